"""Whole nodes that average weights, on a virtual clock: with shared rollouts, and without."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from swarm_node.averaging.costs import NOTHING
from swarm_node.node import Node
from swarm_node.rollouts.probe_answers import ENOUGH
from swarm_node.runtime.simulation import Peer, Simulation
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.types import Group
from swarm_protocol.manifest import Manifest
from swarm_protocol.transports.memory import LinkModel
from tests.support.simulated_peers import MakePeer, state_of, used


def averaging(**options: Any) -> dict[str, Any]:
    return {
        "averaging": {"method": "noloco", "every": 3, "late_join": False, **options},
        "grpo": {"learning_rate": 1e-3},
        "sharing": {"own": 2, "foreign": 2},
    }


def short(manifest: Manifest) -> Manifest:
    """The same swarm with outer rounds of five seconds."""
    return msgspec.structs.replace(manifest, averaging_period_s=5.0)


def flat(peer: Peer) -> Tensor:
    assert peer.policy is not None
    return torch.cat([tensor.flatten() for tensor in peer.policy.trainable_state().values()])


def spread(peers: list[Peer]) -> float:
    weights = torch.stack([flat(peer) for peer in peers])
    return float((weights - weights.mean(0)).square().mean().sqrt())


SHARED, ALONE = {"own": 2, "foreign": 2}, {"own": 4, "foreign": 0}


@pytest.mark.parametrize(
    ("method", "sharing"),
    [
        ("noloco", SHARED),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("diloco", SHARED), ("noloco", ALONE))),
    ],
)
def test_nodes_that_average_stay_together(
    peer: MakePeer, manifest: Manifest, method: str, sharing: dict[str, int]
) -> None:
    def run(method: str) -> Simulation:
        options = averaging(method=method, overlap=method != "diloco") | {"sharing": sharing}
        simulation = Simulation(short(manifest), [peer(options=options, starts_at=0.2 * i) for i in range(2)], seed=1)
        simulation.run(30)
        return simulation

    apart, together = run("none"), run(method)
    assert not any(name.startswith("averaging/") for name in apart.peers[0].metrics[-1])
    assert spread(together.peers) < 0.75 * spread(apart.peers)
    for member in together.peers:
        last = member.metrics[-1]
        assert last["averaging/exchanges"] >= 4, last
        assert last["averaging/bytes"] > 0 and last["averaging/spread"] > 0
        assert last["step"] > 30 - 10 and last["step"] >= last["averaging/exchanges"]
    learned = any(used(a, b) for a in together.peers for b in together.peers if a is not b)
    assert learned == bool(sharing["foreign"])


def test_an_exchange_makes_a_new_policy_version(peer: MakePeer, manifest: Manifest) -> None:
    simulation = Simulation(short(manifest), [peer(options=averaging()) for _ in range(2)], seed=1)
    node = simulation.peers[0].node
    assert node.averager is not None
    while not node.averager.counts["exchanges"]:
        before, version = flat(simulation.peers[0]).clone(), node.policy.version
        simulation.run(seconds=0.01)
    assert node.policy.version > version
    assert not torch.equal(flat(simulation.peers[0]), before)


def test_weights_not_reaching_the_policy_are_an_error(peer: MakePeer, manifest: Manifest) -> None:
    """The tripwire: as if an engine sampled with a copy that nobody refreshes."""
    simulation = Simulation(short(manifest), [peer(options=averaging()) for _ in range(2)], seed=1)
    node = simulation.peers[0].node
    name, parameter = next(iter(node.policy.model.named_parameters()))
    simulation.at(8.0, lambda: setattr(parameter, "data", parameter.data.clone() + 1))
    with pytest.raises(RuntimeError, match="goes on with other values"):
        simulation.run(60)


def test_adapters_are_averaged_alone(peer: MakePeer, manifest: Manifest) -> None:
    def lora(member: Peer) -> Peer:
        policy = member.config.policy.model_copy(update={"lora": True, "lora_rank": 4})
        member.config = member.config.model_copy(update={"policy": policy})
        return member

    simulation = Simulation(short(manifest), [lora(peer(options=averaging())) for _ in range(2)], seed=1)
    base = [p.clone() for n, p in simulation.peers[0].policy.model.named_parameters() if "lora" not in n]  # type: ignore[union-attr]
    simulation.run(15)
    assert simulation.peers[0].metrics[-1]["averaging/exchanges"] >= 2
    policy = simulation.peers[0].policy
    assert policy is not None
    after = [p for n, p in policy.model.named_parameters() if "lora" not in n]
    assert all(torch.equal(a, b) for a, b in zip(base, after, strict=True))


def test_partners_and_their_absence_are_said(peer: MakePeer, manifest: Manifest) -> None:
    alice, bob, carol = (
        peer(family, options=averaging() | {"name": name, "pace_s": 2.0})
        for family, name in (("llama", "alice"), ("llama", "bob"), ("qwen2", "carol"))
    )
    simulation = Simulation(short(manifest), [alice, bob, carol], seed=1)
    simulation.run(seconds=30.0)
    assert alice.node.averager and alice.node.member and carol.node.member
    cohort = alice.node.averager.place.cohort
    started = f"averaging weights with cohort {cohort[:8]}: noloco, in pairs every 5 s, after 3 updates or more, 8bit"
    assert alice.said.count(started) == 1 == alice.said.count("averaging: 1 partner is here: bob")
    alone = "averaging: nobody of this node's cohort is here; {} other models or with other settings"
    assert not any("nobody" in sentence for sentence in alice.said)
    assert carol.said.count(alone.format("2 members average")) == 1
    status = alice.node.member.status()
    shown = status["averaging"]
    assert shown["partners"] == {bob.node.member.peer_id: "bob"} and shown["cohort"] == cohort  # type: ignore[union-attr]
    assert shown["exchanges"] == alice.node.averager.counts["exchanges"] > 0 and shown["bytes"] > 0
    assert shown["last"]["with"] == "bob" and 0 <= status["time"] - shown["last"]["time"] < 15.0
    assert alice.node.averager.brief() == f"averaged {shown['exchanges']} times, last with bob"
    assert carol.node.averager and carol.node.averager.brief() == "not averaged: no partner yet"
    assert carol.node.member.status()["averaging"]["skipped"]["alone"] > 0
    assert carol.metrics[-1]["averaging/exchanges"] == 0 < used(carol, alice), "another model is no cohort"
    simulation.kill(1)
    simulation.run(seconds=80.0)
    assert alice.said.count(alone.format("1 member averages")) == 1
    status = alice.node.member.status()
    gone = status["peers"][bob.node.member.peer_id]  # type: ignore[union-attr]
    assert (gone["name"], gone["present"]) == ("bob", False)
    assert status["averaging"]["partners"] == {} and alice.metrics[-1]["averaging/partners"] == 0
    assert alice.node.averager.brief().endswith("last with bob, no partner here")
    unreachable = [sentence for sentence in alice.said if sentence.startswith("an exchange of weights")]
    assert any(sentence.startswith("an exchange of weights with bob was skipped: ") for sentence in unreachable)
    assert all(sentence.endswith("; the next round tries again") for sentence in unreachable)


def test_refused_exchanges_are_not_counted_as_refused_rollouts(peer: MakePeer, manifest: Manifest) -> None:
    simulation = Simulation(short(manifest), [peer(options=averaging(every=5)) for _ in range(3)], seed=1)
    simulation.run(seconds=30.0)
    refused = {reason for p in simulation.peers for reason in p.node.averager.refused}  # type: ignore[union-attr]
    assert refused & {"early", "crossed", "late", "busy", "partner"}
    for member in simulation.peers:
        last = member.metrics[-1]
        assert not any(name in last for name in ("swarm/rejected/early", "swarm/rejected/crossed"))
        totals = member.node.member.transport.stats()  # type: ignore[union-attr]
        for reason, n in member.node.averager.refused.items():  # type: ignore[union-attr]
            assert totals[f"rejected/{reason}"] >= n
            assert last[f"averaging/refused/{reason}"] <= n


def test_equal_seeds_give_equal_weights(peer: MakePeer, manifest: Manifest) -> None:
    def run() -> Tensor:
        link = LinkModel(latency_s=0.1, jitter_s=0.2, bandwidth_bytes_s=1e5)
        simulation = Simulation(short(manifest), [peer(options=averaging(), link=link) for _ in range(3)], seed=4)
        simulation.run(12)
        return flat(simulation.peers[0]).clone()

    assert torch.equal(run(), run())


def test_costs_are_counted_from_the_first_exchange_on(peer: MakePeer, manifest: Manifest) -> None:
    """By reference answers: few own ones were kept back until then."""
    simulation = Simulation(short(manifest), [peer(options=averaging()) for _ in range(2)], seed=1)
    node = simulation.peers[0].node
    assert node.averager is not None
    while not node.averager.counts["exchanges"]:
        simulation.run(seconds=0.01)
    assert len(node.probe_answers.unseen) < ENOUGH <= len(node.probe_answers.small_costs)
    assert len(node.averager.robust.costs.state()["last"]) >= 1


def test_a_resumed_member_judges_its_partners_as_before(peer: MakePeer, manifest: Manifest, tmp_path: Path) -> None:
    first, other, resumed = (peer(options=averaging()) for _ in range(3))
    Simulation(short(manifest), [first, other], seed=5).run(12)
    Simulation(short(manifest), [resumed], seed=5)
    store = CheckpointStore(tmp_path / "checkpoints", 2, print)
    state_of(first, store, tmp_path).save()
    store.wait()
    assert state_of(resumed, store, tmp_path).resume()
    store.close()
    before, after = first.node, resumed.node
    assert len(before.probe_answers.unseen) >= ENOUGH
    assert after.probe_answers.small_costs == before.probe_answers.small_costs
    assert before.averager is not None and after.averager is not None
    assert after.averager.robust.costs.state() == before.averager.robust.costs.state() != NOTHING


def test_a_latecomer_begins_where_its_cohort_is(peer: MakePeer, manifest: Manifest) -> None:
    options = averaging(late_join=True, every=8)
    peers = [peer(options=options), peer(options=options), peer(options=options, starts_at=40.0)]
    simulation = Simulation(short(manifest), peers, seed=1)
    start = flat(peers[2]).clone()
    simulation.run(seconds=38.0)
    assert all(member.metrics[-1]["round"] > 20 for member in peers[:2])
    simulation.run(seconds=8.0)
    late = peers[2]
    assert any("going on with the weights of" in sentence for sentence in late.said)
    assert late.metrics[-1]["step"] > late.metrics[-1]["round"] + 8
    assert not any("going on with" in sentence for member in peers[:2] for sentence in member.said)
    trained = flat(peers[0]) - start
    assert float(torch.dot(flat(late) - start, trained) / trained.norm() ** 2) > 0.5, "as far in the same direction"


class Idle(Node):
    """Makes no update, as in rounds whose groups are all rewarded alike, and keeps what a checkpoint of each would."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.states: list[tuple[int, int, float, Tensor]] = []

    def learn(self, groups: Sequence[Group], *hooks: Any) -> dict[str, float]:
        return super().learn([], *hooks)

    def average(self) -> bool:
        again = super().average()
        assert self.averager is not None
        weights = torch.cat([tensor.flatten() for tensor in self.policy.trainable_state().values()])
        counts = self.trainer.optimizer.updates, self.averager.counts["exchanges"]
        self.states.append((self.policy.version, *counts, weights.clone()))
        return again


def test_weights_of_another_make_a_version_without_an_update(peer: MakePeer, manifest: Manifest) -> None:
    options = averaging(late_join=True, every=8)
    peers = [peer(options=options), peer(options=options), peer(options=options, starts_at=20.0, node_type=Idle)]
    Simulation(short(manifest), peers, seed=1).run(seconds=28.0)
    late = peers[2].node
    assert isinstance(late, Idle) and any("going on with the weights of" in sentence for sentence in peers[2].said)
    assert {(updates, exchanges) for _, updates, exchanges, _ in late.states} == {(0, 0)}
    changes = [(b > a, not torch.equal(before, after)) for (a, *_, before), (b, *_, after) in pairwise(late.states)]
    assert sorted(set(changes)) == [(False, False), (True, True)] and changes.count((True, True)) == 1


@pytest.mark.long
def test_the_others_average_on_after_a_kill(peer: MakePeer, manifest: Manifest) -> None:
    simulation = Simulation(short(manifest), [peer(options=averaging()) for _ in range(3)], seed=1)
    simulation.run(15)
    simulation.kill(2)
    before = [member.metrics[-1]["averaging/exchanges"] for member in simulation.peers[:2]]
    simulation.run(35)
    after = [member.metrics[-1]["averaging/exchanges"] for member in simulation.peers[:2]]
    assert all(b > a for a, b in zip(before, after, strict=True))
