"""Whether a machine can be reached, as a peer that it asks finds out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from protocol.errors import PeerUnreachable, RemoteProtocolError
from protocol.transports.dial_back import MAX_ASKED, MAX_PORTS, DialBack, ask_back

HERE = "/ip4/127.0.0.1/tcp/4001"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
    peer = back or DialBack()
    return over(
        lambda reader, writer: peer.serve(came_from, reader, writer),
        lambda reader, writer: ask_back(ports, reader, writer),
    )


def test_a_peer_connects_to_each_port(listener: int) -> None:
    assert asked([listener, closed_port()]) == [True, False]
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
    busy = DialBack()
    busy._asked = MAX_ASKED
    with pytest.raises(PeerUnreachable):
        asked([listener], back=busy)
    busy._asked = 0
    assert asked([listener], back=busy) == [True]
    assert busy._asked == 0


def test_an_answer_that_is_none() -> None:
    async def lies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(3)
        writer.write(b"\x02")
        writer.close()

    with pytest.raises(RemoteProtocolError):
        over(lies, lambda reader, writer: ask_back([1], reader, writer))
