"""A place for copies of checkpoints, at any URL that fsspec knows.

    URL/<swarm>/<owner>/<folder>/round-00000120/{*.safetensors, state.json, SHA256SUMS}

SHA256SUMS is written last and removed before anything is overwritten: a copy without it does not exist. Reading has
time limits, because drivers by themselves wait for up to half an hour. Writing has none: it goes on in the background.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

from swarm_node.errors import TemporaryError, UserError
from swarm_node.install import extra_command
from swarm_node.storage.names import NAME, order

GROWTH_CHECK_S = 0.2  # time between two looks at whether a file that is read has grown
ANSWER_S = 60.0  # longest wait for a list, or for the next bytes of a file
CHECKPOINTS = "checkpoints"  # the folder of whole policies; those of a crew's stages are `stages/<number>`
NEEDED = {"state.json", "SHA256SUMS"}
FILE = re.compile(
    rf"([^/]+)/({CHECKPOINTS}|stages/[0-9]{{1,5}})/(round-[0-9]{{8,}}(?:-[0-9]+)?)/"
    r"([a-z0-9_-]+\.safetensors|state\.json|SHA256SUMS)"
)
# URL scheme -> the extra of this package that installs its driver
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

T = TypeVar("T")


class Copy(NamedTuple):
    """A whole copy of one checkpoint."""

    owner: str
    folder: str
    name: str
    files: frozenset[str]

    @property
    def place(self) -> str:
        """The path of its directory, from `Bucket.root`."""
        return f"{self.owner}/{self.folder}/{self.name}"


class Bucket:
    """The copies of one swarm's runs."""

    def __init__(self, url: str, swarm: str) -> None:
        """Raises UserError if no driver for the URL is installed, or if a local folder does not exist."""
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        scheme = url.partition(":")[0]
        # Otherwise gcsfs asks by gRPC what kind of bucket it is: a minute each time where nobody answers.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        try:
            self.fs, place = fsspec.core.url_to_fs(url)
        except ImportError as error:
            extra = EXTRAS.get(scheme)
            package = extra_command(extra) if extra else f"the driver of fsspec for {scheme}"
            raise UserError(f"--checkpoint-to {url} needs a package: {package}") from error
        except ValueError as error:
            raise UserError(f"--checkpoint-to {url}: {error}; use file://, s3://, gs:// or az://") from error
        self.place: str = place  # path of the URL on its file system
        self.root = f"{place.rstrip('/')}/{swarm[:16]}"
        self._local = isinstance(self.fs, LocalFileSystem)
        self._has_folders = scheme not in EXTRAS
        try:
            there = answered_in_time(self._is_there)
        except TimeoutError as error:
            raise TemporaryError(f"--checkpoint-to {url}: {error}") from error
        if not there:
            raise TemporaryError(
                f"--checkpoint-to {place if self._local else url}: there is no such folder; mount the share that it is "
                f"on, or make it there: mkdir {shlex.quote(place)}"
            )

    def copies(self) -> list[Copy]:
        """All whole copies. Raises TimeoutError, or what the driver raises for a place that cannot be read."""
        files: dict[tuple[str, str, str], set[str]] = {}
        try:
            paths = answered_in_time(self._paths)
        except FileNotFoundError:
            return []
        for path in paths:
            if match := FILE.fullmatch(path.removeprefix(self.root).lstrip("/")):
                files.setdefault((match[1], match[2], match[3]), set()).add(match[4])
        return [Copy(*key, frozenset(names)) for key, names in files.items() if names >= NEEDED]

    def sizes(self, copy: Copy) -> dict[str, int]:
        """Bytes of each file of a copy. Raises TimeoutError, or what the driver raises."""
        source, info = f"{self.root}/{copy.place}", self.fs.info
        return answered_in_time(lambda: {file: int(info(f"{source}/{file}")["size"] or 0) for file in copy.files})

    def get(self, copy: Copy, file: str, target: Path) -> None:
        """Fetch one file. Raises TimeoutError once nothing more of it comes, or what the driver raises."""
        answered_in_time(
            lambda: self.fs.get_file(f"{self.root}/{copy.place}/{file}", str(target)),
            lambda: target.stat().st_size if target.exists() else 0,
            f"nothing more of {copy.place}/{file}",
        )

    def put(self, checkpoint: Path, place: str) -> None:
        """Copy the files of a checkpoint to `place`, unless they are there. Raises what the driver raises."""
        there, sums = f"{self.root}/{place}", (checkpoint / "SHA256SUMS").read_bytes()
        self.fs.invalidate_cache()
        try:
            same = self.fs.info(f"{there}/SHA256SUMS")["size"] == len(sums)
            if same and self.fs.cat_file(f"{there}/SHA256SUMS") == sums:
                return
            self.fs.rm_file(f"{there}/SHA256SUMS")
        except FileNotFoundError:
            pass  # nothing is there
        if not self._is_there():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.place)
        if self._has_folders:  # a cloud's bucket has none, and we may lack the right to make or to see buckets
            self.fs.makedirs(there, exist_ok=True)
        for file in sorted(checkpoint.iterdir(), key=lambda file: file.name == "SHA256SUMS"):
            self.fs.put_file(str(file), f"{there}/{file.name}")

    def prune(self, place: str, names: Collection[str], most: int) -> None:
        """Remove copies in `place`, except `names` and the newest others that make `most` with them."""
        self.fs.invalidate_cache()
        there = f"{self.root}/{place}"
        others = {path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(there, detail=False)} - {*names}
        room = most - len(names)
        for name in sorted(filter(NAME.fullmatch, others), key=lambda name: order(Path(name)), reverse=True):
            if room and self.fs.exists(f"{there}/{name}/SHA256SUMS"):
                room -= 1
            else:
                self.fs.rm(f"{there}/{name}", recursive=True)

    def _paths(self) -> list[str]:
        """The paths of all files of the swarm."""
        if not self._local:
            self.fs.invalidate_cache()
            return list(self.fs.find(self.root))

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # a running node has removed an old copy meanwhile
                raise error

        # fsspec's own driver takes a folder that cannot be read for an empty one.
        found = os.walk(self.root, onerror=failed)
        return sorted(f"{folder}/{file}" for folder, _, files in found for file in files)

    def _is_there(self) -> bool:
        """Whether a local folder exists. If it does not, a share may not be mounted: all copies would seem to be lost,
        and new ones would fill the disk beneath."""
        try:
            if self._local:
                os.stat(self.place)
        except OSError as error:  # of other errors, reading or writing will say what is wrong
            return not isinstance(error, FileNotFoundError | NotADirectoryError)
        return True


def answered_in_time(work: Callable[[], T], grown: Callable[[], int] = lambda: 0, late: str = "no answer") -> T:
    """Return what `work` returns, or raise what it raises. Raises TimeoutError if `grown` returns the same number for
    ANSWER_S. `work` then goes on in a thread of its own."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="bucket-read", daemon=True).start()
    size, until = grown(), time.monotonic() + ANSWER_S
    while not done.done() and (left := until - time.monotonic()) > 0:
        wait({done}, min(left, GROWTH_CHECK_S))
        if (now := grown()) != size:
            size, until = now, time.monotonic() + ANSWER_S
    if not done.done():
        raise TimeoutError(f"{late} within {ANSWER_S:.0f} s")
    return done.result()
