"""Find a swarm, believe nothing, and get what it takes to be in it.

    path | https address | swarm:// link -> manifest, checked against the id -> question files, checked by digest
         -> transport -> the link that others join by

A link carries no tasks: the manifest comes from whichever member answers. Both the manifest and the files are kept in
the run directory, so a restart needs nobody.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from protocol.errors import LocalProtocolError, NotOfSwarm, PeerUnreachable, RemoteProtocolError, printable
from protocol.limits import MAX_ADDRESSES, MAX_MANIFEST_BYTES
from protocol.manifest import (
    FILE_METHOD,
    LINK_SCHEME,
    MANIFEST_METHOD,
    Link,
    Manifest,
    ManifestTask,
    parse_link,
    parse_manifest,
)
from protocol.messages import PeerCard
from protocol.peers import parse_cache, peer_of
from protocol.transports.base import Transport
from protocol.transports.settings import NetworkSettings
from swarm_node.config import NetworkConfig, NodeConfig, TaskConfig
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.download import download, is_url
from swarm_node.swarm.manifests import as_table, check_addresses, read_questions, render

if TYPE_CHECKING:
    from protocol.transports.p2p.transport import P2PTransport

Say = Callable[[str], None]

GATHER_S = 120.0
"""How long question files hold up a node that starts, whatever their sources and members do: as long as all that a
manifest may name takes at nine megabits a second."""
FILE_WAIT_S = 20.0
"""Of which, how long it looks for members who hold one, before it goes on without."""
FILE_S, FILE_BYTES_PER_S = 10.0, 2**20
"""How long one question file may take: ten seconds and one for each mebibyte."""
ASK_S, LEAST_ASK_S = 10.0, 0.5
"""How long a member may take to give the manifest, and how long it has when the user's time is nearly over."""
FIRST_WORD_S = 5.0
PATIENCE_S = 20.0
"""Between two sentences about still waiting for somebody."""
RETRY_S, MAX_RETRY_S = 0.2, 3.0
MAX_BOOTSTRAP = 64
"""Addresses in a manifest."""
NAMED = 3
"""Other members that a link names: it is typed by people."""
ASKED_AT_ONCE = 8
"""Members asked for one thing, in random order, before looking again who is there."""
T = TypeVar("T")


class _AnotherSwarm(RemoteProtocolError):
    """A peer is in another swarm."""

    def __init__(self, swarm_id: str = "") -> None:
        """`swarm_id` of the manifest that it gave; empty: it speaks no protocol of the swarm that was asked for."""
        super().__init__("swarm", f"in {swarm_id[:16] or 'another one'}")
        self.swarm_id = swarm_id


class Swarm(msgspec.Struct, frozen=True):
    """A swarm that somebody named."""

    id: str
    manifest: Manifest | None
    """`None` if it was named by a link and nobody has been asked yet."""
    peers: list[str]
    """Addresses to begin with: those of the link, else of the manifest."""
    folder: Path | None = None
    """Where the manifest was read: question files may lie beside it."""
    named: str = ""
    """How it was named; empty = nobody did, it was made here."""


# --------------------------------------------------------------------- which swarm


def find_swarm(named: str | None, run: RunDir | None = None, say: Say = lambda sentence: None) -> Swarm:
    """The swarm named by a path, an address or a link. Asks no peer; what `run` keeps helps out, if it is what was
    named: an address that cannot be had only if `run` was joined by it last time. Raises UserError."""
    if not named:
        raise UserError(
            "which swarm? name a manifest file, its https address or a swarm:// link, or set SWARM_NODE_SWARM"
        )
    kept = None if run is None else _kept(run)
    try:
        if named.startswith(f"{LINK_SCHEME}:"):
            link = parse_link(named)
            check_addresses(link.peers)
            if kept is not None and kept.swarm_id == link.swarm:
                kept = _begun_with(kept, link.peers)
                return Swarm(link.swarm, kept, kept.bootstrap, named=named)
            return Swarm(link.swarm, None, link.peers, named=named)
        if is_url(named):
            try:
                manifest = parse_manifest(download(named, MAX_MANIFEST_BYTES))
            except UserError as error:
                if run is None or kept is None or not named.startswith("https:") or _joined_by(run) != named:
                    raise  # what is kept may be another swarm, where text becomes public, too
                say(f"{error}; going on with the swarm this run was in, {kept.name} {kept.swarm_id[:16]}")
                manifest = kept
            return Swarm(manifest.swarm_id, manifest, manifest.bootstrap, named=named)
        manifest = parse_manifest(_read(Path(named).expanduser()))
        return Swarm(manifest.swarm_id, manifest, manifest.bootstrap, Path(named).expanduser().parent, named)
    except RemoteProtocolError as error:
        raise UserError(f"{named} is no swarm that can be joined: {error.detail}") from error


def swarm_to_join(config: NodeConfig) -> Swarm:
    """The swarm that `config` names, if there is any way into it; says so if nobody can be asked. Touches no disk.
    Raises UserError."""

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    run = RunDir(config.directory)
    swarm = find_swarm(config.swarm, run, say)
    _check_same(swarm, run)
    if swarm.manifest is None and not swarm.peers and not config.network.bootstrap:
        raise UserError(
            "this link names no peer to ask for the manifest: use one that `swarm-node bootstrap` or a member prints, "
            "the manifest itself, or --bootstrap ADDRESS"
        )
    if not (swarm.peers or config.network.bootstrap or cached_addresses(run)):
        say(f"{no_address(swarm.named)}; until somebody joins through this node, it is alone")
    return swarm


def _check_same(swarm: Swarm, run: RunDir) -> None:
    """Raises UserError if `run` has trained in another swarm: what it learned there is not to go on unnoticed here."""
    kept = _kept(run)
    if kept is not None and kept.swarm_id != swarm.id and run.has_trained:
        raise UserError(
            f"{run.path} is a run in swarm {kept.name} {kept.swarm_id[:16]}, not in {swarm.id[:16]}: choose another "
            f"--run-dir; `swarm-node export {shlex.quote(str(run.path))} DIR` makes a model of it for --model"
        )


def no_address(named: str) -> str:
    """What to do about a manifest that leads to nobody."""
    return (
        f"{named} has no address to ask: use a link that `swarm-node bootstrap` or a member prints, or put one of "
        "its addresses into `bootstrap` of the manifest"
    )


def cached_addresses(run: RunDir) -> list[str]:
    """Of peers that this run has seen."""
    try:
        return [address for peer in parse_cache(run.peers.read_bytes()) for address in peer.addresses]
    except (OSError, RemoteProtocolError):  # none yet, or damaged: a run starts without it, too
        return []


def keep(manifest: Manifest, run: RunDir, named: str = "") -> None:
    """Have it at hand when this run is started again, and how it was `named`: in one file, so that no crash parts
    them."""
    run.write_swarm(f"{_first_line(named) if named else ''}{render(manifest).decode()}")


def _first_line(named: str) -> str:
    return f"# joined by {json.dumps(named)}\n"


def _joined_by(run: RunDir) -> str:
    """How the swarm that `run` keeps was named; empty if that is not known."""
    try:
        with run.swarm.open("rb") as file:
            line = file.readline(MAX_MANIFEST_BYTES)
        return str(json.loads(line.removeprefix(b"# joined by ")))
    except (OSError, ValueError):  # never kept, or without such a line
        return ""


def say_what_leaves(swarm: Swarm, config: NodeConfig, run: RunDir, say: Say, trains: bool = True) -> None:
    """What leaves this machine and what comes, before it does; once for each swarm and run directory, where the
    manifest is kept when it begins. Nothing is said of a swarm that was made here for processes of this machine."""
    if not swarm.named and config.network.listen == "127.0.0.1":
        return
    kept = _kept(run)
    if kept is not None and kept.swarm_id == swarm.id:
        return
    if trains:
        public = "the IP address of this machine and all text that its model generates become public"
        weights = ", and the weights it trains" if config.averaging.method != "none" or config.pipeline.stages else ""
        besides = f"so do its name and speed and the kind of its model{weights}"
        taken = f"stored in {run.path}, but never run"
    else:
        public, besides = "the IP address of this machine becomes public", "so does its name"
        taken = "passed on"
    if config.sharing.give_model and (swarm.manifest is None or swarm.manifest.model is not None):
        if_any = "" if swarm.manifest else ", if it has one,"
        besides += (
            f"; the files of the model that the swarm begins with{if_any} are given to members (sharing.give_model)"
        )
    relaying = "on (--relay)" if config.network.serve_relay else "off (--relay switches it on)"
    say(
        f"first time in this swarm: {public} to everybody in it; {besides}; text of strangers is {taken}; relaying "
        f"others' connections is {relaying}"
    )


def _begun_with(manifest: Manifest, peers: Sequence[str]) -> Manifest:
    """The manifest with `peers` first in its bootstrap list, which is not part of the id."""
    return msgspec.structs.replace(manifest, bootstrap=_different([*peers, *manifest.bootstrap])[:MAX_BOOTSTRAP])


def _kept(run: RunDir) -> Manifest | None:
    try:
        return parse_manifest(run.swarm.read_bytes())
    except (OSError, RemoteProtocolError):  # never kept, or damaged: it is only a copy
        return None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        what = "manifest" if path.suffix else "run directory or manifest"
        raise UserError(f"there is no {what} {path}: `swarm-node new` makes a manifest") from error
    except OSError as error:
        raise UserError(f"cannot read the manifest {path}: {error.strerror}") from error


# --------------------------------------------------------------------- what members are asked for


def fetch_manifest(transport: Transport, swarm: Swarm, say: Say, wait_s: float | None = None) -> Manifest:
    """The manifest from the first member that has the right one, together with the addresses it was found by; tries for
    `wait_s`, or as long as it takes. Raises PeerUnreachable, and UserError if the link's peers are in another swarm.
    """

    if swarm.manifest is not None:
        return swarm.manifest

    until = math.inf if wait_s is None else time.monotonic() + wait_s

    def ask(peer: str) -> Manifest:
        seconds = max(LEAST_ASK_S, min(ASK_S, until - time.monotonic()))
        try:
            data = transport.request(peer, MANIFEST_METHOD, timeout=seconds, limit=MAX_MANIFEST_BYTES)
        except NotOfSwarm as error:
            raise _AnotherSwarm from error
        found = parse_manifest(data)
        if found.swarm_id != swarm.id:
            raise _AnotherSwarm(found.swarm_id)
        return found

    manifest = _ask_around(transport, swarm, ask, f"the manifest of swarm {swarm.id[:16]}", say, wait_s)
    return _begun_with(manifest, swarm.peers)


def gather_files(
    manifest: Manifest,
    swarm: Swarm,
    run: RunDir,
    own: Sequence[str | TaskConfig],
    say: Say,
    connect: Callable[[], Transport],
) -> dict[str, Path]:
    """Digest -> question file of the manifest, as copied into the run directory and checked.

    Looked for there, among the user's `own` tasks, beside the manifest, at the source that the manifest names and, if
    all that fails, with members (`connect` is called only then). Sources and members together are given `GATHER_S`. A
    file that cannot be had now is left out: said, not raised. Raises UserError if the run directory, or a file among
    `own`, cannot be used.
    """
    files: dict[str, Path] = {}
    given: dict[str, bytes] | None = None
    until, look_until = time.monotonic() + GATHER_S, 0.0
    for task in manifest.tasks:
        if not task.sha256:
            continue
        path = run.files / task.sha256[:16] / f"{task.name or 'questions'}.jsonl"
        with os_errors_explained(path):
            at_hand = path.exists() and _is(task, path.read_bytes())
        if not at_hand:
            given = _given(own) if given is None else given
            data = given.get(task.sha256) or _beside(task, swarm, say) or _from_source(task, say, until)
            if data is None:
                look_until = look_until or time.monotonic() + FILE_WAIT_S
                data = _from_members(task, swarm, connect(), say, min(look_until, until), until)
                look_until = look_until if data is None else 0.0  # whoever had this one may have the next
            if data is None:
                continue
            with os_errors_explained(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        files[task.sha256] = path
    return files


def _given(own: Sequence[str | TaskConfig]) -> dict[str, bytes]:
    """Digest -> question file among the user's tasks."""
    tables = [spec if isinstance(spec, TaskConfig) else as_table(spec) for spec in own]
    found = [read_questions(table.file) for table in tables if table.file is not None]
    return {hashlib.sha256(data).hexdigest(): data for data in found}


def _beside(task: ManifestTask, swarm: Swarm, say: Say) -> bytes | None:
    if swarm.folder is None:
        return None
    path = swarm.folder / f"{task.name}.jsonl"
    try:
        data = read_questions(str(path)) if path.is_file() else b""
    except (UserError, OSError) as error:  # of that name, but perhaps not this one
        say(f"{error}; looking elsewhere for {_called(task)}")
        return None
    return data if _is(task, data) else None


def _from_source(task: ManifestTask, say: Say, until: float) -> bytes | None:
    if not task.source:
        return None
    try:
        data = download(task.source, task.bytes, _seconds_for(task, until), public=True)
    except UserError as error:
        say(f"{printable(str(error))}; asking members for {_called(task)}")
        return None
    if not _is(task, data):
        say(f"{printable(task.source)} is not what the manifest says; asking members for {_called(task)}")
        return None
    return data


def _from_members(
    task: ManifestTask, swarm: Swarm, transport: Transport, say: Say, look_until: float, until: float
) -> bytes | None:
    def ask(peer: str) -> bytes:
        if time.monotonic() > look_until:
            raise PeerUnreachable("out of time")
        seconds = _seconds_for(task, until)
        data = transport.request(peer, FILE_METHOD, task.sha256.encode(), seconds, max(1, task.bytes))
        if not _is(task, data):
            raise RemoteProtocolError("digest", "another file")
        return data

    try:
        return _ask_around(transport, swarm, ask, _called(task), say, look_until - time.monotonic())
    except PeerUnreachable as error:
        say(f"{error}; playing without it (give the file as --tasks, if you have it)")
        return None


def _seconds_for(task: ManifestTask, until: float) -> float:
    return max(0.1, min(FILE_S + task.bytes / FILE_BYTES_PER_S, until - time.monotonic()))


def _is(task: ManifestTask, data: bytes) -> bool:
    return len(data) == task.bytes and hashlib.sha256(data).hexdigest() == task.sha256


def _called(task: ManifestTask) -> str:
    return f"question file {task.name or 'without a name'} ({task.sha256[:16]})"


def _ask_around(
    transport: Transport,
    swarm: Swarm,
    ask: Callable[[str], T],
    wanted: str,
    say: Say,
    wait_s: float | None,
) -> T:
    """What the first member says that `ask` gets an answer from and believes. Raises PeerUnreachable after `wait_s`,
    UserError if all who answer are in another swarm: at once if all gave its manifest, else after `PATIENCE_S`, since a
    peer that has only begun to start answers as one of another swarm does."""
    began = time.monotonic()
    said = began + FIRST_WORD_S - PATIENCE_S
    refused: dict[str, str] = {}
    answers: dict[str, RemoteProtocolError] = {}
    answered = False
    while True:
        known = _different([*map(peer_of, swarm.peers), *transport.members()])
        peers = [peer for peer in known if peer != transport.peer_id]
        random.shuffle(peers)
        for peer in peers[:ASKED_AT_ONCE]:
            if peer in refused:
                continue
            try:
                return ask(peer)
            except PeerUnreachable:
                continue
            except RemoteProtocolError as error:
                refused[peer], answered, answers[peer] = str(error), True, error
        failure = f"none of {len(peers)} members gives {wanted}"
        if peers and not answered:
            where = ", ".join(swarm.peers[:NAMED]) or f"the addresses of {len(peers)} members"
            failure = f"nobody answers at {where}, to give {wanted}"
        now = time.monotonic()
        over = wait_s is not None and now - began > wait_s
        _check_swarm(swarm, answers, len(peers), over or now - began > PATIENCE_S)
        if over:
            raise PeerUnreachable(failure)
        if now - said > PATIENCE_S:
            said = now
            why = f" ({next(iter(refused.values()))})" if refused else ""
            link = shlex.quote(swarm.named or join_link(swarm.id, swarm.peers, []))
            say(f"{failure}{why}: still trying; `swarm-node doctor {link}` may say why")
        if peers and len(refused) == len(peers):
            refused.clear()
        pause = min(MAX_RETRY_S, RETRY_S + (now - began) / 10)
        time.sleep(pause if wait_s is None else max(0.0, min(pause, began + wait_s - now)))


def _check_swarm(swarm: Swarm, answers: Mapping[str, RemoteProtocolError], peers: int, waited: bool) -> None:
    """UserError if there are answers, and all are of another swarm: no patience mends that. They are final if all
    `peers` gave a manifest, or if it was `waited` long enough."""
    theirs = [error.swarm_id[:16] for error in answers.values() if isinstance(error, _AnotherSwarm)]
    final = waited or (all(theirs) and len(answers) >= peers)
    if final and theirs and len(theirs) == len(answers):
        where = f"in swarm {max(theirs)}" if any(theirs) else "not in it"
        raise UserError(
            f"the link is of swarm {swarm.id[:16]}, but its peers are {where}: take the link that "
            "`swarm-node bootstrap` or a member of your swarm prints"
        )


# --------------------------------------------------------------------- being there


def settings_of(config: NetworkConfig, peers: Sequence[str]) -> NetworkSettings:
    """The transport's settings; `peers` are begun with besides the user's."""
    check_addresses(config.bootstrap)
    table = config.model_dump()
    table["bootstrap"] = tuple(_different([*config.bootstrap, *peers]))
    table["announce"] = tuple(config.announce)
    table["named_ports"] = tuple(sorted({"port", "gossip_port"} & config.model_fields_set))
    return NetworkSettings(**table)


def open_transport(
    config: NetworkConfig, manifest: Manifest, peers: Sequence[str], run: RunDir, say: Say
) -> P2PTransport:
    """The network of a run; comes up in the background. Raises UserError."""
    from protocol.transports.p2p.transport import P2PTransport

    try:
        with os_errors_explained(run.path):
            return P2PTransport(
                identity_path=run.identity,
                swarm=manifest.swarm_id,
                settings=settings_of(config, [*peers, *manifest.bootstrap]),
                shards=manifest.shards,
                limits=manifest.limits,
                cache_file=run.peers,
                ports_file=run.ports,
                report=say,
            )
    except LocalProtocolError as error:
        raise UserError(str(error)) from error


@contextmanager
def visitor(swarm: Swarm, config: NetworkConfig, say: Say) -> Iterator[P2PTransport]:
    """A transport that only looks: dials, is no member, and has a key that is forgotten afterwards."""
    from protocol.transports.p2p.transport import P2PTransport

    looking = config.model_copy(update={"dial_only": True, "relay": False, "serve_relay": False, "announce": []})
    with tempfile.TemporaryDirectory() as folder:
        transport = P2PTransport(Path(folder) / "identity.key", swarm.id, settings_of(looking, swarm.peers), report=say)
        try:
            yield transport
        finally:
            transport.close()


def serve_swarm(transport: Transport, manifest: Manifest, files: Mapping[str, Path]) -> None:
    """Answer others' requests for the manifest and its files."""
    text = render(manifest)

    def give_file(caller: str, digest: bytes) -> bytes:
        path = files.get(digest.decode("ascii", errors="replace"))
        if path is None:
            raise RemoteProtocolError("file", "not here")
        return path.read_bytes()

    transport.serve(MANIFEST_METHOD, lambda caller, payload: text)
    transport.serve(FILE_METHOD, give_file)


def join_link(swarm_id: str, addresses: Sequence[str], others: Sequence[str]) -> str:
    """The link by which others join: at this node's `addresses`, then at `others`, as many as there is room for."""
    direct = [address for address in addresses if "/p2p-circuit" not in address]
    relayed = [address for address in addresses if address not in direct]
    return str(Link(swarm_id, _different([*direct, *others, *relayed])[:MAX_ADDRESSES]))


def living(members: Mapping[str, PeerCard], first: Sequence[str]) -> list[str]:
    """One address each of up to `NAMED` members who can be reached, for links: of bootstrap peers, of those in `first`,
    of any."""
    ranked = [*(peer for peer, card in members.items() if "bootstrap" in card.roles), *first, *sorted(members)]
    found: dict[str, str] = {}
    for peer in dict.fromkeys(ranked):
        reached = members[peer].addresses if peer in members else []
        if reached and len(found) < NAMED:
            found[peer] = min(reached, key=lambda address: "/p2p-circuit" in address)
    return list(found.values())


def _different(items: Sequence[str]) -> list[str]:
    """Without repetitions and empty ones, in order."""
    return [item for item in dict.fromkeys(items) if item]
