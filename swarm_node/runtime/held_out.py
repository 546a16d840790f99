"""Held-out figures of a run: before it trains, while it trains and at its end.

An evaluation asks the same questions with the same seeds each time. It draws from no generator of the training, and
each round seeds its own, so a run that evaluates trains as one that does not. A signal ends an evaluation at once; a
quick one is made once more after it, if it came while the run trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from swarm_node.config import NodeConfig, RewardsConfig
from swarm_node.config.figures import Figure, figure_of, reports_reward
from swarm_node.errors import StopRequested
from swarm_node.observability.evaluations import (
    Evaluation,
    HeldOutRecord,
    before_and_after,
    in_one,
    question_pairs,
    record_of,
)
from swarm_node.observability.falling import EARLY_ROUNDS, PASS_K, remarks, withdrawn
from swarm_node.observability.noise import interval
from swarm_node.observability.progress import clock_face
from swarm_node.observability.summary import HeldOut
from swarm_node.policy.policy import Policy
from swarm_node.rollouts.evaluate import NONE_HELD_OUT, Asked, evaluate, evaluation
from swarm_node.runtime.console import say
from swarm_node.say import Warned
from swarm_node.storage.best import Best
from swarm_node.storage.going_on import who_goes_on
from swarm_node.storage.rundir import RunDir
from swarm_node.tasks.taskset import TaskSet, load_tasks

Allowed = Callable[[], AbstractContextManager[None]]
QUICK_S = 2.0  # a measurement that takes less is made once more after a stop
FIRST = 5.0  # times as long as an evaluation takes: so much training before the first one is enough


class HeldOutFigures:
    """Measures the held-out figures of one run, and knows which of its checkpoints is the best."""

    def __init__(
        self,
        config: NodeConfig,
        policy: Policy,
        tasks: TaskSet,
        show: Callable[[str], None],
        measured: Callable[[int, Evaluation], None],
        whole: bool,
        allowed: Allowed = nullcontext,
        asked: TaskSet | None = None,
    ) -> None:
        """`config` is fitted to the policy. `tasks` are trained on. `show` takes sentences that need not stay in view;
        `measured` takes the round and the figures of each evaluation. `whole`: checkpoints of the run have all weights,
        so that the best one can be kept. In the context of `allowed`, a signal may raise StopRequested: questions are
        asked in it. `asked`: the tasks of `eval.tasks`; None = what is held out of `tasks`."""
        self._config = config
        self._policy = policy
        self.tasks = tasks if asked is None else asked
        self.also_trained = 0 if asked is None else also_trained(tasks, asked)  # questions
        self._show = show
        self._measured = measured
        self._allowed = allowed
        self.figure = figure_of(config.rewards)
        self.figures = HeldOutRecord()
        self.keeps_best = whole and config.eval.every > 0 and config.eval.questions > 0
        self.best: Best | None = None  # without the name of its checkpoint
        self.is_new_best = False  # whether the latest evaluation was the best one, and its checkpoint is due
        self._broken_off = False  # whether a stop ended an evaluation
        self.doing = ""  # what is being measured now; empty = nothing
        self._since = time.monotonic()  # from when on training is not in `figures.trained_s`
        self._told_of_share = False  # whether it was said that evaluations are left out
        self._noticed: set[str] = set()  # keys of the remarks that the latest evaluation gave reason for
        self._said: set[str] = set()  # keys of the remarks that were made and hold

    @property
    def samples(self) -> int:
        """Answers to each question."""
        return self._config.eval.samples

    @property
    def has_own_tasks(self) -> bool:
        """Whether `eval.tasks` are asked, of which training may have seen some."""
        return bool(self._config.eval.tasks)

    @property
    def rewards(self) -> RewardsConfig:
        return self._config.rewards

    @property
    def _trains_for_one_right(self) -> bool:
        return self._config.grpo.advantage == "pass_k"

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions that make two held-out figures comparable."""
        config = self._config
        found: dict[str, Any] = {
            "tasks": self.tasks.names,
            "prompt": config.policy.prompt,
            "answer": config.rewards.answer,
            "questions": config.eval.questions,
            "samples": config.eval.samples,
            "rollouts": [config.rollouts.max_new_tokens, config.rollouts.temperature, config.rollouts.top_p],
        }
        if kinds := self.tasks.kinds:
            found["kinds"] = kinds
        if config.eval.tasks:
            found["whole"] = True
        if self.figure == "reward":
            found["rewards"] = [[function.path, function.weight] for function in config.rewards.functions]
        return found

    @property
    def pass_1_before(self) -> float | None:
        """pass@1 before training; None unless the same questions were asked since."""
        before, last = self.figures.before, self.figures.last
        return before.table["all"].pass_1 if before.table and before.labels == last.labels else None

    def measure_before(self) -> dict[str, float]:
        """Measure before the first round; the metrics, which are empty if no question is held out. Goes on with what
        an earlier start asked that did not get to a round."""
        settings = self._config.eval
        if settings.questions == 0 or self.figures.asked:
            return {}
        if self.tasks.held_out(1):
            most = f"{settings.before_s:g} s, more only for the first few"
            self._show(f"held-out questions, before training (eval.before_s: {most})")
        else:
            say(NONE_HELD_OUT, "held_out")
        found = self._measure("before training", 0, most_s=settings.before_s)
        self.figures.asked = found.asked
        return self._metrics(found)

    def begin(self) -> None:
        """Tell that training begins: its time is what evaluations get a share of."""
        self._since = time.monotonic()

    def due(self, round: int) -> bool:
        """Count the training before the end of this round, and tell whether to evaluate after it: it is one of the
        `eval.every`, and the share of time allows it."""
        settings, figures, now = self._config.eval, self.figures, time.monotonic()
        if not settings.questions or not settings.every:
            return False
        figures.trained_s += now - self._since
        self._since = now
        if round % settings.every:
            return False
        ratio = 1 / settings.share - 1  # of training to evaluations
        ratio = ratio if figures.round else min(ratio, FIRST)
        allowed = figures.trained_s >= ratio * (figures.spent_s + figures.seconds)
        if not allowed and "every" in settings.model_fields_set and not self._told_of_share:
            self._told_of_share = True
            share = f"{100 * settings.share:g} % of the time; `--set eval.share=1` makes them all"
            say(f"evaluations are left out that would take more than {share}", "held_out")
        return allowed

    def measure_during(self, round: int) -> dict[str, float]:
        """Measure after a round; the metrics, which are empty if no question is held out. Says if something fell."""
        began = time.monotonic()
        try:
            now = self._measure(f"after round {round}", round)
        finally:  # one that a signal ends has taken time as well
            self.figures.spent_s += time.monotonic() - began
        if not now.table:
            return {}
        self._remark()
        return self._metrics(now)

    def _metrics(self, now: Evaluation) -> dict[str, float]:
        if not now.table:
            return {}
        every = now.table["all"]
        found = {"eval/pass_1": every.pass_1, "eval/pass_k": every.pass_k}
        if reports_reward(self._config.rewards):
            found["eval/reward"] = every.reward
        return {name: value for name, value in found.items() if value is not None}

    def measure_after(self, round: int, again: bool) -> dict[str, float]:
        """Measure after the last round; the metrics, empty if nothing was measured. `again`: also if there are figures
        of that round."""
        if self.figures.round == round and self.figures.last.table and not again:
            return {}
        if self._config.eval.questions and self.tasks.held_out(1):
            self._show("held-out questions, after training")
        return self._metrics(self._measure("after training", round))

    def measure_stopped(self, round: int, left_s: float) -> dict[str, float]:
        """Measure after a stop that leaves `left_s` seconds, if the last measurement took a moment and the stop ended
        none; the metrics, empty if nothing was measured. Only a second signal, which ends the process, ends it."""
        took, measured = self.figures.seconds, self.figures.round == round and self.figures.last.table
        if round == 0 or measured or self._broken_off or not 0.0 < took < min(QUICK_S, left_s / 2):
            return {}
        return self._metrics(self._measure("after the stop", round, nullcontext))

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the figures in the state of a checkpoint; see `record_of` for the errors if it has none."""
        self.figures = record_of(state)

    def compared(self, round: int) -> HeldOut | None:
        """The figures before and now, for the summary of a run that ended after `round`."""
        figures = self.figures
        both, with_reward = (figures.before, figures.last), reports_reward(self._config.rewards)
        compared_now = compared(*both, self.samples, list(figures.worse.values()), self.figure, with_reward)
        if compared_now is None:
            return None
        at = 0 if figures.round == round else figures.round
        best = None if self.best is None else (self.best.round, self.best.value)
        return msgspec.structs.replace(compared_now, round=at, best=best)

    def _measure(self, when: str, round: int, allowed: Allowed | None = None, most_s: float = math.inf) -> Evaluation:
        """Ask the questions and keep the figures. A signal ends the questions alone, so that complete figures stay, and
        before training those of the questions that were asked, with which the next start goes on. `allowed` replaces
        that of the run; `most_s`: see `ask_in_parts`, for all starts together."""
        settings = self._config.eval
        if settings.questions == 0 or not self.tasks.held_out(1):
            return Evaluation()
        questions, kept = self.figures.asked or settings.questions, Evaluation() if round else self.figures.before
        spent_s = self.figures.seconds if kept.asked else 0.0
        began = time.monotonic() - spent_s
        self.doing = doing = f"held-out questions, {when}"
        asked = Asked(kept.asked, progress=lambda: self._tell(doing, asked, questions, began, most_s))
        parts = self._policy, self.tasks, self._config.rollouts, questions, settings.samples
        try:
            with (allowed or self._allowed)():
                found = in_one(kept, evaluate(*parts, asked, most_s - spent_s))
        except StopRequested:
            self._broken_off = True
            if round == 0:
                self._keep(in_one(kept, evaluation(asked, self.tasks)), 0)
                self.figures.seconds = time.monotonic() - began
            raise
        finally:
            self.doing = ""
        self._since = time.monotonic()
        self.figures.seconds = self._since - began
        if found.table:
            self._keep(found, round)
            self._measured(round, found)
        return found

    def _tell(self, doing: str, asked: Asked, questions: int, began: float, most_s: float) -> None:
        """Say in `doing` how many questions of an evaluation were asked, and how long the others take at most."""
        took = time.monotonic() - began
        done = asked.before + asked.questions
        left_s = max(0.0, min(took * questions / done, most_s) - took)
        self.doing = f"{doing}: {done} of at most {questions}, {clock_face(left_s)} left"

    def _keep(self, now: Evaluation, round: int) -> None:
        if round == 0:
            self.figures.before = now
            return
        self.figures.last, self.figures.round, self.figures.worse = now, round, self._worse(now, round)
        every = now.table["all"]
        value = every.by(self.figure)
        if self.keeps_best and value is not None and (self.best is None or value > self.best.value):
            measured = every.pass_1, every.pass_k
            self.best = Best(round, *measured, self.conditions, reward=every.reward, figure=self.figure)
            self.is_new_best = True

    def _worse(self, now: Evaluation, round: int) -> dict[str, str]:
        """`remarks` about an evaluation; none early in a run, or if it has other questions than the one before
        training."""
        before = self.figures.before
        if round < EARLY_ROUNDS or before.labels != now.labels:
            return {}
        measured = 0 < len(before.rewards) == len(now.rewards)
        rose = self.figure == "pass_1" and measured and sum(now.rewards) > sum(before.rewards)
        return remarks(
            *question_pairs(before, now, self.figure),
            self.samples,
            self._trains_for_one_right,
            self.figure,
            paid=bool(self.rewards.functions) and rose,
            again=who_goes_on(RunDir(self._config.directory), [f.path for f in self.rewards.functions], PASS_K),
        )

    def _remark(self) -> None:
        """Say what has got worse, once for each matter, when two evaluations in a row give reason for it; take it back
        when that is over."""
        found = self.figures.worse
        for key in sorted(self._said - found.keys()):
            self._said.remove(key)
            say(withdrawn(key, self.samples, self.figure), "held_out")
        for key in found.keys() & self._noticed - self._said:
            self._said.add(key)
            say(found[key], "held_out")
        self._noticed = set(found)


def tasks_of_run(config: NodeConfig, of_swarm: TaskSet | None, private: bool) -> tuple[TaskSet, TaskSet | None]:
    """The tasks to train on, which are those `of_swarm` in a swarm; and those of `eval.tasks`, if there are any. Alone
    and in a `private` swarm nobody else holds out questions. Raises UserError."""
    asked = load_tasks(config.eval.tasks, config.rewards, whole=True) if config.eval.tasks else None
    if of_swarm is None:
        return load_tasks(config.tasks, config.rewards, asked), asked
    return of_swarm if asked is None or not private else of_swarm.trained_whole_but_for(asked), asked


def also_trained(tasks: TaskSet, asked: TaskSet) -> int:
    """The number of the questions `asked` that training on `tasks` may draw. It is said if there are any."""
    if known := asked.overlap(tasks):
        of = f"{known} question{'' if known == 1 else 's'} of eval.tasks"
        say(Warned(f"{of} can be drawn in training too, so held-out figures may show what was remembered"), "held_out")
    return known


def compared(
    before: Evaluation,
    after: Evaluation,
    samples: int,
    remarks: Sequence[str] = (),
    figure: Figure = "pass_1",
    with_reward: bool = False,
) -> HeldOut | None:
    """Held-out figures over all tasks, if `figure` exists for before and after training. `remarks`: sentences about
    what got worse; `with_reward`: the mean reward is told as well."""
    if "all" not in before.table or "all" not in after.table:
        return None
    old, new = before.table["all"], after.table["all"]
    if old.by(figure) is None or new.by(figure) is None:
        return None
    answers, answers_of = before_and_after(before, after, figure)
    _, each_old, each_new = question_pairs(before, after, figure)
    return HeldOut(
        questions=len(each_new),
        samples=samples,
        pass_1=_pair(old.pass_1, new.pass_1),
        pass_k=_pair(old.pass_k, new.pass_k),
        interval=interval(each_old, each_new),
        interval_k=None if None in (old.pass_k, new.pass_k) else _interval_k(before, after),
        interval_reward=interval(before.rewards, after.rewards) if with_reward else None,
        remarks=list(remarks),
        answers=answers,
        answers_of=answers_of,
        reward=_pair(old.reward, new.reward) if with_reward else None,
        figure=figure,
    )


def _pair(before: float | None, after: float | None) -> tuple[float, float] | None:
    return None if before is None or after is None else (before, after)


def _interval_k(before: Evaluation, after: Evaluation) -> tuple[float, float] | None:
    """`interval` of the change of pass@k, whose value is 1 for a question with any right answer, else 0."""
    _, old, new = question_pairs(before, after, "pass_1")
    return interval([float(share > 0) for share in old], [float(share > 0) for share in new])
