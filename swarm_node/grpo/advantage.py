"""How much better than its siblings a rollout is: A_i = (r_i - baseline) / scale.

    group_std       (r - mean_g) / (std_g + 1e-4)          GRPO, arXiv 2402.03300, section 4.1.2
    batch_std       (r - mean_g) / (std_batch + 1e-4)      Lite PPO, arXiv 2508.08221
    none            r - mean_g                             Dr. GRPO, arXiv 2503.20783
    leave_one_out   r_i - mean_{j != i} r_j                RLOO, arXiv 2402.14740
    median          (r - median_g) / max(MAD_g, 0.25)      MC-GRPO, arXiv 2601.22582, with a floor;
                                                           MAD = median |r - median_g|
    pass_k          (E[max S | i in S] - E[max S]) / std[max S], S = k of the group's answers drawn without repetition:
                    pass@k training, arXiv 2508.10751, section 3.3, for graded rewards as well

Standard deviations are unbiased. With several rewards, GDPO (arXiv 2601.05242) puts each one through the
formula, adds the weighted results up and whitens the sum over the batch: totals of 1+0 and 1+1 stay apart,
which they do not when the rewards are added first.

NaN = not scored: such a reward takes no part in any mean, and a rollout without a score has advantage 0. The only
rollout of a group has advantage 0 too.

A group that brings its advantages (`Group.advantages`: a peer's, and a replayed one) keeps them, whatever the formula,
and takes no part in the statistics of the batch. A formula of the user's own has the form of those in `BASELINES`.
docs/grpo.md says why the median's scale has a floor.

A peer's group is compared with this node's own success on that kind of task (`foreign_advantages`):

    A_i = clip((r_i - b) / max(s, SPREAD_FLOOR), -M, +M);   b, s = mean and std of own rewards
          then the negative ones are scaled down until they add up to no more than the positive ones do

The sender composes the group, so neither its mean nor its spread may set our scale: docs/sharing.md. Rewards below b
need a bound, since there may be 63 wrong answers for one right one. Most are texts that this policy would never write,
and pushing those down moves probability in directions nobody chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, isnan, nan, sqrt

import numpy as np
import torch
from torch import Tensor

from swarm_node.config import GrpoConfig
from swarm_node.config.plugins import load_function, plugin_error
from swarm_node.errors import UserError
from swarm_node.types import Group, Rollout

EPSILON = 1e-4  # TRL's; it matters only for nearly equal rewards
MAD_FLOOR = 0.25  # a quarter of the distance between right and wrong
SPREAD_FLOOR = 0.25  # a quarter of the distance between right and wrong: the spread of a success rate of 7 %
DECAY = 0.95
"""Weight of earlier answers after each group: about the last twenty groups of a kind of task count. That is long enough
for a mean, and short enough to follow a policy that learns."""
MIN_ANSWERS = 16.0  # answers below which a mean is not worth comparing with: two groups of eight
ROUNDING = 1e-9  # an advantage below this is rounding in a group of equal rewards, that is 0


Baseline = Callable[[Tensor], Tensor]
"""Rewards [groups, G], float64 -> advantages of that shape. NaN stands for a missing rollout, or one without a score.
"""


def advantages(
    groups: Sequence[Group], config: GrpoConfig, weights: Mapping[str, float], baseline: Baseline | None = None
) -> Tensor:
    """Advantages [B] of all rollouts, group after group. `weights` are those of rewards by name, 1 if missing; GDPO
    uses them. `baseline` is that of `config.advantage`, if the caller has looked it up before."""
    computed = [group for group in groups if group.advantages is None]
    if not computed:
        assert all(len(group.advantages or ()) == len(group.rollouts) for group in groups)
        return torch.tensor([a for g in groups for a in g.advantages or ()], dtype=torch.float64).float()
    rows = iter(_computed(computed, config, weights, baseline or find_baseline(config)))
    given = [next(rows) if g.advantages is None else torch.tensor(g.advantages, dtype=torch.float64) for g in groups]
    assert all(len(row) == len(group.rollouts) for row, group in zip(given, groups, strict=True))
    return torch.cat(given).float()


def _computed(
    groups: Sequence[Group], config: GrpoConfig, weights: Mapping[str, float], baseline: Baseline
) -> list[Tensor]:
    """Advantages [G] of each group, computed from the rewards of all groups."""
    if not groups:
        return []
    width = max(len(group.rollouts) for group in groups)
    if config.aggregation == "normalize_then_sum":
        names = sorted({name for group in groups for r in group.rollouts for name in r.rewards})
        scored = _table(groups, width, lambda r: [r.rewards.get(name) for name in names])
        shares = torch.tensor([weights.get(name, 1.0) for name in names], dtype=scored.dtype)
        normalised = torch.stack([baseline(r) for r in scored.unbind(-1)], -1)
        total = (normalised * shares).nansum(-1)
        total[scored.isnan().all(-1)] = torch.nan
        advantage = (total - total.nanmean()) / (nanstd(total.flatten(), 0) + EPSILON)
    else:
        advantage = baseline(_table(groups, width, lambda r: [r.reward if is_judged(r) else None])[..., 0])
    advantage = advantage.nan_to_num(0.0)
    advantage[advantage.abs() < ROUNDING] = 0.0
    return [row[: len(group.rollouts)] for row, group in zip(advantage, groups, strict=True)]


def find_baseline(config: GrpoConfig) -> Baseline:
    """The formula that `grpo.advantage` names. UserError if it is the user's own and cannot be loaded."""
    if config.advantage == "pass_k":
        return partial(pass_k, k=config.k)
    return BASELINES.get(config.advantage) or _checked(load_function(config.advantage, "grpo.advantage"))


def _checked(function: Baseline) -> Baseline:
    """The user's function, with its result checked. UserError if it fails or breaks its contract."""

    def checked(r: Tensor) -> Tensor:
        try:
            advantage = torch.as_tensor(function(r.clone()), dtype=r.dtype)
        except Exception as error:  # the user's code may raise anything
            raise plugin_error("grpo.advantage failed", error) from error
        if advantage.shape != r.shape or advantage.isinf().any():
            raise UserError(
                f"grpo.advantage must give finite advantages {list(r.shape)} for rewards of that shape (NaN for NaN), "
                f"not {list(advantage.shape)}"
            )
        return advantage.masked_fill(r.isnan(), torch.nan)

    return checked


def group_std(r: Tensor) -> Tensor:
    return none(r) / (nanstd(r, 1) + EPSILON)


def batch_std(r: Tensor) -> Tensor:
    return none(r) / (nanstd(r.flatten(), 0) + EPSILON)


def none(r: Tensor) -> Tensor:
    return r - r.nanmean(1, keepdim=True)


def leave_one_out(r: Tensor) -> Tensor:
    n = (~r.isnan()).sum(1, keepdim=True)
    return none(r) * (n / (n - 1))


def median(r: Tensor) -> Tensor:
    distance = r - nanmedian(r)
    return distance / nanmedian(distance.abs()).clamp(min=MAD_FLOOR)


def pass_k(r: Tensor, k: int) -> Tensor:
    """A right answer's share in the group's pass@k; with `k` = 1, `group_std` but for the estimate of the deviation.

    In closed form, with the rewards of a group in rising order r_1 <= ... <= r_n:

        P(max S = r_j) = C(j-1, k-1) / C(n, k)
        P(max S = r_j | i in S) = C(j-2, k-2) / C(n-1, k-1) for j > i, and C(i-1, k-1) / C(n-1, k-1) for j = i

    A group with at most k scored answers has advantage 0: every S is all of it.
    """
    out = torch.full_like(r, torch.nan)
    for row, answers in zip(out, r, strict=True):
        scored, order = answers[~answers.isnan()].sort()
        n = len(scored)
        values = torch.zeros_like(scored)
        if n > k:
            best = torch.tensor([comb(j, k - 1) / comb(n, k) for j in range(n)], dtype=r.dtype)
            mean = (best * scored).sum()
            std = (best * scored.square()).sum().sub(mean.square()).clamp(min=0).sqrt()
            above = torch.tensor([comb(j - 1, k - 2) if k > 1 and j else 0 for j in range(n)], dtype=r.dtype)
            itself = torch.tensor([comb(j, k - 1) for j in range(n)], dtype=r.dtype)
            over = (above * scored).flip(0).cumsum(0).flip(0) - above * scored
            values = ((itself * scored + over) / comb(n - 1, k - 1) - mean) / (std + EPSILON)
        row[~answers.isnan()] = values[order.argsort()]
    return out


BASELINES: dict[str, Baseline] = {f.__name__: f for f in (group_std, batch_std, none, leave_one_out, median)}


def nanstd(r: Tensor, dim: int) -> Tensor:
    """Unbiased standard deviation over `dim` (kept) of the values that are not NaN; NaN for fewer than two of them."""
    n = (~r.isnan()).sum(dim, keepdim=True)
    return ((r - r.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True) / (n - 1)).sqrt()


def nanmedian(r: Tensor) -> Tensor:
    """Median of each row (kept). Of an even number of values it is the mean of the middle two; torch.median takes the
    lower."""
    return r.nanquantile(0.5, dim=1, keepdim=True)


@dataclass
class RewardStatistics:
    """Decayed sums over own answers to one kind of task."""

    n: float = 0.0  # answers
    rewards: float = 0.0
    squares: float = 0.0  # sum of squared rewards

    @property
    def known(self) -> bool:
        """Whether there were enough answers for `reward` and `spread`."""
        return self.n >= MIN_ANSWERS

    @property
    def reward(self) -> float:
        return self.rewards / self.n

    @property
    def spread(self) -> float:
        """Standard deviation of the reward."""
        return sqrt(max(0.0, self.squares / self.n - self.reward**2))


class TaskStatistics:
    """Reward statistics by task label. Only own answers count: a peer's say how well the peer does."""

    def __init__(self, by_label: dict[str, RewardStatistics] | None = None) -> None:
        self.by_label = by_label or {}

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in own scored groups. Answers without a score do not count."""
        for group in groups:
            own = self.by_label.setdefault(group.task.label, RewardStatistics())
            judged = [r for r in group.rollouts if is_judged(r)]
            own.n = DECAY * own.n + len(judged)
            own.rewards = DECAY * own.rewards + sum(r.reward for r in judged)
            own.squares = DECAY * own.squares + sum(r.reward**2 for r in judged)

    def of(self, label: str) -> RewardStatistics:
        """Statistics of one kind of task; of no answers if there were none."""
        return self.by_label.get(label, RewardStatistics())


def foreign_advantages(
    rollouts: Sequence[Rollout], own: RewardStatistics | None, bound: float, k: int = 1
) -> list[float]:
    """One advantage for each of `rollouts`, 0 for those without a score; `own` = None: against the group's own mean.

    With `k` > 1, the share in pass@k of an own group with success p = b, for rewards between 0 and 1:
    right: (1 - p)^k / s, wrong: -p (1 - p)^(k-1) / s, s = sqrt((1 - p)^k (1 - (1 - p)^k)). With other rewards k is 1.
    """
    rewards = [r.reward if is_judged(r) else nan for r in rollouts]
    if own is None:
        raw = group_std(torch.tensor([rewards], dtype=torch.float64))
        return raw.nan_to_num(0.0)[0].clamp(-bound, bound).tolist()
    p = own.reward
    if k == 1 or not 0 <= p <= 1:
        scale = max(own.spread, SPREAD_FLOOR)
        compared = [(reward - p) / scale for reward in rewards]
    else:
        miss, wrong = (1 - p) ** k, -p * (1 - p) ** (k - 1)
        scale = max(sqrt(miss * (1 - miss)), SPREAD_FLOOR)
        compared = [(wrong + reward * (miss - wrong)) / scale for reward in rewards]
    clipped = [0.0 if isnan(a) else max(-bound, min(bound, a)) for a in compared]
    up, down = sum(max(0.0, a) for a in clipped), sum(max(0.0, -a) for a in clipped)
    share = min(1.0, up / down) if down else 1.0
    return [a if a > 0 else a * share for a in clipped]


def is_judged(rollout: Rollout) -> bool:
    """Whether any reward scored it: None from all of them is no reward."""
    rewards = rollout.rewards.values()
    return None not in rewards or any(reward is not None for reward in rewards)


def _table(groups: Sequence[Group], width: int, values: Callable[[Rollout], list[float | None]]) -> Tensor:
    """Table of `values` of each rollout [groups, width, K]; NaN for None, and where a group has fewer rollouts."""
    rows = [[values(r) for r in group.rollouts] for group in groups]
    absent: list[float | None] = [None] * len(rows[0][0])
    padded = [row + [absent] * (width - len(row)) for row in rows]
    return torch.from_numpy(np.array(padded, dtype=np.float64))
