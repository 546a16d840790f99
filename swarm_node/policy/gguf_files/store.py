"""What GGUF files become: a directory for each file, named by the file's sha256, in Hugging Face layout.

    $HF_HOME/swarm-node/models/<sha256>/            config, tokenizer, model.safetensors (float32)
                                       gguf.json    sizes, times and sha256 of these files, and where the GGUF file lay
                              <sha256>.partial/     while it is written, under the lock <sha256>.lock

One process of a machine reads a file, and others wait for it. Two machines get the same bytes from the same file, as
long as their versions of transformers write alike; the weights are the same in any case.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

import msgspec
import psutil
from filelock import FileLock, Timeout

from swarm_node.errors import TemporaryError, UserError
from swarm_node.policy.gguf_files.header import Header, read_header
from swarm_node.say import Say, Warned
from swarm_node.storage.cgroups import free_main_memory
from swarm_node.storage.room import free_bytes
from swarm_node.storage.rundir import os_errors_explained, sync

NAMED = 16  # hexadecimal digits of its file's sha256 in the name of a model
FORMAT = 1  # of the directories: an earlier one is made anew
RECORD = "gguf.json"
VALUE_BYTES = 4  # of a dequantised value
PROGRAM_BYTES = 700 * 2**20  # the process that dequantises, beside the values (measured: 640 MiB)
COPIES = 2  # of the values, that it holds at most
STARTS_S = 600.0  # the process that dequantises gets so long, and more for the bytes of the file
BYTES_PER_S = 2**18  # that it reads even on a slow and busy machine (measured: ten times as many)
SPARE_BYTES = 256 * 2**20  # disk space that is left free
CHILD = "swarm_node.policy.gguf_files.converting"
RUN = (
    "import json, runpy, sys; sys.path[:0] = json.loads(sys.argv[3]); "
    "runpy.run_module(sys.argv[4], run_name='__main__')"
)
OFFLINE = {
    "HF_HUB_OFFLINE": "1",  # nothing that a file names is fetched
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class KeptFile(msgspec.Struct, frozen=True):
    """One file of a directory. While its size and the time of its last change are the same, so is its content."""

    size: int
    changed_ns: int
    sha256: str


class Record(msgspec.Struct, frozen=True):
    """What a directory was made of, and what it holds."""

    format: int
    source: str  # where the GGUF file lay
    files: dict[str, KeptFile]


def models() -> Path:
    """The directory of all that was made of GGUF files."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "swarm-node" / "models"


def sha256_of(file: Path) -> str:
    """sha256 of a file's content, in hexadecimal. Raises UserError."""
    with os_errors_explained(file):
        stat = file.stat()
        return _sha256(file, (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@lru_cache(maxsize=64)
def _sha256(file: Path, mark: tuple[int, int, int]) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def folder_of(file: Path, say: Say, named: str = "") -> Path:
    """The directory that has the model of a GGUF file; dequantises it if that was not done before. `named`: how the
    user calls it. Raises UserError if the file cannot be read, or if memory or disk do not suffice."""
    header, digest = read_header(file), sha256_of(file)
    if (found := kept(digest, say)) is not None:
        return found
    folder = models() / digest
    with os_errors_explained(folder), _only_process(digest, named or file.name, say):
        if (found := kept(digest, say)) is None:  # else another process has made it meanwhile
            check_fits(file, header, folder)
            size = VALUE_BYTES * header.values / 1e6
            place = f"kept in {folder} ({size:,.1f} MB)"
            say(f"reading {named or file}: dequantised once to float32, which takes up to minutes, and {place}")
            _make(file, folder)
    return folder


def kept(digest: str, say: Say = lambda sentence: None) -> Path | None:
    """The directory of the GGUF file with that sha256, if it is here and nothing in it has changed."""
    folder = models() / digest
    record = _record(folder)
    if record is None or record.format != FORMAT:
        return None
    if any(not _is_same(folder / name, was) for name, was in record.files.items()):
        say(Warned(f"{folder} has changed since it was made of {record.source}: it is made anew"))
        return None
    return folder


def swarm_name(folder: Path) -> str:
    """How a model in such a directory is called among members of a swarm: the same on every machine."""
    return f"gguf-{folder.name[:NAMED]}"


def kept_as(name: str) -> Path | None:
    """The directory of the model that members call so, if it is here."""
    if not re.fullmatch(f"gguf-[0-9a-f]{{{NAMED}}}", name):
        return None
    found = [each.parent.name for each in models().glob(f"{name.removeprefix('gguf-')}*/{RECORD}")]
    return kept(found[0]) if len(found) == 1 else None


def kept_from(file: Path) -> Path | None:
    """The directory of a GGUF file that is not there any more; None unless exactly one file lay there."""
    source = str(file.absolute())
    found = [
        each.parent for each in models().glob(f"*/{RECORD}") if (one := _record(each.parent)) and one.source == source
    ]
    return kept(found[0].name) if len(found) == 1 else None


def made_of(folder: Path) -> str:
    """The name of the GGUF file that such a directory was made of, with its sha256; empty for other directories."""
    record = _record(folder) if folder.resolve().parent == models().resolve() else None
    return "" if record is None else f"{Path(record.source).name}, sha256 {folder.name}"


def _record(folder: Path) -> Record | None:
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _is_same(path: Path, was: KeptFile) -> bool:
    try:
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) == (was.size, was.changed_ns):
            return True
        return stat.st_size == was.size and sha256_of(path) == was.sha256  # copied, for example
    except (OSError, UserError):
        return False


def check_fits(file: Path, header: Header, folder: Path) -> None:
    """Raise UserError if this machine cannot dequantise a file: memory, disk."""
    size = VALUE_BYTES * header.values
    needed, free = PROGRAM_BYTES + COPIES * size, free_main_memory() or psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"{file} takes about {needed / 2**30:.1f} GiB of memory to be dequantised, where {free / 2**30:.1f} GiB "
            "are free: close other programs, or take a smaller model"
        )
    room = free_bytes(folder.parent)
    if size + SPARE_BYTES > room:
        raise TemporaryError(
            f"{file} takes {size / 2**30:.1f} GiB at {folder.parent} once it is dequantised, where "
            f"{room / 2**30:.1f} GiB are free: make room, or choose another disk with HF_HOME"
        )


@contextmanager
def _only_process(digest: str, named: str, say: Say) -> Iterator[None]:
    """Only one process of this machine makes a directory. The kernel releases the lock if that one dies."""
    models().mkdir(parents=True, exist_ok=True)
    lock = FileLock(models() / f"{digest}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"another process of this machine is reading {named}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(file: Path, folder: Path) -> None:
    """Dequantise `file` into `folder`, which appears as a whole."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _convert(file, partial)
        files = {path.name: _kept(path) for path in sorted(partial.iterdir())}
        record = Record(FORMAT, str(file.absolute()), files)
        (partial / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        for name in [*files, RECORD]:
            sync(partial / name)
        if folder.exists():  # damaged, or of an earlier format
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _kept(path: Path) -> KeptFile:
    stat = path.stat()
    return KeptFile(stat.st_size, stat.st_mtime_ns, sha256_of(path))


def _convert(file: Path, out: Path) -> None:
    """Run the program that dequantises. Raises UserError."""
    paths = json.dumps([*map(str, sys.path)])
    command = [sys.executable, "-I", "-c", RUN, str(file.absolute()), str(out.absolute()), paths, CHILD]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pipe = subprocess.PIPE  # the child ends when it closes, also if this process is killed
        with subprocess.Popen(command, stdin=pipe, stdout=output, stderr=errors, env=os.environ | OFFLINE) as child:
            try:
                code = child.wait(STARTS_S + file.stat().st_size / BYTES_PER_S)
            except subprocess.TimeoutExpired as error:
                child.kill()
                raise UserError(f"cannot read {file}: to dequantise it took more than {error.timeout:.0f} s") from None
            except BaseException:
                child.kill()
                raise
        told, last = _told(output), _last_line(errors)
    if code == 0 and told == "":
        return
    if code == -signal.SIGKILL:
        told = "the system ended the process that dequantises it, for lack of memory"
    raise UserError(f"cannot read {file}: {told or f'the process that dequantises it ended: {last}'}")


def _told(output: IO[bytes]) -> str:
    """What the child says is wrong with the file."""
    output.seek(0)
    return " ".join(output.read(4096).decode(errors="replace").split())


def _last_line(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 4096))
    return errors.read().decode(errors="replace").strip().rpartition("\n")[2][:200]
