"""The command line on bad input: one line, exit code 2, no traceback, nothing touched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\nnot json\n')
    (folder / "notes").mkdir()
    (folder / "notes/diary.txt").write_text("private")
    (folder / "a_file").write_text("")
    for ending in ("jsonl", "toml", "py"):
        os.mkfifo(folder / f"pipe.{ending}")
        (folder / f"zero.{ending}").symlink_to("/dev/zero")
        (folder / f"folder.{ending}").mkdir()
    return folder


CASES = [
    (["local", "--set", "grpo.los=gspo"], "did you mean grpo.loss"),
    (["local", "--set", "rollouts.group_size=1"], "greater than or equal to 2"),
    (["local", "--set", "grpo.betas=[0.9,1.5]"], "less than 1"),
    (["local", "--model", "./nowhere"], "no model at nowhere"),
    (["local", "--model", "a_file"], "no model at a_file"),
    (["local", "--model", "notes"], "no config.json"),
    (["local", "--tasks", "gdc"], "did you mean 'gcd'"),
    (["local", "--tasks", "countdown"], "refused"),
    (["local", "--tasks", "empty.jsonl"], "empty"),
    (["local", "--tasks", "broken.jsonl"], "2"),
    (["local", "--run-dir", "notes"], "other things than a run"),
    (["eval", "notes/nowhere"], "no model at notes/nowhere"),
    (["export", "notes", "out"], "no run in notes"),
    (["starter", "--out", "notes"], "not empty"),
    (["starter", "--out", "a_file"], "not a directory"),
    (["starter", "--out", "new", "--hidden", "33"], "multiple of 32"),
    (["local", "--config", "nowhere.toml"], "nowhere.toml"),
    (["local", "--quiet-hours", "9-17"], "22:00-07:00"),
    (["pause", "notes"], "no run in notes"),
]
CASES += [
    (["local", *how, *option, f"{before}{name}{after}"], said)
    for how in ([], ["--stages", "2"])
    for option, before, after, said in (
        (["--tasks"], "", ".jsonl", "it is no file"),
        (["--tasks"], '{file="', '.jsonl"}', "it is no file"),
        (["--config"], "", ".toml", "it is no file"),
        (["--set"], "rewards.functions=", ".py:score", "there is no file"),
    )
    for name in ("pipe", "zero", "folder")
]


def check(place, said, code, err):
    lines = [line for line in err.splitlines() if line.startswith("swarm-node: ")]
    assert code == 2, err
    assert len(lines) == 1 and said in lines[0], err
    assert "Traceback" not in err
    assert sorted(p.name for p in (place / "notes").iterdir()) == ["diary.txt"]


@pytest.mark.parametrize(("arguments", "said"), CASES, ids=[" ".join(arguments) for arguments, _ in CASES])
def test_bad_input_is_one_clear_line(place, arguments, said, monkeypatch):
    monkeypatch.chdir(place)
    if "--run-dir" not in arguments:
        monkeypatch.setenv("SWARM_NODE_RUN_DIR", "run")
    done = CliRunner().invoke(app, arguments, prog_name="swarm-node")
    check(place, said, done.exit_code, done.stderr)


def test_so_it_is_of_a_process(place):
    arguments, said = CASES[0]
    done = subprocess.run(
        [sys.executable, "-m", "swarm_node", *arguments],
        cwd=place,
        env=os.environ | {"SWARM_NODE_RUN_DIR": "run"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    check(place, said, done.returncode, done.stderr)
