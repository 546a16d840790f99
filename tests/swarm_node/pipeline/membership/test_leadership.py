"""The table of roles: which events may change a peer's role in its crew, and which records it takes."""

from __future__ import annotations

import pytest

from swarm_node.pipeline.membership.actions import PeerLink
from swarm_node.pipeline.membership.leadership import ACCEPTED, TRANSITIONS, CrewRole
from swarm_protocol.crew import CREW_METHOD, Answer, Hello, Plan, Probe, Refusal, Report
from swarm_protocol.errors import LocalProtocolError
from tests.support.crew_world import World


@pytest.mark.parametrize("role", CrewRole)
@pytest.mark.parametrize("after", CrewRole)
def test_only_moves_of_the_table_are_made(role: CrewRole, after: CrewRole) -> None:
    leadership = World(0, 2).start("me").crew.leadership
    leadership.role = role
    if after in TRANSITIONS[role]:
        leadership._move(after)
        assert leadership.role == after != role
    else:
        with pytest.raises(LocalProtocolError, match=f"{role} cannot become {after}"):
            leadership._move(after)
        assert leadership.role == role


def test_every_role_is_reached_and_left() -> None:
    assert TRANSITIONS.keys() == set().union(*TRANSITIONS.values()) == set(CrewRole)


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
