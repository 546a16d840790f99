"""The directory of a run, held by one process at a time.

    runs/<name>/
        config.toml      the resolved configuration of this machine: a crew may use other options
        config-0001.toml settings of earlier rounds, from before they were changed; oldest first
        metrics.jsonl    one line per round; older rounds share lines
        events.jsonl     what happened, in sentences; the newest ones
        samples.jsonl    some questions with their answers and rewards; the newest ones
        checkpoints/     state to resume from
        best.json        the name of the checkpoint with the best held-out figures
        stages/          checkpoints of stages that the node holds for its crew, by number
        export/          weights for others to load
        plots/           pictures
        lock             process id of the holder, and an id of its machine's present uptime
        paused           exists while the owner has the run paused; the Unix time of its end, if that is known
        waits            why the run is paused now, for whatever reason; exists while it is
        stop             exists from `swarm-node stop` until the node has seen it
        health.json      where the node answers /healthz; exists while it runs

    and, for a node in a swarm,

        identity.key     its private key
        swarm.toml       the swarm's manifest
        swarm.json       the swarm as seen from here, for `swarm-node status`
        peers.json       addresses of peers seen
        ports.json       ports that were free instead of those wanted
        offers.jsonl     groups that were offered and chosen, if that is recorded
        files/           question files of the manifest
        peers/           the other processes of `local --stages`

Loads no torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from swarm_node.errors import SwarmNodeError, TemporaryError, UserError
from swarm_node.storage.lock_file import holder_of, lock_for_this
from swarm_node.storage.nearby import names_near
from swarm_node.storage.plain_files import check_plain, read_plain

RUN_FILES = {  # of a directory in which a run began, but did not get as far as its config.toml
    *("lock", "metrics.jsonl", "events.jsonl", "samples.jsonl", "checkpoints", "best.json", "stages", "export"),
    *("identity.key", "swarm.toml", "swarm.json", "peers.json", "ports.json", "offers.jsonl", "files"),
    *("plots", "peers", "paused", "waits", "stop", "health.json", "page", "wandb-id.txt", "trackio-id.txt"),
}
BOOTSTRAP = "bootstrap"  # role in swarm.json of a run that trains nothing
PAGE = "page"  # role in swarm.json of a directory that holds only the page of a swarm
MAX_STATUS_BYTES = 16 << 20  # a longer swarm.json is not read
MAX_NOTE_BYTES = 1 << 16  # a longer waits or health.json is not read
HALF_WRITTEN = re.compile(  # names of files that a killed process leaves
    r"(config|swarm|paused|waits|stop|health|metrics|events|samples|best|offers)\.tmp|(peers|ports|identity\.[0-9]+)\.new"
)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM}
NOT_A_DIRECTORY = {errno.EEXIST, errno.ENOTDIR}
CANNOT_LOCK = {errno.ENOLCK, errno.ENOTSUP}


class RunDir(AbstractContextManager["RunDir"]):
    """The paths of a run. Making one touches no disk; the run itself calls `open`, readers do not."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.plots = self.path / "plots"
        self.identity = self.path / "identity.key"
        self.swarm = self.path / "swarm.toml"
        self.status = self.path / "swarm.json"
        self.peers = self.path / "peers.json"
        self.ports = self.path / "ports.json"
        self.files = self.path / "files"
        self.paused = self.path / "paused"
        self.waits = self.path / "waits"
        self.stop = self.path / "stop"
        self.health = self.path / "health.json"
        self._lock: int | None = None
        self._made: list[Path] = []  # directories that this start made; empty once the run has begun

    @property
    def quoted(self) -> str:
        """The path as a command line takes it."""
        return shlex.quote(str(self.path))

    @property
    def exists(self) -> bool:
        """Whether a run was ever started here."""
        return self.config.is_file()

    @property
    def has_trained(self) -> bool:
        """Whether there are trained weights: checkpoints of a whole policy or of stages."""
        return any(self.checkpoints.glob("round-*")) or any((self.path / "stages").glob("*/round-*"))

    @property
    def has_rounds(self) -> bool:
        """Whether a round has ended, even if no checkpoint was written after it."""
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    @property
    def in_use(self) -> bool:
        """Whether a process holds the run."""
        try:
            lock = os.open(self.path / "lock", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # filelock has no lock that several readers share
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    @property
    def holder(self) -> str:
        """The process id of who holds the run, or held it last; `unknown` if it is not written down."""
        return holder_of(self.path / "lock")

    def wrote(self, path: Path) -> bool:
        """Whether the process that holds the run, or held it last, has written this file of it."""
        try:
            return path.stat().st_mtime_ns >= (self.path / "lock").stat().st_mtime_ns
        except OSError:
            return False

    @property
    def has_begun(self) -> bool:
        """Whether the process that holds the run, or held it last, has done more than load."""
        return any(map(self.wrote, (self.status, self.metrics, self.waits)))

    def check_exists(self) -> None:
        """Raises UserError unless a run was ever started here."""
        if not self.exists:
            why = "it has no config.toml" if self.path.exists() else "there is no such directory"
            raise UserError(f"no run in {self.path} ({why}){names_near(self.path)}")

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """The run directory at `path`, taken."""
        return cls(path).take()

    def take(self) -> RunDir:
        """Lock the directory for this process until `close` or the process ends. Raises UserError if another process
        holds it, or if it cannot be written."""
        with os_errors_explained(self.path):
            self._made = [folder for folder in (self.path, self.path.parent) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_content()
            self._take_lock()
            try:
                for folder in (self.checkpoints, self.export, self.plots):
                    _make(folder)
            except OSError:
                self.close()
                raise
        for left in (self.waits, self.health, self.stop):  # by a process that was killed
            with suppress(OSError):
                left.unlink(missing_ok=True)
        return self

    def check_usable(self) -> None:
        """Raise UserError if `open` would, as far as can be told while leaving nothing there."""
        with os_errors_explained(self.path):
            there = existing_part(self.path)
            if not there.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(there))
            if not os.access(there, os.W_OK | os.X_OK):
                is_fixed = os.statvfs(there).f_flag & os.ST_RDONLY
                raise OSError(errno.EROFS if is_fixed else errno.EACCES, "not writable", str(there))
            if self.path.exists():
                self._check_content()
            else:
                self._try_making(there)
        if self.in_use:
            raise self._used()

    def _try_making(self, there: Path) -> None:
        """Make a directory in `there`, and remove it: below /proc that fails, though access looks allowed."""
        try:
            os.rmdir(tempfile.mkdtemp(dir=there))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _check_content(self) -> None:
        names = set(os.listdir(self.path))
        ours = {name for name in names if HALF_WRITTEN.fullmatch(name)} | names & RUN_FILES
        if not self.exists and names - ours:
            raise UserError(f"{self.path} holds other things than a run; choose another --run-dir")
        for own in (self.path / name for name in sorted(ours)):
            check_plain(own, self.identity)

    def _used(self) -> UserError:
        return TemporaryError(
            f"{self.path} is in use by process {self.holder}: stop it, or choose another --name or --run-dir"
        )

    def _take_lock(self) -> None:
        """Lock the run. The kernel drops the lock when the process dies, so a leftover file does no harm."""
        self._lock = lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_for_this(lock)
        except BlockingIOError as error:
            self.close()
            raise self._used() from error
        except OSError:
            self.close()
            raise

    def write(self, name: str, text: str) -> None:
        """Replace the file `name`, all of it or nothing, also in a power cut. Raises UserError."""
        with os_errors_explained(self.path / name):
            _replace(self.path / name, text, safely=True)

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace swarm.json, all of it or nothing. It is only for looking at: an error is ignored."""
        with suppress(OSError):
            _replace(self.status, json.dumps(status, indent=1) + "\n", safely=False)

    def read_role(self) -> str:
        """The role in swarm.json; empty if it has none, or cannot be read."""
        return str(self._of_status("role") or "")

    def read_swarm_name(self) -> str:
        """The name of its swarm in swarm.json; empty if it has none, or cannot be read."""
        return str(self._of_status("swarm_name") or "")

    def read_uses(self) -> Any:
        """What members said that they used of this node's groups, in swarm.json; empty if it has none."""
        return self._of_status("uses") or {}

    def _of_status(self, key: str) -> Any:
        """None if it is not there."""
        try:
            return json.loads(read_plain(self.status, MAX_STATUS_BYTES))[key]
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            return None

    def write_paused(self, until: float | None) -> None:
        """Ask the process of this run to pause. Raises OSError."""
        _replace(self.paused, "" if until is None else f"{until:.0f}\n", safely=False)

    def write_stop(self) -> None:
        """Ask the process of this run to stop. Raises OSError."""
        _replace(self.stop, "", safely=False)

    def take_stop(self) -> bool:
        """Whether this process was asked to stop, since the last call."""
        try:
            self.stop.unlink()
        except OSError:
            return False
        return True

    def write_waits(self, why: str) -> None:
        """Write why the run is paused; empty = it is not. It is only for looking at: an error is ignored."""
        with suppress(OSError):
            if why:
                _replace(self.waits, f"{why}\n", safely=False)
            else:
                self.waits.unlink(missing_ok=True)

    def read_waits(self) -> str:
        """Why the run is paused; empty = it is not. Valid while the run is `in_use`."""
        try:
            return read_plain(self.waits, MAX_NOTE_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    @contextmanager
    def answering(self, listen: str, port: int) -> Iterator[None]:
        """Within the context, tell readers where the node answers /healthz; port 0 = nowhere. Errors are ignored."""
        with suppress(OSError):
            _replace(self.health, json.dumps({"listen": listen, "port": port}) + "\n", safely=False)
        try:
            yield
        finally:
            with suppress(OSError):
                self.health.unlink(missing_ok=True)

    def read_health(self) -> tuple[str, int] | None:
        """(IP address, port or 0) at which the node answers /healthz; None if unknown, or no process holds the run."""
        if not self.in_use:  # a file that is there was left by a process that was killed
            return None
        try:
            said = json.loads(read_plain(self.health, MAX_NOTE_BYTES))
            return str(said["listen"]), int(said["port"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def close(self) -> None:
        """Release the lock. Its file stays, since removing it would race with the next holder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def keep(self) -> None:
        """The run has begun: an error no longer removes what it made."""
        self._made = []

    def abandon(self) -> None:
        """Remove what this start made if it has not begun and wrote nothing but its log. The lock stays."""
        made = {self.path / "lock", self.events, self.checkpoints, self.export, self.plots, self.health}
        if self._made and all(path in made for path in self.path.rglob("*")):
            self._remove()

    def undo(self) -> None:
        """Remove what this start made if it has not begun, whatever it wrote."""
        self._remove()

    def _remove(self) -> None:
        """Remove the directories that this start made; none once the run has begun."""
        made, self._made = self._made, []
        if made:
            shutil.rmtree(made[0], ignore_errors=True)
        for parent in made[1:]:  # `runs`, if nothing else is in it by now
            with suppress(OSError):
                parent.rmdir()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Release the lock. A start that was refused, or interrupted before it wrote anything, leaves no directory."""
        if isinstance(error, SwarmNodeError):
            self._remove()
        elif isinstance(error, KeyboardInterrupt):
            self.abandon()
        self.close()


def _replace(path: Path, text: str, safely: bool) -> None:
    """Replace a file in one step, so that readers see the old or the new content. `safely`: sync it to disk."""
    temporary = path.with_suffix(".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        with open(descriptor, "w") as file:  # a stranger's run may have a link or a pipe there
            file.write(text)
            if safely:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_new_directory(path: Path, make: bool = True) -> None:
    """Raises UserError unless the directory `path` is new or empty. Makes it unless `make` is off."""
    with os_errors_explained(path):
        if make:
            _make(path)
        if path.exists() and any(path.iterdir()):
            raise UserError(f"{path} is not empty; choose another directory")


def _make(folder: Path) -> None:
    """Make a folder unless it exists. Raises OSError, also if it may not be written."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "not writable", str(folder))


def existing_part(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def sync(path: Path) -> None:
    """Sync a file or directory: a rename must not outlive the content in a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def goes_with_container(path: Path, root: Path = Path("/")) -> bool:
    """Whether `path` is deleted with the container of this process: it is on no volume, or on one that Docker made
    unasked (its name is 64 hexadecimal digits). False outside containers, and where that cannot be told."""
    if not any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")):
        return False
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    mounts = {Path(mount): source for _, _, _, source, mount, *_ in map(str.split, lines)}
    place = path.resolve()
    mount = next((folder for folder in (place, *place.parents) if folder in mounts), Path("/"))
    return mount == Path("/") or bool(re.search("/volumes/[0-9a-f]{64}/_data$", mounts[mount]))


@contextmanager
def os_errors_explained(path: Path) -> Iterator[None]:
    """Turn an OSError from work on `path` into a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        raise explained(error, path) from error


def explained(error: OSError, path: Path) -> UserError:
    """The error that says what is wrong with `path`, and what to do about it. A full disk is one that time may mend."""
    return (TemporaryError if error.errno in FULL else UserError)(os_error_text(error, path))


def os_error_text(error: OSError, path: Path) -> str:
    """A sentence that says what is wrong with `path`, and what to do about it."""
    where = error.filename or path
    if error.errno in FULL:
        return f"disk full: cannot write {where}; free some space, or choose another directory"
    if error.errno == errno.EROFS:
        return f"{where} is on a file system that is read-only; mount a volume there, or choose another directory"
    if error.errno in FORBIDDEN:
        return f"no permission to write {where}; change its owner or mode, or choose another directory"
    if error.errno in NOT_A_DIRECTORY:
        return f"{where} is not a directory; choose another directory"
    if error.errno in CANNOT_LOCK:
        return f"the file system of {where} cannot lock files; choose one on a local disk"
    return f"cannot write {where}: {error.strerror or error}; mend that, or choose another directory"
