"""AdamW with moments in 8 bits, held to bitsandbytes' own optimiser and bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise
from bitsandbytes.optim import AdamW8bit as Theirs
from torch import nn

from swarm_node.config import GrpoConfig, NodeConfig
from swarm_node.errors import UserError
from swarm_node.grpo import adamw_8bit
from swarm_node.grpo.memory import shape_of
from swarm_node.grpo.optimizer import Optimizer, embeddings_of
from swarm_node.policy.loading import load_policy
from swarm_node.policy.sizes import KNOWN
from swarm_node.storage.checkpoints import CheckpointStore
from tests.support.tiny_policy import make

RATE = 1e-3
NAMES = ("exp_avg", "exp_avg_sq")


def settings(**options: object) -> GrpoConfig:
    return GrpoConfig.model_validate({"optimizer": "adamw_8bit", "grad_clip": 1e9, "betas": (0.9, 0.999)} | options)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def gradients(weight: nn.Parameter, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [0.01 * torch.randn(weight.shape, generator=generator) for _ in range(steps)]


def moment(optimizer: Optimizer, name: str) -> torch.Tensor:
    """A moment of the weight `w`, unpacked."""
    state, table = optimizer.state_dict(), create_dynamic_map(signed=name == "exp_avg")
    return dequantize_blockwise(state[f"{name}.w"], absmax=state[f"{name}_scale.w"], code=table, blocksize=256)


def test_an_update_is_within_bitsandbytes_bounds_of_float32() -> None:
    """Those of its tests/test_optim.py: each step begins with equal weights and moments."""
    mine, exact = parameter(1024, 32), parameter(1024, 32)
    packed = Optimizer([("w", mine)], settings(), RATE)
    whole = Optimizer([("w", exact)], settings(optimizer="adamw"), RATE)
    for gradient in gradients(mine, 20):
        mine.grad, exact.grad = gradient.clone(), gradient.clone()
        packed.step()
        whole.step()
        error = (mine - exact).abs().detach()
        assert error.mean() < 6e-5 and (error / (exact.abs() + 1e-9)).mean() < 6e-4
        for name in NAMES:
            theirs, found = whole.state_dict()[f"{name}.w"], moment(packed, name)
            assert (~torch.isclose(theirs, found, atol=3e-3, rtol=1e-3)).sum() < 20
            theirs.copy_(found)
        mine.data.copy_(exact.data)
    assert packed.state_dict()["exp_avg.w"].dtype == torch.uint8


@pytest.mark.parametrize("part", [512, 2**20])
@pytest.mark.parametrize("shape", [(70, 67), (20, 10), (9000,)])
def test_numbers_are_those_of_bitsandbytes_own_optimiser(
    shape: tuple[int, ...], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw_8bit, "PART", part)
    mine, other = parameter(*shape), parameter(*shape)
    optimizer = Optimizer([("w", mine)], settings(weight_decay=0.1), RATE)
    theirs = Theirs([other], RATE, (0.9, 0.999), weight_decay=0.1 * (len(shape) > 1))
    for gradient in gradients(mine, 5):
        mine.grad, other.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        theirs.step()
        assert torch.equal(mine, other)
    assert torch.equal(optimizer.state_dict()["exp_avg.w"], theirs.state[other]["state1"])


@pytest.mark.parametrize("shape", [(70, 67), (20, 10)])
def test_a_weight_that_lies_transposed_is_updated_alike(shape: tuple[int, int]) -> None:
    plain, lies = parameter(*shape), nn.Parameter(parameter(*shape).detach().t().contiguous().t())
    assert not lies.is_contiguous()
    optimizers = [Optimizer([("w", weight)], settings(), RATE) for weight in (plain, lies)]
    for gradient in gradients(plain, 3):
        for optimizer in optimizers:
            optimizer.named["w"].grad = gradient.clone()
            optimizer.step()
        assert torch.equal(plain, lies)
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_weights_without_gradient_stay_as_they_are() -> None:
    weight = parameter(128, 128)
    before, optimizer = weight.detach().clone(), Optimizer([("w", weight)], settings(), RATE)
    weight.grad = torch.zeros_like(weight)
    weight.grad[0, 0] = 1.0
    optimizer.step()
    assert (weight != before).nonzero().tolist() == [[0, 0]] and weight.isfinite().all()


def test_embeddings_and_small_tensors_keep_float32() -> None:
    model = make("qwen2")
    model.resize_token_embeddings(256)  # 8,192 values, as many as the head has
    optimizer = Optimizer(model.named_parameters(), settings(), RATE, embeddings=embeddings_of(model))
    codes = {name for name, tensor in optimizer.state_dict().items() if tensor.dtype == torch.uint8}
    assert codes == {"exp_avg.lm_head.weight", "exp_avg_sq.lm_head.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights in 16 bits have a master copy, which is updated."""
    one, two = parameter(80, 64).to(dtype), parameter(80, 64).to(dtype)
    whole, broken = (Optimizer([("w", nn.Parameter(w.detach()))], settings(), RATE) for w in (one, two))
    store = CheckpointStore(tmp_path, 1, print)
    for k, gradient in enumerate(gradients(one, 6)):
        if k == 3:
            store.save(1, {"optimizer": broken.state_dict()}, {"updates": broken.updates})
            store.close()
            found = store.load_latest(lambda state: None)
            assert found is not None
            weight = nn.Parameter(broken.named["w"].detach().clone())
            broken = Optimizer([("w", weight)], settings(), RATE)
            broken.load_state_dict(found.tensors["optimizer"], found.state["updates"])
        for optimizer in (whole, broken):
            optimizer.named["w"].grad = gradient.to(dtype)
            optimizer.step()
    assert torch.equal(whole.named["w"], broken.named["w"]) and whole.updates == broken.updates == 6
    assert all(torch.equal(tensor, broken.state_dict()[name]) for name, tensor in whole.state_dict().items())


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_moments_of_the_other_kind_are_refused(kind: str) -> None:
    kinds = {name: Optimizer([("w", parameter(80, 64))], settings(optimizer=name), RATE) for name in (kind, "adamw")}
    kinds.setdefault("adamw_8bit", Optimizer([("w", parameter(80, 64))], settings(), RATE))
    other = next(name for name in kinds if name != kind)
    with pytest.raises(UserError, match=f"--set grpo.optimizer={other}$"):
        kinds[kind].load_state_dict(kinds[other].state_dict(), 3)
    assert kinds[kind].updates == 0


def test_a_renewed_matrix_begins_with_zero_moments() -> None:
    weight, fresh = parameter(80, 64), Optimizer([("w", parameter(80, 64))], settings(), RATE).state_dict()
    optimizer = Optimizer([("w", weight)], settings(), RATE)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.renew("w", torch.zeros_like(weight))
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in optimizer.state_dict().items())


def test_other_devices_are_refused() -> None:
    with pytest.raises(UserError, match="is for CPUs and NVIDIA GPUs, not for meta: leave it out"):
        Optimizer([("w", nn.Parameter(torch.empty(4, device="meta")))], settings(), RATE)


def test_the_estimate_counts_the_bytes_of_the_state() -> None:
    policy = load_policy(NodeConfig().policy, NodeConfig().rollouts, lambda sentence: None)
    optimizer = Optimizer(policy.model.named_parameters(), settings(), RATE, embeddings=embeddings_of(policy.model))
    held = sum(tensor.nbytes for tensor in optimizer.state_dict().values())
    shape = shape_of(policy)
    packed = type(shape)(**vars(shape) | {"adamw_8bit": True})
    assert held == pytest.approx(packed.optimiser, rel=0.02) and held < 0.6 * shape.optimiser
    whole = [type(one)(**vars(one) | {"adamw_8bit": True}) for one in (model.whole() for model in KNOWN)]
    assert all(one.optimiser < 0.6 * 8 * one.trained for one in whole)
