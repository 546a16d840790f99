"""Whether a machine can be reached, as a peer that it asks finds out."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.transports.p2p import dial_back
from swarm_protocol.transports.p2p.dial_back import MAX_ASKERS, MAX_PORTS, DialBack, ask_back, may_look_at
from tests.support.ports import free_port

HERE = "/ip4/127.0.0.1/tcp/4001"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def over(serve: Callable[..., Awaitable[None]], use: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable]):
    """What `use` makes of a connection that `serve` answers."""

    async def both():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await asyncio.wait_for(use(reader, writer), 10)
            finally:
                writer.close()

    return asyncio.run(both())


def asked(ports: list[int], came_from: str = HERE, back: DialBack | None = None) -> list[bool]:
    peer = back or DialBack(lambda: [HERE])
    return over(
        lambda reader, writer: peer.serve(came_from, reader, writer),
        lambda reader, writer: ask_back(ports, reader, writer),
    )


def test_a_peer_connects_to_each_port(listener: int) -> None:
    assert asked([listener, free_port()]) == [True, False]
    assert asked([listener]) == [True]


def test_it_connects_only_to_where_the_asker_is(listener: int) -> None:
    assert asked([listener], "/ip4/127.0.0.2/tcp/4001") == [False]


@pytest.mark.parametrize("came_from", [f"{HERE}/p2p/x/p2p-circuit", "/unix/x", "/ip4/127.0.0.1/udp/1/quic"])
def test_who_came_another_way_gets_no_answer(came_from: str, listener: int) -> None:
    with pytest.raises(PeerUnreachable):
        asked([listener], came_from)


def test_no_answer_to_nonsense_or_to_too_many(listener: int) -> None:
    with pytest.raises(PeerUnreachable):
        asked([listener] * (MAX_PORTS + 1))


def test_few_askers_are_answered_at_a_time(listener: int) -> None:
    busy = DialBack(lambda: [HERE])

    async def serve_beside_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent = [asyncio.StreamReader() for _ in range(MAX_ASKERS)]
        serving = [asyncio.create_task(busy.serve(HERE, one, SimpleNamespace(close=int))) for one in silent]
        await asyncio.sleep(0)  # for them to begin
        await busy.serve(HERE, reader, writer)
        for one in silent:
            one.feed_eof()
        await asyncio.gather(*serving)

    with pytest.raises(PeerUnreachable):
        over(serve_beside_silent, lambda reader, writer: ask_back([listener], reader, writer))
    assert asked([listener], back=busy) == [True]


def test_an_answer_that_is_none() -> None:
    async def lies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(3)
        writer.write(b"\x02")
        writer.close()

    with pytest.raises(RemoteProtocolError):
        over(lies, lambda reader, writer: ask_back([1], reader, writer))


# --------------------------------------------------------------------- no tool for looking at others' ports


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Where was connected to, all of which listens."""
    tried: list[tuple[str, int]] = []

    async def connects(host: str, port: int) -> bool:
        tried.append((host, port))
        return True

    monkeypatch.setattr(dial_back, "_connects", connects)
    return tried


def came_from(number: int) -> str:
    return f"/ip4/8.8.8.{number}/tcp/4001"


def test_few_ports_a_minute(connected: list[tuple[str, int]]) -> None:
    clock = Clock()
    back = DialBack(list, clock)
    ports = [5000, 5001, 5002, 5003]
    for _ in range(2):
        assert asked(ports, came_from(0), back) == [True] * 4
        clock.now += 20.0
    with pytest.raises(PeerUnreachable):
        asked(ports[:1], came_from(0), back)
    for number in range(1, 15):
        asked(ports, came_from(number), back)
    assert len(connected) == 64
    with pytest.raises(PeerUnreachable):
        asked(ports[:1], came_from(99), back)
    clock.now += 20.0  # the first four are a minute ago
    assert asked(ports, came_from(0), back) == [True] * 4
    with pytest.raises(PeerUnreachable):
        asked(ports[:1], came_from(99), back)
    assert len(connected) == 68


@pytest.mark.parametrize("ports", [[22], [5000, 1023]])
def test_no_port_of_the_system(connected: list[tuple[str, int]], ports: list[int]) -> None:
    with pytest.raises(PeerUnreachable):
        asked(ports)
    assert asked([1024]) == [True]
    assert connected == [("127.0.0.1", 1024)]


PUBLIC = ["/ip4/8.8.4.4/tcp/31330"]
CONTAINER = ["/ip4/172.17.0.2/tcp/31330"]
LAN = ["/ip4/192.168.1.5/tcp/31330", "/dns4/a.example/tcp/31330"]
RELAYED = ["/ip4/192.168.1.5/tcp/31330/p2p/x/p2p-circuit"]
TUNNEL = ["/ip4/100.100.1.2/tcp/31330"]


@pytest.mark.parametrize(
    ("host", "told", "may"),
    [
        ("8.8.8.8", [], True),
        ("8.8.8.8", LAN, True),
        ("127.0.0.1", [], False),
        ("127.0.0.1", PUBLIC, False),
        ("127.0.0.1", LAN, False),
        ("127.0.0.1", [HERE], True),
        ("192.168.1.7", PUBLIC, False),
        ("192.168.1.7", LAN, True),
        ("192.168.1.7", RELAYED, False),
        ("192.168.2.7", LAN, False),  # an interface with a net of 24 bits
        ("10.0.0.5", ["/ip4/10.0.0.9/tcp/31330"], True),  # announced, and on none
        ("10.1.0.5", ["/ip4/10.0.0.9/tcp/31330"], False),
        ("172.17.0.3", CONTAINER, True),
        ("172.17.0.1", CONTAINER, False),  # the router: whoever comes through a proxy
        ("100.90.0.1", TUNNEL, True),
        ("100.90.0.1", LAN, False),
        ("fd00:1::7", ["/ip6/fd00:1::5/tcp/31330"], True),
        ("fd00:1::1", ["/ip6/fd00:1::5/tcp/31330"], False),
        ("::1", ["/ip6/::1/tcp/31330"], True),
        ("169.254.169.254", LAN, False),
        ("0.0.0.0", LAN, False),
        ("a.example", LAN, False),
    ],
)
def test_private_addresses_only_where_this_node_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, told: list[str], may: bool
) -> None:
    def on(family: socket.AddressFamily, address: str, mask: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address, netmask=mask)

    interfaces = {
        "lo": [on(socket.AF_INET, "127.0.0.1", "255.0.0.0"), on(socket.AF_INET6, "::1", ":".join(["ffff"] * 8))],
        "eth0": [on(socket.AF_INET, "192.168.1.5", "255.255.255.0")],
        "eth1": [on(socket.AF_INET, "172.17.0.2", "255.255.0.0"), on(socket.AF_INET6, "fd00:1::5", "ffff:ffff::")],
        "vpn0": [on(socket.AF_INET, "100.100.1.2", "255.255.255.255")],
    }
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    here = int.from_bytes(socket.inet_aton("172.17.0.1"), sys.byteorder)
    rows = [f"eth1 00000000 {here:08X} 0003 0 0 0 00000000 0 0 0", "eth1 0000FFFE 00000000 0001 0 0 0 0000FFFF 0 0 0"]
    (tmp_path / "route").write_text(head + "\n".join(rows) + "\n")
    router = socket.inet_pton(socket.AF_INET6, "fd00:1::1").hex()
    (tmp_path / "ipv6_route").write_text(f"{'0' * 32} 00 {'0' * 32} 00 {router} 00000400 1 0 3 eth1\n")
    monkeypatch.setattr(dial_back.psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(dial_back, "PROC_NET", tmp_path)
    assert may_look_at(host, told) is may


def test_a_system_that_lists_no_routes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dial_back, "PROC_NET", tmp_path / "none")
    assert may_look_at("127.0.0.1", [HERE])


def test_other_nets_are_not_looked_at(connected: list[tuple[str, int]]) -> None:
    with pytest.raises(PeerUnreachable):
        asked([5000], HERE, DialBack(lambda: PUBLIC))
    assert connected == []
