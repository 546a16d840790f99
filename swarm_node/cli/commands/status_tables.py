"""The tables of `swarm-node status -v` and `swarm-node status SWARM`: a line for each member."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from swarm_node.observability.reasons import words
from swarm_node.observability.refusals import SHORT_ID

KINDS_LISTED = 8  # most kinds of task that a line names
Cells = Callable[[Mapping[str, Any]], list[str]]
Peers = Mapping[str, Mapping[str, Any]]
"""Peer id -> its figures in the JSON document"""


def exchange_table(peers: Peers, ended: bool) -> Iterator[str]:
    """What a run exchanged with each peer. `ended`: this is of a start that has ended."""
    here = "was here" if ended else "here"
    yield from _table(peers, [here, "updates", "received", "admitted", "used", "not used or refused"], _exchanged)


def card_table(peers: Peers, kinds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the cards of members say, after their success by kind of task."""
    averaged = any(peer["cohort"] for peer in peers.values())
    says = any(peer.get("declared") for peer in peers.values())
    yield from _success(kinds, says)
    optional = [*(["success", "held-out"] if says else []), *(["cohort"] if averaged else [])]
    titles = ["roles", "model", "updates", "tokens/s", *optional, "address"]
    yield from _table(peers, titles, lambda figures: _member(figures, averaged, says))


def reasons_in(figures: Mapping[str, float], prefix: str, words: Callable[[str], str] = words) -> str:
    """`3 × too old, 1 × over the sender's quota`, the most frequent first."""
    counts = {name.removeprefix(prefix): n for name, n in figures.items() if name.startswith(prefix) and n}
    frequent = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{n:,.0f} × {words(reason)}" for reason, n in frequent)


def _success(kinds: Sequence[Mapping[str, Any]], says: bool) -> Iterator[str]:
    """Success by kind of task over all members that declare it; `says`: any member declares something."""
    if not kinds:
        yield from ["held-out   what members say of themselves, unchecked"] if says else []
        return
    listed = ", ".join(f"{row['kind']} {row['success']:.2f}" for row in kinds[:KINDS_LISTED])
    more = f" and {len(kinds) - KINDS_LISTED} more" if len(kinds) > KINDS_LISTED else ""
    yield f"success    {listed}{more}: what members say of themselves, unchecked, as below"
    if unsolved := [row["kind"] for row in kinds if not row["success"]]:
        yield f"{'':10} nobody solves {', '.join(unsolved[:KINDS_LISTED])}"


def _table(peers: Peers, titles: Sequence[str], cells: Cells) -> Iterator[str]:
    rows = [["peer", "name", *titles]]
    for peer, figures in sorted(peers.items(), key=lambda item: (-item[1].get("received", 0), item[0])):
        rows.append(["…" + peer[-SHORT_ID:], figures.get("name") or "-", *cells(figures)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _exchanged(figures: Mapping[str, Any]) -> list[str]:
    refused = reasons_in({f"/{name}": n for name, n in figures.get("rejected", {}).items()}, "/")
    return [
        "gone" if not figures.get("present") else "silent" if figures["absent"] else "yes",
        *(_cell(figures.get(name)) for name in ("policy_version", "received", "admitted", "used")),
        f"{'muted; ' if figures.get('muted') else ''}{refused}",
    ]


def _member(figures: Mapping[str, Any], averaged: bool, says: bool) -> list[str]:
    declared = figures.get("declared") or {}
    shares = [right / answers for answers, right in declared.get("kinds", {}).values()]
    success = _share(sum(shares) / len(shares) if shares else None)
    return [
        ", ".join(figures["roles"]),
        figures["family"] or "-",
        _cell(figures["policy_version"] or (0 if figures["speed"] else None)),  # a card has 0 until a round has ended
        _cell(figures["speed"] or None),
        *([success, _share(declared.get("pass_1"))] if says else []),
        *([figures["cohort"] or "-"] if averaged else []),
        (figures["addresses"] or ["-"])[0],
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
