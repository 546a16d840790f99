"""How much of a machine's memory the stages of a policy take, and which layers each stage is given accordingly.

    frozen weights     itemsize frozen         with an adapter, which is always in float32
    trained weights    itemsize trained, once more for their gradient, and for the reference of a KL term
    AdamW              8 trained; in 16 bits also 8 for master copies and, in an update, their gradient
    a copy of itself   4 offered         on its way to a peer that keeps a replica of it
    replicas it keeps  8 kept            of its neighbours' trained values: a new one comes before the old one goes

The formulas count values and give bytes. Activations and sampling caches are left out. On a machine with a GPU the last
two lines lie in main memory, and are counted nevertheless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm_node.config import NodeConfig
from swarm_node.pipeline.compute.partition import layer_of, model_parts, partition, trained_shapes
from swarm_node.pipeline.membership.actions import Spans
from swarm_node.pipeline.recovery.replicas import keeper, replica_every, replicated
from swarm_node.policy.loading import Plan as Loading
from swarm_node.policy.loading import skeleton
from swarm_node.policy.sizes import GROUPS, MOMENT_BYTES
from swarm_node.storage.cgroups import free_main_memory

WIRE_BYTES = {"bfloat16": 2.0, "float32": 4.0, "int8": 66 / 64}  # of a value on the network; int8 has a scale for 64


@dataclass(frozen=True)
class Sizes:
    """Numbers of values: of each layer, of the embedding, and of norm and head together."""

    layers: Sequence[int]
    embed: int
    head: int

    @classmethod
    def among(cls, tensors: Mapping[str, Tensor], model_config: Any) -> Sizes:
        """Sizes of a model's tensors. A tied matrix counts at both ends, since both hold it."""
        layers, embed, head = [0] * model_config.num_hidden_layers, 0, 0
        embedding = model_parts(model_config).embedding.removesuffix(".weight")
        for name, tensor in tensors.items():
            layer = layer_of(name)
            if layer is not None:
                layers[layer] += tensor.numel()
            elif embedding in name:
                embed += tensor.numel()
            else:
                head += tensor.numel()
        return cls(layers, embed, head + embed * model_config.tie_word_embeddings)

    def of(self, spans: Sequence[tuple[int, int]], layers: bool = True) -> list[int]:
        """Values of each stage; without `layers`, only those that belong to no layer."""
        each = [sum(self.layers[first:end]) if layers else 0 for first, end in spans]
        each[0] += self.embed
        each[-1] += self.head
        return each


def stage_bytes(
    frozen: int, trained: int, itemsize: int, reference: bool = False, offered: int = 0, kept: int = 0
) -> int:
    """Bytes that a stage takes, by the formulas above. `reference`: the weights of before training are kept."""
    own = 4 if frozen else itemsize
    masters = 8 * trained if own < 4 else 0
    copies = 3 if reference and not frozen else 2
    return itemsize * frozen + own * copies * trained + 8 * trained + masters + 4 * offered + 8 * kept


class Footprint:
    """Memory and disk that the stages of one policy take with the options of its crew."""

    def __init__(self, config: NodeConfig, loading: Loading) -> None:
        """Raises UserError for a model family that cannot be divided into stages."""
        self.config = config
        self.reference = bool(config.grpo.beta)  # whether stages keep their weights of before training
        self._itemsize = loading.dtype.itemsize
        self._width: int = loading.config.get_text_config().hidden_size
        frozen = dict(skeleton(loading.config).named_parameters()) if loading.lora else {}
        self._frozen = Sizes.among(frozen, loading.config)
        self._trained = Sizes.among(trained_shapes(config.policy, loading), loading.config)

    def costs(self, spans: Spans) -> list[int]:
        """Bytes of memory of each stage, with the replicas that it keeps for its neighbours."""
        count, trained = len(spans), self._trained.of(spans)
        copies = {"whole": trained, "rest": self._trained.of(spans, layers=False), "": [0] * count}
        offered, kept = [0] * count, [0] * count
        for stage in range(count) if count > 1 else ():
            offered[stage] = copies[replicated(self.config, stage)][stage]
            kept[keeper(stage, count)] += offered[stage]
        return [self._bytes(*values) for values in zip(self._frozen.of(spans), trained, offered, kept, strict=True)]

    def checkpoints(self, spans: Spans) -> list[int]:
        """Bytes of a checkpoint of each stage: trained weights in 32 bits and the optimiser's two moments.

        Weights of 16 bits that are trained themselves add a master copy of 32 bits."""
        masters = 4 if self._itemsize < 4 and not any(self._frozen.layers) else 0
        return [int((4 + MOMENT_BYTES["adamw"] + masters) * values) for values in self._trained.of(spans)]

    def traffic(self, prompt_tokens: float, answer_tokens: int) -> int:
        """Bytes that a stage between two others sends in a round if every answer has `answer_tokens`: activations of
        all tokens, gradients of those trained on, and its replica. Ends send less."""
        rollouts, grpo, wire = self.config.rollouts, self.config.grpo, WIRE_BYTES[self.config.pipeline.wire]
        groups, answers = rollouts.groups or GROUPS, grpo.answers or rollouts.group_size
        length = prompt_tokens + answer_tokens
        sampled = groups * rollouts.group_size * length
        trained = groups * min(answers, rollouts.group_size) * length
        stages = self.config.pipeline.stages
        copies = max(self._trained.of(self.divide([0] * stages))) if self.config.pipeline.replica != "off" else 0
        replica = 4 * copies / replica_every(self.config, any(self._frozen.layers))
        return round(wire * self._width * (sampled + 2 * trained) + replica)

    def divide(self, capacities: Sequence[float]) -> Spans:
        """Layers of each stage, as the memory of the machines that are to hold them allows; see `partition`."""
        count = len(capacities)
        whole = count > 1 and any(replicated(self.config, stage) == "whole" for stage in range(count))

        def cost(frozen: int, trained: int) -> int:
            return self._bytes(frozen, trained, trained * whole, trained * whole)

        layers = [cost(*values) for values in zip(self._frozen.layers, self._trained.layers, strict=True)]
        embed = cost(self._frozen.embed, self._trained.embed)
        head = cost(self._frozen.head, self._trained.head)
        spans = partition(layers, embed, head, capacities)
        if any(0 < room < cost for cost, room in zip(self.costs(spans), capacities, strict=True)):
            raise ValueError("with the replicas that they keep, the stages do not fit these machines")
        return spans

    def _bytes(self, frozen: int, trained: int, offered: int, kept: int) -> int:
        return stage_bytes(frozen, trained, self._itemsize, self.reference, offered, kept)


def free_memory(device: str = "auto") -> int:
    """Bytes of GPU memory that are free or, without a GPU or on the device `cpu`, of main memory; 0 = not known."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return int(torch.cuda.mem_get_info()[0]) if on_gpu else free_main_memory()
