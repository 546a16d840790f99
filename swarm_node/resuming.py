"""How a run goes on where its last start ended: what its snapshots hold, and what is said of changed settings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from protocol.lineage import read_lineage, shared
from swarm_node.config import NodeConfig, load_config
from swarm_node.errors import SnapshotError, UserError
from swarm_node.evaluate import Evaluation, Held
from swarm_node.node import Node
from swarm_node.recovery.snapshots import SnapshotStore
from swarm_node.rundir import RunDir

if TYPE_CHECKING:  # alone, a run loads nothing of the network
    from swarm_node.crew import CrewNode

STALE_S = 600.0
"""A node whose snapshot is older than this looks for a peer of its cohort that is ahead."""
GIVEN_ANEW = {"swarm", "name", "run_dir", "rounds", "minutes", "log", "network", "guest", "price_per_hour"}
"""Settings that may well be others at each start."""
MAX_CHANGES = 8
"""Of the rest, in a sentence."""


class RunState:
    """The state of a run, in its snapshots."""

    def __init__(
        self,
        config: NodeConfig,
        run: RunDir,
        node: Node,
        snapshots: SnapshotStore,
        say: Callable[..., None],
        crew: CrewNode | None,
    ) -> None:
        """`config` is `fitted` to the node's policy; `crew` the one that this node leads."""
        self.config = config
        self.run = run
        self.node = node
        self.policy = node.policy
        self.tasks = node.tasks
        self.snapshots = snapshots
        self.say = say
        self.crew = crew
        self.before = Evaluation()
        """Held-out figures from before training."""
        self.saved: int | None = None
        """The round of the last snapshot."""

    def save(self, anew: bool = False) -> None:
        """Snapshot of the state after `round` rounds, unless there is one, or one is being written (`anew`: also
        then); written in the background."""
        if self.saved == self.node.round and not anew and not self.snapshots.failed:
            return
        tensors, numbers, averaging = self._state()
        self.snapshots.save(
            self.node.round,
            tensors,
            {
                "averaging": averaging,
                "time": time.time(),
                "model": self._identity(),
                "run": None if self.crew is None else self.crew.seats.run,
                "trainer": numbers,
                "policy_version": self.policy.version,
                "before": {label: [h.questions, h.pass_1, h.pass_k] for label, h in self.before.table.items()},
                "before_by_question": self.before.by_question,
                "held_out": self._evaluation(),
            },
        )
        self.saved = self.node.round

    def _state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int], dict[str, Any]]:
        """Tensors by file, numbers of the trainer, numbers of averaging."""
        optimizer, numbers = self.node.trainer.state_dict()
        tensors = {"policy": self.policy.trainable_state(), "optimizer": optimizer}
        if self.crew is not None:  # whoever holds a stage keeps its weights
            tensors = {}
        averaging: dict[str, Any] = {}
        if self.node.averager is not None:
            tensors["averaging"], averaging = self.node.averager.state_dict()
        return tensors, numbers, averaging

    @property
    def snapshot_bytes(self) -> int:
        """Of the tensors in a snapshot."""
        tensors, _, _ = self._state()
        return sum(tensor.nbytes for named in tensors.values() for tensor in named.values())

    def resume(self) -> bool:
        """Go on from the newest snapshot that belongs here: whether there was anything to go on from."""
        snapshot = self.snapshots.load_latest(self.foreign)
        upto = math.inf
        if snapshot is not None and self.crew is not None:
            upto = shared(read_lineage(snapshot.state.get("run")), self.crew.seats.run)
            if upto < 0:
                snapshot = None
                self.set_aside(self.run.metrics)
        if self.crew is not None:
            known = self.crew.progress.round or (0 if snapshot is None else snapshot.round)
            self.node.round = known or self.policy.version
        if snapshot is None:
            return self.node.round > 0
        state = snapshot.state
        if self.crew is None:
            self.policy.load_trainable_state(snapshot.tensors["policy"])
            self.node.trainer.load_state_dict(snapshot.tensors["optimizer"], state["trainer"])
            self.policy.version = state["policy_version"]
            self.node.round = self.saved = snapshot.round
        else:
            self.node.trainer.num_tokens = state["trainer"]["num_tokens"]
        if self.node.averager is not None:
            try:
                if state["policy_version"] > upto:
                    raise SnapshotError("the snapshot is of another branch of the crew's run")
                if not state["averaging"]:
                    raise SnapshotError("this run has not averaged until now")
                self.node.averager.load_state_dict(snapshot.tensors.get("averaging", {}), state["averaging"])
            except (SnapshotError, KeyError) as error:
                self.say(f"averaging begins anew: {error}")
                self.node.averager.restart()
            if time.time() - state.get("time", 0.0) < STALE_S and self.node.member and self.node.member.handover:
                self.node.member.handover.seek(0.0)
        if state["held_out"] == self._evaluation():
            table = {label: Held(*values) for label, values in state["before"].items()}
            self.before = Evaluation(table, state.get("before_by_question", []))  # without: by an earlier version
        else:
            self.say("tasks or evaluation settings are not those this run began with: no figures from before training")
        return True

    def _identity(self) -> dict[str, Any]:
        """What must agree for a snapshot to go on with this model."""
        if self.crew is not None:
            return {"base": self.crew.architecture}
        trained = {name: [str(t.dtype), *t.shape] for name, t in self.policy.trainable_state().items()}
        return {"base": self.policy.base_digest, "start": self.policy.start_digest, "trained": trained}

    def _evaluation(self) -> dict[str, Any]:
        """What must agree for held-out figures to be comparable."""
        return {"tasks": self.tasks.names, **self.config.eval.model_dump(), "rollouts": self._sampling()}

    def _sampling(self) -> list[float]:
        rollouts = self.config.rollouts
        return [rollouts.max_new_tokens, rollouts.temperature, rollouts.top_p]

    def set_aside(self, metrics: Path) -> None:
        """Starting anew over the metrics of a run whose snapshots are gone or refused: keep them under another name."""
        if metrics.exists() and metrics.stat().st_size:
            kept = next(p for n in count(1) if not (p := metrics.with_name(f"{metrics.name}.{n}")).exists())
            metrics.rename(kept)
            self.say(f"starting anew; the metrics that were there are now {kept}")

    def foreign(self, state: dict[str, Any]) -> str | None:
        """Why a snapshot does not belong to this run, or `None`."""
        theirs, mine = state.get("model"), self._identity()
        if not isinstance(theirs, dict):
            return "it names no model"
        if theirs.get("base") != mine["base"]:
            return f"its base model is not {self.config.policy.model}"
        if theirs != mine:
            return "it trains other weights of this model (other LoRA settings, adapter or dtype)"
        return None


def say_what_changed(run: RunDir, config: NodeConfig, say: Callable[[str], None]) -> None:
    """A start takes no setting over from the last one: say which were others then."""
    try:
        last = load_config(run.config)
    except UserError:  # written by a version with other settings
        return
    before, after = (_flat(each.model_dump(mode="json", exclude=GIVEN_ANEW)) for each in (last, config))
    changed = [key for key in after if after[key] != before.get(key)]
    if last.averaging.method != "none" and config.averaging.method == "none":
        say(
            f"this run averaged weights ({last.averaging.method}) until now; without averaging.method it does not any "
            "more"
        )
        changed = [key for key in changed if not key.startswith("averaging.")]
    if changed:
        listed = ", ".join(f"{key} = {after[key]} (was {before.get(key)})" for key in changed[:MAX_CHANGES])
        more = len(changed) - MAX_CHANGES
        say(f"not as when this run was last started: {listed}{f', and {more} more' if more > 0 else ''}")


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
