"""What the swarm gave a node, in numbers and in words: first what this run counted itself, then what members say.

A group that a node learned from has different rewards; all others move no weight.
A kind of task counts as taught by others if more of the groups with something to learn that this node trained on came
from other peers than from itself, else as taught by itself. Success is the share of right answers among this node's own
ones: its first `WINDOW` groups against its latest `WINDOW`. Figures of other members are their own word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

import msgspec

WINDOW = 128  # own groups behind "at first" and behind "now"
MAX_NAMED_KINDS = 3  # most kinds of task that a line names
WHOLE = 0.995  # a share from here on is shown as 100 %


class Change(msgspec.Struct, frozen=True):
    """Own success on some kinds of task, at first and now."""

    kinds: list[str]
    first: float
    now: float


class Worth(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the swarm gave this node; parts that are not known are None."""

    own_groups: int = 0  # own groups that this node learned from
    others_groups: int = 0  # groups of others that it learned from
    by_others: Change | None = None  # kinds taught by others
    by_itself: Change | None = None  # kinds taught by itself
    unsolved: int = 0
    """Questions of which others' right answers were trained on, while the latest own answers to that kind of task were
    all wrong."""
    pass_1: float | None = None  # own held-out pass@1, the latest since training began
    pass_1_before: float | None = None  # the same before training; None if nothing was measured since
    theirs: list[float] = []  # those that members declare, ascending
    used_by_others: int = 0
    """Groups of this node that members declare to have trained on, those that have left or restarted included."""
    share_of_used: float | None = None
    """Share of this node's groups in what a member trained on of others', by its own word: mean over members."""
    declaring: int = 0  # members behind the two figures above


def worth_lines(worth: Worth, summary: bool = False) -> Iterator[str]:
    """The figures as sentences, without those that are not known.

    Success by kind is left out if this node taught itself all kinds, and its share of what members used if that is all,
    as between two trainers: neither says anything of the swarm. A `summary` tells own held-out figures elsewhere, so
    it has them here only beside those of members."""
    if worth.others_groups:
        yield _learned(worth.own_groups, worth.others_groups)
    if worth.unsolved:
        yield f"{_only_others_solved(worth.unsolved)}: its own latest answers to their kind were all wrong"
    if worth.by_others is not None:
        yield _change(worth.by_others, "taught mostly by others")
        if worth.by_itself is not None:
            yield _change(worth.by_itself, "taught mostly by its own answers")
    if worth.theirs:
        yield f"held-out {_own_pass_1(worth)}; {theirs_words(worth)}"
    elif worth.pass_1_before is not None and not summary:
        yield f"held-out {_own_pass_1(worth)}"
    yield from _given(worth)


def worth_in_brief(worth: Worth) -> Iterator[str]:
    """What the swarm gave this node and what it gave others, without reasons, kinds of task and held-out figures."""
    if worth.others_groups:
        solved = f"; {_only_others_solved(worth.unsolved)}" if worth.unsolved else ""
        yield f"{_learned(worth.own_groups, worth.others_groups)}{solved}"
    if worth.by_others is not None:
        alone = "" if worth.by_itself is None else f", where it taught itself {_from_to(worth.by_itself)}"
        yield f"success where others taught it {_from_to(worth.by_others)}{alone}"
    yield from _given(worth)


def theirs_words(worth: Worth) -> str:
    """The held-out pass@1 that members declare; empty if none does."""
    if not worth.theirs:
        return ""
    low, high, n = f"{worth.theirs[0]:.3f}", f"{worth.theirs[-1]:.3f}", len(worth.theirs)
    says = "1 member says" if n == 1 else f"{n} members say"
    return f"{says} {low if low == high else f'{low} to {high}'} (self-declared)"


def _given(worth: Worth) -> Iterator[str]:
    if worth.used_by_others:
        share, took = worth.share_of_used, ""
        if share is not None and share < WHOLE:
            took = f", {share:.0%} of what {_members(worth.declaring)} took from others lately"
        yield f"others trained on at least {worth.used_by_others:,} of its groups{took} (self-declared)"


def mixed_words(exchanges: int, began_with: str = "") -> str:
    """How much of a node's weights is not its own work; `began_with`: the member whose weights it took over."""
    began = f"began with those of {began_with}" if began_with else ""
    averaged = f"averaged {'once' if exchanges == 1 else f'{exchanges:,} times'}" if exchanges else ""
    mixed = " and ".join(filter(None, [began, averaged]))
    return f"its weights: {mixed}, so held-out figures are not its own gain alone"


def worth_metrics(worth: Worth) -> dict[str, float]:
    """The figures under `swarm/`, without those that are not known."""
    figures: dict[str, float] = {}
    if worth.others_groups:
        figures |= {
            "swarm/learned_own": float(worth.own_groups),
            "swarm/learned_others": float(worth.others_groups),
        }
    if worth.by_others is not None:
        figures |= {
            "swarm/success_by_others_first": worth.by_others.first,
            "swarm/success_by_others": worth.by_others.now,
        }
    if worth.by_itself is not None:
        figures |= {
            "swarm/success_by_itself_first": worth.by_itself.first,
            "swarm/success_by_itself": worth.by_itself.now,
        }
    if worth.unsolved:
        figures["swarm/unsolved_taught"] = float(worth.unsolved)
    if worth.theirs:
        figures["swarm/declared_pass_1"] = fmean(worth.theirs)
    if worth.used_by_others or worth.share_of_used is not None:
        figures["swarm/declared_used"] = float(worth.used_by_others)
    if worth.share_of_used is not None:
        figures["swarm/declared_share"] = worth.share_of_used
    return figures


def others_words(
    there: float, crew: int | None, used: float, metrics: Mapping[str, float | None], met: bool
) -> list[str]:
    """Texts of the live lines about others, ever shorter. `there`: how many others train; `crew`: how many others this
    node's crew has; `used`: groups of others that a round trains on; `metrics`: those of the last round; `met`: whether
    any other was ever seen. Groups come at once, but cards, which say who is there, are looked up every few seconds."""
    if not there and not used:
        return ["nobody else trains"]
    if not there:
        coming = (
            "nobody else trains now; the last groups of others" if met else "others are being looked up; their groups"
        )
        return [f"{coming}: {used:.1f} a round", f"{used:.1f} groups of others"]
    others = "1 other" if there == 1 else f"{there:.0f} others"
    if crew is not None and crew >= there:
        return [f"{others}, {'all ' if crew > 1 else ''}of the crew", others]
    who = others if crew is None else f"{others}, {crew or 'none'} of the crew"
    if not used and metrics.get("frac_reward_zero_std") == 1.0:  # what all own groups of the round have in common
        alike = "no answer is right yet" if not metrics.get("reward") else "answers are rewarded alike"
        return [f"{who}; {alike}, so there is nothing to share", f"{who}; nothing to share yet", who]
    plain = f"{who}, {used:.1f} of their groups a round"
    counts = [metrics.get(f"swarm/{name}") or 0.0 for name in ("learned_own", "learned_others", "unsolved_taught")]
    own, foreign, unsolved = counts
    given = f"{plain}, {foreign / (own + foreign):.0%} of what it learned from" if foreign else plain
    return [
        *([f"{given}, {_only_others_solved(int(unsolved))}"] if unsolved else []),
        given,
        plain,
        f"{who}, {used:.1f} groups a round",
        f"{others}, {used:.1f} groups",
    ]


def _only_others_solved(n: int) -> str:
    return f"{n:,} question{'' if n == 1 else 's'} only others solved"


def _learned(own: int, others: int) -> str:
    if not own:
        return f"others gave all of the {others:,} groups it learned from"
    return f"others gave {others:,} of the {own + others:,} groups it learned from ({others / (own + others):.0%})"


def _own_pass_1(worth: Worth) -> str:
    if worth.pass_1 is None:
        return "pass@1 not measured since training began"
    before = "" if worth.pass_1_before is None else f"{worth.pass_1_before:.3f} -> "
    return f"pass@1 {before}{worth.pass_1:.3f}"


def _members(n: int) -> str:
    return "1 member" if n == 1 else f"{n} members"


def _change(change: Change, how: str) -> str:
    named = ", ".join(change.kinds[:MAX_NAMED_KINDS])
    if (more := len(change.kinds) - MAX_NAMED_KINDS) > 0:
        named += f" and {more} more"
    return f"success on kinds {how} ({named}) {_from_to(change)}"


def _from_to(change: Change) -> str:
    return f"{change.first:.3f} -> {change.now:.3f}"
