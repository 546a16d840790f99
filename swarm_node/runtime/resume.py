"""The state of a run in its checkpoints, and how a run resumes from them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from swarm_node.config import NodeConfig
from swarm_node.errors import CheckpointError
from swarm_node.grpo.replay import ReplayState
from swarm_node.node import Node
from swarm_node.observability.jsonl import each_record, last_record
from swarm_node.observability.tally import Tally
from swarm_node.rollouts.evaluate import Evaluation
from swarm_node.runtime.console import say
from swarm_node.runtime.cost import CostMeter, Costs
from swarm_node.runtime.held_out import HeldOutFigures
from swarm_node.say import Warned
from swarm_node.storage.best import BEST, read_best
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.model_names import model_name
from swarm_node.storage.plain_files import as_a_node_writes
from swarm_node.storage.run_settings import RunSettings
from swarm_node.storage.rundir import RunDir
from swarm_protocol.lineage import read_lineage, shared

if TYPE_CHECKING:  # alone, a run loads nothing of the network
    from swarm_node.pipeline.crew import CrewNode
    from swarm_node.sharing import Balance
    from swarm_node.sharing.teaching import Teaching
    from swarm_node.swarm.uses import Uses

STALE_S = 600.0  # a node whose checkpoint is older looks for a peer of its cohort that is ahead


@dataclass
class RunState:
    """Saves the state of a run in checkpoints, and restores it."""

    config: NodeConfig  # `fitted` to the node's policy
    run: RunDir
    node: Node
    checkpoints: CheckpointStore
    crew: CrewNode | None  # the crew that this node leads
    own: RunSettings  # knows the settings behind the weights
    cost: CostMeter  # its figures are saved and restored as well
    held_out: HeldOutFigures  # likewise
    settings: dict[str, Any] | None = None  # the settings in the checkpoint from which this start resumed
    tally: Tally = field(default_factory=Tally)  # figures of all rounds so far
    saved: int | None = None  # the round of the last checkpoint
    saved_figures: tuple[Evaluation, Evaluation] | None = None  # held-out figures in it, from before and the latest

    def save(self, anew: bool = False) -> None:
        """Write a checkpoint of the present round in the background, unless it has one with the latest held-out
        figures; `anew` writes it also then. If its held-out figures are the best so far, it is named as the best.
        Raises NotFinite, and writes nothing, if training has spoiled the weights."""
        best = self.held_out.best if self.held_out.is_new_best else None
        self.held_out.is_new_best = False
        figures = self.held_out.figures.before, self.held_out.figures.last
        if self._has(figures) and not anew and not self.checkpoints.failed:
            return
        if self.crew is None:
            self.node.policy.check_finite()
        tensors, numbers, averaging = self._state()
        self.checkpoints.save(
            self.node.round,
            tensors,
            {
                "averaging": averaging,
                "kept_back": self.node.probe_answers.state(),
                "time": time.time(),
                "model": self._identity(),
                "run": None if self.crew is None else self.crew.held_stages.checkpoints.run,
                "trainer": numbers,
                "replay": self._replay(),
                "tally": msgspec.to_builtins(self.tally),
                **{name: part.state() for name, part in self._parts_of_member().items()},
                "cost": msgspec.to_builtins(self.cost.costs),
                "policy_version": self.node.policy.version,
                "settings": self.own.of_weights,
                "in_effect": self.node.in_effect(),
                "held_out_figures": msgspec.to_builtins(self.held_out.figures),
                "held_out": self.held_out.conditions,
                "judged": self._right_under(),
            },
            best,
        )
        # If weights are averaged before the next round, that is worth a checkpoint of its own.
        self.saved = None if best is not None and self.node.averager is not None else self.node.round
        self.saved_figures = figures

    def save_figures(self) -> None:
        """Save figures that were measured before training, if a checkpoint shows those of an earlier start."""
        if self.saved is not None:
            self.save()

    def _parts_of_member(self) -> dict[str, Teaching | Uses | Balance]:
        """What a checkpoint keeps of this node's membership, by its name there."""
        member = self.node.member
        if member is None:
            return {}
        balance = member.replay_buffer.balance
        found: dict[str, Teaching | Uses | Balance] = {"teaching": member.teaching, "uses": member.uses}
        return found if balance is None else found | {"balance": balance}

    def _has(self, figures: tuple[Evaluation, Evaluation]) -> bool:
        """Whether the last checkpoint is of this round and has these figures."""
        there = self.saved_figures or ()
        return self.saved == self.node.round and [*map(id, there)] == [*map(id, figures)]

    def settle_best(self) -> None:
        """Go back to the best checkpoint in best.json if a better one could not be written: to be named, the next one
        need only be better than that."""
        if self.checkpoints.best_failed:
            self.held_out.best = read_best(self.run.path, self.held_out.conditions)

    def _state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int], dict[str, Any]]:
        """(tensors by file, numbers of the trainer, numbers of averaging)"""
        optimizer, numbers = self.node.trainer.state_dict()
        tensors = {}
        if self.crew is None:  # in a crew, each holder of a stage keeps its weights
            tensors = {"policy": self.node.policy.trainable_state(), "optimizer": optimizer}
        averaging: dict[str, Any] = {}
        if self.node.averager is not None:
            tensors["averaging"], averaging = self.node.averager.state_dict()
        return tensors, numbers, averaging

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the tensors in a checkpoint."""
        tensors, _, _ = self._state()
        return sum(tensor.nbytes for named in tensors.values() for tensor in named.values())

    def resume(self) -> bool:
        """Resume from the newest checkpoint of this run; whether there was one. Raises UserError."""
        checkpoint = self.checkpoints.load_latest(self.foreign)
        if checkpoint is None and self.checkpoints.refused:
            say(Warned("no checkpoint is usable: starting anew (the refused ones stay where they are)"), "checkpoint")
        upto = math.inf
        if checkpoint is not None and self.crew is not None:
            upto = shared(read_lineage(checkpoint.state.get("run")), self.crew.held_stages.checkpoints.run)
            if upto < 0:
                checkpoint = None
                self.set_aside()
        if self.crew is not None:
            known = self.crew.progress.round or (0 if checkpoint is None else checkpoint.round)
            self.node.round = known or self.node.policy.version
        if checkpoint is None:
            return self.node.round > 0
        state = checkpoint.state
        if isinstance(settings := state.get("settings"), dict):
            self.settings = settings
        with suppress(KeyError, msgspec.ValidationError):  # of another version: `catch_up` makes them anew
            figures = msgspec.convert(state["tally"], Tally), msgspec.convert(state["cost"], Costs)
            self.tally, self.cost.costs = figures
        for name, part in self._parts_of_member().items():
            with suppress(KeyError, msgspec.ValidationError):  # of another version: counted from here on
                part.load(state[name])
        if self.crew is None:
            self.node.policy.load_trainable_state(checkpoint.tensors["policy"])
            self.node.trainer.load_state_dict(checkpoint.tensors["optimizer"], state["trainer"])
            self.node.policy.version = state["policy_version"]
            self.node.round = self.saved = checkpoint.round
        else:
            self.node.trainer.num_tokens = state["trainer"]["num_tokens"]
        if self.node.replay is not None and state.get("replay", {}).get("right_under") == self._right_under():
            with suppress(msgspec.ValidationError):  # of another version: no answer is kept
                self.node.replay.load(msgspec.convert(state["replay"], ReplayState))
        if state.get("judged") == self._right_under():
            with suppress(KeyError, msgspec.ValidationError):  # of another version: kept back anew
                self.node.probe_answers.load(state["kept_back"])
        if self.node.averager is not None:
            try:
                if state["policy_version"] > upto:
                    raise CheckpointError("the checkpoint is of another branch of the crew's run")
                if not state["averaging"]:
                    raise CheckpointError("this run has not averaged until now")
                self.node.averager.load_state_dict(checkpoint.tensors.get("averaging", {}), state["averaging"])
            except (CheckpointError, KeyError) as error:
                say(Warned(f"averaging begins anew: {error}"))
                self.node.averager.restart()
            if time.time() - state.get("time", 0.0) < STALE_S and self.node.member and self.node.member.late_join:
                self.node.member.late_join.seek(0.0)
        with as_a_node_writes(self.run.path):
            self._resume_figures(checkpoint.round, state)
        return True

    def _resume_figures(self, round: int, state: dict[str, Any]) -> None:
        """Take over the held-out figures in the state of the checkpoint of `round`, unless questions are asked or
        judged otherwise now. Where nothing was trained yet, all are then measured anew."""
        conditions, judged = self.held_out.conditions, state.get("judged", {})
        earlier = {"answer": "any", "prompt": judged.get("prompt")}  # of versions whose conditions named neither
        alike = earlier | state["held_out"] == conditions
        if not round and not (alike and judged == self._right_under()):
            return
        if alike:
            self.held_out.restore(state)
            best = read_best(self.run.path, conditions)
            self.held_out.best = best if best is not None and best.round <= self.node.round else None
        else:
            say(
                Warned(
                    "tasks, rewards, prompt or evaluation settings are not those this run began with: no figures from "
                    "before training"
                )
            )
        self.saved_figures = self.held_out.figures.before, self.held_out.figures.last

    def catch_up(self) -> None:
        """Complete the running figures from metrics.jsonl, which ends with the round that the run resumes after.

        Reads all of it if the checkpoint has no figures of this version, or those of a later round. Raises UserError.
        """
        if self.tally.round > self.node.round:
            self.tally, self.cost.costs = Tally(), Costs()
        last, known = last_record(self.run.metrics), self.tally.round
        if last is not None and last["round"] > known:
            for record in each_record(self.run.metrics):
                if record["round"] > known:
                    self.tally.add(record)
                    self.cost.go_on(record)
        self.tally.begin()

    def _identity(self) -> dict[str, Any]:
        """The model and the weights that are trained: a checkpoint of this run has the same."""
        policy = self.node.policy
        if self.crew is not None:
            return {"base": self.crew.parts.spec.architecture}
        trained = {name: [str(t.dtype), *t.shape] for name, t in policy.trainable_state().items()}
        return {"base": policy.base_digest, "start": policy.start_digest, "trained": trained}

    def _replay(self) -> dict[str, Any]:
        """The right answers that are kept; empty if none are replayed."""
        if self.node.replay is None:
            return {}
        return {"right_under": self._right_under(), **msgspec.to_builtins(self.node.replay.state())}

    def _right_under(self) -> dict[str, Any]:
        """Tasks, prompts and rewards, under which an answer that is kept is right, and held-out figures are alike."""
        return {
            "tasks": self.node.tasks.names,
            "prompt": self.config.policy.prompt,
            "rewards": self._rewards,
            **({"kinds": kinds} if (kinds := self.node.tasks.kinds) else {}),
        }

    @property
    def _rewards(self) -> dict[str, Any]:
        """The settings of rewards, as in checkpoints of versions that had no kinds of answers."""
        return self.config.rewards.model_dump(mode="json", exclude={"kind"})

    def count(self, record: Mapping[str, Any]) -> None:
        """Add the round that this record is of to the running figures."""
        judges = [self.node.tasks.names, self._rewards, *filter(None, [self.node.tasks.kinds])]
        self.tally.judge(hashlib.sha256(msgspec.json.encode(judges)).hexdigest()[:16])
        self.tally.add(record)

    def count_last(self) -> None:
        """Add what the totals of the swarm have grown by since the last round: exchanges and traffic go on."""
        member = self.node.member
        if member is not None and member.card is not None:
            self.tally.count(member.metrics(member.card.speed))

    def set_aside(self) -> None:
        """Rename the metrics of earlier rounds, whose checkpoints are gone or refused, and forget which was best."""
        metrics = self.run.metrics
        (self.run.path / BEST).unlink(missing_ok=True)
        if self.run.has_rounds:
            kept = next(p for n in count(1) if not (p := metrics.with_name(f"{metrics.name}.{n}")).exists())
            metrics.rename(kept)
            say(f"starting anew; the metrics that were there are now {kept}")

    def foreign(self, state: dict[str, Any]) -> str | None:
        """Why a checkpoint with this state does not belong to this run; None if it does."""
        theirs, mine = state.get("model"), self._identity()
        if not isinstance(theirs, dict):
            return "it names no model"
        if theirs.get("base") != mine["base"]:
            policy = self.config.policy
            packed = f" in {policy.quantize}" if policy.quantize else ""
            return f"its base model is not {model_name(policy.model)}{packed}"
        if theirs != mine:
            return "it trains other weights of this model (other LoRA settings, adapter or dtype)"
        return None
