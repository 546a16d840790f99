"""Held-out figures of a run: what its evaluations found, and what its newest checkpoint has of them.

Loads no torch, since the dashboard imports it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import compress
from statistics import fmean
from typing import Any

import msgspec

from swarm_node.observability.noise import interval, verdict
from swarm_node.storage.names import MAX_STATE_BYTES, NAME, order
from swarm_node.storage.plain_files import read_plain
from swarm_node.storage.rundir import RunDir

SHOWN = 24  # first questions of which an evaluation keeps the first answer; tasks take turns, so these are of many


class Held(msgspec.Struct):
    """Held-out figures of one task, or of all."""

    questions: int
    pass_1: float | None  # None = no checker judges answers to these questions
    pass_k: float | None
    reward: float | None = None  # None = measured by an earlier version

    def by(self, figure: str) -> float | None:
        """That figure, pass_1 or reward; None if it was not measured."""
        return self.pass_1 if figure == "pass_1" else self.reward


class Shown(msgspec.Struct, frozen=True):
    """One held-out question with one answer. Long texts lose their middle."""

    task: str
    question: str
    right: str  # reference answer; empty if there is none
    answer: str
    correct: bool | None  # None = no checker judged it
    reward: float = 0.0
    cut: bool = False  # whether the answer ended at the length limit


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out figures at one time."""

    table: dict[str, Held] = {}  # figures by task label, and under `all` for all of them
    by_question: list[float] = []  # share of right answers to each question, in the order asked
    labels: list[str] = []  # the task label of each question
    shown: list[Shown] = []  # the first questions asked, each with its first answer
    rewards: list[float] = []  # mean reward of the answers to each question; empty if measured by an earlier version
    judged: list[bool] = []  # whether a checker judges answers to each; empty if measured by an earlier version
    asked: int = 0  # questions drawn, those that were too long included; 0 = measured by an earlier version
    cut: float = 0.0  # share of the answers that ended at the length limit
    mixed: int = 0  # questions with answers of different rewards: in training, only such groups teach
    tokens: float = 0.0  # mean length of an answer
    per_token_s: float = 0.0  # seconds of sampling for each token

    def by(self, figure: str) -> list[float]:
        """That figure, pass_1 or reward, of each question; pass_1 is 0 where no checker judges."""
        return self.by_question if figure == "pass_1" else self.rewards


def held_by_task(
    names: Sequence[str],
    labels: Sequence[str],
    right: Sequence[float],
    rewards: Sequence[float],
    judged: Sequence[bool],
) -> dict[str, Held]:
    """Figures of questions by task label, in the order of `names`, then of `all`. Each question has a label, the share
    of its right answers, their mean reward, and whether a checker judges them."""
    table = {}
    for name in [*names, "all"]:
        mine = [i for i, label in enumerate(labels) if name in (label, "all")]
        if not mine:
            continue
        shares = [right[i] for i in mine if judged[i]]
        table[name] = Held(
            len(mine),
            pass_1=fmean(shares) if shares else None,
            pass_k=fmean(share > 0 for share in shares) if shares else None,
            reward=fmean(rewards[i] for i in mine),
        )
    return table


def in_one(first: Evaluation, then: Evaluation) -> Evaluation:
    """The figures of two parts of one evaluation, of which either may have asked nothing."""
    if not (first.asked and then.asked):
        return first if first.asked else then
    both = "labels", "by_question", "rewards", "judged"
    labels, right, rewards, judged = (getattr(first, name) + getattr(then, name) for name in both)
    a, b = len(first.labels) / len(labels), len(then.labels) / len(labels)
    return Evaluation(
        held_by_task([*dict.fromkeys(labels)], labels, right, rewards, judged),
        right,
        labels,
        (first.shown + then.shown)[:SHOWN],
        rewards,
        judged,
        asked=first.asked + then.asked,
        cut=a * first.cut + b * then.cut,
        mixed=first.mixed + then.mixed,
        tokens=a * first.tokens + b * then.tokens,
        per_token_s=then.per_token_s,
    )


class Answered(msgspec.Struct, frozen=True):
    """One held-out question with the first answer before and after training; long texts lose their middle."""

    task: str
    question: str
    right: str  # empty if there is no reference answer
    before: str
    before_correct: bool | None  # None = no checker judges answers to it
    after: str
    after_correct: bool | None
    mean_before: float  # share of right ones among all answers to it, or their mean reward
    mean_after: float
    before_reward: float = 0.0
    after_reward: float = 0.0


class HeldOutRecord(msgspec.Struct):
    """Held-out figures of a run so far, for its checkpoints."""

    before: Evaluation = msgspec.field(default_factory=Evaluation)  # from before training
    last: Evaluation = msgspec.field(default_factory=Evaluation)  # the latest from after it began
    round: int = 0  # the round after which `last` was measured
    seconds: float = 0.0  # seconds that the latest evaluation took
    asked: int = 0  # questions of each evaluation, if that before training had no time for more; 0 = `eval.questions`
    worse: dict[str, str] = {}  # `remarks` of `falling` about `last`
    trained_s: float = 0.0  # seconds of training in all starts, to the end of the latest round
    spent_s: float = 0.0  # seconds of all evaluations while the run trained

    def by_round(self, with_reward: bool) -> dict[int, dict[str, float]]:
        """Round (0 = before training) -> the number of questions and the figures over all tasks, as far as measured."""
        names = ["questions", "pass_1", "pass_k", *(["reward"] if with_reward else [])]
        found = {}
        for round, evaluation in ((0, self.before), (self.round, self.last)):
            if (every := evaluation.table.get("all")) is not None:
                values = {name: getattr(every, name) for name in names}
                found[round] = {name: value for name, value in values.items() if value is not None}
        return found


def record_of(state: Mapping[str, Any]) -> HeldOutRecord:
    """The figures in the state of a checkpoint. Raises KeyError, TypeError, AttributeError and
    msgspec.ValidationError if it has none."""
    if "held_out_figures" in state:
        return msgspec.convert(state["held_out_figures"], HeldOutRecord)
    table = {label: Held(*values) for label, values in state["before"].items()}  # by an earlier version
    return HeldOutRecord(Evaluation(table, state.get("before_by_question", [])))


NOT_MEASURED = (KeyError, TypeError, AttributeError, msgspec.ValidationError)  # of record_of


def newest_checkpoint(run: RunDir) -> tuple[int, dict[str, Any]]:
    """(round, state) of the newest checkpoint, whose digests are not checked; 0 and empty if it cannot be read."""
    try:
        named = sorted((path for path in run.checkpoints.iterdir() if NAME.fullmatch(path.name)), key=order)
        state = json.loads(read_plain(named[-1] / "state.json", MAX_STATE_BYTES))["state"]
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):  # it may be removed meanwhile
        return 0, {}
    return order(named[-1])[0], state if isinstance(state, dict) else {}


def question_pairs(before: Evaluation, after: Evaluation, figure: str) -> tuple[list[str], list[float], list[float]]:
    """The questions over which `table` has the mean of that figure: the task label of each, and the figure in both
    evaluations of the same questions. For pass_1 these are the ones that a checker judges, as `after` tells."""
    labels, old, new = after.labels, before.by(figure), after.by(figure)
    if figure == "pass_1" and (judged := after.judged):
        return list(compress(labels, judged)), list(compress(old, judged)), list(compress(new, judged))
    return labels, old, new


def before_and_after(before: Evaluation, after: Evaluation, figure: str) -> tuple[list[Answered], int]:
    """Up to three questions of which both evaluations kept an answer, those that improved the most, in the middle and
    the least by `figure`, and the number of all such questions."""
    each = zip(before.by(figure), after.by(figure), strict=False)
    kept = [
        Answered(
            then.task,
            then.question,
            then.right,
            before=then.answer,
            before_correct=then.correct,
            after=now.answer,
            after_correct=now.correct,
            mean_before=mean_before,
            mean_after=mean_after,
            before_reward=then.reward,
            after_reward=now.reward,
        )
        for then, now, (mean_before, mean_after) in zip(before.shown, after.shown, each, strict=False)
        if then.question == now.question
    ]
    kept.sort(key=lambda one: one.mean_before - one.mean_after)
    places = sorted({0, len(kept) // 2, len(kept) - 1}) if kept else []
    return [kept[i] for i in places], len(kept)


def shown_held_out(state: Mapping[str, Any], with_reward: bool) -> dict[str, Any] | None:
    """The figures in the state of a checkpoint as the page shows them; None if it has none."""
    try:
        record, conditions = record_of(state), state["held_out"]
        figure, samples = _figure(conditions), conditions["samples"]
    except NOT_MEASURED:
        return None
    before, after = record.before.table, record.last.table
    answers, answers_of = before_and_after(record.before, record.last, figure)
    return {
        "figure": figure,
        "samples": samples,
        "own_tasks": "whole" in conditions,  # questions of eval.tasks, of which training may have drawn some
        "points": [{"round": round, **found} for round, found in record.by_round(with_reward).items()],
        "tasks": [
            {"task": label, "questions": now.questions, "before": before[label].by(figure), "after": now.by(figure)}
            for label, now in after.items()
            if label != "all" and label in before
        ],
        "worse": list(record.worse.values()),
        "answers": msgspec.to_builtins(answers),
        "answers_of": answers_of,
    }


def _figure(conditions: Mapping[str, Any]) -> str:
    """The figure that counts under these conditions of an evaluation, pass_1 or reward."""
    return "reward" if "rewards" in conditions else "pass_1"


def shown_change(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whether the figure in the state of a checkpoint changed by more than noise, by a bootstrap that takes a while.
    None if the questions before were others, or an earlier version kept no figure of each."""
    try:
        record, figure = record_of(state), _figure(state["held_out"])
    except NOT_MEASURED:
        return None
    _, old, new = question_pairs(record.before, record.last, figure)
    if not new or len(old) != len(new):
        return None
    noise = interval(old, new)
    return {"interval": noise and list(noise), "verdict": verdict(noise, len(new))}


def shown_until(found: dict[str, Any], last: int) -> dict[str, Any]:
    """What `shown_held_out` found, without figures from after the round `last`: those are of an earlier run."""
    points = [point for point in found["points"] if point["round"] <= last]
    if len(points) < len(found["points"]):
        found = found | {"tasks": [], "change": None, "worse": [], "answers": [], "answers_of": 0}
    return found | {"points": points}
