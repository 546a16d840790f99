"""The answers by which a node judges averaged weights: which, how many, and from when on."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from swarm_node.config import NodeConfig
from swarm_node.policy.loading import load_policy
from swarm_node.rollouts import fit_length
from swarm_node.rollouts.probe_answers import (
    ENOUGH,
    KEPT_BACK,
    KEPT_BACK_FIRST,
    TRAINED,
    UNSEEN,
    ProbeAnswers,
    reference_answers,
)
from swarm_node.tasks.one_turn import is_held_out
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.messages import TaskName


def group(index: int, rewards: tuple[float, ...] = (0.0, 1.0), peer: str | None = None) -> Group:
    """Answers of which number n has the token ids [n, index]."""
    name = TaskName("made", "0" * 16, "made 1", index, 0)
    rollouts = [Rollout([Turn([n, index], [-1.0, -1.0], False)], reward=reward) for n, reward in enumerate(rewards)]
    return Group(Task(name, "made", "a question", "its answer"), [7, index], rollouts, peer=peer)


def rounds(answers: ProbeAnswers, first: int, many: int, per_round: int = 4) -> list[int]:
    """Of how many rounds, each of so many groups, a group is kept back; their numbers."""
    return [n for n in range(first, first + many) if answers.keep_back(group(100 * n + i) for i in range(per_round))]


def test_there_are_enough_after_eight_rounds_and_one_of_16_from_then_on() -> None:
    answers = ProbeAnswers()
    assert rounds(answers, 0, ENOUGH) == list(range(ENOUGH)) and len(answers.small_costs) == ENOUGH
    assert rounds(answers, ENOUGH, 20) == [11, 15, 19, 23, 27]
    one_a_round = ProbeAnswers()
    assert rounds(one_a_round, 0, 2 * ENOUGH, per_round=1) == list(range(1, 2 * ENOUGH, KEPT_BACK_FIRST))
    assert rounds(one_a_round, 100, 2 * KEPT_BACK, per_round=1) == [115, 131]


def test_nobody_to_average_with_needs_no_more_than_enough() -> None:
    """What was due meanwhile is kept back when somebody comes: answers of long ago are replaced soon."""
    answers = ProbeAnswers()
    for n in range(1000):
        answers.keep_back((group(100 * n + i) for i in range(4)), together=False)
    assert len(answers.unseen) == ENOUGH and answers.unseen[-1].prompt_ids[1] == 100 * (ENOUGH - 1)
    assert rounds(answers, 1000, 20) == [*range(1000, 1000 + ENOUGH), 1011, 1015, 1019]


def test_own_groups_that_teach_are_kept_back() -> None:
    answers = ProbeAnswers()
    alike, foreign, empty = group(0, (1.0, 1.0)), group(1, peer="somebody"), group(2, (0.0,))
    assert all(answers.keep_back([alike, foreign, empty]) is None for _ in range(20))
    first, second = group(3), group(4, (0.5, 0.0, 0.25))
    assert answers.keep_back([alike, first, second]) is first
    answers.trained_on([alike, foreign, second])
    assert [best.rollouts[0].token_ids for best in answers.unseen] == [[1, 3]]
    assert [best.rollouts[0].token_ids for best in answers.trained] == [[0, 4]]
    assert answers.unseen[0].prompt_ids == first.prompt_ids and answers.unseen[0].task.name == first.task.name


def test_the_latest_count() -> None:
    answers = ProbeAnswers()
    rounds(answers, 0, 10_000, per_round=1)
    answers.trained_on(group(n) for n in range(100))
    assert (len(answers.unseen), len(answers.trained)) == (UNSEEN, TRAINED)
    assert answers.trained[-1].rollouts[0].token_ids == [1, 99]


def test_references_stand_in_as_long_as_there_are_few() -> None:
    made: list[list[Group]] = []

    def make() -> list[Group]:
        made.append([group(n) for n in range(ENOUGH)])
        return made[-1]

    answers = ProbeAnswers(make)
    assert not made, "it takes time, and not every node averages"
    for kept in range(ENOUGH):
        assert answers.small_costs == made[0] and len(made) == 1 and len(answers.unseen) == kept
        rounds(answers, kept, 1)
    assert answers.small_costs == list(answers.unseen)
    assert ProbeAnswers(lambda: [group(0)] * (ENOUGH - 1)).small_costs == [], "too few tell nothing"


def test_what_is_kept_back_outlasts_a_restart() -> None:
    before, after, later = ProbeAnswers(), ProbeAnswers(), ProbeAnswers()
    rounds(before, 0, 11)
    after.load(json.loads(json.dumps(before.state())))
    assert after.small_costs == before.small_costs and len(after.unseen) == ENOUGH
    assert rounds(after, 11, 9) == rounds(before, 11, 9) == [11, 15, 19]
    for state in ({}, {"answers": [1], "waiting": 0}, {"answers": before.state()["answers"], "waiting": "soon"}):
        with pytest.raises((KeyError, msgspec.ValidationError)):
            later.load(state)
        assert not later.unseen


def test_references_are_of_held_out_questions_and_as_the_policy_would_answer() -> None:
    config = NodeConfig.model_validate({"tasks": ["small"]})
    policy = load_policy(config.policy, config.rollouts, lambda sentence: None)
    tasks, rollouts = load_tasks(config.tasks, config.rewards), fit_length(config.rollouts, policy, print)
    found = reference_answers(policy, tasks, rollouts)
    assert len(found) == UNSEEN
    by_name = {task.name: task for task in tasks.held_out(100)}
    for one in found:
        task, [answer] = by_name[one.task.name], one.rollouts
        assert is_held_out(task.question) and one.prompt_ids == policy.encode(tasks.prompt(task))
        assert policy.decode(answer.token_ids) == task.answer and answer.token_ids[-1] == policy.eos_id
    short = rollouts.model_copy(update={"max_new_tokens": 2})
    assert 0 < len(reference_answers(policy, tasks, short)) and all(
        len(one.rollouts[0].token_ids) <= 2 for one in reference_answers(policy, tasks, short)
    )


def test_tasks_without_references_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def f(completions, **columns):\n    return [0.5 for _ in completions]\n")
    Path("q.jsonl").write_text("".join(f'{{"question": "Write poem {n}."}}\n' for n in range(60)))
    rewards = {"checker_weight": 0.0, "functions": [{"path": "mine.py:f"}]}
    config = NodeConfig.model_validate({"tasks": ["q.jsonl"], "rewards": rewards})
    policy = load_policy(config.policy, config.rollouts, lambda sentence: None)
    assert reference_answers(policy, load_tasks(config.tasks, config.rewards), config.rollouts) == []
