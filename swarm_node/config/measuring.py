"""Settings of a measurement: which keys `swarm-node eval` takes from its user, over those of a run or of a model.

It trains nothing, so keys that only training has are not its own. On the command line such a key is refused. A file and
the environment may be a node's, so what only a node has is left out there, which is said.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm_node.config.keys import VARIABLE_PREFIX, Table, flat, merged, nest
from swarm_node.config.loading import SETS_VARIABLE, Layers, check_prompt, together
from swarm_node.config.node import NodeConfig
from swarm_node.config.own import listed
from swarm_node.config.section import Section
from swarm_node.errors import UserError

MEASURED = {"tasks", "policy", "rewards", "rollouts", "eval"}  # keys, sections among them, that a measurement has
LIMIT = "resources.max_memory_gb"  # the one key of its section that a measurement has
ONLY_TRAINED = {
    *("policy.lora", "policy.lora_rank", "policy.lora_alpha", "policy.lora_targets"),
    *("rollouts.groups", "rollouts.group_size", "eval.every", "eval.share"),
}
"""Keys of those sections that only training has."""
INSTEAD = {
    "policy.model": "name the model itself: `swarm-node eval MODEL`",
    "rollouts.group_size": "eval.samples is the number of answers to a question",
    "seed": "every measurement samples with the same seeds",
}


def of_a_measurement(layers: Layers, is_run: bool, say: Callable[[str], None]) -> Table:
    """The settings of a measurement in `layers`, in one table. `is_run`: a run is measured, whose base may be elsewhere
    (`policy.model`). Raises UserError for a key that the command line, or a variable of a measurement's section, sets
    in vain; `say` is told what else is left out."""
    together(layers)
    found: Table = {}
    left_out = []
    for source, layer in layers:
        for key, value in flat(layer).items():
            if is_measured(key, is_run):
                found = merged(found, nest(key, value))
            elif source in ("--set", SETS_VARIABLE) or (source.startswith(VARIABLE_PREFIX) and _is_near(key)):
                hint = INSTEAD.get(key, "it belongs to training or to a node, and `eval` does neither")
                raise UserError(f"{source} {key}: `eval` does not use it; leave it out: {hint}")
            else:
                left_out.append(source if source.startswith(VARIABLE_PREFIX) else key)
    if left_out:
        say(f"not used by a measurement: {listed(list(dict.fromkeys(left_out)))}")
    return found


def over(config: NodeConfig, table: Table) -> NodeConfig:
    """`config` with the settings in `table`, which were checked one by one. Raises UserError."""
    given = NodeConfig.model_validate(table)
    for key, value in table.items():
        new, old = getattr(given, key), getattr(config, key)
        if isinstance(old, Section):
            new = old.model_copy(update={name: getattr(new, name) for name in value})
        config = config.model_copy(update={key: new})
    check_prompt(config)
    return config


def is_measured(key: str, is_run: bool) -> bool:
    """Whether a measurement, of a run or else of a model, uses the key."""
    own = key == LIMIT or (key.partition(".")[0] in MEASURED and key not in ONLY_TRAINED)
    return own and (is_run or key != "policy.model")


def _is_near(key: str) -> bool:
    """Whether a user may believe that a measurement uses the key."""
    return key == "seed" or key.partition(".")[0] in MEASURED
