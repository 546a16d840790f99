"""Gossip clients, each with a process of its own on loopback, that talk and keep what they hear."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from swarm_protocol import codec
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.transports.gossip.client import NO_STATUS, GossipClient
from swarm_protocol.transports.gossip.pipe import GossipSettings, Status
from tests.support.gossip_samples import batch, peer_on_shard
from tests.support.waiting import until_async

SWARM = "ab" * 32
TOPIC = ROLLOUTS.topic(SWARM, 0)
PACE_S = 0.06
HANG_S = 120.0


class Peer(GossipClient):
    """A client that keeps what it hears, and seals what it says."""

    def __init__(self, number: int, **settings: Any) -> None:
        defaults = {"listen": "127.0.0.1", "messages_per_minute": 10**6, "bytes_per_minute": 2**30}
        self.heard: list[bytes] = []
        self.reports: list[str] = []
        super().__init__(
            GossipSettings(SWARM, **{**defaults, **settings}),
            lambda topic, data: self.heard.append(data),
            self.reports.append,
            lambda: None,
            None,
        )
        self.sealer = peer_on_shard(0, self.settings.shards, skip=number + 1)

    def say(self, size: int = 5000) -> bytes:
        data = self.sealed(size)
        assert self.publish(TOPIC, data)
        return data

    def sealed(self, size: int) -> bytes:
        """A message that nobody has heard yet."""
        return codec.sign_batch(batch(SWARM, size), self.sealer)


@asynccontextmanager
async def swarm(count: int, first: int = 0, **settings: Any) -> AsyncIterator[list[Peer]]:
    """Peers that listen, subscribed, not connected."""
    peers = [Peer(first + number, **settings) for number in range(count)]
    try:
        await asyncio.gather(*(peer.start() for peer in peers))
        for peer in peers:
            peer.subscribe(TOPIC)
        yield peers
    finally:
        await asyncio.gather(*(peer.close() for peer in peers))


async def until_stat(peer: Peer, what: Callable[[Status], bool], again: Callable[[], object] = lambda: None) -> Status:
    """`again` is called every ten seconds: a dial may fail on a busy machine, and a node would dial again, too.

    A process that is just starting may be too busy to answer."""
    deadline, calm = time.monotonic() + HANG_S, time.monotonic() + 10.0
    stat = NO_STATUS
    while True:
        with suppress(PeerUnreachable):
            stat = await peer.stat()
            if what(stat):
                return stat
        assert time.monotonic() < deadline, f"this did not happen: {stat}"
        if time.monotonic() > calm:
            calm += 10.0
            again()
        await asyncio.sleep(0.1)


def dial_all(peers: Sequence[Peer], hub: Peer) -> None:
    for peer in peers:
        peer.dial(hub.addresses[0])


async def connect_all(peers: Sequence[Peer]) -> None:
    for i, peer in enumerate(peers):
        for other in peers[:i]:
            peer.dial(other.addresses[0])
    for peer in peers:
        await until_stat(peer, lambda stat: stat.mesh.get(TOPIC, 0) >= min(4, len(peers) - 1))


async def talk(peers: Sequence[Peer], count: int, size: int) -> list[tuple[Peer, bytes]]:
    """They take turns. A speaker whose queue is full waits, as on a busy machine."""
    said = []
    for i in range(count):
        speaker = peers[i % len(peers)]
        data = speaker.sealed(size)
        await until_async(lambda speaker=speaker, data=data: speaker.publish(TOPIC, data))
        said.append((speaker, data))
        await asyncio.sleep(PACE_S)
    return said


def expected(peer: Peer, said: list[tuple[Peer, bytes]]) -> list[bytes]:
    return sorted(data for speaker, data in said if speaker is not peer)


async def until_all_heard(peers: Sequence[Peer], said: list[tuple[Peer, bytes]], earlier: Sequence[bytes] = ()) -> None:
    """Everything that others said; and nothing else, and nothing twice, but for `earlier` messages: a process that was
    started again has forgotten the last seconds, so others may tell it of them once more."""
    for peer in peers:
        wanted = expected(peer, said)
        await until_async(lambda peer=peer, wanted=wanted: set(peer.heard) >= set(wanted), HANG_S)
        assert sorted(data for data in peer.heard if data not in earlier) == wanted


def rss(pid: int | None) -> int:
    """Bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
