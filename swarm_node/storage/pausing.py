"""RUN/paused, the file by which its owner pauses a run."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

from swarm_node.storage.plain_files import open_plain


def pause_asked(path: Path, now: float) -> str:
    """Why the file `path` (RUN/paused) pauses the node; empty = it does not. A file that cannot be read has no end."""
    try:
        with open_plain(path) as file:
            text = file.read(64).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError:
        text = ""
    try:
        until = float(text)
    except ValueError:
        until = math.inf
    if now >= until:
        return ""
    return f"by `swarm-node pause`{until_words(until)}"


def until_words(time_s: float) -> str:
    """` until` that Unix time; empty for a pause without end."""
    if time_s == math.inf:
        return ""
    try:
        return datetime.fromtimestamp(time_s).strftime(" until %Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return " until further notice"
