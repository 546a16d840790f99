"""Which weights of others a newcomer goes on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
import pytest
import torch
from torch import Tensor

from benchmarks import averaging_uphill as uphill
from swarm_node.averaging.averager import Averager
from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested
from swarm_node.rollouts.trial import rewards_of
from swarm_node.runtime.simulation import Peer, Simulation, manifest_for
from swarm_node.types import Group

LIES: dict[str, Callable[[str, Tensor], Tensor]] = {
    "zeros": lambda name, values: torch.zeros_like(values),
    "noise": lambda name, values: torch.randn(values.shape, generator=torch.Generator().manual_seed(0)),
    "negated": lambda name, values: -values,
    "huge": lambda name, values: values * 1e15,
    "largest": lambda name, values: torch.full_like(values, 3e38),
    "flattened": lambda name, values: values * 0.05 if name.endswith(".norm.weight") else values,
}
"""What a member may send of each tensor. Flattened, answers are a little likelier than tokens drawn at random."""


def changed(averager: Averager, change: Callable[[str, Tensor], Tensor]) -> list[Tensor]:
    """The weights with each tensor changed, a vector for each fragment; they stay as they are."""
    kept = averager.fragments.gather_all()
    for name, tensor in averager.tensors.items():
        tensor.detach().copy_(change(name, tensor.detach()))
    found = averager.fragments.gather_all()
    restore(averager, kept)
    return found


def restore(averager: Averager, weights: list[Tensor]) -> None:
    for i, values in enumerate(weights):
        averager.fragments.scatter(i, values)


@pytest.mark.parametrize("earns", [True, False], ids=["", "earns-nothing"])
@pytest.mark.parametrize("lie", LIES)
def test_weights_that_answer_worse_than_ones_own_start_are_not_taken_over(
    lie: str, earns: bool, learner: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a newcomer that has not given a right answer yet."""
    node, averager = learner.node, learner.node.averager
    assert averager is not None and any(rewards_of(node._sampled))
    if not earns:
        sampled = msgspec.convert(msgspec.to_builtins(node._sampled), list[Group])
        for rollout in (rollout for group in sampled for rollout in group.rollouts):
            rollout.reward = 0.0
        monkeypatch.setattr(node, "_sampled", sampled)
        node.probe_answers.trained.clear()
    own, version = averager.fragments.gather_all(), node.policy.version
    assert not averager.replace(changed(averager, LIES[lie]))
    assert all(torch.equal(a, b) for a, b in zip(averager.fragments.gather_all(), own, strict=True))
    assert node.policy.version == version


def test_weights_of_a_cohort_that_has_learned_are_taken_over(learner: Peer) -> None:
    averager = learner.node.averager
    assert averager is not None
    own = averager.fragments.gather_all()
    world = uphill.World()
    cohort = uphill.Honest(world, "0", 1e-3)
    for _ in range(8):
        cohort.train()
    world.put(cohort.fast)
    learned = {name: p.data for name, p in world.policy.model.named_parameters()}
    assert averager.replace([values.clone() for values in own]), "a cohort that has learned as little"
    assert averager.replace([values * 1.01 for values in own])
    restore(averager, own)
    assert averager.replace(changed(averager, lambda name, values: learned[name]))
    assert not all(torch.equal(a, b) for a, b in zip(averager.fragments.gather_all(), own, strict=True))
    restore(averager, own)


def test_an_engine_knows_weights_on_trial_by_their_version(learner: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that copies weights would sample with those of this node, or go on with the others'."""
    node, averager, seen = learner.node, learner.node.averager, list[int]()
    assert averager is not None
    own, update = averager.fragments.gather_all(), node.policy.engine.update

    def watched(weights: Mapping[str, Tensor], version: int) -> None:
        seen.append(version)
        update(weights, version)

    monkeypatch.setattr(node.policy.engine, "update", watched)
    for _ in range(2):
        assert averager.replace([values.clone() for values in own])
    assert len({*seen, node.policy.version}) == 3


def test_a_stop_while_weights_are_tried_leaves_own_ones(learner: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def stopped() -> Iterator[None]:
        raise StopRequested
        yield

    averager = learner.node.averager
    assert averager is not None
    own = averager.fragments.gather_all()
    monkeypatch.setattr(learner.node, "_allowed", stopped)
    with pytest.raises(StopRequested):
        averager.replace([values * 1.01 for values in own])
    assert all(torch.equal(a, b) for a, b in zip(averager.fragments.gather_all(), own, strict=True))
    assert averager.copies([0]), "weights are locked no longer"


@pytest.fixture(scope="module")
def learner() -> Peer:
    """A member with the starter policy after its first round."""
    options = {"tasks": ["small"], "policy": {"model": "starter", "threads": 1}, "rollouts": {"groups": 16}}
    config = NodeConfig.model_validate(options)
    simulation = Simulation(manifest_for(config), [Peer(config)])
    simulation.run(rounds=1)
    return simulation.peers[0]
