"""Sweeps over real runs: what a file may say, resuming, failures, Optuna, and the end of its processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.cli.commands.sweep import SearchRange, Sweep, SweepSetting, study_in, table_of, take_up
from swarm_node.errors import UserError
from swarm_node.observability.jsonl import each_record
from swarm_node.storage.rundir import RunDir
from tests.support.waiting import until

HEAD = 'objective = "reward"\n'
CONFIG = """
[config]
rounds = 2
tasks = ["small/gcd"]
rollouts = { groups = 2, group_size = 2, max_new_tokens = 4 }
eval.questions = 0
policy.threads = 1
"""
GRID = HEAD + "parallel = 2\n" + CONFIG + '[search]\n"grpo.loss" = ["dapo", "gspo"]\n'


def write(text: str) -> Path:
    path = Path("find.toml")
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"grpo.loss"', '"grpo.los"'), "unknown key grpo.los in [search]; did you mean grpo.loss?"),
        (('"dapo"', '"dpao"'), "did you mean 'dapo'?"),
        (("parallel = 2", "paralel = 2"), "unknown key paralel in find.toml; known are folder"),
        (("parallel = 2", "parallel = 0"), "parallel in find.toml: must be greater than 0"),
        (("rounds = 2", "minutes = 2"), "set `rounds` in [config]"),
        ((HEAD, ""), 'eval.questions = 0 leaves no held-out figure: set objective = "reward"'),
        (('["dapo", "gspo"]', "[]"), "grpo.loss in [search] has no value"),
        (('"grpo.loss" = ["dapo", "gspo"]', '"grpo.delta" = {low = 1, high = 2}'), "a grid needs `steps`"),
        (('"grpo.loss" = ["dapo", "gspo"]', '"grpo.delta" = {low = 2, high = 1}'), "low must be less than high"),
    ],
)
def test_a_file_that_makes_no_sense_starts_nothing(change: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Sweep(write(GRID.replace(*change)))
    assert not Path("runs").exists()


def test_the_rounds_of_a_sweep_are_in_its_file() -> None:
    done = CliRunner().invoke(app, ["sweep", str(write(GRID)), "--rounds", "3"])
    assert done.exit_code == 2 and "find.toml has them, as `rounds = 3` in [config]" in done.output
    assert not Path("runs").exists()


def test_the_objective_goes_by_own_rewards() -> None:
    Path("judge.py").write_text("def brief(completions, **columns):\n    return [1.0 for _ in completions]\n")
    text = GRID.replace(HEAD, "").replace("eval.questions = 0", 'rewards.functions = ["judge.py:brief"]')
    assert Sweep(write(text)).objective == "held-out pass@1, at the end"
    weights = '"rewards.checker_weight" = [0.0{}]\n'
    assert Sweep(write(text + weights.format(""))).objective == "held-out mean reward, at the end"
    with pytest.raises(UserError, match=r"rewards\.checker_weight is 0 in some settings.*objective = \"reward\""):
        Sweep(write(text + weights.format(", 1.0")))


def test_ranges_become_values() -> None:
    assert SearchRange(low=1e-4, high=1e-2, log=True, steps=3).values() == [1e-4, 1e-3, 1e-2]
    assert SearchRange(low=0, high=3, steps=4).values() == [0, 1, 2, 3]
    assert SearchRange(low=0, high=0.5, steps=2).values() == [0.0, 0.5]


def test_settings_are_numbered_and_told_from_noise() -> None:
    whole = Sweep(write(GRID))
    scores = [[0.50, 0.52], [0.48, 0.50], [0.10, 0.10], [0.3]]
    columns, rows = table_of(whole, [SweepSetting({"grpo.loss": "x"}, {}, "x", each) for each in scores])
    assert columns == ["", "grpo.loss", "reward, last tenth", "against the best", "runs"]
    assert rows == [
        ["1", "x", "0.510 ± 0.127", "best", "2"],
        ["2", "x", "0.490 ± 0.127", "within noise", "2"],
        ["3", "x", "0.100 ± 0.000", "worse", "2"],
        ["4", "x", "0.300", "unknown, one seed", "1"],
    ]


@pytest.mark.slow
def test_a_grid_is_run_once_and_continued() -> None:
    said: list[str] = []
    first = Sweep(write(GRID), said.append)
    settings = first.run()
    assert [each.failed for each in settings] == [[], []] and {each.values["grpo.loss"] for each in settings} == {
        "dapo",
        "gspo",
    }
    folders = [first.directory(each, 0) for each in settings]
    assert said[0].endswith("complete already: 0") and len(said) == 3
    assert re.fullmatch(
        r"1/2 loss-\w+-\w+ seed 0: [01]\.\d+, took \d+:\d\d; \d+:\d\d left, until \w+ \d\d:\d\d", said[1]
    )
    assert re.fullmatch(r"2/2 loss-\w+-\w+ seed 0: [01]\.\d+, took \d+:\d\d", said[2])
    before = [(folder / "metrics.jsonl").read_bytes() for folder in folders]
    scores = [each.score for each in Sweep(write(GRID), said.append).run()]
    assert said[3].endswith("complete already: 2") and scores == [each.score for each in settings]
    assert [(folder / "metrics.jsonl").read_bytes() for folder in folders] == before
    done = CliRunner().invoke(app, ["sweep", str(write(GRID.replace("rounds = 2", "rounds = 3"))), "--csv", "out.csv"])
    assert done.exit_code == 0, done.output
    assert "settings, the best first" in done.output and "settings that differ" in done.output
    for folder, records in zip(folders, before, strict=True):
        whole = (folder / "metrics.jsonl").read_bytes()
        assert whole.startswith(records) and [r["round"] for r in each_record(folder / "metrics.jsonl")] == [1, 2, 3]
    assert Path("out.csv").read_text().startswith("group,measure")


@pytest.mark.slow
def test_a_run_that_fails_is_reported() -> None:
    Path("judge.py").write_text("def crash(completions, **columns):\n    return 1 / 0\n")
    judge = 'rewards.functions = ["judge.py:crash"]\n[search]\n"grpo.loss" = ["dapo"]\n'
    done = CliRunner().invoke(app, ["sweep", str(write(HEAD + CONFIG + judge))])
    assert done.exit_code == 2
    assert "1/1 failed after 0:" in done.output and "failed runs: 1;" in done.output
    assert done.output.count("judge.py, line 2: ZeroDivisionError") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_optuna_chooses_settings_and_goes_on() -> None:
    search = '[search]\n"grpo.learning_rate" = {low = 1e-5, high = 1e-3, log = true}\n'
    text = f'{HEAD}method = "optuna"\ntrials = 1\n{CONFIG}{search}'
    said: list[str] = []
    (first,) = Sweep(write(text), said.append).run()
    assert 1e-5 <= first.values["grpo.learning_rate"] <= 1e-3 and first.score is not None
    settings = Sweep(write(text.replace("trials = 1", "trials = 2")), said.append).run()
    assert "trials in runs/find: 2, complete already: 1" in said
    assert len({each.name for each in settings}) == 2 and first.name in {each.name for each in settings}
    assert len(list(Path("runs/find").glob("*/metrics.jsonl"))) == 2


@pytest.mark.filterwarnings("default")
def test_an_interrupted_search_is_taken_up_repeatedly(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    study.ask().suggest_float("a", 0, 1)
    value = study.trials[0].params["a"]
    study.ask()  # the sweep was killed before it got a value
    for _ in range(2):
        take_up(study, ["a"])
        assert [each.state.name for each in study.trials] == ["FAIL", "FAIL", "WAITING"]
    assert study.ask().suggest_float("a", 0, 1) == value


@pytest.mark.parametrize(
    ("saved", "measured", "complete"), [(2, 2, True), (1, 1, False), (2, 1, False), (2, None, False)]
)
def test_a_complete_run_has_saved_its_figures(saved: int, measured: int | None, complete: bool) -> None:
    text = GRID.replace(HEAD, "").replace("eval.questions = 0", "eval.questions = 4").replace('["dapo", ', "[")
    sweep = Sweep(write(text))
    setting = sweep.setting({"grpo.loss": "gspo"})
    newest = sweep.directory(setting, 0) / f"checkpoints/round-{saved:08}"
    newest.mkdir(parents=True)
    newest.parents[1].joinpath("metrics.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    figures = {} if measured is None else {"held_out_figures": {"round": measured}}
    newest.joinpath("state.json").write_text(json.dumps({"state": figures}))
    assert sweep.is_complete(setting, 0) == complete


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_run_outlives_its_sweep(number: signal.Signals, code: int) -> None:
    path = write(GRID.replace("rounds = 2", "rounds = 100_000").replace('["dapo", "gspo"]', '["dapo"]'))
    with subprocess.Popen([sys.executable, "-m", "swarm_node", "sweep", str(path)]) as process:
        until(lambda: any(Path("runs/find").glob("*/metrics.jsonl")), 120)
        process.send_signal(number)
        assert process.wait(120) == code
    (folder,) = [each.parent for each in Path("runs/find").glob("*/metrics.jsonl")]
    until(lambda: not RunDir(folder).in_use, 60)
    assert list((folder / "checkpoints").iterdir()), "it saved before it ended"
