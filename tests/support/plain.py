"""A Python that finds no package of any extra, as after a plain `pip install swarm-node`."""

from __future__ import annotations

from swarm_node.install import EXTRA_OF

HIDE = f"""
import importlib.metadata
import sys

HIDDEN = {set(EXTRA_OF)!r}
from_name = importlib.metadata.Distribution.from_name

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def of_those_that_are_seen(name):
    if name.replace("-", "_") in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)

sys.meta_path.insert(0, Hidden())
importlib.metadata.Distribution.from_name = of_those_that_are_seen
"""
"""A program to run first."""
