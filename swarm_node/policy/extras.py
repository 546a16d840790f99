"""Packages that some settings of a policy need, looked for without torch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.install import pip

BITSANDBYTES = (0, 50)  # oldest version that computes and trains with such weights on a CPU


def check_quantiser(config: PolicyConfig) -> None:
    """Raise UserError if `policy.quantize` is set, and the package that quantises is missing or too old."""
    if config.quantize is None:
        return
    wanted = ".".join(map(str, BITSANDBYTES))
    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:
        found = ""
    if tuple(map(int, re.findall("[0-9]+", found)[:2])) < BITSANDBYTES:
        state = f"{found} is installed" if found else "it is not installed"
        raise UserError(
            f"--quantize {config.quantize} needs bitsandbytes {wanted} or newer, and {state}: {quantiser_command()}"
        )


def quantiser_command() -> str:
    """The command that installs the package that quantises, here."""
    return pip(f"'bitsandbytes>={'.'.join(map(str, BITSANDBYTES))}'")
