"""What is done so that little is lost when a node leaves: a last exchange of weights, checkpoints elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm_node.config import NodeConfig
from swarm_node.runtime.console import say
from swarm_node.runtime.preemption import cloud_of, reach
from swarm_node.storage.mirror import Mirror
from swarm_node.storage.rundir import RunDir

if TYPE_CHECKING:  # alone, a run loads nothing of the network
    from swarm_node.averaging import Averager
    from swarm_node.swarm.join import JoinedSwarm

WAIT_S = 0.5
"""Longest between two looks whether others' weights have arrived, where training waits for them."""
PART_S = 4.0
"""Left of the time to leave in, after a last exchange of weights: to save what it made of them, and say goodbye."""
GOODBYE_S = 2.5
"""Left of it after the last checkpoint was copied elsewhere."""
COPY_S = 600.0
"""Longest that a run which is over waits for that."""


def last_exchange(averager: Averager, average: Callable[[], object], left_s: Callable[[], float]) -> bool:
    """Have `average` go on until the exchange that is due, or under way, is over, and what was learned since is handed
    over, while there is time: whether any exchange came about."""
    exchanges = averager.counts["exchanges"]
    averager.drain(max(0.0, left_s() - PART_S))
    average()
    while averager.under_way() and left_s() > PART_S:
        averager.woken.wait(WAIT_S)
        averager.woken.clear()
        average()
    return averager.counts["exchanges"] != exchanges


def mirror_of(config: NodeConfig, run: RunDir, swarm: JoinedSwarm | None) -> Mirror | None:
    """Where checkpoints are copied to, if anywhere. UserError if that cannot be."""
    if not config.checkpoints.to:
        return None
    place, peer = ("local", "") if swarm is None else (swarm.manifest.swarm_id, swarm.identity.peer_id)
    return Mirror(config.checkpoints.to, place, config.name or run.path.resolve().name, peer, run.path, say)


def say_reach(config: NodeConfig, state_bytes: int | None) -> None:
    """How much can leave this machine within the notice of its cloud, if it is known to have one."""
    cloud = cloud_of(config.spot)
    if cloud is not None:
        say(reach(cloud, config.spot.uplink_mbit, state_bytes))
