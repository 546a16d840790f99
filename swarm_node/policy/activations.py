"""How many bytes a forward pass keeps for its backward pass: measured on three short rows, and extrapolated.

    kept(T) = fixed + token T + pair T^2      for a row of T tokens

Autograd hands every tensor that it keeps to a hook. What is counted are distinct storages that are not weights: those
bytes are whole numbers that follow the formula exactly, so rows of 17 to 49 tokens tell about rows of 8,000. Nothing
is trained, and no random number is drawn. The head is left out; see `sizes.head_bytes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_node.policy.architecture import largest
from swarm_node.policy.checkpointing import Checkpointing
from swarm_node.policy.logprobs import TokenBatch, additive, token_logprobs
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import Activations

LENGTHS = 17, 33, 49
"""Tokens of the rows, equally far apart. They are odd: some attention kernels pad others."""


def measured(policy: Policy) -> Activations:
    """What an update of this policy keeps, with and without gradient checkpointing."""
    lengths = LENGTHS if policy.max_positions >= LENGTHS[-1] else (3, 5, 7)
    short, middle, long = lengths
    step = middle - short
    first, second, third = (kept_bytes(policy, length) for length in lengths)
    pair = (third - 2 * second + first) / (2 * step * step)
    token = (second - first) / step - pair * (short + middle)
    fixed = first - token * short - pair * short * short
    again = Checkpointing(policy.model)
    inputs = (kept_bytes(policy, middle, again) - kept_bytes(policy, short, again)) / step - pair * (short + middle)
    if pair < 0 or token < 0:  # what is kept is no such sum: the longest row says what a token takes
        token, pair, fixed = third / long, 0.0, 0.0
    layers = largest(policy.base.config.get_text_config(), "num_hidden_layers", 1)
    return Activations(token, pair, fixed, inputs, token / layers)


def kept_bytes(policy: Policy, length: int, checkpointing: Checkpointing | None = None) -> int:
    """Bytes that a forward pass over one row of `length` tokens keeps, with the mask of a packed row."""
    batch = row(policy, length)
    mask = 0 if batch.attention_mask is None else batch.attention_mask.nbytes
    weights = {t.untyped_storage().data_ptr() for t in (*policy.model.parameters(), *policy.model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # held until the end, so that no two have one address

    def keep(tensor: Tensor) -> None:  # a graph with the tensors themselves in it is never freed
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda nothing: nothing):
        if checkpointing is None:
            _ = _forward(policy, batch)
        else:
            with checkpointing.on():
                _ = _forward(policy, batch)
    return mask + sum(storage.nbytes() for storage in kept.values())


def row(policy: Policy, length: int) -> TokenBatch:
    """One row of `length` tokens as updates have it, packed or plain, of which every token is predicted."""
    device = policy.device
    places = torch.arange(length, device=device)
    packed = policy.packing
    return TokenBatch(
        input_ids=(places % policy.vocabulary)[None],
        position_ids=places[None] if packed else None,
        attention_mask=torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril() if packed else None,
        row=torch.zeros_like(places),
        col=places,
        target=places % policy.vocabulary,
        sequence=torch.zeros_like(places),
        index=places,
    )


def _forward(policy: Policy, batch: TokenBatch) -> Tensor:
    """What goes into the head; or log-probabilities, where the head cannot be had apart from the model."""
    if not policy.split_head:
        return token_logprobs(policy.model, batch, 1.0, full_logits=True)[0]
    hidden: Tensor = policy.base.get_decoder()(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=additive(batch.attention_mask, policy.dtype),
        use_cache=False,
    ).last_hidden_state
    return hidden[batch.row, batch.col]
