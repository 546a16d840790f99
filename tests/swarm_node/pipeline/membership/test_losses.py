"""A crew mends itself when a stage or the leader is lost, on a virtual clock."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from swarm_node.pipeline.membership.actions import BuildStage, DropStage, Send
from swarm_node.pipeline.membership.leader_search import FIRST_ANSWER_S
from swarm_node.pipeline.membership.leadership import CrewRole
from swarm_node.pipeline.membership.roster import BANNED_S, MAX_TERM
from swarm_protocol.crew import Assignment, Holding, Kept, Plan, Progress, Ready, Report, Unable
from tests.support.crew_world import (
    BUILD_S,
    FORMING_S,
    MENDING_S,
    SETTINGS,
    SILENCE_S,
    World,
    crew,
    crew_links,
    heard,
    holders,
    holders_of,
)

# --------------------------------------------------------------------- a lost stage


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_spare_takes_a_lost_stage_unnoticed(victim, silent):
    world = crew(4, "a", "b", "c", "d", "e")
    before, (spare,) = holders(world), world.plan().spares
    world.kill(before[victim], silent)
    world.run(SILENCE_S + 5.0)
    assert holders(world) == [*before[:victim], spare, *before[victim + 1 :]]
    assert all(machine.built.total() == 1 for machine in world.machines.values())
    lead = world.machines[before[0]]
    assert heard(lead, f"stage {victim} of crew red is lost") == 1
    if victim < 3:
        assert heard(lead, "as the mean of stages") == 1


def test_without_a_spare_a_newcomer_is_waited_for():
    world = crew(3, "a", "b", "c")
    before = holders(world)
    world.kill(before[1])
    world.run(2.0)
    world.start("new")
    world.run(10.0)
    assert holders(world) == [before[0], "new", before[2]]


def test_a_neighbour_takes_a_stage_until_relieved():
    world = crew(3, "a", "b", "c")
    before = holders(world)
    world.kill(before[1])
    world.run(8.0)
    assert not world.settled()
    world.run(8.0)
    assert holders(world) == [before[0], before[0], before[2]]
    world.start("new")
    world.run(10.0)
    assert holders(world) == [before[0], "new", before[2]]
    assert world.machines["new"].ways == [(1, "live")]
    assert 1 not in world.machines[before[0]].memory
    assert world.machines[before[2]].built.total() == 1


def test_a_missing_stage_is_known_until_it_returns():
    world = crew(3, "a", "b", "c")
    lead, victim, neighbour = (world.machines[name].crew for name in holders(world))
    assert not lead.missing and not lead.absent and not neighbour.missing
    world.kill(victim.spec.me)
    world.run(6.0)
    since = lead.missing[1]
    assert list(lead.missing) == list(neighbour.missing) == [1] and lead.taker(1) == neighbour.taker(1) == ""
    assert lead.absent == {victim.spec.me}
    while not lead.taker(1):
        world.run(0.25)
    assert lead.missing == {1: since} and lead.taker(1) == lead.spec.me
    world.run(8.0)
    assert world.settled() and not lead.missing and not neighbour.missing
    world.kill(lead.spec.me)
    world.run(1.0)
    assert list(neighbour.missing) == [0, 1], "those of the lead"


def test_two_lost_neighbours():
    world = crew(4, "a", "b", "c", "d")
    before = holders(world)
    world.kill(before[1])
    world.kill(before[2])
    world.run(20.0)
    assert holders(world) == [before[0], before[0], before[0], before[3]]
    assert set(world.machines[before[0]].ways) >= {(1, "base"), (2, "base")}


def test_a_stage_given_up_stays_until_taken():
    world = crew(2, "a", "b")
    before = holders(world)
    world.kill(before[1])
    world.run(20.0)
    assert holders(world) == [before[0]] * 2
    world.start("new")
    while 1 not in world.machines["new"].building:
        world.run(0.25)
    world.kill("new")
    world.run(5.0)
    assert holders(world) == [before[0]] * 2
    assert world.machines[before[0]].built[1] == 1  # it was there all the time


def test_a_failed_build_goes_to_another_peer():
    world = crew(3, "a", "b", "c", "d")
    before, (name,) = holders(world), world.plan().spares
    world.kill(before[2])
    spare = world.machines[name]
    while 2 not in spare.building:
        world.run(0.25)
    _, order = spare.building.pop(2)
    world.act(name, spare.crew.unable(order, "out of m\u00e9mory\n", world.now))
    world.run(10.0)
    assert holders(world) == [before[0], name, before[1]]  # a neighbour took it, whose own the spare can take
    assert heard(world.machines[before[0]], f"peer …{name} cannot take it: out of m?mory?") == 1


@pytest.mark.parametrize("late", ["unable", "seated"])
def test_results_of_a_replaced_order_are_ignored(late):
    world = crew(4, "a", "b", "c", "d", "s")
    before, (spare,) = holders(world), world.plan().spares
    machine = world.machines[spare]
    world.kill(before[1])
    while 1 not in machine.building:
        world.run(0.25)
    _, old = machine.building[1]
    machine.building[1] = world.now + BUILD_S, old
    world.kill(before[2])  # of whom stage 1 was to be made
    while machine.building[1][1] == old:
        world.run(0.25)
    _, new = machine.building[1]
    assert not machine.crew.following.stands(old) and machine.crew.following.stands(new)
    lead = world.machines[before[0]].crew
    if late == "unable":
        actions = machine.crew.unable(old, "it is not wanted any more", world.now)
    else:
        actions = machine.crew.built(old, 5, old.sources[0], world.now)
    assert not any(isinstance(action, (Send, DropStage)) for action in actions) and machine.crew.following.stands(new)
    world.run(20.0)
    assert lead.whole and lead.counts["unable"] == 0 and holders_of(lead)[1] == spare and world.learns()


def test_a_stage_built_as_newly_ordered_is_kept():
    world = crew(3, "a", "b", "c", "s")
    before, (spare,) = holders(world), world.plan().spares
    machine = world.machines[spare]
    world.kill(before[1])
    while 1 not in machine.building:
        world.run(0.25)
    _, old = machine.building.pop(1)
    while machine.crew.way_to(2) is None:
        world.run(0.25)
    first, *_ = old.sources
    new = machine.crew.following._ordered[1] = BuildStage(1, old.layers, (first,))
    assert not machine.crew.following.stands(old) and old != new
    machine.memory[1] = 3
    actions = machine.crew.built(old, 3, first, world.now)
    assert any(isinstance(action, Send) and isinstance(action.record, Ready) for action in actions)
    assert machine.crew.following.live == {1: 3} and not machine.crew.following.stands(new)


def test_words_on_an_earlier_plan_are_ignored():
    world = crew(3, "a", "b", "c")
    before, plan = holders(world), world.plan()
    (link,) = crew_links(world, before[1])
    world.send(before[1], link, Unable(plan.mark + 1, 1, "of a plan long ago"))
    world.send(before[1], link, Ready(plan.mark + 1, 0, 2**50))
    world.run(2.0)
    assert world.plan().mark == plan.mark and world.machines[before[0]].crew.counts["unable"] == 0
    assert world.machines[before[0]].crew.leader.roster.members[before[1]].live.keys() == {1}


def test_a_builder_that_hangs_loses_its_stage():
    world = crew(3, "a", "b", "c", "s")
    before, (spare,) = holders(world), world.plan().spares
    world.start("t")
    world.run(5.0)
    world.kill(before[1])
    machine = world.machines[spare]
    while 1 not in machine.building:
        world.run(0.25)
    hangs = machine.building[1] = 1e9, machine.building[1][1]
    world.run(20.0)
    assert machine.building[1] == hangs  # not so soon
    world.run(60.0)
    assert holders(world) == [before[0], "t", before[2]] and world.learns()
    assert heard(world.machines[before[0]], "has not got on with it for") == 1


def test_a_stages_only_taker_has_unlimited_time():
    world = crew(2, "a", "b")
    before = holders(world)
    world.kill(before[1])
    world.start("new")
    while 1 not in world.machines["new"].building:
        world.run(0.25)
    world.machines["new"].building[1] = world.now + 500.0, world.machines["new"].building[1][1]
    world.run(510.0)
    assert holders(world) == [before[0], "new"]


def test_each_outage_is_said_anew():
    world = crew(2, "a", "b", capacity=1)
    for peer in ("n0", "n1"):
        lead = world.machines[holders(world)[0]]
        said = heard(lead, "is held by nobody")
        world.kill(holders(world)[1])
        world.run(30.0)
        assert heard(lead, "is held by nobody") == said + 1
        world.start(peer, capacity=1)
        world.run(FORMING_S)


# --------------------------------------------------------------------- a lost leader


@pytest.mark.parametrize("newcomer", ["a", "z"])
def test_survivors_that_cannot_lead_follow_a_newcomer(newcomer):
    world = crew(3, "a", "b", "c", capacity=1)
    before, plan = holders(world), world.plan()
    assert before[0] == "a"
    round = world.machines["b"].crew.following.progress.round
    world.kill("a")
    world.run(20.0)
    world.start(newcomer, capacity=1)  # perhaps under the same name, and with no plan
    world.run(FORMING_S)
    assert holders(world) == [newcomer, *before[1:]] and world.plan().term == plan.term + 1
    assert world.machines[newcomer].crew.following.progress.round >= round > 5
    assert all(world.machines[peer].built.total() == 1 for peer in before[1:]) and world.learns()


def test_terms_have_an_end():
    world = crew(2, "a", "b", capacity=1)
    world.machines["b"].crew.leadership.term = MAX_TERM
    world.kill("a")
    world.run(10.0)
    world.start("z", capacity=1)
    world.run(FORMING_S)
    assert world.plan().term == MAX_TERM


def test_stages_from_outside_the_crew_are_built_anew():
    world = crew(3, "a", "b", "c", "d")
    me, (spare,) = holders(world)[0], world.plan().spares
    lead = world.machines[me].crew
    link = lead.leader.roster.link_of(spare)
    hello = replace(world.machines[spare].crew.leadership.hello(me), holding=Holding(live=(Kept(1, 99),)))
    for term, live in ((9, {}), (1, {1: 99})):
        lead.heard(link, replace(hello, term=term), world.now)
        assert lead.leader.roster.members[spare].live == live
    lead.heard(link, replace(hello, term=9), world.now)
    lead.heard(link, Report(hello.holding, world.plan().run), world.now)
    assert lead.leader.roster.members[spare].live == {}


def test_a_lead_without_room_makes_way():
    world = crew(3, "a", "b", "c", "s")
    before, (spare,) = holders(world), world.plan().spares
    world.kill(before[0])
    machine = world.machines[spare]
    while 0 not in machine.building:
        world.run(0.25)
    _, order = machine.building.pop(0)
    world.act(spare, machine.crew.unable(order, "no space left", world.now))
    assert not machine.leads and machine.crew.role == CrewRole.SEEKING
    world.run(MENDING_S)
    assert holders(world)[0] == before[1] and world.plan().spares in ((spare,), ()) and world.learns()
    assert heard(machine, "cannot hold stage 0 of crew red (no space left): another peer must lead") == 1
    assert machine.crew.role == CrewRole.FOLLOWING and machine.crew.leadership.barred
    world.run(BANNED_S)
    assert machine.crew.role == CrewRole.FOLLOWING and not machine.crew.leadership.barred


def test_a_lone_peer_that_cannot_lead_retries():
    world = World(1, 1)
    machine = world.start("a")
    while 0 not in machine.building:
        world.run(0.25)
    _, order = machine.building.pop(0)
    world.act("a", machine.crew.unable(order, "no space left", world.now))
    world.run(BANNED_S - 5.0)
    assert machine.crew.role == CrewRole.SEEKING
    world.run(15.0)
    assert world.settled() and machine.leads


def test_a_new_lead_knows_the_runs_progress():
    world = crew(3, "a", "b", "c", "d")
    before = holders(world)
    lead = world.machines[before[0]].crew
    world.trained_at[before[0]] = 1e9  # it pauses
    world.act(before[0], lead.advance(Progress(70, 0.5), world.now))
    world.run(1.0)
    assert {machine.crew.following.progress.round for machine in world.machines.values()} == {70}
    world.start("e")
    world.run(8.0)
    assert world.machines["e"].crew.following.progress == Progress(70, 0.5)
    world.kill(before[0])
    world.run(MENDING_S)
    rounds = {machine.crew.following.progress.round for machine in world.machines.values()}
    assert min(rounds) > 70 and world.plan().term == 2


def test_spares_succeed_first_then_stages_in_order():
    following = World(0, 5).start("me").crew.following
    assert following.succession("lead") == []
    rows = tuple(Assignment(peer, (i, i + 1)) for i, peer in enumerate(["lead", "x", "lead", "y", "x"]))
    following.plan = Plan(1, 1, rows, SETTINGS, ("s", "r"))
    assert following.succession("lead") == ["s", "r", "x", "y"] and following.succession("x") == []
    following.plan = replace(following.plan, assignments=rows[:1], spares=())
    assert following.succession("lead") == []


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("plus", [False, True])
def test_a_spare_succeeds_the_lead(silent, plus):
    world = crew(4, "a", "b", "c", "d", "e", plus=plus)
    before, (spare,) = holders(world), world.plan().spares
    world.kill(before[0], silent)
    world.run(MENDING_S)
    assert holders(world) == [spare, *before[1:]]
    assert world.plan().term == 2
    assert all(machine.built.total() == 1 for machine in world.machines.values())
    assert world.machines[spare].ways == [(0, "copy" if plus else "base")]


@pytest.mark.parametrize("silent", [False, True])
def test_without_a_spare_the_next_stages_holder_leads(silent):
    world = crew(3, "a", "b", "c")
    before = holders(world)
    world.kill(before[0], silent)
    world.run(MENDING_S)
    assert holders(world) == [before[1], before[1], before[2]]
    assert world.machines[before[1]].built == {0: 1, 1: 1}
    assert world.machines[before[2]].built == {2: 1}


@pytest.mark.parametrize("seed", range(6))
def test_a_second_spare_takes_no_first_stage(seed):
    world = crew(4, "a", "b", "c", "d", "e", "f", seed=seed)
    before, spares = holders(world), world.plan().spares
    world.kill(before[0], silent=True)  # each notices at another time
    world.run(MENDING_S)
    assert holders(world) == [spares[0], *before[1:]] and world.plan().spares == spares[1:]


def test_either_of_two_peers_goes_on_alone():
    for victim in (0, 1):
        world = crew(2, "a", "b")
        before = holders(world)
        world.kill(before[victim])
        world.run(20.0)
        rest = before[1 - victim]
        assert holders(world) == [rest, rest]
        world.start("new")
        world.run(20.0)
        assert holders(world) == [rest, "new"]


def test_the_lead_and_its_successor_lost_at_once():
    world = crew(4, "a", "b", "c", "d")
    before = holders(world)
    world.kill(before[0], silent=True)
    world.kill(before[1], silent=True)
    world.run(MENDING_S + FIRST_ANSWER_S)
    assert set(holders(world)) == set(before[2:])
    assert holders(world)[2:] == before[2:]
    assert all(world.machines[before[stage]].built[stage] == 1 for stage in (2, 3))


def test_a_restarted_lead_finds_another_in_its_place():
    world = crew(2, "a", "b", "c")
    before = holders(world)
    world.kill(before[0])
    world.run(8.0)
    world.start(before[0], wanted=0)
    world.run(FORMING_S)
    assert holders(world)[0] != before[0] and world.plan().term == 2
