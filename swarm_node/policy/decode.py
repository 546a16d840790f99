"""The native decode engine: many samples of a few prompts from a Llama-like decoder.

    prefill each prompt once -> [ sample -> drop finished rows -> one token through all layers ] x max_new_tokens

What makes it faster than a general `generate`:
- the G samples of a prompt share its keys and values: attention is one product over the shared prompt (a matrix
  with G rows) and one over each sample's own tokens; the prompt is never repeated;
- q, k, v and gate, up are one matrix each, laid out for products with few rows (a copy per call, while the model
  is small);
- one uniform number a token (`sampling`), no logits processors, no per-step bookkeeping in Python objects;
- rows that finished leave the batch, and so do prompts with no row left.

Rows stand in a grid [P prompts, G samples]; caches are [P, K heads, G, T, D]. Left out: sliding windows shorter
than the sequence, mixture of experts, encoders; `loading` compares this engine with the model itself and falls back
to `decode_transformers` when they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm_node.policy.sampling import sample
from swarm_node.types import Sampling

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
FUSED_COPY_BYTES = 512 * 2**20
"""Fuse (that is copy) weights per call only while the copy is at most this big."""
COMPACT_BELOW = 0.8
"""Move the surviving rows together when the grid shrinks to this share of its cells."""

Linear = Callable[[Tensor], Tensor]


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


class Decoder:
    """A view of a Hugging Face decoder's own weights, good for one round (it may hold fused copies of them)."""

    def __init__(self, model: nn.Module) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = base.config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.act = base.model.layers[0].mlp.act_fn
        self.rotary = base.model.rotary_emb
        self.embed = base.model.embed_tokens
        self.norm = _rms(base.model.norm)
        fuse = sum(p.numel() * p.element_size() for p in base.parameters()) <= FUSED_COPY_BYTES
        self.head = _joined([base.lm_head], fuse)
        self.layers = [_layer(layer, fuse) for layer in base.model.layers]

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, eos: Tensor
    ) -> list[tuple[list[int], list[float], bool]]:
        """Sample `n` completions of each prompt, in order: (token ids, log-probs, finished).

        `uniform` [len(prompts) * n, max_new_tokens] decides the samples; `eos` [E] holds the ids that end one.
        """
        device = self.embed.weight.device
        rows, limit = len(prompts) * n, sampling.max_new_tokens
        uniform, eos = uniform.to(device), eos.to(device)
        tokens = torch.zeros(rows, limit, dtype=torch.long, device=device)
        logprobs = torch.zeros(rows, limit, device=device)
        lengths = torch.full((rows,), limit, device=device)
        finished = torch.zeros(rows, dtype=torch.bool, device=device)

        grid = Grid(self, prompts, n, limit)
        logits = grid.prefill(prompts).repeat_interleave(n, 0)
        for step in range(limit):
            origin = grid.origin.flatten()
            token, logprob = sample(logits, uniform[origin, step], sampling)
            live = grid.live.flatten()
            ended = live & torch.isin(token, eos)
            if grid.full:
                tokens[origin, step], logprobs[origin, step] = token, logprob
            else:
                tokens[origin[live], step], logprobs[origin[live], step] = token[live], logprob[live]
            if ended.any():
                lengths[origin[ended]], finished[origin[ended]] = step + 1, True
                grid.drop(ended)
                if not grid.live.any():
                    break
                kept = grid.compact()
                if kept is not None:
                    token = token[kept]
            if step < limit - 1:
                logits = grid.forward(token, step)
        out_tokens, out_logprobs = tokens.tolist(), logprobs.tolist()
        return [
            (out_tokens[i][:length], out_logprobs[i][:length], done)
            for i, (length, done) in enumerate(zip(lengths.tolist(), finished.tolist(), strict=True))
        ]


class Grid:
    """The rows still being decoded and their keys and values."""

    def __init__(self, decoder: Decoder, prompts: list[list[int]], n: int, limit: int) -> None:
        self.decoder = decoder
        weight = decoder.embed.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        shape = (len(prompts), decoder.kv_heads, n, limit, decoder.head_dim)
        self.keys = [torch.empty(shape, device=self.device, dtype=self.dtype) for _ in decoder.layers]
        self.values = [torch.empty(shape, device=self.device, dtype=self.dtype) for _ in decoder.layers]
        self.prompt_keys: list[Tensor] = []
        self.prompt_values: list[Tensor] = []
        self.origin = torch.arange(len(prompts) * n, device=self.device).view(len(prompts), n)
        self.live = torch.ones(len(prompts), n, dtype=torch.bool, device=self.device)
        self.full = True
        longest = max(len(p) for p in prompts)
        hidden = torch.arange(longest, device=self.device) >= self.lengths[:, None]
        self.prompt_mask = torch.zeros(hidden.shape, device=self.device, dtype=self.dtype)
        self.prompt_mask = self.prompt_mask.masked_fill(hidden, float("-inf"))[:, None, None]
        cos, sin = decoder.rotary(weight, torch.arange(longest + limit, device=self.device)[None])
        self.cos, self.sin = _signed(cos[0], sin[0])

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """Run the prompts, keep their keys [P, K, D, T] and values [P, K, T, D]; logits after each prompt [P, V]."""
        d, p, t = self.decoder, len(prompts), self.prompt_mask.shape[-1]
        ids = torch.zeros(p, t, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        x = d.embed(ids.to(self.device))
        cos, sin = self.cos[:t], self.sin[:t]
        for layer in d.layers:
            q, k, v = _heads(d, layer, layer.norm1(x), cos[:, None], sin[:, None])
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=d.heads != d.kv_heads)
            x = x + layer.out(a.transpose(1, 2).reshape(p, t, -1))
            x = x + _mlp(d, layer, layer.norm2(x))
            self.prompt_keys.append(k.transpose(-1, -2).contiguous())
            self.prompt_values.append(v.contiguous())
        last = x[torch.arange(p, device=self.device), self.lengths - 1]
        return d.head(d.norm(last))

    def forward(self, token: Tensor, step: int) -> Tensor:
        """Append `token` [P*G] as completion token number `step`; logits for the next one [P*G, V]."""
        d = self.decoder
        p, g = self.origin.shape
        rep, scale, t = d.heads // d.kv_heads, d.head_dim**-0.5, self.prompt_mask.shape[-1]
        position = (self.lengths + step).repeat_interleave(g)
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        x = d.embed(token)
        for i, layer in enumerate(d.layers):
            q, k, v = _heads(d, layer, layer.norm1(x), cos, sin)
            keys, values = self.keys[i], self.values[i]
            keys[:, :, :, step] = k.view(p, g, d.kv_heads, -1).transpose(1, 2)
            values[:, :, :, step] = v.view(p, g, d.kv_heads, -1).transpose(1, 2)
            q = (q * scale).view(p, g, d.kv_heads, rep, -1).permute(0, 2, 1, 3, 4)  # [P, K, G, rep, D]
            shared = q.reshape(p, d.kv_heads, g * rep, -1) @ self.prompt_keys[i] + self.prompt_mask
            own = q @ keys[:, :, :, : step + 1].transpose(-1, -2)
            score = torch.cat([shared, own.reshape(p, d.kv_heads, g * rep, step + 1)], -1)
            score = score.softmax(-1, dtype=torch.float32).to(x.dtype)
            a = score[..., :t] @ self.prompt_values[i]
            own = score[..., t:].view(p, d.kv_heads, g, rep, step + 1) @ values[:, :, :, : step + 1]
            a = a.view(p, d.kv_heads, g, rep, -1) + own
            x = x + layer.out(a.permute(0, 2, 1, 3, 4).reshape(p * g, -1))
            x = x + _mlp(d, layer, layer.norm2(x))
        return d.head(d.norm(x))

    def drop(self, ended: Tensor) -> None:
        """Mark rows [P*G] as finished."""
        self.live &= ~ended.view_as(self.live)
        self.full = False

    def compact(self) -> Tensor | None:
        """Shrink the grid to the prompts with live rows and the widest of them; flat indices kept, `None` = none."""
        p, g = self.live.shape
        alive = self.live.any(1).nonzero()[:, 0]
        width = int(self.live.sum(1).max())
        if len(alive) * width > COMPACT_BELOW * p * g:
            return None
        live = self.live[alive]
        column = live.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]  # live ones first
        self.keys = [_pick(x, alive, column) for x in self.keys]
        self.values = [_pick(x, alive, column) for x in self.values]
        self.prompt_keys = [x[alive] for x in self.prompt_keys]
        self.prompt_values = [x[alive] for x in self.prompt_values]
        self.lengths, self.prompt_mask = self.lengths[alive], self.prompt_mask[alive]
        self.origin = self.origin[alive].gather(1, column)
        self.live = live.gather(1, column)
        self.full = bool(self.live.all())
        return (alive[:, None] * g + column).flatten()


def _pick(cache: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Cells (rows, columns) [P', G'] of a cache [P, K, G, T, D]."""
    heads = torch.arange(cache.shape[1], device=cache.device)
    return cache[rows[:, None, None], heads[None, :, None], columns[:, None]]


def _signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate_half` as a roll by half the head with the sign in the sine: sin -> [-sin, sin]."""
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


def _heads(d: Decoder, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [..., heads, D], rotated keys and values [..., kv_heads, D]."""
    qkv = layer.qkv(x).view(*x.shape[:-1], d.heads + 2 * d.kv_heads, d.head_dim)
    qk, v = qkv[..., : d.heads + d.kv_heads, :], qkv[..., d.heads + d.kv_heads :, :]
    if layer.q_norm is not None and layer.k_norm is not None:
        qk = torch.cat([layer.q_norm(qk[..., : d.heads, :]), layer.k_norm(qk[..., d.heads :, :])], -2)
    qk = torch.addcmul(qk * cos, qk.roll(d.head_dim // 2, -1), sin)
    return qk[..., : d.heads, :], qk[..., d.heads :, :], v


def _mlp(d: Decoder, layer: _Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x).chunk(2, -1)
    return layer.down(d.act(gate) * up)


def _layer(layer: nn.Module, fuse: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        norm1=_rms(layer.input_layernorm),
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj], fuse),
        q_norm=None if q_norm is None else _rms(q_norm),
        k_norm=None if k_norm is None else _rms(k_norm),
        out=_joined([attention.o_proj], fuse),
        norm2=_rms(layer.post_attention_layernorm),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj], fuse),
        down=_joined([mlp.down_proj], fuse),
    )


def _rms(norm: nn.Module) -> Linear:
    weight, eps = norm.weight, norm.variance_epsilon
    return lambda x: F.rms_norm(x, weight.shape, weight, eps)


def _joined(modules: list[nn.Module], fuse: bool) -> Linear:
    """One function for several linear modules side by side: a fused copy with adapters merged, or the modules."""
    if not fuse:
        return modules[0] if len(modules) == 1 else lambda x: torch.cat([m(x) for m in modules], -1)
    with torch.no_grad():
        weights = [_merged(m) for m in modules]
        weight = torch.cat([w.t() for w in weights], 1).contiguous()  # [in, out]: 15 % faster at 64 rows
        biases = [getattr(m, "base_layer", m).bias for m in modules]
        if all(b is None for b in biases):
            return lambda x: x @ weight
        bias = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for b, w in zip(biases, weights, strict=True)])
    return lambda x: x @ weight + bias


def _merged(module: nn.Module) -> Tensor:
    """Weight of a linear module with its active LoRA adapter added."""
    if not hasattr(module, "base_layer"):
        return module.weight
    weight = module.base_layer.weight
    if module.disable_adapters:
        return weight
    for name in module.active_adapters:
        if name in module.lora_A:
            weight = weight + module.get_delta_weight(name).to(weight.dtype)
    return weight
