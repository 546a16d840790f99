"""Checks of this machine: Python, packages, torch, memory, disk and the run directory."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swarm_node.cli.commands.check import UNKNOWN_START, Check, StartCommand
from swarm_node.cli.options import note
from swarm_node.config import NodeConfig
from swarm_node.errors import UserError
from swarm_node.install import (
    COMPILED,
    EXTRA_OF,
    extra_command,
    has_extra,
    install_command,
    reinstall_command,
    torch_command,
    upgrade_command,
)
from swarm_node.storage.rundir import existing_part
from swarm_protocol.answer_form import WRITTEN, AnswerForm

if TYPE_CHECKING:
    from swarm_node.policy.fitting import Hardware, Training

# package -> start of its tested versions
TESTED = {"torch": "2", "transformers": "5", "hivemind": "1.1", "libp2p": "0.8", "reasoning-gym": "0.1"}
CREW_BYTES = 6  # random bytes in a proposed crew name, which is the crew's password
TIGHT = 0.8  # above this part of the free memory, sampling may exhaust it
GIB = 2**30


def python() -> Check:
    """Whether this version of Python is tested."""
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Check("python", "ok", found)
    return Check("python", "warn", f"{found} is not tested; 3.11 to 3.13 are", install_command())


def packages() -> Check:
    """Whether the packages of `TESTED` are installed in tested versions, those of extras as far as they are wanted."""
    found, missing = {}, []
    without = sorted(extra for extra in COMPILED if not has_extra(extra))
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing += [name] * (EXTRA_OF.get(name.replace("-", "_")) not in without)
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", reinstall_command())
    listed = ", ".join(f"{name} {number}" for name, number in found.items())
    if without:
        listed += f"; without the extra{'s' * (len(without) > 1)} {' and '.join(without)}"
    if all(number == TESTED[name] or number.startswith(f"{TESTED[name]}.") for name, number in found.items()):
        return Check("packages", "ok", listed)
    return Check("packages", "warn", f"{listed}: some of these versions are not tested", upgrade_command())


def nvidia_gpus(root: Path = Path("/")) -> list[str]:
    """Device files of the NVIDIA GPUs that this machine or container may use."""
    return sorted(map(str, [*root.glob("dev/nvidia[0-9]*"), *root.glob("usr/lib/wsl/lib/libcuda.so.1")]))


def torch_and_device(gpus: Sequence[str]) -> Check:
    """Whether torch loads and uses the GPU, if there is one."""
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", f"cannot be loaded: {error}", reinstall_command("torch"))
    number = torch.__version__
    if torch.cuda.is_available():
        return Check("torch", "ok", f"{number} on {torch.cuda.get_device_name()}")
    if gpus and torch.version.cuda is None and torch.version.hip is None:
        detail = f"{number} is built for the CPU alone, but there is an NVIDIA GPU ({gpus[0]})"
        return Check("torch", "fail", detail, torch_command(number.partition("+")[0]))
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        detail = f"{number} cannot use the NVIDIA GPU ({gpus[0]}): is its driver older than CUDA {torch.version.cuda}?"
        return Check("torch", "fail", detail, "sudo ubuntu-drivers install")
    device = "mps" if torch.backends.mps.is_available() else f"cpu, {torch.get_num_threads()} threads"
    return Check("torch", "ok", f"{number} on {device}")


def answers(form: AnswerForm, own_prompt: bool) -> Check:
    """Which form of answers counts, and that policies are told so."""
    shape = f"an answer counts only as {WRITTEN[form].format('…')} at the end of the text"
    asked = "the prompt asks for that where the model's chat template takes a system prompt"
    asked += ", after your own (policy.system_prompt)" if own_prompt else ""
    return Check("answers", "ok", f"{shape}; {asked}")


def room(config: NodeConfig, place: Path, running: bool, start: StartCommand = UNKNOWN_START) -> Iterator[Check]:
    """Whether memory and disk suffice for the chosen model. May fetch the model's config, never its weights."""
    from swarm_node.grpo.memory import training_of
    from swarm_node.pipeline.footprint import Footprint, free_memory, stage_bytes
    from swarm_node.policy.extras import QUANTIZE, PackageMissing, check_optimizer, check_quantiser
    from swarm_node.policy.fitting import Hardware, option_that_fits
    from swarm_node.policy.loading import prepare
    from swarm_node.policy.model_path import SMOLLM2, is_place, local_folder, located
    from swarm_node.policy.sizes import RUNTIME_BYTES

    model = config.policy.model
    try:
        check_quantiser(config.policy)
        check_optimizer(config.grpo.optimizer, config.pipeline.stages)
    except PackageMissing as error:
        yield Check("packages", "fail", str(error), extra_command(QUANTIZE))
        return
    except UserError as error:
        yield Check("optimizer", "fail", str(error))
        return
    try:
        if model == SMOLLM2 and local_folder(model) is None:
            yield Check("model", "warn", f"{model} is not on this machine yet", f"swarm-node fetch {model}")
            return
        located(model, note)  # a GGUF file is dequantised here, which takes a while
        plan = prepare(config.policy)
    except UserError as error:
        remedy = "" if is_place(model) else f"hf download {shlex.quote(model)}"
        yield Check("memory", "fail", f"not known: {error}", remedy)
        return
    itemsize = plan.dtype.itemsize
    try:
        (needed,) = Footprint(config, plan).costs(((0, plan.config.num_hidden_layers),))
    except UserError:  # a model family that cannot be split into stages
        frozen = plan.size if plan.lora else 0
        needed = stage_bytes(frozen, plan.size - frozen, itemsize, bool(config.grpo.beta))
    free = free_memory(plan.device.type)
    checkpointed = needed - itemsize * plan.size * plan.lora
    needed += RUNTIME_BYTES - plan.saved
    needs = f"{model} needs {_gib(needed)} with the program itself, and more for answers (a start says how much)"
    machine = Hardware(plan.device.type, free, int(config.resources.max_memory_gb * 2**30))
    training = training_of(config, plan)
    if not config.pipeline.stages:
        needed = training.least_bytes(machine.gpu)
        needs = f"{model} needs at least {_gib(needed)} with the program itself"
    detail = (
        f"{needs}; the run has it" if running else f"{needs}; {_gib(free) if free else 'an unknown amount'} is free"
    )
    remedy = start.having("--lora")
    if plan.lora:
        crew = config.pipeline.crew or secrets.token_hex(CREW_BYTES)  # a password
        options = f"--stages {2 * config.pipeline.stages or 2} --crew {crew}"
        remedy = (msgspec.structs.replace(start, verb="join") if start.verb == "local" else start).having(options)
    if not config.pipeline.stages and free and (option := option_that_fits(training, machine)):
        remedy = start.having(option)
    if machine.most and needed > machine.most and not running:
        over = f"{needs}, more than --max-memory {config.resources.max_memory_gb:g} allows"
        yield Check("memory", "fail", over, start.having(f"--max-memory {math.ceil(needed / 2**30)}"))
    elif free and needed > TIGHT * free and not running:
        yield Check("memory", "fail" if needed > free else "warn", detail, remedy)
    else:
        yield Check("memory", "ok", detail)
    if free and model != "starter" and not config.pipeline.stages:
        yield _lengths(training, machine, plan.config)
    kept = (config.checkpoints.keep + 1) * checkpointed
    yield disk(place, kept, _to_fetch(plan.base, itemsize * plan.size), start)


def _lengths(training: Training, machine: Hardware, model_config: Any) -> Check:
    """The longest answers, and the largest groups of answers, that fit with each way of keeping weights."""
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2**15
    new = min(training.config.rollouts.max_new_tokens, positions // 2)
    training = training.with_(rollouts={"max_new_tokens": new})
    n, as_set = training.config.rollouts.group_size, training.config.policy.quantize
    kinds = [as_set] if as_set or not training.lora or machine.device == "mps" else [None, "int8", "nf4"]
    found = []
    for kind in kinds:
        one = training.with_(policy={"quantize": kind})
        name = f"--quantize {kind}" if kind and kind != as_set else "as set"
        length, answers = one.longest(machine, positions), one.widest(machine)
        lengths = f"{n} answers of {length:,} tokens" if length else "none"
        groups = f" or {answers} of {new:,}" if answers else ""
        found.append(f"{name}: {lengths}{groups}")
    return Check("lengths", "ok", f"what fits at most, {'; '.join(found)}")


def disk(place: Path, kept: int, fetched: int, start: StartCommand = UNKNOWN_START) -> Check:
    """Whether `kept` bytes of checkpoints fit at `place`, and `fetched` bytes of weights in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    wanted = [(place, kept, start.having(elsewhere=True)), (Path(HF_HUB_CACHE), fetched, "export HF_HOME=DIR")]
    needs: dict[int, int] = {}
    for path, size, remedy in wanted:
        there = existing_part(path)
        device = there.stat().st_dev
        needs[device] = needs.get(device, 0) + size
        free = shutil.disk_usage(there).free
        if size and needs[device] > free:
            detail = f"{_gib(free)} free at {path}, {_gib(needs[device])} needed"
            return Check("disk", "fail", detail, f"{remedy}  # on another disk")
    weights = f", weights to download {_gib(fetched)}" if fetched else ""
    free = shutil.disk_usage(existing_part(place)).free
    return Check("disk", "ok", f"{_gib(free)} free; checkpoints need {_gib(kept)}{weights}")


def _to_fetch(base: str, size: int) -> int:
    """Bytes of weights that are not on this machine yet."""
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    here = Path(base).exists() or any(isinstance(try_to_load_from_cache(base, name), str) for name in names)
    return 0 if here else size


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def directory(path: Path, start: StartCommand = UNKNOWN_START) -> Check:
    """Whether the run directory is writable, or can be created."""
    existing = existing_part(path)
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check("directory", "ok", f"{path} is writable")
    own = f"sudo chown -R $(id -u) {shlex.quote(str(existing))}"
    remedy = own if existing.is_dir() else start.having(elsewhere=True)
    return Check("directory", "fail", f"{existing} is not writable", remedy)
