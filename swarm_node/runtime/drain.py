"""Draining: a node that leaves hands over its weights and its last checkpoint, so that little is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from swarm_node.config import NodeConfig
from swarm_node.observability.health import Health
from swarm_node.runtime.console import say
from swarm_node.runtime.preemption import cloud_of, reach
from swarm_node.runtime.shutdown import Stopper
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.mirror import Accept, Mirror
from swarm_node.storage.rundir import RunDir

if TYPE_CHECKING:  # alone, a run loads nothing of the network
    from swarm_node.averaging.averager import Averager
    from swarm_node.node import Node
    from swarm_node.runtime.records import RunRecords
    from swarm_node.runtime.resume import RunState
    from swarm_node.swarm.join import JoinedSwarm

WEIGHTS_CHECK_S = 0.5  # longest time between two looks for others' weights, while training waits for them
AFTER_EXCHANGE_S = 4.0  # time kept free after a last exchange of weights, to save its result and leave the swarm
AFTER_COPY_S = 2.5  # time kept free after the last checkpoint was copied elsewhere, to leave the swarm
LAST_COPY_S = 600.0  # longest time that a finished run waits for the copy of its last checkpoint


def last_exchange(averager: Averager, average: Callable[[], object], left_s: Callable[[], float]) -> bool:
    """Call `average` until the exchange that is due or under way is over and the newest weights are handed over, or
    time is up. Returns whether any exchange took place."""
    exchanges = averager.counts["exchanges"]
    averager.drain(max(0.0, left_s() - AFTER_EXCHANGE_S))
    average()
    while averager.under_way() and left_s() > AFTER_EXCHANGE_S:
        averager.woken.wait(WEIGHTS_CHECK_S)
        averager.woken.clear()
        average()
    return averager.counts["exchanges"] != exchanges


def average_last(node: Node, state: RunState, stop: Stopper) -> None:
    """Finish the exchange of weights that is due or under way, if there is time, and save the averaged weights. The
    cohort then has what this node learned since the last exchange."""
    if node.averager is not None and last_exchange(node.averager, node.average, lambda: stop.left_s):
        say("averaged a last time", "stop")
        state.count_last()
        state.save(anew=True)


def measure_last(state: RunState, records: RunRecords, stop: Stopper) -> None:
    """Measure the held-out figures of a run that its owner stopped, if that is known to take a moment."""
    round = state.node.round
    found = {} if stop.hurried else state.held_out.measure_stopped(round, stop.left_s - AFTER_COPY_S)
    if found:
        records.evaluated(round, found)
        state.save()


def open_mirror(
    config: NodeConfig,
    run: RunDir,
    swarm: JoinedSwarm | None,
    stop: Stopper,
    accept: Accept = lambda state: None,
    crew: bool = False,
) -> Mirror | None:
    """The copies of checkpoints at `checkpoints.to`, restored as `Mirror.restore` does; None if it is not set. Raises
    UserError if it cannot be used, and StopRequested."""
    if not config.checkpoints.to:
        return None
    place, peer = ("local", "") if swarm is None else (swarm.manifest.swarm_id, swarm.identity.peer_id)
    name, said = config.name or run.path.resolve().name, partial(say, kind="checkpoint")
    mirror = Mirror(config.checkpoints.to, place, name, peer, run.path, said)
    with stop.allowed():
        mirror.restore(accept, crew)
    mirror.start()
    return mirror


def show_saving(health: Health, checkpoints: CheckpointStore, mirror: Mirror | None) -> None:
    """Show the ages of the last checkpoint and of its last copy elsewhere at /metrics, and a failure at /healthz."""
    health.trouble = lambda: checkpoints.failure or ""
    health.measures["since_checkpoint_seconds"] = lambda: checkpoints.age_s
    if mirror is not None:
        health.measures["since_copy_seconds"] = lambda: mirror.age_s


def finish_mirror(mirror: Mirror | None, stop: Stopper) -> None:
    """Copy the last checkpoint, as long as there is time."""
    if mirror is not None:
        mirror.finish(LAST_COPY_S, lambda: stop.left_s - AFTER_COPY_S)


def say_reach(config: NodeConfig, state_bytes: int | None) -> None:
    """Say how much data can leave this machine within the notice of its cloud, if that gives one."""
    cloud = cloud_of(config.spot)
    if cloud is not None:
        say(reach(cloud, config.spot.uplink_mbit, state_bytes))
