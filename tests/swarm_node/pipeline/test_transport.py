"""Messages find their stages over a transport's channels; those of earlier plans do not; losses are told."""

from __future__ import annotations

import threading

import pytest
import torch
from msgspec.structs import replace

from swarm_node.pipeline.membership.actions import Action, BuildStage, DropStage, StartLeading, StopLeading
from swarm_node.pipeline.messages import LEADER, StageLost, StageMessage, encode_message
from swarm_node.pipeline.transport import StageTransport
from swarm_protocol.crew import CONTROL, CREW_METHOD, STAGE_METHOD, Holding, Kept, Source
from swarm_protocol.pipeline import Backward, StageStatus, StatusRequest
from tests.support.crew_peers import Peers
from tests.support.crew_world import SETTINGS


@pytest.fixture
def crew() -> Peers:
    peers = Peers(3)
    for peer in ("a", "b", "c"):
        peers.start(peer)
    peers.run(30.0)
    assert peers.at(0).mend(0.0)
    return peers


def begin(crew: Peers) -> tuple[StageTransport, StageTransport, StageTransport]:
    """The stage transports by stage; the last one works by the plan."""
    lead, first, last = crew.at(0), crew.at(1), crew.at(2)
    lead.send(StageMessage(2, StatusRequest()))
    crew.run(1.0)
    assert last.receive(0.0) == StageMessage(2, StatusRequest())
    return lead, first, last


def gradient() -> StageMessage:
    return StageMessage(1, Backward(turn=1, microbatch=0, place=1), (torch.arange(24.0).view(2, 3, 4),))


def test_messages_find_their_stages(crew):
    lead, first, last = crew.at(0), crew.at(1), crew.at(2)
    assert (lead.planned_stages, first.planned_stages, last.leading) == ((0,), (1,), False)
    lead.send(StageMessage(1, StatusRequest()))
    lead.send(StageMessage(2, StatusRequest()))
    crew.run(1.0)
    assert first.receive(0.0) == StageMessage(1, StatusRequest()) and last.receive(0.0) == StageMessage(
        2, StatusRequest()
    )
    last.send(gradient())  # over the channel between neighbours
    first.send(StageMessage(LEADER, StageStatus(1, 5, 0.5)))
    crew.run(1.0)
    received = first.receive(0.0)
    assert received is not None and torch.equal(received.tensors[0], gradient().tensors[0])
    assert lead.receive(0.0) == StageMessage(LEADER, StageStatus(1, 5, 0.5))
    assert lead.receive(0.0) is None and first.receive(0.0) is None


def test_a_message_to_oneself_is_passed_unchanged(crew):
    lead = crew.at(0)
    message = StageMessage(0, StatusRequest())
    lead.send(message)
    assert lead.receive(0.0) is message


def test_the_lead_hears_of_losses_dropping_old_messages(crew):
    lead, last = crew.at(0), crew.at(2)
    last_peer = crew.peer(last)
    victim = next(peer for peer, stage_transport in crew.transports.items() if stage_transport not in (lead, last))
    lead.send(StageMessage(2, StatusRequest()))
    lead.send(StageMessage(2, StatusRequest()))
    crew.run(1.0)
    assert last.receive(0.0) == StageMessage(2, StatusRequest())
    crew.kill(victim)
    crew.run(5.0)
    with pytest.raises(StageLost) as lost:
        lead.receive(0.0)
    assert lost.value.stages == {1} and not lead.mend(0.0)
    with pytest.raises(StageLost):
        lead.send(StageMessage(2, StatusRequest()))
    crew.run(10.0)
    assert [order for order in crew.orders[last_peer] if isinstance(order, BuildStage)][0].stage == 2
    with pytest.raises(StageLost):  # whole again, but the lead has not taken note
        lead.receive(0.0)
    assert lead.mend(0.0)
    last.send(StageMessage(LEADER, StageStatus(2, 5, 0.5)))  # in answer to what is void by now
    assert last.receive(0.0) is None
    crew.run(1.0)
    assert lead.receive(0.0) is None
    assert last.metrics()["stages/late"] == 2.0  # that answer, and the second question
    lead.send(StageMessage(2, StatusRequest()))
    crew.run(1.0)
    assert last.receive(0.0) == StageMessage(2, StatusRequest())


def test_a_successor_is_told_to_lead(crew):
    lead, first = crew.at(0), crew.at(1)
    crew.kill(crew.peer(lead))
    crew.run(15.0)
    name = crew.peer(first)
    assert [type(order) for order in crew.orders[name]] == [BuildStage, StartLeading, BuildStage]
    assert first.leading and first.planned_stages == (0, 1) and first.mend(0.0)
    assert first.card.held == (0, 1) and first.card.term == 2
    message = StageMessage(1, StatusRequest())
    first.send(message)
    assert first.receive(0.0) is message  # of both stages


def test_receive_makes_way_for_orders(crew):
    victim = crew.peer(crew.at(1))
    newcomer = crew.start("d")
    crew.busy.add("d")
    crew.kill(victim)
    crew.run(30.0)
    assert newcomer.receive(0.0) is None
    (order,) = [order for order in newcomer.orders() if isinstance(order, BuildStage)]
    assert order.stage == 1 and newcomer.stands(order) and newcomer.orders() == []
    newcomer.unable(order, "no memory")
    assert not newcomer.stands(order)
    crew.run(5.0)
    assert crew.at(0).whole and newcomer.planned_stages != (1,)


@pytest.mark.parametrize("bad", ["numbers", "shape", "stage", "nonsense", "record"])
def test_a_malformed_message_ends_its_channel_and_sender(crew, bad):
    lead, first, last = crew.at(0), crew.at(1), crew.at(2)
    assert last.plan is not None
    head, body = encode_message(gradient(), "float32", last.plan.mark)
    data = bytearray(b"".join(body))
    if bad == "numbers":
        data[:4] = b"\xff\xff\xff\xff"
    elif bad == "shape":
        data = data[:-4]
    elif bad == "stage":
        head, _ = encode_message(StageMessage(2, gradient().head, gradient().tensors), "float32", last.plan.mark)
    elif bad == "nonsense":
        head = b"\x00"
    elif bad == "record":
        head, data = CONTROL, bytearray(b"\x00")
    crew.inject(last, first, STAGE_METHOD, head, bytes(data))
    crew.run(1.0)
    assert first.receive(0.0) is None
    crew.run(20.0)
    refused = sum(n for name, n in first.metrics().items() if name.startswith("stages/refused"))
    if bad == "record":  # the channel is closed, and opened anew
        assert lead.whole and refused == 0 and lead.metrics().get("stages/given_up", 0) == 0
    else:
        assert refused == 1 and lead.metrics()["stages/given_up"] == 1
        assert lead.whole and last.planned_stages == (2,) and crew.at(2) is not last


def test_a_peer_that_stalls_is_found_out(crew):
    lead, first = crew.at(0), crew.at(1)
    lead.send(StageMessage(1, StatusRequest()))
    crew.run(1.0)
    assert first.receive(0.0) == StageMessage(1, StatusRequest())  # and that is all it does
    assert first.held_s() == pytest.approx(1.0, abs=0.5)
    for _ in range(140):
        crew.run(0.5)
        try:
            assert lead.receive(0.0) is None
        except StageLost as lost:
            assert lost.stages == {1} and "stalls" in str(lost)
            break
    else:
        pytest.fail("it was not found out")
    assert first.receive(0.0) is None and first.held_s() == 0.0


def test_a_builder_shows_that_it_gets_on(crew):
    crew.kill(crew.peer(crew.at(1)))
    newcomer = crew.start("d")
    crew.busy.add("d")
    while newcomer.planned_stages != (1,):
        crew.run(0.25)
    (order,) = newcomer.orders()
    crew.run(5.0)
    assert newcomer.held_s() == pytest.approx(5.0)
    assert newcomer.stands(order) and newcomer.held_s() == 0.0
    crew.run(5.0)
    newcomer.seated(order, 3, order.sources[0])
    assert newcomer.held_s() == 0.0


@pytest.mark.parametrize("stages", [{1}, set(), {0}])
def test_the_pipelines_own_judgement_counts(crew, stages):
    lead = crew.at(0)
    plan = lead.plan
    assert plan is not None
    lead.doubt(StageLost(stages, "no answer"))
    lead.doubt(StageLost(stages, "no answer"))  # it is known by now
    with pytest.raises(StageLost, match="no answer") as lost:
        lead.receive(0.0)
    assert lost.value.stages == stages - {0}  # the lead itself lives
    crew.run(10.0)
    assert lead.mend(0.0)
    lead.doubt(StageLost(set(), "of the present plan"))
    assert not lead.mend(0.0)
    crew.run(10.0)
    assert lead.mend(0.0)
    assert lead.metrics().get("stages/given_up", 0) == (stages == {1})
    assert lead.plan is not None and lead.plan.mark != plan.mark
    assert (lead.plan.assignments[1].peer == plan.assignments[1].peer) == (stages != {1})


def test_a_known_loss_is_no_doubt(crew):
    lead, first = crew.at(0), crew.at(1)
    crew.kill(crew.peer(first))
    crew.run(20.0)
    assert lead.whole
    with pytest.raises(StageLost) as lost:
        lead.receive(0.0)
    lead.doubt(lost.value)
    assert lead.whole and lead.mend(0.0) and "stages/given_up" not in lead.metrics()


def test_strangers_messages_are_refused(crew):
    lead = crew.at(0)
    stranger = crew.start("d")
    crew.run(20.0)
    assert stranger.plan is not None and stranger.planned_stages == ()
    head, _ = encode_message(StageMessage(LEADER, StageStatus(1, 5, 0.5)), "float32", stranger.plan.mark)
    crew.inject(stranger, lead, CREW_METHOD, head)
    crew.run(2.0)
    assert lead.metrics()["stages/refused/stranger"] == 1.0 and lead.whole and lead.receive(0.0) is None


def test_too_many_waiting_bytes_end_a_channel(crew, monkeypatch):
    lead, first, last = begin(crew)
    size = sum(len(part) for part in encode_message(gradient(), "float32", 1)[1])
    monkeypatch.setattr("swarm_node.pipeline.inbox.MAX_WAITING_BYTES", 3 * size)
    for _ in range(5):  # what is taken makes room
        for _ in range(3):
            last.send(gradient())
        crew.run(1.0)
        assert [first.receive(0.0) is not None for _ in range(4)] == [True] * 3 + [False]
    for _ in range(4):
        last.send(gradient())
    crew.run(1.0)
    assert len(first._inbox) == 3
    crew.run(20.0)
    assert first.metrics()["stages/refused/flood"] == 1 == lead.metrics()["stages/given_up"]


def test_peers_are_called_by_the_names_they_give(crew):
    lead = crew.at(0)
    others = crew.transports.keys() - {crew.peer(lead)}
    assert {peer: lead.name_of(peer) for peer in others} == {peer: f"name-of-{peer}" for peer in others}
    seen: list[str] = []
    crew.hear = lambda text: seen.append(lead.name_of("d") if "…d" in text else "")
    crew.start("d", wanted=1)
    crew.run(20.0)
    assert "name-of-d" in seen and lead.name_of("nobody") == ""  # from the first sentence on


def test_codec_and_limits_are_those_of_the_plan():
    peers = Peers(3)
    peers.start("a", wanted=0, settings=replace(SETTINGS, wire="int8", microbatch=2))
    peers.run(5.0)
    peers.start("b")
    peers.start("c")
    peers.run(30.0)
    assert peers.at(0).mend(0.0)
    _, first, last = begin(peers)
    sent = torch.linspace(0.01, 1.0, 8).view(1, 2, 4)
    last.send(StageMessage(1, gradient().head, (sent,)))
    peers.run(1.0)
    received = first.receive(0.0)
    assert received is not None and not torch.equal(received.tensors[0], sent)
    torch.testing.assert_close(received.tensors[0], sent, atol=1 / 127, rtol=0)  # of 127 steps from 0 to the greatest
    last.send(gradient())  # six tokens
    peers.run(1.0)
    assert first.receive(0.0) is None and first.metrics()["stages/refused/shape"] == 1


def test_held_stages_are_told_to_the_leader(crew):
    first = crew.at(1)
    first.report(Holding(live=(Kept(1, 9), Kept(2, 9)), replicas=(Kept(0, 8),)))
    crew.run(1.0)
    lead = crew.at(0)._membership.leader
    member = lead.roster.members[crew.peer(first)]
    assert member.holding == Holding(live=(Kept(1, 9),), replicas=(Kept(0, 8),))  # it never held stage 2
    assert crew.at(0).updates == 3  # as the two others say


def test_leaving_is_noticed_at_once(crew):
    lead, first = crew.at(0), crew.at(1)
    first.close()
    del crew.transports[crew.peer(first)]
    crew.run(0.5)
    with pytest.raises(StageLost):
        lead.receive(0.0)
    crew.run(10.0)
    assert lead.mend(0.0)
    assert not any(isinstance(order, (StopLeading, DropStage)) for orders in crew.orders.values() for order in orders)
    assert Source("base") in [source for orders in crew.orders.values() for o in orders for source in _ways(o)]


def _ways(order: object) -> tuple[Source, ...]:
    return order.sources if isinstance(order, BuildStage) else ()


def test_receive_wakes_up_when_a_message_comes():
    peers = Peers(1)
    lead = peers.start("a")
    peers.run(15.0)
    assert lead.mend(0.0)
    later = threading.Thread(target=lead.send, args=[StageMessage(0, StatusRequest())])
    later.start()
    assert lead.receive(60.0) == StageMessage(
        0, StatusRequest()
    )  # the virtual clock stands still: nothing but the message ends it
    later.join()


def test_events_of_many_threads_are_handled_singly():
    peers = Peers(1)
    stage_transport = peers.start("a")
    handled, inside = [], []

    def event(now: float) -> list[Action]:
        inside.append(1)
        handled.append(len(inside))
        inside.pop()
        return []

    def post_many() -> None:
        for _ in range(500):
            stage_transport._handle(event)

    threads = [threading.Thread(target=post_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handled == [1] * 2000
