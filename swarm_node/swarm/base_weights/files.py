"""Models on this machine's disk: what a directory holds, and where models from members are kept.

    HF_HOME/swarm-node/<digest>/            the model's files, whole and checked, and listing.json
    HF_HOME/swarm-node/<digest>.partial/    files of which pieces are missing
    HF_HOME/swarm-node/<digest>.json        the listing of a model that lies elsewhere
    HF_HOME/swarm-node/<digest>.checked     a listing, and size, time and inode of the files that were read and right
    HF_HOME/swarm-node/<digest>.name        what a swarm of this machine calls the model
    HF_HOME/swarm-node/<digest>.lock        held by the process that fetches the model

All runs on a machine share them. Nothing here is ever deleted: that is up to the user, as with the hub's own cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from swarm_node.errors import UserError
from swarm_node.say import Say
from swarm_node.storage.rundir import sync
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.manifest import ManifestModel
from swarm_protocol.model_listing import (
    MAX_LISTING_BYTES,
    PIECE_BYTES,
    ListedFile,
    ModelListing,
    decode_listing,
    digest_of,
    encode_listing,
    names_of,
)

LISTING = "listing.json"
STARTER = "starter"  # the name, in `policy.model`, of the model that this package contains
SPARE_BYTES = 256 * 2**20  # disk space that is left free for the run itself
MUCH_BYTES = 64 * 2**20  # reading more than this takes a while: the node says so, and keeps the result
Mark = tuple[int, int, int]
"""Size of a file in bytes, time of its last change [ns], and its inode. While they are the same, so is its content."""


@dataclass(frozen=True)
class Piece:
    """A part of one file of a model."""

    sha256: str
    name: str  # the name of the file
    start: int
    size: int


@dataclass(frozen=True)
class Model:
    """A model on this machine."""

    digest: str
    folder: Path
    listing: ModelListing


class Checked(msgspec.Struct, frozen=True):
    """A model somewhere on this machine that was read completely and was right."""

    listing: ModelListing
    files: dict[str, Mark]


def cache() -> Path:
    """The directory of models from members."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "swarm-node"


def starter_folder() -> Path:
    """The directory of the model that this package contains."""
    return Path(str(resources.files("swarm_node.policy"))) / "starter_model"


def pieces_of(listing: ModelListing) -> list[Piece]:
    """All pieces, file by file."""
    found: list[Piece] = []
    for file in listing.files:
        start = 0
        for sha256, size in zip(file.pieces, file.lengths(), strict=True):
            found.append(Piece(sha256, file.name, start, size))
            start += size
    return found


def read_piece(folder: Path, piece: Piece) -> bytes | None:
    """The piece, from its place in `folder`; `None` if that holds something else, or nothing."""
    try:
        with (folder / piece.name).open("rb") as file:
            file.seek(piece.start)
            data = file.read(piece.size)
    except OSError:
        return None
    return data if len(data) == piece.size and hashlib.sha256(data).hexdigest() == piece.sha256 else None


def list_model(folder: Path) -> ModelListing:
    """Read all files of a model. Raises UserError if members could not give it to each other, and OSError. They could
    not give an adapter, because its base is elsewhere."""
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} is a LoRA adapter: a swarm's model is whole; `swarm-node merge`, or name its base")
    paths = [folder / name for name in names_of(os.listdir(folder))]
    listing = ModelListing([ListedFile(path.name, list(_hashes(path)), path.stat().st_size) for path in paths])
    try:
        decode_listing(encode_listing(listing))
    except RemoteProtocolError as error:
        raise UserError(
            f"{folder} is no model that members could give to each other: {error.detail}; it needs a config.json and "
            "weights in safetensors, as `save_pretrained` writes them"
        ) from error
    return listing


def holds(folder: Path, listing: ModelListing) -> bool:
    """Whether `folder` holds all files of `listing`, byte for byte; it may hold others as well."""
    return _has_sizes(folder, listing) and all(read_piece(folder, piece) is not None for piece in pieces_of(listing))


def _has_sizes(folder: Path, listing: ModelListing) -> bool:
    try:
        return all((folder / file.name).stat().st_size == file.size for file in listing.files)
    except OSError:
        return False


def as_model(
    folder: Path, digest: str, size: int, listing: ModelListing | None, say: Say = lambda sentence: None
) -> Model | None:
    """The model with that digest and `size` bytes, if `folder` holds it. Reads all of it, unless the size differs or
    the files have not changed since they were last read. `listing`: the one with that digest, if it is known."""
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
    except (OSError, UserError):  # some other directory
        return None
    return Model(digest, folder, found)


def last_place(digest: str) -> Path | None:
    """The directory where the model with that digest was last read and right; it may have changed, or be gone."""
    before = _checked(digest)
    return None if before is None or not before.files else Path(min(before.files)).parent


def known_listing(digest: str) -> ModelListing | None:
    """The listing with that digest, if this machine has kept it."""
    for path in (cache() / digest / LISTING, cache() / f"{digest}.partial" / LISTING, cache() / f"{digest}.json"):
        try:
            with path.open("rb") as file:
                return decode_listing(file.read(MAX_LISTING_BYTES + 1), digest)
        except (OSError, RemoteProtocolError):  # not here, or damaged: members are asked for it
            continue
    return None


def remember(listing: ModelListing, folder: Path) -> str:
    """Keep the listing of the model in `folder`, which may hold more files besides, and where it lies: this machine
    gives it to members from there. Returns its digest. Raises OSError."""
    data = encode_listing(listing)
    digest = digest_of(data)
    cache().mkdir(parents=True, exist_ok=True)
    (cache() / f"{digest}.json").write_bytes(data)
    _note(digest, Checked(listing, _marks(folder, [file.name for file in listing.files])))
    return digest


def cached_model(digest: str) -> Model | None:
    """A model from members, which was checked when it arrived; only the sizes of its files are checked again."""
    listing, folder = known_listing(digest), cache() / digest
    return Model(digest, folder, listing) if listing is not None and _has_sizes(folder, listing) else None


def _marks(folder: Path, names: Iterable[str]) -> dict[str, Mark]:
    """Path -> mark of each file. Raises OSError."""
    found = [(str(folder.absolute() / name), (folder / name).stat()) for name in names]
    return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in found}


def _checked(digest: str) -> Checked | None:
    try:
        with (cache() / f"{digest}.checked").open("rb") as file:
            before = msgspec.json.decode(file.read(2 * MAX_LISTING_BYTES), type=Checked)
        decode_listing(encode_listing(before.listing), digest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RemoteProtocolError):
        return None  # none, or damaged: the model is read again
    return before


def _note(digest: str, checked: Checked) -> None:
    """Keep `checked`, if there is room; without it, the files are read again next time."""
    new = cache() / f"{digest}.{os.getpid()}.new"
    with suppress(OSError, UnicodeEncodeError):  # a path that is not text
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


class Draft:
    """A model in `folder` of which pieces are missing. What has arrived stays, also if the process is killed."""

    def __init__(self, folder: Path, listing: ModelListing) -> None:
        """Reads what an earlier process left there, and counts as missing what is not right."""
        self._folder = folder
        self._listing = listing
        self._places: dict[str, list[Piece]] = {}
        """sha256 -> where that piece is missing, in the order of the files; equal pieces are fetched once."""
        for piece in pieces_of(listing):
            if read_piece(folder, piece) is None:
                self._places.setdefault(piece.sha256, []).append(piece)

    @property
    def missing(self) -> dict[str, int]:
        """sha256 -> bytes of each piece to fetch."""
        return {sha256: places[0].size for sha256, places in self._places.items()}

    @property
    def missing_bytes(self) -> int:
        """Bytes that the missing pieces will take on disk."""
        return sum(piece.size for places in self._places.values() for piece in places)

    def take_from(self, folders: Sequence[Path]) -> None:
        """Copy the pieces that lie in files of the same name elsewhere on this machine."""
        for folder in folders:
            for piece in [piece for places in self._places.values() for piece in places]:
                if piece.sha256 in self._places and (data := read_piece(folder, piece)) is not None:
                    self.keep(piece.sha256, data)

    def keep(self, sha256: str, data: bytes | bytearray) -> None:
        """Write a piece, which was checked, to its places. Raises OSError."""
        for piece in self._places[sha256]:
            descriptor = os.open(self._folder / piece.name, os.O_WRONLY | os.O_CREAT, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(piece.start)
                file.write(data)
        del self._places[sha256]

    def finish(self, folder: Path) -> None:
        """Move the model, of which no piece is missing, to `folder` as a whole."""
        assert not self._places
        for name in [*(file.name for file in self._listing.files), LISTING]:
            sync(self._folder / name)
        if folder.exists():  # damaged since it was put there
            shutil.rmtree(folder)
        self._folder.rename(folder)


@contextmanager
def only_process(model: ManifestModel, say: Say) -> Iterator[None]:
    """Only one process of this machine fetches `model`: others wait. The kernel releases the lock if that one dies."""
    cache().mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache() / f"{model.digest}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"another process of this machine is getting model {model.name}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
