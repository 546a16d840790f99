"""All trained weights of a peer, for whoever asks for them in the name of its cohort.

    asker --(head: cohort)--> member       member --(head: its version | all fragments, float32)--> asker

`fetch` asks one peer; `collect` asks many, a few at a time, and hands on what has arrived. Anybody may ask, member or
not. A body has the right size, sha256 and finite values; whether its values are any good nothing here can tell.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from protocol.codec import version_for
from protocol.errors import ProtocolError, RemoteProtocolError
from protocol.tensors import WEIGHTS_METHOD, WeightsHead, open_weights_head, seal_head
from protocol.transports.base import Outgoing, Sink, Transport
from swarm_node.averaging.averager import cohort_id, reason_of
from swarm_node.averaging.codecs import Decoder, Readers
from swarm_node.averaging.fragments import Fragments
from swarm_node.config import AveragingConfig

BYTES_PER_S = 2**17
"""Both peers give up a weight transfer that is slower than a megabit a second on the whole."""
GRACE_S = 30.0
AGAIN_S = 5.0
"""Whoever is giving its weights to somebody else is asked again this much later."""
MAX_VERSION = 2**32
"""An update a second for 136 years: who claims more lies."""
AT_ONCE = 3
"""Peers that `collect` has weights from at the same time, all of which are in memory."""
TRIES = 3
"""How often a peer is asked that cannot be reached, or goes away in the middle."""
GONE = frozenset({"unreachable", "torn"})
"""Reasons that say so."""
TICK_S = 0.1


@dataclass(eq=False)
class Fetch:
    """A weight transfer that is under way."""

    peer: str
    bodies: Readers
    version: int = 0
    done: Future[None] | None = None


def longest_s(size: int) -> float:
    """Seconds that a weight transfer of `size` bytes may take."""
    return GRACE_S + size / BYTES_PER_S


def fetch(
    transport: Transport,
    swarm: str,
    cohort: str,
    peer: str,
    sizes: Sequence[int],
    least: int,
    have: int = 0,
    seconds: float | None = None,
) -> Fetch:
    """Have the weights of `peer` sent: fragments of `sizes` values, of version `least` or more, where this node has
    `have`. It may take `seconds`, or as long as any may."""
    result = Fetch(peer, Readers([Decoder("float32", n) for n in sizes]))

    def answered(head: bytes, size: int) -> Sink:
        theirs = open_weights_head(head)
        check_place(theirs, swarm, cohort)
        if size != result.bodies.size:
            raise RemoteProtocolError("size", f"{size} bytes for {result.bodies.size}")
        if not least <= theirs.version <= MAX_VERSION:
            raise RemoteProtocolError("claim", f"{theirs.version} updates, where there should be {least}")
        result.version = theirs.version
        return result.bodies.write

    ours = Outgoing(weights_head(transport, peer, swarm, cohort, have))
    limit = longest_s(result.bodies.size)
    result.done = transport.exchange(
        peer, WEIGHTS_METHOD, ours, answered, limit if seconds is None else min(seconds, limit)
    )
    return result


def weights_head(transport: Transport, peer: str, swarm: str, cohort: str, version: int) -> bytes:
    """To `peer`, of either side."""
    return seal_head(WeightsHead(version_for(peer, transport.members()), swarm, cohort, version))


def check_place(head: WeightsHead, swarm: str, cohort: str) -> None:
    """Raises RemoteProtocolError: cohort."""
    if (head.swarm, head.cohort) != (swarm, cohort):
        raise RemoteProtocolError("cohort", f"{head.cohort} of swarm {head.swarm[:16]}")


# --------------------------------------------------------------------- of a whole cohort


def collect(
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
    """Fetch the weights of the peers in `versions` (peer -> what its card says), and call `keep` with (peer, version,
    fragments) of each that has arrived. Takes `seconds` at most; peers that are busy are asked again as long.

    Peers are asked in random order, each for its share of the time that is left, so that a few that trickle do not
    keep all others from being asked; they have what is left when all others have been.

    Returns peer -> why there are none of it.
    """
    end = clock() + seconds
    order = (rng or random.Random()).sample(list(versions), len(versions))
    ask_at = dict.fromkeys(order, clock())
    tries: Counter[str] = Counter()
    failed: dict[str, str] = {}
    running: list[Fetch] = []
    ask = partial(fetch, transport, swarm, cohort)
    while running or (ask_at and clock() < end):
        for one in [one for one in running if one.done is not None and one.done.done()]:
            running.remove(one)
            try:
                assert one.done is not None
                one.done.result()
                values = one.bodies.values()
            except (ProtocolError, CancelledError) as error:
                reason, detail = reason_of(error)
                failed[one.peer] = f"{reason} {detail}".rstrip()
                tries[one.peer] += reason != "busy"
                if reason == "busy" or (reason in GONE and tries[one.peer] < TRIES):
                    ask_at[one.peer] = clock() + AGAIN_S
            else:
                failed.pop(one.peer, None)
                keep(one.peer, one.version, values)
        now = clock()
        due = sorted((peer for peer, at in ask_at.items() if at <= now < end), key=lambda peer: tries[peer])
        share = (end - now) * AT_ONCE / max(1, len(running) + len(ask_at))
        for peer in due[: AT_ONCE - len(running)]:
            del ask_at[peer]
            limit = min(end - now, max(GRACE_S, share))
            running.append(ask(peer, sizes, max(1, versions[peer]), seconds=limit))
        if running or ask_at:
            sleep(TICK_S)
    return {peer: failed.get(peer, "not asked in time") for peer in versions if peer in failed or peer in ask_at}


def cohorts_of(tensors: Mapping[str, Tensor], start: str, swarm: str) -> dict[str, tuple[Fragments, str]]:
    """Id -> fragments and method, of every cohort in `swarm` that trains `tensors` and began with `start`: there are a
    few hundred, by settings that whoever only wants the weights does not know. As `cohort_id` tells them apart."""
    return {
        cohort_id(fragments.layout, start, swarm, config): (fragments, config.method)
        for fragments in _ways_to_cut(tensors)
        for config in _ways_to_average()
    }


def _ways_to_cut(tensors: Mapping[str, Tensor]) -> Iterator[Fragments]:
    for count in range(1, min(64, len(tensors)) + 1):
        yield Fragments(tensors, count)


def _ways_to_average() -> Iterator[AveragingConfig]:
    for gamma in (0.7, 0.6):
        yield AveragingConfig(method="noloco", beta=0.7, gamma=gamma)
    for codec in ("float32", "8bit", "4bit"):
        yield AveragingConfig(method="diloco", codec=codec)
        yield AveragingConfig(method="per_step", codec=codec)
