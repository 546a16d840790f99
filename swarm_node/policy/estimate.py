"""What a round will take, before the first one: memory by arithmetic, time by a short measurement.

    memory = weights + 12 bytes a trained parameter (fp32 gradient and Adam's two moments; + a master copy below fp32)
           + reference copy + keys and values of the sampled tokens + activations of one microbatch + logits chunks
    time   = sampled tokens x measured seconds a token + trained tokens x measured seconds a token

Both are upper bounds: they take every completion to run to its length limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from swarm_node.config import GrpoConfig, RolloutsConfig
from swarm_node.policy.policy import Policy
from swarm_node.types import Sampling

PROMPT_GUESS = 64
"""Tokens of a prompt nobody has seen yet."""
LOGITS_BYTES = 3 * 64 * 2**20
"""Logits, log-softmax and gradient of one chunk of the head."""
RUNTIME_BYTES = 450 * 2**20
"""Python, torch and transformers themselves."""


@dataclass(frozen=True)
class Estimate:
    """Upper bounds for one round."""

    bytes: int
    seconds: float

    def __str__(self) -> str:
        minutes = self.seconds / 60
        took = f"{minutes:.1f} min" if minutes >= 1 else f"{self.seconds:.1f} s"
        return f"about {self.bytes / 2**30:.1f} GiB of memory and at most {took} a round"


def estimate(policy: Policy, rollouts: RolloutsConfig, grpo: GrpoConfig) -> Estimate:
    """Estimate one round of `rollouts` and one update of `grpo` with `policy`."""
    sampled = rollouts.groups * rollouts.group_size * rollouts.max_new_tokens
    trained = rollouts.groups * (PROMPT_GUESS + rollouts.group_size * rollouts.max_new_tokens) * grpo.iterations
    per_sampled, per_trained = _measure(policy, rollouts)
    seconds = sampled * rollouts.refill * per_sampled + trained * per_trained
    return Estimate(_bytes(policy, rollouts, grpo, sampled, trained), seconds)


def _bytes(policy: Policy, rollouts: RolloutsConfig, grpo: GrpoConfig, sampled: int, trained: int) -> int:
    config, width = policy.base.config.get_text_config(), policy.dtype.itemsize
    weights = policy.num_parameters() * width
    learning = policy.num_parameters(trainable=True) * (12 if width == 4 else 16)
    reference = weights if grpo.beta and not policy.is_lora else 0
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kv_width = kv_heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    cache = 2 * config.num_hidden_layers * kv_width * width * (sampled + rollouts.groups * PROMPT_GUESS)
    microbatch = min(trained, grpo.microbatch_tokens)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    activations = microbatch * config.num_hidden_layers * (8 * config.hidden_size + 4 * inner) * width
    return RUNTIME_BYTES + weights + learning + reference + cache + activations + LOGITS_BYTES


def _measure(policy: Policy, rollouts: RolloutsConfig) -> tuple[float, float]:
    """Seconds a sampled token and a trained token, from one group of a few tokens each (weights stay as they are)."""
    vocabulary = policy.base.config.get_text_config().vocab_size
    prompt = torch.randint(vocabulary, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    n, length = rollouts.group_size, 4
    times = []
    for _ in range(2):  # the first pass warms caches up
        start = time.perf_counter()
        made = policy.generate([prompt], n, Sampling(length), [0])[0]
        times.append((time.perf_counter() - start) / sum(len(r.token_ids) for r in made))
    ids = torch.tensor([prompt * 4] * 2, device=policy.device)
    for _ in range(2):
        start = time.perf_counter()
        hidden = policy.base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        hidden.float().square().mean().backward()
        for p in policy.trainable_parameters():
            p.grad = None
        times.append((time.perf_counter() - start) / ids.numel())
    return times[1], times[3]
