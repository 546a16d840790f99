"""Peers that hold stages on the memory transport; their weights travel when the virtual clock moves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm_node.config import AveragingConfig, GrpoConfig, NodeConfig, PipelineConfig, PolicyConfig
from swarm_node.pipeline.membership.actions import BuildStage
from swarm_node.pipeline.recovery.held_stages import HeldStages
from swarm_node.pipeline.recovery.weight_transfer import WeightTransfer
from swarm_node.pipeline.settings import crew_settings
from swarm_node.pipeline.stage_cohort import StageCohort
from swarm_node.policy.loading import prepare
from swarm_node.storage import checkpoints as checkpoints
from swarm_protocol.crew import Assignment, Plan, Source, crew_id, crew_key
from swarm_protocol.messages import PROTOCOL_VERSION, CrewCard, PeerCard
from swarm_protocol.transports.memory import MemoryNetwork, MemoryTransport, VirtualClock
from tests.support.stages import equal_spans

SWARM, ARCHITECTURE = "ab" * 32, "cd" * 8
PERIOD_S = 10.0
RUN = (("5c" * 8, 0),)


class Peer:
    """One machine."""

    def __init__(self, world: World, name: str, crew: str) -> None:
        self.world = world
        self.name = name
        self.crew = crew
        self.said: list[str] = []
        self.gives_up_after = 1000
        """Questions whether a stage is still wanted that are answered with yes."""
        known = [address for peer in world.peers.values() for address in peer.transport.addresses]
        self.transport: MemoryTransport = world.network.join(name, SWARM, bootstrap=known)
        self.weight_transfer = WeightTransfer(
            self.transport,
            (SWARM, ARCHITECTURE),
            allowed=lambda peer, stage: True,
            of_crew=lambda peer: True,
            shelf=lambda peer, stage: {},
            shelved=lambda: None,
            room=lambda: 0,
        )
        self.held_stages = self.new_held_stages()
        self.cohort = StageCohort(
            world.averaging, SWARM, PERIOD_S, self.held_stages, self.transport, self.said.append, world.clock.now
        )

    def new_held_stages(self) -> HeldStages:
        """The held stages of a node that has restarted."""
        world = self.world
        held_stages = HeldStages(
            world.config,
            world.loading,
            self.weight_transfer,
            world.folder / self.name / "stages",
            self._stands,
            self.said.append,
        )
        held_stages.go_to(RUN)
        return held_stages

    def _stands(self, order: BuildStage) -> bool:
        self.world.run(0.5)
        self.gives_up_after -= 1
        return self.gives_up_after > 0

    def take(self, stage: int, *sources: Source) -> tuple[int, Source] | str:
        order = BuildStage(stage, self.world.spans[stage], sources or (Source("base"),))
        return self.held_stages.take(order, self.world.spans)

    def weights(self, stage: int) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.held_stages.workers[stage].optimizer.weights().items()}

    def train(self, stage: int, seed: int, updates: int = 1) -> None:
        """Change the weights, count so many updates more, and set a gradient norm."""
        worker, rng = self.held_stages.workers[stage], torch.Generator().manual_seed(seed)
        optimizer = self.held_stages.workers[stage].optimizer
        with optimizer.updating(), torch.no_grad():
            for tensor in optimizer.weights().values():
                tensor += 0.01 * torch.randn(tensor.shape, generator=rng)
            optimizer.publish()
        worker.updates += updates
        optimizer.updates = worker.updates
        worker.omega = 0.5 + seed

    def announce(self) -> None:
        held = tuple(sorted(self.held_stages.workers))
        layers = [self.world.spans[stage] for stage in held]
        self.transport.announce(
            PeerCard(
                PROTOCOL_VERSION,
                SWARM,
                self.world.clock.now(),
                self.name,
                ["trainer"],
                cohort=self.cohort.id,
                policy_version=self.held_stages.updates,
                stages=(layers[0][0], layers[-1][1] - 1) if layers else None,
                crew=CrewCard(crew_id(crew_key(SWARM, self.crew)), ARCHITECTURE, len(self.world.spans), held),
            )
        )


class World:
    """Machines that hold stages of one model."""

    def __init__(
        self,
        policy: PolicyConfig,
        stages: int,
        folder: Path,
        replica: str = "auto",
        swap: bool = False,
        replica_every: int = 0,
    ):
        self.averaging = AveragingConfig(method="noloco", every=1, codec="float32", clip=0.0, gates=False)
        self.config = NodeConfig(
            policy=policy,
            averaging=self.averaging,
            grpo=GrpoConfig(learning_rate=1e-3),
            pipeline=PipelineConfig(
                stages=stages, replica=replica, replica_every=replica_every, swap=swap, wire="float32"
            ),
        )
        self.loading = prepare(policy)
        self.spans = equal_spans(self.loading, stages)
        self.folder = folder
        self.clock = VirtualClock(1000.0)
        self.network = MemoryNetwork(self.clock, seed=0)
        self.peers: dict[str, Peer] = {}

    def peer(self, name: str, crew: str = "home") -> Peer:
        self.peers[name] = Peer(self, name, crew)
        self.run(5.0)
        return self.peers[name]

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.clock.now() + seconds)

    def plan(self, *holders: Peer) -> Plan:
        seats = tuple(Assignment(p.transport.peer_id, span) for p, span in zip(holders, self.spans, strict=True))
        return Plan(1, 1, seats, crew_settings(self.config))


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


KINDS = pytest.mark.parametrize(
    ("kind", "lora"), [("llama", False), ("llama_tied", False), ("llama_tied", True), ("gpt_neox", False)]
)


def source(way: str, *peers: object, stages: tuple[int, ...] = (), updates: int = 0) -> Source:
    return Source(way, tuple(peer.transport.peer_id for peer in peers), stages, updates)  # type: ignore[attr-defined]
