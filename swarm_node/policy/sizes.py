"""Memory of a round, from the shape of a model; and which open models a machine carries. Loads no torch.

memory = weights + 12 bytes a trained parameter (fp32 gradient and Adam's two moments; + a master copy below fp32)
       + reference copy + keys and values of the sampled tokens + activations of one microbatch + logits chunks
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_node.config import GrpoConfig, NodeConfig

QUANTISED_BYTES = {"nf4": 1 / 2 + 1 / 64 + 1 / 4096, "int8": 1.0}  # of a weight of a linear layer, with its scales
HEAD_BYTES = 3 * 64 * 2**20  # logits, log-softmax and gradient of one chunk of the head
RUNTIME_BYTES = 450 * 2**20  # Python, torch and transformers themselves
GROUPS = 8  # groups of a round if `rollouts.groups` is 0, of all but small models
PROMPT_TOKENS = 200  # of a question with its chat template
MICROBATCH = 2048  # `grpo.microbatch_tokens` that goes with a proposal: activations of the default take most memory
PART = 0.8  # of the free memory that a proposal may take
MOST_ON_CPU = 1_000_000_000  # parameters of the largest model that is proposed without a GPU: larger ones are too slow


@dataclass(frozen=True)
class Shape:
    """What the memory of a round depends on."""

    parameters: int
    trained: int
    width: int  # bytes of a weight
    layers: int
    hidden: int
    inner: int  # width of the feed-forward layers
    kv_width: int  # width of all keys of a layer, as of all values
    saved: int = 0  # bytes that the weights take less because some are quantised


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

    def shape(self, rank: int, width: int, quantize: str | None = None) -> Shape:
        """Its shape with an adapter of that rank on all linear layers, and weights of `width` bytes, unless linear
        layers are quantised."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        linear = self.layers * self.hidden * (2 * q + 2 * kv + 3 * self.inner)
        saved = int(linear * (width - QUANTISED_BYTES[quantize])) if quantize else 0
        ends = 2 * (self.hidden + q) + 2 * (self.hidden + kv) + 3 * (self.hidden + self.inner)
        adapter = self.layers * rank * ends
        return Shape(self.parameters + adapter, adapter, width, self.layers, self.hidden, self.inner, kv, saved)

    @property
    def download_bytes(self) -> int:
        """Bytes of its files on the hub, which have two bytes a weight."""
        return 2 * self.parameters

    def whole(self) -> Shape:
        """Its shape if all weights are trained, which are then float32."""
        kv = self.kv_heads * self.head
        return Shape(self.parameters, self.parameters, 4, self.layers, self.hidden, self.inner, kv)


KNOWN = (
    KnownModel("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, 30, 576, 1536, 9, 3, 64),
    KnownModel("HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, 32, 960, 2560, 15, 5, 64),
    KnownModel("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, 24, 896, 4864, 14, 2, 64),
    KnownModel("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, 28, 1536, 8960, 12, 2, 128),
    KnownModel("Qwen/Qwen3-1.7B", 1_720_574_976, 28, 2048, 6144, 16, 8, 128),
    KnownModel("Qwen/Qwen3-4B", 4_022_468_096, 36, 2560, 9728, 32, 8, 128),
    KnownModel("Qwen/Qwen3-8B", 8_190_735_360, 36, 4096, 12288, 32, 8, 128),
)
"""Well-known open models, the smallest first."""


def round_bytes(shape: Shape, grpo: GrpoConfig, cached: int, trained: int, reference: bool) -> int:
    """Bytes of a round in which `cached` tokens are sampled (with prompts) and `trained` tokens are trained on.
    `reference`: the weights of before training are kept."""
    weights = shape.parameters * shape.width - shape.saved
    learning = shape.trained * (12 if shape.width == 4 else 16)
    cache = 2 * shape.layers * shape.kv_width * shape.width * cached
    microbatch = min(trained, grpo.microbatch_tokens)
    activations = microbatch * shape.layers * (8 * shape.hidden + 4 * shape.inner) * shape.width
    kept = weights if reference else 0
    return RUNTIME_BYTES + weights + learning + kept + cache + activations + HEAD_BYTES


def bytes_with(model: KnownModel, config: NodeConfig, gpu: bool) -> int:
    """Bytes that a round of `config` takes on that model, in microbatches of MICROBATCH: with an adapter, unless
    `policy.lora` is false."""
    rollouts, grpo = config.rollouts, config.grpo
    groups, kept = rollouts.groups or GROUPS, min(grpo.answers or rollouts.group_size, rollouts.group_size)
    sampled = groups * (rollouts.group_size * rollouts.max_new_tokens + PROMPT_TOKENS)
    trained = groups * kept * (rollouts.max_new_tokens + PROMPT_TOKENS)
    all_weights = config.policy.lora is False
    policy, width = config.policy, 2 if gpu else 4
    shape = model.whole() if all_weights else model.shape(policy.lora_rank, width, policy.quantize)
    small = grpo.model_copy(update={"microbatch_tokens": MICROBATCH})
    return round_bytes(shape, small, sampled, trained, reference=False)


def largest_fitting(config: NodeConfig, free: int, gpu: bool) -> KnownModel | None:
    """The largest of the known models of which a round takes at most a part of `free` bytes; None if none does."""
    fitting = (
        model
        for model in KNOWN
        if bytes_with(model, config, gpu) <= PART * free and (gpu or model.parameters <= MOST_ON_CPU)
    )
    return max(fitting, key=lambda model: model.parameters, default=None)
