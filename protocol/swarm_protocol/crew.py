"""Messages between the peers of a crew about which peer holds which stage.

    anybody -> anybody     Hello: the sender's state          Answer: who leads                     Refusal
    member  -> leader      Report, Ready, Unable, Broken, Load
    leader  -> member      Plan: which peer holds each stage  Whole: all stages are held            Probe, Progress

The leader is the peer that holds stage 0. These messages travel on the channel to it (`CREW_METHOD`), as bodies behind
the head `CONTROL`. Messages between stages (`swarm_protocol.pipeline`) use the same channel, and channels between
neighbours (`STAGE_METHOD`). A channel's ends are authenticated by their peer ids, so nothing is signed. Other versions
may have other records: a `Hello` names its version, and nothing else is sent before a Hello was accepted.

The name of a crew is its password. The sender of a Hello or an Answer proves to the receiver that it knows the name;
cards only show that two peers have the same name.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from swarm_protocol.codec import RecordCodec
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import MAX_NAME_CHARS, MAX_STAGES
from swarm_protocol.lineage import NO_RUN, Lineage, check_lineage
from swarm_protocol.messages import Count, Hash16, Hash64, LayerNumber, StageNumber, Time
from swarm_protocol.pipeline import ActivationCodec
from swarm_protocol.tensors import PeerId

CREW_METHOD = "crew"  # channel of a member to the peer that it takes for the leader
STAGE_METHOD = "stage"  # channel between two peers that hold neighbouring stages, neither of which leads
CONTROL = b"\xc1"
"""Head of a message with one of these records: msgpack never begins with it, so the heads of others do not."""

MAX_CONTROL_BYTES: Final = 256 * 1024
"""A record: a plan of `MAX_STAGES` stages with three sources each takes a third of it."""
MAX_MEMBERS: Final = 64  # peers without a stage that a plan lists: a crew needs a few
MAX_KEPT: Final = 64  # checkpoints that a peer reports
MAX_STAGE_SOURCES: Final = 8  # sources of one stage's weights in a plan: there are seven kinds
MAX_REASON_CHARS: Final = 200  # a sentence for people

Layers = tuple[LayerNumber, LayerNumber]  # first layer of a stage, and the one behind its last
Spans = Annotated[tuple[Layers, ...], Meta(max_length=MAX_STAGES)]  # layers of each stage
Line = Annotated[str, Meta(max_length=MAX_REASON_CHARS, pattern=r"^[ -~]*\Z")]
Somebody = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9]*\Z")]  # a peer id; empty = nobody
TokenCount = Annotated[int, Meta(ge=1, le=2**24)]
Way = Literal["live", "replica", "cohort", "mean", "copy", "snapshot", "base"]
"""Source of a stage's weights: the peer that holds it | the copy that a neighbour keeps | another crew | the mean of
the neighbours (CheckFree) | a copy of the neighbour that learned its work (CheckFree+) | a checkpoint file | the base
model."""


class Kept(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Weights of a stage, somewhere."""

    stage: StageNumber
    updates: Count  # optimiser updates behind them


class Holding(msgspec.Struct, frozen=True, omit_defaults=True, rename={"checkpoints": "snapshots"}):
    """What a peer has of its crew's policy. On the wire, checkpoints have the name of earlier versions."""

    live: Annotated[tuple[Kept, ...], Meta(max_length=MAX_STAGES)] = ()  # stages in memory, as they were last trained
    replicas: Annotated[tuple[Kept, ...], Meta(max_length=MAX_STAGES)] = ()  # copies of neighbours' stages
    checkpoints: Annotated[tuple[Kept, ...], Meta(max_length=MAX_KEPT)] = ()  # files, newest first


class Source(msgspec.Struct, frozen=True, array_like=True):
    """One source of a stage's weights."""

    way: Way
    peers: Annotated[tuple[PeerId, ...], Meta(max_length=2)] = ()
    """Peers that have the weights; for `mean`, the holders of `stages`, in that order."""
    stages: Annotated[tuple[StageNumber, ...], Meta(max_length=2)] = ()
    """Stages from which the weights are made, if not from the stage itself."""
    updates: Count = 0  # updates behind these weights, as far as is known


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """A stage in a plan."""

    peer: PeerId
    layers: Layers
    sources: Annotated[tuple[Source, ...], Meta(max_length=MAX_STAGE_SOURCES)] = ()
    """Sources that the holder tries in this order until one works. Empty = it has the weights."""


class Hello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    """First message on a channel, and between two leaders."""

    protocol: Count
    swarm: Hash64
    crew: Hash16  # `crew_id`
    proof: Hash64  # proof for the receiver that the sender knows the crew's name: see `proof`
    architecture: Hash16  # equal for peers that hold stages of one policy
    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9._-]*\Z")] = ""
    """Name of the sender, for people."""
    wanted: StageNumber | None = None  # stage it would like to hold
    leads: bool = False  # the sender holds stage 0, and asks which of two leaders gives way
    term: Count = 0
    """Term of the last plan that the sender followed and whose leader its stages have heard; for a leader, the last
    term in which its crew was complete."""
    updates: Count = 0
    started: Time = 0.0
    holding: Holding = Holding()
    spans: Spans = ()  # layers of the stages, if the sender holds any
    capacity: Count = 0  # bytes that it can hold; 0 = it does not know
    run: Lineage = NO_RUN  # run of the sender's stages, replicas and checkpoints
    round: Count = 0  # last round of that run that the sender knows of


class Answer(msgspec.Struct, frozen=True, tag_field="kind", tag="answer"):
    """The peer that the sender takes for the leader: itself, another one, or none yet."""

    lead: Somebody
    proof: Hash64  # proof as in `Hello`
    term: Count = 0
    may_lead: bool = True  # if there is no leader yet: whether the sender may become it


class Refusal(msgspec.Struct, frozen=True, tag_field="kind", tag="refusal"):
    """The sender refuses the receiver, which then closes the channel."""

    reason: Annotated[str, Meta(max_length=32, pattern=r"^[a-z]+\Z")]
    detail: Line = ""
    proof: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """Proof as in `Hello`, if the receiver has shown that it knows the crew's name."""


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """Settings of a crew. All its peers use the settings of its first leader, whatever their own are."""

    wire: ActivationCodec  # coding of activations and gradients
    swap: bool  # odd microbatches take another order of stages (CheckFree+)
    replica: Literal["auto", "on", "ends", "off"]
    replica_every: Annotated[int, Meta(ge=0, le=100)]
    """Updates from one replica to the next; 0 = as the model and the number of stages have it."""
    reference: bool  # stages keep their weights of before training, for the KL term
    prompt: TokenCount  # tokens of a prompt, at most
    length: TokenCount  # tokens of an answer, at most
    microbatch: TokenCount  # tokens of a microbatch, at most, padding included
    decay: Annotated[float, Meta(ge=0, le=1e3)]  # AdamW: of weights
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]]  # AdamW: of moments
    rounds: Count = 0  # rounds of the whole run; 0 = without end


class Plan(msgspec.Struct, frozen=True, tag_field="kind", tag="plan", rename={"assignments": "seats"}):
    """Which peer holds each stage from now on. Messages of an earlier plan are void. On the wire, assignments have the
    name of earlier versions."""

    term: Count  # number of the leader, counted up
    number: Count  # number of the plan, counted up
    assignments: Annotated[tuple[Assignment, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    """By stage; the peer that holds the first is the leader."""
    settings: Settings
    spares: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """Members without a stage, first in line first. They may change without a new plan."""
    run: Lineage = NO_RUN  # run of these stages. Weights of another run count only up to the fork.

    @property
    def lead(self) -> str:
        return self.assignments[0].peer

    @property
    def mark(self) -> int:
        """Number by which messages between stages name the plan. No two plans of any leaders share it."""
        return _mark(self.lead, self.term, self.number)

    @property
    def spans(self) -> tuple[Layers, ...]:
        return tuple(assignment.layers for assignment in self.assignments)

    def held_by(self, peer: str) -> tuple[int, ...]:
        return tuple(stage for stage, assignment in enumerate(self.assignments) if assignment.peer == peer)


class Ready(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    """A stage is held."""

    plan: Count  # mark of the plan it was in
    stage: StageNumber
    updates: Count
    source: Source | None = None  # source of the weights; `None` = the peer already had them


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
    refused: bool = False  # whether the channel ended because the neighbour sent an unacceptable message


class Report(msgspec.Struct, frozen=True, tag_field="kind", tag="report"):
    """The sender's holding has changed."""

    holding: Holding
    run: Lineage = NO_RUN  # run of the holding


class Probe(msgspec.Struct, frozen=True, tag_field="kind", tag="probe"):
    """A question: for how long has the receiver's oldest message been waiting?"""

    plan: Count


class Load(msgspec.Struct, frozen=True, tag_field="kind", tag="load"):
    """Answer to it."""

    plan: Count
    held_s: Annotated[float, Meta(ge=0, lt=2**40)]  # the oldest message that is not dealt with; 0 = none


class Whole(msgspec.Struct, frozen=True, tag_field="kind", tag="whole"):
    """Every stage of the plan is held. Peers may release what they kept for others."""

    plan: Count


class Progress(msgspec.Struct, frozen=True, tag_field="kind", tag="progress"):
    """Progress of the run: the next leader continues from there."""

    round: Count
    reward: Annotated[float, Meta(ge=-1e12, le=1e12)]  # mean over the last rounds
    over: bool = False  # all rounds are done: no other lead is needed


Record = Hello | Answer | Refusal | Plan | Ready | Unable | Broken | Report | Probe | Load | Whole | Progress


@lru_cache(maxsize=16)
def crew_key(swarm: str, name: str) -> bytes:
    """The key that a crew's peers derive from its name. Slow on purpose (scrypt), because short names can be
    guessed."""
    return hashlib.scrypt(name.encode(), salt=f"swarm-node/crew/{swarm}".encode(), n=2**14, r=8, p=1, dklen=32)


def crew_id(key: bytes) -> str:
    """The id of a crew on cards: 16 hexadecimal digits."""
    return hmac.digest(key, b"id", "sha256").hex()[:16]


def proof(key: bytes, sender: str, receiver: str) -> str:
    """Proof that `sender` knows the crew's key, valid for `receiver` only, because the ends of a channel are
    authenticated."""
    return hmac.digest(key, f"{sender}/{receiver}".encode(), "sha256").hex()


@lru_cache(maxsize=64)
def _mark(lead: str, term: int, number: int) -> int:
    """The mark of a plan; cached, because each message needs it several times."""
    return int.from_bytes(hashlib.sha256(f"{lead}/{term}/{number}".encode()).digest()[:8], "big") >> 11


def _check_record(record: Record) -> None:
    """Raises RemoteProtocolError: `run`, and `plan` unless the first stage begins at layer 0, each other stage begins
    where the one before ends, and none is empty."""
    if isinstance(record, (Plan, Hello)):
        ends = (0, *(end for _, end in record.spans))
        if any(first != before or end <= first for before, (first, end) in zip(ends, record.spans, strict=False)):
            raise RemoteProtocolError("plan", f"layers {record.spans}")
    if isinstance(record, (Plan, Hello, Report)):
        check_lineage(record.run)


_codec: RecordCodec[Record] = RecordCodec(Record, MAX_CONTROL_BYTES, opening="hello", check=_check_record)
encode_record, decode_record = _codec.encode, _codec.decode
"""Encode and decode bodies of messages whose head is `CONTROL`. Decoding raises RemoteProtocolError: size, version,
schema, `plan` for stages that do not join, and `run`."""
