"""Bytes to records and back: msgpack with a schema, sealed with the sender's signature.

    sealed = public key (32) | signature (64) | body          signature over tag | body, exactly as received

Decoding any bytes gives a record or `RemoteProtocolError`, cheapest check first:
size -> signature -> version -> schema -> swarm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from protocol.limits import MAX_BATCH_BYTES, MAX_CARD_BYTES, MAX_TASK_NAME_BYTES
from protocol.messages import PROTOCOL_VERSION, PeerCard, RolloutBatch, TaskName

HEAD_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES
BATCH_TAG = b"swarm-node/rollouts/1\0"
CARD_TAG = b"swarm-node/card/1\0"


def spoken_by(version: int) -> frozenset[int]:
    """Major versions that a node of this one understands: its own and the one before."""
    return frozenset({version, version - 1} - {0})


SPOKEN = spoken_by(PROTOCOL_VERSION)
"""Major versions this node understands."""


class _Header(msgspec.Struct):
    """What every version of every record begins with."""

    protocol: int


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)
_batch_decoder = msgspec.msgpack.Decoder(RolloutBatch)
_card_decoder = msgspec.msgpack.Decoder(PeerCard)
_task_name_decoder = msgspec.msgpack.Decoder(TaskName)


def encode_task_name(name: TaskName) -> bytes:
    """Raises `LocalProtocolError` for a name that peers would refuse."""
    data = _encoder.encode(name)
    try:
        decode_task_name(data)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"task name {name} cannot be sent: {error}") from error
    return data


def decode_task_name(data: bytes) -> TaskName:
    """Raises `RemoteProtocolError` with reason `size` or `schema`, and nothing else."""
    if len(data) > MAX_TASK_NAME_BYTES:  # before decoding: an oversized message costs nothing
        raise RemoteProtocolError("size", f"task name of {len(data)} bytes")
    name: TaskName = _decode(_task_name_decoder, data)
    return name


def seal_batch(batch: RolloutBatch, sender: Identity) -> bytes:
    """Raises `LocalProtocolError` for a batch that peers would refuse."""
    return _seal(batch, _batch_decoder, sender, BATCH_TAG, MAX_BATCH_BYTES)


def open_batch(data: bytes, swarm: str, spoken: Collection[int] = SPOKEN) -> tuple[str, RolloutBatch]:
    """(sender's peer id, batch). Raises `RemoteProtocolError`: size, signature, version, newer, schema or swarm."""
    return _open(data, swarm, _batch_decoder, BATCH_TAG, MAX_BATCH_BYTES, spoken)


def seal_card(card: PeerCard, peer: Identity) -> bytes:
    """Raises `LocalProtocolError` for a card that peers would refuse."""
    return _seal(card, _card_decoder, peer, CARD_TAG, MAX_CARD_BYTES)


def open_card(data: bytes, swarm: str, spoken: Collection[int] = SPOKEN) -> tuple[str, PeerCard]:
    """(peer id, card). Raises `RemoteProtocolError`: size, signature, version, newer, schema or swarm."""
    return _open(data, swarm, _card_decoder, CARD_TAG, MAX_CARD_BYTES, spoken)


def unspoken(version: int, spoken: Collection[int] = SPOKEN) -> str:
    """Why nothing of `version` is read, for people at either end."""
    how = "new" if version > max(spoken) else "old"
    return f"protocol {version} is too {how} for a node that speaks {' and '.join(map(str, sorted(spoken)))}"


def common_version(members: Iterable[PeerCard], spoken: Collection[int] = SPOKEN, newer_heard: bool = False) -> int:
    """The version to write for all: the newest that this node and all `members` understand. For those who understand
    none of this node's, its oldest; likewise while nobody is known, but its newest if only what is too new for it was
    heard (`newer_heard`): those who wrote that understand this node's newest at best."""
    theirs = [max(card.protocol, card.speaks) for card in members]
    if not theirs:
        return max(spoken) if newer_heard else min(spoken)
    return max(min(spoken), min([max(spoken), *theirs]))


def version_for(peer: str, members: Mapping[str, PeerCard], spoken: Collection[int] = SPOKEN) -> int:
    """The version to write for one peer: the newest that both understand; what all do, if its card is not known."""
    card = members.get(peer)
    return common_version(members.values() if card is None else [card], spoken)


def in_version(card: PeerCard, version: int, spoken: Collection[int] = SPOKEN) -> PeerCard:
    """`card` as written in `version`, by a node that understands `spoken`."""
    newest = max(spoken)
    return msgspec.structs.replace(card, protocol=version, speaks=newest if newest > version else 0)


def _seal(
    record: RolloutBatch | PeerCard, decoder: msgspec.msgpack.Decoder[Any], sender: Identity, tag: bytes, limit: int
) -> bytes:
    body = _encoder.encode(record)
    try:
        _check_size(HEAD_BYTES + len(body), limit)
        _decode(decoder, body)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"a {type(record).__name__} cannot be sent: {error}") from error
    return sender.public_key + sender.sign(tag, body) + body


def _open(
    data: bytes,
    swarm: str,
    decoder: msgspec.msgpack.Decoder[Any],
    tag: bytes,
    limit: int,
    spoken: Collection[int],
) -> tuple[str, Any]:
    _check_size(len(data), limit)
    key, signature, body = data[:PUBLIC_KEY_BYTES], data[PUBLIC_KEY_BYTES:HEAD_BYTES], data[HEAD_BYTES:]
    verify(key, tag, body, signature)
    version = _decode(_header_decoder, body).protocol
    if version not in spoken:
        reason = "newer" if version > max(spoken) else "version"
        raise RemoteProtocolError(reason, unspoken(version, spoken))
    record = _decode(decoder, body)
    if record.swarm != swarm:
        raise RemoteProtocolError("swarm", record.swarm)
    return peer_id_of(key), record


def _check_size(size: int, limit: int) -> None:
    if not HEAD_BYTES < size <= limit:
        raise RemoteProtocolError("size", f"{size} bytes, allowed are {HEAD_BYTES + 1} to {limit}")


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError("schema", str(error)) from error
