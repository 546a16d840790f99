"""Layouts of weights that a processor may lack."""

from __future__ import annotations

import pytest
import torch

from swarm_node.policy.engines import products
from swarm_node.policy.engines.products import Name


def skip_if_missing(layout: Name, dtype: torch.dtype = torch.float32) -> None:
    """Skip a test of packed weights of that dtype where torch or this processor has none."""
    if layout != "packed":
        return
    try:
        with torch.inference_mode():
            products._product(torch.ones(1, 16, dtype=dtype), products._packed(torch.ones(16, 16, dtype=dtype)), None)
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"no packed weights in {dtype} here: {error}")
