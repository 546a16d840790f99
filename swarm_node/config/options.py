"""Keys of the configuration that have an option of their own on the command line, in the order of `--help`.

A row adds to a field what only the command line needs. Type, limits, default and explanation are those of the field:
`--help` shows the first sentence of its documentation. `cli/options.py` makes the commands' parameters from these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from swarm_node.config.keys import VARIABLE_PREFIX, all_keys, all_meanings

NETWORK = "Network"
CLOUD = "Cloud"
LIMITS = "Resource limits"
TRAINING = "Training"
STAGES = "Pipeline stages"
LOGS = "Logs"
OF_A_SWARM = "Merging a swarm"
KINDS = "number|maths|choice|…"


class KeyOption(NamedTuple):
    """An option that sets one key."""

    key: str
    flag: str  # the option as typed; a name without dashes is an argument
    commands: str  # the commands that have it, with spaces between
    panel: str | None = None
    metavar: str | None = None
    says: Mapping[str, str] = MappingProxyType({})
    """Command -> explanation, where the key means something else to that command."""
    value: str = ""
    """The value that the option sets, if it is a flag for one value of a key that is no switch."""

    @property
    def name(self) -> str:
        """`max_cpu` for `--max-cpu`: the parameter, and in capitals the end of the environment variable."""
        return self.flag.removeprefix("--").replace("-", "_").lower()


def preset(name: str, meaning: str) -> KeyOption:
    """The flag for a preset of resource limits."""
    commands = "local join resume"
    says = dict.fromkeys(commands.split(), f"{meaning} (resources.preset = {name})")
    return KeyOption("resources.preset", f"--{name}", commands, says=says, value=name)


OPTIONS = (
    KeyOption("swarm", "SWARM", "join bootstrap"),
    KeyOption("name", "--name", "join bootstrap", metavar="NAME"),
    KeyOption(
        "policy.model",
        "--model",
        "local join bootstrap bench doctor",
        metavar="PATH|ID",
        says={
            "bootstrap": "The swarm's model, to give it to members who lack it.",
            "doctor": "Model to look at: does it fit this machine? Nothing of its weights is loaded.",
        },
    ),
    KeyOption(
        "policy.model",
        "--model",
        "merge",
        OF_A_SWARM,
        "PATH|ID",
        {"merge": "Model that the swarm's members started from."},
    ),
    KeyOption(
        "tasks",
        "--tasks",
        "local new bootstrap",
        metavar="NAME|FILE",
        says={
            "new": "Task, set of tasks (see `swarm-node tasks`), question file (.jsonl, .csv, …), data set of the hub "
            "(hf:OWNER/NAME), or an https address.",
            "bootstrap": "Question file of the swarm, to give it to members.",
        },
    ),
    KeyOption("rewards.answer", "--answer", "new tasks", metavar="any|tags|boxed"),
    KeyOption("rewards.kind", "--kind", "new tasks", metavar=KINDS),
    preset("gentle", "Lowest priority, half of the cores, pause on battery"),
    preset("normal", "Lower priority, all cores"),
    preset("all", "No limit, also where `join` would be gentle"),
    KeyOption("minutes", "--minutes", "local join resume"),
    KeyOption("rounds", "--rounds", "local join resume"),
    KeyOption("run_dir", "--run-dir", "local join bootstrap identity", metavar="DIR"),
    KeyOption("resources.max_cpu", "--max-cpu", "local join", LIMITS, "PERCENT"),
    KeyOption("resources.max_memory_gb", "--max-memory", "local join bootstrap eval merge", LIMITS, "GIB"),
    KeyOption("network.max_upload_mbit", "--max-upload", "join bootstrap", LIMITS, "MBIT/S"),
    KeyOption("network.max_download_mbit", "--max-download", "join bootstrap", LIMITS, "MBIT/S"),
    KeyOption("resources.quiet_hours", "--quiet-hours", "local join", LIMITS, "FROM-TO"),
    KeyOption("resources.pause_on", "--pause-on", "local join", LIMITS),
    KeyOption("resources.nice", "--nice", "local join bootstrap", LIMITS),
    KeyOption("policy.threads", "--threads", "local join bench", LIMITS),
    KeyOption(
        "tasks",
        "--tasks",
        "join",
        TRAINING,
        "NAME|FILE",
        {"join": "Train only on these of the swarm's tasks; or your copy of one of its question files."},
    ),
    KeyOption("rewards.answer", "--answer", "local", TRAINING, "any|tags|boxed"),
    KeyOption("rewards.kind", "--kind", "local", TRAINING, KINDS),
    KeyOption("rewards.functions", "--reward", "local join", TRAINING, "FILE.py:FUNCTION"),
    KeyOption("policy.lora", "--lora", "local join bench doctor", TRAINING),
    KeyOption("policy.quantize", "--quantize", "local join bench doctor", TRAINING, "nf4|int8"),
    KeyOption("sharing.own", "--own", "join", TRAINING),
    KeyOption("sharing.foreign", "--foreign", "join", TRAINING),
    KeyOption("sharing.record", "--record", "join", TRAINING),
    KeyOption(
        "averaging.method",
        "--no-averaging",
        "join",
        TRAINING,
        says={"join": "Share answers only: exchange no weights, which saves traffic (averaging.method = none)."},
        value="none",
    ),
    KeyOption("seed", "--seed", "local join", TRAINING),
    KeyOption(
        "pipeline.stages",
        "--stages",
        "local join",
        STAGES,
        says={"local": "Number of pipeline stages that the policy is split into, each in its own process."},
    ),
    KeyOption("pipeline.crew", "--crew", "join", STAGES, "NAME"),
    KeyOption("pipeline.stage", "--stage", "join", STAGES, "auto|K"),
    KeyOption("network.identity", "--identity", "join bootstrap identity", NETWORK, "FILE"),
    KeyOption("network.listen", "--listen", "join bootstrap", NETWORK, "IP"),
    KeyOption("network.announce", "--announce", "join bootstrap", NETWORK, "IP|HOST"),
    KeyOption("network.port", "--port", "join bootstrap", NETWORK),
    KeyOption("network.gossip_port", "--gossip-port", "join bootstrap", NETWORK),
    KeyOption("network.bootstrap", "--bootstrap", "join new bootstrap", NETWORK, "ADDR"),
    KeyOption("network.dial_only", "--dial-only", "join", NETWORK),
    KeyOption("network.serve_relay", "--relay", "join bootstrap", NETWORK),
    KeyOption("spot.cloud", "--spot", "local join", CLOUD),
    KeyOption("checkpoints.to", "--checkpoint-to", "local join", CLOUD, "URL"),
    KeyOption("health.port", "--health-port", "local join bootstrap", CLOUD),
    KeyOption("price_per_hour", "--price-per-hour", "local join", CLOUD, "PRICE"),
    KeyOption("log", "--log", "local join", LOGS),
    KeyOption("log_format", "--log-format", "local join resume bootstrap", LOGS),
)
"""Options that a volunteer needs come first. The others have panels of their own, in the order of the rows."""


def keys_by_name() -> dict[str, str]:
    """Name -> key of all that has a name: an option (`max_cpu`), or a key alone (`averaging__every`)."""
    plain = {key.replace(".", "__"): key for key in all_keys() if "[]" not in key}
    return plain | {option.name: option.key for option in OPTIONS}


def all_variables() -> dict[str, str]:
    """Environment variable -> key."""
    of_flags = {option.name for option in OPTIONS if option.value}
    return {VARIABLE_PREFIX + name.upper(): key for name, key in keys_by_name().items() if name not in of_flags}


def variable_of(key: str) -> str:
    """The environment variable that every key has, also one with an option of its own."""
    return VARIABLE_PREFIX + key.replace(".", "__").upper()


def explanation(key: str) -> str:
    """The first sentence of the key's documentation."""
    text = " ".join(all_meanings().get(key, "").split())
    return text.partition(". ")[0].removesuffix(".") + "."
