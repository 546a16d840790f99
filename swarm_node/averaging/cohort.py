"""Join a cohort (the peers whose weights can be averaged with this node's), and leave it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from protocol.errors import RemoteProtocolError
from protocol.tensors import AVERAGE_METHOD, WEIGHTS_METHOD
from protocol.transports.base import Accepted, Transport
from swarm_node.averaging.averager import Averager, CohortPlace, cohort_id, rhythm
from swarm_node.averaging.cohort_averager import CohortAverager
from swarm_node.averaging.fragments import Fragments
from swarm_node.averaging.late_join import LateJoin
from swarm_node.averaging.pair_averager import PairAverager
from swarm_node.config import AveragingConfig
from swarm_node.errors import UserError


def join_cohort(
    config: AveragingConfig,
    swarm: str,
    period_s: float,
    start: str,
    weights: Mapping[str, Tensor],
    transport: Transport,
    now: Callable[[], float],
    say: Callable[[str], None],
    changed: Callable[[], None],
    probe: Callable[[], float | None],
    what: str = "weights",
) -> LateJoin:
    """Join the cohort of `weights`, which all its members began with as `start` says. The rest is as for `Averager`.

    Raises UserError if the weights have fewer tensors than `averaging.fragments`."""
    try:
        cohort = cohort_of(config, swarm, start, weights)
    except ValueError as error:
        raise UserError(f"averaging.fragments = {config.fragments} is too many: {error}") from error
    place = CohortPlace(swarm, cohort, transport.peer_id, period_s)
    say(f"averaging {what} with cohort {cohort[:8]}: {config.method}, {rhythm(config, period_s)}, {config.codec}")
    averager = make_averager(config, place, weights, transport, now, say, changed, probe)
    return LateJoin(averager, random.Random(f"{cohort}/{transport.peer_id}"))


def make_averager(config: AveragingConfig, *args: Any, **kwargs: Any) -> Averager:
    """The averager for `config.method`; further arguments as for `Averager`."""
    kind = PairAverager if config.method == "noloco" else CohortAverager
    return kind(config, *args, **kwargs)


def cohort_of(config: AveragingConfig, swarm: str, start: str, weights: Mapping[str, Tensor]) -> str:
    """The `cohort_id` of `weights`. Raises ValueError if there are fewer tensors than fragments."""
    return cohort_id(Fragments(weights, config.fragments).layout, start, swarm, config)


def leave_cohort(transport: Transport) -> None:
    """Refuse all further exchanges of weights."""
    for method in (AVERAGE_METHOD, WEIGHTS_METHOD):
        transport.accept(method, _refuse)


def _refuse(peer: str, head: bytes, size: int) -> Accepted:
    raise RemoteProtocolError("cohort", "nothing is averaged here")
