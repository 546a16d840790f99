"""The table of roles: which events may change a peer's role in its crew, and which records it takes."""

from __future__ import annotations

import pytest

from protocol.crew import CREW_METHOD, Answer, Hello, Plan, Probe, Refusal, Report
from protocol.errors import LocalProtocolError
from swarm_node.pipeline.membership.actions import PeerLink
from swarm_node.pipeline.membership.leadership import ACCEPTED, TRANSITIONS, CrewRole, Event, next_role
from tests.support.crew_world import World

LEGAL = [(role, event, after) for role, moves in TRANSITIONS.items() for event, after in moves.items()]
ILLEGAL = [(role, event) for role in CrewRole for event in Event if event not in TRANSITIONS[role]]


@pytest.mark.parametrize(("role", "event", "after"), LEGAL)
def test_legal_moves_lead_to_another_role(role: CrewRole, event: Event, after: CrewRole) -> None:
    assert next_role(role, event) == after != role


@pytest.mark.parametrize(("role", "event"), ILLEGAL)
def test_illegal_moves_are_errors_of_this_program(role: CrewRole, event: Event) -> None:
    with pytest.raises(LocalProtocolError, match=f"while {role}: {event}"):
        next_role(role, event)


def test_every_role_is_reached_and_left() -> None:
    assert TRANSITIONS.keys() == {after for _, _, after in LEGAL} == set(CrewRole)
    assert {event for _, event, _ in LEGAL} == set(Event)


def test_an_illegal_move_changes_no_role() -> None:
    crew = World(0, 2).start("me").crew
    with pytest.raises(LocalProtocolError):
        crew.leadership.lose_leader("gone", 1.0)  # it has none
    assert crew.role == CrewRole.SEEKING


def test_greetings_are_taken_in_every_role() -> None:
    assert all({Hello, Answer, Refusal} <= ACCEPTED[role] for role in CrewRole)
    assert not ACCEPTED[CrewRole.FOLLOWING] & ACCEPTED[CrewRole.LEADING] - ACCEPTED[CrewRole.SEEKING]


def test_records_of_another_role_are_counted_as_stray() -> None:
    world = World(1, 1)
    leader = world.start("b", wanted=0).crew
    world.run(10.0)
    seeker = world.start("a").crew
    assert (seeker.role, leader.role) == (CrewRole.SEEKING, CrewRole.LEADING) and leader.plan is not None
    for crew, record in ((seeker, Probe(1)), (seeker, Report(seeker.following.holding)), (leader, leader.plan)):
        assert type(record) in {Probe, Report, Plan}
        link, before = PeerLink("s", CREW_METHOD), crew.counts["stray"]
        crew.opened(link, world.now)
        role = crew.role
        crew.heard(link, record, world.now)
        assert crew.counts["stray"] == before + 1 and crew.role == role
