"""Which waiting groups to train on: a sampler gives each a weight, and groups are drawn in proportion, one by one.

uniform   w = 1                                         the paper, 2509.08721
yours     f(offers: Sequence[Offer]) -> Sequence[float], finite, >= 0; 0 = never
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_node.config.plugins import describe, load_function
from swarm_node.errors import UserError
from swarm_node.sharing.reward_stats import Belief
from swarm_node.types import Group


@dataclass(frozen=True)
class Offer:
    """A waiting group, as samplers see it."""

    id: int
    """Tells it apart in this run."""
    group: Group
    age: float
    """Seconds since it was sampled."""
    uses: int
    """How often it was trained on."""
    best: float
    """Best reward in it, as judged here."""
    own: Belief
    """How well this node does on that kind of task."""


Sampler = Callable[[Sequence[Offer]], Sequence[float]]


def uniform(offers: Sequence[Offer]) -> list[float]:
    return [1.0] * len(offers)


def find_sampler(name: str) -> Sampler:
    """The sampler that `sharing.sampler` names. UserError if it is outside code that cannot be loaded."""
    return uniform if name == "uniform" else load_function(name, "sharing.sampler")


def weigh(sampler: Sampler, offers: Sequence[Offer]) -> list[float]:
    """The weight of each offer. UserError if the sampler, which may be the user's own, fails or breaks its contract."""
    try:
        weights = [float(weight) for weight in sampler(offers)]
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"sharing.sampler failed: {describe(error)}") from error
    if len(weights) != len(offers) or not all(math.isfinite(w) and w >= 0 for w in weights):
        raise UserError(f"sharing.sampler must give {len(offers)} finite weights >= 0, one for each group offered")
    return weights


def draw(weights: Sequence[float], n: int, rng: random.Random) -> list[tuple[int, float]]:
    """Up to `n` different positions in proportion to `weights`, each with its probability at the time it was drawn:
    the product of these is the probability of the whole draw."""
    left = {i: weight for i, weight in enumerate(weights) if weight > 0}
    drawn: list[tuple[int, float]] = []
    while left and len(drawn) < n:
        total = math.fsum(left.values())
        (i,) = rng.choices(list(left), list(left.values()))
        drawn.append((i, left.pop(i) / total))
    return drawn
