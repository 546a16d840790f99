"""Messages between the stages of a policy: heads of the messages on their channels.

    message = head (msgpack: `Envelope`) | body (its parts one behind the other)

The leader holds stage 0 and drives everything. A *turn* is one pass over microbatches or one generation; the leader
numbers turns, and messages of an earlier turn are dropped. A channel's ends are authenticated by their peer ids, so
heads are not signed. `plan` is the number of the crew's plan that both ends must follow. The fields of a head and the
parts that belong to it are checked by `swarm_node.pipeline.messages` before the body is read.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from swarm_protocol.codec import RecordCodec
from swarm_protocol.limits import MAX_HEAD_BYTES, MAX_STAGES, MAX_TOKENS
from swarm_protocol.messages import Count, StageNumber

MAX_MICROBATCHES: Final = 4096  # microbatches of a pass: 16 million tokens at 4096 each
MAX_SAMPLES: Final = 4096  # samples of a prompt
BLOCK: Final = 64  # values that share a scale in int8
ALIGNMENT: Final = 4  # each part of a body begins at a multiple of so many bytes

ActivationCodec = Literal["float32", "bfloat16", "int8"]
"""Coding of activations and gradients: 32, 16 or 8.25 bits a value."""
Coding = Literal["float32", "bfloat16", "int8", "int32", "bits"]
"""Coding of a tensor, little-endian. int8 = blocks of 64 values: bfloat16 scales of all blocks, then codes of all; bits
= eight booleans a byte, the first one highest."""
Microbatch = Annotated[int, Meta(ge=0, lt=MAX_MICROBATCHES)]
Temperature = Annotated[float, Meta(gt=0, le=100)]
Dimension = Annotated[int, Meta(ge=1, lt=2**31)]
Squares = Annotated[float, Meta(ge=0, le=1e300)] | None  # of a gradient; `None` = their sum is not finite


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Compute a microbatch's next place: token ids [R, T] at the first, hidden states [R, T, H] at others."""

    turn: Count
    total: Count
    """Number of the sum that its gradient is to be added to: a stage begins each from zero. 0 = no gradient."""
    microbatch: Microbatch
    microbatches: Annotated[int, Meta(ge=1, le=MAX_MICROBATCHES)]
    """Microbatches in the turn. With `swapped`, their number decides the schedule."""
    place: Annotated[int, Meta(ge=0, lt=MAX_STAGES + 2)]  # position in the route of the microbatch
    temperature: Temperature
    entropy: bool = False  # entropies are wanted too
    reference: bool = False  # compute with the weights from before training
    swapped: bool = False  # odd microbatches take another order of stages (CheckFree+)
    packed: bool = False  # positions and a mask come along


class Backward(msgspec.Struct, frozen=True, tag="backward"):
    """Gradient [R, T, H] of the loss with respect to the output of a place of the route."""

    turn: Count
    microbatch: Microbatch
    place: Annotated[int, Meta(ge=0, lt=MAX_STAGES + 2)]


class Logprobs(msgspec.Struct, frozen=True, tag="logprobs"):
    """To the leader: log-probabilities [N] of a microbatch's targets, and entropies [N] if requested."""

    turn: Count
    microbatch: Microbatch
    entropy: bool = False


class LossGradient(msgspec.Struct, frozen=True, tag="loss"):
    """From the leader: gradient [N] of the loss with respect to these log-probabilities."""

    turn: Count
    microbatch: Microbatch


class GradientNormRequest(msgspec.Struct, frozen=True, tag="squares"):
    """From the leader, after the last microbatch: asks for the norm of the gradient."""

    total: Count


class TiedGradient(msgspec.Struct, frozen=True, tag="tied"):
    """Between the first and the last stage: rows [B, H] of the sender's gradient of the matrix that both hold. The next
    rows follow when the other stage's rows have arrived."""

    total: Count
    block: Count = 0  # number of the block of rows


class GradientNorm(msgspec.Struct, frozen=True, tag="squared", omit_defaults=True):
    """To the leader: sum of the squares of a stage's gradient."""

    total: Count
    stage: StageNumber
    squares: Squares
    came: Annotated[tuple[tuple[StageNumber, Squares], ...], Meta(max_length=8)] = ()
    """Stage -> sum of the squares of the gradients that it sent this one. Nodes of protocol 1 read past it."""


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """From the leader: update with the gradient times `scale`, unless update number `update` has been made."""

    update: Count
    scale: Annotated[float, Meta(ge=0, le=1)]
    rate: Annotated[float, Meta(ge=0, le=1e3)]


class SetUpdates(msgspec.Struct, frozen=True, tag="skip"):
    """From the leader, to a stage that was rebuilt: the crew has made `update` updates; count from there."""

    update: Count


class Share(msgspec.Struct, frozen=True, tag="share"):
    """From the leader, to the first or the last stage: give the other one the matrix that both hold. The other one then
    asks for one block after the other."""

    keep: bool = False
    """Both stages keep the matrix's moments: it was averaged with other crews, and neither stage is new."""
    block: Count = 0  # number of the block of rows; the leader asks for the first


class TiedMatrix(msgspec.Struct, frozen=True, tag="matrix"):
    """Between the first and the last stage: rows [B, H] of the matrix that both hold. Both reset its moments."""

    keep: bool = False  # both keep the moments; see `Share`
    block: Count = 0  # number of the block of rows. With the last block, the matrix is in use.


class StatusRequest(msgspec.Struct, frozen=True, tag="ask"):
    """From the leader: asks for the progress of a stage."""


class StageStatus(msgspec.Struct, frozen=True, tag="state"):
    """To the leader: the progress of a stage."""

    stage: StageNumber
    updates: Count
    omega: Annotated[float, Meta(ge=0, le=1e300)]  # norm, before clipping, of its layers' gradient in the last update
    taken: bool = False  # the stage has just taken over the matrix of the other end
    new: bool = False  # the stage was built, and since then has neither received `SetUpdates` nor begun a gradient


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """Begin to sample: prompts' token ids [P, T] or hidden states [P, T, H], their lengths [P], uniform numbers
    [P * n] for the first tokens."""

    turn: Count
    wave: StageNumber  # number of one of the turn's groups of prompts, which follow each other through the stages
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]  # samples a prompt
    limit: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]  # most tokens of a sample
    temperature: Temperature
    top_p: Annotated[float, Meta(gt=0, le=1)]


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Compute one token of each sample: ids [W] or hidden states [W, H], and uniform numbers [W] for the next."""

    turn: Count
    wave: StageNumber
    step: Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]  # number of the tokens that are appended
    picked: bool = False  # first keep only some rows: prompts [P] and columns [P, G] come along


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """To the leader: next tokens [W] and their log-probabilities [W]."""

    turn: Count
    wave: StageNumber
    step: Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]  # number of these tokens


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """From the leader: forget the work of this turn and of earlier ones."""

    turn: Count


class TurnFailed(msgspec.Struct, frozen=True, tag="trouble"):
    """To the leader: this turn cannot go on."""

    turn: Count
    stage: StageNumber
    what: Literal["memory", "refused"]  # `refused`: a message made no sense to the stage, or is more than it takes


Head = (
    Forward
    | Backward
    | Logprobs
    | LossGradient
    | GradientNormRequest
    | TiedGradient
    | GradientNorm
    | Apply
    | SetUpdates
    | Share
    | TiedMatrix
    | StatusRequest
    | StageStatus
    | Prefill
    | Step
    | Tokens
    | Reset
    | TurnFailed
)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the body."""

    coding: Coding
    shape: Annotated[tuple[Dimension, ...], Meta(max_length=4)]

    @property
    def values(self) -> int:
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes, with those that fill up to the next part."""
        blocks = -(-self.values // BLOCK)
        size = {
            "float32": 4 * self.values,
            "bfloat16": 2 * self.values,
            "int8": (2 + BLOCK) * blocks,
            "int32": 4 * self.values,
            "bits": -(-self.values // 8),
        }[self.coding]
        return -(-size // ALIGNMENT) * ALIGNMENT


class Envelope(msgspec.Struct, frozen=True):
    """The head of a message."""

    protocol: Count
    plan: Count  # number of the crew's plan that the sender goes by
    stage: Annotated[int, Meta(ge=-1, lt=MAX_STAGES)]  # receiver: a stage, or -1 for the leader's loop
    head: Head
    parts: Annotated[tuple[Part, ...], Meta(max_length=6)] = ()

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return sum(part.size for part in self.parts)


_codec: RecordCodec[Envelope] = RecordCodec(Envelope, MAX_HEAD_BYTES)
encode_envelope, decode_envelope = _codec.encode, _codec.decode
