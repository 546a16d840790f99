"""Many keys that crowd a gossip process, as a program; ends when its stdin does.

python -m tests.integration.gossip_crowd ADDRESS KIND KEYS SOURCES

KIND     idle: handshake, speak gossip, say nothing        half: stop after the first message of the handshake
         valid: say what is let in, every few seconds      push: send identify messages on one stream after another
         names: a protocol's name of 16 MiB on each stream, against the window
         frames: a frame of 2 MiB of which three quarters come
         unread: data without end, against the window, on the stream on which the victim only writes
         hoards: read slowly what the victim passes on, and send it 2.5 MiB of frames of which the end never comes
SOURCES  the connections come from 127.0.0.2 and as many addresses after it; 0 = from 127.0.0.1
"""

from __future__ import annotations

import logging
import os
import struct
import sys
from typing import Any

import trio
from libp2p.crypto.keys import KeyPair
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, PROTOCOL_ID_V12
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_uvarint, encode_varint_prefixed
from multiaddr import Multiaddr

from swarm_protocol.transports.gossip.safe_host import CountedTCP, make_host
from tests.integration.gossip_attacks import Attacker

MULTISTREAM = b"\x13/multistream/1.0.0\n"
NOISE, PUSH = MULTISTREAM + b"\x07/noise\n", MULTISTREAM + b"\x15/ipfs/id/push/1.0.0\n"
"""What is said first, and the protocol that is asked for, without waiting for an answer."""
IDENTITY = Identify(protocols=[os.urandom(50).hex() for _ in range(9000)])
SWARM = "ab" * 32
LONG = 2**24
"""Bytes of a name."""


class SourcedTCP(CountedTCP):
    def __init__(self, host: str) -> None:
        super().__init__(8)
        self.host = host

    async def _dial_resolved(self, maddr: Any, source: tuple[str, int] | None = None) -> Any:
        return await super()._dial_resolved(maddr, (self.host, 0))


async def read(stream: Any) -> None:
    while await stream.read(2**16):
        pass


async def write(stream: Any) -> None:
    stream.muxed_stream.send_window = 2**40
    while True:
        await stream.write(bytes(2**16))


async def read_slowly(stream: Any) -> None:
    while await stream.read(2**16):
        await trio.sleep(0.7)


async def crowd(address: str, kind: str, source: str) -> None:
    """One key after another, each for as long as it may stay."""
    victim = info_from_p2p_addr(Multiaddr(address))
    while True:
        tcp = SourcedTCP(source)
        host = make_host(tcp)
        for protocol in (PROTOCOL_ID_V11, PROTOCOL_ID_V12):
            host.set_stream_handler(protocol, {"unread": write, "hoards": read_slowly}.get(kind, read))
        try:
            async with host.run(listen_addrs=[]):
                if kind == "half":
                    raw = await tcp.dial(victim.addrs[0])
                    await raw.write(NOISE + b"\x00\x20" + os.urandom(32))
                    await read(raw)
                    continue
                with trio.fail_after(20):
                    await host.connect(victim)
                while host.get_network().get_connections(victim.peer_id):
                    await KINDS[kind](host, victim.peer_id)
        except (Exception, BaseExceptionGroup):  # whatever the library makes of being hung up on
            await trio.sleep(0.2)


async def speaking(host: Any, victim: Any) -> Attacker:
    """One that has subscribed."""
    stream = await host.new_stream(victim, [PROTOCOL_ID_V11])
    keys = KeyPair(host.get_private_key(), host.get_public_key())
    attacker = Attacker(host, keys, victim, stream, SWARM, 1)
    hello = rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=attacker.topic)])
    await attacker.raw(encode_varint_prefixed(hello.SerializeToString()))
    return attacker


async def idle(host: Any, victim: Any) -> None:
    await trio.sleep(0.1)


async def push(host: Any, victim: Any) -> None:
    """A large identity, unlike any other."""
    unlike = Identify(agent_version=os.urandom(8).hex())  # two messages on end are one
    stream = await host.get_network().new_stream(victim)
    try:
        await stream.write(PUSH + encode_varint_prefixed(IDENTITY.SerializeToString() + unlike.SerializeToString()))
        await stream.close()
    except Exception:  # it was reset
        await trio.sleep(0.01)


async def names(host: Any, victim: Any) -> None:
    stream = await host.get_network().get_connections(victim)[0].muxed_conn.open_stream()
    stream.send_window = 2 * LONG
    try:
        await stream.write(MULTISTREAM + encode_uvarint(LONG))
        for _ in range(LONG // 2**16):
            await stream.write(bytes(2**16))
    except Exception:  # it was reset
        await trio.sleep(0.01)


async def frames(host: Any, victim: Any) -> None:
    muxed = host.get_network().get_connections(victim)[0].muxed_conn
    await muxed._write_frame(struct.pack("!BBHII", 0, 0, 1, 101, 2**21))
    for _ in range(3):
        await muxed._write_frame(bytes(2**19))
    await muxed.event_closed.wait()


async def hoards(host: Any, victim: Any) -> None:
    attacker = await speaking(host, victim)
    graft = rpc_pb2.ControlMessage(graft=[rpc_pb2.ControlGraft(topicID=attacker.topic)])
    await attacker.raw(encode_varint_prefixed(rpc_pb2.RPC(control=graft).SerializeToString()))
    others = [await host.new_stream(victim, [PROTOCOL_ID_V11]) for _ in range(2)]
    for stream in (attacker.stream, *others):
        await stream.write(encode_uvarint(2**20) + bytes(5 * 2**20 // 6))
    await host.get_network().get_connections(victim)[0].muxed_conn.event_closed.wait()


async def valid(host: Any, victim: Any) -> None:
    attacker = await speaking(host, victim)
    while host.get_network().get_connections(victim):
        await attacker.send(attacker.message(attacker.sealed()))
        await trio.sleep(5)


KINDS = {
    "idle": idle, "unread": idle, "push": push, "names": names, "frames": frames, "valid": valid, "hoards": hoards
}  # fmt: skip


async def main(address: str, kind: str, keys: int, sources: int) -> None:
    async with trio.open_nursery() as nursery:
        for i in range(keys):
            nursery.start_soon(crowd, address, kind, f"127.0.0.{2 + i % sources}" if sources else "127.0.0.1")
        await trio.lowlevel.FdStream(os.dup(0)).receive_some(1)
        os._exit(0)  # at once, whatever the library would still wait for


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
