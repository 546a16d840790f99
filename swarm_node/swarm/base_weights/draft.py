"""A model that is on its way to this machine's disk: which of its pieces are missing, and where each one goes.

What has arrived stays on disk (`files` says where), so a process that was killed goes on from there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from protocol.manifest import ManifestModel
from protocol.model_listing import ModelListing
from swarm_node.swarm.base_weights.files import LISTING, Piece, Say, cache, has_piece, pieces_of, read_piece


class Draft:
    """A model in `folder` of which some pieces are missing."""

    def __init__(self, folder: Path, listing: ModelListing) -> None:
        """Reads what an earlier process left there, and counts as missing what is not right."""
        self._folder = folder
        self._listing = listing
        self._places: dict[str, list[Piece]] = {}
        """sha256 -> where that piece is missing, in the order of the files; equal pieces are fetched once."""
        for piece in pieces_of(listing):
            if not has_piece(folder, piece):
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
                if piece.sha256 in self._places and has_piece(folder, piece):
                    self.keep(piece.sha256, read_piece(folder, piece))

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
            descriptor = os.open(self._folder / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if folder.exists():  # damaged since it was put there
            shutil.rmtree(folder)
        self._folder.rename(folder)


@contextmanager
def only_process(model: ManifestModel, say: Say) -> Iterator[None]:
    """Wait until no other process of this machine fetches `model`, and keep others waiting meanwhile. The kernel
    releases the lock of a process that dies."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{model.digest}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process of this machine is getting model {model.name}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
