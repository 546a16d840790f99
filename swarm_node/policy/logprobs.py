"""Log-probabilities of given completion tokens under a model, without ever holding all logits.

    rows [R, T] -> backbone -> hidden [R, T, H] -> hidden[row, col] [N, H] -> head, a chunk of tokens at a time -> [N]

    logprob_n = z_n[target_n] - logsumexp(z_n),   z_n = head(hidden_n) / temperature

The N completion tokens lie flat, whatever the rows look like, so neither padding nor prompt tokens reach the head.
When the logits of all N would exceed `LOGITS_BYTES`, each chunk computes its logits twice, once forward and once
backward, and none are kept: 8 x 512 tokens at a vocabulary of 152k take 64 MB at a time instead of 2.5 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_BYTES = 64 * 2**20
"""Most bytes of float32 logits in existence at once; larger chunks were no faster."""


@dataclass(frozen=True)
class TokenBatch:
    """Rows of input tokens and where in them the N completion tokens are predicted."""

    input_ids: Tensor
    """[R, T] long."""
    position_ids: Tensor | None
    """[R, T] long when packed: positions restart after the prompt. `None` = 0..T-1."""
    attention_mask: Tensor | None
    """[R, 1, T, T] bool when packed, True = may be seen. `None` = causal: right padding is out of sight by itself."""
    row: Tensor
    """[N] long: row of each completion token ..."""
    col: Tensor
    """[N] long: ... and the position in it whose hidden state predicts the token."""
    target: Tensor
    """[N] long: the token."""
    sequence: Tensor
    """[N] long: which rollout the token belongs to."""
    index: Tensor
    """[N] long: place of the token when all rollouts of the step are laid end to end."""


def token_logprobs(
    model: nn.Module, batch: TokenBatch, temperature: float, entropy: bool = False, full_logits: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [N] of `batch.target`, and on request entropies [N] (detached); both float32.

    `model` is a Hugging Face causal language model or a PEFT wrapper of one. `full_logits` takes the model's own
    logits, for architectures that alter them after the head (soft-capping, scaling); then [R, T, V] does exist.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    inputs = dict(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=_additive(batch.attention_mask, base.get_input_embeddings().weight.dtype),
        use_cache=False,
    )
    if full_logits:
        logits = base(**inputs).logits[batch.row, batch.col]
        return _of_logits(logits, batch.target, temperature, entropy)

    hidden = base.get_decoder()(**inputs).last_hidden_state[batch.row, batch.col]
    head = base.get_output_embeddings()
    chunk = max(1, LOGITS_BYTES // (4 * head.weight.shape[0]))
    if len(hidden) <= chunk:
        return _of_logits(head(hidden), batch.target, temperature, entropy)
    parts = [
        checkpoint(_of_hidden, head, h, t, temperature, entropy, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), batch.target.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as one to add to attention scores: every implementation takes it, and none converts it again in
    each layer."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _of_hidden(
    head: nn.Module, hidden: Tensor, target: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    return _of_logits(head(hidden), target, temperature, entropy)


def _of_logits(
    logits: Tensor, target: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `target` [N] and entropies [N] of the distributions with `logits` [N, V]."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, target[:, None])[:, 0]
    if not entropy:
        return chosen, None
    with torch.no_grad():
        return chosen, -(logprobs.exp() * logprobs).sum(-1)
