"""Sampling engines by name: `rollouts.engine` names one of `ENGINES`, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Callable

from swarm_node.config.plugins import load_function
from swarm_node.policy.engines.base import Engine
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.engines.transformers import TransformersEngine

ENGINES: dict[str, Callable[..., Engine]] = {"native": NativeEngine, "transformers": TransformersEngine}
"""Each is called with (model, ids that end a sequence, padding id)."""


def find_engine(name: str) -> Callable[..., Engine]:
    """The kind of engine that `rollouts.engine` names. UserError if it is code that cannot be loaded."""
    return ENGINES.get(name) or load_function(name, "rollouts.engine")
