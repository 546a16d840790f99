"""GSPO, arXiv 2507.18071: GRPO with one ratio for each rollout, and a clip range that suits it."""

from __future__ import annotations

from swarm_node.grpo.losses.grpo import Grpo


class Gspo(Grpo):
    """The ratio is exp of the mean of log-probability differences over the rollout."""

    level = "sequence"
    clip = (3e-4, 4e-4)
