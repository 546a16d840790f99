"""Nodes in processes of their own, which a test tells what to do."""

from __future__ import annotations

import json
import sys


def obey(node: object) -> None:
    """Say "ready"; then call `node.do_NAME(ARGUMENT, …)` for each line [NAME, ARGUMENT, …] of standard input, and
    answer with a line of JSON."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(node, f"do_{name}")(*arguments)), flush=True)
