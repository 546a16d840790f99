"""Messages between stages as bytes, and what a stage takes from another.

    Message -> encode -> head, body ... head, size -> judge -> (body is read) -> decode -> Message

`judge` knows the shapes that belong to each kind of message and what this stage can expect, so nothing is allocated
for a message that does not fit. `decode` then refuses numbers that are not finite and indices that point nowhere: a
neighbour's mistake must not become an error of this process, nor a wrong gradient.

Activations and gradients travel in a codec; log-probabilities, their gradients and uniform numbers in float32, and
ids, places and masks exactly.

    int8   x ~ code s / 127 in blocks of 64,   code = round(127 x / s),   s = largest magnitude (bfloat16)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import PROTOCOL_VERSION
from protocol.pipeline import (
    BLOCK,
    Apply,
    Backward,
    Codec,
    Envelope,
    Forward,
    GradientNorm,
    GradientNormRequest,
    Head,
    Logprobs,
    LossGradient,
    Part,
    Prefill,
    Reset,
    SetUpdates,
    Share,
    StageStatus,
    StatusRequest,
    Step,
    TiedGradient,
    TiedMatrix,
    Tokens,
    TurnFailed,
    decode_envelope,
    encode_envelope,
)
from swarm_node.pipeline.compute.schedule import route
from swarm_node.pipeline.ports import LEAD, Message

SMALLEST = 1e-30
"""Blocks of int8 without a larger magnitude count as 0: 1 / s must not overflow."""
LARGEST = 1e30
"""Neither an activation nor a gradient is larger."""
BLOCK_BYTES = 2**24
"""Most that travels in one message of a matrix that two stages hold, in float32: other messages come in between."""
TARGETS = 64
"""Most completion tokens for each token of a microbatch's rows: many short ones may follow one prompt."""


@dataclass(frozen=True)
class Limits:
    """What a peer may be sent, by one other peer of its crew."""

    plan: int
    """Number of the plan that this peer goes by."""
    stages: int
    here: frozenset[int]
    """Stages held here; `LEAD` too at the lead."""
    sender: frozenset[int]
    """Stages held by whoever sends."""
    width: int
    """Of a hidden state."""
    vocabulary: int
    tokens: int
    """Most tokens of a microbatch, padding included."""
    rows: int
    """Most samples drawn at a time."""
    prompt: int
    """Most tokens of a prompt that is sampled from."""
    length: int
    """Most tokens of a sample."""


class _Field(NamedTuple):
    """A tensor of a message: how it travels, its shape in symbols, and below which symbol its values must lie."""

    kind: Literal["values", "exact", "unit", "whole", "bits"]
    shape: tuple[str, ...]
    below: str = ""


def _layout(head: Head, stage: int) -> tuple[_Field, ...]:
    """The tensors that belong to a head. H = width, V = vocabulary, B = rows of the block that the head names; other
    letters mean one number in all of them."""
    match head:
        case Forward():
            ids = _Field("whole", ("R", "T"), "V")
            packed = (_Field("whole", ("R", "T"), "T"), _Field("bits", ("R", "1", "T", "T"))) if head.packed else ()
            return (
                ids if head.place == 0 else _Field("values", ("R", "T", "H")),
                _Field("whole", ("N",), "R"),
                _Field("whole", ("N",), "T"),
                _Field("whole", ("N",), "V"),
                *packed,
            )
        case Backward():
            return (_Field("values", ("R", "T", "H")),)
        case Logprobs():
            return (_Field("exact", ("N",)),) * (1 + head.entropy)
        case LossGradient():
            return (_Field("exact", ("N",)),)
        case TiedGradient():
            return (_Field("values", ("B", "H")),)
        case Prefill():
            x = _Field("whole", ("P", "T"), "V") if stage == 0 else _Field("values", ("P", "T", "H"))
            return x, _Field("whole", ("P",), "T+1"), _Field("unit", ("W",))
        case Step():
            x = _Field("whole", ("W",), "V") if stage == 0 else _Field("values", ("W", "H"))
            picked = (_Field("whole", ("P",)), _Field("whole", ("P", "G"))) if head.picked else ()
            return x, _Field("unit", ("W",)), *picked
        case Tokens():
            return _Field("whole", ("W",), "V"), _Field("exact", ("W",))
        case TiedMatrix():
            return (_Field("exact", ("B", "H")),)
        case (
            GradientNormRequest()
            | GradientNorm()
            | Apply()
            | SetUpdates()
            | Share()
            | StatusRequest()
            | StageStatus()
            | Reset()
            | TurnFailed()
        ):
            return ()


def rows_of(block: int, height: int, width: int) -> slice:
    """Rows of a matrix [height, width] that are in a block; none = there is no such block. Whole blocks of int8 scales,
    so that each row is written as in the whole matrix."""
    rows = max(1, BLOCK_BYTES // (4 * width * BLOCK)) * BLOCK
    return slice(min(block * rows, height), min((block + 1) * rows, height))


# --------------------------------------------------------------------- to bytes


def encode(
    message: Message, codec: Codec, plan: int, version: int = PROTOCOL_VERSION
) -> tuple[bytes, list[memoryview]]:
    """Head, in that version of the protocol, and the pieces of the body; these may be views of the message's tensors.

    Raises LocalProtocolError for what no peer would take, for example numbers that are not finite.
    """
    parts, body = [], []
    for field, tensor in zip(_layout(message.head, message.stage), message.tensors, strict=True):
        part, data = _encode(field, tensor.detach(), codec)
        parts.append(part)
        body.append(data.data.cast("B"))
        missing = part.size - len(body[-1])
        if missing:
            body.append(memoryview(bytes(missing)))
    return encode_envelope(Envelope(version, plan, message.stage, message.head, tuple(parts))), body


def size(message: Message, codec: Codec) -> int:
    """Bytes of its body."""
    fields = zip(_layout(message.head, message.stage), message.tensors, strict=True)
    return sum(Part(_coding(field, codec), tuple(tensor.shape)).size for field, tensor in fields)


def rounded(values: Tensor, codec: Codec) -> Tensor:
    """A copy of `values` as the other end will have them; the codec then changes them no more."""
    part, data = _encode(_Field("values", ()), values.detach(), codec)
    result = _numbers(part, bytearray(data.tobytes())) if codec != "float32" else values.detach().clone()
    return result.to(values.device, values.dtype)


def _coding(field: _Field, codec: Codec) -> Literal["float32", "bfloat16", "int8", "int32", "bits"]:
    match field.kind:
        case "values":
            return codec
        case "whole":
            return "int32"
        case "bits":
            return "bits"
    return "float32"


def _encode(field: _Field, tensor: Tensor, codec: Codec) -> tuple[Part, np.ndarray]:
    """What is said of a tensor, and its bytes."""
    coding = _coding(field, codec)
    part, flat = Part(coding, tuple(tensor.shape)), tensor.cpu().contiguous().view(-1)
    if coding == "bits":
        return part, np.packbits(flat.numpy())
    if coding == "int32":
        return part, flat.to(torch.int32).numpy()
    if not bounded(flat):
        raise LocalProtocolError("numbers that are not finite, or too large, are not sent")
    if coding == "float32":
        return part, flat.to(torch.float32).numpy()
    if coding == "bfloat16":
        return part, flat.to(torch.bfloat16).view(torch.int16).numpy()
    blocks = pad(flat.float(), (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1).to(torch.bfloat16)
    scale[scale < SMALLEST] = 0
    ratio = blocks * (127 / scale.float()).nan_to_num_(posinf=0)[:, None]
    codes = ratio.round_().clamp_(-127, 127).to(torch.int8)  # the scale may have been rounded down
    return part, np.concatenate([scale.view(torch.uint8).numpy(), codes.view(torch.uint8).view(-1).numpy()])


def bounded(values: Tensor) -> bool:
    """Whether all are numbers, and none too large."""
    low, high = values.aminmax()
    return bool(low >= -LARGEST) and bool(high <= LARGEST)  # NaN is neither


# --------------------------------------------------------------------- what may come


def judge(head: bytes, size: int, limits: Limits) -> Envelope:
    """Look at a head and the size of its body before the body is read.

    Raises RemoteProtocolError: size, schema, version (of the head); plan, stage, sender, place; shape, size (of the
    body).
    """
    envelope = decode_envelope(head)
    if envelope.plan != limits.plan:
        raise RemoteProtocolError("plan", f"plan {envelope.plan}, here it is {limits.plan}")
    _judge_ends(envelope.head, envelope.stage, limits)
    _dimensions(envelope, limits)
    if size != envelope.size:
        raise RemoteProtocolError("size", f"body of {size} bytes, its parts take {envelope.size}")
    return envelope


def _judge_ends(head: Head, to: int, limits: Limits) -> None:
    """Whether this is for a stage here, and from whom it must come."""
    if to not in limits.here:
        raise RemoteProtocolError("stage", f"for stage {to}, which is not here")
    last = limits.stages - 1
    from_stage = 0
    for_lead = False
    match head:
        case Forward():
            way = route(limits.stages, head.microbatch, head.swapped)
            if head.place >= len(way) or way[head.place].stage != to:
                raise RemoteProtocolError("place", f"stage {to} does not have place {head.place}")
            from_stage = way[max(0, head.place - 1)].stage
        case Backward():
            if not limits.sender:
                raise RemoteProtocolError("sender", "a gradient from a peer without a stage")
            return
        case TiedGradient() | TiedMatrix() | Share():
            if to not in (0, last):
                raise RemoteProtocolError("stage", f"no embedding is tied at stage {to}")
            first = isinstance(head, Share) and head.block == 0  # what the lead asks for
            from_stage = 0 if first else last - to
        case LossGradient():
            if to != last:
                raise RemoteProtocolError("stage", f"no log-probabilities come from stage {to}")
        case Prefill() | Step():
            from_stage = max(0, to - 1)
        case Logprobs() | Tokens():
            from_stage, for_lead = last, True
        case GradientNorm() | StageStatus() | TurnFailed():
            from_stage, for_lead = head.stage, True
        case _:
            pass
    if for_lead != (to == LEAD):
        raise RemoteProtocolError("stage", f"a {type(head).__name__} for stage {to}")
    if from_stage not in limits.sender:
        raise RemoteProtocolError("sender", f"a {type(head).__name__} must come from stage {from_stage}")


def _dimensions(envelope: Envelope, limits: Limits) -> Mapping[str, int]:
    """What each symbol of the layout means; RemoteProtocolError (shape) if parts do not fit it, or are too large."""
    head, layout = envelope.head, _layout(envelope.head, envelope.stage)
    if len(layout) != len(envelope.parts):
        raise RemoteProtocolError("shape", f"{len(envelope.parts)} parts, {len(layout)} belong to it")
    found = {"1": 1, "H": limits.width, "V": limits.vocabulary}
    if isinstance(head, TiedGradient | TiedMatrix):
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
        product = 1
        for symbol in symbols.split():
            product *= found.get(symbol, 0)
        if product > limit:
            raise RemoteProtocolError("shape", f"{symbols} = {product}, at most {limit} are expected")
    if isinstance(head, Prefill):
        wanted = (found["P"] * head.n, limits.prompt, limits.length)
        if found["W"] != wanted[0] or found["T"] > wanted[1] or head.limit > wanted[2]:
            raise RemoteProtocolError("shape", f"{(found['W'], found['T'], head.limit)} instead of {wanted}")
    if isinstance(head, Step):
        if head.step >= limits.length:
            raise RemoteProtocolError("shape", f"token {head.step}, samples have at most {limits.length}")
        if head.picked and found["P"] * found["G"] != found["W"]:
            raise RemoteProtocolError("shape", f"{found['W']} rows are not {found['P']} x {found['G']}")
    return found | {"T+1": found.get("T", 0) + 1, "": 2**31}


# --------------------------------------------------------------------- from bytes


def decode(head: bytes, body: bytearray, limits: Limits) -> Message:
    """The message. Raises RemoteProtocolError as `judge` does, and: nonfinite, values."""
    envelope = judge(head, len(body), limits)
    found = _dimensions(envelope, limits)
    tensors = []
    layout = _layout(envelope.head, envelope.stage)
    for field, part, data in zip(layout, envelope.parts, _pieces(envelope, body), strict=True):
        tensor = _numbers(part, data)
        if field.kind in ("values", "exact", "unit"):
            if not bounded(tensor.view(-1)):
                raise RemoteProtocolError("nonfinite", f"a number of {type(envelope.head).__name__} is not finite")
            if field.kind == "unit" and not (tensor.min() >= 0 and tensor.max() < 1):
                raise RemoteProtocolError("values", "uniform numbers are at least 0 and less than 1")
        elif field.kind == "whole" and not (tensor.min() >= 0 and tensor.max() < found[field.below]):
            raise RemoteProtocolError("values", f"an index is negative, or {found[field.below]} or more")
        tensors.append(tensor)
    if isinstance(envelope.head, Prefill) and tensors[1].min() < 1:
        raise RemoteProtocolError("values", "a prompt without a token")
    return Message(envelope.stage, envelope.head, tuple(tensors))


def _pieces(envelope: Envelope, body: bytearray) -> Iterator[bytearray | memoryview]:
    """The bytes of each part."""
    whole = memoryview(body)
    for part in envelope.parts:
        yield whole[: part.size]
        whole = whole[part.size :]


def _numbers(part: Part, data: bytearray | memoryview) -> Tensor:
    """The tensor that a part's bytes stand for: float32, int64 or bool. It may be a view of them."""
    n = part.values
    if part.coding == "bits":
        flat = torch.from_numpy(np.unpackbits(np.frombuffer(data, np.uint8), count=n).view(np.bool_))
    elif part.coding == "int32":
        flat = torch.frombuffer(data, dtype=torch.int32, count=n).long()
    elif part.coding == "float32":
        flat = torch.frombuffer(data, dtype=torch.float32, count=n)
    elif part.coding == "bfloat16":
        flat = torch.frombuffer(data, dtype=torch.bfloat16, count=n).float()
    else:
        blocks = -(-n // BLOCK)
        scale = torch.frombuffer(data, dtype=torch.bfloat16, count=blocks).float() / 127
        codes = torch.frombuffer(data, dtype=torch.int8, count=blocks * BLOCK, offset=2 * blocks)
        flat = (codes.view(-1, BLOCK) * scale[:, None]).view(-1)[:n]
    return flat.view(part.shape)
