"""A grid of settings gives a tidy table, once: what is there is not run again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import sweep as module
from benchmarks.sweep import code_version, grid_settings, read_grid, sweep
from swarm_node.errors import UserError

GRID = """
peers = 2
rounds = 3
seeds = [0, 1]
metrics = ["reward", "swarm/groups_used"]

[config]
tasks = ["small/count_bits"]
policy.model = "{model}"
rollouts.max_new_tokens = 4
rollouts.group_size = 4
rewards.checker_weight = 0
rewards.functions = [{{path = "tests.swarm.parity:even"}}]
sharing.foreign = 2

[speed]
generate_tok_s = 64

[grid]
"sharing.own" = [1, 2]
"link.latency_s" = [0.0, 0.5]
"""


@pytest.fixture
def grid(models: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID.format(model=models["llama"]))
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_by_two_settings_and_two_seeds(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    said: list[str] = []
    assert sweep(grid, out, said.append) == 8
    rows = read(out)
    assert len(rows) == 2 * 2 * 2 * 2 * 3
    assert list(rows[0]) == [
        *("commit", "config", "sharing.own", "link.latency_s", "seed", "peer", "round"),
        *("reward", "swarm/groups_used"),
    ]
    assert {row["commit"] for row in rows} == {code_version()}
    assert len({row["config"] for row in rows}) == 4
    assert {(row["sharing.own"], row["link.latency_s"]) for row in rows} == {
        ("1", "0.0"),
        ("1", "0.5"),
        ("2", "0.0"),
        ("2", "0.5"),
    }
    assert len({row["reward"] for row in rows}) > 3
    assert len(said) == 10 and "complete" in said[-1]


def test_whole_rows_are_kept_and_torn_ones_redone(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    grid.write_text(grid.read_text().replace("seeds = [0, 1]", "seeds = [0]"))
    sweep(grid, out, lambda text: None)
    whole = out.read_text()
    assert sweep(grid, out, lambda text: None) == 0
    assert out.read_text() == whole
    out.write_text(whole[: int(0.9 * len(whole))])  # as after a crash
    assert sweep(grid, out, lambda text: None) == 1
    assert out.read_text() == whole


def test_a_value_more_runs_only_what_it_adds(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    grid.write_text(grid.read_text().replace("[0.0, 0.5]", "[0.0]").replace("seeds = [0, 1]", "seeds = [0]"))
    assert sweep(grid, out, lambda text: None) == 2
    grid.write_text(grid.read_text().replace("[0.0]", "[0.0, 0.25]"))
    assert sweep(grid, out, lambda text: None) == 2


def test_another_table_is_not_overwritten(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="other columns"):
        sweep(grid, out, lambda text: None)
    assert out.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"sharing.own" = [1, 2]', '"sharing.owm" = [1]'), "sharing.own"),
        (('"sharing.own" = [1, 2]', '"sharing.own" = [0]'), "sharing.own = 0"),
        (('"link.latency_s" = [0.0, 0.5]', '"link.latency" = [1]'), "link.latency"),
        (('"link.latency_s" = [0.0, 0.5]', '"link.latency_s" = ["far"]'), "link.latency_s = 'far'"),
        (('"link.latency_s" = [0.0, 0.5]', '"peers" = [0]'), "peers = 0"),
        (('"link.latency_s" = [0.0, 0.5]', '"peers" = 3'), "grid.peers"),
        (("seeds = [0, 1]", "seeds = []"), "seeds"),
        (("rounds = 3", "round = 3"), "round"),
        (("rounds = 3", "rounds = "), "not valid TOML"),
    ],
)
def test_a_grid_that_makes_no_sense_is_explained(
    grid: Path, tmp_path: Path, change: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "simulate", lambda *args: pytest.fail("nothing may run"))
    grid.write_text(grid.read_text().replace(*change))
    with pytest.raises(UserError, match=message):
        list(grid_settings(read_grid(grid)))
    with pytest.raises(UserError):
        sweep(grid, tmp_path / "out.csv")


def test_a_grid_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_grid(tmp_path / "none.toml")
