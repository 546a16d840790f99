"""Columns of question files that their user names."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swarm_node.config import RewardsConfig, TaskConfig, load_config
from swarm_node.config.writing import dump_toml
from swarm_node.errors import UserError
from swarm_node.tasks import load_tasks
from swarm_node.tasks.checking import check_specs


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
    assert task.question == f"{int(task.answer or 0) - 1} + 1?" and task.metadata.keys() == {"level"}
    (score,) = tasks.score([task], [task.question], [f"<answer>{task.answer}</answer>"])
    assert score.reward == 1.0


def test_a_missing_column_names_those_there(file: str) -> None:
    message = (
        r"line 1: no column `question`; it has `prompt`, `target`, `level`. Name the columns .*question=\"COLUMN\""
    )
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
