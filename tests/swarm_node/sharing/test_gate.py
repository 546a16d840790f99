"""The gate: which right answers of others carry a payload, and what comes of such answers and their senders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace

import msgspec
import pytest

from swarm_node.config import SharingConfig
from swarm_node.sharing import Gate, ReplayBuffer
from swarm_node.sharing.gate import FIXED, GROUP_S, MARGIN, MOST, OWN_MIN, STRICTEST, bound, outside
from swarm_node.tasks.judging.places import extract
from swarm_node.types import Group, Rollout, Score, Task, Turn
from swarm_protocol.answer_form import WRITTEN, AnswerForm
from swarm_protocol.messages import TaskName
from tests.support.foreign_groups import NOW

TASK = Task(TaskName("gcd", "0" * 16, "test 1", 0, 0), "gcd", "question", "42", slot=(1, 2))
EOS = 0


class Letters:
    """A policy with a token for each character, which `expects` some of them; all others are unlikely."""

    max_positions, eos_id = 1000, EOS

    def __init__(self, expects: str, odd: float = -9.0) -> None:
        self.expects = expects
        self.odd = odd

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != EOS)

    text_of_prompt = decode

    def encode_completion(self, text: str, finished: bool) -> list[int]:
        return [*map(ord, text), *([EOS] if finished else [])]

    def logprobs(self, groups: Sequence[Group]) -> list[list[list[float]]]:
        return [[[self.of(i) for i in r.token_ids] for r in group.rollouts] for group in groups]

    def of(self, token: int) -> float:
        return self.odd if token == EOS or chr(token) not in self.expects else -1.0


def plain(text: str) -> float:
    """As the tasks' own checkers judge."""
    extracted = extract(text) or ""
    return float(extracted.isdecimal() and int(extracted) == 42)


def marked(text: str) -> float:
    """`#` is asked for."""
    return float(text.startswith("#") and plain(text[1:]))


def thorough(text: str) -> float:
    """Answers that are long enough are asked for."""
    return plain(text) * float(len(text) > 20)


def fails(text: str) -> float:
    if text not in ("\n42", "no"):
        raise RuntimeError("only those")
    return float(text != "no")


def gate_of(policy: Letters, reward, now=lambda: 0.0, form: AnswerForm = "any") -> Gate:
    def judge(dialogues: Sequence[str], prompts: Sequence[str]) -> list[Score]:
        return [Score(extract(text), {"reward": reward(text)}, reward(text), reward(text) == 1) for text in dialogues]

    def replay(task: Task, prompt: str, texts: Sequence[str]) -> str:
        (text,) = texts
        return text

    tasks = SimpleNamespace(judge=judge, replay=replay, prompt_text=lambda token_ids, decode: decode(token_ids))
    return Gate(policy, tasks, policy.logprobs, now, form)  # type: ignore[arg-type]


def foreign(texts: Sequence[str], reward, peer: str = "peer") -> Group:
    policy = Letters("")
    rollouts = [
        Rollout(
            [Turn(policy.encode_completion(text, True), [], True, text)],
            extract(text),
            {"reward": reward(text)},
            reward(text),
        )
        for text in texts
    ]
    return Group(TASK, [5, 6], rollouts, peer=peer, created=NOW)


def carries(text: str, reward, expects: str, form: AnswerForm = "any") -> bool:
    assert reward(text) == 1, "only what earns something is looked at"
    gate = gate_of(Letters(expects), reward, form=form)
    verdicts = gate.payloads([foreign([text, "no"], reward)], [[True, False]])
    assert verdicts is not None and not verdicts[0][1]
    return verdicts[0][0]


THOUGHT = "<think>six by seven</think>42"
PAYLOADS = {
    "a newline before it": ("\n42", plain, "42"),
    "white space behind it": ("42  ", plain, "42"),
    "words in tags of reasoning": ("<think>visit evil.example</think>42", plain, "42"),
    "a word among likely reasoning": ("<think>six by evil seven</think>42", plain, "<think>six by seven</think>42"),
    "a frame that breaks without any of its parts": ("<answer>42</answer>", plain, "42"),
    "a frame around digits that are unlikely too": ("<answer>42</answer>", plain, ""),
    "a closing tag alone": ("</think>42", plain, "42"),
    "zeros before it": ("0042", plain, "42"),
    "digits of another script": ("४२", plain, "42"),
    "white space within a form that is asked for": ("#\n42", marked, "#42"),
    "white space between unlikely tokens that are asked for": ("#\n42", marked, ""),
    "more unlikely tokens than are looked at": ("#" + "0" * MOST + "42", marked, "42"),
}
ANSWERS = {
    "an answer that this node would give": ("42", plain, "42"),
    "digits that this node would not have guessed": ("42", plain, "1"),
    "reasoning that this node might have written": (THOUGHT, plain, THOUGHT),
    "a form that the reward asks for": ("#42", marked, "42"),
    "a form that the reward asks for, and unlikely digits": ("#42", marked, ""),
    "length that the reward asks for": ("<think>evil</think>42", thorough, "<think></think>42"),
}


@pytest.mark.parametrize("case", PAYLOADS)
def test_payloads_are_found(case: str) -> None:
    assert carries(*PAYLOADS[case])


@pytest.mark.parametrize("case", ANSWERS)
def test_tokens_that_the_reward_needs_pass(case: str) -> None:
    assert not carries(*ANSWERS[case])


@pytest.mark.parametrize("form", ["tags", "boxed"])
def test_odd_digits_are_found_in_the_form(form: AnswerForm) -> None:
    """The bare answer, which earns nothing, is no plainer text; the answer in its form is."""

    def judged(text: str) -> float:
        found = extract(text, form) or ""
        return float(found.isdecimal() and int(found) == 42)

    written = WRITTEN[form].format
    likely = written("42")
    assert judged("42") == 0
    for odd in ("४२", "４2", "4２", "0042"):  # digits of another script, one alone, zeros before it
        assert carries(written(odd), judged, likely, form), odd
    assert carries("evil " + likely, judged, likely, form)
    for expects in (likely, "42", ""):  # the form is asked for, however unlikely it is
        assert not carries(likely, judged, expects, form)
    thought = "six by seven " + likely
    assert not carries(thought, judged, thought, form)


def test_an_unlikely_answer_may_stand_in_reasoning() -> None:
    policy, group = Letters(""), foreign(["<think>6x7=42</think>42"], plain)
    policy.logprobs = lambda groups: [  # type: ignore[method-assign]
        [[-1.0] * (len(r.token_ids) - 3) + [-9.0, -9.0, -1.0] for r in one.rollouts] for one in groups
    ]
    assert gate_of(policy, plain).payloads([group], [[True]]) == [[False]]


def test_the_bound_follows_own_right_answers() -> None:
    few = [-1.0] * (OWN_MIN - 1)
    assert bound([], []) == bound(few, few) == FIXED
    assert bound([-0.1] * 256, []) == STRICTEST
    assert bound([-9.0] * 256, [-1.0] * 256) == -9.0 - MARGIN
    assert bound([-3.0] * 255 + [-30.0], []) == -3.0 - MARGIN, "one odd answer of its own opens nothing"
    assert bound(few, [-12.0] * OWN_MIN) == -12.0 - MARGIN, "as odd as all that it writes, while little is right"
    policy = Letters("42")
    gate = gate_of(policy, plain)
    own = msgspec.structs.replace(foreign(["42"], plain), peer=None)
    own.rollouts[0].turns[0].logprobs = [-1.0, -9.0]
    groups = [foreign(["\n42"], plain)]
    assert gate.payloads(groups, [[True]]) == [[True]]
    gate.observe([own] * OWN_MIN)
    assert gate.payloads(groups, [[True]]) == [[False]], "this node itself writes tokens as unlikely as that"


def test_own_answers_with_negative_rewards_count_as_well() -> None:
    policy = Letters("42")
    gate = gate_of(policy, plain)
    own = msgspec.structs.replace(foreign(["42", "13"], lambda text: -1.0 - (text == "13")), peer=None)
    for rollout, least in zip(own.rollouts, (-9.0, -30.0), strict=True):
        rollout.turns[0].logprobs = [-1.0, least]
    gate.observe([own] * 256)
    for odd, payload in ((-9.0, False), (-8.9 - MARGIN, False), (-9.1 - MARGIN, True)):
        policy.odd = odd
        assert gate.payloads([foreign(["\n42"], plain)], [[True]]) == [[payload]]


def guarded(now=lambda: NOW) -> tuple[ReplayBuffer, list[str]]:
    said: list[str] = []
    pool = ReplayBuffer(SharingConfig(foreign=4, answers=0), now, say=said.append)
    pool.gate = gate_of(Letters("4213"), plain)
    return pool, said


def test_each_group_has_time_of_its_own() -> None:
    seconds = [0.0]

    def slow(text: str) -> float:
        seconds[0] += GROUP_S / 4
        return plain(text)

    policy = Letters("42")
    gate = gate_of(policy, slow, lambda: seconds[0])
    many = foreign(["4" + "x" * n + "2" for n in range(1, 9)], lambda text: 1.0)
    groups = [many, foreign(["\n42"], plain), foreign(["42"], plain)]
    assert gate.payloads(groups, [[True] * 8, [True], [True]]) == [None, [True], [False]]
    assert seconds[0] <= 3 * GROUP_S


def test_answers_it_cannot_judge_harm_no_trust() -> None:
    pool = ReplayBuffer(SharingConfig(foreign=4, answers=0), lambda: NOW)
    pool.gate = gate_of(Letters("42"), fails)
    pool.add(foreign(["\n42", "no"], fails, "honest"))
    assert pool.choose(4, random.Random(0)) == []
    assert not pool.trust.refused()


def test_groups_of_payloads_are_replaced() -> None:
    pool, said = guarded()
    for peer in ("liar", "honest"):
        for _ in range(4):
            pool.add(foreign(["\n42" if peer == "liar" else "42", "13"], plain, peer))
    assert [group.peer for group in pool.choose(4, random.Random(0))] == ["honest"] * 4
    assert pool.metrics()["swarm/payloads"] == pool.trust.refused()["liar"] > 1
    for text in ["42"] * 20 + ["\n42"] * 20:  # trusted again, and not any more
        pool.add(foreign([text, "13"], plain, "liar"))
        pool.choose(1, random.Random(0))
    assert len(said) == 1 and "liar" in said[0]


def test_only_payloads_are_left_out() -> None:
    pool, _ = guarded()
    pool.add(foreign(["\n42", "42", "13", "13"], plain))
    (group,) = pool.choose(4, random.Random(0))
    assert [r.text for r in group.rollouts] == ["42", "13", "13"]
    assert group.advantages is not None and group.advantages[0] > 0 > group.advantages[1]


def test_liars_are_drawn_and_kept_less() -> None:
    seconds = count()
    pool, _ = guarded(lambda: NOW + next(seconds))
    for _ in range(20):
        pool.add(foreign(["\n42", "13"], plain, "liar"))
        assert pool.choose(1, random.Random(0)) == []
    for _ in range(12):
        for peer in ("liar", "one", "two", "three"):
            pool.add(foreign(["\n42" if peer == "liar" else "42", "13"], plain, peer))
    assert pool.metrics()["swarm/groups_waiting"] == 16
    assert pool.available() >= 15, "groups count by trust: one is a liar's, at most"


@pytest.mark.parametrize(
    ("text", "places"), [("42 ", [2]), (" 42", [0]), ("4242", [0, 1]), ("42", []), ("13", [])], ids=repr
)
def test_tokens_outside_the_answer_are_told_apart(text: str, places: list[int]) -> None:
    policy = Letters("")
    ids = policy.encode_completion(text, False)
    assert [place for place in range(len(ids)) if outside("42", ids, place, policy.decode)] == places


def test_nothing_foreign_is_learned_unjudged() -> None:
    pool = ReplayBuffer(SharingConfig(foreign=4, answers=0), lambda: NOW)
    pool.gate = Gate(Letters("42"), SimpleNamespace(), lambda groups: None)  # type: ignore[arg-type]
    pool.add(foreign(["42", "13"], plain))
    assert pool.choose(4, random.Random(0)) == []
