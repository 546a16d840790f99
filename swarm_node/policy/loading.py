"""Load a policy: model, tokenizer, adapter, device and dtype, and which fast paths it may take.

What does not depend on holding the whole model (`prepare`, `load_tokenizer`, adapters) serves a stage of one as well.

Every fast path (native decoding, packed rows, head apart from the backbone) is tried once on a few random tokens and
taken only if it gives the model's own numbers. So an architecture nobody thought of is slow, never wrong.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode
from huggingface_hub import logging as hub_logging
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, find_adapter_config_file
from transformers.utils import logging as transformers_logging

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import vetting
from swarm_node.policy.engines import native as decode
from swarm_node.policy.oom import is_out_of_memory, keep_freed_memory
from swarm_node.policy.policy import Policy

LORA_ABOVE = 100_000_000
"""Parameters above which an adapter is trained unless told otherwise."""
ONE_THREAD_BELOW = 2_000_000
"""Parameters below which a second CPU thread gains nothing (measured: 44 -> 43 ms a step at 0.44 million)."""
ONLY_THE_SWARMS = "of members only a model that their manifest names is had"
"""What is said besides of a hub id that leads nowhere."""
PLAIN = {"attn_implementation": None, "experts_implementation": None}
"""How a model computes is transformers' own choice for this machine, whatever its config says: a config may name code
on the hub."""
MEASURED_WIDTH = 4096
"""Widest layer that the speed of bfloat16 is measured with: a gigabyte or so."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_policy(
    config: PolicyConfig, rollouts: RolloutsConfig, report: Callable[[str], None] = print, samples: bool = True
) -> Policy:
    """Load the policy that `config` names and say what was chosen through `report`; not `samples` = nothing of how it
    answers and is trained, which it will not be.

    UserError if the model cannot be found or read, or is not a causal language model in safetensors.
    """
    plan = prepare(config)
    tokenizer = load_tokenizer(config)
    vetting.check_declared(plan.base, plan.size, _vetted_weights(plan))
    model, found = _load(
        AutoModelForCausalLM,
        plan.base,
        plan.revision,
        config=plan.config,
        dtype=plan.dtype,
        use_safetensors=True,
        output_loading_info=True,
        **PLAIN,
    )
    if found["missing_keys"] or found["mismatched_keys"]:
        lacking = sorted([*found["missing_keys"], *(str(key[0]) for key in found["mismatched_keys"])])
        raise UserError(lacks(plan.base, lacking[0]))
    if plan.adapter is not None:
        with refusing("the adapter", plan.adapter):
            model = PeftModel.from_pretrained(model, plan.adapter, is_trainable=True)
    elif plan.lora:
        model = with_adapter(model, lora_config(config), config)
        start_adapter(dict(model.named_parameters()), model.config)
    model.to(plan.device)

    policy = Policy(model, tokenizer, config, report)
    policy.model.eval()  # for good: dropout would make the trained distribution another one than the sampled one
    _choose_paths(policy, rollouts)
    trained = f"LoRA: {policy.num_parameters(trainable=True):,} of them trained" if plan.lora else "all trained"
    report(f"policy {config.model}: {policy.num_parameters():,} parameters ({trained})")
    report(plan.where)
    if not samples:
        return policy
    report(
        f"decoding with the {'native engine' if policy.native else 'transformers engine (slower)'}, "
        f"{'packed' if policy.packing else 'plain'} rows in updates"
        + ("" if policy.split_head else ", full logits (this architecture alters its logits after the head)")
    )
    if tokenizer.chat_template:
        _ = policy.frame  # a template that is refused is refused now
    else:
        report(f"no chat template in this tokenizer: prompts are {config.prompt_template!r} (policy.prompt_template)")
    return policy


@dataclass(frozen=True)
class Plan:
    """What is to be loaded, and how: the same decisions for a whole policy and for a stage of one."""

    base: str
    """Directory or hub id of the model."""
    revision: str | None
    """Branch, tag or commit of it on the hub."""
    adapter: str | None
    """Directory of the saved adapter that is trained on."""
    config: Any
    """The model's config."""
    size: int
    """Parameters of the whole model."""
    lora: bool
    device: torch.device
    dtype: torch.dtype
    why: str
    """Why this dtype."""

    @property
    def where(self) -> str:
        """Device and dtype in words."""
        return f"device {_device_name(self.device)}, {str(self.dtype).removeprefix('torch.')} ({self.why})"


def prepare(config: PolicyConfig, alone: bool = True) -> Plan:
    """Find the model that `config` names, decide how to load it, and set torch's threads accordingly. Not `alone` = by
    nothing that is measured here: other machines must come to the same.

    UserError if it cannot be found, or its config is not that of a causal language model.
    """
    transformers_logging.disable_progress_bar()
    path = _path(config)
    adapter = adapter_base(path)
    base, revision = (path, config.revision) if adapter is None else (adapter, None)
    if adapter is not None:
        vetting.check_adapter(Path(path).expanduser())
    model_config = _vetted_config(base, revision)
    size = sum(p.numel() for p in skeleton(model_config).parameters())
    lora = adapter is not None or (size > LORA_ABOVE if config.lora is None else config.lora)
    if config.lora is False and adapter is not None:
        raise UserError(f"{path} is a LoRA adapter: it cannot be trained with --no-lora; merge it first")
    device = _device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    if config.threads or size < ONE_THREAD_BELOW:
        torch.set_num_threads(config.threads or 1)
    dtype, why = _dtype(config.dtype, device, lora, model_config, alone)
    folder = None if adapter is None else str(Path(path).expanduser())
    return Plan(base, revision, folder, model_config, size, lora, device, dtype, why)


def load_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model, or that beside the adapter, which `config` names."""
    path = _path(config)
    return _load(AutoTokenizer, path, config.revision if adapter_base(path) is None else None)


def skeleton(model_config: Any) -> PreTrainedModel:
    """The model that a config describes, without memory for its weights (all on the meta device)."""
    try:
        with torch.device("meta"), vetting.bounded_modules("the model"):
            return AutoModelForCausalLM.from_config(model_config, trust_remote_code=False, **PLAIN)
    except UserError:
        raise
    except Exception as exc:  # as in `refusing`: the config is a stranger's
        raise UserError(f"not a causal language model: {' '.join(str(exc).split())[:200]}") from exc


def lacks(base: str, name: str) -> str:
    """What is said of a model without a tensor that it should have."""
    return f"{base} lacks weights that its config asks for, for example {name}"


def starter_path() -> str:
    """Where the starter policy that ships with this package lies."""
    return str(resources.files("swarm_node.policy") / "starter_model")


# --------------------------------------------------------------------- files


def _path(config: PolicyConfig) -> str:
    return starter_path() if config.model == "starter" else config.model


def _load(factory: Any, path: str, revision: str | None, **options: object) -> Any:
    """`from_pretrained` with everything dangerous off and its errors in one line."""
    path = _checked(path)
    with refusing(factory.__name__.removeprefix("Auto"), path):
        return factory.from_pretrained(path, trust_remote_code=False, **_at(revision), **options)


def model_file(plan: Plan, name: str) -> Path | None:
    """One file of the model, fetched from the hub if need be; `None` if there is none of that name."""
    return _file(plan.base, plan.revision, name)


def _file(base: str, revision: str | None, name: str) -> Path | None:
    path = _checked(base)
    with refusing(name, path):
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **_at(revision))
    return None if found is None else Path(found)


def _vetted_config(base: str, revision: str | None) -> Any:
    """The config of a model, after nothing was found in it, or beside it, that may not be read."""
    path = _checked(base)
    with refusing("Config", path):
        vetting.check_no_adapter(path, find_adapter_config_file(path, **_at(revision)))
    file = _file(base, revision, "config.json")
    if file is not None:
        vetting.check_config(file)
    return _load(AutoConfig, base, revision)


def weight_map(plan: Plan) -> dict[str, str]:
    """Tensor -> safetensors file of a model, whose shards are not fetched for that. UserError if a pickle or a file
    elsewhere is named, or if it has no weights that are read."""
    whole = model_file(plan, vetting.WEIGHTS)
    if whole is not None:
        return dict.fromkeys(vetting.check_header(whole), vetting.WEIGHTS)
    index = model_file(plan, vetting.INDEX)
    if index is None:
        if Path(_checked(plan.base)).is_dir():
            vetting.check_not_pickled(plan.base, Path(_checked(plan.base)))
        raise UserError(f"{plan.base} has no {vetting.WEIGHTS}: {vetting.CONVERT}")
    found = vetting.weight_map_of(index)
    vetting.check_weight_names(plan.base, found)
    return found


def _vetted_weights(plan: Plan) -> list[Path]:
    """All files of weights, fetched from the hub if need be, of which each has a header that may be parsed."""
    names = sorted(set(weight_map(plan).values()))
    files = [file for name in names if (file := model_file(plan, name)) is not None]
    if len(files) < len(names):
        raise UserError(f"{plan.base} lacks a file that its index names: download or copy it again")
    if names != [vetting.WEIGHTS] and sum(len(vetting.check_header(file)) for file in files) > vetting.MAX_TENSORS:
        raise UserError(f"{plan.base} has more than {vetting.MAX_TENSORS} tensors")
    return files


@contextmanager
def refusing(what: str, path: str) -> Iterator[None]:
    """Whatever a stranger's files make the libraries raise, they cannot be used: UserError, in one line. What the hub's
    library logs meanwhile of its tries is not shown: the last one says it all."""
    usual = hub_logging.get_verbosity()
    if usual == hub_logging.WARNING:  # who asked for more gets it
        hub_logging.set_verbosity_error()
    try:
        yield
    except UserError:
        raise
    except Exception as exc:
        if is_out_of_memory(exc):
            raise UserError(f"not enough memory to load {path}") from exc
        detail = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
        if Path(path).is_dir():
            raise UserError(f"cannot load {what} from {path}: {detail}") from exc
        nowhere = "" if "/" in path else f"there is no directory {path}; taken as a name on the hub: "
        if _is_out_of_reach(exc):
            detail = f"the hub cannot be reached{' (HF_HUB_OFFLINE is set)' if is_offline_mode() else ''}"
        raise UserError(
            f"{nowhere}cannot load {what} from {path}: {detail}; give a directory with the model (--model ./DIR); "
            f"{ONLY_THE_SWARMS}"
        ) from exc
    finally:
        hub_logging.set_verbosity(usual)


def _is_out_of_reach(error: BaseException) -> bool:
    """Whether it was raised because the hub was not asked, or did not answer, for what its cache lacks."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, LocalEntryNotFoundError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _at(revision: str | None) -> dict[str, str]:
    return {"revision": revision} if revision else {}


def _checked(path: str) -> str:
    """`path` as transformers is to be told it; UserError if it must be a directory and holds no model."""
    folder = Path(path).expanduser()
    if path.startswith((".", "/", "~")) or folder.exists() or (folder.parent.is_dir() and folder.parent != Path(".")):
        path = str(folder)
        if not folder.is_dir():
            raise UserError(f"no model at {path}: give a directory in Hugging Face layout or a hub id")
        if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
            run = "; it is a run: `swarm-node export` makes a model of it" if (folder / "checkpoints").is_dir() else ""
            raise UserError(f"no model in {path}: it has no config.json{run}")
    return path


def adapter_base(path: str) -> str | None:
    """Base model of a local LoRA adapter directory; `None` if `path` is not one."""
    file = Path(path).expanduser() / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        return str(json.loads(file.read_text())["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as exc:
        raise UserError(f"{file} does not name its base model") from exc


# --------------------------------------------------------------------- adapters


def lora_config(config: PolicyConfig) -> LoraConfig:
    """A new adapter as `config` asks for it."""
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=config.lora_targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def with_adapter(model: PreTrainedModel, lora: LoraConfig, config: PolicyConfig) -> PeftModel:
    """The model with an adapter around it, in which only that is trained."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name on its way out
        try:
            return get_peft_model(model, lora)
        except ValueError as exc:
            raise UserError(f"policy.lora_targets {config.lora_targets!r} does not fit this model: {exc}") from exc


ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Keys of a config that tell models apart, whatever version of transformers has read it."""


def start_adapter(named: Mapping[str, nn.Parameter], model_config: Any) -> None:
    """Give a new adapter, or a part of one, its first values, as PEFT does: A Kaiming-uniform, B zero (for embeddings A
    zero, B normal).

    named         its parameters by the names that they have in the whole policy
    model_config  the config of the whole model

    Each tensor is drawn with a seed of its own (its name, its shape, the architecture): equal for all peers with the
    same model, and the same in a stage as in the whole policy.
    """
    text = model_config.get_text_config()
    architecture = json.dumps([getattr(text, key, None) for key in ARCHITECTURE])
    for name, parameter in named.items():
        if ".lora_A." not in name and ".lora_embedding_B." not in name:
            continue
        seed = sha256(f"{name} {tuple(parameter.shape)} {architecture}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        values = torch.empty(parameter.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        else:
            nn.init.normal_(values, generator=generator)
        parameter.data.copy_(values)


# --------------------------------------------------------------------- device and dtype


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


def _dtype(name: str, device: torch.device, lora: bool, model_config: Any, alone: bool) -> tuple[torch.dtype, str]:
    """The dtype of the weights and why it was chosen."""
    if name != "auto":
        return _DTYPES[name], "as asked"
    if not lora:
        return torch.float32, "full training: bfloat16 weights would lose small updates"
    if device.type == "cuda":
        good = torch.cuda.is_bf16_supported()
        return (torch.bfloat16, "this GPU has it") if good else (torch.float32, "no bfloat16 on this GPU")
    if device.type == "mps":
        return torch.float32, "the safe choice on mps"
    if not alone:
        return torch.float32, "as on every machine of a crew without a GPU"
    ratio = bf16_slowdown(min(MEASURED_WIDTH, model_config.get_text_config().hidden_size))
    if ratio < 0.9:
        return torch.bfloat16, f"measured {1 / ratio:.1f}x faster than float32 here"
    return torch.float32, f"bfloat16 measured {ratio:.1f}x slower here"


def bf16_slowdown(hidden: int, seconds: float = 2.0) -> float:
    """Time of a bfloat16 layer over that of a float32 one on this CPU, [256, hidden] x [hidden, 4 hidden]."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(256, hidden, dtype=dtype), torch.randn(4 * hidden, hidden, dtype=dtype)
        torch.nn.functional.linear(x, w)
        best, end = float("inf"), time.monotonic() + seconds / 2
        while math.isinf(best) or time.monotonic() < end:
            start = time.perf_counter()
            torch.nn.functional.linear(x, w)
            best = min(best, time.perf_counter() - start)
        times[dtype] = best
    return times[torch.bfloat16] / times[torch.float32]


# --------------------------------------------------------------------- fast paths


def _choose_paths(policy: Policy, rollouts: RolloutsConfig) -> None:
    """Set `native`, `packing` and `split_head` from comparisons with the model's own forward pass."""
    longest = min(rollouts.max_prompt_tokens + rollouts.max_new_tokens, policy.max_positions)
    text = policy.base.config.get_text_config()
    windowed = is_windowed(text, longest)
    rng = torch.Generator().manual_seed(0)
    prompt, one, two = (torch.randint(text.vocab_size, (k,), generator=rng).tolist() for k in (7, 3, 5))
    with torch.no_grad():
        rows = [_logits(policy, prompt + tail) for tail in (one, two)]
        # the very same operations, unless something happens to the logits afterwards: no room for rounding
        policy.split_head = torch.equal(_head_of_backbone(policy, prompt + one), rows[0])
        policy.packing = not windowed and policy.split_head and _packed_agrees(policy, prompt, one, two, rows)
        wanted = rollouts.engine != "transformers"
        if wanted and not windowed and policy.base.config.model_type in decode.SUPPORTED:
            policy.native = _native_agrees(policy, prompt, one, two, rows)
    if rollouts.engine == "native" and not policy.native:
        raise UserError(
            f"rollouts.engine = native, but it does not serve {policy.base.config.model_type!r} here; use auto"
        )


def is_windowed(text_config: Any, longest: int) -> bool:
    """Whether some layer of a model does not see all of a row of `longest` tokens."""
    windows = [getattr(text_config, "sliding_window", None), getattr(text_config, "attention_chunk_size", None)]
    return any(w and w < longest for w in windows) and getattr(text_config, "use_sliding_window", True)


def _logits(policy: Policy, ids: list[int]) -> Tensor:
    """The model's own logits [T, V]."""
    return policy.model(input_ids=torch.tensor([ids], device=policy.device)).logits[0]


def _head_of_backbone(policy: Policy, ids: list[int], **options: Tensor) -> Tensor:
    """Logits [T, V] as head(backbone(ids))."""
    ids_tensor = torch.tensor([ids], device=policy.device)
    hidden = policy.base.get_decoder()(input_ids=ids_tensor, use_cache=False, **options).last_hidden_state[0]
    return policy.base.get_output_embeddings()(hidden)


def _packed_agrees(policy: Policy, prompt: list[int], one: list[int], two: list[int], rows: list[Tensor]) -> bool:
    """Whether one row [prompt, one, two] with a block mask gives the logits of the two rows apart."""
    p, a, b = len(prompt), len(one), len(two)
    mask = torch.ones(p + a + b, p + a + b, dtype=torch.bool).tril()
    mask[p + a :, p : p + a] = False
    positions = torch.tensor([[*range(p + a), *range(p, p + b)]], device=policy.device)
    try:
        packed = _head_of_backbone(
            policy, prompt + one + two, attention_mask=mask[None, None].to(policy.device), position_ids=positions
        )
    except Exception as exc:  # many forward passes refuse such a mask, each in its own way
        policy.report(f"packed rows do not suit this architecture ({type(exc).__name__}): plain rows")
        return False
    return _same(packed[: p + a], rows[0]) and _same(packed[p + a :], rows[1][p:])


def _native_agrees(policy: Policy, prompt: list[int], one: list[int], two: list[int], rows: list[Tensor]) -> bool:
    """Whether the native engine, fed with given tokens, gives the model's own next-token logits."""
    prompts = [prompt, prompt + two[:2]]
    own_rows = [rows[0], _logits(policy, prompts[1] + one)]
    try:
        grid = decode.Grid(decode.Decoder(policy.model), prompts, 2, len(one))
        ours = [grid.prefill(prompts).repeat_interleave(2, 0)]
        for step, token in enumerate(one):
            ours.append(grid.forward(torch.full((4,), token, device=policy.device), step))
    except Exception as exc:  # it reaches into the model's modules: any surprise there means "not this one"
        policy.report(f"the native engine does not suit this model ({type(exc).__name__}: {exc})")
        return False
    logits = torch.stack(ours, 1)  # [4, 1 + len(one), V]
    return all(
        _same(logits[2 * i + j], own[len(p) - 1 :])
        for i, (p, own) in enumerate(zip(prompts, own_rows, strict=True))
        for j in range(2)
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two sets of logits give the same log-probabilities, up to rounding in the dtype they were computed in."""
    tolerance = 1e-3 if b.dtype == torch.float32 else 0.25
    difference = a.float().log_softmax(-1) - b.float().log_softmax(-1)
    return bool(difference.abs().max() <= tolerance)
