"""A node names the hostile peers that it refuses, over real sockets: by peer id, and the IP address they come from."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from swarm_protocol.transports.p2p.transport import P2PTransport
from swarm_protocol.transports.settings import NetworkSettings
from tests.support.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, which the network's thread imports
]
SWARM = "a" * 64


def test_hostile_peers_are_named_by_key_and_address(tmp_path: Path) -> None:
    node = P2PTransport(tmp_path / "identity.key", SWARM, NetworkSettings(listen="127.0.0.1", port=0, gossip_port=0))
    try:
        until(lambda: node.addresses)
        peer = asyncio.run(_rubbish(node))
        assert node.refusals()[peer].address == "127.0.0.1"
    finally:
        node.close()


async def _rubbish(node: P2PTransport) -> str:
    """Ask for a key many times in one request, until the node knows where that comes from; the peer id that asked."""
    from hivemind.proto import dht_pb2

    from benchmarks.attacks.hostile import call, dht_peer

    request = dht_pb2.FindRequest(keys=[bytes(20)] * 1000, peer=dht_pb2.NodeInfo())
    async with dht_peer(node.addresses[0]) as (p2p, to):
        peer = str(p2p.peer_id)
        deadline = time.monotonic() + PATIENCE_S
        while not (refused := node.refusals().get(peer)) or not refused.address or refused.reasons["find"] < 3:
            assert time.monotonic() < deadline, "it is not named"
            try:
                await call(p2p, to, "rpc_find", request, dht_pb2.FindResponse, 5.0)
            except Exception:  # whatever hivemind raises of a refusal
                await asyncio.sleep(0.5)
    return peer
