"""What commands do where no extra is installed, in processes that do not find the packages of any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_node.cli.app import USER_ERROR
from swarm_node.config.own import read_own
from swarm_node.install import WHEELS
from swarm_node.tasks import catalogue
from tests.support.plain import HIDE
from tests.support.repository import ROOT

LINK = f"swarm://{'0' * 64}?peer=/ip4/127.0.0.1/tcp/1/p2p/12D3KooWJadSBDmH8eD7zbWFNk2PyNAkUSeWVQqB2J1vEZiHXpd7"


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/sitecustomize.py").write_text(HIDE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "modules"), os.environ["PYTHONPATH"]]))


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarm_node", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250)


@pytest.mark.slow
def test_a_node_alone_learns_from_the_questions_of_the_package(tmp_path: Path) -> None:
    done = typed("local", "--rounds", "1", "--run-dir", "run", "--set", "eval.questions=4")
    assert done.returncode == 0, done.stdout
    assert "tasks starter" in done.stdout and "round 1/1" in done.stdout
    assert "since reasoning-gym is not installed" in done.stdout
    assert read_own(tmp_path / "run/config.toml").tasks == ["starter"], "it asks the same after a new start"


@pytest.mark.parametrize(
    ("typing", "extra"),
    [
        (("join", LINK), "swarm"),
        (("bootstrap", "swarm.toml"), "swarm"),
        (("status", LINK), "swarm"),
        (("doctor", LINK), "swarm"),
        (("dashboard", "walk.toml"), "swarm"),
        (("identity", "new"), "swarm"),
        (("merge", LINK, "--out", "out"), "swarm"),
        (("local", "--stages", "2"), "swarm"),
        (("local", "--health-port", "1234"), "swarm"),
        (("local", "--tasks", "small"), "puzzles"),
        (("local", "--tasks", "gcd"), "puzzles"),
        (("new", "--tasks", "small"), "puzzles"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:3]).replace(LINK, "LINK"),
)
def test_a_command_names_the_extra_that_it_needs_before_torch_is_loaded(
    typing: tuple[str, ...], extra: str, tmp_path: Path
) -> None:
    (tmp_path / "modules/torch.py").write_text("raise SystemExit('torch was loaded')")
    (tmp_path / "swarm.toml").write_text("")
    done = typed(*typing)
    assert done.returncode == USER_ERROR, done.stdout
    assert f"the extra {extra!r}, which is not installed: " in done.stdout
    assert f"[{extra}]" in done.stdout and f"--find-links {WHEELS}" in done.stdout
    assert "torch" not in done.stdout and "Traceback" not in done.stdout


def test_the_list_of_tasks_has_those_of_the_package_and_names_the_extra_of_the_rest() -> None:
    starter, second_try, rest = typed("tasks").stdout.splitlines()
    assert starter.startswith("starter ") and second_try.startswith("second_try ")
    assert "the extra 'puzzles', which is not installed: " in rest


def test_an_environment_of_the_package_needs_no_extra() -> None:
    done = typed("local", "--tasks", "second_try", "--model", "nope")
    assert "there is no directory nope" in done.stdout and "extra" not in done.stdout


def test_the_configuration_has_the_tasks_that_a_node_asks() -> None:
    for typing in (("config", "show"), ("local", "--dry-run")):
        assert '"starter"' in typed(*typing).stdout


def test_a_plain_installation_is_whole_to_the_doctor() -> None:
    checks = {check["name"]: check for check in json.loads(typed("doctor", "--json").stdout)["checks"]}
    assert checks["packages"]["verdict"] != "fail"
    assert "without the extras puzzles and swarm" in checks["packages"]["detail"]


def test_questions_of_the_package_are_some_of_the_small_set() -> None:
    rows = [json.loads(line) for line in catalogue.STARTER_QUESTIONS.read_text().splitlines()]
    assert {row["task"] for row in rows} == set(catalogue.SETS["small"])
    assert len({row["question"] for row in rows}) == len(rows) > 500
    assert (ROOT / "swarm_node/tasks/starter.jsonl").stat().st_size < 200_000
