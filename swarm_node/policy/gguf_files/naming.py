"""Which GGUF file a user means by a path. Loads no torch."""

from __future__ import annotations

import re
from pathlib import Path

from swarm_node.errors import UserError
from swarm_node.policy.gguf_files.header import split_text
from swarm_node.storage.utf8 import check_utf8

SUFFIX = ".gguf"
PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$", re.IGNORECASE)
BESIDE = re.compile(r"^mmproj", re.IGNORECASE)  # what a model sees with, which is no model of text
MOST_NAMED = 8


def gguf_at(path: str) -> Path | None:
    """The GGUF file that `path` is or would be, or the one in a directory that has no weights in safetensors. None for
    anything else. Raises UserError if a directory has several, and for a part of one."""
    place = Path(path).expanduser()
    if place.suffix.lower() == SUFFIX and not place.is_dir():
        return _whole(place)
    if not place.is_dir() or any(place.glob("*.safetensors")):
        return None
    files = sorted(file for file in place.iterdir() if file.suffix.lower() == SUFFIX and not BESIDE.match(file.name))
    if len(files) > 1 and not all(PART.search(file.name) for file in files):
        more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
        names = ", ".join(file.name for file in files[:MOST_NAMED])
        raise UserError(f"{path} has several GGUF files: name the one to train, as {files[0]} ({names}{more})")
    return _whole(files[0]) if files else None


def _whole(file: Path) -> Path:
    check_utf8(file)
    if (part := PART.search(file.name)) and int(part[2]) > 1:
        raise UserError(split_text(file, int(part[2])))
    return file
