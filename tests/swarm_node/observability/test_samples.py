"""samples.jsonl: which groups it gets, and that it stays small."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_node.config.machine import MetricsConfig
from swarm_node.errors import UserError
from swarm_node.observability import samples
from swarm_node.observability.samples import ANSWER_CHARS, MAX_ANSWERS, SampleLog, read_samples, without_middle
from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.messages import TaskName
from tests.support.run_files import read_jsonl


def group(label: str, *rewards: float, peer: str | None = None, text: str = "so it is 6") -> Group:
    task = Task(TaskName("gcd", "0" * 16, "g 1", 0, 1), label, f"a question of {label}", "6")
    rollouts = [
        Rollout([Turn([1], [0.0], True, text)], "6", reward=reward, correct=reward == 1.0) for reward in rewards
    ]
    return Group(task, [1], rollouts, peer=peer)


def log(said: list[str], every: int = 10, groups: int = 3) -> SampleLog:
    config = MetricsConfig(samples_every=every, samples_groups=groups)
    return SampleLog(Path("samples.jsonl"), config, said.append, lambda ids: f"<prompt {ids}>")


def test_each_kind_of_group_is_recorded() -> None:
    own = [group("solved", 1, 1), group("failed", 0, 0), group("mixed", 0, 1)]
    others = [group("theirs", 1, 0, peer="QmAlice")]
    written = log([], groups=3).write(20, own, [*own, *others])
    assert [(record["task"], record["peer"]) for record in written] == [
        ("mixed", None),
        ("theirs", "QmAlice"),
        ("failed", None),
    ]
    there = read_jsonl(Path("samples.jsonl"))
    assert [record["task"] for record in there] == ["mixed", "theirs", "failed"]
    assert there[0]["answers"] == written[0]["answers"]
    first = written[0]
    assert (first["round"], first["question"], first["right"], first["of"]) == (20, "a question of mixed", "6", 2)
    assert [answer["reward"] for answer in first["answers"]] == [0, 1] and first["reward"] == 0.5
    assert first["answers"][1] == {
        "text": "so it is 6",
        "extracted": "6",
        "reward": 1,
        "correct": True,
        "finished": True,
        "advantage": None,
    }
    assert first["prompt"] == "<prompt [1]>"


def test_each_reward_and_the_advantage_are_recorded() -> None:
    one = group("gcd", 0.5)
    one.rollouts[0].rewards, one.rollouts[0].advantage = {"checker": 0.0, "short": None}, -0.25
    answer = log([]).write(1, [one], [])[0]["answers"][0]
    assert (answer["rewards"], answer["advantage"]) == ({"checker": 0.0, "short": None}, -0.25)


def test_tasks_take_turns() -> None:
    writer, own = log([], groups=1), [group("gcd", 0, 1), group("lcm", 0, 1), group("bf", 0, 1)]
    assert [writer.write(n, own, [])[0]["task"] for n in range(4)] == ["gcd", "lcm", "bf", "gcd"]


def test_no_group_is_recorded_twice() -> None:
    only = [group("gcd", 0, 1)]
    assert len(log([], groups=3).write(1, only, only)) == 1


def test_no_round_is_due_when_off() -> None:
    assert not any(log([], every=0).due(round) for round in range(1, 30))


def test_the_first_and_every_tenth_round_are_due() -> None:
    writer = log([])
    assert [round for round in range(1, 31) if writer.due(round)] == [1, 10, 20, 30]


def test_long_texts_lose_their_middle() -> None:
    assert without_middle("short", 100) == "short"
    text = "begin" + 5000 * "x" + "the answer"
    cut = without_middle(text, 100)
    assert len(cut) == 100 and cut.startswith("begin") and cut.endswith("the answer")
    assert without_middle("\ud800", 10).encode() == b"?"
    record = log([]).write(1, [group("gcd", *[0.5] * 20, text=text)], [])[0]
    assert record["of"] == 20 and len(record["answers"]) == MAX_ANSWERS
    assert len(record["answers"][0]["text"]) == ANSWER_CHARS


def test_a_full_file_keeps_the_newer_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SAMPLES_BYTES", 4000)
    writer = log([], groups=1)
    for round in range(1, 100):
        writer.write(round, [group("gcd", 0, 1)], [])
        assert Path("samples.jsonl").stat().st_size <= 4000
    kept = [record["round"] for record in read_samples(Path("samples.jsonl"))]
    assert kept == list(range(kept[0], 100)) and len(kept) > 3


def test_rounds_after_the_checkpoint_are_dropped() -> None:
    writer = log([], groups=1)
    for round in (10, 20, 30):
        writer.write(round, [group("gcd", 0, 1)], [])
    writer.close()
    again = log([], groups=1)
    again.truncate_after(20)
    again.write(21, [group("gcd", 0, 1)], [])
    assert [record["round"] for record in read_samples(Path("samples.jsonl"))] == [10, 20, 21]


def test_a_damaged_file_does_not_stop_a_start() -> None:
    Path("samples.jsonl").write_text('{"round": 1, "answers": []}\nno record\n[1]\n{"round": 3}\n')
    said: list[str] = []
    writer = log(said, groups=1)
    writer.truncate_after(2)
    writer.write(2, [group("gcd", 0, 1)], [])
    assert len(said) == 1 and "is not a record" in said[0]
    assert [record["round"] for record in read_samples(Path("samples.jsonl"))] == [1, 2]


def test_a_prompt_that_cannot_be_decoded_ends_nothing() -> None:
    def fails(ids: list[int]) -> str:
        raise UserError("the tokenizer failed")

    said: list[str] = []
    writer = SampleLog(Path("samples.jsonl"), MetricsConfig(), said.append, fails)
    assert [record["prompt"] for record in writer.write(1, [group("gcd", 0, 1), group("lcm", 1, 1)], [])] == ["", ""]
    assert said == ["a sample has no prompt: the tokenizer failed"]
