"""Load a policy: model, tokenizer, adapter, device and dtype, and which fast paths it may take.

What does not depend on holding the whole model (`prepare`, `load_tokenizer`, adapters) serves a stage of one as well.

`probes` decides which fast paths are taken; `vetting` refuses dangerous files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, is_offline_mode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file, find_adapter_config_file
from transformers.utils import logging as transformers_logging

from swarm_node.config import NodeConfig, PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import vetting
from swarm_node.policy.adapter_patterns import check_patterns
from swarm_node.policy.adapters import adapter_base, lora_config, start_adapter, trains_layers, with_adapter
from swarm_node.policy.architecture import beside_text
from swarm_node.policy.chat_template import named_template, unused_arguments
from swarm_node.policy.dtypes import TIMED_BELOW, DtypeChoice, expected, fastest, name_of
from swarm_node.policy.engines.graphs import GraphEngine
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.extras import check_quantiser
from swarm_node.policy.finite import check_weights
from swarm_node.policy.load_errors import (
    COPY_AGAIN,
    check_names,
    check_no_adapter,
    lacks,
    naming_base,
    refusing,
    without_reports,
)
from swarm_node.policy.model_path import LORA_ABOVE, check_hub, checked, hub_answers, located
from swarm_node.policy.oom import keep_freed_memory, return_freed_memory
from swarm_node.policy.policy import Policy
from swarm_node.policy.probes import choose_paths
from swarm_node.policy.quantised import (
    check_quantisable,
    linear_values,
    loading_options,
    original_lines,
    settle,
)
from swarm_node.policy.sizes import QUANTISED_BYTES
from swarm_node.policy.suitability import OTHER
from swarm_node.policy.tokenizer_vetting import MAX_GROWTH, check_tokenizer, check_tokenizer_file, check_tokens
from swarm_node.say import Detail, Warned, in_short
from swarm_node.storage.model_names import model_name

ONE_THREAD_BELOW = 2_000_000
"""Parameters below which a second CPU thread gains nothing (measured: 44 -> 43 ms a step at 0.44 million)."""
TOKEN_FILES = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
"""Files with tokens beside tokenizer.json."""
PLAIN = {"attn_implementation": None, "experts_implementation": None}
"""Implementations that a config must not choose: it may name code on the hub. Transformers chooses for this machine."""


def load_policy(
    config: PolicyConfig,
    rollouts: RolloutsConfig,
    report: Callable[[str], None] = print,
    samples: bool = True,
    check: Callable[[Plan], None] = lambda plan: None,
    fit: Callable[[Policy], object] = lambda policy: None,
    of_round: Callable[[Policy], NodeConfig] | None = None,
) -> Policy:
    """Load the policy that `config` names, and report the choices that were made. Without `samples`, nothing is
    reported about sampling and training, which the policy will not do. `check` is called before weights are fetched,
    and `fit` before anything is sampled, to make that fit into memory. `of_round` gives the settings of the rounds for
    which the faster type is taken; None = `rollouts` and the defaults of an update.

    UserError if the model cannot be found or read, or is not a causal language model in safetensors.
    """
    plan = prepare(config, report=report)
    if plan.choice.timed and not samples:  # no round will be
        plan = replace(plan, choice=DtypeChoice(torch.float32, "nothing is sampled"))
    plan = _that_fits(plan, check)
    tokenizer = load_tokenizer(config)

    def made(plan: Plan) -> Policy:
        policy = _policy_of(plan, tokenizer, config, rollouts, report)
        fit(policy)
        return policy

    if plan.choice.timed:
        report(Detail("timing a short round in float32 and in bfloat16"))
        settings = of_round or (lambda policy: NodeConfig(rollouts=rollouts))
        policy, choice = fastest(plan.choice, lambda dtype: made(_in(dtype, plan)), settings)
        plan = replace(plan, choice=choice)
    else:
        policy = made(plan)
    count = policy.num_parameters(trainable=True)
    trained = "all trained" if count == policy.num_parameters() else f"{count:,} of them trained"
    trained = f"LoRA: {trained}" if plan.lora else trained
    trained += f", linear layers in {plan.quantize}" if plan.quantize else ""
    size = f"{policy.num_parameters():,} parameters in {name_of(plan.dtype)}"
    report(f"policy {model_name(config.model)}: {size} ({trained})")
    report(Detail(plan.where))
    if told := policy.check_rows():
        report(Warned(told))
    if not samples:
        return policy
    rows = "packed" if policy.packing else "plain"
    full = "" if policy.split_head else ", full logits (this architecture alters its logits after the head)"
    report(Detail(f"decoding with {_engine_name(policy)}, {rows} rows in updates{full}"))
    if tokenizer.chat_template:
        _ = policy.frame  # a template that is refused is refused now
        if unused := unused_arguments(tokenizer.chat_template, config):
            report(Warned(f"the chat template of {model_name(config.model)} does not use {', '.join(unused)}"))
    elif config.chat_template or config.chat_template_kwargs:
        named_template(None, config)
    else:
        template = f"prompts are {config.prompt_template!r} (policy.prompt_template)"
        report(Detail(f"no chat template in this tokenizer: {template}"))
    return policy


def _that_fits(plan: Plan, check: Callable[[Plan], None]) -> Plan:
    """`plan` if it passes `check`. Where the faster of two types is to be found and float32 does not pass, bfloat16 is
    taken, however fast it is. Raises UserError if that does not pass either."""
    if plan.choice.timed:
        try:
            check(_in(torch.float32, plan))
        except UserError:
            plan = _in(torch.bfloat16, plan, "float32 does not fit into memory")
        else:
            return plan
    check(plan)
    return plan


def _in(dtype: torch.dtype, plan: Plan, why: str = "") -> Plan:
    return replace(plan, choice=DtypeChoice(dtype, why))


def _policy_of(
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    config: PolicyConfig,
    rollouts: RolloutsConfig,
    report: Callable[[str], None],
) -> Policy:
    """The policy of `plan`, with the fast paths that it may take."""
    model, files = load_base(plan)
    if not plan.lora and type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{type(model).__name__} ({plan.base}): transformers does not load again what it saves of such a model; "
            f"train an adapter (policy.lora = true), or {OTHER}"
        )
    if plan.adapter is not None:
        from peft import PeftModel

        check_patterns(Path(plan.adapter), [name for name, _ in model.named_modules()])
        with refusing("the adapter", plan.adapter), warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")  # it would begin anew there
            model = PeftModel.from_pretrained(model, plan.adapter, is_trainable=True)
    elif plan.lora:
        model = with_adapter(model, lora_config(config), config)
        start_adapter(dict(model.named_parameters()), model.config)
    else:
        beside = beside_text(model)
        for name in beside:
            model.get_parameter(name).requires_grad_(False)
    model.to(plan.device)
    check_weights(model.named_parameters(), config.model)

    original = plan.quantize and original_lines(files, plan.tensors, plan.quantize)
    policy = Policy(model, tokenizer, config, report, original or None)
    policy.model.eval()  # for good: dropout would make the trained distribution another one than the sampled one
    settle(policy.model)
    choose_paths(policy, rollouts)
    if plan.device.type == "cpu":
        return_freed_memory()  # of weights in another dtype: as much again as a model in 16 bits takes
    return policy


def load_base(plan: Plan) -> tuple[Any, list[Path]]:
    """The model of `plan` without an adapter, on the CPU if it is not quantised, and its files of weights. UserError if
    these are not what they should be."""
    files = _vetted_weights(plan)
    check_names(plan.base, plan.tensors, weight_map(plan))
    vetting.check_declared(plan.base, plan.size, files)
    with without_reports():
        model, found = _load(
            AutoModelForCausalLM,
            plan.base,
            plan.revision,
            config=plan.config,
            dtype=plan.dtype,
            use_safetensors=True,
            output_loading_info=True,
            **loading_options(plan.quantize, plan.dtype, plan.device),
            **PLAIN,
        )
    if found["missing_keys"] or found["mismatched_keys"]:
        lacking = sorted([*found["missing_keys"], *(str(key[0]) for key in found["mismatched_keys"])])
        raise UserError(f"{type(model).__name__}: {lacks(plan.base, lacking[0], weight_map(plan))}, or {OTHER}")
    return model, files


def _engine_name(policy: Policy) -> str:
    names: dict[type, str] = {
        NativeEngine: "the native engine",
        GraphEngine: "the native engine in recorded steps (CUDA graphs)",
        TransformersEngine: "the transformers engine (slower)",
    }
    engine = type(policy.engine)
    return names.get(engine, engine.__name__) + ("" if policy.engine.exact else ", whose samples no seed repeats")


@dataclass(frozen=True)
class Plan:
    """The model to be loaded, and how to load it: the same decisions for a whole policy and for a stage of one."""

    base: str  # directory or hub id of the model
    revision: str | None  # branch, tag or commit of it on the hub
    adapter: str | None  # directory of the saved adapter that is trained on
    config: Any  # the model's config
    size: int  # parameters of the whole model
    lora: bool
    device: torch.device
    choice: DtypeChoice  # of the dtype
    quantize: str | None = None  # how linear layers are quantised
    linear: int = 0  # values of those layers
    tensors: frozenset[str] = frozenset()  # names of the parameters of the whole model

    @property
    def dtype(self) -> torch.dtype:
        """The number format of its weights, apart from quantised ones."""
        return self.choice.dtype

    @property
    def saved(self) -> int:
        """Bytes that the model's weights take less because some are quantised."""
        return 0 if self.quantize is None else int(self.linear * (self.dtype.itemsize - QUANTISED_BYTES[self.quantize]))

    @property
    def where(self) -> str:
        """Device and dtype in words."""
        return f"device {_device_name(self.device)}, {name_of(self.dtype)} ({self.choice.why})"


def prepare(config: PolicyConfig, alone: bool = True, report: Callable[[str], None] | None = None) -> Plan:
    """Find the model that `config` names, decide how to load it, and set torch's threads.

    Without `alone`, nothing that is measured here decides, so that other machines decide alike. UserError if the model
    cannot be found, or its config is not that of a causal language model. `report` is told before the hub is asked.
    """
    transformers_logging.disable_progress_bar()
    say = report or (lambda sentence: None)
    path = located(config.model, say)
    if not Path(path).is_dir():
        _ask_hub(path, config.revision, say)
    adapter = adapter_base(path)
    if adapter is None:
        base, revision = path, config.revision
        model_config = _vetted_config(base, revision)
    else:
        with refusing("the adapter", path):
            vetting.check_adapter(Path(path).expanduser())
        with naming_base(path, adapter):
            base, revision = located(adapter, say), None
            model_config = _vetted_config(base, revision)
    vetting.check_positions(base, model_config)
    empty = skeleton(model_config)
    size = sum(p.numel() for p in empty.parameters())
    by_itself = size > LORA_ABOVE or config.quantize is not None
    lora = adapter is not None or (by_itself if config.lora is None else config.lora)
    if config.lora is False and adapter is not None:
        raise UserError(f"{path} is a LoRA adapter: it cannot be trained with --no-lora; merge it first")
    device = _device(config.device)
    if config.quantize is not None:
        check_quantiser(config)
        check_quantisable(config.quantize, base, model_config, device)
    if device.type == "cpu":
        keep_freed_memory()
    elif device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: eight times the rate, 10 bits of each factor
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new shape, and updates have new ones
    if config.threads or size < ONE_THREAD_BELOW:
        torch.set_num_threads(config.threads or 1)
    folder = None if adapter is None else str(Path(path).expanduser())
    factors = lora and not (folder and trains_layers(folder))
    small = size < TIMED_BELOW and config.quantize is None
    choice = expected(config.dtype, device, factors, model_config, small, alone)
    return Plan(
        *(base, revision, folder, model_config, size, lora, device, choice, config.quantize),
        linear=linear_values(empty),
        tensors=frozenset(name for name, _ in empty.named_parameters()),
    )


def load_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that `config` names, or the one beside its adapter."""
    path = located(config.model)
    revision = config.revision if adapter_base(path) is None else None
    others = [file for name in TOKEN_FILES if (file := _file(path, revision, name)) is not None]
    with refusing("Tokenizer", path):
        settings = [vetting.read_json(file) for file in others if file.name == TOKEN_FILES[0]]
        named = settings[0].get("fast_tokenizer_files") if settings else []
        names = {"tokenizer.json", *(map(str, named) if isinstance(named, list) else [])}
        fast = [file for name in names if (file := _file(path, revision, name)) is not None]
        growth = max(map(check_tokenizer_file, fast), default=MAX_GROWTH)
        for file in others:
            check_tokens(file, growth)
        tokenizer = _load(AutoTokenizer, path, revision)
        check_tokenizer(tokenizer, config.model)
    return tokenizer


def skeleton(model_config: Any) -> PreTrainedModel:
    """The model that a config describes, without memory for its weights (all on the meta device)."""
    try:
        with torch.device("meta"), vetting.bounded_modules("the model"):
            return AutoModelForCausalLM.from_config(model_config, trust_remote_code=False, **PLAIN)
    except UserError:
        raise
    except Exception as exc:  # as in `refusing`: the config is a stranger's
        kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_config.model_type, model_config.model_type)
        detail = in_short(exc, 250)
        raise UserError(f"{kind}: not a causal language model that can be made here: {detail}; {OTHER}") from exc


def _load(factory: Any, path: str, revision: str | None, **options: object) -> Any:
    """`from_pretrained` with everything dangerous off and its errors in one line."""
    path = checked(path)
    with refusing(factory.__name__.removeprefix("Auto"), path):
        return factory.from_pretrained(path, trust_remote_code=False, **_at(revision), **options)


def model_file(plan: Plan, name: str) -> Path | None:
    """One file of the model, fetched from the hub if need be; `None` if there is none of that name."""
    return _file(plan.base, plan.revision, name)


def _file(base: str, revision: str | None, name: str) -> Path | None:
    path = checked(base)
    with refusing(name, path):
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **_at(revision))
    return None if found is None else Path(found)


def _vetted_config(base: str, revision: str | None) -> Any:
    """The config of a model, after a check that nothing in it, or beside it, is dangerous to read."""
    path = checked(base)
    with refusing("Config", path):
        if find_adapter_config_file(path, **_at(revision)) is not None:  # transformers would put it on by itself
            check_no_adapter(path)
    file = _file(base, revision, "config.json")
    if file is not None:
        with refusing("Config", path):
            vetting.check_config(file)
    return _load(AutoConfig, base, revision)


def weight_map(plan: Plan) -> dict[str, str]:
    """Tensor -> safetensors file of a model; shards are not fetched for that. UserError if the model names a pickle or
    a file elsewhere, or has no weights in safetensors."""
    whole = model_file(plan, vetting.WEIGHTS)
    if whole is not None:
        return dict.fromkeys(vetting.check_header(whole), vetting.WEIGHTS)
    index = model_file(plan, vetting.INDEX)
    if index is None:
        if (folder := Path(checked(plan.base))).is_dir():
            vetting.refuse_pickles(f"{plan.base} has its weights", folder.iterdir())
        raise UserError(f"{plan.base} has no {vetting.WEIGHTS}: {vetting.CONVERT}")
    return vetting.weight_map_of(plan.base, index)


def _vetted_weights(plan: Plan) -> list[Path]:
    """All files of weights, fetched from the hub if need be. Each has a header that is safe to parse."""
    names = sorted(set(weight_map(plan).values()))
    files = [file for name in names if (file := model_file(plan, name)) is not None]
    if missing := [name for name in names if model_file(plan, name) is None]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{plan.base} lacks {missing[0]}{more}, which its {vetting.INDEX} names: {COPY_AGAIN}")
    if names != [vetting.WEIGHTS] and sum(len(vetting.check_header(file)) for file in files) > vetting.MAX_TENSORS:
        raise UserError(f"{plan.base} has more than {vetting.MAX_TENSORS} tensors")
    return files


def _ask_hub(path: str, revision: str | None, say: Callable[[str], None]) -> None:
    """Say that the hub is asked. If it does not answer, its library stays offline from then on: it would try again for
    minutes before it takes what is in its cache. Raises UserError if nothing is there."""
    if not is_offline_mode():
        say(f"asking {constants.ENDPOINT} for {path}")
    check_hub(path, revision)
    if not is_offline_mode() and not hub_answers():
        constants.HF_HUB_OFFLINE = True
        say(Warned(f"{constants.ENDPOINT} does not answer: {path} is taken from what was downloaded before"))


def _at(revision: str | None) -> dict[str, str]:
    return {"revision": revision} if revision else {}


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as exc:
        raise UserError(f"device {name!r} is not usable here: {str(exc).splitlines()[0]}") from exc
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})" if device.type == "cpu" else device.type
