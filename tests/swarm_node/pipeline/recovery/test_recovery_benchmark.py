"""The recovery benchmark: traces, costs, and that every arm does what it says."""

from __future__ import annotations

from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recovery, recovery_lm
from benchmarks import recovery_costs as costs
from benchmarks.averaging_lm import Corpus
from benchmarks.recovery import ARMS, WITHOUT
from benchmarks.recovery_lm import Arm, Run, Task, failures, nearest, swapped

TINY = Task(steps=12, hidden=16, layers=4, length=8, warm_up=2, held_out=4, watched=2, every=4, learning_rate=1e-2)
LOST_AT = 6
TRACE: list[tuple[int, ...]] = [(1,) if step == LOST_AT else () for step in range(TINY.steps)]


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    files = [torch.randint(97, 101, (600,), generator=rng, dtype=torch.uint8) for _ in range(3)]
    monkeypatch.setattr(recovery_lm, "corpus", lambda: Corpus(files[0], files[0], files, "0" * 64))


def anew(arm: Arm) -> dict[str, Any]:
    return Run(TINY, arm, TRACE, seed=0).figures()


run = cache(anew)
"""Several tests look at the same figures."""


# --------------------------------------------------------------------- traces, orders, costs


def test_rate_and_seed_decide_a_trace() -> None:
    long = failures(0.1, 1, 2000, 4)
    assert failures(0.1, 1, 100, 4) == long[:100] != failures(0.1, 2, 100, 4)
    assert 0.08 < sum(map(len, long)) / 8000 < 0.12
    assert {stage for lost in long for stage in lost} == {0, 1, 2, 3}


def test_neighbours_and_order() -> None:
    assert nearest([1], 1, 4) == (0, 2)
    assert nearest([1, 2], 1, 4) == (0, 3) == nearest([1, 2], 2, 4)
    assert nearest([0], 0, 4) == (None, 1) and nearest([3], 3, 4) == (2, None)
    assert swapped(4) == [1, 0, 3, 2] and swapped(6) == [1, 0, 2, 3, 5, 4]


def test_what_losses_cost() -> None:
    trace: list[tuple[int, ...]] = [(), (), (0, 2), ()]
    assert costs.rebuilt_s(trace) == [0, 91, 182, 303, 394]
    assert costs.rebuilt_s(trace, costs.REDUNDANT_S)[-1] == 4 * 151 + 30
    assert costs.replica_s(trace)[-1] == 5 * 91 + 30
    assert costs.at([0, 10, 30], 1.5) == 20 and costs.at([0, 10, 30], 2) == 30


def test_a_checkpoint_costs_saving_and_lost_steps() -> None:
    trace = lambda: chain([(), (), (), (1,)], repeat(()))  # noqa: E731
    # saved after two steps; the third is done, lost, and done again
    assert costs.checkpoint_s(trace(), 4, every=2) == [0, 91, 182, 3 * 91 + 30 + 30 + 91, 5 * 91 + 60]
    assert costs.checkpoint_s(trace(), 4, every=2, save_s=0.0, recovery_s=0.0)[-1] == 5 * 91
    assert costs.checkpoint_s(trace(), 4, every=100)[-1] == 3 * 91 + 30 + 4 * 91
    assert costs.checkpoint_s(repeat(()), 4, every=1, save_s=5.0)[-1] == 4 * 91 + 3 * 5.0


def test_the_best_interval_is_the_best() -> None:
    rate, steps = 0.004, 4000
    trace = failures(rate, 0, 20 * steps, 4)
    total = {k: costs.checkpoint_s(trace, steps, k)[-1] for k in (2, costs.best_interval(rate, 4), 60)}
    assert min(total, key=total.__getitem__) == costs.best_interval(rate, 4) == 6


def test_when_a_target_is_reached() -> None:
    curve = [[0, 5.0], [10, 3.0], [20, 4.0], [30, 2.0]]
    assert costs.reached(curve, 3.0) == 10 and costs.reached(curve, 2.5) == 27.5 and costs.reached(curve, 1.0) is None


# --------------------------------------------------------------------- runs


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_as_without_losses_until_one(name: str) -> None:
    arm = ARMS[name]
    figures, without = run(arm), run(Arm(swapped=arm.swapped))
    assert figures["losses"][:LOST_AT] == without["losses"][:LOST_AT]
    assert len(figures["losses"]) == TINY.steps and [s for s, _ in figures["curve"]] == [0, 4, 8, 12]
    if name in WITHOUT:
        assert figures["losses"] == without["losses"] and not figures["rebuilt"]
    else:
        assert figures["losses"][LOST_AT] != without["losses"][LOST_AT]
        assert [(r["step"], r["stage"]) for r in figures["rebuilt"]] == [(LOST_AT, 1)]


def test_the_same_run_gives_the_same_figures() -> None:
    one, two = run(Arm()), anew(Arm())
    assert one["losses"] == two["losses"] and one["loss"] == two["loss"]


def test_odd_microbatches_take_the_other_order() -> None:
    assert run(Arm(swapped=True))["losses"][0] == run(Arm())["losses"][0]
    assert run(Arm(swapped=True))["losses"][-1] != run(Arm())["losses"][-1]
    mine = Run(TINY, Arm(swapped=True), [], seed=0)
    text = mine.batch(0)
    by_hand = Run(TINY, Arm(), [], seed=0)
    by_hand.model.model.layers = torch.nn.ModuleList(by_hand.layers[k] for k in (1, 0, 3, 2))
    assert torch.equal(mine.losses(text, swapped(4)), by_hand.losses(text))
    assert not torch.equal(mine.losses(text), mine.losses(text, swapped(4)))


@pytest.mark.parametrize(("stage", "source", "twins"), [(0, 1, False), (3, 2, False), (1, 0, True), (2, 3, True)])
def test_copies(stage: int, source: int, twins: bool) -> None:
    mine = Run(TINY, Arm("checkfree", twins=twins), [], seed=0)
    for step in range(3):
        mine.learn(step)
    mine.rebuild(3, [stage])
    for name, tensor in mine.tensors(stage).items():
        assert torch.equal(tensor, mine.tensors(source)[name])
    assert not any(p in mine.adam.state for p in mine.groups[stage])
    assert all(p in mine.adam.state for p in mine.groups[source])
    mine.learn(3)
    assert [group["lr"] / TINY.learning_rate for group in mine.adam.param_groups] == pytest.approx(
        [1.1 if k == stage else 1.0 for k in range(5)]
    )


def test_a_middle_stage_is_weighted_by_norms() -> None:
    mine = Run(TINY, Arm("checkfree"), [], seed=0)
    mine.learn(0)
    mine.norms = [3.0, 99.0, 1.0, 99.0]
    expected = {
        name: (3 * a.detach() + b.detach()) / 4
        for (name, a), b in zip(mine.tensors(0).items(), mine.tensors(2).values(), strict=True)
    }
    mine.rebuild(1, [1])
    for name, tensor in mine.tensors(1).items():
        torch.testing.assert_close(tensor.detach(), expected[name])


# --------------------------------------------------------------------- files


def test_finished_runs_are_reported_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recovery, "FOLDER", tmp_path)
    monkeypatch.setattr(recovery, "TASK", TINY)
    monkeypatch.setattr(recovery, "AFTER", range(1, 3))
    arms = ["none", "none, swapped", "checkfree", "checkfree+"]
    options = ["--seeds", "0", "--rates", "0.01", "--arms", *arms]
    recovery.main(options)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert len(files) == 4
    recovery.main(options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == files
    recovery.main(["--report"])
    shown = capsys.readouterr().out
    assert all(f"| {arm} |" in shown for arm in [*arms, "redundant", "checkpoint, 50", "replica"])
    assert (tmp_path / "report.md").exists()
