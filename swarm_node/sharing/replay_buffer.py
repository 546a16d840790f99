"""Foreign groups that wait to be trained on: bounded in number, bytes and age, by peer, and in their uses.

    add -> balance -> [ waiting: each peer its share, none too old ] -> sampler -> J groups -> advantages -> gate

At most as many groups wait as four rounds can use; where rounds are shorter than the time between messages, as the
rounds of the last seconds can use. Groups of a policy of long ago teach less. When room is needed, a peer with more
than its share loses its oldest groups; if there is none, the oldest group of all goes.

The advantages of a chosen group compare it with this node's own success (`grpo/advantage.py`), or with the group's mean
where own answers are too few, or if asked for.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean
from typing import Any

import msgspec

from swarm_node.config import SharingConfig
from swarm_node.config.plugins import load_function, plugin_error
from swarm_node.errors import UserError
from swarm_node.grpo.advantage import RewardStatistics, TaskStatistics, foreign_advantages, is_judged
from swarm_node.grpo.down_sampling import down_sampled
from swarm_node.say import Warned
from swarm_node.sharing.balance import Balance
from swarm_node.sharing.gate import Gate
from swarm_node.sharing.peer_accounts import DISTRUSTED, MAX_PEERS, Trust
from swarm_node.types import Group, Rollout

ROUNDS = 4
"""The groups that wait last for at most so many rounds of this node. With ten minutes' worth waiting, groups were 20
rounds old when used."""
LULL_S = 2.0  # messages of a peer come about once a second: groups of one have to last until the next
DRAWS = 3
"""Times that groups are drawn in a round, each time for those that were nothing but payloads. One pass through the
policy is made of each draw."""
MAX_NAMED = 200  # peers that are named for their payloads in a run: a stranger's key costs nothing


def earning(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> list[bool]:
    """Which of `rollouts` are rewarded, or would be if better ones were left out."""
    least = min((r.reward for r in rollouts if is_judged(r)), default=0.0)
    return [is_judged(r) and (a > 0 or r.reward > least) for r, a in zip(rollouts, advantages, strict=True)]


def teaches(best: float, own: RewardStatistics | None) -> bool:
    """Whether a group whose best reward is `best` has any advantage. The group must hold two different rewards."""
    return own is None or best > own.reward


@dataclass(frozen=True)
class Offer:
    """A waiting group, as samplers see it."""

    id: int  # tells it apart in this run
    group: Group
    age: float  # seconds since it was sampled
    uses: int  # how often it was trained on
    best: float  # best reward in it, as judged here
    own: RewardStatistics  # how well this node does on that kind of task


Sampler = Callable[[Sequence[Offer]], Sequence[float]]
"""Weights of offers, finite and >= 0 (0 = never): groups are drawn in proportion to them, one by one."""


@dataclass
class _Entry:
    id: int
    peer: str
    group: Group
    size: int  # bytes of memory, estimated from above
    best: float  # largest reward
    uses: int = 0


@dataclass
class ReplayBuffer:
    """Admitted groups of other peers. UserError for a sampler that cannot be loaded."""

    config: SharingConfig
    now: Callable[[], float]
    record: Callable[[dict[str, Any]], None] | None = None  # gets what was offered and chosen in each `choose`
    say: Callable[[str], None] = lambda line: None
    gate: Gate | None = None  # says which answers carry a payload: these are left out
    balance: Balance | None = None  # says for which groups there is room beside own ones
    k: int = 1  # own success is measured as pass@k

    def __post_init__(self) -> None:
        config = self.config
        self.trust = Trust()
        self._named: set[str] = set()
        self._refused = 0  # groups with a payload
        self._rounds: deque[float] = deque(maxlen=64)  # when `choose` was called, lately
        self._sampler = uniform if config.sampler == "uniform" else load_function(config.sampler, "sharing.sampler")
        self._statistics = TaskStatistics()
        self._entries: dict[int, _Entry] = {}  # by id, in the order of arrival
        self._peer_bytes: Counter[str] = Counter()
        self._peer_groups: Counter[str] = Counter()
        self._ids = count()
        self._used: list[float] = []  # age in seconds of each group that the last `choose` gave
        self._used_by: Counter[str] = Counter()

    def add(self, group: Group) -> str | None:
        """Keep `group`, or say why not: `age`, `bytes` if it alone exceeds its sender's share, or `balance` if there
        is no room for its answer or its length beside own ones."""
        assert group.peer is not None
        size = _memory(group)
        if self.now() - group.created > self.config.max_age_s:
            return "age"
        share = self.config.peer_share * self.config.max_bytes
        if size > share:
            return "bytes"
        if self.balance is not None and not self.balance.admits(group):
            return "balance"
        best = max((r.reward for r in group.rollouts if is_judged(r)), default=-math.inf)
        entry = _Entry(next(self._ids), group.peer, group, size, best)
        self._entries[entry.id] = entry
        self._count(entry, 1)
        while self._peer_bytes[group.peer] > share:
            self._drop(self._oldest_of(group.peer))
        while self._peer_bytes.total() > self.config.max_bytes or len(self._entries) > self._most():
            greediest = max(self._peer_groups, key=lambda peer: self._peer_groups[peer] / self.trust.of(peer))
            groups = self._peer_groups[greediest] / self.trust.of(greediest)
            is_greedy = groups > max(self.config.foreign, self.config.peer_share * self._most())
            self._drop(self._oldest_of(greediest if is_greedy else None))
        return None

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from this node's own scored `groups` how well it does on each kind of task."""
        self._statistics.observe(groups)
        if self.gate is not None:
            self.gate.observe(groups)
        if self.balance is not None:
            self.balance.observe(groups)

    def available(self) -> int:
        """Number of groups that `choose` could give now; a peer's groups count as much as it is trusted."""
        return round(sum(self.trust.of(entry.peer) for entry in self._usable()))

    def choose(self, n: int, rng: random.Random) -> list[Group]:
        """Up to `n` groups for one step, with their advantages. UserError if a sampler of the user's own fails."""
        now, entries = self.now(), self._usable()
        self._rounds.append(now)
        offers = [
            Offer(e.id, e.group, now - e.group.created, e.uses, e.best, self._statistics.of(e.group.task.label))
            for e in entries
        ]
        weights = weigh(self._sampler, offers) if offers else []
        weights = [w * self.trust.of(e.peer) for w, e in zip(weights, entries, strict=True)]
        left = list(weights)
        chosen: list[Group] = []
        everything: list[tuple[int, float]] = []
        self._used = []
        for _ in range(DRAWS):
            drawn = draw(left, n - len(chosen), rng)
            compared = [self._compared(entries[i].group) for i, _ in drawn]
            parts = [down_sampled(group, self.config.answers, rng) for group in compared]
            groups = self._without_payloads(parts)
            for (i, _), group in zip(drawn, groups, strict=True):
                left[i] = 0.0
                entries[i].uses += 1
                if group is None or entries[i].uses >= self.config.reuse:
                    self._drop(entries[i])
                if group is not None:
                    chosen.append(group)
                    self._used.append(now - group.created)
                    self._count_use(entries[i].peer)
            everything += drawn
            if not drawn or len(chosen) == n:
                break
        if self.record is not None:
            self.record(_report(now, n, offers, weights, everything))
        return chosen

    def _without_payloads(self, groups: Sequence[Group]) -> list[Group | None]:
        """The groups without answers that carry a payload; None for a group that teaches nothing then, or that cannot
        be judged."""
        if self.gate is None:
            return list(groups)
        earns = [earning(group.rollouts, group.advantages or []) for group in groups]
        verdicts = self.gate.payloads(groups, earns)
        if verdicts is None:
            return [None] * len(groups)
        return [
            None if payload is None else self._sifted(group, flags, payload)
            for group, flags, payload in zip(groups, earns, verdicts, strict=True)
        ]

    def _sifted(self, group: Group, earns: Sequence[bool], payload: Sequence[bool]) -> Group | None:
        """`group` without its payloads, which are counted against its sender."""
        if any(earns):
            self._judged(group.peer or "", sum(payload), sum(earns))
        if not any(payload):
            return group
        kept = [r for r, carries in zip(group.rollouts, payload, strict=True) if not carries]
        if not kept:
            return None
        sifted = self._compared(msgspec.structs.replace(group, rollouts=kept))
        return sifted if any(a > 0 for a in sifted.advantages or []) else None

    def _judged(self, peer: str, payloads: int, right: int) -> None:
        before = self.trust.of(peer)
        self.trust.judged(peer, payloads / right)
        self._refused += payloads > 0
        if before >= DISTRUSTED > self.trust.of(peer) and len(self._named) < MAX_NAMED and peer not in self._named:
            self._named.add(peer)
            self.say(
                Warned(f"most right answers of {peer} hold text that this policy would not write and nothing asks for")
            )

    def _compared(self, group: Group) -> Group:
        """`group` with its advantages."""
        advantages = foreign_advantages(group.rollouts, self._baseline(group), self.config.max_advantage, self.k)
        return msgspec.structs.replace(group, advantages=advantages)

    def metrics(self) -> dict[str, float]:
        """`swarm/groups_used` and `swarm/staleness_mean` (seconds) of the last `choose`; levels."""
        figures = {
            "swarm/groups_used": float(len(self._used)),
            "swarm/groups_waiting": float(len(self._entries)),
            "swarm/bytes_waiting": float(self._peer_bytes.total()),
        }
        if self._refused:
            figures["swarm/payloads"] = float(self._refused)
        return figures | ({"swarm/staleness_mean": fmean(self._used)} if self._used else {})

    def used_by_peer(self) -> dict[str, int]:
        """Groups trained on, by sender; running totals."""
        return dict(self._used_by)  # copied at once: another thread may be asking

    def _baseline(self, group: Group) -> RewardStatistics | None:
        """Own success, which the group's rewards are compared with; None = their own mean."""
        own = self._statistics.of(group.task.label)
        return own if self.config.baseline == "own" and own.known else None

    def _usable(self) -> list[_Entry]:
        oldest = self.now() - self.config.max_age_s
        for entry in [e for e in self._entries.values() if e.group.created < oldest]:
            self._drop(entry)
        return [e for e in self._entries.values() if teaches(e.best, self._baseline(e.group))]

    def _most(self) -> int:
        lately = self.now() - LULL_S
        return max(1, self.config.foreign) * max(ROUNDS, sum(at > lately for at in self._rounds))

    def _oldest_of(self, peer: str | None) -> _Entry:
        """The oldest entry of a peer, or of all. Groups arrive newest first, so the order of arrival is not that of
        age."""
        entries = (e for e in self._entries.values() if peer in (None, e.peer))
        return min(entries, key=lambda entry: (entry.group.created, entry.id))

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.id]
        self._count(entry, -1)

    def _count(self, entry: _Entry, sign: int) -> None:
        for counter, amount in ((self._peer_bytes, entry.size), (self._peer_groups, 1)):
            counter[entry.peer] += sign * amount
            if not counter[entry.peer]:
                del counter[entry.peer]

    def _count_use(self, peer: str) -> None:
        if peer not in self._used_by and len(self._used_by) >= MAX_PEERS:
            del self._used_by[min(self._used_by, key=self._used_by.__getitem__)]
        self._used_by[peer] += 1


def _memory(group: Group) -> int:
    """Bytes that `group` takes, from above: 40 a token id, 32 a log-probability, a kilobyte for each object."""
    numbers = 40 * len(group.prompt_ids) + sum(40 * len(r.token_ids) + 32 * len(r.logprobs) for r in group.rollouts)
    texts = sum(2 * sys.getsizeof(r.text) for r in group.rollouts) + sys.getsizeof(group.task.question)
    return 2048 + numbers + texts + 1024 * len(group.rollouts)


def _report(
    now: float, n: int, offers: Sequence[Offer], weights: Sequence[float], drawn: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """One line of offers.jsonl."""
    return {
        "time": now,
        "wanted": n,
        "offered": [
            {
                "id": offer.id,
                "peer": offer.group.peer,
                "label": offer.group.task.label,
                "slot": offer.group.task.slot,
                "rollouts": len(offer.group.rollouts),
                "best": offer.best,
                "age": offer.age,
                "uses": offer.uses,
                "own_reward": offer.own.reward if offer.own.known else None,
                "own_answers": offer.own.n,
                "weight": weight,
            }
            for offer, weight in zip(offers, weights, strict=True)
        ],
        "chosen": [{"id": offers[i].id, "probability": probability} for i, probability in drawn],
    }


def uniform(offers: Sequence[Offer]) -> list[float]:
    """The default sampler: every group has the same weight, as in arXiv 2509.08721."""
    return [1.0] * len(offers)


def weigh(sampler: Sampler, offers: Sequence[Offer]) -> list[float]:
    """The weight of each offer. UserError if the sampler, which may be the user's own, fails or breaks its contract."""
    try:
        weights = [float(weight) for weight in sampler(offers)]
    except Exception as error:  # the user's code may raise anything
        raise plugin_error("sharing.sampler failed", error) from error
    if len(weights) != len(offers) or not all(math.isfinite(w) and w >= 0 for w in weights):
        raise UserError(f"sharing.sampler must give {len(offers)} finite weights >= 0, one for each group offered")
    return weights


def draw(weights: Sequence[float], n: int, rng: random.Random) -> list[tuple[int, float]]:
    """Draw up to `n` different positions in proportion to `weights`. Each comes with its probability when it was drawn;
    their product is the probability of the whole draw."""
    left = {i: weight for i, weight in enumerate(weights) if weight > 0}
    drawn: list[tuple[int, float]] = []
    while left and len(drawn) < n:
        total = math.fsum(left.values())
        (i,) = rng.choices(list(left), list(left.values()))
        drawn.append((i, left.pop(i) / total))
    return drawn
