"""What the stages of a policy take of a machine's memory, and which layers each is given accordingly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from swarm_node.config import NodeConfig
from swarm_node.observability.cgroups import control_groups
from swarm_node.pipeline.compute.footprint import Sizes, footprint
from swarm_node.pipeline.compute.partition import partition, parts_of, sizes
from swarm_node.pipeline.membership.actions import Spans
from swarm_node.pipeline.recovery.held_stages import keeper, replicated, shapes
from swarm_node.pipeline.recovery.weight_transfer import layer_of
from swarm_node.policy.loading import Plan as Loading

CHECKPOINT_BYTES = 12
"""Of a trained value in a checkpoint: itself and two moments, four bytes each."""


class Memory:
    """Of a policy that is cut into stages, by its crew's options."""

    def __init__(self, config: NodeConfig, loading: Loading) -> None:
        """UserError for a family that cannot be cut."""
        self.config = config
        self.reference = bool(config.grpo.beta)
        """Stages keep their weights of before training."""
        self._itemsize = loading.dtype.itemsize
        held = Sizes(*sizes(loading.config, 1))
        nothing = Sizes([0] * len(held.layers), 0, 0)
        self._frozen, self._trained = (held, _trained(config, loading)) if loading.lora else (nothing, held)

    def costs(self, spans: Spans) -> list[int]:
        """Bytes of each stage, with what it keeps for its neighbours."""
        count, trained = len(spans), self._trained.of(spans)
        rest = self._trained.of(spans, layers=False)
        copied = [
            {"whole": trained, "rest": rest, "": [0] * count}[replicated(self.config, stage)][stage]
            for stage in range(count)
        ]
        kept = [0] * count
        for stage in range(count) if count > 1 else ():
            kept[keeper(stage, count)] += copied[stage]
        return [
            self._bytes(*values)
            for values in zip(self._frozen.of(spans), trained, copied if count > 1 else kept, kept, strict=True)
        ]

    def checkpoints(self, spans: Spans) -> list[int]:
        """Bytes of a checkpoint of each stage: trained weights in 32 bits, the optimiser's two moments and, of weights
        in 16 bits that are trained themselves, its master copies."""
        masters = 4 if self._itemsize < 4 and not any(self._frozen.layers) else 0
        return [(CHECKPOINT_BYTES + masters) * values for values in self._trained.of(spans)]

    def divide(self, capacities: Sequence[float]) -> Spans:
        """Layers of each stage, as the memory of the machines allows that are to hold them (bytes, `UNKNOWN` or inf).
        ValueError if they do not fit; UserError if there are more stages than layers."""
        count = len(capacities)
        whole = count > 1 and any(replicated(self.config, stage) == "whole" for stage in range(count))

        def cost(frozen: int, trained: int) -> int:
            return self._bytes(frozen, trained, trained * whole, trained * whole)

        layers = [cost(*values) for values in zip(self._frozen.layers, self._trained.layers, strict=True)]
        embed = cost(self._frozen.embed, self._trained.embed)
        head = cost(self._frozen.head, self._trained.head)
        spans = tuple((span.first, span.end) for span in partition(layers, embed, head, capacities))
        if any(0 < room < cost for cost, room in zip(self.costs(spans), capacities, strict=True)):
            raise ValueError("with what they keep for their neighbours, the stages do not fit these machines")
        return spans

    def _bytes(self, frozen: int, trained: int, offered: int, kept: int) -> int:
        return footprint(frozen, trained, self._itemsize, self.reference, offered, kept)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this machine, or the container or job that this process is in, has left; 0 = not known."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return free_main_memory(root)


def free_main_memory(root: Path = Path("/")) -> int:
    """Likewise, whether there is a GPU or not."""
    try:
        fields = _numbers((root / "proc/meminfo").read_text().replace(":", ""))
        return min([1024 * fields["MemAvailable"], *_cgroups_left(root)])
    except (OSError, KeyError):
        return 0


def _cgroups_left(root: Path) -> Iterator[int]:
    """Of each control group, version 1 or 2, that bounds the memory of this process; caches can be given up."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for version, folder in control_groups("memory", root):
        limit, used, cache = names[version]
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            cached = _numbers((folder / "memory.stat").read_text()).get(cache, 0)
            yield max(1, int(most) - int((folder / used).read_text()) + cached)


def _numbers(text: str) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _trained(config: NodeConfig, loading: Loading) -> Sizes:
    """Values of the adapter."""
    layers, ends = [0] * loading.config.num_hidden_layers, {True: 0, False: 0}
    embedding = parts_of(loading.config).embedding.removesuffix(".weight")
    for name, tensor in shapes(config, loading).items():
        layer = layer_of(name)
        if layer is None:
            ends[embedding in name] += tensor.numel()
        else:
            layers[layer] += tensor.numel()
    return Sizes(layers, ends[True], ends[False])
