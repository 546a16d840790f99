"""Fingerprints are equal for peers that can hold stages of one policy, and say what differs."""

from __future__ import annotations

import pytest

from swarm_node.pipeline.compute.fingerprint import architecture, difference

MINE = (["llama", 4], "weights", [16, 32, "all-linear"], "torch.float32")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({0: ["llama", 5]}, "another model"),
        ({0: ["llama", 5], 1: "w", 3: "torch.bfloat16"}, "another model"),
        ({1: "w"}, "other weights of the same model"),
        ({2: []}, "other LoRA settings"),
        ({3: "torch.bfloat16"}, "another policy.dtype"),
        ({2: [8], 3: "torch.bfloat16"}, "other LoRA settings and another policy.dtype"),
    ],
)
def test_differences_are_named(changes: dict[int, object], said: str) -> None:
    mine = architecture(*MINE)
    theirs = architecture(*(changes.get(place, aspect) for place, aspect in enumerate(MINE)))  # type: ignore[arg-type]
    assert len(mine) == 16 and int(mine, 16) >= 0
    assert (theirs == mine) == (not changes)
    assert difference(mine, theirs) == said
