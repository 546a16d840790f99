"""Comparing runs by their files: groups, intervals, curves, CSV and picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import NodeConfig
from swarm_node.config.own import dump_own
from swarm_node.errors import UserError
from swarm_node.observability.comparing import Comparison, band, read_run, t_95
from swarm_node.observability.comparison_plot import plot_comparison
from swarm_node.observability.evaluations import newest_checkpoint
from swarm_node.storage.best import Best, write_best
from swarm_node.storage.rundir import RunDir


def make_run(name: str, rewards: list[float], held: tuple[float, float] | None = None, /, **settings: Any) -> Path:
    """A run with such rewards, two seconds a round; `held` is pass@1 before and at the end."""
    path = Path("runs") / name
    (path / "checkpoints/round-00000002").mkdir(parents=True)
    config = NodeConfig.model_validate({"run_dir": str(path), "name": name, "rounds": len(rewards), **settings})
    (path / "config.toml").write_text(dump_own(config, config))
    records = [{"round": n, "reward": r, "step_time": 2.0, "num_tokens": 10 * n} for n, r in enumerate(rewards, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if held is not None:
        before, last = ({"table": {"all": {"questions": 9, "pass_1": p, "pass_k": 1.0}}} for p in held)
        state = {"held_out_figures": {"before": before, "last": last, "round": len(rewards)}}
        (path / "checkpoints/round-00000002/state.json").write_text(json.dumps({"state": state}))
    return path


@pytest.fixture
def runs() -> list[Path]:
    return [
        make_run("a", [0.0, 0.2, 0.4], (0.1, 0.5), seed=1),
        make_run("b", [0.2, 0.4, 0.6], (0.1, 0.7), seed=2, resources={"nice": 3}),
        make_run("c", [0.5, 0.5, 0.5], (0.1, 0.2), seed=1, grpo={"loss": "gspo"}),
    ]


def test_runs_that_differ_by_seed_are_one_group(runs: list[Path]) -> None:
    comparison = Comparison([*runs, runs[0]])
    assert [[run.path.name for run in group.runs] for group in comparison.groups] == [["a", "b"], ["c"]]
    assert comparison.differences == {"grpo.loss": ["dapo", "gspo"]}
    assert [group.name for group in comparison.groups] == ["loss=dapo", "loss=gspo"]
    assert comparison.heads == ["1", "2"] and Comparison(runs, apart=True).heads == ["a", "b", "c"]


def test_runs_that_differ_by_seed_are_shown_apart(runs: list[Path]) -> None:
    assert [group.name for group in Comparison(runs, apart=True).groups] == ["a", "b", "c"]
    shown = [CliRunner().invoke(app, ["compare", *map(str, runs[:2]), *more]).stdout for more in ([], ["--apart"])]
    assert "averaged; --apart shows them side by side" in " ".join(shown[0].split())
    assert "0.500" in shown[1] and "0.700" in shown[1] and "averaged" not in shown[1]


def test_final_figures_have_students_interval(runs: list[Path]) -> None:
    group, alone = Comparison(runs).groups
    mean, half = group.final["held-out pass@1, at the end"]
    expected = stats.t.interval(0.95, 1, loc=0.6, scale=stats.sem([0.5, 0.7]))
    assert half is not None and (mean - half, mean + half) == pytest.approx(expected, rel=1e-3)
    assert group.final["reward, last tenth"][0] == pytest.approx(0.5)
    assert group.final["held-out questions"] == (9.0, 0.0)
    assert group.final["held-out pass@1, before"] == pytest.approx((0.1, 0.0))
    assert alone.final["reward, last tenth"] == (0.5, None) and alone.final["tokens"] == (30, None)


def test_columns_say_which_runs_they_are(runs: list[Path]) -> None:
    Path("runs/notes.json").write_text("{}")
    (runs[2] / "config-0001.toml").write_text((runs[2] / "config.toml").read_text())
    shown = CliRunner().invoke(app, ["compare", *map(str, [*runs, "runs/notes.json"])]).stdout
    lines = shown.splitlines()
    assert lines[:2] == ["1 = runs/a and 1 more", "2 = runs/c"], "and the file is left out"
    assert "half of the 95 % interval" in shown and "±" in shown
    assert not any("±" in line for line in lines if line.split()[:1] in (["rounds"], ["tokens"]))
    assert "runs/c: its settings changed while it trained" in shown and "runs/a: its" not in shown
    alone = CliRunner().invoke(app, ["compare", *map(str, runs), "--apart"]).stdout
    assert "interval" not in alone and "±" not in alone and "1 =" not in alone


def test_figures_of_different_questions_are_named(runs: list[Path]) -> None:
    assert Comparison(runs).not_comparable == []
    for path, task in zip(runs, ["gcd a 1", "gcd a 1", "lcm b 1"], strict=True):
        file = path / "checkpoints/round-00000002/state.json"
        document = json.loads(file.read_text())
        document["state"]["held_out"] = {"tasks": [task], "samples": 8}
        file.write_text(json.dumps(document))
    assert Comparison(runs[:2]).not_comparable == []
    remark = "held-out figures are not comparable: different questions"
    assert Comparison(runs).not_comparable == [remark]
    assert remark in CliRunner().invoke(app, ["compare", *map(str, runs)]).stdout


def test_reward_functions_are_named_with_weights() -> None:
    first, second, third = (
        [{"path": "mine.py:brevity", "weight": 0.2}, "mine.py:level"],
        [{"path": "mine.py:brevity", "weight": 0.3}],
        [{"path": "other.py:brevity", "weight": 0.3}],
    )
    paths = [make_run(f"r{n}", [0.1], rewards={"functions": each}) for n, each in enumerate([first, second, third])]
    comparison = Comparison(paths[:2])
    assert comparison.different_texts["rewards.functions"] == ["brevity×0.2, level", "brevity×0.3"]
    assert comparison.not_comparable == ["rewards differ: mean rewards are not comparable"]
    assert len(set(Comparison(paths[1:]).different_texts["rewards.functions"])) == 2


def test_an_empty_list_is_none() -> None:
    functions = [{"path": "mine.py:brevity", "weight": 0.2}]
    paths = [make_run("plain", [0.1]), make_run("own", [0.1], rewards={"functions": functions})]
    assert Comparison(paths).different_texts["rewards.functions"] == ["none", "brevity×0.2"]


@pytest.mark.parametrize(("value", "is_best"), [(0.1, False), (0.3, True)])
def test_the_best_checkpoint_is_better_than_the_start(runs: list[Path], value: float, is_best: bool) -> None:
    write_best(runs[0], Best(2, value, 1.0), "round-00000002")
    assert read_run(runs[0]).final.get("held-out pass@1, best checkpoint") == (value if is_best else None)


def test_values_that_a_run_chose_are_told(runs: list[Path]) -> None:
    settings: dict[str, Any] = {"grpo": {"learning_rate": 1e-4, "off_policy_mask": 0.5}, "rollouts": {"groups": 16}}
    paths = [make_run("automatic", [0.1], (0.1, 0.2)), make_run("chosen", [0.1], (0.1, 0.2), **settings)]
    keys = ["grpo.learning_rate", "grpo.off_policy_mask", "rollouts.groups"]
    file = paths[0] / "checkpoints/round-00000002/state.json"
    state = json.loads(file.read_text())["state"]
    assert [Comparison(paths).different_texts[key][0] for key in keys] == ["unset", "unset", "0"], (
        "of an earlier version"
    )
    state["in_effect"] = {"grpo.learning_rate": 2e-6, "rollouts.groups": 8}
    file.write_text(json.dumps({"state": state}))
    texts = Comparison(paths).different_texts
    assert [texts[key] for key in keys] == [
        ["2e-06 (default)", "0.0001"],
        ["unset", "0.5"],
        ["8 (default)", "16"],
    ]


def test_quantiles_are_those_of_students_t() -> None:
    assert [t_95(n) for n in range(2, 17)] == pytest.approx([stats.t.ppf(0.975, n - 1) for n in range(2, 17)], abs=1e-3)
    assert t_95(1000) == pytest.approx(stats.norm.ppf(0.975), abs=1e-3)


def test_curves_go_over_rounds_and_time(runs: list[Path]) -> None:
    comparison = Comparison(runs)
    (_, over_rounds), _ = comparison.bands("round", "reward")
    assert over_rounds.x.tolist() == [1, 2, 3] and over_rounds.mean == pytest.approx([0.1, 0.3, 0.5])
    (_, over_time), _ = comparison.bands("seconds", "reward")
    assert over_time.x.tolist() == [2, 4, 6]
    (_, held), (_, alone) = comparison.bands("seconds", "pass_1")
    assert held.x.tolist() == [0, 6] and held.mean == pytest.approx([0.1, 0.6])
    assert np.isnan(alone.low).all() and held.low[1] == pytest.approx(0.6 - 12.706 * 0.1, abs=1e-3)


def test_held_out_figures_of_several_runs_are_not_interpolated(runs: list[Path]) -> None:
    for path, times in zip(runs[:2], [(2.0, 2.0, 2.0), (3.0, 5.0, 7.0)], strict=True):
        records = [{"round": n, "reward": 0.5, "step_time": s, "eval/pass_1": n / 10} for n, s in enumerate(times, 1)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:2]))
    with open(runs[1] / "metrics.jsonl", "a") as file:
        file.write('{"round": 3, "reward": 0.5, "step_time": 7.0, "eval/pass_1": 0.4}\n')
    for path in runs[:2]:
        (path / "checkpoints/round-00000002/state.json").unlink()
    [(_, held)] = Comparison(runs[:2]).bands("seconds", "pass_1")
    assert held.measured and held.x.tolist() == [2.5, 6.0, 9.5], "rounds 1 and 2 of both, and their ends"
    assert held.mean == pytest.approx([0.1, 0.2, 0.3])
    [(_, reward)] = Comparison(runs[:2]).bands("seconds", "reward")
    assert not reward.measured


def test_figures_sampled_otherwise_are_named() -> None:
    shorter: dict[str, Any] = {"rollouts": {"max_new_tokens": 16}, "eval": {"samples": 4}}
    paths = [make_run("long", [0.1], (0.1, 0.2)), make_run("short", [0.1], (0.1, 0.2), **shorter)]
    assert Comparison(paths).not_comparable == [
        "held-out figures are not comparable: different max_new_tokens, samples"
    ]


def test_a_band_spans_what_all_runs_have() -> None:
    long = np.arange(0.0, 1000.0)
    found = band([(long, long), (np.asarray([10.0, 20.0]), np.asarray([12.0, 22.0]))])
    assert (found.x[0], found.x[-1]) == (10.0, 20.0) and found.mean == pytest.approx(found.x + 1)
    assert len(band([(long, long)]).x) == 200


def test_evaluations_in_between_are_points(runs: list[Path]) -> None:
    with open(runs[0] / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "reward": 0.5, "step_time": 2.0, "eval/pass_1": 0.8}\n')
    x, y = read_run(runs[0]).curves["round", "pass_1"]
    assert (x.tolist(), y.tolist()) == ([0, 3, 4], [0.1, 0.5, 0.8])


def test_cpu_time_is_that_of_all_rounds(runs: list[Path]) -> None:
    assert "CPU seconds" not in read_run(runs[0]).final
    with open(runs[0] / "metrics.jsonl", "a") as file:
        file.write('{"round": 5, "rounds": 2, "reward": 0.5, "step_time": 3.0, "machine/cpu_cores": 1.5}\n')
    final = read_run(runs[0]).final
    assert (final["seconds"], final["CPU seconds"]) == (3 * 2.0 + 2 * 3.0, 1.5 * 12.0)


def test_the_table_has_every_curve(runs: list[Path]) -> None:
    Comparison(runs).write_csv(Path("out.csv"))
    with open("out.csv") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * (3 + 3) + 2 * (2 + 2)
    assert table[0] == {
        "group": "loss=dapo",
        "measure": "reward",
        "axis": "round",
        "x": "1",
        "mean": "0.1",
        "low": "-1.1706",
        "high": "1.3706",
        "runs": "2",
        "measured": "1",
    }


@pytest.mark.parametrize(("name", "begins"), [("out.png", b"\x89PNG"), ("deep/out.svg", b"<?xml")])
def test_the_ending_decides_the_format(runs: list[Path], name: str, begins: bytes) -> None:
    plot_comparison(Comparison(runs), Path(name))
    assert Path(name).read_bytes().startswith(begins)


def test_what_cannot_be_compared_is_named(runs: list[Path]) -> None:
    (runs[0] / "metrics.jsonl").unlink()
    for path, message in [(runs[0], "has no round yet"), (Path("nowhere"), "no run in")]:
        with pytest.raises(UserError, match=message):
            Comparison([path])
    done = CliRunner().invoke(app, ["compare", str(runs[1]), "--png", "out.gif"])
    assert done.exit_code == 2 and "must end in .png, .svg, .pdf" in done.output


def test_a_torn_checkpoint_only_costs_held_out_figures(runs: list[Path]) -> None:
    for text in ("", "[]", '{"state": {"held_out_figures": {"before": 3}}}', '{"state": {"before": {"all": [1]}}}'):
        (runs[0] / "checkpoints/round-00000002/state.json").write_text(text)
        assert not any("held-out" in name for name in read_run(runs[0]).final)


def test_the_command_prints_and_writes(runs: list[Path]) -> None:
    words = ["compare", *map(str, runs), "--csv", "out.csv", "--png", "out.png"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "grpo.loss" in done.output and "0.500 ± 1.271" in done.output and Path("out.png").exists()
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert document["differences"] == {"grpo.loss": ["dapo", "gspo"]}
    assert [run["seed"] for run in document["groups"][0]["runs"]] == [1, 2]


def test_the_tenth_writing_of_a_round_is_the_newest(tmp_path: Path) -> None:
    for name in ("round-00000007-2", "round-00000007-10", "round-00000006"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"round": 7, "state": {"of": name}}))
    assert newest_checkpoint(RunDir(tmp_path)) == (7, {"of": "round-00000007-10"})
