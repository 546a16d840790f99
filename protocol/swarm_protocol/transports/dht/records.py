"""The records that may lie in the DHT: cards of this swarm's peers, and nothing else.

key = membership_key(swarm, bucket_of(peer))      subkey = peer id      value = signed card
expiration = card.created + TTL at most           so that nobody can keep another's old card alive
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from functools import lru_cache, partial
from heapq import nsmallest
from statistics import median

import msgspec
from hivemind.dht.routing import DHTID

from swarm_protocol.codec import decode_as, verify_card
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.introductions import Introductions
from swarm_protocol.limits import MAX_CLOCK_SKEW_S, MEMBERSHIP_BUCKETS
from swarm_protocol.messages import PeerCard
from swarm_protocol.topics import bucket_of, membership_key
from swarm_protocol.transports.dht.messages import MAX_BUCKET_CARDS, MAX_PEER_ID_CHARS, MAX_VALUE_BYTES, CardRecord

MAX_DATED = 256  # peers whose clocks are compared with this node's
MAX_OFF_S = 86_400.0  # a card whose time differs more than this is not compared, nor opened for long
STORED_EACH, STORED_ALL = 128, 512
"""Cards of others that one connection, and all together, may have stored here at a time: a node that joins gets those
of its buckets from its neighbours, some 60 a bucket in a swarm of 1,000; their own peers renew them within 15 s."""
FOUND_EACH, FOUND_ALL = 1024, 8192
"""Cards of others that are accepted at a time from one peer's answers, and from all answers: a quarter of, and twice,
the peer table's size."""

_bytes_decoder = msgspec.msgpack.Decoder(bytes)
_text_decoder = msgspec.msgpack.Decoder(str)


class CardValidator:
    """Says of a record whether it is the card of a member of this swarm, under that member's name.

    A peer's own card is always accepted from it, and cards of others within the limits above. A peer stores its own
    card every few seconds; until then, copies from others help. They keep out no card that its own peer brings.
    """

    def __init__(self, swarm: str, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self.keys = [DHTID.generate(membership_key(swarm, bucket)).to_bytes() for bucket in range(MEMBERSHIP_BUCKETS)]
        """DHT keys of the buckets."""
        self._buckets = {key: bucket for bucket, key in enumerate(self.keys)}
        self.open = lru_cache(4096)(partial(verify_card, swarm=swarm))
        """Signed card -> (peer id, card); each is seen many times, from every replica."""
        self.stored = Introductions(STORED_EACH, STORED_ALL)  # cards of others that connections brought to store
        self.found = Introductions(FOUND_EACH, FOUND_ALL)  # and in answers
        self.too_new = ""  # see `Transport.too_new`
        self.made: dict[str, float] = {}
        """Peer id -> when its newest card was made, by its own clock; also of those that are refused for it."""
        self._ages: dict[str, float] = {}
        """Peer id -> how old its newest card seemed when it came, for peers that have renewed theirs since this began:
        others may be gone, and their cards old."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._buckets

    def check(
        self, key: bytes, name: str | bytes, value: bytes, expiration: float, account: Introductions, bringer: str
    ) -> str:
        """The peer of a card that was checked. `name` is the claimed peer, in msgpack if it is bytes; `value` is
        msgpack. `bringer` is the peer that the record came from, and `account` counts the valid cards of others that it
        brings. Raises RemoteProtocolError: key, size, schema, expiration, newcomers, signature, version, newer, swarm
        or peer."""
        bucket = self._buckets.get(key)
        if bucket is None:
            raise RemoteProtocolError("key", "not a bucket of this swarm's members")
        if len(value) > MAX_VALUE_BYTES or len(name) > MAX_PEER_ID_CHARS:
            raise RemoteProtocolError("size", f"record of {len(value)} bytes")
        named = name if isinstance(name, str) else decode_as(_text_decoder, name)
        signed = decode_as(_bytes_decoder, value)
        now = time.time()
        if not abs(expiration - now) <= MAX_OFF_S:  # not >: NaN too
            raise RemoteProtocolError("expiration", f"{expiration - now:.0f} s ahead")
        if not account.may_admit(named, bringer, now):  # costs less than a signature
            raise RemoteProtocolError("newcomers", f"a card of {named}, over a connection that has brought many")
        try:
            peer, card = self.open(signed)
        except RemoteProtocolError as error:
            if error.reason == "newer" and not self.too_new and named.isascii() and named.isalnum():
                self.too_new = named  # not longer than its record
            raise
        if peer != named or bucket_of(peer) != bucket:
            raise RemoteProtocolError("peer", f"a card of {peer} under the name of {named!r}")
        if not expiration <= card.created + self._ttl_s:  # not >: NaN too
            raise RemoteProtocolError("expiration", f"{expiration - card.created:.0f} s after its making")
        if card.created > now + MAX_OFF_S:
            raise RemoteProtocolError("expiration", f"made {card.created - now:.0f} s from now")
        self._date(peer, card.created, now)
        if expiration > now + self._ttl_s + MAX_CLOCK_SKEW_S:
            raise RemoteProtocolError("expiration", f"{expiration - now:.0f} s ahead")
        if not account.admits(peer, bringer, expiration, now):
            raise RemoteProtocolError("newcomers", f"a card of {peer}, over a connection that has brought many")
        return peer

    def _date(self, peer: str, made: float, now: float) -> None:
        """Compare the time of a card with the present one."""
        before = self.made.get(peer)
        if before is not None and made > before:
            self._ages[peer] = now - made
        if before is not None or len(self.made) < MAX_DATED:
            self.made[peer] = max(made, before or 0.0)

    @property
    def clock_ahead(self) -> float | None:
        """See `Transport.clock_ahead`. From any thread."""
        ages = list(self._ages.values())
        return median(ages) if ages else None

    def card(self, value: bytes) -> tuple[str, PeerCard]:
        """(peer id, card) of a value that `check` let pass."""
        opened: tuple[str, PeerCard] = self.open(_bytes_decoder.decode(value))
        return opened


class CardStorage:
    """This node's part of the DHT: each peer's newest card until it expires, `MAX_BUCKET_CARDS` in a bucket. `now` is
    Unix time, in seconds."""

    def __init__(self) -> None:
        self.connected: Collection[str] = ()  # peers whose cards are not displaced
        self._rng = random.Random()
        self._buckets: dict[bytes, dict[str, tuple[bytes, float, bool]]] = {}
        """Key -> peer -> card, expiration, whether the peer has brought it, or an older one, itself."""
        self._full_until: dict[bytes, float] = {}

    def store(self, key: bytes, peer: str, value: bytes, expiration: float, now: float, is_own: bool) -> bool:
        """Keep a card that was checked; `is_own` = it came from its own peer. Returns False, and keeps nothing, if it
        has expired, if one as new is held, or if the bucket is full and no other card makes way.

        A card that its own peer brings replaces one that another peer brought, else one of a peer that is not
        connected, drawn by chance. A card that another peer brings replaces none.
        """
        bucket = self._buckets.setdefault(key, {})
        _, held_until, was_own = bucket.get(peer, (b"", 0.0, False))
        if expiration <= max(now, held_until):
            return False
        if peer not in bucket and not self._has_room(key, now):
            strangers = [other for other in bucket if is_own and other not in self.connected]
            choice = [other for other in strangers if not bucket[other][2]] or strangers
            if not choice:
                return False
            del bucket[self._rng.choice(choice)]
        bucket[peer] = value, expiration, is_own or was_own
        return True

    def clear(self) -> None:
        """Forget all cards: the clock was set back."""
        self._buckets.clear()
        self._full_until.clear()

    def records(self, key: bytes, now: float) -> list[CardRecord]:
        """The cards of a bucket that have not run out."""
        self._drop_old(key, now)
        return [(peer, value, expiration) for peer, (value, expiration, _) in self._buckets.get(key, {}).items()]

    def some(self, most: int, now: float) -> list[bytes]:
        """At most `most` signed cards that have not run out: of connected peers first, else drawn by chance. Any thread
        may call this."""
        held = [item for bucket in list(self._buckets.values()) for item in list(bucket.items())]
        drawn = [
            (peer not in self.connected, self._rng.random(), value)
            for peer, (value, expiration, _) in held
            if expiration > now
        ]
        return [_bytes_decoder.decode(value) for *_, value in nsmallest(most, drawn)]

    def _has_room(self, key: bytes, now: float) -> bool:
        bucket = self._buckets[key]
        if len(bucket) >= MAX_BUCKET_CARDS and now >= self._full_until.get(key, now):
            self._drop_old(key, now)
            self._full_until[key] = min((expiration for _, expiration, _ in bucket.values()), default=now)
        return len(bucket) < MAX_BUCKET_CARDS

    def _drop_old(self, key: bytes, now: float) -> None:
        bucket = self._buckets.get(key, {})
        for peer in [peer for peer, (_, expiration, _) in bucket.items() if expiration <= now]:
            del bucket[peer]

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))
