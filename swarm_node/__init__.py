"""swarm-node: one command makes any machine a peer that improves its own language model by reinforcement learning.

    import swarm_node

    result = swarm_node.train({"tasks": ["gcd"], "rounds": 20})

docs/api.md describes `train` and its callbacks. Importing this package loads nothing; its names are loaded when used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_node.cli.commands.export import export_run as export
    from swarm_node.config import NodeConfig
    from swarm_node.errors import UserError
    from swarm_node.runtime.api import train
    from swarm_node.runtime.callbacks import Callback, TrainResult

__version__ = "0.1.0"

__all__ = ["Callback", "NodeConfig", "TrainResult", "UserError", "export", "train"]

_PLACES = {
    "Callback": ("runtime.callbacks", "Callback"),
    "NodeConfig": ("config", "NodeConfig"),
    "TrainResult": ("runtime.callbacks", "TrainResult"),
    "UserError": ("errors", "UserError"),
    "export": ("cli.commands.export", "export_run"),
    "train": ("runtime.api", "train"),
}
"""Name -> (module of this package, name there)."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'swarm_node' has no attribute {name!r}")
    module, there = _PLACES[name]
    return getattr(import_module(f"{__name__}.{module}"), there)
