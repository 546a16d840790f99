"""The gossip addresses of all members that one node knows; the bootstrap is called `boot`.

python -m benchmarks.attacks.look ADDRESS SWARM      -> JSON: name -> address
"""

from __future__ import annotations

import asyncio
import json
import sys

import hivemind.dht.storage  # noqa: F401  registers the type of what is found
import msgspec
from hivemind.dht.node import DHTID
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer

from benchmarks.attacks.hostile import call, dht_peer
from swarm_protocol.codec import verify_card
from swarm_protocol.limits import MEMBERSHIP_BUCKETS
from swarm_protocol.topics import membership_key


async def look(address: str, swarm: str) -> dict[str, str]:
    keys = [DHTID.generate(membership_key(swarm, bucket)).to_bytes() for bucket in range(MEMBERSHIP_BUCKETS)]
    found = {}
    async with dht_peer(address) as (p2p, victim):
        request = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo(node_id=bytes(20)))
        answer = await call(p2p, victim, "rpc_find", request, dht_pb2.FindResponse)
        for result in answer.results:
            if result.type == dht_pb2.FOUND_DICTIONARY:
                for _, (sealed, _) in MSGPackSerializer.loads(result.value).items():
                    _, card = verify_card(msgspec.msgpack.decode(sealed), swarm)
                    name = "boot" if "bootstrap" in card.roles else card.name
                    found[name] = card.gossip[0] if card.gossip else ""
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(look(*sys.argv[1:]))))
