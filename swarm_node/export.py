"""The trained policy of a run: to evaluate it, or to export it for plain transformers and PEFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from swarm_node.config import NodeConfig, load_config
from swarm_node.errors import UserError
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.recovery.snapshots import SnapshotStore
from swarm_node.rundir import RunDir, check_new_directory, os_errors_explained


def policy_of_run(path: Path, report: Callable[[str], None], samples: bool = True) -> tuple[Policy, NodeConfig]:
    """The policy of the newest good snapshot in a run directory, and the run's configuration. Not `samples` = it will
    answer nothing.

    UserError if there is no run or no snapshot yet. Reads only: the run may be going on.
    """
    run = RunDir(path)
    _check_runs([run])
    config = load_config(run.config)
    policy = load_policy(config.policy, config.rollouts, report, samples)
    if config.stages.count:
        from swarm_node.staged import find_stages

        staged = find_stages([run], report)
        policy.load_trainable_state({name: tensor for stage in staged.stages for name, tensor in stage.items()})
        policy.version = staged.updates
        return policy, config

    def foreign(state: dict) -> str | None:
        return None if state["model"]["base"] == policy.base_digest else f"its base is not {config.policy.model}"

    snapshot = SnapshotStore(run.snapshots, config.snapshots.keep, report).load_latest(foreign)
    if snapshot is None:
        raise UserError(f"{path} has no snapshot yet: the first comes after {config.snapshots.every} rounds")
    policy.load_trainable_state(snapshot.tensors["policy"])
    policy.version = snapshot.state["policy_version"]
    report(f"policy of {path} after round {snapshot.round}")
    return policy, config


def export_run(path: Path | Sequence[Path], out: Path, report: Callable[[str], None] = print) -> Path:
    """Write the policy of a run to `out` in Hugging Face layout (an adapter alone, if one was trained). Several paths
    are run directories of one crew."""
    runs = [RunDir(path)] if isinstance(path, Path) else [RunDir(each) for each in path]
    _check_runs(runs)
    in_stages = [load_config(run.config).stages.count > 0 for run in runs]
    if len(runs) > 1 and not all(in_stages):
        raise UserError("only the runs of one crew are exported together; `swarm-node merge` makes one model of others")
    check_new_directory(out)
    if in_stages[0]:
        from swarm_node.staged import find_stages, save_staged

        staged = find_stages(runs, report)
        with os_errors_explained(out):
            save_staged(staged, out)
        is_lora = staged.plan.lora
    else:
        policy, _ = policy_of_run(runs[0].path, report, samples=False)
        with os_errors_explained(out):
            policy.save(out)
        is_lora = policy.is_lora
    report(f"exported to {out}; load it with {loaded_with(out, is_lora)}")
    return out


def loaded_with(path: Path, is_lora: bool) -> str:
    """The Python that loads what lies at `path`."""
    if is_lora:
        return f"PeftModel.from_pretrained(base, {str(path)!r})"
    return f"AutoModelForCausalLM.from_pretrained({str(path)!r})"


def _check_runs(runs: Sequence[RunDir]) -> None:
    for run in runs:
        if not run.exists:
            raise UserError(f"no run in {run.path} (it has no config.toml)")
