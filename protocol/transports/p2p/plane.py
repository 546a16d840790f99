"""The DHT and the streams of a node: hivemind's `P2P` (p2pd) and this project's `CardDHT` in the caller's asyncio loop.

    P2PTransport --coroutines--> HivemindPlane --unix sockets--> p2pd (go-libp2p) ==TCP==> other peers
                                     watch: p2pd gone -> fail the calls in flight, start it again: same key, same port

p2pd starts without bootstrap peers and dials them afterwards, so that dead ones cannot hold up a start. Every call is
bounded in time.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from protocol.codec import seal_card
from protocol.dials import Dials
from protocol.errors import LocalProtocolError, NotOfSwarm, PeerUnreachable, RemoteProtocolError
from protocol.hosts import neighbourhood_of_stream
from protocol.identity import Identity
from protocol.limits import MAX_CLOCK_SKEW_S, MAX_REQUEST_BYTES
from protocol.messages import PeerCard
from protocol.peers import peer_of
from protocol.topics import bucket_of
from protocol.transports.base import Acceptor, Outgoing, Server, Sink
from protocol.transports.dht.records import CardStorage, CardValidator
from protocol.transports.dht.server import Accounts, CardDHT
from protocol.transports.dht.whereabouts import ASK_S, MAX_ADDRESSES_BYTES, METHOD, Whereabouts, read_answer
from protocol.transports.p2p.dial_back import DialBack, ask_back
from protocol.transports.p2p.p2pd_calls import keep_accounts
from protocol.transports.p2p.p2pd_memory import end_if_grown
from protocol.transports.p2p.relay import RELAY_PROTOCOL, reserve
from protocol.transports.pacing import Paces
from protocol.transports.ports import Port
from protocol.transports.refusals import ip_of
from protocol.transports.settings import NetworkSettings, announced, best_first, endpoint, listen_address
from protocol.transports.streams.channels import Channels, StreamChannel, Streams
from protocol.transports.streams.exchanges import Exchanges
from protocol.transports.streams.requests import Answers, Traffic, ask

START_S = 15.0
CALL_S = 10.0
DIAL_S = 8.0
KNOCK_S = 4.0
GOODBYE_S = 2.0
LAST_WORD_S = 0.2
"""For p2pd to pass on what was said last over channels."""
MAX_WAIT_S = 10.0
LOCATED_S = 1.0
"""Between two looks where refused peers are connected from: a hostile one causes thousands of refusals a second."""
ASKED_TO_END = 0, -signal.SIGINT, -signal.SIGTERM
"""Exit codes not worth a word: whoever ends a node may end all of its processes, as systemd does."""
IN_ITS_OWN_SESSION = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
"""Ctrl-C is for the node, which says goodbye through p2pd, then ends it."""
STEADY_S = 10.0
"""A p2pd that lived this long did not die of its own start."""
_FAILURES = (P2PDaemonError, P2PHandlerError, OSError, EOFError)
"""What calls to p2pd raise besides running into their time limit."""
ANOTHER_KEY = re.compile(r"\[(/\S+)\] [^\n]*peer id mismatch: expected \w+, but remote key matches (\w{46,64})")
"""What go-libp2p says of an address when another peer than the one dialled answers there."""
NO_WAY = "failed to dial"
"""What go-libp2p says when it has no address of a peer, or nobody answers there."""
NOT_SPOKEN = "protocols not supported"
"""What go-libp2p says when a peer is there and does not know the protocol, which has the swarm's id in its name."""
MAX_ANSWER_BYTES = DEFAULT_MAX_MSG_SIZE - 2**16
"""An answer to a call, and room for its envelope in a message to p2pd."""
SHORT_CHARACTERS = 40
"""A Unix socket's path has 104 bytes on macOS; ours, in a folder of this length, have half of the rest to spare."""
NEW_S = 60.0
"""A folder younger than this may belong to a process that has not locked it yet."""
T = TypeVar("T")

logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "CRITICAL"))  # faults are counted instead


class HivemindPlane:
    """One peer's p2pd and DHT node. All coroutines belong to the loop that `start` was called in."""

    def __init__(
        self,
        identity: Identity,
        identity_path: Path,
        swarm: str,
        settings: NetworkSettings,
        report: Callable[[str], None] = lambda sentence: None,
        on_restart: Callable[[], None] = lambda: None,
        channels: Channels | None = None,
        port: Port | None = None,
        dials: Dials | None = None,
        known: Callable[[str], Sequence[str]] | None = None,
        told: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        """`dials` says which addresses may be dialled (default: any once), `known` which ones a peer has, and `told`
        which of them others may hear (default: those on the cards stored here). Any thread may call `told`."""
        self.addresses: list[str] = []
        """Where others reach this node, those worth telling first."""
        self.port = settings.port
        """Where p2pd listens, or listened last."""
        self.restarts = 0
        self._channels = channels or Channels(Traffic(), report)
        self.traffic = self._channels.traffic
        self.refusals = self.traffic.refusals
        """What peers were refused: on the DHT, and of their requests."""
        self.refusals.unlocated = self._locate_soon
        self._locating: asyncio.Task[None] | None = None
        self._identity = identity
        self._identity_path = identity_path
        self._swarm = swarm
        self._settings = settings
        self._port = port or Port(settings.listen, settings.port, report=report)
        self._report = report
        self._on_restart = on_restart
        self._protocol = f"/swarm-node/{swarm[:16]}/request/1"
        self._exchange_protocol = f"/swarm-node/{swarm[:16]}/exchange/1"
        self._channel_protocol = f"/swarm-node/{swarm[:16]}/channel/1"
        self._dial_back_protocol = f"/swarm-node/{swarm[:16]}/dial-back/1"
        self._dial_back = DialBack(lambda: self.addresses)
        self._answers = Answers(self.traffic, report)
        self._exchanges = Exchanges(self.traffic, report)
        self._paces = Paces(settings.max_upload_mbit, settings.max_download_mbit)
        self._validator = CardValidator(swarm, settings.card_ttl_s)
        self._storage = CardStorage()
        self._accounts = Accounts()
        self._dials = dials or Dials()
        self._addresses_of = known or self._stored_addresses
        self._whereabouts = Whereabouts(told or self._stored_addresses)
        self._answers.servers[METHOD] = self._whereabouts.serve
        self._bootstrap = {peer_of(address) for address in settings.bootstrap}
        self._serving: dict[str, None] = {}
        """Connected peers that keep a part of the DHT, longest connected first."""
        self._clock_offset = time.time() - time.monotonic()
        self._folder = ""
        self._folder_lock = -1
        self._panic = ""
        """Why p2pd died, if it said so before its last line."""
        self._daemon: P2P | None = None
        self._dht: CardDHT | None = None
        self._ended: asyncio.Future[int] = asyncio.Future()
        """Exit code of the p2pd that runs now."""
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Start p2pd and keep it running; returns when it is up. Raises LocalProtocolError for settings it refuses."""
        self._folder, self._folder_lock = _private_folder()
        self._daemon_class = _daemon_class(self)
        up = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(up))
        await up

    async def close(self) -> None:
        """Stop p2pd; bounded, whatever state it is in."""
        self._closing = True
        talking = self._channels.cancel()
        ending = self._exchanges.cancel() | talking
        for task in (self._keeper, self._locating):
            if task is not None:
                task.cancel()
                ending.add(task)
        if ending:
            await asyncio.wait(ending, timeout=GOODBYE_S)
        if talking:
            await asyncio.sleep(LAST_WORD_S)
        await self._stop_daemon()
        self._answers.close()  # after p2pd, which brings the requests
        self._port.release()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._folder_lock)
            self._folder = ""

    async def _keep(self, up: asyncio.Future[None]) -> None:
        """Start p2pd whenever there is none."""
        wait = 0.0
        while not self._closing:
            try:
                await self._start_daemon()
            except LocalProtocolError as error:
                if not up.done():
                    up.set_exception(error)
                    return
                self._report(str(error))
                wait = MAX_WAIT_S
            except Exception as error:  # whatever hivemind raises: this node lives on, and tries again
                self._report(f"p2pd does not start: {self._panic or error or type(error).__name__}")
                wait = min(MAX_WAIT_S, wait + 1.0)
            else:
                started = time.monotonic()
                if up.done():
                    self.restarts += 1
                    self._on_restart()
                else:
                    up.set_result(None)
                code = await self._end_of_daemon()
                wait = 0.0 if time.monotonic() - started > STEADY_S else min(MAX_WAIT_S, wait + 0.25)
                if code not in ASKED_TO_END:
                    why = f" ({self._panic})" if self._panic else ""
                    self._report(f"p2pd ended with code {code}{why}; starting it again")
            await self._stop_daemon()
            await asyncio.sleep(wait)

    async def _start_daemon(self) -> None:
        settings = self._settings
        port = 0 if settings.dial_only else self._port.take()
        daemon = await asyncio.wait_for(
            self._daemon_class.create(
                identity_path=str(self._identity_path),
                check_if_identity_free=False,  # would start a second p2pd, with port mapping
                host_maddrs=None if settings.dial_only else [listen_address(settings.listen, port)],
                announce_maddrs=announced(settings, port) or None,
                no_listen=settings.dial_only,
                force_reachability="public" if settings.serve_relay else "private" if settings.dial_only else None,
                auto_nat=settings.relay,
                use_relay=settings.relay or settings.serve_relay,
                use_auto_relay=False,  # wants p2pd's own DHT, which is off; `P2PTransport` asks relays for places
                nat_port_map=settings.nat_port_map,
                startup_timeout=START_S,
            ),
            START_S + 5.0,
        )
        self._ended = asyncio.ensure_future(_end_of(daemon))
        if port and self._port.is_shared():  # with a program that claims none
            raise P2PDaemonError(f"port {port} was taken meanwhile")
        dht = CardDHT(
            daemon,
            self._identity.peer_id,
            self._validator,
            self._storage,
            self._accounts,
            self.refusals,
            client=settings.dial_only,
            named=self._whereabouts.named,
        )
        await asyncio.wait_for(dht.serve(), CALL_S)
        for protocol, handler in (
            (self._protocol, self._on_request),
            (self._exchange_protocol, self._on_exchange),
            (self._channel_protocol, self._on_channel),
            (self._dial_back_protocol, self._on_dial_back),
        ):
            await asyncio.wait_for(daemon.add_binary_stream_handler(protocol, handler), CALL_S)
        if not settings.serve_relay:  # without its relay service, p2pd still relays 128 KiB a connection
            await asyncio.wait_for(daemon.add_binary_stream_handler(RELAY_PROTOCOL, _hang_up), CALL_S)
        self._dht, self.port = dht, port
        await self.look_around()

    async def _end_of_daemon(self) -> int:
        """Exit code of p2pd, which is ended if it has grown too large."""
        assert self._daemon is not None
        watch = asyncio.create_task(end_if_grown(self._daemon._child, lambda: len(self._storage.connected)))
        try:
            code = await self._ended
            if watch.done() and not watch.exception():
                self._panic = watch.result()
            return code
        finally:
            watch.cancel()

    async def _stop_daemon(self) -> None:
        """End p2pd."""
        daemon, self._daemon, self._dht = self._daemon, None, None
        self._serving.clear()
        if daemon is None:
            return
        try:
            await asyncio.wait_for(daemon.shutdown(), GOODBYE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                daemon._child.kill()
        for left in Path(self._folder).glob("*.sock"):
            left.unlink(missing_ok=True)  # of a p2pd that was killed

    # ---------------------------------------------------------------- addresses and connections

    async def look_around(self) -> None:
        """Ask p2pd where this node can be reached by now (routers, relays). Raises PeerUnreachable."""
        daemon = self._running()[0]
        with suppress(ValueError):  # no address at all: dial-only and no relay yet
            found = await self._bounded(daemon.get_visible_maddrs(latest=True), CALL_S)
            self.addresses = best_first([str(address) for address in found])

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Dial a peer at all of these multiaddresses, let both DHT tables know, and give it this node's card. Raises
        PeerUnreachable."""
        dht = self._running()[1]
        to = await self._dial(peer, addresses)
        if not await self._bounded(dht.ping(to), CALL_S):
            return  # connected, but it only dials and keeps no part of the DHT
        self._serving.setdefault(peer)
        await self._bounded(asyncio.gather(dht.give_own(to), dht.look_around()), CALL_S)

    async def _dial(self, peer: str, addresses: Sequence[str]) -> PeerID:
        """Connect p2pd to a peer, if it is not, at those of these addresses that may be dialled now. Raises
        PeerUnreachable."""
        daemon = self._running()[0]
        new = peer not in await self.connected()
        if new:
            own = [address for address in addresses if peer_of(address) == peer]
            allowed = [address for address in own if self._dials.take(address, time.time())]
            if own and not allowed:
                raise PeerUnreachable(f"{peer} was dialled at {', '.join(own)} not long ago")
            addresses = await _answering(allowed)
        try:
            to = PeerID.from_base58(peer)
            ways = [_way(address) for address in addresses]
        except (ValueError, MultiaddrError) as error:
            raise PeerUnreachable(f"{peer} at {addresses}: {error}") from error
        try:
            await self._bounded(daemon._client.connect(to, ways), DIAL_S)
        except PeerUnreachable as error:
            for address, other in ANOTHER_KEY.findall(str(error)):
                self._dials.hint(address, other, time.time())
            raise
        if new:
            if len(addresses) == 1 and "/dns" in addresses[0]:
                self._dials.prove(peer, addresses, time.time())  # of others, the connection shows the address
            await self.connections()
        return to

    async def _reach(self, peer: str) -> None:
        """Dial a peer that was named by another one, at the addresses on its card. Raises PeerUnreachable."""
        addresses = list(self._addresses_of(peer))
        namer = self._whereabouts.namer(peer)
        if not addresses and namer and namer in await self.connected():
            try:
                answer = await self.request(namer, METHOD, peer.encode(), ASK_S, MAX_ADDRESSES_BYTES)
                addresses = read_answer(peer, answer)
            except RemoteProtocolError as error:
                raise PeerUnreachable(f"{namer} does not say where {peer} is: {error}") from error
        await self._dial(peer, addresses)

    def _stored_addresses(self, peer: str) -> list[str]:
        try:
            value = self._storage.value(self._validator.keys[bucket_of(peer)], peer)
            return [] if value is None else list(self._validator.card(value)[1].addresses)
        except RemoteProtocolError:
            return []

    async def take_place(self, relay: str) -> None:
        """Be reached through a peer that this node is connected to, for `PLACE_S` at least. Raises PeerUnreachable."""

        async def take() -> None:
            daemon = self._running()[0]
            _, reader, writer = await daemon.call_binary_stream_handler(PeerID.from_base58(relay), RELAY_PROTOCOL)
            try:
                await reserve(reader, writer)
            finally:
                writer.close()

        await self._bounded(take(), CALL_S)

    async def connected(self) -> set[str]:
        """Peer ids with a connection to this node. Raises PeerUnreachable."""
        return set(await self.connections())

    async def connections(self) -> Mapping[str, list[str]]:
        """Peer id -> addresses at the other ends of its connections; these peers have proved their keys there. Raises
        PeerUnreachable."""
        daemon = self._running()[0]
        peers = await self._bounded(daemon.list_peers(), CALL_S)
        found = {str(peer.peer_id): [str(address) for address in peer.addrs] for peer in peers}
        for peer, addresses in found.items():
            self._dials.prove(peer, addresses, time.time())
        self.refusals.locate({peer: ip_of(addresses) for peer, addresses in found.items()})
        self._storage.connected = found.keys()
        self._serving = {peer: None for peer in self._serving if peer in found}
        return found

    def _locate_soon(self) -> None:
        if not self._closing and (self._locating is None or self._locating.done()):
            self._locating = asyncio.get_running_loop().create_task(self._locate())

    async def _locate(self) -> None:
        """Learn where refused peers are connected from while they still are: a hostile one may leave at once."""
        with suppress(PeerUnreachable):
            await self.connections()
        await asyncio.sleep(LOCATED_S)

    @property
    def too_new(self) -> str:
        """As `Transport.too_new`."""
        return self._validator.too_new

    @property
    def made(self) -> dict[str, float]:
        """As `P2PTransport.made`."""
        return dict(self._validator.made)

    @property
    def daemon_pid(self) -> int | None:
        """Process id of p2pd."""
        return None if self._daemon is None or self._daemon._child is None else int(self._daemon._child.pid)

    # ---------------------------------------------------------------- cards

    async def store_card(self, card: PeerCard, members: int = 0) -> int:
        """Seal this node's card and store it, while `members` others are known; by how many peers it was taken. Raises
        PeerUnreachable."""
        dht, peer = self._running()[1], self._identity.peer_id
        self._mind_the_clock(dht)
        value = msgspec.msgpack.encode(seal_card(card, self._identity))
        record = peer, value, card.created + self._settings.card_ttl_s
        key = self._validator.keys[bucket_of(peer)]
        return await self._bounded(dht.store_card(key, record, members, self._bootstrap, list(self._serving)), CALL_S)

    async def get_cards(self, buckets: Collection[int], members: int = 0) -> dict[str, PeerCard]:
        """Peer id -> card of everyone in these buckets, this node too, while `members` others are known. Raises
        PeerUnreachable."""
        dht = self._running()[1]
        self._mind_the_clock(dht)
        keys = [self._validator.keys[bucket] for bucket in buckets]
        search = dht.find_cards(keys, members, self._bootstrap, list(self._serving))
        found, now = await self._bounded(search, CALL_S), time.time()
        return dict(self._validator.card(value) for value, expiration in found.values() if expiration > now)

    def _mind_the_clock(self, dht: CardDHT) -> None:
        """Forget all cards stored here if the clock was set back: they would outlast, and keep out, newer ones."""
        before, self._clock_offset = self._clock_offset, time.time() - time.monotonic()
        if self._clock_offset < before - MAX_CLOCK_SKEW_S:
            dht.forget_cards()

    # ---------------------------------------------------------------- requests, exchanges, channels

    def serve(self, method: str, server: Server) -> None:
        """Answer requests for `method` from now on."""
        self._answers.servers[method] = server

    def accept(self, method: str, acceptor: Acceptor) -> None:
        """Take part in exchanges of `method` from now on."""
        self._exchanges.acceptors[method] = acceptor

    async def request(
        self, peer: str, method: str, payload: bytes, timeout: float, limit: int, addresses: Sequence[str] = ()
    ) -> bytes:
        """Ask `peer`, known to be at `addresses`. Raises PeerUnreachable or RemoteProtocolError."""
        if len(payload) > MAX_REQUEST_BYTES or not 0 < len(method.encode()) < 256:
            raise LocalProtocolError(f"a request {method!r} of {len(payload)} bytes cannot be sent")

        async def ask_it() -> bytes:
            async with self._stream(peer, self._protocol, addresses) as (reader, writer):
                return await ask(reader, writer, method, payload, limit, self.traffic)

        self._running()
        return await self._bounded(ask_it(), timeout)

    async def exchange(
        self,
        peer: str,
        method: str,
        ours: Outgoing,
        answered: Callable[[bytes, int], Sink],
        timeout: float,
        addresses: Sequence[str] = (),
    ) -> None:
        """Exchange bodies with `peer`, known to be at `addresses`. Raises PeerUnreachable, RemoteProtocolError, or
        LocalProtocolError for a fault in `ours` or `answered`."""

        async def exchange_with_it() -> None:
            async with self._stream(peer, self._exchange_protocol, addresses) as (reader, writer):
                await self._exchanges.call(reader, writer, method, ours, answered, peer)

        self._running()
        call = asyncio.create_task(exchange_with_it())
        try:
            await self._bounded(call, timeout)
        finally:
            await asyncio.wait({call}, timeout=GOODBYE_S)  # for callbacks that still run

    async def dial_back(self, peer: str, ports: Sequence[int], addresses: Sequence[str] = ()) -> list[bool]:
        """Of each of this machine's TCP ports, whether `peer`, known to be at `addresses`, could connect to it. Raises
        PeerUnreachable, RemoteProtocolError."""

        async def ask() -> list[bool]:
            async with self._stream(peer, self._dial_back_protocol, addresses) as (reader, writer):
                return await ask_back(ports, reader, writer)

        return await self._bounded(ask(), CALL_S)

    async def open_channel(self, channel: StreamChannel, method: str, addresses: Sequence[str] = ()) -> None:
        """Open `channel`, to a peer known to be at `addresses`, and live through it."""

        async def dial() -> Streams:
            self._running()
            return await self._bounded(self._open(channel.peer, self._channel_protocol, addresses), CALL_S)

        await self._channels.call(channel, method, dial)

    @asynccontextmanager
    async def _stream(self, peer: str, protocol: str, addresses: Sequence[str]) -> AsyncIterator[Streams]:
        """A stream to `peer`, which is dialled if need be."""
        reader, writer = await self._open(peer, protocol, addresses)
        try:
            yield reader, writer
        except RemoteProtocolError as error:
            if error.reason == "torn":
                await asyncio.sleep(0.1)  # if it was our own p2pd that died, that is known by then, and ends this call
            raise
        finally:
            writer.close()

    async def _open(self, peer: str, protocol: str, addresses: Sequence[str]) -> Streams:
        daemon = self._running()[0]
        try:
            to = PeerID.from_base58(peer)
        except ValueError as error:
            raise PeerUnreachable(f"{peer!r} is no peer: {error}") from error
        failure: Exception | None = None
        if addresses and peer not in await self.connected():
            try:
                await self.connect(peer, addresses)
            except PeerUnreachable as error:  # p2pd may know another address
                failure = error
        elif not addresses and peer not in await self.connected():
            with suppress(PeerUnreachable):
                await self._reach(peer)
        try:
            _, reader, writer = await daemon.call_binary_stream_handler(to, protocol)
            return self._paces.of(reader, writer)
        except P2PDaemonError as error:
            if NOT_SPOKEN in str(error):
                raise NotOfSwarm(f"{peer} is there, but not in swarm {self._swarm[:16]}") from error
            raise failure or error from error

    async def _on_request(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = neighbourhood_of_stream(str(info.addr))
        await self._answers.serve(str(info.peer_id), *self._paces.of(reader, writer), address)

    async def _on_exchange(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = neighbourhood_of_stream(str(info.addr))
        await self._exchanges.serve(str(info.peer_id), *self._paces.of(reader, writer), address)

    async def _on_channel(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = neighbourhood_of_stream(str(info.addr))
        await self._channels.serve(str(info.peer_id), *self._paces.of(reader, writer), address)

    async def _on_dial_back(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._dial_back.serve(str(info.addr), reader, writer)

    # ---------------------------------------------------------------- calls to p2pd

    def _running(self) -> tuple[P2P, CardDHT]:
        if self._daemon is None or self._dht is None or self._ended.done():
            raise PeerUnreachable("the network is not up")
        return self._daemon, self._dht

    async def _bounded(self, call: Awaitable[T], timeout: float) -> T:
        """The result of a call to p2pd. Raises PeerUnreachable if it takes too long, fails, or p2pd dies meanwhile:
        hivemind's calls would wait for ever."""
        task, ended = asyncio.ensure_future(call), self._ended
        either: set[asyncio.Future[Any]] = {task, ended}
        try:
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
        except _FAILURES as error:
            raise PeerUnreachable(str(error) or type(error).__name__) from error
        finally:
            task.cancel()
            task.add_done_callback(_forget)
        if ended.done():
            raise PeerUnreachable("p2pd ended meanwhile")
        raise PeerUnreachable("closed meanwhile" if self._closing else f"no answer within {timeout:g} s")


async def _hang_up(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def _daemon_class(plane: HivemindPlane) -> type[P2P]:
    """p2pd as hivemind starts it, but in a session of its own, with its sockets in a private folder, relaying only if
    wanted, bytes counted, and known to `plane` from its birth, so that none is left over if its start fails half-way.
    """
    traffic, paces, serves = plane.traffic, plane._paces, int(plane._settings.serve_relay)

    class Daemon(P2P):  # type: ignore[misc]
        _UNIX_SOCKET_PREFIX = f"/unix{plane._folder}/"
        DHT_MODE_MAPPING = {"server": {"relayService": serves}}  # without its own DHT: see `whereabouts`

        def __init__(self) -> None:
            super().__init__()
            plane._daemon, plane._panic = self, ""

        @classmethod
        async def create(cls, *arguments: Any, **options: Any) -> P2P:
            daemon = await super().create(*arguments, **options)
            keep_accounts(daemon._client.control)
            return daemon

        @staticmethod
        def _make_process_args(*arguments: Any, **options: Any) -> list[str]:
            return [sys.executable, "-ISc", IN_ITS_OWN_SESSION, *P2P._make_process_args(*arguments, **options)]

        @staticmethod
        def _log_p2pd_message(line: str) -> None:  # told every line: hivemind keeps the last, of a trace of many
            if line.startswith(("panic: ", "fatal error: ")):
                plane._panic = plane._panic or line
            P2P._log_p2pd_message(line)

        async def call_protobuf_handler(self, peer_id: PeerID, name: str, input: Any, output_type: Any) -> Any:
            traffic.bytes_out += input.ByteSize()
            paces.upload.take(input.ByteSize())
            try:
                output = await super().call_protobuf_handler(peer_id, name, input, output_type)
            except P2PDaemonError as error:
                if NO_WAY not in str(error):
                    raise
                await plane._reach(str(peer_id))
                output = await super().call_protobuf_handler(peer_id, name, input, output_type)
            traffic.bytes_in += output.ByteSize()
            paces.download.take(output.ByteSize())
            return output

        async def add_protobuf_handler(self, name: str, handler: Any, input_type: Any, **options: Any) -> None:
            async def counted(request: Any, context: P2PContext) -> Any:
                traffic.bytes_in += request.ByteSize()
                paces.download.take(request.ByteSize())
                response = await handler(request, context)
                if response.ByteSize() > MAX_ANSWER_BYTES:  # hivemind's own way of refusing it raises
                    raise LocalProtocolError(f"an answer of {response.ByteSize()} bytes is too large")
                traffic.bytes_out += response.ByteSize()
                paces.upload.take(response.ByteSize())
                return response

            await super().add_protobuf_handler(name, counted, input_type, **options)

    return Daemon


def _private_folder() -> tuple[str, int]:
    """A new folder for sockets, whose paths must be short, and its lock, which the kernel drops with this process. The
    folders of those that were killed are removed."""
    prefix = f"swarm-node-{os.getuid()}-"
    root = tempfile.gettempdir() if len(tempfile.gettempdir()) <= SHORT_CHARACTERS else "/tmp"
    for old in Path(root).glob(f"{prefix}*"):
        with suppress(OSError):  # it is another's, is in use, or another process was quicker
            lock = _open_folder(old)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > NEW_S:
                    shutil.rmtree(old)
            finally:
                os.close(lock)
    folder = tempfile.mkdtemp(prefix=prefix, dir=root)
    lock = _open_folder(folder)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _open_folder(path: str | Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _way(address: str) -> Multiaddr:
    """`address` without the peer id at its end, for p2pd. hivemind itself writes Ed25519 ids of relays as CIDs, which
    go-libp2p cannot read."""
    head = address.rpartition("/p2p/")[0]
    to_relay, circuit, _ = head.partition("/p2p-circuit")
    if not circuit:
        return Multiaddr(head)
    to_relay, _, relay = to_relay.rpartition("/p2p/")
    id = PeerID.from_base58(relay).to_bytes()
    return Multiaddr(Multiaddr(to_relay).to_bytes() + b"\xa5\x03" + bytes([len(id)]) + id + b"\xa2\x02")


async def _answering(addresses: Sequence[str]) -> list[str]:
    """Those where somebody listens, and those that lead through a relay. Raises PeerUnreachable if there is none.

    p2pd must not find out by itself: it refuses to dial an address that failed, each time longer, up to five minutes,
    and would miss a peer's return.
    """
    found = await asyncio.gather(*map(_answers, addresses))
    answering = [address for address, answers in zip(addresses, found, strict=True) if answers]
    if not answering:
        raise PeerUnreachable(f"nobody listens at {', '.join(addresses) or 'an unknown address'}")
    return answering


async def _answers(address: str) -> bool:
    target = endpoint(address)
    if target is None:
        return "/p2p-circuit" in address
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*target), KNOCK_S)
    except (OSError, TimeoutError, ValueError):  # the latter for names that cannot be any
        return False
    writer.close()
    return True


async def _end_of(daemon: P2P) -> int:
    return int(await daemon._child.wait())


def _forget(task: asyncio.Future[Any]) -> None:
    """Look at what an abandoned call ended with, or asyncio complains that nobody did."""
    if not task.cancelled():
        task.exception()
