"""One codec for all messages: msgpack with a schema and a size limit, signed where strangers pass it on.

    signed = public key (32 bytes) | signature (64 bytes) | body          signature over tag | body, exactly as received

Decoding any bytes gives a record or raises `RemoteProtocolError`. The cheapest check comes first:
size -> signature -> version -> schema -> swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from swarm_protocol.limits import MAX_BATCH_BYTES, MAX_CARD_BYTES
from swarm_protocol.messages import (
    PROTOCOL_VERSION,
    BatchOfBefore,
    GroupOfBefore,
    PeerCard,
    RolloutBatch,
    SharedGroup,
    SharedRollout,
)

SIGNED_HEAD_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES
BATCH_TAG = b"swarm-node/rollouts/1\0"
CARD_TAG = b"swarm-node/card/1\0"
T = TypeVar("T")


class Signed(Protocol):
    """What every record has that strangers pass on."""

    @property
    def protocol(self) -> int: ...

    @property
    def swarm(self) -> str: ...


S = TypeVar("S", bound=Signed)


def spoken_by(version: int) -> frozenset[int]:
    """Major versions that a node of `version` understands: its own and the one before."""
    return frozenset({version, version - 1} - {0})


SPOKEN = spoken_by(PROTOCOL_VERSION)  # major versions that this node understands


class _Header(msgspec.Struct):
    """The fields that decide whether the rest of a record can be understood, whatever its version."""

    protocol: int | None = None
    kind: object = ""


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)


class RecordCodec(Generic[T]):
    """Encodes and decodes records of one schema, for streams whose ends are authenticated."""

    def __init__(
        self, schema: Any, limit: int, opening: str = "", check: Callable[[T], None] = lambda record: None
    ) -> None:
        """A record takes at most `limit` bytes. Every record carries a version; with `opening`, only records of that
        kind do, because they open a conversation. `check` raises RemoteProtocolError for values that no schema
        excludes."""
        self._decoder = msgspec.msgpack.Decoder(schema)
        self._limit = limit
        self._opening = opening
        self._check = check

    def encode(self, record: T) -> bytes:
        """The bytes of `record`. Raises LocalProtocolError for a record that peers would refuse."""
        data = _encoder.encode(record)
        try:
            self.decode(data)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"a {type(record).__name__} cannot be sent: {error}") from error
        return data

    def decode(self, data: bytes | bytearray) -> T:
        """The record in `data`. Raises RemoteProtocolError: size, version, schema, and the reasons of `check`."""
        if len(data) > self._limit:  # before anything is allocated
            raise RemoteProtocolError("size", f"{len(data)} bytes, allowed are {self._limit}")
        header = decode_as(_header_decoder, data)
        if self._opening in ("", header.kind) and (self._opening or header.protocol is not None):
            check_version(header.protocol, SPOKEN)
        record: T = decode_as(self._decoder, data)
        self._check(record)
        return record


class EarlierForm(Generic[S]):
    """The form of a record in protocol 1."""

    def __init__(self, schema: Any, read: Callable[[Any], S], write: Callable[[S], Any]) -> None:
        """`read` makes today's record of one of `schema`, and `write` the other way; it raises LocalProtocolError for
        what protocol 1 cannot say."""
        self.decoder: Any = msgspec.msgpack.Decoder(schema)
        self.read: Callable[[Any], S] = read
        self.write: Callable[[S], Any] = write


def _batch_of_before(batch: BatchOfBefore) -> RolloutBatch:
    groups = [
        SharedGroup(
            *(group.task, group.epoch, group.slot, group.prompt, group.policy_version),
            rollouts=[SharedRollout([turn]) for turn in group.rollouts],
        )
        for group in batch.groups
    ]
    head = batch.protocol, batch.swarm, batch.sequence, batch.created, batch.fingerprint, batch.tokenizer
    return RolloutBatch(*head, batch.sampling, groups, batch.addresses)


def _as_before(batch: RolloutBatch) -> BatchOfBefore:
    for group in batch.groups:
        if group.kind not in ("", "text") or any(len(rollout.turns) != 1 for rollout in group.rollouts):
            raise LocalProtocolError(f"protocol 1 has texts of one turn only, not {group.kind or 'dialogues'}")
    groups = [
        GroupOfBefore(
            *(group.task, group.epoch, group.slot, group.prompt, group.policy_version),
            rollouts=[rollout.turns[0] for rollout in group.rollouts],
        )
        for group in batch.groups
    ]
    head = batch.protocol, batch.swarm, batch.sequence, batch.created, batch.fingerprint, batch.tokenizer
    return BatchOfBefore(*head, batch.sampling, groups, batch.addresses)


class SignedCodec(Generic[S]):
    """Signs and verifies records of one schema that strangers pass on."""

    def __init__(self, schema: type[S], limit: int, tag: bytes, before: EarlierForm[S] | None = None) -> None:
        """A signed record takes at most `limit` bytes. `tag` separates signatures of different kinds of records.
        `before`: how protocol 1 writes them, if otherwise."""
        self._decoder: Any = msgspec.msgpack.Decoder(schema)
        self._limit, self._tag = limit, tag
        self._before: EarlierForm[S] | None = before

    def sign(self, record: S, sender: Identity) -> bytes:
        """The bytes of `record`, signed, in the form of its version. Raises LocalProtocolError for a record that peers
        would refuse."""
        before = self._before if record.protocol == 1 else None
        body = _encoder.encode(record if before is None else before.write(record))
        try:
            self._check_size(SIGNED_HEAD_BYTES + len(body))
            self._decode(body, record.protocol)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"a {type(record).__name__} cannot be sent: {error}") from error
        return sender.public_key + sender.sign(self._tag, body) + body

    def verify(self, data: bytes, swarm: str, spoken: Collection[int] = SPOKEN) -> tuple[str, S]:
        """(peer id of the sender, record). Raises RemoteProtocolError: size, signature, version, newer, schema or
        swarm."""
        self._check_size(len(data))
        head, body = data[:SIGNED_HEAD_BYTES], data[SIGNED_HEAD_BYTES:]
        key, signature = head[:PUBLIC_KEY_BYTES], head[PUBLIC_KEY_BYTES:]
        verify(key, self._tag, body, signature)
        version = decode_as(_header_decoder, body).protocol
        if version is not None:  # else the schema refuses it
            check_version(version, spoken, newer="newer")
        record = self._decode(body, version)
        if record.swarm != swarm:
            raise RemoteProtocolError("swarm", record.swarm)
        return peer_id_of(key), record

    def _decode(self, body: bytes, version: int | None) -> S:
        if self._before is not None and version == 1:
            earlier: S = self._before.read(decode_as(self._before.decoder, body))
            return earlier
        record: S = decode_as(self._decoder, body)
        return record

    def _check_size(self, size: int) -> None:
        if not SIGNED_HEAD_BYTES < size <= self._limit:
            raise RemoteProtocolError("size", f"{size} bytes, allowed are {SIGNED_HEAD_BYTES + 1} to {self._limit}")


_batches = SignedCodec(
    RolloutBatch, MAX_BATCH_BYTES, BATCH_TAG, EarlierForm(BatchOfBefore, _batch_of_before, _as_before)
)
_cards = SignedCodec(PeerCard, MAX_CARD_BYTES, CARD_TAG)
sign_batch, verify_batch = _batches.sign, _batches.verify
verify_card = _cards.verify


def sign_card(card: PeerCard, sender: Identity) -> bytes:
    """The bytes of `card`, signed; without what it declares if its addresses leave no room for that. Raises
    LocalProtocolError for a card that peers would refuse."""
    if card.declared is not None and SIGNED_HEAD_BYTES + len(_encoder.encode(card)) > MAX_CARD_BYTES:
        card = msgspec.structs.replace(card, declared=None)
    return _cards.sign(card, sender)


def decode_as(decoder: Any, data: Any) -> Any:
    """Decode `data` by a msgspec decoder. Raises RemoteProtocolError `schema`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError("schema", str(error)) from error


def check_version(version: int | None, spoken: Collection[int], newer: str = "version") -> None:
    """Raises RemoteProtocolError for a version that is not `spoken`: `newer` for a later one, else `version`."""
    if version is None:
        raise RemoteProtocolError("version", "no protocol version")
    if version not in spoken:
        how = "new" if version > max(spoken) else "old"
        detail = f"protocol {version} is too {how} for a node that speaks {' and '.join(map(str, sorted(spoken)))}"
        raise RemoteProtocolError(newer if how == "new" else "version", detail)


def common_version(members: Iterable[PeerCard], spoken: Collection[int] = SPOKEN, newer_heard: bool = False) -> int:
    """The newest version that this node and all `members` understand; this node's oldest if a member understands none
    of its versions. Without members: this node's oldest, or its newest if records too new for it were heard
    (`newer_heard`), because their senders understand at least that."""
    theirs = [max(card.protocol, card.speaks) for card in members]
    if not theirs:
        return max(spoken) if newer_heard else min(spoken)
    return max(min(spoken), min([max(spoken), *theirs]))


def version_for(peer: str, members: Mapping[str, PeerCard], spoken: Collection[int] = SPOKEN) -> int:
    """The newest version that this node and one peer understand; if the peer's card is not known, the version that all
    members understand."""
    card = members.get(peer)
    return common_version(members.values() if card is None else [card], spoken)


def in_version(card: PeerCard, version: int, spoken: Collection[int] = SPOKEN) -> PeerCard:
    """`card` written in `version`, by a node that understands `spoken`."""
    newest = max(spoken)
    return msgspec.structs.replace(card, protocol=version, speaks=newest if newest > version else 0)
