"""Read the trained policy of a run, and export it for transformers or PEFT: `swarm-node export`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from swarm_node.config import NodeConfig, TaskConfig
from swarm_node.config.figures import WORDS
from swarm_node.config.own import read_own
from swarm_node.errors import CheckpointError, UserError
from swarm_node.observability.evaluations import NOT_MEASURED, record_of
from swarm_node.policy.loading import load_policy, load_tokenizer
from swarm_node.policy.policy import Policy
from swarm_node.policy.prompt_format import write_prompt_format
from swarm_node.say import Warned, is_shown, level_of
from swarm_node.storage.best import Best, read_best
from swarm_node.storage.checkpoints import Checkpoint, CheckpointStore, read_checkpoint
from swarm_node.storage.run_settings import as_trained
from swarm_node.storage.rundir import RunDir, check_new_directory, os_errors_explained

DTYPES = "float32", "bfloat16", "float16"
Which = Literal["newest", "best"]  # the checkpoint of a run that is taken


def policy_of_run(
    path: Path,
    report: Callable[[str], None],
    samples: bool = True,
    which: Which = "newest",
    alter: Callable[[NodeConfig], NodeConfig] = lambda config: config,
) -> tuple[Policy, NodeConfig]:
    """The policy of a valid checkpoint of a run, which may be active, and the settings of its training. Without
    `samples` the policy cannot generate. `alter` changes the settings before the model is loaded. Raises UserError if there is no run or no such checkpoint yet."""
    run = RunDir(path)
    run.check_exists()
    config = read_own(run.config, report)
    if config.pipeline.stages:
        if which == "best":
            raise UserError(f"{path} is of a crew, which keeps no best checkpoint: leave out --checkpoint")
        from swarm_node.pipeline.staged_run import find_stages

        config = alter(as_trained(config, None))
        policy = load_policy(config.policy, config.rollouts, report, samples)
        staged = find_stages([run], report)
        policy.load_trainable_state({name: tensor for stage in staged.stages for name, tensor in stage.items()})
        policy.version = staged.updates
        return policy, config
    checkpoint, config = (best_of if which == "best" else newest_of)(run, config, report)
    config = alter(config)
    policy = load_policy(config.policy, config.rollouts, report, samples)
    if checkpoint.state["model"]["base"] != policy.base_digest:
        raise UserError(f"the checkpoints of {path} were trained from another {config.policy.model} than the one here")
    policy.load_trainable_state(checkpoint.tensors["policy"])
    policy.version = checkpoint.state["policy_version"]
    report(f"policy of {path} after round {checkpoint.round}")
    return policy, config


def newest_of(run: RunDir, config: NodeConfig, say: Callable[[str], None]) -> tuple[Checkpoint, NodeConfig]:
    """The newest valid checkpoint of a run, and `config` with the settings of its training. Raises UserError."""
    checkpoint = CheckpointStore(run.checkpoints, config.checkpoints.keep, say).load_latest(_foreign)
    if checkpoint is None:
        raise UserError(f"{run.path} has no checkpoint yet: the first comes after {config.checkpoints.every} rounds")
    return checkpoint, settings_in(checkpoint.state, config)


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
        return checkpoint, settings_in(checkpoint.state, config)
    if tried is not None:
        raise UserError(f"the best checkpoint of {run.path}, {problem}; leave out --checkpoint to take the newest")
    raise UserError(
        f"{run.path} has no best checkpoint: it has measured no held-out questions while it trained (eval.every); "
        "leave out --checkpoint to take the newest"
    )


def settings_in(state: Mapping[str, Any], config: NodeConfig) -> NodeConfig:
    """`config` of a run with the settings in the state of a checkpoint, and with the dtype in which it was trained,
    which a short test may have chosen. Raises UserError."""
    config, chosen = as_trained(config, state.get("settings")), state.get("in_effect")
    dtype = chosen.get("policy.dtype") if isinstance(chosen, dict) else None
    if config.policy.dtype != "auto" or dtype not in DTYPES:
        return config
    return config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": dtype})})


def _at_start(checkpoint: Checkpoint, best: Best) -> float | None:
    """The figure that chose the best checkpoint, from before training; None if it was not measured."""
    try:
        every = record_of(checkpoint.state).before.table.get("all")
    except NOT_MEASURED:
        return None
    return None if every is None else every.by(best.figure)


def _foreign(state: dict[str, Any]) -> str | None:
    model = state.get("model")
    return None if isinstance(model, dict) and {"base", "start"} <= model.keys() else "it names no model"


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
) -> Path:
    """Write the policy of a run to `out` in Hugging Face layout; only the adapter, if one was trained. Several paths
    are run directories of one crew. `report` takes sentences, which are printed by default; `quiet`: only warnings are.
    Raises UserError."""
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
    save: Callable[[Path], None]
    if in_stages[0]:
        from swarm_node.pipeline.staged_run import find_stages, save_staged

        staged = find_stages(runs, report)
        config, tokenizer = as_trained(staged.config, None), load_tokenizer(staged.config.policy)
        save, is_lora = partial(save_staged, staged), staged.plan.lora
    else:
        policy, config = policy_of_run(runs[0].path, report, samples=False, which=which)
        save, is_lora, tokenizer = policy.save, policy.is_lora, policy.tokenizer
    tasks = config.tasks if config.swarm and config.tasks else tasks_of(runs[0], config)  # those that a member chose
    with os_errors_explained(out):
        save(out)
        write_prompt_format(out, tokenizer, config, tasks, is_lora)
    report(f"exported to {out}; load it with {loaded_with(out, is_lora)}")
    return out


def _print(sentence: str, quiet: bool) -> None:
    level = level_of(sentence)
    if level >= logging.WARNING if quiet else is_shown(level):
        print(sentence)


def loaded_with(path: Path, is_lora: bool) -> str:
    """The Python expression that loads the model at `path`."""
    if is_lora:
        return f"PeftModel.from_pretrained(base, {str(path)!r})"
    return f"AutoModelForCausalLM.from_pretrained({str(path)!r})"
