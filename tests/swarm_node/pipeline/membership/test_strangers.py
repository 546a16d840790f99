"""A crew keeps out peers that do not belong to it, and is not stopped by them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from swarm_node.pipeline.membership.actions import MAX_SAID, Close, Connect, PeerLink, Send
from swarm_node.pipeline.membership.channels import MAX_STRANGERS, PART_S, STRANGER_S
from swarm_node.pipeline.membership.leadership import CrewRole
from swarm_protocol.crew import (
    CREW_METHOD,
    STAGE_METHOD,
    Answer,
    Broken,
    Hello,
    Holding,
    Kept,
    Load,
    Ready,
    Refusal,
    Report,
    Unable,
    Whole,
    proof,
)
from swarm_protocol.messages import CrewCard, PeerCard
from tests.support.crew_world import FORMING_S, MENDING_S, SWARM, World, crew, crew_links, heard, holders, holders_of


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
        link = PeerLink("s", CREW_METHOD)
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
    link = PeerLink("s", CREW_METHOD)
    lead.opened(link, world.now)
    lead.heard(link, replace(hello, proof=proofs[lie]), world.now)
    assert (
        lead.counts["refused/crew"] == 1 and "s" not in lead.leader.roster.members and "s" not in lead.directory.names
    )
    lead.heard(link, hello, world.now)
    assert "s" in lead.leader.roster.members and lead.directory.names["s"] == "name-of-s"


@pytest.mark.parametrize("word", [Answer("fake", "0" * 64, 99), Refusal("stall", "you are given up")])
def test_leads_without_the_crews_name_lead_nobody(word):
    world = World(1, 2)
    world.start("b")
    fake = world.start("fake")  # a card of the crew, and stage 0 on it
    fake.crew.leadership.role = CrewRole.LEADING
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
    assert machine.crew.role == CrewRole.LEADING and machine.crew.counts["refused/crew"] == 1 == len(actions)
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
    assert Close(link) in actions and lead.role == CrewRole.LEADING and lead.whole and lead.counts["refused/crew"] == 1


def test_terms_without_a_stage_count_for_nothing():
    world = crew(2, "a", "b")
    me = holders(world)[0]
    lead = world.machines[me].crew
    rival = World(1, 2).start("z", wanted=0)
    hello = replace(rival.crew.leadership.hello(me), leads=True, term=99, updates=10**6)
    for holding, gave_way in ((Holding(), 0), (Holding(live=(Kept(0, 10**6),)), 1)):
        link = PeerLink("z", CREW_METHOD)
        lead.opened(link, world.now)
        lead.heard(link, replace(hello, holding=holding), world.now)
        assert lead.counts["gave_way"] == gave_way


@pytest.mark.parametrize(
    ("term", "updates", "started", "gives_way"),
    [
        (1, -5, 5.0, True),
        (0, 1, 5.0, True),
        (0, 0, -1.0, True),
        (0, 0, 0.0, False),  # then the lower id leads
        (0, 0, 1.0, False),
        (0, -1, -1.0, False),
        (-1, 5, -1.0, False),
    ],
)
def test_the_lower_of_two_leads_gives_way(term: int, updates: int, started: float, gives_way: bool) -> None:
    world = crew(2, "a", "b")
    me = holders(world)[0]
    lead = world.machines[me].crew
    hello = replace(
        World(1, 2).start("z", wanted=0).crew.leadership.hello(me),
        leads=True,
        term=lead.leader.won + term,
        updates=lead.leader.updates + updates,
        started=lead.spec.started + started,
        holding=Holding(live=(Kept(0, 1),)),
    )
    link = PeerLink("z", CREW_METHOD)
    lead.opened(link, world.now)
    lead.heard(link, hello, world.now)
    assert lead.counts["gave_way"] == gives_way


def test_a_silent_stranger_is_shown_out():
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]].crew
    crew_link, stage_link = PeerLink("s", CREW_METHOD), PeerLink("s", STAGE_METHOD)
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
    assert spare not in lead.leader.roster.members
    assert Close(link) in lead.tick(world.now + PART_S)


def mute_cards(world: World, count: int, seats: tuple[int, ...] = (0,)) -> None:
    """Peers that show the crew's sign and the highest term, take channels, and say nothing."""
    of_crew = World(1, world.stages).start("s").crew.card
    card = CrewCard(of_crew.id, of_crew.architecture, of_crew.count, seats, 2**40)
    mutes = {f"0mute{i}": PeerCard(1, SWARM, 0.0, "n", ["trainer"], crew=card) for i in range(count)}
    seen_by, connect = world.seen_by, world.connect

    def dial(peer: str, link: PeerLink) -> None:
        if link.peer in mutes:
            far = PeerLink(peer, link.method)
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
    assert machine.crew.role == CrewRole.FOLLOWING and lead.leader.planning.spares == ["z"]
    world.kill(holders(world)[0])
    world.run(MENDING_S)
    assert world.learns()


def test_peers_without_proof_are_asked_ever_more_rarely():
    world = World(1, 2)
    mute_cards(world, 1)
    asked: dict[str, list[float]] = {"a": [], "b": []}
    connect = world.connect

    def dial(peer: str, link: PeerLink) -> None:
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
    opened = [PeerLink(f"s{i}", CREW_METHOD if i % 2 else STAGE_METHOD) for i in range(3 * MAX_STRANGERS)]
    closed = [action.link for link in opened for action in lead.opened(link, world.now) if isinstance(action, Close)]
    assert closed == opened[:-MAX_STRANGERS]  # those that have been silent for longest
    hello = World(1, 2).start("s").crew.leadership.hello(holders(world)[0])
    late = PeerLink("s", CREW_METHOD)
    lead.opened(late, world.now)
    lead.heard(late, hello, world.now)
    assert "s" in lead.leader.roster.members


def test_a_peer_with_stages_of_other_layers_is_refused():
    world = crew(2, "a", "b")
    lead = world.machines[holders(world)[0]].crew
    other = World(1, 2).start("s", Holding(checkpoints=(Kept(1, 3),)), spans=((0, 1), (1, 4))).crew
    link = PeerLink("s", CREW_METHOD)
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


def test_strangers_words_change_nothing():
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
    crew_link, stage_link = PeerLink("s", CREW_METHOD), PeerLink("s", STAGE_METHOD)
    lead.opened(crew_link, world.now)
    lead.opened(stage_link, world.now)
    for record in nonsense:
        lead.heard(crew_link, record, world.now)
    for record in [hello, *nonsense]:
        lead.heard(stage_link, record, world.now)
    assert (
        lead.plan is before and lead.role == CrewRole.LEADING and lead.whole and "s" not in lead.leader.roster.members
    )


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
