"""Right foreign answers that carry a payload are left out: the attack of "Hail to the Thief" (arXiv 2511.09780).

    bound      B = min(FIXED, m - MARGIN),   m: quantile of the least log-probabilities of own latest right answers
    unlikely   a token whose log-probability under this node's own policy is below B
    idle       an unlikely token without which the answer still earns as much as with it
    payload    an answer with an idle token

Every right answer earns the same advantage however it is written, so a text that liars add to their right answers would
be learned with them. An unlikely token that the reward asks for is not idle: the answer earns less without it. Such
tokens are what a node learns from others (a form that it hardly ever uses, a digit that it would not have guessed).
Reasoning that this policy might have written itself holds no unlikely token. The paper's own defence is to check
log-probabilities of tokens as well; it leaves nothing to discover.

A token is idle if one of these earns as much as the whole answer: the extracted part or the reference answer, where
the rest of the answer still contains it; the text without all unlikely tokens; the text without one run of them;
without up to SPAN tokens from an unlikely one on; or with letters and digits alone left of an unlikely token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from swarm_node.types import Group, Rollout, Score, Task

FIXED = -6.0
"""B of a node that has no right answers of its own, and the strictest B: this node would draw such a token once in 400
times. Honest answers of equal policies fell below it in 0 to 1 % of the cases, the payloads tried lie below -15."""
MARGIN = 2.0
"""How far below own right answers, in nats."""
OWN = 256
"""Latest own right answers that are remembered: about the last ten rounds of a node that is often right."""
OWN_MIN = 32
"""Own right answers below which the fixed bound holds."""
QUANTILE = 0.02
"""Of own least log-probabilities. Their minimum would open the gate for OWN answers each time that this node itself
happens to draw a payload."""
MOST = 32
"""Unlikely tokens of an answer that are looked at, which bounds its cost; an answer with more of them is left out."""
SPAN = 4
"""Tokens deleted together: one character may take three or four."""
ROUNDING = 1e-9
"""Rewards that differ by less are equal."""

Logprobs = Callable[[Sequence[Group]], list[list[list[float]]] | None]
"""Groups -> log-probability of each token of each rollout; None if it cannot be computed now."""
ScoreCompletions = Callable[[Sequence[Task], Sequence[str], Sequence[str]], list[Score]]


class Gate:
    """Says which answers of others carry a payload."""

    def __init__(
        self,
        logprobs: Logprobs,
        score: ScoreCompletions,
        decode: Callable[[list[int]], str],
        prompt: Callable[[list[int]], str],
    ) -> None:
        """`decode` makes text of completion tokens, `prompt` of prompt tokens, as `score` takes them."""
        self._logprobs = logprobs
        self._score = score
        self._decode = decode
        self._prompt = prompt
        self._own: deque[float] = deque(maxlen=OWN)

    @property
    def bound(self) -> float:
        """Log-probability below which a token is unlikely."""
        return bound(self._own)

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in own scored groups."""
        self._own += [min(r.logprobs) for group in groups for r in group.rollouts if r.logprobs and r.reward > 0]

    def payloads(self, groups: Sequence[Group], earns: Sequence[Sequence[bool]]) -> list[list[bool]] | None:
        """Whether each rollout carries a payload; only those that earn something are looked at. None if the policy
        cannot say how likely they are."""
        asked = [_distinct(group, flags) for group, flags in zip(groups, earns, strict=True)]
        tables = self._logprobs([group for group in asked if group.rollouts])
        if tables is None:
            return None
        left = iter(tables)
        verdicts = []
        for group, only, flags in zip(groups, asked, earns, strict=True):
            table = next(left) if only.rollouts else []
            found = {
                _key(r): self._carries(group, r, logprobs) for r, logprobs in zip(only.rollouts, table, strict=True)
            }
            verdicts.append([flag and found[_key(r)] for r, flag in zip(group.rollouts, flags, strict=True)])
        return verdicts

    def _carries(self, group: Group, rollout: Rollout, logprobs: Sequence[float]) -> bool:
        places = self._unlikely(rollout.token_ids, logprobs)
        if not places:
            return False
        if len(places) > MOST:
            return True
        prompt = self._prompt(group.prompt_ids)

        def earns_as_much(text: str) -> bool:
            try:
                (score,) = self._score([group.task], [prompt], [text])
            except Exception:  # users' reward functions may raise anything at a text that nobody wrote
                return True
            return score.reward >= rollout.reward - ROUNDING

        cores = {core for core in (rollout.extracted, group.task.answer) if core and core != rollout.text}
        for core in sorted(cores):
            without = (self._decode(_without(rollout.token_ids, i, i + 1)) for i in places)
            if any(core in text for text in without) and earns_as_much(core):
                return True
        return any(earns_as_much(text) for text in shortened(rollout.token_ids, places, self._decode))

    def _unlikely(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        """Places of unlikely tokens, the least likely first; a token without a text, as the one that ends an answer, is
        no payload."""
        limit = self.bound
        places = [i for i, value in enumerate(logprobs) if value < limit and self._decode([ids[i]])]
        return sorted(places, key=lambda i: logprobs[i])


def bound(own: Sequence[float]) -> float:
    """B, from the least log-probabilities of own right answers."""
    if len(own) < OWN_MIN:
        return FIXED
    return min(FIXED, sorted(own)[int(QUANTILE * len(own))] - MARGIN)


def shortened(ids: Sequence[int], places: Sequence[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Different texts of the answer `ids` without some of the unlikely tokens at `places`."""
    seen = {decode(list(ids))}
    for text in _shortened(ids, places, decode):
        if text not in seen:
            seen.add(text)
            yield text


def _shortened(ids: Sequence[int], places: Sequence[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    gone = set(places)
    yield decode([token for i, token in enumerate(ids) if i not in gone])
    for start in sorted(gone):
        if start - 1 not in gone:
            stop = next(i for i in range(start, len(ids) + 1) if i not in gone)
            yield decode(_without(ids, start, stop))
    for i in places:
        for length in range(1, SPAN + 1):
            yield decode(_without(ids, i, i + length))
        kept = "".join(char for char in decode([ids[i]]) if char.isalnum())
        yield decode(list(ids[:i])) + kept + decode(list(ids[i + 1 :]))


def _without(ids: Sequence[int], start: int, stop: int) -> list[int]:
    return [*ids[:start], *ids[stop:]]


def _distinct(group: Group, flags: Sequence[bool]) -> Group:
    """`group` with one of each of its different answers that are flagged."""
    distinct = {_key(r): r for r, flag in zip(group.rollouts, flags, strict=True) if flag}
    return msgspec.structs.replace(group, rollouts=list(distinct.values()))


def _key(rollout: Rollout) -> tuple[int, ...]:
    return tuple(rollout.token_ids)
