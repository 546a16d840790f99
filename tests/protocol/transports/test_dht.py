"""A node of the DHT among peers that a table of canned answers stands for: no p2pd, no sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm_protocol.codec import sign_card
from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.messages import PeerCard
from swarm_protocol.topics import bucket_of
from swarm_protocol.transports.dht.messages import MAX_BUCKET_CARDS, CardRecord, encode_bucket, node_id_of
from swarm_protocol.transports.dht.records import FOUND_EACH, STORED_EACH, CardStorage, CardValidator
from swarm_protocol.transports.dht.server import (
    MAX_FINDS,
    MAX_PINGS_AND_STORES,
    MAX_REFUSED,
    CardDHT,
)
from swarm_protocol.transports.refusals import Refusals

SWARM = "ab" * 32
Find = Callable[[dht_pb2.FindRequest], dht_pb2.FindResponse]


def record(peer: Identity) -> CardRecord:
    """The card of a peer, as it lies in the DHT."""
    now = time.time()
    return peer.peer_id, msgspec.msgpack.encode(sign_card(PeerCard(1, SWARM, now, "me", []), peer)), now + 30.0


class Node:
    """One `CardDHT`, and what the peers that it calls answer to a find; those that are not there cannot be dialled."""

    def __init__(self, p2p: Any = None) -> None:
        self.identity = Identity.generate()
        self.validator = CardValidator(SWARM, 60.0)
        self.refused: Counter[str] = Counter()
        self.names: list[tuple[str, set[PeerID]]] = []
        self.dht = CardDHT(
            p2p,
            self.identity.peer_id,
            self.validator,
            CardStorage(),
            Refusals(self.refused),
            False,
            lambda namer, peers: self.names.append((namer, set(peers))),
        )
        self.answers: dict[str, Find] = {}
        self.asked = Counter[str]()
        self.dht.get_stub = self._stub

    def _stub(self, p2p: object, peer: PeerID) -> Any:
        async def find(request: dht_pb2.FindRequest, timeout: float) -> dht_pb2.FindResponse:
            self.asked[str(peer)] += 1
            if str(peer) not in self.answers:
                raise PeerUnreachable("nobody listens there")
            return self.answers[str(peer)](request)

        return SimpleNamespace(rpc_find=find)

    def meets(self, peer: Identity, answer: Find) -> PeerID:
        """`peer` answers finds from now on, and is in the routing table."""
        id = PeerID.from_base58(peer.peer_id)
        self.answers[peer.peer_id] = answer
        self.dht.neighbours.add_or_update_node(node_id_of(id), id)
        return id

    def finds(self) -> set[str]:
        return set(asyncio.run(self.dht.find_cards(self.validator.keys, 2, ())))


def answer(node: Node, *records: CardRecord, named: list[bytes]) -> Find:
    """Answers each find with these cards, and with these names for each key."""

    def find(request: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
        response = dht_pb2.FindResponse()
        for key in request.keys:
            here = [r for r in records if node.validator.keys[bucket_of(r[0])] == key]
            result = response.results.add(type=dht_pb2.FOUND_DICTIONARY if here else dht_pb2.NOT_FOUND)
            result.value = encode_bucket(here) if here else b""
            result.nearest_peer_ids.extend(named)
            result.nearest_node_ids.extend(node_id_of(PeerID(id)).to_bytes() if len(id) < 99 else b"" for id in named)
        return response

    return find


def store(records: list[CardRecord], key: bytes) -> dht_pb2.StoreRequest:
    """A bucket for another node to keep."""
    return dht_pb2.StoreRequest(
        keys=[key], subkeys=[b""], values=[encode_bucket(records)], expiration_time=[0.0], in_cache=[False]
    )


def own_card(node: Node, peer: Identity) -> dht_pb2.StoreRequest:
    """A peer's own card for another node to keep."""
    name, value, expiration = record(peer)
    return dht_pb2.StoreRequest(
        keys=[node.validator.keys[bucket_of(name)]],
        subkeys=[msgspec.msgpack.encode(name)],
        values=[value],
        expiration_time=[expiration],
        in_cache=[False],
    )


def test_few_cards_of_one_message_are_looked_at() -> None:
    node = Node()
    caller = SimpleNamespace(remote_id=PeerID.from_base58(Identity.generate().peer_id))
    false = [(f"peer{i}", msgspec.msgpack.encode(bytes(100)), time.time()) for i in range(1000)]
    answered = asyncio.run(node.dht.rpc_store(store(false, node.validator.keys[0]), caller))
    assert list(answered.store_ok) == [False] and node.refused.total() == STORED_EACH


@pytest.mark.parametrize(
    ("call", "request_of", "most"),
    [
        ("rpc_find", lambda node, peer: dht_pb2.FindRequest(keys=node.validator.keys[:1]), MAX_FINDS),
        ("rpc_store", lambda node, peer: own_card(node, peer), MAX_PINGS_AND_STORES // 2),
        ("rpc_store", lambda node, peer: store([record(peer)] * 9, node.validator.keys[0]), MAX_PINGS_AND_STORES // 10),
        ("rpc_ping", lambda node, peer: dht_pb2.PingRequest(), MAX_PINGS_AND_STORES),
    ],
)
def test_endless_calls_are_answered_so_often(call: str, request_of: Any, most: int) -> None:
    node, peer = Node(), Identity.generate()
    caller = SimpleNamespace(remote_id=PeerID.from_base58(peer.peer_id))
    request, answered = request_of(node, peer), 0

    async def ask(times: int) -> None:
        nonlocal answered
        for _ in range(times):
            await getattr(node.dht, call)(request, caller)
            answered += 1

    asyncio.run(ask(most // 2))
    assert not node.refused["rate"]
    with pytest.raises(RemoteProtocolError, match="rate"):
        asyncio.run(ask(100_000))
    assert node.refused["rate"] == 1 and answered >= most
    other = SimpleNamespace(remote_id=PeerID.from_base58(Identity.generate().peer_id))
    asyncio.run(getattr(node.dht, call)(request, other))


def test_peers_that_go_on_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)  # else a slow machine's peers earn new calls meanwhile
    caller = SimpleNamespace(remote_id=PeerID.from_base58(Identity.generate().peer_id))
    ended: list[PeerID] = []

    async def disconnect(peer: PeerID) -> None:
        ended.append(peer)

    node = Node(SimpleNamespace(_client=SimpleNamespace(disconnect=disconnect)))

    async def ping(times: int) -> None:
        for _ in range(times):
            with suppress(RemoteProtocolError):
                await node.dht.rpc_ping(dht_pb2.PingRequest(), caller)
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    asyncio.run(ping(MAX_PINGS_AND_STORES + MAX_REFUSED // 2))
    assert ended == [] and node.refused["rate"]
    asyncio.run(ping(MAX_PINGS_AND_STORES + MAX_REFUSED))
    assert ended == [caller.remote_id]
    asyncio.run(ping(1))
    assert ended == [caller.remote_id] * 2  # it has come back


def test_a_name_counts_once_in_a_message() -> None:
    node, bob = Node(), Identity.generate()
    card = record(bob)
    node.meets(bob, answer(node, *[card] * 50, named=[]))
    assert node.finds() == {bob.peer_id} and node.refused == {"schema": 49}


@pytest.mark.parametrize("way", ["answers", "stores"])
def test_a_connection_brings_few_cards_of_others(way: str) -> None:
    node, bob, others = Node(), Identity.generate(), [Identity.generate(), Identity.generate()]
    cards, caller = [*map(record, [*others, bob])], SimpleNamespace(remote_id=PeerID.from_base58(bob.peer_id))
    account, most = {
        "answers": (node.validator.found, FOUND_EACH),
        "stores": (node.validator.stored, STORED_EACH),
    }[way]
    for i in range(most - 1):
        assert account.admits(f"peer {i}", bob.peer_id, time.time() + 30.0, time.time())

    def taken() -> set[str]:
        if way == "answers":
            node.meets(bob, answer(node, *cards, named=[]))
            return node.finds()
        for card in cards:
            asyncio.run(node.dht.rpc_store(store([card], node.validator.keys[bucket_of(card[0])]), caller))
        held = [node.dht.storage.records(key, time.time()) for key in node.validator.keys]
        return {peer for records in held for peer, _, _ in records}

    some = taken()
    assert bob.peer_id in some and len(some) == 2  # its own card, and the last one that it may bring
    assert node.refused == {"newcomers": 1} and node.validator.open.cache_info().misses == 2  # signatures checked
    node.dht.forget_cards()
    assert len(node.dht.storage) == 0 and len(taken()) == 3


def test_own_cards_find_room_in_full_buckets() -> None:
    node, bob, carol = Node(), Identity.generate(), Identity.generate()
    caller = SimpleNamespace(remote_id=PeerID.from_base58(bob.peer_id))
    for peer, is_kept in ((carol, False), (bob, True)):
        key = node.validator.keys[bucket_of(peer.peer_id)]
        for i in range(MAX_BUCKET_CARDS):
            node.dht.storage.store(key, f"peer {i}", b"", time.time() + 30.0, time.time(), is_own=False)
        answered = asyncio.run(node.dht.rpc_store(store([record(peer)], key), caller))
        assert list(answered.store_ok) == [is_kept]


def test_a_name_of_nobody_ends_no_lookup() -> None:
    node, bob, nobody = Node(), Identity.generate(), PeerID.from_base58(Identity.generate().peer_id)
    node.meets(bob, answer(node, record(bob), named=[nobody.to_bytes()]))
    assert node.finds() == {bob.peer_id}
    assert node.names == [(bob.peer_id, {nobody})]
    assert node.finds() == {bob.peer_id} and node.asked[str(nobody)] == 1  # avoided from then on


@pytest.mark.parametrize("id", [b"", bytes(65), bytes(2**20)])
def test_no_name_of_a_wrong_length_is_remembered(id: bytes) -> None:
    node, bob = Node(), Identity.generate()
    node.meets(bob, answer(node, named=[id] * 20))
    assert node.finds() == set() and node.names == [(bob.peer_id, set())]
    assert node.refused == {"node_id": 20 * len(node.validator.keys)}
