"""Gossip between real processes on loopback. This process imports neither libp2p nor hivemind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarm_protocol.transports.gossip import client as gossip_client
from swarm_protocol.transports.gossip.pipe import (
    Ask,
    Dial,
    Event,
    Frames,
    GossipReady,
    GossipSettings,
    Message,
    Status,
    Subscribe,
    frame,
)
from swarm_protocol.transports.ports import Port
from tests.support.gossip_peers import (
    HANG_S,
    SWARM,
    TOPIC,
    Peer,
    connect_all,
    dial_all,
    expected,
    needs_proc,
    rss,
    swarm,
    talk,
    until_all_heard,
    until_stat,
)
from tests.support.processes import alive
from tests.support.waiting import until_async

pytestmark = pytest.mark.timeout(300)


def test_each_message_reaches_each_peer_once() -> None:
    async def run() -> None:
        async with swarm(4) as peers:
            await connect_all(peers)
            said = []
            for size in (300_000, 5_000):
                said += await talk(peers, 20, size)
                await until_all_heard(peers, said)  # nor anything twice of what was said before
            stats = [await peer.stat() for peer in peers]
            assert all(stat.rejected == {} and stat.dropped == 0 for stat in stats)
            assert all(stat.messages_out == 10 and stat.messages_in == 30 for stat in stats)
            assert sum(stat.bytes_in for stat in stats) >= 20 * 3 * 305_000  # all of it passed over sockets

    asyncio.run(run())


def test_a_killed_sidecar_comes_back_with_its_subscriptions() -> None:
    async def run() -> None:
        async with swarm(3) as peers:
            await connect_all(peers)
            victim, others = peers[0], peers[1:]
            victim.on_start = lambda: [victim.dial(peer.addresses[0]) for peer in others]  # type: ignore[assignment]
            before = victim.gossip_id, victim.addresses, await victim.stat()
            earlier = []
            for kills in (1, 2):
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
                await until_async(lambda kills=kills: victim.restarts == kills and victim.pid is not None, HANG_S)
                earlier.append(victim.say())  # queued while it starts
                await until_stat(victim, lambda stat: stat.mesh.get(TOPIC, 0) == 2)
                await until_async(lambda: all(earlier[-1] in peer.heard for peer in others), HANG_S)
            assert victim.gossip_id != before[0]
            assert [a.split("/p2p/")[0] for a in victim.addresses] == [a.split("/p2p/")[0] for a in before[1]]
            for peer in peers:
                peer.heard.clear()
            said = await talk(peers, 15, 20_000)
            await until_all_heard(peers, said, earlier)
            after = await victim.stat()
            assert after.bytes_out > before[2].bytes_out
            assert any("ended (-9)" in report for report in victim.reports)

    asyncio.run(run())


def test_a_taken_port_is_passed_over() -> None:
    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            async with swarm(1, port=port, announce=["example.org", "203.0.113.7"]) as (peer,):
                other = peer.settings.port
                assert port < other < port + 100
                assert peer.addresses == [
                    f"/dns4/example.org/tcp/{other}/p2p/{peer.gossip_id}",
                    f"/ip4/203.0.113.7/tcp/{other}/p2p/{peer.gossip_id}",
                    f"/ip4/127.0.0.1/tcp/{other}/p2p/{peer.gossip_id}",
                ]

    asyncio.run(run())


def test_a_port_taken_while_starting_is_given_up() -> None:
    async def run() -> None:
        peer, port = Peer(0), Port("127.0.0.1", 0)
        peer._port = port
        lost = port.take()
        with socket.socket() as other:
            taking = asyncio.create_task(peer.start())
            await until_async(lambda: peer.pid is not None, HANG_S)
            other.bind(("127.0.0.1", lost))
            other.listen()
            try:
                await taking
                assert peer.settings.port == port.number != lost
                assert f"/tcp/{port.number}/" in peer.addresses[0]
                assert peer.restarts == 1 and f"port {lost} was taken meanwhile" in peer.reports[0]
            finally:
                await peer.close()
                port.release()

    asyncio.run(run())


def test_dials_that_fail_harm_nothing() -> None:
    async def run() -> None:
        async with swarm(2) as (peer, other):
            nobody = "12D3KooWA5QapJCxXj1sqbLndrL9jm3UKnHvuuBprxM6pjmCh6R1"
            for address in (
                f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}",
                f"/ip4/127.0.0.1/tcp/{peer.settings.port}/p2p/{nobody}",
                peer.addresses[0],
                "/ip4/127.0.0.1/tcp/1",
                "nonsense",
            ):
                for _ in range(20):  # more in all than may be under way
                    peer.dial(address)
            dial = partial(peer.dial, other.addresses[0])
            dial()
            await until_stat(peer, lambda stat: stat.mesh.get(TOPIC, 0) == 1, again=dial)
            assert peer.restarts == 0

    asyncio.run(run())


@pytest.mark.long
def test_a_latecomer_hears_large_messages_whole() -> None:
    """Recent messages are replayed to a newcomer while new ones are sent: each must arrive whole."""

    async def run() -> None:
        async with swarm(2) as peers, swarm(1, first=2) as (late,):
            await connect_all(peers)
            said = await talk(peers, 10, 450_000)
            for peer in peers:
                late.dial(peer.addresses[0])
            while len(late.heard) < 20:
                said += await talk(peers, 2, 450_000)
            await until_async(lambda: said[-1][1] in late.heard, HANG_S)
            assert len(late.heard) == len(set(late.heard))
            assert (await late.stat()).rejected == {}
            await until_all_heard(peers, said)

    asyncio.run(run())


@pytest.mark.long
def test_a_full_hub_says_no_until_somebody_leaves() -> None:
    async def run() -> None:
        async with swarm(1, max_connections=2) as (hub,), swarm(3, first=1, dial_only=True) as leaves:
            for leaf in leaves[:2]:
                leaf.dial(hub.addresses[0])
            await until_stat(hub, lambda stat: stat.mesh.get(TOPIC, 0) == 2)
            await until_all_heard(leaves[:2], await talk(leaves[:2], 2, 5000))  # who is heard keeps its place
            leaves[2].dial(hub.addresses[0])
            await until_stat(hub, lambda stat: stat.rejected.get("connections") == 1)
            hub.drop([leaves[0].gossip_id, "nobody"])
            await until_stat(hub, lambda stat: leaves[0].gossip_id not in stat.peers)
            leaves[2].dial(hub.addresses[0])  # which may still be trying by itself
            await until_stat(hub, lambda stat: leaves[2].gossip_id in stat.peers)
            for leaf in leaves:
                leaf.heard.clear()
            said = await talk(leaves[1:], 4, 5000)
            await until_async(lambda: all(set(expected(leaf, said)) <= set(leaf.heard) for leaf in leaves[1:]), HANG_S)

    asyncio.run(run())


@pytest.mark.long
def test_peers_that_dial_each_other_are_linked() -> None:
    async def run() -> None:
        async with swarm(2) as peers:
            for _ in range(5):
                for peer, other in (peers, reversed(peers)):
                    peer.dial(other.addresses[0])
                for peer in peers:
                    await until_stat(peer, lambda stat: stat.mesh.get(TOPIC, 0) == 1)
                for peer in peers:
                    peer.heard.clear()
                await until_all_heard(peers, await talk(peers, 4, 50_000))
                peers[0].drop([peers[1].gossip_id])
                for peer in peers:
                    await until_stat(peer, lambda stat: stat.peers == [])

    asyncio.run(run())


def test_hostile_messages_are_refused_and_counted() -> None:
    refused = {
        "garbage": "frame",
        "forged": "forged",
        "wrong_swarm": "swarm",
        "far_future": "future",
        "resets": "flood",
    }

    async def run() -> None:
        async with swarm(2, shards=2) as peers:
            await connect_all(peers)
            reports = await attack(peers[0], refused, *refused, "bad_mux")
            assert all(report["sent"] for report in reports), reports
            await until_all_heard(peers, await talk(peers, 2, 5000))  # that, and nothing of the other's
            assert all(peer.restarts == 0 for peer in peers)

    asyncio.run(run())


def test_nobody_is_given_a_message_twice() -> None:
    async def run() -> None:
        async with swarm(2, shards=2) as peers:
            await connect_all(peers)
            (report,) = await attack(peers[0], {}, "asks_again")
            assert report["error"] == ""
            assert all(len(peer.heard) == 2 for peer in peers)
            await until_stat(peers[0], lambda stat: stat.peers == [peers[1].gossip_id])

    asyncio.run(run())


@pytest.mark.long
@needs_proc
def test_a_hostile_peer_brings_nothing_down() -> None:
    refused = {
        "garbage": "frame",
        "endless": "frame",
        "oversized_frame": "frame",
        "unreadable_key": "forged",
        "unsigned": "unsigned",
        "forged": "forged",
        "oversized": "size",
        "no_batch": "signature",
        "wrong_swarm": "swarm",
        "wrong_version": "newer",
        "wrong_schema": "schema",
        "wrong_shard": "shard",
        "far_future": "future",
        "long_past": "age",
        "persistent": "graylist",
        "streams": "flood",
        "replayed": "seen",
        "flood": "graylist",
        "fresh_keys": "graylist",
    }
    harmless = ["bad_utf8", "control", "bad_mux", "bad_noise", "unread", "comes_and_goes"]

    async def run() -> None:
        async with swarm(3, shards=2, max_connections=8, messages_per_minute=100) as peers:
            await connect_all(peers)
            await until_all_heard(peers, await talk(peers, 3, 2000))  # who is known is heard, whoever floods
            for peer in peers:
                peer.heard.clear()
            victim, pids, size = peers[0], [peer.pid for peer in peers], rss(peers[0].pid)

            async def suffer(*attacks: str, times: int = 1) -> dict[str, int]:
                before = await victim.stat()
                reports = await attack(victim, refused, *attacks, times=times)
                assert [report["attack"] for report in reports] == list(attacks)
                idle = [report for report in reports if not report["sent"] and report["attack"] != "oversized_frame"]
                assert not idle, idle
                after = await victim.stat()
                return {why: n - before.rejected.get(why, 0) for why, n in after.rejected.items()}

            await suffer(*list(refused)[:-3], *harmless)
            assert [peer.heard for peer in peers] == [[], [], []]

            # What is well-formed is let in, once, and no more than one author may say.
            await suffer("replayed", times=3)
            began = time.monotonic()
            counts = await suffer("flood")
            assert counts["flood"] >= 5 and counts["graylist"] == 1, counts  # blamed on it until it was banned
            assert 100 <= len(victim.heard) <= 110 + 100 * (time.monotonic() - began) / 60  # a budget fills up again

            # Nor does it help to speak for others, all of them made up, over connections for which they never spoke.
            before, began = len(victim.heard), time.monotonic()
            counts = await suffer("fresh_keys")
            assert counts["newcomers"] >= 50 and counts["flood"] >= 5 and counts["graylist"] == 1, counts
            most = 140 + 128 * (time.monotonic() - began) / 60  # 64 a minute for each of two shards
            assert 100 <= len(victim.heard) - before <= most

            with socket.create_connection(("127.0.0.1", victim.settings.port)) as stranger:
                stranger.sendall(os.urandom(5000))
            for peer in peers:
                peer.heard.clear()
            said = await talk(peers, 30, 20_000)
            await until_all_heard(peers, said)
            assert [peer.pid for peer in peers] == pids and all(peer.restarts == 0 for peer in peers)
            assert rss(victim.pid) < size + 64 * 2**20

    asyncio.run(run())


@pytest.mark.long
def test_a_hostile_dialled_peer_brings_nothing_down() -> None:
    attacks = ["garbage", "control", "bad_mux", "bad_noise"]

    async def run() -> None:
        async with swarm(2, shards=2) as peers:
            await connect_all(peers)
            for name in attacks:
                process = await asyncio.create_subprocess_exec(*ATTACKS, "serve", SWARM, "2", name, stdout=-1)
                try:
                    assert process.stdout is not None
                    peers[0].dial(json.loads(await asyncio.wait_for(process.stdout.readline(), HANG_S))["address"])
                    report = json.loads(await asyncio.wait_for(process.stdout.readline(), HANG_S))
                    assert report["attack"] == name and report["sent"]
                    if name == "garbage":
                        await until_stat(peers[0], lambda stat: stat.rejected.get("frame") == 1)
                finally:
                    process.kill()
                    await process.communicate()
            said = await talk(peers, 10, 5000)
            await until_all_heard(peers, said)
            assert all(peer.restarts == 0 for peer in peers)
            assert (await peers[0].stat()).rejected["frame"] == 1

    asyncio.run(run())


@pytest.mark.long
def test_a_frozen_sidecar_harms_nobody() -> None:
    async def run() -> None:
        async with swarm(4) as peers:
            await connect_all(peers)
            frozen, others = peers[0], peers[1:]
            assert frozen.pid is not None
            os.kill(frozen.pid, signal.SIGSTOP)
            try:
                said = await talk(others, 60, 300_000)
                await until_all_heard(others, said)
                assert frozen.heard == []
                taken = sum(frozen.publish(TOPIC, bytes(400_000)) for _ in range(100))
                assert 0 < taken < 100  # the queue is bounded, and publish never waits
            finally:
                os.kill(frozen.pid, signal.SIGCONT)

    asyncio.run(run())


@needs_proc
def test_a_sidecar_ends_with_its_parent(root: Path) -> None:
    program = (
        "import asyncio\n"
        "from tests.support.gossip_peers import Peer\n"
        "async def main():\n"
        "    peer = Peer(0)\n"
        "    await peer.start()\n"
        "    print(peer.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        sidecar = int(parent.stdout.readline())
        assert alive(sidecar)
        parent.kill()

    async def run() -> None:
        await until_async(lambda: not alive(sidecar), HANG_S)

    asyncio.run(run())


CHATTY = """
import sys
from swarm_protocol.transports.gossip.pipe import GossipReady, frame
sys.stdout.buffer.write(frame(GossipReady("an-id", [], 0)))
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
sys.stdout.buffer.write(bytes(2**22))
"""


def test_a_sidecar_with_much_to_say_can_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than fits into the pipe and what is read ahead: nobody wants it any more, but somebody has to read it."""
    (tmp_path / "chatty.py").write_text(CHATTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gossip_client, "SIDECAR", "chatty")

    async def run() -> None:
        peer = Peer(0)
        await peer.start()
        await asyncio.wait_for(peer.close(), HANG_S)

    asyncio.run(run())


@pytest.mark.long
@needs_proc
def test_an_unread_outbox_loses_the_oldest() -> None:
    """Spoken to by hand: 120 messages of 450 KB, 54 MB, fill an outbox of 32 MiB; all of them are passed on."""

    async def run() -> None:
        async with swarm(2) as (speaker, listener):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", gossip_client.SIDECAR, stdin=-1, stdout=-1, limit=2**16
            )
            assert process.stdin is not None and process.stdout is not None
            try:
                settings = GossipSettings(SWARM, dial_only=True, messages_per_minute=10**6, bytes_per_minute=2**30)
                dials = [Dial(peer.addresses[0]) for peer in (speaker, listener)]
                for command in (settings, Subscribe(TOPIC), *dials):
                    process.stdin.write(frame(command))
                for peer in (speaker, listener):
                    await until_stat(peer, lambda stat: stat.mesh.get(TOPIC, 0) == 1)
                said: list[tuple[Peer, bytes]] = []
                for _ in range(12):  # on a busy machine, more at once would overflow a queue between two neighbours
                    said.extend(await talk([speaker], 10, 450_000))
                    await until_async(lambda: len(listener.heard) == len(said), HANG_S)
                assert rss(process.pid) < 200 * 2**20
                process.stdin.write(frame(Ask(1)))
                frames: Frames[Event] = Frames(Event)
                events: list[Event] = []
                while not any(isinstance(event, Status) for event in events):
                    events += frames.feed(await asyncio.wait_for(process.stdout.read(2**18), HANG_S))
            finally:
                process.stdin.close()
                await asyncio.wait_for(process.communicate(), HANG_S)
            status = events[-1]
            assert isinstance(events[0], GossipReady) and isinstance(status, Status)
            heard = [event.data for event in events if isinstance(event, Message)]
            assert status.dropped >= 30
            assert len(heard) + status.dropped == 120
            assert heard[-60:] == [data for _, data in said][-60:]

    asyncio.run(run())


def test_a_sidecar_that_talks_nonsense_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nonsense.py").write_text(
        "import sys, time\n"
        "print('last words', file=sys.stderr, flush=True)\n"
        "sys.stdout.buffer.write(b'\\xff' * 64)\n"
        "sys.stdout.flush()\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr(gossip_client, "SIDECAR", "nonsense")

    async def run() -> None:
        peer = Peer(0)
        starting = asyncio.create_task(peer.start())
        try:
            await until_async(lambda: peer.restarts >= 2, HANG_S)
            assert all("unreadable: size" in report for report in peer.reports)
            assert peer.publish(TOPIC, b"x")  # it waits for a better one
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await peer.close()

    asyncio.run(run())


def test_a_sidecar_that_grew_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "grown.py").write_text(
        "from swarm_protocol.transports.gossip import sidecar\n"
        "sidecar.MEMORY_S, sidecar.MAX_SIDECAR_RSS = 0.01, 2**20\n"
        "sidecar.main()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr(gossip_client, "SIDECAR", "grown")

    async def run() -> None:
        peer = Peer(0)
        await peer.start()
        try:
            await until_async(lambda: peer.restarts >= 1, HANG_S)
            assert re.fullmatch(r"grown to \d+ MiB", peer.last_end)
            assert peer.last_end in peer.reports[0]
        finally:
            await peer.close()

    asyncio.run(run())


def test_a_client_closed_early_leaves_no_sidecar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(
        "import sys, time\nsys.stdout.buffer.write(b'\\xff' * 64)\nsys.stdout.flush()\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr(gossip_client, "SIDECAR", "deaf")

    async def run() -> None:
        peer = Peer(0)
        starting = asyncio.create_task(peer.start())
        while (pid := peer.pid) is None:
            await asyncio.sleep(0)
        while peer.pid is not None:
            await asyncio.sleep(0)
        assert alive(pid)  # it is given a moment to go by itself
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await peer.close()
        assert not alive(pid)

    asyncio.run(run())


@pytest.mark.long
def test_a_hub_serves_twelve_that_only_dial() -> None:
    async def run() -> None:
        async with swarm(1, degree=3) as (hub,), swarm(12, first=1, dial_only=True) as leaves:
            for leaf in leaves:
                assert leaf.addresses == []
                leaf.dial(hub.addresses[0])
            await until_stat(hub, lambda stat: stat.mesh.get(TOPIC, 0) == 12)
            said = await talk(leaves, 36, 20_000)  # for two heartbeats: a usual hub would cut its mesh from 12 to 3
            said += [(leaf, leaf.say(20_000)) for _ in range(4) for leaf in leaves]  # all at once
            await until_all_heard(leaves, said)
            assert (await hub.stat()).mesh[TOPIC] == 12

    asyncio.run(run())


@pytest.mark.long
def test_two_hubs_with_leaves_enough_still_link() -> None:
    async def run() -> None:
        async with (
            swarm(2, degree=3) as hubs,
            swarm(5, first=2, dial_only=True) as left,
            swarm(5, first=7, dial_only=True) as right,
        ):
            for hub, leaves in zip(hubs, (left, right), strict=True):
                dial_all(leaves, hub)
                again = partial(dial_all, leaves, hub)
                await until_stat(hub, lambda stat: stat.mesh.get(TOPIC, 0) == 5, again)
            hubs[0].dial(hubs[1].addresses[0])
            for hub in hubs:
                await until_stat(hub, lambda stat: stat.mesh[TOPIC] == 6)
            everybody = [*hubs, *left, *right]
            await until_all_heard(everybody, await talk([*left, *right], 40, 20_000))  # for two heartbeats
            assert [(await hub.stat()).mesh[TOPIC] for hub in hubs] == [6, 6]

    asyncio.run(run())


ATTACKS = [sys.executable, "-m", "tests.integration.gossip_attacks"]


async def attack(victim: Peer, refused: dict[str, str], *names: str, times: int = 1) -> list[dict[str, Any]]:
    """Each attacker stays until it was refused so many times, if `refused` says for which reason."""
    before, reports = (await victim.stat()).rejected, []
    process = await asyncio.create_subprocess_exec(
        *ATTACKS, victim.addresses[0], SWARM, "2", *names, stdin=-1, stdout=-1
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for name in names:
            reports.append(json.loads(await asyncio.wait_for(process.stdout.readline(), HANG_S)))
            if why := refused.get(name):
                goal = before.get(why, 0) + times
                await until_stat(victim, lambda stat, why=why, goal=goal: stat.rejected.get(why, 0) >= goal)
            before = (await victim.stat()).rejected
            process.stdin.write(b"\n")
        await asyncio.wait_for(process.communicate(), HANG_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    return reports
