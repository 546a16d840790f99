"""The transport of a node: its settings, a member's or a visitor's, and what it serves to newcomers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_node.config import NetworkConfig, NodeConfig
from swarm_node.errors import UserError
from swarm_node.say import Detail, Say, Warned
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.links import Swarm, distinct
from swarm_node.swarm.manifests import check_addresses, render
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import FILE_METHOD, MANIFEST_METHOD, Manifest
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.transports.base import Transport
from swarm_protocol.transports.settings import NetworkSettings

if TYPE_CHECKING:
    from swarm_protocol.transports.p2p.transport import P2PTransport


def settings_of(config: NetworkConfig, peers: Sequence[str]) -> NetworkSettings:
    """The transport's settings; `peers` are added to the bootstrap addresses of the configuration. Raises UserError."""
    check_addresses(config.bootstrap)
    table = config.model_dump(exclude={"identity"})
    table["bootstrap"] = tuple(distinct([*config.bootstrap, *peers]))
    table["announce"] = tuple(config.announce)
    table["named_ports"] = tuple(sorted({"port", "gossip_port"} & config.model_fields_set))
    return NetworkSettings(**table)


def identity_file(config: NetworkConfig, run: RunDir) -> Path:
    """The key file of this node. Raises UserError if the user named one that is not there, or is no key."""
    if config.identity is None:
        return run.identity
    file = Path(config.identity).expanduser()
    if not file.is_file():
        raise UserError(f"no key file at {file} (network.identity); `swarm-node identity export {file}` writes one")
    load_key(file, "network.identity")
    return file


def load_key(file: Path, named_by: str) -> Identity:
    """The identity in a file that the user named, by `named_by`. Raises UserError."""
    try:
        return Identity.load(file)
    except LocalProtocolError as error:
        wrong = f"{file} ({named_by}) holds no key of a peer, or a damaged one"
        raise UserError(f"{wrong}: name a file that `swarm-node identity export` wrote") from error
    except OSError as error:
        raise UserError(f"cannot read {file} ({named_by}): {error.strerror}") from error


def open_transport(
    config: NetworkConfig, manifest: Manifest, peers: Sequence[str], run: RunDir, say: Say
) -> P2PTransport:
    """The transport of a run; it connects in the background. Raises UserError."""
    from swarm_protocol.transports.p2p.transport import P2PTransport

    try:
        with os_errors_explained(run.path):
            return P2PTransport(
                identity_path=identity_file(config, run),
                swarm=manifest.swarm_id,
                settings=settings_of(config, [*peers, *manifest.bootstrap]),
                shards=manifest.shards,
                limits=manifest.limits,
                cache_file=run.peers,
                ports_file=run.ports,
                report=say,
                report_port=lambda sentence: say(Detail(sentence)),
                report_end=lambda sentence: say(Warned(sentence)),
            )
    except LocalProtocolError as error:
        raise UserError(str(error)) from error


@contextmanager
def visitor(swarm: Swarm, config: NetworkConfig, say: Say) -> Iterator[P2PTransport]:
    """A transport that only dials, is no member, and has a key of its own that is deleted afterwards."""
    from swarm_protocol.transports.p2p.transport import P2PTransport

    looking = config.model_copy(update={"dial_only": True, "relay": False, "serve_relay": False, "announce": []})
    with tempfile.TemporaryDirectory() as folder:
        transport = P2PTransport(Path(folder) / "identity.key", swarm.id, settings_of(looking, swarm.peers), report=say)
        try:
            yield transport
        finally:
            transport.close()


def arriving(config: NodeConfig, swarm: str) -> PeerCard:
    """The card of a node that has just come and does not train yet: others know it before it loads a model, and before
    its first group."""
    return PeerCard(
        protocol=PROTOCOL_VERSION,
        swarm=swarm,
        created=time.time(),
        name=config.name or "node",
        roles=["relay"] if config.network.serve_relay else [],
    )


def serve_swarm(transport: Transport, manifest: Manifest, files: Mapping[str, Path]) -> None:
    """Answer requests for the manifest and for its question `files` (sha256 -> path)."""
    text = render(manifest)

    def give_file(caller: str, digest: bytes) -> bytes:
        path = files.get(digest.decode("ascii", errors="replace"))
        if path is None:
            raise RemoteProtocolError("file", "not here")
        return path.read_bytes()

    transport.serve(MANIFEST_METHOD, lambda caller, payload: text)
    transport.serve(FILE_METHOD, give_file)
