"""Log-probabilities of given completion tokens under a model, without ever holding all logits.

    rows [R, T] -> backbone -> hidden [R, T, H] -> hidden[row, col] [N, H] -> head, chunk after chunk -> [N]

    logprob_n = z_n[target_n] - logsumexp(z_n),   z_n = head(hidden_n) / temperature

The N completion tokens lie flat, whatever the rows look like, so neither padding nor prompt tokens reach
the head. When the logits of all N would exceed `LOGITS_BYTES`, each chunk computes its logits twice, once
forward and once backward, and none are kept: 8 x 512 tokens at a vocabulary of 152k take 64 MB at a time
instead of 2.5 GB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from swarm_node.policy.oom import free_on_gpu

LOGITS_BYTES = 64 * 2**20  # most bytes of float32 logits in one chunk; a pass holds at most two such buffers
LOGITS_BYTES_ON_GPU = 512 * 2**20  # likewise: fewer chunks read the head's weights less often
MASK_MULTIPLES = {"cuda": 8}
"""Rows of a mask begin a multiple of so many numbers apart on these devices. Where they do not, attention on a GPU
copies the mask in each layer, and keeps all copies for the backward pass."""


@dataclass(frozen=True)
class TokenBatch:
    """Rows of input tokens and where in them the N completion tokens are predicted."""

    input_ids: Tensor  # [R, T] long
    position_ids: Tensor | None  # [R, T] long when packed: positions restart after the prompt. `None` = 0..T-1.
    attention_mask: Tensor | None
    """[R, 1, T, T] bool when packed, True = may be seen. `None` = causal, which hides right padding too."""
    row: Tensor  # [N] long: row of each completion token ...
    col: Tensor  # [N] long: ... and the position in it whose hidden state predicts the token.
    target: Tensor  # [N] long: the token
    sequence: Tensor  # [N] long: which rollout the token belongs to
    index: Tensor  # [N] long: place of the token when all rollouts of the step are laid end to end


def token_logprobs(
    model: nn.Module, batch: TokenBatch, temperature: float, entropy: bool = False, full_logits: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [N] of `batch.target`, and on request entropies [N] (detached); both float32.

    `model` is a Hugging Face causal language model or a PEFT wrapper of one. `full_logits` takes the
    model's own logits, for architectures that alter them after the head (soft-capping, scaling); [R, T, V]
    exists then.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    inputs = dict(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=additive(batch.attention_mask, base.get_input_embeddings().weight.dtype),
        use_cache=False,
    )
    if full_logits:
        logits = base(**inputs).logits[batch.row, batch.col]
        return _of_logits(logits, batch.target, temperature, entropy)

    hidden = base.get_decoder()(**inputs).last_hidden_state[batch.row, batch.col]
    return head_logprobs(base.get_output_embeddings(), hidden, batch.target, temperature, entropy)


def head_logprobs(
    head: nn.Module, hidden: Tensor, target: Tensor, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [N] of `target` and entropies [N] as above, of what goes into the head [N, H]."""
    chunk = max(1, logits_bytes(hidden.device) // (4 * head.weight.shape[0]))
    if len(hidden) <= chunk:
        return _of_logits(head(hidden), target, temperature, entropy)
    if type(head) is nn.Linear:
        return _ChunkedHead.apply(hidden, head.weight, head.bias, target, temperature, entropy, chunk)

    def of_hidden(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        return _of_logits(head(h), t, temperature, entropy)

    parts = [  # an adapter on the head, a quantised head: slower, but any module will do
        checkpoint(of_hidden, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), target.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def logits_bytes(device: torch.device) -> int:
    """Most bytes of float32 logits in one chunk on this device: on a GPU a sixteenth of its free memory, in bounds."""
    if device.type != "cuda":
        return LOGITS_BYTES
    return min(max(free_on_gpu(device) // 16, LOGITS_BYTES), LOGITS_BYTES_ON_GPU)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as one to add to attention scores: `eager` attention needs that, `sdpa` takes it."""
    if mask is None:
        return None
    *rows, t = mask.shape
    apart = t + -t % MASK_MULTIPLES.get(mask.device.type, 1)
    numbers = torch.zeros(*rows, apart, dtype=dtype, device=mask.device)[..., :t]
    return numbers.masked_fill_(~mask, torch.finfo(dtype).min)


def _of_logits(logits: Tensor, target: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `target` [N] and entropies [N] of the distributions with `logits` [N, V]."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, target[:, None])[:, 0]
    if not entropy:
        return chosen, None
    with torch.no_grad():
        return chosen, -torch.linalg.vecdot(logprobs.exp(), logprobs)


class _ChunkedHead(torch.autograd.Function):
    """`_of_logits` of a linear head, `chunk` tokens at a time.

    Only logsumexp [N] is kept. Backward, with upstream gradient g [N] and p = softmax(z):

        dL/dlogits_n = g_n (onehot(target_n) - p_n) / temperature

    Checkpointing each chunk gives the same numbers, but took 1.7 times as long and twice the memory at a
    vocabulary of 152k (it makes a weight gradient for each chunk and adds them up).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: float,
        entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, total, entropies = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            z = _logits(hidden[part], weight, bias, temperature)
            total[part] = z.logsumexp(-1)
            logprobs[part] = z.gather(1, target[part, None])[:, 0] - total[part]
            if entropy:  # H = logsumexp(z) - sum_v p_v z_v
                p = (z - total[part, None]).exp_()
                entropies[part] = total[part] - torch.linalg.vecdot(p, z)
        ctx.save_for_backward(hidden, weight, bias, target, total)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, total = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for i in range(0, len(hidden), ctx.chunk):
            part = slice(i, i + ctx.chunk)
            g = gradient[part, None] / ctx.temperature
            z = _logits(hidden[part], weight, bias, ctx.temperature)
            of_logits = z.sub_(total[part, None]).exp_().mul_(-g)
            of_logits.scatter_add_(1, target[part, None], g)
            of_logits = of_logits.to(weight.dtype)
            torch.mm(of_logits, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight.addmm_(of_logits.T, hidden[part])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """A fresh float32 [n, V] of logits / temperature."""
    return nn.functional.linear(hidden, weight, bias).float().div_(temperature)
