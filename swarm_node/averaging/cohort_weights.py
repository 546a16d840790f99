"""All trained weights of a peer, for any peer that asks for them in the name of its cohort.

    asker --(head: cohort)--> member       member --(head: its version | all fragments, float32)--> asker

`fetch` asks one peer; `collect_weights` asks many, a few at a time. A body that has arrived has the right size, the
right sha256 and finite values; nothing here can tell whether the values are any good.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from protocol.codec import version_for
from protocol.errors import ProtocolError, RemoteProtocolError
from protocol.tensors import WEIGHTS_METHOD, WeightsHead, decode_head, encode_head
from protocol.transports.base import Outgoing, Sink, Transport
from protocol.transports.transfer import Donor, Pace, Retry, outcome, reason_of
from swarm_node.averaging.averager import cohort_id
from swarm_node.averaging.codecs import BodyDecoder, Readers
from swarm_node.averaging.fragments import Fragments
from swarm_node.config import AveragingConfig

PACE = Pace(30.0, 2**17)  # both sides give up a transfer that is slower than a megabit a second on the whole
RETRY = Retry(busy_s=5.0, accident_s=5.0, max_accidents=3)
MAX_VERSION = 2**32  # an update a second for 136 years: no honest peer claims more
AT_ONCE = 3  # peers whose weights `collect_weights` fetches at the same time; all of them are in memory
COLLECT_LOOP_S = 0.1


@dataclass(eq=False)
class WeightsFetch:
    """Weights on their way from a peer."""

    peer: str
    version: int = 0  # optimiser updates behind them, as the peer says when it answers
    done: Future[list[Tensor]] | None = None  # the fragments, float32; fails with ProtocolError


def fetch(
    transport: Transport,
    place: tuple[str, str],
    peer: str,
    sizes: Sequence[int],
    least: int,
    have: int = 0,
    seconds: float | None = None,
) -> WeightsFetch:
    """Fetch the weights of `peer`, fragments of `sizes` values, in the background. `place` is (swarm, cohort). They
    must be of version `least` or later; `have` is this node's version. They may take `seconds`, or what `PACE` allows.
    """
    result, bodies = WeightsFetch(peer), Readers([BodyDecoder("float32", n) for n in sizes])

    def answered(head: bytes, size: int) -> Sink:
        theirs = decode_head(head, WeightsHead)
        check_place(theirs, place)
        if size != bodies.size:
            raise RemoteProtocolError("size", f"{size} bytes for {bodies.size}")
        if not least <= theirs.version <= MAX_VERSION:
            raise RemoteProtocolError("claim", f"{theirs.version} updates, where there should be {least}")
        result.version = theirs.version
        return bodies.write

    ours = Outgoing(weights_head(transport, peer, place, have))
    limit = PACE.seconds(bodies.size)
    limit = limit if seconds is None else min(seconds, limit)
    result.done = outcome(transport.exchange(peer, WEIGHTS_METHOD, ours, answered, limit), bodies.values)
    return result


def weights_head(transport: Transport, peer: str, place: tuple[str, str], version: int) -> bytes:
    """The head that either side sends to `peer`."""
    return encode_head(WeightsHead(version_for(peer, transport.members()), *place, version))


def check_place(head: WeightsHead, place: tuple[str, str]) -> None:
    """Raise RemoteProtocolError (cohort) unless `head` is of this (swarm, cohort)."""
    if (head.swarm, head.cohort) != place:
        raise RemoteProtocolError("cohort", f"{head.cohort} of swarm {head.swarm[:16]}")


# --------------------------------------------------------------------- of a whole cohort


def collect_weights(
    transport: Transport,
    swarm: str,
    cohort: str,
    versions: Mapping[str, int],
    sizes: Sequence[int],
    keep: Callable[[str, int, list[Tensor]], None],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> dict[str, str]:
    """Fetch the weights of the peers in `versions` (peer -> version on its card) within `seconds`. `keep` is called
    with (peer, version, fragments) as they arrive. Peers that are busy are asked again.

    Peers are asked in random order, each for its share of the time that is left, so that slow ones do not keep the
    others from being asked. Slow ones have the time that is left when all others have been asked.

    Returns peer -> why there are no weights of it.
    """
    end = clock() + seconds
    waiting = {peer: Donor() for peer in (rng or random.Random()).sample(list(versions), len(versions))}
    failed: dict[str, str] = {}
    running: list[tuple[WeightsFetch, Donor]] = []
    while running or (waiting and clock() < end):
        for one, donor in [pair for pair in running if pair[0].done is not None and pair[0].done.done()]:
            running.remove((one, donor))
            try:
                assert one.done is not None
                values = one.done.result()
            except ProtocolError as error:
                reason, detail = reason_of(error)
                failed[one.peer] = f"{reason} {detail}".rstrip()
                donor.failed(reason, clock(), RETRY)
                if donor.next_at < end:
                    waiting[one.peer] = donor
            else:
                failed.pop(one.peer, None)
                keep(one.peer, one.version, values)
        now = clock()
        due = [peer for peer, donor in waiting.items() if donor.next_at <= now < end]
        share = (end - now) * AT_ONCE / max(1, len(running) + len(waiting))
        for peer in sorted(due, key=lambda peer: waiting[peer].accidents)[: AT_ONCE - len(running)]:
            limit = min(end - now, max(PACE.grace_s, share))
            one = fetch(transport, (swarm, cohort), peer, sizes, max(1, versions[peer]), seconds=limit)
            running.append((one, waiting.pop(peer)))
        if running or waiting:
            sleep(COLLECT_LOOP_S)
    return {peer: failed.get(peer, "not asked in time") for peer in versions if peer in failed or peer in waiting}


def cohorts_of(tensors: Mapping[str, Tensor], start: str, swarm: str) -> dict[str, tuple[Fragments, str]]:
    """Cohort id -> fragments and method, for all settings with which peers in `swarm` may average `tensors`
    that began with `start`.

    Cards tell only the id, a hash. A node that averages nothing itself, but fetches weights, finds the settings by
    trying all of them, at most 512, rather than by one more field in every card."""
    cuts = [Fragments(tensors, count) for count in range(1, min(64, len(tensors)) + 1)]
    ways: list[dict[str, Any]] = [{"method": "noloco", "beta": 0.7, "gamma": gamma} for gamma in (0.7, 0.6)]
    ways += [{"method": way, "codec": codec} for way in ("diloco", "per_step") for codec in ("float32", "8bit", "4bit")]
    configs = [AveragingConfig(**way) for way in ways]
    return {cohort_id(cut.layout, start, swarm, way): (cut, way.method) for cut in cuts for way in configs}
