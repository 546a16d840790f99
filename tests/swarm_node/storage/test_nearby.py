"""Errors about a run or manifest that does not exist name those that do."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.storage.nearby import names_near


@pytest.fixture(autouse=True)
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("alice", "bob"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.toml").touch()
    Path("demo.toml").touch()


@pytest.mark.parametrize(
    "command", ["status", "doctor", "pause", "unpause", "stop", "samples", "resume", "dashboard", "compare"]
)
@pytest.mark.parametrize("name", ["runs/alise", "alice"])
def test_a_wrong_name_is_answered_with_runs(command: str, name: str) -> None:
    result = CliRunner().invoke(app, [command, name])
    assert result.exit_code == 2, result.output
    near = "did you mean runs/alice? there are: "
    assert near in result.stderr and "runs/alice, runs/bob" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["join", "bootstrap"])
def test_a_wrong_manifest_is_answered_with_manifests(command: str) -> None:
    result = CliRunner().invoke(app, [command, "demo.tom"])
    assert result.exit_code == 2, result.output
    assert result.stderr.endswith("; did you mean demo.toml? there are: demo.toml\n")


def test_a_directory_that_is_missing_is_called_so() -> None:
    result = CliRunner().invoke(app, ["samples", "runs/alise"])
    assert "no run in runs/alise (there is no such directory); did you mean" in result.stderr


def test_a_name_like_no_other_lists_a_few() -> None:
    for i in range(5):
        Path(f"more-{i}.toml").touch()
    said = names_near(Path("zzz"), manifests=True)
    assert said == "; there are: demo.toml, more-0.toml, more-1.toml, more-2.toml, more-3.toml, …"
    assert names_near(Path("nowhere/else/x"), runs=False) == ""
