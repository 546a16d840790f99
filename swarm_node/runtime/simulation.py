"""Many nodes in one process: the code of a node over a network in memory, on a virtual clock.

    at t            a node samples its groups: that takes tokens / speed seconds of virtual time
    at t + g        it publishes them, chooses foreign ones, learns: that takes trained tokens / speed
    at t + g + l    it begins its next round

Events of other nodes happen in between, and messages arrive when their links deliver them. The same seeds give the same
metrics, line for line; the speed of this machine plays no part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm_node.config import NodeConfig
from swarm_node.node import Node, fitted
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.rollouts import Collected
from swarm_node.swarm.member import Member
from swarm_node.tasks.taskset import TaskSet, load_tasks
from swarm_protocol.codec import spoken_by
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import Manifest, ManifestLimits, ManifestTask
from swarm_protocol.messages import PROTOCOL_VERSION
from swarm_protocol.transports.memory import LinkModel, MemoryNetwork, VirtualClock

START = 1_800_000_000.0  # Unix time at which simulations begin
SIMULATED_CHECK_S = 0.05  # virtual time between two looks of a node that waits for others' weights
WALL_CLOCK = ("perf/trained_tok_s", "perf/reward_share")  # metrics that are left out, because they measure this machine


@dataclass(frozen=True)
class Speed:
    """How fast a simulated machine is."""

    generate_tok_s: float = 5000.0  # sampled tokens per second
    train_tok_s: float = 10_000.0  # trained tokens per second, prompts included
    overhead_s: float = 0.01  # seconds of a round besides sampling and training


@dataclass
class Peer:
    """One simulated node."""

    config: NodeConfig
    speed: Speed = Speed()
    link: LinkModel = LinkModel()
    policy: Policy | None = None  # None = load it from `config.policy`
    tasks: TaskSet | None = None  # None = load them from `config.tasks`
    starts_at: float = 0.0  # virtual seconds from the beginning of the simulation to the start of the node
    sleeps: Sequence[tuple[float, float]] = ()
    """(from, to) in virtual seconds in which the node starts no round, as a laptop whose lid is closed."""
    silo: bool = False  # whether the node trains alone, on the same tasks
    protocol: int = PROTOCOL_VERSION
    """The newest version of the protocol that the node understands; it also understands the one before."""
    node_type: type[Node] = Node
    metrics: list[dict[str, Any]] = field(default_factory=list)  # one record per round, as in metrics.jsonl
    said: list[str] = field(default_factory=list)
    dead: bool = False
    node: Node = field(init=False)


class Simulation:
    """Nodes of one swarm on one virtual clock."""

    def __init__(self, manifest: Manifest, peers: Sequence[Peer], seed: int = 0) -> None:
        """A peer's seed follows from `seed` and its place in `peers`, unless its configuration sets one."""
        self.clock = VirtualClock(START)
        self.network = MemoryNetwork(self.clock, seed=seed)
        self.manifest = manifest
        self.peers = list(peers)
        self._rounds = 0.0
        self._waiting: list[Peer] = []  # those that have had that many
        first: list[str] = []
        for i, peer in enumerate(self.peers):
            if peer.config.seed is None:
                peer.config = peer.config.model_copy(update={"seed": 1000 * seed + i})
            peer.policy = peer.policy or load_policy(peer.config.policy, peer.config.rollouts, peer.said.append)
            peer.tasks = peer.tasks or load_tasks(peer.config.tasks, peer.config.rewards)
            peer.config = fitted(peer.config, peer.policy, peer.said.append, peer.tasks.turns)
            parts = peer.config, peer.policy, peer.tasks, peer.said.append
            member = None
            if not peer.silo:
                identity = Identity.generate(hashlib.sha256(f"sim/{seed}/{i}".encode()).digest())
                transport = self.network.join(identity, manifest.swarm_id, link=peer.link, bootstrap=first)
                first = first or transport.addresses[:1]
                now, spoken = self.clock.now, spoken_by(peer.protocol)
                # Admission's clock stands still: a simulation must not depend on the speed of the machine.
                member = Member(
                    peer.config, manifest, identity, transport, *parts[1:], now, spoken=spoken, spent=lambda: 0.0
                )
            peer.node = peer.node_type(*parts, member, self.clock.now)
            self._call_at(START + peer.starts_at, peer, self._begin)

    def run(self, rounds: int | None = None, seconds: float | None = None) -> None:
        """Run until every living peer has had `rounds` rounds in all, or for `seconds` of virtual time."""
        self._rounds = float("inf") if rounds is None else rounds
        end = float("inf") if seconds is None else self.clock.now() + seconds
        waiting, self._waiting = self._waiting, []
        for peer in waiting:
            if not peer.dead:
                self._begin(peer)
        while any(not peer.dead and len(peer.metrics) < self._rounds for peer in self.peers):
            if not self.clock.step(end):
                break
        else:
            return
        if seconds is not None:
            self.clock.run_until(end)

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` at `seconds` after the beginning, for example to inject a fault."""
        self.clock.call_at(START + seconds, do)

    def kill(self, number: int) -> None:
        """Remove peer `number` without a message to the others."""
        peer = self.peers[number]
        peer.dead = True
        if peer.node.member is not None:
            self.network.kill(peer.node.member.peer_id)

    def _begin(self, peer: Peer) -> None:
        """Sample now, or when the node wakes."""
        if peer.node.round >= self._rounds:
            self._waiting.append(peer)
            return
        now = self.clock.now()
        awake = max((START + to for since, to in peer.sleeps if START + since <= now < START + to), default=now)
        if awake > now:
            self._call_at(awake, peer, self._begin)
            return
        collected = peer.node.collect()
        collected.seconds = collected.num_tokens / peer.speed.generate_tok_s
        self._call_at(now + collected.seconds, peer, self._learn, now, collected)

    def _learn(self, peer: Peer, began: float, collected: Collected) -> None:
        peer.node.share(collected)
        groups = peer.node.choose(collected)
        learned = peer.node.learn(groups)
        tokens = sum(len(g.prompt_ids) + r.num_tokens for g in groups for r in g.rollouts)
        seconds = collected.seconds + tokens / peer.speed.train_tok_s + peer.speed.overhead_s
        seconds = max(seconds, peer.config.pace_s)
        self._call_at(began + seconds, peer, self._end, seconds, collected, learned)

    def _end(self, peer: Peer, seconds: float, collected: Collected, learned: dict[str, float]) -> None:
        line = peer.node.record(collected, learned, seconds)
        peer.metrics.append({name: value for name, value in line.items() if name not in WALL_CLOCK})
        self._average(peer)

    def _average(self, peer: Peer) -> None:
        """Exchange weights, wait for others if need be, and begin the next round."""
        if peer.node.average():
            self._call_at(self.clock.now() + SIMULATED_CHECK_S, peer, self._average)
        else:
            self._begin(peer)

    def _call_at(self, at: float, peer: Peer, do: Callable[..., None], *more: Any) -> None:
        """Call `do(peer, *more)` at the virtual time `at`, if the peer lives then."""
        self.clock.call_at(at, lambda: None if peer.dead else do(peer, *more))


def manifest_for(config: NodeConfig, name: str = "simulation", **limits: Any) -> Manifest:
    """The manifest of a swarm with the named tasks of `config`; `limits` as in its file."""
    names = [task if isinstance(task, str) else task.env or "jsonl" for task in config.tasks]
    tasks = [ManifestTask(env=name) for name in names if not name.endswith(".jsonl")] or [ManifestTask(sha256="0" * 64)]
    return Manifest(name=name, tasks=tasks, limits=ManifestLimits(**limits))
