"""Join a cohort (the peers whose weights can be averaged with this node's), and leave it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from swarm_node.averaging.averager import Averager, CohortPlace, cohort_id, rhythm
from swarm_node.averaging.cohort_averager import CohortAverager
from swarm_node.averaging.cohort_weights import LateJoin
from swarm_node.averaging.fragments import Fragments
from swarm_node.averaging.pair_averager import PairAverager
from swarm_node.config import AveragingConfig
from swarm_node.errors import UserError
from swarm_node.say import Detail, Say
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.tensors import AVERAGE_METHOD, WEIGHTS_METHOD
from swarm_protocol.transports.base import Accepted, Transport

VALUES_PER_S = 100_000
"""Weights that a node sends in a second, in the mean: 0.1 MB with 8 bits each, a tenth of a usual home connection."""


def outer_period(period_s: float, weights: Mapping[str, Tensor]) -> float:
    """The least multiple of the swarm's `period_s` at which a cohort may exchange `weights` so often. All its members
    compute the same."""
    values = sum(weight.numel() for weight in weights.values())
    return period_s * max(1, math.ceil(values / (VALUES_PER_S * period_s)))


def join_cohort(
    config: AveragingConfig,
    swarm: str,
    period_s: float,
    start: str,
    weights: Mapping[str, Tensor],
    transport: Transport,
    now: Callable[[], float],
    say: Say,
    changed: Callable[[], None],
    probe: Callable[[], float | None],
    what: str = "weights",
) -> LateJoin:
    """Join the cohort of `weights`, which all its members began with as `start` says. `period_s` is the swarm's, for
    small weights; see `outer_period`. The rest is as for `Averager`.

    Raises UserError if the weights have fewer tensors than `averaging.fragments`."""
    try:
        cohort = cohort_of(config, swarm, start, weights)
    except ValueError as error:
        raise UserError(f"averaging.fragments = {config.fragments} is too many: {error}") from error
    period_s = outer_period(period_s, weights)
    place = CohortPlace(swarm, cohort, transport.peer_id, period_s)
    how = f"{config.method}, {rhythm(config, period_s)}, {config.codec}"
    say(Detail(f"averaging {what} with cohort {cohort[:8]}: {how}"))
    averager = make_averager(config, place, weights, transport, now, say, changed, probe)
    return LateJoin(averager, random.Random(f"{cohort}/{transport.peer_id}"))


def make_averager(config: AveragingConfig, *args: Any, **kwargs: Any) -> Averager:
    """The averager for `config.method`; further arguments as for `Averager`."""
    return (PairAverager if config.method == "noloco" else CohortAverager)(config, *args, **kwargs)


def cohort_of(config: AveragingConfig, swarm: str, start: str, weights: Mapping[str, Tensor]) -> str:
    """The `cohort_id` of `weights`. Raises ValueError if there are fewer tensors than fragments."""
    return cohort_id(Fragments(weights, config.fragments).layout, start, swarm, config)


def cohorts_of(tensors: Mapping[str, Tensor], start: str, swarm: str) -> dict[str, tuple[Fragments, str]]:
    """Cohort id -> fragments and method, for all settings with which peers may average `tensors` that began as `start`.

    Cards tell only the id, a hash. A node that averages nothing itself, but fetches weights, finds the settings by
    trying all of them, at most 512, rather than by one more field in every card."""
    cuts = [Fragments(tensors, count) for count in range(1, min(64, len(tensors)) + 1)]
    ways: list[dict[str, Any]] = [{"method": "noloco", "beta": 0.7, "gamma": gamma} for gamma in (0.7, 0.6)]
    ways += [{"method": way, "codec": codec} for way in ("diloco", "per_step") for codec in ("float32", "8bit", "4bit")]
    configs = [AveragingConfig(**way) for way in ways]
    return {cohort_id(cut.layout, start, swarm, way): (cut, way.method) for cut in cuts for way in configs}


def leave_cohort(transport: Transport) -> None:
    """Refuse all further exchanges of weights."""

    def refuse(peer: str, head: bytes, size: int) -> Accepted:
        raise RemoteProtocolError("cohort", "nothing is averaged here")

    for method in (AVERAGE_METHOD, WEIGHTS_METHOD):
        transport.accept(method, refuse)
