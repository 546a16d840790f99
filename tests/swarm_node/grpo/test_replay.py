"""Own right answers that are trained on again, by hand: what is kept, what is drawn, what the trainer makes of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swarm_node.config import GrpoConfig, NodeConfig
from swarm_node.grpo.replay import KEPT, KIND, Replay, ReplayState
from swarm_node.grpo.trainer import Trainer
from swarm_node.node import Node
from swarm_node.rollouts import Collected
from swarm_node.types import Group, Rollout, Sampling, Task, Turn
from swarm_protocol.messages import TaskName
from tests.support.tiny_policy import TinyPolicy, make

Answer = tuple[str, float | None]  # text and reward


def group(label: str, *answers: Answer, question: int = 5) -> Group:
    """One of this node's own; each answer has three tokens."""
    task = Task(TaskName(label, "0" * 16, "test 1", 0, question), label, f"question {question}", "answer")
    rollouts = [
        Rollout([Turn([3 + len(text), 4, 2], [-1.0, -1.0, -1.0], True, text)], rewards={"checker": r}, reward=r or 0.0)
        for text, r in answers
    ]
    return Group(task, [question, 6], rollouts)


def right(label: str, *texts: str, question: int = 5) -> Group:
    return group(label, ("wrong", 0.0), *((text, 1.0) for text in texts), question=question)


def kept(replay: Replay) -> list[tuple[str, str]]:
    return [(answer.label, answer.text) for answer in replay.state().answers]


def drawn(replay: Replay, seed: int = 0) -> list[tuple[str, str]]:
    return [(g.task.label, g.rollouts[0].text) for g in replay.draw(random.Random(seed))]


def test_the_best_of_a_group_that_has_a_worse_one_is_right():
    replay = Replay(8)
    replay.observe([group("graded", ("low", 0.2), ("high", 0.7), ("as high", 0.7), ("unjudged", None))])
    replay.observe([group("all", ("a", 1.0), ("b", 1.0)), group("none", ("a", 0.0), ("unjudged", None))])
    replay.observe([group("penalty", ("long", -2.0), ("short", -1.0))])
    assert kept(replay) == [("graded", "high"), ("graded", "as high"), ("penalty", "short")]
    assert sorted(drawn(replay)) == sorted(kept(replay))
    empty = right("empty", "")
    empty.rollouts[1].turns[0].token_ids = []
    replay.observe([empty])
    assert "empty" not in dict(kept(replay)), "nothing to train on"


def test_a_text_counts_once_in_its_kind():
    replay = Replay(8)
    replay.observe([right("gcd", "1", "1", "1"), right("gcd", "2")])
    replay.observe([right("gcd", "1", question=9), right("lcm", "1")])
    assert kept(replay) == [("gcd", "2"), ("gcd", "1"), ("lcm", "1")]
    assert [answer.prompt_ids[0] for answer in replay.state().answers] == [5, 9, 5], "the newest one"


def test_few_are_kept_of_a_kind_and_in_all():
    replay = Replay(8)
    replay.observe([right("gcd", str(n)) for n in range(KIND + 24)])
    assert kept(replay) == [("gcd", str(n)) for n in range(24, KIND + 24)]
    replay.observe([right(f"kind{k}", str(n)) for n in range(KIND) for k in range(9)])
    counts = Counter(label for label, _ in kept(replay))
    assert counts.total() == KEPT == 128 and counts.keys() == {"gcd", *(f"kind{k}" for k in range(9))}
    assert set(counts.values()) == {12, 13}, "the kind with most loses its oldest, so a rare kind keeps its few"


def test_draws_are_even_over_kinds():
    replay = Replay(6)
    replay.observe([right("gcd", *"0123456789"), right("lcm", *"01"), right("bits", "0")])
    counts = Counter(label for label, _ in drawn(replay))
    assert counts == {"gcd": 3, "lcm": 2, "bits": 1}, "one of each, two of each that has two, the rest"
    assert len(set(drawn(replay))) == 6 and drawn(replay) == drawn(replay)
    two = Replay(2)
    two.observe([right("gcd", *"0123456789"), right("lcm", *"01"), right("bits", "0")])
    counts = Counter(label for seed in range(300) for label, _ in drawn(two, seed))
    assert counts.total() == 600 and all(150 < n < 250 for n in counts.values()), "two of three kinds by chance"


def test_a_kind_is_retired_while_the_node_succeeds_at_it():
    replay = Replay(8)
    replay.observe([right("gcd", *"0123456"), right("lcm", "0")])
    assert len(drawn(replay)) == 8, "7 of 8 right, but 8 answers are too few to know"
    of = [("a", 1.0)] * 16 + [("b", 0.0)] * 4
    replay = Replay(8)
    replay.observe([group("gcd", *of), right("lcm", "0")])
    assert dict(drawn(replay)).keys() == {"gcd", "lcm"}, "16 of 20 are not more than 0.8"
    replay.observe([group("gcd", *of[1:], ("a", 1.0), ("a", 1.0))])  # 0.95 * 16 + 17 of 0.95 * 20 + 21: 0.805
    assert replay.own.of("gcd").reward == pytest.approx(32.2 / 40)
    assert drawn(replay) == [("lcm", "0")]
    replay.observe([group("gcd", ("b", 0.0), ("b", 0.0))])
    assert dict(drawn(replay)).keys() == {"gcd", "lcm"}, "success fell again"


def test_a_poor_answer_is_retired_earlier():
    replay = Replay(8)
    replay.observe([group("gcd", ("poor", 0.5), ("none", 0.0)), group("gcd", *[("good", 1.0), ("none", 0.0)] * 8)])
    assert replay.own.of("gcd").reward == pytest.approx(8.475 / 17.9)  # 0.47: above 0.8 * 0.5, not above 0.8
    assert drawn(replay) == [("gcd", "good")]


def test_the_state_goes_on_as_it_was():
    replay, other = Replay(4), Replay(4)
    replay.observe([right("gcd", "1", "2", "3"), right("lcm", "4", "5"), right("My kind!", "6")])
    text = json.dumps(msgspec.to_builtins(replay.state()), sort_keys=True)
    other.load(msgspec.convert(json.loads(text), ReplayState))
    for n in range(3):
        assert other.draw(random.Random(n)) == replay.draw(random.Random(n))
        for each in (replay, other):
            each.observe([right("gcd", str(n), "7"), group("lcm", *[("8", 1.0)] * 9, ("9", 0.0))])
    assert other.state() == replay.state()
    other.load(ReplayState())
    assert other.draw(random.Random(0)) == []


def test_a_replayed_answer_is_pushed_by_one_from_ratio_one():
    replay = Replay(2)
    replay.observe([right("gcd", "1"), right("lcm", "22")])
    policy = TinyPolicy(make(), version=7)  # so that the answers are stale
    metrics = Trainer(policy, GrpoConfig(), Sampling(max_new_tokens=6)).step(replay.draw(random.Random(0)))
    assert metrics["loss"] == pytest.approx(-1.0), "advantage 1, ratio 1, mean over tokens"
    assert "sampling/logp_difference" not in metrics and policy.version == 8
    new = group("gcd", ("1", 1.0), ("2", 0.0))
    new.policy_version = 8  # its advantages add up to 0, its tokens count: 3 of 9 are replayed
    metrics = Trainer(policy, GrpoConfig(answers=2), Sampling(max_new_tokens=6)).step(
        [new, *replay.draw(random.Random(0))[:1]]
    )
    assert metrics["loss"] == pytest.approx(-1 / 3)


def node(replay: int) -> Node:
    config = NodeConfig.model_validate({"grpo": {"replay": replay}})
    parts: Any = TinyPolicy(make()), SimpleNamespace(reward_weights={})
    return Node(config, *parts, print)


def test_a_node_replays_what_finished_rounds_found():
    learner = node(2)
    first, second = Collected([right("gcd", "1")]), Collected([right("lcm", "2")])
    assert learner.choose(first) == first.groups
    chosen = learner.choose(first)  # the first attempt was interrupted
    learner.learn(chosen)
    assert learner.replay is not None
    assert kept(learner.replay) == [("gcd", "1")] and learner.replay.own.of("gcd").n == 2
    own, again = learner.choose(second)
    assert own is second.groups[0] and again.rollouts[0].text == "1" and again.advantages == [1.0]
    learner.learn([own, again])
    assert kept(learner.replay) == [("gcd", "1"), ("lcm", "2")]
    assert learner.replay.own.of("gcd").n == 2, "a replayed answer is no new success"


def test_without_the_option_nothing_is_kept():
    learner = node(0)
    collected = Collected([right("gcd", "1")], [right("gcd", "1")])
    for _ in range(2):
        assert learner.choose(collected) == collected.groups
        learner.learn(collected.groups)
    assert learner.replay is None
