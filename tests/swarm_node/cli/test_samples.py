"""`swarm-node samples` and `swarm-node tasks NAME`: readable, and safe whatever models and strangers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swarm_node.cli.app import app
from swarm_node.cli.commands.samples import find_samples
from swarm_node.errors import UserError
from swarm_node.storage.rundir import BOOTSTRAP, RunDir
from tests.support.run_files import write

ALICE, BOB = "QmAlice1234abcd", "QmBob00001234xyz"


def run(*words: str, **more: Any) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False, **more)


def record(round: int, task: str = "gcd", *rewards: float, peer: str | None = None, text: str = "6") -> dict[str, Any]:
    answers = [{"text": text, "extracted": text, "reward": r, "correct": r == 1, "finished": True} for r in rewards]
    mean = sum(rewards) / len(rewards)
    asked = {"question": f"What is {round}?", "right": "6", "of": len(rewards), "answers": answers}
    return {"round": round, "time": 1.7e9, "task": task, "peer": peer, "reward": mean, **asked}


@pytest.fixture
def samples() -> Path:
    """A run with four records."""
    path = Path("run")
    records = [
        record(10, "gcd", 0, 1),
        record(20, "lcm", 0, 0, peer=ALICE),
        record(30, "lcm", 1, 1),
        record(40, "gcd", 1, 0, 0, peer=BOB),
    ]
    write(path / "samples.jsonl", *records)
    (path / "config.toml").touch()
    (path / "swarm.json").write_text(json.dumps({"peers": {ALICE: {"name": "alice"}, BOB: {}}}))
    return path


def rounds(*options: str) -> list[int]:
    document = json.loads(run("samples", "run", "--json", *options).stdout)
    return [one["round"] for one in document["samples"]]


def test_samples_are_chosen(samples: Path) -> None:
    assert rounds() == [40, 30, 20, 10] == rounds("--newest")
    assert rounds("--count", "1") == [40]
    assert rounds("--worst", "--count", "2") == [20, 40]
    assert rounds("--task", "lcm") == [30, 20]
    assert rounds("--peer", "own") == [30, 10]
    assert rounds("--peer", "alice") == rounds("--peer", "4abcd") == [20]
    assert rounds("--peer", "4xyz", "--task", "gcd") == [40]


def test_samples_show_question_answers_and_rewards(samples: Path) -> None:
    lines = run("samples", "run", "--count", "3").stdout.splitlines()
    assert lines[0].startswith("round 40, gcd, peer …01234xyz, ") and "3 answers kept" in lines[0]
    assert lines[1:5] == ["  asked  What is 40?", "  right  6", "   1.00  6", "   0.00  2x 6"]
    assert "lcm, own, mean reward " in lines[6] and any("alice …1234abcd" in line for line in lines)
    note = "of others' groups only the answers trained on are kept (sharing.answers)"
    assert lines[-1] == note and note not in run("samples", "run", "--peer", "own").stdout


def test_no_control_character_reaches_the_terminal(samples: Path) -> None:
    evil = "\x1b[2Jred\u202e\x07\nsecond " + "wide " * 300 + "\x9b31m"
    write(samples / "samples.jsonl", record(50, "gcd\x1b[0m", 0, peer="Qm\x1b]0;title", text=evil))
    shown = run("samples", "run", "--count", "1").stdout
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert all(len(line) <= 80 for line in shown.splitlines()) and "second wide" in shown


def test_damaged_lines_are_left_out(samples: Path) -> None:
    with open(samples / "samples.jsonl", "a") as file:
        file.write('{"answers": [1, {"text": 5}], "reward": "x", "of": null, "peer": 3}\nnot json\n{"half')
    shown = run("samples", "run", "--count", "1")
    assert shown.exit_code == 0 and "peer …3" in shown.stdout


def test_nothing_to_show_says_what_there_is(samples: Path) -> None:
    result = run("samples", "run", "--task", "bf")
    assert result.exit_code == 2 and "no sample of task bf; there are samples of the tasks gcd, lcm" in result.stderr
    assert "of the peers 01234xyz, alice, own" in result.stderr
    (samples / "samples.jsonl").write_text("")
    assert "no samples yet" in run("samples", "run").stderr
    (samples / "samples.jsonl").unlink()
    assert "no samples yet" in run("samples", "run").stderr
    assert run("samples", "elsewhere").exit_code == 2


def test_tasks_shows_ten_questions_with_answers() -> None:
    shown = run("tasks", "small/gcd").stdout
    assert "models are told" not in shown
    assert run("tasks", "small/gcd", "--answer", "tags").stdout.startswith("models are told  End with only the final")
    assert shown.count("Greatest Common Divisor") == shown.count("    = ") == 10
    assert run("tasks", "small/gcd").stdout == shown, "the same each time"
    questions = json.loads(run("tasks", "small", "--json").stdout)
    assert len(questions) == 10 and len({one["task"] for one in questions}) == 7
    assert all(one["question"] and one["answer"] for one in questions)


def test_tasks_says_how_the_answer_is_asked_for() -> None:
    assert "\\boxed{}" in run("tasks", "gcd", "--answer", "boxed").stdout


def test_questions_of_a_file_are_escaped() -> None:
    lines = ({"question": f"What is \x1b[31m{n} + 1?", "answer": str(n + 1)} for n in range(40))
    write(Path("q.jsonl"), *lines)
    shown = run("tasks", "q.jsonl").stdout
    assert "\x1b" not in shown and shown.count("    = ") == 10


def test_unknown_tasks_are_refused() -> None:
    result = run("tasks", "gdc")
    assert result.exit_code == 2 and "did you mean" in result.stderr


def test_a_bootstrap_has_no_samples(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "boot")
    run.path.mkdir()
    run.config.touch()
    run.write_status({"role": BOOTSTRAP})
    with pytest.raises(UserError, match="is of a bootstrap, which answers no questions"):
        find_samples(run, False, None, None, 5)


def test_rewards_advantages_and_the_prompt_are_shown(samples: Path) -> None:
    one = record(50, "gcd", 1) | {"prompt": "<|im_start|>user\nWhat is 50?"}
    one["answers"][0] |= {"rewards": {"checker": 0.0, "short": 1.0}, "advantage": -0.5}
    write(samples / "samples.jsonl", one)
    shown = run("samples", "run").stdout
    assert "(checker 0.00, short 1.00, advantage -0.50)" in shown and "asked  What is 50?" in shown
    assert "<|im_start|>user" not in shown
    assert "asked  <|im_start|>user\n" in run("samples", "run", "--prompt").stdout
