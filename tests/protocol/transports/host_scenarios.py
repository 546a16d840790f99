"""What the other end of a gossip connection may say before it is admitted, when a stream is opened, and on streams. For
test_safe_host.py."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from libp2p import create_mplex_muxer_option
from libp2p.io.exceptions import IOException
from libp2p.peer.peerinfo import PeerInfo
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.utils import encode_delim, encode_uvarint
from multiaddr import Multiaddr

from swarm_protocol.transports.gossip import sidecar as gossip_sidecar
from swarm_protocol.transports.gossip.pipe import GossipSettings, Status
from swarm_protocol.transports.gossip.places import MAX_HANDSHAKE_BYTES
from swarm_protocol.transports.gossip.safe_host import MAX_PROTOCOL_BYTES, CountedTCP, Wire, make_host
from tests.support.scenarios import serve


class Talker:
    """The other end: says `first`, then zeros without end."""

    def __init__(self, first: bytes = b"", host: str = "192.0.2.1") -> None:
        self.first, self.said, self.host = first, 0, host
        self.stream = SimpleNamespace(setsockopt=lambda *of: None)

    def get_remote_address(self) -> tuple[str, int]:
        return self.host, 4001

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        data, self.first = self.first[:n], self.first[n:]
        data = data or bytes(n or 2**16)
        self.said += len(data)
        return data

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


async def an_answer_to_a_dial_is_bounded() -> None:
    await _a_handshake_is_bounded(inbound=False)


async def what_comes_in_is_bounded() -> None:
    await _a_handshake_is_bounded(inbound=True)


async def _a_handshake_is_bounded(inbound: bool) -> None:
    tcp = CountedTCP(4)
    wire = Wire(Talker(), tcp, inbound)
    if inbound:
        tcp.places.arrive(wire.link)
    with pytest.raises(IOException):
        while wire.bytes_in < 4 * MAX_HANDSHAKE_BYTES:
            await wire.read(2**14)
    assert not tcp.live and tcp.rejected == {"handshake": 1}


async def nothing_is_bounded_once_it_is_admitted() -> None:
    tcp = CountedTCP(4)
    wire = Wire(Talker(), tcp, inbound=False)
    assert await tcp.admit(wire.address, inbound=False)
    while wire.bytes_in < 4 * MAX_HANDSHAKE_BYTES:
        await wire.read(2**14)
    assert not tcp.rejected


async def no_long_answer_opens_a_stream() -> None:
    host: Any = make_host(CountedTCP(4))
    talker: Any = Talker(encode_uvarint(2**26))
    with pytest.raises(MultiselectClientError):
        await host.multiselect_client.select_one_of(["/meshsub/1.1.0"], MultiselectCommunicator(talker), 30)
    assert talker.said <= MAX_PROTOCOL_BYTES


async def a_short_answer_opens_a_stream() -> None:
    host: Any = make_host(CountedTCP(4))
    talker: Any = Talker(encode_delim(b"/multistream/1.0.0") + encode_delim(b"/meshsub/1.1.0"))
    communicator = MultiselectCommunicator(talker)
    assert await host.multiselect_client.select_one_of(["/meshsub/1.1.0"], communicator, 30) == "/meshsub/1.1.0"


async def the_node_is_told_which_addresses_were_refused() -> None:
    tcp = CountedTCP(64)
    for host in ("203.0.113.9", "203.0.113.9", "2001:db8:1:2::3", "2001:db8:1:2:4:5:6:7"):
        tcp.refuse("flood", (host, 4001))
    tcp.refuse("graylist", None)
    assert tcp.rejected == {"flood": 4, "graylist": 1}
    status = Status(1, [], {}, 0, 0, 0, 0, 0, dict(tcp.rejected), sources=tcp.refusals.by_source())
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=Status)
    reasons = {source: refused.reasons for source, refused in told.sources.items()}
    assert reasons == {"203.0.113.9": {"flood": 2}, "2001:db8:1:2::/64": {"flood": 2}}


# ---------------------------------------------------------------- over sockets, from a host to another

PUSH, DEAF = (encode_delim(b"/multistream/1.0.0") + encode_delim(name) for name in (b"/ipfs/id/push/1.0.0", b"/deaf"))
HANG_S = 60.0


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[CountedTCP, Any, Any]]:
    """(TCP of a host, its yamux connection with another, that one's end)."""
    tcp = CountedTCP(4)
    host: Any = make_host(tcp)
    other: Any = make_host(CountedTCP(4))
    host.set_stream_handler("/deaf", lambda stream: trio.sleep_forever())
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]), other.run(listen_addrs=[]):
        with trio.fail_after(HANG_S):
            await other.connect(PeerInfo(host.get_id(), host.get_addrs()))
            while not host.get_network().get_connections(other.get_id()):
                await trio.sleep(0.01)
            here, there = (
                end.get_network().get_connections(peer)[0].muxed_conn
                for end, peer in ((host, other.get_id()), (other, host.get_id()))
            )
            yield tcp, here, there


async def unread_data_of_refused_streams_is_dropped() -> None:
    async with linked() as (_, here, there):
        streams = [await there.open_stream() for _ in range(8)]
        for stream in streams:
            await stream.write(PUSH + encode_uvarint(10**5) + bytes(10**5))
        while not all(stream.reset_received for stream in streams):
            await trio.sleep(0.01)
        assert sum(map(len, here.stream_buffers.values())) == 0 and not here.streams


async def a_long_frame_ends_its_connection() -> None:
    async with linked() as (tcp, here, there):
        await there._write_frame(struct.pack("!BBHII", 0, 0, 1, 1, 2**20))  # a megabyte is to come on a new stream
        await here.event_closed.wait()
        assert [address for address in tcp.flooding.values() if address] and not tcp.live


async def more_than_may_lie_unread_ends_its_connection() -> None:
    async with linked() as (tcp, here, there):
        stream = await there.open_stream()
        stream.send_window = 2**30
        await stream.write(DEAF)
        with pytest.raises(Exception):  # noqa: B017 - as the library has it
            for _ in range(500):
                await stream.write(bytes(60_000))
        await here.event_closed.wait()
        assert list(tcp.flooding) == [here.peer_id]


async def nobody_is_spoken_to_over_mplex() -> None:
    host: Any = make_host(CountedTCP(4))
    other: Any = make_host(CountedTCP(4))
    options = create_mplex_muxer_option()
    other.get_network().upgrader.muxer_multistream = MuxerMultistream(
        {name: muxer for name, muxer in options.items() if "mplex" in name}
    )
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]), other.run(listen_addrs=[]):
        with pytest.raises(Exception, match="no addresses established"), trio.fail_after(HANG_S):
            await other.connect(PeerInfo(host.get_id(), host.get_addrs()))
        assert not host.get_network().get_connections(other.get_id())


# ---------------------------------------------------------------- memory


async def the_heaviest_connection_gives_way_to_memory() -> None:
    sidecar = gossip_sidecar.Sidecar(GossipSettings("ab" * 32, dial_only=True))
    dialled, quiet, heavy = wires = [Wire(Talker(host=f"192.0.2.{i}"), sidecar.tcp, inbound=i > 1) for i in (1, 2, 3)]
    for wire, reads in zip(wires, (200, 1, 100), strict=True):
        assert await sidecar.tcp.admit(wire.address, wire.link.inbound)
        for _ in range(reads):
            await wire.read(2**16)
    high, step = gossip_sidecar.HIGH_RSS, gossip_sidecar.GROWTH_BYTES
    sizes = iter((0, high - 1, high + step // 2, gossip_sidecar.MAX_SIDECAR_RSS + 1))
    closed = []

    def rss() -> int:
        closed.append([wire.closed.is_set() for wire in wires])
        return next(sizes)

    gossip_sidecar.own_rss, gossip_sidecar.MEMORY_S = rss, 0.01
    with pytest.raises(MemoryError):
        await sidecar._watch_memory()
    assert not any(map(any, closed))  # it was small, or hardly grew

    await heavy.read(2**16)
    sizes = iter((high, high + 2 * step, high + 2 * step, gossip_sidecar.MAX_SIDECAR_RSS + 1))
    with pytest.raises(MemoryError):
        await sidecar._watch_memory()
    assert heavy.closed.is_set() and not quiet.closed.is_set() and not dialled.closed.is_set()
    assert sidecar.tcp.rejected == {"memory": 1}


if __name__ == "__main__":
    serve(globals(), trio.run)
