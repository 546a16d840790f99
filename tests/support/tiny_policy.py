"""Tiny real models, groups of random tokens, and a policy with no more than training needs."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from swarm_node.grpo.batch import Row, flatten, plan, token_batch
from swarm_node.policy.checkpointing import Checkpointing
from swarm_node.policy.logprobs import TokenBatch
from swarm_node.policy.policy import Policy
from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.messages import TaskName

VOCABULARY = 64
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.1,
)


def make(kind: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).train()
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)).train()


@dataclass
class TinyPolicy:
    """What a trainer sees of a policy."""

    model: nn.Module
    packing: bool = True
    split_head: bool = True
    version: int = 0
    microbatches: int = 1
    checkpointing: Checkpointing | None = None
    pad_id: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    vocabulary, width = Policy.vocabulary, Policy.width
    passes, _passes, again = Policy.passes, Policy._passes, Policy.again

    def __post_init__(self) -> None:
        self.start = copy.deepcopy(self.model).requires_grad_(False)

    def trainable_state(self) -> dict[str, Tensor]:
        return {name: p.data for name, p in self.model.named_parameters() if p.requires_grad}

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        adapter = hasattr(self.model, "peft_config")
        with self.model.disable_adapter() if adapter else nullcontext():
            yield self.model if adapter else self.start


def group(
    rewards: Sequence[float | None],
    lengths: Sequence[int] | None = None,
    prompt: int = 5,
    seed: int = 0,
    unfinished: Sequence[int] = (),
    version: int = 0,
) -> Group:
    """Rollouts with these rewards (`None` = not scored) and lengths, of random tokens."""
    rng = random.Random(seed)
    ids = lambda n: [rng.randrange(3, VOCABULARY) for _ in range(n)]  # noqa: E731
    lengths = lengths or [rng.randint(1, 6) for _ in rewards]
    rollouts = [
        Rollout([Turn(ids(n), [], i not in unfinished)], rewards={"checker": r}, reward=r or 0.0)
        for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))
    ]
    task = Task(TaskName("gcd", "0" * 16, "test 1", 0, seed), "gcd", "question", "answer")
    return Group(task, ids(prompt), rollouts, version)


def batch(groups: Sequence[Row], packing: bool) -> TokenBatch:
    """All of them in one microbatch."""
    (rows,) = plan(groups, packing, 1000, hidden=1000)
    return token_batch(rows, flatten(groups), pad_id=0, device=torch.device("cpu"))


def watch_gradients(policy: TinyPolicy) -> dict[str, Tensor]:
    """A dictionary that always holds the gradient as accumulated last, before clipping, by parameter name."""
    seen: dict[str, Tensor] = {}

    def watch(name: str, p: nn.Parameter) -> None:
        p.register_post_accumulate_grad_hook(lambda p: seen.__setitem__(name, p.grad.clone()))

    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            watch(name, p)
    return seen
