"""A node's membership in its swarm: whom it dials, whose cards it looks up, and its own card.

every few seconds: dial known addresses -> look up cards -> keep places at relays -> tend gossip -> renew the own card
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from swarm_protocol.codec import common_version, in_version
from swarm_protocol.dials import Dials
from swarm_protocol.errors import PeerUnreachable, ProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_ADDRESSES, MEMBERSHIP_BUCKETS
from swarm_protocol.messages import PeerCard
from swarm_protocol.peers import WANTED, PeerTable, peer_of
from swarm_protocol.topics import bucket_of
from swarm_protocol.transports.dht.strangers import Strangers
from swarm_protocol.transports.p2p.gossip_side import GossipSide
from swarm_protocol.transports.p2p.relay import PLACE_S, Reach
from swarm_protocol.transports.ports import note_ports, read_ports
from swarm_protocol.transports.settings import NetworkSettings
from swarm_protocol.transports.streams.stream import Traffic
from swarm_protocol.twins import Twins

if TYPE_CHECKING:  # imports torch, which takes seconds: the network's own thread does it
    from swarm_protocol.transports.p2p.plane import HivemindPlane

LAST_CARD_S = 2.0  # longest time to tell the others that this node leaves
HASTE_S = 1.0  # longest pause after a round that dialled a gossip process
CARDS_PER_LOOKUP = 32
"""About as many cards are looked up at a time: up to some 200 members, traffic does not grow with the swarm."""
GREET_AGAIN_S = 30.0
"""A node that finds nobody although peers are connected makes itself known to them again, this often at most."""
CACHE_S = 60.0  # time between two writes of the cache file, which keeps the addresses of peers
NEWCOMER_S, NEWCOMER_LOOK_S = 30.0, 1.0
"""A node that came less than so long ago and knows few members looks for others so often: those that come with it know
nobody but the peer through which they came, which may be gone in a moment."""
FIRST_CARD_S = 5.0  # longest time for which the first card waits for a lookup: it would hide the card of a twin


def standing_of(card: PeerCard) -> tuple[object, ...]:
    """What a card says of its peer's place in the swarm."""
    return card.crew, card.cohort, tuple(card.roles)


class Membership:
    """One node's view of its swarm. Everything here runs in the network's loop."""

    def __init__(
        self,
        peer_id: str,
        settings: NetworkSettings,
        gossip: GossipSide,
        traffic: Traffic,
        cache_file: Path | None,
        ports_file: Path | None,
        report: Callable[[str], None],
        wake: asyncio.Event,
    ) -> None:
        """`wake` starts the next round at once."""
        self.peer_id = peer_id
        self._settings = settings
        self._gossip = gossip
        self._traffic = traffic
        self._cache_file, self._ports_file = cache_file, ports_file
        self._report = report
        self._wake = wake
        self.dials = Dials()
        self.table = PeerTable(peer_id, random.Random(), settings.card_ttl_s, self.dials)
        for address in self.table.learn(settings.bootstrap, time.time(), bootstrap=True):
            report(f"{address} does not end in /p2p/<peer id>: nobody can be dialled there")
        self._read_cache()
        self.members: dict[str, PeerCard] = {}
        self.left: dict[str, PeerCard] = {}
        self.card: PeerCard | None = None  # this node's card, without addresses
        self.twins = Twins(time.time())
        self.connected: set[str] = set()
        self.failed_steps = 0  # steps of a round that raised an error which was not expected
        self._told: tuple[object, ...] = ()  # the addresses, among others, that the card stored last names
        self._renew_at = 0.0  # like all deadlines here of the monotonic clock, which nobody sets back
        self._greeted: set[str] = set()  # connected peers whose DHT table has this node
        self._greet_again_at = 0.0
        self._newcomers: frozenset[str] = frozenset()  # peers that were connected after the last lookup of cards
        self._places: dict[str, float] = {}  # relay at which this node has a place -> when to ask for the place again
        self._reach = Reach(random.Random(), wake.set)
        self._strangers = Strangers()
        self._look_at = self._sweep_s = 0.0
        self._came_at, self._has_looked = time.monotonic(), False
        self._next_bucket = random.randrange(MEMBERSHIP_BUCKETS)
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._cached_at = time.monotonic()
        self._cached: set[str] = set()  # peers that are in the cache file

    async def round(self, plane: HivemindPlane) -> None:
        """Run all steps once. A step that p2pd or the gossip process cannot take now is left to the next round."""
        for step in (self._dial, self._look_up, self._take_places, self._tend_gossip, self._renew):
            try:
                await step(plane)
            except PeerUnreachable:
                pass
            except Exception as error:  # of hivemind, which does not say what it may raise: the next round tries again
                self.failed_steps += 1
                self._report(f"the network stumbled: {error!r}")
            self.members = self.table.members(time.time())
            self.left = self.table.left()
        self._write_cache(CACHE_S)

    async def pause(self) -> None:
        """Wait until the next round is due, or `wake` is set."""
        seconds = self._settings.lookup_s * random.uniform(0.8, 1.2)
        if self._is_newcomer():
            seconds = min(seconds, NEWCOMER_LOOK_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), min(seconds, HASTE_S) if self._gossip.has_dialled else seconds)
        await asyncio.sleep(0.1)  # what woke us may come in bunches
        self._wake.clear()

    def hear(self, peer: str, addresses: Sequence[str]) -> None:
        """See `Transport.hear`."""
        if self.table.hear(peer, addresses, time.time()):
            self._wake.set()

    def meet(self, cards: Mapping[str, PeerCard]) -> None:
        """See `Transport.meet`."""
        for peer, card in cards.items():
            self.table.see(peer, card, time.time())
        self._wake.set()

    def on_restart(self) -> None:
        """Forget what depended on the connections of the last p2pd: a new one runs."""
        self._greeted.clear()
        self._places.clear()
        self._reach.forget()
        self._wake.set()

    async def _dial(self, plane: HivemindPlane) -> None:
        """Start dialling the peers that the table names. The first answer starts the next round at once."""
        connected, now = set(await plane.connections.connected()), time.time()
        self._newcomers |= connected - self.connected
        self.connected = connected
        self.table.set_connected(connected, now)
        wanted = self.table.to_dial(now)
        wanted |= {peer: [] for peer in connected - self._greeted}  # p2pd dials relays by itself: the DHT must know
        self._greeted &= connected
        for peer, addresses in wanted.items():
            if peer not in self._dialling:
                self._dialling[peer] = asyncio.create_task(self._dial_one(plane, peer, addresses))

    async def _dial_one(self, plane: HivemindPlane, peer: str, addresses: Sequence[str]) -> None:
        try:
            await plane.connect(peer, addresses)
            self._greeted.add(peer)
            self._wake.set()
        except PeerUnreachable:
            pass  # the table counts tries
        finally:
            del self._dialling[peer]

    async def _look_up(self, plane: HivemindPlane) -> None:
        """Look up cards when that is due, and soon if an unknown peer is connected. A small swarm is looked up in all
        buckets at once; a large one in some of them, but in all of them twice in a card's life."""
        settings, now = self._settings, time.monotonic()
        known = {card.gossip_id for card in self.members.values()}
        unknown = (set(self._gossip.stat.peers) - known) | (self._newcomers - self.members.keys())
        strangers = self._strangers.are_worth_a_lookup(unknown, len(known), now)
        if now < self._look_at and not strangers:
            return
        every = min(settings.card_renewal_s, settings.lookup_s * (1 + len(known) / 4))  # all of them are asked
        if self._is_newcomer():
            every = min(every, NEWCOMER_LOOK_S)
        affordable = MEMBERSHIP_BUCKETS * CARDS_PER_LOOKUP // (len(known) + 1)
        needed = math.ceil(MEMBERSHIP_BUCKETS * 2 * every / settings.card_ttl_s)
        count = min(MEMBERSHIP_BUCKETS, max(affordable, needed, MEMBERSHIP_BUCKETS * strangers))
        buckets = [(self._next_bucket + i) % MEMBERSHIP_BUCKETS for i in range(count)]
        found = await self._find(plane, buckets)
        self._next_bucket += count
        self._look_at = now + every if found.keys() - {self.peer_id} else now
        if not found.keys() - {self.peer_id} and not self.members and now >= self._greet_again_at:
            self._greeted.clear()
            self._greet_again_at = now + GREET_AGAIN_S
        self._newcomers = frozenset()
        self._sweep_s = every * (math.ceil(MEMBERSHIP_BUCKETS / count) - 1)
        self._has_looked |= bool(found)
        for peer, card in found.items():
            self.table.see(peer, card, time.time())

    async def _find(self, plane: HivemindPlane, buckets: Sequence[int]) -> dict[str, PeerCard]:
        """The cards of these buckets; an own one may be a twin's."""
        found = await plane.get_cards(buckets, len(self.members))
        self.twins.is_mine(self._gossip.client.gossip_id)
        if (own := found.get(self.peer_id)) is not None:
            self.twins.see(own)
        return found

    def _is_newcomer(self) -> bool:
        return len(self.members) < WANTED and time.monotonic() < self._came_at + NEWCOMER_S

    async def _take_places(self, plane: HivemindPlane) -> None:
        """Keep a place at every bootstrap peer that relays and cannot connect to this node, unless the user announces
        addresses. A place that is not asked for again expires."""
        settings, now = self._settings, time.monotonic()
        if settings.serve_relay or settings.announce or not settings.relay:
            return
        self._places = {relay: again for relay, again in self._places.items() if relay in self.connected}
        for relay in self.connected & {peer_of(address) for address in settings.bootstrap}:
            card = self.members.get(relay)
            if card is None or "relay" not in card.roles:
                continue
            direct = not settings.dial_only and self._reach.is_direct(plane, relay, now)
            if direct:
                self._places.pop(relay, None)
            elif direct is not None and self._places.get(relay, 0.0) <= now:
                self._places.pop(relay, None)
                with suppress(PeerUnreachable):  # it has no place left
                    await plane.streams.take_place(relay)
                    self._places[relay] = now + PLACE_S

    async def _renew(self, plane: HivemindPlane) -> None:
        """Store the own card when it is due, and at once when its addresses, the version for the members or the node's
        place in the swarm changed, or it ended its first round."""
        waits = self._settings.bootstrap and not self._has_looked and time.monotonic() < self._came_at + FIRST_CARD_S
        if self.card is None or waits:
            return
        await plane.look_around()
        gossip, addresses = self._gossip.client, self.own_addresses(plane)
        heard_at = self._gossip.addresses(addresses)
        card = self._dated(self.card)
        has_trained = card.speed > 0  # from the end of its first round
        ways = (plane.daemon.restarts, gossip.gossip_id, card.protocol, has_trained, *standing_of(card))
        ways += (*addresses, *heard_at)
        if ways == self._told and time.monotonic() < self._renew_at:
            return
        card = replace(card, addresses=addresses, gossip=heard_at, gossip_id=gossip.gossip_id)
        self.twins.is_mine(card.gossip_id)
        if ways != self._told:
            self._note_ports(plane)
        await self._find(plane, [bucket_of(self.peer_id)])  # a twin's card, which this one replaces
        taken = await plane.store_card(card, len(self.members))
        self._told, self._renew_at = ways, time.monotonic() + (self._settings.card_renewal_s if taken else 0.0)

    def own_addresses(self, plane: HivemindPlane) -> list[str]:
        """Addresses at which this node listens, best first, then addresses through the relays at which it has a place:
        some of each, `MAX_ADDRESSES` in all."""
        ways = [address for address in self._settings.bootstrap if peer_of(address) in self._places]
        relayed = [f"{address}/p2p-circuit/p2p/{self.peer_id}" for address in ways]
        return [*plane.addresses[: max(MAX_ADDRESSES // 2, MAX_ADDRESSES - len(relayed))], *relayed][:MAX_ADDRESSES]

    def _dated(self, card: PeerCard) -> PeerCard:
        """`card` dated now, in a version that all members understand."""
        version = common_version(self.members.values(), newer_heard=self._traffic.rejected["newer"] > 0)
        return replace(in_version(card, version), created=time.time())

    async def _tend_gossip(self, plane: HivemindPlane) -> None:
        await self._gossip.tend(self.table, self.dials, self._sweep_s)

    async def goodbye(self, plane: HivemindPlane) -> None:
        """Store a card without addresses, which tells the others that this node leaves, and end all dials."""
        for task in self._dialling.values():
            task.cancel()
        self._reach.forget()
        self._note_ports(plane)  # it may leave before its first card
        with suppress(ProtocolError, TimeoutError):
            if self._told and self.card is not None:
                await asyncio.wait_for(plane.store_card(self._dated(self.card)), LAST_CARD_S)
        self._write_cache(0.0)

    def _note_ports(self, plane: HivemindPlane) -> None:
        """Write down the ports that this node listens on, for its next run."""
        gossip, file, got = self._gossip.client, self._ports_file, plane.daemon.port_number
        if file is None or not plane.addresses:
            return
        before = read_ports(file).get(self._settings.gossip_port or -1, 0)
        try:
            note_ports(self._settings, got, gossip.settings.port if gossip.addresses else before, file)
        except OSError as error:
            self._report(f"cannot write {self._ports_file}: {error.strerror}")

    def _read_cache(self) -> None:
        if self._cache_file is not None and self._cache_file.exists():
            try:
                self.table.read_cache(self._cache_file.read_bytes(), time.time())
            except RemoteProtocolError as error:
                self._report(f"{self._cache_file} is damaged and not used: {error}")

    def _write_cache(self, every_s: float) -> None:
        """Write the addresses of peers for the next run, if `every_s` have passed or a peer is new: this node may be
        killed at any moment."""
        peers = set(self.table.worth_finding())
        if self._cache_file is None or (time.monotonic() - self._cached_at < every_s and peers <= self._cached):
            return
        self._cached_at, self._cached = time.monotonic(), peers
        new = self._cache_file.with_suffix(".new")
        try:
            new.write_bytes(self.table.write_cache())
            new.replace(self._cache_file)
        except OSError as error:
            self._report(f"{self._cache_file} cannot be written: {error.strerror}")
