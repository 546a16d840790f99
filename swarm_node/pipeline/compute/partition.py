"""Which layers and which tensors each stage holds.

    cost of a stage = its layers + the embedding, if it is the first + norm and head, if it is the last
    load of a stage = its cost / the capacity of its machine

The partition has the smallest possible maximum load. Every stage holds at least one layer, and none has a load above 1.
Layers are contiguous, so a dynamic programme over (stage, layer) finds it. Among partitions with the same maximum, the
one with the smallest sum of squared loads is taken: it leaves no stage needlessly large. A machine of unknown capacity
counts like the largest known one, except that its load may exceed 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.pipeline.membership.actions import Spans
from swarm_node.policy.adapters import lora_config, with_adapter
from swarm_node.policy.loading import Plan, skeleton

UNKNOWN = 0.0  # capacity of a machine whose capacity is not known
ADAPTED = "base_model.model."  # how all names of a policy with an adapter begin (PEFT's)


@dataclass(frozen=True, order=True)
class Span:
    """Stage `index` of `count`: layers `first` to `end` - 1 of a policy with `layers`."""

    index: int
    count: int
    first: int
    end: int
    layers: int

    @classmethod
    def of(cls, stage: int, spans: Spans) -> Span:
        """The span of one stage; `spans` gives the layers of all stages."""
        return cls(stage, len(spans), *spans[stage], spans[-1][1])

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def __str__(self) -> str:
        return f"stage {self.index} of {self.count} (layers {self.first}-{self.end - 1} of {self.layers})"


def partition(layer_bytes: Sequence[int], embed_bytes: int, head_bytes: int, capacities: Sequence[float]) -> Spans:
    """The layers of each stage. `capacities`: bytes that each stage's machine can hold; `UNKNOWN` or inf = not known.

    Raises UserError if there are more stages than layers, ValueError if the layers do not fit the machines."""
    layers, count = len(layer_bytes), len(capacities)
    if not 1 <= count <= layers:
        raise UserError(f"this model has {layers} layers: it can be divided into 1 to {layers} stages, not {count}")
    if not all(capacity >= 0 for capacity in capacities):
        raise ValueError(f"capacities must be numbers of bytes, not {list(capacities)}")
    known = [0 < capacity < inf for capacity in capacities]
    most = max((capacity for capacity, is_known in zip(capacities, known, strict=True) if is_known), default=1.0)
    upto = [0, *accumulate(layer_bytes)]

    def load(stage: int, first: int, end: int) -> float:
        ends = (embed_bytes if stage == 0 else 0) + (head_bytes if stage == count - 1 else 0)
        full = (upto[end] - upto[first] + ends) / (capacities[stage] if known[stage] else most)
        return inf if known[stage] and full > 1 else full

    def squares(total: float, load: float) -> float:
        return total + load**2 if load <= limit else inf

    limit = _best(layers, count, load, max)[0]
    if limit == inf:
        needed = (upto[-1] + embed_bytes + head_bytes) / 2**30
        room = ", ".join(f"{c / 2**30:.3g}" if is_known else "?" for c, is_known in zip(capacities, known, strict=True))
        raise ValueError(
            f"machines with {room} GiB cannot hold this model's {needed:.3g} GiB in whole layers: use more stages, or "
            "machines with more memory"
        )
    return tuple(pairwise(_best(layers, count, load, squares)[1]))


def _best(
    layers: int,
    count: int,
    load: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """(cost, bounds) of the cheapest partition: stage s holds layers bounds[s] to bounds[s + 1] - 1.

    The cost of stages 0..s is join(cost of stages 0..s-1, load of s); that of no stages is 0.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # by the end of the stages so far
    for stage in range(count):
        best = {
            end: min(
                (join(cost, load(stage, first, end)), (*bounds, end))
                for first, (cost, bounds) in best.items()
                if first < end
            )
            for end in range(stage + 1, layers - (count - 1 - stage) + 1)
        }
    return best[layers]


@dataclass(frozen=True)
class Parts:
    """Names of the parts of a model family."""

    decoder: str  # the model under the head; it has `layers`
    embed: str
    norm: str
    heads: tuple[str, ...] = ("lm_head.weight",)  # the head's matrix, under its present name and those in older files

    @property
    def layers(self) -> str:
        """Prefix of the names of the layers' parameters."""
        return f"{self.decoder}.layers."

    @property
    def embedding(self) -> str:
        """Name of the embedding's matrix."""
        return f"{self.decoder}.{self.embed}.weight"


LIKE_LLAMA = Parts("model", "embed_tokens", "norm")
FAMILIES = {
    "gpt_neox": Parts("gpt_neox", "embed_in", "final_layer_norm", ("lm_head.weight", "embed_out.weight")),
    "llama": LIKE_LLAMA,
    "mistral": LIKE_LLAMA,
    "qwen2": LIKE_LLAMA,
    "qwen3": LIKE_LLAMA,
}


def model_parts(model_config: Any) -> Parts:
    """Names of the parts of a model with this config. Raises UserError for an unknown family."""
    parts = FAMILIES.get(model_config.model_type)
    if parts is None:
        raise UserError(
            f"a policy of the family {model_config.model_type!r} cannot be divided into stages: use one of "
            f"{', '.join(FAMILIES)}"
        )
    return parts


def layer_of(name: str) -> int | None:
    """Number of the layer that a tensor belongs to: the first integer among the dotted parts of its name."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def trained_shapes(policy: PolicyConfig, loading: Plan) -> dict[str, Tensor]:
    """All tensors that a policy trains, by name, without values (on the meta device)."""
    model = skeleton(loading.config)
    if loading.lora:
        with torch.device("meta"):
            model = with_adapter(model, lora_config(policy), policy)
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad or not loading.lora}


def shapes_of_stage(shapes: Mapping[str, Tensor], model_config: Any, stage: int, spans: Spans) -> dict[str, Tensor]:
    """The part of `trained_shapes` that one stage holds; `spans` gives the layers of all stages."""
    first, end = spans[stage]
    embedding = model_parts(model_config).embedding.removesuffix(".weight")

    def is_held(name: str) -> bool:
        layer = layer_of(name)
        if layer is not None:
            return first <= layer < end
        is_embedding = name.removeprefix(ADAPTED).startswith(embedding)
        at_head = not is_embedding or model_config.tie_word_embeddings
        return (is_embedding and stage == 0) or (at_head and stage == len(spans) - 1)

    return {name: tensor for name, tensor in shapes.items() if is_held(name)}
