"""Gradient checkpointing: layers are computed again in the backward pass instead of keeping what they computed.

transformers checkpoints a layer only in training mode, and a policy stays in evaluation mode, where dropout is off. So
the layers themselves, and no module inside them, are in training mode during a forward pass with a gradient. A layer
that would drop something then gives other numbers, which is looked for before checkpointing is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from swarm_node.policy.logprobs import TokenBatch, token_logprobs


class Checkpointing:
    """The layers of a model that can be computed again."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context for a forward pass; the backward pass may come after it."""
        for layer in self._layers:
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            layer.gradient_checkpointing = layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.gradient_checkpointing = layer.training = False

    def agrees(self, model: nn.Module, batch: TokenBatch, full_logits: bool) -> bool:
        """Whether the model has such layers, and gives the very same log-probabilities with them. Global random numbers
        stay as they are."""
        if not self._layers:
            return False

        def logprobs() -> Tensor:
            return token_logprobs(model, batch, 1.0, full_logits=full_logits)[0].detach()

        devices = [batch.input_ids.device] if batch.input_ids.is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            plain = logprobs()
            with self.on():
                return torch.equal(plain, logprobs())
