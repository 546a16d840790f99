"""What a policy answers before training, in a few sentences: can it learn like this, and which setting would help? How
long does a round take?

only questions with answers of different rewards teach; of others every advantage is 0
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from swarm_node.config import GrpoConfig, RolloutsConfig
from swarm_node.config.figures import WORDS, Figure
from swarm_node.observability.cut_off import MANY
from swarm_node.observability.evaluations import Evaluation, Shown
from swarm_node.observability.samples import without_middle
from swarm_node.policy.policy import Policy
from swarm_node.policy.probes import round_seconds, token_seconds
from swarm_node.say import Detail, Warned
from swarm_protocol.errors import printable

QUESTIONS = 3  # questions that are shown
QUESTION_CHARS, ANSWER_CHARS = 200, 160  # most characters shown of each


def first_look(
    found: Evaluation, samples: int, figure: Figure, most_tokens: int, member: bool = False
) -> Iterator[str]:
    """Sentences about an evaluation before training, with `samples` answers to a question and at most `most_tokens`
    tokens in each; none if nothing was asked. A `member` goes by its swarm's form and kind of answers."""
    every = found.table.get("all")
    if every is None:
        return
    value, n = every.by(figure) or 0.0, every.questions
    cut = f"{found.cut:.0%} of the answers cut off at {most_tokens} tokens"
    yield f"before training: {WORDS[figure]} {value:.3f} on {n} held-out questions with {samples} answers each, {cut}"
    for one in found.shown[:QUESTIONS]:
        right = f" (right: {_cut(one.right, ANSWER_CHARS)})" if one.right else ""
        yield f"  {_cut(one.question, QUESTION_CHARS)}{right} -> {_cut(one.answer, ANSWER_CHARS)}{_verdict(one)}"
    if found.mixed:
        yield f"{found.mixed} of {n} questions have both better and worse answers: the policy learns from these"
        if found.cut > MANY:
            longer = f"`--set rollouts.max_new_tokens={2 * most_tokens}`"
            yield f"most answers are cut off: {longer} lets more of them end, and rounds take longer"
    elif samples > 1:
        why = _why_not(found, every.reward or value, most_tokens, member)
        yield Warned(f"none of the {n} questions asked so far teaches: {why}")


def round_times(
    found: Evaluation, policy: Policy, prompts: list[list[int]], rollouts: RolloutsConfig, grpo: GrpoConfig
) -> Iterator[str]:
    """Sentences about the time of a round, measured with some of its prompts: with answers as long as those of an
    evaluation before training, if there are any, and with the longest ones."""
    tokens, known = found.tokens or rollouts.max_new_tokens, found.per_token_s if found.tokens else None
    speed = token_seconds(policy, prompts[0], rollouts, grpo, tokens, known)
    seconds = partial(round_seconds, policy, speed, prompts, rollouts, grpo)
    if found.tokens:
        teaching = (found.mixed or 1) / found.asked  # a question that teaches is drawn sooner or later
        so_far = f"with answers of {tokens:.0f} tokens, their mean length so far"
        yield f"a round takes about {_duration(seconds(tokens, teaching))} {so_far}"
    longest = _duration(seconds(rollouts.max_new_tokens))
    yield Detail(f"a round takes at most {longest}, if every answer runs to its limit")


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def _why_not(found: Evaluation, reward: float, most_tokens: int, member: bool) -> str:
    if reward > 0:
        return "the answers to each question are rewarded alike. Take harder questions, or a finer reward"
    if found.cut > MANY:
        remedy = f"`--set rollouts.max_new_tokens={2 * most_tokens}` lets them end"
        return f"no answer earns a reward, and most are cut off at the length limit: {remedy}"
    how = "the swarm's owner may name how they are read (`swarm-node new --kind, --answer`)" if member else ""
    form = f"if right ones are among those above, {how or 'name how they are read (--kind, --answer)'}"
    return f"no answer earns a reward: {form}; else take easier questions, or a model that answers some of them"


def _verdict(one: Shown) -> str:
    judged = f"reward {one.reward:.2f}" if one.correct is None else "right" if one.correct else "wrong"
    return f" [{judged}{', cut off' if one.cut else ''}]"


def _cut(text: str, most: int) -> str:
    return printable(without_middle(" ".join(text.split()), most)) or "(empty)"
