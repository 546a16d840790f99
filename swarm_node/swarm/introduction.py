"""What a node says when it first joins a swarm: what leaves this machine, and what the swarm is for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from textwrap import shorten

from swarm_node.config import NetworkConfig, NodeConfig
from swarm_node.config.keys import flat
from swarm_node.config.own import read_toml
from swarm_node.policy.gguf_files.smollm2 import PARAMETERS, SMOLLM2, WHEEL_MB
from swarm_node.policy.model_path import parameters, starter_path
from swarm_node.policy.sizes import bytes_with, largest_fitting
from swarm_node.say import Say
from swarm_node.storage.model_names import model_name
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.links import Swarm, kept_manifest
from swarm_node.swarm.question_files import names_of_files
from swarm_node.tasks.taskset import TaskSet
from swarm_protocol.answer_form import WRITTEN
from swarm_protocol.errors import printable
from swarm_protocol.manifest import Manifest

EXAMPLES = 3  # questions, and names of kinds and files, that are shown
DRAWN = 24  # questions among which examples of different kinds are looked for
QUESTION_CHARS = 60
DECIDE_S = 5.0  # how long a user at a terminal has to refuse
OFF = "\n    (off: {})"
DECLARED = "its success, its version, and whose answers it uses" + OFF.format("--set sharing.declare=false")
MORE = "`swarm-node status` shows the memory and traffic that it takes."
Memory = Callable[[], tuple[int, bool]]  # (free bytes of memory, whether it is a GPU's)


def say_what_leaves(swarm: Swarm, config: NodeConfig, run: RunDir, say: Say, trains: bool = True) -> bool:
    """Say what members will see of this machine, before they do: once for each swarm and run directory. Nothing is
    said of a swarm that was made here for processes of this machine. The user of a run whose earlier version declared
    nothing is told of that alone. Returns whether all was said."""
    if not swarm.named and config.network.listen == "127.0.0.1":
        return False
    kept = kept_manifest(run)
    if kept is not None and kept.swarm_id == swarm.id:
        if trains and config.sharing.declare and _declared_nothing(run):
            say(f"new in this version: members of the swarm will also see {DECLARED}")
        return False
    staged, averages = config.pipeline.stages > 0, config.averaging.method != "none"
    points = ["your IP address and the node's name" + (", its speed and its kind of model" if trains else "")]
    if trains:
        points.append("every answer that your model writes")
    if trains and (staged or averages):
        points.append("the weights that it trains" + ("" if staged else OFF.format("--no-averaging")))
    if trains and config.sharing.declare:
        points.append(DECLARED)
    if config.sharing.give_model and (swarm.manifest is None or swarm.manifest.model is not None):
        if_any = "" if swarm.manifest else ", if it has one"
        points.append(f"the files of the swarm's model{if_any}" + OFF.format("--set sharing.give_model=false"))
    if swarm.manifest is None or names_of_files(swarm.manifest):
        points.append("the swarm's question files" + ("" if swarm.manifest else ", if it has any"))
    points.append("no other file of this machine")
    relays = "Others may connect through this node" if config.network.serve_relay else "This node relays nothing"
    stored = f"\nAnswers of others are kept in {run.path}, and never executed.\n{_takes(config)}" if trains else ""
    seen = "".join(f"\n  - {point}" for point in points)
    until = f" (a terminal waits {DECIDE_S:.0f} seconds)" if trains else ""
    say(
        f"first time in this swarm. Its members, anybody with its link, will see:{seen}\n{relays} (--relay).\n"
        f"{_listens(config.network, trains)}{stored}\n"
        f"Press Ctrl-C now if you do not want this{until}."
    )
    return True


def _listens(network: NetworkConfig, trains: bool) -> str:
    """Where others can connect to this node and, unless it is a bootstrap, how to keep it closed."""
    if network.dial_only:
        return "It listens nowhere (--dial-only)."
    if network.listen == "127.0.0.1":
        return "It listens on this machine alone (--listen 127.0.0.1)."
    named = network.port and network.gossip_port
    ports = f"TCP ports {network.port} and {network.gossip_port} or the next free ones" if named else "two TCP ports"
    at = "" if network.listen == NetworkConfig().listen else f" at {network.listen}"
    less = "\n(--listen 127.0.0.1: to this machine only; --dial-only: to nobody)" if trains else ""
    return f"It listens{at} on {ports}, open to others{less}."


def _takes(config: NodeConfig) -> str:
    """What the node takes of the processor, and how to make that less."""
    limits = config.resources.in_force()
    part = "half" if limits.max_cpu == 50 else f"{limits.max_cpu:g} %"
    cores = "up to all cores" if limits.max_cpu >= 100 else f"up to {part} of the cores"
    priority = {0: "usual", 19: "lowest"}.get(limits.nice, "lower")
    is_gentle = config.pipeline.stages or limits.max_cpu <= 50
    chosen = config.resources.model_fields_set or config.pipeline.stages
    it = "It" if chosen else "No battery or desktop found, so it"  # with one, `join` has chosen `gentle`
    less = "" if is_gentle else "\n(--gentle: half of the cores, at the lowest)"
    return f"{it} takes {cores} at {priority} priority{less}.\n{MORE}"


def _declared_nothing(run: RunDir) -> bool:
    """Whether the run's settings are of a version that had no `sharing.declare`. This version writes all settings."""
    return run.exists and "sharing.declare" not in flat(read_toml(run.config, "the run's settings"))


def say_what_for(manifest: Manifest, tasks: TaskSet, config: NodeConfig, say: Say, memory: Memory) -> None:
    """Say what the swarm is for: tasks with up to three examples, the form of answers, the model, and who gives model
    and question files. Where the manifest leaves the model open and the user chose none, propose one. Nothing is
    downloaded for that."""
    kinds = tasks.labels
    one = len(kinds) == 1
    lines = [f"its members train models on {len(kinds)} kind{'' if one else 's'} of questions: {_first(kinds)}"]
    examples: dict[str, str] = {}
    for task in tasks.sample(random.Random(0), DRAWN):
        if len(examples) < EXAMPLES:
            examples.setdefault(task.label, shorten(printable(task.question), QUESTION_CHARS, placeholder=" …"))
    lines += [f"  - {printable(label)}: {question}" for label, question in examples.items()]
    if manifest.answer != "any":
        lines.append(f"  - answers count only in the form {WRITTEN[manifest.answer].format('…')}")
    if named := names_of_files(manifest):
        givers = "their addresses or " if any(task.source for task in manifest.tasks) else ""
        lines.append(f"  - its question files come from {givers}members: {_first([*named.values()])}")
    if (model := manifest.model) is not None:
        givers = "the hub or " if model.revision else ""
        lines.append(f"  - its model is {model.name}, {model.bytes / 1e6:,.1f} MB, from {givers}members that have it")
    else:
        lines += _own_model(config, memory)
    say("\n".join(lines))


def _first(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:EXAMPLES]) + (f" and {len(names) - EXAMPLES} more" if len(names) > EXAMPLES else "")


def _own_model(config: NodeConfig, memory: Memory) -> list[str]:
    """Points about the model of a member whose swarm has none."""
    if "model" in config.policy.model_fields_set or config.pipeline.stages:
        return [f"  - each member brings its own model; yours is {model_name(config.policy.model)}"]
    lines = ["  - each member brings its own model; yours is the starter, a toy for trying out"]
    free, gpu = memory()
    if (fitting := largest_fitting(config, free, gpu)) is None:
        return lines
    gib = bytes_with(fitting, config, gpu) / 2**30
    where = "this GPU" if gpu else "this machine"
    if not gpu:
        lines.append("  - with real weights, and small enough for a CPU:")
        lines.append(f"    --model {SMOLLM2}")
        lines.append(f"    ({WHEEL_MB} MB to download; {_work(PARAMETERS)})")
    if gpu or fitting.parameters > PARAMETERS:
        lines.append(f"  - {where} would carry a larger one (about {gib:.0f} GiB, estimated):")
        lines.append(f"    --model {fitting.name}")
        takes = _work(fitting.parameters) + ("" if gpu else ",\n    so that a round takes minutes on a CPU")
        lines.append(f"    (about {fitting.download_bytes / 1e9:.1f} GB to download; {takes})")
    return lines


def _work(parameters_of_model: int) -> str:
    times = parameters_of_model / (parameters(starter_path()) or 1)
    return f"{float(f'{times:.2g}'):,.0f} times the starter's work for each token"
