"""How many groups a round samples, and how many updates it makes."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested, Unworkable, UserError
from swarm_node.grpo.trainer import Trainer
from swarm_node.node import Node, fitted
from swarm_node.rollouts import Collected
from swarm_node.sharing.teaching import Teaching
from swarm_node.types import Group, Sampling
from tests.support.tiny_policy import TinyPolicy, group, make

SMALL = 20_000_000


def node(batch_groups: int, **grpo: Any) -> Node:
    grpo |= {"batch_groups": batch_groups}
    config = NodeConfig.model_validate({"grpo": grpo, "rollouts": {"max_new_tokens": 6}})
    parts: Any = TinyPolicy(make()), SimpleNamespace(reward_weights={}, function_s={})
    return Node(config, *parts, print)


@pytest.mark.parametrize(("batch_groups", "updates"), [(0, 1), (1, 5), (2, 2), (3, 2), (4, 1), (8, 1)])
def test_a_round_makes_an_update_for_each_batch_of_its_groups(batch_groups: int, updates: int):
    learner, alone = node(batch_groups), TinyPolicy(make())
    trainer = Trainer(alone, learner.config.grpo, Sampling(6))
    found = [group([1, 0, 0, 1], seed=seed) for seed in range(5)]
    figures = learner.learn(found)
    losses = [trainer.step(found[i::updates])["loss"] for i in range(updates)]
    assert learner.policy.version == learner.trainer.optimizer.updates == updates and learner.round == 1
    assert figures["loss"] == pytest.approx(sum(losses) / updates)
    assert figures["num_tokens"] == trainer.num_tokens
    for mine, other in zip(learner.policy.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_round_without_groups_ends():
    learner = node(8)
    assert learner.learn([])["loss"] == 0.0
    assert learner.round == 1 and learner.policy.version == 0


@pytest.mark.parametrize("stopped_in", ["go_on", "before_update"])
def test_a_stop_ends_a_round_between_updates(stopped_in: str):
    learner, alone = node(1), TinyPolicy(make())
    found = [group([1, 0, 0, 1], seed=seed) for seed in range(4)]
    rests: list[float] = []

    def go_on(seconds: float) -> None:
        rests.append(seconds)
        if stopped_in == "go_on":
            raise StopRequested

    def before_update() -> None:
        if rests:
            raise StopRequested

    figures = learner.learn(found, before_update, go_on)
    assert learner.round == learner.policy.version == learner.trainer.optimizer.updates == 1
    assert len(rests) == 1 and 0 <= rests[0] < math.inf
    trainer = Trainer(alone, learner.config.grpo, Sampling(6))
    alone_figures = trainer.step(found[:1])
    assert (figures["loss"], figures["num_tokens"]) == (alone_figures["loss"], alone_figures["num_tokens"])
    for mine, other in zip(learner.policy.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_stop_before_any_update_ends_no_round():
    learner = node(1)

    def stop() -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        learner.learn([group([1, 0]), group([1, 0])], stop)
    assert learner.round == learner.policy.version == 0


def test_each_further_update_is_asked_for():
    learner = node(1)
    made: list[int] = []
    learner.learn([group([1, 0], seed=seed) for seed in range(4)], go_on=lambda s: made.append(learner.policy.version))
    assert made == [1, 2, 3]


def in_a_swarm(batch_groups: int) -> tuple[Node, Teaching]:
    learner, teaching = node(batch_groups), Teaching()
    exchange: Any = SimpleNamespace(teaching=teaching)
    learner.exchange = exchange
    return learner, teaching


def foreign(advantage: float = 1.0) -> Group:
    return replace(group([1]), peer="bob", advantages=[advantage])


def test_groups_behind_an_update_count_as_learned_from() -> None:
    learner, teaching = in_a_swarm(1)
    learner.learn([group([1, 0]), foreign(), foreign(advantage=0.0), group([0, 1])])
    assert teaching.learned == (2, 1) and learner.policy.version == 3


def test_batches_after_a_stop_do_not_count() -> None:
    learner, teaching = in_a_swarm(1)

    def stop(seconds: float) -> None:
        if learner.policy.version == 2:
            raise StopRequested

    learner.learn([group([1, 0]), foreign()] * 2, go_on=stop)
    assert teaching.learned == (1, 1)


@pytest.mark.parametrize("why", ["not finite", "no stages"])
def test_a_skipped_update_does_not_count(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, teaching = in_a_swarm(0)

    def skipped() -> tuple[float, float]:
        if why == "no stages":
            raise Unworkable("no stages are left")
        return math.nan, 0.1

    monkeypatch.setattr(learner.trainer.optimizer, "step", skipped)
    learner.learn([group([1, 0]), foreign()])
    assert teaching.learned == (0, 0) and learner.round == 1


@pytest.mark.parametrize(
    ("parameters", "stages", "given", "groups"),
    [(SMALL - 1, 0, 0, 32), (SMALL, 0, 0, 8), (SMALL - 1, 2, 0, 8), (SMALL, 0, 3, 3), (1, 0, 3, 3)],
)
def test_small_policies_sample_more_groups(parameters: int, stages: int, given: int, groups: int):
    policy: Any = SimpleNamespace(num_parameters=lambda: parameters, max_positions=1000)
    config = NodeConfig.model_validate({"rollouts": {"groups": given}, "pipeline": {"stages": stages}})
    assert fitted(config, policy, print).rollouts.groups == groups


@pytest.mark.parametrize(
    ("parameters", "given", "answers", "schedule"),
    [
        (SMALL - 1, {}, 4, "constant"),
        (SMALL, {}, 0, "linear"),
        (SMALL, {"swarm": "some.toml"}, 0, "constant"),
        (SMALL, {"pipeline": {"stages": 2}}, 0, "constant"),
        (SMALL, {"grpo": {"answers": 2, "schedule": "cosine"}}, 2, "cosine"),
        (SMALL - 1, {"grpo": {"answers": 0, "schedule": "linear"}}, 0, "linear"),
    ],
)
def test_large_policies_train_on_all_answers_at_a_falling_rate(
    parameters: int, given: dict[str, Any], answers: int, schedule: str
):
    policy: Any = SimpleNamespace(num_parameters=lambda: parameters, max_positions=1000)
    grpo = fitted(NodeConfig.model_validate(given), policy, print).grpo
    assert (grpo.answers, grpo.schedule) == (answers, schedule)


def test_the_rate_falls_as_the_time_of_the_run_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("swarm_node.node.collect", lambda *given: given[-1].groups.append(group([1, 0])))
    learner, passed = node(0, schedule="linear", learning_rate=1e-3), iter([0.0, 0.25, 0.5])
    learner.of_time = lambda: next(passed)
    rates = [learner.learn(learner.collect().groups)["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3])


def test_reward_std_is_that_of_each_group() -> None:
    learner = node(0)
    learner.tasks = SimpleNamespace(labels=[], reward_labels={}, scorer_errors=None, function_s={})  # type: ignore[assignment]
    rewards = [[0.1, 0.7, 0.3], [0.3, 0.1, 0.7], [1.0, 0.0, 0.0]]
    record = learner.record(Collected([group(each) for each in rewards]), {}, 1.0)
    assert record["reward_std"] == fmean(stdev(each) for each in rewards)


def test_a_rounds_seed_decides_what_reward_functions_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, drawn = node(0), []

    def draw(*args: object) -> None:
        drawn.append((torch.rand(2).tolist(), random.random()))

    learner.tasks = SimpleNamespace(function_s={}, turns=1)  # type: ignore[assignment]
    monkeypatch.setattr("swarm_node.node.collect", draw)
    for number in (0, 0, 1):
        learner.round = number
        with pytest.raises(UserError):  # nothing was collected
            learner.collect()
    assert drawn[0] == drawn[1] != drawn[2]
    rng = random.Random("0/0")
    seeds = [rng.getrandbits(bits) for bits in (63, 32, 63)]
    torch.manual_seed(seeds[-1])
    assert drawn[0][0] == torch.rand(2).tolist()
