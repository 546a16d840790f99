#!/usr/bin/env python3
"""What an installation downloads: packages and megabytes of a report of pip.

pip install --dry-run --ignore-installed --report report.json 'swarm-node[swarm,puzzles]'
python scripts/download_size.py report.json
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit


def size_of(url: str) -> int:
    """Bytes of the file at `url`."""
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path)).stat().st_size
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


if __name__ == "__main__":
    found = [each["download_info"]["url"] for each in json.loads(Path(sys.argv[1]).read_text())["install"]]
    print(f"{len(found)} packages, {sum(map(size_of, found)) / 1e6:,.0f} MB")
