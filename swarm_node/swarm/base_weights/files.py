"""Models on this machine's disk: what is in a directory, and where those that came from members are kept.

    HF_HOME/swarm-node/<digest>/            the model's files, whole and checked, and listing.json
    HF_HOME/swarm-node/<digest>.partial/    on their way: `have` counts the pieces that are in, one number a line
    HF_HOME/swarm-node/<digest>.json        the listing of a model that lies elsewhere
    HF_HOME/swarm-node/<digest>.checked     likewise, and what its files were like when they were read and found right
    HF_HOME/swarm-node/<digest>.lock        held by the process that fetches it

All runs on a machine share them. Nothing in here is ever removed: that is up to the user, as with the hub's own cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from protocol.errors import RemoteProtocolError
from protocol.model_listing import (
    MAX_LISTING_BYTES,
    PIECE_BYTES,
    ListedFile,
    ModelListing,
    decode_listing,
    digest_of,
    encode_listing,
    names_of,
)
from swarm_node.errors import UserError

LISTING = "listing.json"
STARTER = "starter"
"""As `policy.model` calls the model that is in this package."""
SPARE_BYTES = 256 * 2**20
"""Of the disk, left for the run itself."""
MUCH_BYTES = 64 * 2**20
"""To read more than that takes a moment: it is said, and what was found is remembered."""
Mark = tuple[int, int, int]
"""Bytes of a file, when it was changed last [ns] and its inode: while they stay the same, so does what is in it."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Piece:
    """A part of one file of a model."""

    number: int
    """Counted over all files."""
    sha256: str
    name: str
    """Of the file."""
    start: int
    size: int


@dataclass(frozen=True)
class Model:
    """A model on this machine."""

    digest: str
    folder: Path
    listing: ModelListing


class Checked(msgspec.Struct, frozen=True):
    """A model somewhere on this machine that was read, whole, and was right."""

    listing: ModelListing
    files: dict[str, Mark]


def cache() -> Path:
    """Where models that came from members are kept."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "swarm-node"


def starter_folder() -> Path:
    """Where the starter policy that ships with this package lies."""
    return Path(str(resources.files("swarm_node.policy"))) / "starter_model"


def pieces_of(listing: ModelListing) -> list[Piece]:
    """All of them, file by file."""
    found: list[Piece] = []
    for file in listing.files:
        start = 0
        for sha256, size in zip(file.pieces, file.lengths(), strict=True):
            found.append(Piece(len(found), sha256, file.name, start, size))
            start += size
    return found


def read_piece(folder: Path, piece: Piece) -> bytes:
    """What is there in its place, right or not. Raises OSError."""
    with (folder / piece.name).open("rb") as file:
        file.seek(piece.start)
        return file.read(piece.size)


def is_right(piece: Piece, data: bytes | bytearray) -> bool:
    """Whether these are its bytes."""
    return len(data) == piece.size and hashlib.sha256(data).hexdigest() == piece.sha256


def list_model(folder: Path) -> ModelListing:
    """Read all of a model's files. Raises UserError if it is none that members could give to each other, and OSError.

    An adapter is none: its base is elsewhere.
    """
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} is a LoRA adapter: a swarm's model is whole; `swarm-node merge`, or name its base")
    files = [
        ListedFile(name, list(_hashes(folder / name)), (folder / name).stat().st_size)
        for name in names_of(os.listdir(folder))
    ]
    listing = ModelListing(files)
    try:
        decode_listing(encode_listing(listing))
    except RemoteProtocolError as error:
        raise UserError(
            f"{folder} is no model that members could give to each other: {error.detail}; it needs a config.json and "
            "weights in safetensors, as `save_pretrained` writes them"
        ) from error
    return listing


def has_piece(folder: Path, piece: Piece) -> bool:
    """Whether the piece is in its place in `folder`, byte for byte."""
    try:
        return is_right(piece, read_piece(folder, piece))
    except OSError:
        return False


def holds(folder: Path, listing: ModelListing) -> bool:
    """Whether `folder` holds all files of `listing`, byte for byte; it may hold others as well."""
    try:
        sizes = [(folder / file.name).stat().st_size for file in listing.files]
    except OSError:
        return False
    same = sizes == [file.size for file in listing.files]
    return same and all(has_piece(folder, piece) for piece in pieces_of(listing))


def as_model(
    folder: Path, digest: str, size: int, listing: ModelListing | None, say: Say = lambda sentence: None
) -> Model | None:
    """The model of that digest, which has `size` bytes, if `folder` holds it. Reads all of it, unless its size alone
    tells that it is another, or its files are those that were read before. `listing` is that of the digest, if it is
    known."""
    try:
        names = names_of(os.listdir(folder)) if listing is None else [file.name for file in listing.files]
        marks = _marks(folder, names)
        there = sum(mark[0] for mark in marks.values())
        if there != (size if listing is None else listing.size):
            return None
        before = _checked(digest)
        if before is not None and before.files == marks:
            return Model(digest, folder, before.listing)
        if there > MUCH_BYTES:
            say(f"reading {there / 2**30:.1f} GiB in {folder}, to check that they are the swarm's model")
        if listing is None:
            found = list_model(folder)
            right = digest_of(encode_listing(found)) == digest
        else:
            found, right = listing, holds(folder, listing)
        if not right:
            return None
        if there > MUCH_BYTES and _marks(folder, names) == marks:
            _note(digest, Checked(found, marks))
    except (OSError, UserError):  # somebody's directory: it is not this one
        return None
    return Model(digest, folder, found)


# --------------------------------------------------------------------- the cache


def known_listing(digest: str) -> ModelListing | None:
    """That of a model that this machine has had to do with."""
    for path in (cache() / digest / LISTING, cache() / f"{digest}.partial" / LISTING, cache() / f"{digest}.json"):
        try:
            with path.open("rb") as file:
                return decode_listing(file.read(MAX_LISTING_BYTES + 1), digest)
        except (OSError, RemoteProtocolError):  # not here, or damaged: then it is asked for
            continue
    return None


def remember(listing: ModelListing) -> str:
    """Keep the listing of a model that lies elsewhere, for members on this machine that have the same and more files;
    its digest. Raises OSError."""
    data = encode_listing(listing)
    digest = digest_of(data)
    cache().mkdir(parents=True, exist_ok=True)
    (cache() / f"{digest}.json").write_bytes(data)
    return digest


def cached_model(digest: str) -> Model | None:
    """A model that came from members, which was checked when it did; files that were cut off since are noticed."""
    listing, folder = known_listing(digest), cache() / digest
    try:
        if listing is None or any((folder / file.name).stat().st_size != file.size for file in listing.files):
            return None
    except OSError:
        return None
    return Model(digest, folder, listing)


def _marks(folder: Path, names: Iterable[str]) -> dict[str, Mark]:
    """Of these files, by their paths. Raises OSError."""
    found = [(str(folder.absolute() / name), (folder / name).stat()) for name in names]
    return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in found}


def _checked(digest: str) -> Checked | None:
    """What is remembered of the model of that digest."""
    try:
        with (cache() / f"{digest}.checked").open("rb") as file:
            before = msgspec.json.decode(file.read(2 * MAX_LISTING_BYTES), type=Checked)
        decode_listing(encode_listing(before.listing), digest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RemoteProtocolError):  # none, or damaged: read again
        return None
    return before


def _note(digest: str, checked: Checked) -> None:
    """Remember it, if there is room: without, the files are read again next time."""
    new = cache() / f"{digest}.{os.getpid()}.new"
    with suppress(OSError, UnicodeEncodeError):  # of a path that is no text
        cache().mkdir(parents=True, exist_ok=True)
        try:
            new.write_bytes(msgspec.json.encode(checked))
            new.replace(cache() / f"{digest}.checked")
        finally:
            new.unlink(missing_ok=True)


def _hashes(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            yield hashlib.sha256(data).hexdigest()
