"""The recovery benchmark under GRPO: what is put in the place of a lost adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.recovery import RL_ARMS
from benchmarks.recovery_rl import Arm, Run, Task
from benchmarks.sharing_settings import SETTINGS, Setting
from swarm_node.policy.policy import save
from swarm_node.policy.starter import build_model, build_tokenizer

TASKS = ["small/gcd", "small/lcm"]
TINY = Task(steps=5, groups=2, rank=2, every=2, watched=2)
LOST_AT = 3
TRACE: list[tuple[int, ...]] = [(1,) if step == LOST_AT else () for step in range(TINY.steps)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("four layers")
    tokenizer = build_tokenizer(["What is the greatest common divisor of 12 and 18?"] * 3)
    save(build_model(len(tokenizer), layers=4, hidden=32, seed=0), tokenizer, out)
    return out


@pytest.fixture
def setting(folder: Path) -> Setting:
    """A random model, and a reward that it earns."""
    rewards = {"checker_weight": 0.0, "functions": [{"path": "tests.swarm.parity:even"}]}
    return replace(
        SETTINGS["plain"],
        tasks=lambda peer: TASKS,
        held_out=TASKS,
        start=lambda seed, peer: folder,
        rewards=rewards,
        max_new_tokens=4,
        learning_rate=1e-2,
    )


def run(setting: Setting, arm: Arm) -> Run:
    return Run(TINY, arm, TRACE, seed=0, setting=setting)


def values(mine: Run, stage: int) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in mine.tensors(stage).items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    "name", [name if name == "checkfree+" else pytest.param(name, marks=pytest.mark.long) for name in RL_ARMS]
)
def test_every_arm_is_as_without_losses_until_one(setting: Setting, name: str) -> None:
    arm = RL_ARMS[name]
    figures, without = run(setting, arm).figures(), run(setting, Arm(swapped=arm.swapped)).figures()
    assert figures["rewards"][:LOST_AT] == without["rewards"][:LOST_AT] and len(figures["rewards"]) == TINY.steps
    assert [step for step, _ in figures["curve"]] == [0, 2, 4, 5]
    assert figures["updates"] > 0
    assert [(r["step"], r["stages"]) for r in figures["rebuilt"]] == ([(LOST_AT, [1])] if arm.method else [])


def test_each_method_replaces_a_lost_adapter_as_named(setting: Setting) -> None:
    """`replica`: as it was one update ago; `fresh`: as it began; others stay, and learn on."""
    mine = run(setting, Arm())
    start = values(mine, 1)
    for _ in range(2):
        mine.replica, before = mine.states(), values(mine, 1)
        mine.node.learn(mine.node.collect().groups)
    now, other = values(mine, 1), values(mine, 2)
    assert mine.optimizer.updates == 2 and not equal(before, now) and not equal(before, start)
    mine.arm = Arm("replica")
    mine.rebuild([1])
    assert equal(values(mine, 1), before) and equal(values(mine, 2), other) and not mine.faster
    assert {float(mine.state(p)[3]) for p in mine.tensors(1).values()} == {1.0}
    mine.arm = Arm("fresh")
    mine.rebuild([1])
    assert equal(values(mine, 1), start) and equal(values(mine, 2), other) and mine.faster == {1}
    assert {float(t.abs().sum()) for p in mine.tensors(1).values() for t in mine.state(p)[1:]} == {0.0}
    assert {float(mine.state(p)[3]) for p in mine.tensors(2).values()} == {2.0}
    mine.arm, mine.norms = Arm("checkfree"), [1.0, 9.0, 3.0, 9.0]
    first = values(mine, 0)
    mine.rebuild([1])
    for name, tensor in values(mine, 1).items():
        torch.testing.assert_close(tensor, (first[name] + 3 * other[name]) / 4)


def test_a_stage_made_anew_learns_a_tenth_faster(setting: Setting) -> None:
    one, two = run(setting, Arm()), run(setting, Arm())
    two.faster = {1}
    start = values(one, 1)
    for mine in (one, two):
        mine.node.learn(mine.node.collect().groups)
    plain, fast = values(one, 1), values(two, 1)
    assert equal(values(one, 2), values(two, 2)) and not equal(plain, start)
    for name, was in start.items():
        torch.testing.assert_close(fast[name] - was, 1.1 * (plain[name] - was))


def test_norms_are_of_the_gradient_before_clipping(setting: Setting) -> None:
    mine = run(setting, Arm())
    mine.optimizer.grad_clip = 1e-6
    learned = mine.node.learn(mine.node.collect().groups)
    assert sum(norm**2 for norm in mine.norms) == pytest.approx(learned["grad_norm"] ** 2, rel=1e-4)
    assert learned["grad_norm"] > 1e-6


def test_odd_microbatches_run_in_the_other_order(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, orders = run(setting, Arm(swapped=True)), []
    forward = type(mine.inner).forward

    def noted(self, *args, **kwargs):
        orders.append([list(mine.layers).index(layer) for layer in self.layers])
        return forward(self, *args, **kwargs)

    collected = mine.node.collect()
    monkeypatch.setattr(type(mine.inner), "forward", noted)
    mine.node.learn(collected.groups)
    assert mine.optimizer.updates == 1
    assert orders == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert mine.inner.layers is mine.layers
