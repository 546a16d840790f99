"""The native decode engine: many samples of a few prompts from a Llama-like decoder.

    prefill each prompt once -> [ sample -> drop finished rows -> one token through all layers ] x max_new_tokens

What makes it faster than a general `generate`:
- the G samples of a prompt share its keys and values: attention is one product over the shared prompt (a matrix
  with G rows) and one over each sample's own tokens; the prompt is never repeated;
- q, k, v and gate, up are one matrix each, laid out for products with few rows (`products`);
- one uniform number a token (`sampling`), no logits processors, no per-step bookkeeping in Python objects;
- rows that finished leave the batch, and so do prompts with no row left.

Rows stand in a grid [P prompts, G samples]; caches are [P, K heads, G, T, D]. The layers may be spread over several
processes: each holds the `Cache` of its own `Slice`, hidden states go from one to the next, and the first one has the
`Rows`. Left out: sliding windows shorter than the sequence, mixture of experts, encoders; `probes` compares this
engine with the model itself and falls back to `engines.transformers` when they differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from swarm_node.policy.engines.base import BatchEngine, Cancelled, Completion, sample
from swarm_node.policy.engines.products import Layout, Linear, Name, joined, layout_of
from swarm_node.types import Sampling

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
COMPACT_BELOW = 0.8  # move the surviving rows together when the grid shrinks to this share of its cells


@dataclass(frozen=True)
class _Layer:
    """The functions of one decoder layer, on [R, hidden] or [P, T, hidden]."""

    norm1: Linear
    qkv: Linear
    q_norm: Linear | None
    k_norm: Linear | None
    out: Linear
    norm2: Linear
    gate_up: Linear
    down: Linear


class LayerCache(Protocol):
    """Keys and values of some layers for the rows still being decoded: P prompts, G samples each. Call it under
    `torch.inference_mode()`: first `prefill`, then `forward` step by step."""

    def prefill(self, x: Tensor) -> Tensor:
        """Run the prompts [P, T, hidden] through the layers, T the longest. Ignore output behind a prompt's end."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        """Run completion token number `step` of each row, [P*G, hidden], through the layers."""

    def pick(self, alive: Tensor, column: Tensor) -> None:
        """Keep the prompts `alive` [P'], and of each its samples `column` [P', G']."""


class Slice:
    """A view of consecutive decoder layers, good for one round (it may hold copies of their weights).

    `backbone` is a Hugging Face one of a `SUPPORTED` type; of it only `config`, `layers` and `rotary_emb` are used.
    """

    def __init__(self, backbone: nn.Module, layout: Name) -> None:
        config = backbone.config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.act = backbone.layers[0].mlp.act_fn
        self.rotary = backbone.rotary_emb
        self.layers = [_layer(layer, layout) for layer in backbone.layers]

    def cache(self, lengths: list[int], n: int, limit: int) -> Cache:
        """A cache for `n` completions of at most `limit` tokens after each of the prompts with these lengths."""
        return Cache(self, lengths, n, limit)


class Decoder:
    """A view of a Hugging Face decoder's own weights, good for one round (it may hold copies of them)."""

    def __init__(self, model: nn.Module, layout: Name) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.embed = base.model.embed_tokens
        self.slice = Slice(base.model, layout)
        self.head = head_of(base.model.norm, base.lm_head, layout)

    def prefill(self, cache: Cache, prompts: list[list[int]]) -> Tensor:
        """Run the prompts; logits after each [P, V]."""
        x = cache.prefill(self.embed(padded(prompts).to(self.embed.weight.device)))
        return self.head(last_of(x, [len(p) for p in prompts]))

    def forward(self, cache: Cache, token: Tensor, step: int) -> Tensor:
        """Append `token` [P*G] as completion token number `step`; logits for the next one [P*G, V]."""
        return self.head(cache.forward(self.embed(token), step))


class NativeEngine(BatchEngine):
    """Decodes with a `Decoder`, which is made anew for each round."""

    def __init__(self, model: nn.Module, eos: list[int], pad_id: int, layout: Layout | None = None) -> None:
        """`layout` of the weights in its decoders; None = that of `layout_of`."""
        super().__init__()
        self._model, self._eos = model, torch.tensor(eos)
        self.layout = layout or layout_of(model)
        self._decoder: Decoder | None = None

    @property
    def decoder(self) -> Decoder:
        """The decoder of this round."""
        self._decoder = self._decoder or Decoder(self._model, self.layout.name)
        return self._decoder

    @torch.inference_mode()
    def decode(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, cancelled: Cancelled
    ) -> list[Completion]:
        decoder = self.decoder
        device, limit = decoder.embed.weight.device, sampling.max_new_tokens
        uniform, eos = uniform.to(device), self._eos.to(device)
        rows = Rows(len(prompts), n, limit, device)
        cache = decoder.slice.cache([len(p) for p in prompts], n, limit)
        logits = decoder.prefill(cache, prompts).repeat_interleave(n, 0)
        for step in range(limit):
            if (gone := cancelled()) and not rows.drop(gone, step):
                break
            token, logprob = sample(logits, uniform[rows.origin.flatten(), step], sampling)
            if rows.record(step, token, logprob, eos):
                if not rows.live.any():
                    break
                g = rows.live.shape[1]
                kept = rows.compact()
                if kept is not None:
                    cache.pick(*kept)
                    token = picked(token, g, *kept)
            if step < limit - 1:
                logits = decoder.forward(cache, token, step)
        return rows.samples()

    def release(self) -> None:
        self._decoder = None

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        super().update(weights, version)
        self._decoder = None


class Rows:
    """Sampled tokens, and the rows of the grid [P, G] that are still being decoded. It knows no model."""

    def __init__(self, prompts: int, n: int, limit: int, device: torch.device) -> None:
        rows, self._n = prompts * n, n
        self.origin = torch.arange(rows, device=device).view(prompts, n)
        """[P, G] of the present grid: number of the completion, counted over all prompts."""
        self.live = torch.ones(prompts, n, dtype=torch.bool, device=device)
        """[P, G] whether the row is still being decoded."""
        self._full = True
        self._tokens = torch.zeros(rows, limit, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(rows, limit, device=device)
        self._lengths = torch.full((rows,), limit, device=device)
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)

    def record(self, step: int, token: Tensor, logprob: Tensor, eos: Tensor) -> bool:
        """Record completion token number `step` of each row [P*G] and its log-probability, and drop the rows that end
        with it. Gives whether any row ended."""
        origin, live = self.origin.flatten(), self.live.flatten()
        ended = live & torch.isin(token, eos)
        if self._full:
            self._tokens[origin, step], self._logprobs[origin, step] = token, logprob
        else:
            self._tokens[origin[live], step], self._logprobs[origin[live], step] = token[live], logprob[live]
        if not ended.any():
            return False
        self._lengths[origin[ended]], self._finished[origin[ended]] = step + 1, True
        self.live &= ~ended.view_as(self.live)
        self._full = False
        return True

    def drop(self, prompts: Collection[int], step: int) -> bool:
        """Leave the completions of these prompts as they are before token number `step`; whether any other is live."""
        gone = torch.isin(self.origin // self._n, torch.tensor([*prompts], device=self.origin.device)) & self.live
        self._lengths[self.origin[gone]] = step
        self.live &= ~gone
        self._full = False
        return bool(self.live.any())

    def compact(self) -> tuple[Tensor, Tensor] | None:
        """Shrink the grid to the prompts with live rows and the widest of them: what `LayerCache.pick` takes, the
        prompts kept [P'] and the samples kept of each [P', G']; `None` = nothing changes. Some row must be live."""
        kept = compaction(self.live, COMPACT_BELOW)
        if kept is not None:
            alive, column = kept
            self.origin = self.origin[alive].gather(1, column)
            self.live = self.live[alive].gather(1, column)
            self._full = bool(self.live.all())
        return kept

    def samples(self) -> list[Completion]:
        """All completions in order."""
        lengths = self._lengths.tolist()
        longest = max(lengths, default=0)
        tokens, logprobs = self._tokens[:, :longest].tolist(), self._logprobs[:, :longest].tolist()
        return [
            (tokens[i][:length], logprobs[i][:length], done)
            for i, (length, done) in enumerate(zip(lengths, self._finished.tolist(), strict=True))
        ]


def compaction(live: Tensor, share: float) -> tuple[Tensor, Tensor] | None:
    """How to shrink a grid with these `live` cells [P, G]: the prompts kept [P'] and the samples kept of each [P', G'];
    `None` if more than `share` of the cells would remain. Some cell must be live."""
    alive = live.any(1).nonzero()[:, 0]
    width = int(live.sum(1).max())
    if len(alive) * width > share * live.numel():
        return None
    return alive, live[alive].to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]  # live ones first


class Cache:
    """The `LayerCache` of a `Slice`: the samples of a prompt share its keys and values."""

    def __init__(self, layers: Slice, lengths: list[int], n: int, limit: int, room: int | None = None) -> None:
        """`room` is the number of tokens of a completion that there is memory for at first, `limit` unless given."""
        self.slice, self.n, self.limit, self.room = layers, n, limit, room or limit
        self.lengths = torch.tensor(lengths)
        self.keys: list[Tensor] = []  # [P, K, G, T, D] of the completions, a tensor a layer
        self.values: list[Tensor] = []
        self.prompt_keys: list[Tensor] = []  # [P, K, D, T]
        self.prompt_values: list[Tensor] = []  # [P, K, T, D]

    def prefill(self, x: Tensor) -> Tensor:
        s, (p, t), device = self.slice, x.shape[:2], x.device
        self.lengths = self.lengths.to(device)
        shape = (p, s.kv_heads, self.n, self.room, s.head_dim)
        self.keys = [torch.empty(shape, device=device, dtype=x.dtype) for _ in s.layers]
        self.values = [torch.empty(shape, device=device, dtype=x.dtype) for _ in s.layers]
        hidden = torch.arange(t, device=device) >= self.lengths[:, None]
        self.prompt_mask = torch.zeros(hidden.shape, device=device, dtype=x.dtype)
        self.prompt_mask = self.prompt_mask.masked_fill(hidden, float("-inf"))[:, None, None]
        cos, sin = s.rotary(x, torch.arange(t + self.limit, device=device)[None])
        self.cos, self.sin = _signed(cos[0], sin[0])
        cos, sin = self.cos[:t], self.sin[:t]
        for layer in s.layers:
            q, k, v = _heads(s, layer, layer.norm1(x), cos[:, None], sin[:, None])
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads)
            x = x + layer.out(a.transpose(1, 2).reshape(p, t, -1))
            x = x + _mlp(s, layer, layer.norm2(x))
            self.prompt_keys.append(k.transpose(-1, -2).contiguous())
            self.prompt_values.append(v.contiguous())
        return x

    def forward(self, x: Tensor, step: int) -> Tensor:
        s = self.slice
        p, g = len(self.lengths), len(x) // len(self.lengths)
        rep = s.heads // s.kv_heads
        position = (self.lengths + step).repeat_interleave(g)
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        for i, layer in enumerate(s.layers):
            q, k, v = _heads(s, layer, layer.norm1(x), cos, sin)
            q = q.view(p, g, s.kv_heads, rep, -1).permute(0, 2, 1, 3, 4)  # [P, K, G, rep, D]
            k, v = (a.view(p, g, s.kv_heads, -1).transpose(1, 2) for a in (k, v))  # [P, K, G, D]
            a = self.attend(i, q, k, v, step)
            x = x + layer.out(a.permute(0, 2, 1, 3, 4).reshape(p * g, -1))
            x = x + _mlp(s, layer, layer.norm2(x))
        return x

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, step: int) -> Tensor:
        """Attention [P, K, G, rep, D] of layer `i` to prompt and completion, which `k` and `v` are appended to."""
        (p, heads, g, rep, _), t = q.shape, self.prompt_mask.shape[-1]
        keys, values = self.keys[i], self.values[i]
        keys[:, :, :, step], values[:, :, :, step] = k, v
        q = q * self.slice.head_dim**-0.5
        shared = q.reshape(p, heads, g * rep, -1) @ self.prompt_keys[i] + self.prompt_mask
        own = q @ keys[:, :, :, : step + 1].transpose(-1, -2)
        score = torch.cat([shared, own.reshape(p, heads, g * rep, step + 1)], -1)
        score = score.softmax(-1, dtype=torch.float32).to(q.dtype)
        own = score[..., t:].view(p, heads, g, rep, step + 1) @ values[:, :, :, : step + 1]
        return (score[..., :t] @ self.prompt_values[i]).view(p, heads, g, rep, -1) + own

    def pick(self, alive: Tensor, column: Tensor) -> None:
        for i in range(len(self.keys)):  # one after the other: all of them twice would take as much again
            self.keys[i] = _pick(self.keys[i], alive, column)
            self.values[i] = _pick(self.values[i], alive, column)
        self.prompt_keys = [x[alive] for x in self.prompt_keys]
        self.prompt_values = [x[alive] for x in self.prompt_values]
        self.lengths, self.prompt_mask = self.lengths[alive], self.prompt_mask[alive]


def padded(prompts: list[list[int]]) -> Tensor:
    """Token ids [P, T], prompts at the left, as `LayerCache.prefill` expects its rows."""
    return pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)


def last_of(x: Tensor, lengths: list[int]) -> Tensor:
    """Output of a prefill [P, T, hidden] at the last token of each prompt [P, hidden]."""
    return x[torch.arange(len(x), device=x.device), torch.tensor(lengths, device=x.device) - 1]


def picked(rows: Tensor, width: int, alive: Tensor, column: Tensor) -> Tensor:
    """The part of `rows` [P*G, ...], G = `width`, that a compaction to (alive, column) keeps [P'*G', ...]."""
    return rows.view(-1, width, *rows.shape[1:])[alive[:, None], column].flatten(0, 1)


def head_of(norm: nn.Module, head: nn.Module, layout: Name) -> Linear:
    """Final norm and head of a `SUPPORTED` model as one function, hidden states [R, hidden] to logits [R, V]."""
    normed, logits = _rms(norm), joined([head], layout)
    return lambda x: logits(normed(x))


def _pick(cache: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Cells (rows, columns) [P', G'] of a cache [P, K, G, T, D]."""
    heads = torch.arange(cache.shape[1], device=cache.device)
    return cache[rows[:, None, None], heads[None, :, None], columns[:, None]]


def _signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate_half` as a roll by half the head with the sign in the sine: sin -> [-sin, sin]."""
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


def _heads(d: Slice, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [..., heads, D], rotated keys and values [..., kv_heads, D]."""
    qkv = layer.qkv(x).view(*x.shape[:-1], d.heads + 2 * d.kv_heads, d.head_dim)
    qk, v = qkv[..., : d.heads + d.kv_heads, :], qkv[..., d.heads + d.kv_heads :, :]
    if layer.q_norm is not None and layer.k_norm is not None:
        qk = torch.cat([layer.q_norm(qk[..., : d.heads, :]), layer.k_norm(qk[..., d.heads :, :])], -2)
    qk = torch.addcmul(qk * cos, qk.roll(d.head_dim // 2, -1), sin)
    return qk[..., : d.heads, :], qk[..., d.heads :, :], v


def _mlp(d: Slice, layer: _Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x).chunk(2, -1)
    return layer.down(d.act(gate) * up)


def _layer(layer: nn.Module, layout: Name) -> _Layer:
    attention, mlp, dtype = layer.self_attn, layer.mlp, layer.input_layernorm.weight.dtype
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        norm1=_rms(layer.input_layernorm),
        qkv=joined([attention.q_proj, attention.k_proj, attention.v_proj], layout, dtype),
        q_norm=None if q_norm is None else _rms(q_norm),
        k_norm=None if k_norm is None else _rms(k_norm),
        out=joined([attention.o_proj], layout, dtype),
        norm2=_rms(layer.post_attention_layernorm),
        gate_up=joined([mlp.gate_proj, mlp.up_proj], layout, dtype),
        down=joined([mlp.down_proj], layout, dtype),
    )


def _rms(norm: nn.Module) -> Linear:
    weight, eps = norm.weight, norm.variance_epsilon
    return lambda x: F.rms_norm(x, weight.shape, weight, eps)
