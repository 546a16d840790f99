"""Groups as admission hands them over, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.messages import TaskName

NOW = 1_800_000_000.0


def group(
    rewards: Sequence[float | None] = (1.0, 0.0),
    peer: str | None = "peer",
    label: str = "gcd",
    created: float = NOW,
    tokens: int = 3,
) -> Group:
    task = Task(TaskName("gcd", "0" * 16, "test 1", 0, 0), label, "question", "answer", slot=(1, 2))
    rollouts = [
        Rollout([Turn([5] * tokens, [], True, "text")], rewards={"checker": r}, reward=r or 0.0, correct=r == 1.0)
        for r in rewards
    ]
    return Group(task, [5, 6], rollouts, peer=peer, created=created)
