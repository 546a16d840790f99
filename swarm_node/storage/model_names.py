"""What to call a model that lies in a cache, whose directory is named by a digest or a commit.

HF_HOME/swarm-node/<digest>/                           a model from members; the file <digest>.name has its name
HF_HOME/hub/models--OWNER--NAME/snapshots/<commit>/    a model of the hub
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from swarm_node.storage.plain_files import read_plain

DIGEST = re.compile(r"[0-9a-f]{64}")
SNAPSHOT = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[0-9a-f]+/?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")  # as in manifests
SHORT = 8  # digits of a digest without a name


def model_name(model: str) -> str:
    """How to call the model at `policy.model` in sentences: by its name, where that is a place in a cache."""
    if snapshot := SNAPSHOT.search(model):
        return snapshot[1].replace("--", "/")
    folder = Path(model)
    if not DIGEST.fullmatch(folder.name):
        return model
    try:
        name = read_plain(_file(folder), 128).decode()
    except (OSError, UnicodeDecodeError):  # fetched by an earlier version, or removed
        name = ""
    return name if NAME.fullmatch(name) else f"model {folder.name[:SHORT]}…"


def keep_name(folder: Path, name: str) -> None:
    """Remember how a swarm calls the model in `folder`, if that is a cache's. It is only for looking at: an error is
    ignored."""
    if DIGEST.fullmatch(folder.name) and model_name(str(folder)) != name:
        with suppress(OSError):
            _file(folder).write_text(name)


def _file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.name")
