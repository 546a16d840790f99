"""Estimate of a round before the first one: memory by arithmetic, time by a short measurement.

    memory = weights + 12 bytes a trained parameter (fp32 gradient and Adam's two moments; + a master copy below fp32)
           + reference copy + keys and values of the sampled tokens + activations of one microbatch + logits chunks
    time   = sampled tokens x measured seconds a token + trained tokens x measured seconds a token

Prompts have the mean length of a few that were drawn. Every completion counts with its length limit, which most do not
reach. Scoring and evaluation are left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean

import torch

from swarm_node.config import GrpoConfig, RolloutsConfig
from swarm_node.policy.policy import Policy
from swarm_node.types import Sampling

HEAD_BYTES = 3 * 64 * 2**20  # logits, log-softmax and gradient of one chunk of the head
RUNTIME_BYTES = 450 * 2**20  # Python, torch and transformers themselves


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a round in which every completion runs to its limit."""

    bytes: int
    seconds: float

    def __str__(self) -> str:
        minutes = self.seconds / 60
        took = f"{minutes:.1f} min" if minutes >= 1 else f"{self.seconds:.1f} s"
        return f"about {self.bytes / 2**30:.1f} GiB of memory, and {took} a round if every answer runs to its limit"


def estimate(policy: Policy, prompts: list[list[int]], rollouts: RolloutsConfig, grpo: GrpoConfig) -> Estimate:
    """Estimate one round of `rollouts` and one update of `grpo` with `policy`, given some encoded prompts."""
    length = round(fmean(len(p) for p in prompts))
    sampled = rollouts.groups * rollouts.group_size * rollouts.max_new_tokens
    copies = 1 if grpo.packing and policy.packing else rollouts.group_size  # of each prompt in the rows of an update
    trained = sampled + rollouts.groups * copies * length
    passes = grpo.iterations * (1 + (1 / 3 if grpo.beta else 0))  # the reference needs no backward pass
    per_sampled, per_trained = _measure(policy, prompts[0], rollouts)
    seconds = rollouts.refill * (sampled * per_sampled + rollouts.groups * length * per_trained / 3)
    seconds += trained * passes * per_trained
    cached = sampled + rollouts.groups * length
    return Estimate(_bytes(policy, grpo, cached, trained), seconds)


def _bytes(policy: Policy, grpo: GrpoConfig, cached: int, trained: int) -> int:
    config, width = policy.base.config.get_text_config(), policy.dtype.itemsize
    weights = policy.num_parameters() * width
    learning = policy.num_parameters(trainable=True) * (12 if width == 4 else 16)
    reference = weights if grpo.beta and not policy.is_lora else 0
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kv_width = kv_heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    cache = 2 * config.num_hidden_layers * kv_width * width * cached
    microbatch = min(trained, grpo.microbatch_tokens)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    activations = microbatch * config.num_hidden_layers * (8 * config.hidden_size + 4 * inner) * width
    return RUNTIME_BYTES + weights + learning + reference + cache + activations + HEAD_BYTES


def _measure(policy: Policy, prompt: list[int], rollouts: RolloutsConfig) -> tuple[float, float]:
    """Seconds a sampled token and a trained token, from a group of short completions (weights stay as they are)."""
    n = rollouts.group_size
    length = min(8, rollouts.max_new_tokens)
    sampling = Sampling(length, rollouts.temperature, rollouts.top_p)
    times = []
    for _ in range(2):  # the first pass warms caches up
        start = time.perf_counter()
        made = policy.generate([prompt], n, sampling, [0])[0]
        times.append((time.perf_counter() - start) / sum(len(r.token_ids) for r in made))
    row = (prompt * (n * length // len(prompt) + 1))[: min(n * length, policy.max_positions)]
    ids = torch.tensor([row], device=policy.device)
    for _ in range(2):
        start = time.perf_counter()
        hidden = policy.base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        policy.base.get_output_embeddings()(hidden).float().logsumexp(-1).mean().backward()
        for p in policy.trainable_parameters():
            p.grad = None
        times.append((time.perf_counter() - start) / ids.numel())
    return times[1], times[3]
