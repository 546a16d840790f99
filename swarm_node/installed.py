"""How this installation came about, and so what mends it: commands for people, for `doctor` and for what peers tell."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

from protocol.messages import PROTOCOL_VERSION


def install_command() -> str:
    """Install swarm-node anew, with a Python it is tested with."""
    if _by() == "pipx":
        return "pipx reinstall swarm-node --python 3.12"
    return "uv tool install --reinstall --python 3.12 swarm-node"


def upgrade_command() -> str:
    """Get the newest release."""
    known = {"uv": "uv tool upgrade swarm-node", "pipx": "pipx upgrade swarm-node"}
    return known.get(_by()) or pip("--upgrade swarm-node")


def pip(arguments: str) -> str:
    """`pip install` into this installation, which may lack pip."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python} {arguments}"
    return f"{python} -m pip install {arguments}"


def torch_command(version: str) -> str:
    """Replace a torch for the CPU alone by one that can use a GPU."""
    if importlib.util.find_spec("pip") is None:
        return pip(f"--reinstall-package torch torch=={version} --torch-backend=auto")
    return f"{shlex.quote(sys.executable)} -m pip uninstall -y torch && {pip(f'torch=={version}')}"


def outdated(who: str) -> str:
    """That `who` speaks a protocol which this node is too old for."""
    return (
        f"{who} speaks a newer protocol than this node, which speaks {PROTOCOL_VERSION}, and is not heard here; "
        f"to upgrade: {upgrade_command()}"
    )


def _by() -> str:
    parts = Path(sys.prefix).parts
    return "uv" if {"uv", "tools"} <= set(parts) else "pipx" if "pipx" in parts else ""
