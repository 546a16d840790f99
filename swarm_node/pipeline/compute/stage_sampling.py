"""One stage's part in drawing samples: the caches of each wave of prompts, and an engine with the present weights.

Prefill, Step, Step, ... -> the next stage          the last stage draws tokens and sends them to the leader
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm_node.config import RolloutsConfig
from swarm_node.pipeline.compute.stage_model import Stage
from swarm_node.pipeline.compute.tensor_codec import sendable
from swarm_node.pipeline.messages import LEADER, StageMessage
from swarm_node.policy.architecture import is_windowed
from swarm_node.policy.engines.base import sample
from swarm_node.policy.engines.native import SUPPORTED, LayerCache, Slice, head_of, last_of
from swarm_node.policy.engines.products import layout_of
from swarm_node.policy.engines.transformers import ModelSlice
from swarm_node.policy.rounding import FACTOR, allowed, random_rounding
from swarm_node.types import Sampling
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import Prefill, Step, Tokens


@dataclass
class _Wave:
    """Samples that are being drawn."""

    cache: LayerCache
    sampling: Sampling
    shape: tuple[int, int]  # prompts, and samples of each
    step: int = 0  # tokens that have been appended


class _Engine:
    """Decodes with the present weights of a stage; valid for one turn, since it may hold copies of them."""

    def __init__(self, stage: Stage, native: bool) -> None:
        backbone, layout = stage.base.get_decoder(), layout_of(stage.base).name
        self.slice = Slice(backbone, layout) if native else ModelSlice(backbone)
        self.logits: Callable[[Tensor], Tensor] | None = None
        """At the last stage: output of the last layer [W, H] -> logits [W, V]."""
        if stage.norm is not None and stage.head is not None:
            head, final = stage.head, stage.final
            self.logits = head_of(stage.norm, head, layout) if native else lambda hidden: head(final(hidden))


@dataclass
class StageSampler:
    """Computes one stage's layers for the tokens of a turn."""

    stage: Stage
    native: bool  # use the native engine
    _waves: dict[int, _Wave] = field(default_factory=dict)
    _engine: _Engine | None = None

    def drop(self) -> None:
        """Give up all waves."""
        self._engine = None
        self._waves.clear()

    @torch.inference_mode()
    def prefill(self, message: StageMessage, head: Prefill) -> StageMessage:
        """Begin a wave. Raises RemoteProtocolError: order, shape."""
        if head.wave in self._waves:
            raise RemoteProtocolError("order", f"wave {head.wave} has begun")
        x, lengths, uniform = message.tensors
        if len(uniform) != len(lengths) * head.n:
            raise RemoteProtocolError("shape", f"{len(uniform)} rows instead of {len(lengths)} x {head.n}")
        if self._engine is None:
            self._engine = _Engine(self.stage, self.native)
        cache = self._engine.slice.cache(lengths.tolist(), head.n, head.limit)
        x = cache.prefill(self._embedded(x))
        sampling = Sampling(head.limit, head.temperature, head.top_p)
        self._waves[head.wave] = _Wave(cache, sampling, (len(lengths), head.n))
        if self._engine.logits is None:
            return StageMessage(message.stage + 1, head, (sendable(x), lengths, uniform))
        logits = self._engine.logits(last_of(x, lengths.tolist()))
        return self._draw(head, logits.repeat_interleave(head.n, 0), uniform)

    @torch.inference_mode()
    def step(self, message: StageMessage, head: Step) -> StageMessage:
        """Append one token to each sample of a wave. Raises RemoteProtocolError: order, values, shape."""
        wave, engine = self._waves.get(head.wave), self._engine
        in_turn = wave is not None and head.step == wave.step and head.step + 1 < wave.sampling.max_new_tokens
        if wave is None or engine is None or not in_turn:
            raise RemoteProtocolError("order", f"token {head.step} of wave {head.wave} out of turn")
        x, uniform, *picked = message.tensors
        shape = wave.shape
        if picked:
            alive, column = picked
            if int(alive.max()) >= shape[0] or int(column.max()) >= shape[1]:
                raise RemoteProtocolError("values", f"rows are picked that are not among {shape[0]} x {shape[1]}")
            shape = len(column), column.shape[1]
        if len(x) != math.prod(shape) or len(uniform) != len(x):
            raise RemoteProtocolError("shape", f"{len(x)} rows instead of {math.prod(shape)}")
        if picked:
            wave.cache.pick(*(t.to(self.stage.device) for t in picked))
        x = wave.cache.forward(self._embedded(x), head.step)
        wave.shape, wave.step = shape, head.step + 1
        if engine.logits is None:
            return StageMessage(message.stage + 1, head, (sendable(x), uniform, *picked))
        return self._draw(head, engine.logits(x), uniform)

    def _embedded(self, x: Tensor) -> Tensor:
        """Input of the layers: hidden states, at the first stage of token ids."""
        x = x.to(self.stage.device)
        return self.stage.hidden(x) if self.stage.span.is_first else x.to(self.stage.dtype)

    def _draw(self, head: Prefill | Step, logits: Tensor, uniform: Tensor) -> StageMessage:
        """The next tokens [W] for the leader, drawn from `logits` [W, V]."""
        wave = self._waves[head.wave]
        token, logprob = sample(logits, uniform.to(logits.device), wave.sampling)
        return StageMessage(LEADER, Tokens(head.turn, head.wave, wave.step), (token, sendable(logprob)))


@torch.inference_mode()
def is_native_exact(stage: Stage, rollouts: RolloutsConfig) -> bool:
    """Whether the native engine may be used, and gives the numbers that the stage's own layers give."""
    backbone, config = stage.base.get_decoder(), stage.base.config
    if rollouts.engine == "transformers" or config.model_type not in SUPPORTED:
        return False
    if is_windowed(config, rollouts.max_prompt_tokens + rollouts.max_new_tokens):
        return False
    x = torch.randn(1, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    x = x.to(stage.device, stage.dtype)
    native, own = _decoded(Slice(backbone, "own"), x), _decoded(ModelSlice(backbone), x)
    if stage.dtype == torch.float32:
        return all(
            bool((a - b).abs().max() <= 1e-3 * max(1.0, float(b.abs().max()))) for a, b in zip(native, own, strict=True)
        )
    with random_rounding(backbone, stage.dtype):
        moved = _decoded(ModelSlice(backbone), x)
    far = [allowed(_apart(c, b), stage.dtype, FACTOR) for b, c in zip(own, moved, strict=True)]
    return all(_apart(a, b) <= most for a, b, most in zip(native, own, far, strict=True))


def _decoded(layers: Slice | ModelSlice, x: Tensor) -> list[Tensor]:
    """What layers give for a prompt [1, T, hidden], and for two of its tokens after it."""
    cache = layers.cache([x.shape[1]], 2, 2)
    return [cache.prefill(x), cache.forward(x[:, :2].flatten(0, 1), 0)]


def _apart(found: Tensor, own: Tensor) -> float:
    """Length of the difference of hidden states, as a part of their own length."""
    return float((found.float() - own.float()).norm() / own.float().norm())
