"""A cohort of averagers over the memory transport: weights that drift, no policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from swarm_node.averaging.averager import Averager, CohortPlace
from swarm_node.averaging.cohort import make_averager
from swarm_node.averaging.cohort_weights import LateJoin, WeightsFetch
from swarm_node.averaging.outer_step import NoLoCo
from swarm_node.config import AveragingConfig
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.transports.memory import LinkModel, MemoryNetwork, MemoryTransport, VirtualClock

SWARM, COHORT = "a" * 64, "c" * 16
START, PERIOD_S, STEP_S = 1000.0, 10.0, 1.0
PAPER = {"alpha": 0.5, "beta": 0.7, "gamma": 0.7}
LINK = LinkModel(latency_s=0.02, bandwidth_bytes_s=1e6)


def noloco_step(
    outer: NoLoCo,
    slow: Tensor,
    momentum: Tensor,
    fast: Tensor,
    partner_fast: Tensor,
    partner_slow: Tensor | None = None,
) -> None:
    """NoLoCo's equations 2 and 3: change `slow` and `momentum` in place."""
    after = partner_fast.clone()
    outer.momentum_in_place(slow, momentum, fast, after, partner_slow)
    slow.add_(momentum.copy_(after))


@dataclass(eq=False)
class Trainee:
    """A node whose training pulls weights towards 1, with noise of its own."""

    number: int
    transport: MemoryTransport
    weights: dict[str, Tensor]
    averager: Averager
    late_join: LateJoin
    noise: torch.Generator
    said: list[str] = field(default_factory=list)
    updates: int = 0
    version: int = 0
    fetched: list[WeightsFetch] = field(default_factory=list)
    """Fetched weights that it went on with."""
    dead: bool = False
    step_s: float = STEP_S
    trains: bool = True
    changed: Callable[[], None] = lambda: None
    probe: Callable[[], float | None] = lambda: None
    """Callbacks of its averager."""

    @property
    def flat(self) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in self.weights.values()])


class Cohort:
    """A cohort of `n` trainees on one clock."""

    def __init__(self, n: int, seed: int = 0, link: LinkModel = LINK, hidden: int = 0, **options: Any) -> None:
        """The last `hidden` can only dial."""
        usual = {"method": "noloco", "every": 5, "codec": "float32", "clip": 0.0, "gates": False}
        self.config = AveragingConfig(**{**usual, **PAPER, **options})
        self.clock = VirtualClock(START)
        self.network = MemoryNetwork(self.clock, seed)
        self.seed = seed
        self.link = link
        self.first: list[str] = []
        self._numbers = count()
        self.trainees = [self.join(dial_only=i >= n - hidden) for i in range(n)]
        self.clock.run_until(START + PERIOD_S)  # cards have spread

    def join(self, cohort: str = COHORT, dial_only: bool = False, **keys: Any) -> Trainee:
        number = next(self._numbers)
        transport = self.network.join(f"peer{number}", SWARM, link=self.link, bootstrap=self.first, dial_only=dial_only)
        self.first = self.first or transport.addresses[:1]
        weights = {"layers.0.w": torch.zeros(30, 10), "layers.1.w": torch.zeros(300), "embed": torch.zeros(130)}
        said: list[str] = []
        place = CohortPlace(SWARM, cohort, transport.peer_id, PERIOD_S)
        now, changed, probe = self.clock.now, lambda: trainee.changed(), lambda: trainee.probe()
        averager = make_averager(self.config, place, weights, transport, now, said.append, changed, probe)
        late_join = LateJoin(averager, random.Random(number))
        noise = torch.Generator().manual_seed(100 * self.seed + number)
        trainee = Trainee(number, transport, weights, averager, late_join, noise, said, **keys)
        self.announce(trainee)
        self.clock.call_at(self.clock.now() + 2 * PERIOD_S + 0.1 * number, partial(self.tick, trainee))
        return trainee

    def announce(self, trainee: Trainee) -> None:
        """Announce its card with its present version, which others see when cards are renewed."""
        trainee.transport.announce(
            PeerCard(
                PROTOCOL_VERSION,
                SWARM,
                self.clock.now(),
                f"p{trainee.number}",
                ["trainer"],
                cohort=trainee.averager.place.cohort,
                policy_version=trainee.version,
            )
        )

    def tick(self, trainee: Trainee) -> None:
        """Make one step of training, or wait."""
        if trainee.dead:
            return
        again = 0.05
        if not trainee.averager.waiting():
            again = trainee.step_s
            trainee.updates += 1
            trainee.version += 1
            with trainee.averager.changing():
                for tensor in trainee.weights.values():
                    if trainee.trains:
                        tensor += 0.01 * (1 - tensor) + 0.02 * torch.randn(tensor.shape, generator=trainee.noise)
        fetched = trainee.late_join.step(trainee.version)
        if fetched is not None:
            trainee.version = max(trainee.version, fetched.version)
            trainee.fetched.append(fetched)
        trainee.averager.step(trainee.updates)
        self.clock.call_at(self.clock.now() + again, partial(self.tick, trainee))

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.clock.now() + seconds)

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        self.clock.call_at(self.clock.now() + seconds, do)

    def kill(self, trainee: Trainee) -> None:
        trainee.dead = True
        self.network.kill(trainee.transport.peer_id)

    def spread(self) -> float:
        """Root mean square distance of live trainees from their mean."""
        all_ = torch.stack([trainee.flat for trainee in self.trainees if not trainee.dead])
        return float((all_ - all_.mean(0)).square().mean().sqrt())

    def exchanges(self) -> list[int]:
        return [trainee.averager.counts["exchanges"] for trainee in self.trainees]
