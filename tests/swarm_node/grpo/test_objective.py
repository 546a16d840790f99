"""The objective by hand, for what the oracle does not show: defaults, weights, metrics, splitting."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, tensor

from swarm_node.config import GrpoConfig
from swarm_node.grpo.corrections import find_correction
from swarm_node.grpo.losses import LOSSES, find_loss
from swarm_node.grpo.objective import Correction, Loss, Tokens, clip_range, policy_loss

SEQUENCE = tensor([0, 0, 0, 1, 1, 2])
LENGTHS = tensor([3, 2, 1])
ADVANTAGES = tensor([1.0, -2.0, 0.5])


def loss(ratio: Tensor, config: GrpoConfig, weights: Tensor | None = None, **given: Tensor) -> tuple[Tensor, dict]:
    """Loss at given probability ratios [6]; every token weighs 1 unless told."""
    logprobs = ratio.log() - 1.0
    old = torch.full((6,), -1.0)
    weights = torch.ones(3) if weights is None else weights
    named = find_loss(config.loss), find_correction(config)
    return policy_loss(logprobs, old, SEQUENCE, ADVANTAGES, weights, config, *named, **given)


def test_default_clip_ranges_are_those_of_the_papers():
    assert clip_range(GrpoConfig(), find_loss("dapo")) == (0.2, 0.28)
    assert clip_range(GrpoConfig(), find_loss("grpo")) == (0.2, 0.28)
    assert clip_range(GrpoConfig(), find_loss("gspo")) == (3e-4, 4e-4)
    assert clip_range(GrpoConfig(), find_loss("cispo"))[1] == 5.0
    assert clip_range(GrpoConfig(epsilon_low=0.0, epsilon_high=0.1), find_loss("gspo")) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1 / 9, 1 / 6, 1 / 3]),  # 1 / (3 rollouts * length)
        ("gspo", [1 / 9, 1 / 6, 1 / 3]),
        ("dr_grpo", [1 / 30, 1 / 30, 1 / 30]),  # 1 / (3 rollouts * 10 tokens at most)
        ("dapo", [1 / 6, 1 / 6, 1 / 6]),  # 1 / 6 tokens
        ("cispo", [1 / 6, 1 / 6, 1 / 6]),
    ],
)
def test_token_weights(name, expected):
    weights = find_loss(name).weights(LENGTHS, 10)
    torch.testing.assert_close(weights, tensor(expected))


@pytest.mark.parametrize("name", LOSSES)
def test_weights_are_finite_when_everything_is_masked(name):
    weights = find_loss(name).weights(tensor([0, 0]), 10)
    assert weights.isfinite().all()


def test_clipping_by_hand():
    # A = 1: min(1.5, 1.28) + min(0.5, 0.8) + min(1, 1) = 2.78
    # A = -2: min(-0.4, -1.6) + min(-3, -2.56) = -4.6;  A = 0.5: min(0.5, 0.5)
    value, sums = loss(tensor([1.5, 0.5, 1.0, 0.2, 1.5, 1.0]), GrpoConfig(loss="dapo"))
    assert value.item() == pytest.approx(-(2.78 - 4.6 + 0.5), abs=1e-5)
    assert (sums["clip/high"], sums["clip/low"], sums["clip/count"]) == (1, 1, 6)


def test_delta_bounds_the_loss_of_a_negative_advantage():
    ratio = tensor([1.0, 1.0, 1.0, 9.0, 1.0, 1.0])
    unbounded, _ = loss(ratio, GrpoConfig())
    bounded, _ = loss(ratio, GrpoConfig(delta=4.0))
    assert unbounded - bounded == pytest.approx(2 * (9 - 4), abs=1e-4)


def test_gspo_clips_whole_sequences():
    """Geometric means of the ratios: 1, 1.2, 1; the second has a negative advantage and is not clipped."""
    value, sums = loss(tensor([2.0, 0.5, 1.0, 1.2, 1.2, 1.0]), GrpoConfig(loss="gspo"))
    assert value.item() == pytest.approx(-(3 * 1 - 2 * 2 * 1.2 + 0.5), abs=1e-5)
    value, sums = loss(tensor([2.0, 2.0, 2.0, 0.5, 0.5, 1.0]), GrpoConfig(loss="gspo"))
    assert (sums["clip/high"].item(), sums["clip/low"].item(), sums["clip/count"].item()) == pytest.approx((1, 1, 3))


def test_cispo_caps_the_weight_but_not_the_gradient():
    logprobs = (tensor([7.0, 1.0, 1.0, 1.0, 1.0, 1.0]).log() - 1).requires_grad_()
    step = SEQUENCE, ADVANTAGES, torch.ones(3), GrpoConfig(), find_loss("cispo"), Correction()
    value, sums = policy_loss(logprobs, torch.full((6,), -1.0), *step)
    value.backward()
    torch.testing.assert_close(logprobs.grad, -tensor([5.0, 1.0, 1.0, -2.0, -2.0, 0.5]))
    assert sums["clip/high"] == 1


def test_kl_is_k3_and_zero_at_the_reference():
    ratio = torch.ones(6)
    config = GrpoConfig(beta=0.1)
    at_reference, sums = loss(ratio, config, reference=torch.full((6,), -1.0))
    assert sums["kl"] == 0.0
    away, sums = loss(ratio, config, reference=torch.full((6,), -1.5))  # d = -0.5: e^-0.5 + 0.5 - 1
    assert sums["kl"].item() == pytest.approx(6 * 0.106531, abs=1e-4)
    assert (away - at_reference).item() == pytest.approx(0.1 * 6 * 0.106531, abs=1e-4)


def test_the_mask_drops_drifted_negative_sequences_only():
    sampled = torch.full((6,), -1.0)
    sampled[3:5] = 0.0  # mean drift 1 for the sequence with A = -2
    sampled[0:3] = 0.0  # and for one with A = 1, which stays
    config = GrpoConfig(off_policy_mask=0.5)
    value, _ = loss(torch.ones(6), config, sampled=sampled)
    assert value.item() == pytest.approx(-(3 * 1 + 0.5), abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_sum_over_parts_is_the_whole(name):
    """Sequences may be computed in any microbatch: no normaliser depends on it."""
    config = GrpoConfig(loss=name, beta=0.1, off_policy_mask=0.1)
    rng = torch.Generator().manual_seed(0)
    logprobs, old, reference = (-torch.rand(6, generator=rng) for _ in range(3))
    weights = find_loss(name).weights(LENGTHS, 10)
    named = find_loss(name), find_correction(config)

    def part(keep: Tensor) -> Tensor:
        return policy_loss(
            logprobs[keep], old[keep], SEQUENCE[keep], ADVANTAGES, weights, config, *named, reference=reference[keep]
        )[0]

    whole = part(SEQUENCE >= 0)
    torch.testing.assert_close(part(SEQUENCE == 1) + part(SEQUENCE != 1), whole)


def test_every_loss_has_a_name_in_the_configuration():
    names = get_args(get_args(GrpoConfig.model_fields["loss"].annotation)[0])
    assert set(names) == set(LOSSES)


class Squared(Loss):
    """A fake: the square of the log-probability; every rollout weighs 2."""

    def surrogate(self, tokens: Tokens) -> Tensor:
        return tokens.logprobs.square()

    def weights(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        return torch.full(lengths.shape, 2.0)


def test_a_loss_of_ones_own_is_a_class():
    logprobs = -torch.arange(1.0, 7.0).requires_grad_()
    weights = Squared().weights(LENGTHS, 10)
    step = SEQUENCE, ADVANTAGES, weights, GrpoConfig(), Squared(), Correction()
    value, _ = policy_loss(logprobs, torch.zeros(6), *step)
    assert value.item() == 2 * (1 + 4 + 9 + 16 + 25 + 36)
    assert isinstance(find_loss(f"{__name__}:Squared"), Squared)
