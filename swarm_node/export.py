"""The trained policy of a run: to evaluate it, or to export it for plain transformers and PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swarm_node.config import NodeConfig, load_config
from swarm_node.errors import UserError
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.recovery.snapshots import SnapshotStore
from swarm_node.rundir import RunDir, check_new_directory, os_errors_explained


def policy_of_run(path: Path, report: Callable[[str], None]) -> tuple[Policy, NodeConfig]:
    """The policy of the newest good snapshot in a run directory, and the run's configuration.

    UserError if there is no run or no snapshot yet. Reads only: the run may be going on.
    """
    run = RunDir(path)
    if not run.exists:
        raise UserError(f"no run in {path} (it has no config.toml)")
    config = load_config(run.config)
    policy = load_policy(config.policy, config.rollouts, report)

    def foreign(state: dict) -> str | None:
        return None if state["model"]["base"] == policy.base_digest else f"its base is not {config.policy.model}"

    snapshot = SnapshotStore(run.snapshots, config.snapshots.keep, report).load_latest(foreign)
    if snapshot is None:
        raise UserError(f"{path} has no snapshot yet: the first comes after {config.snapshots.every} rounds")
    policy.load_trainable_state(snapshot.tensors["policy"])
    policy.version = snapshot.state["policy_version"]
    report(f"policy of {path} after round {snapshot.round}")
    return policy, config


def export_run(path: Path, out: Path, report: Callable[[str], None] = print) -> Path:
    """Write the policy of a run to `out` in Hugging Face layout (an adapter alone, if one was trained)."""
    check_new_directory(out)
    policy, _ = policy_of_run(path, report)
    with os_errors_explained(out):
        policy.save(out)
    kind = "PeftModel.from_pretrained(base, …)" if policy.is_lora else "AutoModelForCausalLM.from_pretrained(…)"
    report(f"exported to {out}; load it with {kind}")
    return out
