"""Replay of verified successes: train on own earlier right answers again (RLEP, arXiv 2507.07451).

    kept    the newest right answers: KIND of one kind of task, KEPT in all, and the same text once in each kind
    drawn   in each round n different ones, equally many of each kind that is not retired
    A = 1   for each of them; l^old is that of the first pass, as for a peer's answers

A right answer has the best reward of its group, and the group has a worse one. It is retired while the mean own reward
on its kind of task exceeds RETIRED of its reward: rewards of 0 and 1 retire a kind at a success of 80 %. One text
counts once, so that a policy that gives one answer to all questions does not replay this one alone.

RLEP collects its successes with a policy trained before, keeps them by question, and compares them with the new answers
to that question. Here questions hardly ever come twice, and the successes are those of the run itself.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from swarm_node.grpo.advantage import RewardStatistics, TaskStatistics, is_judged
from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.messages import TaskName

KIND = 16  # most answers of one kind of task: about those of its last ten groups
KEPT = 128  # most answers in all
RETIRED = 0.8
NAME = TaskName("replay", "0" * 16, "replay", 0, 0)  # training asks for no name


class Success(msgspec.Struct, frozen=True, array_like=True):
    """A right answer."""

    label: str  # kind of task
    prompt_ids: list[int]
    token_ids: list[int]  # completion tokens
    finished: bool
    text: str
    reward: float

    def group(self) -> Group:
        """The answer as a group of its own: with advantage 1, and without log-probabilities."""
        rollout = Rollout([Turn(self.token_ids, [], self.finished, self.text)], reward=self.reward)
        return Group(Task(NAME, self.label, "", None), self.prompt_ids, [rollout], advantages=[1.0])


class ReplayState(msgspec.Struct):
    """What a checkpoint keeps."""

    answers: list[Success] = []  # from the oldest to the newest
    own: dict[str, RewardStatistics] = {}  # own rewards by kind of task


class Replay:
    """The right answers that are kept, and how well this node does on each kind of task."""

    def __init__(self, n: int) -> None:
        """`n` answers are drawn in each round."""
        self._n = n
        self.own = TaskStatistics()  # own success
        self._kept: dict[tuple[str, str], Success] = {}  # by kind and text, from the oldest to the newest

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in own scored `groups`."""
        self.own.observe(groups)
        for group in groups:
            judged = [rollout for rollout in group.rollouts if is_judged(rollout)]
            rewards = {rollout.reward for rollout in judged}
            for rollout in judged:
                if len(rewards) > 1 and rollout.reward == max(rewards) and rollout.turns[-1].token_ids:
                    self._keep(group, rollout)

    def _keep(self, group: Group, rollout: Rollout) -> None:
        label, text = group.task.label, rollout.text
        self._kept.pop((label, text), None)
        prompt_ids = group.prompt_ids + rollout.before_last  # of a dialogue, its last answer is learned
        last = rollout.turns[-1].token_ids
        self._kept[label, text] = Success(label, prompt_ids, last, rollout.finished, text, rollout.reward)
        [(fullest, n)] = Counter(label for label, _ in self._kept).most_common(1)
        if n > KIND or len(self._kept) > KEPT:
            del self._kept[next(key for key in self._kept if key[0] == fullest)]

    def draw(self, rng: random.Random) -> list[Group]:
        """Up to `n` groups of one answer each: all of them, if fewer are kept that are not retired."""
        kinds: dict[str, list[Success]] = defaultdict(list)
        for answer in self._kept.values():
            own = self.own.of(answer.label)
            if not own.known or own.reward <= min(RETIRED * answer.reward, answer.reward):  # rewards may be negative
                kinds[answer.label].append(answer)
        piles = [rng.sample(answers, len(answers)) for answers in kinds.values()]
        rng.shuffle(piles)
        dealt = [answer for layer in zip_longest(*piles) for answer in layer if answer is not None]
        return [answer.group() for answer in dealt[: self._n]]

    def state(self) -> ReplayState:
        return ReplayState(list(self._kept.values()), self.own.by_label)

    def load(self, state: ReplayState) -> None:
        """Go on from the result of `state`."""
        self.own = TaskStatistics(state.own)
        self._kept = {(answer.label, answer.text): answer for answer in state.answers}
