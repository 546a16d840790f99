"""The fallback decode engine: transformers' own `generate`, for architectures the native one does not serve.

Temperature, nucleus cut and the draw itself happen in one logits processor of ours, so that both engines make the
same samples from the same uniform numbers and record the same log-probabilities.

Where only some of the layers are held, there is no `generate`: `ModelSlice` runs the backbone's own forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

from swarm_node.policy.engines.base import BatchEngine, Cancelled, Completion, sample
from swarm_node.types import Sampling


class _Draw(LogitsProcessor):
    """Draws the token and leaves `generate` no choice: every other score becomes -inf."""

    def __init__(self, uniform: Tensor, sampling: Sampling) -> None:
        self.uniform, self.sampling = uniform, sampling
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token, logprob = sample(scores, self.uniform[:, len(self.logprobs)], self.sampling)
        self.logprobs.append(logprob)
        return scores.fill_(float("-inf")).scatter_(1, token[:, None], 0.0)  # `generate` keeps no other use of them


class _Stop(StoppingCriteria):
    """Ends the rows of cancelled prompts, and keeps how many tokens each of them has."""

    def __init__(self, n: int, cancelled: Cancelled) -> None:
        self.n, self.cancelled = n, cancelled
        self.lengths: dict[int, int] = {}
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        self._step += 1
        for prompt in self.cancelled():
            for row in range(prompt * self.n, (prompt + 1) * self.n):
                self.lengths.setdefault(row, self._step)
        stopped = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        stopped[list(self.lengths)] = True
        return stopped


class _Reserved(DynamicLayer):
    """Keys and values of a layer in memory that is taken once, for rows of at most `room` tokens.

    A cache that is copied to append a token takes the time of the copies, and leaves gaps in the C library's heap that
    no longer tensor fits into.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._taken: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if self._taken is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            shapes = ((*x.shape[:2], self._room, x.shape[-1]) for x in (key_states, value_states))
            keys, values = (key_states.new_empty(shape) for shape in shapes)
            self._taken = keys, values
        keys, values = self._taken
        keys[:, :, start:stop], values[:, :, start:stop] = key_states, value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values


def _reserved(model: PreTrainedModel, room: int) -> DynamicCache | None:
    """A cache for rows of at most `room` tokens, in memory that is taken once; None for a model that keeps anything but
    all keys and values of all layers, whose cache `generate` makes."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if "past_key_values" not in signature(base.forward).parameters or not base._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [_Reserved(room) for _ in cache.layers]
    return cache


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Switch off the model's own generation config: penalties and banned tokens would bend the distribution."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    own = base.generation_config
    base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = own


class TransformersEngine(BatchEngine):
    """Decodes with the model's own `generate`."""

    def __init__(
        self, model: PreTrainedModel, eos: list[int], pad_id: int, padded: bool = True, cached: bool = True
    ) -> None:
        """Unless `padded`, prompts of different lengths are decoded one length after the other: a model that counts
        padding, as a recurrent one does, gives other numbers. Unless `cached`, all of a row is computed each step."""
        super().__init__()
        self._model, self._eos, self._pad_id = model, eos, pad_id
        self.padded, self.cached = padded, cached

    @torch.no_grad()
    def decode(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, cancelled: Cancelled
    ) -> list[Completion]:
        if self.padded:
            return self._decode(prompts, n, sampling, uniform, cancelled)
        completions: list[Completion] = [([], [], False)] * (len(prompts) * n)
        for length in {len(prompt): None for prompt in prompts}:
            places = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            rows = [i * n + j for i in places for j in range(n)]
            part = self._decode([prompts[i] for i in places], n, sampling, uniform[rows], _within(places, cancelled))
            for row, completion in zip(rows, part, strict=True):
                completions[row] = completion
        return completions

    def _decode(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, cancelled: Cancelled
    ) -> list[Completion]:
        device = next(self._model.parameters()).device
        rows = [torch.tensor(prompt) for prompt in prompts for _ in range(n)]
        ids = pad_sequence(rows, batch_first=True, padding_value=self._pad_id, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        draw, stop = _Draw(uniform.to(device), sampling), _Stop(n, cancelled)
        options: dict[str, Any] = {"use_cache": False}
        if self.cached:
            cache = _reserved(self._model, ids.shape[1] + sampling.max_new_tokens)
            options = {} if cache is None else {"past_key_values": cache}
        with _plain_generation(self._model):
            out = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([stop]),
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,
                eos_token_id=self._eos,
                pad_token_id=self._pad_id,
                **options,
            )
        logprobs = torch.stack(draw.logprobs, 1).tolist()
        samples = []
        for row, tokens in enumerate(out[:, ids.shape[1] :].tolist()):
            tokens = tokens[: stop.lengths.get(row)]
            end = next((i + 1 for i, token in enumerate(tokens) if token in self._eos), None)
            length = len(tokens) if end is None else end
            samples.append((tokens[:length], logprobs[row][:length], end is not None))
        return samples


def _within(places: list[int], cancelled: Cancelled) -> Cancelled:
    """`cancelled` for the prompts at these `places`, which are counted anew."""
    return lambda: [places.index(i) for i in cancelled() if i in places]


class ModelSlice:
    """A `native.Slice` for architectures that the native engine does not serve: a Hugging Face backbone of these layers
    alone, with `nn.Identity` for its final norm."""

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone = backbone

    def cache(self, lengths: list[int], n: int, limit: int) -> ModelCache:
        """A cache for `n` completions of at most `limit` tokens after each of the prompts with these lengths."""
        return ModelCache(self.backbone, lengths, n)


class ModelCache:
    """The `native.LayerCache` of a `ModelSlice`: every sample has its prompt's keys and values, padded at the left."""

    def __init__(self, backbone: nn.Module, lengths: list[int], n: int) -> None:
        self.backbone, self.n = backbone, n
        self.lengths = torch.tensor(lengths)
        self.cache = DynamicCache(config=backbone.config)

    def prefill(self, x: Tensor) -> Tensor:
        self.lengths = self.lengths.to(x.device)
        t = x.shape[1]
        column, shift = torch.arange(t, device=x.device)[None], t - self.lengths[:, None]
        position = (column - shift).clamp(min=0)
        mask = (column >= shift).long()
        x = self._run(_columns(x, position), mask, position)
        self.cache.batch_repeat_interleave(self.n)
        self.mask = mask.repeat_interleave(self.n, 0)
        x = _columns(x, (column + shift).clamp(max=t - 1))
        return x.masked_fill((column >= self.lengths[:, None])[..., None], 0.0)

    def forward(self, x: Tensor, step: int) -> Tensor:
        position = (self.lengths + step).repeat_interleave(len(x) // len(self.lengths))
        mask = torch.cat([self.mask, self.mask.new_ones(len(x), step + 1)], 1)
        return self._run(x[:, None], mask, position[:, None])[:, 0]

    def pick(self, alive: Tensor, column: Tensor) -> None:
        kept = (alive[:, None] * (len(self.mask) // len(self.lengths)) + column).flatten()
        self.cache.batch_select_indices(kept)
        self.mask, self.lengths = self.mask[kept], self.lengths[alive]

    def _run(self, x: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        return self.backbone(
            inputs_embeds=x, attention_mask=mask, position_ids=position, past_key_values=self.cache, use_cache=True
        ).last_hidden_state


def _columns(x: Tensor, index: Tensor) -> Tensor:
    """Columns `index` [P, T] of each row of x [P, T, hidden]."""
    return x.gather(1, index[..., None].expand_as(x))
