"""The package that some settings need, looked for without torch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.install import extra_command

QUANTIZE = "quantize"  # the extra that brings it
BITSANDBYTES = (0, 50)  # oldest version with which weights and moments in 8 bits and less are known to work on a CPU


class PackageMissing(UserError):
    """A package that a setting needs is missing or too old."""


def check_quantiser(config: PolicyConfig) -> None:
    """Raise PackageMissing if `policy.quantize` is set, and the package that quantises is missing or too old."""
    if config.quantize is not None:
        _check(f"--quantize {config.quantize}")


def check_optimizer(name: str, stages: int = 0) -> None:
    """Raise PackageMissing if the `grpo.optimizer` of that name needs a package that is missing or too old; UserError
    if it cannot be had with a policy in `stages`."""
    if name == "adamw":
        return
    if stages:
        raise UserError(
            f"grpo.optimizer = {name} is not for pipeline stages, which share out memory for float32: leave it out"
        )
    _check(f"grpo.optimizer = {name}")


def _check(setting: str) -> None:
    """Raise PackageMissing if the package is missing or too old; `setting` is what needs it."""
    wanted = ".".join(map(str, BITSANDBYTES))
    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:
        found = ""
    if tuple(map(int, re.findall("[0-9]+", found)[:2])) < BITSANDBYTES:
        state = f"{found} is installed" if found else "it is not installed"
        raise PackageMissing(f"{setting} needs bitsandbytes {wanted} or newer, and {state}: {extra_command(QUANTIZE)}")
