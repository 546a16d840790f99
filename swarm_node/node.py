"""READ FIRST: a node, its rooms and its round.

        tasks -> rollouts -> own groups ---------------> choose --I own + J foreign--> grpo step -> policy
          ^                     |                           ^                            |
          |                     v publish                   | admitted                   v
          |                  gossip <====== swarm ======> replay                       metrics
          +------------------------------- next round -----------------------------------+

`collect` samples and scores; `share` publishes what was sampled; `choose` takes foreign groups to train on with it;
`learn` updates the policy; `record` says what happened. Alone (`local`), a node has no `member`: nothing is published
and nothing foreign chosen. Nobody waits for anybody.

Rooms do not know each other; they exchange the records of `types`, and only this module and `member` see them all.
`run` gives a node its directory, its signals and its screen; `sim` runs many in one process. Randomness is a function
of (seed, round): alone, a run that stops after any round and resumes equals one that never stopped.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from swarm_node.config import NodeConfig
from swarm_node.errors import UserError
from swarm_node.grpo.optimizer import AnyOptimizer
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy.policy import Policy
from swarm_node.rollouts import Collected, collect, fit_length, has_signal
from swarm_node.tasks import TaskSet
from swarm_node.types import Group, Sampling

if TYPE_CHECKING:  # alone, a node loads nothing of the network
    from swarm_node.averaging import Averager
    from swarm_node.swarm.member import Member


PROBED = 8
"""Own answers that averaged weights are judged by."""


def fitted(config: NodeConfig, policy: Policy, say: Callable[[str], None]) -> NodeConfig:
    """`config` as far as `policy` can follow it: what `Node` and `Member` are made with."""
    return config.model_copy(update={"rollouts": fit_length(config.rollouts, policy, say)})


class Node:
    """One policy, its tasks, its trainer and, in a swarm, its membership."""

    def __init__(
        self,
        config: NodeConfig,
        policy: Policy,
        tasks: TaskSet,
        say: Callable[[str], None],
        member: Member | None = None,
        now: Callable[[], float] = time.time,
        optimizer: AnyOptimizer | None = None,
        averaged: AnyOptimizer | None = None,
        private: bool = False,
    ) -> None:
        """`config` is `fitted` to `policy`. For a policy in stages, `optimizer` updates all of them, and `averaged` the
        one whose weights this node averages. In a `private` swarm nobody else trains: the node draws tasks as it does
        alone, and shares no answers."""
        self.config = config
        self.policy = policy
        self.tasks = tasks
        self.member = member
        self.exchange = None if private else member
        """Where answers are exchanged with others; None = nowhere."""
        self.say = say
        self.now = now
        if config.grpo.beta:
            policy.keep_reference()
        rollouts = config.rollouts
        sampling = Sampling(rollouts.max_new_tokens, rollouts.temperature, rollouts.top_p)
        self.trainer = Trainer(policy, config.grpo, sampling, say, tasks.reward_weights, optimizer)
        if member is not None and config.sharing.gate:
            member.guard(self._logprobs)
        self.averager: Averager | None = None
        if member is not None and config.averaging.method != "none":
            own = averaged or self.trainer.optimizer
            self.averager = member.average(config.averaging, own.weights(), own.publish, self._probe)
            own.updating = self.averager.changing
        if member is not None:
            member.announce()
        self._best: deque[Group] = deque(maxlen=PROBED)
        self.round = 0
        self.collected = Collected()
        """What has been sampled and scored of this round, until it is shared."""

    # ----------------------------------------------------------------- a round

    def collect(self) -> Collected:
        """Sample and score the groups of the next round. UserError if no task fits the model."""
        self.collected = collected = Collected()
        name = f"{self.config.seed or 0}/{self.round}"
        rng = random.Random(name)
        random.seed(rng.getrandbits(63))  # for users' reward functions: nothing of ours draws from global generators
        np.random.seed(rng.getrandbits(32))
        torch.manual_seed(rng.getrandbits(63))
        rollouts = self.config.rollouts
        if self.exchange is None:
            collect(self.policy, lambda n: self.tasks.sample(rng, n), self.tasks.score, rollouts, name, collected)
        else:
            rollouts = rollouts.model_copy(update={"groups": self.exchange.wanted()})
            collect(self.policy, self.exchange.draw, self.tasks.score, rollouts, name, collected)
        if not collected.groups:
            raise UserError(
                f"none of {collected.too_long} tasks fits: prompts are longer than rollouts.max_prompt_tokens or "
                "than what rollouts.max_new_tokens leaves of the model's positions"
            )
        return collected

    def share(self, collected: Collected) -> None:
        """Publish what was sampled."""
        if self.exchange is not None:
            for group in collected.groups:
                group.created = self.now()
            self.exchange.publish(collected.groups)
        self.collected = Collected()

    def choose(self, collected: Collected) -> list[Group]:
        """The groups to train on: own ones and, in a swarm, foreign ones."""
        if self.exchange is None:
            return collected.kept
        rng = random.Random(f"choose/{self.config.seed or 0}/{self.round}")
        return collected.kept + self.exchange.choose(len(collected.kept), rng)

    def learn(self, groups: Sequence[Group], before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        """One step on `groups`; its metrics. The round is over with it (`before_update`: see Trainer.step)."""
        learned = self.trainer.step(groups, before_update)
        self.round += 1
        if self.averager is not None:
            self._best += [best for group in groups if (best := _best(group)) is not None]
        return learned

    def average(self) -> bool:
        """Between rounds: apply what peers' weights did to ours, begin what is due. Whether to call it again in a
        moment before the next round (`averager.woken` says when)."""
        averager, member = self.averager, self.member
        if averager is None or member is None or member.late_join is None:
            return False
        before = self.trainer.before_averaging(averager.tensors)
        fetched = member.late_join.step(self.policy.version)
        if fetched is not None:
            self.policy.version = max(self.policy.version, fetched.version)
            self.trainer.averaged(averager.tensors, before)
            before = self.trainer.before_averaging(averager.tensors)
            self.say(f"going on with the weights of {averager.roster.called(fetched.peer)}, version {fetched.version}")
        exchanges = averager.counts["exchanges"]
        averager.step(self.trainer.optimizer.updates)
        if averager.counts["exchanges"] != exchanges:
            self.trainer.averaged(averager.tensors, before)
        return averager.waiting()

    def _logprobs(self, groups: Sequence[Group]) -> list[list[list[float]]] | None:
        """How likely this node itself is to sample answers of others."""
        purpose = "judging answers of others: they are not trained on"
        return self.trainer.logprobs(groups, self.config.rollouts.temperature, purpose)

    def _probe(self) -> float | None:
        """How unlikely this node's own latest best answers are, in nats a token; None if there are none."""
        return self.trainer.unlikelihood(list(self._best)) if self._best else None

    def record(self, collected: Collected, learned: dict[str, float], seconds: float) -> dict[str, Any]:
        """The metrics line of a round. `reward` is over all own groups, before any filter."""
        groups = collected.groups
        rewards = [[r.reward for r in g.rollouts] for g in groups]
        rollouts = [r for g in groups for r in g.rollouts]
        lengths = [len(r.token_ids) for r in rollouts]
        record: dict[str, Any] = {
            "step": self.policy.version,
            "round": self.round,
            "time": self.now(),
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
        if self.member is not None:
            record |= self.member.metrics(record["perf/generated_tok_s"])
            record["swarm/groups_own"] = float(len(collected.kept))
        return learned | record


def _best(group: Group) -> Group | None:
    """The best answer of an own group, alone; None if all were rewarded alike."""
    if group.peer is not None or not has_signal(group):
        return None
    best = max(group.rollouts, key=lambda rollout: rollout.reward)
    return msgspec.structs.replace(group, rollouts=[best]) if best.token_ids else None
