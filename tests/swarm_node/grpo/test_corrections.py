"""Off-policy corrections: what a sender's log-probabilities may change."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nan, tensor

from benchmarks.corrections import TruncatedSequence
from swarm_node.config import GrpoConfig
from swarm_node.errors import UserError
from swarm_node.grpo.corrections import CORRECTIONS, find_correction
from swarm_node.grpo.losses import find_loss
from swarm_node.grpo.objective import Correction, Tokens, policy_loss
from swarm_node.grpo.trainer import Trainer
from swarm_node.types import Sampling
from tests.support.tiny_policy import TinyPolicy, group, make


class Watching(Correction):
    """A fake: ratios are taken to a peer's log-probabilities where there are any, and the loss is halved."""

    seen: list[Tensor] = []

    def old(self, sampled: Tensor, stale: Tensor, foreign: Tensor) -> Tensor:
        self.seen.append(sampled)
        return torch.where(foreign, sampled, torch.nan)

    def factor(self, tokens: Tokens) -> Tensor:
        return torch.full_like(tokens.ratio, 0.5)


def sent(logprobs: bool):
    """A foreign group, with or without the log-probabilities that its sender recorded."""
    foreign = group([1.0, 0.0], lengths=[3, 2], version=9)
    foreign.peer = "12D3KooW"
    for rollout in foreign.rollouts if logprobs else ():
        rollout.turns[0].logprobs = [-5.0] * len(rollout.token_ids)
    return foreign


def step(config: GrpoConfig, *groups) -> dict[str, float]:
    return Trainer(TinyPolicy(make()), config, Sampling(6)).step(groups)


def test_a_senders_logprobs_reach_the_correction():
    Watching.seen.clear()
    config = GrpoConfig(correction=f"{__name__}:Watching")
    given = step(config, sent(True))
    step(config, sent(False))
    with_, without = Watching.seen
    assert with_.tolist() == [-5.0] * 5 and without.isnan().all()
    assert given["clip_ratio/region_mean"] > 0  # ratios are not 1


def test_the_factor_scales_the_loss():
    own = group([1.0, 0.0, 0.0], seed=1)
    halved, whole = (step(GrpoConfig(correction=name), own)["loss"] for name in (f"{__name__}:Watching", "recorded"))
    assert whole != 0 and halved == pytest.approx(whole / 2)


@pytest.mark.parametrize("mask", [None, 0.01])
def test_by_default_a_senders_logprobs_change_nothing(mask):
    config = GrpoConfig(off_policy_mask=mask)
    assert step(config, sent(True))["loss"] == step(config, sent(False))["loss"]


def test_every_correction_has_a_name_in_the_configuration():
    names = get_args(get_args(GrpoConfig.model_fields["correction"].annotation)[0])
    assert set(names) == set(CORRECTIONS)


def test_a_correction_that_cannot_be_used_is_a_user_error():
    with pytest.raises(UserError, match="must name a subclass"):
        find_correction(GrpoConfig(correction="builtins:dict"))


# ------------------------------------------------------------ importance weights; two are plugins, which lost

FIRST = tensor([0.5, 0.5, 0.2, 0.2, 0.1, 0.4, 0.4]).log()  # of the first pass
SEQUENCE = tensor([0, 0, 1, 1, 1, 2, 2])
CLAIMED = SEQUENCE == 2
EXPECTED = {  # sampled with ratios 4, 0.25; 3, 2, unknown; claimed: 4, 0.5
    "truncated": [2, 0.25, 2, 2, 1, 1, 0.5],
    "benchmarks.corrections:TruncatedSequence": [1, 1, 2, 2, 2, 1, 1],
    "benchmarks.corrections:IcePop": [4, 0, 3, 2, 1, 1, 0.5],
}
WEIGHING = list(EXPECTED)
SAMPLED = FIRST - tensor([4.0, 0.25, 3.0, 2.0, nan, 4.0, 0.5]).log()


def gradients(name: str, sampled: Tensor) -> Tensor:
    """Of the loss of seven tokens at ratio 1, with respect to each log-probability: -factor, for advantages of 1."""
    logprobs = FIRST.clone().requires_grad_()
    config = GrpoConfig(correction=name)
    weighing = find_loss("dapo"), find_correction(config)
    ones, foreign = torch.ones(3), CLAIMED
    value, _ = policy_loss(logprobs, FIRST, SEQUENCE, ones, ones, config, *weighing, sampled=sampled, foreign=foreign)
    value.backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize("name", WEIGHING)
def test_importance_weights_by_hand(name):
    torch.testing.assert_close(gradients(name, SAMPLED), -tensor(EXPECTED[name]).float())


@pytest.mark.parametrize("name", WEIGHING)
def test_without_recorded_logprobs_nothing_is_weighed(name):
    torch.testing.assert_close(gradients(name, torch.full((7,), nan)), -torch.ones(7))


@pytest.mark.parametrize("name", ["recorded", *WEIGHING])
def test_weights_do_not_depend_on_the_microbatch(name):
    one, correction = torch.ones(3), find_correction(GrpoConfig(correction=name))

    def part(keep: Tensor) -> Tensor:
        now, sampled, sequence, foreign = (x[keep] for x in (FIRST, SAMPLED, SEQUENCE, CLAIMED))
        step = sequence, one, one, GrpoConfig(correction=name), find_loss("dapo"), correction
        return policy_loss(now, now, *step, sampled=sampled, foreign=foreign)[0]

    torch.testing.assert_close(part(SEQUENCE == 1) + part(SEQUENCE != 1), part(SEQUENCE >= 0))


def test_the_objective_is_decoupled():
    """The clip acts on now / first pass = 1.5, the weight is first pass / sampled = 1.75: 1.75 min(1.5, 1.28)."""
    first, one = tensor([0.2]).log(), torch.ones(1)
    config = GrpoConfig(correction=WEIGHING[0])
    step = torch.zeros(1, dtype=torch.long), one, one, config, find_loss("dapo"), find_correction(config)
    value, _ = policy_loss(first + math.log(1.5), first, *step, sampled=first - math.log(1.75))
    assert value.item() == pytest.approx(-1.75 * 1.28)


CLAIM = st.one_of(st.floats(-65504, 0, width=16), st.sampled_from([0.0, -1e4, math.log(0.4)]))


@pytest.mark.parametrize("name", WEIGHING)
@given(claims=st.tuples(CLAIM, CLAIM))
def test_claims_lower_the_weight_of_their_own_samples_and_change_nothing_else(name, claims):
    claimed, unsaid = SAMPLED.clone(), SAMPLED.clone()
    claimed[CLAIMED], unsaid[CLAIMED] = tensor(claims), nan
    with_, without = gradients(name, claimed), gradients(name, unsaid)
    assert torch.equal(with_[~CLAIMED], without[~CLAIMED])
    assert (with_[CLAIMED] <= 0).all() and (with_[CLAIMED] >= without[CLAIMED]).all()


def test_the_weight_of_a_long_sequence_neither_over_nor_underflows():
    """Of 600 log-ratios -1, as many 1 and one 0.5, whose sum is 0.5: a product would leave float32 on the way."""
    drift = torch.cat([torch.full((600,), -1.0), torch.full((600,), 1.0), tensor([0.5])])
    first, zeros = torch.full_like(drift, -2.0), torch.zeros(1201, dtype=torch.long)
    tokens = Tokens(first, first, first - drift, zeros.bool(), first, first, zeros, 1, 0.2, 0.2, None)
    factor = TruncatedSequence().factor(tokens)
    torch.testing.assert_close(factor, torch.full((1201,), math.exp(0.5)))


@pytest.mark.parametrize("name", WEIGHING)
@pytest.mark.parametrize("claim", [0.0, -1e4])
def test_absurd_claims_leave_the_step_size_alone(name, claim):
    foreign = sent(True)
    for rollout in foreign.rollouts:
        rollout.turns[0].logprobs = [claim] * len(rollout.token_ids)
    own = group([1.0, 0.0, 0.0], seed=1)
    config = GrpoConfig(correction=name)
    claimed, unsaid = step(config, own, foreign), step(config, own, sent(False))
    assert claimed["learning_rate"] == unsaid["learning_rate"] and math.isfinite(claimed["loss"])
