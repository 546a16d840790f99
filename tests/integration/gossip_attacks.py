"""A hostile peer, as a program that speaks GossipSub by hand and reports what it sent as lines of JSON.

python -m tests.integration.gossip_attacks ADDRESS SWARM SHARDS ATTACK...    attack ADDRESS, each time as another peer;
after each report it stays connected until it reads a line
python -m tests.integration.gossip_attacks serve SWARM SHARDS ATTACK...      attack who dials, one attack a connection
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import multiaddr
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.utils import encode_varint_prefixed
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.identity import Identity
from swarm_protocol.topics import shard_of
from tests.support.gossip_samples import batch, peer_on_shard, seal_as

GOSSIP = "/meshsub/1.1.0"
PREFIX = b"libp2p-pubsub:"
HANG_S = 100.0
"""What a victim does about an attack takes seconds."""


def tell(attack: str, sent: int, error: str) -> None:
    print(json.dumps({"attack": attack, "sent": sent, "error": error[:200]}), flush=True)


class Attacker:
    """A connection to the victim and whatever it takes to lie over it."""

    def __init__(self, host: Any, keys: Any, victim: Any, stream: Any, swarm: str, shards: int) -> None:
        self.host, self.keys, self.victim, self.stream = host, keys, victim, stream
        self.swarm, self.shards = swarm, shards
        self.topic = ROLLOUTS.topic(swarm, 0)
        self.author = peer_on_shard(0, shards)
        self.sequence = time.time_ns()
        self.sent = 0

    def message(self, data: bytes, keys: Any = None) -> Any:
        """A message as honest peers wrap it; signed with other `keys`, as if only passed on."""
        keys = keys or self.keys
        self.sequence += 1
        message = rpc_pb2.Message(
            data=data,
            topicIDs=[self.topic],
            from_id=ID.from_pubkey(keys.public_key).to_bytes(),
            seqno=self.sequence.to_bytes(8, "big"),
        )
        message.signature = keys.private_key.sign(PREFIX + message.SerializeToString())
        message.key = keys.public_key.serialize()
        return message

    def sealed(self, **changes: Any) -> bytes:
        """A batch of its own, changed."""
        return seal_as(msgspec.structs.replace(batch(self.swarm, 200), **changes), self.author)

    async def send(self, *messages: Any) -> None:
        await self.raw(encode_varint_prefixed(rpc_pb2.RPC(publish=list(messages)).SerializeToString()))

    async def raw(self, data: bytes) -> None:
        await self.stream.write(data)
        self.sent += 1


async def several(attacker: Attacker, make: Callable[[], Any], n: int = 3) -> None:
    for _ in range(n):
        await attacker.send(make())


# ---------------------------------------------------------------- frames


async def garbage(a: Attacker) -> None:
    await a.raw(encode_varint_prefixed(os.urandom(500)))


async def endless(a: Attacker) -> None:
    await a.raw(b"\xff" * 64)


async def oversized_frame(a: Attacker) -> None:
    await a.raw(encode_varint_prefixed(os.urandom(2 << 20)))


async def bad_utf8(a: Attacker) -> None:
    await a.raw(encode_varint_prefixed(b"\x0a\x06\x08\x01\x12\x02\xff\xfe"))  # a subscription whose topic is no text


# ---------------------------------------------------------------- messages


async def unreadable_key(a: Attacker) -> None:
    def make() -> Any:
        message = a.message(a.sealed())
        message.from_id, message.key = b"\x12\x20" + os.urandom(32), os.urandom(40)  # as of an RSA key
        return message

    await several(a, make)


async def unsigned(a: Attacker) -> None:
    def make() -> Any:
        message = a.message(a.sealed())
        message.ClearField("signature")
        return message

    await several(a, make)


async def forged(a: Attacker) -> None:
    def make() -> Any:
        message = a.message(a.sealed())
        message.from_id = ID.from_pubkey(create_new_key_pair().public_key).to_bytes()
        return message

    await several(a, make)


async def oversized(a: Attacker) -> None:
    await several(a, lambda: a.message(os.urandom(600_000)))


async def no_batch(a: Attacker) -> None:
    await several(a, lambda: a.message(os.urandom(3000)))


async def wrong_swarm(a: Attacker) -> None:
    await several(a, lambda: a.message(a.sealed(swarm="cd" * 32)))


async def wrong_version(a: Attacker) -> None:
    await several(a, lambda: a.message(a.sealed(protocol=99)))


async def wrong_schema(a: Attacker) -> None:
    await several(a, lambda: a.message(a.sealed(groups=[])))


async def wrong_shard(a: Attacker) -> None:
    a.author = peer_on_shard(1, a.shards)
    await several(a, lambda: a.message(a.sealed()))


async def far_future(a: Attacker) -> None:
    await several(a, lambda: a.message(a.sealed(created=time.time() + 3600)))


async def long_past(a: Attacker) -> None:
    await several(a, lambda: a.message(a.sealed(created=time.time() - 36_000)))


async def replayed(a: Attacker) -> None:
    data = a.sealed()
    await several(a, lambda: a.message(data), 4)


async def flood(a: Attacker) -> None:
    """Messages of one author as fast as they go, until it is hung up on; on a slow machine the first 600 may be read
    when it would be gone."""
    for _ in range(5000):
        await a.send(*(a.message(a.sealed()) for _ in range(4)))


async def fresh_keys(a: Attacker) -> None:
    """Up to 4000 messages, each of an author and of a process of its own, as if they were passed on for others; until
    it is hung up on. A slow machine makes them so slowly that 1600 are too few to be blamed for."""
    for _ in range(1000):
        messages = []
        for _ in range(4):
            a.author = Identity.generate(os.urandom(32))
            while shard_of(a.author.peer_id, a.shards):
                a.author = Identity.generate(os.urandom(32))
            messages.append(a.message(a.sealed(), create_new_key_pair()))
        await a.send(*messages)


async def persistent(a: Attacker) -> None:
    """Goes on until it is hung up on."""
    for _ in range(200):
        await a.send(a.message(os.urandom(300)))
        await trio.sleep(0.02)


# ---------------------------------------------------------------- control


async def control(a: Attacker) -> None:
    """Topics, message ids, back-offs and peers to dial, all invented."""
    for _ in range(20):
        invented = [os.urandom(16).hex() for _ in range(2000)]
        talk = rpc_pb2.ControlMessage()
        talk.prune.extend(rpc_pb2.ControlPrune(topicID=topic, backoff=2**40) for topic in invented)
        talk.graft.extend(rpc_pb2.ControlGraft(topicID=topic) for topic in invented)
        talk.ihave.extend(rpc_pb2.ControlIHave(topicID=topic, messageIDs=[os.urandom(40)]) for topic in invented[:500])
        talk.iwant.extend(rpc_pb2.ControlIWant(messageIDs=[os.urandom(40)]) for _ in range(500))
        talk.prune.append(
            rpc_pb2.ControlPrune(
                topicID=a.topic, backoff=2**63, peers=[rpc_pb2.PeerInfo(peerID=os.urandom(34)) for _ in range(50)]
            )
        )
        rpc = rpc_pb2.RPC(control=talk, senderRecord=os.urandom(2000))
        rpc.subscriptions.extend(rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic) for topic in invented)
        await a.raw(encode_varint_prefixed(rpc.SerializeToString()))


async def asks_again(a: Attacker) -> None:
    """Asks for a message 64 times over, in each frame, and subscribes again and again, until it has that and another.
    Raises ValueError if it was given anything twice."""
    heard: Counter[bytes] = Counter()

    async def listen(stream: Any) -> None:
        while True:
            rpc = rpc_pb2.RPC()
            rpc.ParseFromString(await read_varint_prefixed_bytes_limited(stream, 1 << 20))
            heard.update(message.from_id + message.seqno for message in rpc.publish)

    async with attacking(str(a.victim.addrs[0]) + f"/p2p/{a.victim.peer_id}", a.swarm, a.shards, listen) as asker:
        for size in (300_000, 300):  # what is asked for last comes last
            message = asker.message(seal_as(batch(a.swarm, size), a.author))
            wanted = message.from_id + message.seqno
            await asker.send(message)
            while not heard[wanted]:
                rpc = rpc_pb2.RPC()
                rpc.control.iwant.extend(rpc_pb2.ControlIWant(messageIDs=[wanted] * 64) for _ in range(2))
                for subscribe in (False, True):
                    rpc.subscriptions.append(rpc_pb2.RPC.SubOpts(subscribe=subscribe, topicid=a.topic))
                await asker.raw(encode_varint_prefixed(rpc.SerializeToString()))
                await trio.sleep(0.25)  # more entries a second are ignored
        a.sent += asker.sent
    if set(heard.values()) != {1}:
        raise ValueError(f"messages came so many times each: {list(heard.values())}")


async def resets(a: Attacker) -> None:
    """Resets each stream on which the victim speaks, and makes it speak again, until it is hung up on."""

    async def listen(stream: Any) -> None:
        await read_varint_prefixed_bytes_limited(stream, 1 << 20)
        await stream.reset()

    async with attacking(str(a.victim.addrs[0]) + f"/p2p/{a.victim.peer_id}", a.swarm, a.shards, listen) as other:
        while True:
            rpc = rpc_pb2.RPC()
            rpc.subscriptions.extend(rpc_pb2.RPC.SubOpts(subscribe=on, topicid=a.topic) for on in (False, True))
            rpc.control.ihave.append(rpc_pb2.ControlIHave(topicID=a.topic, messageIDs=[os.urandom(40)]))
            await other.raw(encode_varint_prefixed(rpc.SerializeToString()))
            a.sent += 1
            await trio.sleep(0.02)


async def bad_mux(a: Attacker) -> None:
    """Noise where the multiplexer expects headers."""
    connection = a.host.get_network().get_connections(a.victim.peer_id)[0]
    await connection.muxed_conn.secured_conn.write(os.urandom(4096))
    a.sent += 1


async def bad_noise(a: Attacker) -> None:
    """Noise where the cipher expects its own."""
    connection = a.host.get_network().get_connections(a.victim.peer_id)[0]
    layer = connection.muxed_conn.secured_conn
    while not isinstance(layer, RawConnection):
        layer = next(
            getattr(layer, name) for name in ("conn", "read_writer", "read_write_closer") if hasattr(layer, name)
        )
    await layer.write(os.urandom(4096))
    a.sent += 1


async def unread(a: Attacker) -> None:
    """Data for a stream that nobody reads any more, against the receive window."""
    connection = a.host.get_network().get_connections(a.victim.peer_id)[0]
    muxed = await connection.muxed_conn.open_stream()  # and no protocol is named
    for _ in range(4000):
        muxed.send_window = 1 << 30
        await muxed.write(os.urandom(60_000))
        a.sent += 1


async def streams(a: Attacker) -> None:
    """Streams that never say what they are for."""
    connection = a.host.get_network().get_connections(a.victim.peer_id)[0]
    for _ in range(200):
        await connection.muxed_conn.open_stream()
        a.sent += 1
    await connection.muxed_conn.event_closed.wait()


async def comes_and_goes(a: Attacker) -> None:
    """More connections, one after another, than the victim takes at a time."""
    for _ in range(30):
        async with attacking(str(a.victim.addrs[0]) + f"/p2p/{a.victim.peer_id}", a.swarm, a.shards):
            a.sent += 1


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        garbage, endless, oversized_frame, bad_utf8, unreadable_key, unsigned, forged, oversized, no_batch,
        wrong_swarm, wrong_version, wrong_schema, wrong_shard, far_future, long_past, replayed, flood, fresh_keys,
        persistent, control, asks_again, resets, bad_mux, bad_noise, unread, streams, comes_and_goes,
    )
}  # fmt: skip


@asynccontextmanager
async def attacking(
    address: str, swarm: str, shards: int, listen: Callable[[Any], Awaitable[None]] | None = None
) -> AsyncIterator[Attacker]:
    """Connected as a new peer. `listen` gets the stream on which the victim speaks; without, it finds nobody there."""
    keys = create_new_key_pair()
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    host = new_host(key_pair=keys, sec_opt={NOISE: noise}, muxer_preference="YAMUX")
    victim = info_from_p2p_addr(multiaddr.Multiaddr(address))
    if listen is not None:
        host.set_stream_handler(GOSSIP, listen)
    async with host.run(listen_addrs=[]):
        with trio.fail_after(10):
            await host.connect(victim)
            stream = await host.new_stream(victim.peer_id, [GOSSIP])
            attacker = Attacker(host, keys, victim, stream, swarm, shards)
            hello = rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=attacker.topic)])
            await stream.write(encode_varint_prefixed(hello.SerializeToString()))
        try:
            yield attacker
        finally:
            with trio.move_on_after(3):
                await host.disconnect(victim.peer_id)


async def serve(swarm: str, shards: int, attacks: list[str]) -> None:
    """Listen, tell where, and attack who dials, one attack each connection, all of which stay."""
    keys = create_new_key_pair()
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    host = new_host(key_pair=keys, sec_opt={NOISE: noise}, muxer_preference="YAMUX")
    left = iter(attacks)

    async def nonsense(stream: Any) -> None:
        await stream.write(os.urandom(3000))

    async def attack(stream: Any) -> None:
        name = next(left, "")
        if not name:
            return
        peer = PeerInfo(stream.muxed_conn.peer_id, [])
        attacker = Attacker(host, keys, peer, await host.new_stream(peer.peer_id, [GOSSIP]), swarm, shards)
        try:
            await ATTACKS[name](attacker)
        except Exception as cause:  # being hung up on is to be expected
            tell(name, attacker.sent, repr(cause))
        else:
            tell(name, attacker.sent, "")

    host.set_stream_handler("/ipfs/id/1.0.0", nonsense)
    host.set_stream_handler(GOSSIP, attack)
    async with host.run(listen_addrs=[multiaddr.Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        print(json.dumps({"address": str(host.get_addrs()[0])}), flush=True)
        await trio.sleep_forever()


async def main(address: str, swarm: str, shards: int, attacks: list[str]) -> None:
    for name in attacks:
        error, sent = "", None
        try:
            async with attacking(address, swarm, shards) as attacker:
                try:
                    with trio.fail_after(HANG_S):
                        await ATTACKS[name](attacker)
                        await trio.sleep(0.5)
                except Exception as cause:  # being thrown out is to be expected
                    error = repr(cause)
                sent = attacker.sent
                tell(name, sent, error)
                await trio.to_thread.run_sync(sys.stdin.readline)
        except* Exception as group:
            if sent is None:
                tell(name, 0, repr(group.exceptions[0]))
                await trio.to_thread.run_sync(sys.stdin.readline)


if __name__ == "__main__":
    where, swarm, shards, *attacks = sys.argv[1:]
    if where == "serve":
        trio.run(serve, swarm, int(shards), attacks)
    else:
        trio.run(main, where, swarm, int(shards), attacks)
