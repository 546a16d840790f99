"""Which model a member of a swarm trains, where it comes from, and whether it is given to others.

The user's --model counts first. Else it is the manifest's [model], by its digest. Without [model] members give no
model, because there would be no digest to check it against.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from swarm_node.config import NodeConfig
from swarm_node.errors import UserError
from swarm_node.policy import model_path
from swarm_node.policy.gguf_files import store
from swarm_node.policy.gguf_files.naming import gguf_at
from swarm_node.policy.model_path import SMOLLM2
from swarm_node.say import Say, Warned, in_short
from swarm_node.storage.model_names import keep_name
from swarm_node.storage.rundir import os_error_text, os_errors_explained
from swarm_node.swarm.base_weights import files
from swarm_node.swarm.base_weights.fetching import NO_PIECE_S, Donors
from swarm_node.swarm.base_weights.files import STARTER, Draft, Model
from swarm_node.swarm.base_weights.giving import Giver
from swarm_node.swarm.base_weights.hub import HubFailed, download_from_hub, in_hub_cache, is_offline
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.manifest import Manifest, ManifestModel
from swarm_protocol.model_listing import OTHER_NAMES, ModelListing, decode_listing, encode_listing
from swarm_protocol.transports.base import Transport

PATTERNS = [*sorted(OTHER_NAMES), "model.safetensors", "model-*-of-*.safetensors"]
"""Names of the files that members give to each other."""
SLOW_HUB_NO_PIECE_S = 60.0  # how long members are asked if the hub has the model as well, but sends it slowly


def choose_model(
    config: NodeConfig, manifest: Manifest, first: Sequence[str], transport: Transport, say: Say
) -> str | None:
    """Where the swarm's model is, as `policy.model` takes it; `None` if it has none, or the user has named another.
    Finds or fetches it, which may take minutes, and gives it to others from then on. `first`: addresses of members to
    ask first. Raises UserError if no member gives it, or the disk is full."""
    model = manifest.model
    if model is None:
        return None
    policy = config.policy
    as_named = policy.model == model.name and policy.revision is None and not _is_here(policy.model)
    if "model" in policy.model_fields_set and not as_named:
        give_what_is_here(config, manifest, transport, say)
        return None
    donors = Donors(transport, manifest.swarm_id, first, say)
    found = find_model(model, donors, say)
    if config.sharing.give_model:
        _give(config, found, manifest.swarm_id, transport, say)
    keep_name(found.folder, model.name)
    return STARTER if found.folder == files.starter_folder() else str(found.folder)


def _is_here(named: str) -> bool:
    """Whether a user who names a model so means one of this machine, or always the same, and not the swarm's."""
    return named == SMOLLM2 or Path(named).expanduser().exists()


def give_what_is_here(
    config: NodeConfig, manifest: Manifest, transport: Transport, say: Say, asked: bool = False
) -> None:
    """For a member that does not train the swarm's model: give it to others if this machine has it, at `policy.model`
    or elsewhere (`at_hand`). Returns at once; the model is read in the background. `asked`: members may count on this
    one, so it says if it cannot give the model."""
    model = manifest.model
    if model is None or not config.sharing.give_model:
        return

    def give() -> None:
        try:
            own = model_path.local_folder(config.policy.model)
        except UserError:  # told by the one who loads it
            own = None
        found = at_hand(model, [] if own is None else [own], say)
        if found is not None:
            _give(config, found, manifest.swarm_id, transport, say)
        elif asked and not model.revision:  # else the hub gives it
            lacking = f"this node does not give model {model.name}, since it is not here, and nobody trains before a"
            say(Warned(f"{lacking} member gives it: start again with --model DIR, or on the machine that has it"))

    threading.Thread(target=give, name="model", daemon=True).start()


def find_model(model: ManifestModel, donors: Donors, say: Say) -> Model:
    """The model from this machine, else from the hub, else from members. Raises UserError."""
    found = at_hand(model, say=say)
    if found is not None:
        return found
    slow = False
    if model.revision and not is_offline():
        say(f"asking the hub for model {model.name}")
        try:
            return _from_hub(model, False, say)
        except HubFailed as failure:
            slow = failure.slow
            say(Warned(f"the hub {failure}: asking members for model {model.name}"))
    near = [folder for folder in [in_hub_cache(model.name, model.revision)] if folder is not None]
    try:
        return fetch_model(model, donors, say, near, SLOW_HUB_NO_PIECE_S if slow else NO_PIECE_S)
    except UserError as error:
        if not slow:
            raise
        say(Warned(f"{error}; going on with the hub, though it is slow"))
    try:
        return _from_hub(model, True, say)
    except HubFailed as failure:
        raise UserError(f"neither members nor the hub give model {model.name}: the hub {failure}") from failure


def at_hand(model: ManifestModel, near: Sequence[Path] = (), say: Say = lambda sentence: None) -> Model | None:
    """The model in the cache, in one of the directories `near`, where this machine last read it (`new --model DIR`), or
    in the hub's cache; `None` if it is in none."""
    found = files.cached_model(model.digest)
    if found is not None:
        return found
    named = model_path.local_folder(model.name) if model.name in (STARTER, SMOLLM2) else store.kept_as(model.name)
    places = [*near, files.last_place(model.digest), named, in_hub_cache(model.name, model.revision)]
    listing = files.known_listing(model.digest)
    tried = (files.as_model(folder, model.digest, model.bytes, listing, say) for folder in places if folder is not None)
    return next((there for there in tried if there is not None), None)


def fetch_model(
    wanted: ManifestModel, donors: Donors, say: Say, near: Sequence[Path] = (), patience_s: float = NO_PIECE_S
) -> Model:
    """Get the model from members into the cache, from where an earlier call left off. Pieces that lie in the
    directories `near` are copied. Raises UserError if the disk is full, or no member gives it for `patience_s`."""
    folder = files.cache() / wanted.digest
    with os_errors_explained(folder), files.only_process(wanted, say):
        found = files.cached_model(wanted.digest)  # fetched by another process, while this one waited
        if found is not None:
            return found
        partial = folder.with_name(f"{wanted.digest}.partial")
        partial.mkdir(exist_ok=True)
        called = f"model {wanted.name}"
        listing = _listing(wanted, donors, partial, called, patience_s)
        draft = Draft(partial, listing)
        need, free = draft.missing_bytes + files.SPARE_BYTES, shutil.disk_usage(partial).free
        if draft.missing and need > free:
            raise UserError(
                f"{called} takes {draft.missing_bytes / 2**30:.1f} GiB more at {folder.parent}, where "
                f"{free / 2**30:.1f} GiB are free: make room, or choose another disk with HF_HOME"
            )
        draft.take_from(near)
        began, size = time.monotonic(), draft.missing_bytes
        if draft.missing:
            at_hand = listing.size - size
            here = f", {at_hand / 2**20:.1f} MiB of it are here" if at_hand else ""
            say(f"getting {called} from members: {listing.size / 2**20:.1f} MiB{here}")
            donors.get(draft.missing, draft.keep, called, patience_s)
            givers = sum(donor.given > 0 for donor in donors.donors.values())
            seconds = time.monotonic() - began
            members = f"{givers} member{'s' * (givers != 1)}"
            say(f"{called} is here: {size / 2**20:.1f} MiB in {seconds:.1f} s from {members}, all checked")
        draft.finish(folder)
    return Model(wanted.digest, folder, listing)


def _listing(wanted: ManifestModel, donors: Donors, partial: Path, called: str, patience_s: float) -> ModelListing:
    """The model's listing, from this machine or else from members; a copy goes into `partial`."""
    listing = files.known_listing(wanted.digest)
    if listing is None:
        got = bytearray()
        donors.get({wanted.digest: None}, lambda sha256, data: got.extend(data), f"the listing of {called}", patience_s)
        try:
            listing = decode_listing(bytes(got), wanted.digest)
        except RemoteProtocolError as error:  # its digest is right, so it is what the swarm's maker wrote
            raise UserError(f"this swarm's {called} cannot be used: {error.detail}; choose one with --model") from error
    if listing.size != wanted.bytes:
        raise UserError(f"this swarm's {called} is not of the size that its manifest says; choose one with --model")
    (partial / files.LISTING).write_bytes(encode_listing(listing))
    return listing


def _from_hub(model: ManifestModel, patient: bool, say: Say) -> Model:
    folder = download_from_hub(model, patient)
    found = files.as_model(folder, model.digest, model.bytes, files.known_listing(model.digest), say)
    if found is None:
        raise HubFailed("has something else of that name")
    return found


def _give(config: NodeConfig, found: Model, swarm: str, transport: Transport, say: Say) -> None:
    Giver(transport, swarm, found, say, config.network.max_upload_mbit)
    say("giving the swarm's model to members that lack it (sharing.give_model = false turns this off)")


def describe_model(named: str, say: Say = lambda sentence: None) -> ManifestModel:
    """Name, digest, size and (from the hub) commit of the model at a path or of a hub id, for a manifest's [model].
    Downloads it if need be, and keeps its listing in the cache. Raises UserError."""
    path = Path(named).expanduser()
    if named == STARTER:
        folder, name = files.starter_folder(), STARTER
    elif named == SMOLLM2 or gguf_at(named) is not None:
        folder = Path(model_path.located(named, say))
        name = SMOLLM2 if named == SMOLLM2 else store.swarm_name(folder)
    elif path.is_dir():
        folder, name = path, re.sub("[^A-Za-z0-9._-]+", "-", path.resolve().name).strip("-._") or "model"
    elif named.startswith((".", "/", "~")):
        raise UserError(f"no model at {path}: give a directory in Hugging Face layout, a GGUF file or a hub id")
    else:
        folder, name = downloaded(named), named
    commit = folder.name if name == named and re.fullmatch("[0-9a-f]{40}", folder.name) else ""
    try:
        listing = files.list_model(folder)
    except OSError as error:
        raise UserError(f"cannot read the model: {os_error_text(error, folder)}") from error
    with os_errors_explained(folder):
        return ManifestModel(name, files.remember(listing, folder), listing.size, commit)


def downloaded(name: str) -> Path:
    """The directory of a model of the hub, downloaded if need be. Raises UserError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # the library may raise anything about a mistyped name
        detail = in_short(f"{type(error).__name__}: {error}", 300)
        raise UserError(f"cannot get model {name} from the hub: {detail}") from error
