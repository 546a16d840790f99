"""Copies of a run's checkpoints at a URL, which survive when all machines of a fleet are taken back at once.

Copying: a thread copies the newest whole checkpoint of each folder in the background, once it is on disk. A torn
checkpoint is not copied. A bucket that is full, slow or gone is mentioned once, and never stops training.

Restoring: a run directory without a whole checkpoint is filled from the newest copy of its own peer, else of a peer of
its name, else of any peer that trained the same. A member of a crew leaves out the last, since the machines of a crew
hold different stages. It takes the copies of all stages, because a crew can only go on from an update of which every
stage has files. Where some stages are whole here, the others come from its own peer's copies. A run that is alone has
the swarm `local`, and uses copies of its name only.

Left out: a `latest` file. One listing names the newest whole copies of all owners, and a second file could contradict
it. No secret is copied: the identity stays on the machine. Copies are checked as checkpoints on disk are.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm_node.errors import CheckpointError, SwarmNodeError, TemporaryError, UserError
from swarm_node.say import Once, Say, Warned, in_short
from swarm_node.storage.bucket import CHECKPOINTS, Bucket, Copy
from swarm_node.storage.checkpoints import ForeignCheckpoint, check_files, read_state
from swarm_node.storage.names import MAX_STATE_BYTES, NAME, order
from swarm_node.storage.rundir import explained

NEW_CHECKPOINT_CHECK_S = 1.0  # time between two looks for a new checkpoint
END_CHECK_S = 0.2  # time between two looks at how long the last copy may still take
MENTION_S = 2.0  # a wait that is longer is mentioned
COPY_RETRY_S = 30.0  # time from a copy that failed to the next try
SLOW_S = 600.0  # a copy that takes longer is mentioned: drivers may hang for ever
KEPT, STAGES_KEPT = 2, 3
"""Copies kept of a folder, and of a stage: a stage saved at a time of its own must not displace the newest update of
which all stages have copies."""

Accept = Callable[[dict[str, Any]], str | None]  # (state) -> why a checkpoint does not belong to this run, or None


class RunFolders:
    """The folders of a run that hold checkpoints."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: dict[Path, dict[Path, tuple[float, float]]] = {}
        """Folder -> checkpoint -> (the look that first saw it, when its state says that it was made)."""

    def folders(self) -> list[Path]:
        """`checkpoints`, and the folder of each stage. Raises OSError."""
        stages = sorted(path for path in (self._run / "stages").glob("*") if path.name.isdecimal())
        return [self._run / CHECKPOINTS, *stages]

    def where(self, folder: Path) -> str:
        """The name of a folder in the run directory and in the bucket."""
        return folder.relative_to(self._run).as_posix()

    def rounds(self, folder: Path) -> list[Path]:
        """The checkpoints in a folder, the one written last first. Numbers do not tell that, since a run may go back to
        an older one, nor do clocks, which may be set; among those of the first look, their own times must do."""
        try:
            paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        before, now = self._seen.get(folder, {}), time.monotonic()
        seen = self._seen[folder] = {path: before.get(path) or (now, _made(path)) for path in paths}
        return sorted(paths, key=lambda path: (*seen[path], order(path)), reverse=True)

    def sweep(self) -> None:
        """Remove what a killed process has left. Raises OSError."""
        for folder in self.folders():
            for leftover in (*folder.glob(".leaving-*"), *folder.glob(".arriving-*")):
                shutil.rmtree(leftover, ignore_errors=True)


class Mirror:
    """The copies of one run."""

    def __init__(self, url: str, swarm: str, name: str, peer: str, run: Path, say: Say) -> None:
        """`peer` is empty for a run that is alone. Raises UserError if the URL cannot be used."""
        self.bucket = Bucket(url, swarm)
        self.here = RunFolders(run)
        self._url = url
        self._name = name
        self._owner = f"{name}-{peer[-8:]}" if peer else name
        self._alone = not peer
        self._run = run
        self._say = say
        self._once = Once(lambda sentence: None if self._over else say(sentence))
        self._done: dict[str, list[str]] = {}
        """Folder -> rounds whose copies equal those here, oldest first; as many as are kept."""
        self._failed: dict[str, float] = {}  # folder whose last copy failed -> when
        self._good_at = time.monotonic()  # when the last copy was complete; at first, when this start began
        self._torn: set[Path] = set()  # checkpoints here that are torn, and so are not copied
        self._last = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    @property
    def age_s(self) -> float:
        """Seconds since a copy was complete or, if none was, since this start began. From any thread."""
        return time.monotonic() - self._good_at

    def restore(self, accept: Accept = lambda state: None, crew: bool = False) -> None:
        """Fill the folders of the run directory that have no whole checkpoint: `checkpoints` and, for a member of a
        crew, all stages. Raises UserError if copies may exist and cannot be read."""
        try:
            self.here.sweep()
            whole, torn = self._state_here(crew)
        except OSError as error:
            raise explained(error, self._run) from error
        if whole and not crew:
            return
        # A member with whole stages, and none torn, may lack nothing: a bucket that cannot be read must not stop it.
        needed = bool(torn - {CHECKPOINTS}) or not whole - {CHECKPOINTS}
        try:
            try:
                self._fill(accept, crew, whole, needed, again=False)
            except FileNotFoundError:  # a running node removes old copies, also while they are read here
                self._fill(accept, crew, whole, needed, again=True)
        except UserError:
            raise
        except Exception as error:  # each driver has its own; to begin anew silently would lose everything
            raise TemporaryError(
                f"cannot read {self._url} ({_what(error)}): mend that, or leave out --checkpoint-to to begin anew"
            ) from error

    def _state_here(self, crew: bool) -> tuple[set[str], set[str]]:
        """The folders with a whole checkpoint, and those with torn ones only; mentions one of the latter. Raises
        OSError, and UserError for a checkpoint that may not be read."""
        whole, torn = set[str](), dict[str, str]()
        for folder in self.here.folders() if crew else [self._run / CHECKPOINTS]:
            where = self.here.where(folder)
            for path in self.here.rounds(folder):
                try:
                    check_files(path)
                except CheckpointError as error:
                    torn.setdefault(where, f"{where}/{path.name}: {error}")
                else:
                    whole.add(where)
                    torn.pop(where, None)
                    break
        if torn:
            where = ", ".join(str(self._run / folder) for folder in torn) if whole else str(self._run)
            wrong = next(iter(torn.values()))
            self._say(Warned(f"no checkpoint in {where} is whole ({wrong}): looking for one at {self._url}"))
        return whole, set(torn)

    def _fill(self, accept: Accept, crew: bool, whole: set[str], needed: bool, again: bool) -> None:
        """Fill the folders that are not `whole` from the best owner's copies. A copy that vanishes while it is read
        raises FileNotFoundError or, if `again`, is left alone. A bucket that cannot be listed is only mentioned, unless
        copies are `needed`."""
        try:
            with self._said_if_slow(f"looking for checkpoints at {self._url}"):
                copies = self.bucket.copies()
        except Exception as error:  # each driver has its own
            if needed:
                raise
            self._say(Warned(f"cannot read {self._url} ({_what(error)}): going on with the stages that are here"))
            return
        newest: dict[str, int] = {}
        for copy in copies:
            newest[copy.owner] = max(newest.get(copy.owner, 0), order(Path(copy.name))[0])
        farthest = 0 if self._alone or whole - {CHECKPOINTS} else 1 if crew else 2
        owners = [owner for owner in newest if self._distance(owner) <= farthest]
        for owner in sorted(owners, key=lambda owner: (self._distance(owner), -newest[owner], owner)):
            wanted: dict[str, list[Copy]] = {}
            for copy in copies:
                if copy.owner == owner and copy.folder not in whole and (crew or copy.folder == CHECKPOINTS):
                    wanted.setdefault(copy.folder, []).append(copy)
            found = {folder: self._fetch(wanted[folder], accept, again) for folder in wanted}
            if owner == self._owner:
                self._done = found
            if names := ", ".join(f"{folder}/{name}" for folder in found for name in reversed(found[folder])):
                self._say(f"continues from the checkpoints of {owner} at {self._url}: {names}")
                return

    def _distance(self, owner: str) -> int:
        """0 = this peer, 1 = another of its name, 2 = any other."""
        if owner == self._owner:
            return 0
        return 1 if re.fullmatch(re.escape(self._name) + "(-[^-]{8})?", owner) else 2

    def _fetch(self, copies: Sequence[Copy], accept: Accept, again: bool) -> list[str]:
        """Fetch the newest good copies of one owner's folder; their names, oldest first. Raises UserError if they are
        this owner's and all good ones belong to another run: new copies would replace them."""
        owner, where = copies[0].owner, copies[0].folder
        folder, got, foreign = self._run / where, list[str](), ""
        for copy in sorted(copies, key=lambda copy: order(Path(copy.name)), reverse=True):
            if len(got) == (1 if where == CHECKPOINTS else STAGES_KEPT):
                break
            target, arriving = folder / copy.name, folder / f".arriving-{copy.name}"
            shutil.rmtree(arriving, ignore_errors=True)
            arriving.mkdir(parents=True)
            try:
                self._get(copy, arriving, accept)
                check_files(arriving)
                shutil.rmtree(target, ignore_errors=True)  # torn, or from before the list was read again
                arriving.rename(target)
                got.append(copy.name)
            except (CheckpointError, OSError) as error:
                gone = isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ESTALE
                if gone and not again:
                    raise FileNotFoundError(copy.name) from error
                if not gone and not isinstance(error, CheckpointError):
                    raise
                if isinstance(error, ForeignCheckpoint):
                    foreign = foreign or f"{copy.place}: {error}"
                why = "it was removed meanwhile" if gone else error
                self._say(f"{self._url}: {copy.place} is left alone: {why}")
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
        if foreign and not got and owner == self._owner:
            there = f"{self.bucket.root.rpartition('/')[2]}/{owner}"
            raise UserError(
                f"what is at {self._url} under this name belongs to another run ({foreign}): give another name (--set "
                f"name=NAME) or another --checkpoint-to, or remove {there} there"
            )
        return sorted(got, key=lambda name: (_made(folder / name), order(Path(name))))

    def _get(self, copy: Copy, arriving: Path, accept: Accept) -> None:
        """Fetch the files of a copy, its state first. Raises ForeignCheckpoint if that is not accepted, TimeoutError if
        nothing more comes, or what the driver raises."""
        sizes = self.bucket.sizes(copy)
        if sizes["state.json"] > MAX_STATE_BYTES:
            raise CheckpointError("state.json is too large")
        with self._said_if_slow(f"fetching {copy.place} from {self._url}: {sum(sizes.values()) / 1e6:.1f} MB"):
            for file in sorted(copy.files, key=lambda file: file != "state.json"):
                self.bucket.get(copy, file, arriving / file)
                if file == "state.json" and (reason := accept(read_state(arriving / file))):
                    raise ForeignCheckpoint(reason)

    def start(self) -> None:
        """Copy each new checkpoint from now on."""
        self.here.sweep()
        self._thread = threading.Thread(target=self._watch, name="mirror", daemon=True)
        self._thread.start()

    def finish(self, seconds: float, left_s: Callable[[], float] = lambda: math.inf) -> None:
        """Copy what is missing, and end: after `seconds`, or once `left_s`, which may shrink, returns 0."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._last.set()
        until, most = time.monotonic() + seconds, f"{min(seconds, left_s()):.0f} s at most"
        waiting = f"waiting until the last checkpoint is at {self._url}, {most}; a signal cuts that to seconds"
        with self._said_if_slow(waiting):
            while thread.is_alive() and (left := min(until - time.monotonic(), left_s())) > 0:
                thread.join(min(left, END_CHECK_S))
        if thread.is_alive() or self._failed or self._lacks_newest():
            newest = [f"{folder}/{names[-1]}" for folder, names in list(self._done.items()) if names]
            self._over = True  # a driver whose process ends under it fails: nothing to mention
            self._say(
                Warned(f"the last checkpoint is not at {self._url}; there: {', '.join(newest) or 'none of this start'}")
            )

    def _lacks_newest(self) -> bool:
        """Whether a folder's newest checkpoint has no copy. Torn ones were mentioned and do not count."""
        try:
            for folder in self.here.folders():
                names = [path.name for path in self.here.rounds(folder) if path not in self._torn]
                if names and names[0] not in self._done.get(self.here.where(folder), []):
                    return True
        except OSError:
            return True
        return False

    def _watch(self) -> None:
        last, folders = False, list[Path]()
        while not last:
            last = self._last.wait(NEW_CHECKPOINT_CHECK_S)
            with self._survived("stages"):
                folders = self.here.folders()
            for folder in folders:
                where = self.here.where(folder)
                if last or time.monotonic() - self._failed.get(where, -math.inf) > COPY_RETRY_S:
                    with self._survived(where):
                        self._copy_newest(folder, where)

    @contextmanager
    def _survived(self, where: str) -> Iterator[None]:
        """Mention a failure once, until it is over."""
        try:
            yield
        except Exception as error:  # each driver has its own; a copy that fails must not cost a run
            self._failed[where] = time.monotonic()
            again = f"tried again every {COPY_RETRY_S:.0f} s"
            self._once(where, Warned(f"checkpoints do not get to {self._url} ({where}: {_what(error)}); {again}"))
        else:
            if self._failed.pop(where, None) is not None:
                self._say(f"checkpoints get to {self._url} again ({where})")
            self._once.over(where)

    def _copy_newest(self, folder: Path, where: str) -> None:
        done = self._done.setdefault(where, [])
        for path in self.here.rounds(folder):
            if path.name in done:
                return
            if path not in self._torn and self._copy_whole(path, where, done):
                return

    def _copy_whole(self, newest: Path, where: str, done: list[str]) -> bool:
        """Copy a checkpoint unless it is torn; whether it was whole."""
        name, leaving = f"{where}/{newest.name}", newest.with_name(f".leaving-{newest.name}")
        slow = f"{name} is not at {self._url} after {SLOW_S / 60:.0f} minutes of copying, which go on"
        try:
            with self._said_if_slow(slow, SLOW_S, once=f"{where} slow"):
                shutil.copytree(newest, leaving, copy_function=_link)
                try:
                    check_files(leaving)
                except CheckpointError as error:
                    self._torn.add(newest)
                    self._once(name, f"{name} is not copied to {self._url}: {error}")
                    return False
                self.bucket.put(leaving, f"{self._owner}/{name}")
                done.append(newest.name)
                self._good_at = time.monotonic()
                kept = KEPT if where == CHECKPOINTS else STAGES_KEPT
                del done[:-kept]
                if len(done) > 1:
                    try:
                        self.bucket.prune(f"{self._owner}/{where}", done, kept)
                    except Exception as error:  # each driver has its own; a node that may only write there writes on
                        stay = f"old copies stay at {self._url} ({_what(error)})"
                        self._once("old", f"{stay}: ask its owner to remove them")
            return True
        finally:
            shutil.rmtree(leaving, ignore_errors=True)

    @contextmanager
    def _said_if_slow(self, sentence: str, seconds: float | None = None, once: str = "") -> Iterator[None]:
        """Say the sentence if the context lasts longer than `seconds` (default MENTION_S); `once`: the key of a
        sentence that is said again only after a context that was faster."""
        say, arguments = (self._once, (once, sentence)) if once else (self._say, (sentence,))
        timer = threading.Timer(MENTION_S if seconds is None else seconds, say, arguments)
        timer.daemon = True
        timer.start()
        try:
            yield
            if once and timer.is_alive():
                self._once.over(once)
        finally:
            timer.cancel()


def _made(path: Path) -> float:
    """When a checkpoint's state says that it was made, in seconds since the Unix epoch; 0 if it does not say."""
    try:
        made = read_state(path / "state.json").get("time")
    except SwarmNodeError:
        return 0.0
    return float(made) if isinstance(made, (int, float)) else 0.0


def _link(source: str, target: str) -> None:
    """Have `target` keep a file that may be pruned meanwhile: by a hard link or, where there are none, by a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _what(error: Exception) -> str:
    return in_short(f"{type(error).__name__}: {error}")
