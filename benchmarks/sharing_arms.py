"""The arms that `benchmarks.sharing` compares: who trains on what.

An arm is a configuration of `swarm-node` wherever there is one; the controls that no node can be configured to replace
what a node chooses to train on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from swarm_node.grpo.optimizer import Optimizer
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

    def learn(self, groups: Sequence[Group], *calls: Any) -> dict[str, float]:
        self.trained += len(groups)
        self.signal += sum(has_signal(group.rollouts) or group.advantages is not None for group in groups)
        self.foreign += sum(group.peer is not None for group in groups)
        with self._clock("train"):
            return super().learn(groups, *calls)

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

    def _timed(self, part: str, function: Callable[..., int]) -> Callable[..., int]:
        def timed(**keys: Any) -> int:
            with self._clock(part):
                return function(**keys)

        return timed


# --------------------------------------------------------------------- controls


class RateBySignal(Measured):
    """The learning rate follows the number of groups with a signal, and decays: times sqrt(s / S), where s is the mean
    number in this node's last rounds and S that of its first ones, at most MOST; to a tenth over ROUNDS rounds."""

    MOST, ROUNDS, LAST = 2.0, 60, 4

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.signals: list[int] = []

    def learn(self, groups: Sequence[Group], *calls: Any) -> dict[str, float]:
        self.signals.append(sum(has_signal(g.rollouts) or g.advantages is not None for g in groups))
        first, last = fmean(self.signals[: self.LAST]), fmean(self.signals[-self.LAST :])
        by_signal = min(self.MOST, (last / max(first, 1.0)) ** 0.5)
        optimizer = self.trainer.optimizer
        assert isinstance(optimizer, Optimizer)
        optimizer.rate_scale = by_signal * max(0.1, 1 - self.round / self.ROUNDS)
        return super().learn(groups, *calls)


class ImitatesOthers(Measured):
    """Trains on nothing but the right answers of others, all alike: supervised training."""

    def choose(self, collected: Collected) -> list[Group]:
        return [successes(group) for group in super().choose(collected) if group.peer is not None]


def successes(group: Group) -> Group:
    """The fully right answers of `group`, each with advantage 1."""
    right = unrecorded([rollout for rollout in group.rollouts if rollout.reward > 0.999])
    return msgspec.structs.replace(group, rollouts=right, advantages=[1.0] * len(right))


def unrecorded(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Without the log-probabilities at sampling."""
    turns = [[msgspec.structs.replace(turn, logprobs=[]) for turn in rollout.turns] for rollout in rollouts]
    return [msgspec.structs.replace(each, turns=mine) for each, mine in zip(rollouts, turns, strict=True)]


# --------------------------------------------------------------------- arms


@dataclass(frozen=True)
class Arm:
    """Who trains on what."""

    says: str
    own: int = 8
    foreign: int = 24
    silo: bool = False
    """Not a member of the swarm; `own` groups a round."""
    sets: dict[str, Any] = field(default_factory=dict)
    """Further keys of the configuration, by section."""
    node: type[Measured] = Measured
    peers: int = 0
    """Peers that are simulated; 0 = as many as of other arms."""
    longer: float = 1
    """Goes on for this many times the setting's rounds: silos with a quarter of the groups a round have four times as
    many, members twice as many. What is compared with `new` alone has half of them."""
    period_s: float = 0.0
    """Of outer rounds, where weights are averaged; 0 = the setting's."""


def _sets(answers: int | None = None, own_answers: int | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    """Keys by section; `answers` of each foreign group and `own_answers` of each own one are trained on."""
    table = {name: dict(keys) for name, keys in sections.items()}
    if answers is not None:
        table.setdefault("sharing", {})["answers"] = answers
    if own_answers is not None:
        table.setdefault("grpo", {})["answers"] = own_answers
    return table


def _silo(says: str, **grpo: Any) -> Arm:
    return Arm(says, own=32, foreign=0, silo=True, sets={"grpo": grpo} if grpo else {})


ALONE: dict[str, Any] = {"averaging": {"method": "none"}}
BEFORE = _sets(answers=0, own_answers=0, averaging={"method": "none"})
"""As before the present defaults: all answers of each group, weights are not averaged."""
PASS_K: dict[str, Any] = {"advantage": "pass_k", "k": 4}
STREAMING = {
    "method": "diloco",
    "fragments": 4,
    "mixing": 0.5,
    "codec": "4bit",
    "overlap": True,
    "outer_learning_rate": 0.7,
    "outer_momentum": 0.9,
}
NOLOCO = {"alpha": 0.5, "beta": 0.7, "gamma": 0.7}

ARMS = {
    "8/0": Arm("silo, 8 groups a round, all answers", own=8, foreign=0, silo=True, sets=BEFORE, longer=4),
    "silo": _silo("`local` as it comes: 32 groups a round, 4 updates, 4 answers of each 8"),
    "silo two": _silo("32 groups a round, 2 answers of each 8", answers=2),
    "silo whole": _silo("32 groups a round, all answers", answers=0),
    "silo replay": _silo("32 groups a round, and 32 own right answers again", replay=32),
    "silo pass@k": _silo("32 groups a round, pass@k advantages, k = 4", **PASS_K),
    "4/4 paper": Arm(
        "4 own + 4 foreign, advantages against the sender's group, unbounded",
        own=4,
        foreign=4,
        sets=_sets(
            0, 0, averaging={"method": "none"}, sharing={"baseline": "group", "max_advantage": 100.0, "gate": False}
        ),
        longer=2,
    ),
    "4/4": Arm("4 own + 4 foreign, all answers: the default before", own=4, foreign=4, sets=BEFORE, longer=2),
    "new": Arm("`join` as it comes: 8 own + the best answer of 24 foreign groups, averaging"),
    "sharing": Arm("sharing alone", sets=ALONE),
    "averaging": Arm("averaging alone: 32 own groups, the mean of pairs", own=32, foreign=0),
    "NoLoCo": Arm("NoLoCo's outer step (0.5, 0.7, 0.7) instead of the mean", sets={"averaging": NOLOCO}),
    "Streaming DiLoCo": Arm(
        "the whole cohort in 4 fragments, E3M0, mixing 0.5, overlapped", sets={"averaging": STREAMING}
    ),
    "new 2/6": Arm("2 own + 6 foreign, one update a round", own=2, foreign=6, longer=2),
    "new 4/28": Arm("4 own + 28 foreign", own=4, foreign=28, longer=0.5),
    "new two": Arm("the best and the worst answer of a foreign group", sets=_sets(answers=2), longer=0.5),
    "new all": Arm("all answers of a foreign group", sets=_sets(answers=0), longer=0.5),
    "new whole": Arm("all answers of an own group", sets=_sets(own_answers=0), longer=0.5),
    "new pass@k": Arm("pass@k advantages, k = 4", sets={"grpo": PASS_K}, longer=0.5),
    "new rate": Arm("the learning rate follows the signal, and decays", node=RateBySignal, longer=0.5),
    "new aha": Arm("the sampler `aha`", sets={"sharing": {"sampler": "benchmarks.samplers:aha"}}, longer=0.5),
    "new no gate": Arm("without the gate", sets={"sharing": {"gate": False}}, longer=0.5),
    "imitate": Arm(
        "supervised on foreign successes only", sets={"sharing": {"fill": False}, **ALONE}, node=ImitatesOthers
    ),
    "pooled": Arm("one learner, 256 groups a round", own=256, foreign=0, silo=True, peers=1),
}
