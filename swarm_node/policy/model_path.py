"""Where a model is on this machine and how large it is, found out without torch."""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm_node.errors import UserError
from swarm_node.policy.gguf_files import smollm2, store
from swarm_node.policy.gguf_files.header import read_header
from swarm_node.policy.gguf_files.naming import gguf_at
from swarm_node.say import Say, Warned
from swarm_node.storage.hub import hub_answers
from swarm_node.storage.plain_files import open_plain

STARTER = "starter"  # the name of the model that this package contains
SMOLLM2 = smollm2.SMOLLM2
CONFIGS = ("config.json", "adapter_config.json")
LORA_ABOVE = 100_000_000  # parameters above which an adapter is trained unless told otherwise
MAX_HEADER_BYTES = 32 * 2**20  # JSON before the tensors of a safetensors file: 2**17 entries of 250 bytes


class _Tensor(msgspec.Struct):
    """An entry of the header of a safetensors file."""

    shape: Annotated[list[Annotated[int, Meta(ge=0, le=2**40)]], Meta(max_length=8)]


def starter_path() -> str:
    """Directory of the starter policy that ships with this package."""
    return str(resources.files("swarm_node.policy") / "starter_model")


def located(named: str, say: Say = lambda sentence: None) -> str:
    """Directory or hub id of the model that a user calls `named`, as transformers wants it. A GGUF file is dequantised
    if that was not done before, and `smollm2` is fetched, which `say` is told. Raises UserError."""
    if named == SMOLLM2:
        return str(smollm2.smollm2(say))
    path = checked(named)
    if named == STARTER or (file := gguf_at(path)) is None:
        return path
    if not file.is_file() and (kept := store.kept_from(file)) is not None:
        say(Warned(f"{file} is not there any more: going on with {kept}, which was made of it"))
        return str(kept)
    return str(store.folder_of(file, say))


def local_folder(named: str) -> Path | None:
    """The directory of the model that a user calls `named`, if it is on this machine; None for a hub id, and for what
    would have to be fetched or dequantised first. Raises UserError."""
    if named == SMOLLM2:
        return store.kept(smollm2.SHA256)
    path = checked(named)
    if (file := gguf_at(path)) is None:
        return Path(path) if Path(path).is_dir() else None
    return store.kept(store.sha256_of(file)) if file.is_file() else store.kept_from(file)


def checked(path: str) -> str:
    """`path` as it lies on this machine, or a hub id: nothing is fetched, and of a GGUF file the header alone is read.
    UserError if it must be a directory or a file and holds no model; names with a slash may be hub ids, and so are
    names of models in the hub's cache."""
    if path in (STARTER, SMOLLM2):
        return starter_path() if path == STARTER else path
    if (file := gguf_at(path)) is not None:
        if file.is_file():
            read_header(file)
        elif store.kept_from(file) is None:
            raise UserError(f"there is no file {file}")
        return str(file)
    folder = Path(path).expanduser()
    if is_place(path):
        path = str(folder)
        if not folder.is_dir():
            raise UserError(f"no model at {path}: give a directory in Hugging Face layout, a GGUF file or a hub id")
        if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
            run = "; it is a run: `swarm-node export` makes a model of it" if (folder / "checkpoints").is_dir() else ""
            raise UserError(f"no model in {path}: it has no config.json{run}")
    elif "/" not in path and not _is_cached(path):
        close = get_close_matches(path, (STARTER, SMOLLM2), n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        hub = "a model of the hub is named OWNER/NAME, as on its page"
        raise UserError(f"there is no directory {path}{meant}, and {hub}")
    return path


def is_place(path: str) -> bool:
    """Whether `path` is one on this machine, whatever is there, and no hub id."""
    folder = Path(path).expanduser()
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists():
        return True
    return folder.parent.is_dir() and folder.parent != Path(".")


def is_particular(named: str) -> bool:
    """Whether a user who names a model so means one model, whatever a swarm calls its own."""
    return named == SMOLLM2 or "/" in named or Path(named).expanduser().exists()


def check_hub_id(name: str) -> None:
    """Raise UserError unless `name` can be that of a model on the hub."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[\w][\w.-]{0,95}", name, re.ASCII):
        raise UserError(f"--base {name}: a model of the hub is named OWNER/NAME, as on its page")


def _is_cached(name: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{name}").is_dir()


def check_hub(path: str, revision: str | None = None) -> None:
    """Raise UserError for a model that must come from the hub while the hub does not answer. One question, since the
    hub's library tries again for more than a minute."""
    from huggingface_hub import is_offline_mode

    if path == SMOLLM2 or gguf_at(path) or Path(path).expanduser().is_dir() or _is_downloaded(path, revision):
        return
    if is_offline_mode():
        raise hub_out_of_reach(path, "HF_HUB_OFFLINE is set")
    if not hub_answers():
        raise hub_out_of_reach(path)


def _is_downloaded(path: str, revision: str | None) -> bool:
    """Whether the hub's cache has anything of the model, or would refuse the name anyway."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(path, name, revision=revision) for name in CONFIGS]
    except HFValidationError:
        return True
    return any(isinstance(each, str) for each in found)


def hub_out_of_reach(path: str, why: str = "") -> UserError:
    """The error about a model that this machine lacks, while it cannot ask the hub."""
    return UserError(
        f"cannot load the model {path}: it is not on this machine, and the hub cannot be reached"
        f"{f' ({why})' if why else ''}; give a directory with the model (--model ./DIR); other members of a swarm give "
        "a model only if the swarm's manifest names it"
    )


def parameters(path: str) -> int | None:
    """Parameters of the model in a directory or a GGUF file, by the headers of its weights; None if it is elsewhere, or
    an adapter, or cannot be read."""
    if path == SMOLLM2:
        return smollm2.PARAMETERS
    if (file := gguf_at(path)) is not None and file.is_file():
        return read_header(file).values
    folder = Path(path).expanduser()
    files = [*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")]
    if not files or (folder / "adapter_config.json").is_file():
        return None
    try:
        return sum(map(_values, files))
    except (OSError, ValueError, RecursionError):  # told by the one who loads it
        return None


def _values(file: Path) -> int:
    """Values of all tensors in a safetensors file: eight bytes with the length of the header, then the header."""
    with open_plain(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError
        header = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    return sum(math.prod(msgspec.json.decode(entry, type=_Tensor).shape) for entry in header.values())
