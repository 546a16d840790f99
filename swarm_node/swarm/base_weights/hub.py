"""The swarm's model from the Hugging Face hub, if it answers at once and sends fast enough.

    this process --starts, ends--> python -m swarm_node.swarm.base_weights.hub NAME REVISION BYTES --https--> hub

The download runs in a process of its own, because it cannot be stopped otherwise. What has arrived by then stays in the
hub's cache, for the next download; pieces of it need not come from members.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from swarm_node.storage.rundir import existing_part
from swarm_node.swarm.base_weights.files import SPARE_BYTES
from swarm_protocol.manifest import ManifestModel
from swarm_protocol.model_listing import names_of

START_S = 60.0  # how long Python may take to start on a busy machine
ANSWER_S = 6.0  # how long the hub may take to answer
SLOW_S, LEAST_BYTES_S = 15.0, 2**18  # a hub that sends fewer bytes a second for so long is too slow
CHILD_LOOP_S = 0.1
ASKING, ANSWERED = "asking", "answered"
INCOMPLETE = "*.incomplete"  # names of files of the hub's cache that were not downloaded to the end


def is_offline() -> bool:
    """Whether the user has told the hub's library to stay offline (HF_HUB_OFFLINE)."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def in_hub_cache(name: str, revision: str = "") -> Path | None:
    """The directory of earlier downloads of that model, complete or not. Does not ask the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except (OSError, HFValidationError):  # LocalEntryNotFoundError is an OSError; or the name is not valid on the hub
        return None


def download_from_hub(model: ManifestModel, patient: bool = False) -> Path:
    """Download the model; returns its directory in the hub's cache. Raises HubFailed if the hub does not answer, is too
    slow (unless `patient`), or has another model of that name."""
    blobs = _blobs(model.name)
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-m", __name__, model.name, model.revision, str(model.bytes)]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
        try:
            watch(child, lambda: _said(out.fileno()), blobs, patient, time.monotonic)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        lines = _said(out.fileno())
    if child.returncode != 0 or len(lines) != 3:
        raise HubFailed(lines[-1] if len(lines) > 1 else "cannot be asked")
    return Path(lines[2])


class HubFailed(Exception):
    """The hub does not give a model; the message completes the sentence "the hub ..."."""

    def __init__(self, why: str, slow: bool = False) -> None:
        super().__init__(why)
        self.slow = slow  # the hub is sending the model, but slowly


def watch(
    child: subprocess.Popen[bytes],
    said: Callable[[], list[str]],
    blobs: Path,
    patient: bool,
    clock: Callable[[], float],
) -> None:
    """Wait for the child to end. Raises HubFailed if it should be stopped before that."""
    since, limit, there = clock(), START_S, 0
    heard: list[str] = []
    while child.poll() is None:
        time.sleep(CHILD_LOOP_S)
        now, lines = clock(), said()
        if lines != heard:
            heard, since, limit, there = lines, now, SLOW_S if ANSWERED in lines else ANSWER_S, _bytes_in(blobs)
        elif now - since > limit:
            if ANSWERED not in heard:
                raise HubFailed("does not answer")
            have, seconds = _bytes_in(blobs), now - since
            if have - there < LEAST_BYTES_S * seconds and not patient:
                raise HubFailed(f"sends {(have - there) / seconds / 1e6:.1f} MB a second", slow=True)
            since, there = now, have


def _blobs(name: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"


def _bytes_in(folder: Path, names: str = "*") -> int:
    """Bytes on disk of the files of such names."""
    try:
        return sum(path.stat().st_blocks * 512 for path in folder.glob(names))
    except OSError:  # not there yet, or files come and go
        return 0


def _said(descriptor: int) -> list[str]:
    return os.pread(descriptor, 4096, 0).decode(errors="replace").splitlines()


def main(name: str, revision: str, size: int) -> int:
    """Runs in the child: prints ASKING, ANSWERED, then the model's directory, or else why there is none."""
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    print(ASKING, flush=True)
    try:
        found = HfApi().model_info(name, revision=revision or None, files_metadata=True, timeout=ANSWER_S)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or []}
        names = names_of(sizes)
        if sum(sizes[file] for file in names) != size:
            print("has other files of that name")
            return 1
        cached = {file for file in names if isinstance(try_to_load_from_cache(name, file, revision=found.sha), str)}
        missing = sum(sizes[file] for file in names if file not in cached)
        free = shutil.disk_usage(existing_part(Path(HF_HUB_CACHE))).free
        if missing and missing + SPARE_BYTES > free + _bytes_in(_blobs(name), INCOMPLETE):
            print(f"has {missing / 2**30:.1f} GiB more, for which there is no room at {HF_HUB_CACHE}")
            return 1
        print(ANSWERED, flush=True)
        print(snapshot_download(name, revision=found.sha, allow_patterns=names))
    except Exception as error:  # the library may raise anything: members are asked instead
        print(f"does not give it ({type(error).__name__})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
