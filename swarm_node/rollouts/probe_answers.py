"""The answers by which a node judges averaged weights, and the own groups that it keeps back for that.

    trained on   its latest best answers: they tell weights that break the policy
    kept back    best answers of own groups that nobody was trained on: they tell small costs
    references   reference answers of held-out questions, in place of those as long as there are few

Own best answers are in the form that this policy writes, and no partner knows them. References need no time, and are
there from the first round on, but a partner knows them, and a policy may write answers in another form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from swarm_node.config import RolloutsConfig
from swarm_node.policy.policy import Policy
from swarm_node.policy.tokenizing import TokenizerError
from swarm_node.rollouts.collect import encode_each
from swarm_node.tasks.taskset import TaskSet, has_signal
from swarm_node.types import Group, Rollout, Turn

TRAINED, UNSEEN = 8, 16  # most answers of each kind
ENOUGH = 8  # fewer tell small costs from noise too badly
KEPT_BACK = 16  # one of so many own groups that teach is kept back,
KEPT_BACK_FIRST = 2  # and one of so many until there are enough
POOL = 32  # held-out questions from which references are taken


class ProbeAnswers:
    """The answers of one node, each as a group of its own."""

    def __init__(self, make_references: Callable[[], list[Group]] = list) -> None:
        """`make_references` is called when they are first needed."""
        self.trained: deque[Group] = deque(maxlen=TRAINED)
        self.unseen: deque[Group] = deque(maxlen=UNSEEN)
        self._make_references = make_references
        self._waiting = 0  # own groups that teach since one was kept back

    @cached_property
    def references(self) -> list[Group]:
        """Reference answers of held-out questions; empty if there are too few."""
        found = self._make_references()
        return found if len(found) >= ENOUGH else []

    @property
    def small_costs(self) -> list[Group]:
        """The answers that tell small costs; empty if there are too few."""
        return list(self.unseen) if len(self.unseen) >= ENOUGH else self.references

    def keep_back(self, groups: Iterable[Group], together: bool = True) -> Group | None:
        """The first of a round's own `groups` that teaches, if one is due: nobody may be trained on it. Once there are
        enough, none is due while nobody is here to average with (not `together`); what was due then, at most ENOUGH,
        is due when somebody is."""
        teaching = [(group, best) for group in groups if (best := _best_of(group)) is not None]
        self._waiting += len(teaching)
        enough = len(self.unseen) >= ENOUGH
        due = min(ENOUGH, self._waiting // KEPT_BACK) if enough else self._waiting // KEPT_BACK_FIRST
        if not teaching or not due or (enough and not together):
            return None
        self._waiting = KEPT_BACK * (due - 1) if enough else 0
        group, best = teaching[0]
        self.unseen.append(best)
        return group

    def trained_on(self, groups: Iterable[Group]) -> None:
        self.trained += [best for group in groups if (best := _best_of(group)) is not None]

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON: what was kept back."""
        return {"answers": msgspec.to_builtins(list(self.unseen)), "waiting": self._waiting}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`. Raises KeyError or msgspec.ValidationError, with nothing changed, if it is none."""
        waiting = msgspec.convert(state["waiting"], int)
        self.unseen.extend(msgspec.convert(state.get("answers", []), list[Group]))  # earlier ones had another form
        self._waiting = waiting


def _best_of(group: Group) -> Group | None:
    """An own group reduced to what its best answer's likelihood needs; None if all answers have the same reward."""
    if group.peer is not None or not has_signal(group.rollouts):
        return None
    best = max(group.rollouts, key=lambda rollout: rollout.reward)
    last = best.turns[-1]
    asked = msgspec.structs.replace(group, prompt_ids=group.prompt_ids + best.before_last)
    return _of_one(asked, last.token_ids, last.finished) if last.token_ids else None


def reference_answers(policy: Policy, tasks: TaskSet, rollouts: RolloutsConfig) -> list[Group]:
    """Reference answers of held-out questions, at most UNSEEN. Questions without one are left out, and those that this
    policy could not be asked, or answer so."""
    asked = [task for task in tasks.held_out(POOL) if task.answer]
    longest = min(rollouts.max_prompt_tokens, policy.max_positions - rollouts.max_new_tokens)
    found = []
    for task, prompt in zip(asked, encode_each(policy, list(map(tasks.prompt, asked))) if asked else [], strict=True):
        answer = _encoded(policy, task.answer or "")
        if prompt is not None and len(prompt) <= longest and 0 < len(answer) <= rollouts.max_new_tokens:
            found.append(_of_one(Group(task, prompt, []), answer, True))
    return found[:UNSEEN]


def _encoded(policy: Policy, answer: str) -> list[int]:
    """The ids with which `policy` would write an answer; none if it cannot."""
    try:
        return policy.encode_completion(answer, True) or []
    except TokenizerError:
        return []


def _of_one(group: Group, answer: list[int], finished: bool) -> Group:
    """`group` with one answer, and without what is known of the question but its name."""
    task = msgspec.structs.replace(group.task, question="", answer=None, metadata={}, accepted=())
    return Group(task, group.prompt_ids, [Rollout([Turn(answer, [], finished)])])
