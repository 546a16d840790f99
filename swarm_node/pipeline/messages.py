"""Messages between stages: what they are, their bytes, and what a stage accepts from another.

    StageMessage -> encode_message -> head, body ... Envelope (the decoded head), body -> decode_message -> StageMessage

`check_message` knows the shapes that belong to each kind of message and what this stage can expect. It is asked before
the body is read, so nothing is allocated for a message that does not fit. `decode_message` then refuses numbers that
are not finite, log-probabilities above 0 and indices that point nowhere: a mistake of a neighbour must not become an
error of this process, nor a wrong gradient.

Activations and gradients travel in a codec; log-probabilities, their gradients and uniform numbers in float32, and ids,
places and masks exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from swarm_node.averaging.codecs import bounded
from swarm_node.errors import Interrupted
from swarm_node.pipeline.compute.schedule import route
from swarm_node.pipeline.compute.tensor_codec import decode_tensor, encode_tensor
from swarm_node.pipeline.compute.tied_weights import rows_of
from swarm_protocol import pipeline as heads
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import PROTOCOL_VERSION

LEADER = -1  # receiver of a message: the loop that drives all stages, at the peer that holds stage 0
ROUNDING = 0.01  # log-probabilities that are so far above 0 are 0
TARGETS = 64  # most completion tokens for each token of a microbatch's rows: many short ones may follow one prompt


@dataclass(frozen=True)
class StageMessage:
    """From one stage to another, or between the leader and a stage."""

    stage: int  # receiver: number of a stage, or `LEADER`
    head: heads.Head
    tensors: tuple[Tensor, ...] = ()


class StageLost(Interrupted):
    """Stages have gone, or are given up; the work under way must be done again once they are rebuilt."""

    def __init__(self, stages: Collection[int], why: str) -> None:
        """No `stages`: only messages were lost."""
        lost = f"stage {', '.join(map(str, sorted(stages)))}" if stages else "messages"
        super().__init__(f"{lost} lost: {why}")
        self.stages = frozenset(stages)
        self.why = why


class MessageTransport(Protocol):
    """Carries messages to the other stages of a crew, wherever they are."""

    def send(self, message: StageMessage) -> None:
        """Send to the holder of that stage, in order; never waits. Raises StageLost if no peer holds it."""

    def receive(self, timeout: float) -> StageMessage | None:
        """The next message for a stage held here, or for the leader if it is here; `None` if none comes in time.

        At the leader, raises StageLost if a stage has gone since the pipeline was last whole."""


@dataclass(frozen=True)
class Limits:
    """What one peer of a crew may send to this peer."""

    plan: int  # number of the plan that this peer goes by
    stages: int
    here: frozenset[int]  # stages held here; at the leader also `LEADER`
    sender: frozenset[int]  # stages held by the sender
    width: int  # values of a hidden state
    vocabulary: int
    tokens: int  # most tokens of a microbatch, padding included
    rows: int  # most samples drawn at a time
    prompt: int  # most tokens of a prompt that is sampled from
    length: int  # most tokens of a sample


class _Field(NamedTuple):
    """A tensor of a message: how it travels, its shape in symbols, and below which symbol its values must lie."""

    kind: Literal["values", "exact", "logprob", "unit", "whole", "bits"]
    shape: tuple[str, ...]
    below: str = ""


def _layout(head: heads.Head, stage: int) -> tuple[_Field, ...]:
    """The tensors that belong to a head.

    In shapes H is the width, V the vocabulary, B the rows of the block that the head names. Any other letter stands for
    one number throughout a message."""
    match head:
        case heads.Forward():
            ids = _Field("whole", ("R", "T"), "V")
            packed = (_Field("whole", ("R", "T"), "T"), _Field("bits", ("R", "1", "T", "T"))) if head.packed else ()
            return (
                ids if head.place == 0 else _Field("values", ("R", "T", "H")),
                _Field("whole", ("N",), "R"),
                _Field("whole", ("N",), "T"),
                _Field("whole", ("N",), "V"),
                *packed,
            )
        case heads.Backward():
            return (_Field("values", ("R", "T", "H")),)
        case heads.Logprobs():
            return (_Field("logprob", ("N",)), _Field("exact", ("N",)))[: 1 + head.entropy]
        case heads.LossGradient():
            return (_Field("exact", ("N",)),)
        case heads.TiedGradient():
            return (_Field("values", ("B", "H")),)
        case heads.Prefill():
            x = _Field("whole", ("P", "T"), "V") if stage == 0 else _Field("values", ("P", "T", "H"))
            return x, _Field("whole", ("P",), "T+1"), _Field("unit", ("W",))
        case heads.Step():
            x = _Field("whole", ("W",), "V") if stage == 0 else _Field("values", ("W", "H"))
            picked = (_Field("whole", ("P",)), _Field("whole", ("P", "G"))) if head.picked else ()
            return x, _Field("unit", ("W",)), *picked
        case heads.Tokens():
            return _Field("whole", ("W",), "V"), _Field("logprob", ("W",))
        case heads.TiedMatrix():
            return (_Field("exact", ("B", "H")),)
    return ()


# --------------------------------------------------------------------- to bytes


def encode_message(
    message: StageMessage, codec: heads.ActivationCodec, plan: int, version: int = PROTOCOL_VERSION
) -> tuple[bytes, list[memoryview]]:
    """The head, in that version of the protocol, and the pieces of the body, which may be views of the tensors.

    Raises LocalProtocolError for a message that no peer would take, for example one with numbers that are not finite.
    """
    parts, body = [], []
    for field, tensor in zip(_layout(message.head, message.stage), message.tensors, strict=True):
        part, data = encode_tensor(tensor, _coding(field, codec))
        parts.append(part)
        body.append(data.data.cast("B"))
        missing = part.size - len(body[-1])
        if missing:
            body.append(memoryview(bytes(missing)))
    return heads.encode_envelope(heads.Envelope(version, plan, message.stage, message.head, tuple(parts))), body


def encoded_size(message: StageMessage, codec: heads.ActivationCodec) -> int:
    """Bytes of its body."""
    fields = zip(_layout(message.head, message.stage), message.tensors, strict=True)
    return sum(heads.Part(_coding(field, codec), tuple(tensor.shape)).size for field, tensor in fields)


def _coding(field: _Field, codec: heads.ActivationCodec) -> heads.Coding:
    codings: dict[str, heads.Coding] = {"values": codec, "whole": "int32", "bits": "bits"}
    return codings.get(field.kind, "float32")


# --------------------------------------------------------------------- what may come


def check_message(envelope: heads.Envelope, size: int, limits: Limits) -> Mapping[str, int]:
    """Check the head of a message, and the size of its body in bytes, before the body is read.

    Returns the value of each symbol of the message's layout. Raises RemoteProtocolError: plan, stage, sender, place (of
    the head); shape, size (of the body).
    """
    if envelope.plan != limits.plan:
        raise RemoteProtocolError("plan", f"plan {envelope.plan}, here it is {limits.plan}")
    _judge_ends(envelope.head, envelope.stage, limits)
    symbols = _dimensions(envelope, limits)
    if size != envelope.size:
        raise RemoteProtocolError("size", f"body of {size} bytes, its parts take {envelope.size}")
    return symbols


def _judge_ends(head: heads.Head, to: int, limits: Limits) -> None:
    """Raise RemoteProtocolError unless the receiver is here and the sender is the one that it must be."""
    if to not in limits.here:
        raise RemoteProtocolError("stage", f"for stage {to}, which is not here")
    last = limits.stages - 1
    from_stage, for_leader = 0, False
    match head:
        case heads.Forward():
            way = route(limits.stages, head.microbatch, head.swapped)
            if head.place >= len(way) or way[head.place].stage != to:
                raise RemoteProtocolError("place", f"stage {to} does not have place {head.place}")
            from_stage = way[max(0, head.place - 1)].stage
        case heads.Backward():
            if not limits.sender:
                raise RemoteProtocolError("sender", "a gradient from a peer without a stage")
            return
        case heads.TiedGradient() | heads.TiedMatrix() | heads.Share():
            if to not in (0, last):
                raise RemoteProtocolError("stage", f"no embedding is tied at stage {to}")
            first = isinstance(head, heads.Share) and head.block == 0  # a request of the leader
            from_stage = 0 if first else last - to
        case heads.LossGradient():
            if to != last:
                raise RemoteProtocolError("stage", f"no log-probabilities come from stage {to}")
        case heads.Prefill() | heads.Step():
            from_stage = max(0, to - 1)
        case heads.Logprobs() | heads.Tokens():
            from_stage, for_leader = last, True
        case heads.GradientNorm() | heads.StageStatus() | heads.TurnFailed():
            from_stage, for_leader = head.stage, True
    if for_leader != (to == LEADER):
        raise RemoteProtocolError("stage", f"a {type(head).__name__} for stage {to}")
    if from_stage not in limits.sender:
        raise RemoteProtocolError("sender", f"a {type(head).__name__} must come from stage {from_stage}")


def _dimensions(envelope: heads.Envelope, limits: Limits) -> Mapping[str, int]:
    """The value of each symbol of the layout. Raises RemoteProtocolError (shape) if a part does not fit its limits."""
    head, layout = envelope.head, _layout(envelope.head, envelope.stage)
    if len(layout) != len(envelope.parts):
        raise RemoteProtocolError("shape", f"{len(envelope.parts)} parts, {len(layout)} belong to it")
    found = {"1": 1, "H": limits.width, "V": limits.vocabulary}
    if isinstance(head, heads.TiedGradient | heads.TiedMatrix):
        rows = rows_of(head.block, limits.vocabulary, limits.width)
        found["B"] = rows.stop - rows.start
    for field, part in zip(layout, envelope.parts, strict=True):
        codings = ("float32", "bfloat16", "int8") if field.kind == "values" else (_coding(field, "float32"),)
        if part.coding not in codings or len(part.shape) != len(field.shape):
            raise RemoteProtocolError("shape", f"{part.coding} {part.shape} instead of {field.kind} {field.shape}")
        for symbol, length in zip(field.shape, part.shape, strict=True):
            if found.setdefault(symbol, length) != length:
                raise RemoteProtocolError("shape", f"{part.shape} where {symbol} = {found[symbol]}: {field.shape}")
    most = {
        "R T": limits.tokens,
        "N": TARGETS * limits.tokens,
        "P": limits.rows,
        "W": limits.rows,
        "P G": limits.rows,
        "P T": limits.rows * limits.prompt,
    }
    for symbols, limit in most.items():
        product = prod(found.get(symbol, 0) for symbol in symbols.split())
        if product > limit:
            raise RemoteProtocolError("shape", f"{symbols} = {product}, at most {limit} are expected")
    if isinstance(head, heads.Prefill):
        wanted = (found["P"] * head.n, limits.prompt, limits.length)
        if found["W"] != wanted[0] or found["T"] > wanted[1] or head.limit > wanted[2]:
            raise RemoteProtocolError("shape", f"{(found['W'], found['T'], head.limit)} instead of {wanted}")
    if isinstance(head, heads.Step):
        if head.step >= limits.length:
            raise RemoteProtocolError("shape", f"token {head.step}, samples have at most {limits.length}")
        if head.picked and found["P"] * found["G"] != found["W"]:
            raise RemoteProtocolError("shape", f"{found['W']} rows are not {found['P']} x {found['G']}")
    return found | {"T+1": found.get("T", 0) + 1, "": 2**31}


# --------------------------------------------------------------------- from bytes


def decode_message(envelope: heads.Envelope, body: bytearray, limits: Limits) -> StageMessage:
    """Raises RemoteProtocolError for the reasons of `check_message`, and: nonfinite, values."""
    symbols = check_message(envelope, len(body), limits)
    tensors = []
    rest = memoryview(body)
    for field, part in zip(_layout(envelope.head, envelope.stage), envelope.parts, strict=True):
        tensor, rest = decode_tensor(part, rest[: part.size]), rest[part.size :]
        if field.kind in ("values", "exact", "logprob", "unit"):
            if not bounded(tensor.view(-1)):
                raise RemoteProtocolError("nonfinite", f"a number of {type(envelope.head).__name__} is not finite")
            if field.kind == "unit" and not (tensor.min() >= 0 and tensor.max() < 1):
                raise RemoteProtocolError("values", "uniform numbers are at least 0 and less than 1")
            if field.kind == "logprob" and tensor.max() > ROUNDING:
                raise RemoteProtocolError("values", "log-probabilities are at most 0")
        elif field.kind == "whole" and not (tensor.min() >= 0 and tensor.max() < symbols[field.below]):
            raise RemoteProtocolError("values", f"an index is negative, or {symbols[field.below]} or more")
        tensors.append(tensor)
    if isinstance(envelope.head, heads.Prefill) and tensors[1].min() < 1:
        raise RemoteProtocolError("values", "a prompt without a token")
    return StageMessage(envelope.stage, envelope.head, tuple(tensors))
