"""Replicas: copies of a stage's weights in the memory of another peer of the crew; which peer keeps which, and when
it is renewed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from torch import Tensor

from swarm_node.config import NodeConfig
from swarm_node.pipeline.compute.partition import layer_of
from swarm_node.pipeline.membership.actions import Spans
from swarm_node.pipeline.recovery.weight_transfer import PER_PEER, WeightTransfer, size_of
from swarm_node.say import Warned
from swarm_protocol.crew import Plan
from swarm_protocol.errors import ProtocolError

MANY_STAGES, EVERY = 4, 20
"""With so many stages and all weights trained, replicas are renewed every so many updates; else after each update."""
OFFER_WAIT_S = 0.1
"""First pause between two questions whether an offered stage has arrived; also the shortest wait for an answer."""
OFFER_BACKOFF, OFFER_PAUSE_S = 1.05, 1.0
"""Each pause is longer by this factor, up to so many seconds: fewer than MAX_ASKS questions in two minutes."""
ANSWER_S = 2.0  # a peer that is asked to keep a stage answers within so long, or another peer is asked


def replicated(config: NodeConfig, stage: int) -> Literal["whole", "rest", ""]:
    """The part of a stage that a neighbour keeps a replica of.

    `rest` means the tensors of no layer, where a copy of the neighbour replaces the layers (CheckFree+)."""
    pipeline = config.pipeline
    replaced, end = pipeline.swap and pipeline.stages >= MANY_STAGES, stage in (0, pipeline.stages - 1)
    whole = {"auto": not replaced, "on": True, "ends": end, "off": False}[pipeline.replica]
    return "whole" if whole else "rest" if pipeline.swap and end else ""


def replica_every(config: NodeConfig, lora: bool) -> int:
    """Updates from one renewal of a replica to the next."""
    return config.pipeline.replica_every or (1 if lora or config.pipeline.stages < MANY_STAGES else EVERY)


def kept_for(plan: Plan, me: str) -> list[int]:
    """Stages of other peers whose replica this peer keeps."""
    holders = msgspec.structs.replace(plan, spares=())
    rows = enumerate(plan.assignments)
    return [stage for stage, row in rows if takers(holders, stage, row.peer)[:1] == [me]]


def keeper(stage: int, count: int) -> int:
    """The stage whose holder keeps the replica of `stage`, unless it holds both: the next one or, for the last stage,
    the one before."""
    return stage + 1 if stage < count - 1 else max(0, count - 2)


def takers(plan: Plan, stage: int, me: str) -> list[str]:
    """Peers that may keep `stage` when this peer, its holder, leaves, first choice first.

    The order is: the keeper of its replica, the other neighbour, the other holders, spares."""
    count = len(plan.assignments)
    stages = [keeper(stage, count), *([stage - 1] if stage else []), *range(count)]
    peers = [*(plan.assignments[one].peer for one in stages), *plan.spares]
    return [peer for peer in dict.fromkeys(peers) if peer != me]


@dataclass(eq=False)
class Replicas:
    """Keeps the replicas that are this peer's to keep; `WeightTransfer.replicas` holds them."""

    transfer: WeightTransfer
    shapes_of: Callable[[int, Spans], dict[str, Tensor]]  # names and shapes of what a stage trains
    say: Callable[[str], None]
    asked: dict[int, int] = field(default_factory=dict)
    """Stages that a leaving peer has asked this one to keep -> mark of the plan by which it held them. They are kept
    until there is an update by another plan."""
    cramped: set[int] = field(default_factory=set)  # stages whose replica does not fit here, as was said

    def renew(self, plan: Plan, config: NodeConfig, lora: bool, updates: int) -> None:
        """Forget replicas that are not this peer's to keep, and fetch the others anew where they are due.

        updates  that the stages held here have made"""
        every = replica_every(config, lora)
        kept = {stage: part for stage in kept_for(plan, self.transfer.me) if (part := replicated(config, stage))}
        for stage, mark in self.asked.copy().items():  # another thread adds to it
            if mark != plan.mark:
                self.asked.pop(stage, None)
        self.transfer.forget(kept.keys() | self.asked.keys())
        for stage, part in kept.items():
            known = self.transfer.replicas.get(stage)
            if known is not None and known.updates <= updates < known.updates + every:
                continue
            like = self.shapes_of(stage, plan.spans)
            if part == "rest":
                like = {name: tensor for name, tensor in like.items() if layer_of(name) is None}
            size = size_of(like.values())
            if known is None and 0 < self.transfer.room() < 2 * size:  # the rest is for training
                if stage not in self.cramped:
                    self.say(Warned(f"no replica of stage {stage} is kept here: its {size / 2**30:.2g} GiB do not fit"))
                self.cramped.add(stage)
                continue
            self.transfer.keep(stage, plan.assignments[stage].peer, like)


def offer_stages(
    transfer: WeightTransfer, plan: Plan, updates: Mapping[int, int], left_s: Callable[[], float]
) -> dict[int, tuple[str, str]]:
    """Before this peer leaves: have other peers of the crew keep the stages that were trained here.

    updates  of each stage held here
    left_s   seconds that this may still take

    Returns, by stage, the peer that keeps it and "", or "" and why there is none."""
    asked = {stage: takers(plan, stage, transfer.me) for stage, made in updates.items() if made}
    found = {stage: ("", "there is no time") for stage, peers in asked.items() if peers}
    pause = OFFER_WAIT_S
    while asked and left_s() > 0:
        for stage, peers in list(asked.items())[:PER_PEER]:  # no peer is given more at a time
            if not peers:
                del asked[stage]
                continue
            timeout = min(ANSWER_S, max(OFFER_WAIT_S, left_s()))
            try:
                if transfer.offer(peers[0], stage, updates[stage], timeout).result(timeout) >= updates[stage]:
                    found[stage] = peers[0], ""
                    del asked[stage]
            except (ProtocolError, NotYet) as error:
                found[stage] = "", str(error) or "no answer"
                del peers[0]
        time.sleep(min(pause, max(0.0, left_s())))
        pause = min(OFFER_BACKOFF * pause, OFFER_PAUSE_S)
    return found
