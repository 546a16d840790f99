"""Which settings fit a machine, from a model's config alone: before anything is loaded. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from swarm_node.config import NodeConfig
from swarm_node.policy.sizes import KnownModel, largest_fitting, least_work, round_bytes

SHARE = 0.9
"""Part of the memory that a run plans with. The rest is for other programs, and for what the estimate misses."""
SHORTEST = 32  # tokens of an answer; shorter ones are not proposed
AGAIN = "--set grpo.gradient_checkpointing=auto"
EIGHT_BITS = "--set grpo.optimizer=adamw_8bit"
MOST_ANSWERS = 256  # to one question; larger groups are not proposed
GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """Where a policy is to be trained."""

    device: str  # cpu, cuda or mps
    available: int  # bytes of its memory that are free; 0 = not known
    most: int = 0  # bytes that its owner allows; 0 = all

    @property
    def room(self) -> float:
        """Bytes to plan with; infinite if nothing is known of them."""
        limits = [SHARE * self.available] * bool(self.available) + [float(self.most)] * bool(self.most)
        return min(limits, default=math.inf)

    @property
    def gpu(self) -> bool:
        """Whether it has memory of its own."""
        return self.device == "cuda"

    @property
    def in_words(self) -> str:
        if self.most and self.room == self.most:
            return f"the {self.most / GIB:.1f} GiB that --max-memory allows"
        return f"{self.available / GIB:.1f} GiB of {'GPU memory' if self.gpu else 'memory'}"


@dataclass(frozen=True)
class Training:
    """How a model is to be trained: what its memory depends on."""

    model: KnownModel
    config: NodeConfig
    lora: bool
    width: int  # bytes of a weight
    copies: int = 0  # of what is trained in float32, for averaging

    def least_bytes(self, gpu: bool) -> int:
        """Bytes of a round with one question sampled, and one of its answers trained on, at a time."""
        policy = self.config.policy
        shape = self.model.shape(policy.lora_rank if self.lora else 0, self.width, policy.quantize)
        shape = replace(shape, adamw_8bit=self.config.grpo.optimizer == "adamw_8bit")
        reference = bool(self.config.grpo.beta) and not self.lora
        return round_bytes(shape, shape.activations, least_work(self.config), gpu, reference, self.copies)

    def fits(self, machine: Hardware) -> bool:
        """Whether such a round fits into the room that a machine has."""
        return self.least_bytes(machine.gpu) <= machine.room

    def longest(self, machine: Hardware, positions: int) -> int:
        """The longest answers that fit, a power of two of tokens and at most half of `positions`; 0 if none do."""
        new = 1 << (max(2, positions // 2).bit_length() - 1)
        while new >= SHORTEST and not self.with_(rollouts={"max_new_tokens": new}).fits(machine):
            new //= 2
        return new if new >= SHORTEST else 0

    def widest(self, machine: Hardware) -> int:
        """The largest group of answers of the configured length that fits, a power of two; 0 if none does."""
        answers = MOST_ANSWERS
        while answers > 1 and not self.with_(rollouts={"group_size": answers}).fits(machine):
            answers //= 2
        return answers if answers > 1 else 0

    def with_(self, **sections: dict[str, object]) -> Training:
        """The same with other settings, by section of the configuration."""
        updated = {name: getattr(self.config, name).model_copy(update=update) for name, update in sections.items()}
        return replace(self, config=self.config.model_copy(update=updated))


def option_that_fits(training: Training, machine: Hardware) -> str:
    """The option with which a run fits that does not fit as it is; the least change that is enough. Empty = none is."""
    option = next((option for option, one in _smaller(training, machine) if one.fits(machine)), None)
    if option is None and (model := largest_fitting(training.config, machine.available, machine.gpu)) is not None:
        option = f"--model {model.name}"
    return option or ""


def sentence_of_refusal(training: Training, machine: Hardware, measured: int = 0) -> str:
    """The sentence about a run that does not fit: what it takes (the `measured` bytes, else computed ones), what there
    is, and the setting that fits."""
    needed, option = (measured or training.least_bytes(machine.gpu)) / GIB, option_that_fits(training, machine)
    remedy = f"it fits with {option}" if option else "take a smaller --model, or several machines (docs/stages.md)"
    if EIGHT_BITS in option:
        slow = "" if machine.gpu else " and makes an update many times as long"
        remedy += f", which needs the package bitsandbytes{slow}"
    return f"{training.model.name} needs at least {needed:.1f} GiB, of {machine.in_words} here: {remedy}"


def _smaller(training: Training, machine: Hardware) -> Iterator[tuple[str, Training]]:
    """Options that save memory with the training that they make, the least change first."""
    config, new, again = training.config, training.config.rollouts.max_new_tokens, ""
    if config.grpo.gradient_checkpointing == "off":
        training, again = training.with_(grpo={"gradient_checkpointing": "auto"}), AGAIN
        yield AGAIN, training
    eight_bits = f"{again} {EIGHT_BITS}".strip(), training.with_(grpo={"optimizer": "adamw_8bit"})
    offered = not training.lora and config.grpo.optimizer == "adamw"
    if offered and machine.device == "cuda":
        yield eight_bits
    ways = [(again, training)]
    if not training.lora:
        ways.append((f"{again} --lora".strip(), replace(training, lora=True, width=2 if machine.gpu else 4)))
    lora = ways[-1][1]
    if machine.device != "cuda" and lora.width == 4:
        half = f"{ways[-1][0]} --set policy.dtype=bfloat16".strip()
        ways.append((half, replace(lora, width=2)))
    if machine.device in ("cpu", "cuda") and config.policy.quantize != "nf4":
        ways.append((f"{again} --quantize nf4".strip(), lora.with_(policy={"quantize": "nf4"})))
    yield from ways[1:]
    if offered and machine.device == "cpu":  # there it is slow
        yield eight_bits
    for option, one in ways:
        shorter = new // 2
        while shorter >= SHORTEST:
            yield (
                f"{option} --set rollouts.max_new_tokens={shorter}".strip(),
                one.with_(rollouts={"max_new_tokens": shorter}),
            )
            shorter //= 2
