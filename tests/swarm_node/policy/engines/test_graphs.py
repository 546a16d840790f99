"""The engine for GPUs, whose steps have one shape, makes the native engine's samples, on a CPU and on a GPU if any."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_node.policy.engines import base, graphs
from swarm_node.policy.engines.base import uniforms
from swarm_node.policy.engines.graphs import Batch, GraphEngine
from swarm_node.policy.engines.native import Decoder, NativeEngine
from swarm_node.types import Sampling
from tests.support.tiny_models import make
from tests.swarm_node.policy.engines.test_native import EOS, NATIVE, OFTEN, PROMPTS

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal"}
"""Operations that make the host wait for the device."""


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(graphs, "ROOM", 3)
    monkeypatch.setattr(graphs, "LOOK", 2)


def both(model, eos, sampling, cancelled=tuple, n=5):
    uniform = uniforms([1, 2, 3, 4], n, sampling.max_new_tokens)
    return [
        kind(model, eos, 0).decode(PROMPTS, n, sampling, uniform, cancelled) for kind in (NativeEngine, GraphEngine)
    ]


def assert_same(native, static):
    assert [(ids, done) for ids, _, done in native] == [(ids, done) for ids, _, done in static]
    for (_, ours, _), (_, theirs, _) in zip(native, static, strict=True):
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), atol=1e-4, rtol=0)


@pytest.mark.parametrize("eos", [EOS, OFTEN, [384]])
@pytest.mark.parametrize("kind", NATIVE)
def test_steps_of_one_shape_make_the_same_samples(kind, eos, device):
    assert_same(*both(make(kind).to(device), eos, Sampling(20, temperature=0.9, top_p=0.95)))


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_short_limits_are_kept(limit, device):
    native, static = both(make("qwen2").to(device), [384], Sampling(limit))
    assert_same(native, static)
    assert {len(ids) for ids, _, _ in static} == {limit}


def test_the_grid_shrinks_when_half_has_ended(monkeypatch, device):
    sizes = []
    pick = graphs.StaticCache.pick
    monkeypatch.setattr(
        graphs.StaticCache, "pick", lambda self, *kept: (sizes.append(kept[1].numel()), pick(self, *kept))[1]
    )
    assert_same(*both(make("llama").to(device), OFTEN, Sampling(20)))
    assert sizes and sizes[0] <= 10


def test_cancelled_prompts_end_and_the_others_go_on(device):
    model, asked = make("llama").to(device), []

    def cancelled():
        asked.append(1)
        return [1] if len(asked) > 1 else ()

    samples = both(model, [384], Sampling(12), tuple)[0]
    asked.clear()
    uniform = uniforms([1, 2, 3, 4], 5, 12)
    static = GraphEngine(model, [384], 0).decode(PROMPTS, 5, Sampling(12), uniform, cancelled)
    for i, ((ids, _, _), (whole, _, _)) in enumerate(zip(static, samples, strict=True)):
        assert ids == (whole[: len(ids)] if i // 5 == 1 else whole)
        assert len(ids) < 12 or i // 5 != 1


@pytest.mark.parametrize(("top_p", "blocks_above"), [(1.0, 2**15), (0.9, 2**15), (1.0, 0)])
def test_steps_make_no_wait_for_the_device(monkeypatch, top_p, blocks_above):
    monkeypatch.setattr(base, "BLOCKS_ABOVE", blocks_above)  # 0: sampling as from a large vocabulary
    seen, masks = set(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(function.name().split(".")[0])
            if function.name().split(".")[0] in ("aten::index", "aten::index_put_"):
                masks.extend(x for x in args[1] if x is not None and x.dtype == torch.bool)
            return function(*args, **kwargs or {})

    with torch.no_grad():
        decoder, sampling = Decoder(make("qwen2"), "joined"), Sampling(8, top_p=top_p)
        batch = Batch(decoder, PROMPTS, 3, sampling, uniforms([1, 2, 3, 4], 3, 8), torch.tensor(EOS))
        with Watch():
            batch.run(3)
            batch.make_room(3)
            batch.run(2)
    assert batch.step == 5 and batch.cache.room == 6
    assert {"aten::mm", "aten::index_copy_"} <= seen
    assert not WAITS & seen
    assert not masks  # an index by a mask asks how many cells it has
