"""What training costs, from what the machine costs an hour (`price_per_hour`, in any currency).

    spent            = spent before + price * (now - began) / 3600
    per group        = spent / groups admitted to training, own and foreign; one trained on twice counts twice
    per reward point = spent / gain

    gain = mean(last k) - mean(first k)       k = max(10, n // 10) of the n rewards so far, once n >= 2 k
           nothing, unless it exceeds 2 * sqrt(var(first k) / k + var(last k) / k): twice its standard error

Time counts from each start to the end of its last round, pauses between included, since the machine is there meanwhile.
What comes after that round is in no figure, at the next start neither: held-out questions, the hand-over, a pause that
ends the run; nor is time in which no process runs. All goes on from the last line that a resume keeps, so that the
rounds lost by a crash, and their cost, are not in it. Groups and rewards count from the first round that has a price,
as the money does.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

HOUR_S = 3600.0
LEAST_ROUNDS = 10
"""Behind each of the two means: the reward of one round is mostly noise."""
ERRORS = 2.0
"""Standard errors that a gain must exceed."""


class CostMeter:
    """Adds up over one run. Without a price it has no figures."""

    def __init__(self, price_per_hour: float | None, now: float) -> None:
        """`now` is on a clock that never goes back, as those below; the machine is there from now on."""
        self._price = price_per_hour
        self._at = now
        self._spent = 0.0
        self._groups = 0
        self._rewards = Sums()

    def go_on(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Take up the lines of the run that were kept."""
        if self._price is None:
            return
        counted = [record for record in kept if record.get("cost/spent") is not None]
        for record in counted:
            self._rewards.add(record.get("reward"))
        if counted:
            self._spent += counted[-1]["cost/spent"]
            self._groups += int(counted[-1]["cost/groups"])

    def round(self, reward: float, groups: int, now: float) -> dict[str, float]:
        """Of the round that ends: its mean `reward`, and the `groups` it trained on."""
        if self._price is None:
            return {}
        self._spent += spent(self._price, now - self._at)
        self._at = now
        self._groups += groups
        self._rewards.add(reward)
        figures = {"cost/spent": self._spent, "cost/groups": self._groups}
        if self._groups:
            figures["cost/per_admitted_group"] = self._spent / self._groups
        if (gained := self._rewards.gain()) is not None:
            figures["cost/per_reward_point"] = self._spent / gained
        return figures


class Sums:
    """Running sums of rewards and of their squares, so that each round costs the same however long the run."""

    def __init__(self) -> None:
        self._sums = array("d", [0.0])
        self._squares = array("d", [0.0])

    def add(self, reward: float | None) -> None:
        """One that is missing or not finite counts for nothing."""
        if reward is not None and math.isfinite(reward):
            self._sums.append(self._sums[-1] + reward)
            self._squares.append(self._squares[-1] + reward * reward)

    def gain(self) -> float | None:
        """How much higher the last rewards are than the first ones; None if they are not, or if it may be noise."""
        n = len(self._sums) - 1
        k = max(LEAST_ROUNDS, n // 10)
        if n < 2 * k:
            return None
        (first, first_variance), (last, last_variance) = self._of(0, k), self._of(n - k, n)
        gained = last - first
        return gained if gained > ERRORS * math.sqrt((first_variance + last_variance) / k) else None

    def _of(self, a: int, b: int) -> tuple[float, float]:
        """(mean, sample variance) of those from `a` up to `b`."""
        k = b - a
        mean = (self._sums[b] - self._sums[a]) / k
        return mean, max(0.0, (self._squares[b] - self._squares[a] - k * mean * mean) / (k - 1))


def spent(price_per_hour: float, seconds: float) -> float:
    """In the currency of `price_per_hour`."""
    return price_per_hour * seconds / HOUR_S
