"""What `swarm-node new --model` writes into a manifest: a model's name, digest, size and, from the hub, its commit.

directory | hub id -> directory -> listing -> [model]
"""

from __future__ import annotations

import re
from pathlib import Path

from protocol.manifest import ManifestModel
from protocol.model_listing import OTHER_NAMES
from swarm_node.errors import UserError
from swarm_node.storage.rundir import explain, os_errors_explained
from swarm_node.swarm.base_weights.files import STARTER, list_model, remember, starter_folder

PATTERNS = [*sorted(OTHER_NAMES), "model.safetensors", "model-*-of-*.safetensors"]


def describe_model(named: str) -> ManifestModel:
    """The model at a path or of a hub id, whose files are read, and downloaded first if need be. Its listing is kept in
    the cache. Raises UserError."""
    path = Path(named).expanduser()
    if named == STARTER:
        folder, name = starter_folder(), STARTER
    elif path.is_dir():
        folder, name = path, re.sub("[^A-Za-z0-9._-]+", "-", path.resolve().name).strip("-._") or "model"
    elif named.startswith((".", "/", "~")):
        raise UserError(f"no model at {path}: give a directory in Hugging Face layout or a hub id")
    else:
        folder, name = _from_hub(named), named
    commit = folder.name if name == named and re.fullmatch("[0-9a-f]{40}", folder.name) else ""
    try:
        listing = list_model(folder)
    except OSError as error:
        raise UserError(f"cannot read the model: {explain(error, folder)}") from error
    with os_errors_explained(folder):
        return ManifestModel(name, remember(listing), listing.size, commit)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # whatever its library raises about a name that somebody typed
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"cannot get model {name} from the hub: {detail}") from error
