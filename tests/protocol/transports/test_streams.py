"""Answers over real streams (socket pairs): places, memory and time that strangers can take."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.manifest import FILE_METHOD, MANIFEST_METHOD
from swarm_protocol.transports.base import Server
from swarm_protocol.transports.streams import requests as streams
from swarm_protocol.transports.streams.requests import (
    MAX_ANSWERS,
    MAX_ANSWERS_PER_PEER,
    MAX_LARGE,
    MAX_SHORT_BYTES,
    Answers,
    ask,
)
from swarm_protocol.transports.streams.stream import Stream, Traffic
from tests.support.clocks import HANG_S, run, settle, until

LARGE = bytes(8 * 2**20)
Dial = Callable[[str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Peer, or peer@address -> a stream to `Answers` from there."""


@asynccontextmanager
async def node() -> AsyncIterator[tuple[Answers, Dial, Counter[str]]]:
    """Answers, how to dial them, and what they refused."""
    traffic = Traffic()
    answers = Answers(traffic, print)
    answers.servers |= {FILE_METHOD: lambda peer, payload: LARGE, "echo": lambda peer, payload: payload}
    serving: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def dial(peer: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        ends = await asyncio.open_connection(sock=ours)
        serving.append(asyncio.create_task(answers.serve(Stream(*ends, traffic, peer, peer.partition("@")[2]))))
        reader, writer = await asyncio.open_connection(sock=theirs)
        writers.append(writer)
        return reader, writer

    yield answers, dial, traffic.rejected
    for writer in writers:
        writer.transport.abort()
    await asyncio.wait_for(asyncio.gather(*serving), HANG_S)
    answers.close()


async def request(dial: Dial, peer: str, method: str, payload: bytes = b"") -> bytes:
    return await ask(Stream(*await dial(peer), Traffic(), "answers"), method, payload, len(LARGE))


async def hold(dial: Dial, peer: str, method: str = FILE_METHOD) -> None:
    """Ask, but take no answer."""
    stream = Stream(*await dial(peer), Traffic(), "answers")
    stream.write_method(method)
    await stream.write_frame(b"")
    stream.writer.transport.pause_reading()


def slowly(go: threading.Event) -> Server:
    """Answers once it may."""
    return lambda peer, payload: bytes(go.wait(HANG_S))


def test_readers_of_files_leave_places_for_short_answers() -> None:
    async def scenario() -> None:
        async with node() as (_, dial, _):
            assert await request(dial, "first", FILE_METHOD) == LARGE
            for i in range(MAX_LARGE):
                await hold(dial, f"reader {i}")
            await settle()
            with pytest.raises(PeerUnreachable, match="busy"):
                await request(dial, "late", FILE_METHOD)
            for i in range(MAX_LARGE):
                assert await request(dial, f"reader {i}", "echo", b"here") == b"here"

    run(scenario())


def test_one_peer_takes_few_places_at_a_time() -> None:
    async def scenario() -> None:
        async with node() as (answers, dial, rejected):
            await hold(dial, "greedy")
            await settle()
            with pytest.raises(PeerUnreachable, match="busy"):
                await request(dial, "greedy", FILE_METHOD)
            assert await request(dial, "modest", FILE_METHOD) == LARGE
            go = threading.Event()
            answers.servers["slow"] = slowly(go)
            slow = [asyncio.create_task(request(dial, "greedy", "slow")) for _ in range(MAX_ANSWERS_PER_PEER - 1)]
            await settle()
            with pytest.raises(PeerUnreachable, match="busy"):
                await request(dial, "greedy", "echo")
            assert rejected["busy"] == 2
            go.set()
            await asyncio.gather(*slow)

    run(scenario())


MANY = 3 * streams.MAX_UNREAD // 2


@pytest.mark.parametrize(
    "peers",
    [
        [f"slow {i}@here" for i in range(MANY)],  # more keys than places, at one address
        [f"slow {i % 24}@here" for i in range(MANY)],
        [f"slow {i}@there {i % 40}" for i in range(MANY)],
        ["slow@here"] * 40,
    ],
)
def test_requests_that_do_not_come_keep_nobody_out(peers: list[str]) -> None:
    async def scenario() -> None:
        async with node() as (answers, dial, rejected):
            answers.servers[MANIFEST_METHOD] = lambda peer, payload: b"tasks"
            for peer in peers:
                (await dial(peer))[1].write(b"\x08")  # a method of eight letters is to come
            await settle()
            assert rejected["crowded"] >= max(1, len(peers) - streams.MAX_UNREAD)
            for _ in range(10):
                assert await request(dial, "newcomer@here", MANIFEST_METHOD) == b"tasks"
                assert await request(dial, "newcomer@elsewhere", "echo", b"too") == b"too"
            assert rejected["busy"] == 0

    run(scenario())


def test_the_manifest_is_given_while_places_are_taken() -> None:
    async def scenario() -> None:
        async with node() as (answers, dial, _):
            go = threading.Event()
            answers.servers |= {MANIFEST_METHOD: lambda peer, payload: b"tasks", "slow": slowly(go)}
            for i in range(MAX_ANSWERS):
                await hold(dial, f"slow {i}", "slow")
            await settle()
            with pytest.raises(PeerUnreachable, match="busy"):
                await request(dial, "newcomer", "echo")
            assert await request(dial, "newcomer", MANIFEST_METHOD) == b"tasks"
            go.set()

    run(scenario())


def test_one_address_never_takes_all_places() -> None:
    async def scenario() -> None:
        async with node() as (answers, dial, rejected):
            go = threading.Event()
            answers.servers["slow"] = slowly(go)
            for i in range(MAX_ANSWERS):
                await hold(dial, f"slow {i}@here", "slow")
            await settle()
            assert rejected["busy"] == MAX_ANSWERS // 4
            other = asyncio.create_task(request(dial, "newcomer@elsewhere", "echo", b"heard"))
            await settle()
            go.set()
            assert await other == b"heard"

    run(scenario())


def test_a_reader_that_takes_nothing_is_dropped() -> None:
    async def scenario() -> None:
        async with node() as (_, dial, rejected):
            await hold(dial, "asleep")
            await until(lambda: rejected["torn"] == 1)
            assert await request(dial, "asleep", FILE_METHOD) == LARGE  # its place is free again

    run(scenario())


def test_the_loop_goes_on_during_file_reads() -> None:
    asked, go = threading.Event(), threading.Event()

    def slow(peer: str, payload: bytes) -> bytes:
        asked.set()
        assert go.wait(HANG_S)
        return LARGE

    async def scenario() -> None:
        async with node() as (answers, dial, _):
            answers.servers[FILE_METHOD] = slow
            file = asyncio.create_task(request(dial, "one", FILE_METHOD))
            await until(asked.is_set)
            assert await request(dial, "two", "echo", b"here") == b"here"
            go.set()
            assert await file == LARGE

    run(scenario())


def test_only_files_are_long() -> None:
    async def scenario() -> None:
        async with node() as (answers, dial, rejected):
            answers.servers["long"] = lambda peer, payload: bytes(MAX_SHORT_BYTES + 1)
            with pytest.raises(PeerUnreachable, match="failed"):
                await request(dial, "one", "long")
            assert rejected["handler"] == 1

    run(scenario())
