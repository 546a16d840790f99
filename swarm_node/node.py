"""READ FIRST: a node, its rooms and its loop.

        tasks -> rollouts -> groups -> grpo step -> policy
          ^                                           |      every round: one line of metrics
          +---------------- next round ---------------+      every few:   a snapshot in the background

Rooms do not know each other; they exchange the records of `types`, and only this module sees them all. Randomness is
a function of (seed, round): a run that stops after any round and resumes equals one that never stopped.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from msgspec import to_builtins

from swarm_node.config import NodeConfig, dump_toml
from swarm_node.errors import UserError
from swarm_node.evaluate import Held, evaluate, rows
from swarm_node.grpo.trainer import Trainer
from swarm_node.observability.metrics import EventLog, MetricsWriter, read_metrics
from swarm_node.observability.plots import plot_reward
from swarm_node.observability.progress import Progress
from swarm_node.observability.sinks import open_sinks
from swarm_node.policy.estimate import estimate
from swarm_node.policy.loading import load_policy
from swarm_node.recovery.snapshots import SnapshotStore
from swarm_node.rollouts import Collected, collect, fit_length, has_signal
from swarm_node.rundir import RunDir
from swarm_node.stopping import Stopper, StopRequested
from swarm_node.tasks import TaskSet, load_tasks
from swarm_node.types import Group, Sampling

ZERO_REWARD_ROUNDS = 10
"""Rounds without any reward after which some completions are shown: the prompt or the extraction may be wrong."""


def run_local(config: NodeConfig, json_output: bool = False) -> int:
    """Train alone until `rounds` or `minutes` are over or a signal comes; resumes what is in the run directory.

    Returns the exit code. Raises UserError for what only the user can mend.
    """
    with ExitStack() as stack:
        run = stack.enter_context(RunDir.open(config.run_dir))
        node = Node(config, run, json_output, stack)
        node.train()
    return 0


class Node:
    """One policy, its tasks and its run directory."""

    def __init__(self, config: NodeConfig, run: RunDir, json_output: bool, stack: ExitStack) -> None:
        """Load everything, in the order in which mistakes are cheapest to find."""
        self.run = run
        self.json_output = json_output
        self.progress = Progress(config.total_rounds, config.minutes, json_output)
        self.events = EventLog(run.events, self.progress.say)
        stack.callback(self.events.close)
        self.tasks: TaskSet = load_tasks(config.tasks, config.rewards)
        self.policy = load_policy(config.policy, config.rollouts, self.say)
        self.config = config.model_copy(update={"rollouts": fit_length(config.rollouts, self.policy, self.say)})
        if config.grpo.beta:
            self.policy.keep_reference()
        rollouts = self.config.rollouts
        sampling = Sampling(rollouts.max_new_tokens, rollouts.temperature, rollouts.top_p)
        self.trainer = Trainer(self.policy, config.grpo, sampling, self.say, self.tasks.reward_weights)
        self.snapshots = SnapshotStore(run.snapshots, config.snapshots.keep, self.say)
        stack.callback(self.snapshots.close)
        self.round = 0
        self._changing = False
        self._saved: int | None = None
        self.before: dict[str, Held] = {}
        self.after: dict[str, Held] = {}
        resumed = self._resume()
        run.write_config(dump_toml(config))
        if not resumed:
            self._set_aside(run.metrics)
        sinks = open_sinks(config.log, run.path, config.model_dump(mode="json"), self.round + 1)
        self.metrics = MetricsWriter(run.metrics, self.say, sinks)
        stack.callback(self.metrics.close)
        self.metrics.truncate_after(self.round)
        if resumed:
            self.say(f"resumed {run.path} at round {self.round}", "resume")

    # ----------------------------------------------------------------- the loop

    def train(self) -> None:
        """Rounds until the end or a signal; then a last snapshot, the held-out table, the plot and the summary."""
        self.say(f"tasks {', '.join(self.tasks.labels)}; run directory {self.run.path}", "start")
        self.progress.start(self.round)
        try:
            with Stopper(last_resort=self._last_resort) as stop:
                try:
                    self._rounds(stop)
                    stop.allow()
                    self.after = self._held_out("after") if self.round > 0 else {}
                except StopRequested:
                    self.say(f"stopping after round {self.round}; the same command resumes here", "stop")
                finally:
                    stop.hold()
                    if not self._changing:  # whatever went wrong, finished rounds are not lost
                        self.save()
        finally:
            self.progress.stop()
        self.snapshots.wait()
        self._report()

    def _rounds(self, stop: Stopper) -> None:
        config, without_reward = self.config, 0
        stop.allow()
        drawn = self.tasks.sample(random.Random(config.seed), config.rollouts.groups)
        prompts = [self.policy.encode(task.question) for task in drawn]
        self.say(str(estimate(self.policy, prompts, config.rollouts, config.grpo)), "estimate")
        if self.round == 0:
            self.before = self._held_out("before")
        if self.round >= config.total_rounds:
            self.say(f"all {self.round} rounds are done: give more --rounds to go on, or another --run-dir", "done")
        started = time.monotonic()
        while self.round < config.total_rounds:
            if config.minutes and time.monotonic() - started > 60 * config.minutes:
                self.say(f"{config.minutes:g} minutes are over", "stop")
                break
            stop.allow()
            began = time.perf_counter()
            collected = self.collect()
            if not collected.groups:
                raise UserError(
                    f"none of {collected.too_long} tasks fits: prompts are longer than rollouts.max_prompt_tokens or "
                    "than what rollouts.max_new_tokens leaves of the model's positions"
                )
            learned = self.trainer.step(collected.kept, before_update=lambda: self._change(stop))
            stop.hold()
            self.round += 1
            self._changing = False
            record = self._record(collected, learned, time.perf_counter() - began)
            self.metrics.write(record)
            self.progress.update(self.round, record)
            without_reward = 0 if record["reward"] else without_reward + 1
            if without_reward == ZERO_REWARD_ROUNDS:
                self._show_completions(collected.groups)
            if self.round % config.snapshots.every == 0 and self.round < config.total_rounds:
                self.save()

    def _change(self, stop: Stopper) -> None:
        """From here to the end of the round the weights are not those of a finished round."""
        stop.hold()
        self._changing = True

    def collect(self) -> Collected:
        """The groups of the next round."""
        name = f"{self.config.seed}/{self.round}"
        rng = random.Random(name)
        random.seed(rng.getrandbits(63))  # for users' reward functions: nothing of ours draws from global generators
        np.random.seed(rng.getrandbits(32))
        torch.manual_seed(rng.getrandbits(63))
        return collect(self.policy, lambda n: self.tasks.sample(rng, n), self.tasks.score, self.config.rollouts, name)

    # ----------------------------------------------------------------- state

    def save(self) -> None:
        """Snapshot of the state after `round` rounds, unless there is one; written in the background."""
        if self._saved == self.round:
            return
        optimizer, numbers = self.trainer.state_dict()
        self.snapshots.save(
            self.round,
            {"policy": self.policy.trainable_state(), "optimizer": optimizer},
            {
                "model": self._identity(),
                "trainer": numbers,
                "policy_version": self.policy.version,
                "before": {label: [h.questions, h.pass_1, h.pass_k] for label, h in self.before.items()},
                "held_out": self._evaluation(),
            },
        )
        self._saved = self.round

    def _resume(self) -> bool:
        snapshot = self.snapshots.load_latest(self._foreign)
        if snapshot is None:
            return False
        state = snapshot.state
        self.policy.load_trainable_state(snapshot.tensors["policy"])
        self.trainer.load_state_dict(snapshot.tensors["optimizer"], state["trainer"])
        self.policy.version = state["policy_version"]
        if state["held_out"] == self._evaluation():
            self.before = {label: Held(*values) for label, values in state["before"].items()}
        else:
            self.say("tasks or evaluation settings are not those this run began with: no figures from before training")
        self.round = self._saved = snapshot.round
        return True

    def _identity(self) -> dict[str, Any]:
        """What must agree for a snapshot to go on with this model."""
        trained = {name: [str(t.dtype), *t.shape] for name, t in self.policy.trainable_state().items()}
        return {"base": self.policy.base_digest, "start": self.policy.start_digest, "trained": trained}

    def _evaluation(self) -> dict[str, Any]:
        """What must agree for held-out figures to be comparable."""
        return {"tasks": self.tasks.names, **self.config.eval.model_dump(), "rollouts": self._sampling()}

    def _sampling(self) -> list[float]:
        rollouts = self.config.rollouts
        return [rollouts.max_new_tokens, rollouts.temperature, rollouts.top_p]

    def _set_aside(self, metrics: Path) -> None:
        """Starting anew over the metrics of a run whose snapshots are gone or refused: keep them under another name."""
        if metrics.exists() and metrics.stat().st_size:
            kept = next(p for n in count(1) if not (p := metrics.with_name(f"{metrics.name}.{n}")).exists())
            metrics.rename(kept)
            self.say(f"starting anew; the metrics that were there are now {kept}")

    def _foreign(self, state: dict[str, Any]) -> str | None:
        """Why a snapshot does not belong to this run, or `None`."""
        theirs, mine = state.get("model"), self._identity()
        if not isinstance(theirs, dict):
            return "it names no model"
        if theirs.get("base") != mine["base"]:
            return f"its base model is not {self.config.policy.model}"
        if theirs != mine:
            return "it trains other weights of this model (other LoRA settings, adapter or dtype)"
        return None

    def _last_resort(self) -> None:
        """The deadline after a signal is over and the main thread is still inside torch: weights as they are, if they
        are those of a finished round, else the last snapshot stands."""
        if not self._changing:
            self.save()
            self.snapshots.wait()

    # ----------------------------------------------------------------- what people see

    def say(self, text: str, kind: str = "note") -> None:
        """One sentence to the screen and to events.jsonl."""
        self.progress.say(text)
        self.events.write(kind, text)

    def _held_out(self, when: str) -> dict[str, Held]:
        settings = self.config.eval
        if settings.questions == 0:
            return {}
        self.progress.say(f"held-out questions, {when} training")
        return evaluate(self.policy, self.tasks, self.config.rollouts, settings.questions, settings.samples)

    def _record(self, collected: Collected, learned: dict[str, float], seconds: float) -> dict[str, Any]:
        """The metrics line of a round. `reward` is over all own groups, before any filter."""
        groups = collected.groups
        rewards = [[r.reward for r in g.rollouts] for g in groups]
        rollouts = [r for g in groups for r in g.rollouts]
        lengths = [len(r.token_ids) for r in rollouts]
        record: dict[str, Any] = {
            "step": self.policy.version,
            "round": self.round,
            "time": time.time(),
            "reward": fmean(fmean(r) for r in rewards),
            "reward_std": fmean(stdev(r) for r in rewards),
            "frac_reward_zero_std": fmean(not has_signal(g) for g in groups),
            "completions/mean_length": fmean(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": fmean(not r.finished for r in rollouts),
            "step_time": seconds,
            "perf/generated_tok_s": collected.num_tokens / max(collected.seconds, 1e-9),
        }
        for label in self.tasks.labels:
            mine = [fmean(r) for g, r in zip(groups, rewards, strict=True) if g.task.label == label]
            if mine:
                record[f"reward/{label}"] = fmean(mine)
        if collected.too_long:
            record["tasks/too_long"] = collected.too_long
        if self.tasks.scorer_errors:
            record["tasks/scorer_errors"] = self.tasks.scorer_errors.total()
        return learned | record

    def _show_completions(self, groups: Sequence[Group]) -> None:
        self.say(f"no reward in {ZERO_REWARD_ROUNDS} rounds; what the policy answers:", "zero_reward")
        for group in groups[:3]:
            rollout = group.rollouts[0]
            end = "" if rollout.finished else " [cut off at max_new_tokens]"
            self.say(
                f"  {group.task.label}: question {group.task.question[-80:]!r}, "
                f"completion {rollout.text[-200:]!r}{end}, "
                f"extracted {rollout.extracted!r}, expected {group.task.answer!r}"
            )

    def _report(self) -> None:
        """Table, plot and summary; one JSON document on stdout with --json."""
        metrics = read_metrics(self.run.metrics)
        tenth = max(1, len(metrics) // 10)
        summary: dict[str, Any] = {
            "run_dir": str(self.run.path),
            "rounds": self.round,
            "reward_first_tenth": fmean(m["reward"] for m in metrics[:tenth]) if metrics else None,
            "reward_last_tenth": fmean(m["reward"] for m in metrics[-tenth:]) if metrics else None,
            "held_out_before": to_builtins(self.before),
            "held_out_after": to_builtins(self.after),
        }
        if self.before and self.after:
            columns, table = rows(self.before, self.after, self.config.eval.samples)
            self.progress.table("held-out questions", columns, table)
        if metrics:
            held = (self.before["all"].pass_1, self.after["all"].pass_1) if self.before and self.after else None
            plot = self.run.plots / "reward.png"
            plot_reward(metrics, plot, title=str(self.run.path), held_out=held)
            self.say(
                f"reward {summary['reward_first_tenth']:.3f} (first tenth of rounds) -> "
                f"{summary['reward_last_tenth']:.3f} (last tenth); {plot}",
                "summary",
            )
        if self.json_output:
            json.dump(summary, sys.stdout)
            sys.stdout.write("\n")
