"""Heads of exchanges of weights between two peers: whose weights they are, of which round, and in which coding.

    exchange = head (msgpack, below) | body (encoded values), both ways; see `transports.base`

Each half is written in the newest version that both peers understand (`codec.version_for`); a head of any other version
is refused. If the caller's head has version PROMISES or a later one, both halves of a pair's exchange for averaging are
promised (`transports.base.Outgoing`). A stream's ends are authenticated by their peer ids, so a head is not signed.
Receivers know from their own policy how many values a fragment has, and how many bytes those take in each codec. A body
of any other size is refused unread.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from swarm_protocol.codec import RecordCodec
from swarm_protocol.limits import MAX_HEAD_BYTES
from swarm_protocol.messages import Count, Hash16, Hash64, LayerNumber, StageNumber

PROMISES = 2
AVERAGE_METHOD = "average"  # exchange of weights between two peers of one cohort, for averaging
WEIGHTS_METHOD = "weights"  # exchange in which a peer gets all trained weights of another, and sends no body

STATE_METHOD = "stage-state"  # exchange in which a peer gets weights of a stage from another, and sends no body
KEEP_METHOD = "stage-keep"
"""Exchange without bodies in which a peer that leaves its crew has another fetch a stage of its, and keep that."""

PeerId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9]+\Z")]
WeightCodec = Literal["float32", "int8", "e3m0", "lattice8", "lattice4"]
"""Coding of values; `swarm_node.averaging.codecs` and `.lattice` define each."""

T = TypeVar("T", bound=msgspec.Struct)


class AverageHead(msgspec.Struct, frozen=True):
    """Head of each half of an exchange for averaging."""

    protocol: Count
    swarm: Hash64
    cohort: Hash16
    sender: PeerId
    receiver: PeerId
    round: Count  # outer round: both must mean the same one
    fragment: Count  # number of the part of the weights
    phase: Annotated[int, Meta(ge=0, le=2)] = 0
    """0 = between pairs; 1 = parts to the peers that average them, 2 = averages back (group methods)."""
    group: Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")] = ""
    """For group methods, who takes part and how: first 64 bits of sha256 of the outer learning rate, the outer momentum
    and the sorted peer ids, separated by blanks."""
    codec: WeightCodec = "float32"
    reach: Annotated[float, Meta(ge=0, le=1e30)] = 0.0
    """The sender's estimate of the root mean square distance per value between these weights and the receiver's."""
    written_out: Count = 0  # blocks of a lattice codec that are sent in float32 besides
    version: Count = 0  # optimiser updates behind these weights
    draining: bool = msgspec.field(default=False, name="parting")
    """The sender is leaving the swarm. Any peer of its cohort may then be asked to take part in a pair's exchange, also
    one that is not its partner in this round, and one that is not due."""


class WeightsHead(msgspec.Struct, frozen=True):
    """Head of each half of an exchange that hands over all trained weights."""

    protocol: Count
    swarm: Hash64
    cohort: Hash16
    version: Count = 0  # optimiser updates behind them; of the peer that asks, those that it has


class StateHead(msgspec.Struct, frozen=True):
    """Head of each half of an exchange that hands over trained weights of a stage."""

    protocol: Count
    swarm: Hash64
    architecture: Hash16  # equal for peers that hold stages of one policy, in any crew
    stage: StageNumber  # stage whose weights are exchanged
    replica: bool  # the copy that the asked peer keeps for another, rather than its own
    first: LayerNumber  # the layers wanted: from this one ...
    end: LayerNumber  # ... to before this one.
    rest: bool  # whether weights that belong to no layer are included: embedding, norm, head
    updates: Count = 0  # optimiser updates behind them; 0 in the request
    omega: Annotated[float, Meta(ge=0, le=1e30)] = 0.0
    """Norm of the stage's gradient at its last update, before clipping."""


class KeepHead(msgspec.Struct, frozen=True):
    """Head of each half of an exchange in which a peer asks another to keep a stage. It asks again until the other has
    it."""

    protocol: Count
    swarm: Hash64
    architecture: Hash16
    stage: StageNumber
    updates: Count
    """Optimiser updates behind the stage; in the answer, behind the copy of it that is kept by now; 0 = there is
    none."""


class BlobHead(msgspec.Struct, frozen=True):
    """Head of each half of an exchange that hands over a listing or a piece of the swarm's model (`model_listing`)."""

    protocol: Count
    swarm: Hash64
    sha256: Hash64  # digest of the body


_codecs: dict[type, RecordCodec[Any]] = {
    kind: RecordCodec(kind, MAX_HEAD_BYTES) for kind in (AverageHead, WeightsHead, StateHead, KeepHead, BlobHead)
}


def encode_head(head: AverageHead | WeightsHead | StateHead | KeepHead | BlobHead) -> bytes:
    """The bytes for `transports.base.Outgoing`. Raises LocalProtocolError for a head that peers would refuse."""
    return _codecs[type(head)].encode(head)


def decode_head(data: bytes, kind: type[T]) -> T:
    """The head of that kind in `data`. Raises RemoteProtocolError: size, version, schema."""
    head: T = _codecs[kind].decode(data)
    return head
