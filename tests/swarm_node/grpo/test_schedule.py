"""Schedules of the learning rate, held to torch's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR, LRScheduler

from swarm_node.config import GrpoConfig, NodeConfig, load_config
from swarm_node.errors import UserError
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.grpo.schedule import decay
from swarm_node.runtime.api import train
from tests.support.tiny_policy import make

RATE, ROUNDS, FINAL = 3e-4, 7, 0.1


def torchs(schedule: str, warmup: int) -> list[float]:
    """The rates of torch's schedulers, a step a round, two rounds beyond the end."""
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    falling: LRScheduler = LinearLR(adamw, 1.0, FINAL, ROUNDS)
    if schedule == "cosine":
        falling = CosineAnnealingLR(adamw, ROUNDS, RATE * FINAL)
    rising = [LinearLR(adamw, 1 / warmup, 1.0, warmup - 1)] if warmup else []
    both = ChainedScheduler([falling, *rising], adamw)
    rates = []
    for _ in range(ROUNDS + 1):
        rates.append(adamw.param_groups[0]["lr"])
        adamw.step()
        both.step()
    return rates


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_rates_are_those_of_torch(schedule: Any, warmup: int) -> None:
    config = GrpoConfig(schedule=schedule, final_rate=FINAL, warmup=warmup)
    optimizer = Optimizer(make().named_parameters(), config, RATE)
    rates = []
    for round in range(ROUNDS + 1):
        optimizer.decay = decay(config, round, ROUNDS)
        rates.append(optimizer.step()[1])
    # With a warm-up torch's cosine is recursive, and wrong once another scheduler has changed the rate.
    warm = [min(1.0, (n + 1) / warmup) if warmup else 1.0 for n in range(ROUNDS + 1)]
    expected = torchs(schedule, 0 if schedule == "cosine" else warmup)
    if schedule == "cosine":
        expected = [rate * factor for rate, factor in zip(expected, warm, strict=True)]
    assert rates == pytest.approx(expected, rel=1e-9)


def test_the_rate_stays_after_the_end() -> None:
    short = GrpoConfig(schedule="cosine", final_rate=0.25, schedule_rounds=4)
    assert [decay(short, round, 100) for round in (4, 5, 99)] == [0.25] * 3


def test_the_rate_falls_with_the_larger_part_of_rounds_and_time() -> None:
    linear = GrpoConfig(schedule="linear")
    assert [decay(linear, 1, math.inf, part) for part in (0.0, 0.25, 1.0, 1.5)] == [1.0, 0.75, 0.0, 0.0]
    assert decay(linear, 10, 20, 0.25) == 0.5 and decay(linear, 1, 20, 0.5) == 0.5
    by_rounds = GrpoConfig(schedule="linear", schedule_rounds=40)
    assert decay(by_rounds, 10, 20, 0.9) == 0.75, "`schedule_rounds` is what was asked for"
    assert decay(GrpoConfig(), 10, 20, 0.5) == decay(GrpoConfig(schedule="constant"), 10, 20, 0.5) == 1.0


def test_a_run_without_end_needs_schedule_rounds() -> None:
    for sets in (["minutes=5", "pipeline.stages=2"], ["swarm=some.toml"]):
        with pytest.raises(UserError, match='grpo.schedule = "linear" has to know where it ends'):
            load_config(sets=["grpo.schedule=linear", *sets])
        load_config(sets=["grpo.schedule=linear", "grpo.schedule_rounds=50", *sets])
        load_config(sets=["grpo.schedule=linear", "rounds=50", *sets])
    for end in ([], ["minutes=5"], ["swarm=some.toml", "minutes=5"]):
        load_config(sets=["grpo.schedule=linear", *end])


def test_a_resumed_run_has_the_same_rates(tmp_path: Path) -> None:
    """Rewards by turns, so that every round makes an update; the rates of the rounds are those of the schedule."""
    (tmp_path / "judge.py").write_text(
        "def by_turns(completions, **columns):\n    return [i % 2 for i in range(len(completions))]\n"
    )
    table = {
        "rounds": 4,
        "tasks": ["small/gcd"],
        "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
        "eval": {"questions": 0},
        "rewards": {"checker_weight": 0.0, "functions": ["judge.py:by_turns"]},
        "grpo": {"schedule": "cosine", "warmup": 2, "learning_rate": 1e-3, "batch_groups": 0},
    }
    whole = train(NodeConfig.model_validate(table | {"run_dir": "whole"}), quiet=True)
    for rounds in (2, 4):
        schedule = table["grpo"] | {"schedule_rounds": 4}
        parts = train(table | {"run_dir": "parts", "rounds": rounds, "grpo": schedule}, quiet=True)
    rates = [[record["learning_rate"] for record in result.metrics()] for result in (whole, parts)]
    cosine = [(1 + math.cos(math.pi * n / 4)) / 2 for n in range(4)]
    assert (
        rates[0]
        == rates[1]
        == pytest.approx([1e-3 * c * w for c, w in zip(cosine, (0.5, 1, 1, 1), strict=True)], rel=1e-5)
    )
    assert whole.checkpoint is not None and parts.checkpoint is not None
    one, two = ((each / "policy.safetensors").read_bytes() for each in (whole.checkpoint, parts.checkpoint))
    assert one == two
