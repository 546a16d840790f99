"""What the other end of a gossip connection may say before it is admitted, and when a stream is opened: no sockets. For
test_safe_host.py, which starts a process for each: libp2p and hivemind cannot be imported into one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from libp2p.io.exceptions import IOException
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils import encode_delim, encode_uvarint

from protocol.transports.gossip_pipe import Status
from protocol.transports.gossip_places import MAX_HANDSHAKE_BYTES
from protocol.transports.refusals import Refused
from protocol.transports.safe_host import MAX_PROTOCOL_BYTES, CountedTCP, Wire, make_host


class Talker:
    """The other end: says `first`, then zeros without end."""

    def __init__(self, first: bytes = b"") -> None:
        self.first, self.said = first, 0
        self.stream = SimpleNamespace(setsockopt=lambda *of: None)

    def get_remote_address(self) -> tuple[str, int]:
        return "192.0.2.1", 4001

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


async def no_long_answer_is_read_when_a_stream_is_opened() -> None:
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
    tcp.refuse("flood", ("203.0.113.9", 4001))
    tcp.refuse("flood", ("203.0.113.9", 4002))
    tcp.refuse("graylist", None)
    assert tcp.rejected == {"flood": 2, "graylist": 1}
    status = Status(1, [], {}, 0, 0, 0, 0, 0, dict(tcp.rejected), sources=tcp.refusals.by_source())
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=Status)
    assert told.sources == {"203.0.113.9": Refused({"flood": 2}, told.sources["203.0.113.9"].last)}


if __name__ == "__main__":
    trio.run(globals()[sys.argv[1]])
