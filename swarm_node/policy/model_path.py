"""Where a model is on this machine and how large it is, found out without torch."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path

from swarm_node.errors import UserError

LORA_ABOVE = 100_000_000  # parameters above which an adapter is trained unless told otherwise
MAX_HEADER_BYTES = 32 * 2**20  # JSON before the tensors of a safetensors file: 2**17 entries of 250 bytes


def starter_path() -> str:
    """Directory of the starter policy that ships with this package."""
    return str(resources.files("swarm_node.policy") / "starter_model")


def checked(path: str) -> str:
    """`path` as transformers wants it. UserError if it must be a directory and holds no model; names with a slash may
    be hub ids, and so are names of models in the hub's cache."""
    folder = Path(path).expanduser()
    is_place = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists()
    if is_place or (folder.parent.is_dir() and folder.parent != Path(".")):
        path = str(folder)
        if not folder.is_dir():
            raise UserError(f"no model at {path}: give a directory in Hugging Face layout or a hub id")
        if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
            run = "; it is a run: `swarm-node export` makes a model of it" if (folder / "checkpoints").is_dir() else ""
            raise UserError(f"no model in {path}: it has no config.json{run}")
    elif "/" not in path and not _is_cached(path):
        raise UserError(f"there is no directory {path}, and a model of the hub is named OWNER/NAME, as on its page")
    return path


def _is_cached(name: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{name}").is_dir()


def parameters(path: str) -> int | None:
    """Parameters of the model in a directory, by the headers of its weights; None if it is elsewhere, or an adapter, or
    cannot be read."""
    folder = Path(path).expanduser()
    files = [*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")]
    if not files or (folder / "adapter_config.json").is_file():
        return None
    try:
        return sum(map(_values, files))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # told by the one who loads it
        return None


def _values(file: Path) -> int:
    """Values of all tensors in a safetensors file: eight bytes with the length of the header, then the header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError
        header = json.loads(opened.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
