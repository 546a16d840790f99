"""What the peers of a crew say to each other about who holds which stage.

    anybody -> anybody     Hello: this is who I am            Answer: that is the lead, go there    Refusal
    member  -> lead        Report, Ready, Unable, Broken, Load
    lead    -> member      Plan: who holds what from now on   Whole: all of them do                 Probe, Progress

The lead is whoever holds stage 0. These travel on the channel to it (`CREW_METHOD`), as bodies behind the head
`CONTROL`; what stages say to each other (`protocol.pipeline`) goes over it too, and over channels between neighbours
(`STAGE_METHOD`). A channel's ends are authenticated by their peer ids, so nothing is signed. Other versions may have
other records: a `Hello` says which it is of, and nothing else is said before one was taken.

The name of a crew is its password: whoever says Hello or Answer proves to that very peer that he knows it, and cards
show no more than that peers have the same one.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from protocol.codec import RecordCodec
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_NAME_CHARS, MAX_STAGES
from protocol.lineage import NO_RUN, Lineage, check_lineage
from protocol.messages import Count, Hash16, Hash64, LayerNumber, StageNumber, Time
from protocol.pipeline import Codec
from protocol.tensors import PeerId

CREW_METHOD = "crew"
"""Channel of a member to whom it takes for the lead."""
STAGE_METHOD = "stage"
"""Channel between two peers that hold neighbouring stages, neither of which leads."""
CONTROL = b"\xc1"
"""Head of a message with one of these records: msgpack never begins with it, so the heads of others do not."""

MAX_CONTROL_BYTES: Final = 256 * 1024
"""A record: a plan of `MAX_STAGES` stages with three sources each takes a third of it."""
MAX_MEMBERS: Final = 64
"""Peers without a stage that a plan lists: a crew needs a few."""
MAX_KEPT: Final = 64
"""Checkpoints that are told of."""
MAX_SOURCES: Final = 8
"""Ways to come by one stage: there are eight kinds."""
MAX_REASON_CHARS: Final = 200
"""A sentence for people."""

Layers = tuple[LayerNumber, LayerNumber]
"""First layer of a stage, and the one behind its last."""
Spans = Annotated[tuple[Layers, ...], Meta(max_length=MAX_STAGES)]
"""Of each stage."""
Line = Annotated[str, Meta(max_length=MAX_REASON_CHARS, pattern=r"^[ -~]*\Z")]
Somebody = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9]*\Z")]
"""A peer id; empty = nobody."""
TokenCount = Annotated[int, Meta(ge=1, le=2**24)]
Way = Literal["live", "replica", "cohort", "mean", "copy", "snapshot", "base"]
"""How a stage's weights are come by: from whoever holds it and hands it over | from the copy that a neighbour keeps |
from another crew | as the mean of the neighbours (CheckFree) | as a copy of the neighbour that learned its work
(CheckFree+) | from a file | anew from the base model."""


class Kept(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Weights of a stage, somewhere."""

    stage: StageNumber
    updates: Count
    """Optimiser updates behind them."""


class Holding(msgspec.Struct, frozen=True, omit_defaults=True, rename={"checkpoints": "snapshots"}):
    """What a peer has of its crew's policy. On the wire, checkpoints have the name of earlier versions."""

    live: Annotated[tuple[Kept, ...], Meta(max_length=MAX_STAGES)] = ()
    """Stages in memory, as they were last trained."""
    replicas: Annotated[tuple[Kept, ...], Meta(max_length=MAX_STAGES)] = ()
    """Copies of neighbours' stages."""
    checkpoints: Annotated[tuple[Kept, ...], Meta(max_length=MAX_KEPT)] = ()
    """Files, newest first."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """One way to come by a stage's weights."""

    way: Way
    peers: Annotated[tuple[PeerId, ...], Meta(max_length=2)] = ()
    """From whom; for `mean`, from those who hold `stages`, in that order."""
    stages: Annotated[tuple[StageNumber, ...], Meta(max_length=2)] = ()
    """Which stages it is made of, if not of itself."""
    updates: Count = 0
    """Behind what is had so, as far as is known."""


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """A stage in a plan."""

    peer: PeerId
    layers: Layers
    sources: Annotated[tuple[Source, ...], Meta(max_length=MAX_SOURCES)] = ()
    """How its holder comes by it: the first that works. None: it has it."""


class Hello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    """First word of whoever opens a channel; and of two leads to each other."""

    protocol: Count
    swarm: Hash64
    crew: Hash16
    """`crew_id`."""
    proof: Hash64
    """That the sender knows the crew's name, to the receiver: see `proof`."""
    architecture: Hash16
    """Equal for those who hold stages of one policy."""
    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9._-]*\Z")] = ""
    """Of the sender, for people."""
    wanted: StageNumber | None = None
    """Stage it would like to hold."""
    leads: bool = False
    """It holds stage 0, and wants to know who gives way."""
    term: Count = 0
    """Of the last plan it went by, whose lead its stages have heard; of a lead, the last in which its crew was
    whole."""
    updates: Count = 0
    started: Time = 0.0
    holding: Holding = Holding()
    spans: Spans = ()
    """What its stages are, if it holds anything."""
    capacity: Count = 0
    """Bytes that it can hold; 0 = it does not know."""
    run: Lineage = NO_RUN
    """Of which its stages, replicas and checkpoints are."""
    round: Count = 0
    """How far that run is, as far as it knows."""


class Answer(msgspec.Struct, frozen=True, tag_field="kind", tag="answer"):
    """Whom the sender takes for the lead: itself, somebody else, or nobody yet."""

    lead: Somebody
    proof: Hash64
    """As in `Hello`."""
    term: Count = 0
    may_lead: bool = True
    """If it is nobody yet: the sender may become it."""


class Refusal(msgspec.Struct, frozen=True, tag_field="kind", tag="refusal"):
    """The sender will have nothing to do with the receiver, who then closes the channel."""

    reason: Annotated[str, Meta(max_length=32, pattern=r"^[a-z]+\Z")]
    detail: Line = ""
    proof: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """As in `Hello`, if the receiver has shown that it knows the crew's name."""


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """How a crew works, as its first lead was told: all its peers go by these, whatever they were told themselves."""

    wire: Codec
    """Of activations and gradients."""
    swap: bool
    """Odd microbatches take another order of stages (CheckFree+)."""
    replica: Literal["auto", "on", "ends", "off"]
    replica_every: Annotated[int, Meta(ge=0, le=100)]
    """Updates from one replica to the next; 0 = as the model and the number of stages have it."""
    reference: bool
    """Stages keep their weights of before training, for the KL term."""
    prompt: TokenCount
    """Tokens of a prompt, at most."""
    length: TokenCount
    """Tokens of an answer, at most."""
    microbatch: TokenCount
    """Tokens of a microbatch, at most, padding included."""
    decay: Annotated[float, Meta(ge=0, le=1e3)]
    """AdamW: of weights."""
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]]
    """AdamW: of moments."""
    rounds: Count = 0
    """Of the whole run; 0 = without end."""


class Plan(msgspec.Struct, frozen=True, tag_field="kind", tag="plan", rename={"assignments": "seats"}):
    """Which peer holds each stage from now on. Messages of an earlier plan are void. On the wire, assignments have the
    name of earlier versions."""

    term: Count
    """Counts leads."""
    number: Count
    """Counts plans."""
    assignments: Annotated[tuple[Assignment, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    """By stage; the peer that holds the first is the leader."""
    settings: Settings
    spares: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """Members without a stage, first in line first. They may change without a new plan."""
    run: Lineage = NO_RUN
    """Of which these stages are: what is held of another counts only up to where they forked."""

    @property
    def lead(self) -> str:
        return self.assignments[0].peer

    @property
    def mark(self) -> int:
        """What messages between stages name it by: no two plans share it, whoever made them."""
        return _mark(self.lead, self.term, self.number)

    @property
    def spans(self) -> tuple[Layers, ...]:
        return tuple(assignment.layers for assignment in self.assignments)

    def held_by(self, peer: str) -> tuple[int, ...]:
        """Stages of a peer."""
        return tuple(stage for stage, assignment in enumerate(self.assignments) if assignment.peer == peer)


class Ready(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    """A stage is held."""

    plan: Count
    """Mark of the plan it was in."""
    stage: StageNumber
    updates: Count
    source: Source | None = None
    """How it was come by; `None` = it was there."""


class Unable(msgspec.Struct, frozen=True, tag_field="kind", tag="unable"):
    """A stage cannot be held."""

    plan: Count
    stage: StageNumber
    why: Line


class Broken(msgspec.Struct, frozen=True, tag_field="kind", tag="broken"):
    """The channel to a neighbour ended; messages may be lost."""

    plan: Count
    peer: PeerId
    why: Line
    refused: bool = False
    """Because the neighbour said what nobody takes."""


class Report(msgspec.Struct, frozen=True, tag_field="kind", tag="report"):
    """What the sender holds has changed."""

    holding: Holding
    run: Lineage = NO_RUN
    """Of which that is."""


class Probe(msgspec.Struct, frozen=True, tag_field="kind", tag="probe"):
    """How long has a message been waiting for you?"""

    plan: Count


class Load(msgspec.Struct, frozen=True, tag_field="kind", tag="load"):
    """Answer to it."""

    plan: Count
    held_s: Annotated[float, Meta(ge=0, lt=2**40)]
    """The oldest message that is not dealt with; 0 = none."""


class Whole(msgspec.Struct, frozen=True, tag_field="kind", tag="whole"):
    """Every stage of the plan is held: what was kept for others can be let go."""

    plan: Count


class Progress(msgspec.Struct, frozen=True, tag_field="kind", tag="progress"):
    """How far the run is: whoever leads next goes on from there."""

    round: Count
    reward: Annotated[float, Meta(ge=-1e12, le=1e12)]
    """Mean over the last rounds."""
    over: bool = False
    """All rounds are done: no other lead is needed."""


Record = Hello | Answer | Refusal | Plan | Ready | Unable | Broken | Report | Probe | Load | Whole | Progress


@lru_cache(maxsize=16)
def crew_key(swarm: str, name: str) -> bytes:
    """What a crew's peers have in common, of its name. Slow on purpose (scrypt): short names take time to guess."""
    return hashlib.scrypt(name.encode(), salt=f"swarm-node/crew/{swarm}".encode(), n=2**14, r=8, p=1, dklen=32)


def crew_id(key: bytes) -> str:
    """What cards show of it: 16 hexadecimal digits."""
    return hmac.digest(key, b"id", "sha256").hex()[:16]


def proof(key: bytes, sender: str, receiver: str) -> str:
    """That `sender` knows the crew's key. The ends of a channel are authenticated, so it is of use to nobody else."""
    return hmac.digest(key, f"{sender}/{receiver}".encode(), "sha256").hex()


@lru_cache(maxsize=64)
def _mark(lead: str, term: int, number: int) -> int:
    """It is asked for several times a message."""
    return int.from_bytes(hashlib.sha256(f"{lead}/{term}/{number}".encode()).digest()[:8], "big") >> 11


def _check_record(record: Record) -> None:
    if isinstance(record, (Plan, Hello)):
        check_spans(record.spans)
    if isinstance(record, (Plan, Hello, Report)):
        check_lineage(record.run)


def check_spans(spans: tuple[Layers, ...]) -> None:
    """Raises RemoteProtocolError `plan` unless each begins, from layer 0, where the one before ends, and none is
    empty."""
    ends = (0, *(end for _, end in spans))
    if any(first != before or end <= first for before, (first, end) in zip(ends, spans, strict=False)):
        raise RemoteProtocolError("plan", f"layers {spans}")


_codec: RecordCodec[Record] = RecordCodec(Record, MAX_CONTROL_BYTES, opening="hello", check=_check_record)
encode_record, decode_record = _codec.encode, _codec.decode
"""Bodies of messages whose head is `CONTROL`. Decoding raises RemoteProtocolError: size, version, schema, `plan` for
stages that are not all the layers, and `run`."""
