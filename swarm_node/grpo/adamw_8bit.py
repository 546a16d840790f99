"""AdamW whose two moments take 8 bits a value, by bitsandbytes (arXiv 2110.02861): 2 bytes a weight in place of 8.

    exp_avg, exp_avg_sq               a code of 8 bits for each value, in the shape of the weight
    exp_avg_scale, exp_avg_sq_scale   float32, one for each block of 256 values in a row

A value is its code's entry in a table of 256 numbers, times its block's scale. Only the block that is being updated is
ever unpacked. Tensors of fewer than 4,096 values, and those that a caller names, have moments in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise, optimizer_update_32bit
from torch import Tensor, nn

BLOCK = 256  # values with one scale: bitsandbytes has no other number
LEAST = 4096  # values of the smallest tensor in 8 bits, as in bitsandbytes' own optimisers
PART = 2**20  # values that a CPU updates at a time: it takes several float32 copies of them


class AdamW8bit(torch.optim.Optimizer):
    """Updates weights in float32. Their state is set by the caller to what `moments` gives."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self._tables = [create_dynamic_map(signed) for signed in (True, False)]  # of exp_avg and exp_avg_sq

    @staticmethod
    def moments(weight: Tensor, wide: bool) -> dict[str, Tensor]:
        """The state of a weight before its first update; `wide` = with moments in float32."""
        wide = wide or weight.numel() < LEAST
        dtype = torch.float32 if wide else torch.uint8
        like = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        state = {"step": torch.zeros(()), "exp_avg": like, "exp_avg_sq": like.clone()}
        if not wide:
            scales = torch.zeros(-(-weight.numel() // BLOCK), device=weight.device)
            state |= {"exp_avg_scale": scales, "exp_avg_sq_scale": scales.clone()}
        return state

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: nn.Parameter, group: dict[str, Any]) -> None:
        state, (beta1, beta2), total = self.state[weight], group["betas"], weight.numel()
        table1, table2 = self._tables = [table.to(weight.device) for table in self._tables]
        state["step"] += 1
        step, rate, eps, decay = int(state["step"]), group["lr"], group["eps"], group["weight_decay"]
        gradient, values = weight.grad.reshape(-1), weight.detach().reshape(-1)
        means, squares = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        size = PART if weight.device.type == "cpu" else total
        for first in range(0, total, size):
            part, blocks = slice(first, first + size), slice(first // BLOCK, -(-(first + size) // BLOCK))
            g, w, m, v = (each[part] for each in (gradient, values, means, squares))
            if "exp_avg_scale" in state:
                scale1, scale2 = state["exp_avg_scale"][blocks], state["exp_avg_sq_scale"][blocks]
                optimizer_update_8bit_blockwise(
                    *("adam", g, w, m, v, beta1, beta2, 0.0, 0.0, eps, step, rate),
                    *(table1, table2, scale1, scale2, decay),
                )
            else:
                optimizer_update_32bit("adam", g, w, m, beta1, eps, step, rate, v, beta2, weight_decay=decay)
        if not weight.is_contiguous():  # `values` is a copy
            weight.copy_(values.view_as(weight))
