"""The summary of a run, as numbers and in words; for a resumed run, over all its starts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path

import msgspec

from swarm_node.config.figures import WORDS, Figure
from swarm_node.observability.cut_off import CUT, remedy
from swarm_node.observability.evaluations import Answered
from swarm_node.observability.noise import ENOUGH_QUESTIONS, verdict
from swarm_node.observability.progress import clock_face, volume
from swarm_node.observability.reasons import UNUSED, words
from swarm_node.observability.samples import without_middle
from swarm_node.observability.tally import ENOUGH_ROUNDS, Tally
from swarm_node.observability.worth import Worth, mixed_words, worth_lines
from swarm_node.say import own_command
from swarm_node.storage.going_on import GoingOn
from swarm_protocol.errors import printable

INDENT = 10  # columns before the text of a line
QUESTION_CHARS, ANSWER_CHARS = 200, 120  # most characters of a question and of an answer in the summary
MOST, LEAST = "most improved, ", "least improved, "
PLACES = {1: [""], 2: [MOST, LEAST], 3: [MOST, "in the middle, ", LEAST]}
"""Number of answers shown -> the words before each."""
MAX_REASONS = 4  # reasons that are listed; the others become one number
REFUSED = {"swarm/rejected/": "", "averaging/refused/": "weights/", "stages/refused/": "crew/"}
KINDS = {"weights": "weights", "crew": "the crew"}
COST = {
    "spent": "spent by the end of the last round",
    "per_admitted_group": "a group trained on",
    "per_reward_point": "a point of reward",
}


class HeldOut(msgspec.Struct, frozen=True):
    """Held-out figures of all tasks, before and after training, or before and at the last evaluation."""

    questions: int
    samples: int  # answers per question
    pass_1: tuple[float, float] | None  # None = no checker judges the answers
    pass_k: tuple[float, float] | None
    interval: tuple[float, float] | None = None  # 95 % interval of the change of `main`; None = too few questions
    interval_k: tuple[float, float] | None = None  # that of the change of `pass_k`
    interval_reward: tuple[float, float] | None = None  # that of the change of `reward`
    round: int = 0  # the round after which the second figures were measured; 0 = the last one
    remarks: list[str] = []  # sentences about what got worse
    best: tuple[int, float] | None = None  # the round of the best checkpoint, and the figure that chose it
    answers: list[Answered] = []  # the most, the middle and the least improved of the questions that were kept
    answers_of: int = 0  # questions that were kept
    reward: tuple[float, float] | None = None  # mean reward; None = it says no more than pass@1
    figure: Figure = "pass_1"  # the one that says how good the policy is

    @property
    def main(self) -> tuple[float, float]:
        """That figure, before and after."""
        found = self.pass_1 if self.figure == "pass_1" else self.reward
        assert found is not None, "the figure that a run goes by is measured"
        return found


class SwarmFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Groups sent to and received from other peers, and the traffic in bytes."""

    received: int = 0
    admitted: int = 0
    used: int = 0  # groups of other peers trained on, counted each time
    foreign_share: float = 0.0  # share of foreign groups among all groups trained on
    sent: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Averaging(msgspec.Struct, frozen=True):
    """Exchanges of weights; in each, a node gives and takes."""

    exchanges: int
    bytes: int  # bytes sent


class Stages(msgspec.Struct, frozen=True):
    """Losses and recoveries in the crew that this node led."""

    lost: int
    built: dict[str, int]  # way -> how often a stage was built so, at first as well as after a loss


class Figures(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run in numbers; parts that did not occur are None."""

    rounds_recorded: int = 0
    reward_rounds: int = 0  # the rounds since tasks or rewards last changed, which the rewards are of; 0 = all
    resumed_at: int = 0  # the round after which the last start resumed
    reward_first_tenth: float | None = None
    reward_last_tenth: float | None = None
    cut: float | None = None  # share of the last round's own answers that ended at the length limit
    seconds: float = 0.0  # seconds spent in rounds, without held-out evaluation and pauses
    num_tokens: int = 0  # tokens trained on; 0 = no update was made
    alike: bool = False  # whether the rewards of each own group were all equal, and no update was made
    held_out: HeldOut | None = None
    swarm: SwarmFigures | None = None
    worth: Worth | None = None  # what the swarm gave
    averaging: Averaging | None = None
    stages: Stages | None = None
    unused: dict[str, int] = {}
    """Reason -> groups of others that came too late, twice or in too large numbers: that says nothing against them."""
    refused: dict[str, int] = {}  # reason -> groups, calls and messages that broke a rule
    cost: dict[str, float] = {}


def figures(tally: Tally, resumed_at: int = 0, held_out: HeldOut | None = None, worth: Worth | None = None) -> Figures:
    """The figures of the rounds in `tally`."""
    whole = {name: round(total) for name, total in tally.totals.items() if total > 0}
    own, used = tally.own, tally.used
    first, last = tally.rewards.tenths() or (None, None)
    swarm = SwarmFigures(
        received=whole.get("swarm/groups_received", 0),
        admitted=whole.get("swarm/groups_admitted", 0),
        used=round(used),
        foreign_share=used / (own + used) if used else 0.0,
        sent=whole.get("swarm/groups_sent", 0),
        bytes_in=whole.get("swarm/bytes_in", 0),
        bytes_out=whole.get("swarm/bytes_out", 0),
    )
    exchanges = whole.get("averaging/exchanges", 0)
    stages = Stages(whole.get("stages/lost", 0), _below("stages/recovered/", whole))
    left_out = {f"{kind}{reason}": n for prefix, kind in REFUSED.items() for reason, n in _below(prefix, whole).items()}
    return Figures(
        rounds_recorded=tally.rounds,
        reward_rounds=tally.rounds - tally.earlier if tally.earlier else 0,
        resumed_at=resumed_at,
        reward_first_tenth=first,
        reward_last_tenth=last,
        cut=tally.cut or None,
        seconds=tally.seconds,
        num_tokens=round(tally.num_tokens),
        alike=tally.rounds > 0 and not tally.num_tokens and not tally.differing,
        held_out=held_out,
        swarm=swarm if swarm != SwarmFigures() else None,
        worth=worth,
        averaging=Averaging(exchanges, whole.get("averaging/bytes", 0)) if exchanges else None,
        stages=stages if stages.lost else None,
        unused={reason: n for reason, n in left_out.items() if reason in UNUSED},
        refused={reason: n for reason, n in left_out.items() if reason not in UNUSED},
        cost={name: tally.cost[f"cost/{name}"] for name in COST if f"cost/{name}" in tally.cost},
    )


def summary(run: Figures, of_weights: Callable[[str], str] = str) -> list[str]:
    """The lines of the summary, each with a word before it that names its subject. `of_weights`: words for a reason why
    an exchange of weights was refused."""
    received, gave, traffic, crew = [], [], [], []
    if (swarm := run.swarm) is not None:
        if swarm.received:
            groups = _counted(swarm.received, "group")
            received.append(f"{groups} from others, {swarm.admitted:,} admitted, {swarm.used:,} used")
        if swarm.sent:
            gave.append(f"{_counted(swarm.sent, 'group')} published")
        traffic.append(f"{volume(swarm.bytes_in)} received, {volume(swarm.bytes_out)} sent")
    if run.averaging is not None:
        exchanges = _counted(run.averaging.exchanges, "exchange")
        received.append(f"weights of others in {exchanges}")
        gave.append(f"its weights in {exchanges}, {volume(run.averaging.bytes)}")
    if run.stages is not None:
        ways = ", ".join(f"{n:,} by {way}" for way, n in run.stages.built.items())
        crew.append(f"{_counted(run.stages.lost, 'stage')} lost" + (f"; rebuilt so far: {ways}" if ways else ""))
    return _labelled(
        {
            "outcome": [*_reward(run), *filter(None, [remedy({CUT: run.cut})]), *_held_out(run.held_out)],
            "worse": [] if run.held_out is None else run.held_out.remarks,
            "best": _best(run.held_out),
            "worth": _worth(run),
            "received": received,
            "crew": crew,
            "gave": gave,
            "not used": _by_reason(run.unused),
            "refused": _by_reason(run.refused, of_weights),
            "traffic": traffic,
            "rounds": _rounds(run),
            "cost": [", ".join(f"{value:.4g} {COST[name]}" for name, value in run.cost.items())] if run.cost else [],
        }
    )


def answered(held: HeldOut | None) -> list[str]:
    """Lines with a few held-out questions and their answers before and after. Texts of models, on one line each."""
    if held is None or not held.answers:
        return []
    first = "the answer" if held.samples == 1 else f"the first of {held.samples} answers"
    lines = [f"{first} to three of {_counted(held.answers_of, 'held-out question')}"]
    later = f"after round {held.round:,}" if held.round else "after"
    for place, one in zip(PLACES[len(held.answers)], held.answers, strict=True):
        right = f" (right: {_cut(one.right, ANSWER_CHARS)})" if one.right else ""
        if place == MOST and one.mean_after <= one.mean_before:
            place = "not improved, "
        lines.append(f"{place}{one.task}: {_cut(one.question, QUESTION_CHARS)}{right}")
        before = "before", one.before, one.before_correct, one.before_reward, one.mean_before
        after = later, one.after, one.after_correct, one.after_reward, one.mean_after
        for when, text, correct, reward, mean in (before, after):
            verdict = f"{'right' if correct else 'wrong'} ({round(mean * held.samples)} of {held.samples} right)"
            if held.figure == "reward":
                verdict = f"reward {reward:.3f} (mean of {_counted(held.samples, 'answer')} {mean:.3f})"
            lines.append(f"  {when:{max(6, len(later))}} {_cut(text, ANSWER_CHARS) or '(empty)'} -> {verdict}")
    return _labelled({"answers": lines})


def _cut(text: str, most: int) -> str:
    return printable(without_middle(" ".join(text.split()), most))


def whereabouts(run_dir: str, files: Sequence[str]) -> list[str]:
    """The line that says where the files are."""
    return _labelled({"files": [f"{run_dir}: {', '.join(files)}"]})


def next_steps(
    run_dir: str,
    goes_on: GoingOn,
    whole: bool = True,
    evaluates: bool = True,
    best: bool = False,
    samples: bool = False,
) -> list[str]:
    """Commands for the next step, as they can be typed here. `whole`: all weights are in the directory; `evaluates`:
    they fit this machine, and there are held-out questions; `best`: the best checkpoint is better than the last one;
    `samples`: answers of the run were kept."""
    run = shlex.quote(run_dir)
    which = " --checkpoint best" if best else ""
    commands = [goes_on.command] if goes_on.command else []
    commands += [f"eval {run}{which}"] if evaluates else []
    commands += [f"export {run} {shlex.quote(_new_model(run_dir))}{which}"] if whole else []
    commands += [f"samples {run}"] if samples else []
    commands += [f"dashboard {run}"]
    to_go_on = [f"to go on, {goes_on.instead}"] if goes_on.instead else []
    return _labelled({"next": [*(f"{own_command()} {each}" for each in commands), *to_go_on]})


def _new_model(run_dir: str) -> str:
    """A directory beside the run that is not there yet, for the exported model."""
    first = f"{run_dir.rstrip('/')}-model"
    names = chain([first], (f"{first}-{number}" for number in count(2)))
    return next(name for name in names if not Path(name).exists())


def _labelled(parts: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        f"{'' if number else label:{INDENT}}{line}"
        for label, lines in parts.items()
        for number, line in enumerate(lines)
    ]


def _reward(run: Figures) -> list[str]:
    n, first, last = run.reward_rounds or run.rounds_recorded, run.reward_first_tenth, run.reward_last_tenth
    if first is None or last is None:
        return []
    if n == 1:
        only = "the one round since tasks or rewards changed" if run.reward_rounds else "its only round"
        return [f"reward {last:.3f} in {only}"]
    which = f"the {n:,} rounds since tasks or rewards changed" if run.reward_rounds else f"{n:,} rounds"
    if n < ENOUGH_ROUNDS:
        return [f"reward {first:.3f} in the first, {last:.3f} in the last of {which}: too few rounds for a trend"]
    return [f"reward {first:.3f} -> {last:.3f}, first and last tenth of {which}"]


def _held_out(held: HeldOut | None) -> list[str]:
    if held is None:
        return []
    before, after = held.main
    at = f" after round {held.round:,}, not measured since" if held.round else ""
    change = f"held-out {WORDS[held.figure]} {before:.3f} -> {after:.3f}{at}, {after - before:+.3f}"
    lines = [f"{change}: {verdict(held.interval, held.questions)}"]
    if held.interval is not None:
        low, high = held.interval
        narrow = ", which make it somewhat too narrow" if held.questions < ENOUGH_QUESTIONS else ""
        lines[0] += f" (95 % interval {low:+.3f} to {high:+.3f}, {held.questions} questions{narrow})"
    others = {
        "pass@1": (held.pass_1 if held.figure == "reward" else None, None),
        f"pass@{held.samples}": (held.pass_k if held.samples > 1 else None, held.interval_k),
        "mean reward": (held.reward if held.figure == "pass_1" else None, held.interval_reward),
    }
    for name, (pair, range_) in others.items():
        remarked = any(remark.startswith(f"held-out {name} fell") for remark in held.remarks)
        if pair and not remarked:
            told = f": {verdict(range_, held.questions)} ({range_[0]:+.3f} to {range_[1]:+.3f})" if range_ else ""
            lines.append(f"held-out {name} {pair[0]:.3f} -> {pair[1]:.3f}{told}")
    return lines


def _worth(run: Figures) -> list[str]:
    gave = [] if run.worth is None else list(worth_lines(run.worth, summary=True))
    mixed = [] if run.averaging is None or run.held_out is None else [mixed_words(run.averaging.exchanges)]
    return [*gave, *mixed]


def _best(held: HeldOut | None) -> list[str]:
    if held is None or held.best is None:
        return []
    round, value = held.best
    name, at_first = f"held-out {WORDS[held.figure]}", held.main[0]
    if value <= at_first:
        return [f"none: no checkpoint has a better {name} than the start, {at_first:.3f}"]
    return [f"{name} {value:.3f} after round {round:,}: `export` and `eval` take it as --checkpoint best"]


def _counted(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _by_reason(numbers: Mapping[str, int], of_weights: Callable[[str], str] = str) -> list[str]:
    counts = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    listed = [f"{n:,} {_why(name, of_weights)}" for name, n in counts[:MAX_REASONS]]
    if rest := sum(n for _, n in counts[MAX_REASONS:]):
        listed.append(f"{rest:,} for other reasons")
    return [", ".join(listed)] if listed else []


def _why(name: str, of_weights: Callable[[str], str]) -> str:
    """`weights/late` -> of weights (it came too late)"""
    kind, _, reason = name.rpartition("/")
    said = of_weights if kind == "weights" else words
    return f"of {KINDS[kind]} ({said(reason)})" if kind else words(reason)


def _rounds(run: Figures) -> list[str]:
    n = run.rounds_recorded
    lines = []
    if n and run.seconds and math.isfinite(run.seconds):
        each = f", {run.seconds / n:.2f} s each" if n > 1 else ""
        lines.append(f"{n:,} in {clock_face(run.seconds)}{each}; {_trained(run)}")
    if run.resumed_at:
        lines.append(f"in several starts; this one went on from round {run.resumed_at:,}")
    return lines


def _trained(run: Figures) -> str:
    if run.num_tokens:
        return f"{run.num_tokens:,} tokens trained on, prompts included"
    return "no update was made" + (": no group had different rewards" if run.alike else "")


def _below(prefix: str, totals: Mapping[str, int]) -> dict[str, int]:
    return {name.removeprefix(prefix): n for name, n in totals.items() if name.startswith(prefix)}
