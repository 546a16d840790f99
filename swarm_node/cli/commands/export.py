"""Read the trained policy of a run, and export it for transformers or PEFT: `swarm-node export`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedTokenizerBase

from swarm_node.cli.commands.export_card import about_run, base_of, name_base
from swarm_node.config import NodeConfig, PolicyConfig, TaskConfig
from swarm_node.config.figures import WORDS
from swarm_node.config.own import read_own
from swarm_node.config.own_code import without_foreign_code
from swarm_node.errors import CheckpointError, UserError
from swarm_node.grpo.memory import hardware_of
from swarm_node.observability.evaluations import NOT_MEASURED, record_of
from swarm_node.policy.digests import is_of_adapter
from swarm_node.policy.dtypes import name_of
from swarm_node.policy.loading import Plan, load_policy, load_tokenizer
from swarm_node.policy.merging import check_room_to_merge, dtype_of_base, merged_model
from swarm_node.policy.policy import Policy, save
from swarm_node.policy.prompt_format import write_prompt_format
from swarm_node.say import Warned, is_shown, level_of
from swarm_node.storage.best import Best, read_best
from swarm_node.storage.checkpoints import Checkpoint, CheckpointStore, read_checkpoint
from swarm_node.storage.model_names import model_name
from swarm_node.storage.plain_files import as_a_node_writes
from swarm_node.storage.room import free_bytes
from swarm_node.storage.run_settings import as_trained
from swarm_node.storage.rundir import RunDir, check_new_directory, existing_part, os_errors_explained
from swarm_protocol.answer_form import AnswerKind
from swarm_protocol.errors import visible

DTYPES = "float32", "bfloat16", "float16"
Which = Literal["newest", "best"]  # the checkpoint of a run that is taken


def policy_of_run(
    path: Path,
    report: Callable[[str], None],
    samples: bool = True,
    which: Which = "newest",
    alter: Callable[[NodeConfig], NodeConfig] = lambda config: config,
) -> tuple[Policy, NodeConfig]:
    """The policy of a valid checkpoint of a run, which may be active, and the settings of its training, which `alter`
    changes before the model is loaded. Without `samples` the policy cannot generate. Raises UserError if there is no
    run or no such checkpoint yet."""
    run = RunDir(path)
    run.check_exists()
    config = read_own(run.config, report)
    if config.pipeline.stages:
        if which == "best":
            raise UserError(f"{path} is of a crew, which keeps no best checkpoint: leave out --checkpoint")
        from swarm_node.pipeline.staged_run import find_stages

        own = without_foreign_code(as_trained(config, None), run.config, config, report)
        config = alter(own)
        policy = load_policy(config.policy, config.rollouts, report, samples)
        staged = find_stages([run], report)
        policy.load_trainable_state({name: tensor for stage in staged.stages for name, tensor in stage.items()})
        policy.version = staged.updates
        return policy, config
    checkpoint, trained = (best_of if which == "best" else newest_of)(run, config, report)
    config = alter(without_foreign_code(trained, run.config, config, report))
    return policy_at(path, checkpoint, config, report, samples), config


def policy_at(
    path: Path,
    checkpoint: Checkpoint,
    config: NodeConfig,
    report: Callable[[str], None],
    samples: bool,
    check: Callable[[Plan], None] = lambda plan: None,
) -> Policy:
    """The policy at a checkpoint of the run in `path`; `samples` as for `policy_of_run`, `check` as for `load_policy`.
    Raises UserError if the base here is another than in training."""
    policy = load_policy(config.policy, config.rollouts, report, samples, check)
    if checkpoint.state["model"]["base"] != policy.base_digest:
        model = model_name(config.policy.model)
        raise UserError(f"the checkpoints of {path} were trained from another {model} than the one here")
    trained = checkpoint.tensors["policy"]
    with as_a_node_writes(path):
        if not samples:  # the weights are only written: none is rounded to the dtype that was chosen here
            for name, tensor in policy.trainable_state().items():
                if name in trained:
                    policy.model.get_parameter(name).data = tensor.to(trained[name].dtype)
        policy.load_trainable_state(trained)
    policy.version = checkpoint.state["policy_version"]
    report(f"policy of {path} after round {checkpoint.round}")
    return policy


def newest_of(run: RunDir, config: NodeConfig, say: Callable[[str], None]) -> tuple[Checkpoint, NodeConfig]:
    """The newest valid checkpoint of a run, and `config` with the settings of its training. Raises UserError."""
    store = CheckpointStore(run.checkpoints, config.checkpoints.keep, say)
    checkpoint = store.load_latest(_foreign)
    if checkpoint is None and store.refused:
        newest, why = next(iter(store.refused.items()))
        raise UserError(f"no checkpoint of {run.path} can be used; the newest, {newest}: {why}")
    if checkpoint is None:
        raise UserError(f"{run.path} has no checkpoint yet: the first comes after {config.checkpoints.every} rounds")
    return _with_weights(run, checkpoint), settings_in(checkpoint.state, config)


def best_of(run: RunDir, config: NodeConfig, say: Callable[[str], None]) -> tuple[Checkpoint, NodeConfig]:
    """The checkpoint of a run with the best held-out figures, and `config` with the settings of its training. Raises
    UserError."""
    tried = None
    while (best := read_best(run.path)) is not None and best != tried:  # a running node may have replaced it
        try:
            checkpoint = read_checkpoint(run.checkpoints / best.checkpoint, _foreign)
        except CheckpointError as error:
            tried, problem = best, f"{best.checkpoint} is not usable: {error}"
            continue
        told = f"best held-out {WORDS[best.figure]} {best.value:.3f}, after round {best.round}"
        start = _at_start(checkpoint, best)
        say(told if start is None or best.value >= start else Warned(f"{told}: below the start's {start:.3f}"))
        return _with_weights(run, checkpoint), settings_in(checkpoint.state, config)
    if tried is not None:
        raise UserError(f"the best checkpoint of {run.path}, {problem}; leave out --checkpoint to take the newest")
    raise UserError(
        f"{run.path} has no best checkpoint: it has measured no held-out questions while it trained (eval.every); "
        "leave out --checkpoint to take the newest"
    )


def _with_weights(run: RunDir, checkpoint: Checkpoint) -> Checkpoint:
    if "policy" not in checkpoint.tensors:
        raise UserError(f"the checkpoint of {run.path} after round {checkpoint.round} has no weights of a policy")
    return checkpoint


def settings_in(state: Mapping[str, Any], config: NodeConfig) -> NodeConfig:
    """`config` of a run with the settings in the state of a checkpoint, with the number of questions that its
    evaluations have, for which time was left before training, and with the dtype in which it was trained, which a short
    test may have chosen. Raises UserError."""
    config, chosen = as_trained(config, state.get("settings")), state.get("in_effect")
    if 0 < (asked := _asked(state)) < config.eval.questions:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"questions": asked})})
    dtype = chosen.get("policy.dtype") if isinstance(chosen, dict) else None
    if config.policy.dtype != "auto" or dtype not in DTYPES:
        return config
    return config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": dtype})})


def _kind_in(state: Mapping[str, Any]) -> AnswerKind | None:
    """The kind of the answers in all question files of a run; None if its checkpoint does not say."""
    chosen = state.get("in_effect")
    kind = chosen.get("rewards.kind") if isinstance(chosen, dict) else None
    return kind if kind in get_args(AnswerKind) else None


def _asked(state: Mapping[str, Any]) -> int:
    """The number of questions in each evaluation of a run; 0 if its checkpoint does not say."""
    try:
        return record_of(state).asked
    except NOT_MEASURED:
        return 0


def _at_start(checkpoint: Checkpoint, best: Best) -> float | None:
    """The figure that chose the best checkpoint, from before training; None if it was not measured."""
    try:
        every = record_of(checkpoint.state).before.table.get("all")
    except NOT_MEASURED:
        return None
    return None if every is None else every.by(best.figure)


def _foreign(state: dict[str, Any]) -> str | None:
    model = state.get("model")
    if not isinstance(model, dict) or not {"base", "start"} <= model.keys():
        return "it names no model"
    return None if isinstance(state.get("policy_version"), int) else "it names no version of the policy"


def tasks_of(run: RunDir, config: NodeConfig) -> list[str | TaskConfig]:
    """Tasks of a run. A member of a swarm has the tasks of the swarm, even if it chose some of them."""
    if not config.swarm or not run.swarm.is_file():
        return config.tasks
    from swarm_node.swarm.links import find_swarm  # runs that trained alone need nothing of the network
    from swarm_node.swarm.manifests import task_tables

    manifest = find_swarm(str(run.swarm)).manifest
    assert manifest is not None  # a file is a manifest, unlike a link
    digests = [task.sha256 for task in manifest.tasks if task.sha256]
    files = {digest: path for digest in digests for path in run.files.glob(f"{digest[:16]}/*.jsonl")}
    return list(task_tables(manifest, files))


def export_run(
    path: str | Path | Sequence[str | Path],
    out: str | Path,
    report: Callable[[str], None] | None = None,
    which: Which = "newest",
    quiet: bool = False,
    merged: bool = False,
    dtype: str | None = None,
    base: str | None = None,
) -> Path:
    """Write the policy of a run to `out` in Hugging Face layout; only the adapter, if one was trained, unless it is to
    be `merged` into its base. Several paths are run directories of one crew. `dtype` (float32, bfloat16 or float16) is
    that of the files, by default the checkpoint's, or the base's if merged. `base`: name of the base on the hub.
    `report` takes sentences, which are printed by default; `quiet`: only warnings are. Raises UserError."""
    report = report or partial(_print, quiet=quiet)
    out = Path(out)
    runs = [RunDir(each) for each in ([path] if isinstance(path, str | Path) else path)]
    for run in runs:
        run.check_exists()
    in_stages = [read_own(run.config, report).pipeline.stages > 0 for run in runs]
    if len(runs) > 1 and not all(in_stages):
        raise UserError("only the runs of one crew are exported together; `swarm-node merge` merges other runs")
    if in_stages[0] and which == "best":
        raise UserError("a crew keeps no best checkpoint: leave out --checkpoint")
    check_new_directory(out)
    how = _Files(out, merged, dtype, report)
    written = _of_crew(runs, how) if in_stages[0] else _of_run(runs[0], which, how)
    config = written.config
    tasks = config.tasks if config.swarm and config.tasks else tasks_of(runs[0], config)  # those that a member chose
    of_base = base_of(config.policy, base)
    about = replace(about_run(runs[0], config, tasks, of_base, written.state), merged=written.merged)
    with os_errors_explained(out):
        written.save(out)
        name_base(out, of_base, base, written.is_lora, report)
        write_prompt_format(out, written.tokenizer, config, tasks, written.is_lora, about, _kind_in(written.state))
    report(f"exported to {out}; load it with {loaded_with(out, written.is_lora)}")
    return out


@dataclass(frozen=True)
class _Files:
    """What the user wants to have written."""

    out: Path
    merged: bool
    dtype: str | None
    say: Callable[[str], None]


@dataclass(frozen=True)
class _Trained:
    """What a run trained, ready to be written."""

    config: NodeConfig
    state: Mapping[str, Any]  # of its checkpoint
    tokenizer: PreTrainedTokenizerBase
    is_lora: bool
    save: Callable[[Path], None]
    merged: bool = False


def _of_run(run: RunDir, which: Which, files: _Files) -> _Trained:
    """The policy of a run. Raises UserError."""
    own = read_own(run.config, files.say)
    found, config = (best_of if which == "best" else newest_of)(run, own, files.say)
    config = without_foreign_code(config, run.config, own, files.say)
    state = {**found.state, "round": found.round}

    def load(policy: PolicyConfig, check: Callable[[Plan], None]) -> Policy:
        altered = config.model_copy(update={"policy": policy})
        return policy_at(run.path, found, altered, files.say, samples=False, check=check)

    if dtype := _own_dtype(config.policy, files):
        merge = _merging(config.policy, dtype, found.tensors["policy"], files, load)
        return _Trained(config, state, load_tokenizer(config.policy), False, merge, merged=True)
    policy = load(config.policy, lambda plan: None)
    return _Trained(config, state, policy.tokenizer, policy.is_lora, partial(_save, policy, files.dtype))


def _of_crew(runs: Sequence[RunDir], files: _Files) -> _Trained:
    """The policy of a crew. Raises UserError."""
    from swarm_node.pipeline.staged_run import find_stages, save_staged

    staged = find_stages(runs, files.say)
    config, tokenizer = as_trained(staged.config, None), load_tokenizer(staged.config.policy)
    config = without_foreign_code(config, runs[0].config, staged.config, files.say)
    settings = config.policy.model_copy(update={"dtype": name_of(staged.plan.dtype)})
    config = config.model_copy(update={"policy": settings})
    tensors = {name: tensor for stage in staged.stages for name, tensor in stage.items()}

    def load(policy: PolicyConfig, check: Callable[[Plan], None]) -> Policy:
        loaded = load_policy(policy, config.rollouts, files.say, samples=False, check=check)
        loaded.load_trainable_state(tensors)
        return loaded

    if own := _own_dtype(config.policy, files):
        merge = _merging(config.policy, own, tensors, files, load)
        return _Trained(config, {}, tokenizer, False, merge, merged=True)
    dtype = None if files.dtype is None else getattr(torch, files.dtype)
    return _Trained(config, {}, tokenizer, staged.plan.lora, partial(save_staged, staged, dtype=dtype))


def _own_dtype(policy: PolicyConfig, files: _Files) -> str | None:
    """The dtype of a merged model; None if nothing is to be merged. Raises UserError."""
    if not files.merged:
        return None
    own = dtype_of_base(policy)
    if own is None:
        files.say("--merged changes nothing: all weights were trained, so the export is a whole model")
    return own and (files.dtype or own)


def _merging(
    policy: PolicyConfig,
    own: str,
    trained: Mapping[str, torch.Tensor],
    files: _Files,
    load: Callable[[PolicyConfig, Callable[[Plan], None]], Policy],
) -> Callable[[Path], None]:
    """How to merge what was `trained` into its base and save it in the dtype `own`. A base in 4 or 8 bits is loaded as
    in training, one with whole layers beside the adapter in float32, and any other in `own`."""
    whole_layers = not all(map(is_of_adapter, trained))
    first = policy.dtype if policy.quantize else "float32" if whole_layers else own
    dtype: torch.dtype = getattr(torch, own)

    def check(plan: Plan) -> None:
        available = hardware_of(torch.device("cpu")).available
        check_room_to_merge(plan, dtype, files.out, available, free_bytes(existing_part(files.out)))

    def merge(out: Path) -> None:
        loaded = load(policy.model_copy(update={"dtype": first, "device": "cpu"}), check)
        tokenizer = loaded.tokenizer
        save(merged_model(loaded, dtype), tokenizer, out)

    return merge


def _save(policy: Policy, dtype: str | None, out: Path) -> None:
    if dtype is not None:
        for name in policy.trainable_state() if policy.is_lora else dict(policy.model.named_parameters()):
            parameter = policy.model.get_parameter(name)
            parameter.data = parameter.data.to(getattr(torch, dtype))
    policy.save(out)


def _print(sentence: str, quiet: bool) -> None:
    level = level_of(sentence)
    if level >= logging.WARNING if quiet else is_shown(level):
        print(visible(sentence))


def loaded_with(path: Path, is_lora: bool) -> str:
    """The Python expression that loads the model at `path`."""
    if is_lora:
        return f"PeftModel.from_pretrained(base, {str(path)!r})"
    return f"AutoModelForCausalLM.from_pretrained({str(path)!r})"
