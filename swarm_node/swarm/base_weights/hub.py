"""The swarm's model from the Hugging Face hub, if that answers at once and sends it fast enough.

    this process --starts, ends--> python -m swarm_node.swarm.base_weights.hub NAME REVISION BYTES --https--> hub

In a process of its own, because a download cannot be given up otherwise. What it has got by then stays in the hub's
cache, where the next download, or what members lack, goes on from it.
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

from protocol.manifest import ManifestModel
from protocol.model_listing import names_of
from swarm_node.swarm.base_weights.files import SPARE_BYTES

START_S = 60.0
"""How long Python may take to start, on a machine that is busy."""
ANSWER_S = 6.0
"""How long the hub may take to answer."""
WINDOW_S = 15.0
LEAST_BYTES_S = 2**18
"""Who sends less than this for so long is too slow, if members have it too."""
LOOK_S = 0.1
ASKING, ANSWERED = "asking", "answered"


def is_offline() -> bool:
    """Whether the user has told the hub's library to stay offline (HF_HUB_OFFLINE)."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def in_hub_cache(name: str, revision: str = "") -> Path | None:
    """Where earlier downloads of that model lie, whole or not. Asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except (OSError, HFValidationError):  # LocalEntryNotFoundError is an OSError; or the name is none of the hub's
        return None


def download_from_hub(model: ManifestModel, patient: bool = False, clock: Callable[[], float] = time.monotonic) -> Path:
    """The directory that the hub's library has put it in. Raises HubFailed if the hub is closed or too slow (unless
    `patient`), or has something else of that name."""
    blobs = _blobs(model.name)
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-m", __name__, model.name, model.revision, str(model.bytes)]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
        try:
            watch(child, lambda: _said(out.fileno()), blobs, patient, clock)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        lines = _said(out.fileno())
    if child.returncode != 0 or len(lines) != 3:
        raise HubFailed(lines[-1] if len(lines) > 1 else "cannot be asked")
    return Path(lines[2])


class HubFailed(Exception):
    """Why the hub does not give a model, as the rest of a sentence about it."""

    def __init__(self, why: str, slow: bool = False) -> None:
        super().__init__(why)
        self.slow = slow
        """It would, in time."""


def watch(
    child: subprocess.Popen[bytes],
    said: Callable[[], list[str]],
    blobs: Path,
    patient: bool,
    clock: Callable[[], float],
) -> None:
    """Until it has ended. Raises HubFailed if it is to be ended before that."""
    since, limit, there = clock(), START_S, 0
    heard: list[str] = []
    while child.poll() is None:
        time.sleep(LOOK_S)
        now, lines = clock(), said()
        if lines != heard:
            heard, since, limit, there = lines, now, WINDOW_S if ANSWERED in lines else ANSWER_S, _bytes_in(blobs)
        elif now - since <= limit:
            continue
        elif ANSWERED not in heard:
            raise HubFailed("does not answer")
        else:
            have, seconds = _bytes_in(blobs), now - since
            if have - there < LEAST_BYTES_S * seconds and not patient:
                raise HubFailed(f"sends {(have - there) / seconds / 1e6:.1f} MB a second", slow=True)
            since, there = now, have


def _blobs(name: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"


def _free_bytes(folder: Path) -> int:
    """Of the disk on which `folder` is, or would be."""
    return shutil.disk_usage(next(one for one in (folder, *folder.absolute().parents) if one.exists())).free


def _begun_bytes(blobs: Path) -> int:
    """On disk, of files that were cut off."""
    return sum(path.stat().st_blocks * 512 for path in blobs.glob("*.incomplete"))


def _bytes_in(folder: Path) -> int:
    try:
        return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))
    except OSError:  # not made yet, or files that come and go
        return 0


def _said(descriptor: int) -> list[str]:
    return os.pread(descriptor, 4096, 0).decode(errors="replace").splitlines()


def main(name: str, revision: str, size: int) -> int:
    """In the process of its own: prints ASKING, ANSWERED, then where the model is; or why not."""
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
        missing, free = sum(sizes[file] for file in names if file not in cached), _free_bytes(Path(HF_HUB_CACHE))
        if missing and missing + SPARE_BYTES > free + _begun_bytes(_blobs(name)):
            print(f"has {missing / 2**30:.1f} GiB more, for which there is no room at {HF_HUB_CACHE}")
            return 1
        print(ANSWERED, flush=True)
        print(snapshot_download(name, revision=found.sha, allow_patterns=names))
    except Exception as error:  # whatever its library raises: members are asked instead
        print(f"does not give it ({type(error).__name__})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
