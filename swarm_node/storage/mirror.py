"""Copies of a run's checkpoints at a URL, for the day on which all machines of a fleet are taken back at once.

    URL/<swarm>/<name>-<end of peer id>/checkpoints/round-00000120/{*.safetensors, state.json, SHA256SUMS}
                                        stages/<k>/round-…         likewise, of stages held for a crew

Each checkpoint is copied once it is whole on disk, in the background, the newest first; one that has no SHA256SUMS,
which leaves last and is removed before anything is overwritten, is not there. What is torn here is not copied. A run
directory without a whole checkpoint is filled from the newest copy: of its own peer, else of a peer of its name, else
(unless of a crew, whose machines hold different things) of any that trained the same. Of the stages of a crew all
copies come, since its machines can only go on together from an update of which there are files of each; where some
stages are here whole, the others come from its own peer's. A run that is alone, whose <swarm> is `local`, has nothing
but those of its name.

The URL is any that fsspec knows; what is copied is as trustworthy as who can write there, and is checked as checkpoints
on disk are. There is no secret in it: the identity stays on the machine.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from swarm_node.errors import CheckpointError, UserError
from swarm_node.storage.checkpoints import MAX_STATE_BYTES, NAME, ForeignCheckpoint, check_files, order
from swarm_node.storage.rundir import explain

LOOK_S = 1.0
TICK_S = 0.2
"""Between two looks at how far something is that is waited for."""
SAY_S = 2.0
"""What is waited for longer is said."""
AGAIN_S = 30.0
"""After a copy that failed."""
SLOW_S = 600.0
"""A copy that takes longer is mentioned: drivers may hang for ever."""
ANSWER_S = 60.0
"""At the start, for a list of what is there, and for anything more of a file; drivers by themselves wait for up to half
an hour."""
KEPT, STAGES_KEPT = 2, 3
"""Copies of a folder; of a stage one more, since one that was made at a time of its own must not take the place of the
update of which there are copies of all stages."""
FILE = re.compile(
    r"([^/]+)/(checkpoints|stages/[0-9]{1,5})/(round-[0-9]{8,}(?:-[0-9]+)?)/([a-z0-9_-]+\.safetensors|state\.json|SHA256SUMS)"
)
UNLINKABLE = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What file systems answer that have no hard links, or no more of them."""
CHECKPOINTS = "checkpoints"
NEEDED = {"state.json", "SHA256SUMS"}
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

Accept = Callable[[dict[str, Any]], str | None]
"""(state) -> why a checkpoint is not one to go on from, or None."""
Copies = dict[str, dict[str, dict[str, set[str]]]]
"""Owner -> folder -> round's name -> files."""
T = TypeVar("T")


class Mirror:
    """The copies of one run, and those of its swarm."""

    def __init__(self, url: str, swarm: str, name: str, peer: str, run: Path, say: Callable[[str], None]) -> None:
        """`peer` is empty for a run that is alone. Raises UserError if nothing here speaks the URL's protocol, or a
        local folder is not there."""
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        scheme = url.partition(":")[0]
        # Else gcsfs asks by gRPC what kind of bucket it is, for a minute each time where nobody answers that.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        try:
            self.fs, root = fsspec.core.url_to_fs(url)
            """The file system on which the copies are."""
        except ImportError as error:
            extra = EXTRAS.get(scheme)
            package = f"'swarm-node[{extra}]'" if extra else f"fsspec's driver for {scheme}"
            raise UserError(f"--checkpoint-to {url} needs a package: pip install {package}") from error
        except ValueError as error:
            raise UserError(f"--checkpoint-to {url}: {error}; use file://, s3://, gs:// or az://") from error
        self._local = isinstance(self.fs, LocalFileSystem)
        self.place = root
        """Path of the copies on that file system."""
        try:
            there = in_time(self._is_there)
        except TimeoutError as error:
            raise UserError(f"--checkpoint-to {url}: {error}") from error
        if not there:
            raise UserError(
                f"--checkpoint-to {url}: there is no such folder; mount the share that it is on, or make it there: "
                f"mkdir {shlex.quote(root)}"
            )
        self._url = url
        self._bucket = scheme in EXTRAS
        self._root = f"{root.rstrip('/')}/{swarm[:16]}"
        self._name = name
        self._owner = f"{name}-{peer[-8:]}" if peer else name
        self._alone = not peer
        self._run = run
        self._say = say
        self._done: dict[str, list[str]] = {}
        """Folder -> rounds that are there as they are here, oldest first; as many as are kept."""
        self._failed: dict[str, float] = {}
        """Folder whose last copy failed -> when."""
        self._told: set[str] = set()
        """What is said once, until it is over."""
        self._torn: set[Path] = set()
        """Rounds here that are not copied."""
        self._seen: dict[Path, dict[Path, tuple[float, float]]] = {}
        """Folder -> round here -> at which look it was first there, and when it says that it was made."""
        self._last = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    # ----------------------------------------------------------------- from there

    def restore(self, accept: Accept = lambda state: None, crew: bool = False) -> None:
        """Fill those folders of the run directory from copies that have no whole checkpoint: `checkpoints`, and of a
        crew's member all stages. Raises UserError."""
        try:
            self._sweep()
            whole, torn = self._state_here(crew)
        except OSError as error:
            raise UserError(explain(error, self._run)) from error
        if whole and not crew:
            return
        # There may be more stages of which nothing is left here. Where nothing says so, a place that cannot be read
        # must not keep this machine from the crew.
        surely = bool(torn - {CHECKPOINTS}) or not whole - {CHECKPOINTS}
        try:
            try:
                self._fill(accept, crew, whole, surely, again=False)
            except FileNotFoundError:  # whoever lives removes old copies, also while they are read
                self._fill(accept, crew, whole, surely, again=True)
        except UserError:
            raise
        except Exception as error:  # each driver has its own; to begin anew silently would be the loss of everything
            raise UserError(
                f"cannot read {self._url} ({_what(error)}): mend that, or leave out --checkpoint-to to begin anew"
            ) from error

    def _state_here(self, crew: bool) -> tuple[set[str], set[str]]:
        """Folders with a whole checkpoint, and those with none but torn ones; what is wrong with the newest of these is
        said. Raises OSError, and UserError for one that may not be read."""
        whole, torn = set[str](), dict[str, str]()
        for folder in self._folders() if crew else [self._run / CHECKPOINTS]:
            where = folder.relative_to(self._run).as_posix()
            for path in self._rounds(folder):
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
            self._say(f"no checkpoint in {where} is whole ({wrong}): looking for one at {self._url}")
        return whole, set(torn)

    def _fill(self, accept: Accept, crew: bool, whole: set[str], surely: bool, again: bool) -> None:
        """All folders but those that are `whole`. Raises FileNotFoundError, unless `again`, if one goes while it is
        read. A place that cannot be listed is no more than said, unless something is `surely` to be had from there."""
        try:
            with self._said_if_slow(f"looking for checkpoints at {self._url}"):
                copies = in_time(self._list)
        except Exception as error:  # each driver has its own
            if surely:
                raise
            self._say(f"cannot read {self._url} ({_what(error)}): going on with the stages that are here")
            return
        farthest = 0 if self._alone or whole - {CHECKPOINTS} else 1 if crew else 2
        for owner in sorted(copies, key=lambda owner: self._rank(owner, copies[owner])):
            if self._rank(owner, {})[0] > farthest:
                continue
            found: dict[str, list[str]] = {}
            for folder, rounds in copies[owner].items():
                if folder not in whole and (crew or folder == CHECKPOINTS):
                    most = 1 if folder == CHECKPOINTS else STAGES_KEPT
                    found[folder] = self._fetch(owner, folder, rounds, accept, again, most)
            names = ", ".join(f"{folder}/{name}" for folder, names in found.items() for name in reversed(names))
            if owner == self._owner:
                self._done = found
            if names:
                self._say(f"going on from what {owner} left at {self._url}: {names}")
                return

    def _list(self) -> Copies:
        """Whole ones."""
        copies: Copies = {}
        try:
            paths = self._paths()
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

    def _paths(self) -> list[str]:
        """Of all files there. Raises FileNotFoundError if there is no such place, OSError or what else the driver has
        for one that cannot be read."""
        if not self._local:
            self.fs.invalidate_cache()
            return list(self.fs.find(self._root))

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # of what whoever lives removes
                raise error

        # fsspec's own driver takes a folder that cannot be read for an empty one.
        found = os.walk(self._root, onerror=failed)
        return sorted(f"{folder}/{file}" for folder, _, files in found for file in files)

    def _rank(self, owner: str, folders: dict[str, dict[str, set[str]]]) -> tuple[int, int, str]:
        """Least first."""
        kin = 0 if owner == self._owner else 1 if re.fullmatch(re.escape(self._name) + "(-[^-]{8})?", owner) else 2
        newest = max((order(Path(name))[0] for rounds in folders.values() for name in rounds), default=0)
        return kin, -newest, owner

    def _fetch(
        self, owner: str, where: str, rounds: dict[str, set[str]], accept: Accept, again: bool, most: int
    ) -> list[str]:
        """The newest good rounds of OWNER/FOLDER, so many of them at most, into the run directory; their names, oldest
        first. UserError if they are this owner's and there is none, but one of another run: new ones would take the
        place of those."""
        folder, place, got = self._run / where, f"{owner}/{where}", list[str]()
        foreign = ""
        for name in sorted(rounds, key=lambda name: order(Path(name)), reverse=True):
            if len(got) == most:
                break
            target = folder / name
            arriving = target.with_name(f".arriving-{name}")
            shutil.rmtree(arriving, ignore_errors=True)
            arriving.mkdir(parents=True)
            try:
                self._get(f"{place}/{name}", rounds[name], arriving, accept)
                check_files(arriving)
                shutil.rmtree(target, ignore_errors=True)  # torn, or from before the list was read again
                arriving.rename(target)
                got.append(name)
            except (CheckpointError, OSError) as error:
                gone = isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ESTALE
                if gone and not again:
                    raise FileNotFoundError(name) from error
                if not gone and not isinstance(error, CheckpointError):
                    raise
                if isinstance(error, ForeignCheckpoint):
                    foreign = foreign or f"{place}/{name}: {error}"
                why = "it was removed meanwhile" if gone else error
                self._say(f"{self._url}: {place}/{name} is left alone: {why}")
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
        if foreign and not got and owner == self._owner:
            raise UserError(
                f"what is at {self._url} under this name belongs to another run ({foreign}): give another name (--set "
                f"name=NAME) or another --checkpoint-to, or remove {self._root.rpartition('/')[2]}/{owner} there"
            )
        return sorted(got, key=lambda name: (_made(folder / name), order(Path(name))))

    def _get(self, place: str, files: set[str], arriving: Path, accept: Accept) -> None:
        """The files of OWNER/FOLDER/ROUND. Raises ForeignCheckpoint for one that is not accepted, and what the driver
        does; TimeoutError if nothing more comes."""
        source = f"{self._root}/{place}"
        sizes = in_time(lambda: {file: int(self.fs.info(f"{source}/{file}")["size"] or 0) for file in files})
        if sizes["state.json"] > MAX_STATE_BYTES:
            raise CheckpointError("state.json is too large")
        with self._said_if_slow(f"fetching {place} from {self._url}: {sum(sizes.values()) / 1e6:.1f} MB"):
            for file in sorted(files, key=lambda file: file != "state.json"):
                here = arriving / file
                get = partial(self.fs.get_file, f"{source}/{file}", str(here))
                in_time(get, partial(_size, here), f"nothing more of {place}/{file}")
                if file == "state.json" and (reason := accept(_state(here))):
                    raise ForeignCheckpoint(reason)

    # ----------------------------------------------------------------- to there

    def start(self) -> None:
        """Copy what comes, from now on."""
        self._sweep()
        self._thread = threading.Thread(target=self._watch, name="mirror", daemon=True)
        self._thread.start()

    def finish(self, seconds: float, left_s: Callable[[], float] = lambda: math.inf) -> None:
        """Copy what is not, and end; no longer than so many seconds, nor than `left_s`, which may come to be less."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._last.set()
        until = time.monotonic() + seconds
        most = min(seconds, left_s())
        waiting = (
            f"waiting until the last checkpoint is at {self._url}, {most:.0f} s at most; a signal cuts that to seconds"
        )
        with self._said_if_slow(waiting):
            while thread.is_alive() and (left := min(until - time.monotonic(), left_s())) > 0:
                thread.join(min(left, TICK_S))
        if thread.is_alive() or self._failed or self._lacks_newest():
            newest = [f"{folder}/{names[-1]}" for folder, names in list(self._done.items()) if names]
            self._over = True  # a driver whose process ends under it fails
            self._say(f"the last checkpoint is not at {self._url}; there: {', '.join(newest) or 'none of this start'}")

    def _lacks_newest(self) -> bool:
        """Whether the newest of a folder here is not there; of those that are torn it was said."""
        try:
            for folder in self._folders():
                names = [path.name for path in self._rounds(folder) if path not in self._torn]
                if names and names[0] not in self._done.get(folder.relative_to(self._run).as_posix(), []):
                    return True
        except OSError:
            return True
        return False

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
            self._tell(where, f"checkpoints do not get to {self._url} ({where}: {_what(error)}); {again}")
        else:
            self._failed.pop(where, None)
            self._told.discard(where)

    def _tell(self, what: str, sentence: str) -> None:
        if what not in self._told and not self._over:
            self._told.add(what)
            self._say(sentence)

    def _copy_newest(self, folder: Path, where: str) -> None:
        done = self._done.setdefault(where, [])
        for path in self._rounds(folder):
            if path.name in done:
                return
            if path not in self._torn and self._copy_whole(path, where, done):
                return

    def _copy_whole(self, newest: Path, where: str, done: list[str]) -> bool:
        """Copy it, unless it is torn: whether it is not."""
        leaving, slow = newest.with_name(f".leaving-{newest.name}"), f"{where} slow"
        sentence = (
            f"{where}/{newest.name} is not at {self._url} after {SLOW_S / 60:.0f} minutes of copying, which go on"
        )
        timer = threading.Timer(SLOW_S, self._tell, (slow, sentence))
        timer.daemon = True
        timer.start()
        try:
            _link(newest, leaving)
            try:
                check_files(leaving)
            except CheckpointError as error:
                self._torn.add(newest)
                self._tell(f"{where}/{newest.name}", f"{where}/{newest.name} is not copied to {self._url}: {error}")
                return False
            there = f"{self._root}/{self._owner}/{where}"
            self._copy(leaving, f"{there}/{newest.name}")
            done.append(newest.name)
            kept = KEPT if where == CHECKPOINTS else STAGES_KEPT
            del done[:-kept]
            if len(done) > 1:
                self._prune(there, done, kept)
            if timer.is_alive():
                self._told.discard(slow)
            return True
        finally:
            timer.cancel()
            shutil.rmtree(leaving, ignore_errors=True)

    def _copy(self, leaving: Path, there: str) -> None:
        sums = (leaving / "SHA256SUMS").read_bytes()
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
        if not self._bucket:  # in which there are no folders, and whose owner may not let us make or see buckets
            self.fs.makedirs(there, exist_ok=True)
        for file in sorted(leaving.iterdir(), key=lambda file: file.name == "SHA256SUMS"):
            self.fs.put_file(str(file), f"{there}/{file.name}")

    def _is_there(self) -> bool:
        """Whether there is such a folder, if it is a local one. What is not may be on a share that is not mounted: all
        would seem lost, and copies would fill the disk beneath."""
        if not self._local:
            return True
        try:
            os.stat(self.place)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass  # reading or writing says what
        return True

    def _prune(self, there: str, done: list[str], kept: int) -> None:
        """All but what is `done`, and as much of what earlier starts left, newest first, as makes `kept` of it."""
        try:
            self.fs.invalidate_cache()
            names = {path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(there, detail=False)} - {*done}
            room = kept - len(done)
            for name in sorted(filter(NAME.fullmatch, names), key=lambda name: order(Path(name)), reverse=True):
                if room and self.fs.exists(f"{there}/{name}/SHA256SUMS"):
                    room -= 1
                else:
                    self.fs.rm(f"{there}/{name}", recursive=True)
        except Exception as error:  # each driver has its own; whoever may only write there writes on
            why = _what(error)
            self._tell("old", f"old copies stay at {self._url} ({why}): have whoever keeps it remove them")

    # ----------------------------------------------------------------- here

    def _folders(self) -> list[Path]:
        stages = sorted(path for path in (self._run / "stages").glob("*") if path.name.isdecimal())
        return [self._run / CHECKPOINTS, *stages]

    def _rounds(self, folder: Path) -> list[Path]:
        """Whole ones, that first which was written last: numbers may begin again, where a run goes back to an older
        one, and clocks be set. Of those that were all there at the first look, it is as they say."""
        try:
            paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        before, now = self._seen.get(folder, {}), time.monotonic()
        seen = self._seen[folder] = {path: before.get(path) or (now, _made(path)) for path in paths}
        return sorted(paths, key=lambda path: (*seen[path], order(path)), reverse=True)

    def _sweep(self) -> None:
        """What a process that was killed has left."""
        for folder in self._folders():
            for leftover in (*folder.glob(".leaving-*"), *folder.glob(".arriving-*")):
                shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _said_if_slow(self, sentence: str) -> Iterator[None]:
        timer = threading.Timer(SAY_S, self._say, (sentence,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def in_time(work: Callable[[], T], grown: Callable[[], int] = lambda: 0, late: str = "no answer") -> T:
    """Its result. Raises what it raises, or TimeoutError if `grown` says the same for ANSWER_S; then it goes on in a
    thread that holds up nobody."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="mirror-read", daemon=True).start()
    size, until = grown(), time.monotonic() + ANSWER_S
    while not done.done() and (left := until - time.monotonic()) > 0:
        wait({done}, min(left, TICK_S))
        if (now := grown()) != size:
            size, until = now, time.monotonic() + ANSWER_S
    if not done.done():
        raise TimeoutError(f"{late} within {ANSWER_S:.0f} s")
    return done.result()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _made(path: Path) -> float:
    """When a checkpoint says that it was made, in seconds since the Unix epoch; 0 = it does not."""
    try:
        made = _state(path / "state.json").get("time")
    except (CheckpointError, OSError):
        return 0.0
    return float(made) if isinstance(made, (int, float)) else 0.0


def _link(checkpoint: Path, leaving: Path) -> None:
    """`leaving` keeps the files of `checkpoint`, which may be pruned meanwhile."""
    leaving.mkdir()
    for file in checkpoint.iterdir():
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
        raise CheckpointError(f"state.json is malformed ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError("state.json is malformed")
    return state


def _what(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
