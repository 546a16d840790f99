"""Whether the patterns of a saved adapter can be matched with the modules of its base.

PEFT takes them for regular expressions, and a stranger's can take longer than anybody waits. So they are tried first in
a process of its own, which the system ends after `CPU_S` seconds of work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm_node.errors import UserError
from swarm_node.policy.vetting import read_json

CPU_S = 5
MAX_NAMES = 20_000  # of modules, in any list: PEFT compares each with each module of the base
PROGRAM = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.match(pattern, name)
"""


def check_patterns(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if the adapter in `folder` has patterns that PEFT could not match with these names of modules, or
    longer lists than any adapter has."""
    found = read_json(folder / "adapter_config.json")
    lists = [found.get(key) for key in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters")]
    tables = [found.get(key) for key in ("rank_pattern", "alpha_pattern")]
    if any(isinstance(each, list | dict) and len(each) > MAX_NAMES for each in (*lists, *tables)):
        raise UserError(f"{folder}: its adapter names more than {MAX_NAMES:,} modules, which none has")
    patterns = [rf"(?:{each})\Z" for each in lists[:2] if isinstance(each, str)]
    patterns += [rf"(.*\.)?({key})$" for each in tables if isinstance(each, dict) for key in each]
    patterns += [rf".*\.{each}\.(\d+)\." for each in _several(found.get("layers_pattern"))]
    if patterns and not _end(patterns, names):
        raise UserError(
            f"{folder}: the patterns of its adapter (target_modules and others) are no regular expressions, or cannot "
            f"be matched with the names of modules in {CPU_S} seconds"
        )


def _several(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found] if found else []


def _end(patterns: Sequence[str], names: Sequence[str]) -> bool:
    """Whether each pattern can be matched with each name."""
    command = [sys.executable, "-I", "-c", PROGRAM, str(CPU_S)]
    done = subprocess.run(command, input=json.dumps([patterns, list(names)]), text=True, capture_output=True)
    return done.returncode == 0
