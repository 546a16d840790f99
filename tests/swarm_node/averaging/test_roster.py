"""The messages about partners that are here."""

from __future__ import annotations

import msgspec
import pytest

from swarm_node.averaging.averager import REASONS
from swarm_node.averaging.roster import LISTED, MAX_NAMES, CohortRoster
from swarm_protocol.messages import PROTOCOL_VERSION, CrewCard, PeerCard
from tests.support.averaging_cohort import Cohort
from tests.support.repository import ROOT

SWARM, MINE, OTHER = "a" * 64, "1" * 16, "2" * 16


def card(name: str, cohort: str) -> PeerCard:
    return PeerCard(PROTOCOL_VERSION, SWARM, 0.0, name, ["trainer"], cohort=cohort)


def roster() -> tuple[CohortRoster, list[str]]:
    said: list[str] = []
    return CohortRoster(MINE, 120.0, said.append), said


def test_being_alone_is_said_after_a_while() -> None:
    here, said = roster()
    others = {"x": card("x", OTHER), "silent": card("silent", "")}
    for now in (0.0, 60.0, 119.0):
        here.look(others, now)
    assert said == []
    here.look(others, 120.0)
    here.look(others, 400.0)
    alone = "averaging: nobody of this node's cohort is here; {} other models or with other settings"
    assert said == [alone.format("1 member averages")]
    here.look({}, 401.0)
    assert said[1:] == [alone.format("no members average")]
    for now in (402.0, 403.0, 520.0):  # no more often than that
        here.look(others | {"y": card("y", OTHER)}, now)
    assert len(said) == 2
    here.look(others | {"y": card("y", OTHER)}, 521.0)
    assert said[2:] == [alone.format("2 members average")]


def test_peers_that_average_stages_are_said_apart() -> None:
    """A member of one's own crew averages another stage of the same policy: no other model."""
    here, said = roster()
    stage = msgspec.structs.replace(card("mate", OTHER), crew=CrewCard("3" * 16, "4" * 16, 2))
    for now in (0.0, 120.0):
        here.look({"m": stage}, now)
    for now in (200.0, 240.0):
        here.look({"m": stage, "x": card("x", OTHER)}, now)
    assert [sentence.partition("; ")[2] for sentence in said] == [
        "1 member averages single stages of a policy",
        "1 member averages other models or with other settings and 1 member averages single stages of a policy",
    ]


def test_a_node_that_never_saw_another_says_nothing() -> None:
    here, said = roster()
    for now in (0.0, 200.0, 400.0):
        here.look({}, now)
    assert said == []


def test_partners_that_come_and_go_are_said_once() -> None:
    here, said = roster()
    bob = {"b" * 8: card("bob", MINE)}
    here.look(bob, 0.0)
    here.look({}, 10.0)  # a card that was late
    here.look(bob | {"c" * 8: card("carol", MINE)}, 20.0)
    here.look({}, 30.0)
    here.look({}, 149.0)
    assert said == ["averaging: 1 partner is here: bob"]
    here.look({}, 150.0)
    assert len(said) == 2 and "nobody" in said[1]
    here.look(bob | {"c" * 8: card("carol", MINE)}, 151.0)
    assert said[2:] == ["averaging: 2 partners are here: bob, carol"]


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_who_is_known_to_be_gone_is_no_partner(method: str) -> None:
    """As a crew knows it of the leader that it lost, whose card stays for a while."""
    cohort = Cohort(2, method=method, codec="8bit")
    one, other = cohort.trainees
    one.averager.absent = lambda: {other.transport.peer_id}
    cohort.run(30)
    assert other.transport.peer_id in one.transport.members(), "its card is here"
    assert not any("here: " in text for text in one.said)
    assert one.averager.status()["partners"] == {} and one.averager.metrics()["averaging/partners"] == 0.0
    one.averager.absent = tuple
    cohort.run(30)
    assert one.averager.status()["partners"] and any("1 partner is here: " in text for text in one.said)


def test_names_are_remembered_and_ambiguous_ones_carry_ids() -> None:
    here, _ = roster()
    here.look({"first-12345678": card("bob", MINE)}, 0.0)
    here.look({}, 1.0)
    assert here.called("first-12345678") == "bob"
    assert here.called("nobody-87654321") == "…87654321"
    here.look({"second-abcdefgh": card("bob", MINE)}, 2.0)
    assert here.called("first-12345678") == "bob…12345678" and here.called("second-abcdefgh") == "bob…abcdefgh"
    many = {f"peer{i:05}": card(f"n{i}", MINE) for i in range(MAX_NAMES)}
    here.look(many, 3.0)
    assert here.called("first-12345678") == "…12345678", "strangers' names do not pile up"
    assert here.listed(sorted(many)[: LISTED + 2]) == "n0, n1, n2, n3, n4 and 2 more"


def test_all_reasons_are_explained() -> None:
    text = (ROOT / "docs/averaging.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {reason for reason in REASONS if not any(f"`{reason}`" in row for row in rows)} == set()
    figures = "exchanges bytes spread partners skipped/<reason> refused/<reason>".split()
    assert {figure for figure in figures if not any(f"`{figure}`" in row for row in rows)} == set()
