"""What is said when a model cannot be loaded: the usual mistakes in own sentences, a library's text in short."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers
from huggingface_hub import is_offline_mode
from huggingface_hub import logging as hub_logging
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers.utils import logging as transformers_logging

from swarm_node.errors import UserError
from swarm_node.policy.oom import is_out_of_memory
from swarm_node.policy.tokenizing import TokenizerError, guarded
from swarm_node.say import in_short

COPY_AGAIN = "download or copy it again"
NO_TYPE = "its config.json names no model_type: take config.json of the model that it was made from"
USUAL = {
    "custom code which must be executed": (
        "it has code of its own (auto_map), which is never run here: take a model of an architecture that transformers "
        "has"
    ),
    "Couldn't instantiate the backend tokenizer": (
        "it has no tokenizer that can be read: copy tokenizer.json and tokenizer_config.json of the model that it was "
        "made from into it, or have them written by `tokenizer.save_pretrained(DIR)`"
    ),
    "does not recognize this architecture": (
        f"transformers {transformers.__version__} does not know the model_type in its config.json: upgrade "
        "transformers, or take another model"
    ),
    "Should have a `model_type` key": NO_TYPE,
    "Unrecognized model in": NO_TYPE,
}
"""Words of a library's message -> what to say in its place."""
WRAPPERS = {
    "_orig_mod.": "a compiled model: save `model._orig_mod`",
    "module.": "a model in DataParallel: save `model.module`",
    "base_model.model.": "a model with an adapter: save `model.merge_and_unload()`",
}
"""Beginning of the names of all tensors -> of what they are, and what to save instead."""


@contextmanager
def refusing(what: str, path: str) -> Iterator[None]:
    """Turn every error of the libraries into a UserError of one line: the files are a stranger's.

    The hub library's own log of failed tries is not shown from then on, unless HF_HUB_VERBOSITY asks for more.
    """
    if hub_logging.get_verbosity() == hub_logging.WARNING:
        hub_logging.set_verbosity_error()
    try:
        with guarded("its own files"):
            yield
    except TokenizerError as exc:
        raise UserError(f"cannot load {what} from {path}: {exc}") from exc
    except UserError:
        raise
    except Exception as exc:
        if is_out_of_memory(exc):
            raise UserError(f"not enough memory to load {path}") from exc
        if (usual := next((told for words, told in USUAL.items() if words in str(exc)), None)) is not None:
            raise UserError(f"cannot load {what} from {path}: {usual}") from exc
        detail = in_short(f"{type(exc).__name__}: {exc}", 300)
        if Path(path).is_dir():
            raise UserError(f"cannot load {what} from {path} ({detail}): {COPY_AGAIN}, or take another model") from exc
        if _is_out_of_reach(exc):
            detail = f"the hub cannot be reached{' (HF_HUB_OFFLINE is set)' if is_offline_mode() else ''}"
        raise UserError(
            f"cannot load {what} from {path}: {detail}; give a directory with the model (--model ./DIR); other members "
            "of a swarm give a model only if the swarm's manifest names it"
        ) from exc


def _is_out_of_reach(error: BaseException) -> bool:
    """Whether the hub was not asked, or did not answer, for a file that its cache lacks."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, LocalEntryNotFoundError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextmanager
def naming_base(folder: str, base: str) -> Iterator[None]:
    """Let an error about the base of the adapter in `folder` say which file names it."""
    try:
        yield
    except UserError as error:
        file = Path(folder) / "adapter_config.json"
        raise UserError(f"{file} names the base {base}: {error}; change base_model_name_or_path there") from error


def check_no_adapter(path: str) -> None:
    """Raise UserError for a directory or a name of a model that has an adapter's config as well, or that alone."""
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(
            f"{path} is an adapter too, and none is trained on top of another: name a model that it was merged into "
            "(`swarm-node export RUN OUT --merged` of its run, or PEFT's `model.merge_and_unload()`)"
        )
    raise UserError(
        f"{path} holds a model and an adapter: name a directory with the model alone, or one with the adapter "
        "alone (adapter_config.json and adapter_model.safetensors)"
    )


def lacks(base: str, name: str, there: Collection[str] = ()) -> str:
    """What to say of a model without a tensor `name` that it should have; `there` are those in its files."""
    other = next((each for each in there if each.endswith(f".{name}")), None)
    if other is None:
        return f"{base} lacks weights that its config asks for, for example {name}; {COPY_AGAIN}"
    return _wrapped(base, other.removesuffix(name))


def check_names(base: str, wanted: Collection[str], there: Collection[str]) -> None:
    """Raise UserError if the tensors in a model's files have the names that they have inside of a wrapper."""
    for prefix in WRAPPERS:
        if any(name.removeprefix(prefix) in wanted for name in there if name.startswith(prefix)):
            raise UserError(_wrapped(base, prefix))


def _wrapped(base: str, prefix: str) -> str:
    known = WRAPPERS.get(prefix, f"a larger model: save the part that is called `{prefix.rstrip('.')}`")
    return f"{base}: the names of its tensors begin with {prefix}, as those of {known}, or remove that from the names"


@contextmanager
def without_reports() -> Iterator[None]:
    """Within it, transformers shows no table of the tensors that it did not find: `lacks` says what is wrong."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(max(before, transformers_logging.ERROR))
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
