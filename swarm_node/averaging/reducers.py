"""Code of the user's own that says what a mean is: `averaging.reducer = "pkg.mod:fn"`.

    fn(own [n], others [k, n]) -> [n]        float32, on the CPU; k = 1 in pairs, else one for each other member

It takes the place of the mean, after what was sent has been found finite, and clipped and gated if that is on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swarm_node.config.plugins import describe, load_function
from swarm_node.errors import UserError

Reducer = Callable[[Tensor, Tensor], Tensor]


def find_reducer(name: str) -> Reducer | None:
    """The reducer that `averaging.reducer` names if it is outside code, else `None`. UserError if it cannot be had."""
    if ":" not in name:
        return None
    function = load_function(name, "averaging.reducer")

    def reduce(own: Tensor, others: Tensor) -> Tensor:
        try:
            mean = function(own.clone(), others)
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"averaging.reducer {name!r} failed: {describe(error)}") from error
        if not isinstance(mean, Tensor) or mean.shape != own.shape or not bool(torch.isfinite(mean).all()):
            raise UserError(f"averaging.reducer {name!r} must return {len(own)} finite values, a tensor")
        return mean.float()

    return reduce
