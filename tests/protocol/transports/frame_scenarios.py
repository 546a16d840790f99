"""What a peer can have a gossip process keep for it: the messages that it asks for, and its queue. For
test_gossip_frames.py."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub import pubsub as library
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11
from libp2p.pubsub.pb import rpc_pb2
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr

from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.transports.gossip import safe_pubsub
from swarm_protocol.transports.gossip import sidecar as gossip_sidecar
from swarm_protocol.transports.gossip.frames import (
    CONTROL_BYTES,
    MAX_PEER_QUEUE,
    MAX_PEER_QUEUE_BYTES,
    PIECE_BYTES,
    PIECE_COPIES,
)
from swarm_protocol.transports.gossip.pipe import GossipSettings
from swarm_protocol.transports.gossip.safe_host import CountedTCP, make_host
from swarm_protocol.transports.gossip.safe_pubsub import SafePubsub
from swarm_protocol.transports.gossip.sidecar import GROWTH_BYTES, HIGH_RSS, MAX_SIDECAR_RSS, Sidecar
from tests.support.scenarios import serve

SWARM = "ab" * 32
TOPIC = ROLLOUTS.topic(SWARM, 0)
LARGE = 400_000  # bytes of a message, about as many as one may have
HANG_S = 60.0
_numbers = count(1)


class World:
    """A gossip process, not running, with peers that read nothing."""

    def __init__(self) -> None:
        self.sidecar = Sidecar(GossipSettings(SWARM, dial_only=True))
        self.pubsub, self.router = self.sidecar.pubsub, self.sidecar.router

    def peer(self, name: str) -> ID:
        peer = ID(name.encode())
        self.router.add_peer(peer, "/meshsub/1.2.0")
        self.pubsub.peers[peer] = object()
        self.pubsub.peer_queues[peer] = library.RpcQueue()
        return peer

    def heard(self, size: int = LARGE) -> rpc_pb2.Message:
        """A message that came just now."""
        number = next(_numbers).to_bytes(8, "big")
        message = rpc_pb2.Message(data=bytes(size), topicIDs=[TOPIC], from_id=b"author", seqno=number)
        self.router.mcache.put(message)
        return message

    async def asks(self, peer: ID, *entries: list[bytes]) -> None:
        """One frame of a peer, with an IWANT of these names for each entry."""
        rpc = rpc_pb2.RPC()
        rpc.control.iwant.extend(rpc_pb2.ControlIWant(messageIDs=names) for names in entries)
        self.pubsub._sanitise(rpc)
        await self.router.handle_rpc(rpc, peer)

    def waiting(self, peer: ID) -> list[list[bytes]]:
        """Names of the messages in each frame that waits for a peer."""
        frames = self.pubsub.peer_queues[peer].frames()
        return [names for frame in frames if (names := [name(message) for message in decoded(frame).publish])]


def name(message: rpc_pb2.Message) -> bytes:
    return message.from_id + message.seqno


def decoded(frame: bytes) -> Any:
    """The RPC in a frame that is written to a stream."""
    head = next(i for i, byte in enumerate(frame) if byte < 0x80)
    return rpc_pb2.RPC.FromString(frame[head + 1 :])


async def a_message_named_many_times_waits_once() -> None:
    world = World()
    asker, message = world.peer("asker"), world.heard()
    wanted = name(message)
    await world.asks(asker, [wanted] * 64)
    assert world.waiting(asker) == [[wanted]]
    await world.asks(asker, [wanted] * 64, [wanted], [wanted.hex().encode()] * 3)
    for _ in range(4):
        await world.asks(asker, [wanted, wanted])
    assert world.waiting(asker) == [[wanted]]


async def whoever_asks_gets_all_that_it_lacks() -> None:
    world = World()
    first, second = world.peer("first"), world.peer("second")
    messages = [world.heard(100) for _ in range(3)]
    names = [name(message) for message in messages]
    await world.asks(first, names[:1])
    await world.asks(first, [*names, b"never heard"])
    await world.asks(second, [wanted.hex().encode() for wanted in names])
    assert world.waiting(first) == world.waiting(second) == [[wanted] for wanted in names]
    frames = [world.pubsub.peer_queues[peer].frames() for peer in (first, second)]
    assert all(one is other for one, other in zip(*frames, strict=True))  # and none is built twice


async def what_was_passed_on_is_not_given_again() -> None:
    world = World()
    neighbour, sender = world.peer("neighbour"), world.peer("sender")
    world.router.mesh[TOPIC] = {neighbour, sender}
    world.pubsub.peer_topics[TOPIC] = {neighbour, sender}
    message = rpc_pb2.Message(data=bytes(100), topicIDs=[TOPIC], from_id=b"author", seqno=b"1")
    await world.router.publish(sender, message)
    await world.asks(neighbour, [name(message)])
    assert world.waiting(neighbour) == [[name(message)]] and world.waiting(sender) == []


async def whoever_subscribes_again_gets_nothing_twice() -> None:
    world = World()
    peer = world.peer("peer")
    names = [[name(world.heard(100))] for _ in range(2)]
    for _ in range(5):
        await world.router.send_recent_messages(peer, TOPIC)
    assert sorted(world.waiting(peer)) == names


async def who_resets_a_stream_gets_nothing_twice() -> None:
    """The library forgets a peer whose stream broke, and opens another one at once."""
    world = World()
    peer, wanted = world.peer("peer"), name(world.heard())
    await world.asks(peer, [wanted])
    for _ in range(3):
        world.router.remove_peer(peer)
        world.peer("peer")
        await world.asks(peer, [wanted])
        await world.router.send_recent_messages(peer, TOPIC)
        assert world.waiting(peer) == []
    await world.asks(peer, [late := name(world.heard())])
    assert world.waiting(peer) == [[late]]


async def what_was_given_is_forgotten_with_the_message() -> None:
    world = World()
    peer, wanted = world.peer("peer"), name(world.heard())
    await world.asks(peer, [wanted])
    for _ in range(len(world.router.mcache.history)):
        assert wanted in world.router.recent.frames
        world.router.mcache.shift()
    assert not world.router.recent.frames and not world.router.recent._given
    await world.asks(peer, [wanted])
    assert world.waiting(peer) == [[wanted]]  # the frame of before


async def nothing_keeps_a_message_longer_than_the_cache() -> None:
    """The library kept each that was passed on for half a minute: some 450 MB of what one connection may bring."""
    world = World()
    neighbour, sender = world.peer("neighbour"), world.peer("sender")
    world.router.mesh[TOPIC] = world.pubsub.peer_topics[TOPIC] = {neighbour, sender}
    message = rpc_pb2.Message(data=bytes(100), topicIDs=[TOPIC], from_id=b"author", seqno=b"1")
    before = sys.getrefcount(message)
    await world.router.publish(sender, message)
    frame = world.router.recent.frames[name(message)]
    assert sys.getrefcount(message) == before  # the cache has its frame
    assert await world.pubsub.peer_queues[neighbour].pop() is frame
    world.pubsub.peer_queues.clear()
    for _ in range(len(world.router.mcache.history)):
        world.router.mcache.shift()
    fresh = os.urandom(8)
    assert sys.getrefcount(frame) == sys.getrefcount(fresh)  # nobody else holds it


async def a_queue_is_bounded_by_what_waits() -> None:
    world = World()
    peer = world.peer("peer")
    queue, room = world.pubsub.peer_queues[peer], MAX_PEER_QUEUE_BYTES - CONTROL_BYTES
    for size in [LARGE] * 60 + [30_000] * 60 + [10] * MAX_PEER_QUEUE:  # the small ones last
        world.router.send_rpc(peer, rpc_pb2.RPC(publish=[world.heard(size)]))
        assert queue.bytes == sum(map(len, queue.frames())) <= room
    assert queue.bytes > room - 30_500 and len(queue) <= MAX_PEER_QUEUE

    for _ in range(100):  # control has room of its own, and a bound as well
        await world.router.emit_iwant([os.urandom(80)] * 400, peer)
        assert queue.bytes == sum(map(len, queue.frames())) <= MAX_PEER_QUEUE_BYTES
    assert len(queue._queue._priority) >= CONTROL_BYTES // 33_000

    while queue._queue._priority:
        await queue.pop()
    for _ in range(3):  # as long as the third is being written, it counts
        await queue.pop()
    world.router.send_rpc(peer, rpc_pb2.RPC(publish=[late := world.heard(300_000)]))
    assert world.waiting(peer)[-1] == [name(late)]
    while len(queue):
        frame = await queue.pop()
        assert frame is not None and queue.bytes == sum(map(len, [frame, *queue.frames()[1:]]))


async def a_message_that_had_no_room_may_be_asked_for_later() -> None:
    world = World()
    peer = world.peer("peer")
    queue = world.pubsub.peer_queues[peer]
    for _ in range(60):
        world.router.send_rpc(peer, rpc_pb2.RPC(publish=[lost := world.heard(LARGE)]))
    assert [name(lost)] not in world.waiting(peer)
    for _ in range(2):
        await queue.pop()
    await world.asks(peer, [name(lost)])
    assert world.waiting(peer)[-1] == [name(lost)]


async def names_that_no_message_has_are_dropped() -> None:
    world = World()
    peer = world.peer("peer")
    rpc = rpc_pb2.RPC()
    rpc.control.ihave.append(rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=[b"\xff" * 15_000] * 60 + [b"\xff" * 40]))
    rpc.control.idontwant.append(rpc_pb2.ControlIDontWant(messageIDs=[b"\xff" * 15_000, b"short"]))
    world.pubsub._sanitise(rpc)
    await world.router.handle_rpc(rpc, peer)
    assert world.router.dont_send_message_ids[peer] == {b"short"}
    (frame,) = world.pubsub.peer_queues[peer]._queue._priority
    assert list(decoded(frame).control.iwant[0].messageIDs) == [b"\xff" * 40]


# ---------------------------------------------------------------- memory


async def the_peer_for_which_most_waits_gives_way_to_memory() -> None:
    """Not the neighbour that brought the messages which others ask for."""
    sidecar = Sidecar(GossipSettings(SWARM))
    neighbour, asker, patient = others = [make_host(CountedTCP(4)) for _ in range(3)]
    here: Any = sidecar.host
    here.get_network().notifees.clear()  # pubsub does not run
    async with (
        here.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]),
        others[0].run(listen_addrs=[]),
        others[1].run(listen_addrs=[]),
        others[2].run(listen_addrs=[]),
    ):
        with trio.fail_after(HANG_S):
            for other in others:
                await other.connect(PeerInfo(here.get_id(), here.get_addrs()))
            while len(here.get_connected_peers()) < len(others):
                await trio.sleep(0.01)
        for other, frames in ((asker, 20), (patient, 2)):
            queue = sidecar.pubsub.peer_queues[other.get_id()] = library.RpcQueue()
            for _ in range(frames):
                queue.push_message(bytes(LARGE))
        of = {peer: sidecar.pubsub.address(peer) for peer in here.get_connected_peers()}
        brings = next(wire for wire in sidecar.tcp.live.values() if wire.address == of[neighbour.get_id()])
        told = sidecar._heaviest(brings, 2**20)
        assert told is not None and told.words == ", 7 of them for 127.0.0.1"
        brings.bytes_in += 2**20
        slowly = [HIGH_RSS + i * GROWTH_BYTES // 4 for i in range(6)]  # less than half as much would be healthy
        sizes = iter((*slowly, MAX_SIDECAR_RSS + 2**20))
        gossip_sidecar.own_rss, gossip_sidecar.MEMORY_S = lambda: next(sizes), 0.01
        with pytest.raises(MemoryError, match="grown to 513 MiB"):
            await sidecar._watch_memory()
        assert {wire.address for wire in sidecar.tcp.live.values()} == {of[neighbour.get_id()], of[patient.get_id()]}
        assert sidecar.tcp.rejected == {"memory": 1}


async def what_all_wait_for_counts_once() -> None:
    """Else a flood of messages that are let in would cut slow peers before the one that floods."""
    world = World()
    message = world.heard()
    peers = [world.peer(f"peer {i}") for i in range(5)]
    for peer in peers:
        await world.asks(peer, [name(message)])
    assert math.isclose(world.pubsub.kept_once(), LARGE, rel_tol=0.01)


class Stream:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.written.append(data)


async def all_are_written_the_same_bytes() -> None:
    """The library made three copies of a message for each peer: 86 MB where sixty asked for a large one."""
    world, stream = World(), Stream()
    message, peers = world.heard(), [world.peer(f"peer {i}") for i in range(5)]
    for peer in peers:
        await world.asks(peer, [name(message)])
        frame: Any = await world.pubsub.peer_queues[peer].pop()
        assert await world.pubsub.write_msg(stream, frame)  # type: ignore[arg-type]
    first, *others = stream.written
    assert decoded(first).publish[0] == message and all(other is first for other in others)
    pieces = len(peers) * PIECE_COPIES * PIECE_BYTES  # which are under way
    assert math.isclose(world.pubsub.kept_once(), LARGE + pieces, rel_tol=0.01)


@asynccontextmanager
async def speaking() -> AsyncIterator[tuple[SafePubsub, Any]]:
    """The gossip of a process, and a stream of a peer on which nothing has been sent."""
    sidecar, peer = Sidecar(GossipSettings(SWARM)), make_host(CountedTCP(4))
    here: Any = sidecar.host
    async with (
        here.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]),
        background_trio_service(sidecar.pubsub),
        background_trio_service(sidecar.router),
        peer.run(listen_addrs=[]),
    ):
        await sidecar.pubsub.wait_until_ready()
        await peer.connect(PeerInfo(here.get_id(), here.get_addrs()))
        yield sidecar.pubsub, await peer.new_stream(here.get_id(), [PROTOCOL_ID_V11])


async def until_kept(pubsub: SafePubsub, what: Callable[[int], bool]) -> None:
    with trio.fail_after(HANG_S):
        while not what(sum(pubsub.kept().values())):
            await trio.sleep(0.01)


async def a_frame_without_an_end_counts() -> None:
    """Sixty peers had 180 MB lying in such frames, which nothing counted."""
    message = rpc_pb2.Message(data=bytes(LARGE), topicIDs=["another"])
    frame = encode_varint_prefixed(rpc_pb2.RPC(publish=[message]).SerializeToString())
    most = safe_pubsub.MAX_ALL_BUFFERED
    async with speaking() as (pubsub, stream):
        (peer,) = pubsub.host.get_connected_peers()
        for _ in range(2):
            await stream.write(frame[:-1])
            await until_kept(pubsub, lambda kept: kept >= LARGE)
            assert pubsub.kept_once() >= LARGE and not await pubsub._bound_buffers()
            await stream.write(frame[-1:])
            await until_kept(pubsub, lambda kept: kept < LARGE)  # it has been handled
        assert not pubsub.is_banned(peer)
        await stream.write(frame[:-1])
        await until_kept(pubsub, lambda kept: kept >= LARGE)
        safe_pubsub.MAX_ALL_BUFFERED = LARGE - 1
        try:
            await pubsub._bound_buffers()
        finally:
            safe_pubsub.MAX_ALL_BUFFERED = most
        assert pubsub.is_banned(peer) and pubsub.rejected == {"flood": 1}
        with trio.fail_after(HANG_S):
            while pubsub._reading:
                await trio.sleep(0.01)


if __name__ == "__main__":
    serve(globals(), trio.run)
