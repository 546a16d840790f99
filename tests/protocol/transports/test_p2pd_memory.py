"""How large a p2pd may grow, and that a larger one is ended."""

from __future__ import annotations

import asyncio
import sys

import pytest

from swarm_protocol.transports.p2p import daemon
from swarm_protocol.transports.p2p.daemon import (
    FEW,
    MAX_P2PD_RSS,
    MOST_CONNECTIONS,
    RSS_PER_CONNECTION,
    end_if_grown,
    most_rss,
)


@pytest.mark.parametrize(
    ("connections", "more"),
    [(0, 0), (FEW, 0), (FEW + 1, 1), (2000, 2000 - FEW), (10**6, MOST_CONNECTIONS - FEW)],
)
def test_each_connection_may_take_memory(connections: int, more: int) -> None:
    assert most_rss(connections) == MAX_P2PD_RSS + more * RSS_PER_CONNECTION


def test_a_process_grown_too_large_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "P2PD_MEMORY_CHECK_S", 0.01)
    monkeypatch.setattr(daemon, "rss", lambda pid: MAX_P2PD_RSS + 10 * RSS_PER_CONNECTION)

    async def play() -> tuple[str, int]:
        left = 30

        def connections() -> int:  # they hang up one after the other
            nonlocal left
            left -= 1
            return FEW + left

        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
        why = await end_if_grown(process, connections)
        await process.wait()
        return why, left

    why, left = asyncio.run(play())
    assert left == 9 and "grown" in why
