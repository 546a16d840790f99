"""Ends a p2pd that has grown too large; its keeper starts it again with the same key and port."""

from __future__ import annotations

import asyncio

import psutil

MAX_RSS = 512 * 2**20
"""A p2pd of a node with 64 connections takes 60 to 100 MB; four large exchanges and four large answers at a time may
have go-libp2p's largest window, 16 MB, in flight each way: 256 MB."""
LOOK_S = 5.0
"""Between two looks: at 100 Mbit/s it can grow by 60 MB meanwhile."""


def rss(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


async def end_if_grown(process: asyncio.subprocess.Process) -> str:
    """Returns why, in words, when `process` has been ended because it grew beyond `MAX_RSS`."""
    while (size := rss(process.pid)) <= MAX_RSS:
        await asyncio.sleep(LOOK_S)
    process.kill()
    return f"it had grown to {size >> 20} MiB"
