"""One stage of a policy: a model of the same class with fewer layers, which has read nothing but its own tensors.

    first stage:  ids -> embedding -> layers -> hidden
    middle:             hidden -> layers -> hidden
    last stage:         hidden -> layers -> norm -> head -> logits

The Hugging Face class is built from a cut config (its own number of layers) on the meta device, what other stages hold
is taken out, and its parameters are filled one by one from the files. Inside, layers count from 0; everything outside
a stage speaks the names of the whole policy, adapter included, so that the parameters of all stages put together are
those of the whole policy. A tied matrix is on the first stage as the embedding and on the last as the head, and has
one name.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.pipeline.compute.partition import ADAPTED, UNKNOWN, Parts, Span, partition, parts_of, sizes
from swarm_node.policy.adapters import lora_config, start_adapter, with_adapter
from swarm_node.policy.loading import Plan, lacks, model_file, prepare, refusing, skeleton, weight_map
from swarm_node.policy.logprobs import additive
from swarm_node.policy.vetting import ADAPTER_WEIGHTS, check_header

SAMPLED = 1024
"""Values of a tensor that tell files apart: 4 KiB."""


class Stage(nn.Module):
    """Some layers of a policy; with the embedding if they are the first, with norm and head if they are the last."""

    def __init__(self, span: Span, model: nn.Module, norm: nn.Module | None, config: Any, is_lora: bool) -> None:
        """`config` is that of the whole model."""
        super().__init__()
        self.span = span
        self.model = model
        """The cut Hugging Face model, or the PEFT model around it if any of its own modules has an adapter."""
        self.norm = norm
        """Of the last stage."""
        self.config = config
        self.is_lora = is_lora
        """Whether the policy is trained by an adapter, be there a part of it in this stage or not."""
        self.tied: bool = config.tie_word_embeddings
        """Whether embedding and head are one matrix."""
        self._parts = parts_of(config)

    @property
    def base(self) -> PreTrainedModel:
        """The cut model under the adapter, if there is one."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def embed(self) -> nn.Module | None:
        """Of the first stage."""
        return getattr(self._decoder, self._parts.embed)

    @property
    def head(self) -> nn.Module | None:
        """Of the last stage."""
        return self.base.get_output_embeddings()

    @property
    def shared(self) -> str | None:
        """Name of the trained matrix that the stage at the other end holds too."""
        span = self.span
        if not self.tied or span.is_first == span.is_last:
            return None
        matrix = self.embed if span.is_first else self.head
        return next((name for name, p in self.named().items() if p is getattr(matrix, "weight", None)), None)

    @property
    def device(self) -> torch.device:
        return self._decoder.layers[0].input_layernorm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.layers[0].input_layernorm.weight.dtype

    @property
    def _decoder(self) -> Any:
        return getattr(self.base, self._parts.decoder)

    # ----------------------------------------------------------------- passes

    def hidden(self, ids: Tensor) -> Tensor:
        """What goes into the first layer [R, T, H], of token ids [R, T]."""
        assert self.embed is not None, f"{self.span} has no embedding"
        return self.embed(ids)

    def layers(
        self, hidden: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Through the layers, [R, T, H] -> [R, T, H]; positions and mask as in `logprobs.TokenBatch`."""
        hidden = hidden.to(self.dtype)
        return self._decoder(
            inputs_embeds=hidden,
            position_ids=position_ids,
            attention_mask=additive(attention_mask, hidden.dtype),
            use_cache=False,
        ).last_hidden_state

    def final(self, hidden: Tensor) -> Tensor:
        """What goes into the head, of what comes out of the last layer; both [..., H]."""
        assert self.norm is not None, f"{self.span} has no norm"
        return self.norm(hidden)

    # ----------------------------------------------------------------- names

    def named(self, trainable: bool = True) -> dict[str, nn.Parameter]:
        """Its parameters by their names in the whole policy: the trained ones, or all."""
        parts = self._parts
        own = dict(self.base.named_parameters())
        if self.norm is not None:
            own |= {f"{parts.decoder}.{parts.norm}.{name}": p for name, p in self.norm.named_parameters()}
        prefix = ADAPTED if self.is_lora else ""
        return {
            prefix + _global(name, self.span.first, parts, self.tied): parameter
            for name, parameter in own.items()
            if parameter.requires_grad or not trainable
        }


def _global(name: str, first: int, parts: Parts, tied: bool) -> str:
    """The whole model's name of what is called `name` in a cut one whose first layer is layer `first`."""
    if tied and name in _head_names(parts):
        return parts.embedding
    return _shifted(name, first, parts)


def _shifted(name: str, by: int, parts: Parts) -> str:
    """`model.layers.2.x` -> `model.layers.7.x`, if shifted by 5; what is in no layer keeps its name."""
    return re.sub(rf"^({re.escape(parts.layers)})(\d+)", lambda found: f"{found[1]}{int(found[2]) + by}", name)


def _head_names(parts: Parts) -> list[str]:
    return [f"{head}.weight" for head in parts.heads]


# --------------------------------------------------------------------- loading


def load_stage(config: PolicyConfig, span: Span | tuple[int, int], report: Callable[[str], None] = print) -> Stage:
    """Load one stage of the policy that `config` names and say through `report` what was chosen.

    span  which; (index, count) = of `count` stages on machines that are alike

    UserError if the model cannot be found or read, is of a family that cannot be cut, or has no such stage.
    """
    plan = prepare(config, alone=False)
    parts = parts_of(plan.config)
    if getattr(plan.config, "quantization_config", None) is not None:
        raise UserError(f"{plan.base} is quantised: to cut it into stages, give the model that it was made from")
    span = _checked(span, plan)
    base = _cut(span, plan, parts)
    _fill(base, span, plan, parts)
    model = _adapted(base, span, plan, parts, config) if plan.lora else base
    decoder = getattr(base, parts.decoder)
    norm = getattr(decoder, parts.norm) if span.is_last else None
    setattr(decoder, parts.norm, nn.Identity())
    stage = Stage(span, model, norm, plan.config, plan.lora)
    stage.eval()  # for good, as in `load_policy`
    if plan.adapter is not None:
        _fill_adapter(stage, plan.adapter)
    elif plan.lora:
        start_adapter(stage.named(), plan.config)
    own = sum(p.numel() for p in stage.named(trainable=False).values())
    trained = f"LoRA: {sum(p.numel() for p in stage.named().values()):,} of them trained"
    report(f"{span} of {config.model}: {own:,} parameters ({trained if plan.lora else 'all trained'})")
    report(plan.where)
    return stage


def _checked(span: Span | tuple[int, int], plan: Plan) -> Span:
    """The stage itself; UserError if this model has no such stage."""
    index, count = (span.index, span.count) if isinstance(span, Span) else span
    layers = plan.config.num_hidden_layers
    if not 0 <= index < count:
        raise UserError(f"there is no stage {index} of {count}: the first is 0")
    if not isinstance(span, Span):
        return partition(*sizes(plan.config, plan.dtype.itemsize), [UNKNOWN] * count)[index]
    whole = span.is_first == (span.first == 0) and span.is_last == (span.end == layers)
    if span.layers != layers or not 0 <= span.first < span.end <= layers or not whole:
        raise UserError(f"{span} is no stage of {plan.base}, which has {layers} layers")
    return span


def _cut(span: Span, plan: Plan, parts: Parts) -> PreTrainedModel:
    """The model without what other stages hold, on the meta device."""
    config = copy.deepcopy(plan.config)
    config.num_hidden_layers = span.end - span.first
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[span.first : span.end]
    config.tie_word_embeddings &= span.is_first and span.is_last  # else nobody is to look for the other of the two
    base = skeleton(config)
    decoder = getattr(base, parts.decoder)
    if not span.is_first:
        setattr(decoder, parts.embed, None)
    if not span.is_last:
        setattr(decoder, parts.norm, None)
        base.set_output_embeddings(None)
    return base


def _fill(base: PreTrainedModel, span: Span, plan: Plan, parts: Parts) -> None:
    """Give a cut model its weights, and the buffers that are in no file."""
    weights, tied = _weights(plan), plan.config.tie_word_embeddings
    for name, empty in list(base.named_parameters()):
        wanted = _global(name, span.first, parts, tied)
        tensor = weights.read(_spellings(wanted, parts, tied), empty.shape)
        owner, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(tensor.to(plan.device, plan.dtype, copy=True))
        setattr(base.get_submodule(owner), leaf, parameter)
        if wanted == parts.embedding and tied and span.is_first and span.is_last:
            base.get_output_embeddings().weight = parameter
    decoder = getattr(base, parts.decoder)
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config).to(plan.device)
    for name, tensor in chain(base.named_parameters(), base.named_buffers()):
        if tensor.is_meta:
            raise RuntimeError(f"{name} of a {plan.config.model_type} model is in no file, and nothing makes it")
    generation = model_file(plan, "generation_config.json")  # which tokens end an answer
    if generation is not None:
        with refusing(generation.name, plan.base):
            base.generation_config = GenerationConfig.from_pretrained(generation.parent)


def _spellings(name: str, parts: Parts, tied: bool) -> list[str]:
    """What files may call the whole model's parameter `name`."""
    heads = _head_names(parts)
    if name == parts.embedding:
        return [name, *heads] if tied else [name]
    return heads if name in heads else [name]


# --------------------------------------------------------------------- files


class _Tensors:
    """Tensors in safetensors files, read one by one."""

    def __init__(self, source: str, files: Mapping[str, str], locate: Callable[[str], Path | None]) -> None:
        """`files`: name of a tensor -> name of the file that holds it; `locate` says where that is."""
        self._source = source
        self._files = files
        self._locate = cache(lambda name: _vetted(locate(name)))

    def read(self, spellings: list[str], shape: torch.Size) -> Tensor:
        """The tensor that has one of these names; it may lie in the file itself, so copy it.

        UserError if there is none, none of that shape, or two that differ."""
        found = [self._get(name) for name in spellings if name in self._files]
        if not found or found[0].shape != shape or not found[0].is_floating_point():
            raise UserError(lacks(self._source, spellings[0]))
        if not all(torch.equal(found[0], other) for other in found[1:]):
            raise UserError(
                f"{self._source} says that embedding and head are one matrix, but has two: set tie_word_embeddings to "
                "false in its config.json"
            )
        return found[0]

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def beginning(self, name: str) -> Tensor | None:
        """The first values of a tensor, nothing else of it is read; `None` if its file is not on this machine."""
        path = self._locate(self._files[name])
        if path is None:
            return None
        with refusing(path.name, self._source), safe_open(path, "pt") as file:
            part = file.get_slice(name)
            width = max(1, math.prod(part.get_shape()[1:]))
            return part[: -(-SAMPLED // width)].flatten()[:SAMPLED].float()

    def _get(self, name: str) -> Tensor:
        path = self._locate(self._files[name])
        if path is None:
            raise UserError(f"{self._source} has no {self._files[name]}, which its index names")
        with refusing(path.name, self._source), safe_open(path, "pt") as file:
            return file.get_tensor(name)  # the file is opened each time: what was mapped of it is let go at once


def _vetted(file: Path | None) -> Path | None:
    if file is not None:
        check_header(file)
    return file


def _weights(plan: Plan) -> _Tensors:
    """The tensors of a model; a shard is fetched from the hub when one of its tensors is read."""
    return _Tensors(plan.base, weight_map(plan), lambda name: model_file(plan, name))


def weights_digest(plan: Plan) -> str:
    """Equal for those who begin with the same weights: of a model from the hub, its commit; of one in a directory, the
    first values of its final norm and of a tensor of the first and of the last layer. Whoever lacks the file of one of
    these has another digest. Of an adapter that is trained on, those of two of its tensors as well."""
    parts, commit = parts_of(plan.config), getattr(plan.config, "_commit_hash", None)
    found = hashlib.sha256(str(commit).encode())

    def add(tensors: _Tensors, starts: Sequence[str], ends: str) -> None:
        for start in starts:
            name = next((name for name in tensors.names if name.startswith(start) and name.endswith(ends)), None)
            values = None if name is None else tensors.beginning(name)
            found.update(f"{name} ".encode() + (b"absent" if values is None else values.numpy().tobytes()))

    if not commit:
        first, last = f"{parts.layers}0.mlp.", f"{parts.layers}{plan.config.num_hidden_layers - 1}.mlp."
        add(_weights(plan), [first, last, f"{parts.decoder}.{parts.norm}."], ".weight")
    if plan.adapter is not None:
        tensors = _adapter_tensors(plan.adapter)
        add(tensors, [tensors.names[0], tensors.names[-1]], "")
    return found.hexdigest()


# --------------------------------------------------------------------- adapter


SHARED = (
    "base_model_name_or_path auto_mapping peft_version peft_type task_type revision inference_mode r lora_alpha "
    "lora_dropout use_rslora target_modules exclude_modules layers_to_transform layers_pattern"
).split()
"""What may differ in a saved adapter's config from PEFT's defaults for it to be cut."""


def _adapted(base: PreTrainedModel, span: Span, plan: Plan, parts: Parts, config: PolicyConfig) -> nn.Module:
    """The cut model with the adapter's part that belongs to it: nothing, if that has none in these layers.

    Which modules get one is asked of the whole model, since `lora_targets` may speak of layers by number.
    """
    lora = lora_config(config) if plan.adapter is None else _saved_config(plan.adapter)
    with torch.device("meta"):
        whole = with_adapter(skeleton(plan.config), copy.deepcopy(lora), config)
    ends = {parts.embedding, *_head_names(parts)}
    mine = []
    for name in whole.base_model.targeted_module_names:
        if plan.config.tie_word_embeddings and f"{name}.weight" in ends:
            raise UserError(f"{plan.base} has one matrix for embedding and head: in stages, {name} takes no adapter")
        local = _shifted(name, -span.first, parts)
        if _has(base, local):
            mine.append(local)
    base.requires_grad_(False)
    if not mine:
        return base
    lora.target_modules, lora.exclude_modules = set(mine), None
    lora.layers_to_transform = lora.layers_pattern = None
    return with_adapter(base, lora, config)


def _has(base: nn.Module, name: str) -> bool:
    try:
        return base.get_submodule(name) is not None
    except AttributeError:
        return False


def _saved_config(adapter: str) -> LoraConfig:
    """The config of a saved adapter; UserError if it asks for more than low-rank matrices."""
    with refusing("the adapter", adapter):
        lora, plain = LoraConfig.from_pretrained(adapter), LoraConfig()
    if not isinstance(lora, LoraConfig):
        raise UserError(f"{adapter} is no LoRA adapter: only those can be cut into stages")
    for key in (field.name for field in fields(plain)):
        if key not in SHARED and getattr(lora, key) != getattr(plain, key):
            raise UserError(f"{adapter} has {key} = {getattr(lora, key)!r}: such an adapter cannot be cut into stages")
    lora.inference_mode = False
    return lora


def _fill_adapter(stage: Stage, adapter: str) -> None:
    """Give the stage its part of the saved adapter."""
    tensors = _adapter_tensors(adapter)
    for name, parameter in stage.named().items():
        parameter.data.copy_(tensors.read([name.replace(".default", "")], parameter.shape))


def _adapter_tensors(adapter: str) -> _Tensors:
    file = Path(adapter) / ADAPTER_WEIGHTS
    return _Tensors(adapter, dict.fromkeys(check_header(file), file.name), lambda name: file)
