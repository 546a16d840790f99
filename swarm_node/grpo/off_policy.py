"""How far from the present policy the tokens of a step were sampled. This is measured, and nothing acts on it.

    d_t            log-probability in the step's first pass - log-probability at sampling, within +-BOUND
    ratio          exp(d_t)
    second moment  mean_t d_t^2                                           what M2PO bounds, arXiv 2510.01161
    ess            (sum_i w_i)^2 / (n sum_i w_i^2),  w_i = exp(sum_t d_t)    of n rollouts, in [1/n, 1]

ess is the share of the rollouts that an unbiased estimate would be worth. So its weights are those of whole rollouts:
those by geometric mean belong to no such estimate. It falls with the length of answers, the second moment does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BOUND = 20.0  # nats, as in verl: a log-ratio that a peer makes up leaves every figure finite


def log_ratios(now: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """d_t [N]; NaN where `sampled` [N] is."""
    return np.clip(now.astype(float) - sampled, -BOUND, BOUND)


def effective_share(log_weights: np.ndarray) -> float:
    """ess of rollouts with `log_weights` [n], n > 0."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def off_policy_metrics(
    now: np.ndarray, sampled: np.ndarray, sequence: np.ndarray, stale: np.ndarray, foreign: np.ndarray
) -> dict[str, float]:
    """Metrics `off_policy/*` of N tokens, all of each rollout; those are missing that the tokens cannot give.

    now, sampled      [N] log-probabilities in the first pass and at sampling, the latter NaN where there is none
    sequence          [N] number of the rollout
    stale, foreign    [N] whether an older version of this policy sampled the token, or a peer
    """
    metrics = {"off_policy/foreign_logp": float(now[foreign].mean())} if foreign.any() else {}
    drift = log_ratios(now, sampled)
    for whose, tokens in (("stale", stale), ("foreign", foreign)):
        known = tokens & ~np.isnan(drift)
        if known.any():
            d = drift[known]
            _, rollout = np.unique(sequence[known], return_inverse=True)
            low, middle, high = np.quantile(np.exp(d), (0.01, 0.5, 0.99)).tolist()
            metrics |= {
                f"off_policy/{whose}/ratio_p1": low,
                f"off_policy/{whose}/ratio_p50": middle,
                f"off_policy/{whose}/ratio_p99": high,
                f"off_policy/{whose}/second_moment": float((d**2).mean()),
                f"off_policy/{whose}/ess": effective_share(np.bincount(rollout, d)),
            }
    return metrics


def sums_by_peer(
    now: np.ndarray, sampled: np.ndarray, sequence: np.ndarray, peers: Sequence[str | None]
) -> dict[str, np.ndarray]:
    """For each peer [4]: its tokens, their log-probabilities in the first pass, the tokens whose log-probabilities it
    sent, and the squared d_t of these. `peers`: of each rollout who sampled it; None = this node."""
    drift = log_ratios(now, sampled)
    known = ~np.isnan(drift)
    each = (None, now, known, np.where(known, drift, 0.0) ** 2)
    totals = np.stack([np.bincount(sequence, column, len(peers)) for column in each], axis=1)
    sums: dict[str, np.ndarray] = {}
    for peer, total in zip(peers, totals, strict=True):
        if peer is not None:
            sums[peer] = sums.get(peer, 0.0) + total
    return sums
