"""The optimiser's update in the parts that stages of one policy take it in."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from swarm_node.config import GrpoConfig
from swarm_node.errors import CheckpointError
from swarm_node.grpo import optimizer as optimizer_module
from swarm_node.grpo.optimizer import Optimizer
from tests.support.locks import Watched
from tests.support.tiny_policy import make


def fill(model: torch.nn.Module, seed: int) -> None:
    """Random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_clip", [1e-2, 1e3])
def test_two_halves_take_the_step_of_the_whole(grad_clip, dtype):
    config = GrpoConfig(grad_clip=grad_clip, warmup=3, weight_decay=0.1)
    one, two = make("qwen2").to(dtype), make("qwen2").to(dtype)
    whole = Optimizer(one.named_parameters(), config, 1e-3)
    named = list(two.named_parameters())
    halves = [Optimizer(part, config, 1e-3) for part in (named[:7], iter(named[7:]))]
    for seed in range(3):
        fill(one, seed)
        fill(two, seed)
        norm, rate = whole.step()
        together = math.sqrt(sum(half.squares() for half in halves))
        assert together == pytest.approx(norm, rel=1e-6 if dtype == torch.float32 else 1e-2)
        assert {half.rate() for half in halves} == {rate} == {1e-3 * (seed + 1) / 3}
        for half in halves:
            half.apply(min(1.0, grad_clip / together), rate)
            assert half.updates == seed + 1 == whole.updates
        assert all(p.grad is None for p in two.parameters())
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=0, msg=name)
    assert not torch.equal(one.lm_head.weight, make("qwen2").to(dtype).lm_head.weight)


def test_shared_parameters_are_left_out_of_the_norm():
    model = make("qwen2")
    optimizer = Optimizer(model.named_parameters(), GrpoConfig(), 1e-3)
    fill(model, 0)
    expected = sum(float(p.grad.square().sum()) for p in model.parameters())
    head = float(model.lm_head.weight.grad.square().sum())
    assert optimizer.squares() == pytest.approx(expected, rel=1e-5)
    assert optimizer.squares(leave_out=["lm_head.weight"]) == pytest.approx(expected - head, rel=1e-5)
    optimizer.zero_grad()
    assert optimizer.squares() == 0.0
    model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, torch.nan)
    assert math.isnan(optimizer.squares())


def test_a_rebuilt_stage_takes_longer_unshared_steps():
    moved = []
    for scale in (1.0, 1.1):
        model = make("qwen2")
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = Optimizer(model.named_parameters(), GrpoConfig(), 1e-3, ["lm_head.weight"])
        optimizer.rate_scale = scale
        fill(model, 0)
        assert optimizer.step()[1] == 1e-3
        moved.append({name: p.detach() - start[name] for name, p in model.named_parameters()})
    for name, move in moved[0].items():
        expected = move if name == "lm_head.weight" else 1.1 * move
        torch.testing.assert_close(moved[1][name], expected, atol=5e-7, rtol=0, msg=name)
        assert move.abs().max() > 5e-4


def test_nothing_to_update_is_an_update():
    optimizer = Optimizer([], GrpoConfig(grad_clip=0.5), 1e-3)
    optimizer.zero_grad()
    assert optimizer.squares() == 0.0 and optimizer.step() == (0.0, 1e-3)
    optimizer.apply(0.5, 1e-3)
    assert optimizer.updates == 2 and optimizer.weights() == {} == optimizer.state_dict()
    optimizer.load_state_dict({}, 5)
    assert optimizer.updates == 5


def test_other_options_hold_from_the_next_update_on():
    one, two = make(), make()
    optimizers = [Optimizer(m.named_parameters(), c, 1e-3) for m, c in ((one, GrpoConfig()), (two, GrpoConfig()))]
    other = GrpoConfig(weight_decay=0.3, betas=(0.5, 0.6), warmup=7, grad_clip=0.1)
    optimizers[1].go_by(other)
    alone = Optimizer((three := make()).named_parameters(), other, 1e-3)
    for model, optimizer in zip((one, two, three), (*optimizers, alone), strict=True):
        for seed in range(2):
            fill(model, seed)
            optimizer.step()
    for p, q, r in zip(one.parameters(), two.parameters(), three.parameters(), strict=True):
        assert torch.equal(q, r) and not torch.equal(p, q)


def test_an_update_waits_for_copies_of_the_weights(monkeypatch):
    wanted, model = threading.Event(), make()
    monkeypatch.setattr(optimizer_module, "threading", SimpleNamespace(Lock=lambda: Watched(wanted)))
    optimizer = Optimizer(model.named_parameters(), GrpoConfig(), 1e-3)
    before = model.lm_head.weight.detach().clone()
    fill(model, 0)
    updating = threading.Thread(target=optimizer.apply, args=(1.0, 1e-3))
    with optimizer.still():
        updating.start()
        assert wanted.wait(60) and torch.equal(model.lm_head.weight, before)
    updating.join(60)
    assert not updating.is_alive() and not torch.equal(model.lm_head.weight, before)


def test_weights_change_only_while_that_is_announced():
    model = make()
    optimizer = Optimizer(model.named_parameters(), GrpoConfig(), 1e-3)
    seen = []

    class Watch:
        def __enter__(self):
            seen.append(model.lm_head.weight.detach().clone())

        def __exit__(self, *_):
            seen.append(model.lm_head.weight.detach().clone())

    optimizer.updating = Watch
    fill(model, 0)
    before = model.lm_head.weight.detach().clone()
    optimizer.apply(1.0, 1e-3)
    assert torch.equal(seen[0], before) and not torch.equal(seen[1], before)
    assert torch.equal(seen[1], model.lm_head.weight)


def test_a_rebuilt_stages_state_is_taken_over():
    """Its moments are younger than the policy, and its rates longer."""

    def rebuilt(model: torch.nn.Module) -> Optimizer:
        return Optimizer(model.named_parameters(), GrpoConfig(), 1e-3, ["lm_head.weight"])

    model, other = make("qwen2"), make("qwen2")
    before = rebuilt(model)
    before.updates, before.rate_scale = 1000, 1.1
    for seed in range(5):
        fill(model, seed)
        before.step()
    after, kept = rebuilt(other), {name: tensor.clone() for name, tensor in before.state_dict().items()}
    other.load_state_dict(model.state_dict())
    after.load_state_dict(kept, before.updates)
    for one in (model, other):
        fill(one, 9)
    before.step()
    after.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert before.updates == after.updates == 1006 and after.rate_scale == pytest.approx(1.1)
    after.load_state_dict(rebuilt(make("qwen2")).state_dict(), 3)
    assert after.rate_scale == 1.0


def test_state_without_steps_counts_all_updates():
    optimizer = Optimizer(make("qwen2").named_parameters(), GrpoConfig(), 1e-3)
    old = {name: tensor for name, tensor in optimizer.state_dict().items() if not name.startswith("step.")}
    optimizer.load_state_dict(old, 7)
    assert optimizer.updates == 7 and all(state["step"] == 7 for state in optimizer.adamw.state.values())
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict({name: old[name] for name in list(old)[1:]}, 8)
    assert optimizer.updates == 7
