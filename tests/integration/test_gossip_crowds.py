"""A gossip process that strangers crowd, over real sockets: honest peers get in, and stay linked."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from swarm_protocol.transports.gossip.places import MAX_BUFFERED
from tests.support.gossip_peers import (
    HANG_S,
    Peer,
    connect_all,
    needs_proc,
    rss,
    swarm,
    talk,
    until_all_heard,
    until_stat,
)
from tests.support.waiting import until_async

KEYS = 4
"""That flood at a time; the connection of each may have `MAX_BUFFERED` lying unread."""
MOST_BYTES = 384 * 2**20
"""Between what a gossip process of a hundred MB takes with all that may lie unread, and what ends it (512 MiB)."""

pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def crowd(hub: Peer, kind: str, keys: int, sources: int) -> AsyncIterator[None]:
    program = sys.executable, "-m", "tests.integration.gossip_crowd"
    process = await asyncio.create_subprocess_exec(*program, hub.addresses[0], kind, str(keys), str(sources), stdin=-1)
    try:
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def get_in(leaf: Peer, hub: Peer) -> None:
    """As a node does: dial again until it worked, and speak."""
    heard = len(hub.heard)
    async with asyncio.timeout(HANG_S):
        while len(hub.heard) == heard:
            leaf.dial(hub.addresses[0])
            for _ in range(20):
                if hub.gossip_id in (await leaf.stat()).peers:
                    leaf.say()
                    break
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.2)


def test_idle_tcp_keeps_nobody_out() -> None:
    async def run() -> None:
        async with swarm(1, max_connections=4) as (hub,), swarm(1, first=1, dial_only=True) as (leaf,):
            with ExitStack() as stack:
                for _ in range(150):  # more than may be in their handshake, each for longer than the test takes
                    stack.enter_context(socket.create_connection(("127.0.0.1", hub.settings.port)))
                leaf.dial(hub.addresses[0])
                await until_stat(hub, lambda stat: leaf.gossip_id in stat.peers)
            assert (await hub.stat()).rejected["handshake"] > 0 and hub.restarts == 0

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "sources"), [("idle", 0), ("idle", 3), ("half", 0), ("valid", 3)])
def test_crowds_keep_nobody_out(kind: str, sources: int) -> None:
    async def run() -> None:
        async with swarm(1, max_connections=8) as (hub,), swarm(2, first=1, dial_only=True) as leaves:
            await get_in(leaves[0], hub)
            async with crowd(hub, kind, 16, sources):
                if kind in ("idle", "valid"):
                    await until_stat(hub, lambda stat: len(stat.peers) == 8)
                await get_in(leaves[1], hub)
                assert leaves[0].gossip_id in (await hub.stat()).peers
            assert hub.restarts == 0

    asyncio.run(run())


@pytest.mark.long
@needs_proc
@pytest.mark.parametrize("kind", ["push", "names", "frames", "unread"])
def test_a_flood_costs_its_senders_only(kind: str) -> None:
    async def run() -> None:
        async with swarm(3) as peers:
            await connect_all(peers)
            hub, size = peers[0], rss(peers[0].pid)
            async with crowd(hub, kind, KEYS, 0):
                await until_stat(hub, lambda stat: stat.rejected.get("flood", 0) >= KEYS)
            assert rss(hub.pid) < size + 2 * KEYS * MAX_BUFFERED  # a buffer that grows is copied
            await until_all_heard(peers, await talk(peers, 6, 5000))
            assert all(peer.restarts == 0 for peer in peers)

    asyncio.run(run())


@pytest.mark.long
@needs_proc
def test_who_takes_memory_costs_no_neighbour_its_link() -> None:
    """Sixty keys hold 150 MB of frames without an end, and read slowly when the neighbour brings large messages."""

    async def run() -> None:
        async with swarm(1, max_connections=128) as (hub,), swarm(1, first=1, dial_only=True) as (neighbour,):
            await get_in(neighbour, hub)
            async with crowd(hub, "hoards", 60, 0):
                await until_stat(hub, lambda stat: stat.bytes_in > 60 * 2 * 2**20)
                for _ in range(15):
                    said = neighbour.say(450_000)
                    await until_async(lambda said=said: said in hub.heard, HANG_S)
                    await until_stat(hub, lambda stat: neighbour.gossip_id in stat.peers)  # it never dials again
                stat = await hub.stat()
            assert hub.restarts == 0 and stat.rejected["memory"] + stat.rejected["flood"] > 0
            assert rss(hub.pid) < MOST_BYTES

    asyncio.run(run())
