"""Drawing tasks, naming them, judging answers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.config.plugins import load_function
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.errors import UserError
from swarm_node.tasks.base import Messages, TaskSource
from swarm_node.tasks.judging.texts import normalise
from swarm_node.tasks.names import in_metrics
from swarm_node.tasks.one_turn import is_held_out
from swarm_node.tasks.option_limits import check_options
from swarm_node.tasks.reasoning_gym import ReasoningGym
from swarm_node.tasks.sources import ENVIRONMENTS
from swarm_node.tasks.taskset import TaskSet, load_tasks, stratify
from swarm_node.types import Task
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import TaskName

REWARDS = RewardsConfig()


@pytest.fixture(scope="module")
def small() -> TaskSet:
    return load_tasks(["small"], REWARDS)


def write_lines(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def rows(n: int) -> list[dict[str, object]]:
    return [{"question": f"What is {i} + {i}?", "answer": str(2 * i), "level": i % 3} for i in range(n)]


# --- drawing ---


def test_labels(small: TaskSet) -> None:
    assert small.labels == [
        "basic_arithmetic",
        "chain_sum",
        "fraction_simplification",
        "gcd",
        "lcm",
        "count_bits",
        "products",
    ]
    both = load_tasks(["small/basic_arithmetic", "sapo/basic_arithmetic", "gcd"], REWARDS).labels
    assert both == ["small/basic_arithmetic", "sapo/basic_arithmetic", "gcd"]
    tables = [TaskConfig(env="gcd", config={"max_value": n}) for n in (20, 30)]
    first, second = load_tasks(tables, REWARDS).labels
    assert first != second and first.startswith("gcd:")


def test_files_of_one_name_are_numbered(tmp_path: Path) -> None:
    files = []
    for number, folder in enumerate(["a", "b", "c"], 3):
        (tmp_path / folder).mkdir()
        files.append(write_lines(tmp_path / folder / "gcd.jsonl", rows(20 * number)))
    assert load_tasks([files[0], files[1]], REWARDS).labels == ["gcd", "gcd-2"]
    assert load_tasks([files[2], "gcd", files[0]], REWARDS).labels == ["gcd-2", "gcd", "gcd-3"]


def test_the_same_source_twice_is_one_source() -> None:
    assert load_tasks(["small/gcd", "small/gcd", "bf", "sapo/bf"], REWARDS).labels == ["gcd", "bf"]


def test_sampling_is_seeded_and_even(small: TaskSet) -> None:
    drawn = small.sample(random.Random(3), 21)
    assert drawn == small.sample(random.Random(3), 21) != small.sample(random.Random(4), 21)
    assert Counter(task.label for task in drawn) == dict.fromkeys(small.labels, 3)
    for seed in range(20):
        assert {task.label for task in small.sample(random.Random(seed), 8)} == set(small.labels)
        assert len(small.sample(random.Random(seed), 3)) == 3


def test_weights_are_met_on_average() -> None:
    rng = random.Random(0)
    totals = [0, 0, 0]
    for _ in range(3000):
        counts = stratify([1.0, 2.0, 5.0], 2, rng)
        assert sum(counts) == 2
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    assert totals == pytest.approx([750, 1500, 3750], rel=0.08)
    for _ in range(200):
        assert stratify([1.0, 2.0, 5.0], 8, rng) == [1, 2, 5]
        many = stratify([0.001, 1.0, 1.0], 8, rng)
        assert many[0] == 1 and sum(many) == 8 and abs(many[1] - many[2]) <= 1
        assert sorted(stratify([1.0] * 7, 8, rng)) == [1] * 6 + [2]
        assert stratify([1.0] * 5, 5, rng) == [1] * 5


def test_training_and_evaluation_are_disjoint_by_content(small: TaskSet) -> None:
    trained = {normalise(task.question) for task in small.sample(random.Random(0), 3000)}
    evaluated = [normalise(task.question) for task in small.held_out(300)]
    assert not trained & set(evaluated)
    assert len(evaluated) == len(set(evaluated)) >= 100
    assert not any(map(is_held_out, trained)) and all(map(is_held_out, evaluated))


def test_held_out_questions_are_fixed_and_even(small: TaskSet) -> None:
    tasks = small.held_out(28)
    assert tasks == small.held_out(28)
    assert Counter(task.label for task in tasks) == dict.fromkeys(small.labels, 4)
    assert small.held_out(0) == []


def test_the_split_is_pinned_and_ignores_layout() -> None:
    """Every machine must split alike, for ever."""
    assert [is_held_out(f"question {i}") for i in range(20)].count(True) == PINNED_SPLIT.count(True)
    assert [is_held_out(f"question {i}") for i in range(20)] == PINNED_SPLIT
    for text in ("question 1", "question 4"):
        assert is_held_out(f"  {text.replace(' ', chr(10) * 2)}\t") == is_held_out(text)
    assert normalise("cafe\u0301") == normalise("caf\u00e9")


PINNED_SPLIT = [bool(int(bit)) for bit in "00000000010000000010"]


def test_nothing_left_to_train_on_is_said(tmp_path: Path) -> None:
    question = next(f"q{i}" for i in range(100) if is_held_out(f"q{i}"))
    with pytest.raises(
        UserError,
        match="has one question only, and one question in 5 .* is held out of training, here all of them: add",
    ):
        load_tasks([write_lines(tmp_path / "one.jsonl", [{"question": question, "answer": "1"}])], REWARDS)


# --- names ---


def seeded(tasks: TaskSet, n: int) -> list[tuple[Task, str]]:
    """Tasks that keys seed, over all sources, each with its key."""
    return [(tasks.at((i + 0.5) / n, f"key {i}"), f"key {i}") for i in range(n)]


def test_another_node_makes_a_task_by_its_name(small: TaskSet) -> None:
    other = load_tasks(["small/gcd", "small/products", "sapo"], REWARDS)
    for task, key in seeded(small, 70):
        name = msgspec.msgpack.decode(msgspec.msgpack.encode(task.name), type=TaskName)
        if task.label in ("gcd", "products"):
            assert other.assigned(name, key) == task
        else:
            with pytest.raises(RemoteProtocolError, match="no source"):
                other.assigned(name, key)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"environment": "lcm"}, "task"),
        ({"config": "0" * 16}, "task"),
        ({"generator": "reasoning-gym 0.0.1"}, "task"),
        ({"seed": 1}, "assignment"),
        ({"index": -1}, "assignment"),
        ({"index": 2**31}, "assignment"),
    ],
)
def test_a_name_that_is_not_assigned_is_refused(small: TaskSet, change: dict[str, object], reason: str) -> None:
    ((task, key),) = seeded(load_tasks(["small/gcd"], REWARDS), 1)
    with pytest.raises(RemoteProtocolError) as caught:
        small.assigned(msgspec.structs.replace(task.name, **change), key)
    assert caught.value.reason == reason


def test_no_evaluation_question_is_assigned(small: TaskSet) -> None:
    assert not any(is_held_out(task.question) for task, _ in seeded(small, 300))


def test_the_config_hash_covers_defaults_but_not_spelling() -> None:
    def config(options: dict[str, object]) -> str:
        tasks = load_tasks([TaskConfig(env="gcd", config=options)], REWARDS)
        return tasks.sample(random.Random(0), 1)[0].name.config

    assert config({}) == config({"max_value": 1000, "min_value": 1}) != config({"max_value": 999})


# --- bad input ---


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gdc", "unknown task 'gdc'; did you mean 'gcd'"),
        ("smal", "did you mean 'small'"),
        ("small/gdc", "did you mean 'small/gcd'"),
        ("", "unknown task ''"),
        ("n_queens", "'n_queens' is refused: its scorer executes"),
        ("sudoku", "'sudoku' is refused: its scorer has not been audited"),
        ("nowhere.jsonl", "cannot read task file nowhere.jsonl"),
        (TaskConfig(env="small", config={"max_value": 9}), "'small' is a set"),
        (TaskConfig(env="gcd", config={"max_valeu": 9}), "no option 'max_valeu'; did you mean 'max_value'"),
        (TaskConfig(env="gcd", config={"seed": 9}), "'seed' is set by the node"),
        (TaskConfig(env="spell_backward", config={"data_file": "/etc/passwd"}), "is set by the node"),
        (TaskConfig(env="gcd", config={"max_value": 0}), "'gcd': wrong options: max_value must be"),
        (TaskConfig(env="gcd", config={"max_value": "many"}), "must be a whole number, not 'many'"),
        (TaskConfig(env="gcd", config={"max_value": 9.5}), "must be a whole number, not 9.5"),
        (TaskConfig(env="binary_matrix", config={"p_zero": "few"}), "task 'binary_matrix': wrong options: "),
        (TaskConfig(env="calendar_arithmetic", config={"tasks": ["easter"]}), "Invalid tasks: easter"),
    ],
)
def test_one_line_says_what_is_wrong(spec: str | TaskConfig, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_tasks([spec], REWARDS)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_no_tasks_at_all() -> None:
    with pytest.raises(UserError, match="no tasks"):
        load_tasks([], REWARDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"question": "a", "answer": "b"}\nnot json\n', "line 2: JSON is malformed"),
        (b'["a"]', "row 1: not a JSON object"),
        (b'["a"]\n["b"]', "line 1: not a JSON object"),
        (b'\n{"answer": "b"}', "line 2: no column `question`; it has `answer`. Name its columns in place of the file"),
        (b'{"question": " ", "answer": "b"}', "line 1: `question` must be a text"),
        (b'{"question": "a"}', "line 1: no column `answer`; it has `question`. Name its columns in place of the file"),
        (b'{"question": "a"}', "no answer is needed: --set rewards.checker_weight=0"),
        (b'{"question": "a", "answer": {"b": 1}}', "line 1: `answer` must be a text, a number, true or false, or a"),
        (b'{"question": "a", "answer": " "}', "line 1: `answer` is empty"),
        (b'{"question": "\xff", "answer": "b"}', "line 1: "),
        (b'{"question": "\\ud800", "answer": "b"}', "line 1: "),
        (b"[" * 100_000, "line 1: "),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="bad.jsonl") as caught:
        load_tasks([str(path)], REWARDS)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# --- files ---


def test_a_test_file_is_asked_whole_and_in_order(tmp_path: Path) -> None:
    lines = [*rows(30), rows(30)[0]]
    file = write_lines(tmp_path / "test.jsonl", lines)
    tasks = load_tasks([file], REWARDS, whole=True)
    assert [task.question for task in tasks.held_out(100)] == [line["question"] for line in lines]
    assert tasks.every() == tasks.held_out(100) == load_tasks([file], REWARDS).every()
    assert [task.name.index for task in tasks.held_out(3)] == [0, 1, 2]
    mixed = load_tasks(["small/gcd", file], REWARDS, whole=True)
    assert mixed.held_out(4)[0].label == "gcd", "of what has no end, the held-out part is asked"
    with pytest.raises(UserError, match="gcd never ends"):
        mixed.every()


def test_questions_that_training_may_draw_are_counted(tmp_path: Path) -> None:
    training = load_tasks([write_lines(tmp_path / "train.jsonl", rows(60)), "small/gcd"], REWARDS)
    test = load_tasks([write_lines(tmp_path / "test.jsonl", rows(80))], REWARDS, whole=True)
    held_out = len(training.only([str(tmp_path / "train.jsonl")]).held_out(100))
    assert test.overlap(training) == 60 - held_out
    assert load_tasks([write_lines(tmp_path / "new.jsonl", rows(80)[60:])], REWARDS, whole=True).overlap(training) == 0


def test_a_file_says_how_it_is_split(tmp_path: Path) -> None:
    tasks = load_tasks([write_lines(tmp_path / "train.jsonl", rows(60)), "small/gcd"], REWARDS)
    held = len(tasks.only([str(tmp_path / "train.jsonl")]).held_out(100))
    assert 0 < held < 30
    assert tasks.split(tasks) == [f"train: {60 - held} questions trained on, {held} held out"], "gcd never ends"
    others = load_tasks([write_lines(tmp_path / "test.jsonl", rows(80)[60:])], REWARDS, whole=True)
    unasked = f"{held} neither trained on nor asked: all members of a swarm hold them out"
    assert tasks.split(others) == [f"train: {60 - held} questions trained on, {unasked}"]
    same = load_tasks([str(tmp_path / "train.jsonl")], REWARDS, whole=True)
    assert tasks.split(same) == tasks.split(tasks)


def test_a_file_is_trained_on_whole_but_for_the_exam(tmp_path: Path) -> None:
    train, test = (
        write_lines(tmp_path / f"{name}.jsonl", rows(60)[a:b]) for name, a, b in [("train", 0, 40), ("test", 40, 60)]
    )
    exam = load_tasks([test], REWARDS, whole=True)
    alone = load_tasks([train, "small/gcd"], REWARDS, exam)
    drawn = alone.sample(random.Random(0), 2000)
    assert {task.question for task in drawn if task.label == "train"} == {str(row["question"]) for row in rows(40)}
    assert not any(is_held_out(task.question) for task in drawn if task.label == "gcd"), "it has no end"
    assert alone.split(exam) == ["train: 40 questions trained on"]
    assert alone.drawn_of(load_tasks([train], REWARDS).every()) == 40
    assert not any(is_held_out(task.question) for task, _ in seeded(alone, 300)), "as peers expect"
    asked_too = load_tasks([train], REWARDS, load_tasks([TaskConfig(file=train), test], REWARDS, whole=True))
    assert not any(is_held_out(task.question) for task in asked_too.sample(random.Random(0), 300))
    only_held = next(row for row in rows(60) if is_held_out(str(row["question"])))
    one = write_lines(tmp_path / "one.jsonl", [only_held])
    assert load_tasks([one], REWARDS, exam).sample(random.Random(0), 1)[0].question == only_held["question"]


@pytest.mark.parametrize(
    "code",
    [
        "async def late(prompts, completions, **columns):\n    return [0.0]\n",
        "async def late(prompts, completions, **columns):\n    yield 0.0\n",
        "class Late:\n    async def __call__(self, **columns):\n        return [0.0]\nlate = Late()\n",
    ],
)
def test_an_async_reward_function_is_refused(code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    rewards = RewardsConfig.model_validate({"functions": [{"path": f"{tmp_path}/mine.py:late"}]})
    with pytest.raises(UserError, match=r"reward function 'late' in .*mine.py, line \d, is an `async def`"):
        load_tasks(["small/gcd"], rewards)


def test_one_question_may_be_all_of_a_test_file(tmp_path: Path) -> None:
    [task] = load_tasks([write_lines(tmp_path / "one.jsonl", rows(1))], REWARDS, whole=True).every()
    assert task.label == "one"


def test_a_file_of_questions(tmp_path: Path) -> None:
    tasks = load_tasks([write_lines(tmp_path / "sums.jsonl", rows(60))], REWARDS)
    assert tasks.labels == ["sums"]
    drawn = tasks.sample(random.Random(0), 40)
    named = tasks.at(0.5, "a key")
    assert tasks.assigned(named.name, "a key") == named
    held_out = tasks.held_out(100)
    assert 0 < len(held_out) < 30 and not {t.question for t in drawn} & {t.question for t in held_out}
    task = drawn[0]
    assert task.question == f"What is {task.name.index} + {task.name.index}?"
    assert task.metadata == {"level": task.name.index % 3}
    assert task.name.environment == "jsonl" and task.name.seed == 0

    moved = load_tasks([write_lines(tmp_path / "moved.jsonl", rows(60))], REWARDS)
    assert moved.assigned(named.name, "a key") == msgspec.structs.replace(named, label="moved")
    edited = load_tasks([write_lines(tmp_path / "edited.jsonl", rows(61))], REWARDS)
    with pytest.raises(RemoteProtocolError, match="no source"):
        edited.assigned(named.name, "a key")


def test_file_answers_compare_as_text_or_number(tmp_path: Path) -> None:
    content = [{"question": f"q{i}", "answer": "so 1,000 it is\n#### 1,000"} for i in range(9)]
    content += [{"question": f"n{i}", "answer": 1000} for i in range(9)]
    tasks = load_tasks([write_lines(tmp_path / "gsm.jsonl", content)], RewardsConfig(kind="text"))
    for task in tasks.sample(random.Random(0), 10):
        for completion, right in [("#### 1000", 1), (r"\boxed{1,000.0}", 1), ("1e3", 0), ("10000", 0)]:
            (score,) = tasks.score([task], [task.question], [completion])
            assert score.reward == right and score.correct == bool(right)


# --- rewards ---


def test_exact_by_default_and_partial_on_request() -> None:
    """The library gives `123456789` a ninth of the reward wherever one digit is right."""
    for partial, reward in ((False, 0.0), (True, 1 / 9)):
        tasks = load_tasks(["small/count_bits"], RewardsConfig(partial=partial))
        task = next(task for task in tasks.sample(random.Random(0), 50) if task.answer == "3")
        guess, right = tasks.score([task] * 2, [task.question] * 2, ["124567893", "<answer>3</answer>"])
        assert guess.reward == pytest.approx(reward) and not guess.correct
        assert (right.reward, right.correct, right.extracted) == (1.0, True, "3")
        assert right.rewards == {"checker": 1.0}


FUNCTIONS = """
import json
from pathlib import Path
def length(prompts, completions, **columns):
    Path("calls.json").write_text(json.dumps([prompts, completions, columns]))
    return [len(text) for text in completions]
def some(completions, answer, task, level, **columns):
    return [None if grade is None else float(grade) for grade in level]
def short(completions, **columns):
    return [1.0]
def broken(completions, **columns):
    return [1 / 0 for text in completions]
def nan(completions, **columns):
    return [float("nan") for text in completions]
def text(completions, **columns):
    return ["good" for text in completions]
def single(completions, **columns):
    return 1.0
def lazy(completions, **columns):
    for text in completions:
        yield int("x")
def chat(completions, **columns):
    return [len(completion[0]["content"]) for completion in completions]
"""


def functions(tmp_path: Path, *names: str, weight: float = 1.0) -> list[RewardFunctionConfig]:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return [RewardFunctionConfig(path=f"{path}:{name}", weight=weight) for name in names]


def test_prompts_are_decoded_for_functions_alone(tmp_path: Path) -> None:
    rewards = [REWARDS, RewardsConfig(functions=functions(tmp_path, "length"))]
    assert [
        load_tasks(["small/gcd"], each).prompt_text([*range(20)], lambda ids: str(len(ids))) for each in rewards
    ] == ["16", "20"]


def test_rewards_are_summed_by_weight(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "sums.jsonl", rows(60))
    rewards = RewardsConfig(checker_weight=2.0, functions=functions(tmp_path, "length", "some", weight=0.5))
    tasks = load_tasks([file, "small/gcd"], rewards)
    assert tasks.reward_weights == {"checker": 2.0, "length": 0.5, "some": 0.5}
    ours = next(task for task in tasks.sample(random.Random(0), 40) if task.metadata.get("level") == 2)
    gcd = next(task for task in tasks.sample(random.Random(0), 40) if task.label == "gcd")
    first, second = tasks.score([ours, gcd], ["p", "q"], [f"<answer>{ours.answer}</answer>", "none"])
    size = len(f"<answer>{ours.answer}</answer>")
    assert first.rewards == {"checker": 1.0, "length": size, "some": 2.0}
    assert first.reward == 2.0 + 0.5 * size + 0.5 * 2.0 and first.correct
    assert second.rewards == {"checker": 0.0, "length": 4.0, "some": None}
    assert second.reward == 2.0 and not second.correct


def test_rewards_have_plain_names_in_metrics(tmp_path: Path) -> None:
    assert load_tasks(["small/gcd"], REWARDS).reward_labels == {}
    tasks = load_tasks(["small/gcd"], RewardsConfig(functions=functions(tmp_path, "length")))
    assert tasks.reward_labels == {"checker": "checker", "length": "length"}
    assert in_metrics(["größe/x y", "gr__e_x_y"]) == {"größe/x y": "gr__e_x_y", "gr__e_x_y": "gr__e_x_y-2"}
    many = in_metrics([f"f{n}" * 90 for n in range(99)])
    assert len(many) == 16 and max(map(len, many.values())) == 60


def test_functions_alone_may_judge_questions_without_answers(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "open.jsonl", [{"question": f"q{i}"} for i in range(20)])
    rewards = RewardsConfig(checker_weight=0.0, functions=functions(tmp_path, "length"))
    tasks = load_tasks([file], rewards)
    (task,) = tasks.sample(random.Random(0), 1)
    (score,) = tasks.score([task], [task.question], ["four"])
    assert task.answer is None and not score.correct
    assert (score.rewards, score.reward) == ({"length": 4.0}, 4.0)


def test_functions_get_strings_and_columns(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "sums.jsonl", rows(60))
    tasks = load_tasks([file], RewardsConfig(functions=functions(tmp_path, "length")))
    drawn = tasks.sample(random.Random(0), 2)
    tasks.score(drawn, ["p1", "p2"], ["c1", "c2"])
    prompts, completions, columns = json.loads(Path("calls.json").read_text())
    assert (prompts, completions) == (["p1", "p2"], ["c1", "c2"])
    assert columns == {
        "question": [task.question for task in drawn],
        "answer": [task.answer for task in drawn],
        "task": ["sums", "sums"],
        "level": [task.metadata["level"] for task in drawn],
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "'short' in rewards.py, line 9, gave 1 rewards for 2 completions"),
        ("broken", "'broken' failed in rewards.py, line 12: ZeroDivisionError: division by zero"),
        ("nan", "'nan' in rewards.py, line 13, gave a reward that is not finite"),
        ("text", "'text' in rewards.py, line 15, must give a list of numbers, and gave ['good', 'good']"),
        ("single", "'single' in rewards.py, line 17, must give a list of numbers, and gave 1.0"),
        ("lazy", "'lazy' failed in rewards.py, line 21: ValueError"),
        ("chat", "; completions are plain texts here, also for a column of messages (docs/tasks.md#rewards)"),
        (
            "some",
            "'some' in rewards.py, line 7, cannot be called: missing a required argument: 'level'. It is called with",
        ),
    ],
)
def test_a_function_that_fails_is_the_users_error(tmp_path: Path, name: str, message: str) -> None:
    tasks = load_tasks(["small/gcd"], RewardsConfig(functions=functions(tmp_path, name)))
    drawn = tasks.sample(random.Random(0), 2)
    with pytest.raises(UserError) as caught:
        tasks.score(drawn, ["p", "q"], ["1", "2"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_functions_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    for path, message in [
        ("length", "write file.py:function"),
        ("nowhere.py:f", "cannot import nowhere.py"),
        ("no.such.module:f", "cannot import no.such.module: ModuleNotFoundError"),
        (f"{tmp_path}/bad.py:f", "nothing_of_this_name"),
        ("math:no_such", "math has no function 'no_such'"),
        ("math:pi", "math has no function 'pi'"),
    ]:
        with pytest.raises(UserError, match="reward function") as caught:
            load_tasks(["small/gcd"], RewardsConfig(functions=[RewardFunctionConfig(path=path)]))
        assert message in str(caught.value)
    with pytest.raises(UserError, match="nothing to reward"):
        load_tasks(["small/gcd"], RewardsConfig(checker_weight=0.0))
    with pytest.raises(UserError, match="two rewards are called 'length'"):
        load_tasks(["small/gcd"], RewardsConfig(functions=functions(tmp_path, "length", "length")))


def test_function_files_are_modules_of_their_own(tmp_path: Path) -> None:
    """Dataclasses with postponed annotations look their module up; files of one name do not get in each other's way."""
    paths = [tmp_path / "a" / "json.py", tmp_path / "b" / "json.py"]
    for value, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Judge:\n    value: float\n"
            f"def f(completions, **columns): return [Judge({value}.0).value for text in completions]\n"
        )
    first, second = (load_function(f"{path}:f", "function") for path in paths)
    assert (first(completions=["x"]), second(completions=["x"])) == ([0.0], [1.0])
    assert sys.modules["json"] is json
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(UserError):
        load_function(f"{tmp_path}/bad.py:f", "function")
    loaded = [m for m in sys.modules.values() if str(tmp_path) in (getattr(m, "__file__", None) or "")]
    assert [m.f for m in loaded] == [first, second]


def test_importing_tasks_imports_neither_torch_nor_reasoning_gym(root: Path) -> None:
    code = "import sys, swarm_node.tasks; print({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=root).strip() == "set()"


def test_chosen_tasks_are_drawn_all_are_judged() -> None:
    Path("q.jsonl").write_text("".join(f'{{"question": "{i}+1?", "answer": "{i + 1}"}}\n' for i in range(20)))
    wide = TaskConfig(env="gcd", config={"max_value": 50})
    tasks = load_tasks(["small", wide, "q.jsonl"], RewardsConfig())
    chosen = {
        ("small",): 7,
        ("gcd",): 2,
        ("small/gcd", "lcm"): 2,
        ("q.jsonl",): 1,
    }
    for specs, count in chosen.items():
        assert len(tasks.only(specs).labels) == count
    assert tasks.only([wide]).labels == [label for label in tasks.labels if label.startswith("gcd")]
    part = tasks.only(["lcm"])
    assert {task.label for task in part.sample(random.Random(0), 20)} == {"lcm"}
    assert {part.at(place / 10, "key").label for place in range(10)} == {"lcm"}
    other = tasks.only(["q.jsonl"]).at(0.5, "key")
    assert part.assigned(other.name, "key") == other
    assert part.score([other], ["?"], [other.answer or ""])[0].correct
    with pytest.raises(UserError, match="'bf' is not one of this swarm's"):
        tasks.only(["lcm", "bf"])


# --- environments of one's own ---


class Countdown(TaskSource):
    """A fake with several steps: the answers must count down from the question's number to 0."""

    generator, size = "countdown 1", 50

    def __init__(self, name: str, options: dict[str, object], path: str) -> None:
        self.environment = self.label = name
        self.config, self.path, self.turns = "0" * 16, path, options.get("turns")

    def task(self, index: int) -> Task:
        name = TaskName(self.environment, self.config, self.generator, 0, index)
        return Task(name, self.label, f"Count down from {index}", "0")

    def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": f"{task.question}, one number at a time."}]

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        messages = [*messages, {"role": "assistant", "content": answer}]
        expected = task.name.index - len(messages) // 2
        if int(answer) != expected or expected == 0 or self.turns == len(messages) // 2:
            return messages, float(int(answer) == expected), True
        return [*messages, {"role": "user", "content": "Next?"}], 0.0, False


def test_a_dialogue_has_steps() -> None:
    environment = Countdown("countdown", {}, "countdown")
    task = environment.task(2)
    messages = environment.reset(task)
    messages, reward, done = environment.step(task, messages, "1")
    assert (messages[-1]["content"], reward, done) == ("Next?", 0.0, False)
    assert environment.step(task, messages, "0")[1:] == (1.0, True)
    assert environment.step(task, messages, "5")[1:] == (0.0, True)


def test_an_environment_of_ones_own_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "countdown", Countdown)
    for env in ("countdown", f"{__name__}:Countdown"):
        tasks = load_tasks([TaskConfig(env=env, config={"turns": 1})], REWARDS)
        task = tasks.sample(random.Random(0), 1)[0]
        assert tasks.prompt(task) == f"{task.question}, one number at a time."
        right, wrong, odd = tasks.score([task] * 3, [""] * 3, [str(task.name.index - 1), "77", "?"])
        assert (right.reward, wrong.reward, odd.reward) == (1.0, 0.0, 0.0) and tasks.scorer_errors.total() == 1
    check_options("countdown", {})
    endless = load_tasks(["countdown"], REWARDS)
    (task,) = endless.sample(random.Random(0), 1)
    with pytest.raises(UserError, match="asks for another answer"):
        endless.score([task], [""], [str(task.name.index - 1)])
    with pytest.raises(UserError, match="must name a subclass"):
        load_tasks(["builtins:slice"], REWARDS)


def test_a_library_judges_equal_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = load_tasks(["small/gcd"], REWARDS)
    one, other = tasks.sample(random.Random(0), 2)
    judged = []

    def check(self: ReasoningGym, task: Task, answer: str) -> float:
        judged.append((task.name.index, answer))
        return float(answer == "2") if answer != "?" else 1 / 0

    monkeypatch.setattr(ReasoningGym, "check", check)
    scores = tasks.score([one, one, one, other, one, one], [""] * 6, ["1", "2", "2", "2", "?", "?"])
    assert [score.reward for score in scores] == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    a, b = one.name.index, other.name.index
    assert judged == [(a, "1"), (a, "2"), (b, "2"), (a, "?"), (a, "?")] and tasks.scorer_errors.total() == 2
