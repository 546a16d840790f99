"""Off-policy corrections: what a sender's log-probabilities may change."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from swarm_node.config import GrpoConfig
from swarm_node.errors import UserError
from swarm_node.grpo.corrections import CORRECTIONS, find_correction
from swarm_node.grpo.objective import Correction, Tokens
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
        rollout.logprobs = [-5.0] * len(rollout.token_ids)
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
    with pytest.raises(UserError, match="grpo.off_policy_mask needs"):
        find_correction(GrpoConfig(correction=f"{__name__}:Watching", off_policy_mask=0.5))
