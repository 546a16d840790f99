"""Weights in fragments that are averaged in turn: whole layers, strided (Streaming DiLoCo, arXiv 2501.18512).

    layer l                   -> fragment l mod F            l = first integer among the dotted parts of a tensor's name
    embeddings, norm, head    -> the smallest fragment       one by one, in order of names

If a fragment stays empty (fewer layers than fragments), all tensors are spread one by one instead, the largest first,
each to the smallest fragment. A fragment's values are those of its tensors in order of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256

import torch
from torch import Tensor

COPY_CHUNK = 2**18  # about so many values are copied at a time


class Fragments:
    """Live `tensors`, by name, in `count` fragments. Raises ValueError if there are fewer tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], count: int) -> None:
        if len(tensors) < count:
            raise ValueError(f"{len(tensors)} tensors cannot be cut into {count} fragments")
        self._tensors = {name: tensors[name].detach() for name in sorted(tensors)}
        values = {name: tensor.numel() for name, tensor in self._tensors.items()}
        parts: list[list[str]] = [[] for _ in range(count)]
        for name in values:
            if (layer := _layer(name)) is not None:
                parts[layer % count].append(name)
        parts = _spread(values, [name for name in values if _layer(name) is None], parts)
        if not all(parts):
            parts = _spread(values, sorted(values, key=lambda name: -values[name]), [[] for _ in range(count)])
        self.names = [sorted(part) for part in parts]  # names of the tensors of each fragment
        self.sizes = [sum(values[name] for name in part) for part in parts]  # values in each fragment
        shapes = "".join(f"{name} {list(tensor.shape)}\n" for name, tensor in self._tensors.items())
        self.layout = sha256(f"{count}\n{shapes}".encode()).hexdigest()[:16]
        """16 hex digits: equal for equal names, shapes and number of fragments."""

    def gather(self, i: int) -> Tensor:
        """A copy of fragment `i`: float32 [sizes[i]] on the CPU."""
        flat = torch.empty(self.sizes[i])
        for tensor, part in self._parts(i, flat):
            part.copy_(tensor)
        return flat

    def gather_all(self) -> list[Tensor]:
        return [self.gather(i) for i in range(len(self.sizes))]

    def moved(self, i: int, before: Tensor) -> Tensor:
        """How fragment `i` has changed since it was `before`: float32 [sizes[i]]."""
        return self.gather(i).sub_(before)

    def scatter(self, i: int, flat: Tensor) -> None:
        """Set the live values of fragment `i` to `flat` [sizes[i]]."""
        for tensor, part in self._parts(i, flat):
            tensor.copy_(part)

    def add(self, i: int, flat: Tensor) -> None:
        """Add `flat` [sizes[i]] to the live values of fragment `i`, rounded to their type once. `flat` becomes the
        former values, with which `scatter` takes the sum back."""
        for tensor, part in self._parts(i, flat):
            rows = max(1, COPY_CHUNK // max(1, part[:1].numel())) if part.dim() else 1
            for live, addend in zip(*(torch.atleast_1d(x).split(rows) for x in (tensor, part)), strict=True):
                before = live.clone()
                live.add_(addend.to(live.device))
                addend.copy_(before)

    def _parts(self, i: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Live tensors of fragment `i`, each with its part of `flat`, in its shape."""
        assert flat.shape == (self.sizes[i],)
        tensors = [self._tensors[name] for name in self.names[i]]
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            yield tensor, part.view(tensor.shape)


def _layer(name: str) -> int | None:
    """12 for `model.layers.12.mlp.up_proj.weight`."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _spread(values: Mapping[str, int], names: list[str], parts: list[list[str]]) -> list[list[str]]:
    """`parts`, with each of `names` in turn added to the smallest part."""
    for name in names:
        min(parts, key=lambda part: sum(values[other] for other in part)).append(name)
    return parts
