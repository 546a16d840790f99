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
from swarm_node.policy.oom import is_out_of_memory

SOME = 16  # weights whose gradients are compared


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
        """Whether the model has such layers, gives the very same log-probabilities with them, and the same gradients of
        some weights up to rounding. Global random numbers stay as they are."""
        if not self._layers:
            return False
        trained = [p for p in model.parameters() if p.requires_grad]
        some = trained[:: -max(1, len(trained) // SOME)]  # the last one is lora_B; lora_A has no gradient at first

        def passed() -> tuple[Tensor, tuple[Tensor | None, ...]]:
            logprobs = token_logprobs(model, batch, 1.0, full_logits=full_logits)[0]
            return logprobs.detach(), torch.autograd.grad(logprobs.sum(), some, allow_unused=True)

        devices = [batch.input_ids.device] if batch.input_ids.is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            plain = passed()
            try:
                with self.on():
                    again = passed()
            except Exception as exc:  # hundreds of architectures, each with errors of its own
                if is_out_of_memory(exc):
                    raise
                return False
        return torch.equal(plain[0], again[0]) and all(map(_same, plain[1], again[1]))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two gradients are the same up to rounding."""
    if a is None or b is None:
        return a is b
    return bool((a - b).abs().max() <= 1e-2 * a.abs().max())
