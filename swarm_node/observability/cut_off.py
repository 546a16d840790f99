"""Answers that end at the length limit: with many of them, it is the first thing to know about a reward."""

from __future__ import annotations

from collections.abc import Mapping

CUT = "completions/clipped_ratio"  # metric: share of a round's own answers that ended at the limit
MANY = 0.5


def cut_off(metrics: Mapping[str, float | None]) -> str:
    """Words about the share that was cut off in a round, if they were many; else empty."""
    share = metrics.get(CUT) or 0.0
    return f"{share:.0%} cut off" if share > MANY else ""


def remedy(metrics: Mapping[str, float | None]) -> str:
    """A sentence about a round of which many answers were cut off, with the setting that helps; else empty."""
    words = cut_off(metrics)
    return f"{words} at the length limit in the last round: rollouts.max_new_tokens sets it" if words else ""
