"""The manifest from members that are honest, lie, start up, or are in another swarm; who is there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from swarm_node.errors import UserError
from swarm_node.swarm import lookup
from swarm_node.swarm.links import find_swarm
from swarm_node.swarm.lookup import fetch_manifest, look_around
from swarm_node.swarm.manifests import render
from swarm_protocol.codec import sign_card
from swarm_protocol.errors import NotOfSwarm, PeerUnreachable, RemoteProtocolError
from swarm_protocol.first_cards import CARDS_METHOD, MAX_FIRST_BYTES, MAX_FIRST_CARDS, write_cards
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import MANIFEST_METHOD, Manifest
from swarm_protocol.messages import PeerCard
from swarm_protocol.transports.base import Server
from tests.support.fake_transport import FakeTransport, address, card, peer_id
from tests.support.manifests import PLAIN


def test_any_member_may_give_the_right_manifest() -> None:
    def forged(caller: str, payload: bytes) -> bytes:
        return render(Manifest(name="other", tasks=PLAIN.tasks))

    def garbage(caller: str, payload: bytes) -> bytes:
        return b"\xff"

    def refusal(caller: str, payload: bytes) -> bytes:
        raise RemoteProtocolError("busy")

    servers: list[Server] = [forged, garbage, refusal]
    others = {peer_id(2 + i): {MANIFEST_METHOD: server} for i, server in enumerate(servers)}
    transport = FakeTransport(others)
    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}")
    with pytest.raises(PeerUnreachable, match="none of 4 members gives the manifest"):
        fetch_manifest(transport, swarm, lambda sentence: None, wait_s=0.05)
    assert all(transport.asked[peer, MANIFEST_METHOD] for peer in (*others, peer_id(1)))
    transport.others = {**others, peer_id(1): {MANIFEST_METHOD: lambda caller, payload: render(PLAIN)}}
    manifest = fetch_manifest(transport, swarm, lambda sentence: None)
    assert manifest.swarm_id == PLAIN.swarm_id
    assert manifest.bootstrap == [address(1)]


def signed(number: int, swarm: str = PLAIN.swarm_id) -> bytes:
    return sign_card(replace(card(), swarm=swarm), Identity.generate(bytes([number] * 32)))


@pytest.mark.parametrize(
    ("answer", "known"),
    [
        (write_cards([signed(2), signed(3)]), {2, 3}),
        (write_cards([signed(2), signed(3)[:-1] + b"\0", signed(4, "ab" * 32), b""]), {2}),
        (write_cards([signed(i) for i in range(2, 3 + MAX_FIRST_CARDS)]), set()),
        (bytes(MAX_FIRST_BYTES + 1), set()),
        (b"\xff", set()),
        (None, set()),  # a member of an earlier version
    ],
)
def test_cards_come_with_the_manifest(answer: bytes | None, known: set[int]) -> None:
    serves: dict[str, Server] = {MANIFEST_METHOD: lambda caller, payload: render(PLAIN)}
    if answer is not None:
        serves[CARDS_METHOD] = lambda caller, payload: answer
    transport, met = FakeTransport({peer_id(1): serves}), dict[str, PeerCard]()
    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}")
    assert fetch_manifest(transport, swarm, lambda sentence: None, met=met).swarm_id == PLAIN.swarm_id
    assert met.keys() == {peer_id(number) for number in known}
    fetch_manifest(transport, swarm, lambda sentence: None)
    assert transport.asked[peer_id(1), CARDS_METHOD] == 1  # only who joins needs them


@pytest.mark.usefixtures("clock")
def test_waiting_for_the_manifest_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "FIRST_REPORT_S", 0.0)
    said: list[str] = []
    with pytest.raises(PeerUnreachable):
        fetch_manifest(FakeTransport(), find_swarm(f"swarm://{PLAIN.swarm_id}"), said.append, wait_s=0.05)
    assert "still trying" in said[0]
    link = f"swarm://{PLAIN.swarm_id}?peer={address(1)}"
    with pytest.raises(PeerUnreachable, match=f"nobody answers at {address(1)}"):
        fetch_manifest(FakeTransport(), find_swarm(link), said.append, wait_s=0.05)
    assert f"nobody answers at {address(1)}" in said[-1] and f"`swarm-node doctor '{link}'`" in said[-1]


@pytest.mark.usefixtures("clock")
def test_a_link_of_another_swarm_ends() -> None:
    said: list[str] = []
    other = Manifest(name="other", tasks=PLAIN.tasks)
    server: dict[str, Server] = {MANIFEST_METHOD: lambda caller, payload: render(other)}
    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}&peer={address(2)}")
    transport = FakeTransport({peer_id(1): server, peer_id(2): server})
    with pytest.raises(UserError, match=f"its peers are in swarm {other.swarm_id[:16]}"):
        fetch_manifest(transport, swarm, lambda sentence: None)
    transport.others = {peer_id(1): server}  # the other one may come back meanwhile
    with pytest.raises(UserError, match="its peers are in swarm"):
        fetch_manifest(transport, swarm, said.append)
    assert transport.asked[peer_id(2), MANIFEST_METHOD] > 2
    assert said == [
        f"a peer answers, but not as a member of swarm {swarm.id[:16]}: asking for {said[0].split()[-3]} s more"
    ]


@pytest.mark.usefixtures("clock")
def test_peers_without_this_swarms_protocol_end_it() -> None:
    asked = 0

    def starting(caller: str, payload: bytes) -> bytes:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise NotOfSwarm("not yet")
        return render(PLAIN)

    def elsewhere(caller: str, payload: bytes) -> bytes:
        raise NotOfSwarm("elsewhere")

    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}")
    begun = FakeTransport({peer_id(1): {MANIFEST_METHOD: starting}})
    assert fetch_manifest(begun, swarm, lambda sentence: None).swarm_id == PLAIN.swarm_id
    with pytest.raises(UserError, match=f"the link is of swarm {PLAIN.swarm_id[:16]}, but its peers are not in it"):
        fetch_manifest(FakeTransport({peer_id(1): {MANIFEST_METHOD: elsewhere}}), swarm, lambda sentence: None)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("reply", [b"\xff", None])
def test_one_peer_of_another_swarm_ends_nothing(reply: bytes | None) -> None:
    """While somebody else may have the right one, be it now busy or damaged."""

    def other(caller: str, payload: bytes) -> bytes:
        return render(Manifest(name="other", tasks=PLAIN.tasks))

    def unwell(caller: str, payload: bytes) -> bytes:
        if reply is None:
            raise RemoteProtocolError("busy")
        return reply

    others: dict[str, dict[str, Server]] = {
        peer_id(1): {MANIFEST_METHOD: other},
        peer_id(2): {MANIFEST_METHOD: unwell},
    }
    swarm = find_swarm(f"swarm://{PLAIN.swarm_id}?peer={address(1)}&peer={address(2)}")
    with pytest.raises(PeerUnreachable):
        fetch_manifest(FakeTransport(others), swarm, lambda sentence: None, wait_s=100.0)


def test_looking_around_ends_when_nobody_new_turns_up() -> None:
    now, ticks = [0.0], [0]
    transport = FakeTransport()

    def clock() -> float:
        now[0] += 0.1
        ticks[0] += 1
        if ticks[0] in (20, 40):
            transport.cards = {**transport.cards, peer_id(ticks[0]): card()}
        return now[0]

    assert set(look_around(transport, look_s=60.0, clock=clock, tick_s=0.0)) == {peer_id(20), peer_id(40)}
    assert 5.0 < now[0] < 20.0
    assert look_around(FakeTransport(), look_s=5.0, clock=clock, tick_s=0.0) == {}
