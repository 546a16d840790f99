"""A run: a node with a directory, a console and signals.

    open the directory -> (swarm), tasks, policy -> resume -> held-out table -> rounds -> checkpoint -> table and plot

`node` does a round. This module writes the metrics and the checkpoints, and decides when and how a run ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested
from swarm_node.grpo.memory import Estimate, Fitting, check_plan, fit_sampling, hardware_of
from swarm_node.node import Node, fitted
from swarm_node.observability.jsonl import JsonLines
from swarm_node.observability.legend import running_legend
from swarm_node.policy.dtypes import with_dtype
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import AVERAGING_COPIES
from swarm_node.rollouts.answer_length import with_answer_length
from swarm_node.rollouts.collect import DRAWS, encode_each
from swarm_node.rollouts.evaluate import Evaluation, part_size
from swarm_node.runtime.callbacks import Callbacks, TrainResult
from swarm_node.runtime.console import Console, say
from swarm_node.runtime.cost import CostMeter
from swarm_node.runtime.drain import average_last, finish_mirror, measure_last, open_mirror, say_reach, show_saving
from swarm_node.runtime.first_look import first_look, round_times
from swarm_node.runtime.held_out import HeldOutFigures, tasks_of_run
from swarm_node.runtime.limits import ResourceLimits
from swarm_node.runtime.records import RunRecords
from swarm_node.runtime.report import RunReport
from swarm_node.runtime.resume import RunState
from swarm_node.runtime.shutdown import Stopper
from swarm_node.runtime.status import status_written
from swarm_node.runtime.threads import Threads
from swarm_node.runtime.weight_changes import WeightChanges
from swarm_node.say import Warned
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.going_on import who_goes_on
from swarm_node.storage.run_settings import RunSettings, with_kept_choices
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.join import JoinedSwarm, join_swarm
from swarm_node.swarm.links import Swarm
from swarm_node.tasks.one_turn import in_form
from swarm_node.tasks.taskset import TaskSet
from swarm_node.types import Group

if TYPE_CHECKING:  # alone, a run loads nothing of the network
    from swarm_node.pipeline.crew import CrewNode
    from swarm_node.swarm.member import Member

ZERO_REWARD_ROUNDS = 10
"""Rounds without any reward after which some answers are shown: the prompt or the extraction may be wrong."""
SAID_TOKENS = 64  # tokens that an environment is taken to say between two answers, where memory is estimated


class Run:
    """One run of a node that trains its own policy, or leads a crew that holds the policy."""

    def __init__(
        self,
        config: NodeConfig,
        run: RunDir,
        stack: ExitStack,
        stop: Stopper,
        console: Console,
        found: Swarm | None = None,
        crew: CrewNode | None = None,
        private: bool = False,
        callbacks: Callbacks | None = None,
    ) -> None:
        """Load everything, in the order in which mistakes are cheapest to find.

        `found` is the swarm to join, `crew` the one that this node leads, `private` as for `Node`. Raises
        StopRequested.
        """
        self.callbacks = callbacks or Callbacks()
        self.run = run
        self.stop = stop
        self.crew = crew
        self.console = console
        self.threads = Threads(partial(say, kind="start"))
        self.cost = CostMeter(config.price_per_hour, time.monotonic())
        self.progress = console.progress
        swarm = None if crew is None else crew.parts.entered
        asked = config
        if found is not None:
            swarm = join_swarm(found, config, run, say, stack, stop.allowed)
            config = swarm.of_a_member(config)
            self.progress.spent_s = swarm.waited_s
        elif crew is None:
            config = in_form(config, config.rewards.answer)
        self.console.health.identify(config.name or run.path.resolve().name, swarm.manifest.swarm_id if swarm else "")
        if swarm is not None and config.seed is None:
            config = config.model_copy(update={"seed": swarm.seed})
        self.limits = ResourceLimits(config.resources, run, say, member=swarm is not None)
        with stop.allowed():
            self.tasks, exam = tasks_of_run(config, swarm.tasks if swarm else None, private)
            self.policy, config = _load(config, run, self.tasks, self.limits) if crew is None else (crew.policy, config)
        self.config = fitted(config, self.policy, say, self.tasks.turns)
        member = None if swarm is None else self._become_member(swarm, stack)
        optimizer, averaged = (None, None) if crew is None else (crew.driver, crew.held_stages.workers[0].optimizer)
        parts = self.config, self.policy, self.tasks, say, member
        self.node = Node(*parts, optimizer=optimizer, averaged=averaged, private=private, allowed=stop.allowed)
        if self.node.averager is not None:
            self.node.averager.run = run.quoted
            self.node.averager.absent = tuple if crew is None else crew.parts.cohort.absent
        self.checkpoints = CheckpointStore(run.checkpoints, config.checkpoints.keep, partial(say, kind="checkpoint"))
        stack.callback(self.checkpoints.close)
        self.own = RunSettings(run, config, asked, say) if crew is None else crew.parts.run_settings
        telling = partial(say, kind="start"), self._measured
        self.held_out = HeldOutFigures(*parts[:3], *telling, crew is None, stop.allowed, exam)
        self.progress.held_out = f"eval/{self.held_out.figure}"
        of_run = crew, self.own, self.cost, self.held_out
        self.state = RunState(self.config, run, self.node, self.checkpoints, *of_run)
        if crew is None:
            self.threads.begin(self.limits.threads, bool(config.policy.threads), self.policy.device.type)
            self.progress.tell_how_to_stop(run.quoted)
            self.progress.waiting = self.console.health.waiting = lambda: self.held_out.doing or self.limits.waiting()
            self.progress.paused_s = lambda: self.limits.paused_s
        self.goes_on = partial(who_goes_on, run, [function.path for function in config.rewards.functions])
        self.finished = False  # whether all rounds are over
        self.weights = WeightChanges(self.node, stop, crew is None)
        self._without_reward, self._saved_at = 0, 0.0  # rounds in a row; when the last checkpoint was begun
        self._mirror = open_mirror(config, run, swarm, stop, self.state.foreign) if crew is None else None
        show_saving(self.console.health, self.checkpoints, self._mirror)
        self.console.usage.saved_s = lambda: self.checkpoints.age_s
        resumed = self.state.resume()
        self._declare()
        if crew is None:
            self.own.begin(resumed or run.has_rounds, self.state.settings)
        if not resumed:
            self.state.set_aside()
        decode = self.policy.text_of_prompt
        self.records = RunRecords(config, run, self.node.round, self.console.health, stack, decode)
        self.state.catch_up()
        self.began_at = self.node.round  # the round after which this start resumed; 0 if it began anew
        if crew is None:
            self.checkpoints.check_room(self.state.checkpoint_bytes, best=self.held_out.keeps_best)
        if resumed:
            say(f"resumed {run.path} at round {self.node.round}", "resume")

    def _become_member(self, swarm: JoinedSwarm, stack: ExitStack) -> Member:
        from swarm_node.swarm.member import Member

        record = None
        if self.config.sharing.record:
            offers = JsonLines(self.run.path / "offers.jsonl", say)
            stack.callback(offers.close)
            record = offers.append
        network = swarm.manifest, swarm.identity, swarm.transport
        subscribe = None if self.crew is None else self.crew.subscriptions.subscribe
        member = Member(self.config, *network, self.policy, self.tasks, say, record=record, subscribe=subscribe)
        if self.crew is None:
            stack.callback(member.close)
            self.console.health.restarted = swarm.transport.restarted
        else:  # the network is the crew's
            stack.callback(member.publisher.flush)
            member.crew = self.crew.announcer.card
        stack.enter_context(
            status_written(self.run, member, self.config.network, lambda: self.limits.reason, self.crew)
        )
        return member

    def train(self) -> None:
        """Train until the end or a signal; then evaluate on held-out questions and save a last checkpoint."""
        stop = self.stop
        if self.crew is None and (self.node.member is not None or self._mirror is not None):
            trained = sum(t.numel() * t.element_size() for t in self.policy.trainable_state().values())
            say_reach(self.config, 3 * trained)  # with the optimiser's two moments
        say(f"tasks {', '.join(self.tasks.labels)}; run directory {self.run.path}", "start")
        for line in self.tasks.described(self.held_out.tasks):
            say(line, "start")
        measures, is_member = self.config.eval.questions > 0, self.node.member is not None
        for line in running_legend(measures, is_member, self.held_out.has_own_tasks):
            say(line, "legend")
        self.progress.start(self.node.round, deepcopy(self.state.tally.rewards))
        try:
            with self.limits.watching(stop) if self.crew is None else nullcontext():
                try:
                    self._rounds()
                    self.finished = self.node.round >= self.config.total_rounds
                    stop.allow()
                    if self.node.round > 0:
                        self.state.settle_best()
                        again = self.node.averager is not None
                        self.records.evaluated(self.node.round, self.held_out.measure_after(self.node.round, again))
                        stop.check()
                except StopRequested:
                    self.console.leave(f"stopping after round {self.node.round}; {self.goes_on()} goes on")
                    self.state.count_last()
                else:
                    stop.hold()
                    self.state.count_last()
                finally:
                    stop.hold()
                    if not self.weights.unfinished:  # whatever went wrong, finished rounds are not lost
                        self.state.save()
                    leaves = stop.requested and self.crew is None and not self.weights.unfinished
                    if leaves:
                        average_last(self.node, self.state, stop)
                if leaves:
                    measure_last(self.state, self.records, stop)
        finally:
            self.progress.stop()
        self.checkpoints.wait()
        self.state.settle_best()
        self.callbacks.checkpoints(self.checkpoints.written)
        if self.checkpoints.failed and not self.weights.unfinished:  # there may be room by now
            self.state.save()
            self.checkpoints.wait()
        if self.crew is None:
            stop.safe()
        finish_mirror(self._mirror, stop)
        self.limits.check_kept()

    def _rounds(self) -> None:
        """Do the rounds that are left, until the time is over. Raises StopRequested."""
        config, stop = self.config, self.stop
        self._prepare()
        started = time.monotonic() - self.limits.paused_s - self.progress.spent_s
        self._saved_at = time.monotonic()
        self.node.of_time = partial(self._of_time, started)
        while self.node.round < config.total_rounds and not self.callbacks.ends:
            self.limits.wait(stop)
            if self._of_time(started) >= 1.0:
                say(f"{config.minutes:g} minutes are over", "stop")
                break
            stop.allow()
            began = time.perf_counter()
            sampled, reward = self._round(began)
            self.weights.average()
            self._after_round(sampled, reward)
            self.threads.look()
            if (rest := config.pace_s - (time.perf_counter() - began)) > 0:
                stop.allow()
                stop.wait(rest)

    def _prepare(self) -> None:
        """Check that a round fits into memory, and measure held-out figures before the first one."""
        config, node, stop = self.config, self.node, self.stop
        stop.allow()
        prompts = _prompts_of_a_round(node)
        self.limits.wait(stop)
        if self.crew is None:
            _fit(node, self.limits, prompts, _asked(self.held_out.tasks, node))
        if node.round == 0:
            self.records.evaluated(0, self.held_out.measure_before())
            self.state.save_figures()
            _say_first_look(self.held_out, node, prompts)
        self.held_out.begin()
        if node.round >= config.total_rounds:
            say(f"all {node.round} rounds are done; {self.goes_on('--rounds N')} trains more", "done")
            self.own.say_unused()
        elif self.crew is None:
            self.own.announce(f"from round {node.round + 1}", config.grpo.schedule)

    def _of_time(self, started: float) -> float:
        if self.crew is not None:
            return float(self.crew.minutes_over)
        minutes = self.config.minutes
        return 0.0 if minutes is None else (time.monotonic() - started - self.limits.paused_s) / (60 * minutes)

    def _round(self, began: float) -> tuple[Sequence[Group], float]:
        """Sample, share, learn and record a round that `began` then: its own groups and their mean reward."""
        node, stop = self.node, self.stop
        try:
            collected = node.collect()
        except StopRequested:
            node.share(node.collected)  # the finished part
            raise
        stop.hold()
        node.share(collected)
        with stop.allowed():  # it may take a pass through the policy
            groups = node.choose(collected)
        self.limits.wait(stop)
        stop.allow()
        learned = node.learn(groups, self.weights.begin, self.weights.go_on)
        stop.hold()
        self.weights.unfinished = False
        record = node.record(collected, learned, time.perf_counter() - began)
        if self.crew is not None:
            record |= self.crew.metrics()
        record |= self.console.usage.metrics()
        record |= self.cost.round(record["reward"], len(groups), time.monotonic())
        self.records.sample(node.round, collected.groups, groups)
        try:
            if self.held_out.due(node.round):
                self.state.settle_best()
                record |= self.held_out.measure_during(node.round)
                stop.check()
        finally:  # a signal ends the evaluation, and not the round
            self._round_ended(record)
        return collected.groups, record["reward"]

    def _after_round(self, sampled: Sequence[Group], reward: float) -> None:
        """Tell the crew and the user how the round went, and save it if that is due."""
        advised = self.stop.advised  # what comes from here on is of the next round
        if self.crew is not None:
            self.crew.round_over(self.node.round, reward, self.node.averager)
        self._without_reward = 0 if reward else self._without_reward + 1
        if self._without_reward == ZERO_REWARD_ROUNDS:
            _say_completions(sampled)
        settings = self.config.checkpoints
        long_ago = time.monotonic() - self._saved_at >= 60 * settings.every_minutes
        due = (long_ago and not self.checkpoints.busy) or advised or self.node.round % settings.every == 0
        if due and self.node.round < self.config.total_rounds:
            self.stop.advised, self._saved_at = self.stop.advised and not advised, time.monotonic()
            self.state.save()

    def _round_ended(self, record: Mapping[str, Any]) -> None:
        """Record a round, and save the weights if they are the best so far."""
        self.records.write(record)
        self.own.trained()
        self.state.count(record)
        averager = self.node.averager
        self.progress.update(self.node.round, record, "" if averager is None else averager.brief())
        self.callbacks.round(self.node.round, record)
        self.callbacks.checkpoints(self.checkpoints.written)
        if self.held_out.is_new_best:
            self.state.save()

    def last_resort(self) -> None:
        """Save at the deadline after a signal, when the main thread is still inside torch or the disk is slow. If the
        weights are not those of a finished round, the last checkpoint stands."""
        if not self.weights.unfinished:
            self.state.save()
            self.checkpoints.wait()

    def _measured(self, round: int, found: Evaluation) -> None:
        """Let members and callbacks know the held-out figures of a round."""
        self._declare()
        self.callbacks.evaluation(round, found.table)

    def _declare(self) -> None:
        """Let members know the latest held-out figures from after training began, if there are any."""
        every = self.held_out.figures.last.table.get("all")
        if self.node.member is not None and every is not None and every.pass_1 is not None:
            self.node.member.held_out = every.pass_1, every.questions
            self.node.member.pass_1_before = self.held_out.pass_1_before

    def report(self) -> RunReport:
        """Report the ended run in words and, with --json, as a document. The caller draws the picture."""
        worth = None if self.node.member is None else self.node.member.latest_worth
        told = RunReport(self.run, self.state.tally, self.began_at, self.node.round, self.held_out, worth)
        evaluates = self.crew is None and bool(self.held_out.tasks.held_out(1))
        told.tell(self.console, self.crew is None or self.crew.leaving.complete, evaluates)
        if self.console.json_output:
            told.dump()
        return told

    def result(self, report: RunReport) -> TrainResult:
        """The ended run, for the program that started it."""
        newest = None if self.crew is not None else self.checkpoints.newest
        rounds, now = self.node.round, self.node.round - self.began_at
        return TrainResult(self.run.path, rounds, self.finished, report.figures, newest, now, self.own.not_used)


def _prompts_of_a_round(node: Node) -> list[list[int]]:
    """The encoded prompts of tasks as a round draws them; of those that are too long for it only if all are.
    TokenizerError if none of many tasks can be encoded."""
    drawing = random.Random(node.config.seed)
    for _ in range(DRAWS):  # a round draws as often before it gives up
        asked = list(map(node.tasks.prompt, node.tasks.sample(drawing, node.config.rollouts.groups)))
        if encoded := [each for each in encode_each(node.policy, asked) if each]:
            break
    else:
        encoded = node.policy.encode_questions(asked)
    longest = node.config.rollouts.max_prompt_tokens
    return [each for each in encoded if len(each) <= longest] or [min(encoded, key=len)[:longest]]


def _load(config: NodeConfig, run: RunDir, tasks: TaskSet, limits: ResourceLimits) -> tuple[Policy, NodeConfig]:
    """The policy, and `config` with its number format and the length of its answers to `tasks`, which are measured
    within the memory of the run; a run keeps those of its first start."""
    config = with_kept_choices(config, run)
    rollouts = config.rollouts

    def fit(policy: Policy) -> None:
        fit_sampling(policy, hardware_of(policy.device, limits.own_memory), rollouts, rollouts.group_size)

    def of_round(policy: Policy) -> NodeConfig:
        nonlocal config
        config = with_answer_length(config, policy, tasks, partial(say, kind="start"))
        return config

    policy = load_policy(config.policy, rollouts, say, check=partial(check_plan, config), fit=fit, of_round=of_round)
    return policy, with_dtype(of_round(policy), policy)


def _asked(tasks: TaskSet, node: Node) -> list[list[int]]:
    """The held-out questions that are not too long, encoded."""
    number, longest = node.config.eval.questions, node.config.rollouts.max_prompt_tokens
    asked = [tasks.prompt(task) for task in tasks.held_out(number)] if number else []
    return [prompt for prompt in encode_each(node.policy, asked) if prompt is not None and len(prompt) <= longest]


def _fit(node: Node, limits: ResourceLimits, prompts: list[list[int]], asked: list[list[int]]) -> None:
    """Make rounds and the evaluations on the `asked` questions fit into memory, and say what they take. UserError if
    they cannot."""
    config, policy = node.config, node.policy
    earlier = [policy.pad_id] * ((node.tasks.turns - 1) * (config.rollouts.max_new_tokens + SAID_TOKENS))
    prompts, asked = ([prompt + earlier for prompt in each] for each in (prompts, asked))  # as the last turn has them
    copies = 0 if node.averager is None else AVERAGING_COPIES
    machine = hardware_of(policy.device, limits.own_memory)
    fitting = Fitting(node.trainer, prompts, config, machine, copies)
    bytes = fitting.fit()
    if asked:
        bytes = max(bytes, fitting.asking(asked, config.eval.samples, part_size(policy)))
    bytes = bytes if machine.gpu else limits.with_network(bytes)
    needed = Estimate(bytes, machine.gpu, bool(asked))
    say(str(needed), "estimate")
    if not machine.gpu:
        limits.check_estimate(needed.bytes)


def _say_first_look(held_out: HeldOutFigures, node: Node, prompts: list[list[int]]) -> None:
    """Say what the policy answers before training, and how long a round takes."""
    before, most = held_out.figures.before, node.config.rollouts.max_new_tokens
    for line in first_look(before, held_out.samples, held_out.figure, most, node.member is not None):
        say(line, "first_look")
    if node.config.pipeline.stages == 0:
        for line in round_times(before, node.policy, prompts, node.config.rollouts, node.config.grpo):
            say(line, "estimate")


def _say_completions(groups: Sequence[Group]) -> None:
    say(Warned(f"no reward in {ZERO_REWARD_ROUNDS} rounds; what the policy answers:"), "zero_reward")
    for group in groups[:3]:
        rollout = group.rollouts[0]
        end = "" if rollout.finished else " [cut off at max_new_tokens]"
        say(
            f"  {group.task.label}: question {group.task.question[-80:]!r}, completion {rollout.text[-200:]!r}{end}, "
            f"extracted {rollout.extracted!r}, expected {group.task.answer!r}",
            "completion",
        )
