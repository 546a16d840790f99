"""Right foreign answers that carry a payload are left out: the attack of "Hail to the Thief" (arXiv 2511.09780).

    bound      B = min(STRICTEST, m - MARGIN)   m: quantile of the least log-probabilities of own latest right answers,
                                                or of all own latest ones, as long as few are right
    unlikely   a token whose log-probability under this node's own policy is below B
    idle       an unlikely token without which the answer still earns as much as with it
    odd        an answer whose least log-probability is more than MARGIN below that of a plainer text that earns as much
    payload    an answer with an unlikely token that is idle, or that makes it odd

Every right answer earns the same advantage however it is written, so a policy would also learn a text that liars add to
their right answers. An unlikely token that the reward asks for is no payload: the answer earns less without it.

Three deletions are tried: all unlikely tokens together, each run of them, and up to SPAN tokens from each of them on.
The plainer texts are the part of the answer that was judged, and the reference answer, in the form in which answers
count. A token is idle, too, if it lies outside of a plainer text that the answer contains. Plainer texts also show that
an answer spells a needed part in another way (digits of another script), or that a likely token makes the next one
unlikely.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from swarm_node.policy.policy import Policy
from swarm_node.policy.tokenizing import TokenizerError
from swarm_node.tasks.taskset import TaskSet
from swarm_node.types import Group, Rollout, Turn
from swarm_protocol.answer_form import WRITTEN, AnswerForm

FIXED = -6.0  # B of a node with too few answers of its own: it would draw such a token once in 400 times
STRICTEST = -4.0
"""B of a node that is nearly sure of all it writes: answers that it would write itself now and then are no payloads."""
MARGIN = 2.0  # distance in nats below its own right answers, or below the plainer text
OWN = 256  # latest own right answers that are remembered: about the last ten rounds of a node that is often right
OWN_MIN = 32
"""With fewer right answers, all of this node's answers count: they are as long and as odd as its right ones will be.
With fewer of those too, the fixed bound holds."""
QUANTILE = 0.02
"""Quantile of own least log-probabilities. Their minimum would open the gate for OWN answers each time that this node
itself draws a payload."""
MOST = 32
"""Unlikely tokens of an answer that are examined, which bounds its cost. An answer with more of them is left out."""
TRIES = 256
"""Texts that are scored for one group: a quarter of a second if a checker takes a millisecond. Answers that need more
are left out."""
GROUP_S = 3.0
"""Seconds that one group may take, because reward functions may be slow. Each group has time of its own, so a liar's
group takes none from others."""
SPAN = 4  # tokens deleted together: one character may take three or four
ROUNDING = 1e-9  # rewards that differ by less are equal

Logprobs = Callable[[Sequence[Group]], list[list[list[float]]] | None]
"""Groups -> log-probability of each token of each rollout; None if it cannot be computed now."""


@dataclass(frozen=True)
class _Suspect:
    """An answer that may have unlikely tokens."""

    group: Group
    rollout: Rollout
    turn: int  # which of its turns: each is examined by itself
    least: float  # log-probability of the least likely of them
    places: list[int]  # places of its unlikely tokens, the least likely first


class _Undecided(Exception):
    """This node cannot decide: no time is left for the group, or its own reward fails. The sender is not at fault."""


@dataclass
class Gate:
    """Finds the answers of others that carry a payload."""

    policy: Policy
    tasks: TaskSet
    logprobs: Logprobs
    now: Callable[[], float] = time.monotonic  # gives seconds, which bound the time that a group takes
    form: AnswerForm = "any"  # form in which an answer counts

    def __post_init__(self) -> None:
        self._right: deque[float] = deque(maxlen=OWN)
        self._own: deque[float] = deque(maxlen=OWN)
        self._tries = 0  # of the group that is looked at
        self._until = 0.0

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in own scored groups."""
        for group in groups:
            least = min((r.reward for r in group.rollouts), default=0.0)
            right = [r for r in group.rollouts if r.reward > min(0.0, least)]  # rewards may all be negative
            self._right += [min(r.logprobs) for r in right if r.logprobs]
            self._own += [min(r.logprobs) for r in group.rollouts if r.logprobs]

    def payloads(self, groups: Sequence[Group], earns: Sequence[Sequence[bool]]) -> list[list[bool] | None] | None:
        """Whether each rollout carries a payload; only those that earn something are examined.

        None for a group that cannot be judged in time, or for which this node's reward fails. None for all if the
        policy cannot compute log-probabilities.
        """
        asked = [_distinct(group, flags) for group, flags in zip(groups, earns, strict=True)]
        tables = self.logprobs(asked)
        if tables is None:
            return None
        limit = bound(self._right, self._own)
        judged = [
            self._judge(
                [s for pair in zip(group.rollouts, table, strict=True) for s in self._suspects(group, *pair, limit)]
            )
            for group, table in zip(asked, tables, strict=True)
        ]
        found = [each for group in judged for each in group or ()]
        carries = {id(s.rollout) for s, _, is_idle in found if is_idle}
        odd = self._odd([(s, plainer) for s, plainer, is_idle in found if not is_idle])
        if odd is None:
            return None
        texts = [{_key(r) for r in group.rollouts if id(r) in carries | odd} for group in asked]
        return [
            None
            if verdict is None
            else [flag and _key(r) in mine for r, flag in zip(group.rollouts, flags, strict=True)]
            for group, flags, mine, verdict in zip(groups, earns, texts, judged, strict=True)
        ]

    def _judge(self, suspects: Sequence[_Suspect]) -> list[tuple[_Suspect, list[str], bool]] | None:
        """(answer with unlikely tokens, its plainer texts, whether such a token is idle) of one group; None if
        undecided."""
        self._tries, self._until = 0, self.now() + GROUP_S
        found = []
        try:
            for suspect in suspects:
                if suspect.places:
                    plainer = self._plainer(suspect)
                    found.append((suspect, plainer, self._has_idle(suspect, plainer)))
        except (_Undecided, TokenizerError):
            return None
        return found

    def _suspects(self, group: Group, rollout: Rollout, logprobs: Sequence[float], limit: float) -> Iterator[_Suspect]:
        values = iter(logprobs)
        for number, turn in enumerate(rollout.turns):
            mine = [*islice(values, len(turn.token_ids))]
            places = [i for i, value in enumerate(mine) if value < limit and self._has_text(turn.token_ids[i])]
            places.sort(key=lambda i, mine=mine: mine[i])  # type: ignore[misc]
            yield _Suspect(group, rollout, number, mine[places[0]] if places else 0.0, places)

    def _least(self, rollout: Rollout, logprobs: Sequence[float]) -> float:
        """Least log-probability of a token with a text in the last turn."""
        ids = rollout.turns[-1].token_ids
        pairs = zip(ids, logprobs[len(logprobs) - len(ids) :], strict=True)
        return min((value for token, value in pairs if self._has_text(token)), default=0.0)

    def _has_text(self, token: int) -> bool:
        """Whether the token has a text that can be deleted. One that ends an answer has none, and is no payload."""
        try:
            return token != self.policy.eos_id and bool(self.policy.decode([token]))
        except TokenizerError:
            return True  # so that it is looked at, and its group is undecided

    def _plainer(self, suspect: _Suspect) -> list[str]:
        """The plainer texts that earn as much as the answer; none for a turn before the last, which nothing is judged
        by."""
        rollout = suspect.rollout
        if suspect.turn < len(rollout.turns) - 1:
            return []
        answers = [text for text in (rollout.extracted, suspect.group.task.answer) if text]
        texts = {WRITTEN[self.form].format(text) for text in answers} - {rollout.text}
        return [text for text in sorted(texts) if self._earns_as_much(suspect, text)]

    def _has_idle(self, suspect: _Suspect, plainer: Sequence[str]) -> bool:
        """Whether the answer earns as much without some of its unlikely tokens, or has too many of them to tell."""
        ids, places, decode = suspect.rollout.turns[suspect.turn].token_ids, suspect.places, self.policy.decode
        if len(places) > MOST:
            return True
        for text in plainer:
            self._check_time()
            if any(outside(text, ids, i, decode) for i in places):
                return True
        return any(self._earns_as_much(suspect, text) for text in shortened(ids, places, decode))

    def _odd(self, suspects: Sequence[tuple[_Suspect, Sequence[str]]]) -> set[int] | None:
        """Ids of the rollouts that are much less likely than a plainer text."""
        compared = []
        for suspect, plainer in suspects:
            group, (*before, last) = suspect.group, suspect.rollout.turns
            taken = sum(len(turn.context) + len(turn.token_ids) for turn in before) + len(last.context)
            room = self.policy.max_positions - len(group.prompt_ids) - taken
            encoded = [(text, self.encoded(text, last.finished)) for text in plainer]
            turns = [
                Turn(ids, [], last.finished, text, last.context) for text, ids in encoded if ids and len(ids) <= room
            ]
            rollouts = [Rollout([*before, turn]) for turn in turns]
            if rollouts:
                compared.append((suspect, msgspec.structs.replace(group, rollouts=rollouts)))
        tables = self.logprobs([group for _, group in compared])
        if tables is None:
            return None
        return {
            id(suspect.rollout)
            for (suspect, group), table in zip(compared, tables, strict=True)
            if suspect.least < max(map(self._least, group.rollouts, table)) - MARGIN
        }

    def encoded(self, text: str, finished: bool) -> list[int] | None:
        """`Policy.encode_completion`, with None also for a text at which the tokenizer fails."""
        try:
            return self.policy.encode_completion(text, finished)
        except TokenizerError:
            return None

    def length(self, text: str) -> int:
        """The tokens of a finished answer; 0 for one that has none."""
        return len(self.encoded(text, True) or ())

    def _earns_as_much(self, suspect: _Suspect, text: str) -> bool:
        """Whether `text` earns as much as the answer; True also after too many tries."""
        self._tries += 1
        if self._tries > TRIES:
            return True
        self._check_time()
        prompt = self.tasks.prompt_text(suspect.group.prompt_ids, self.policy.text_of_prompt)
        texts = [turn.text for turn in suspect.rollout.turns]
        texts[suspect.turn] = text
        try:
            (score,) = self.tasks.judge([self.tasks.replay(suspect.group.task, prompt, texts)], [prompt])
        except Exception as error:  # users' reward functions may raise anything at a text that nobody wrote
            raise _Undecided from error
        return score.reward >= suspect.rollout.reward - ROUNDING

    def _check_time(self) -> None:
        if self.now() > self._until:
            raise _Undecided


def bound(right: Sequence[float], own: Sequence[float]) -> float:
    """B, from the least log-probabilities of own right answers, and of all own ones."""
    known = right if len(right) >= OWN_MIN else own
    if len(known) < OWN_MIN:
        return FIXED
    return min(STRICTEST, sorted(known)[int(QUANTILE * len(known))] - MARGIN)


def outside(part: str, ids: Sequence[int], place: int, decode: Callable[[list[int]], str]) -> bool:
    """Whether the token at `place` lies before or behind the last `part` in the text of the answer `ids`."""
    start = decode(list(ids)).rfind(part)
    begins, ends = len(decode(list(ids[:place]))), len(decode(list(ids[: place + 1])))
    return start >= 0 and (ends <= start or begins >= start + len(part))


def shortened(ids: Sequence[int], places: Sequence[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Different texts of the answer `ids` without some of the unlikely tokens at `places`."""
    gone = set(places)
    starts = [i for i in sorted(gone) if i - 1 not in gone]
    runs = [(start, next(i for i in range(start, len(ids) + 1) if i not in gone)) for start in starts]
    spans = [(i, i + length) for i in places for length in range(1, SPAN + 1)]
    likely = [token for i, token in enumerate(ids) if i not in gone]
    seen = {decode(list(ids))}
    for kept in chain([likely], ([*ids[:start], *ids[stop:]] for start, stop in runs + spans)):
        text = decode(kept)
        if text not in seen:
            seen.add(text)
            yield text


def _distinct(group: Group, flags: Sequence[bool]) -> Group:
    """`group` with one of each of its different answers that are flagged."""
    distinct = {_key(r): r for r, flag in zip(group.rollouts, flags, strict=True) if flag}
    return msgspec.structs.replace(group, rollouts=list(distinct.values()))


def _key(rollout: Rollout) -> tuple[int, ...]:
    return tuple(rollout.token_ids)
