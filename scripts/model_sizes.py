#!/usr/bin/env python3
"""The tables of docs/own-model.md: which well-known model a machine carries, by the estimate that `join` proposes with;
and with which option a recipe of `configs/` fits a machine.

python scripts/model_sizes.py            # print them
python scripts/model_sizes.py --write    # and put them into the page
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from swarm_node.config import NodeConfig, load_config  # noqa: E402
from swarm_node.policy.fitting import Hardware, Training, option_that_fits  # noqa: E402
from swarm_node.policy.sizes import KNOWN, bytes_with, largest_fitting  # noqa: E402

PAGE = ROOT / "docs" / "own-model.md"
GIB = 2**30
MAIN_MEMORY, GPUS = (4, 8, 16, 32), (8, 12, 16, 24, 48, 80)  # free GiB
HEAD = "| free memory | LoRA | all weights |\n|---|---|---|\n"

RECIPES = ("qwen2.5-0.5b", "qwen3-1.7b", "qwen3-4b")  # files of configs/
FREE = 0.92
"""Part of a machine's memory that is taken to be free."""
MACHINES = {
    **{f"GPU, {gib} GB": Hardware("cuda", int(FREE * gib * GIB)) for gib in (8, 12, 16, 24)},
    "CPU only, 16 GB": Hardware("cpu", int(FREE * 16 * GIB)),
}
RECIPE_HEAD = f"| file | {' | '.join(MACHINES)} |\n|---|{'---|' * len(MACHINES)}\n"


def recipe(name: str, machine: Hardware) -> Training:
    """How a recipe trains its model on a machine: with bfloat16 on a GPU and float32 on a CPU, unless it says so."""
    config = load_config(ROOT / "configs" / f"{name}.toml", {})
    model = next(model for model in KNOWN if model.name == config.policy.model)
    width = 2 if machine.gpu or config.policy.dtype == "bfloat16" else 4
    return Training(model, config, config.policy.lora is not False, width)


def recipes() -> str:
    """Markdown: for each recipe and machine, the option with which it fits, and the longest answers then."""
    rows = ""
    for name in RECIPES:
        cells = [_needs(recipe(name, machine), machine) for machine in MACHINES.values()]
        rows += f"| `configs/{name}.toml` | {' | '.join(cells)} |\n"
    return RECIPE_HEAD + rows


def _needs(training: Training, machine: Hardware) -> str:
    option = "" if training.fits(machine) else option_that_fits(training, machine)
    if option and "--model" in option:
        return "no"
    needed = training.least_bytes(machine.gpu) / GIB
    return f"`{option}`" if option else f"yes: {needed:.1f} GiB or more"


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
        page = PAGE.read_text()
        for head, made in (HEAD, table()), (RECIPE_HEAD, recipes()):
            page = re.sub(re.escape(head) + r"(\|.*\n)*", made, page)
        PAGE.write_text(page)
    print(table(), recipes(), sep="\n", end="")


if __name__ == "__main__":
    main()
