"""When a run evaluates while it trains: early for the first time, and within its share of the time of all starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested
from swarm_node.observability.evaluations import newest_checkpoint
from swarm_node.rollouts.evaluate import Evaluation, Held
from swarm_node.runtime import held_out
from swarm_node.runtime.held_out import HeldOutFigures
from swarm_node.storage.rundir import RunDir
from tests.support.starting import train_locally

ROUND_S, EVALUATION_S = 9.0, 10.0
ROUNDS_OF_A_START = 3


def figures() -> HeldOutFigures:
    config = NodeConfig.model_validate({"eval": {"every": 1, "share": 0.05}})
    tasks = SimpleNamespace(names=["gcd"], kinds={}, held_out=lambda n: [None] * n)
    return HeldOutFigures(config, cast(Any, None), cast(Any, tasks), print, lambda round, found: None, whole=True)


@pytest.mark.parametrize(
    ("stopped", "evaluated"),
    [((), [54, 387, 576]), ((2,), [54, 108, 576])],  # 5 x 10, 19 x 20, 19 x 30 s; 5 x 10, 5 x 20, 19 x 30 s
    ids=["whole", "a signal ends the first"],
)
def test_short_starts_share_their_time(
    stopped: Sequence[int], evaluated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stopped`: evaluations that a signal ends, where the one before training is 1. `evaluated`: the seconds of
    training before each one."""
    now, asked = [0.0], list[None]()

    def answers(*arguments: object) -> Evaluation:
        asked.append(None)
        now[0] += EVALUATION_S
        if len(asked) in stopped:
            raise StopRequested
        return Evaluation({"all": Held(60, 0.5, 0.5)}, [0.5] * 60, ["gcd"] * 60, asked=60)

    monkeypatch.setattr(held_out, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(held_out, "evaluate", answers)
    before = figures()
    before.measure_before()
    saved, found = json.dumps(msgspec.to_builtins(before.figures)), list[float]()
    for first in range(1, 67, ROUNDS_OF_A_START):
        now[0] += 1000  # nothing runs between two starts
        ours = figures()
        ours.restore({"held_out_figures": json.loads(saved)})
        ours.begin()
        for round in range(first, first + ROUNDS_OF_A_START):
            now[0] += ROUND_S
            if ours.due(round):
                found.append(round * ROUND_S)
                try:
                    ours.measure_during(round)
                except StopRequested:
                    now[0] += 1000  # it goes on as a start of its own
                    ours.begin()
        saved = json.dumps(msgspec.to_builtins(ours.figures))
    assert found == evaluated


def test_checkpoints_have_the_time_of_all_starts() -> None:
    rollouts = {"groups": 4, "group_size": 2, "max_new_tokens": 8}
    evaluation = {"questions": 7, "samples": 2, "every": 1, "share": 1.0}
    settings = {"run_dir": "run", "rollouts": rollouts, "eval": evaluation}
    times = []
    for rounds in (1, 2):
        assert train_locally(NodeConfig.model_validate(settings | {"rounds": rounds}), json_output=True) == 0
        figures = newest_checkpoint(RunDir(Path("run")))[1]["held_out_figures"]
        times.append((figures["trained_s"], figures["spent_s"]))
    (trained, spent), (trained_later, spent_later) = times
    assert 0 < trained < trained_later and 0 < spent < spent_later
