"""How many bytes of memory a stage takes, activations and sampling caches aside.

    frozen weights     itemsize frozen         with an adapter, which is in float32 always
    trained weights    itemsize trained, once more for their gradient, and for the reference of a KL term
    AdamW              8 trained; in 16 bits also 8 for masters and, in an update, their gradient
    a copy of itself   4 offered         on its way to whoever keeps a replica of it
    replicas it keeps  8 kept            of its neighbours' trained values: the next one comes before the last one goes

All numbers are of values. On a machine with a GPU the last two are in other memory, and counted nevertheless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Values of a policy: of each layer, of the embedding, of norm and head."""

    layers: Sequence[int]
    embed: int
    head: int

    def of(self, spans: Sequence[tuple[int, int]], layers: bool = True) -> list[int]:
        """Of each stage; without `layers`, only of what is in none."""
        each = [sum(self.layers[first:end]) if layers else 0 for first, end in spans]
        each[0] += self.embed
        each[-1] += self.head
        return each


def footprint(
    frozen: int, trained: int, itemsize: int, reference: bool = False, offered: int = 0, kept: int = 0
) -> int:
    """Bytes, as above; `itemsize` is that of the model's weights, `reference` whether one is kept."""
    own = 4 if frozen else itemsize
    masters = 8 * trained if own < 4 else 0
    copies = 3 if reference and not frozen else 2
    return itemsize * frozen + own * copies * trained + 8 * trained + masters + 4 * offered + 8 * kept
