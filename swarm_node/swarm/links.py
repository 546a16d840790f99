"""Which swarm: a manifest's path, its https address or a swarm:// link names it; links lead others to it.

path | https address | swarm:// link -> Swarm (manifest checked against the id; `None` behind a link) -> join link

A link carries no tasks: members give the manifest (`lookup`). The run directory keeps it, so a restart asks nobody.
"""

from __future__ import annotations

import ipaddress
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from swarm_node.config import NodeConfig
from swarm_node.errors import UserError
from swarm_node.say import Say, Warned
from swarm_node.storage.nearby import names_near
from swarm_node.storage.plain_files import open_plain, read_plain
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.download import download, is_url
from swarm_node.swarm.manifests import check_addresses, render
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.hosts import is_public
from swarm_protocol.limits import MAX_ADDRESSES, MAX_MANIFEST_BYTES
from swarm_protocol.manifest import LINK_SCHEME, JoinLink, Manifest, parse_link, parse_manifest
from swarm_protocol.messages import PeerCard
from swarm_protocol.peers import MAX_CACHE_BYTES, is_relayed, parse_cache

MAX_BOOTSTRAP = 64  # bootstrap addresses in a kept manifest
MAX_NAMED = 3  # other members that a join link names: people type it


class Swarm(msgspec.Struct, frozen=True):
    """A swarm that a node may join."""

    id: str
    manifest: Manifest | None  # `None` if a link named the swarm and no member has given the manifest yet
    peers: list[str]  # addresses to begin with: those of the link, or else of the manifest
    folder: Path | None = None  # the directory of the manifest, in which question files may lie, too
    named: str = ""  # the path, address or link that named it; empty if this process made the swarm


def find_swarm(named: str | None, run: RunDir | None = None, say: Say = lambda sentence: None) -> Swarm:
    """The swarm that a path, an https address or a link names. Asks no peer. The manifest that `run` keeps is used for
    a link to the same swarm, and for an address that cannot be reached if it named the swarm last time. Raises
    UserError."""
    if named is None or not named.strip():
        raise UserError(
            "which swarm? Give a link, such as 'swarm://0031a11b…?peer=/ip4/…', which `swarm-node bootstrap` and every "
            "member print; or a manifest file, or its https address. SWARM_NODE_SWARM may name it too"
        )
    kept = None if run is None else kept_manifest(run)
    try:
        if named.startswith(f"{LINK_SCHEME}:"):
            link = parse_link(named)
            check_addresses(link.peers)
            if kept is not None and kept.swarm_id == link.swarm:
                kept = with_bootstrap(kept, link.peers)
                return Swarm(link.swarm, kept, kept.bootstrap, named=named)
            return Swarm(link.swarm, None, link.peers, named=named)
        if is_url(named):
            try:
                manifest = parse_manifest(download(named, MAX_MANIFEST_BYTES))
            except UserError as error:
                if run is None or kept is None or not named.startswith("https:") or _joined_by(run) != named:
                    raise  # the kept manifest may be of another swarm, whose members would see this node's answers
                say(Warned(f"{error}; going on with the swarm this run was in, {kept.name} {kept.swarm_id[:16]}"))
                manifest = kept
            return Swarm(manifest.swarm_id, manifest, manifest.bootstrap, named=named)
        path = Path(named).expanduser()
        manifest = parse_manifest(_read(path, runs=run is None and not path.suffix))
        return Swarm(manifest.swarm_id, manifest, manifest.bootstrap, path.parent, named)
    except RemoteProtocolError as error:
        raise UserError(f"{named} is no swarm that can be joined: {error.detail}") from error


def swarm_to_join(config: NodeConfig, say: Say | None = None) -> Swarm:
    """The swarm that `config` names. Warns if there is no address to ask. Writes nothing. Raises UserError, also for a
    link that leads nowhere, and for a run that has trained in another swarm."""
    say = say or partial(print, file=sys.stderr, flush=True)
    run = RunDir(config.directory)
    swarm = find_swarm(config.swarm, run, say)
    kept = kept_manifest(run)
    if kept is not None and kept.swarm_id != swarm.id and run.has_trained:  # its policy should not move on unnoticed
        raise UserError(
            f"{run.path} is a run in swarm {kept.name} {kept.swarm_id[:16]}, not in {swarm.id[:16]}: choose another "
            f"--name or --run-dir; `swarm-node export {shlex.quote(str(run.path))} DIR` makes a model of it for --model"
        )
    if swarm.manifest is None and not swarm.peers and not config.network.bootstrap:
        raise UserError(
            "this link names no peer to ask for the manifest: use one that `swarm-node bootstrap` or a member prints, "
            "the manifest itself, or --bootstrap ADDRESS"
        )
    if not (swarm.peers or config.network.bootstrap or cached_addresses(run)):
        say(f"{swarm.named} names no other node, so this one begins alone; others join by the link that it prints")
    return swarm


def cached_addresses(run: RunDir) -> list[str]:
    try:
        cached = parse_cache(read_plain(run.peers, MAX_CACHE_BYTES))
        return [address for peer in cached for address in peer.addresses]
    except (OSError, RemoteProtocolError):  # none yet, or damaged: a run starts without them as well
        return []


def keep(manifest: Manifest, run: RunDir, named: str = "") -> None:
    """Write the manifest to the run directory, for restarts. The first line says how it was `named`, in the same
    file, so that a crash cannot separate the two."""
    first = f"# joined by {json.dumps(named)}\n" if named else ""
    run.write("swarm.toml", f"{first}{render(manifest).decode()}")


def _joined_by(run: RunDir) -> str:
    """The name by which `run` joined its swarm; empty if that is not known."""
    try:
        with open_plain(run.swarm) as file:
            return str(json.loads(file.readline(MAX_MANIFEST_BYTES).removeprefix(b"# joined by ")))
    except (OSError, ValueError, RecursionError):  # no manifest, or one without such a line
        return ""


def with_bootstrap(manifest: Manifest, peers: Sequence[str]) -> Manifest:
    """The manifest with `peers` first in its bootstrap list, which the swarm's id does not cover."""
    return msgspec.structs.replace(manifest, bootstrap=distinct([*peers, *manifest.bootstrap])[:MAX_BOOTSTRAP])


def kept_manifest(run: RunDir) -> Manifest | None:
    """The manifest in the run directory, if it is there and valid."""
    try:
        return parse_manifest(read_plain(run.swarm, MAX_MANIFEST_BYTES))
    except (OSError, RemoteProtocolError):  # none yet, or damaged: it is only a copy
        return None


def _read(path: Path, runs: bool) -> bytes:
    """The text of a manifest. `runs`: the name may be meant for a run directory."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        what = "run directory or manifest" if runs else "manifest"
        near = names_near(path, runs, manifests=True)
        raise UserError(f"there is no {what} {path}: `swarm-node new` makes a manifest{near}") from error
    except OSError as error:
        raise UserError(f"cannot read the manifest {path}: {error.strerror}") from error


def join_link(swarm_id: str, addresses: Sequence[str], others: Sequence[str]) -> str:
    """The link by which others join: this node's direct `addresses`, then `others`, then this node's relayed ones."""
    direct = [address for address in addresses if not is_relayed(address)]
    relayed = [address for address in addresses if address not in direct]
    return str(JoinLink(swarm_id, distinct([*direct, *others, *relayed])[:MAX_ADDRESSES]))


Reach = Literal["public", "private", "own", "unknown"]


def kind_of(address: str) -> Reach:
    """From where a multiaddress can be reached."""
    _, kind, host, *_ = [*address.split("/"), "", ""]
    if kind.startswith("dns"):
        return "public"
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:  # members may claim anything
        return "unknown"
    return "own" if ip.is_loopback else "public" if is_public(ip) else "private"


def kind_of_link(link: str) -> Reach:
    """From where the farthest of its addresses can be reached."""
    kinds = {kind_of(address) for address in parse_link(link).peers}
    known: tuple[Reach, ...] = "public", "private", "own"
    return "unknown" if "unknown" in kinds else next((kind for kind in known if kind in kinds), "unknown")


def reach_of(link: str) -> str:
    """A sentence for a link that leads no further than this network or this machine; empty if it leads further, or if
    that cannot be told."""
    place = {"private": "in this network", "own": "on this machine"}.get(kind_of_link(link))
    if place is None:
        return ""
    return f"this link works only {place}; docs/swarm.md, “Behind a router”, says how others reach this node"


def living(members: Mapping[str, PeerCard], first: Sequence[str]) -> list[str]:
    """An address each of up to `MAX_NAMED` reachable members, for links: bootstrap nodes, then `first`, then others."""
    ranked = [*(peer for peer, card in members.items() if "bootstrap" in card.roles), *first, *sorted(members)]
    found: dict[str, str] = {}
    for peer in dict.fromkeys(ranked):
        reached = members[peer].addresses if peer in members else []
        if reached and len(found) < MAX_NAMED:
            found[peer] = min(reached, key=is_relayed)
    return list(found.values())


def distinct(items: Sequence[str]) -> list[str]:
    """`items` in order, without repetitions and empty ones."""
    return [item for item in dict.fromkeys(items) if item]
