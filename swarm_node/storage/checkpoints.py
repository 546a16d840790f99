"""State to resume from, on disk: atomic, checked, written in the background.

    checkpoints/round-00000120/
        policy.safetensors …   one file per group of tensors
        state.json             everything else, and the list of tensor files
        SHA256SUMS             written last: `sha256sum -c SHA256SUMS` checks a checkpoint by hand

A checkpoint appears by the rename of a complete and synced directory. A process that is killed leaves older checkpoints
as they were, and at most a `.tmp-*` directory that the next write removes. A checkpoint is used only if every digest is
right, and no file is parsed before its digest is checked. There is no pickle.

The best checkpoint, which best.json of the run names, stays beside the newest ones.

Left out: overwriting. A second checkpoint of the same round gets a name of its own (`round-00000120-1`), since a
directory cannot be replaced by another in one atomic move.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swarm_node.errors import CheckpointError, TemporaryError, UserError
from swarm_node.say import Warned
from swarm_node.storage.best import BEST, Best, read_best, write_best
from swarm_node.storage.names import MAX_STATE_BYTES, NAME, order
from swarm_node.storage.plain_files import open_plain, read_plain
from swarm_node.storage.room import check_room
from swarm_node.storage.rundir import os_error_text, sync

FORMAT = 1
WARN_AGAIN_S = 600.0  # least time between two warnings while writes fail
MAX_WRITTEN = 64  # complete checkpoints that wait for somebody to hear of them
# errors of the system that mean for good that a file of a checkpoint is missing
NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}

TensorFiles = Mapping[str, Mapping[str, Tensor]]
Copies = dict[str, tuple[dict[str, Tensor], dict[str, str]]]  # stem -> distinct tensors, alias -> name


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed every check."""

    round: int  # rounds completed when it was taken
    tensors: dict[str, dict[str, Tensor]]
    """File stem -> name -> tensor, on the CPU; tensors that shared their memory when saved are one object."""
    state: dict[str, Any]  # the saved state as JSON gives it back: tuples have become lists


class ForeignCheckpoint(CheckpointError):
    """The checkpoint is intact, but of another model or run."""


class CheckpointStore:
    """The checkpoints of one run. Making one touches no disk, so it serves readers as well."""

    def __init__(self, directory: Path, keep: int, report: Callable[[str], None]) -> None:
        """Keep the newest `keep` checkpoints. `report` gets sentences for the user, also from the writing thread."""
        self._directory = directory
        self._keep = keep
        self._report = report
        self.refused: dict[str, str] = {}  # names of checkpoints that `load_latest` did not take -> why
        self._last_good: int | None = None
        self.failure: str | None = None  # of the last write, in words
        self._warned_at = -math.inf
        self._best_failed = False
        self._writing: Future[None] | None = None
        self._good_at = time.monotonic()  # when the last checkpoint was complete; at first, when this start began
        self.written: deque[Path] = deque(maxlen=MAX_WRITTEN)
        """Complete checkpoints of this start, oldest first; a reader may empty it, from any thread."""

    def save(self, round: int, tensors: TensorFiles, state: dict[str, Any], best: Best | None = None) -> None:
        """Copy all tensors now and write them in the background, once an older write is over. A write that fails is
        reported, though not each time, leaves the older checkpoints alone and does not stop training; `close` raises if
        the last one failed. `state` must be JSON-able (TypeError otherwise). `best`: this is the best checkpoint so
        far, with its figures.
        """
        self.wait()
        document = {"format": FORMAT, "round": round, "files": sorted(tensors), "state": state}
        text = json.dumps(document, sort_keys=True).encode()
        copies = {stem: _copy(named) for stem, named in tensors.items()}
        writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._writing = writer.submit(self._write, round, copies, text, best)
        writer.shutdown(wait=False)  # its thread ends with this write

    def check_room(self, size: int, best: bool = False) -> None:
        """Raise UserError if there is no room for two checkpoints of `size` bytes and, if `best`, the best one, or for
        one beside those that exist: the newest goes only after the next is complete."""
        check_room(self._directory, size, len(self._list()), 3 if best else 2)

    @property
    def newest(self) -> Path | None:
        """The directory of the newest checkpoint, whether it is usable or not; None if there is none."""
        return found[-1] if (found := self._list()) else None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def age_s(self) -> float:
        """Seconds since a checkpoint was complete or, if none was, since this start began. From any thread."""
        return time.monotonic() - self._good_at

    @property
    def failed(self) -> bool:
        """Whether the last write is over and has failed."""
        return not self.busy and self.failure is not None

    @property
    def best_failed(self) -> bool:
        """Whether the last write of a best checkpoint is over and has failed: best.json names the one before."""
        return not self.busy and self._best_failed

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Finish writing. Raises UserError if the newest state could not be saved."""
        self.wait()
        if self.failure is not None:
            raise TemporaryError(self.failure)

    def load_latest(self, accept: Callable[[dict[str, Any]], str | None]) -> Checkpoint | None:
        """The newest usable checkpoint, or None if there is none; changes nothing on disk.

        `accept(state)` returns why a checkpoint does not belong to this run, or None if it does. A refused one is
        reported with its reason, and the next older one is tried. Raises UserError if none is usable and one is
        foreign: beginning anew here would mix two runs.
        """
        foreign = None
        while untried := [path for path in self._list() if path.name not in self.refused]:
            path = untried[-1]  # listed anew each time: a running node may be writing and pruning meanwhile
            try:
                checkpoint = read_checkpoint(path, accept)
            except CheckpointError as error:
                self.refused[path.name] = str(error)
                self._report(Warned(f"checkpoint {path.name} refused: {error}"))
                if isinstance(error, ForeignCheckpoint):
                    foreign = foreign or error
            else:
                self._last_good = checkpoint.round
                return checkpoint
        if foreign is not None:
            raise UserError(f"{self._directory.parent} belongs to another run: {foreign}; choose another --run-dir")
        return None

    def _write(self, round: int, copies: Copies, text: bytes, best: Best | None) -> None:
        self._best_failed = self._best_failed if best is None else True
        try:
            name = self._write_atomically(round, copies, text)
            self._last_good = round
            self._prune(round)
            if best is not None and self._name_best(best, name):
                self._prune(round)  # the best one until now
            self.written.append(self._directory / name)
        except OSError as error:
            good = "none yet" if self._last_good is None else f"round {self._last_good}"
            problem = os_error_text(error, self._directory)
            is_new = self.failure is None
            self.failure = f"checkpoint of round {round}: {problem} (last good checkpoint: {good})"
            if is_new or time.monotonic() - self._warned_at > WARN_AGAIN_S:
                self._warned_at = time.monotonic()
                self._report(Warned(self.failure))
        else:
            self._good_at = time.monotonic()
            if self.failure is not None:
                self._report(f"checkpoints are written again: round {round} is saved")
            self.failure = None

    def _name_best(self, best: Best, name: str) -> bool:
        """Let best.json name this checkpoint; whether it does. A failure is reported: the checkpoint is good all the
        same."""
        try:
            write_best(self._directory.parent, best, name)
        except OSError as error:
            problem = os_error_text(error, self._directory.parent / BEST)
            self._report(Warned(f"checkpoint of round {best.round} is not recorded as the best: {problem}"))
            return False
        self._best_failed = False
        return True

    def _write_atomically(self, round: int, copies: Copies, text: bytes) -> str:
        """Write a checkpoint; its name."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in self._directory.glob(".tmp-*"):
            shutil.rmtree(leftover)
        temporary = self._directory / f".tmp-{round:08}"
        temporary.mkdir()
        try:
            for stem, (unique, aliases) in copies.items():
                _save_tensors(unique, aliases, temporary / f"{stem}.safetensors")
            (temporary / "state.json").write_bytes(text)
            files = sorted(temporary.iterdir())
            sums = "".join(f"{_digest(file)}  {file.name}\n" for file in files)
            (temporary / "SHA256SUMS").write_text(sums)
            for file in [*files, temporary / "SHA256SUMS", temporary]:
                sync(file)
            same = [order(path)[1] for path in self._list() if order(path)[0] == round]
            name = f"round-{round:08}" + (f"-{max(same) + 1}" if same else "")
            temporary.rename(self._directory / name)
            sync(self._directory)
            return name
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well

    def _list(self) -> list[Path]:
        """All checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        return sorted((path for path in self._directory.iterdir() if NAME.fullmatch(path.name)), key=order)

    def _prune(self, round: int) -> None:
        """Remove old checkpoints, but neither the best one, nor refused ones, which are of another run, nor those of
        later rounds: neither may displace a good one."""
        best = read_best(self._directory.parent)
        ours = [path for path in self._list() if path.name not in self.refused and order(path)[0] <= round]
        for path in ours[: -self._keep]:
            if best is None or path.name != best.checkpoint:
                shutil.rmtree(path)


def read_checkpoint(path: Path, accept: Callable[[dict[str, Any]], str | None]) -> Checkpoint:
    """Check, then parse, one checkpoint directory; cheap checks first. Raises CheckpointError if it is torn,
    ForeignCheckpoint if `accept` refuses its state, UserError if it may not be read."""
    with _torn():
        sums = _sums(path)
        _check(path / "state.json", sums)
        document = json.loads(read_plain(path / "state.json", MAX_STATE_BYTES))
        if document["format"] != FORMAT:
            raise ForeignCheckpoint(f"it has format {document['format']}, this version reads format {FORMAT}")
        round, stems, state = document["round"], document["files"], document["state"]
    if round != order(path)[0] or not isinstance(state, dict) or not isinstance(stems, list):
        raise CheckpointError("malformed (state.json is of another round or shape)")
    if reason := accept(state):
        raise ForeignCheckpoint(reason)
    with _torn():
        for stem in stems:
            _check(path / f"{stem}.safetensors", sums)
        tensors = {stem: _load_tensors(path / f"{stem}.safetensors") for stem in stems}
    for name, tensor in tensors.get("policy", {}).items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{name} has values that are not finite")
    return Checkpoint(round, tensors, state)


@contextmanager
def _torn(codes: Collection[int] | None = None) -> Iterator[None]:
    """Turn errors of reading into CheckpointError: malformed content, and the system's errors in `codes` (None = all).
    A file that may not be read is not torn: UserError."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"no permission to read {error.filename}; change its owner or mode") from error
    except OSError as error:
        if codes is not None and error.errno not in codes:
            raise
        raise CheckpointError(f"{Path(error.filename or '').name}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"malformed ({type(error).__name__}: {error})") from error


def read_state(path: Path) -> dict[str, Any]:
    """The state in a state.json, whose digest and format are not checked. Raises CheckpointError and UserError."""
    with _torn():
        return dict(json.loads(read_plain(path, MAX_STATE_BYTES))["state"])


def _copy(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(copies on the CPU of the distinct tensors, alias -> name of tensors that share memory, as tied weights do)"""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in named.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in first:
            aliases[name] = first[memory]
            continue
        first[memory] = name
        unique[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return unique, aliases


def _save_tensors(unique: dict[str, Tensor], aliases: dict[str, str], path: Path) -> None:
    try:
        save_file(unique, path, metadata={"aliases": json.dumps(aliases)})
    except SafetensorError as error:  # an OSError, told in words only
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(path)) from error


def _load_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def _sums(path: Path) -> dict[str, str]:
    """File name -> digest, as SHA256SUMS has it."""
    lines = read_plain(path / "SHA256SUMS", MAX_STATE_BYTES).decode().splitlines()
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}


def _check(path: Path, sums: dict[str, str]) -> None:
    if _digest(path) != sums.get(path.name):
        raise CheckpointError(f"{path.name} does not have the digest in SHA256SUMS")


def check_files(path: Path) -> None:
    """Check the digests of a checkpoint directory without parsing its content. Raises CheckpointError if it is torn,
    UserError if it may not be read, and OSError for an error that may pass."""
    with _torn(NOT_THERE):
        sums = _sums(path)
        for name in {"state.json", *sums}:
            _check(path / Path(name).name, sums)


def _digest(path: Path) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
