"""The arms that `benchmarks.sharing` compares: who trains on what.

An arm is a configuration of `swarm-node` wherever there is one; the controls that no node can be configured to replace
what a node chooses to train on.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from swarm_node.grpo.advantage import TaskStatistics, foreign_advantages
from swarm_node.node import Node
from swarm_node.rollouts import Collected
from swarm_node.tasks.taskset import has_signal
from swarm_node.types import Group, Rollout


class Round(NamedTuple):
    """The end of a node's round."""

    reward: float  # mean over the round's own answers, before any filter
    cpu_s: float  # of the whole simulation up to here, looks left out
    samples: int  # own answers sampled up to here
    tokens: int  # of these


@dataclass
class Stopwatch:
    """CPU seconds of this process since it was started, without what was left out."""

    began: float = field(default_factory=time.process_time)

    def seconds(self) -> float:
        return time.process_time() - self.began

    @contextmanager
    def stopped(self) -> Iterator[None]:
        since = time.process_time()
        yield
        self.began += time.process_time() - since


class Measured(Node):
    """A node that keeps account of what it costs and what it trains on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cpu: dict[str, float] = defaultdict(float)
        """CPU seconds of each part of its rounds."""
        self.stopwatch = Stopwatch()
        self.samples = self.tokens = self.trained = self.signal = self.foreign = 0
        """Own answers sampled, their tokens; groups trained on, those of them with a signal, and foreign ones."""
        self.curve: list[Round] = []
        self.look_every = 0
        """Rounds between two looks at what the policy can do; 0 = none."""
        self.look: Callable[[], dict[str, float]] = dict
        self.looks: list[tuple[float, dict[str, float]]] = []  # CPU seconds, what was seen
        if self.member is not None:
            receiver = self.member.receiver
            receiver.admit = self._timed("admit", receiver.admit)  # type: ignore[method-assign]

    def collect(self) -> Collected:
        with self._clock("generate"):
            collected = super().collect()
        self.samples += sum(len(group.rollouts) for group in collected.groups)
        self.tokens += collected.num_tokens
        return collected

    def share(self, collected: Collected) -> None:
        with self._clock("publish"):
            super().share(collected)

    def learn(self, groups: Sequence[Group], before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        self.trained += len(groups)
        self.signal += sum(has_signal(group.rollouts) or group.advantages is not None for group in groups)
        self.foreign += sum(group.peer is not None for group in groups)
        with self._clock("train"):
            return super().learn(groups, before_update)

    def record(self, collected: Collected, learned: dict[str, float], seconds: float) -> dict[str, Any]:
        line = super().record(collected, learned, seconds)
        self.curve.append(Round(line["reward"], self.stopwatch.seconds(), self.samples, self.tokens))
        if self.look_every and self.round % self.look_every == 0:
            with self.stopwatch.stopped():
                self.looks.append((self.curve[-1].cpu_s, self.look()))
        return line

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        """Add the CPU time of the block to `part`, less what parts within it took."""
        start, inner = time.process_time(), sum(self.cpu.values())
        yield
        self.cpu[part] += time.process_time() - start - (sum(self.cpu.values()) - inner)

    def _timed(self, part: str, function: Callable[[], int]) -> Callable[[], int]:
        def timed() -> int:
            with self._clock(part):
                return function()

        return timed


# --------------------------------------------------------------------- controls


class ReplaysItself(Measured):
    """Beside its own new groups, J of its own earlier ones with a signal, treated as foreign ones are: as much data as
    sharing gives, and nobody else's. Unlike those, each is used again and again: there are too few."""

    J = 4
    KEPT = 64

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.earlier: list[Group] = []
        self.statistics = TaskStatistics()

    def choose(self, collected: Collected) -> list[Group]:
        self.statistics.observe(collected.groups)
        rng = random.Random(f"replay/{self.config.seed}/{self.round}")
        bound = self.config.sharing.max_advantage
        drawn = rng.sample(self.earlier, min(self.J, len(self.earlier)))
        self.earlier = [*self.earlier, *(g for g in collected.groups if has_signal(g.rollouts))][-self.KEPT :]
        return collected.kept + [as_foreign(group, self.statistics, bound) for group in drawn]


class ReplaysByOwnSuccess(Measured):
    """`grpo.replay` with the advantages that foreign answers would have, once own success is known, instead of 1."""

    def choose(self, collected: Collected) -> list[Group]:
        assert self.replay is not None
        own, bound = self.replay.own, self.config.sharing.max_advantage
        return [
            as_foreign(g, own, bound) if g.advantages is not None and own.of(g.task.label).known else g
            for g in super().choose(collected)
        ]


class JudgesItselfAsForeign(Measured):
    """Own groups get the advantages that foreign ones would: is it the sharing, or just the rule?"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statistics = TaskStatistics()

    def choose(self, collected: Collected) -> list[Group]:
        self.statistics.observe(collected.groups)
        bound = self.config.sharing.max_advantage
        return [as_foreign(g, self.statistics, bound) if has_signal(g.rollouts) else g for g in collected.kept]


class ImitatesOthers(Measured):
    """Trains on nothing but the right answers of others, all alike: supervised training."""

    def choose(self, collected: Collected) -> list[Group]:
        return [successes(group) for group in super().choose(collected) if group.peer is not None]


def as_foreign(group: Group, statistics: TaskStatistics, bound: float) -> Group:
    """An own group as if it were another's: advantages against own success, ratios from 1."""
    own = statistics.of(group.task.label)
    advantages = foreign_advantages(group.rollouts, own if own.known else None, bound)
    return msgspec.structs.replace(group, rollouts=unrecorded(group.rollouts), advantages=advantages)


def successes(group: Group) -> Group:
    """The fully right answers of `group`, each with advantage 1."""
    right = unrecorded([rollout for rollout in group.rollouts if rollout.reward > 0.999])
    return msgspec.structs.replace(group, rollouts=right, advantages=[1.0] * len(right))


def unrecorded(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Without the log-probabilities at sampling."""
    return [msgspec.structs.replace(rollout, logprobs=[]) for rollout in rollouts]


# --------------------------------------------------------------------- arms


@dataclass(frozen=True)
class Arm:
    """Who trains on what."""

    says: str
    own: int = 4
    foreign: int = 4
    silo: bool = False
    """Not a member of the swarm; `own` groups a round."""
    sets: dict[str, Any] = field(default_factory=dict)
    """Further keys of the configuration, by section."""
    node: type[Measured] = Measured
    peers: int = 0
    """Peers that are simulated; 0 = as many as of other arms."""
    longer: int = 1
    """Goes on for this many times the rounds, to see where it is when dearer arms end."""
    period_s: float = 60.0
    """Of outer rounds, where weights are averaged."""
    rate: float = 1.0
    """Times the setting's learning rate."""


def _replay(says: str, n: int, node: type[Measured] = Measured) -> Arm:
    return Arm(says, own=8, foreign=0, silo=True, sets={"grpo": {"replay": n}}, node=node, longer=3)


ARMS = {
    "8/0": Arm("silo", own=8, foreign=0, silo=True, longer=3),
    "6/2": Arm("6 own + 2 foreign", own=6, foreign=2),
    "4/4": Arm("4 own + 4 foreign"),
    "2/6": Arm("2 own + 6 foreign", own=2, foreign=6),
    "2/6 two": Arm("2 own + 6 foreign, two answers of each", own=2, foreign=6, sets={"sharing": {"answers": 2}}),
    "2/6 two all": Arm(
        "2 own + 6 foreign, two answers of each",
        own=2,
        foreign=6,
        sets={"sharing": {"answers": 2}, "grpo": {"answers": 2}},
    ),
    "4/4 gate": Arm("answers that carry a payload are left out", sets={"sharing": {"gate": True}}),
    "4/4 no fill": Arm("4 own + up to 4 foreign", sets={"sharing": {"fill": False}}),
    "4/4 aha": Arm("the sampler `aha`", sets={"sharing": {"sampler": "benchmarks.samplers:aha"}}),
    "4/4 paper": Arm(
        "advantages against the sender's group, unbounded",
        sets={"sharing": {"baseline": "group", "max_advantage": 100.0}},
    ),
    "4/4 group": Arm("advantages against the sender's group, bounded", sets={"sharing": {"baseline": "group"}}),
    "refill": Arm("silo that refills dead groups, x4", own=8, foreign=0, silo=True, sets={"rollouts": {"refill": 4.0}}),
    "8/0 rule": Arm(
        "silo, advantages as for foreign groups",
        own=8,
        foreign=0,
        silo=True,
        node=JudgesItselfAsForeign,
        longer=2,
    ),
    "refill rule": Arm(
        "refilling silo, advantages as for foreign groups",
        own=8,
        foreign=0,
        silo=True,
        sets={"rollouts": {"refill": 4.0}},
        node=JudgesItselfAsForeign,
    ),
    "4/4 refill": Arm("sharing and refilling", sets={"rollouts": {"refill": 4.0}}),
    "4/0": Arm("4 own and nothing else", own=4, foreign=0, silo=True),
    "sender": Arm("4 own + 4 of its own earlier ones", own=4, foreign=0, silo=True, node=ReplaysItself),
    "replay": _replay("8 own + 4 earlier own, successes only", 4),
    "replay 8": _replay("8 own + 8 earlier own, successes only", 8),
    "replay own": _replay(
        "8 own + 4 earlier own, successes only, advantages against own success", 4, ReplaysByOwnSuccess
    ),
    "imitate": Arm("supervised on foreign successes only", sets={"sharing": {"fill": False}}, node=ImitatesOthers),
    "pooled": Arm("one learner, 64 groups a round", own=64, foreign=0, silo=True, peers=1),
    "pooled x8": Arm("one learner, 8 groups, 8 x the rounds", own=8, foreign=0, silo=True, peers=1, longer=8),
}
