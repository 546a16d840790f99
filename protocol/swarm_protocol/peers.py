"""The peers that a node knows: which it dials next, which connections it keeps. Pure: `now` (Unix s) and `rng` come in.

Every few seconds, after a lookup, a node tells its table of the cards found (`see`) and of the peers connected, and
asks it whom to dial (`to_dial`, `gossip_to_dial`) and which gossip connections to hang up on (`ghosts`).

Handing out an address counts as a try, and a connection resets the count. The wait between tries doubles, up to
`BOOTSTRAP_WAIT_S` or `OTHER_WAIT_S`, and is drawn from its upper half. Bootstrap peers are dialled for ever. Others are
dialled while their card is missing, because they may be in another part of the swarm, or while too few peers are
connected; then none of them waits longer than `FEW_WAIT_S`, since the few that are connected may go.
`swarm_protocol.dials` decides when an address is dialled at which nobody proved a key: `to_dial` only checks, and its
caller takes the try; `gossip_to_dial` takes the try itself. All memory is bounded, whatever strangers send.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm_protocol.codec import decode_as
from swarm_protocol.dials import INHABITED_WAIT_S, Dials
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import CARD_RENEWAL_S, CARD_TTL_S, MAX_ADDRESS_CHARS, MAX_ADDRESSES, MAX_CLOCK_SKEW_S
from swarm_protocol.messages import Address, PeerCard, Time

FIRST_DIAL_WAIT_S = 1.0
BOOTSTRAP_WAIT_S = 15.0
"""Longest wait between tries of a bootstrap peer: with the time of a lookup and a dial, one that returns is found
within 30 s."""
OTHER_WAIT_S = 300.0  # longest wait between tries of any other peer
FEW_WAIT_S = 30.0
"""The same while too few peers are connected: a peer that was heard of is found in a minute, whoever else is gone."""
WANTED = 8  # connections below which members are dialled although somebody already leads to them
MAX_DHT_DIALS = 4
"""Peers handed out at a time, bootstrap peers not counted. Half of these places are for peers that were connected once,
in turn: anybody can have any number of fresh peers heard of, or take each dial and hang up. Fresh ones get the rest."""
MAX_KNOWN_PEERS = 256
"""Peers whose addresses are kept from round to round: all bootstrap peers, then peers that were connected once, up to
half, then peers with a card; in each group, the latest heard of. A flood of cards does not push out peers that
worked."""
MAX_CARDS = 4096  # live cards: 8 MB at their largest
NEWCOMER_CARDS = 1024
"""Cards among these that are kept for newcomers once the rest is full. A newcomer then displaces another newcomer at
random: a flood neither pushes out members nor hides honest newcomers for ever."""
HUBS = 3  # hubs that a node keeps gossip connections to: one may be busy and one may go away
UNREACHABLE_TRIES = 2  # after more tries than this without success, a gossip address counts as unreachable
GOSSIP_DIAL_S = 15.0
"""A gossip address that may not be dialled again soon counts as unreachable so long after it was: a dial takes 10 s."""
GHOST_S = 8.0  # a gossip connection that no card claims for this long is of a process that is gone, or of nobody known
MAX_CACHE_BYTES = 1024 * 1024  # a cache file: `MAX_KNOWN_PEERS` peers with all their addresses take half of it


class CachedPeer(msgspec.Struct, frozen=True):
    addresses: Annotated[list[Address], Meta(min_length=1, max_length=2 * MAX_ADDRESSES)]
    seen: Time  # Unix time of the last sign of the peer


_cache_decoder = msgspec.json.Decoder(Annotated[list[CachedPeer], Meta(max_length=MAX_KNOWN_PEERS)])


@dataclass
class _Tries:
    """Tries to dial something since it last worked."""

    count: int = 0
    last_at: float = 0.0  # of the last try, or when it was last seen to work
    wait: float = 0.0

    def due(self, now: float, longest: float = math.inf) -> bool:
        """Whether the wait is over; it counts as `longest` seconds at most."""
        return not self.last_at <= now < self.last_at + min(self.wait, longest)  # earlier: the clock was set back

    def note(self, now: float, longest: float, rng: random.Random) -> None:
        self.last_at = now
        self.wait = min(longest, FIRST_DIAL_WAIT_S * 2.0 ** min(self.count, 16)) * rng.uniform(0.5, 1.0)
        self.count += 1


@dataclass
class _Known:
    """A peer with addresses."""

    given: list[str] = field(default_factory=list)  # addresses from the manifest, flags or environment: kept for ever
    told: list[str] = field(default_factory=list)
    """Addresses from the latest card, or from the cache until there is a card."""
    seen: float = 0.0
    worked: bool = False  # was connected once
    tries: _Tries = field(default_factory=_Tries)


class PeerTable:
    """Everything one node knows of other peers."""

    def __init__(self, me: str, rng: random.Random, ttl_s: float = CARD_TTL_S, dials: Dials | None = None) -> None:
        self._me = me
        self.dials = dials
        """Limits on dials; None = everything may be dialled, for a network in which addresses lead nowhere else."""
        self._rng = rng
        self._ttl_s = ttl_s
        self._known: dict[str, _Known] = {}
        self._cards: dict[str, tuple[PeerCard, float]] = {}  # peer id -> card and when it runs out
        self._newcomers: list[str] = []  # peers with a card that got only a newcomer's place; at most `NEWCOMER_CARDS`
        self._connected: frozenset[str] = frozenset()
        self._heard = float("-inf")  # time of the latest new card
        self._gossip: dict[str, _Tries] = {}
        self._out_of_reach: set[str] = set()  # gossip ids none of whose addresses may be dialled now
        self._unclaimed: dict[str, float] = {}  # gossip id -> since when it is connected without a card

    def __len__(self) -> int:
        """Number of peers whose addresses are remembered beyond their cards."""
        return len(self._known)

    # ----------------------------------------------------------------- what it is told

    def learn(self, addresses: Iterable[str], now: float, bootstrap: bool = False) -> list[str]:
        """Addresses worth a try. Returns those that are of no use because they do not end in /p2p/<peer id>."""
        useless = []
        for address in addresses:
            peer = peer_of(address)
            if not peer or len(address) > MAX_ADDRESS_CHARS:
                useless.append(address)
            elif peer != self._me:
                known = self._known.setdefault(peer, _Known(seen=now))
                part = known.given if bootstrap else known.told
                if address not in part and len(part) < MAX_ADDRESSES:
                    part.append(address)
                    if bootstrap and self.dials is not None:
                        self.dials.give(address)
        self._forget_oldest()
        return useless

    def see(self, peer: str, card: PeerCard, now: float) -> None:
        """A card that was found; one that is not newer than the one held changes nothing. One without a way to reach
        its peer is a goodbye."""
        held = self._cards.get(peer)
        entry = card, min(card.created, now) + self._ttl_s
        if peer == self._me or not _is_live(entry, now):
            return
        if held is None:
            self._make_room(peer)
        elif _is_live(held, now) and card.created <= held[0].created:
            return
        self._cards[peer] = entry
        self._heard = now
        if told := _addresses(peer, card):
            known = self._known.setdefault(peer, _Known())
            known.told, known.seen = told, now

    def hear(self, peer: str, addresses: Iterable[str], now: float) -> bool:
        """A peer was heard of through others, and says that it can be reached at these addresses. Returns whether that
        is news: it has no card here, which would know better."""
        own = [address for address in addresses if peer_of(address) == peer][:MAX_ADDRESSES]
        card = self._cards.get(peer)
        if not own or peer == self._me or (card is not None and _is_live(card, now)):
            return False
        known = self._known.setdefault(peer, _Known())
        is_news, known.told, known.seen = own != known.told, own, now
        self._forget_oldest()
        return is_news

    def set_connected(self, peers: Iterable[str], now: float) -> None:
        """Peers that are connected now, whichever side dialled."""
        self._connected = frozenset(peers)
        if self.dials is not None:
            few_s = INHABITED_WAIT_S if self._has_few() else math.inf
            self.dials.longest_wait_s = few_s if self._connected else FEW_WAIT_S
        for peer in self._connected & self._known.keys():
            known = self._known[peer]
            known.seen, known.worked, known.tries = now, True, _Tries(last_at=now)

    def _make_room(self, peer: str) -> None:
        """Make room for one more card. If a newcomer must give way, it is drawn at random."""
        if len(self._cards) - len(self._newcomers) < MAX_CARDS - NEWCOMER_CARDS:
            return
        if len(self._newcomers) >= NEWCOMER_CARDS:
            place = self._rng.randrange(len(self._newcomers))
            for _ in range(NEWCOMER_CARDS):
                if not self._is_proven(self._newcomers[place]):
                    break
                place = (place + 1) % NEWCOMER_CARDS
            del self._cards[self._newcomers[place]]
            self._newcomers[place] = peer
        else:
            self._newcomers.append(peer)

    def _is_proven(self, peer: str) -> bool:
        known = self._known.get(peer)
        return peer in self._connected or (known is not None and (known.worked or bool(known.given)))

    # ----------------------------------------------------------------- membership and the DHT

    def members(self, now: float) -> dict[str, PeerCard]:
        """Peer id -> card, for cards that have not expired."""
        before = len(self._cards)
        self._cards = {peer: entry for peer, entry in self._cards.items() if _is_live(entry, now)}
        if len(self._cards) < before:
            self._settle()
        return {peer: card for peer, (card, _) in self._cards.items() if card.addresses or card.gossip_id}

    def left(self) -> dict[str, PeerCard]:
        """Peer id -> last card, for peers that said goodbye, as of the last `members`."""
        return {peer: card for peer, (card, _) in self._cards.items() if not (card.addresses or card.gossip_id)}

    def _settle(self) -> None:
        """Newcomers get the places that became free: those that proved a key first, then by chance."""
        waiting = [peer for peer in self._newcomers if peer in self._cards]
        free = MAX_CARDS - NEWCOMER_CARDS - (len(self._cards) - len(waiting))
        if free > 0:
            self._rng.shuffle(waiting)
            waiting = sorted(waiting, key=lambda peer: not self._is_proven(peer))[free:]
        self._newcomers = waiting

    def addresses_of(self, peer: str) -> list[str]:
        """All known addresses of a peer, its own word first."""
        known = self._known.get(peer, _Known())
        return list(dict.fromkeys(self.told_by(peer) + known.told + known.given))

    def told_by(self, peer: str) -> list[str]:
        """Addresses on a peer's card, which others may be told. Any thread may call this."""
        card = self._cards.get(peer)
        return [] if card is None else _addresses(peer, card[0])

    def to_dial(self, now: float) -> dict[str, list[str]]:
        """Peer id -> addresses to dial now: bootstrap peers that are due, and at most `MAX_DHT_DIALS` others."""
        self._forget_oldest()
        members = self.members(now)
        few = self._has_few()
        longest = FEW_WAIT_S if few else OTHER_WAIT_S
        due = {
            peer: known
            for peer, known in self._known.items()
            if peer not in self._connected and known.tries.due(now, longest)
        }
        first = [peer for peer, known in due.items() if known.given]
        hinted = set() if self.dials is None else self.dials.hinted
        others = [
            peer
            for peer, known in due.items()
            if not known.given
            and (few or peer not in members)
            and any(self._may(address, now) for address in self.addresses_of(peer))
        ]
        others.sort(key=lambda peer: (peer not in hinted, due[peer].tries.count, -due[peer].seen))
        proven = sorted((peer for peer in others if due[peer].worked), key=lambda peer: due[peer].tries.last_at)
        fresh = [peer for peer in others if not due[peer].worked]
        chosen = first + list(dict.fromkeys(proven[: MAX_DHT_DIALS // 2] + fresh + proven))[:MAX_DHT_DIALS]
        for peer in chosen:
            due[peer].tries.note(now, BOOTSTRAP_WAIT_S if due[peer].given else OTHER_WAIT_S, self._rng)
        return {peer: self.addresses_of(peer) for peer in chosen}

    def _has_few(self) -> bool:
        return len(self._connected) < WANTED

    # ----------------------------------------------------------------- gossip

    def gossip_to_keep(self, shards: Collection[int], most: int, now: float) -> list[str]:
        """At most `most` gossip ids to keep connections to, best first: `HUBS` hubs, through which those that only dial
        hear each other, then members, dealt to `shards` in turn; unreachable ones last. Peers that serve none of the
        shards are left out. The order is stable."""
        listening = [card for _, card in self._listening(now) if not card.shards or set(shards) & set(card.shards)]
        reachable = [card for card in listening if self._is_reachable(card)]
        keep = dict.fromkeys([card.gossip_id for card in reachable][:HUBS])
        for cards in (reachable, [card for card in listening if not self._is_reachable(card)]):
            rows = [[card.gossip_id for card in cards if not card.shards or shard in card.shards] for shard in shards]
            for dealt in zip_longest(*rows):
                keep |= dict.fromkeys(gossip_id for gossip_id in dealt if gossip_id is not None)
        return list(keep)[:most]

    def gossip_to_dial(
        self, shards: Collection[int], most: int, connected: Collection[str], now: float
    ) -> dict[str, list[str]]:
        """Gossip id -> addresses to dial now, of those to keep; `connected` are the gossip ids connected now."""
        claims: dict[str, list[tuple[str, PeerCard]]] = {}
        for peer, card in self._listening(now):
            claims.setdefault(card.gossip_id, []).append((peer, card))
        self._gossip = {
            gossip_id: _Tries() if gossip_id in connected else self._gossip.get(gossip_id, _Tries())
            for gossip_id in claims
        }
        self._out_of_reach = {
            gossip_id
            for gossip_id, cards in claims.items()
            if gossip_id not in connected
            and not now - GOSSIP_DIAL_S < self._gossip[gossip_id].last_at <= now
            and not any(self._may(way, now, peer) for peer, card in cards for way in _gossip_addresses(card))
        }
        chosen = {}
        for gossip_id in self.gossip_to_keep(shards, most, now):
            tries = self._gossip[gossip_id]
            if gossip_id not in connected and tries.due(now, FEW_WAIT_S if len(connected) < HUBS else OTHER_WAIT_S):
                if taken := self._take_gossip(claims[gossip_id], now):
                    serves_all = any(_serves_all(card) for _, card in claims[gossip_id])
                    tries.note(now, BOOTSTRAP_WAIT_S if serves_all else OTHER_WAIT_S, self._rng)
                    chosen[gossip_id] = taken
        return chosen

    def _take_gossip(self, cards: list[tuple[str, PeerCard]], now: float) -> list[str]:
        """Addresses to dial, of those that may be, on the cards that claim one gossip id: one of each card in turn, as
        some of them may lie; first those of peers that proved their own keys."""
        cards = sorted(cards, key=lambda item: (not self._is_proven(item[0]), _chance(self._me, item[0])))
        rows = [[(address, peer) for address in _gossip_addresses(card)] for peer, card in cards]
        owners: dict[str, str] = {}
        for claim in (claim for column in zip_longest(*rows) for claim in column if claim is not None):
            owners.setdefault(*claim)
        ways = [address for address, owner in owners.items() if self._may(address, now, owner)]
        return [way for way in ways[:MAX_ADDRESSES] if self._take(way, now, owners[way])]

    def ghosts(self, connected: Iterable[str], now: float, turn_s: float = 0.0) -> list[str]:
        """Connected gossip ids that no live card has claimed for `GHOST_S`, and for `turn_s` if a lookup of all cards
        takes that long. Empty while no new cards arrive or more cards exist than fit: then this node cannot tell."""
        claimed = {card.gossip_id for card in self.members(now).values()}
        if not 0.0 <= now - self._heard <= 2 * CARD_RENEWAL_S or len(self._cards) >= MAX_CARDS:
            self._unclaimed = {}
        else:
            unclaimed = [gossip_id for gossip_id in connected if gossip_id not in claimed]
            self._unclaimed = {gossip_id: min(self._unclaimed.get(gossip_id, now), now) for gossip_id in unclaimed}
        return [gossip_id for gossip_id, since in self._unclaimed.items() if now - since > GHOST_S + turn_s]

    def _listening(self, now: float) -> list[tuple[str, PeerCard]]:
        """Members with gossip addresses, and their cards: this node's bootstrap peers first, then peers that serve all
        shards. Within each group, the order is this node's own."""
        listening = [(peer, card) for peer, card in self.members(now).items() if _gossip_addresses(card)]
        return sorted(listening, key=lambda item: self._rank(*item))

    def _rank(self, peer: str, card: PeerCard) -> tuple[bool, bool, bytes]:
        known = self._known.get(peer)
        return known is None or not known.given, not _serves_all(card), _chance(self._me, peer)

    def _may(self, address: str, now: float, owner: str = "") -> bool:
        return self.dials is None or self.dials.may(address, now, owner)

    def _take(self, address: str, now: float, owner: str = "") -> bool:
        return self.dials is None or self.dials.take(address, now, owner)

    def _is_reachable(self, card: PeerCard) -> bool:
        tries = self._gossip.get(card.gossip_id)
        return card.gossip_id not in self._out_of_reach and (tries is None or tries.count <= UNREACHABLE_TRIES)

    # ----------------------------------------------------------------- the cache file

    def worth_finding(self) -> list[str]:
        """The peers that this node would like to find again after a restart, latest heard of first."""
        worth = [peer for peer, known in self._known.items() if known.worked or known.told]
        return sorted(worth, key=lambda peer: -self._known[peer].seen)[:MAX_KNOWN_PEERS]

    def write_cache(self) -> bytes:
        """JSON: those peers."""
        return msgspec.json.encode(
            [CachedPeer(self.addresses_of(peer), self._known[peer].seen) for peer in self.worth_finding()]
        )

    def read_cache(self, data: bytes, now: float) -> None:
        """Read the output of `write_cache`. Raises RemoteProtocolError (size or schema), and changes nothing, if it is
        damaged."""
        for cached in parse_cache(data):
            self.learn(cached.addresses, min(cached.seen, now))

    def _forget_oldest(self) -> None:
        if len(self._known) <= MAX_KNOWN_PEERS:
            return
        latest = sorted(self._known, key=lambda peer: -self._known[peer].seen)
        worked = [peer for peer in latest if self._known[peer].worked][: MAX_KNOWN_PEERS // 2]
        given = [peer for peer in latest if self._known[peer].given]
        present = [peer for peer in latest if peer in self._cards]
        best = list(dict.fromkeys(given + worked + present + latest))
        for peer in best[max(MAX_KNOWN_PEERS, len(given)) :]:
            del self._known[peer]


def parse_cache(data: bytes) -> list[CachedPeer]:
    """The peers in a cache file. Raises RemoteProtocolError: size or schema."""
    if len(data) > MAX_CACHE_BYTES:
        raise RemoteProtocolError("size", f"a cache of {len(data)} bytes, allowed are {MAX_CACHE_BYTES}")
    peers: list[CachedPeer] = decode_as(_cache_decoder, data)
    return peers


def peer_of(address: str) -> str:
    """Peer id at the end of a multiaddress; empty if it has none."""
    head, _, peer = address.rpartition("/p2p/")
    return peer if head and "/" not in peer else ""


def is_relayed(address: str) -> bool:
    return "/p2p-circuit" in address


@lru_cache(2 * MAX_CARDS)
def _chance(me: str, peer: str) -> bytes:
    """The place of a peer in an order of this node's own."""
    return hashlib.sha256(f"{me}/{peer}".encode()).digest()


def _is_live(entry: tuple[PeerCard, float], now: float) -> bool:
    """Whether a card is neither expired nor dated in the future; the latter happens when the clock was set back."""
    card, expires = entry
    return expires > now and card.created <= now + MAX_CLOCK_SKEW_S


def _addresses(peer: str, card: PeerCard) -> list[str]:
    """Addresses on a card that end in the peer's own id. Nobody can name addresses of others."""
    return [address for address in card.addresses if peer_of(address) == peer]


def _serves_all(card: PeerCard) -> bool:
    return "bootstrap" in card.roles or "relay" in card.roles


def _gossip_addresses(card: PeerCard) -> list[str]:
    return [address for address in card.gossip if card.gossip_id and peer_of(address) == card.gossip_id]
