"""What the swarm gave a node, in numbers and in words.

A kind of task counts as taught by others if more of the groups with something to learn that this node trained on came
from other peers than from itself, else as taught by itself. Success is the share of right answers among this node's own
ones: its first `WINDOW` groups against its latest `WINDOW`. Figures of other members are their own word.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import msgspec

WINDOW = 128  # own groups behind "at first" and behind "now"
MAX_NAMED_KINDS = 3  # most kinds of task that a line names


class Change(msgspec.Struct, frozen=True):
    """Own success on some kinds of task, at first and now."""

    kinds: list[str]
    first: float
    now: float


class Worth(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the swarm gave this node; parts that are not known are None."""

    by_others: Change | None = None  # kinds taught by others
    by_itself: Change | None = None  # kinds taught by itself
    unsolved: int = 0
    """Questions of which others' right answers were trained on, while the latest own answers to that kind of task were
    all wrong."""
    pass_1: float | None = None  # own held-out pass@1
    theirs: list[float] = []  # those that members declare, ascending
    used_by_others: int = 0
    """Groups of this node that members declare to have trained on, those that have left or restarted included."""
    share_of_used: float | None = None
    """Share of this node's groups in what a member trained on of others', by its own word: mean over members."""
    declaring: int = 0  # members behind the two figures above


def worth_lines(worth: Worth) -> Iterator[str]:
    """The figures as sentences, without those that are not known. Where this node taught itself all kinds, their
    success says nothing of the swarm, and is left out."""
    if worth.by_others is not None:
        yield _change(worth.by_others, "taught mostly by others")
        if worth.by_itself is not None:
            yield _change(worth.by_itself, "taught mostly by its own answers")
    if worth.unsolved:
        yield f"{only_others_solved(worth.unsolved)}: its own latest answers to their kind were all wrong"
    if worth.theirs:
        own = "not measured yet" if worth.pass_1 is None else f"{worth.pass_1:.3f}"
        low, high, n = worth.theirs[0], worth.theirs[-1], len(worth.theirs)
        values = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"
        yield f"held-out pass@1 {own}; {_members(n)} {'says' if n == 1 else 'say'} {values} (self-declared)"
    if worth.used_by_others or worth.share_of_used is not None:
        share = worth.share_of_used
        took = "" if share is None else f", {share:.0%} of what {_members(worth.declaring)} took from others lately"
        yield f"others trained on {worth.used_by_others:,} of its groups so far{took} (self-declared)"


def worth_metrics(worth: Worth) -> dict[str, float]:
    """The figures under `swarm/`, without those that are not known."""
    figures: dict[str, float] = {}
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


def only_others_solved(n: int) -> str:
    """The short form for the live lines."""
    return f"{n:,} question{'' if n == 1 else 's'} only others solved"


def _members(n: int) -> str:
    return "1 member" if n == 1 else f"{n} members"


def _change(change: Change, how: str) -> str:
    named = ", ".join(change.kinds[:MAX_NAMED_KINDS])
    if (more := len(change.kinds) - MAX_NAMED_KINDS) > 0:
        named += f" and {more} more"
    return f"success on kinds {how} ({named}) {change.first:.3f} -> {change.now:.3f}"
