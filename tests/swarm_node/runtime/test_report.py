"""What a run says of itself when it has ended, from a real one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from swarm_node.cli.commands.evaluate import main as evaluation
from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested, UserError
from swarm_node.install import extra_command
from swarm_node.observability.noise import interval
from swarm_node.observability.summary import Averaging, Figures, HeldOut, Stages, SwarmFigures
from swarm_node.observability.tally import Tally
from swarm_node.rollouts.evaluate import Evaluation, Held, Shown
from swarm_node.runtime.held_out import HeldOutFigures, compared
from swarm_node.runtime.limits import ResourceLimits
from swarm_node.runtime.report import RunReport
from swarm_node.runtime.shutdown import Stopper
from swarm_node.storage.rundir import RunDir
from tests.support.starting import train_locally


def start(rounds: int, capsys: pytest.CaptureFixture[str], **settings: Any) -> tuple[dict[str, Any], str]:
    """The document and the words of a start in `run`."""
    config = settings | {
        "run_dir": "run",
        "rounds": rounds,
        "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
        "eval": {"questions": 56, "samples": 2},
    }
    assert train_locally(NodeConfig.model_validate(config), json_output=True) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_two_starts_are_reported_as_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    first, words = start(1, capsys)
    assert "resumed_at" not in first and "several starts" not in words
    document, words = start(2, capsys)
    assert (document["rounds"], document["rounds_recorded"], document["resumed_at"]) == (2, 2, 1)
    assert document["held_out_before"] == first["held_out_before"]
    held, before = document["held_out"], document["held_out_before"]["all"]
    assert held["questions"] == before["questions"] == 56 and held["pass_1"][0] == before["pass_1"]
    low, high = held["interval"]
    assert low <= held["pass_1"][1] - held["pass_1"][0] <= high, "questions from before were kept in the checkpoint"
    assert "this one went on from round 1" in words and " export run run-model\n" in words
    assert not any(part in document for part in ("swarm", "averaging", "stages", "refused", "unused", "cost"))
    last = json.loads(Path("run/events.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "summary" and last["text"].startswith("outcome   reward ")
    assert [line for line in last["text"].split("\n") if line.startswith("files     run: ")], "it keeps its lines"
    assert " samples run\n" in words
    assert Path("run/plots/reward.png").exists()


def test_a_log_of_json_ends_with_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    document, log = start(1, capsys, log_format="json")
    records = [json.loads(line) for line in log.splitlines()]
    [told] = [record for record in records if record["kind"] == "summary"]
    assert told["summary"] == document and told["message"].startswith("outcome   reward ")
    assert records[-1] == told, "and no table, nor what to type next"


def test_a_run_without_a_round_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(limits: ResourceLimits, stop: Stopper) -> None:
        raise StopRequested

    monkeypatch.setattr(ResourceLimits, "wait", stopped)
    document, log = start(1, capsys, log_format="json")
    record = json.loads(log.splitlines()[-1])
    assert (record["kind"], record["message"], document["rounds"]) == ("summary", "no round was made", 0)


def test_the_keys_of_the_document_are_explained(root: Path) -> None:
    page = (root / "docs/fleet.md").read_text().partition("### The summary of a run")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    explained = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    always = ["run_dir", "rounds", "held_out_before", "held_out_after"]
    assert sorted(explained) == sorted([*always, *Figures.__struct_fields__])
    for name, part in (("held_out", HeldOut), ("swarm", SwarmFigures), ("averaging", Averaging), ("stages", Stages)):
        [row] = re.findall(rf"^\| `{name}` .*$", page, re.MULTILINE)
        assert set(part.__struct_fields__) - {"answers_of"} <= set(re.findall(r"`(\w+)`", row)), name


def test_no_picture_is_missed_without_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.runtime.report.CAN_DRAW", False)
    _, words = start(1, capsys)
    assert extra_command("plots") in words and "reward.png" not in words
    assert not Path("run/plots/reward.png").exists()


def test_a_lost_round_is_in_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = start(2, capsys)
    with open("run/metrics.jsonl", "a") as file:  # recorded, but no checkpoint of it was made
        file.write('{"round": 3, "reward": 1e6, "step_time": 1e6, "num_tokens": 1}\n')
    document, _ = start(3, capsys)
    assert document["rounds_recorded"] == 3 and document["reward_last_tenth"] <= 1.0
    assert first["seconds"] < document["seconds"] < 1e5
    assert document["reward_first_tenth"] == first["reward_first_tenth"], (
        "exactly, since the checkpoint has the figures"
    )


def test_too_few_questions_hold_none_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("q.jsonl").write_text("".join(f'{{"question": "{n}+1?", "answer": "{n + 1}"}}\n' for n in (1, 2)))
    rollouts = {"groups": 2, "group_size": 2, "max_new_tokens": 4}
    config = {"run_dir": "run", "rounds": 1, "tasks": ["q.jsonl"], "rollouts": rollouts}
    assert train_locally(NodeConfig.model_validate(config)) == 0
    words = "".join(capsys.readouterr()).replace("\n", " ")
    assert words.count("no question is held out of training") == 1 and "20 different questions" in words
    assert "held-out questions," not in words and " eval run" not in words and " export run run-model" in words
    with pytest.raises(UserError, match="no question is held out of training"):
        evaluation("run", samples=2)


def test_a_run_without_rounds_has_no_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    nothing = cast(Any, None)
    told = RunReport(
        RunDir(tmp_path), Tally(), 0, 0, HeldOutFigures(NodeConfig(), *[nothing] * 2, print, print, whole=True)
    )
    told.draw()
    assert told.figures.rounds_recorded == 0 and not (tmp_path / "plots").exists()


def test_shown_questions_span_all_changes() -> None:
    table, kept = {"all": Held(5, 0.5, 0.75)}, [Shown("gcd", question, "6", "6", True) for question in "abcde"]
    before = Evaluation(table, [0.5, 0.5, 0.25, 1.0, 0.5], shown=kept)
    after = Evaluation(table, [0.5, 0.25, 1.0, 1.0, 0.75], shown=kept)
    held = compared(before, after, 8)
    assert held is not None and held.answers_of == 5
    changes = [(one.question, one.mean_before, one.mean_after) for one in held.answers]
    assert changes == [("c", 0.25, 1.0), ("a", 0.5, 0.5), ("b", 0.5, 0.25)]
    one = compared(msgspec.structs.replace(before, shown=kept[:1]), after, 8)
    assert one is not None and [answer.question for answer in one.answers] == ["a"]


def test_held_out_figures_need_both_evaluations() -> None:
    table = {"all": Held(128, 0.5, 0.75)}
    assert compared(Evaluation(), Evaluation(table, [0.5] * 128), 8) is None
    assert compared(Evaluation(table), Evaluation(), 8) is None
    halved = compared(Evaluation(table, [0.5] * 128), Evaluation(table, [0.0, 0.5] * 64), 8)
    assert halved is not None and halved.interval_k == interval([1.0] * 128, [0.0, 1.0] * 64)
    judged = [True] * 32 + [False] * 96  # tasks without a checker count in neither figures nor intervals
    of_some = compared(
        Evaluation(table, [0.5] * 32 + [0.0] * 96), Evaluation(table, [0.0, 0.5] * 16 + [0.0] * 96, judged=judged), 8
    )
    assert of_some is not None and of_some.questions == 32
    assert of_some.interval == interval([0.5] * 32, [0.0, 0.5] * 16)
    assert of_some.interval_k == interval([1.0] * 32, [0.0, 1.0] * 16)
    unjudged = compared(Evaluation(table), Evaluation(table, [0.5] * 128), 8)  # begun by an earlier version
    assert unjudged is not None and unjudged.interval is None and unjudged.pass_k == (0.75, 0.75)
