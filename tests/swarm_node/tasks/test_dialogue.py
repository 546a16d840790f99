"""Dialogues without I/O: who says what, when it is over, and what it earns."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.errors import UserError
from swarm_node.tasks.base import Messages, TaskSource
from swarm_node.tasks.dialogue import Dialogue
from swarm_node.tasks.second_try import LESS, MORE, NO_NUMBER, SecondTry
from swarm_node.tasks.sources import list_own
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Task, Turn
from swarm_protocol.limits import MAX_TEXT_CHARS, MAX_TURNS
from swarm_protocol.messages import TaskName

TASK = SecondTry("second_try", {}).task(0)
RIGHT = int(TASK.answer or "")


def dialogue(
    environment: TaskSource, task: Task = TASK, opened: bool = False, errors: list[Any] | None = None
) -> Dialogue:
    """Tokens of what the environment says are its characters, behind 1 where the answer ended by itself, else 0."""
    said = [] if errors is None else errors
    return Dialogue(
        task,
        environment,
        [7],
        lambda text, ended: [int(ended), *map(ord, text)],
        opened,
        lambda *each: said.append(each),
    )


def test_a_right_answer_ends_it() -> None:
    held = dialogue(SecondTry("second_try", {}))
    assert held.ask() == [7]
    held.answer(Turn([5, 6], [-1.0, -2.0], True, f"It is {RIGHT}."))
    assert held.ask() is None and held.reward == 1.0 and held.rollout.spoken == [5, 6]
    assert held.rollout.transcript == f"It is {RIGHT}."


@pytest.mark.parametrize(
    ("first", "hint"), [(str(RIGHT - 1), MORE), (f"{RIGHT + 5}", LESS), ("no idea", NO_NUMBER), ("", NO_NUMBER)]
)
@pytest.mark.parametrize(("second", "reward"), [(str(RIGHT), 1.0), ("77", 0.0)])
def test_a_wrong_answer_gets_a_hint_and_one_more_try(first: str, hint: str, second: str, reward: float) -> None:
    held = dialogue(SecondTry("second_try", {}))
    held.answer(Turn([5], [-1.0], False, first))
    context = [0, *map(ord, hint)]
    assert held.ask() == [7, 5, *context] and held.reward == 0.0 and not held.over
    held.answer(Turn([8, 9], [-0.5, -0.25], True, second))
    assert held.ask() is None and held.reward == reward
    rollout = held.rollout
    assert rollout.token_ids == [5, 8, 9] and rollout.logprobs == [-1.0, -0.5, -0.25] and rollout.num_tokens == 3
    assert rollout.spoken == [5, *context, 8, 9] and rollout.before_last == [5, *context]
    assert [own for turn in rollout.turns for own in turn.is_own] == [True, *[False] * len(context), True, True]
    assert rollout.transcript == f"{first}\n> {hint}\n{second}" and rollout.text == second


def test_reasoning_that_the_prompt_began_is_given_back_to_the_answer() -> None:
    held = dialogue(SecondTry("second_try", {}), opened=True)
    held.answer(Turn([5], [], True, f"hm, {RIGHT}"))  # never closed: no answer
    assert not held.over and held.said == f"<think>hm, {RIGHT}"
    held.answer(Turn([5], [], True, f"hm</think>{RIGHT}"))
    assert held.reward == 1.0


class Endless(TaskSource):
    """A fake that asks on and on; what it says, and what it raises, are its options."""

    environment, config, generator, label, size = "endless", "0" * 16, "endless 1", "endless", 9

    def __init__(self, name: str, options: dict[str, Any], path: str) -> None:
        self.path, self.options = path, options

    def task(self, index: int) -> Task:
        return Task(TaskName("endless", self.config, self.generator, 0, index), "endless", f"Question {index}", "1")

    def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": task.question}]

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        if answer == "bad":
            raise ValueError(answer)
        role = str(self.options.get("role", "user"))
        return (
            [*messages, {"role": role, "content": self.options.get("says", "more?")}],
            self.options.get("reward"),
            False,
        )


def test_an_environment_that_fails_at_an_answer_makes_it_wrong() -> None:
    errors: list[Any] = []
    held = dialogue(Endless("endless", {"reward": 5}, ""), errors=errors)
    held.answer(Turn([5], [], True, "good"))
    assert held.reward == 1.0 and not held.over
    held.answer(Turn([5], [], True, "bad"))
    assert held.over and held.reward == 0.0
    assert [(task, str(error)) for task, error in errors] == [(TASK, "bad")]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"role": "assistant"}, "no message of a user"),
        ({"says": "x" * (MAX_TEXT_CHARS + 1)}, "no message of a user"),
        ({}, f"asks for more than {MAX_TURNS} answers"),
    ],
)
def test_an_environment_has_bounds(options: dict[str, Any], told: str) -> None:
    held = dialogue(Endless("endless", options, ""))
    with pytest.raises(UserError, match=told):
        for _ in range(MAX_TURNS):
            held.answer(Turn([5], [], True, "good"))
    assert len(held.turns) == (1 if options else MAX_TURNS)


def test_a_dialogue_without_room_is_cut() -> None:
    held = Dialogue(TASK, SecondTry("second_try", {}), [7], lambda text, ended: None, False, lambda *each: None)
    held.answer(Turn([5], [], True, "77"))
    assert held.over and held.ask() is None and held.rollout.cut and held.reward == 0.0


@pytest.mark.parametrize("options", [{"digits": 0}, {"digits": 10}, {"digits": "2"}, {"digit": 1}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has one option, digits"):
        load_tasks([TaskConfig(env="second_try", config=options)], RewardsConfig())


def test_it_is_listed_with_what_the_package_brings() -> None:
    assert [(entry.name, entry.checker) for entry in list_own()] == [("starter", "own"), ("second_try", "own")]


def test_a_set_judges_the_last_answer() -> None:
    tasks = load_tasks([TaskConfig(env="second_try", config={"digits": 2})], RewardsConfig())
    assert tasks.turns == 2
    task = tasks.at(0.5, "key")
    assert tasks.assigned(task.name, "key") == task
    texts = [[f"<answer>{task.answer}</answer>"], ["x", f"<answer>{task.answer}</answer>"], ["x", "y"], ["x"]]
    scores = tasks.judge([tasks.replay(task, "", each) for each in texts], [""] * len(texts))
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0, 0.0]
    assert [score.extracted for score in scores] == [task.answer, task.answer, "y", "x"]
    with pytest.raises(UserError, match="asks for another answer"):
        tasks.score([task], [""], ["x"])
