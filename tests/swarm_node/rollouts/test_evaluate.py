"""The table of held-out figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_node.config import NodeConfig, RewardsConfig
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.policy.loading import load_policy
from swarm_node.rollouts import evaluate as evaluating
from swarm_node.rollouts.evaluate import Asked, Held, evaluate, rows, summarise
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.messages import TaskName

OWN = RewardsConfig(checker_weight=0.0, functions=[RewardFunctionConfig(path="mine.py:f")])


def test_the_row_of_all_tasks_is_the_last() -> None:
    table = {"all": Held(4, 0.5, 1.0), "gcd": Held(2, 0.5, 1.0), "lcm": Held(2, 0.5, 1.0)}  # as a checkpoint sorts them
    assert [row[0] for row in rows(table, table, 8, RewardsConfig())[1]] == ["gcd", "lcm", "all"]


def answered(label: str, rewards: list[float], checked: bool) -> Group:
    rollouts = [
        Rollout([Turn([1], [0.0], True)], reward=r, correct=checked and r == 1.0, checked=checked) for r in rewards
    ]
    return Group(Task(TaskName("jsonl", "0" * 16, "jsonl 1", 0, 0), label, "?", None), [1], rollouts)


def test_questions_without_a_checker_have_rewards_alone() -> None:
    groups = [answered("poems", [0.25, 0.75], False), answered("gcd", [1.0, 0.0], True)]
    table = summarise(groups, ["poems", "gcd"])
    assert table == {
        "poems": Held(1, None, None, 0.5),
        "gcd": Held(1, 0.5, 1.0, 0.5),
        "all": Held(2, 0.5, 1.0, 0.5),
    }
    columns, lines = rows({"lcm": table["poems"]}, {"poems": table["poems"]}, 8, OWN)
    assert columns == ["task", "questions", "reward before", "reward after"]
    assert lines == [["poems", "1", "-", "0.500"]]
    columns, lines = rows(table, table, 8, OWN)
    assert columns[-2:] == ["reward before", "reward after"]
    assert [line for line in lines if line[0] == "poems"] == [["poems", "1", *["-"] * 4, "0.500", "0.500"]]


def test_an_evaluation_tells_which_questions_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def f(completions, **columns):\n    return [0.5 for _ in completions]\n")
    Path("q.jsonl").write_text("".join(f'{{"question": "Write poem {n}."}}\n' for n in range(60)))
    config = NodeConfig.model_validate({"tasks": ["small/gcd", "q.jsonl"], "rollouts": {"max_new_tokens": 2}})
    policy = load_policy(config.policy, config.rollouts, lambda sentence: None)
    found = evaluate(policy, load_tasks(config.tasks, OWN), config.rollouts, 8, 2)
    assert found.judged == [label == "gcd" for label in found.labels] and len(set(found.judged)) == 2


def test_a_part_of_the_questions_is_asked_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NodeConfig.model_validate({"rollouts": {"max_new_tokens": 4}})
    policy, tasks = (
        load_policy(config.policy, config.rollouts, lambda sentence: None),
        load_tasks(["small"], RewardsConfig()),
    )
    whole = evaluate(policy, tasks, config.rollouts, 40, 2)
    monkeypatch.setattr(evaluating, "SMALL", 0)
    parts: list[int] = []
    asked = Asked(progress=lambda: parts.append(asked.questions))
    found = evaluate(policy, tasks, config.rollouts, 40, 2, asked)
    assert parts == [8, 16, 24, 32, 40] and found.asked == 40
    assert (found.labels, found.by_question, found.shown) == (whole.labels, whole.by_question, whole.shown)
    assert found.cut == whole.cut and found.tokens == whole.tokens and found.mixed == whole.mixed
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(evaluating.time, "monotonic", lambda: float(next(clock)))
    first = evaluate(policy, tasks, config.rollouts, 40, 2, Asked(), 35.0)  # ten seconds for each look at the clock
    assert first.asked == 24 and first.by_question == whole.by_question[:24]
    assert evaluate(policy, tasks, config.rollouts, 40, 2, Asked(), 1.0).asked == 8, "a first part in any case"
