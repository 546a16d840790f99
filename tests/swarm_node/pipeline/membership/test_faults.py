"""A crew survives broken channels and seeded random faults, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from swarm_node.pipeline.membership.channels import NEIGHBOUR_REDIAL_S, STRANGER_S
from swarm_node.pipeline.membership.leader import REPLAN_S
from swarm_node.pipeline.membership.leader_search import FIND_LEADER_S, FIRST_ANSWER_S, RETRY_PEER_S
from swarm_node.pipeline.membership.leadership import CrewRole
from swarm_node.pipeline.membership.roster import BREAKS_S, CALM_S, GATHER_S
from swarm_protocol.crew import STAGE_METHOD
from tests.support.crew_world import (
    DIAL_FAILS_S,
    FORMING_S,
    MENDING_S,
    SILENCE_S,
    DiskWorld,
    World,
    crew,
    crew_links,
    heard,
    holders,
    holders_of,
)

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
        lead = next((m.crew for m in world.machines.values() if m.crew.role == CrewRole.LEADING and m.crew.plan), None)
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


def test_a_peer_whose_messages_are_refused_is_given_up():
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
    assert before[1] not in lead.leader.roster.members  # not so soon
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


def test_nothing_moves_and_nobody_has_it():
    world = crew(2, "a", "b")
    before = holders(world)
    lead, since, number = world.machines[before[0]].crew, world.now, world.plan().number
    world.run(125.0)
    world.act(before[0], lead.tick(world.now, since))
    assert lead.counts["stuck"] == 1
    world.run(5.0)
    assert holders(world) == before and world.plan().number == number + 1


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
            if machine.crew.role == CrewRole.LEADING and machine.crew.whole:
                assert seats[0] == peer
                there = [world.machines.get(holder) for holder in seats]
                assert all(m is None or m.crew.plan is None or i in m.memory for i, m in enumerate(there))

    return check


@pytest.mark.parametrize("seed", range(25))
def test_a_crew_is_whole_again_after_any_faults(seed):
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
def test_a_loss_leaves_other_stages_where_they_are(seed):
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
def test_no_faults_mix_two_branches(seed):
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
    assert SILENCE_S + FIRST_ANSWER_S < GATHER_S and FIND_LEADER_S < RETRY_PEER_S
    assert max(STRANGER_S, DIAL_FAILS_S) + REPLAN_S + NEIGHBOUR_REDIAL_S < CALM_S


@pytest.mark.parametrize("seed", range(4))
def test_the_next_lead_is_told_how_stages_came(seed):
    world = crew(5, "a", "b", "c", "d", "e", seed=seed)
    world.builds_s, world.opens_s = (0.0, 0.1), 4.0
    before = holders(world)
    world.kill(before[2])
    world.run(1.0)
    machine = world.start(before[2])
    for _ in range(80):
        if machine.built:
            break
        world.run(0.25)
    neighbours = [machine.crew.way_to(stage) for stage in (1, 3)]
    assert machine.built == {2: 1} and None in neighbours, "it was ready before its neighbours could be talked to"
    world.kill(before[0])
    world.run(60.0)
    assert world.settled(), world.story()
    said = next(m.said for m in world.machines.values() if m.crew.role == CrewRole.LEADING)
    told = {text[:8] for text in said if "rebuilt" in text or "begins with" in text}
    assert {"stage 0 ", "stage 2 "} <= told, world.story()
