"""Scenarios with real p2pd processes, for test_hivemind_plane.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from swarm_protocol.errors import NotOfSwarm, PeerUnreachable, ProtocolError, RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import FILE_METHOD, MANIFEST_METHOD
from swarm_protocol.transports.base import Accepted, Outgoing, Sink
from swarm_protocol.transports.p2p import daemon as p2p_daemon
from swarm_protocol.transports.p2p.daemon import NEW_S, Daemon
from tests.support.planes import EVERYWHERE, HANG_S, SWARM, Node
from tests.support.ports import free_port
from tests.support.scenarios import serve
from tests.support.waiting import until_async

Scenario = Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def started(*names: str, **settings: Any) -> AsyncIterator[list[Node]]:
    """Nodes, all connected to the first."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = [Node(Path(folder), name, **settings) for name in names]
        try:
            for node in nodes:
                await node.plane.daemon.start()
                if node is not nodes[0]:
                    await node.plane.connect(nodes[0].id, nodes[0].plane.addresses)
            yield nodes
        finally:
            for node in nodes:
                await node.plane.close()


async def until(condition: Callable[[], Any], seconds: float = HANG_S) -> Any:
    """What `condition` gives once it is true; it may be a coroutine function, and ask a peer that is not back yet."""

    async def reached() -> Any:
        result = condition()
        if not asyncio.iscoroutine(result):
            return result
        try:
            return await result
        except PeerUnreachable:
            return None

    return await until_async(reached, seconds)


# -------------------------------------------------------------------- membership


async def everybody_sees_everybody() -> None:
    async with started("one", "two", "three") as nodes:
        for node in nodes:
            assert await node.plane.store_card(node.card())
        for node in nodes:
            await until(lambda node=node: same(node.names(), {"one", "two", "three"}))
            assert node.plane.traffic.bytes_in > 500 and node.plane.traffic.bytes_out > 500
            assert not node.plane.traffic.rejected
        assert nodes[0].id in await nodes[1].plane.connections.connected()


async def a_newer_card_replaces_an_older_one() -> None:
    async with started("one", "two") as (one, two):
        for version in (1, 2):
            assert await one.plane.store_card(one.card(policy_version=version))
        assert (await two.plane.get_cards(EVERYWHERE))[one.id].policy_version == 2


async def a_dead_bootstrap_is_joined_when_it_appears() -> None:
    async with started("one") as (one,):
        with tempfile.TemporaryDirectory() as folder:
            late = Node(Path(folder), "late", port=free_port())
            address = f"/ip4/127.0.0.1/tcp/{late.plane.daemon.port_number}/p2p/{late.id}"
            assert await fails(one.plane.connect(late.id, [address]), PeerUnreachable)
            await one.plane.store_card(one.card())
            assert await one.names() == {"one"}  # alone, and not held up
            assert await fails(one.plane.connect(late.id, [address]), PeerUnreachable)
            one.plane.connections.dials.give(address)
            try:
                await late.plane.daemon.start()
                assert late.plane.addresses == [address]
                await one.plane.connect(late.id, [address])
                await one.plane.store_card(one.card())
                await late.plane.store_card(late.card())
                await until(lambda: same(late.names(), {"one", "late"}))
                await until(lambda: same(one.names(), {"one", "late"}))
            finally:
                await late.plane.close()


async def a_dial_only_node_is_a_member() -> None:
    async with started("hub") as (hub,):
        with tempfile.TemporaryDirectory() as folder:
            inside = Node(Path(folder), "inside", dial_only=True)
            try:
                await inside.plane.daemon.start()
                assert inside.plane.addresses == []
                await inside.plane.connect(hub.id, hub.plane.addresses)
                await inside.plane.store_card(inside.card())
                await hub.plane.store_card(hub.card())
                await until(lambda: same(hub.names(), {"hub", "inside"}))
                await until(lambda: same(inside.names(), {"hub", "inside"}))
                inside.serve("echo", lambda peer, payload: payload)
                assert (
                    await hub.ask(inside, "echo", b"through the connection it made")
                    == b"through the connection it made"
                )
            finally:
                await inside.plane.close()


async def two_that_relay_for_others_know_each_other() -> None:
    async with started("one", serve_relay=True, relay=True) as (one,):
        with tempfile.TemporaryDirectory() as folder:
            two = Node(Path(folder), "two", serve_relay=True, relay=True)
            try:
                await asyncio.wait_for(two.plane.daemon.start(), HANG_S)
                await two.plane.connect(one.id, one.plane.addresses)
                assert two.id in await one.plane.connections.connected() and two.said == []
            finally:
                await two.plane.close()


async def nobody_relays_unless_told_to() -> None:
    for serves in (False, True):
        async with started("hub", serve_relay=serves, relay=True) as (hub,):
            with tempfile.TemporaryDirectory() as folder:
                hidden = Node(Path(folder), "hidden", dial_only=True, relay=True)
                await hidden.plane.daemon.start()
                try:
                    await hidden.plane.connect(hub.id, hub.plane.addresses)
                    hidden.serve("say", lambda caller, payload: payload)
                    ways = [f"{address}/p2p-circuit/p2p/{hidden.id}" for address in hub.plane.addresses]
                    if serves:
                        await hidden.plane.streams.take_place(hub.id)
                        async with started("other", dial_only=True, relay=True) as (other,):
                            other.ways[hidden.id] = ways
                            assert await other.ask(hidden, "say", b"hi") == b"hi"
                    else:
                        await fails(hidden.plane.streams.take_place(hub.id), PeerUnreachable)
                finally:
                    await hidden.plane.close()


async def a_peer_connects_back() -> None:
    async with started("one", "two") as (one, two):
        listening = one.plane.daemon.port_number
        with socket.create_server(("127.0.0.1", 0)) as server:
            closed = server.getsockname()[1]
        found = await one.plane.streams.dial_back(two.id, [listening, closed])
        assert found == [True, False], found


async def addresses_that_make_no_sense_are_unreachable() -> None:
    async with started("one") as (one,):
        peer = Identity.generate().peer_id
        circuit = f"/p2p-circuit/p2p/{peer}"
        for address in (
            "",
            "/",
            f"/p2p/{peer}",
            f"/ip4/999.1.1.1/tcp/5/p2p/{peer}",
            f"/ip4/127.0.0.1/tcp/99999/p2p/{peer}",
            f"/ip4/127.0.0.1/udp/5/quic/p2p/{peer}",
            f"/dns4/{'a..b' * 40}/tcp/5/p2p/{peer}",
            circuit,
            f"/junk/7{circuit}",
            f"/ip4/127.0.0.1/tcp/5/p2p/!{circuit}",
            f"/ip4/127.0.0.1/tcp/5/p2p/zzz{circuit}",
            f"/junk/7/p2p/{peer}{circuit}",
        ):
            assert await fails(one.plane.connect(peer, [address]), PeerUnreachable), address
            one.ways[peer] = [address]
            assert await fails(one.plane.streams.request(peer, "x", b"", 5.0, 9), PeerUnreachable), address
        assert await fails(
            one.plane.connect("?", [f"/ip4/127.0.0.1/tcp/{one.plane.daemon.port_number}/p2p/?"]), PeerUnreachable
        )


async def new_cards_win_after_a_clock_set_back() -> None:
    async with started("one", "two") as nodes:
        real = time.time
        try:
            time.time = lambda: real() + 3600.0
            for node in nodes:
                assert await node.plane.store_card(node.card())
            assert await nodes[0].names() == {"one", "two"}
        finally:
            time.time = real
        for node in nodes:
            await node.names()  # notices
        for node in nodes:
            assert await node.plane.store_card(node.card(policy_version=2))
        for node in nodes:
            cards = (await node.plane.get_cards(EVERYWHERE)).values()
            assert {card.name for card in cards} == {"one", "two"} and {card.policy_version for card in cards} == {2}


# -------------------------------------------------------------------- death of p2pd


async def a_panic_of_p2pd_is_told() -> None:
    make = p2p_daemon._p2pd_class

    def panicking(daemon: Daemon) -> Any:
        class Panicking(make(daemon)):  # type: ignore[misc]
            @classmethod
            async def create(cls, **options: Any) -> Any:
                return await super().create(**options | {"trusted_relays": [f"/ip4/127.0.0.1/tcp/5/p2p/{peer}"]})

        return Panicking

    with tempfile.TemporaryDirectory() as folder:
        one, peer = Node(Path(folder), "one"), Identity.generate().peer_id
        p2p_daemon._p2pd_class = panicking
        try:
            start = asyncio.create_task(one.plane.daemon.start())
            await until(lambda: one.said)
            assert one.said[0].startswith("p2pd does not start: panic: Found staticRelays"), one.said
        finally:
            p2p_daemon._p2pd_class = make
            await one.plane.close()
            start.cancel()


async def a_killed_p2pd_is_replaced() -> None:
    async with started("one", "two") as (one, two):
        for node in (one, two):
            await node.plane.store_card(node.card())
            node.serve("echo", lambda peer, payload: payload)
        asked, go_on = threading.Event(), threading.Event()
        two.serve("hold", lambda peer, payload: asked.set() or bytes(go_on.wait(HANG_S)))
        pid, port = one.plane.daemon.pid, one.plane.daemon.port_number
        held = asyncio.create_task(one.ask(two, "hold", timeout=7200.0))
        await until(asked.is_set)
        os.kill(pid, signal.SIGKILL)
        lookup = asyncio.create_task(one.plane.get_cards(EVERYWHERE))
        results = await asyncio.wait_for(asyncio.gather(held, lookup, return_exceptions=True), HANG_S)
        assert all(isinstance(result, PeerUnreachable) for result in results), results
        go_on.set()
        await until(lambda: one.plane.daemon.restarts == 1)
        assert one.plane.daemon.port_number == port and one.plane.daemon.pid != pid
        assert any("code -9" in sentence for sentence in one.said)
        assert await until(lambda: two.ask(one, "echo", b"still you")) == b"still you"  # same peer id, same address
        assert await one.names() == {"one", "two"}  # its part of the DHT outlived p2pd
        assert len(os.listdir(one.plane.daemon.folder)) == 2  # sockets of the dead one are gone


async def p2pd_is_replaced_each_time_it_dies() -> None:
    async with started("one") as (one,):
        for round in range(3):
            pid = await until(lambda: one.plane.daemon.pid)
            os.kill(pid, signal.SIGKILL)
            await until(lambda round=round: one.plane.daemon.restarts == round + 1)
        await one.plane.store_card(one.card())
        assert await one.names() == {"one"}


# -------------------------------------------------------------------- ports, ends


async def a_port_that_is_taken_is_left_alone() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        async with started("one", port=port) as (one,):
            assert port < one.plane.daemon.port_number <= port + 100
            assert any(f"port {port} is taken" in sentence for sentence in one.said)
            async with started("two", port=one.plane.daemon.port_number) as (two,):
                assert two.plane.daemon.port_number > one.plane.daemon.port_number


async def nodes_starting_at_once_share_no_port() -> None:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        nodes = [Node(Path(folder), name, port=port) for name in ("one", "two", "three")]
        try:
            await asyncio.gather(*(node.plane.daemon.start() for node in nodes))
            assert len({node.plane.daemon.port_number for node in nodes}) == 3
        finally:
            for node in nodes:
                await node.plane.close()


async def a_port_that_another_program_shares_is_left() -> None:
    async with started("one") as (one,):
        port = one.plane.daemon.port_number
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as p2pd does

            def intrude() -> None:
                other.bind(("127.0.0.1", port))
                other.listen()

            def take_and_lose() -> int:
                asyncio.get_running_loop().call_soon(intrude)
                one.plane.daemon.port.take = take
                return take()

            take, one.plane.daemon.port.take = one.plane.daemon.port.take, take_and_lose
            os.kill(one.plane.daemon.pid, signal.SIGKILL)
            await until(lambda: one.plane.daemon.restarts == 1)
        assert one.plane.daemon.port_number != port
        assert any(f"port {port} was taken meanwhile" in sentence for sentence in one.said)


async def settings_that_cannot_work_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder), "one", listen="192.0.2.1")  # an address of nobody
        try:
            assert "192.0.2.1" in str(await fails(node.plane.daemon.start(), ProtocolError))
        finally:
            await node.plane.close()


async def announced_addresses_come_first() -> None:
    async with started("one", announce=("203.0.113.7", "home.example", "/ip4/203.0.113.8/tcp/4")) as (one,):
        port = one.plane.daemon.port_number
        assert one.plane.addresses == [
            f"{address}/p2p/{one.id}"
            for address in (
                "/dns4/home.example/tcp/" + str(port),
                f"/ip4/203.0.113.7/tcp/{port}",
                "/ip4/203.0.113.8/tcp/4",
            )
        ]


async def closing_leaves_nothing_behind() -> None:
    async with started("one", "two") as nodes:
        pids, folders = [node.plane.daemon.pid for node in nodes], [node.plane.daemon.folder for node in nodes]
        assert all(map(_alive, pids))
        threads = threading.enumerate()
        one, two = nodes
        one.serve(MANIFEST_METHOD, lambda peer, payload: b"tasks")
        assert await two.ask(one, MANIFEST_METHOD) == b"tasks"
        started_by_request = set(threading.enumerate()) - set(threads)
    assert not any(map(_alive, pids))
    assert not any(map(os.path.exists, folders))
    assert started_by_request
    await until(lambda: not any(thread.is_alive() for thread in started_by_request))


async def what_killed_processes_left_is_removed() -> None:
    long_ago = time.time() - NEW_S - 5.0
    left, new = (tempfile.mkdtemp(prefix=f"swarm-node-{os.getuid()}-") for _ in range(2))
    Path(left, "p2pd.sock").touch()
    os.utime(left, (long_ago, long_ago))
    try:
        async with started("one") as (one,):
            assert not os.path.exists(left) and os.path.exists(new)
            os.utime(one.plane.daemon.folder, (long_ago, long_ago))
            async with started("two"):
                assert os.path.exists(one.plane.daemon.folder)
    finally:
        os.rmdir(new)


async def ctrl_c_does_not_reach_p2pd() -> None:
    async with started("one") as (one,):
        pid = one.plane.daemon.pid
        assert os.getsid(pid) == pid != os.getsid(0)  # the terminal's signals go to its session, group by group


async def closing_while_all_processes_are_ended_restarts_none() -> None:
    async with started("one") as (one,):
        os.kill(one.plane.daemon.pid, signal.SIGTERM)
        await one.plane.close()
        assert one.said == [] and one.plane.daemon.restarts == 0


# -------------------------------------------------------------------- requests


async def requests_are_answered() -> None:
    async with started("one", "two") as (one, two):
        callers: list[str] = []
        big = os.urandom(3 * 2**20 + 17)
        one.serve("echo", lambda peer, payload: callers.append(peer) or payload)
        one.serve(FILE_METHOD, lambda peer, payload: big)
        assert await two.ask(one, "echo", b"") == b""
        assert await two.ask(one, "echo", b"x" * 65536, limit=65536) == b"x" * 65536
        assert callers == [two.id, two.id]
        assert await two.ask(one, FILE_METHOD, limit=2**22) == big
        assert two.plane.traffic.bytes_in > len(big) and one.plane.traffic.bytes_out > len(big)
        assert await one.refused(two, FILE_METHOD) == "unreachable"  # served by the other only


async def other_swarms_are_told_from_the_dead() -> None:
    async with started("one", "two") as (one, two):
        one.serve("echo", lambda peer, payload: payload)
        two.plane.streams.request_protocol = two.plane.streams.request_protocol.replace(SWARM[:16], "cd" * 8)
        failure = await fails(two.ask(one, "echo"), ProtocolError)
        assert isinstance(failure, NotOfSwarm), repr(failure)
        await one.plane.close()
        failure = await fails(two.ask(one, "echo"), ProtocolError)
        assert type(failure) is PeerUnreachable, repr(failure)


async def requests_fail_in_time() -> None:
    async with started("one", "two") as (one, two):

        def refuse(peer: str, payload: bytes) -> bytes:
            raise RemoteProtocolError("secret", "not for you\n")

        one.serve("big", lambda peer, payload: bytes(1025))
        one.serve("refuse", refuse)
        one.serve("fail", lambda peer, payload: payload[1:2].decode() + 1)  # type: ignore[operator]
        assert await two.refused(one, "big") == "size"
        assert await two.refused(one, "refuse") == "secret"
        assert await two.refused(one, "fail") == "unreachable"
        assert any("answering 'fail' failed" in sentence for sentence in one.said)
        assert await two.refused(one, "no such method") == "unreachable"
        assert await two.refused(two, "big") == "unreachable"  # itself
        for nobody in (Identity.generate().peer_id, "?"):
            assert await fails(two.plane.streams.request(nobody, "big", b"", 5.0, 1), PeerUnreachable)
        assert {"secret", "handler", "method"} <= one.plane.traffic.rejected.keys()


async def streams_that_lie_are_seen_through() -> None:
    async with started("one", "two") as (one, two):
        answers = {
            b"t": b"\0" + (100).to_bytes(8, "big") + bytes(32) + b"only this",
            b"h": b"\0" + (9).to_bytes(8, "big") + bytes(32) + b"only this",
            b"s": b"\0" + (2**63).to_bytes(8, "big") + bytes(32),
            b"r": b"\1" + (2**40).to_bytes(8, "big") + bytes(32),
            b"e": b"",
        }

        async def hostile(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(3)
            await reader.readexactly(40)
            writer.write(answers.get(await reader.readexactly(1), b"\0"))
            await writer.drain()
            if name_of_the_game != "silent":
                writer.close()

        one.plane.daemon.p2pd._client.control.handlers[one.plane.streams.request_protocol] = hostile
        name_of_the_game = "liar"
        reasons = [await two.refused(one, "ab", answer) for answer in (b"t", b"h", b"s", b"r", b"e")]
        assert reasons == ["torn", "hash", "size", "size", "torn"], reasons
        name_of_the_game = "silent"
        assert await two.refused(one, "ab", b"?", timeout=1.0) == "unreachable"


async def callers_that_lie_are_borne() -> None:
    async with started("one", "two") as (one, two):
        one.serve("echo", lambda peer, payload: payload)

        async def send(data: bytes) -> bytes:
            from hivemind.p2p import PeerID

            _, reader, writer = await two.plane.daemon.p2pd.call_binary_stream_handler(
                PeerID.from_base58(one.id), one.plane.streams.request_protocol
            )
            writer.write(data)
            if writer.can_write_eof() and not data.endswith(b"hold"):
                writer.write_eof()
            answer = await asyncio.wait_for(reader.read(4096), HANG_S)
            writer.close()
            return answer

        assert await send(b"\4echo" + (2**60).to_bytes(8, "big") + bytes(32) + b"hold") != b""  # a refusal, at once
        assert one.plane.traffic.rejected["size"] == 1
        await send(b"\4echo" + (10).to_bytes(8, "big") + bytes(32) + b"short")
        await send(b"\4ec")
        await until(lambda: one.plane.traffic.rejected["torn"] >= 2)
        assert await two.ask(one, "echo", b"fine") == b"fine"


async def one_caller_cannot_take_all_places() -> None:
    async with started("one", "two") as (one, two):
        go_on, entered = threading.Event(), []

        def hold(peer: str, payload: bytes) -> bytes:
            entered.append(peer)
            go_on.wait(60)
            return payload

        one.serve("hold", hold)
        one.serve("echo", lambda peer, payload: payload)
        held = [asyncio.create_task(two.ask(one, "hold", timeout=60.0)) for _ in range(4)]
        try:
            await until(lambda: len(entered) == 4)
            # p2pd may drop the answer "busy" when the stream is closed before the request was read
            assert await two.refused(one, "echo") in ("unreachable", "torn")
            assert one.plane.traffic.rejected["busy"] == 1
        finally:
            go_on.set()
        await asyncio.gather(*held)
        await until(lambda: same(two.refused(one, "echo"), "answered"))


# -------------------------------------------------------------------- exchanges


class Body:
    """What a node sends and gets in exchanges of `swap`; what its acceptor is told."""

    def __init__(self, size: int) -> None:
        self.sent = os.urandom(size)
        self.got = bytearray()
        self.outcomes: list[Exception | None] = []

    @property
    def outgoing(self) -> Outgoing:
        pieces = (memoryview(self.sent)[start : start + 2**20] for start in range(0, len(self.sent), 2**20))
        return Outgoing(b"head", len(self.sent), lambda: pieces)

    def answered(self, head: bytes, size: int) -> Sink:
        assert head == b"head"
        self.got.clear()
        return self.got.extend

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        return Accepted(self.outgoing, self.answered(head, size), self.outcomes.append)


async def exchange(caller: Node, acceptor: Node, ours: Body, timeout: float = HANG_S) -> str:
    """How it ended: `whole`, a reason, or `unreachable`."""
    try:
        caller.ways[acceptor.id] = acceptor.plane.addresses
        await caller.plane.streams.exchange(acceptor.id, "swap", ours.outgoing, ours.answered, timeout)
    except RemoteProtocolError as error:
        return error.reason
    except PeerUnreachable:
        return "unreachable"
    return "whole"


async def bodies_are_exchanged() -> None:
    async with started("one", "two") as (one, two):
        ours, theirs = Body(8 * 2**20), Body(8 * 2**20 + 17)
        two.accept("swap", theirs.accept)
        assert await exchange(one, two, ours) == "whole"
        await until(lambda: theirs.outcomes == [None])
        assert ours.got == theirs.sent and theirs.got == ours.sent
        assert one.plane.traffic.bytes_out > 8 * 2**20 and one.plane.traffic.bytes_in > 8 * 2**20
        assert await exchange(two, one, theirs) == "unreachable"  # has no acceptor

        def refuse(peer: str, head: bytes, size: int) -> Accepted:
            raise RemoteProtocolError("early", f"{peer} {size}")

        two.accept("swap", refuse)
        assert await exchange(one, two, ours) == "early"
        assert not one.said and not two.said


async def an_exchange_fails_with_its_p2pd() -> None:
    async with started("one", "two") as (one, two):
        for victim, ends in ((one, ("unreachable",)), (two, ("torn", "unreachable"))):
            ours, theirs = Body(64 * 2**20), Body(64 * 2**20)
            two.accept("swap", theirs.accept)
            call = asyncio.create_task(exchange(one, two, ours))
            await until(lambda ours=ours, theirs=theirs: ours.got and theirs.got)
            os.kill(victim.plane.daemon.pid, signal.SIGKILL)
            assert await asyncio.wait_for(call, HANG_S) in ends
            await until(lambda theirs=theirs: len(theirs.outcomes) == 1)
            assert isinstance(theirs.outcomes[0], ProtocolError)
            assert ours.got != theirs.sent and theirs.got != ours.sent
            await until(lambda victim=victim: victim.plane.daemon.restarts == 1)
            ours, theirs = Body(2**20), Body(2**20)
            two.accept("swap", theirs.accept)
            await until(lambda ours=ours: same(exchange(one, two, ours), "whole"))
            await until(lambda theirs=theirs: None in theirs.outcomes)
            assert ours.got == theirs.sent and theirs.got == ours.sent


async def exchanges_that_stall_are_given_up() -> None:
    async with started("one", "two") as (one, two):
        theirs = Body(2**20)
        two.accept("swap", theirs.accept)

        def stuck(head: bytes, size: int) -> Sink:
            time.sleep(6.0)  # longer than the caller has; it waits for what works for it to end
            return theirs.answered(head, size)

        ours = Body(2**20)
        nobody = Identity.generate().peer_id
        for peer in (nobody, one.id, "?"):
            call = one.plane.streams.exchange(peer, "swap", ours.outgoing, ours.answered, 5.0)
            assert isinstance(await fails(call, ProtocolError), PeerUnreachable)
        call = one.plane.streams.exchange(two.id, "swap", ours.outgoing, stuck, 5.0)
        assert "within 5 s" in str(await fails(call, PeerUnreachable))
        await until(lambda: len(theirs.outcomes) == 1)

        ours, theirs = Body(64 * 2**20), Body(64 * 2**20)
        two.accept("swap", theirs.accept)
        running = asyncio.create_task(exchange(one, two, ours))
        await until(lambda: ours.got)
        await one.plane.close()
        assert await asyncio.wait_for(running, HANG_S) == "unreachable"
        await until(lambda: len(theirs.outcomes) == 1)
        assert isinstance(theirs.outcomes[0], ProtocolError)
        assert await exchange(one, two, ours) == "unreachable"


async def closing_tells_acceptors() -> None:
    async with started("one", "two") as (one, two):
        ours, theirs = Body(64 * 2**20), Body(64 * 2**20)
        two.accept("swap", theirs.accept)
        running = asyncio.create_task(exchange(one, two, ours))
        await until(lambda: theirs.got)
        await two.plane.close()
        assert len(theirs.outcomes) == 1 and isinstance(theirs.outcomes[0], ProtocolError)
        assert await asyncio.wait_for(running, HANG_S) in ("torn", "unreachable")


# -------------------------------------------------------------------- helpers, main


async def same(found: Awaitable[Any], wanted: Any) -> bool:
    return bool(await found == wanted)


async def fails(call: Awaitable[Any], kind: type[Exception]) -> Exception:
    try:
        result = await call
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {result!r}")


def _alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _run(scenario: Scenario) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # hivemind's own tasks after a kill
    await scenario()


def main(scenarios: dict[str, Any]) -> None:
    serve(scenarios, lambda scenario: asyncio.run(_run(scenario)))


if __name__ == "__main__":
    main(globals())
