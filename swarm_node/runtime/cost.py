"""The cost of training, from the price of the machine per hour (`price_per_hour`, in any currency).

    spent            = spent before + price * (now - began) / 3600
    per group        = spent / groups admitted to training, own and foreign; a group counts each time it is trained on
    per reward point = spent / gain

    gain = mean(last k) - mean(first k)       k = max(10, n // 10) of the n rewards so far, once n >= 2 k
           none, unless it exceeds 2 * sqrt(var(first k) / k + var(last k) / k): twice its standard error

Time counts from each start to the end of its last round, pauses included. Time after the last round of a start does not
count, nor does time without a process. A resumed run takes the figures of its checkpoint, so the cost of rounds that a
crash lost is not included. Groups and rewards count from the first round that has a price. Beyond 512 rounds, rewards
are kept as sums over parts of equally many rounds, and the two means are exact to within one part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from swarm_node.observability.tally import Buckets
from swarm_node.observability.thinning import rounds_of

LEAST_ROUNDS = 10  # rewards behind each of the two means: the reward of one round is mostly noise
ERRORS = 2.0  # a gain counts if it exceeds so many standard errors


class Costs(msgspec.Struct):
    """The figures that a checkpoint keeps."""

    spent: float = 0.0
    groups: int = 0
    rewards: Buckets = msgspec.field(default_factory=Buckets)


class CostMeter:
    """Adds up the cost of one run. Without a price it has no figures."""

    def __init__(self, price_per_hour: float | None, now: float) -> None:
        """`now` is the time at which the cost begins, on a monotonic clock in seconds."""
        self._price = price_per_hour
        self._at = now
        self.costs = Costs()

    def go_on(self, record: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl from an earlier start."""
        if record.get("cost/spent") is not None:
            self.costs.spent = record["cost/spent"]
            self.costs.groups = int(record["cost/groups"])
            self.costs.rewards.add(record.get("reward"), rounds_of(record))

    def round(self, reward: float, groups: int, now: float) -> dict[str, float]:
        """The `cost/*` of the round that ends at `now`: its mean `reward`, and the number of `groups` trained on."""
        if self._price is None:
            return {}
        costs = self.costs
        costs.spent += self._price * (now - self._at) / 3600
        self._at = now
        costs.groups += groups
        costs.rewards.add(reward)
        figures = {"cost/spent": costs.spent, "cost/groups": costs.groups}
        if costs.groups:
            figures["cost/per_admitted_group"] = costs.spent / costs.groups
        if (gained := gain(costs.rewards)) is not None:
            figures["cost/per_reward_point"] = costs.spent / gained
        return figures


def gain(rewards: Buckets) -> float | None:
    """How much higher the last rewards are than the first; None if they are not, or if that may be noise."""
    k = max(LEAST_ROUNDS, rewards.count // 10)
    if rewards.count < 2 * k:
        return None
    (first, first_variance), (last, last_variance) = rewards.first(k), rewards.last(k)
    gained = last - first
    return gained if gained > ERRORS * math.sqrt((first_variance + last_variance) / k) else None
