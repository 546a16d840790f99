"""What may lie in the DHT: cards of this swarm's peers, and nothing else.

key = membership_key(swarm, bucket_of(peer))      subkey = peer id      value = sealed card
expiration = card.created + TTL at most           so that nobody can keep another's old card alive
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import lru_cache, partial

import msgspec
from hivemind.dht.node import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from protocol.codec import open_card
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_CARD_BYTES, MAX_CLOCK_SKEW_S, MEMBERSHIP_BUCKETS
from protocol.messages import PeerCard
from protocol.topics import bucket_of, membership_key
from protocol.transports.places import gives_way

MAX_BUCKET_CARDS = 1500
"""Cards of a bucket stored here: of the largest size they still fit into a reply of 4 MiB, beyond which hivemind 1.1.12
answers nothing at all."""

MAX_DATED = 256
"""Peers whose clocks are told."""
MAX_OFF_S = 86_400.0
"""Whose card is of a time further off is not counted among these, nor is such a card opened for long."""

_bytes_decoder = msgspec.msgpack.Decoder(bytes)
_text_decoder = msgspec.msgpack.Decoder(str)


class CardValidator(RecordValidatorBase):  # type: ignore[misc]
    """Accepts cards and counts the rest.

    Tries to decode, because `get` of bytes that are not msgpack never returns in hivemind 1.1.12.
    """

    def __init__(
        self,
        swarm: str,
        ttl_s: float,
        rejected: Counter[str],
        admits: Callable[[str, float, float], bool] = lambda peer, expires, now: True,
    ) -> None:
        """`admits` (peer, when its card runs out, now) says whether a valid card is let in."""
        self._ttl_s = ttl_s
        self._admits = admits
        self._rejected = rejected
        self._buckets = {
            DHTID.generate(membership_key(swarm, bucket)).to_bytes(): bucket for bucket in range(MEMBERSHIP_BUCKETS)
        }
        self.open = lru_cache(4096)(partial(_open, swarm))
        """Sealed card -> (peer id, card); each is seen many times, from every replica."""
        self.too_new = ""
        """As `Transport.too_new`."""
        self.made: dict[str, float] = {}
        """Peer id -> when its newest card was made, by its own clock; also of those that are refused for it."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            self.check(record)
        except RemoteProtocolError as error:
            self._rejected[error.reason] += 1
            return False
        return True

    def check(self, record: DHTRecord) -> None:
        """Raises RemoteProtocolError: key, size, schema, expiration, signature, version, newer, swarm or peer."""
        bucket = self._buckets.get(record.key)
        if bucket is None:
            raise RemoteProtocolError("key", "not a bucket of this swarm's members")
        if len(record.value) > MAX_CARD_BYTES + 8 or len(record.subkey) > 80:
            raise RemoteProtocolError("size", f"record of {len(record.value)} bytes")
        try:
            named, sealed = _text_decoder.decode(record.subkey), _bytes_decoder.decode(record.value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError("schema", str(error)) from error
        now = time.time()
        if not abs(record.expiration_time - now) <= MAX_OFF_S:  # not >: NaN too
            raise RemoteProtocolError("expiration", f"{record.expiration_time - now:.0f} s ahead")
        try:
            peer, card = self.open(sealed)
        except RemoteProtocolError as error:
            if error.reason == "newer" and not self.too_new and named.isascii() and named.isalnum():
                self.too_new = named  # not longer than its record
            raise
        if peer != named or bucket_of(peer) != bucket:
            raise RemoteProtocolError("peer", f"a card of {peer} under the name of {named!r}")
        if not record.expiration_time <= card.created + self._ttl_s:  # not >: NaN too
            raise RemoteProtocolError("expiration", f"{record.expiration_time - card.created:.0f} s after its making")
        if card.created > now + MAX_OFF_S:
            raise RemoteProtocolError("expiration", f"made {card.created - now:.0f} s from now")
        if peer in self.made or len(self.made) < MAX_DATED:
            self.made[peer] = max(card.created, self.made.get(peer, 0.0))
        if record.expiration_time > now + self._ttl_s + MAX_CLOCK_SKEW_S:
            raise RemoteProtocolError("expiration", f"{record.expiration_time - now:.0f} s ahead")
        if not self._admits(peer, record.expiration_time, now):
            raise RemoteProtocolError("newcomers", f"a card of {peer}, over a connection that has brought many")

    def keep_valid(self, key: bytes, cards: DictionaryDHTValue) -> bool:
        """Remove what is not valid from a dictionary, rather than refuse it whole for one bad entry (always True)."""
        with cards.freeze():
            for subkey, (value, expiration) in list(cards.items()):
                named = msgspec.msgpack.encode(subkey) if isinstance(subkey, str) else b""
                if not self.validate(DHTRecord(key, named, value, expiration)):
                    del cards[subkey]
        cards.maxsize = float("inf")  # came from the peer as well, with any type
        return True


class CardStorage(DHTLocalStorage):  # type: ignore[misc]
    """This node's part of the DHT, bounded."""

    def __init__(self, is_own: Callable[[str], bool] = lambda peer: True) -> None:
        """`is_own` says whether the card of a peer, which is about to be stored, comes from that peer itself."""
        super().__init__()
        self.connected: Collection[str] = ()
        """Peers whose cards stay."""
        self._is_own = is_own
        self._own: dict[DHTID, set[str]] = {}
        self._rng = random.Random()

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        held, own = self.get(key), self._own.setdefault(key, set())
        if held is not None and isinstance(held.value, DictionaryDHTValue):
            card = held.value.get(subkey)
            if card is None and len(held.value) >= MAX_BUCKET_CARDS:
                names = [name for name, _ in held.value.items()]
                own.intersection_update(names)
                gone = gives_way(names, own, self.connected, self._is_own(subkey), self._rng)
                if gone is None:
                    return False
                del held.value[gone]
            if card is not None and card.expiration_time >= expiration_time:
                return False  # hivemind would forget the newer one when the older one runs out
        stored = bool(super().store_subkey(key, subkey, value, expiration_time))
        if stored and self._is_own(subkey):
            own.add(subkey)
            if len(own) > 2 * MAX_BUCKET_CARDS and (now_held := self.get(key)) is not None:
                own.intersection_update(name for name, _ in now_held.value.items())
        return stored

    def sealed(self, key: DHTID, peer: str) -> bytes | None:
        """The sealed card of a peer that is stored here."""
        held = self.get(key)
        card = held.value.get(peer) if held is not None and isinstance(held.value, DictionaryDHTValue) else None
        return None if card is None else _bytes_decoder.decode(card.value)


def _open(swarm: str, sealed: bytes) -> tuple[str, PeerCard]:
    return open_card(sealed, swarm)
