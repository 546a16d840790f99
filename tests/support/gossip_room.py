"""A sender's and a receiver's end of the gossip room, joined by a list of messages and a clock that tests set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from swarm_node.config import SharingConfig
from swarm_node.policy.policy import Policy
from swarm_node.sharing import Publisher, Receiver
from swarm_node.tasks.taskset import TaskSet, slot_key, slot_place
from swarm_node.types import Group, Rollout, Sampling, Turn
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import Manifest, ManifestLimits, ManifestTask
from swarm_protocol.messages import RolloutBatch, SharedGroup, SharedRollout
from swarm_protocol.topics import epoch_at

NOW = 1_800_000_000.0
SAMPLING = Sampling(max_new_tokens=16)
ME, PEER, OTHER = (Identity.generate(bytes([i]) * 32) for i in (1, 2, 3))


def manifest(**limits: Any) -> Manifest:
    return Manifest(name="test", tasks=[ManifestTask(env="small")], limits=ManifestLimits(**limits))


@dataclass
class World:
    """What both ends need, and the results."""

    policy: Policy
    tasks: TaskSet
    manifest: Manifest = field(default_factory=manifest)
    config: SharingConfig = field(default_factory=SharingConfig)
    time: float = NOW
    sent: list[bytes] = field(default_factory=list)
    admitted: list[Group] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    slot: int = 0

    def now(self) -> float:
        return self.time

    def publisher(self, identity: Identity = PEER, send: Callable[[bytes], bool] | None = None, **changes: Any) -> Any:
        options = dict(policy=self.policy, sampling=SAMPLING, manifest=self.manifest, config=self.config) | changes
        return Publisher(
            send=send or (lambda data: self.sent.append(data) or True), identity=identity, now=self.now, **options
        )

    def receiver(self, score: Any = None, **changes: Any) -> Receiver:
        """`score` replaces that of the tasks."""
        tasks = copy.copy(self.tasks)
        if score is not None:
            tasks.prompt_text = lambda token_ids, decode: decode(token_ids)
            tasks.judge = lambda held, prompts: score([d.task for d in held], prompts, [d.turns[-1].text for d in held])
        options = dict(
            me=ME.peer_id,
            manifest=self.manifest,
            policy=self.policy,
            sampling=SAMPLING,
            tasks=tasks,
            config=self.config,
            add=self.admitted.append,
            now=self.now,
            say=self.said.append,
            spent=lambda: 0.0,
        )
        return Receiver(**options | changes)  # type: ignore[arg-type]

    def group(self, texts: Sequence[str] = ("$", "no"), identity: Identity = PEER, **changes: Any) -> Group:
        """A scored group that `identity` was assigned in its next slot; `$` in a text stands for the right answer."""
        epoch, self.slot = epoch_at(self.time), self.slot + 1
        which = self.manifest.swarm_id, identity.peer_id, epoch, self.slot
        task = self.tasks.at(slot_place(*which), slot_key(*which))
        task = msgspec.structs.replace(task, slot=(epoch, self.slot))
        texts = [text.replace("$", task.answer or "") for text in texts]
        rollouts = []
        for text, score in zip(texts, self.tasks.score([task] * len(texts), [""] * len(texts), texts), strict=True):
            ids = self.policy.encode_completion(text, True) or [1]
            rollouts.append(
                Rollout(
                    [Turn(ids, [-0.5] * len(ids), True, text)],
                    score.extracted,
                    score.rewards,
                    score.reward,
                    score.correct,
                )
            )
        group = Group(task, self.policy.encode(task.question), rollouts, created=self.time)
        for name, value in changes.items():
            setattr(group, name, value)
        return group

    def batch(self, *groups: Group, identity: Identity = PEER) -> RolloutBatch:
        """What a publisher makes of `groups`, to be tampered with."""
        captured: list[bytes] = []
        publisher = self.publisher(identity, send=lambda data: captured.append(data) or True)
        publisher.publish(groups or [self.group(identity=identity)])
        publisher.flush()
        (data,) = captured
        return msgspec.msgpack.decode(data[96:], type=RolloutBatch)


def edit(batch: RolloutBatch, rollouts: Sequence[SharedRollout] | None = None, **changes: Any) -> RolloutBatch:
    """`batch` with its only group changed."""
    (group,) = batch.groups
    if rollouts is not None:
        changes["rollouts"] = list(rollouts)
    changed: SharedGroup = msgspec.structs.replace(group, **changes)
    return msgspec.structs.replace(batch, groups=[changed])


def texts(*values: str) -> list[SharedRollout]:
    return [SharedRollout.of(value, True) for value in values]


def rejected(receiver: Receiver) -> dict[str, float]:
    """Reason -> count, without the prefix."""
    found = receiver.metrics().items()
    return {name.removeprefix("swarm/rejected/"): n for name, n in found if name.startswith("swarm/rejected/")}
