"""The settings in which `benchmarks.sharing` compares arms: tasks, policies, rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import steps
from benchmarks.format_reward import MARK
from benchmarks.warm_starts import now_and_then, shipped, taught
from swarm_node.config import TaskConfig

SIX = [f"small/{name}" for name in "basic_arithmetic fraction_simplification gcd lcm count_bits products".split()]
SEVEN = [*SIX, "small/chain_sum"]


@dataclass(frozen=True)
class Setting:
    """Tasks, policies and rewards of a comparison."""

    says: str
    tasks: Callable[[int], Sequence[str | TaskConfig]]
    """Tasks of peer i."""
    start: Callable[[int, int], Path]
    """(seed, peer) -> model directory."""
    rewards: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 3e-4
    held_out: Sequence[str | TaskConfig] = tuple(SIX)
    max_new_tokens: int = 8
    rounds: int = 72  # of 32 groups
    period_s: float = 5.0  # of outer rounds, where weights are averaged: two to four rounds
    kinds: int = 1
    """Peers i and i + kinds are alike."""


def _format(share: float, sizes: Sequence[dict[str, int]] = ({},)) -> Setting:
    name = f"format{100 * share:g}"
    return Setting(
        says=f"`#` before {100 * share:g} % of the taught answers; only `#` and the right answer is rewarded",
        tasks=lambda peer: SIX,
        start=lambda seed, peer: taught(seed, name, SIX, now_and_then(share, MARK), **sizes[peer % len(sizes)]),
        rewards=_only("marked"),
    )


def _only(function: str) -> dict[str, Any]:
    """`rewards` with nothing but that function."""
    return {"checker_weight": 0.0, "functions": [{"path": f"benchmarks.format_reward:{function}"}]}


def _specialist(seed: int, peer: int) -> Path:
    """A weak starter, taught more of two of the six tasks."""
    kind = peer % 3
    return taught(seed, f"special{kind}", SIX[2 * kind : 2 * kind + 2], now_and_then(0.0, ""), steps=150)


def _steps(share: float) -> Setting:
    return Setting(
        says=f"32 to 64 tokens an answer, steps written out; {100 * share:g} % of the taught ones in the right form",
        tasks=lambda peer: steps.TASKS,
        start=lambda seed, peer: steps.start(seed, share),
        held_out=steps.TASKS,
        period_s=40.0,
        rounds=36,
        max_new_tokens=steps.MAX_NEW_TOKENS,
    )


SETTINGS = {
    "steps-3": _steps(0.02),
    "steps-8": _steps(0.07),
    "steps-15": _steps(0.155),
    "format": _format(0.07),
    "format-dense": _format(0.12),
    "sizes": replace(
        _format(0.07, sizes=[{}, {"steps": 500, "layers": 1, "hidden": 64}]),
        says="as `format`, every other peer with a policy an eighth of the size",
        kinds=2,
    ),
    "tags": Setting(
        says='starters like the one that ships; a manifest with `answer = "tags"`: answers of about ten tokens count',
        tasks=lambda peer: SEVEN,
        start=lambda seed, peer: shipped(seed),
        rewards={"answer": "tags"},
        held_out=SEVEN,
        max_new_tokens=16,
    ),
    "tags-3M": Setting(
        says="as `tags`, policies of 3.2M parameters",
        tasks=lambda peer: SEVEN,
        start=lambda seed, peer: shipped(seed, layers=4, hidden=256),
        rewards={"answer": "tags"},
        learning_rate=1.5e-4,
        held_out=SEVEN,
        rounds=36,
        max_new_tokens=16,
    ),
    "plain": Setting(
        says="equal starter policies, the tasks' own checkers, nothing to discover",
        tasks=lambda peer: SEVEN,
        start=lambda seed, peer: shipped(seed),
        learning_rate=2e-4,
        held_out=SEVEN,
    ),
    "specialists": Setting(
        says="weak starters, each taught more of two of the six tasks; all play all six",
        tasks=lambda peer: SIX,
        start=_specialist,
        learning_rate=2e-4,
        kinds=3,
    ),
}
