"""Ends a p2pd that has grown too large; its keeper starts it again with the same key and port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil

MAX_P2PD_RSS = 512 * 2**20
"""A p2pd of a node with `FEW` connections takes 60 to 100 MB; four large exchanges and four large answers at a time may
have go-libp2p's largest window, 16 MB, in flight each way: 256 MB."""
FEW = 64  # connections that `MAX_P2PD_RSS` is for
RSS_PER_CONNECTION = 256 * 2**10
"""Bytes for each further connection. An idle one takes 75 KB (measured with 25 to 200); three times that leaves room
for calls under way and for memory that Go frees late."""
MOST_CONNECTIONS = 4096
"""Connections beyond these, with which p2pd may take 1.5 GB, add nothing: strangers can make many."""
P2PD_MEMORY_CHECK_S = 5.0  # time between two checks; at 100 Mbit/s, p2pd can grow by 60 MB in it


def rss(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def most_rss(connections: int) -> int:
    """Bytes of memory that a p2pd with so many connections may hold."""
    return MAX_P2PD_RSS + RSS_PER_CONNECTION * max(0, min(connections, MOST_CONNECTIONS) - FEW)


async def end_if_grown(process: asyncio.subprocess.Process, connections: Callable[[], int]) -> str:
    """Returns why, in words, when `process`, a p2pd with so many `connections`, was ended because it grew too large."""
    while (size := rss(process.pid)) <= most_rss(connections()):
        await asyncio.sleep(P2PD_MEMORY_CHECK_S)
    process.kill()
    return f"it had grown to {size >> 20} MiB"
