"""One stage of a policy: a model of the same class with fewer layers, which has read nothing but its own tensors.

    first stage:  ids -> embedding -> layers -> hidden
    middle:             hidden -> layers -> hidden
    last stage:         hidden -> layers -> norm -> head -> logits

The Hugging Face class is built on the meta device from a config with fewer layers. The parts that other stages hold are
taken out, and its parameters are read one by one from the files. Inside, layers count from 0. Outside, a stage uses the
names of the whole policy, adapter included: the parameters of all stages together are those of the whole policy. A tied
matrix is at the first stage the embedding and at the last stage the head, under one name.
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
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.pipeline.compute.partition import ADAPTED, Parts, Span, model_parts
from swarm_node.policy.adapters import lora_config, start_adapter, with_adapter
from swarm_node.policy.finite import check_weights
from swarm_node.policy.loading import Plan, lacks, model_file, prepare, refusing, skeleton, weight_map
from swarm_node.policy.logprobs import additive
from swarm_node.policy.vetting import ADAPTER_WEIGHTS, check_header
from swarm_node.storage.model_names import model_name

SAMPLED = 1024  # values of a tensor that are compared to tell files apart: 4 KiB


class Stage(nn.Module):
    """Some layers of a policy: the first ones with the embedding, the last ones with norm and head."""

    def __init__(self, span: Span, model: nn.Module, norm: nn.Module | None, config: Any, is_lora: bool) -> None:
        """`config`: of the whole model."""
        super().__init__()
        self.span = span
        self.model = model
        """The stage's Hugging Face model, or the PEFT model around it if one of its modules has an adapter."""
        self.norm = norm  # the final norm, at the last stage
        self.is_lora = is_lora  # whether the policy is trained by an adapter, even if this stage has no part of it
        self.tied: bool = config.tie_word_embeddings  # whether embedding and head are one matrix
        self._parts = model_parts(config)
        first = self._decoder.layers[0].input_layernorm.weight
        self.device, self.dtype = first.device, first.dtype

    @property
    def base(self) -> PreTrainedModel:
        """The stage's model without its adapter."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def embed(self) -> nn.Module | None:
        """The embedding, at the first stage."""
        return getattr(self._decoder, self._parts.embed)

    @property
    def head(self) -> nn.Module | None:
        """The head, at the last stage."""
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
    def _decoder(self) -> Any:
        return getattr(self.base, self._parts.decoder)

    # ----------------------------------------------------------------- passes

    def hidden(self, ids: Tensor) -> Tensor:
        """Token ids [R, T] -> input of the first layer [R, T, H]."""
        assert self.embed is not None, f"{self.span} has no embedding"
        return self.embed(ids)

    def layers(
        self, hidden: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Input of the first layer here [R, T, H] -> output of the last one [R, T, H].

        For positions and mask see `logprobs.TokenBatch`."""
        hidden = hidden.to(self.dtype)
        return self._decoder(
            inputs_embeds=hidden,
            position_ids=position_ids,
            attention_mask=additive(attention_mask, hidden.dtype),
            use_cache=False,
        ).last_hidden_state

    def final(self, hidden: Tensor) -> Tensor:
        """Output of the last layer [..., H] -> input of the head [..., H]."""
        assert self.norm is not None, f"{self.span} has no norm"
        return self.norm(hidden)

    # ----------------------------------------------------------------- names

    def named(self, trainable: bool = True) -> dict[str, nn.Parameter]:
        """The trained parameters, or all of them, by their names in the whole policy."""
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
    """The name in the whole model of a parameter `name` of a stage whose first layer is layer `first`."""
    if tied and name in parts.heads:
        return parts.embedding
    return _shifted(name, first, parts)


def _shifted(name: str, by: int, parts: Parts) -> str:
    """`model.layers.2.x` -> `model.layers.7.x` for `by` = 5. A name outside the layers stays as it is."""
    return re.sub(rf"^({re.escape(parts.layers)})(\d+)", lambda found: f"{found[1]}{int(found[2]) + by}", name)


# --------------------------------------------------------------------- loading


def load_stage(config: PolicyConfig, span: Span, report: Callable[[str], None] = print) -> Stage:
    """Load one stage of the policy that `config` names, and report what was chosen.

    Raises UserError if the model cannot be found or read, has no such stage, or cannot be divided into stages.
    """
    plan = prepare(config, alone=False)
    parts = model_parts(plan.config)
    if getattr(plan.config, "quantization_config", None) is not None:
        raise UserError(f"{plan.base} is quantised: to divide it into stages, give the model that it was made from")
    _check(span, plan)
    base = _without_weights(span, plan, parts)
    _fill(base, span, plan, parts)
    model = _adapted(base, span, plan, parts, config) if plan.lora else base
    decoder = getattr(base, parts.decoder)
    norm = getattr(decoder, parts.norm) if span.is_last else None
    setattr(decoder, parts.norm, nn.Identity())
    stage = Stage(span, model, norm, plan.config, plan.lora)
    stage.eval()  # as in `load_policy`
    if plan.adapter is not None:
        _fill_adapter(stage, plan.adapter)
    elif plan.lora:
        start_adapter(stage.named(), plan.config)
    check_weights(stage.named(trainable=False).items(), config.model)
    own = sum(p.numel() for p in stage.named(trainable=False).values())
    trained = f"LoRA: {sum(p.numel() for p in stage.named().values()):,} of them trained"
    report(f"{span} of {model_name(config.model)}: {own:,} parameters ({trained if plan.lora else 'all trained'})")
    report(plan.where)
    return stage


def _check(span: Span, plan: Plan) -> None:
    """Raise UserError if this model has no such stage."""
    layers = plan.config.num_hidden_layers
    whole = span.is_first == (span.first == 0) and span.is_last == (span.end == layers)
    inside = 0 <= span.index < span.count and 0 <= span.first < span.end <= layers
    if span.layers != layers or not inside or not whole:
        raise UserError(f"{span} is no stage of {plan.base}, which has {layers} layers")


def _without_weights(span: Span, plan: Plan, parts: Parts) -> PreTrainedModel:
    """The model without the parts of other stages, on the meta device."""
    config = copy.deepcopy(plan.config)
    config.num_hidden_layers = span.end - span.first
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[span.first : span.end]
    config.tie_word_embeddings &= span.is_first and span.is_last  # else there is only one of the two
    base = skeleton(config)
    decoder = getattr(base, parts.decoder)
    if not span.is_first:
        setattr(decoder, parts.embed, None)
    if not span.is_last:
        setattr(decoder, parts.norm, None)
        base.set_output_embeddings(None)
    return base


def _fill(base: PreTrainedModel, span: Span, plan: Plan, parts: Parts) -> None:
    """Fill a stage's model with its weights, and with the buffers that are in no file."""
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
            raise RuntimeError(f"{name} of a {plan.config.model_type} model is in no file, and cannot be computed")
    generation = model_file(plan, "generation_config.json")  # it names the tokens that end an answer
    if generation is not None:
        with refusing(generation.name, plan.base):
            base.generation_config = GenerationConfig.from_pretrained(generation.parent)


def _spellings(name: str, parts: Parts, tied: bool) -> list[str]:
    """Names that files may have for the whole model's parameter `name`."""
    if name == parts.embedding and tied:
        return [name, *parts.heads]
    return [*parts.heads] if name in parts.heads else [name]


# --------------------------------------------------------------------- files


class _Tensors:
    """Tensors in safetensors files, which are read one by one."""

    def __init__(self, source: str, files: Mapping[str, str], locate: Callable[[str], Path | None]) -> None:
        """`files`: name of a tensor -> name of its file. `locate`: name of a file -> its path."""
        self._source = source
        self._files = files

        @cache
        def vetted(name: str) -> Path | None:
            file = locate(name)
            if file is not None:
                check_header(file)
            return file

        self._locate = vetted

    def read(self, spellings: list[str], shape: torch.Size) -> Tensor:
        """The tensor with one of these names; it may be mapped from the file, so copy it.

        Raises UserError if there is none, none of that shape, or two that differ."""
        found = [self._get(name) for name in spellings if name in self._files]
        if not found or found[0].shape != shape or not found[0].is_floating_point():
            raise UserError(f"{lacks(self._source, spellings[0])}, or take another model")
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
        """The first values of a tensor, without reading the others; `None` if its file is not on this machine."""
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
            return file.get_tensor(name)  # the file is opened each time, so that its mapping ends at once


def _weights(plan: Plan) -> _Tensors:
    """The tensors of a model. A shard is fetched from the hub when one of its tensors is read."""
    return _Tensors(plan.base, weight_map(plan), lambda name: model_file(plan, name))


def weights_digest(plan: Plan) -> str:
    """A digest that is equal for peers that begin with the same weights.

    It covers the commit of a model from the hub. Of a model in a directory it covers the first values of its final norm
    and of a tensor of the first and of the last layer; a peer without one of these files has another digest. Of an
    adapter that is trained further it covers the first values of two tensors."""
    parts, commit = model_parts(plan.config), getattr(plan.config, "_commit_hash", None)
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
"""Fields in which the config of a saved adapter may differ from PEFT's defaults."""


def _adapted(base: PreTrainedModel, span: Span, plan: Plan, parts: Parts, config: PolicyConfig) -> nn.Module:
    """The stage's model with its part of the adapter, if there is one for these layers.

    The modules that get one are looked up in the whole model, since `lora_targets` may name layers by number.
    """
    lora = lora_config(config) if plan.adapter is None else _saved_config(plan.adapter)
    with torch.device("meta"):
        whole = with_adapter(skeleton(plan.config), copy.deepcopy(lora), config)
    ends = {parts.embedding, *parts.heads}
    here = {name for name, _ in base.named_modules()}
    mine = []
    for name in whole.base_model.targeted_module_names:
        if plan.config.tie_word_embeddings and f"{name}.weight" in ends:
            raise UserError(
                f"{plan.base} has one matrix for embedding and head: in stages, {name} cannot have an adapter"
            )
        local = _shifted(name, -span.first, parts)
        if local in here:
            mine.append(local)
    base.requires_grad_(False)
    if not mine:
        return base
    lora.target_modules, lora.exclude_modules = set(mine), None
    lora.layers_to_transform = lora.layers_pattern = None
    return with_adapter(base, lora, config)


def _saved_config(adapter: str) -> Any:
    """The LoraConfig of a saved adapter. Raises UserError if it has more than low-rank matrices."""
    from peft import LoraConfig

    with refusing("the adapter", adapter):
        lora, plain = LoraConfig.from_pretrained(adapter), LoraConfig()
    if not isinstance(lora, LoraConfig):
        raise UserError(f"{adapter} is no LoRA adapter: only those can be divided into stages")
    for key in (field.name for field in fields(plain)):
        if key not in SHARED and getattr(lora, key) != getattr(plain, key):
            raise UserError(
                f"{adapter} has {key} = {getattr(lora, key)!r}: such an adapter cannot be divided into stages"
            )
    lora.inference_mode = False
    return lora


def _fill_adapter(stage: Stage, adapter: str) -> None:
    tensors = _adapter_tensors(adapter)
    for name, parameter in stage.named().items():
        parameter.data.copy_(tensors.read([name.replace(".default", "")], parameter.shape))


def _adapter_tensors(adapter: str) -> _Tensors:
    file = Path(adapter) / ADAPTER_WEIGHTS
    return _Tensors(adapter, dict.fromkeys(check_header(file), file.name), lambda name: file)
