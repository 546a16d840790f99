"""Export the policy of a crew from its run directories: the newest checkpoints of all stages, put together.

    RUN/stages/<k>/round-…       of one or more run directories -> the last update of which every stage has one
        all weights trained  ->  model-0000k-of-0000n.safetensors, one file for each stage, and their index
        an adapter trained   ->  adapter_model.safetensors, adapter_config.json

Memory holds one stage at a time, since the policy may be larger than any of its machines. The leader's run directory is
enough if its run ended regularly: then it has fetched the other stages.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from swarm_node.config import NodeConfig
from swarm_node.config.own import read_own
from swarm_node.errors import CheckpointError, UserError
from swarm_node.pipeline.compute.partition import trained_shapes
from swarm_node.pipeline.recovery.stage_checkpoints import StageFile, newest, stage_files
from swarm_node.policy import tokenizing
from swarm_node.policy.adapters import lora_config, with_adapter
from swarm_node.policy.loading import Plan, load_tokenizer, model_file, prepare, refusing, skeleton
from swarm_node.say import Warned
from swarm_node.storage.checkpoints import Checkpoint, read_checkpoint
from swarm_node.storage.model_names import model_name
from swarm_node.storage.plain_files import as_a_node_writes
from swarm_node.storage.rundir import RunDir

Say = Callable[[str], None]
_SPAN = re.compile(r"stage (\d+) of (\d+) \(layers (\d+)-(\d+) of (\d+)\)")


@dataclass(frozen=True)
class Staged:
    """A policy, every stage of which was found."""

    config: NodeConfig
    plan: Plan
    stages: list[dict[str, Tensor]]
    """Weights of each stage by global name, mapped from files. A matrix that two stages hold is with the first."""
    updates: int


def find_stages(runs: Sequence[RunDir], say: Say) -> Staged:
    """Find all stages, after the same update if possible.

    Raises UserError if one of them is missing, or if they are not of one policy."""
    configs = [read_own(run.config) for run in runs]
    config, count = configs[0], configs[0].pipeline.stages
    crews = [(one.policy.model, one.pipeline.stages, one.pipeline.crew) for one in configs]
    for run, crew in zip(runs, crews, strict=True):
        if crew != crews[0]:
            raise UserError(f"{run.path} is not of the crew of {runs[0].path}: crew, model and stages must be the same")
    plan = prepare(config.policy, alone=False)
    kept = [file for run in runs for file in stage_files(run.path / "stages") if file.stage < count]
    latest = newest([file for file in kept if file.run])
    others = [file for file in kept if not file.torn and not (latest and file.counts(latest.run))]
    if others:
        say(f"checkpoints left out, since they are of another run or branch than the newest: {len(others)}")
    kept = [file for file in kept if file not in others]
    while True:
        missing = [stage for stage in range(count) if not any(one.stage == stage for one in kept)]
        if missing:
            names, where = ", ".join(map(str, missing)), ", ".join(str(run.path) for run in runs)
            raise UserError(
                f"stage {names} of {count} is not in {where}: name the run directories of the peers that held it too "
                "(`swarm-node export RUN RUN OUT`); the leader's has all stages if it ends, by itself or by Ctrl-C, "
                "while the others run"
            )
        chosen = _choose(kept, count)
        read: list[Checkpoint] = []
        for one in chosen:
            try:
                read.append(read_checkpoint(one.path, lambda state: None if "span" in state else "it is of no stage"))
            except CheckpointError as error:
                say(Warned(f"{one.path} refused: {error}"))
                kept.remove(one)
                break
            read[-1].tensors.pop("optimizer", None)  # twice as large as the weights, and not exported
        else:
            break
    with as_a_node_writes(runs[0].path):
        stages = _weights(config, plan, chosen, read)
    updates = [one.updates for one in chosen]
    if len(set(updates)) > 1:
        listed = ", ".join(f"stage {one.stage} after update {one.updates}" for one in chosen)
        say(Warned(f"no update has a checkpoint of every stage: {listed}"))
    else:
        say(f"all {count} stages after update {updates[0]}")
    return Staged(config, plan, stages, max(updates))


def _choose(kept: Sequence[StageFile], count: int) -> list[StageFile]:
    """One file of each stage: of the last update that all stages have, or else the newest."""
    files = sorted(kept, key=lambda one: (one.updates, one.number))
    by_stage = [{one.updates: one for one in files if one.stage == stage} for stage in range(count)]
    common = set.intersection(*(set(updates) for updates in by_stage))
    return [stage[max(common or stage)] for stage in by_stage]


def _weights(
    config: NodeConfig, plan: Plan, chosen: Sequence[StageFile], read: Sequence[Checkpoint]
) -> list[dict[str, Tensor]]:
    """`Staged.stages`. UserError unless these checkpoints together are all trained tensors of the model."""
    if len({checkpoint.state.get("architecture") for checkpoint in read}) > 1:
        raise UserError("these stages are not of one policy: their runs had other models or LoRA settings")
    first, layers, expected = 0, plan.config.num_hidden_layers, trained_shapes(config.policy, plan)
    seen: set[str] = set()
    stages = []
    for one, checkpoint in zip(chosen, read, strict=True):
        span = checkpoint.state["span"]
        match = _SPAN.fullmatch(str(span))
        found = tuple(map(int, match.groups())) if match else ()
        if not match or found[:3] != (one.stage, len(chosen), first) or found[4] != layers:
            raise UserError(f"{one.path} is {span}, which does not fit the other stages of {plan.base}")
        first = found[3] + 1
        stages.append({name: tensor for name, tensor in checkpoint.tensors["policy"].items() if name not in seen})
        seen |= stages[-1].keys()
    model = model_name(config.policy.model)
    if first != layers or seen != expected.keys():
        raise UserError(f"these stages together are not all of {model}")
    for name, tensor in ((name, tensor) for stage in stages for name, tensor in stage.items()):
        if tensor.shape != expected[name].shape:
            raise UserError(f"{name} is {list(tensor.shape)} in these stages, but not in {model}")
    return stages


def save_staged(staged: Staged, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model, or an adapter for PEFT, in Hugging Face layout to the directory `out`, in `dtype`; None = in that
    of the checkpoints."""
    tokenizing.save_tokenizer(load_tokenizer(staged.config.policy), out)
    if staged.plan.lora:
        _save_adapter(staged, out, dtype)
    else:
        _save_model(staged, out, dtype)
    for file in out.glob("*.safetensors"):
        file.chmod((out / "tokenizer_config.json").stat().st_mode)


def _save_model(staged: Staged, out: Path, dtype: torch.dtype | None) -> None:
    plan = staged.plan
    config = copy.deepcopy(plan.config)
    config.dtype = dtype or next(tensor.dtype for stage in staged.stages for tensor in stage.values())
    config.architectures = [type(skeleton(plan.config)).__name__]
    config.save_pretrained(out)
    generation = model_file(plan, "generation_config.json")
    if generation is not None:
        with refusing(generation.name, plan.base):
            GenerationConfig.from_pretrained(generation.parent).save_pretrained(out)
    where: dict[str, str] = {}
    size = 0
    for number, stage in enumerate(staged.stages, 1):
        file = f"model-{number:05}-of-{len(staged.stages):05}.safetensors"
        tensors = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in stage.items()}
        save_file(tensors, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _save_adapter(staged: Staged, out: Path, dtype: torch.dtype | None) -> None:
    plan, policy = staged.plan, staged.config.policy
    if plan.adapter is not None:
        shutil.copyfile(Path(plan.adapter) / "adapter_config.json", out / "adapter_config.json")
    else:
        with torch.device("meta"):
            lora = with_adapter(skeleton(plan.config), lora_config(policy), policy).peft_config["default"]
        lora.base_model_name_or_path, lora.revision, lora.inference_mode = plan.base, plan.revision, True
        lora.save_pretrained(out)
    tensors = {
        name.replace(".default", ""): tensor.to(dtype or tensor.dtype).contiguous()
        for stage in staged.stages
        for name, tensor in stage.items()
    }
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
