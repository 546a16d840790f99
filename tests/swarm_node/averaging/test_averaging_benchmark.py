"""Every arm of the benchmark runs, and its figures are consistent."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import averaging, averaging_lm
from benchmarks.averaging import ATTACKERS, DEFENCES, LIES, LM
from benchmarks.averaging_lm import Corpus, Run, Task, peak

STEPS, EVERY = 24, 8
TINY = Task(
    replicas=2,
    steps=STEPS,
    hidden=16,
    layers=4,
    batch=1,
    length=8,
    learning_rate=2e-3,
    warm_up=2,
    held_out=4,
    start_steps=1,
)


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Corpus:
    rng = torch.Generator().manual_seed(0)
    files = [torch.randint(97, 101, (300,), generator=rng, dtype=torch.uint8) for _ in range(9)]
    corpus = Corpus(files[-1], files[-1], files[:-1], "0" * 64)
    monkeypatch.setattr(averaging_lm, "CACHE", tmp_path / ".cache")
    monkeypatch.setattr(averaging_lm, "corpus", lambda: corpus)
    return corpus


def anew(name: str) -> dict[str, Any]:
    """The arm with an exchange of every fragment each 8 steps, instead of its own rate."""
    arm = LM.get(name) or ATTACKERS[name]
    return Run(TINY, replace(arm, every=min(arm.every, EVERY)), seed=0).figures()


run = cache(anew)
"""The figures that several tests look at."""


@pytest.mark.parametrize("name", LM)
def test_every_arm_runs(name: str) -> None:
    figures = run(name)
    assert figures["loss_before"] > figures["loss"] > 0 and len(figures["loss_by_replica"]) == 2
    assert (
        STEPS - 1 <= figures["curve"][-1][0] <= STEPS
        and figures["curve"][0][0] == 0
        and figures["curve"][0][2] <= figures["curve"][-1][2] <= figures["bytes"]
    )
    assert 0 <= figures["peak_bytes_per_s"] <= figures["bytes"] * 2
    assert figures["cpu_training_s"] <= figures["cpu_s"]
    if name == "none":
        assert figures["bytes"] == 0 and figures["counts"] == {}
    else:
        assert figures["counts"]["exchanges"] >= 2
        assert figures["bytes"] >= figures["counts"]["bytes"] > 0, "bodies and heads"


def test_averaging_after_each_step_leaves_one_model() -> None:
    figures = run("per_step")
    assert figures["spread"] < 1e-7 and figures["loss_of_mean"] == pytest.approx(figures["loss"], abs=1e-5)
    values = figures["parameters"]
    assert figures["counts"]["exchanges"] == STEPS
    assert figures["counts"]["bytes"] == pytest.approx(STEPS * 4 * values, rel=0.02), "2 (N - 1) / N of the weights"
    assert run("none")["spread"] > 1e-4


def test_pairs_send_the_bytes_of_codec_and_schedule() -> None:
    whole, coarse = run("noloco"), run("noloco 4bit streaming")
    exact = 4 * whole["parameters"] * whole["counts"]["exchanges"]
    assert whole["counts"]["bytes"] == pytest.approx(exact, rel=0.01), "whole blocks"
    assert coarse["counts"]["bytes"] < 0.2 * whole["counts"]["bytes"]
    assert coarse["counts"]["exchanges"] > 2 * whole["counts"]["exchanges"], "four fragments"


def test_a_run_is_the_same_every_time() -> None:
    first, second = run("noloco 8bit streaming"), anew("noloco 8bit streaming")
    assert {**first, "cpu_s": 0, "cpu_training_s": 0} == {**second, "cpu_s": 0, "cpu_training_s": 0}


@pytest.mark.parametrize("lie", LIES)
def test_lies_arrive(lie: str) -> None:
    """Of two replicas one lies, which changes the other."""
    honest, lied_to = run("0 off"), run(f"1 {lie} off")
    assert lied_to["counts"]["exchanges"] > 0 and len(lied_to["loss_by_replica"]) == 1
    assert lied_to["loss"] != honest["loss_by_replica"][0]


def test_all_attackers_are_there() -> None:
    assert len(ATTACKERS) == len(DEFENCES) * (1 + 2 * len(LIES))
    assert {(arm.liars, arm.lie) for arm in ATTACKERS.values()} >= {(0, ""), (1, "flip"), (2, "drift")}


def test_shards_have_all_text_once(text: Corpus) -> None:
    for alike in (True, False):
        assert sorted(torch.cat(text.shards(3, alike)).tolist()) == sorted(torch.cat(text.files).tolist())
    assert torch.equal(torch.cat(text.shards(3, False)), torch.cat(text.files)), "neighbouring files"
    assert torch.equal(text.shards(3, True)[1][:300], text.files[1])


def test_the_peak_is_the_fullest_second() -> None:
    assert peak([0, 10, 10, 10, 10, 30, 35, 35, 36]) == 26
    assert peak([7, 7]) == 7, "what was sent at once"


def test_figures_are_written_once_and_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(averaging, "FOLDER", tmp_path)
    monkeypatch.setattr(averaging, "PLOT", tmp_path / "plot.png")
    monkeypatch.setattr(averaging, "PARTS", {"lm": (TINY, LM), "attackers": (TINY, ATTACKERS)})
    arms = ["per_step", "0 off", "1 flip all"]
    averaging.main(["--arms", *arms, "--seeds", "0"])
    written = sorted(tmp_path.rglob("*.json"))
    assert len(written) == 3 and json.loads(written[0].read_text())["seed"] == 0
    before = [path.stat().st_mtime_ns for path in written]
    averaging.main(["--arms", *arms, "--seeds", "0"])
    assert [path.stat().st_mtime_ns for path in written] == before
    averaging.main(["--report"])
    report = (tmp_path / "report.md").read_text()
    assert "| per_step | 1 |" in report and "| 1 flip | own |" in report
    assert (tmp_path / "plot.png").stat().st_size > 1000
