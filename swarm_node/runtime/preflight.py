"""What a start needs, checked before torch is loaded: mistakes are answered at once.

`Run` checks the same things again when it comes to them. Loads neither torch nor reasoning-gym, unless a task is
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import psutil

from swarm_node.config import NodeConfig
from swarm_node.config.plugins import not_here, only_in_a_program
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.errors import TemporaryError, UserError
from swarm_node.policy.extras import check_optimizer, check_quantiser
from swarm_node.policy.model_path import LORA_ABOVE, check_hub, checked, parameters
from swarm_node.policy.sizes import MOMENT_BYTES
from swarm_node.storage.bucket import Bucket
from swarm_node.storage.room import check_room
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.network import identity_file
from swarm_node.tasks.checking import check_specs
from swarm_node.tasks.hub_data import pinned
from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.transports.settings import is_free


def check_run_place(config: NodeConfig, network: bool) -> None:
    """Raise UserError if the run directory cannot be used, or if a port that the user chose is taken. `network`: the
    node listens for others."""
    RunDir(config.directory).check_usable()
    if network:
        _check_key(identity_file(config.network, RunDir(config.directory)))
    if config.health.port:
        _check_port(config.health.listen, config.health.port, "--health-port")
    chosen = {"port", "gossip_port"} & config.network.model_fields_set
    if network and not config.network.dial_only:
        for key in sorted(chosen):
            _check_port(config.network.listen, getattr(config.network, key) or 0, f"--{key.replace('_', '-')}")


def check_material(config: NodeConfig, own_tasks: bool, own_model: bool) -> None:
    """Raise UserError for tasks, a model, a package or a place of copies that are not there, and for a disk without
    room for its checkpoints, where the model's size can be told. `own_tasks`, `own_model`: this node's user chooses
    them, not its swarm."""
    answer_needed = config.rewards.checker_weight > 0 or not config.rewards.functions
    check_specs([*(config.tasks if own_tasks else []), *config.eval.tasks], answer_needed, config.rewards.kind)
    check_functions(config.rewards.functions)
    check_quantiser(config.policy)
    check_optimizer(config.grpo.optimizer, config.pipeline.stages)
    if config.checkpoints.to:
        Bucket(config.checkpoints.to, swarm="")  # looks for the driver and the folder
    if own_model:
        path = checked(config.policy.model)
        check_hub(path, config.policy.revision)
        _check_disk(config, path)


def with_commits(config: NodeConfig) -> NodeConfig:
    """`config`, in which each data set of the hub has its commit, so that a run that goes on asks the same questions.
    Raises UserError."""
    tasks, asked = pinned(config.tasks), pinned(config.eval.tasks)
    if tasks != config.tasks:
        config = config.model_copy(update={"tasks": tasks})
    if asked != config.eval.tasks:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": asked})})
    return config


def check_functions(functions: Sequence[RewardFunctionConfig]) -> None:
    """Raise UserError for reward functions that cannot be there."""
    for function in functions:
        if only_in_a_program(function.path):
            raise not_here(function.path, "reward function")
        file = Path(function.path.rpartition(":")[0]).expanduser()
        if file.suffix == ".py" and not file.is_file():
            raise UserError(f"reward function {function.path!r}: there is no file {file}")
        if file.suffix == ".py" and not _may_define(file, function.name):
            raise UserError(f"reward function {function.path!r}: {file} has no function {function.name!r}")


def _may_define(file: Path, name: str) -> bool:
    """Whether a Python file may define `name`: it has the word, or makes names that it does not spell."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):  # told when it is loaded
        return True
    unspelt = r"import\s*\*|globals|locals|vars\(|exec\(|setattr|__getattr__|__dict__"
    return re.search(rf"\b{re.escape(name)}\b|{unspelt}", text) is not None


def _check_key(file: Path) -> None:
    """Raise UserError if the file is there and holds no key."""
    try:
        if file.exists():
            with os_errors_explained(file):
                Identity.load(file)
    except LocalProtocolError as error:
        raise UserError(str(error)) from error


def _check_port(listen: str, port: int, option: str) -> None:
    try:
        if port and not is_free(listen, port):
            taken = f"port {port} of {listen} is taken{port_holder(port)}"
            raise TemporaryError(f"{taken}: free it, or choose another {option}")
    except LocalProtocolError as error:
        raise UserError(f"{error}; choose another {option}") from error


def port_holder(port: int) -> str:
    """The process that listens on the port, in brackets; empty if the system does not tell."""
    try:
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return f" (by {psutil.Process(one.pid).name()}, process {one.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def _check_disk(config: NodeConfig, path: str) -> None:
    """Raise UserError if the checkpoints that are kept do not fit: two of the model at `path`, and the best one.
    Adapters are small; a crew has a check. `Run` counts embeddings too, whose moments are never in 8 bits."""
    size = parameters(path)
    lora = config.policy.lora if config.policy.lora is not None else size is not None and size > LORA_ABOVE
    if size is None or lora or config.policy.quantize or config.pipeline.stages:
        return
    checkpoints = RunDir(config.directory).checkpoints
    keeps_best = config.eval.every and config.eval.questions
    each = int((4 + MOMENT_BYTES[config.grpo.optimizer]) * size)
    check_room(checkpoints, each, len(list(checkpoints.glob("round-*"))), 3 if keeps_best else 2)
