"""Refuse a model's files before the libraries read them.

    config.json            nothing in it may fetch or run anything, or ask for endless work
    weights                safetensors only: no pickle is opened; headers, tensors and declared sizes are bounded
    adapter directory      the same for its config and its weights

All functions raise UserError with the file's name and what to do.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from swarm_node.errors import UserError
from swarm_node.policy.model_path import MAX_HEADER_BYTES
from swarm_node.say import in_short
from swarm_node.storage.plain_files import read_plain
from swarm_protocol.limits import MAX_LAYERS

MAX_JSON_BYTES = 16 * 2**20  # a config or an index: the longest index known, of a model of 91,991 tensors, has 9 MB
MAX_LABELS = 2**16  # classes of a classifier: the config library makes a name for each
MIN_POSITIONS = 16  # a prompt and an answer of a few tokens each
MAX_TENSORS = 2**17
"""Tensors in all files of a model, and modules, parameters and buffers that its config makes: the largest mixture of
experts known has 91,991. So many take some seconds."""
MAX_VALUES = 2**42  # values of all parameters: four times the largest open model
MAX_BUFFER_VALUES = 2**28  # values of all buffers, which are in no file: a causal mask of 16,384 positions
VALUES_PER_BYTE = 4  # most values that a byte of the files stands for: weights in 4 bits have two
MAX_RANK = 4096  # largest rank of an adapter; the largest in use are 256
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
CONVERT = "have it saved as safetensors (`model.save_pretrained(DIR)` writes it), or take a copy of it that is"
PICKLED = re.compile(r"\.(bin|pt|pth|pkl|pickle|ckpt)$")
COUNTED = re.compile(r"(^|_)(layers?|depths?|blocks?)$")  # keys of a config whose numbers become loops in the library
LOADED = {
    "configuration_files": "names another config",
    "transformers_weights": "names another file of weights",
    "kernel_config": "names kernels to be fetched and run",
    "use_kernels": "asks for kernels to be fetched and run",
    "use_pretrained_backbone": "names another model to be fetched",
    "use_timm_backbone": "names another model to be fetched",
    "custom_generate": "names code to be run",
    "megatron_config": "names a module to be imported",
}
"""Keys of a config that make the libraries load more than the model's own files, and why they are refused."""
QUANTISED = frozenset({"bitsandbytes"})
"""Ways to quantise whose code is a package of the user's own. All others fetch kernels, or run what they compile."""


def check_config(file: Path) -> None:
    """The config of a model or of an adapter, as it lies on disk."""
    for key, value in _entries(read_json(file)):
        if value and key in LOADED:
            raise UserError(f"{file}: {key} {LOADED[key]}, which is refused; remove it from the file")
        if key.endswith(("_implementation", "_implementation_internal")):
            if any(not re.fullmatch("[A-Za-z0-9_]*", text) for text in _texts(value)):
                raise UserError(f"{file}: {key} names code to be fetched and run; remove it from the file")
        if key in ("quantization_config", "quantization") and value:
            _check_quantised(file, value)
        most = MAX_LAYERS if COUNTED.search(key) else MAX_LABELS if key == "num_labels" else None
        if most is not None and any(number > most for number in _numbers(value)):
            raise UserError(f"{file}: {key} is more than {most}, which no model has")


def check_positions(source: str, config: Any) -> None:
    """Whether a model's loaded config leaves room for a prompt and an answer. It may say nothing of it, or 0."""
    for key, positions in _entries(config.to_dict()):
        if key == "max_position_embeddings" and positions:
            if not (isinstance(positions, int) and positions >= MIN_POSITIONS):
                raise UserError(
                    f"{source}: its config says {key} = {ascii(positions)[:40]}, allowed are {MIN_POSITIONS} or more: "
                    "a prompt and its answer need room"
                )


def _check_quantised(file: Path, how: object) -> None:
    """Raise UserError for weights that are quantised in another way than this package may load."""
    method = how.get("quant_method") if isinstance(how, dict) else how
    if method in QUANTISED:
        return
    if method is None and isinstance(how, dict) and {"group_size", "bits"} <= how.keys():
        by = "MLX, which only Apple's machines read, cannot be trained here"
    elif method is None:
        by = "a method that is not named (no quant_method) cannot be loaded"
    else:
        by = f"{method!r} need code that is fetched or compiled"
    raise UserError(f"{file}: weights quantised by {by}; give the model that it was made from")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file that is not too large."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise UserError(f"{file} is larger than {MAX_JSON_BYTES // 2**20} MiB, which no config is")
        found = json.loads(read_plain(file, MAX_JSON_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {file}: {in_short(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} is no JSON object")
    return found


def _entries(value: object) -> Iterator[tuple[str, Any]]:
    """(key, value) of all objects in `value`, at any depth."""
    for key, each in value.items() if isinstance(value, dict) else ():
        yield key, each
        yield from _entries(each)
    for each in value if isinstance(value, list) else ():
        yield from _entries(each)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    for each in value if isinstance(value, list) else ():
        yield from _numbers(each)


class _Made(threading.local):
    """Modules, parameters and buffers that this thread made within `bounded_modules`."""

    source: str | None = None  # name of the model; `None` outside
    made = values = buffered = 0

    def count(self, tensor: Tensor | None, is_buffer: bool) -> None:
        if self.source is None:
            return
        numel = 0 if tensor is None else tensor.numel()
        self.made += 1
        self.values, self.buffered = self.values + numel * (not is_buffer), self.buffered + numel * is_buffer
        if self.made > MAX_TENSORS or self.values > MAX_VALUES or self.buffered > MAX_BUFFER_VALUES:
            raise UserError(f"{self.source}: its config asks for a model larger than any that is known")


_made = _Made()
# Once for the process: torch walks its hooks while any thread makes a module, and must not see them change meanwhile.
register_module_parameter_registration_hook(lambda module, name, tensor: _made.count(tensor, False))
register_module_buffer_registration_hook(lambda module, name, tensor: _made.count(tensor, True))
register_module_module_registration_hook(lambda module, name, child: _made.count(None, False))


@contextmanager
def bounded_modules(source: str) -> Iterator[None]:
    """Within it, this thread makes no model of more modules and values than any has, whatever its config says."""
    _made.source, _made.made, _made.values, _made.buffered = source, 0, 0, 0
    try:
        yield
    finally:
        _made.source = None


def weight_map_of(source: str, index: Path) -> dict[str, str]:
    """Tensor -> file, out of a model's index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} has no weight_map")
    if len(weight_map) > MAX_TENSORS:
        raise UserError(f"{source}: its index names {len(weight_map)} tensors, allowed are {MAX_TENSORS}")
    for name in set(weight_map.values()):
        if PICKLED.search(name):
            raise UserError(f"{source}: its index names {name}, a pickle, which is not read; {CONVERT}")
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{source} has an index that names a file elsewhere, or none of weights: {name!r}")
    return weight_map


def check_header(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file. Its header is bounded before it is parsed."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise UserError(
                f"{file} is no file of weights: its header has {size} bytes, allowed are {MAX_HEADER_BYTES}"
            )
        with safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {file}: {error}; download or copy it again") from error
    if len(names) > MAX_TENSORS:
        raise UserError(f"{file} has {len(names)} tensors, allowed are {MAX_TENSORS}")
    return names


def check_declared(source: str, values: int, files: list[Path]) -> None:
    """Whether `files` can hold the `values` of all parameters that the config declares."""
    size = sum(file.stat().st_size for file in files)
    if values > VALUES_PER_BYTE * size:
        raise UserError(
            f"{source}: its config asks for {values:,} parameters, but its weights have {size:,} bytes; the two do not "
            "belong together"
        )


def check_adapter(folder: Path) -> None:
    """A directory with a saved adapter."""
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        refuse_pickles(f"{folder} has its adapter", folder.glob("adapter_model*"))
        raise UserError(f"{folder} has no {ADAPTER_WEIGHTS}: no adapter was saved there")
    check_config(folder / "adapter_config.json")
    found = read_json(folder / "adapter_config.json")
    if str(found.get("peft_type", "LORA")).upper() != "LORA":
        raise UserError(f"{folder} is an adapter of type {found['peft_type']!r}: only LoRA is trained on")
    pattern = found.get("rank_pattern")
    ranks = [found.get("r"), *(pattern.values() if isinstance(pattern, dict) else [])]
    if any(number > MAX_RANK for number in _numbers(ranks)):
        raise UserError(f"{folder}: its adapter is of a rank above {MAX_RANK}, which none has")
    if found.get("layer_replication"):
        raise UserError(f"{folder}: its adapter makes a model of other layers than its base (layer_replication)")
    if re.search("[0-9]{4}", str(found.get("init_lora_weights"))):
        raise UserError(f"{folder}: init_lora_weights of its adapter asks for thousands of passes over the weights")
    check_header(file)


def refuse_pickles(what: str, files: Iterable[Path]) -> None:
    """Name the first pickle among `files`, if there is one, instead of the safetensors that are missing."""
    pickled = sorted(path.name for path in files if PICKLED.search(path.name))
    if pickled:
        raise UserError(f"{what} in {pickled[0]}, a pickle, which is not read; {CONVERT}")
