"""Products of a few rows with the weights of linear layers: in which layout a decoder holds these, copied or not.

    own        the modules as they are: no copy, an adapter is computed beside its layer
    joined     a copy with adapters merged, modules with one input side by side: [in, out] on a CPU, [out, in] on a GPU
    packed     such a copy in the blocks of oneDNN, on a CPU

Small models are `joined`: at their sizes `packed` gains little. For others `packed` is measured once in a process, and
taken where rounds leave room for the copy. A quantised model is copied there in any case, since its `own` layers
dequantise all weights at each token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm_node.policy.oom import free_on_gpu
from swarm_node.policy.packed import is_packed, plain_weight, values_of
from swarm_node.policy.sizes import COPIED_BYTES

ROWS = 8  # of the products that are measured; oneDNN chooses its blocks for as many
WORTH = 1.15  # times as fast as `own`: below, packing costs more than it gains
REPEATS = 5

Linear = Callable[[Tensor], Tensor]
Name = Literal["own", "joined", "packed"]


class Layout(NamedTuple):
    """How a decoder holds its weights, and a sentence that says why."""

    name: Name
    why: str


def layout_of(model: nn.Module) -> Layout:
    """The layout for `model` to begin with: a copy if it is small, or takes at most half of what a GPU has free."""
    weights = next(model.parameters())
    itemsize = weights.element_size()  # of the embedding, which is never quantised
    copy = sum(values_of(p) * (itemsize if is_packed(p) else p.element_size()) for p in model.parameters())
    size = f"a copy of the weights takes {copy / 2**30:.1f} GiB"
    if weights.is_cuda:
        fits = copy <= free_on_gpu(weights.device) // 2
        return Layout("joined", size) if fits else Layout("own", f"{size}, more than half of what is free")
    return Layout("joined" if copy <= COPIED_BYTES else "own", size)


def packed_layout(model: nn.Module) -> Layout:
    """The layout for a `model` that is not small, on a machine with room for a copy of it."""
    weights = next(model.parameters())
    if weights.device.type != "cpu":
        return Layout("own", f"packed weights are for CPUs, not for {weights.device.type}")
    gain = packing_gain(model.config.get_text_config().hidden_size, weights.dtype)
    measured = f"packed weights measured {gain:.1f} times as fast" if gain else "this processor has no packed weights"
    if gain >= WORTH:
        return Layout("packed", measured)
    if any(is_packed(p) for p in model.parameters()):
        return Layout("joined", f"{measured}; a copy is dequantised once a round, not at each token")
    return Layout("own", measured)


@lru_cache
def packing_gain(hidden: int, dtype: torch.dtype) -> float:
    """How many times as fast the product of `ROWS` rows with a packed weight [4 hidden, hidden] is as with the weight
    itself; 0 if this processor has no such product, or another result."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, hidden, generator=random).to(dtype) for n in (ROWS, 4 * hidden))
    with torch.inference_mode():
        try:
            blocks = _packed(weight)
            own, packed = F.linear(x, weight), _product(x, blocks, None)
        except (RuntimeError, AttributeError):  # torch without oneDNN, or a dtype that this processor does not multiply
            return 0.0
        if not torch.allclose(own.float(), packed.float(), rtol=1e-2, atol=0.1):  # of values about hidden ** 0.5
            return 0.0
        return best_s(lambda: F.linear(x, weight)) / best_s(lambda: _product(x, blocks, None))


def joined(modules: list[nn.Module], layout: Name, dtype: torch.dtype | None = None) -> Linear:
    """One function for several linear modules with one input, [..., in] to [..., out of all modules]. `dtype` of the
    input; None = that of the weights, which int8 ones do not have."""
    if layout == "own":
        return modules[0] if len(modules) == 1 else lambda x: torch.cat([m(x) for m in modules], -1)
    with torch.no_grad():
        bias = _bias(modules)
        if layout == "packed":
            packed = _packed(_whole(modules, dtype))
            return lambda x: _product(x, packed, bias)
        if next(modules[0].parameters()).is_cuda:  # cuBLAS takes either layout
            whole = _whole(modules, dtype)
            return lambda x: F.linear(x, whole, bias)
        weight = _whole(modules, dtype, columns=True)  # [in, out]: 15 % faster at 64 rows
    return (lambda x: x @ weight) if bias is None else lambda x: x @ weight + bias


def _bias(modules: list[nn.Module]) -> Tensor | None:
    """Biases of all modules, zeros for a module without one; None if none has one."""
    biases = [getattr(m, "base_layer", m).bias for m in modules]
    some = next((b for b in biases if b is not None), None)
    if some is None:
        return None
    pairs = zip(biases, modules, strict=True)
    return torch.cat([some.new_zeros(m.out_features) if b is None else b for b, m in pairs])


def _whole(modules: list[nn.Module], dtype: torch.dtype | None, columns: bool = False) -> Tensor:
    """The merged weights of all modules in one tensor, [out of all, in], or [in, out of all] with `columns`. They are
    dequantised and merged one after the other, see `sizes.copying_bytes`."""
    first = getattr(modules[0], "base_layer", modules[0])
    if first is modules[0] and len(modules) == 1 and not columns:
        return plain_weight(first).to(dtype)
    inner, outer = first.in_features, [m.out_features for m in modules]
    shape = (inner, sum(outer)) if columns else (sum(outer), inner)
    whole = torch.empty(shape, dtype=dtype or first.weight.dtype, device=first.weight.device)
    for part, module in zip((whole.t() if columns else whole).split(outer), modules, strict=True):
        _merge_into(part, module)
    return whole


def _packed(weight: Tensor) -> Tensor:
    """A copy of a weight [out, in] in oneDNN's blocks, for `_product` alone."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def best_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _merge_into(out: Tensor, module: nn.Module) -> None:
    """Write the weight of a linear module to `out` [out, in], dequantised, with its active LoRA adapters added."""
    base = getattr(module, "base_layer", module)
    out.copy_(plain_weight(base))
    if base is module or module.disable_adapters:
        return
    for name in (name for name in module.active_adapters if name in module.lora_A):
        if module.fan_in_fan_out or name in module.lora_variant:
            out += module.get_delta_weight(name).to(out.dtype)
        else:  # in one pass: fresh memory costs more than the product
            up, down = (part[name].weight.to(out.dtype) for part in (module.lora_B, module.lora_A))
            out.addmm_(up, down, alpha=module.scaling[name])
