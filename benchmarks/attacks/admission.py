"""What admission costs and what it lets in, without a network: answers of the largest legal size, and one task slot
answered four hundred times.

    python benchmarks/attacks/admission.py [MODEL]      in the checkout that PYTHONPATH names first

Prints JSON. It imports nothing of `benchmarks`, so that it measures any checkout.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from swarm_node.config import NodeConfig
from swarm_node.policy.loading import load_policy
from swarm_node.sharing import Receiver, ReplayBuffer
from swarm_node.tasks.one_turn import prompt_digest
from swarm_node.tasks.taskset import load_tasks, slot_key, slot_place
from swarm_node.types import Sampling
from swarm_protocol.codec import sign_batch
from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import Manifest, ManifestTask
from swarm_protocol.messages import PROTOCOL_VERSION, RolloutBatch, SharedGroup, SharedRollout, SharedSampling
from swarm_protocol.topics import epoch_at

GROUPS = 8
"""Of each kind of text."""
SLOTS, SECONDS, PER_SECOND = 4096, 20, 20
Text = Callable[[random.Random, int], str]
TEXTS: dict[str, Text] = {
    "letters": lambda rng, n: "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(n)),
    "one letter": lambda rng, n: "a" * n,
    "digits": lambda rng, n: "1" * n,
    "spaces": lambda rng, n: " " * n + "1",
    "emoji": lambda rng, n: "🙂" * n,
    "hangul": lambda rng, n: "".join(chr(rng.randrange(0xAC00, 0xD7A3)) for _ in range(n)),
    "combining": lambda rng, n: "e" + "\u0301" * (n - 1),
    "short honest": lambda rng, n: str(rng.randrange(99)),
}


class World:
    """A receiver of the set `small` with the starter, and a clock that is set by hand."""

    def __init__(self, model: str) -> None:
        config = NodeConfig.model_validate({"tasks": ["small"], "policy": {"model": model}})
        self.policy = load_policy(config.policy, config.rollouts, lambda sentence: None)
        self.tasks = load_tasks(["small"], config.rewards)
        self.manifest = Manifest("attacked", [ManifestTask(env="small")])
        self.now = 1_800_000_000.0
        self.questions: set[str] = set()
        pool = ReplayBuffer(config.sharing, lambda: self.now)

        def add(group: Any) -> str | None:
            refused = pool.add(group)
            if refused is None:
                self.questions.add(group.task.question)
            return refused

        self.receiver = Receiver(
            "me",
            self.manifest,
            self.policy,
            Sampling(128),
            self.tasks,
            config.sharing,
            add,
            lambda: self.now,
            lambda sentence: None,
        )

    def task(self, peer: str, slot: int) -> Any:
        which = self.manifest.swarm_id, peer, epoch_at(self.now), slot
        return self.tasks.at(slot_place(*which), slot_key(*which))

    def batch(self, me: Identity, number: int, groups: list[SharedGroup], tokens: int = 128) -> bytes:
        sampling = SharedSampling(tokens, 1.0, 1.0)
        swarm = self.manifest.swarm_id
        return sign_batch(
            RolloutBatch(PROTOCOL_VERSION, swarm, number, self.now, "0" * 16, "0" * 16, sampling, groups), me
        )

    def group(self, me: Identity, slot: int, texts: list[str]) -> SharedGroup:
        task = self.task(me.peer_id, slot)
        rollouts = [SharedRollout.of(text, True) for text in texts]
        return SharedGroup(task.name, epoch_at(self.now), slot, prompt_digest(task.question), 1, rollouts)


def largest(world: World, make: Text, rng: random.Random) -> dict[str, Any]:
    """Main-thread milliseconds for a group of 16 texts, as long as a message can carry."""
    me, cost = Identity.generate(), 0.0
    chars = world.manifest.limits.max_text_chars
    for slot in range(GROUPS):
        while True:
            try:
                texts = [make(rng, chars)[:chars] for _ in range(16)]
                data = world.batch(me, slot, [world.group(me, slot, texts)])
                break
            except LocalProtocolError:
                chars = int(chars * 0.8)
        world.receiver.take(data)
        began = time.thread_time()
        world.receiver.admit()
        cost += time.thread_time() - began
    account = world.receiver.by_peer().get(me.peer_id, {})
    return {
        "characters": chars,
        "ms_a_group": round(1000 * cost / GROUPS, 3),
        "rejected": account.get("rejected", {}),
        "muted": account.get("muted", False),
    }


def one_slot(world: World) -> dict[str, Any]:
    """Groups admitted for the slot with the longest question, answered anew 20 times a second."""
    me = Identity.generate(b"x" * 32)
    slot = max(range(SLOTS), key=lambda slot: len(world.task(me.peer_id, slot).question))
    right, offered = world.task(me.peer_id, slot).answer, 0
    world.questions.clear()
    epoch = epoch_at(world.now)
    for _ in range(SECONDS):
        groups = []
        for _ in range(PER_SECOND):
            offered += 1
            groups.append(world.group(me, slot, [right] * 7 + [str(10_000 + offered)]))
        assert epoch_at(world.now) == epoch
        world.receiver.take(world.batch(me, offered, groups, tokens=4))
        world.receiver.admit()
        world.receiver.admit()
        world.now += 1
    account = world.receiver.by_peer()[me.peer_id]
    return {"offered": offered, "admitted": account["admitted"], "rejected": account["rejected"]}


def main() -> None:
    torch.set_num_threads(1)
    model = sys.argv[1] if len(sys.argv) > 1 else "starter"
    rng = random.Random(1)
    largest(World(model), TEXTS["short honest"], rng)  # the first is slower: tables are made
    cost = {name: largest(World(model), make, rng) for name, make in TEXTS.items()}
    print(json.dumps({"cost": cost, "one_slot": one_slot(World(model))}), flush=True)


if __name__ == "__main__":
    main()
