"""What the swarm gave a node, and what members declare of themselves, in a simulated swarm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm_node.errors import UserError
from swarm_node.observability.worth import worth_lines
from swarm_node.runtime.simulation import Peer, Simulation
from swarm_node.runtime.status import status_written
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.member import Member
from swarm_protocol.manifest import Manifest
from tests.support.simulated_peers import MakePeer, state_of, used


def member(peer: Peer) -> Member:
    assert peer.node.member is not None
    return peer.node.member


def test_members_learn_what_others_made_of_their_groups(peer: MakePeer, manifest: Manifest) -> None:
    peers = [peer(), peer(), peer(options={"sharing": {"own": 2, "foreign": 2, "declare": False}})]
    first, second, silent = peers
    simulation = Simulation(manifest, peers, seed=3)
    for one, pass_1 in zip(peers, (0.25, 0.5, 1.0), strict=True):
        member(one).held_out = pass_1, 10
    simulation.run(seconds=60.0)
    worth = member(first).worth()
    assert worth.pass_1 == 0.25
    assert worth.theirs == [0.5], "the third says nothing"
    assert worth.declaring == 1 and 0 < worth.used_by_others <= used(second, first)
    assert worth.share_of_used is not None and 0 < worth.share_of_used < 1, "the second also used the third's"
    assert member(silent).worth().declaring == 2
    assert first.metrics[-1]["swarm/declared_pass_1"] == 0.5
    text = "\n".join(worth_lines(worth))
    assert "held-out pass@1 0.250; 1 member says 0.500 (self-declared)" in text
    assert f"others trained on at least {worth.used_by_others:,} of its groups" in text
    assert (worth.own_groups, worth.others_groups) == member(first).teaching.learned
    assert worth.others_groups > 0 and f"others gave {worth.others_groups:,} of the" in text
    status = member(first).status()
    declared = [row["declared"] for row in status["peers"].values()]
    assert [row for row in declared if row][0]["kinds"].keys() == {"count_bits"}
    assert status["worth"]["theirs"] == [0.5]
    rows = [row for row in status["peers"].values() if "admitted" in row]
    for name in ("received", "admitted"):
        assert status["received"][f"swarm/groups_{name}"] == sum(row[name] for row in rows), "both are of now"


def test_a_member_declares_its_last_counts_as_it_leaves(peer: MakePeer, manifest: Manifest) -> None:
    peers = [peer(), peer()]
    first, second = peers
    Simulation(manifest, peers, seed=3).run(12)
    taken = used(second, first)
    assert member(first).worth().used_by_others < taken, "its card is older"
    member(second).close()
    assert member(first).worth().used_by_others == taken
    assert member(first).latest_worth == member(first).worth()


def test_a_node_says_how_it_does_by_who_taught_it(peer: MakePeer, manifest: Manifest) -> None:
    peers = [peer(), peer()]
    Simulation(manifest, peers, seed=4).run(150)
    worth = member(peers[0]).worth()
    told = worth.by_others or worth.by_itself
    assert told is not None and told.kinds == ["count_bits"]
    last = peers[0].metrics[-1]
    assert {last.get("swarm/success_by_others"), last.get("swarm/success_by_itself")} == {told.now, None}


def test_a_resumed_member_goes_on_counting(peer: MakePeer, manifest: Manifest, tmp_path: Path) -> None:
    alone = {"averaging": {"method": "none"}}
    first, other, resumed = peer(options=alone), peer(options=alone), peer(options=alone)
    Simulation(manifest, [first, other], seed=5).run(6)
    Simulation(manifest, [resumed], seed=5)
    before, after = member(first).teaching, member(resumed).teaching
    assert before.latest() and after.latest() == {}
    store = CheckpointStore(tmp_path / "checkpoints", 2, print)
    state_of(first, store, tmp_path).save()
    store.wait()
    assert state_of(resumed, store, tmp_path).resume()
    store.close()
    assert after.state() == before.state()
    proportions, resumed_ones = (member(one).replay_buffer.balance for one in (first, resumed))
    assert proportions is not None and resumed_ones is not None and proportions.state()["asked"]
    assert resumed_ones.state() == proportions.state()


def test_a_run_leaves_its_last_status(peer: MakePeer, manifest: Manifest, tmp_path: Path) -> None:
    first, run = peer(), RunDir(tmp_path)
    Simulation(manifest, [first], seed=6)
    with status_written(run, member(first), first.config.network, lambda: "", None):
        pass
    assert json.loads(run.status.read_text())["peer"] == member(first).peer_id


def fail() -> None:
    raise RuntimeError("a second error")


def test_no_error_at_the_end_hides_the_first(
    peer: MakePeer, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = peer()
    Simulation(manifest, [first], seed=6)
    monkeypatch.setattr(member(first), "status", fail)
    with (
        pytest.raises(UserError, match="the first error"),
        status_written(RunDir(tmp_path), member(first), first.config.network, lambda: "", None),
    ):
        raise UserError("the first error")


def test_a_member_that_cannot_publish_still_leaves(
    peer: MakePeer, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = peers = [peer(), peer()]
    Simulation(manifest, peers, seed=7).run(30)
    assert set(member(second).transport.members()) == {member(first).peer_id}
    monkeypatch.setattr(member(first).publisher, "flush", fail)
    with pytest.raises(RuntimeError):
        member(first).close()
    assert member(second).transport.members() == {}
