"""Copies of a run's snapshots at a URL, for the day on which all machines of a fleet are taken back at once.

    URL/<swarm>/<name>-<end of peer id>/snapshots/round-00000120/{*.safetensors, state.json, SHA256SUMS}
                                        stages/<k>/round-…         likewise, of stages held for a crew

Each snapshot is copied once it is whole on disk, in the background, the newest first; one that has no SHA256SUMS, which
leaves last, is not there. A run directory without snapshots is filled from the newest copy: of its own peer, else of a
peer of its name, else (unless of a crew, whose machines hold different things) of any that trained the same.

The URL is any that fsspec knows; what is copied is as trustworthy as who can write there, and is checked as snapshots
on disk are. There is no secret in it: the identity stays on the machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm_node.errors import SnapshotError, UserError
from swarm_node.recovery.snapshots import MAX_STATE_BYTES, NAME, check_files, order

LOOK_S = 1.0
AGAIN_S = 30.0
"""After a copy that failed."""
FILE = re.compile(
    r"([^/]+)/(snapshots|stages/[0-9]{1,5})/(round-[0-9]{8,}(?:-[0-9]+)?)/([a-z0-9_-]+\.safetensors|state\.json|SHA256SUMS)"
)
NEEDED = {"state.json", "SHA256SUMS"}
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

Accept = Callable[[dict[str, Any]], str | None]
"""(state) -> why a snapshot is not one to go on from, or None."""
Copies = dict[str, dict[str, dict[str, set[str]]]]
"""Owner -> folder -> round's name -> files."""


class Mirror:
    """The copies of one run, and those of its swarm."""

    def __init__(self, url: str, swarm: str, name: str, peer: str, run: Path, say: Callable[[str], None]) -> None:
        """`peer` may be empty. Raises UserError if nothing here speaks the URL's protocol."""
        import fsspec

        scheme = url.partition(":")[0]
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            extra = EXTRAS.get(scheme)
            package = f"'swarm-node[{extra}]'" if extra else f"fsspec's driver for {scheme}"
            raise UserError(f"--snapshot-to {url} needs a package: pip install {package}") from error
        except ValueError as error:
            raise UserError(f"--snapshot-to {url}: {error}; use file://, s3://, gs:// or az://") from error
        self._url = url
        self._root = f"{root.rstrip('/')}/{swarm[:16]}"
        self._name = name
        self._owner = f"{name}-{peer[-8:]}" if peer else name
        self._run = run
        self._say = say
        self._done: dict[str, list[str]] = {}
        """Folder -> rounds copied from here, oldest first; two at most."""
        self._failed_at = float("-inf")
        self._failing = False
        self._last = threading.Event()
        self._thread: threading.Thread | None = None

    # ----------------------------------------------------------------- from there

    def restore(self, accept: Accept = lambda state: None, crew: bool = False) -> None:
        """Fill the run directory from a copy, if it has no snapshot and there is one. Raises UserError."""
        if any(self._newest(folder) for folder in self._folders()):
            return
        try:
            copies = self._list()
            for owner in sorted(copies, key=lambda owner: self._rank(owner, copies[owner])):
                if crew and self._rank(owner, {})[0] > 1:
                    continue
                folders = [folder for folder in copies[owner] if crew or folder == "snapshots"]
                found = [name for folder in folders if (name := self._fetch(owner, folder, copies, accept))]
                if found:
                    self._say(f"going on from what {owner} left at {self._url}: {', '.join(found)}")
                    return
        except Exception as error:  # each driver has its own; to begin anew silently would be the loss of everything
            raise UserError(
                f"cannot read {self._url} ({_what(error)}): mend that, or leave out --snapshot-to to begin anew"
            ) from error

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

    def _fetch(self, owner: str, folder: str, copies: Copies, accept: Accept) -> str | None:
        """The newest good round of `folder` into the run directory; what it is called there."""
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
                arriving.rename(target)
                return f"{folder}/{name}"
            except SnapshotError as error:
                self._say(f"{self._url}: {owner}/{folder}/{name} is left alone: {error}")
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

    def finish(self, seconds: float) -> None:
        """Copy what is not, and end; no longer than so many seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._last.set()
        thread.join(max(0.0, seconds))
        if thread.is_alive() or self._failing:
            newest = [f"{folder}/{names[-1]}" for folder, names in self._done.items() if names]
            self._say(f"the last snapshot is not at {self._url}; there: {', '.join(newest) or 'none of this start'}")

    def _watch(self) -> None:
        last = False
        while not last:
            last = self._last.wait(LOOK_S)
            if last or time.monotonic() - self._failed_at > AGAIN_S:
                for folder in self._folders():
                    self._copy_newest(folder)

    def _copy_newest(self, folder: Path) -> None:
        newest = self._newest(folder)
        where = folder.relative_to(self._run).as_posix()
        done = self._done.setdefault(where, [])
        if newest is None or newest.name in done:
            return
        leaving = folder / f".leaving-{newest.name}"
        try:
            _link(newest, leaving)
            self._copy(leaving, f"{self._root}/{self._owner}/{where}", newest.name, done)
            self._failing = False
        except Exception as error:  # each driver has its own; a copy that fails must not cost a run
            self._failed_at = time.monotonic()
            if not self._failing:
                self._failing = True
                self._say(f"snapshots do not get to {self._url} ({_what(error)}); tried again every {AGAIN_S:.0f} s")
        finally:
            shutil.rmtree(leaving, ignore_errors=True)

    def _copy(self, leaving: Path, there: str, name: str, done: list[str]) -> None:
        self._fs.makedirs(f"{there}/{name}", exist_ok=True)
        for file in sorted(leaving.iterdir(), key=lambda file: file.name == "SHA256SUMS"):
            self._fs.put_file(str(file), f"{there}/{name}/{file.name}")
        done.append(name)
        del done[:-2]
        self._fs.invalidate_cache()
        for old in self._fs.ls(there, detail=False):
            if (stem := old.rstrip("/").rpartition("/")[2]) not in done and NAME.fullmatch(stem) and len(done) > 1:
                self._fs.rm(old, recursive=True)

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


def _link(snapshot: Path, leaving: Path) -> None:
    """`leaving` keeps the files of `snapshot`, which may be pruned meanwhile."""
    leaving.mkdir()
    for file in snapshot.iterdir():
        os.link(file, leaving / file.name)


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
