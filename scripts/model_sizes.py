#!/usr/bin/env python3
"""The table of docs/own-model.md: which well-known model a machine carries, by the estimate that `join` proposes with.

python scripts/model_sizes.py            # print it
python scripts/model_sizes.py --write    # and put it into the page
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from swarm_node.config import NodeConfig  # noqa: E402
from swarm_node.policy.sizes import bytes_with, largest_fitting  # noqa: E402

PAGE = ROOT / "docs" / "own-model.md"
GIB = 2**30
MAIN_MEMORY, GPUS = (4, 8, 16, 32), (8, 12, 16, 24, 48, 80)  # free GiB
HEAD = "| free memory | LoRA | all weights |\n|---|---|---|\n"


def table() -> str:
    """Markdown: the largest fitting model of each size of memory, with the GiB that a round of it takes."""
    adapter = NodeConfig()
    whole = adapter.model_copy(update={"policy": adapter.policy.model_copy(update={"lora": False})})
    rows = ""
    for gpu, sizes in (False, MAIN_MEMORY), (True, GPUS):
        for gib in sizes:
            where = f"{gib} GiB, {'GPU' if gpu else 'main memory'}"
            rows += f"| {where} | {_largest(adapter, gib, gpu)} | {_largest(whole, gib, gpu)} |\n"
    return HEAD + rows


def _largest(config: NodeConfig, gib: int, gpu: bool) -> str:
    model = largest_fitting(config, gib * GIB, gpu)
    return "the starter" if model is None else f"{model.name}: {bytes_with(model, config, gpu) / GIB:.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/own-model.md")
    if parser.parse_args().write:
        PAGE.write_text(re.sub(re.escape(HEAD) + r"(\|.*\n)*", table(), PAGE.read_text()))
    print(table(), end="")


if __name__ == "__main__":
    main()
