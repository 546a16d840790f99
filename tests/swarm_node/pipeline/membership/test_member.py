"""A crew finds its lead, fills its seats and mends itself, on a virtual clock with seeded faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from protocol.crew import (
    CREW_METHOD,
    STAGE_METHOD,
    Answer,
    Broken,
    Hello,
    Holding,
    Kept,
    Load,
    Progress,
    Ready,
    Refusal,
    Report,
    Source,
    Unable,
    Whole,
    proof,
)
from protocol.lineage import leads_to, shared
from protocol.messages import CrewCard, PeerCard
from swarm_node.pipeline.membership.actions import MAX_SAID, BuildStage, Close, Connect, DropStage, Link, Send
from swarm_node.pipeline.membership.channels import MAX_STRANGERS, PART_S, REDIAL_S, STRANGER_S
from swarm_node.pipeline.membership.leader import REPLAN_S
from swarm_node.pipeline.membership.leader_search import ALONE_S, AVOID_S, DIAL_S, FIND_S
from swarm_node.pipeline.membership.leadership import Role
from swarm_node.pipeline.membership.roster import BANNED_S, BREAKS_S, CALM_S, GATHER_S, MAX_TERM, counted
from tests.support.crew_world import (
    BUILD_S,
    RUN,
    SETTINGS,
    SILENCE_S,
    SWARM,
    DiskWorld,
    Machine,
    World,
    a_layer_costs_one,
    crew_links,
)

FORMING_S = 25.0
DIAL_FAILS_S = 15.0
"""Longer than p2pd takes to say that it cannot reach somebody."""
OTHER = (("0e" * 8, 0),)
"""A run."""
MENDING_S = SILENCE_S + DIAL_S + GATHER_S + 8.0
"""Everything that may have to be waited for when peers vanish silently, and some seconds to say and build things."""


def crew(stages: int, *peers: str, seed: int = 0, **changes: object) -> World:
    """A crew that is whole."""
    world = World(seed, stages, **{name: changes.pop(name) for name in list(changes) if name == "plus"})  # type: ignore[arg-type]
    for peer in peers:
        world.start(peer, **changes)
        world.run(0.5)
    world.run(FORMING_S)
    assert world.settled(), world.story()
    return world


def holders(world: World) -> list[str]:
    return [seat.peer for seat in world.plan().assignments]


def heard(machine: Machine, text: str) -> int:
    return sum(text in said for said in machine.said)


# --------------------------------------------------------------------- the beginning


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_crew_forms(stages):
    world = crew(stages, *(f"peer{i}" for i in range(stages)))
    assert sorted(holders(world)) == [f"peer{i}" for i in range(stages)]
    assert [machine.leads for machine in world.machines.values()].count(True) == 1
    assert all(machine.built.total() == 1 for machine in world.machines.values())


def test_explicit_stages_are_given_whoever_comes_first():
    world = World(1, 3)
    for peer, stage in (("a", 2), ("b", 1), ("c", None)):
        world.start(peer, wanted=stage)
    world.run(FORMING_S)
    assert holders(world) == ["c", "b", "a"]


def test_who_wants_the_first_stage_leads_at_once():
    world = World(1, 2)
    world.start("a")
    world.start("b", wanted=0)
    world.run(FORMING_S)
    assert holders(world) == ["b", "a"]


def test_nobody_begins_a_crew_who_wants_another_stage():
    world = World(1, 2)
    machine = world.start("a", wanted=1)
    world.run(10 * FIND_S)
    assert machine.crew.role == Role.SEEKING and heard(machine, "waiting for a peer that takes stage 0") == 1
    world.start("b", wanted=0)
    world.run(FORMING_S)
    assert holders(world) == ["b", "a"]


def test_a_crew_waits_for_enough_peers_saying_so():
    world = World(1, 3)
    first = world.start("a")
    world.run(60.0)
    assert first.crew.role == Role.LEADING and not first.crew.whole
    assert heard(first, "waits for 2 more peers") == 1
    world.start("b")
    world.start("c")
    world.run(FORMING_S)
    assert world.settled(), world.story()


def test_two_wishes_for_one_stage_are_settled():
    world = World(1, 3)
    world.start("a", wanted=0)
    world.run(8.0)
    world.start("b", wanted=1)
    world.run(4.0)
    world.start("c", wanted=1)
    world.run(FORMING_S)
    assert holders(world) == ["a", "b", "c"]
    world.start("d", wanted=1)
    world.run(60.0)
    lead = world.machines["a"]
    assert heard(lead, "peer …d wants stage 1 of crew red, which …b holds") == 1
    assert lead.crew.counts["refused/claim"] == 2  # c and d
    assert world.plan().spares == ("d",)


def test_two_first_leads_at_once_one_gives_way():
    world = World(1, 2)
    world.start("a", wanted=0)
    world.start("b", wanted=0)
    world.run(3.0)
    assert all(machine.crew.role == Role.LEADING for machine in world.machines.values())
    world.run(FORMING_S)
    assert holders(world) == ["a", "b"]  # equal in all but their ids
    assert world.machines["b"].crew.counts["gave_way"] == 1 and not world.machines["b"].leads


def test_two_leads_agree_once_one_sees_a_card():
    world = World(1, 2)
    world.start("a")
    world.start("b")
    cards, world.card_store = world.card_store, {**world.card_store}
    world.seen_by = lambda peer: {}  # type: ignore[method-assign]
    world.run(ALONE_S + FIND_S + 1.0)
    assert all(machine.crew.role == Role.LEADING for machine in world.machines.values())
    world.card_store = cards  # as they were when nobody led
    world.publish = lambda peer: None  # type: ignore[method-assign]
    del world.seen_by
    world.run(2.0)
    assert [machine.crew.role for machine in world.machines.values()] == [Role.LEADING, Role.FOLLOWING]
    world.run(4.0)
    assert holders(world) == ["a", "b"]


def test_a_newcomer_is_told_of_an_unseen_lead():
    world = World(1, 2)
    world.start("a")
    world.run(ALONE_S + FIND_S + 1.0)
    machine = world.start("b")
    seen_by = world.seen_by
    world.seen_by = lambda peer: seen_by(peer) if peer == "a" else {}  # type: ignore[method-assign]
    world.run(6.0)
    assert holders(world) == ["a", "b"] and not machine.leads


def test_layers_are_divided_by_memory_if_necessary():
    world = World(1, 3, costs=a_layer_costs_one)
    world.start("a", capacity=2)
    world.start("b", capacity=1)
    world.start("c", capacity=5)
    world.run(FORMING_S)
    assert holders(world) == ["a", "b", "c"]
    assert world.plan().spans == ((0, 1), (1, 2), (2, 6))
    assert heard(world.machines["a"], "layers by memory: 0-0, 1-1, 2-5") == 1
    world.kill("b")
    world.start("d", capacity=5)
    world.run(FORMING_S)
    assert holders(world) == ["a", "d", "c"] and world.plan().spans == ((0, 1), (1, 2), (2, 6))
    assert heard(world.machines["a"], "layers by memory") == 1


@pytest.mark.parametrize("room", [(2, 2, 2), (9, 0, 2), (2, 9, 9, 1)])
def test_each_peer_with_room_gets_an_equal_share(room):
    world = World(1, 3, costs=a_layer_costs_one)
    for i, capacity in enumerate(room):
        world.start(f"p{i}", capacity=capacity)
    world.run(FORMING_S)
    assert world.plan().spans == ((0, 2), (2, 4), (4, 6))


def test_layers_without_room_wait_for_more():
    world = World(1, 2, costs=a_layer_costs_one)
    first = world.start("a", capacity=2)
    world.start("b", capacity=1)
    world.run(FORMING_S)
    assert not first.crew.whole and heard(first, "none of its peers has room for it: start another") == 1
    world.start("c", capacity=3)
    world.run(FORMING_S)
    assert world.plan().spans == ((0, 2), (2, 4)) and holders(world) == ["a", "c"]


def test_layers_are_those_of_existing_files():
    world = World(1, 2, costs=a_layer_costs_one)
    world.start("a", capacity=4)
    world.start("b", Holding(checkpoints=(Kept(1, 7),)), spans=((0, 1), (1, 4)), capacity=4)
    world.run(FORMING_S)
    assert world.plan().spans == ((0, 1), (1, 4)) and (1, "snapshot") in world.machines["b"].ways
    assert world.machines["a"].crew.counts["refused/span"] == 0


def test_a_crew_works_by_its_first_leads_settings():
    world = World(1, 3)
    ours = replace(SETTINGS, wire="int8", prompt=99)
    world.start("a", settings=ours, wanted=0)
    world.run(4.0)
    world.start("b")
    world.start("c", settings=replace(SETTINGS, wire="bfloat16"))
    world.run(FORMING_S)
    assert world.plan().settings == ours
    world.kill("a")
    world.run(MENDING_S)
    assert world.plan().term == 2 and world.plan().settings == ours
    lead = holders(world)[0]
    world.start("a", settings=SETTINGS, wanted=0)  # it comes back, and was told something else
    world.run(1.0)
    world.kill(lead)
    world.run(MENDING_S + FORMING_S)
    assert world.plan().settings == ours
    assert all(machine.crew.plan.settings == ours for machine in world.machines.values())


def test_only_lost_stages_are_counted_as_lost():
    world = crew(3, "a", "b", "c")
    before = holders(world)
    lead = world.machines[before[0]].crew
    world.cut(crew_links(world, before[1])[0], silent=False)  # a member loses touch for a moment
    world.run(8.0)
    assert holders(world) == before and lead.counts["lost"] == 1
    lead.leader.resume()
    world.act(before[0], lead.doubted(lead.plan.mark, (), "no answer", world.now))  # a step is done again
    assert lead.leader.lost == set()
    world.run(5.0)
    world.start("d")
    world.run(5.0)
    assert lead.whole and lead.counts["lost"] == 1
    world.kill(before[2])
    while 2 not in world.machines["d"].building:
        world.run(0.25)
    _, order = world.machines["d"].building.pop(2)
    world.act("d", world.machines["d"].crew.unable(order, "out of memory", world.now))
    world.run(10.0)
    assert lead.whole and lead.counts["lost"] == 2  # it was lost once, however often it had to be rebuilt
    world.kill(before[0])
    world.run(MENDING_S)
    (lead,) = [machine.crew for machine in world.machines.values() if machine.leads]
    assert lead.whole and lead.counts["lost"] == 1  # since it leads


def test_a_restarted_crew_goes_back_to_its_checkpoints():
    world = World(1, 2)
    world.start("a", Holding(checkpoints=(Kept(0, 30), Kept(0, 20))))
    world.start("b", Holding(checkpoints=(Kept(1, 20), Kept(1, 10))))
    world.run(FORMING_S)
    by_stage = {stage: way for machine in world.machines.values() for stage, way in machine.ways}
    assert by_stage == {0: "snapshot", 1: "snapshot"} and world.learns()
    assert 20 < world.machines["a"].memory[0] < 60 and heard(world.machines["a"], "the checkpoint after update 20") == 2
    *before, (_, began) = world.plan().run
    assert tuple(before) == RUN and began == 20
    assert [machine.crew.following.holding.checkpoints for machine in world.machines.values()] == [
        (Kept(0, 20),),  # it went back: what it has made after that is of a branch that was left
        (Kept(1, 20), Kept(1, 10)),
    ]


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_holdings_of_another_run_do_not_count(order):
    world = World(1, 3)
    files = {
        "a": {},
        "b": {"holding": Holding(checkpoints=(Kept(1, 30),)), "round": 25},
        "c": {"holding": Holding(checkpoints=(Kept(1, 500), Kept(2, 500))), "run": OTHER, "round": 400},
    }
    for peer in order:
        world.start(peer, wanted={"a": 0, "b": 1, "c": None}[peer], **files[peer])
        world.run(5.0 if peer == "b" else 0.25)  # the first that has something
    world.run(FORMING_S)
    plan = world.plan()
    ours, theirs = (OTHER, RUN) if order == "cab" else (RUN, OTHER)
    assert leads_to(ours, plan.run) and shared(theirs, plan.run) == -1 and world.learns()
    ways = {stage: way for machine in world.machines.values() for stage, way in machine.ways}
    assert ways == {0: "base", 1: "snapshot", 2: "base"} if ours == RUN else {0: "base", 1: "base", 2: "snapshot"}
    assert all(machine.crew.following.run == plan.run for machine in world.machines.values())
    others = world.machines["c" if ours == RUN else "b"].crew
    assert others.following.holding.checkpoints == () and others.leadership.hello("x").run == plan.run


def test_stages_in_memory_outweigh_files_of_another_run():
    world = crew(2, "a", "b", capacity=1)
    run, updates = world.plan().run, world.machines["b"].memory[1]
    world.kill("a")
    world.run(10.0)
    files = Holding(checkpoints=(Kept(0, 900), Kept(1, 900)))
    world.start("c", files, run=OTHER, round=900)
    world.run(FORMING_S)
    assert holders(world) == ["c", "b"] and leads_to(run, world.plan().run) and world.learns()
    assert world.machines["b"].built == {1: 1} and world.machines["b"].memory[1] > updates
    assert world.machines["c"].ways == [(0, "base")] and world.machines["c"].crew.following.progress.round < 900


def test_a_follower_of_another_run_drops_its_own():
    world = crew(2, "a", "b", "c")
    _, peer = holders(world)
    machine, plan = world.machines[peer].crew, world.plan()
    seat = replace(plan.assignments[1], sources=(Source("snapshot", (peer,), updates=3),))
    machine.heard(machine.following.link, replace(plan, number=50, assignments=(plan.assignments[0], seat)), world.now)
    order = BuildStage(1, seat.layers, seat.sources)
    assert machine.following.stands(order) and machine.following.live == {}
    machine.following.live[1] = 5
    again = replace(plan, number=51, assignments=(plan.assignments[0], seat), run=OTHER)
    actions = machine.heard(machine.following.link, again, world.now)
    assert order in actions and machine.following.holding == Holding()  # the same, but of that run
    machine.following.live[1] = 5
    gone = replace(
        plan, number=52, assignments=(plan.assignments[0], replace(seat, peer=plan.spares[0])), run=(("0f" * 8, 0),)
    )
    actions = machine.heard(machine.following.link, gone, world.now)
    assert DropStage(1) in actions and machine.following.live == {} and not machine.following.stands(order)


def test_a_lone_spare_goes_on_from_known_rounds():
    world = crew(1, "a", "b")
    (lead,) = holders(world)
    world.act(lead, world.machines[lead].crew.advance(Progress(700, 0.5), world.now))
    world.run(1.0)
    world.kill(lead)
    world.run(MENDING_S)
    (machine,) = world.machines.values()
    assert machine.leads and machine.crew.following.progress.round > 700


def test_reports_of_another_run_are_ignored():
    world = crew(2, "a", "b", "c")
    me = holders(world)[0]
    (spare,) = world.plan().spares
    lead = world.machines[me].crew
    link = lead.leader.roster.link_of(spare)
    old = Holding(replicas=(Kept(1, 99),), checkpoints=(Kept(1, 99),))
    for run, kept in ((OTHER, Holding()), (world.plan().run, old)):
        lead.heard(link, Report(old, run), world.now)
        assert lead.leader.members[spare].holding == kept


def test_branches_files_count_up_to_the_fork():
    world = World(1, 2)
    ours, theirs = ((*RUN, (name * 8, 40)) for name in ("0a", "0b"))
    world.start("a", Holding(checkpoints=(Kept(0, 60), Kept(0, 40))), run=ours, wanted=0)
    world.start("b", Holding(checkpoints=(Kept(1, 90), Kept(1, 40))), run=theirs)
    world.run(FORMING_S)
    *before, (_, began) = world.plan().run
    assert tuple(before) == ours and began == 40 and world.learns()
    assert heard(world.machines["a"], "the checkpoint after update 40") == 2
    assert world.machines["b"].crew.following.holding.checkpoints == (Kept(1, 40),)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_continuation_of_the_leads_run_is_joined(first):
    world = World(1, 2)
    files = {"a": ((Kept(0, 60), Kept(0, 50)), RUN), "b": ((Kept(1, 200), Kept(1, 50)), (*RUN, ("0b" * 8, 50)))}
    for peer in sorted(files, key=lambda peer: peer != first):  # whoever comes first leads
        world.start(peer, Holding(checkpoints=files[peer][0]), run=files[peer][1])
        world.run(5.0)
    world.run(FORMING_S)
    assert leads_to(files["b"][1], world.plan().run) and world.learns()
    assert world.machines["a"].crew.following.holding.checkpoints == (Kept(0, 50),)


def test_a_lead_begins_a_segment_and_keeps_it():
    world = crew(3, "a", "b", "c", "d", "e")
    before, plan = holders(world), world.plan()
    assert [began for _, began in plan.run] == [0]
    world.kill(before[1])
    world.run(MENDING_S)
    assert world.plan().number > plan.number and world.plan().run == plan.run
    kept = {stage: world.machines[before[stage]].memory[stage] for stage in (0, 2)}
    world.kill(before[0])
    world.run(MENDING_S)
    first, (segment, began) = world.plan().run
    assert (first,) == plan.run and segment != first[0] and kept[2] <= began <= kept[2] + 2
    assert world.machines[before[2]].built == {2: 1} and world.learns()
    assert {machine.crew.following.run for machine in world.machines.values()} == {world.plan().run}


@pytest.mark.parametrize("seed", range(4))
def test_updates_of_the_losing_part_do_not_count(seed):
    world = crew(2, "a", "b", "c", "d", seed=seed)
    before, spares = holders(world), world.plan().spares
    world.split({before[0], spares[0]}, {before[1], spares[1]})
    world.run(60.0)
    assert world.settled(0) and world.settled(1), world.story()
    runs = [world.plan(side).run for side in (0, 1)]
    fork = shared(*runs)
    assert 0 < fork == runs[1][1][1]  # the old lead kept its segment
    for machine in world.machines.values():
        ((stage, updates),) = machine.memory.items()
        assert updates > fork + 10
        files = tuple(Kept(stage, n) for n in (updates, fork, fork - 1))
        world.act(
            machine.crew.spec.me,
            machine.crew.report(replace(machine.crew.following.holding, checkpoints=files), world.now),
        )
    told = {peer: machine.crew.following.holding.checkpoints for peer, machine in world.machines.items()}
    sides = {peer: machine.side for peer, machine in world.machines.items()}
    world.heal()
    world.run(60.0)
    assert world.learns(), world.story()
    run, lead = world.plan().run, next(machine.crew.leader for machine in world.machines.values() if machine.leads)
    winner = runs.index(run)
    for peer, side in sides.items():
        expected = told[peer] if side == winner else told[peer][1:]
        assert (
            world.machines[peer].crew.following.holding.checkpoints
            == lead.members[peer].holding.checkpoints
            == expected
        )
        assert world.machines[peer].built.total() == 1 or side != winner


@pytest.mark.parametrize("forked", [False, True])
def test_a_new_lead_takes_the_living_stages_run(forked):
    world = crew(2, "a", "b", "c", "d", capacity=1)
    before, spares = holders(world), world.plan().spares
    world.split({spares[1]})  # it has no room for more than one stage
    world.run(10.0)
    world.kill(before[0])
    world.run(MENDING_S)
    world.kill(spares[0])  # that led
    world.run(10.0)
    survivor, alone = world.machines[before[1]], world.machines[spares[1]]
    run = survivor.crew.following.run
    assert len(run) == 2 and alone.crew.following.run == run[:1] and survivor.built == {1: 1}
    if forked:
        alone.crew.following.run = (*run[:1], ("0d" * 8, 1))
    world.heal()
    world.run(MENDING_S)
    assert holders(world) == [spares[1], before[1]] and world.learns(), world.story()
    assert survivor.built == {1: 1} and world.plan().run[:2] == run


@pytest.mark.parametrize(
    ("theirs", "live", "replicas", "checkpoints"),
    [
        ((("0a" * 8, 0), ("0b" * 8, 40)), 99, 99, 99),  # the very same
        ((("0a" * 8, 0),), 41, 41, 40),  # ours has gone on from it
        ((("0a" * 8, 0), ("0c" * 8, 30)), -1, 30, 30),
        ((("0a" * 8, 0), ("0b" * 8, 40), ("0c" * 8, 70)), -1, 70, 70),
        ((("0c" * 8, 0),), -1, -1, -1),
    ],
)
def test_a_peers_things_count_up_to_its_fork(theirs, live, replicas, checkpoints):
    ours = (("0a" * 8, 0), ("0b" * 8, 40))
    every = tuple(Kept(1, updates) for updates in range(100))
    found = counted(Holding(every, every, every), theirs, ours)
    assert [found.live, found.replicas, found.checkpoints] == [
        every[: most + 1] for most in (live, replicas, checkpoints)
    ]


def test_only_a_files_owner_can_use_it():
    world = crew(3, "a", "b", "c", "d")
    before, (spare,) = holders(world), world.plan().spares
    lead = world.machines[before[0]].crew
    n = world.machines[before[1]].memory[1]
    for peer, updates in ((before[2], n - 5), (spare, n - 10)):
        link = lead.leader.roster.link_of(peer)
        holding = replace(lead.leader.members[peer].holding, checkpoints=(Kept(1, updates),))
        lead.heard(link, Report(holding, world.plan().run), world.now)
    world.kill(before[1])
    while 1 not in world.machines[spare].building:
        world.run(0.25)
    _, order = world.machines[spare].building[1]
    assert [(source.way, source.peers) for source in order.sources if source.way == "snapshot"] == [
        ("snapshot", (spare,))
    ]


def test_machines_take_only_what_they_have_room_for():
    world = World(1, 2)
    small = world.start("a", capacity=1)
    world.start("b", capacity=1)
    world.run(FORMING_S)
    world.kill(holders(world)[1])
    world.run(60.0)
    lead = next(iter(world.machines.values()))
    assert not lead.crew.whole and heard(lead, "none of its peers has room for it: start another") == 1
    assert lead is small
    world.start("c", capacity=1)
    world.run(FORMING_S)
    assert world.settled(), world.story()


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
    assert world.machines[before[0]].crew.leader.members[before[1]].live.keys() == {1}


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


# --------------------------------------------------------------------- a lost lead


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
        assert lead.leader.members[spare].live == live
    lead.heard(link, replace(hello, term=9), world.now)
    lead.heard(link, Report(hello.holding, world.plan().run), world.now)
    assert lead.leader.members[spare].live == {}


def test_a_lead_without_room_makes_way():
    world = crew(3, "a", "b", "c", "s")
    before, (spare,) = holders(world), world.plan().spares
    world.kill(before[0])
    machine = world.machines[spare]
    while 0 not in machine.building:
        world.run(0.25)
    _, order = machine.building.pop(0)
    world.act(spare, machine.crew.unable(order, "no space left", world.now))
    assert not machine.leads and machine.crew.role == Role.SEEKING
    world.run(MENDING_S)
    assert holders(world)[0] == before[1] and world.plan().spares in ((spare,), ()) and world.learns()
    assert heard(machine, "cannot hold stage 0 of crew red (no space left): another peer must lead") == 1


def test_a_lone_peer_that_cannot_lead_retries():
    world = World(1, 1)
    machine = world.start("a")
    while 0 not in machine.building:
        world.run(0.25)
    _, order = machine.building.pop(0)
    world.act("a", machine.crew.unable(order, "no space left", world.now))
    world.run(BANNED_S - 5.0)
    assert machine.crew.role == Role.SEEKING
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
    world.run(MENDING_S + DIAL_S)
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


# --------------------------------------------------------------------- channels break, peers do not


def test_members_out_of_touch_briefly_keep_their_stage():
    world = crew(3, "a", "b", "c")
    before = holders(world)
    number = world.plan().number
    world.cut(crew_links(world, before[1])[0], silent=False)
    world.run(8.0)
    assert holders(world) == before and world.plan().term == 1
    assert world.plan().number > number  # what was under way may be lost
    assert all(machine.built.total() == 1 for machine in world.machines.values())


def test_messages_are_void_when_neighbours_lose_touch():
    world = crew(4, "a", "b", "c", "d")
    before, number = holders(world), world.plan().number
    broken = next(link for link in world.far if link.method == STAGE_METHOD)
    world.cut(broken, silent=False)
    world.run(8.0)
    assert holders(world) == before and world.plan().number > number
    assert all(machine.built.total() == 1 for machine in world.machines.values())
    assert any(link.method == STAGE_METHOD and link.peer == broken.peer for link in world.far)


@pytest.mark.parametrize("seed", range(5))
def test_a_crew_without_talking_neighbours_is_not_whole(seed):
    world = crew(5, "a", "b", "c", "d", "e", seed=seed)
    world.builds_s, world.opens_s = (0.0, 0.1), 2.0
    unheard, was_whole = [], True

    def look():
        nonlocal was_whole
        lead = next((m.crew for m in world.machines.values() if m.crew.role == Role.LEADING and m.crew.plan), None)
        whole = lead is not None and lead.whole
        if whole and not was_whole:
            crews = [world.machines[seat.peer].crew for seat in lead.plan.assignments]
            pairs = [*pairwise(range(1, 5)), *((k + 1, k) for k in range(1, 4))]
            unheard.extend((k, j) for k, j in pairs if crews[k] is not crews[j] and crews[k].way_to(j) is None)
        was_whole = whole

    for _ in range(4):
        victim = world.rng.choice(holders(world)[1:])
        world.kill(victim)
        world.run(world.rng.uniform(0.5, 8.0), look)
        world.start(victim)
        world.run(30.0, look)
        assert world.settled(), world.story()
    assert not unheard


@pytest.mark.parametrize("fails_s", [0.0, 5.0, 10.0, DIAL_FAILS_S, None])  # None = it hangs
def test_neighbours_out_of_reach_do_not_stop_crews(fails_s):
    world = crew(4, "a", "b", "c", "d")
    before, connect = holders(world), world.connect
    apart = {before[2], before[3]}

    def fails(peer, link):
        if link.method != STAGE_METHOD or {peer, link.peer} != apart:
            connect(peer, link)
        elif fails_s is not None:
            world.at(fails_s, lambda: world.tell_closed(peer, link, "cannot be reached"))

    world.kill(before[2])
    world.connect = fails
    world.run(3.0)
    world.start(before[2])
    lead, whole = world.machines[before[0]].crew, []
    for _ in range(120):
        world.run(4.0)
        whole.append(lead.whole)
    assert lead.counts["given_up"] and sum(whole) > 0.7 * len(whole), f"{sum(whole)}\n{world.story()}"
    assert any("again and again" in text for text in world.machines[before[0]].said)


def test_the_lead_is_told_of_unsent_messages():
    world = crew(4, "a", "b", "c", "d")
    before, number = holders(world), world.plan().number
    machine = world.machines[before[1]].crew
    link = machine._channels.neighbours.pop(before[2])
    for _ in range(3):
        world.act(before[1], machine.unsent(world.plan().mark, before[2], world.now))
    machine._channels.neighbours[before[2]] = link
    world.run(8.0)
    assert holders(world) == before and world.plan().number == number + 1
    assert world.machines[before[0]].crew.counts["given_up"] == 0


def test_who_says_what_nobody_takes_is_given_up():
    world = crew(4, "a", "b", "c", "d", "e")
    before, (spare,) = holders(world), world.plan().spares
    crew_of_3 = world.machines[before[3]].crew
    link = crew_of_3.way_to(2)
    world.act(before[3], crew_of_3.refused(link, "nonfinite", world.now))
    assert crew_of_3.counts["refused/nonfinite"] == 1
    world.run(10.0)
    lead = world.machines[before[0]].crew
    assert holders_of(lead) == [*before[:2], spare, before[3]]
    assert lead.whole and lead.counts["given_up"] == 1


@pytest.mark.parametrize("ended", [False, True])
def test_a_member_that_keeps_refusing_the_lead_goes(ended):
    world = crew(3, "a", "b", "c")
    before = holders(world)
    lead, machine = world.machines[before[0]].crew, world.machines[before[1]].crew
    number = world.plan().number
    world.act(before[1], machine.refused(machine.following.link, "shape", world.now, ended))
    world.run(5.0)
    assert holders(world) == before and lead.whole and lead.plan.number > number
    assert lead.counts["lost"] == ended and lead.leader.lost == ({1} if ended else set())
    refused = 0
    for _ in range(200):
        world.run(0.5)
        if machine.whole and machine.following.link is not None:
            refused += 1
            world.act(before[1], machine.refused(machine.following.link, "shape", world.now, ended))
    assert refused <= 2 * BREAKS_S and lead.whole and before[1] not in holders_of(lead)


def test_a_stage_holding_a_message_is_given_up():
    world = crew(3, "a", "b", "c", "d")
    before, (spare,) = holders(world), world.plan().spares
    lead = world.machines[before[0]].crew
    since = world.now
    world.machines[before[1]].held_s = 20.0
    world.run(40.0)
    world.act(before[0], lead.tick(world.now, since))
    world.run(2.0)
    assert holders(world) == before  # 20 s are not too long
    world.machines[before[1]].held_s = 61.0
    world.act(before[0], lead.tick(world.now, since))
    world.run(5.0)
    assert lead.whole and holders_of(lead) == [before[0], spare, before[2]]
    assert heard(world.machines[before[0]], "it stalls: a message has been waiting for 61 s") == 1
    world.run(90.0)
    assert before[1] not in lead.leader.members  # not so soon
    world.run(90.0)
    assert world.plan().spares == (before[1],)


def test_a_mute_stage_is_given_up():
    world = crew(3, "a", "b", "c", "d")
    before = holders(world)
    lead, since = world.machines[before[0]].crew, world.now
    mute = world.machines[before[1]].crew
    mute.heard = lambda link, record, now: []  # type: ignore[method-assign]
    for _ in range(100):
        world.run(1.0)
        if lead.whole:
            world.act(before[0], lead.tick(world.now, since))
    assert lead.counts["given_up"] == 1 and before[1] not in holders_of(lead)


def holders_of(lead) -> list[str]:
    return [seat.peer for seat in lead.plan.assignments]


def test_nothing_moves_and_nobody_has_it():
    world = crew(2, "a", "b")
    before = holders(world)
    lead, since, number = world.machines[before[0]].crew, world.now, world.plan().number
    world.run(125.0)
    world.act(before[0], lead.tick(world.now, since))
    assert lead.counts["stuck"] == 1
    world.run(5.0)
    assert holders(world) == before and world.plan().number == number + 1


# --------------------------------------------------------------------- who does not belong


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("model", {"architecture": "f" * 16}),
        ("stages", {"spans": ((0, 2), (2, 4), (4, 6))}),
        ("stages", {"wanted": 2}),
        ("swarm", {"swarm": "00" * 32}),
        ("crew", {"crew": "blue"}),
    ],
)
def test_strangers_are_refused_counted_and_named_once(reason, changes):
    world = crew(2, "a", "b")
    before = holders(world)
    stranger = World(1, 2).start("s", **changes).crew
    lead = world.machines[before[0]]
    for _ in range(3):
        link = Link("s", CREW_METHOD)
        lead.crew.opened(link, world.now)
        actions = lead.crew.heard(link, stranger.leadership.hello(before[0]), world.now)
        refusals = [action.record for action in actions if isinstance(action, Send)]
        assert [record.reason for record in refusals if isinstance(record, Refusal)] == [reason]
        assert all(isinstance(record, Refusal) for record in refusals)  # and nothing else is said
        world.act(before[0], actions)
    assert lead.crew.counts[f"refused/{reason}"] == 3
    assert heard(lead, "peer …s is refused in crew red") == 1
    world.run(60.0)
    assert holders(world) == before and not crew_links(world, "s")


@pytest.mark.parametrize("lie", ["another's", "reflected", "made up"])
def test_a_proof_holds_for_its_two_peers_only(lie):
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]].crew
    me, member = holders(world)
    hello = World(1, 2).start("s").crew.leadership.hello(me)  # it knows the name
    proofs = {
        "another's": world.machines[member].crew.leadership.hello(me).proof,
        "reflected": lead.leadership.hello("s").proof,
        "made up": "0" * 64,
    }
    link = Link("s", CREW_METHOD)
    lead.opened(link, world.now)
    lead.heard(link, replace(hello, proof=proofs[lie]), world.now)
    assert lead.counts["refused/crew"] == 1 and "s" not in lead.leader.members and "s" not in lead.directory.names
    lead.heard(link, hello, world.now)
    assert "s" in lead.leader.members and lead.directory.names["s"] == "name-of-s"


@pytest.mark.parametrize("word", [Answer("fake", "0" * 64, 99), Refusal("stall", "you are given up")])
def test_leads_without_the_crews_name_lead_nobody(word):
    world = World(1, 2)
    world.start("b")
    fake = world.start("fake")  # a card of the crew, and stage 0 on it
    fake.crew.leadership.role = Role.LEADING
    world.publish("fake")
    actions = []

    def says(link, record, now):
        actions.append(record)
        return [Send(link, word)] if isinstance(record, Hello) else []

    fake.crew.opened = lambda link, now: []  # type: ignore[method-assign]
    fake.crew.cards = fake.crew.closed = fake.crew.tick = lambda *args: []  # type: ignore[method-assign]
    fake.crew.heard = says  # type: ignore[method-assign]
    world.run(12.0)
    machine = world.machines["b"]
    assert machine.crew.role == Role.LEADING and machine.crew.counts["refused/crew"] == 1 == len(actions)
    assert heard(machine, "peer …fake is left out of crew red: it does not know the crew's name") == 1
    world.start("c")
    world.run(FORMING_S)
    assert holders_of(machine.crew) == ["b", "c"]
    assert len(actions) < 10  # not asked again and again


def test_a_fake_rival_does_not_depose_a_lead():
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]].crew
    seen = world.seen_by(holders(world)[0])
    card = CrewCard(lead.spec.id, lead.spec.architecture, 2, (0,), 99)
    actions = lead.cards({**seen, "fake": PeerCard(1, "5a" * 32, 0.0, "n", ["trainer"], crew=card)}, world.now)
    (link,) = [action.link for action in actions if isinstance(action, Connect)]
    actions = lead.heard(link, Answer("fake", "0" * 64, 99), world.now)
    assert Close(link) in actions and lead.role == Role.LEADING and lead.whole and lead.counts["refused/crew"] == 1


def test_terms_without_a_stage_count_for_nothing():
    world = crew(2, "a", "b")
    me = holders(world)[0]
    lead = world.machines[me].crew
    rival = World(1, 2).start("z", wanted=0)
    hello = replace(rival.crew.leadership.hello(me), leads=True, term=99, updates=10**6)
    for holding, gave_way in ((Holding(), 0), (Holding(live=(Kept(0, 10**6),)), 1)):
        link = Link("z", CREW_METHOD)
        lead.opened(link, world.now)
        lead.heard(link, replace(hello, holding=holding), world.now)
        assert lead.counts["gave_way"] == gave_way


def test_who_says_nothing_is_shown_out():
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]].crew
    crew_link, stage_link = Link("s", CREW_METHOD), Link("s", STAGE_METHOD)
    lead.opened(crew_link, world.now)
    lead.opened(stage_link, world.now)
    lead.heard(crew_link, Whole(1), world.now)  # no Hello
    assert not {Close(crew_link), Close(stage_link)} & set(lead.tick(world.now + STRANGER_S - 0.1))
    assert {Close(crew_link), Close(stage_link)} <= set(lead.tick(world.now + STRANGER_S))
    world.run(2 * STRANGER_S)
    assert world.settled()  # those who belong stay


def test_a_silent_peer_that_was_called_is_dropped():
    world = crew(2, "a", "b")
    me = holders(world)[0]
    lead = world.machines[me].crew
    card = CrewCard(lead.spec.id, lead.spec.architecture, 2)
    seen = {**world.seen_by(me), "mute": PeerCard(1, "5a" * 32, 0.0, "n", ["trainer"], crew=card)}
    (link,) = [action.link for action in lead.cards(seen, world.now) if isinstance(action, Connect)]
    assert not any(isinstance(action, Connect) for action in lead.cards(seen, world.now + 1.0))
    assert Close(link) in lead.tick(world.now + STRANGER_S)


def test_a_member_that_changes_identity_is_lost():
    world = crew(2, "a", "b", "c")
    me, _ = holders(world)
    (spare,) = world.plan().spares
    lead = world.machines[me].crew
    link = lead.leader.roster.link_of(spare)
    hello = world.machines[spare].crew.leadership.hello(me)
    lead.heard(link, replace(hello, architecture="f" * 16), world.now)
    assert spare not in lead.leader.members
    assert Close(link) in lead.tick(world.now + PART_S)


def mute_cards(world: World, count: int, seats: tuple[int, ...] = (0,)) -> None:
    """Peers that show the crew's sign and the highest term, take channels, and say nothing."""
    of_crew = World(1, world.stages).start("s").crew.card
    card = CrewCard(of_crew.id, of_crew.architecture, of_crew.count, seats, 2**40)
    mutes = {f"0mute{i}": PeerCard(1, SWARM, 0.0, "n", ["trainer"], crew=card) for i in range(count)}
    seen_by, connect = world.seen_by, world.connect

    def dial(peer: str, link: Link) -> None:
        if link.peer in mutes:
            far = Link(peer, link.method)
            world.far[link], world.far[far] = (link.peer, far), (peer, link)
        else:
            connect(peer, link)

    world.seen_by = lambda peer: {**seen_by(peer), **mutes}  # type: ignore[method-assign]
    world.connect = dial  # type: ignore[method-assign]


@pytest.mark.parametrize("count", [3, 16, 64])
def test_silent_peers_do_not_keep_crews_from_forming(count):
    world = World(1, 2)
    mute_cards(world, count)
    world.start("b")
    world.start("c", wanted=1)
    world.run(60.0)
    assert sorted(holders(world)) == ["b", "c"] and world.learns()


@pytest.mark.parametrize("seats", [(), (0,)])
@pytest.mark.parametrize("count", [16, 64])
def test_silent_peers_do_not_keep_others_out(count, seats):
    world = crew(2, "b", "c")
    mute_cards(world, count, seats)
    world.run(60.0)
    lead = world.machines[holders(world)[0]].crew
    machine = world.start("z")
    world.run(50.0)
    assert machine.crew.role == Role.FOLLOWING and lead.leader.planning.spares == ["z"]
    world.kill(holders(world)[0])
    world.run(MENDING_S)
    assert world.learns()


def test_peers_without_proof_are_asked_ever_more_rarely():
    world = World(1, 2)
    mute_cards(world, 1)
    asked: dict[str, list[float]] = {"a": [], "b": []}
    connect = world.connect

    def dial(peer: str, link: Link) -> None:
        if link.peer == "0mute0":
            asked[peer].append(world.now)
        connect(peer, link)

    world.connect = dial  # type: ignore[method-assign]
    world.start("a", wanted=1)  # seeks
    world.run(300.0)
    world.start("b", wanted=0)  # leads
    world.run(300.0)
    assert all(3 <= len(times) <= 9 for times in asked.values())


def test_made_up_cards_do_not_silence_a_crew():
    world = World(1, 2)
    machine = world.start("a")
    of_crew = machine.crew.card
    wrong = CrewCard(of_crew.id, "f" * 16, 2)
    fakes = {f"fake{i:06}": PeerCard(1, SWARM, 0.0, "n", ["trainer"], crew=wrong) for i in range(MAX_SAID + 100)}
    world.seen_by = lambda peer: fakes  # type: ignore[method-assign]
    world.run(20.0)
    assert heard(machine, "another model") == MAX_SAID and heard(machine, "waits for 1 more peer") == 1


def test_silent_channels_are_few():
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]].crew
    opened = [Link(f"s{i}", CREW_METHOD if i % 2 else STAGE_METHOD) for i in range(3 * MAX_STRANGERS)]
    closed = [action.link for link in opened for action in lead.opened(link, world.now) if isinstance(action, Close)]
    assert closed == opened[:-MAX_STRANGERS]  # those that have been silent for longest
    hello = World(1, 2).start("s").crew.leadership.hello(holders(world)[0])
    late = Link("s", CREW_METHOD)
    lead.opened(late, world.now)
    lead.heard(late, hello, world.now)
    assert "s" in lead.leader.members


def test_whoever_has_stages_of_other_layers_is_refused():
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]].crew
    other = World(1, 2).start("s", Holding(checkpoints=(Kept(1, 3),)), spans=((0, 1), (1, 4))).crew
    link = Link("s", CREW_METHOD)
    lead.opened(link, world.now)
    lead.heard(link, other.leadership.hello(lead.spec.me), world.now)
    assert lead.counts["refused/span"] == 1
    harmless = World(1, 2).start("s", spans=((0, 1), (1, 4))).crew  # it has nothing yet
    lead.heard(link, harmless.leadership.hello(lead.spec.me), world.now)
    assert lead.counts["refused/span"] == 1


def test_a_crew_of_another_model_is_left_alone():
    world = World(1, 1)
    world.start("a")
    world.start("b", architecture="f" * 16)
    world.run(FORMING_S)
    assert all(machine.crew.whole and machine.leads for machine in world.machines.values())
    assert (
        heard(world.machines["a"], "peer …b of crew red has another model: it and this node cannot hold one policy")
        == 1
    )


@pytest.mark.parametrize(("count", "architecture", "said"), [(2, "", 1), (3, "", 0), (2, "f" * 16, 0)])
def test_a_lone_peer_hears_of_another_such_crew(count: int, architecture: str, said: int) -> None:
    world = World(1, 2)
    machine = world.start("a")
    card = CrewCard("c" * 16, architecture or machine.crew.spec.architecture, count, (0,), 1)
    world.seen_by = lambda peer: {"other": PeerCard(1, SWARM, 0.0, "n", ["trainer"], crew=card)}  # type: ignore[method-assign]
    world.run(20.0)
    assert heard(machine, "another crew of this policy is in the swarm: if it is the one that was meant") == said


def test_a_whole_crew_does_not_hear_of_others() -> None:
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]]
    card = CrewCard("c" * 16, lead.crew.spec.architecture, 2, (0,), 1)
    other, seen = PeerCard(1, SWARM, 0.0, "n", ["trainer"], crew=card), world.seen_by
    world.seen_by = lambda peer: {**seen(peer), "other": other}  # type: ignore[method-assign]
    world.run(20.0)
    assert heard(lead, "another crew of this policy") == 0


def test_what_strangers_say_changes_nothing():
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]].crew
    before = lead.plan
    hello = World(1, 2).start("s").crew.leadership.hello(lead.spec.me)
    nonsense = [
        Refusal("model"),
        before,
        Answer("s", proof(lead.spec.key, "s", lead.spec.me), 99),
        Ready(before.mark, 255, 2**50),
        Unable(before.mark, 0, "no"),
        Broken(before.mark, "a", "gone", True),
        Load(before.mark, 1e9),
        Whole(before.mark),
    ]
    crew_link, stage_link = Link("s", CREW_METHOD), Link("s", STAGE_METHOD)
    lead.opened(crew_link, world.now)
    lead.opened(stage_link, world.now)
    for record in nonsense:
        lead.heard(crew_link, record, world.now)
    for record in [hello, *nonsense]:
        lead.heard(stage_link, record, world.now)
    assert lead.plan is before and lead.role == Role.LEADING and lead.whole and "s" not in lead.leader.members


def test_a_spares_words_on_others_stages_change_nothing():
    world = crew(2, "a", "b", "c")
    before, plan = holders(world), world.plan()
    (spare,) = plan.spares
    for record in (
        Ready(plan.mark, 1, 2**50),
        Ready(plan.mark, 255, 2**50),
        Unable(plan.mark, 0, "no"),
        Unable(plan.mark, 1, "no"),
        Load(plan.mark, 0.0),
        Whole(plan.mark),
        Report(Holding(live=(Kept(0, 2**50), Kept(200, 2**50)))),
    ):
        (link,) = crew_links(world, spare)
        world.send(spare, link, record)
    world.run(5.0)
    lead = world.machines[before[0]].crew
    assert holders(world) == before and world.plan().mark == plan.mark
    assert lead.leader.updates < 100


# --------------------------------------------------------------------- at random


def consistent(world: World) -> Callable[[], None]:
    """Plans have one holder a stage, and all who go by a plan mean the same one."""
    seen: dict[int, list[str]] = {}

    def check() -> None:
        for peer, machine in world.machines.items():
            plan = machine.crew.plan
            if plan is None:
                continue
            seats = [seat.peer for seat in plan.assignments]
            assert all(seats) and len(seats) == world.stages
            assert seen.setdefault(plan.mark, seats) == seats
            if machine.crew.role == Role.LEADING and machine.crew.whole:
                assert seats[0] == peer
                there = [world.machines.get(holder) for holder in seats]
                assert all(m is None or m.crew.plan is None or i in m.memory for i, m in enumerate(there))

    return check


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_a_crew_is_whole_again_soon(seed):
    rng = random.Random(seed)
    world = World(seed, rng.randint(2, 4), plus=rng.random() < 0.5)
    check, bounded = consistent(world), rng.random() < 0.5

    def join(*wishes: int | None) -> None:
        wishes = wishes or (None, None, None, 0, 1, world.stages - 1)
        capacity = rng.choice([0, 1, 1, 2]) if bounded else 0
        world.start(f"peer{rng.randrange(10**8):08d}", wanted=rng.choice(wishes), capacity=capacity)

    for _ in range(rng.randint(2, 6)):
        join()
    world.run(rng.uniform(5.0, 30.0), check)
    for _ in range(rng.randint(1, 6)):
        peers = sorted(world.machines)
        match rng.choice(["kill", "silence", "join", "split", "heal", "cut"]):
            case "kill" if len(peers) > 1:
                world.kill(rng.choice(peers))
            case "silence" if len(peers) > 1:
                world.kill(rng.choice(peers), silent=True)
            case "join" if len(peers) < 6:
                join()
            case "split":
                world.split(set(rng.sample(peers, rng.randint(1, len(peers)))))
            case "heal":
                world.heal()
            case "cut" if world.far:
                world.cut(rng.choice(list(world.far)), silent=rng.random() < 0.5)
        world.run(rng.uniform(0.5, 25.0), check)
    world.heal()
    join(None)
    while len(world.machines) < world.stages:
        join()
    for _ in range(45):
        if world.settled():
            break
        world.run(1.0, check)
    assert world.settled(), f"seed {seed}\n{world.story()}"
    assert world.learns(), f"seed {seed}\n{world.story()}"


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_lost_the_others_keep_their_stages(seed):
    rng = random.Random(seed)
    stages = rng.randint(2, 5)
    world = crew(stages, *(f"peer{i}" for i in range(stages + rng.randint(0, 1))), seed=seed)
    for _ in range(4):
        before = holders(world)
        built = {peer: dict(machine.built) for peer, machine in world.machines.items()}
        victim = rng.choice(before)
        world.kill(victim, silent=rng.random() < 0.5)
        world.run(MENDING_S)
        after = holders(world)
        lost = {stage for stage, peer in enumerate(before) if peer == victim}
        assert all(after[stage] == peer for stage, peer in enumerate(before) if stage not in lost), seed
        for peer, machine in world.machines.items():
            kept = {stage: n for stage, n in machine.built.items() if stage not in lost}
            assert kept == {stage: n for stage, n in built[peer].items() if stage not in lost}, f"seed {seed}: {peer}"
        world.start(f"new{world.now:.0f}", wanted=rng.choice([None, rng.randrange(stages)]))
        world.run(FORMING_S)
        assert len(set(holders(world))) == min(stages, len(world.machines)), f"seed {seed}\n{world.story()}"


@pytest.mark.parametrize("seed", range(8))
def test_two_parts_of_a_crew_become_one_again(seed):
    rng = random.Random(seed)
    stages = rng.randint(2, 4)
    peers = [f"peer{i}" for i in range(stages)]
    world = crew(stages, *peers, seed=seed)
    part = set(rng.sample(peers, rng.randint(1, stages - 1)))
    world.split(part)
    world.run(60.0, consistent(world))
    assert all(world.settled(side) for side in world.crews()), f"seed {seed}\n{world.story()}"
    world.heal()
    world.run(60.0, consistent(world))
    assert world.settled(), f"seed {seed}\n{world.story()}"
    assert len(set(holders(world))) == stages and world.learns()


@pytest.mark.parametrize(
    "seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.long) for seed in (7, 9, 11, 12, 13, 16, 17))]
)
def test_whatever_happens_no_branch_is_mixed_with_another(seed):
    """With seeds by which runs branch and files are loaded."""
    rng = random.Random(seed)
    stages = rng.randint(2, 3)
    world = DiskWorld(seed, stages)
    peers = [f"peer{i}" for i in range(stages + 1)]
    for peer in peers:
        world.start(peer)
    world.run(FORMING_S, world.check)
    for _ in range(8):
        there = sorted(world.machines)
        match rng.choice(["split", "split", "heal", "kill", "all", "start"]):
            case "split":
                world.split(set(rng.sample(there, rng.randint(1, len(there)))))
            case "heal":
                world.heal()
            case "kill" if len(there) > 1:
                world.kill(rng.choice(there), silent=rng.random() < 0.5)
            case "all":
                for peer in there:
                    world.kill(peer)
        for peer in peers:
            if peer not in world.machines and rng.random() < 0.5:
                world.start(peer)
        if not world.machines:
            world.start(rng.choice(peers))
        world.run(rng.uniform(5.0, 40.0), world.check)
    world.heal()
    for peer in peers:
        if peer not in world.machines:
            world.start(peer)
    world.run(60.0, world.check)
    assert world.loaded and any(len(file.run) > 1 for files in world.disks.values() for file in files)
    assert world.learns(), f"seed {seed}\n{world.story()}"


def test_waiting_times_fit_together():
    """A new lead waits for its crew until everyone has noticed that the old one is gone, and asked it once more."""
    assert SILENCE_S + DIAL_S < GATHER_S and FIND_S < AVOID_S
    assert max(STRANGER_S, DIAL_FAILS_S) + REPLAN_S + REDIAL_S < CALM_S


@pytest.mark.parametrize("seed", range(4))
def test_the_next_lead_is_told_how_stages_came(seed):
    world = crew(5, "a", "b", "c", "d", "e", seed=seed)
    world.builds_s, world.opens_s = (0.0, 0.1), 4.0
    before = holders(world)
    world.kill(before[2])
    world.run(1.0)
    machine = world.start(before[2])
    for _ in range(80):
        if machine.crew.following.ready:
            break
        world.run(0.25)
    assert machine.crew.following.ready, "it was ready before its neighbours could be talked to"
    world.kill(before[0])
    world.run(60.0)
    assert world.settled(), world.story()
    said = next(m.said for m in world.machines.values() if m.crew.role == Role.LEADING)
    told = {text[:8] for text in said if "rebuilt" in text or "begins with" in text}
    assert {"stage 0 ", "stage 2 "} <= told, world.story()
