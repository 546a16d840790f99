"""A run: a node with a directory, a screen and signals.

    open the directory -> (swarm), tasks, policy -> resume -> held-out table -> rounds -> snapshot -> table and plot

A round is the node's own affair (`node`); here are its metrics line, its snapshot every few, and the ways it may end.
"""

from __future__ import annotations

import json
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from msgspec import to_builtins

from protocol.lineage import read_lineage, shared
from swarm_node.config import NodeConfig, dump_toml, load_config
from swarm_node.enter import EnteredSwarm, enter_swarm
from swarm_node.errors import SnapshotError, UserError
from swarm_node.evaluate import Held, evaluate, rows
from swarm_node.guest import Guest, refuse_in_a_crew
from swarm_node.joining import Swarm, join_link
from swarm_node.node import Node, fitted
from swarm_node.observability.health import Health, serving
from swarm_node.observability.jsonl import JsonLines
from swarm_node.observability.metrics import EventLog, MetricsWriter, read_metrics
from swarm_node.observability.plots import plot_reward
from swarm_node.observability.progress import Progress
from swarm_node.observability.sinks import open_sinks
from swarm_node.policy.estimate import estimate
from swarm_node.policy.loading import load_policy
from swarm_node.preemption import cloud_of, reach, stopper
from swarm_node.recovery.mirror import Mirror
from swarm_node.recovery.snapshots import SnapshotStore
from swarm_node.rundir import RunDir, goes_with_container
from swarm_node.stopping import Stopper, StopRequested
from swarm_node.tasks import load_tasks
from swarm_node.types import Group

if TYPE_CHECKING:  # alone, a run loads nothing of the network
    from swarm_node.averaging import Averager
    from swarm_node.crew import CrewNode
    from swarm_node.member import Member

ZERO_REWARD_ROUNDS = 10
"""Rounds without any reward after which some completions are shown: the prompt or the extraction may be wrong."""
WAIT_S = 0.5
"""Longest between two looks whether others' weights have arrived, where training waits for them."""
STALE_S = 600.0
"""A node whose snapshot is older than this looks for a peer of its cohort that is ahead."""
GIVEN_ANEW = {"swarm", "name", "run_dir", "rounds", "minutes", "log", "network", "guest"}
"""Settings that may well be others at each start."""
MAX_CHANGES = 8
"""Of the rest, in a sentence."""
STATUS_SECONDS = 2.0
"""Between two writings of a run's status in its swarm."""
PART_S = 4.0
"""Left of the time to leave in, after a last exchange of weights: to save what it made of them, and say goodbye."""
GOODBYE_S = 2.5
"""Left of it after the last snapshot was copied elsewhere."""
COPY_S = 600.0
"""Longest that a run which is over waits for that."""


def run_local(config: NodeConfig, json_output: bool = False) -> int:
    """Train alone until `rounds` or `minutes` are over or a signal comes; resumes what is in the run directory. With
    `stages.count`, in as many processes.

    Returns the exit code. Raises UserError for what only the user can mend.
    """
    if config.stages.count:
        from swarm_node.local_crew import run_local_crew

        refuse_in_a_crew(config, RunDir(config.directory))
        return run_local_crew(config, json_output)
    return _run(config.model_copy(update={"swarm": None}), json_output)


Beside = Callable[[Callable[[], str], Callable[[str], None]], AbstractContextManager[None]]
"""(the join link, empty while there is none; what says a sentence) -> what runs beside a node in a crew."""


def run_join(config: NodeConfig, swarm: Swarm, json_output: bool = False, beside: Beside | None = None) -> int:
    """As `run_local`, as a member of `swarm`; waits for nobody but, once, for its manifest. With `stages.count`, as one
    of a crew."""
    return _run_crew(config, json_output, swarm, beside) if config.stages.count else _run(config, json_output, swarm)


def _run(config: NodeConfig, json_output: bool, swarm: Swarm | None = None) -> int:
    with ExitStack() as stack:
        run = stack.enter_context(RunDir.open(config.directory))
        Run(config, run, json_output, stack, swarm).train()
    return 0


def _run_crew(config: NodeConfig, json_output: bool, swarm: Swarm, beside: Beside | None) -> int:
    """Hold stages, and lead the crew while that falls to this node, until the run is over or a signal comes."""
    from swarm_node.crew import CrewNode, Deposed

    with ExitStack() as stack:
        refuse_in_a_crew(config, RunDir(config.directory))
        run = stack.enter_context(RunDir.open(config.directory))
        screen = Screen(config, run, json_output, stack)
        try:
            run.path.chmod(0o700)
        except OSError as error:
            screen.say(f"whoever can read {run.path} finds the crew's name there: {error.strerror}")
        entered = enter_swarm(swarm, config, run, screen.say, stack)
        mirror = mirror_of(config, run, entered, screen.say)
        if mirror is not None:
            mirror.restore(crew=True)
            mirror.start()
        crew = CrewNode(config, entered, run, screen.say, stack)
        say_what_changed(run, crew.own, screen.say)
        run.write_config(dump_toml(crew.own))
        screen.progress.waiting = crew.waiting
        screen.health.waiting = lambda: crew.waiting() or ("" if crew.mates.whole else "for the others of the crew")
        say_reach(config, None, screen.say)
        if beside is not None:
            crew.invitation.open = False
            stack.enter_context(beside(lambda: crew.invitation.link, screen.say))
        lead: Run | None = None

        def last_resort() -> None:
            try:
                if lead is not None:
                    lead.last_resort()
            finally:
                crew.seats.save_all()

        with stopper(config.spot, last_resort, screen.say) as stop:
            try:
                while True:
                    try:
                        if not screen.following(partial(crew.follow, stop)):
                            break
                        crew.take_lead(stop)
                        with ExitStack() as leading:
                            lead = Run(crew.config, run, json_output, leading, screen=screen, crew=crew)
                            lead.train(stop)
                        if not lead.finished:
                            crew.hand_over(stop)
                        crew.gather(stop)
                        if lead.finished:
                            crew.over()
                        break
                    except Deposed:
                        stop.hold()
                        lead = None
                        crew.leave_lead()
            except StopRequested:
                screen.health.leaving = True
                screen.say("stopping; the same command takes a stage again", "stop")
            finally:  # whatever went wrong, what is held here is not lost
                crew.leave(stop)
        if mirror is not None:
            mirror.finish(min(COPY_S, stop.left_s - GOODBYE_S))
    return 0


class Screen:
    """What people see of a run, and events.jsonl."""

    def __init__(self, config: NodeConfig, run: RunDir, json_output: bool, stack: ExitStack) -> None:
        self.progress = Progress(config.total_rounds, config.minutes, json_output)
        self.events = EventLog(run.events, self.progress.say)
        stack.callback(self.events.close)
        self.health = Health()
        if config.health.port:
            stack.enter_context(serving(self.health, config.health.listen, config.health.port))
        self._saying = threading.Lock()
        if goes_with_container(run.path):
            self.say(f"no volume: {run.path} goes when this container goes; mount one there (docker run -v NAME:DIR)")

    def following(self, follow: Callable[[Callable[[int, float], None]], bool]) -> bool:
        """`follow`, showing the rounds of the lead that it tells of."""
        began = False

        def show(round: int, reward: float) -> None:
            nonlocal began
            if not began:
                began = True
                self.progress.start(round)
            self.progress.update(round, {"reward": reward})
            self.health.write(round, {"reward": reward})

        try:
            return follow(show)
        finally:
            if began:
                self.progress.stop()

    def say(self, text: str, kind: str = "note") -> None:
        """One sentence to the screen and to events.jsonl."""
        with self._saying:  # the network's thread has things to say as well
            self.progress.say(text)
            self.events.write(kind, text)


class Run:
    """A node and its run directory."""

    def __init__(
        self,
        config: NodeConfig,
        run: RunDir,
        json_output: bool,
        stack: ExitStack,
        found: Swarm | None = None,
        screen: Screen | None = None,
        crew: CrewNode | None = None,
    ) -> None:
        """Load everything, in the order in which mistakes are cheapest to find; `found` is the swarm to be in, `crew`
        the one that this node leads."""
        self.run = run
        self.crew = crew
        self.json_output = json_output
        self.screen = screen or Screen(config, run, json_output, stack)
        self.progress, self.say = self.screen.progress, self.screen.say
        swarm = crew.entered if crew is not None else None
        if found is not None:
            swarm = enter_swarm(found, config, run, self.say, stack)
        if swarm is not None and config.seed is None:
            config = config.model_copy(update={"seed": swarm.seed})
        self.tasks = swarm.tasks if swarm is not None else load_tasks(config.tasks, config.rewards)
        self.policy = load_policy(config.policy, config.rollouts, self.say) if crew is None else crew.policy
        self.config = fitted(config, self.policy, self.say)
        self.guest = Guest(config.guest, run, self.say, member=swarm is not None)
        member = None if swarm is None else self._become_member(swarm, stack)
        if member is None and self.config.averaging.method != "none":
            self.say("averaging.method needs peers: training alone, nothing is averaged")
        optimizer, averaged = (None, None) if crew is None else (crew.optimizer, crew.seats.optimizer(0))
        self.node = Node(self.config, self.policy, self.tasks, self.say, member, optimizer=optimizer, averaged=averaged)
        self.snapshots = SnapshotStore(run.snapshots, config.snapshots.keep, self.say)
        stack.callback(self.snapshots.close)
        if crew is None:
            torch.set_num_threads(min(torch.get_num_threads(), self.guest.threads))
            self.progress.waiting = self.screen.health.waiting = self.guest.waiting
        self._mirror = mirror_of(config, run, swarm, self.say) if crew is None else None
        self._soon = False
        """The machine may well go away: a snapshot is due at the end of this round."""
        self.finished = False
        """All rounds are over."""
        self._changing = False
        self._saved: int | None = None
        self.before: dict[str, Held] = {}
        self.after: dict[str, Held] = {}
        if self._mirror is not None:
            self._mirror.restore(self._foreign)
            self._mirror.start()
        resumed = self._resume()
        if crew is None:
            if resumed:
                say_what_changed(run, config, self.say)
            run.write_config(dump_toml(config))
        if not resumed:
            self._set_aside(run.metrics)
        shown = config.model_dump(mode="json", exclude={"stages": {"crew"}})  # the crew's name is its password
        sinks = [*open_sinks(config.log, run.path, shown, self.node.round + 1), self.screen.health]
        self.metrics = MetricsWriter(run.metrics, self.say, sinks)
        stack.callback(self.metrics.close)
        self.metrics.truncate_after(self.node.round)
        if resumed:
            self.say(f"resumed {run.path} at round {self.node.round}", "resume")

    def _become_member(self, swarm: EnteredSwarm, stack: ExitStack) -> Member:
        from swarm_node.member import Member

        record = None
        if self.config.sharing.record:
            offers = JsonLines(self.run.path / "offers.jsonl", self.say)
            stack.callback(offers.close)
            record = offers.append
        member = Member(
            self.config,
            swarm.manifest,
            swarm.identity,
            swarm.transport,
            self.policy,
            self.tasks,
            self.say,
            record=record,
            subscribe=None if self.crew is None else self.crew.ear.subscribe,
        )
        if self.crew is None:
            stack.callback(member.close)
        else:  # the network is the crew's
            stack.callback(member.publisher.flush)
            member.crew = self.crew.on_card
        ended = threading.Event()
        watch = threading.Thread(target=self._watch_swarm, args=(member, ended), name="status", daemon=True)
        watch.start()
        stack.callback(watch.join)
        stack.callback(ended.set)
        return member

    # ----------------------------------------------------------------- the loop

    def train(self, stop: Stopper | None = None) -> None:
        """Rounds until the end or a signal; then a last snapshot, the held-out table, the plot and the summary. Signals
        are those of `stop`, if it is given."""
        self.say(f"tasks {', '.join(self.tasks.labels)}; run directory {self.run.path}", "start")
        self.progress.start(self.node.round)
        try:
            with (
                nullcontext(stop) if stop is not None else self._stopper() as stop,
                self.guest.watching(stop) if self.crew is None else nullcontext(),
            ):
                try:
                    self._rounds(stop)
                    self.finished = self.node.round >= self.config.total_rounds
                    stop.allow()
                    self.after = self._held_out("after") if self.node.round > 0 else {}
                except StopRequested:
                    self.screen.health.leaving = True
                    self.say(f"stopping after round {self.node.round}; the same command resumes here", "stop")
                finally:
                    stop.hold()
                    if not self._changing:  # whatever went wrong, finished rounds are not lost
                        self.save()
                    if stop.requested:
                        self._part(stop)
        finally:
            self.progress.stop()
        self.snapshots.wait()
        if self._mirror is not None:
            self._mirror.finish(min(COPY_S, stop.left_s - GOODBYE_S))
        if self.guest.over:
            raise UserError(self.guest.over)
        self._report()

    def _stopper(self) -> AbstractContextManager[Stopper]:
        if self.node.member is not None or self._mirror is not None:
            trained = sum(t.numel() * t.element_size() for t in self.policy.trainable_state().values())
            say_reach(self.config, 3 * trained, self.say)  # with the optimiser's two moments
        return stopper(self.config.spot, self.last_resort, self.say, self._save_soon)

    def _save_soon(self) -> None:
        self._soon = True

    def _part(self, stop: Stopper) -> None:
        """While there is time: let the exchange of weights that is due, or under way, come about, so that the cohort
        has what was learned here since the last one; and save what it made of the weights."""
        averager = self.node.averager
        if averager is None or self._changing or self.crew is not None:
            return
        if last_exchange(averager, self.node.average, lambda: stop.left_s):
            self.say("averaged a last time", "stop")
            self._saved = None
            self.save()

    def _rounds(self, stop: Stopper) -> None:
        config, node, without_reward = self.config, self.node, 0
        stop.allow()
        drawn = self.tasks.sample(random.Random(config.seed), config.rollouts.groups)
        prompts = [self.policy.encode(task.question) for task in drawn]
        self.guest.wait(stop)
        if self.crew is None:
            needed = estimate(self.policy, prompts, config.rollouts, config.grpo)
            self.say(str(needed), "estimate")
            self.guest.check_estimate(needed.bytes)
        if node.round == 0:
            self.before = self._held_out("before")
        if node.round >= config.total_rounds:
            self.say(f"all {node.round} rounds are done: give more --rounds to go on, or another --run-dir", "done")
        started = time.monotonic() - self.guest.paused_s
        while node.round < config.total_rounds:
            self.guest.wait(stop)
            over = config.minutes and time.monotonic() - started - self.guest.paused_s > 60 * config.minutes
            if over if self.crew is None else self.crew.minutes_over:
                self.say(f"{config.minutes:g} minutes are over", "stop")
                break
            stop.allow()
            began = time.perf_counter()
            collected = node.collect()
            stop.hold()
            node.share(collected)
            groups = node.choose(collected)
            self.guest.wait(stop)
            stop.allow()
            learned = node.learn(groups, before_update=lambda: self._change(stop))
            stop.hold()
            self._changing = False
            record = node.record(collected, learned, time.perf_counter() - began)
            if self.crew is not None:
                record |= self.crew.metrics()
            self.metrics.write(record)
            self.progress.update(node.round, record, "" if node.averager is None else node.averager.brief())
            self._average(stop)
            if self.crew is not None:
                self.crew.round_over(node.round, record["reward"], node.averager)
            without_reward = 0 if record["reward"] else without_reward + 1
            if without_reward == ZERO_REWARD_ROUNDS:
                self._show_completions(collected.groups)
            if (node.round % config.snapshots.every == 0 or self._soon) and node.round < config.total_rounds:
                self._soon = False
                self.save()
            if (rest := config.pace_s - (time.perf_counter() - began)) > 0:
                stop.allow()
                stop.wait(rest)

    def _average(self, stop: Stopper) -> None:
        """Exchange weights with the cohort; a signal may come while it waits for others, not while weights change."""
        averager = self.node.averager
        if averager is None:
            return
        while True:
            stop.hold()
            averager.woken.clear()
            self._changing = True
            try:
                again = self.node.average()
            except UserError:  # of the user's own reducer, before anything has changed
                self._changing = False
                raise
            self._changing = False
            if not again:
                return
            stop.allow()
            averager.woken.wait(WAIT_S)

    def _change(self, stop: Stopper) -> None:
        """From here to the end of the round the weights are not those of a finished round; but a crew's are not in
        these snapshots."""
        stop.hold()
        self._changing = self.crew is None

    # ----------------------------------------------------------------- state

    def save(self) -> None:
        """Snapshot of the state after `round` rounds, unless there is one; written in the background."""
        if self._saved == self.node.round:
            return
        optimizer, numbers = self.node.trainer.state_dict()
        tensors = {"policy": self.policy.trainable_state(), "optimizer": optimizer}
        if self.crew is not None:  # whoever holds a stage keeps its weights
            tensors = {}
        averaging: dict[str, Any] = {}
        if self.node.averager is not None:
            tensors["averaging"], averaging = self.node.averager.state_dict()
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
                "before": {label: [h.questions, h.pass_1, h.pass_k] for label, h in self.before.items()},
                "held_out": self._evaluation(),
            },
        )
        self._saved = self.node.round

    def _resume(self) -> bool:
        snapshot = self.snapshots.load_latest(self._foreign)
        upto = math.inf
        if snapshot is not None and self.crew is not None:
            upto = shared(read_lineage(snapshot.state.get("run")), self.crew.seats.run)
            if upto < 0:
                snapshot = None
                self._set_aside(self.run.metrics)
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
            self.node.round = self._saved = snapshot.round
        else:
            self.node.trainer.num_tokens = state["trainer"]["num_tokens"]
        if self.node.averager is not None:
            try:
                if state["policy_version"] > upto:
                    raise SnapshotError("the snapshot is of another branch of the crew's run")
                self.node.averager.load_state_dict(snapshot.tensors.get("averaging", {}), state["averaging"])
            except (SnapshotError, KeyError) as error:
                self.say(f"averaging begins anew: {error}")
                self.node.averager.restart()
            if time.time() - state.get("time", 0.0) < STALE_S and self.node.member and self.node.member.handover:
                self.node.member.handover.seek(0.0)
        if state["held_out"] == self._evaluation():
            self.before = {label: Held(*values) for label, values in state["before"].items()}
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

    def last_resort(self) -> None:
        """The deadline after a signal is over and the main thread is still inside torch: weights as they are, if they
        are those of a finished round, else the last snapshot stands."""
        if not self._changing:
            self.save()
            self.snapshots.wait()

    # ----------------------------------------------------------------- what people see

    def _watch_swarm(self, member: Member, ended: threading.Event) -> None:
        """On a thread of its own, since a round may take long: what `swarm-node status` shows, and the join link
        whenever it changes."""
        told = ""
        others = [*self.config.network.bootstrap, *member.manifest.bootstrap]
        while not ended.wait(STATUS_SECONDS):
            status = member.status()
            mine = join_link(status["swarm"], status["addresses"], others)
            link = mine if self.crew is None else self.crew.invitation.link
            crew = None if self.crew is None else self.crew.status()
            self.run.write_status(status | {"link": link, "crew": crew, "paused": self.guest.reason})
            if self.crew is not None:
                self.crew.invite()
            elif status["addresses"] and link != told:
                told = link
                self.say("others join with:")
                self.say(link, "link")

    def _held_out(self, when: str) -> dict[str, Held]:
        settings = self.config.eval
        if settings.questions == 0:
            return {}
        self.progress.say(f"held-out questions, {when} training")
        return evaluate(self.policy, self.tasks, self.config.rollouts, settings.questions, settings.samples)

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
            "rounds": self.node.round,
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


def last_exchange(averager: Averager, average: Callable[[], object], left_s: Callable[[], float]) -> bool:
    """Have `average` go on until the exchange that is due, or under way, is over, while there is time: whether it came
    about."""
    exchanges = averager.counts["exchanges"]
    average()
    while averager.under_way() and averager.counts["exchanges"] == exchanges and left_s() > PART_S:
        averager.woken.wait(WAIT_S)
        averager.woken.clear()
        average()
    return averager.counts["exchanges"] != exchanges


def mirror_of(config: NodeConfig, run: RunDir, swarm: EnteredSwarm | None, say: Callable[[str], None]) -> Mirror | None:
    """Where snapshots are copied to, if anywhere. UserError if that cannot be."""
    if not config.snapshots.to:
        return None
    place, peer = ("local", "") if swarm is None else (swarm.manifest.swarm_id, swarm.identity.peer_id)
    return Mirror(config.snapshots.to, place, config.name or run.path.resolve().name, peer, run.path, say)


def say_reach(config: NodeConfig, state_bytes: int | None, say: Callable[[str], None]) -> None:
    """How much can leave this machine within the notice of its cloud, if it is known to have one."""
    cloud = cloud_of(config.spot)
    if cloud is not None:
        say(reach(cloud, config.spot.uplink_mbit, state_bytes))


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
