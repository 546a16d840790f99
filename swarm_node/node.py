"""READ FIRST: a node, its packages and its round.

     tasks --> rollouts --> own groups ------------> choose --own + foreign groups--> grpo --> policy
       ^                        |                      ^                               |
       |                        v share                | admitted                      v
       |                     swarm <=== sharing ===> replay buffer                  metrics
       +------------------------------------ next round -----------------------------------+

`collect` samples answers and scores them; `share` publishes them; `choose` adds groups of other peers to train on;
`learn` updates the policy; `record` says what happened. Between rounds `average` exchanges weights. A node that is
alone (`local`) has no `member`: it publishes nothing and chooses nothing foreign. No node waits for another.

    tasks          questions and their checkers            policy         the model, its engines and its adapters
    rollouts       sampling, scoring, evaluation           grpo           advantage, loss, trainer, optimiser
    sharing        publishing, admission, replay           averaging      exchanges of weights within a cohort
    swarm          joining, manifests, membership          pipeline       one policy in stages on several machines
    runtime        a run: directory, signals, console      storage        run directory, checkpoints, copies elsewhere
    observability  metrics, plots, health, dashboard       config, cli    settings and commands

Packages of one layer do not import each other; they exchange the records of `types`. `runtime.loop` runs this node's
rounds, `runtime.simulation` those of many nodes in one process. Randomness is a function of (seed, round): alone, a run
that stops after any round and resumes equals one that never stopped.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested, UserError
from swarm_node.grpo.objective import clip_range
from swarm_node.grpo.optimizer import AnyOptimizer, Optimizer
from swarm_node.grpo.replay import Replay
from swarm_node.grpo.schedule import decay
from swarm_node.grpo.trainer import Before, Trainer
from swarm_node.policy.dtypes import name_of
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import GROUPS, SMALL
from swarm_node.rollouts import Collected, collect, fit_length, too_long
from swarm_node.rollouts.probe_answers import ProbeAnswers, reference_answers
from swarm_node.rollouts.trial import Standing, answered_again, rewards_of
from swarm_node.say import Once, Warned
from swarm_node.storage.model_names import model_name
from swarm_node.tasks.taskset import TaskSet, has_signal
from swarm_node.types import Group, Sampling

if TYPE_CHECKING:  # alone, a node loads nothing of the network
    from swarm_node.averaging.averager import Averager
    from swarm_node.swarm.member import Member


GROUPS_OF_SMALL = 32  # `rollouts.groups`, if it is 0, of policies below SMALL parameters; others have GROUPS
ANSWERS_OF_SMALL = 4  # `grpo.answers`, if it is unset, of the same; others train on all
SLOW_SHARE = 0.5  # part of a round above which reward functions are called slow


def fitted(config: NodeConfig, policy: Policy, say: Callable[[str], None], turns: int = 1) -> NodeConfig:
    """`config` within what `policy` can do in dialogues of so many `turns`, and with what goes by its size where
    nothing is set; `Node` and `Member` take the result. UserError if `policy` takes one turn only, and these are more.
    """
    if turns > 1:
        policy.after_answer("?", ended=True)
    rollouts, grpo = fit_length(config.rollouts, policy, say, turns), config.grpo
    is_small = config.pipeline.stages == 0 and policy.num_parameters() < SMALL
    if not rollouts.groups:
        rollouts = rollouts.model_copy(update={"groups": GROUPS_OF_SMALL if is_small else GROUPS})
    falls = not (is_small or config.swarm or config.pipeline.stages)
    chosen = {"answers": ANSWERS_OF_SMALL if is_small else 0, "schedule": "linear" if falls else "constant"}
    unset = {key: value for key, value in chosen.items() if getattr(grpo, key) is None}
    return config.model_copy(update={"rollouts": rollouts, "grpo": grpo.model_copy(update=unset)})


class Node:
    """One policy with its tasks, its trainer and, in a swarm, its membership."""

    def __init__(
        self,
        config: NodeConfig,
        policy: Policy,
        tasks: TaskSet,
        say: Callable[[str], None],
        member: Member | None = None,
        now: Callable[[], float] = time.time,
        optimizer: AnyOptimizer | None = None,
        averaged: Optimizer | None = None,
        private: bool = False,
        allowed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`config` is `fitted` to `policy`. For a policy in stages, `optimizer` updates all of them, and `averaged` the
        one whose weights this node averages. In a `private` swarm nobody else trains: the node draws tasks as it does
        alone, and shares no answers. In the context of `allowed`, a signal may raise StopRequested: others' weights are
        tried in it."""
        self.config = config
        self.policy = policy
        self.tasks = tasks
        self.member = member
        self.exchange = None if private else member  # where answers are exchanged with others; None = nowhere
        self.say = say
        self._once = Once(say)
        self.now = now
        if config.grpo.beta:
            policy.keep_reference()
        rollouts = config.rollouts
        sampling = Sampling(rollouts.max_new_tokens, rollouts.temperature, rollouts.top_p)
        self.trainer = Trainer(policy, config.grpo, sampling, say, tasks.reward_weights, optimizer)
        if self.exchange is not None:
            self.trainer.measured = self.exchange.receiver.measure
        self.averager: Averager | None = None
        if member is not None:
            if config.sharing.gate:
                member.guard(self._logprobs)
            if config.averaging.method != "none":
                own = averaged or self.trainer.optimizer
                assert isinstance(own, Optimizer), "the stage that is averaged must be given"
                self.averager = member.average(config.averaging, own.weights(), own.publish, self._probe)
                own.updating = self.averager.changing
                self.averager.probes.unseen = self._unseen_probe
                self.averager.trial = self._trial
            member.announce()
        self.replay = Replay(config.grpo.replay) if config.grpo.replay else None
        self._scored: list[Group] = []  # own groups behind the choice of this round, until it ends
        self.probe_answers = ProbeAnswers(partial(reference_answers, policy, tasks, rollouts))
        self._kept_back: Group | None = None  # of this round
        self._sampled: list[Group] = []  # own groups of the last round that was shared, where weights are averaged
        self._allowed = allowed
        has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()
        self._seed_torch = torch.manual_seed if has_gpu else torch.default_generator.manual_seed  # the first is slow
        self.round = 0
        self.of_time: Callable[[], float] = float  # part of the run's time that is over; 0 where none is set
        self._function_s = dict[str, float]()  # seconds that reward functions had taken when this round began
        self.collected = Collected()  # groups of this round that were sampled and scored, until they are shared

    def in_effect(self) -> dict[str, Any]:
        """Key -> the value that it stands for where it is unset, 0 or `auto`; empty for a policy in stages."""
        policy, trainer = self.policy, self.trainer
        if not isinstance(trainer.optimizer, Optimizer):
            return {}
        low, high = clip_range(trainer.config, trainer.loss)
        grpo, found = self.config.grpo, dict[str, Any]()
        if grpo.schedule != "constant" and math.isfinite(rounds := grpo.schedule_rounds or self.config.total_rounds):
            found["grpo.schedule_rounds"] = rounds
        if self.tasks.kind is not None:
            found["rewards.kind"] = self.tasks.kind
        return found | {
            "policy.lora": policy.is_lora,
            "policy.device": policy.device.type,
            "policy.dtype": name_of(policy.dtype),
            "rollouts.groups": self.config.rollouts.groups,
            "grpo.answers": grpo.answers,
            "grpo.schedule": grpo.schedule,
            "grpo.learning_rate": trainer.optimizer.learning_rate,
            "grpo.epsilon_low": low,
            "grpo.epsilon_high": high,
            "grpo.importance_level": trainer.config.importance_level or trainer.loss.level,
        }

    def collect(self) -> Collected:
        """Set the next round's rate; sample and score its groups. Raises UserError if no task fits the model."""
        self.collected = collected = Collected()
        self.trainer.optimizer.decay = decay(self.config.grpo, self.round, self.config.total_rounds, self.of_time())
        self._function_s = dict(self.tasks.function_s)
        name = self._name(self.round)
        rng = random.Random(name)
        random.seed(rng.getrandbits(63))  # for users' reward functions: nothing of ours draws from global generators
        np.random.seed(rng.getrandbits(32))
        self._seed_torch(rng.getrandbits(63))
        rollouts = self.config.rollouts
        if self.exchange is None:
            collect(self.policy, lambda n: self.tasks.sample(rng, n), self.tasks, rollouts, name, collected)
        else:
            rollouts = rollouts.model_copy(update={"groups": self.exchange.wanted()})
            collect(self.policy, self.exchange.draw, self.tasks, rollouts, name, collected)
        if not collected.groups and not collected.too_long and collected.not_encoded:
            model = model_name(self.config.policy.model)
            raise UserError(f"the tokenizer of {model} fails at every prompt; take another model")
        if not collected.groups:
            why = too_long(collected.skipped, rollouts, self.policy, self.tasks.turns)
            raise UserError(f"none of {collected.too_long} tasks fits: {why}")
        return collected

    def _name(self, round: int) -> str:
        """The name of a round's randomness."""
        return f"{self.config.seed or 0}/{round}"

    def share(self, collected: Collected) -> None:
        """Publish the own groups, but for one that is kept back now and then."""
        self._keep_back(collected.groups)
        if self.exchange is not None:
            for group in collected.groups:
                group.created = self.now()
            self.exchange.publish(self._taught(collected))
        self.collected = Collected()

    def _keep_back(self, groups: list[Group]) -> None:
        """Keep back a group that teaches, if one is due: nobody is trained on it, so it shows what averaging costs."""
        self._kept_back = None
        if self.averager is not None:
            self._sampled = groups
            if self.averager.config.probe:
                self._kept_back = self.probe_answers.keep_back(groups, bool(self.averager.roster.partners))

    def _taught(self, collected: Collected) -> list[Group]:
        """The own groups that are shared and trained on."""
        return [group for group in collected.groups if group is not self._kept_back]

    def choose(self, collected: Collected) -> list[Group]:
        """Groups to train on: own ones, own earlier right answers and, in a swarm, groups of other peers."""
        own, replayed = self._taught(collected), list[Group]()
        if self.replay is not None:
            self._scored = own
            replayed = self.replay.draw(random.Random(f"replay/{self.config.seed or 0}/{self.round}"))
        if self.exchange is None:
            return own + replayed
        self.exchange.receiver.admit()
        sharing = self.exchange.sharing
        n = sharing.own + sharing.foreign - len(collected.groups) if sharing.fill else sharing.foreign
        rng = random.Random(f"choose/{self.config.seed or 0}/{self.round}")
        foreign = self.exchange.replay_buffer.choose(max(0, min(sharing.foreign, n)), rng)
        return own + replayed + foreign

    def learn(
        self,
        groups: Sequence[Group],
        before_update: Callable[[], None] = lambda: None,
        go_on: Callable[[float], None] = lambda seconds: None,
    ) -> dict[str, float]:
        """Train on `groups`, a step for each batch of them, and end the round. `before_update`: see `Trainer.step`.

        `go_on` is called before each further step with the seconds that the rest will take. It may raise StopRequested,
        as the step may after it: the round then ends with the updates that were made.

        Returns the metrics of the steps, averaged over those that have them.
        """
        size = self.config.grpo.batch_groups or len(groups)
        n = max(1, round(len(groups) / size)) if groups else 1
        first, *others = batches = [groups[i::n] for i in range(n)]
        began = time.monotonic()
        steps = [self.trainer.step(first, before_update)]
        for batch in others:
            try:
                go_on((time.monotonic() - began) / len(steps) * (n - len(steps)))
                steps.append(self.trainer.step(batch, before_update))
            except StopRequested:
                break
        learned = {name: fmean(step[name] for step in steps if name in step) for step in steps for name in step}
        learned["num_tokens"] = steps[-1]["num_tokens"]
        if self.replay is not None:
            self.replay.observe(self._scored)
            self._scored = []
        if self.exchange is not None:
            for batch, step in zip(batches, steps, strict=False):  # a step without a gradient made no update
                self.exchange.teaching.learned_from(batch if step.get("grad_norm") else [])
        self.round += 1
        if self.averager is not None:
            self.probe_answers.trained_on(groups)
        return learned

    def average(self) -> bool:
        """Apply the exchanges of weights that have ended, and begin those that are due. Call it between rounds.

        Returns whether to call it again before the next round, once `averager.woken` is set.
        """
        averager, member = self.averager, self.member
        if averager is None or member is None or member.late_join is None:
            return False
        before: list[Before] = []  # of the next change of the weights, if there is one

        def remember() -> None:
            before[:] = before or [self.trainer.before_averaging(averager.tensors)]

        averager.before_change = remember
        fetched = None
        with suppress(StopRequested):  # while others' weights were tried: it is raised again at the next occasion
            fetched = member.late_join.step(self.policy.version)
        if fetched is not None:
            self.policy.version = max(self.policy.version, fetched.version)
            self.trainer.averaged(averager.tensors, before.pop())
            averager.began_with = partner = averager.roster.called(fetched.peer)
            why = "which was ahead of this node when it joined (averaging.late_join)"
            self.say(f"going on with the weights of {partner}, version {fetched.version}, {why}")
        exchanges = averager.counts["exchanges"]
        averager.step(self.trainer.optimizer.updates)
        if averager.counts["exchanges"] != exchanges:
            self.trainer.averaged(averager.tensors, before.pop())
        return averager.waiting()

    def _logprobs(self, groups: Sequence[Group]) -> list[list[list[float]]] | None:
        """Log-probabilities under this node's policy of others' answers: group -> answer -> token."""
        purpose = "judging answers of others: they are not trained on"
        return self.trainer.logprobs(groups, self.config.rollouts.temperature, purpose)

    def _probe(self) -> float | None:
        """Mean negative log-likelihood of this node's latest best answers, in nats per token; None without any."""
        return self._nll(self.probe_answers.trained)

    def _unseen_probe(self) -> float | None:
        """The same of right answers that nobody was trained on; None as long as there are few."""
        return self._nll(self.probe_answers.small_costs)

    def _nll(self, groups: Sequence[Group]) -> float | None:
        return self.trainer.mean_nll(groups) if groups else None

    def _trial(self) -> Callable[[], bool]:
        """See `Averager.trial`: own weights have answered the questions of the last round."""
        asked, name = self._sampled, self._name(self.round - 1)
        own = Standing(rewards_of(asked), self._nll(self.probe_answers.references))

        def worse() -> bool:
            loss = self._nll(self.probe_answers.references)
            if loss is not None and not math.isfinite(loss):
                return True
            with self._allowed():
                answers = answered_again(asked, self.policy, self.tasks, self.config.rollouts, name)
            return answers is None or Standing(rewards_of(answers), loss).worse_than(own)

        return worse

    def record(self, collected: Collected, learned: dict[str, float], seconds: float) -> dict[str, Any]:
        """The metrics of a round, for metrics.jsonl. `reward` covers all own groups, before any filter."""
        groups = collected.groups
        rewards = [[r.reward for r in g.rollouts] for g in groups]
        rollouts = [r for g in groups for r in g.rollouts]
        lengths = [r.num_tokens for r in rollouts]
        record: dict[str, Any] = {
            "step": self.policy.version,
            "round": self.round,
            "time": self.now(),
            "reward": fmean(fmean(r) for r in rewards),
            "reward_std": fmean(_stdev(tuple(sorted(r))) for r in rewards),
            "frac_reward_zero_std": fmean(not has_signal(g.rollouts) for g in groups),
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
        for name, label in self.tasks.reward_labels.items():
            scored = [reward for r in rollouts if (reward := r.rewards.get(name)) is not None]
            if scored:
                record[f"rewards/{label}/mean"] = fmean(scored)
            if len(scored) > 1:
                record[f"rewards/{label}/std"] = stdev(scored)
        record |= self._share_of_functions(seconds)
        if collected.too_long:
            record["tasks/too_long"] = collected.too_long
        if collected.not_encoded:
            record["tasks/not_encoded"] = collected.not_encoded
        if self.tasks.scorer_errors:
            record["tasks/scorer_errors"] = self.tasks.scorer_errors.total()
        if self.member is not None:
            record |= self.member.metrics(record["perf/generated_tok_s"])
            record["swarm/groups_own"] = float(len(collected.groups))
        return learned | record

    def _share_of_functions(self, seconds: float) -> dict[str, float]:
        """The part of a round of so many seconds that reward functions took; empty without one. A slow one is named."""
        spent = {name: s - self._function_s.get(name, 0.0) for name, s in self.tasks.function_s.items()}
        if not spent:
            return {}
        share, slowest = min(1.0, sum(spent.values()) / max(seconds, 1e-9)), max(spent, key=spent.__getitem__)
        if share > SLOW_SHARE:
            took = f"{slowest!r} {spent[slowest]:.1f} s of {seconds:.1f} s"
            remedy = "let it judge the answers that it gets at once in parallel"
            told = f"reward functions take {share:.0%} of a round, {took}, and nothing is trained meanwhile: {remedy}"
            self._once("slow", Warned(told))
        return {"perf/reward_share": share}


@lru_cache(maxsize=1024)
def _stdev(rewards: tuple[float, ...]) -> float:
    """Standard deviation of a group's rewards in order. It is exact whatever their order, and groups have few kinds."""
    return stdev(rewards)
