"""`swarm-node eval --out`: every answer in a file."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swarm_node.cli.app import app
from swarm_node.cli.commands import evaluate
from swarm_node.config import NodeConfig
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.sizes import RUNTIME_BYTES
from swarm_node.rollouts import evaluate as rollouts_evaluate
from swarm_node.rollouts.evaluate import QUESTIONS_PER_SEED
from swarm_node.types import Group
from tests.support.run_files import read_jsonl
from tests.support.starting import train_locally

QUESTIONS = [{"prompt": f"What is {n} + {n}?", "solution": str(2 * n)} for n in range(3)]
SUMS = '{file="sums.jsonl", question="prompt", answer="solution"}'
WORDS = ["eval", "starter", "--tasks", SUMS, "--all", "--samples", "2", "--json", "--out", "deep/answers.jsonl"]


def test_each_question_has_a_line_with_its_answers() -> None:
    Path("sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    done = CliRunner().invoke(app, WORDS)
    assert done.exit_code == 0, done.output
    lines = read_jsonl(Path("deep/answers.jsonl"))
    assert [(line["task"], line["index"]) for line in lines] == [("sums", n) for n in range(3)]
    assert [{"prompt": line["question"], "solution": line["right"]} for line in lines] == QUESTIONS
    for line in lines:
        assert len(line["answers"]) == line["k"] == 2 and all(answer["text"] for answer in line["answers"])
        for answer in line["answers"]:
            assert answer["correct"] == (answer["extracted"] == line["right"])
            assert answer["rewards"] == {"checker": answer["reward"]} == {"checker": float(answer["correct"])}
    every = json.loads(done.stdout)["held_out"]["all"]
    for name in ("pass_1", "pass_k", "reward"):
        assert fmean(line[name] for line in lines) == pytest.approx(every[name])
    assert [path.name for path in Path("deep").iterdir()] == ["answers.jsonl"]


def test_one_answer_has_one_figure() -> None:
    Path("sums.jsonl").write_text(json.dumps(QUESTIONS[0]))
    done = CliRunner().invoke(app, ["eval", "starter", "--tasks", SUMS, "--all", "--samples", "1"])
    assert done.exit_code == 0 and done.stdout.count("pass@1") == 2, "in the table's head and in its legend"


def test_a_terminal_counts_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    Path("sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    words, counted = WORDS[:-3], "3 of 3 questions"
    assert counted in CliRunner().invoke(app, words).stderr
    for silent in ("--json", "--quiet"):
        assert counted not in CliRunner().invoke(app, [*words, silent]).stderr
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert counted not in CliRunner().invoke(app, words).stderr


def test_a_run_is_asked_as_many_questions_as_it_asked_itself() -> None:
    """There was no time for all of them before training, so none of its evaluations had more."""
    short = {"questions": 40, "samples": 1, "before_s": 1e-9}
    config = {"run_dir": "run", "rounds": 1, "tasks": ["small/gcd"], "rollouts": {"groups": 2, "max_new_tokens": 4}}
    train_locally(NodeConfig.model_validate(config | {"eval": short}), json_output=True)
    words = {
        QUESTIONS_PER_SEED: (["run"], ["starter", "--like", "run"]),
        40: (["run", "--questions", "40"], ["run", "--set", "eval.questions=40"]),
    }
    for questions, ways in words.items():
        for way in ways:
            found = json.loads(CliRunner().invoke(app, ["eval", *way, "--json"]).stdout)
            assert found["held_out"]["all"]["questions"] == questions
    told = CliRunner().invoke(app, ["eval", "run"]).output
    assert "; --questions 111 asks more" in " ".join(told.split())
    assert CliRunner().invoke(app, ["export", "run", "out"]).exit_code == 0
    assert json.loads(Path("out/swarm-node.json").read_text())["eval"]["questions"] == QUESTIONS_PER_SEED


def test_own_functions_judge_beside_the_checker() -> None:
    """As `local --reward` does. A question without an answer is judged by the functions alone."""
    lines = [QUESTIONS[0], {"prompt": "Say something."}]
    Path("sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("mine.py").write_text("def half(prompts, completions, **columns):\n    return [0.5] * len(completions)\n")
    half = ["--reward", '{path="mine.py:half", weight=2}']
    done = CliRunner().invoke(app, [*WORDS, *half])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    checked = document["held_out"]["all"]["pass_1"]
    assert document["rewards"] == {"checker": {"weight": 1.0, "mean": checked}, "half": {"weight": 2.0, "mean": 0.5}}
    first, second = read_jsonl(Path("deep/answers.jsonl"))
    assert first["reward"] == first["pass_1"] + 1.0 and (second["reward"], second["pass_1"]) == (1.0, None)
    shown = CliRunner().invoke(app, [*WORDS[:5], "--samples", "1", "--reward", "mine.py:half"])
    assert "half 0.500 (weight 1)" in " ".join(shown.stdout.split())


def test_failing_functions_are_told_as_in_training() -> None:
    Path("sums.jsonl").write_text(json.dumps(QUESTIONS[0]))
    Path("mine.py").write_text("def half(prompts, completions, **columns):\n    return 1 / 0\n")
    done = CliRunner().invoke(app, [*WORDS, "--reward", "mine.py:half"])
    assert done.exit_code == 2 and "reward function 'half' failed in mine.py, line 2: ZeroDivisionError" in done.stderr
    missing = CliRunner().invoke(app, [*WORDS, "--reward", "other.py:half"])
    assert missing.exit_code == 2 and "'other.py:half': there is no file other.py" in missing.stderr
    assert "starting" not in missing.stderr, "before torch is loaded"


@pytest.mark.parametrize("words", [["--max-memory"], ["--set", "resources.max_memory_gb="]], ids=["option", "key"])
def test_questions_keep_to_the_memory_that_is_allowed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, decode = list[int](), NativeEngine.decode

    def decoded(self: NativeEngine, prompts: list[list[int]], *more: Any) -> Any:
        sizes.append(len(prompts))
        return decode(self, prompts, *more)

    def asked(gib: float) -> Result:
        *first, last = words
        limit = [*first, f"{last}{gib}"] if last.endswith("=") else [*words, str(gib)]
        return CliRunner().invoke(app, [*WORDS[:-2], *limit])

    monkeypatch.setattr(NativeEngine, "decode", decoded)
    Path("sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    assert asked(0).exit_code == 0 and sizes == [3]
    assert asked((RUNTIME_BYTES + 4 * 2**20) / 2**30).exit_code == 0 and sizes[1:] == [1, 1, 1]
    refused = asked(0.1)
    assert refused.exit_code == 2 and len(sizes) == 4
    assert "takes about 0.49 GiB, more than --max-memory 0.1: choose a smaller model" in " ".join(
        refused.stderr.split()
    )


def test_answers_replace_no_file() -> None:
    Path("sums.jsonl").write_text(json.dumps(QUESTIONS[0]))
    Path("deep").mkdir()
    Path("deep/answers.jsonl").write_text("precious")
    done = CliRunner().invoke(app, WORDS)
    assert done.exit_code == 2 and "deep/answers.jsonl exists already; choose another --out" in done.output
    assert Path("deep/answers.jsonl").read_text() == "precious"


@pytest.mark.parametrize("as_json", [True, False])
def test_a_failed_write_loses_no_figures(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers_to(*arguments: Any) -> list[Group]:
        Path("deep").rmdir()  # after the check, while the policy answers
        return rollouts_evaluate.answers_to(*arguments)

    monkeypatch.setattr(evaluate, "answers_to", answers_to)
    Path("sums.jsonl").write_text(json.dumps(QUESTIONS[0]))
    done = CliRunner().invoke(app, WORDS if as_json else [word for word in WORDS if word != "--json"])
    assert done.exit_code == 2 and "cannot write deep/answers.jsonl: No such file" in done.stderr
    if as_json:
        document = json.loads(done.stdout)
        assert document["held_out"]["all"]["questions"] == 1 and document["error"] in done.stderr
    else:
        assert "pass@2" in done.stdout


def test_a_closed_pipe_loses_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*arguments: Any, **named: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("rich.console.Console.print", closed)
    Path("sums.jsonl").write_text(json.dumps(QUESTIONS[0]))
    done = CliRunner().invoke(app, [word for word in WORDS if word != "--json"])
    assert done.exit_code != 0 and len(read_jsonl(Path("deep/answers.jsonl"))) == 1
