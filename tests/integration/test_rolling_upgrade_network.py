"""A swarm of real processes is upgraded machine by machine and never stops: neighbouring versions learn from each other
and average, whoever is too old for somebody is told so once, and who was upgraded goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm_node.install import upgrade_command
from swarm_protocol.identity import Identity
from tests.support.processes import LOCAL, QUICK, NodeProcess, make_manifest, nodes

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
OLD, NEW, NEWEST = 4, 5, 6
AVERAGING = (
    *QUICK,
    "pace_s=0.5",
    "averaging.method=noloco",
    "averaging.every=2",
    "averaging.codec=float32",
    "sharing.own=4",
)
Start = Callable[[str, int], NodeProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `hub`, or a node of another name, as a release of that version; the second time from where it was."""
    manifest = make_manifest(tmp_path, "--averaging-period-s", "3")
    link = ""
    with nodes() as starter:

        def started(name: str, version: int) -> NodeProcess:
            nonlocal link
            program = "tests.integration.speaking", str(version)
            if name == "hub":
                hub = starter("bootstrap", str(manifest), *LOCAL, run_dir=tmp_path / name, sets=(), program=program)
                link = link or hub.link()
                return hub
            command = "join", link, "--name", name
            return starter(*command, run_dir=tmp_path / name, sets=AVERAGING, program=program)

        yield started


def learn_from_each_other(*nodes: NodeProcess) -> None:
    """Until each has admitted groups, used some, and averaged, once more."""
    names = "swarm/groups_admitted", "averaging/exchanges"
    goals = {node: {name: node.last(name) + 1 for name in names} for node in nodes}
    for node, least in goals.items():
        node.until(lambda node=node, least=least: all(node.last(n) >= least[n] for n in names))


def upgraded(node: NodeProcess, start: Start, name: str, others: tuple[NodeProcess, ...]) -> NodeProcess:
    """`node` stopped, and started anew as the new version; nobody loses a round by it."""
    rounds, theirs = node.rounds, [other.rounds for other in others]
    assert node.stop() == 0
    for other, before in zip(others, theirs, strict=True):
        other.until(lambda other=other, before=before: other.rounds > before)
    again = start(name, NEW)
    if name != "hub":
        again.until_rounds(1)
        numbers = [line["round"] for line in again.metrics]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > rounds
    return again


def test_a_swarm_is_upgraded_node_by_node(start: Start, tmp_path: Path) -> None:
    hub, a, b, stranger = start("hub", OLD), start("a", OLD), start("b", NEW), start("stranger", NEWEST)
    learn_from_each_other(a, b)
    for node in (hub, a):
        node.until(lambda node=node: "newer protocol" in node.output)
    its_id = Identity.load_or_create(tmp_path / "stranger" / "identity.key").peer_id
    stranger.until_rounds(3)
    for node in (hub, a):
        told = [line for line in node.output.splitlines() if "newer protocol" in line]
        assert len(told) == 1 and its_id in told[0] and upgrade_command() in told[0]
    assert its_id not in json.loads((tmp_path / "a" / "swarm.json").read_text())["peers"]
    assert stranger.stop() == 0

    hub = upgraded(hub, start, "hub", (a, b))
    a = upgraded(a, start, "a", (b,))
    learn_from_each_other(a, b)

    for node in (a, b, hub):
        assert node.stop() == 0
        assert "Traceback" not in node.output
    for node in (a, b):
        assert not node.last("averaging/skipped/version") and not node.last("averaging/refused/version")
    assert "speaks a newer protocol" not in a.output + b.output


def test_a_node_one_version_behind_is_heard(start: Start) -> None:
    """What it writes to strangers, the version before its own, none of them reads."""
    hub, b = start("hub", NEW), start("b", NEW)
    b.until_rounds(1)
    b.until(lambda: b.last("swarm/peers") >= 1)
    old = start("old", OLD)
    learn_from_each_other(old, b)
    for node in (old, b, hub):
        assert node.stop() == 0
    assert "newer protocol" in old.output  # before the others knew of it
