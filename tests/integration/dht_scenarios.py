"""Scenarios of the DHT with real p2pd processes and peers that keep no rules, for test_hivemind_plane.py, as
plane_scenarios.py has others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import math
import os
import struct
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr
from plane_scenarios import main, same, started, until

from benchmarks.attacks.hostile import EXT_DICTIONARY, EXT_TUPLE, call, dht_peer, memory_mib, nested_ext
from swarm_protocol.codec import sign_card
from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.introductions import Introductions
from swarm_protocol.limits import MAX_CARD_BYTES
from swarm_protocol.messages import PeerCard
from swarm_protocol.topics import bucket_of, membership_key
from swarm_protocol.transports.dht.neighbours import Neighbours
from swarm_protocol.transports.dht.records import CardStorage, CardValidator
from swarm_protocol.transports.refusals import Refusals
from tests.support.planes import EVERYWHERE, HANG_S, SWARM, TTL_S, Node

KEYS = [DHTID.generate(membership_key(SWARM, bucket)) for bucket in EVERYWHERE]
pack = msgspec.msgpack.encode


# -------------------------------------------------------------------- what may lie in the DHT


def _record(card: bytes, peer: str, expiration: float, bucket: int | None = None) -> tuple[Any, ...]:
    return KEYS[bucket_of(peer) if bucket is None else bucket].to_bytes(), pack(peer), pack(card), expiration


def _sealed(peer: Identity, **changes: Any) -> bytes:
    return sign_card(msgspec.structs.replace(PeerCard(1, SWARM, time.time(), "me", []), **changes), peer)


def _refusal(validator: CardValidator, record: tuple[Any, ...]) -> str:
    try:
        validator.check(*record, Introductions(1, 1), "somebody")
    except RemoteProtocolError as error:
        return error.reason
    return ""


async def only_cards_are_valid() -> None:
    validator = CardValidator(SWARM, 60.0)
    peer, other, now = Identity.generate(), Identity.generate(), time.time()
    sealed = _sealed(peer, created=now)
    key, subkey, value, expiration = good = _record(sealed, peer.peer_id, now + 60.0)
    by = Introductions(1, 1), peer.peer_id
    assert validator.check(*good, *by) == peer.peer_id
    assert validator.check(key, peer.peer_id, value, expiration, *by) == peer.peer_id
    forged = bytearray(sealed)
    forged[-1] ^= 1
    oldest, ahead, far = (_sealed(peer, created=now + ahead) for ahead in (-50, 500, 1e6))
    bad = {
        "signature": [_record(bytes(forged), peer.peer_id, now + 60)],
        "swarm": [_record(_sealed(peer, swarm="cd" * 32), peer.peer_id, now + 60)],
        "newer": [_record(_sealed(peer, protocol=7), peer.peer_id, now + 60)],
        "size": [
            _record(b"x" * (MAX_CARD_BYTES + 1), peer.peer_id, now + 60),
            (key, subkey, value * 100, now),
            (key, subkey * 100, value, now),
        ],
        "schema": [
            (key, subkey, sealed, now),
            (key, subkey, value + b"\0", now),
            (key, b"\xc0", value, now),  # a value without subkey
            (key, b"", value, now),
            (key, pack(peer.peer_id.encode()), value, now),
        ],
        "key": [(b"k" * 20, subkey, value, now), (b"", b"", b"", now)],
        "peer": [
            _record(sealed, other.peer_id, now + 60, bucket_of(other.peer_id)),
            _record(sealed, peer.peer_id, now + 60, (bucket_of(peer.peer_id) + 1) % 16),
        ],
        "expiration": [
            _record(sealed, peer.peer_id, expiration) for expiration in (now + 61, now + 1e9, math.inf, math.nan)
        ]
        + [
            _record(oldest, peer.peer_id, now + 60),
            _record(ahead, peer.peer_id, now + 560),
            _record(far, peer.peer_id, now + 60),
            _record(bytes(forged), peer.peer_id, now + 1e6),  # no signature is looked at for that
            _record(bytes(forged), peer.peer_id, now - 1e6),
        ],
    }
    for reason, records in bad.items():
        for record in records:
            assert _refusal(validator, record) == reason, (reason, record)
    assert validator.made == {peer.peer_id: now + 500}, validator.made  # signed: it is early, or we are late


async def storage_is_bounded_and_keeps_the_newest() -> None:
    storage, key, now = CardStorage(), b"key", time.time()
    assert storage.store(key, "a", b"new", now + 50, now, False)
    assert not storage.store(key, "a", b"old", now + 0.05, now, False)
    assert not storage.store(key, "b", b"gone", now, now, False)
    assert [value for _, value, _ in storage.records(key, now + 49)] == [b"new"]
    assert sum(storage.store(key, f"p{i}", b"card", now + 60, now, False) for i in range(2000)) == 1499
    assert storage.store(key, "a", b"newer", now + 51, now, False)
    assert not storage.store(key, "late", b"card", now + 100, now + 50.5, False)
    assert storage.store(key, "late", b"card", now + 100, now + 51.5, False)  # the first has run out
    assert storage.records(key, now + 200) == [] and len(storage) == 0


async def a_bucket_is_read_as_it_was_written() -> None:
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.serializer import MSGPackSerializer

    from swarm_protocol.transports.dht.messages import MAX_BUCKET_CARDS, decode_bucket, encode_bucket, shares

    records = [("a", b"x" * 2048, 5e9), ("b", b"", 6e9)]
    assert decode_bucket(encode_bucket(records)) == records and decode_bucket(encode_bucket([])) == []
    theirs: Any = DictionaryDHTValue()
    with theirs.freeze():
        for name, value, expiration in records:
            theirs.store(name, value, expiration)
    assert decode_bucket(MSGPackSerializer.dumps(theirs)) == records  # older nodes write so
    assert dict(MSGPackSerializer.loads(encode_bucket(records)).data) == theirs.data  # and read so
    for bad in [*SHAPES.values(), encode_bucket([(str(i), b"", 1.0) for i in range(MAX_BUCKET_CARDS + 1)])]:
        try:
            decode_bucket(bad)
        except RemoteProtocolError as error:
            assert error.reason == "schema"
        else:
            raise AssertionError(bad[:40])
    assert shares([10, 1000, 0, 400], 1000) == [10, 590, 0, 400] and shares([9, 9], 5) == [2, 3]


# -------------------------------------------------------------------- hostile peers


def _ext(code: int, content: bytes, length: int | None = None) -> bytes:
    return b"\xc9" + struct.pack(">Ib", len(content) if length is None else length, code) + content


def _bucket(*items: Any, maximum: bytes = b"\xc0") -> bytes:
    return _ext(EXT_DICTIONARY, b"\x93" + maximum + pack(1.0) + pack(list(items)))


SHAPES = {
    f"{depth} extensions {code:#x}": nested_ext(depth, code)
    for depth in (250, 2000)
    for code in (EXT_TUPLE, EXT_DICTIONARY, 0x51, 7)
}
SHAPES |= {
    f"extensions {code:#x} in a bucket": _ext(EXT_DICTIONARY, b"\x93" + nested_ext(2000, code) + b"\0\x90")
    for code in (EXT_TUPLE, EXT_DICTIONARY)
}
SHAPES |= {
    "arrays": b"\x91" * 100_000,
    "maps": b"\x81" * 100_000,
    "arrays in a bucket": _ext(EXT_DICTIONARY, b"\x91" * 100_000),
    "maps in a bucket": _bucket(maximum=b"\x81" * 100_000),
    "a long array": b"\xdd\xff\xff\xff\xff",
    "a long array in a bucket": _ext(EXT_DICTIONARY, b"\xdd\xff\xff\xff\xff"),
    "long bytes": b"\xc6\xff\xff\xff\xff",
    "an extension that lies short": _ext(EXT_DICTIONARY, b"\x93\xc0\0\x90", 2),
    "an extension that lies long": _ext(EXT_DICTIONARY, b"\x93\xc0\0\x90", 2**31),
    "nothing": b"",
    "names that are numbers": _bucket((7, b"", 1.0)),
    "values that are no bytes": _bucket(("a", {"b": []}, 1.0)),
    "a long name": _bucket(("a" * 100_000, b"", 1.0)),
    "a timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
}


GARBAGE = [
    b"",
    b"\xff" * 1000,
    b"\x0b" * 100_000,  # groups inside groups
    b"\x0a\x80" * 50_000,
    b"\x12\xff\xff\xff\xff\x07",  # a length that lies
    b"\x0a\x06\x0a\x04\x0a\x02\x0a\x00" * 10_000,
    bytes(range(256)) * 100,
]
"""Bytes that are no protobuf, or none of these messages."""


class Evil:
    """A DHT server that answers finds with whatever `value` is at the moment, and takes all cards."""

    def __init__(self, p2p: Any, address: str) -> None:
        self.p2p, self.id, self.address = p2p, str(p2p.peer_id), address
        self.info = dht_pb2.NodeInfo(node_id=DHTID.generate(self.id).to_bytes())
        self.answer: Callable[[bytes], Any] = lambda key: dht_pb2.FindResult()
        self.asked = Counter[str]()

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: Any) -> Any:
        return dht_pb2.PingResponse(peer=self.info, dht_time=time.time(), available=True)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: Any) -> Any:
        self.asked["store"] += 1
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: Any) -> Any:
        self.asked["find"] += 1
        return dht_pb2.FindResponse(results=[self.answer(key) for key in request.keys], peer=self.info)

    async def connect(self, node: Node) -> PeerID:
        to = PeerID.from_base58(node.id)
        await self.p2p._client.connect(to, [Multiaddr(node.plane.addresses[0].rpartition("/p2p/")[0])])
        return to

    async def ping(self, to: PeerID, node_id: bytes | None = None) -> None:
        info = self.info if node_id is None else dht_pb2.NodeInfo(node_id=node_id)
        await call(self.p2p, to, "rpc_ping", dht_pb2.PingRequest(peer=info), dht_pb2.PingResponse)


@contextlib.asynccontextmanager
async def evil(identity: str | None = None) -> AsyncIterator[Evil]:
    async with dht_peer(server=True, identity=identity) as (p2p, _):
        one = Evil(p2p, str((await p2p.get_visible_maddrs())[0]))
        for name, handler, kind in (
            ("ping", one.rpc_ping, dht_pb2.PingRequest),
            ("store", one.rpc_store, dht_pb2.StoreRequest),
            ("find", one.rpc_find, dht_pb2.FindRequest),
        ):
            await p2p.add_protobuf_handler(f"DHTProtocol.rpc_{name}", handler, kind)
        yield one


async def _says(data: bytes, request: bytes, peer: PeerID) -> bytes:
    return data


def _store(*items: tuple[bytes, bytes, bytes], expiration: float | None = None) -> Any:
    keys, subkeys, values = zip(*items, strict=True)
    until = time.time() + TTL_S / 2 if expiration is None else expiration
    return dht_pb2.StoreRequest(
        keys=keys, subkeys=subkeys, values=values, expiration_time=[until] * len(keys), in_cache=[False] * len(keys)
    )


async def _is_refused(asking: Any) -> bool:
    try:
        answer = await asking
    except P2PHandlerError:
        return True
    return not any(answer.store_ok)


async def hostile_stores_end_nothing() -> None:
    async with started("one") as (one,), evil() as peer:
        await one.plane.store_card(one.card())
        to = await peer.connect(one)
        mine = KEYS[bucket_of(one.id)].to_bytes()
        stolen = pack(sign_card(one.card(), Identity.generate()))
        requests: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            requests[f"{name} as a bucket"] = _store((mine, b"", shape))
            requests[f"{name} under another key"] = _store((bytes(20), b"", shape))
            requests[f"{name} as a card"] = _store((mine, pack(one.id), shape))
            if shape:
                requests[f"{name} as a name"] = _store((mine, shape[:4000], stolen))
            requests[f"{name} as a card in a bucket"] = _store((mine, b"", _bucket((one.id, shape, 1.0))))
        requests |= {
            "the key of nothing": _store((bytes(20), b"", _bucket())),
            "another's name": _store((mine, pack(one.id), stolen)),
            "no name": _store((mine, b"\xc0", stolen), expiration=time.time() + 1e9),
            "without end": _store((mine, pack(one.id), stolen), expiration=math.inf),
            "many keys": _store(*[(mine, pack(str(i)), stolen) for i in range(17)]),
            "lists that do not match": dht_pb2.StoreRequest(keys=[mine], values=[stolen, stolen]),
            "a long key": _store((bytes(10_000), pack(one.id), stolen)),
        }
        for name, request in requests.items():
            refused = call(peer.p2p, to, "rpc_store", request, dht_pb2.StoreResponse)
            assert await _is_refused(refused), name
        for data in GARBAGE:
            for method in ("ping", "store", "find"):
                raw = peer.p2p._client.call_unary_handler(to, f"DHTProtocol.rpc_{method}", data)
                with contextlib.suppress(P2PHandlerError):
                    await asyncio.wait_for(raw, 20.0)
        assert await one.names() == {"one"} and len(one.plane._storage) == 1
        assert one.plane.refusals.by_source().keys() == {peer.id}
        assert one.plane.refusals.by_source()[peer.id].reasons.keys() >= {"schema", "store", "peer", "size", "key"}
        assert not one.plane.daemon.p2pd._client.control._handler_tasks


async def hostile_answers_end_no_lookup() -> None:
    """Each value, and each name of a peer, in an answer to a find: of a peer that was dialled, and of one heard of."""
    async with started("one", "two") as (one, two), evil() as peer:
        for node in (one, two):
            await node.plane.store_card(node.card())
        for node in (one, two):
            await until(lambda node=node: same(node.names(), {"one", "two"}))
        await one.plane.connect(peer.id, [peer.address])
        await peer.ping(await peer.connect(two))

        def value(shape: bytes, kind: int = 2) -> Callable[[bytes], Any]:
            return lambda key: dht_pb2.FindResult(type=kind, value=shape, expiration_time=math.inf)

        def near(node_id: bytes, peer_id: bytes, count: int = 1) -> Callable[[bytes], Any]:
            ids = dict(nearest_node_ids=[node_id] * count, nearest_peer_ids=[peer_id] * count)
            return lambda key: dht_pb2.FindResult(**ids)

        answers = {name: value(shape) for name, shape in SHAPES.items()}
        answers |= {f"{name}, no bucket": value(shape, 1) for name, shape in SHAPES.items()}
        answers |= {
            "a card that is none": value(_bucket((one.id, nested_ext(2000), time.time() + 5))),
            "a card of others": value(_bucket((one.id, pack(b"x" * 500), time.time() + 5))),
            "a bucket without end": value(_bucket(maximum=pack("x"))),
            "a long peer id": near(bytes(20), b"\1" * 200_000),
            "no peer id": near(bytes(20), b""),
            "a long node id": near(b"\xff" * 100_000, b"\0$\x08\x01\x12 " + bytes(32)),
            "many peers": near(bytes(20), b"\0$\x08\x01\x12 " + bytes(32), 3_000),
        }
        for name, answer in answers.items():
            peer.answer, before = answer, peer.asked["find"]
            await peer.ping(PeerID.from_base58(one.id))  # whoever answers nonsense is passed over for a while
            assert await one.names() == {"one", "two"}, name
            assert peer.asked["find"] > before, name
        refused = one.plane.refusals.by_source()[peer.id].reasons
        assert refused.keys() >= {"schema", "signature", "node_id"}, refused
        handlers = peer.p2p._client.control.unary_handlers
        honest = dict(handlers)
        for data in GARBAGE:
            for name in handlers:
                handlers[name] = functools.partial(_says, data)
            with contextlib.suppress(PeerUnreachable):
                await one.plane.connect(peer.id, [peer.address])
            assert await one.names() == {"one", "two"}, data[:20]
        handlers.update(honest)
        peer.answer = answers["250 extensions 0x40"]
        assert await two.names() == {"one", "two"}


async def _asks_for(peer: Evil, to: PeerID, keys: Sequence[bytes]) -> Any:
    request = dht_pb2.FindRequest(keys=keys, peer=peer.info)
    return await call(peer.p2p, to, "rpc_find", request, dht_pb2.FindResponse)


async def an_answer_is_never_larger_than_a_message() -> None:
    async with started("one") as (one,), evil() as peer:
        to, now = await peer.connect(one), time.time()
        await one.plane.store_card(one.card())
        keys = [key.to_bytes() for key in KEYS]
        for too_many in ([keys[0]] * 2, [keys[0]] * 1000, [*keys, bytes(20)], [b""], [bytes(10**6)]):
            assert await _is_refused(_asks_for(peer, to, too_many))
        for key in keys:
            for i in range(1490):
                one.plane._storage.store(key, f"peer {i}", bytes(1900), now + TTL_S, now, True)
        mine = keys[bucket_of(one.id)]
        before, seen, began = memory_mib(os.getpid()), set(), time.monotonic()
        sizes = []
        for _ in range(3):
            answer = await _asks_for(peer, to, keys)
            sizes.append(answer.ByteSize())
            assert 2 * 2**20 < sizes[-1] < 4 * 2**20
            from swarm_protocol.transports.dht.messages import decode_bucket
            from swarm_protocol.transports.dht.server import MAX_GIVEN_BYTES

            for key, result in zip(keys, answer.results, strict=True):
                found = {name for name, _, _ in decode_bucket(result.value)}
                assert len(found) > 50 and (one.id in found) == (key == mine)
                seen |= found
        assert len(seen) > 300  # others each time
        for _ in range(16):
            sizes.append((await _asks_for(peer, to, keys)).ByteSize())
        minutes = (time.monotonic() - began) / 60  # its share comes back meanwhile
        assert sum(sizes) < MAX_GIVEN_BYTES * (1 + minutes) + sizes[0]
        refused = one.plane.refusals.by_source()[peer.id].reasons.get("rate", 0)
        assert (refused > 0) == any(size < 2**16 for size in sizes), (refused, sizes)
        assert memory_mib(os.getpid()) - before < 60  # both ends are in this process
        assert not one.plane.daemon.p2pd._client.control._handler_tasks


async def what_a_handler_cannot_send_is_forgotten() -> None:
    async with started("one") as (one,), evil() as peer:
        to, control = await peer.connect(one), one.plane.daemon.p2pd._client.control

        async def too_large(request: Any, context: Any) -> Any:
            return dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=bytes(5 * 2**20))])

        async def never(request: Any, context: Any) -> Any:
            await asyncio.sleep(3600)

        await one.plane.daemon.p2pd.add_protobuf_handler("large", too_large, dht_pb2.FindRequest)
        await one.plane.daemon.p2pd.add_protobuf_handler("never", never, dht_pb2.FindRequest)
        request = dht_pb2.FindRequest()
        for _ in range(3):
            try:
                await asyncio.wait_for(peer.p2p.call_protobuf_handler(to, "large", request, dht_pb2.FindResponse), 20)
                raise AssertionError("5 MiB were sent")
            except P2PHandlerError as error:
                assert "too large" in str(error)
        calls = [
            asyncio.create_task(peer.p2p.call_protobuf_handler(to, "never", request, dht_pb2.FindResponse))
            for _ in range(20)
        ]
        await until(lambda: len(control._handler_tasks) == 20)
        for hanging in calls:
            hanging.cancel()
        await until(lambda: not control._handler_tasks)


async def late_answers_end_no_other_calls() -> None:
    """The answer comes after the call was given up, and before its end was noted."""
    async with started("one", "two") as (one, two):
        control = one.plane.daemon.p2pd._client.control
        to, request, real = PeerID.from_base58(two.id), dht_pb2.PingRequest(), control._pending_messages.put

        async def give_up(message: Any) -> None:
            await real(message)
            if message.HasField("callUnary"):
                control._pending_calls[uuid.UUID(bytes=message.callId)].cancel()

        class Watched(type(control._pending_calls)):
            """Knows when the answer to a call that was given up has come."""

            def __contains__(self, call_id: object) -> bool:
                if self[call_id].cancelled():
                    answered.set()
                return super().__contains__(call_id)

        async def note_later(call_id: Any) -> None:
            await asyncio.wait_for(answered.wait(), HANG_S)

        answered, control._pending_calls = asyncio.Event(), Watched(control._pending_calls)
        control._pending_messages.put, control._cancel_unary_call = give_up, note_later
        late = asyncio.create_task(call(one.plane.daemon.p2pd, to, "rpc_ping", request, dht_pb2.PingResponse))
        await asyncio.wait({late})
        del control._pending_messages.put, control._cancel_unary_call
        answer = await call(one.plane.daemon.p2pd, to, "rpc_ping", request, dht_pb2.PingResponse, 20.0)
        assert answer.peer.node_id


async def made_up_node_ids_are_ignored() -> None:
    async with started("one", "two", "three") as nodes, evil() as peer:
        for node in nodes:
            await node.plane.store_card(node.card())
        for node in nodes:
            to = await peer.connect(node)
            made_up = [(key ^ i).to_bytes(20, "big") for key in KEYS for i in range(1, 11)]
            await asyncio.gather(*(peer.ping(to, node_id) for node_id in [*made_up, b"x", bytes(10_000)]))
            pairs = dict(nearest_node_ids=made_up[:20], nearest_peer_ids=[peer.p2p.peer_id.to_bytes()] * 20)
            peer.answer = lambda key, pairs=pairs: dht_pb2.FindResult(**pairs)
        for node in nodes:
            assert await node.plane.store_card(node.card(policy_version=1))
        for node in nodes:
            await until(lambda node=node: same(node.names(), {"one", "two", "three"}))
            assert len(node.plane._dht.neighbours.uid_to_peer_id) <= 3
            assert node.plane.refusals.by_source()[peer.id].reasons["node_id"] >= len(made_up)


async def the_table_is_bounded() -> None:
    me = PeerID.from_base58(Identity.generate().peer_id)
    table: Any = Neighbours(me, Refusals(Counter()), lambda peer: asyncio.sleep(0, True))
    for i in range(5000):
        table.add_or_update_node(DHTID.generate(f"peer {i}"), PeerID(b"%d" % i))
    held = sum(len(bucket.nodes_to_peer_id) + len(bucket.replacement_nodes) for bucket in table.buckets)
    assert held == len(table.uid_to_peer_id) == len(table.peer_id_to_uid)
    assert all(len(bucket.replacement_nodes) <= 20 for bucket in table.buckets) and held < 2500


def _ground(key: int, count: int, tries: int) -> list[Identity]:
    """Of `tries` new identities those whose node ids are nearest to `key`."""
    drawn = [Identity.generate() for _ in range(tries)]
    return heapq.nsmallest(count, drawn, lambda one: DHTID.generate(one.peer_id) ^ key)


async def members_see_each_other_among_ground_keys() -> None:
    """Eight peers, whose keys were chosen so that their ids are nearest to the members' bucket, take cards and find
    nothing; one more is connected than nodes ask directly."""
    with tempfile.TemporaryDirectory() as folder:
        names = ["one", "two", "three"]
        for name in names:
            while bucket_of((identity := Identity.generate()).peer_id) != 0:
                pass
            identity.save(Path(folder) / f"{name}.key")
        for i, identity in enumerate(_ground(KEYS[0], 9, 3000)):
            identity.save(Path(folder) / f"evil {i}.key")
        async with contextlib.AsyncExitStack() as stack:
            nodes = [Node(Path(folder), name) for name in names]
            for node in nodes:
                await node.plane.daemon.start()
                stack.push_async_callback(node.plane.close)
            evils = [await stack.enter_async_context(evil(f"{folder}/evil {i}.key")) for i in range(9)]
            for peer in evils:
                for node in nodes:
                    await peer.ping(await peer.connect(node))
            for node in nodes:
                for peer in evils:
                    await node.plane.connect(peer.id, [peer.address])
            for node in nodes[1:]:
                await node.plane.connect(nodes[0].id, nodes[0].plane.addresses)
            for node in nodes:
                for other in nodes:
                    if other is not node:
                        await node.plane.connect(other.id, other.plane.addresses)
            for node in nodes:
                await node.plane.store_card(node.card())
            assert sum(peer.asked["store"] for peer in evils) >= 15  # they did surround the bucket
            seen: dict[str, set[str]] = {node.name: set() for node in nodes}

            async def all_seen() -> bool:
                for node in nodes:
                    seen[node.name] |= await node.names()
                return all(names == {"one", "two", "three"} for names in seen.values())

            await until(all_seen)


if __name__ == "__main__":
    main(globals())
