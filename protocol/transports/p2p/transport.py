"""The real transport: the DHT and streams of `hivemind_plane`, the gossip of `gossip_client`, in one loop and thread.

    every few seconds: dial known addresses -> look up cards -> tend gossip connections -> renew the own card

Nothing waits for the network but `request`: it comes up, goes away and comes back in the background.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from protocol.codec import SPOKEN, common_version, in_version
from protocol.dials import Dials
from protocol.errors import PeerUnreachable, ProtocolError, RemoteProtocolError
from protocol.identity import Identity
from protocol.limits import MAX_ADDRESSES, MEMBERSHIP_BUCKETS
from protocol.manifest import ManifestLimits
from protocol.messages import PeerCard
from protocol.peers import PeerTable, peer_of
from protocol.topics import rollout_topic
from protocol.transports.base import Acceptor, Channel, Handler, Listener, Outgoing, Server, Sink
from protocol.transports.dht.strangers import Strangers
from protocol.transports.gossip.client import GossipClient, Stat
from protocol.transports.gossip.pipe import gossip_settings
from protocol.transports.p2p.reach import Reach
from protocol.transports.p2p.relay import PLACE_S
from protocol.transports.ports import choose_ports, note_ports
from protocol.transports.refusals import Refused
from protocol.transports.reports import Reports
from protocol.transports.settings import NetworkSettings, best_first, endpoint
from protocol.transports.streams.channels import Channels, StreamChannel, check_method
from protocol.transports.streams.exchanges import check_call
from protocol.transports.streams.requests import Traffic

if TYPE_CHECKING:  # imports torch, which takes seconds: the network's own thread does it
    from protocol.transports.p2p.plane import HivemindPlane

T = TypeVar("T")
CLOSE_S = 8.0
"""Longest that `close` takes."""
GOODBYE_S = 2.0
LEFT_S = 1.0
"""For tasks that are left when all is over."""
HASTE_S = 1.0
"""The next round after one that dialled."""
CARDS_PER_LOOKUP = 32
"""About so many cards are looked up at a time: up to some 200 members, traffic does not grow with the swarm."""
GREET_AGAIN_S = 30.0
"""A node that finds nobody although peers are connected makes itself known to them again, this often at most."""
CACHE_S = 60.0
"""How often the addresses of peers seen are written to the cache file."""


class P2PTransport:
    """`protocol.transports.base.Transport` over real processes: p2pd and the gossip sidecar.

    Handlers and servers run on the network's thread; `request` waits for that thread, so they must not call it.
    """

    def __init__(
        self,
        identity_path: Path,
        swarm: str,
        settings: NetworkSettings,
        shards: int = 1,
        limits: ManifestLimits | None = None,
        cache_file: Path | None = None,
        ports_file: Path | None = None,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Returns at once; the network comes up in the background. `limits` are the swarm's; `cache_file` keeps the
        addresses of peers seen from run to run, `ports_file` the ports that were got; `report` is told, on another
        thread, what people should know, ever more rarely if it repeats itself.

        Raises LocalProtocolError for an identity file, a listen address or settings that cannot be used.
        """
        self._identity = Identity.load_or_create(identity_path)
        self._identity_path = identity_path
        self._swarm = swarm
        self._ports_file = ports_file
        self._settings = settings
        self._cache_file = cache_file
        self._report = Reports(report)
        self._wake = asyncio.Event()
        told = gossip_settings(swarm, shards, limits or ManifestLimits(), settings)
        self._gossip_settings = replace(told, spoken=tuple(sorted(SPOKEN)))
        self._dht_port, self._gossip_port = choose_ports(settings, ports_file, self._report)
        self._gossip = self._new_gossip()
        self._plane: HivemindPlane | None = None
        self._shard_of_topic = {rollout_topic(swarm, shard): shard for shard in range(shards)}
        self._dialled = Dials()
        self._table = PeerTable(self.peer_id, random.Random(), settings.card_ttl_s, self._dialled)
        for address in self._table.learn(settings.bootstrap, time.time(), bootstrap=True):
            report(f"{address} does not end in /p2p/<peer id>: nobody can be dialled there")
        self._read_cache()
        self._handlers: dict[str, list[Handler]] = {}
        self._servers: dict[str, Server] = {}
        self._acceptors: dict[str, Acceptor] = {}
        self._traffic = Traffic()
        self._channels = Channels(self._traffic, self._report)
        self._calls: set[Future[None]] = set()
        """Exchanges and channels that this node began."""
        self._card: PeerCard | None = None
        self._told: tuple[object, ...] = ()
        self._renew_at = 0.0  # like all deadlines here of the monotonic clock, which nobody sets back
        self._members: dict[str, PeerCard] = {}
        self._connected: set[str] = set()
        self._greeted: set[str] = set()
        """Connected peers whose DHT knows ours."""
        self._greet_again_at = 0.0
        self._newcomers: frozenset[str] = frozenset()
        """Connected on the DHT since cards were last looked up."""
        self._places: dict[str, float] = {}
        """Relays that pass on to this node -> when to ask them again."""
        self._reach = Reach(random.Random(), self._wake.set)
        self._strangers = Strangers()
        self._look_at = self._turn_s = 0.0
        self._hasty = False
        self._handler_faults = 0
        self._refused = 0
        self._loose_ends = 0
        self._stat = Stat([], {}, 0, 0, 0, 0, 0, {})
        self._cached_at = time.monotonic()
        self._cached: set[str] = set()
        """Peers that are in the cache file."""
        self._next_bucket = random.randrange(MEMBERSHIP_BUCKETS)
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._closed = threading.Event()
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the port; any thread

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def addresses(self) -> list[str]:
        return [] if self._plane is None else self._own_addresses(self._plane)

    def subscribe(self, topic: str, handler: Handler) -> None:
        self._soon(self._subscribe, topic, handler)

    def publish(self, topic: str, data: bytes) -> bool:
        taken = self._gossip.publish(topic, data)
        self._refused += not taken
        return taken

    def serve(self, method: str, server: Server) -> None:
        self._soon(self._serve, method, server)

    def request(self, peer: str, method: str, payload: bytes = b"", timeout: float = 10.0, limit: int = 2**20) -> bytes:
        return self._wait(self._request(peer, method, payload, timeout, limit), timeout)

    def _wait(self, asking: Coroutine[Any, Any, T], timeout: float) -> T:
        if self._closed.is_set():
            asking.close()
            raise PeerUnreachable("the network is closed")
        call = asyncio.run_coroutine_threadsafe(asking, self._loop)
        try:
            return call.result(timeout + 1.0)
        except (TimeoutError, CancelledError) as error:
            call.cancel()
            raise PeerUnreachable(f"no answer within {timeout:g} s") from error

    def accept(self, method: str, acceptor: Acceptor) -> None:
        self._soon(self._accept, method, acceptor)

    def exchange(
        self,
        peer: str,
        method: str,
        ours: Outgoing,
        answered: Callable[[bytes, int], Sink],
        timeout: float,
    ) -> Future[None]:
        """Callbacks added to the future run on the network's thread, which must not wait for it."""
        check_call(method, ours)
        with self._close_lock:  # the loop, if it is not closed yet, looks at all that are begun before it is
            if self._closed.is_set():
                closed: Future[None] = Future()
                closed.set_exception(PeerUnreachable("the network is closed"))
                return closed
            future = asyncio.run_coroutine_threadsafe(self._exchange(peer, method, ours, answered, timeout), self._loop)
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def listen(self, method: str, opened: Callable[[Channel], Listener]) -> None:
        self._channels.openings[method] = opened

    def connect(self, peer: str, method: str, opened: Callable[[Channel], Listener]) -> Channel:
        """If the network is closed, the listener is told so before this returns."""
        check_method(method)
        channel = self._channels.new(peer, self._loop)
        channel.listener = opened(channel)
        with self._close_lock:  # as for exchanges
            future = None
            if not self._closed.is_set():
                future = asyncio.run_coroutine_threadsafe(self._connect(channel, method), self._loop)
                self._calls.add(future)
        if future is None:
            channel.end("the network is closed")
        else:
            future.add_done_callback(self._calls.discard)
            future.add_done_callback(lambda _: channel.end("the network is closed"))  # if it was not told otherwise
        return channel

    def dial_back(self, peer: str, ports: Sequence[int], timeout: float = 10.0) -> list[bool]:
        """Of each of this machine's TCP ports, whether `peer` could connect to it. Waits, like `request`, and raises
        what that does."""
        return self._wait(self._dial_back(peer, ports), timeout)

    def made(self) -> Mapping[str, float]:
        """Peer id -> when its newest card was made (Unix seconds, by its own clock), of some of all whose cards were
        seen, also of those that are no members by this machine's clock."""
        plane = self._plane
        return {} if plane is None else plane.made

    def announce(self, card: PeerCard) -> None:
        before, self._card = self._card, card
        if before is None or before.crew != card.crew:  # newcomers are to find whoever leads now
            self._soon(self._wake.set)

    def members(self) -> Mapping[str, PeerCard]:
        return self._members

    def too_new(self) -> str:
        plane = self._plane
        return "" if plane is None else plane.too_new

    def stats(self) -> Mapping[str, float]:
        stat, plane = self._stat, self._plane
        totals: Counter[str] = Counter(
            {
                "peers": len(self._members),
                "bytes_in": stat.bytes_in + self._traffic.bytes_in,
                "bytes_out": stat.bytes_out + self._traffic.bytes_out,
                "messages_in": stat.messages_in,
                "messages_out": stat.messages_out,
                "dropped": stat.dropped + self._refused,
                "restarts/gossip": self._gossip.restarts,
                "restarts/dht": 0 if plane is None else plane.restarts,
                "connections/gossip": len(stat.peers),
                "connections/dht": len(self._connected),
                "loose_ends": self._loose_ends,
            }
        )
        rejected = [
            stat.rejected,
            {"handler": self._handler_faults},
            dict(self._traffic.rejected),  # the other thread goes on counting
            dict(self._dialled.refused),
        ]
        for reasons in rejected:
            for reason, count in reasons.items():
                totals[f"rejected/{reason}"] += count
        return {name: float(total) for name, total in totals.items()}

    def refusals(self) -> Mapping[str, Refused]:
        plane = self._plane
        return ({} if plane is None else plane.refusals.by_source()) | self._stat.sources

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._soon(self._cancel)
        self._thread.join(CLOSE_S)

    def _soon(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: too late
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._on_loose_end)
        self._main = self._loop.create_task(self._live())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # this thread may end, the node must not
            self._report(f"the network ended: {error!r}")
        finally:
            with self._close_lock:
                self._closed.set()
            self._end_tasks()
            self._loop.close()
            for port in (self._dht_port, self._gossip_port):
                if port is not None:
                    port.release()
            for future in [future for future in list(self._calls) if not future.done()]:
                future.set_exception(PeerUnreachable("the network is closed"))

    def _end_tasks(self) -> None:
        """What hivemind has left behind: closed with the loop it runs in, not by the garbage collector after it."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=LEFT_S))

    def _cancel(self) -> None:
        assert self._main is not None
        self._main.cancel()

    async def _live(self) -> None:
        """From the first import to the last goodbye."""
        gossip = asyncio.create_task(self._start_gossip())
        try:
            module = await asyncio.to_thread(importlib.import_module, "protocol.transports.p2p.plane")
            self._plane = plane = module.HivemindPlane(
                self._identity,
                self._identity_path,
                self._swarm,
                self._settings,
                report=self._report,
                on_restart=self._on_restart,
                channels=self._channels,
                port=self._dht_port,
                dials=self._dialled,
                known=self._table.addresses_of,
                told=self._table.told_by,
            )
            try:
                for method, server in self._servers.items():
                    plane.serve(method, server)
                for method, acceptor in self._acceptors.items():
                    plane.accept(method, acceptor)
                await plane.start()
                while True:
                    await self._round(plane)
                    self._write_cache(CACHE_S)
                    await self._pause()
            finally:
                await self._goodbye(plane)
        except ProtocolError as error:
            self._report(f"no network: {error}")
        finally:
            gossip.cancel()
            await self._gossip.close()

    def _new_gossip(self) -> GossipClient:
        gossip = GossipClient(self._gossip_settings, self._on_message, self._report, self._gossip_port)
        gossip.on_restart = self._on_gossip
        return gossip

    def _on_gossip(self) -> None:
        """There is a gossip process, perhaps a new one: the card can say where to find it."""
        self._wake.set()

    async def _start_gossip(self) -> None:
        """Returns once there is gossip; from then on the client keeps it running by itself."""
        while True:
            try:
                await self._gossip.start()
            except PeerUnreachable as error:
                self._report(f"no gossip yet: {error}")
                self._gossip = self._new_gossip()
                for topic in self._handlers:
                    self._gossip.subscribe(topic)
            else:
                self._on_gossip()
                return

    async def _goodbye(self, plane: HivemindPlane) -> None:
        """Tell the others, by a card without a way to reach this node, rather than let the last one run out."""
        for task in self._dials.values():
            task.cancel()
        self._reach.forget()
        with suppress(ProtocolError, TimeoutError):
            if self._told and self._card is not None:
                await asyncio.wait_for(plane.store_card(self._dated(self._card)), GOODBYE_S)
        self._write_cache(0.0)
        await plane.close()

    def _on_loose_end(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """hivemind leaves tasks behind whose p2pd died or whose peer talked nonsense: nobody waits for them."""
        self._loose_ends += 1

    # ---------------------------------------------------------------- on it: the port's other half

    def _subscribe(self, topic: str, handler: Handler) -> None:
        if topic not in self._handlers:
            self._gossip.subscribe(topic)
        self._handlers.setdefault(topic, []).append(handler)

    def _on_message(self, topic: str, data: bytes) -> None:
        for handler in self._handlers.get(topic, ()):
            try:
                handler(data)
            except Exception as error:  # the port's promise
                self._handler_faults += 1
                self._report(f"a message was dropped: {error!r}")

    def _serve(self, method: str, server: Server) -> None:
        self._servers[method] = server
        if self._plane is not None:
            self._plane.serve(method, server)

    async def _request(self, peer: str, method: str, payload: bytes, timeout: float, limit: int) -> bytes:
        if self._plane is None:
            raise PeerUnreachable("the network is not up yet")
        return await self._plane.request(peer, method, payload, timeout, limit, self._table.addresses_of(peer))

    async def _dial_back(self, peer: str, ports: Sequence[int]) -> list[bool]:
        if self._plane is None:
            raise PeerUnreachable("the network is not up yet")
        return await self._plane.dial_back(peer, ports, self._table.addresses_of(peer))

    def _accept(self, method: str, acceptor: Acceptor) -> None:
        self._acceptors[method] = acceptor
        if self._plane is not None:
            self._plane.accept(method, acceptor)

    async def _exchange(
        self, peer: str, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink], timeout: float
    ) -> None:
        if self._plane is None:
            raise PeerUnreachable("the network is not up yet")
        try:
            await self._plane.exchange(peer, method, ours, answered, timeout, self._table.addresses_of(peer))
        except ProtocolError:
            raise
        except Exception as error:  # of hivemind, which does not say what it may raise
            self._report(f"the network stumbled: {error!r}")
            raise PeerUnreachable(repr(error)) from error

    async def _connect(self, channel: StreamChannel, method: str) -> None:
        if self._plane is None:
            channel.end("the network is not up yet")
            return
        try:
            await self._plane.open_channel(channel, method, self._table.addresses_of(channel.peer))
        except Exception as error:  # of hivemind, which does not say what it may raise
            self._report(f"the network stumbled: {error!r}")
            channel.end(repr(error))

    # ---------------------------------------------------------------- on it: who is there

    async def _round(self, plane: HivemindPlane) -> None:
        """One look at the swarm. A step that p2pd or the sidecar cannot take just now is left to the next round."""
        for step in (self._dial, self._look_up, self._take_places, self._tend_gossip, self._renew):
            try:
                await step(plane)
            except PeerUnreachable:
                pass
            except Exception as error:  # of hivemind, which does not say what it may raise: the next round tries again
                self._loose_ends += 1
                self._report(f"the network stumbled: {error!r}")
            self._members = self._table.members(time.time())

    async def _pause(self) -> None:
        """Until the next round is due, or something happened since this one began."""
        seconds = self._settings.lookup_s * random.uniform(0.8, 1.2)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), min(seconds, HASTE_S) if self._hasty else seconds)
        await asyncio.sleep(0.1)  # what woke us may come in bunches
        self._wake.clear()

    def _on_restart(self) -> None:
        """p2pd is a new one: all its connections are."""
        self._greeted.clear()
        self._places.clear()
        self._reach.forget()
        self._wake.set()

    async def _dial(self, plane: HivemindPlane) -> None:
        """Start dialling whom the table names; one that answers causes the next round at once."""
        connected, now = await plane.connected(), time.time()
        self._newcomers |= connected - self._connected
        self._connected = connected
        self._table.set_connected(connected, now)
        wanted = self._table.to_dial(now)
        wanted |= {peer: [] for peer in connected - self._greeted}  # p2pd dials relays by itself: the DHT must know
        self._greeted &= connected
        for peer, addresses in wanted.items():
            if peer not in self._dials:
                self._dials[peer] = asyncio.create_task(self._dial_one(plane, peer, addresses))

    async def _dial_one(self, plane: HivemindPlane, peer: str, addresses: Sequence[str]) -> None:
        try:
            await plane.connect(peer, addresses)
            self._greeted.add(peer)
            self._wake.set()
        except PeerUnreachable:
            pass  # the table counts tries
        finally:
            del self._dials[peer]

    async def _look_up(self, plane: HivemindPlane) -> None:
        """Read cards: now and then, and soon if somebody is there who is not known. All buckets in a small swarm; in a
        large one some, but all of them twice in a card's life."""
        settings, now = self._settings, time.monotonic()
        known = {card.gossip_id for card in self._members.values()}
        unknown = (set(self._stat.peers) - known) | (self._newcomers - self._members.keys())
        strangers = self._strangers.are_worth_a_lookup(unknown, len(known), now)
        if now < self._look_at and not strangers:
            return
        every = min(settings.card_renewal_s, settings.lookup_s * (1 + len(known) / 4))  # all of them are asked
        affordable = MEMBERSHIP_BUCKETS * CARDS_PER_LOOKUP // (len(known) + 1)
        needed = math.ceil(MEMBERSHIP_BUCKETS * 2 * every / settings.card_ttl_s)
        count = min(MEMBERSHIP_BUCKETS, max(affordable, needed, MEMBERSHIP_BUCKETS * strangers))
        buckets = [(self._next_bucket + i) % MEMBERSHIP_BUCKETS for i in range(count)]
        found = await plane.get_cards(buckets, len(self._members))
        self._next_bucket += count
        self._look_at = now + every if found.keys() - {self.peer_id} else now
        if not found.keys() - {self.peer_id} and not self._members and now >= self._greet_again_at:
            self._greeted.clear()
            self._greet_again_at = now + GREET_AGAIN_S
        self._newcomers = frozenset()
        self._turn_s = every * (math.ceil(MEMBERSHIP_BUCKETS / count) - 1)
        for peer, card in found.items():
            self._table.see(peer, card, time.time())

    async def _take_places(self, plane: HivemindPlane) -> None:
        """Keep a place at every bootstrap peer that relays and does not reach this node directly, unless the user has
        told where it can be reached. A place that is not asked for again runs out."""
        settings, now = self._settings, time.monotonic()
        if settings.serve_relay or settings.announce or not settings.relay:
            return
        self._places = {relay: again for relay, again in self._places.items() if relay in self._connected}
        for relay in self._connected & {peer_of(address) for address in settings.bootstrap}:
            card = self._members.get(relay)
            if card is None or "relay" not in card.roles:
                continue
            direct = not settings.dial_only and self._reach.is_direct(plane, relay, now)
            if direct:
                self._places.pop(relay, None)
            elif direct is not None and self._places.get(relay, 0.0) <= now:
                self._places.pop(relay, None)
                with suppress(PeerUnreachable):  # it has no place left
                    await plane.take_place(relay)
                    self._places[relay] = now + PLACE_S

    async def _tend_gossip(self, plane: HivemindPlane) -> None:
        """Dial and drop gossip connections as the table says."""
        if not self._gossip.gossip_id or self._gossip.pid is None:
            return  # its restart will wake us
        self._stat = await self._gossip.stat()
        now, connected = time.time(), self._stat.peers
        for gossip_id, address in self._stat.ways.items():
            self._dialled.prove(gossip_id, [address], now)
        self._hasty = False
        shards = sorted({self._shard_of_topic[topic] for topic in self._handlers if topic in self._shard_of_topic})
        for addresses in self._table.gossip_to_dial(shards, self._settings.max_connections, connected, now).values():
            for address in addresses:
                self._gossip.dial(address)
                self._hasty = True  # to see what became of it
        ghosts = self._table.ghosts(connected, now, self._turn_s)
        if ghosts:
            self._gossip.drop(ghosts)

    def _note_ports(self, plane: HivemindPlane) -> None:
        gossip = [endpoint(address) for address in self._gossip.addresses[:1]]
        if self._ports_file is None or not gossip or gossip[0] is None:
            return
        try:
            note_ports(self._settings, plane.port, gossip[0][1], self._ports_file)
        except OSError as error:
            self._report(f"cannot write {self._ports_file}: {error.strerror}")

    def _read_cache(self) -> None:
        if self._cache_file is not None and self._cache_file.exists():
            try:
                self._table.read_cache(self._cache_file.read_bytes(), time.time())
            except RemoteProtocolError as error:
                self._report(f"{self._cache_file} is damaged and not used: {error}")

    def _write_cache(self, every_s: float) -> None:
        """Keep the addresses seen for the next run, if they were kept longer ago than `every_s`, or a peer is new: this
        node may be killed at any moment."""
        peers = set(self._table.worth_finding())
        if self._cache_file is None or (time.monotonic() - self._cached_at < every_s and peers <= self._cached):
            return
        self._cached_at, self._cached = time.monotonic(), peers
        new = self._cache_file.with_suffix(".new")
        try:
            new.write_bytes(self._table.write_cache())
            new.replace(self._cache_file)
        except OSError as error:
            self._report(f"{self._cache_file} cannot be written: {error.strerror}")

    async def _renew(self, plane: HivemindPlane) -> None:
        """Store the own card anew when it is time, and at once when it would lead others to where nobody is, or is
        written in a version that they do not read."""
        if self._card is None:
            return
        await plane.look_around()
        gossip, addresses = self._gossip, self._own_addresses(plane)
        heard_at = self._gossip_addresses(addresses)
        card = self._dated(self._card)
        ways = (plane.restarts, gossip.gossip_id, card.protocol, *addresses, *heard_at)
        if ways == self._told and time.monotonic() < self._renew_at:
            return
        card = replace(card, addresses=addresses[:MAX_ADDRESSES])
        if gossip.gossip_id:
            card = replace(card, gossip=heard_at, gossip_id=gossip.gossip_id)
        taken = await plane.store_card(card, len(self._members))
        if ways != self._told:
            self._note_ports(plane)
        self._told, self._renew_at = ways, time.monotonic() + (self._settings.card_renewal_s if taken else 0.0)

    def _gossip_addresses(self, addresses: Sequence[str]) -> list[str]:
        """Where the gossip process listens: it knows its port, and p2pd, at `addresses`, more of this machine."""
        own = self._gossip.addresses
        if not own:
            return []
        tail = own[0].partition("/tcp/")[2]  # <port>/p2p/<gossip id>
        hosts = [address.partition("/tcp/")[0] for address in addresses if "/p2p-circuit" not in address]
        return best_first(list(dict.fromkeys([*own, *(f"{host}/tcp/{tail}" for host in hosts)])))[:MAX_ADDRESSES]

    def _own_addresses(self, plane: HivemindPlane) -> list[str]:
        """Where this node listens, best first, then ways through relays: some of each, `MAX_ADDRESSES` in all."""
        relayed = self._relayed()
        return [*plane.addresses[: max(MAX_ADDRESSES // 2, MAX_ADDRESSES - len(relayed))], *relayed][:MAX_ADDRESSES]

    def _relayed(self) -> list[str]:
        """Addresses through the relays that pass on to this node."""
        ways = [address for address in self._settings.bootstrap if peer_of(address) in self._places]
        return [f"{address}/p2p-circuit/p2p/{self.peer_id}" for address in ways]

    def _dated(self, card: PeerCard) -> PeerCard:
        """`card` as of now, for all members to understand, without ways to reach this node."""
        return replace(
            in_version(
                card,
                common_version(self._members.values(), newer_heard=self._traffic.rejected["newer"] > 0),
            ),
            swarm=self._swarm,
            created=time.time(),
            addresses=[],
            gossip=[],
            gossip_id="",
        )
