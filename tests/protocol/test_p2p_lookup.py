"""A node's round of lookups, without a network: `P2PTransport`'s own steps on a plane that is played."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.messages import PeerCard
from protocol.peers import PeerTable
from protocol.transports import p2p
from protocol.transports.p2p import GREET_AGAIN_S, P2PTransport
from protocol.transports.settings import NetworkSettings


class Plane:
    """Two peers are connected; `cards` is what a lookup finds."""

    def __init__(self) -> None:
        self.cards: dict[str, PeerCard] = {}
        self.greeted: list[str] = []

    async def connected(self) -> set[str]:
        return {"one", "two"}

    async def connect(self, peer: str, addresses: list[str]) -> None:
        self.greeted.append(peer)

    async def get_cards(self, buckets: list[int], members: int) -> dict[str, PeerCard]:
        return self.cards


def test_connected_peers_are_greeted_again_when_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(p2p.time, "monotonic", lambda: clock)
    plane = Plane()
    node: Any = SimpleNamespace(
        peer_id="me",
        _settings=NetworkSettings(),
        _table=PeerTable("me", random.Random(0)),
        _stat=SimpleNamespace(peers=[]),
        _wake=asyncio.Event(),
        _members={},
        _newcomers=frozenset(),
        _connected=set(),
        _greeted=set(),
        _greet_again_at=0.0,
        _dials={},
        _look_at=0.0,
        _next_bucket=0,
    )
    node._dial_one = lambda *arguments: P2PTransport._dial_one(node, *arguments)

    async def rounds(seconds: int) -> None:
        """One each five seconds."""
        nonlocal clock
        for _ in range(seconds // 5):
            await P2PTransport._dial(node, plane)
            await asyncio.gather(*node._dials.values())
            await P2PTransport._look_up(node, plane)
            clock += 5.0

    asyncio.run(rounds(5))
    assert sorted(plane.greeted) == ["one", "two"]
    asyncio.run(rounds(int(2 * GREET_AGAIN_S)))
    assert 4 <= plane.greeted.count("one") + plane.greeted.count("two") <= 8
    plane.greeted.clear()
    plane.cards = {"one": PeerCard(1, "ab" * 32, p2p.time.time(), "one", [])}
    asyncio.run(rounds(5))  # may still greet for what the last round found
    plane.greeted.clear()
    asyncio.run(rounds(120))
    assert plane.greeted == []
