"""A node names the hostile peers that it refuses, over real sockets: by peer id, and the IP address they come from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.transports.p2p import P2PTransport
from protocol.transports.settings import NetworkSettings

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, which the network's thread imports
SWARM = "a" * 64
PATIENCE_S = 90.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def test_a_hostile_peer_is_named_by_key_and_address(tmp_path: Path) -> None:
    settings = NetworkSettings(listen="127.0.0.1", port=0, gossip_port=0)
    node = P2PTransport(tmp_path / "identity.key", SWARM, settings)
    try:
        until(lambda: bool(node.addresses))
        peer = asyncio.run(_rubbish(node))
        until(lambda: node.refusals()[peer].address == "127.0.0.1")
        assert node.refusals()[peer].reasons["find"] >= 3
    finally:
        node.close()


def test_a_peer_that_leaves_at_once_is_located(tmp_path: Path) -> None:
    node = P2PTransport(tmp_path / "identity.key", SWARM, NetworkSettings(listen="127.0.0.1", port=0, gossip_port=0))
    try:
        until(lambda: bool(node.addresses))
        peer = asyncio.run(_rubbish_once(node.addresses[0]))
        until(lambda: peer in node.refusals())
        until(lambda: node.refusals()[peer].address == "127.0.0.1")
    finally:
        node.close()


async def _rubbish_once(address: str) -> str:
    """Ask for a key many times in one request, and leave; the peer id that asked."""
    from hivemind.p2p import P2PHandlerError
    from hivemind.proto import dht_pb2

    from benchmarks.attacks.hostile import call, dht_peer

    request = dht_pb2.FindRequest(keys=[bytes(20)] * 1000, peer=dht_pb2.NodeInfo())
    async with dht_peer(address) as (p2p, to):
        with pytest.raises(P2PHandlerError):
            await call(p2p, to, "rpc_find", request, dht_pb2.FindResponse)
        return str(p2p.peer_id)


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
