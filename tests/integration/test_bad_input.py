"""The command line on bad input: one line, exit code 2, no traceback, nothing touched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\nnot json\n')
    (folder / "notes").mkdir()
    (folder / "notes/diary.txt").write_text("private")
    (folder / "a_file").write_text("")
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
]


@pytest.mark.parametrize(("arguments", "said"), CASES, ids=[" ".join(arguments) for arguments, _ in CASES])
def test_bad_input_is_one_clear_line(place, arguments, said):
    environment = os.environ | {"SWARM_NODE_RUN_DIR": "run"} if "--run-dir" not in arguments else os.environ
    done = subprocess.run(
        [sys.executable, "-m", "swarm_node", *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("swarm-node: ")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and said in lines[0], done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in (place / "notes").iterdir()) == ["diary.txt"]
