"""The listing of a model's files, which makes it safe to take them from anybody.

    piece    PIECE_BYTES of a file, the last one fewer
    listing  canonical JSON (sorted keys, no blanks) of {"files": [{"name", "pieces": [sha256, ...], "size"}]}, by name
    digest   sha256 of the listing: in the manifest, and so behind the swarm's id

    asker --(head: sha256)--> member          member --(head | the listing, or the piece, of that sha256)--> asker

The link leads to the digest, so a listing from any peer can be checked, and each piece as it arrives. A wrong piece is
noticed at once, and so is its sender.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm_protocol.codec import decode_as
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import Hash64

MODEL_METHOD = "model"
"""Exchange in which a peer gets a listing or a piece of the swarm's model from another, and sends no body."""
PIECE_BYTES = 8 * 2**20  # large enough that a stream comes up to speed, small enough that a few can be held in memory
MAX_MODEL_BYTES = 256 * 2**30  # all files together: a model of 128 billion parameters in 16 bits
MAX_OTHER_BYTES = 64 * 2**20
"""A file that is no weights, which libraries parse whole: the largest tokenizers known have 33 MB."""
MAX_FILES = 512  # shards of the largest model have half a gigabyte then
MAX_LISTING_BYTES = 4 * 2**20  # the listing of a model of `MAX_MODEL_BYTES` takes 2.3 MB

OTHER_NAMES = frozenset(
    {
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
    }
)
"""Files besides weights that loading reads: data alone, neither code nor pickles."""
WHOLE_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


class ListedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a model."""

    name: Annotated[str, Meta(max_length=64)]  # name in the model's directory, which has no subdirectories
    pieces: Annotated[list[Hash64], Meta(min_length=1, max_length=MAX_MODEL_BYTES // PIECE_BYTES)]
    """sha256 of each piece."""
    size: Annotated[int, Meta(ge=1, le=MAX_MODEL_BYTES)]

    def lengths(self) -> list[int]:
        """Bytes of each piece."""
        return [min(PIECE_BYTES, self.size - start) for start in range(0, self.size, PIECE_BYTES)]


class ModelListing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model."""

    files: Annotated[list[ListedFile], Meta(min_length=2, max_length=MAX_FILES)]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


_decoder = msgspec.json.Decoder(ModelListing)


def is_weights(name: str) -> bool:
    """Whether a file of that name holds tensors."""
    return name == WHOLE_WEIGHTS or SHARD.fullmatch(name) is not None


def names_of(found: Iterable[str]) -> list[str]:
    """The names among `found`, sorted, that loading reads. Shards are left out if there is a file of all weights."""
    names = {name for name in found if name in OTHER_NAMES or is_weights(name)}
    if WHOLE_WEIGHTS in names:
        names = {name for name in names if name != WEIGHTS_INDEX and not SHARD.fullmatch(name)}
    return sorted(names)


def encode_listing(listing: ModelListing) -> bytes:
    """The canonical form of a listing."""
    return msgspec.json.encode(listing, order="deterministic")


def digest_of(listing: bytes) -> str:
    """sha256 in hexadecimal."""
    return hashlib.sha256(listing).hexdigest()


def decode_listing(data: bytes, digest: str | None = None) -> ModelListing:
    """The listing of that digest, if any is wanted. Raises RemoteProtocolError: size, digest, schema."""
    if len(data) > MAX_LISTING_BYTES:
        raise RemoteProtocolError("size", f"listing of {len(data)} bytes, allowed are {MAX_LISTING_BYTES}")
    if digest is not None and digest_of(data) != digest:
        raise RemoteProtocolError("digest", "another listing")
    listing: ModelListing = decode_as(_decoder, data)
    if encode_listing(listing) != data:  # a member that encodes it again would name another digest
        raise RemoteProtocolError("schema", "not in the canonical form")
    names = [file.name for file in listing.files]
    if names != names_of(names):
        raise RemoteProtocolError("schema", "files that no model has, or not in order")
    if "config.json" not in names or not any(map(is_weights, names)):
        raise RemoteProtocolError("schema", "no config.json, or no weights")
    for file in listing.files:
        if len(file.pieces) != len(file.lengths()):
            raise RemoteProtocolError("schema", f"{file.name}: {len(file.pieces)} pieces of {file.size} bytes")
        if file.size > MAX_OTHER_BYTES and not is_weights(file.name):
            raise RemoteProtocolError("size", f"{file.name} of {file.size} bytes, allowed are {MAX_OTHER_BYTES}")
    if listing.size > MAX_MODEL_BYTES:
        raise RemoteProtocolError("size", f"files of {listing.size} bytes, allowed are {MAX_MODEL_BYTES}")
    return listing
