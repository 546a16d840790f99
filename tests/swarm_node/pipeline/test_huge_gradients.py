"""A stage that sends another a gradient that cannot be is found, whatever follows from it elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from swarm_node.averaging.codecs import LARGEST
from swarm_node.config import GrpoConfig
from swarm_node.pipeline import driver
from swarm_node.pipeline.driver import to_blame
from swarm_node.pipeline.messages import LEADER, StageLost, StageMessage
from swarm_protocol.pipeline import Backward, GradientNorm, TiedGradient
from tests.support.pipeline_crew import RATE, Crew, Saved, saver, some_groups

GRPO = GrpoConfig(learning_rate=RATE, microbatch_tokens=12, packing=False)  # many microbatches


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saver(tmp_path_factory)


@pytest.mark.parametrize(
    ("stages", "liar", "kind", "options"),
    [
        (2, 1, "llama", {}),
        (3, 2, "llama", {}),
        (4, 2, "llama", {"holders": {1: 0}}),
        (2, 1, "llama_tied", {"heads": (TiedGradient,)}),
        pytest.param(4, 2, "llama", {"swapped": True}, marks=pytest.mark.long),
        pytest.param(4, 3, "llama", {"swapped": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("times", [1e9, 1e22])
def test_a_stage_that_sends_a_huge_gradient_is_given_up(
    stages: int, liar: int, kind: str, options: dict[str, Any], times: float, saved: Saved
) -> None:
    """Not the stage that it was sent to, which cannot compute with it."""
    options = dict(options)
    huge = options.pop("heads", (Backward,))
    crew = Crew(saved(kind), stages, GRPO, **options)
    lost, said = list[StageLost](), list[str]()
    crew.driver.on_lost, crew.trainer.report = lost.append, said.append
    handle = crew.workers[liar].handle

    def longer(gradient: torch.Tensor) -> torch.Tensor:
        return (gradient * times).clamp(-LARGEST, LARGEST)

    def lie(message: StageMessage) -> list[StageMessage]:
        return [
            replace(each, tensors=(longer(each.tensors[0]),)) if isinstance(each.head, huge) and not lost else each
            for each in handle(message)
        ]

    crew.workers[liar].handle = lie  # type: ignore[method-assign]
    steps = [crew.trainer.step(some_groups(10 * i)) for i in range(driver.TRIES)]
    assert [each.stages for each in lost] == [{liar}] and "that the gradient has norm" in str(lost[0])
    assert ["grad_norm" in metrics for metrics in steps] == [False] * (driver.TRIES - 1) + [True]
    assert len(said) == driver.TRIES - 1 and all(line.startswith(f"stage {liar} says to stage ") for line in said)
    assert not crew.said and not crew.refused


def test_who_only_passes_on_a_huge_gradient_is_not_to_blame() -> None:
    doubtful = {1: "that its gradient is not finite"}
    assert to_blame(doubtful, {(1, 0): 5.0, (2, 1): 9.9, (2, 0): 1.0}, 10.0) == doubtful
    assert to_blame(doubtful, {(1, 0): 50.0, (2, 1): 11.0, (3, 2): 1.0}, 10.0).keys() == {2}
    assert to_blame(doubtful, {(1, 0): 50.0, (3, 2): 1.0}, 10.0) == doubtful
    assert to_blame({}, {(1, 0): None, (3, 2): 1.0}, 10.0).keys() == {1}
    assert to_blame(doubtful, {(3, 2): 50.0, (2, 3): 1.0}, 10.0) == doubtful, "zeros of stage 1 made it long"
    assert to_blame(doubtful, {(3, 2): 50.0, (2, 3): 50.0, (2, 1): 50.0}, 10.0).keys() == {3}, "odd microbatches"


def test_only_who_sends_a_stage_gradients_is_blamed_by_it(saved: Saved) -> None:
    crew, said = Crew(saved("llama"), 4, GRPO), list[str]()
    crew.trainer.report = said.append
    squares = crew.workers[1]._squares

    def lie() -> StageMessage:
        true = squares()
        assert isinstance(true.head, GradientNorm) and [stage for stage, _ in true.head.came] == [2]
        return StageMessage(LEADER, structs.replace(true.head, came=((0, 1e99), (3, 1e99), (9, None))))

    crew.workers[1]._squares = lie  # type: ignore[method-assign]
    assert "grad_norm" in crew.trainer.step(some_groups()) and not said
