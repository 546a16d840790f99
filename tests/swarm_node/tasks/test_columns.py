"""Columns of question files that their user names."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from swarm_node.config import RewardsConfig, TaskConfig, load_config
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.config.writing import dump_toml
from swarm_node.errors import UserError
from swarm_node.tasks.checking import check_specs
from swarm_node.tasks.taskset import load_tasks


@pytest.fixture
def file() -> str:
    path = Path("sums.jsonl")
    path.write_text("".join(f'{{"prompt": "{n} + 1?", "target": {n + 1}, "level": {n % 3}}}\n' for n in range(60)))
    return str(path)


def test_named_columns_are_question_and_answer(file: str) -> None:
    (table,) = load_config(sets=[f'tasks=[{{file="{file}", question="prompt", answer="target"}}]']).tasks
    assert isinstance(table, TaskConfig)
    check_specs([table], answer_needed=True)
    tasks = load_tasks([table], RewardsConfig())
    (task,) = tasks.sample(random.Random(0), 1)
    assert task.question == f"{int(task.answer or 0) - 1} + 1?" and task.metadata.keys() == {
        "prompt",
        "target",
        "level",
    }
    (score,) = tasks.score([task], [task.question], [f"<answer>{task.answer}</answer>"])
    assert score.reward == 1.0


def test_a_reward_function_gets_columns_by_their_names(file: str) -> None:
    Path("mine.py").write_text(
        "def near(prompts, completions, target, **kwargs):\n"
        "    assert target == kwargs['answer']\n"
        "    return [float(text == right) for text, right in zip(completions, target)]\n"
    )
    rewards = RewardsConfig(checker_weight=0, functions=[RewardFunctionConfig(path="mine.py:near")])
    tasks = load_tasks([TaskConfig(file=file, question="prompt", answer="target")], rewards)
    (task,) = tasks.sample(random.Random(0), 1)
    scores = tasks.score([task, task], ["", ""], [task.answer or "", "none"])
    assert [score.reward for score in scores] == [1.0, 0.0]


def test_a_missing_column_names_those_there(file: str) -> None:
    message = r"line 1: no column `answer`; it has `prompt`, `target`, `level`. Name its columns .*question=\"COLUMN\""
    for check in (lambda specs: load_tasks(specs, RewardsConfig()), lambda specs: check_specs(specs, True)):
        with pytest.raises(UserError, match=message):
            check([file])
    with pytest.raises(UserError, match="no column `reply`"):
        load_tasks([TaskConfig(file=file, question="prompt", answer="reply")], RewardsConfig())


def test_other_columns_make_other_tasks(file: str) -> None:
    """Reading a file the other way round gives other questions, which no checkpoint or peer may take for the same."""
    tables = [TaskConfig(file=file, question="prompt", answer=answer) for answer in ("target", "level")]
    assert len(set(load_tasks(tables, RewardsConfig()).names)) == 2
    first, second = load_tasks(tables, RewardsConfig()), load_tasks(tables, RewardsConfig()).only(tables[:1])
    assert second.names == first.names[:1]


def test_a_written_configuration_may_be_read_again() -> None:
    Path("run.toml").write_text(dump_toml(load_config(sets=["tasks=[{env='gcd'}]"])))
    assert load_config(Path("run.toml")).tasks == [TaskConfig(env="gcd")]


SYSTEM, USER = {"role": "system", "content": " Be brief. "}, {"role": "user", "content": "1 + 1?\n"}
TEXT = {"type": "text", "text": "1 + 1?"}
CHAT = TaskConfig(file="chat.jsonl", question="prompt", answer="solution")


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        ([USER], "1 + 1?"),
        ([SYSTEM, USER], "Be brief.\n\n1 + 1?"),
        ([USER | {"content": [TEXT, {"type": "text", "text": " Quick!"}]}], "1 + 1? Quick!"),
        ([SYSTEM, USER, {"role": "user", "content": "Or 2?", "name": "x"}], "Be brief.\n\n1 + 1?\n\nOr 2?"),
    ],
)
def test_messages_of_a_data_set_are_a_question(messages: list[object], question: str) -> None:
    Path("chat.jsonl").write_text(json.dumps({"prompt": messages, "solution": 2, "level": 3}))
    (task,) = load_tasks([CHAT], RewardsConfig(), whole=True).every()
    assert (task.question, task.answer, task.metadata) == (
        question,
        "2",
        {"prompt": question, "solution": "2", "level": 3},
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {"role": "assistant", "content": "2"}], "`prompt` has a turn of an assistant or a tool: a task is one"),
        ([SYSTEM], "`prompt` must be messages of the user, after one of the system at most"),
        ([SYSTEM, SYSTEM, USER], "`prompt` must be messages of the user"),
        ([USER, SYSTEM], "`prompt` must be messages of the user"),
        ([], "`prompt` must be messages of the user"),
        (["1 + 1?"], "`prompt` must be messages of the user"),
        ([USER | {"role": ["user"]}], "`prompt` must be messages of the user"),
        (
            [USER | {"content": [TEXT, {"type": "image"}]}],
            "`content` in `prompt` has a part of type `image`: only text",
        ),
        ([USER | {"content": [{"type": "text"}]}], "`content` in `prompt` has a part without a text"),
        ([USER | {"content": []}], "each `content` in `prompt` must be a text"),
        ([SYSTEM | {"content": " "}, USER], "each `content` in `prompt` must be a text"),
        ({"role": "user", "content": "1 + 1?"}, "`prompt` must be a text, or a list of messages"),
    ],
)
def test_other_messages_are_refused_with_their_line(messages: object, message: str) -> None:
    good, bad = ({"prompt": each, "solution": 2} for each in ([USER], messages))
    Path("chat.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    with pytest.raises(UserError, match=re.escape(f"task file chat.jsonl, line 2: {message}")):
        check_specs([CHAT], answer_needed=True)
