"""CISPO, MiniMax-M1, arXiv 2506.13585: the ratio is a capped factor without gradient.

l_t = -stop_gradient(min(ratio, high)) A logprob_t
"""

from __future__ import annotations

from torch import Tensor

from swarm_node.grpo.objective import Loss, Tokens


class Cispo(Loss):
    """The upper clip range is the cap itself; its default is that of ScaleRL, arXiv 2510.13786."""

    clip = (0.2, 5.0)

    def surrogate(self, tokens: Tokens) -> Tensor:
        return -tokens.ratio.clamp(max=tokens.high).detach() * tokens.advantage * tokens.logprobs

    def highest(self, high: float) -> float:
        return high

    def metrics(self, low: float, high: float, count: float) -> dict[str, float]:
        return {"cispo_clip_ratio": high / count}
