"""Scenarios of floods of cards, and of what p2pd does for strangers, with real p2pd processes, for
test_hivemind_plane.py, as plane_scenarios.py has others."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PDaemonError
from hivemind.proto import dht_pb2
from plane_scenarios import fails, main, same, started, until

from benchmarks.attacks.hostile import call, dht_peer
from swarm_protocol.codec import sign_card
from swarm_protocol.first_cards import CARDS_METHOD, MAX_FIRST_BYTES, read_cards
from swarm_protocol.identity import Identity
from swarm_protocol.limits import MEMBERSHIP_BUCKETS
from swarm_protocol.messages import PeerCard
from swarm_protocol.topics import bucket_of, membership_key
from swarm_protocol.transports.dht.messages import MAX_BUCKET_CARDS
from swarm_protocol.transports.dht.records import FOUND_EACH, STORED_EACH, CardStorage
from swarm_protocol.transports.p2p import daemon as p2p_daemon
from swarm_protocol.transports.p2p.transport import P2PTransport
from swarm_protocol.transports.settings import NetworkSettings
from tests.support.planes import EVERYWHERE, SWARM, TTL_S


async def an_unconnected_member_is_reached_by_its_card() -> None:
    async with started("hub", "one", "two") as (hub, one, two):
        for node in (hub, two):
            await node.plane.store_card(node.card())
        two.serve("hello", lambda caller, payload: b"hello " + payload)
        await until(lambda: same(one.names(), {"hub", "two"}))
        assert await one.ask(two, "hello", b"one") == b"hello one"
        assert two.id in await one.plane.connections.connected()


async def members_cards_are_given_to_a_visitor() -> None:
    async with started("hub", "one", "two") as (hub, one, two), started("visitor", dial_only=True) as (visitor,):
        for node in (one, two):
            await node.plane.store_card(node.card(gossip=["/ip4/127.0.0.1/tcp/1"], gossip_id="g"))
        await visitor.plane.connect(hub.id, hub.plane.addresses)
        cards = read_cards(await visitor.ask(hub, CARDS_METHOD, limit=MAX_FIRST_BYTES), SWARM)
        assert {card.name for card in cards.values()} == {"one", "two"} and cards.keys() == {one.id, two.id}
        assert all(card.addresses and card.gossip_id == "g" for card in cards.values())


async def cards_of_connected_peers_are_given_first() -> None:
    storage, key, now = CardStorage(), b"key", time.time()
    storage.connected = {"friend", "old", "another"}
    for i in range(100):
        storage.store(key, f"p{i}", msgspec.msgpack.encode(b"p%d" % i), now + 50, now, False)
    for peer, left in (("friend", 50), ("old", 5), ("another", 50)):
        storage.store(key, peer, msgspec.msgpack.encode(peer.encode()), now + left, now, False)
    given = [set(storage.some(8, now + 10)) for _ in range(20)]
    assert all({b"friend", b"another"} <= some and b"old" not in some and len(some) == 8 for some in given)
    assert len(set().union(*given)) > 50  # others are drawn anew each time
    assert CardStorage().some(8, now) == []


async def p2pd_keeps_nothing_for_strangers() -> None:
    async with started("one") as (one,), dht_peer(one.plane.addresses[0]) as (p2p, victim):
        for protocol in ("/ipfs/kad/1.0.0", "/swarm-node/kad/1.0.0", "/libp2p/autonat/1.0.0"):
            failure = await fails(p2p.call_binary_stream_handler(victim, protocol), P2PDaemonError)
            assert "protocols not supported" in str(failure)


async def a_grown_p2pd_is_replaced_on_its_port() -> None:
    async with started("one", "two") as (one, two):
        port, before = one.plane.daemon.port_number, one.plane.daemon.pid
        limit, p2p_daemon.MAX_P2PD_RSS = p2p_daemon.MAX_P2PD_RSS, 2**20
        pause, p2p_daemon.P2PD_MEMORY_CHECK_S = p2p_daemon.P2PD_MEMORY_CHECK_S, 0.1
        try:
            one.plane.daemon.p2pd._child.kill()  # the next one is looked at sooner
            await until(lambda: any("grown" in sentence for sentence in one.said))
            p2p_daemon.MAX_P2PD_RSS = limit
            await until(lambda: one.plane.daemon.pid not in (None, before) and one.plane._dht is not None)
        finally:
            p2p_daemon.MAX_P2PD_RSS, p2p_daemon.P2PD_MEMORY_CHECK_S = limit, pause
        assert one.plane.daemon.port_number == port and one.plane.daemon.restarts >= 1
        assert sum("had grown to" in sentence for sentence in one.said) <= one.plane.daemon.restarts
        two.plane.connections.dials.give(one.plane.addresses[0])

        async def back() -> bool:
            await two.plane.connect(one.id, one.plane.addresses)
            return True

        await until(back)


async def a_full_bucket_keeps_connected_peers() -> None:
    own: set[str] = {"friend", "late"} | {f"p{i}" for i in range(2000)}
    storage, key, now = CardStorage(), b"key", time.time()
    storage.connected = {"friend"}

    def store(peer: str) -> bool:
        return storage.store(key, peer, b"card", now + 50, now, peer in own)

    def held() -> set[str]:
        return {peer for peer, _, _ in storage.records(key, now)}

    assert store("friend")
    assert sum(store(f"x{i}") for i in range(2000)) == MAX_BUCKET_CARDS - 1
    assert store("late")
    for i in range(MAX_BUCKET_CARDS - 2):  # cards that others brought go before those of their own peers
        assert store(f"p{i}")
    assert held() == {"friend", "late"} | {f"p{i}" for i in range(MAX_BUCKET_CARDS - 2)}
    for i in range(MAX_BUCKET_CARDS, 2000):
        assert store(f"p{i}")
    assert "friend" in held() and len(held()) == MAX_BUCKET_CARDS


async def one_connection_stores_few_cards_of_others() -> None:
    async with started("one", "two") as (one, two), dht_peer(one.plane.addresses[0]) as (p2p, victim):
        crowd = [Identity.generate() for _ in range(STORED_EACH + 100)]
        for _ in range(2):  # renewals are free, and gain nothing
            cards = [(peer, PeerCard(1, SWARM, time.time(), "x", [])) for peer in crowd]
            assert await stored(p2p, victim, cards) == STORED_EACH
        assert one.plane.traffic.rejected["newcomers"] == 200
        await two.plane.store_card(two.card())  # its own
        assert "two" in await one.names()
        assert (await two.plane.get_cards(EVERYWHERE)).keys() >= {two.id}


async def one_answer_makes_few_cards_of_others_known() -> None:
    async with started("one", "liar") as (one, liar):
        crowd = [Identity.generate() for _ in range(FOUND_EACH + 200)]
        for peer in crowd:  # as if it had taken them in
            sealed = msgspec.msgpack.encode(sign_card(PeerCard(1, SWARM, time.time(), "x", []), peer))
            key = one.plane.validator.keys[bucket_of(peer.peer_id)]
            assert liar.plane._storage.store(key, peer.peer_id, sealed, time.time() + TTL_S - 1, time.time(), True)
        await liar.plane.store_card(liar.card())
        await until(lambda: same(_count(one.plane.get_cards(EVERYWHERE)), FOUND_EACH + 1))  # and its own
        assert one.plane.traffic.rejected["newcomers"] >= 200


async def a_named_bystander_is_dialled_few_times() -> None:
    dialled: list[bool] = []

    async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(True)
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        quick = NetworkSettings(listen="127.0.0.1", port=0, gossip_port=0, relay=False, lookup_s=0.5)
        victim = P2PTransport(Path(folder) / "victim.key", SWARM, quick)
        bystander = await asyncio.start_server(noted, "127.0.0.1", 0)
        try:
            place = f"/ip4/127.0.0.1/tcp/{bystander.sockets[0].getsockname()[1]}/p2p/"
            address = (await until(lambda: victim.addresses))[0]
            async with dht_peer(address) as (p2p, to):
                for _ in range(2):  # with new keys each time
                    crowd = [Identity.generate() for _ in range(12)]  # few, so that lookups are frequent
                    cards = [
                        PeerCard(1, SWARM, time.time(), "x", [], [place + id], [place + id], id)
                        for id in (peer.peer_id for peer in crowd)
                    ]
                    await stored(p2p, to, [*zip(crowd, cards, strict=True)])
                    ids = {peer.peer_id for peer in crowd}
                    await until(lambda ids=ids: ids <= victim.members().keys())
                await until(lambda: dialled)
                rounds = victim._membership._next_bucket
                await until(lambda: victim._membership._next_bucket >= rounds + 2 * 16)  # with time to dial between
            assert 1 <= len(dialled) <= 3  # one knock, one dial, or one of the gossip process
        finally:
            await asyncio.to_thread(victim.close)
            bystander.close()


async def _count(found: Awaitable[Any]) -> int:
    return len(await found)


async def stored(p2p: Any, to: Any, cards: Sequence[tuple[Identity, PeerCard]]) -> int:
    """How many of these cards a peer took, as many in a request as one may have."""
    taken = 0
    for start in range(0, len(cards), MEMBERSHIP_BUCKETS):
        request = store_request(cards[start : start + MEMBERSHIP_BUCKETS])
        taken += sum((await call(p2p, to, "rpc_store", request, dht_pb2.StoreResponse)).store_ok)
    return taken


def store_request(cards: Sequence[tuple[Identity, PeerCard]]) -> Any:
    """A request to store cards, whoever sends it."""
    request = dht_pb2.StoreRequest()
    for peer, card in cards:
        request.keys.append(DHTID.generate(membership_key(SWARM, bucket_of(peer.peer_id))).to_bytes())
        request.subkeys.append(msgspec.msgpack.encode(peer.peer_id))
        request.values.append(msgspec.msgpack.encode(sign_card(card, peer)))
        request.expiration_time.append(card.created + TTL_S - 1)
        request.in_cache.append(False)
    return request


if __name__ == "__main__":
    main(globals())
