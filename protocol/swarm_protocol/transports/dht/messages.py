"""Messages between nodes about the DHT, read with a schema.

    bucket = msgpack ext 0x50 { [maximum | nil, latest expiration, [[peer id, value, expiration], ...]] }
    value  = msgpack bin { signed card }

hivemind 1.1.12's own decoder unpacks extension types inside extension types without a limit, which can end the process.
Nothing here calls it. Readers raise RemoteProtocolError: schema, size, find or store.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from msgspec import Meta

from swarm_protocol.codec import decode_as
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import MAX_CARD_BYTES, MEMBERSHIP_BUCKETS

EXT_BUCKET = 0x50  # hivemind's code for a dictionary of records
KEY_BYTES = DHTID.HASH_NBYTES
MAX_BUCKET_CARDS = 1500
"""Cards of a bucket, stored or read: of the largest size they take 3 MB, less than a message of p2pd can hold."""
MAX_PEER_ID_BYTES = 64
"""Ids of Ed25519 keys have 38 bytes. base58 takes time with the square of the length: minutes for a megabyte."""
MAX_PEER_ID_CHARS = 80
MAX_VALUE_BYTES = MAX_CARD_BYTES + 8  # a signed card and its msgpack header
MAX_NEAREST = 20  # peers that an answer may name for each key: as many as nodes name, and hivemind's k

CardRecord = tuple[
    Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)],
    Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)],
    float,
]
"""Peer id, value, expiration (Unix seconds)."""
_Bucket = tuple[float | None, float, Annotated[list[CardRecord], Meta(max_length=MAX_BUCKET_CARDS)]]

_ext_decoder = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_bucket_decoder = msgspec.msgpack.Decoder(_Bucket)
_encoder = msgspec.msgpack.Encoder()


def encode_bucket(records: Collection[CardRecord]) -> bytes:
    """The records of a bucket, as hivemind's nodes also write and read them."""
    latest = max((expiration for _, _, expiration in records), default=-math.inf)
    return _encoder.encode(msgspec.msgpack.Ext(EXT_BUCKET, _encoder.encode((math.inf, latest, records))))


def decode_bucket(data: bytes) -> list[CardRecord]:
    """The records of a bucket. Raises RemoteProtocolError (schema)."""
    outer = decode_as(_ext_decoder, data)
    if outer.code != EXT_BUCKET:
        raise RemoteProtocolError("schema", f"extension type {outer.code}")
    records: list[CardRecord] = decode_as(_bucket_decoder, outer.data)[2]
    return records


@lru_cache(4096)
def node_id_of(peer: PeerID) -> DHTID:
    """The only DHT id that a peer may have: it follows from its key, so nobody has two, nor one of another."""
    return DHTID.generate(str(peer))


def read_keys(keys: Sequence[bytes]) -> list[bytes]:
    """The keys of a find request. Raises RemoteProtocolError (find) for more than a node can mean."""
    if len(keys) > MEMBERSHIP_BUCKETS:
        raise RemoteProtocolError("find", f"{len(keys)} keys")
    if len(set(keys)) < len(keys) or any(len(key) != KEY_BYTES for key in keys):
        raise RemoteProtocolError("find", "keys that repeat, or are none")
    return list(keys)


def read_store(request: Any) -> list[tuple[bytes, bytes, bytes, float]]:
    """(key, subkey, value, expiration) for each item of a store request; an empty subkey means that the value is a
    bucket. Raises RemoteProtocolError `store` if there are more items than buckets, or if the lists do not match."""
    columns = request.keys, request.subkeys, request.values, request.expiration_time
    if len(request.keys) > MEMBERSHIP_BUCKETS or len({len(column) for column in columns}) > 1:
        raise RemoteProtocolError("store", f"lists of {', '.join(str(len(column)) for column in columns)} items")
    return list(zip(*columns, strict=True))


def read_nearest(node_ids: Sequence[bytes], peer_ids: Sequence[bytes]) -> tuple[list[PeerID], int]:
    """Peers that an answer names, and how many pairs were left out because the node id does not follow from the peer's
    key, or the peer id is none."""
    peers = []
    pairs = list(zip(node_ids[:MAX_NEAREST], peer_ids[:MAX_NEAREST], strict=False))
    for node_id, peer_id in pairs:
        if 0 < len(peer_id) <= MAX_PEER_ID_BYTES:
            peer = PeerID(peer_id)
            if node_id_of(peer).to_bytes() == node_id:
                peers.append(peer)
    return peers, len(pairs) - len(peers)


def shares(sizes: Iterable[int], room: int) -> list[int]:
    """Divide `room` among several things: small ones get all that they need, and the others share the rest evenly."""
    wanted = list(sizes)
    given = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, index in enumerate(order):
        given[index] = min(wanted[index], room // (len(order) - place))
        room -= given[index]
    return given
