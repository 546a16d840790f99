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
        metrics |= {f"off_policy/{whose}/{name}": value for name, value in _distances(drift, sequence, tokens).items()}
    return metrics


def figures_by_peer(
    now: np.ndarray, sampled: np.ndarray, sequence: np.ndarray, peers: Sequence[str | None]
) -> dict[str, dict[str, float]]:
    """The same figures of the tokens of each peer, with `logp`, their mean log-probability in the first pass.
    `peers`: of each rollout, which peer sampled it; None = this node."""
    drift = log_ratios(now, sampled)
    figures = {}
    for peer in {peer for peer in peers if peer is not None}:
        tokens = np.array([other == peer for other in peers])[sequence]
        if tokens.any():
            figures[peer] = {"logp": float(now[tokens].mean())} | _distances(drift, sequence, tokens)
    return figures


def _distances(drift: np.ndarray, sequence: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """Figures of those of `tokens` [N] whose sampling probability is known; none if there are none."""
    known = tokens & ~np.isnan(drift)
    if not known.any():
        return {}
    d = drift[known]
    _, rollout = np.unique(sequence[known], return_inverse=True)
    low, middle, high = np.quantile(np.exp(d), (0.01, 0.5, 0.99)).tolist()
    return {
        "ratio_p1": low,
        "ratio_p50": middle,
        "ratio_p99": high,
        "second_moment": float((d**2).mean()),
        "ess": effective_share(np.bincount(rollout, d)),
    }
