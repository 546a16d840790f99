"""Copies of a run's snapshots at a URL, for the day on which all machines of a fleet are taken back at once.

    URL/<swarm>/<name>-<end of peer id>/snapshots/round-00000120/{*.safetensors, state.json, SHA256SUMS}
                                        stages/<k>/round-…         likewise, of stages held for a crew

Each snapshot is copied once it is whole on disk, in the background, the newest first; one that has no SHA256SUMS, which
leaves last and is removed before anything is overwritten, is not there. A run directory without snapshots is filled
from the newest copy: of its own peer, else of a peer of its name, else (unless of a crew, whose machines hold different
things) of any that trained the same. A run that is alone, whose <swarm> is `local`, has nothing but those of its name.

The URL is any that fsspec knows; what is copied is as trustworthy as who can write there, and is checked as snapshots
on disk are. There is no secret in it: the identity stays on the machine.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm_node.errors import SnapshotError, UserError
from swarm_node.recovery.snapshots import MAX_STATE_BYTES, NAME, check_files, order
from swarm_node.rundir import explain

LOOK_S = 1.0
TICK_S = 0.2
"""Between two looks at how long a last copy may take."""
AGAIN_S = 30.0
"""After a copy that failed."""
SLOW_S = 600.0
"""A copy that takes longer is mentioned: drivers may hang for ever."""
ANSWER_S = 60.0
"""For a list of what is there, at the start; drivers by themselves wait for up to half an hour."""
FILE = re.compile(
    r"([^/]+)/(snapshots|stages/[0-9]{1,5})/(round-[0-9]{8,}(?:-[0-9]+)?)/([a-z0-9_-]+\.safetensors|state\.json|SHA256SUMS)"
)
UNLINKABLE = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What file systems answer that have no hard links, or no more of them."""
NEEDED = {"state.json", "SHA256SUMS"}
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

Accept = Callable[[dict[str, Any]], str | None]
"""(state) -> why a snapshot is not one to go on from, or None."""
Copies = dict[str, dict[str, dict[str, set[str]]]]
"""Owner -> folder -> round's name -> files."""


class Mirror:
    """The copies of one run, and those of its swarm."""

    def __init__(self, url: str, swarm: str, name: str, peer: str, run: Path, say: Callable[[str], None]) -> None:
        """`peer` is empty for a run that is alone. Raises UserError if nothing here speaks the URL's protocol."""
        import fsspec

        scheme = url.partition(":")[0]
        # Else gcsfs asks by gRPC what kind of bucket it is, for a minute each time where nobody answers that.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            extra = EXTRAS.get(scheme)
            package = f"'swarm-node[{extra}]'" if extra else f"fsspec's driver for {scheme}"
            raise UserError(f"--snapshot-to {url} needs a package: pip install {package}") from error
        except ValueError as error:
            raise UserError(f"--snapshot-to {url}: {error}; use file://, s3://, gs:// or az://") from error
        self._url = url
        self._bucket = scheme in EXTRAS
        self._root = f"{root.rstrip('/')}/{swarm[:16]}"
        self._name = name
        self._owner = f"{name}-{peer[-8:]}" if peer else name
        self._alone = not peer
        self._run = run
        self._say = say
        self._done: dict[str, list[str]] = {}
        """Folder -> rounds that are there as they are here, oldest first; two at most."""
        self._failed: dict[str, float] = {}
        """Folder whose last copy failed -> when."""
        self._told: set[str] = set()
        """What is said once, until it is over."""
        self._last = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    # ----------------------------------------------------------------- from there

    def restore(self, accept: Accept = lambda state: None, crew: bool = False) -> None:
        """Fill the run directory from a copy, if it has no snapshot and there is one. Raises UserError."""
        try:
            if any(self._newest(folder) for folder in self._folders()):
                return
        except OSError as error:
            raise UserError(explain(error, self._run)) from error
        try:
            try:
                self._fill(accept, crew, again=False)
            except FileNotFoundError:  # whoever lives removes old copies, also while they are read
                self._fill(accept, crew, again=True)
        except Exception as error:  # each driver has its own; to begin anew silently would be the loss of everything
            raise UserError(
                f"cannot read {self._url} ({_what(error)}): mend that, or leave out --snapshot-to to begin anew"
            ) from error

    def _fill(self, accept: Accept, crew: bool, again: bool) -> None:
        """Raises FileNotFoundError, unless `again`, if one goes while it is read."""
        copies = _in_time(self._list, ANSWER_S)
        for owner in sorted(copies, key=lambda owner: self._rank(owner, copies[owner])):
            if self._rank(owner, {})[0] > (0 if self._alone else 1 if crew else 2):
                continue
            folders = [folder for folder in copies[owner] if crew or folder == "snapshots"]
            found = {folder: name for folder in folders if (name := self._fetch(owner, folder, copies, accept, again))}
            if owner == self._owner:
                self._done = {folder: [name] for folder, name in found.items()}
            if found:
                names = ", ".join(f"{folder}/{name}" for folder, name in found.items())
                self._say(f"going on from what {owner} left at {self._url}: {names}")
                return

    def _list(self) -> Copies:
        """Whole ones."""
        self._fs.invalidate_cache()
        copies: Copies = {}
        try:
            paths = self._fs.find(self._root)
        except FileNotFoundError:
            return {}
        for path in paths:
            if match := FILE.fullmatch(path.removeprefix(self._root).lstrip("/")):
                owner, folder, name, file = match.groups()
                copies.setdefault(owner, {}).setdefault(folder, {}).setdefault(name, set()).add(file)
        for folders in copies.values():
            for folder, rounds in folders.items():
                folders[folder] = {name: files for name, files in rounds.items() if files >= NEEDED}
        return copies

    def _rank(self, owner: str, folders: dict[str, dict[str, set[str]]]) -> tuple[int, int, str]:
        """Least first."""
        kin = 0 if owner == self._owner else 1 if re.fullmatch(re.escape(self._name) + "(-[^-]{8})?", owner) else 2
        newest = max((order(Path(name))[0] for rounds in folders.values() for name in rounds), default=0)
        return kin, -newest, owner

    def _fetch(self, owner: str, folder: str, copies: Copies, accept: Accept, again: bool) -> str | None:
        """The newest good round of `folder` into the run directory; its name."""
        rounds = copies[owner][folder]
        for name in sorted(rounds, key=lambda name: order(Path(name)), reverse=True):
            source, target = f"{self._root}/{owner}/{folder}/{name}", self._run / folder / name
            arriving = target.with_name(f".arriving-{name}")
            shutil.rmtree(arriving, ignore_errors=True)
            arriving.mkdir(parents=True)
            try:
                if self._fs.info(f"{source}/state.json")["size"] > MAX_STATE_BYTES:
                    raise SnapshotError("state.json is too large")
                for file in sorted(rounds[name], key=lambda file: file != "state.json"):
                    self._fs.get_file(f"{source}/{file}", str(arriving / file))
                    if file == "state.json" and (reason := accept(_state(arriving / file))):
                        raise SnapshotError(reason)
                check_files(arriving)
                shutil.rmtree(target, ignore_errors=True)  # from before the list was read again
                arriving.rename(target)
                return name
            except (SnapshotError, OSError) as error:
                gone = isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ESTALE
                if gone and not again:
                    raise FileNotFoundError(source) from error
                if not gone and not isinstance(error, SnapshotError):
                    raise
                why = "it was removed meanwhile" if gone else error
                self._say(f"{self._url}: {owner}/{folder}/{name} is left alone: {why}")
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
        return None

    # ----------------------------------------------------------------- to there

    def start(self) -> None:
        """Copy what comes, from now on."""
        for folder in self._folders():
            for leftover in folder.glob(".leaving-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._thread = threading.Thread(target=self._watch, name="mirror", daemon=True)
        self._thread.start()

    def finish(self, seconds: float, left_s: Callable[[], float] = lambda: math.inf) -> None:
        """Copy what is not, and end; no longer than so many seconds, nor than `left_s`, which may come to be less."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._last.set()
        until = time.monotonic() + seconds
        while thread.is_alive() and (left := min(until - time.monotonic(), left_s())) > 0:
            thread.join(min(left, TICK_S))
        if thread.is_alive() or self._failed:
            newest = [f"{folder}/{names[-1]}" for folder, names in list(self._done.items()) if names]
            self._over = True  # a driver whose process ends under it fails
            self._say(f"the last snapshot is not at {self._url}; there: {', '.join(newest) or 'none of this start'}")

    def _watch(self) -> None:
        last, folders = False, list[Path]()
        while not last:
            last = self._last.wait(LOOK_S)
            with self._survived("stages"):
                folders = self._folders()
            for folder in folders:
                where = folder.relative_to(self._run).as_posix()
                if last or time.monotonic() - self._failed.get(where, -math.inf) > AGAIN_S:
                    with self._survived(where):
                        self._copy_newest(folder, where)

    @contextmanager
    def _survived(self, where: str) -> Iterator[None]:
        """What fails is said once, until it succeeds."""
        try:
            yield
        except Exception as error:  # each driver has its own; a copy that fails must not cost a run
            self._failed[where] = time.monotonic()
            again = f"tried again every {AGAIN_S:.0f} s"
            self._tell(where, f"snapshots do not get to {self._url} ({where}: {_what(error)}); {again}")
        else:
            self._failed.pop(where, None)
            self._told.discard(where)

    def _tell(self, what: str, sentence: str) -> None:
        if what not in self._told and not self._over:
            self._told.add(what)
            self._say(sentence)

    def _copy_newest(self, folder: Path, where: str) -> None:
        newest = self._newest(folder)
        done = self._done.setdefault(where, [])
        if newest is None or newest.name in done:
            return
        leaving, slow = folder / f".leaving-{newest.name}", f"{where} slow"
        sentence = (
            f"{where}/{newest.name} is not at {self._url} after {SLOW_S / 60:.0f} minutes of copying, which go on"
        )
        timer = threading.Timer(SLOW_S, self._tell, (slow, sentence))
        timer.daemon = True
        timer.start()
        try:
            _link(newest, leaving)
            there = f"{self._root}/{self._owner}/{where}"
            self._copy(leaving, f"{there}/{newest.name}")
            done.append(newest.name)
            del done[:-2]
            if len(done) > 1:
                self._prune(there, done)
            if timer.is_alive():
                self._told.discard(slow)
        finally:
            timer.cancel()
            shutil.rmtree(leaving, ignore_errors=True)

    def _copy(self, leaving: Path, there: str) -> None:
        sums = (leaving / "SHA256SUMS").read_bytes()
        self._fs.invalidate_cache()
        try:
            same = self._fs.info(f"{there}/SHA256SUMS")["size"] == len(sums)
            if same and self._fs.cat_file(f"{there}/SHA256SUMS") == sums:
                return
            self._fs.rm_file(f"{there}/SHA256SUMS")
        except FileNotFoundError:
            pass  # nothing is there
        if not self._bucket:  # in which there are no folders, and whose owner may not let us make or see buckets
            self._fs.makedirs(there, exist_ok=True)
        for file in sorted(leaving.iterdir(), key=lambda file: file.name == "SHA256SUMS"):
            self._fs.put_file(str(file), f"{there}/{file.name}")

    def _prune(self, there: str, keep: list[str]) -> None:
        try:
            self._fs.invalidate_cache()
            for old in self._fs.ls(there, detail=False):
                if (stem := old.rstrip("/").rpartition("/")[2]) not in keep and NAME.fullmatch(stem):
                    self._fs.rm(old, recursive=True)
        except Exception as error:  # each driver has its own; whoever may only write there writes on
            why = _what(error)
            self._tell("old", f"old copies stay at {self._url} ({why}): have whoever keeps it remove them")

    # ----------------------------------------------------------------- here

    def _folders(self) -> list[Path]:
        stages = sorted(path for path in (self._run / "stages").glob("*") if path.name.isdecimal())
        return [self._run / "snapshots", *stages]

    def _newest(self, folder: Path) -> Path | None:
        try:
            whole = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return None
        return max(whole, key=order, default=None)


def _in_time(work: Callable[[], Copies], seconds: float) -> Copies:
    """Its result. Raises what it raises, or TimeoutError; then it goes on in a thread that holds up nobody."""
    done: Future[Copies] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="mirror-list", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError as error:
        raise error if done.done() else TimeoutError(f"no answer within {seconds:.0f} s") from error


def _link(snapshot: Path, leaving: Path) -> None:
    """`leaving` keeps the files of `snapshot`, which may be pruned meanwhile."""
    leaving.mkdir()
    for file in snapshot.iterdir():
        try:
            os.link(file, leaving / file.name)
        except OSError as error:
            if error.errno not in UNLINKABLE:
                raise
            shutil.copyfile(file, leaving / file.name)


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())["state"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotError(f"state.json is malformed ({error})") from error
    if not isinstance(state, dict):
        raise SnapshotError("state.json is malformed")
    return state


def _what(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
