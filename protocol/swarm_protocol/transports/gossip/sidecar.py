"""The gossip process: GossipSub of py-libp2p under trio, controlled by its parent over a pipe (`pipe`).

    stdin  -> commands -> paced publisher -> mesh
    mesh   -> gate (`gate`) -> bounded outbox -> stdout

    python -m swarm_protocol.transports.gossip.sidecar

It makes a new key at each start, because peers would ignore its old id while they still hold the old connection. It
ends when its stdin ends, or when it has grown beyond `MAX_SIDECAR_RSS`; then its parent starts it again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import psutil
import trio
from libp2p.abc import IHost
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.gossip_kinds import KINDS
from swarm_protocol.limits import MAX_ADDRESSES
from swarm_protocol.transports.gossip import pipe
from swarm_protocol.transports.gossip.gate import GossipGate
from swarm_protocol.transports.gossip.hub_router import HubGossipSub
from swarm_protocol.transports.gossip.safe_host import CountedTCP, Wire, connect, make_host
from swarm_protocol.transports.gossip.safe_pubsub import SafePubsub
from swarm_protocol.transports.pacing import Bandwidth
from swarm_protocol.transports.settings import announced, free_port, listen_address

PACE_S = 0.05  # time between two of our messages: the library drops messages beyond 32 in a peer's queue
MAX_PUBLISH = 8  # messages waiting to be published; then the pipe is not read, and fills
MAX_OUT, MAX_OUT_BYTES = 512, 32 * 2**20  # events waiting for the parent; then the oldest is dropped
SIDECAR_DIAL_S = 10.0
MAX_SIDECAR_DIALS = 64  # dials under way at a time. The node asks again for the others.
MAX_SIDECAR_RSS = 512 * 2**20  # a healthy process takes 90 to 150 MB
HIGH_RSS, GROWTH_BYTES = MAX_SIDECAR_RSS // 2, 4 * 2**20
"""Above `HIGH_RSS`, a process that grew by `GROWTH_BYTES`, however slowly, hangs up on the peer for which the most is
kept: frames that it asked for and does not read, or bytes of it that nobody has read. If one connection has brought
more since the last check than is kept for all peers, that connection goes, provided that the process grew so much since
then. So peers that take memory go one after another, and the other links live, also the one over which a message came
that many ask for."""
MEMORY_S = 1.0  # time between two checks of memory; some 50 MB can arrive in it

log = logging.getLogger("gossip")


class Sidecar:
    """One process's gossip; `run` returns when the parent closes the pipe."""

    def __init__(self, settings: pipe.GossipSettings) -> None:
        self.settings = settings
        limits = Bandwidth(settings.upload_bytes_s), Bandwidth(settings.download_bytes_s)
        self.tcp = CountedTCP(settings.max_connections, *limits)
        self.host = make_host(self.tcp)
        self.router = HubGossipSub(settings.degree)
        self.pubsub = SafePubsub(
            self.host,
            self.router,
            self.tcp,
            (topic for kind in KINDS for topic in kind.topics(settings.swarm, settings.shards)),
            GossipGate(settings),
            self._deliver,
        )
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0
        self.outbox_filled = trio.Event()
        self.to_publish, self.publishing = trio.open_memory_channel[pipe.Publish](MAX_PUBLISH)
        self.dials = 0
        self.messages_in = self.messages_out = self.dropped = 0

    async def run(self, commands: AsyncIterator[pipe.Command], stdout: trio.lowlevel.FdStream) -> None:
        port = 0 if self.settings.dial_only else free_port(self.settings.listen, self.settings.port)
        listen = [] if self.settings.dial_only else [Multiaddr(listen_address(self.settings.listen, port))]
        async with (
            self.host.run(listen_addrs=listen),
            background_trio_service(self.pubsub),
            background_trio_service(self.router),
            trio.open_nursery() as nursery,
        ):
            await self.pubsub.wait_until_ready()
            self._emit(pipe.GossipReady(str(self.host.get_id()), self._addresses(port), port))
            nursery.start_soon(self.pubsub.watch)
            nursery.start_soon(self._publish_paced)
            nursery.start_soon(self._drain, stdout)
            nursery.start_soon(self._watch_memory)
            async for command in commands:
                await self._do(command, nursery)
            nursery.cancel_scope.cancel()

    async def _do(self, command: pipe.Command, nursery: trio.Nursery) -> None:
        match command:
            case pipe.Subscribe(topic):
                if topic in self.pubsub.known:
                    await self.pubsub.subscribe(topic)
            case pipe.Publish():
                await self.to_publish.send(command)
            case pipe.Dial(address):
                if self.dials < MAX_SIDECAR_DIALS:
                    self.dials += 1
                    nursery.start_soon(self._dial, address)
            case pipe.Drop(ids):
                for peer in self.host.get_connected_peers():
                    if str(peer) in ids:
                        await self.pubsub.hang_up(peer)
            case pipe.Ask(number):
                self._emit(self._status(number))

    async def _publish_paced(self) -> None:
        async for message in self.publishing:
            await self.pubsub.publish(message.topic, message.data)
            self.messages_out += 1
            await trio.sleep(PACE_S)

    async def _dial(self, address: str) -> None:
        try:
            peer = info_from_p2p_addr(Multiaddr(address))
            if peer.peer_id == self.host.get_id():
                raise ConnectionError("that is this process")
            if self.pubsub.is_banned(peer.peer_id):
                raise ConnectionError("banned")
            if not self.tcp.places.has_room(inbound=False):
                raise ConnectionError("no room for another connection")
            with trio.fail_after(SIDECAR_DIAL_S):
                await connect(self.host, peer)
            if not await self.pubsub.ensure_peer_stream(peer.peer_id, SIDECAR_DIAL_S):
                raise ConnectionError("it does not speak gossip")
        except Exception as error:  # of many libraries, on what a stranger wrote on a card
            log.info("cannot dial %s: %r", address, error)
        finally:
            self.dials -= 1

    def _deliver(self, topic: str, data: bytes) -> None:
        self.messages_in += 1
        self._emit(pipe.Message(topic, data))

    def _emit(self, event: pipe.Event) -> None:
        """Never waits: a parent that is busy must not stop us from passing on messages of others."""
        data = pipe.frame(event)
        self.outbox.append(data)
        self.outbox_bytes += len(data)
        while len(self.outbox) > MAX_OUT or self.outbox_bytes > MAX_OUT_BYTES:
            self.outbox_bytes -= len(self.outbox.popleft())
            self.dropped += 1
        self.outbox_filled.set()

    async def _drain(self, stdout: trio.lowlevel.FdStream) -> None:
        while True:
            await self.outbox_filled.wait()
            self.outbox_filled = trio.Event()
            while self.outbox:
                data = self.outbox.popleft()
                self.outbox_bytes -= len(data)
                await stdout.send_all(data)

    def _status(self, number: int) -> pipe.Status:
        return pipe.Status(
            number=number,
            peers=[str(peer) for peer in self.pubsub.peers],
            mesh={topic: len(peers) for topic, peers in self.router.mesh.items()},
            bytes_in=self.tcp.bytes_in,
            bytes_out=self.tcp.bytes_out,
            messages_in=self.messages_in,
            messages_out=self.messages_out,
            dropped=self.dropped,
            rejected=dict(self.pubsub.rejected),
            ways=remote_addresses(self.host, self.pubsub.peers),
            sources=dict(list(self.tcp.refusals.by_source().items())[-pipe.MAX_STATUS_SOURCES :]),
        )

    def _addresses(self, port: int) -> list[str]:
        if self.settings.dial_only:
            return []
        told = announced(self.settings.announce, port)
        told += [listen_address(ip, port) for ip in _own_ips(self.settings.listen)]
        return [f"{address}/p2p/{self.host.get_id()}" for address in dict.fromkeys(told)][:MAX_ADDRESSES]

    async def _watch_memory(self) -> None:
        """End the process when it has grown too far; before that, the connections under which it grows."""
        before = level = own_rss()
        while True:
            await trio.sleep(MEMORY_S)
            now, brought = own_rss(), self.tcp.heaviest()
            heaviest = self._heaviest(*brought) if now > HIGH_RSS else None
            if now > MAX_SIDECAR_RSS:
                raise MemoryError(f"grown to {now >> 20} MiB{'' if heaviest is None else heaviest.words}")
            if heaviest is not None and now - (level if heaviest.keeps else before) > GROWTH_BYTES:
                self.tcp.refuse("memory", heaviest.address)
                await heaviest.hang_up()
                level = now
            before, level = now, max(HIGH_RSS, min(level, now))

    def _heaviest(self, wire: Wire | None, brought: int) -> Heaviest | None:
        """The connection that takes the most memory. `wire` `brought` the most bytes since the last check."""
        kept = self.pubsub.kept()
        if self.pubsub.kept_once() > max(brought, GROWTH_BYTES):
            peer = max(kept, key=lambda peer: kept[peer])
            address = self.pubsub.address(peer)
            words = f", {kept[peer] >> 20} of them for {address[0] if address else 'a peer'}"
            return Heaviest(address, words, partial(self.pubsub.hang_up, peer), keeps=True)
        if wire is None:
            return None
        words = f"; {wire.address[0]} sent the most in the last second" if wire.address else ""
        return Heaviest(wire.address, words, wire.close, keeps=False)


@dataclass(frozen=True)
class Heaviest:
    """A connection that takes memory."""

    address: tuple[str, int] | None  # of its other end
    words: str  # about that, behind the memory of the process
    hang_up: Callable[[], Awaitable[None]]
    keeps: bool  # whether by what is kept for it, not by what it brought


def remote_addresses(host: IHost, peers: Iterable[ID]) -> dict[str, str]:
    """Gossip id -> multiaddress at the other end of its connection, of those that are still connected."""
    found = {}
    for peer in peers:
        connections = host.get_network().get_connections(peer)
        addresses = connections[0].get_transport_addresses() if connections else []
        if addresses:
            found[str(peer)] = str(addresses[0]).partition("/p2p/")[0]
    return found


def own_rss() -> int:
    """Bytes of memory that this process holds. (`getrusage` counts the parent's in.)"""
    return int(psutil.Process().memory_info().rss)


def _own_ips(listen: str) -> list[str]:
    """IP addresses at which a listener on `listen` can be reached: the one on the default route, and loopback."""
    if listen not in ("0.0.0.0", "::"):
        return [listen]
    family, far, loopback = (
        (socket.AF_INET, "192.0.2.1", "127.0.0.1") if listen == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1", "::1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # sends nothing; the system only chooses a route
            return [probe.getsockname()[0], loopback]
        except OSError:
            return [loopback]


async def commands_from(stdin: trio.lowlevel.FdStream) -> AsyncIterator[pipe.Command]:
    """Commands until stdin ends. Raises RemoteProtocolError for anything else."""
    frames: pipe.Frames[pipe.Command] = pipe.Frames(pipe.Command)
    while data := await stdin.receive_some(pipe.PIPE_READ_BYTES):
        for command in frames.feed(data):
            yield command


async def run_sidecar(stdin_fd: int, stdout_fd: int) -> None:
    """Read the settings, then gossip until stdin ends."""
    commands = commands_from(trio.lowlevel.FdStream(stdin_fd))
    async for first in commands:
        if not isinstance(first, pipe.GossipSettings):
            raise LocalProtocolError("the first command must be the settings")
        await Sidecar(first).run(commands, trio.lowlevel.FdStream(stdout_fd))


def main() -> None:
    """The program. Its exit code is 1 if it ends for a reason of its own, which is its last line on stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it calls every closed connection an error
    stdout = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not end up between frames
    try:
        trio.run(run_sidecar, os.dup(0), stdout)
    except* (LocalProtocolError, RemoteProtocolError, MemoryError) as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):  # one for each nursery around
            error = error.exceptions[0]
        sys.exit(str(error))
    except* (BrokenPipeError, trio.BrokenResourceError):  # the parent is gone
        pass


if __name__ == "__main__":
    main()
