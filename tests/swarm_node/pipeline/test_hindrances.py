"""A stage that answers, but keeps its crew from working, is given up in the end, and the leader goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm_node.config import GrpoConfig
from swarm_node.errors import NoRoom, Unworkable
from swarm_node.pipeline import driver
from swarm_node.pipeline.hindrances import TRIES, Hindrances
from swarm_node.pipeline.messages import LEADER, StageLost, StageMessage
from swarm_node.pipeline.stage_calls import TurnRefused
from swarm_node.types import Sampling
from swarm_protocol import pipeline as heads
from swarm_protocol.errors import RemoteProtocolError
from tests.support.pipeline_crew import RATE, Crew, Saved, saver, some_groups

GRPO = GrpoConfig(learning_rate=RATE)
Lie = Callable[[Callable[[StageMessage], list[StageMessage]], StageMessage], list[StageMessage]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saver(tmp_path_factory)


def lying(crew: Crew, liar: int, lie: Lie) -> list[StageLost]:
    """From now on that stage lies, until it is given up: then another peer holds it. Gives the losses."""
    lost = list[StageLost]()
    worker = crew.workers[liar]
    honest = worker.handle

    def on_lost(one: StageLost) -> None:
        lost.append(one)
        crew.plan += 1  # what is under way is dropped
        if liar in one.stages:
            worker.handle = honest  # type: ignore[method-assign]

    crew.driver.on_lost = on_lost
    worker.handle = lambda message: lie(honest, message)  # type: ignore[method-assign]
    return lost


def keeping(*kinds: type) -> Lie:
    """A stage that keeps these answers."""
    return lambda handle, message: [each for each in handle(message) if not isinstance(each.head, kinds)]


def short(kind: type) -> Lie:
    """A stage that gives fewer numbers than were wanted."""

    def lie(handle: Callable[[StageMessage], list[StageMessage]], message: StageMessage) -> list[StageMessage]:
        given = handle(message)
        return [
            replace(each, tensors=tuple(t[:1] for t in each.tensors)) if isinstance(each.head, kind) else each
            for each in given
        ]

    return lie


def without_memory(handle: Callable[[StageMessage], list[StageMessage]], message: StageMessage) -> list[StageMessage]:
    """A stage that says that it has no memory for anything."""
    if isinstance(message.head, heads.Forward | heads.Prefill):
        return [StageMessage(LEADER, heads.TurnFailed(message.head.turn, 1, "memory"))]
    return handle(message)


def refusing(*kinds: type) -> Lie:
    """A stage that takes no such messages."""

    def lie(handle: Callable[[StageMessage], list[StageMessage]], message: StageMessage) -> list[StageMessage]:
        if isinstance(message.head, kinds):
            raise RemoteProtocolError("shape", "too long")
        return handle(message)

    return lie


@pytest.mark.parametrize(
    "lie",
    [
        keeping(heads.Logprobs),
        keeping(heads.Backward),
        short(heads.Logprobs),
        keeping(heads.GradientNorm),
        lambda handle, message: [] if isinstance(message.head, heads.Apply) else handle(message),
    ],
)
def test_a_stage_that_keeps_what_is_under_way_is_given_up(lie: Lie, saved: Saved) -> None:
    crew = Crew(saved("llama"), 2, GRPO)
    lost = lying(crew, 1, lie)
    assert "grad_norm" in crew.trainer.step(some_groups()) and crew.policy.version == 1
    assert [each.stages for each in lost] == [frozenset()] * (TRIES - 1) + [{1}]
    assert str(lost[-1]).startswith("stage 1 lost: all answer, but what is under way does not arrive, again")


@pytest.mark.parametrize(
    "lie", [keeping(heads.Tokens), short(heads.Tokens), refusing(heads.Prefill), refusing(heads.Step)]
)
def test_a_stage_without_which_nothing_can_be_sampled_is_given_up(lie: Lie, saved: Saved) -> None:
    crew = Crew(saved("llama"), 2, GRPO)
    lost = lying(crew, 1, lie)
    (samples,) = crew.policy.generate([[5, 6, 7]], 2, Sampling(3), [1])
    assert len(samples) == 2 and [set(each.stages) for each in lost if each.stages] == [{1}]


@pytest.mark.parametrize("liar", [1, 2])
def test_of_several_stages_one_after_the_other_is_given_up(liar: int, saved: Saved) -> None:
    """Until work is done: which one keeps it cannot be seen."""
    crew = Crew(saved("llama"), 3, GRPO)
    lost = lying(crew, liar, keeping(heads.Backward))
    assert "grad_norm" in crew.trainer.step(some_groups())
    assert [set(each.stages) for each in lost if each.stages] == [{2}, {1}][: 3 - liar]


def test_a_stage_that_takes_nothing_is_given_up(saved: Saved) -> None:
    """Not by the first rollouts that it refuses: these may be at fault."""
    crew, said = Crew(saved("llama"), 2, GRPO), list[str]()
    crew.trainer.report = said.append
    lost = lying(crew, 1, refusing(heads.Forward))
    for i in range(TRIES):
        crew.policy.generate([[5, 6, 7]], 2, Sampling(3), [1])  # it does all but train
        crew.trainer.step(some_groups(10 * i))
    assert [each.stages for each in lost] == [{1}] and crew.policy.version == 1
    assert said == ["stage 1 refuses what it is sent, 3 times: no update is made of these rollouts"] * (TRIES - 1)


def test_rollouts_that_the_leader_refuses_itself_cost_nobody_the_stage(saved: Saved) -> None:
    crew = Crew(saved("llama"), 3, GRPO, holders={1: 0, 2: 0})
    lost = lying(crew, 1, refusing(heads.Forward))
    for i in range(2 * TRIES):
        crew.trainer.step(some_groups(i))
    assert not lost and crew.policy.version == 0


def test_a_stage_that_says_it_has_no_memory_for_anything_is_given_up(saved: Saved) -> None:
    """It does not end the leader, and leaves no small pieces behind."""
    crew = Crew(saved("llama"), 3, GRPO)
    limit, packing = crew.trainer.limit, crew.trainer.packing
    lost = lying(crew, 1, without_memory)
    samples = crew.policy.generate([[5, 6, 7]] * 4, 2, Sampling(3), [1, 2, 3, 4])
    assert [len(each) for each in samples] == [2] * 4 and [each.stages for each in lost] == [{1}]
    assert "no memory for the least work" in str(lost[0])
    lost = lying(crew, 1, without_memory)
    assert "grad_norm" in crew.trainer.step(some_groups()) and [each.stages for each in lost] == [{1}]
    assert (crew.trainer.limit, crew.trainer.packing) == (limit, packing)


def test_a_leader_without_memory_for_anything_says_what_to_do(saved: Saved) -> None:
    crew = Crew(saved("llama"), 3, GRPO, holders={1: 0})
    lost = lying(crew, 1, without_memory)
    with pytest.raises(NoRoom, match="lower rollouts.group_size"):
        crew.policy.generate([[5, 6, 7]] * 4, 2, Sampling(3), [1, 2, 3, 4])
    with pytest.raises(NoRoom, match="lower rollouts.max_new_tokens"):
        crew.trainer.step(some_groups())
    assert not lost


def test_who_is_given_up_for_failures() -> None:
    found = Hindrances()
    assert [found.blamed("refused", {1, 2}, 1) for _ in range(2 * TRIES)] == [None, None, 1, None, None, 2]
    assert [found.blamed("nothing arrives", {1, 2, 3}, 2) for _ in range(TRIES)] == [None, None, 3]
    for _ in range(TRIES):
        assert found.blamed("nothing arrives", {1}, 1) is None and found.blamed("refused", {1}, 1) is None
        found.done("nothing arrives", "refused")
    assert [found.blamed("refused", set(), 1) for _ in range(TRIES)] == [None] * TRIES


def test_refused_work_that_is_followed_by_an_update_costs_nobody_the_stage(saved: Saved) -> None:
    crew = Crew(saved("llama"), 2, GRPO)
    lost = lying(crew, 1, keeping())
    for i in range(TRIES):
        for _ in range(driver.TRIES - 1):
            crew.driver.again(TurnRefused(1), others=True)
        with pytest.raises(Unworkable, match="stage 1 refuses what it is sent, 3 times"):
            crew.driver.again(TurnRefused(1), others=True)
        crew.trainer.step(some_groups(10 * i))
    assert not lost and crew.policy.version == TRIES
