"""Which extras a start needs: looked at first, since a refusal is to come at once. Loads nothing that takes time."""

from __future__ import annotations

from swarm_node.config import NodeConfig
from swarm_node.install import check_extra, check_package, has_extra
from swarm_node.say import Say
from swarm_node.tasks.catalogue import ALLOWED, SETS, STARTER


def with_extras(config: NodeConfig, say: Say = lambda text: None) -> NodeConfig:
    """`config` with the questions of this package, if it names none and reasoning-gym, whose questions a node asks by
    default, is not installed, which `say` is told. UserError if an extra that it needs is not."""
    for needed, what in (
        (config.swarm is not None, "a swarm"),
        (config.pipeline.stages > 0, "a policy in stages"),
        (config.health.port > 0, "--health-port"),
    ):
        if needed:
            check_extra("swarm", what)
    for sink in config.log:
        check_package(sink, sink, f"log = [{sink!r}]")
    if config.swarm is not None or has_extra("puzzles"):
        return config
    if "tasks" in config.model_fields_set:
        for task in config.tasks:
            name = (task if isinstance(task, str) else task.env) or ""
            if name in ALLOWED or {name, name.rpartition("/")[0]} & SETS.keys():
                check_extra("puzzles", f"task {name!r}")
        return config
    say(f"the questions are those of this package (--tasks {STARTER}), since reasoning-gym is not installed")
    return config.model_copy(update={"tasks": [STARTER]})
