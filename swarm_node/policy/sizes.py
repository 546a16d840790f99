"""Memory of a round, from the shape of a model; and which open models a machine carries. Loads no torch.

    memory   = program + weights + optimiser + reference + copies for averaging + what is larger of
    sampling = a merged copy of the weights + keys and values of all tokens + logits of one step
               + what is larger of the draw and of one layer's work on the prompts
    update   = what is larger of activations of one microbatch + logits of one chunk, and gradients

A loaded policy measures its activations (`activations`); `Shape.activations` computes the same numbers for a decoder of
the Llama kind, layer by layer. Tests compare both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from swarm_node.config import NodeConfig


def program_bytes(torch: str) -> int:
    """Bytes of Python, torch and transformers themselves, after an update; `torch` is a file in torch's directory. A
    torch for GPUs takes more, also where it computes on a CPU (measured: 453 and 830 MiB)."""
    libraries = Path(torch).parent / "lib"
    is_for_gpus = any((libraries / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip"))
    return (500 + 380 * is_for_gpus) * 2**20


QUANTISED_BYTES = {"nf4": 1 / 2 + 1 / 64 + 1 / 4096, "int8": 1.0}  # of a weight of a linear layer, with its scales
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 2 * 4 / 256}
"""Bytes of a weight's two moments, and of their scales, by `grpo.optimizer`."""
RUNTIME_BYTES = program_bytes(getattr(find_spec("torch"), "origin", None) or "/")
CHUNK_BYTES = 64 * 2**20  # float32 logits of one chunk of the head on a CPU, see `logprobs`
SLICE_BYTES = 16 * 2**20  # float32 logits of the rows that a CPU draws from at a time
CHUNK_BYTES_ON_GPU = 512 * 2**20
COPIED_BYTES = 512 * 2**20  # a CPU samples from a copy of weights that take at most this much; see `engines.products`
SPARE_ON_GPU = 1.2
"""Memory of activations that torch takes on a GPU, over what they need: 1.20 and 1.18 with models of 0.5B and 3B, the
only two that were measured (docs/evidence.md)."""
SPARE_IN_HEAP = {"all weights": 1.5, "adapter": 2.0, "adapter of a small model": 2.4, "adapter over 16 bits": 1.3}
"""The same for the C library's heap, whose gaps cost more with more tensors of different sizes (benchmarks/memory.py).
With an adapter of SmolLM2 1.84 and 1.87 were measured. There are none where large tensors are mapped one by one, see
`oom`."""
AVERAGING_COPIES = 5  # of what is trained in float32 during an exchange (docs/evidence.md)
SMALL = 20_000_000
"""Below this many parameters, of which all are trained, the defaults are those of a small model: learning rate and its
schedule, groups of a round, answers trained on, questions asked at a time, length of answers. An adapter has its own
learning rate."""
GROUPS = 8  # groups of a round if `rollouts.groups` is 0, of all but small models
PROMPT_TOKENS = 200  # of a question with its chat template
PART = 0.8  # of the free memory that a proposal may take
MOST_ON_CPU = 1_000_000_000  # parameters of the largest model that is proposed without a GPU: larger ones are too slow


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward pass keeps for its backward pass, of a row of T tokens: fixed + token T + pair T^2."""

    token: float
    pair: float
    fixed: float = 0.0
    inputs: float = 0.0  # of a token with gradient checkpointing: the input of each layer
    layer: float = 0.0  # of a token in one layer, which is computed again then

    def of(self, tokens: int, longest: int, checkpointing: bool) -> float:
        """Bytes for rows with `tokens` tokens together, of which the longest has `longest`. With gradient checkpointing
        one layer comes on top of them when it is computed again."""
        each = self.inputs if checkpointing else self.token
        return self.fixed + each * tokens + self.pair * tokens * longest


@dataclass(frozen=True)
class Shape:
    """What the memory of a round depends on."""

    parameters: int
    trained: int
    width: int  # bytes of a weight
    layers: int
    hidden: int
    inner: int  # width of the feed-forward layers
    q_width: int  # width of all queries of a layer
    kv_width: int  # width of all keys of a layer, as of all values
    heads: int
    vocabulary: int
    rank: int = 0  # of the adapter; 0 = all weights are trained
    normed: bool = False  # whether queries and keys have norms of their own
    saved: int = 0  # bytes that the weights take less because some are quantised
    adamw_8bit: bool = False  # whether moments are in 8 bits, but those of the embedding

    @property
    def weights(self) -> int:
        return self.parameters * self.width - self.saved

    @property
    def optimiser(self) -> int:
        """Bytes of Adam's two moments, and of a float32 copy of trained weights in 16 bits. Adapters are float32."""
        in_8_bits = self.trained - (0 if self.rank else self.vocabulary * self.hidden) if self.adamw_8bit else 0
        saved = int((MOMENT_BYTES["adamw"] - MOMENT_BYTES["adamw_8bit"]) * in_8_bits)
        master = 0 if self.rank or self.width == 4 else 4
        return int((MOMENT_BYTES["adamw"] + master) * self.trained) - saved

    @property
    def gradients(self) -> int:
        """Bytes of the gradients, once more in float32 if they are in 16 bits."""
        return self.trained * (4 if self.rank or self.width == 4 else 6)

    @property
    def cached(self) -> int:
        """Bytes of the keys and values of a token."""
        return 2 * self.layers * self.kv_width * self.width

    @property
    def working(self) -> int:
        """Bytes of a token that operations of the backward pass take beside what was kept: gradients inside a
        feed-forward layer, and of the hidden state."""
        return 2 * self.inner * self.width + 2 * self.hidden * 4

    def spare(self, gpu: bool, mapped: bool) -> float:
        """Memory that activations take, over what they need."""
        if gpu:
            return SPARE_ON_GPU
        if mapped:
            return 1.0
        if not self.rank:
            return SPARE_IN_HEAP["all weights"]
        small = " of a small model" if self.parameters < SMALL else ""
        return SPARE_IN_HEAP[f"adapter{small}" if self.width == 4 else "adapter over 16 bits"]

    @property
    def activations(self) -> Activations:
        """What a forward pass over packed rows keeps, in a decoder of the Llama kind."""
        h, q, kv, i, w = self.hidden, self.q_width, self.kv_width, self.inner, self.width
        each = 4 * self.heads + 8  # log-sum-exp of attention, and the scales of two norms
        if not self.rank:
            layer = each + w * (6 * h + 4 * q + 4 * i) + self.normed * 2 * w * (q + kv)
        elif w == 4:
            layer = each + 4 * (4 * h + 4 * q + 4 * i + 7 * self.rank) + self.normed * 4 * (q + kv)
        else:  # inputs of adapters and norms are kept in float32 as well
            layer = each + 4 * (7 * h + q + i + 7 * self.rank) + w * (4 * q + 3 * i) + self.normed * 4 * (q + kv)
        inputs = self.layers * w * h + 4 * h * (1 if self.rank else 2)  # of layers, and what the last norm keeps
        return Activations(self.layers * layer, w + 1, 0.0, inputs, layer)


@dataclass(frozen=True)
class Work:
    """What is done at a time in a round of which every answer runs to its limit."""

    answers: int  # answers sampled at a time
    sampled: int  # their tokens, prompts included
    tokens: int  # in the largest microbatch, padding included
    longest: int  # in its longest row
    targets: int  # tokens of answers in it
    several: bool = True  # whether an update has more than one microbatch
    checkpointing: bool = False
    mapped: bool = True  # whether large tensors are mapped one by one, on a CPU
    copied: int = 0  # bytes of the copy of the weights that is sampled from, if it is known
    prefilled: int = 0  # tokens of prompts that sampling computes at once
    native: bool = True  # whether the native engine samples


def head_bytes(shape: Shape, targets: int, gpu: bool) -> int:
    """Bytes of logits, log-softmax and gradient of one chunk of the head. A CPU's products in 16 bits also copy its
    weights."""
    copied = 0 if gpu or shape.width == 4 else shape.vocabulary * shape.hidden * shape.width
    return copied + 3 * min(4 * shape.vocabulary * targets, CHUNK_BYTES_ON_GPU if gpu else CHUNK_BYTES)


def update_bytes(shape: Shape, kept: Activations, work: Work, gpu: bool) -> int:
    """Bytes of an update beside weights and optimiser, at the head or at the end of the backward pass.

    The gradients of head and embedding are dense. If they share weights, both are there at the end, beside the
    gradients of all layers; few models whose weights are all trained here have them apart."""
    spare = shape.spare(gpu, work.mapped)
    activations = spare * kept.of(work.tokens, work.longest, work.checkpointing)
    again = spare * kept.layer * work.tokens if work.checkpointing else 0.0
    embedding = 0 if shape.rank else shape.vocabulary * shape.hidden * shape.width
    largest = activations + max(head_bytes(shape, work.targets, gpu), again + shape.working * work.tokens)
    heap = 0.0 if gpu or work.mapped else activations  # it does not shrink; gradients of layers go into its gaps
    layers = 0 if work.several else shape.gradients - embedding
    update = max(largest + embedding, max(heap, layers) + 2 * embedding)
    return int(shape.gradients + update if work.several else update)


def sampling_bytes(
    shape: Shape, answers: int, tokens: int, prefilled: int = 0, native: bool = True, gpu: bool = False
) -> int:
    """Bytes of sampling `answers` answers that have `tokens` tokens together, prompts included, of which `prefilled`
    are computed at once.

    Memory for keys and values of all tokens is taken before prompts are computed. A CPU draws from slices of the
    logits. The native engine holds the logits of two steps, `generate` those of one and
    copies of two in float32."""
    if gpu:
        return shape.cached * tokens + 16 * shape.vocabulary * answers
    logits = shape.vocabulary * answers * (2 * shape.width if native else shape.width + 8)
    head = 0 if shape.width == 4 else shape.vocabulary * shape.hidden * shape.width
    drawn = 3 * min(4 * shape.vocabulary * answers, SLICE_BYTES)
    return shape.cached * tokens + logits + max(head + drawn, prefill_bytes(shape, native) * prefilled)


def prefill_bytes(shape: Shape, native: bool) -> int:
    """Bytes of a prompt's token inside a feed-forward layer. `generate` computes an adapter beside its layer: its
    result, scaled, and the sum, in float32."""
    h, i, w = shape.hidden, shape.inner, shape.width
    if native or not shape.rank:
        return w * (4 * i + 2 * h)
    return 2 * w * i + (12 if w == 2 else 8) * i + 2 * w * h + 4 * h


def round_bytes(
    shape: Shape, kept: Activations, work: Work, gpu: bool = False, reference: bool = False, copies: int = 0
) -> int:
    """Bytes of a round; see `lasting_bytes`."""
    copied = work.copied or copied_bytes(shape, gpu)
    sampling = sampling_bytes(shape, work.answers, work.sampled, work.prefilled, work.native, gpu)
    if copied:
        sampling = copied + max(sampling, copying_bytes(shape))
    return lasting_bytes(shape, gpu, reference, copies) + max(sampling, update_bytes(shape, kept, work, gpu))


def lasting_bytes(shape: Shape, gpu: bool = False, reference: bool = False, copies: int = 0) -> int:
    """Bytes that are held while a policy samples and learns. `reference`: the weights of before training are kept;
    `copies`: of what is trained in float32, for averaging, in main memory."""
    lasting = shape.weights + shape.optimiser + reference * shape.weights
    return lasting if gpu else lasting + RUNTIME_BYTES + copies * 4 * shape.trained


def copied_bytes(shape: Shape, gpu: bool) -> int:
    """Bytes of the copy of its weights that a small model is sampled from on a CPU; a larger one is not copied, unless
    there is ample memory."""
    whole = shape.weights + shape.saved
    return 0 if gpu or whole > COPIED_BYTES else whole


def copying_bytes(shape: Shape) -> int:
    """Bytes, at most, that making such a copy takes beside it, before anything is sampled: two matrices of a
    feed-forward layer in float32, dequantised or about to be packed."""
    return 2 * 4 * shape.hidden * shape.inner


@dataclass(frozen=True)
class KnownModel:
    """An open model, with the numbers of its config.json."""

    name: str  # id on the Hugging Face hub
    parameters: int
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int  # width of a head
    vocabulary: int = 151_936
    normed: bool = False  # whether queries and keys have norms of their own

    @property
    def linear(self) -> int:
        """Weights of linear layers, without the head."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        return self.layers * self.hidden * (2 * q + 2 * kv + 3 * self.inner)

    def shape(self, rank: int, width: int, quantize: str | None = None) -> Shape:
        """Its shape with an adapter of that rank on all linear layers, and weights of `width` bytes, unless linear
        layers are quantised. Rank 0: all weights are trained."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        ends = 2 * (self.hidden + q) + 2 * (self.hidden + kv) + 3 * (self.hidden + self.inner)
        adapter = self.layers * rank * ends
        return Shape(
            parameters=self.parameters + adapter,
            trained=adapter or self.parameters,
            width=width,
            layers=self.layers,
            hidden=self.hidden,
            inner=self.inner,
            q_width=q,
            kv_width=kv,
            heads=self.heads,
            vocabulary=self.vocabulary,
            rank=rank,
            normed=self.normed,
            saved=int(self.linear * (width - QUANTISED_BYTES[quantize])) if quantize else 0,
        )

    @property
    def download_bytes(self) -> int:
        """Bytes of its files on the hub, which have two bytes a weight."""
        return 2 * self.parameters

    def whole(self) -> Shape:
        """Its shape if all weights are trained, which are then float32."""
        return self.shape(0, 4)


KNOWN = (
    KnownModel("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, 30, 576, 1536, 9, 3, 64, 49_152),
    KnownModel("HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, 32, 960, 2560, 15, 5, 64, 49_152),
    KnownModel("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, 24, 896, 4864, 14, 2, 64),
    KnownModel("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, 28, 1536, 8960, 12, 2, 128),
    KnownModel("Qwen/Qwen3-1.7B", 1_720_574_976, 28, 2048, 6144, 16, 8, 128, normed=True),
    KnownModel("Qwen/Qwen3-4B", 4_022_468_096, 36, 2560, 9728, 32, 8, 128, normed=True),
    KnownModel("Qwen/Qwen3-8B", 8_190_735_360, 36, 4096, 12288, 32, 8, 128, normed=True),
)
"""Well-known open models, the smallest first."""


def bytes_with(model: KnownModel, config: NodeConfig, gpu: bool) -> int:
    """Bytes that a round of `config` takes on that model, in microbatches of one answer with gradient checkpointing if
    there is no memory for more: with an adapter, unless `policy.lora` is false."""
    policy, width = config.policy, 2 if gpu else 4
    whole = policy.lora is False
    shape = model.whole() if whole else model.shape(policy.lora_rank, width, policy.quantize)
    shape = replace(shape, adamw_8bit=config.grpo.optimizer == "adamw_8bit")
    return round_bytes(shape, shape.activations, least_work(config), gpu)


def least_work(config: NodeConfig, prompt: int = PROMPT_TOKENS) -> Work:
    """The work that takes least memory: one answer trained on at a time, one question's answers sampled at a time."""
    rollouts, checkpointing = config.rollouts, config.grpo.gradient_checkpointing != "off"
    answers, new = rollouts.group_size, rollouts.max_new_tokens
    length = prompt + new
    sampled = answers * new + prompt
    return Work(answers, sampled, length, length, new, checkpointing=checkpointing, prefilled=prompt)


def largest_fitting(config: NodeConfig, free: int, gpu: bool) -> KnownModel | None:
    """The largest of the known models of which a round takes at most a part of `free` bytes; None if none does."""
    fitting = (
        model
        for model in KNOWN
        if bytes_with(model, config, gpu) <= PART * free and (gpu or model.parameters <= MOST_ON_CPU)
    )
    return max(fitting, key=lambda model: model.parameters, default=None)
