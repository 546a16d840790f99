"""A crew finds its leader, and every stage a holder, on a virtual clock."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from swarm_node.pipeline.membership.actions import BuildStage, DropStage
from swarm_node.pipeline.membership.leader_search import FIND_LEADER_S, NO_MEMBERS_S
from swarm_node.pipeline.membership.leadership import CrewRole
from swarm_node.pipeline.membership.roster import counted
from swarm_protocol.crew import Holding, Kept, Progress, Report, Source
from swarm_protocol.lineage import leads_to, shared
from tests.support.crew_world import (
    FORMING_S,
    MENDING_S,
    OTHER,
    RUN,
    SETTINGS,
    World,
    a_layer_costs_one,
    crew,
    crew_links,
    heard,
    holders,
)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_crew_forms(stages):
    world = crew(stages, *(f"peer{i}" for i in range(stages)))
    assert sorted(holders(world)) == [f"peer{i}" for i in range(stages)]
    assert [machine.leads for machine in world.machines.values()].count(True) == 1
    assert all(machine.built.total() == 1 for machine in world.machines.values())


def test_explicit_stages_are_given_in_any_order():
    world = World(1, 3)
    for peer, stage in (("a", 2), ("b", 1), ("c", None)):
        world.start(peer, wanted=stage)
    world.run(FORMING_S)
    assert holders(world) == ["c", "b", "a"]


def test_a_peer_for_the_first_stage_leads_at_once():
    world = World(1, 2)
    world.start("a")
    world.start("b", wanted=0)
    world.run(FORMING_S)
    assert holders(world) == ["b", "a"]


def test_a_peer_for_another_stage_begins_no_crew():
    world = World(1, 2)
    machine = world.start("a", wanted=1)
    world.run(10 * FIND_LEADER_S)
    assert machine.crew.role == CrewRole.SEEKING and heard(machine, "waiting for a peer that takes stage 0") == 1
    world.start("b", wanted=0)
    world.run(FORMING_S)
    assert holders(world) == ["b", "a"]


def test_a_crew_waits_for_enough_peers_saying_so():
    world = World(1, 3)
    first = world.start("a")
    world.run(60.0)
    assert first.crew.role == CrewRole.LEADING and not first.crew.whole
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
    assert all(machine.crew.role == CrewRole.LEADING for machine in world.machines.values())
    world.run(FORMING_S)
    assert holders(world) == ["a", "b"]  # equal in all but their ids
    assert world.machines["b"].crew.counts["gave_way"] == 1 and not world.machines["b"].leads


def test_two_leads_agree_once_one_sees_a_card():
    world = World(1, 2)
    world.start("a")
    world.start("b")
    cards, world.card_store = world.card_store, {**world.card_store}
    world.seen_by = lambda peer: {}  # type: ignore[method-assign]
    world.run(NO_MEMBERS_S + FIND_LEADER_S + 1.0)
    assert all(machine.crew.role == CrewRole.LEADING for machine in world.machines.values())
    world.card_store = cards  # as they were when nobody led
    world.publish = lambda peer: None  # type: ignore[method-assign]
    del world.seen_by
    world.run(2.0)
    assert [machine.crew.role for machine in world.machines.values()] == [CrewRole.LEADING, CrewRole.FOLLOWING]
    world.run(4.0)
    assert holders(world) == ["a", "b"]


def test_a_newcomer_is_told_of_an_unseen_lead():
    world = World(1, 2)
    world.start("a")
    world.run(NO_MEMBERS_S + FIND_LEADER_S + 1.0)
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
        assert lead.leader.roster.members[spare].holding == kept


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
            == lead.roster.members[peer].holding.checkpoints
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
        holding = replace(lead.leader.roster.members[peer].holding, checkpoints=(Kept(1, updates),))
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
