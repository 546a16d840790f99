"""A peer that does not keep the rules: its own p2pd or libp2p host, and requests made by hand.

    async with dht_peer(victim) as (p2p, victim_id):       hivemind's daemon, connected to one node
        await call(p2p, victim_id, "rpc_find", request, dht_pb2.FindResponse)
    async with libp2p_host() as host: ...                  py-libp2p, under trio, for the gossip port and raw streams

Tests and `benchmarks.attacks` use it. It is never part of a node. The two libraries cannot be loaded into one process,
so each is imported where it is used.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

EXT_TUPLE, EXT_DICTIONARY = 0x40, 0x50
"""Codes of hivemind 1.1.12's msgpack extension types."""


def nested_ext(depth: int, code: int = EXT_TUPLE, size: int = 0) -> bytes:
    """`depth` msgpack ext32 headers of six bytes, one inside the other, around zeros: `size` bytes in all, or a hundred
    more than the headers take."""
    parts, left = [], size or 6 * depth + 100
    for _ in range(depth):
        left -= 6
        parts.append(b"\xc9" + struct.pack(">Ib", left, code))
    return b"".join(parts) + b"\xc6" + struct.pack(">I", left - 5) + bytes(left - 5)


@asynccontextmanager
async def dht_peer(
    victim: str = "", server: bool = False, identity: str | None = None
) -> AsyncIterator[tuple[Any, Any]]:
    """(hivemind `P2P`, the victim's `PeerID`), connected to the multiaddress `victim`, which ends in /p2p/<id>; not
    connected if it is empty. With `server`, others can dial it. `identity` is the path of a key file."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    from hivemind.p2p import P2P, PeerID
    from hivemind.utils.multiaddr import Multiaddr

    p2p = await P2P.create(
        dht_mode="server" if server else "client",
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        identity_path=identity,
    )
    try:
        to = None
        if victim:
            head, _, peer = victim.rpartition("/p2p/")
            to = PeerID.from_base58(peer)
            await p2p._client.connect(to, [Multiaddr(head)])
        yield p2p, to
    finally:
        await p2p.shutdown()


async def call(p2p: Any, to: Any, method: str, request: Any, answer: type[Any], timeout: float = 30.0) -> Any:
    """The answer to a call of hivemind's `DHTProtocol`. Raises what hivemind does, and TimeoutError."""
    return await asyncio.wait_for(p2p.call_protobuf_handler(to, f"DHTProtocol.{method}", request, answer), timeout)


@asynccontextmanager
async def libp2p_host() -> AsyncIterator[Any]:
    """A py-libp2p host (trio) that only dials, with a fresh key."""
    from swarm_protocol.transports.gossip.safe_host import CountedTCP, make_host

    host = make_host(CountedTCP(64))
    async with host.run(listen_addrs=[]):
        yield host


def memory_mib(pid: int) -> float:
    """Resident memory of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    resident = [line for line in fields.splitlines() if line.startswith("VmRSS")]
    return int(resident[0].split()[1]) / 1024 if resident else 0.0


def lives(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
