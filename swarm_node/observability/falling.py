"""Sentences about held-out figures that got worse by more than noise, each with a remedy.

    answers become alike    pass@k fell though pass@1 did not: fewer questions have a right answer among several tries
    a task is unlearned     pass@1 of one task fell, or its mean reward in a run that goes by that

Both falls are judged by the paired bootstrap of `noise`. A task has few questions, for which percentile intervals are
too narrow, and there are several tasks; so its interval is widened by the number of tasks (Bonferroni). With 18
questions each for seven tasks, where nothing was learned, 5 % of 400 drawn pairs of evaluations had a task that fell.
Nothing is said where all tasks together have fewer than ENOUGH_QUESTIONS, and before EARLY_ROUNDS.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean

from swarm_node.config.figures import WORDS, Figure
from swarm_node.observability.noise import ENOUGH_QUESTIONS, LEAST_QUESTIONS, interval

EARLY_ROUNDS = 100  # a run of fewer has hardly begun
LEAST_OF_TASK = LEAST_QUESTIONS  # questions of a task, below which nothing is said of it
NOTABLE = 0.05  # a figure of a task that is lower by less needs no word in the table at the end
ALIKE = (
    "held-out pass@{k} fell by more than noise, from {k_before:.3f} to {k_now:.3f}, while pass@1 went from "
    "{before:.3f} to {now:.3f}: the answers to a question become alike; {remedy} (docs/grpo.md)"
)
PASS_K = "--set grpo.advantage=pass_k"
FOR_ONE_RIGHT = "{again} trains for one right answer in several"
SLOWER = "a lower grpo.learning_rate slows that down"  # where the run trains for one right answer in several already
FELL = "held-out {figure} of {task} fell by more than noise, from {before:.3f} to {now:.3f}: {remedy}"
LOWER = "lower grpo.learning_rate"
WEIGH = "give it more weight among the tasks (docs/tasks.md), or "
PAID = (
    "the mean reward rose meanwhile, so the reward functions pay for something else; look at `swarm-node samples`, or "
    "lower their weight"
)


def remarks(
    labels: Sequence[str],
    before: Sequence[float],
    now: Sequence[float],
    samples: int,
    for_one_right: bool = False,
    figure: Figure = "pass_1",
    paid: bool = False,
    again: str = f"`swarm-node resume RUN {PASS_K}`",
) -> dict[str, str]:
    """Key -> sentence for each thing that got worse; empty if the two evaluations are of different questions,
    or of fewer than ENOUGH_QUESTIONS. `again`: who goes on with the run under `PASS_K`.

    For each question `labels` has its task, and `before` and `now` the share of its `samples` answers that is right, or
    their mean reward if that is the `figure`.
    `for_one_right`: the run trains with grpo.advantage=pass_k, so that is no remedy. `paid`: there are
    reward functions of the user's, and the mean reward rose.
    """
    if not ENOUGH_QUESTIONS <= len(labels) == len(before) == len(now):
        return {}
    found: dict[str, str] = {}
    if samples > 1 and figure == "pass_1":
        any_before, any_now = ([float(share > 0) for share in shares] for shares in (before, now))
        fall = interval(any_before, any_now)
        if fall is not None and fall[1] < 0 and fmean(now) >= fmean(before):
            means = {"before": fmean(before), "now": fmean(now), "k_before": fmean(any_before), "k_now": fmean(any_now)}
            remedy = SLOWER if for_one_right else FOR_ONE_RIGHT.format(again=again)
            found["pass_k"] = ALIKE.format(k=samples, remedy=remedy, **means)
    tasks = dict.fromkeys(labels)
    for task in tasks:
        mine = [i for i, label in enumerate(labels) if label == task]
        old, new = [before[i] for i in mine], [now[i] for i in mine]
        change = interval(old, new, LEAST_OF_TASK, 1 - 0.05 / len(tasks))
        if change is not None and change[1] < 0:
            means = {"before": fmean(old), "now": fmean(new)}
            remedy = PAID if paid else f"{WEIGH if len(tasks) > 1 else ''}{LOWER}"
            found[f"task {task}"] = FELL.format(figure=WORDS[figure], task=task, remedy=remedy, **means)
    return found


def lower_tasks(
    labels: Sequence[str],
    before: Sequence[float],
    now: Sequence[float],
    samples: int,
    figure: Figure = "pass_1",
    told: Collection[str] = (),
) -> list[str]:
    """One line for each task of which a figure is notably lower than before by more than noise, unless the remark of
    a key in `told` tells it, and one for all others. Rewards have any scale, so that a mean reward is notably lower if
    that is more than noise. None of a single task, of which the summary tells the same. Other parameters are those of
    `remarks`."""
    if not len(labels) == len(before) == len(now):
        return []
    figures = {WORDS[figure]: (list(before), list(now))}
    if samples > 1 and figure == "pass_1":
        figures[f"pass@{samples}"] = ([float(x > 0) for x in before], [float(x > 0) for x in now])
    tasks = dict.fromkeys(labels)
    if len(tasks) == 1:
        return []
    level = 1 - 0.05 / (len(tasks) * len(figures))
    lines, unsure = [], []
    for task in tasks:
        mine = [i for i, label in enumerate(labels) if label == task]
        fell: dict[bool, list[str]] = {True: [], False: []}  # whether by more than noise -> figures
        for name, (was, then) in figures.items():
            old, new = [was[i] for i in mine], [then[i] for i in mine]
            change = interval(old, new, LEAST_OF_TASK, level)
            sure = change is not None and change[1] < 0
            if sure if figure == "reward" else fmean(old) - fmean(new) >= NOTABLE:
                fell[sure].append(f"{name} {fmean(old):.3f} -> {fmean(new):.3f}")
        if f"task {task}" in told:
            continue
        of = f"{task} ({len(mine)} question{'s' * (len(mine) != 1)}) "
        if fell[True]:
            lines.append(f"lower by more than noise: {of}{', '.join(fell[True])}")
        if fell[False]:
            unsure.append(of + ", ".join(fell[False]))
    return [*lines, *([f"lower, which may be noise: {'; '.join(unsure)}"] if unsure else [])]


def withdrawn(key: str, samples: int, figure: Figure = "pass_1") -> str:
    """The sentence that takes back the remark of this key."""
    about = (
        f"pass@{samples} fell while pass@1 did not"
        if key == "pass_k"
        else f"{WORDS[figure]} of {key.removeprefix('task ')} fell"
    )
    return f"the latest held-out figures no longer show that {about}"
