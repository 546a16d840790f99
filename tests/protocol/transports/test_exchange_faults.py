"""Exchanges that fail by a fault of a peer or of this node, and the places that exchanges take."""

from __future__ import annotations

import asyncio
import threading
from hashlib import sha256
from weakref import ref

import pytest

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES, MAX_HEAD_BYTES
from swarm_protocol.transports.base import Outgoing
from swarm_protocol.transports.streams import exchanges
from swarm_protocol.transports.streams.exchanges import MAX_EXCHANGES, MAX_EXCHANGES_PER_PEER
from swarm_protocol.transports.streams.stream import Stream
from tests.protocol.transports.exchange_world import (
    HEAD,
    TO_ACCEPTOR,
    TO_CALLER,
    Side,
    body,
    node,
    reason,
    until_still,
)
from tests.support.clocks import HANG_S, run, settle, until


@pytest.mark.parametrize("who", [TO_ACCEPTOR, TO_CALLER])
def test_a_sink_may_end_the_exchange(who: str) -> None:
    async def scenario() -> None:
        us, them = Side(5 * MAX_CHUNK_BYTES, 1), Side(4 * MAX_CHUNK_BYTES, 2)

        def refuse(piece: memoryview) -> None:
            raise RemoteProtocolError("nan", "not a number")

        (us if who == TO_CALLER else them).sink = refuse  # type: ignore[method-assign]
        async with node() as there:
            caller, acceptor = await there.run(us, them)
            ends = {TO_CALLER: (caller, there.callers), TO_ACCEPTOR: (acceptor, there.traffic)}
            error, traffic = ends.pop(who)
            assert reason(error) == "nan" and traffic.rejected == {"nan": 1}
            ((error, traffic),) = ends.values()
            assert reason(error) == "torn" and traffic.rejected == {"torn": 1}
            assert not there.said

    run(scenario())


@pytest.mark.parametrize("sizes", [(0, 0), (10, 3 * MAX_CHUNK_BYTES)])
def test_promised_bodies_arrive(sizes: tuple[int, int]) -> None:
    async def scenario() -> None:
        sides = Side(sizes[0], 1), Side(sizes[1], 2)
        for side in sides:
            side.promises = sha256(side.body).digest()
        async with node() as there:
            assert await there.run(*sides) == (None, None)

    run(scenario())


@pytest.mark.parametrize("who", [TO_ACCEPTOR, TO_CALLER])
def test_another_body_than_the_promised_one_is_refused(who: str) -> None:
    async def scenario() -> None:
        us, them = Side(1000, 1), Side(1000, 2)
        for side in (us, them):
            side.promises = sha256(side.body).digest()
        liar = us if who == TO_ACCEPTOR else them
        liar.body = them.body if liar is us else us.body  # as if it had seen the other's first
        async with node() as there:
            ends = dict(zip((TO_CALLER, TO_ACCEPTOR), await there.run(us, them), strict=True))
            victim = ends[TO_ACCEPTOR if who == TO_ACCEPTOR else TO_CALLER]
            assert reason(victim) == "hash" and "promised" in str(victim)

    run(scenario())


class Silent(Side):
    """Promises nothing."""

    @property
    def outgoing(self) -> Outgoing:
        def promise() -> bytes:
            raise RemoteProtocolError("busy", "no promise")

        return Outgoing(self.head, self.claims, self.pieces, promise)


@pytest.mark.parametrize("who", [TO_ACCEPTOR, TO_CALLER])
def test_no_body_leaves_before_the_other_is_promised(who: str) -> None:
    async def scenario() -> None:
        victim, silent = Side(3 * MAX_CHUNK_BYTES, 1), Silent(3 * MAX_CHUNK_BYTES, 2)
        victim.promises = sha256(victim.body).digest()
        us, them = (silent, victim) if who == TO_ACCEPTOR else (victim, silent)
        async with node() as there:
            await there.run(us, them)
            assert victim.told == [(silent.head, len(silent.body))], "heads are exchanged"
            assert victim.made == 0 and not silent.got
            assert reason(victim.outcomes[0]) == "torn"

    run(scenario())


class Body(bytearray):
    """One that weak references can be made to."""


def test_a_kept_error_keeps_no_buffers() -> None:
    held = []

    def fail() -> None:
        buffer = Body()
        held.append(ref(buffer))
        raise OSError("torn")

    def fail_again() -> None:
        buffer = Body()
        held.append(ref(buffer))
        try:
            fail()
        except OSError as error:
            raise RemoteProtocolError("torn") from error

    try:
        fail_again()
    except RemoteProtocolError as error:
        kept = error
    assert all(reference() is not None for reference in held)
    exchanges.let_go(kept)
    assert len(held) == 2 and all(reference() is None for reference in held)


@pytest.mark.parametrize("who", [TO_ACCEPTOR, TO_CALLER])
@pytest.mark.parametrize(
    ("claims", "size", "piece"),
    [
        (1001, 1000, 100),
        (999, 1000, 100),
        (1000, 0, 1),
        (0, 1, 1),
        (2 * MAX_CHUNK_BYTES, 2 * MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1),
    ],
)
def test_pieces_must_add_up(who: str, claims: int, size: int, piece: int) -> None:
    async def scenario() -> None:
        us, them = Side(1, 1), Side(1, 2)
        wrong, right = (us, them) if who == TO_CALLER else (them, us)
        wrong.body, wrong.claims, wrong.piece = body(size), claims, piece
        async with node() as there:
            ends = dict(zip((TO_CALLER, TO_ACCEPTOR), await there.run(us, them), strict=True))
            assert isinstance(ends.pop(who), LocalProtocolError)
            assert reason(ends.popitem()[1]) == "torn"
            assert (there.callers if who == TO_CALLER else there.traffic).rejected == {"handler": 1}
            assert len(there.said) == 1 and "'swap' failed" in there.said[0]

    run(scenario())


@pytest.mark.parametrize(
    ("who", "callback"),
    [(who, callback) for who in (TO_ACCEPTOR, TO_CALLER) for callback in ("answered", "pieces", "sink")]
    + [(TO_ACCEPTOR, "done")],
)
def test_faults_in_callbacks_are_reported_and_survived(who: str, callback: str) -> None:
    async def scenario() -> None:
        us, them = Side(MAX_CHUNK_BYTES, 1), Side(MAX_CHUNK_BYTES, 2)
        side = us if who == TO_CALLER else them

        def fail(*arguments: object) -> None:
            if callback == "done":
                side.outcomes.append(arguments[0])  # type: ignore[arg-type]
            raise OSError("disk full")

        setattr(side, callback, fail)
        async with node() as there:
            caller, acceptor = await there.run(us, them)
            assert (there.callers if who == TO_CALLER else there.traffic).rejected == {"handler": 1}
            assert there.said == ["exchanging 'swap' failed: OSError('disk full')"]
            if callback == "done":
                assert caller is acceptor is None
            elif callback == "answered" and who == TO_ACCEPTOR:
                assert isinstance(caller, PeerUnreachable) and "failed" in str(caller)
            else:
                assert isinstance(caller if who == TO_CALLER else acceptor, LocalProtocolError)
            good, fine = Side(10, 3), Side(20, 4)
            assert await there.run(good, fine) == (None, None)

    run(scenario())


def test_an_acceptor_s_long_head_is_refused() -> None:
    async def scenario() -> None:
        us, them = Side(1), Side(1)
        them.head = bytes(MAX_HEAD_BYTES + 1)
        async with node() as there:
            caller, acceptor = await there.run(us, them)
            assert isinstance(caller, PeerUnreachable) and isinstance(acceptor, LocalProtocolError)

    run(scenario())


# --------------------------------------------------------------------- places, ends


def test_one_peer_gets_few_places() -> None:
    async def scenario() -> None:
        async with node() as there:
            them = Side()

            async def hold(peer: str) -> None:
                """Be accepted, and send no body."""
                _, writer = await there.dial(peer)
                writer.write(b"\4swap" + HEAD + (1).to_bytes(8, "big"))

            there.exchanges.acceptors["swap"] = them.accept
            for _ in range(MAX_EXCHANGES_PER_PEER):
                await hold("greedy")
            await until(lambda: len(them.told) == MAX_EXCHANGES_PER_PEER)
            us = Side()
            await there.call(us, "greedy")
            assert isinstance(us.outcomes[0], PeerUnreachable) and str(us.outcomes[0]) == "busy"
            for i in range(MAX_EXCHANGES - MAX_EXCHANGES_PER_PEER):
                await hold(f"peer {i}")
            await until(lambda: len(them.told) == MAX_EXCHANGES)
            late = Side()
            await there.call(late, "late")
            assert str(late.outcomes[0]) == "busy" and there.traffic.rejected == {"busy": 2}
            assert len(them.told) == MAX_EXCHANGES and not them.outcomes
            for writer in there.writers:
                writer.transport.abort()
            await until(lambda: len(them.outcomes) == MAX_EXCHANGES)
            await asyncio.gather(*there.tasks)
            again = Side()
            await there.call(again, "greedy")
            assert again.outcomes == [None]

    run(scenario())


def test_openings_have_few_places_and_little_time() -> None:
    async def scenario() -> None:
        async with node() as there:
            there.exchanges.acceptors["swap"] = Side().accept
            for _ in range(exchanges.MAX_OPENINGS_PER_PEER):
                _, writer = await there.dial("slow")
                writer.write(b"\4sw")
            await settle()
            us = Side()
            await there.call(us, "slow")
            assert us.outcomes == [None]
            await until(lambda: there.traffic.rejected["slow"] == exchanges.MAX_OPENINGS_PER_PEER - 1)
            assert there.traffic.rejected["crowded"] == 1 and len(there.said) == 1  # the oldest made room

    run(scenario())


def test_openings_that_do_not_come_keep_nobody_out() -> None:
    async def scenario() -> None:
        async with node() as there:
            there.exchanges.acceptors["swap"] = Side().accept
            for i in range(exchanges.MAX_OPENINGS + 10):
                (await there.dial(f"slow {i}"))[1].write(b"\4sw")
            us = Side()
            await there.call(us, "newcomer")
            assert us.outcomes == [None]
            assert there.traffic.rejected["crowded"] >= 10 and there.traffic.rejected["busy"] == 0

    run(scenario())


@pytest.mark.parametrize("callback", ["accept", "pieces", "sink", "done"])
def test_cancelling_waits_for_callbacks_and_tells_once(callback: str) -> None:
    inside, go = threading.Event(), threading.Event()

    async def scenario() -> None:
        us, them = Side(100, 1), Side(100, 2)
        original = getattr(them, callback)

        def slow(*arguments: object) -> object:
            inside.set()
            assert go.wait(HANG_S)
            return original(*arguments)

        setattr(them, callback, slow)
        async with node() as there:
            running = asyncio.create_task(there.run(us, them))
            await until(inside.is_set)
            tasks = there.exchanges.cancel()
            assert tasks == set(there.tasks)
            there.exchanges.cancel()
            await until_still(busy=1)
            assert them.outcomes == [] and not any(task.done() for task in tasks)
            go.set()
            await running
            assert len(them.outcomes) == 1
            if callback != "done":
                assert isinstance(them.outcomes[0], PeerUnreachable) and us.outcomes != [None]

    run(scenario())


def test_a_cancelled_caller_ends_its_callbacks_first() -> None:
    inside, go = threading.Event(), threading.Event()

    async def scenario() -> None:
        us, them = Side(100, 1), Side(100, 2)

        def slow(piece: memoryview) -> None:
            inside.set()
            assert go.wait(HANG_S)
            us.got += piece

        async with node() as there:
            there.exchanges.acceptors["swap"] = them.accept
            near = await there.dial()
            call = asyncio.create_task(
                there.mine.call(Stream(*near, there.callers, "peer"), "swap", us.outgoing, lambda head, size: slow)
            )
            await until(inside.is_set)
            (task,) = there.mine.cancel()
            assert task is call
            await until_still(busy=1)
            assert not call.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert us.got == them.body
            await asyncio.gather(*there.tasks)
            assert reason(them.outcomes[0]) == "torn"

    run(scenario())
