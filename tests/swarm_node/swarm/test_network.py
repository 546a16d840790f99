"""The settings of a transport, and what it serves to newcomers."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from swarm_node.config import (
    NetworkConfig,
)
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.manifests import render
from swarm_node.swarm.network import identity_file, open_transport, serve_swarm, settings_of
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import FILE_METHOD, MANIFEST_METHOD
from tests.support.fake_transport import FakeTransport, address
from tests.support.manifests import PLAIN, QUESTIONS, with_questions


def test_members_serve_manifest_and_files_only(run: RunDir) -> None:
    manifest = with_questions()
    Path("q.jsonl").write_bytes(QUESTIONS)
    transport = FakeTransport()
    serve_swarm(transport, manifest, {manifest.tasks[0].sha256: Path("q.jsonl")})
    assert transport.served[MANIFEST_METHOD]("", b"") == render(manifest)
    assert transport.served[FILE_METHOD]("", manifest.tasks[0].sha256.encode()) == QUESTIONS
    for payload in (b"", b"q.jsonl", b"/etc/passwd", b"\xff" * 99, manifest.tasks[0].sha256.encode() + b"\0"):
        with pytest.raises(RemoteProtocolError) as caught:
            transport.served[FILE_METHOD]("", payload)
        assert caught.value.reason == "file"


@pytest.mark.parametrize("name", ["identity.key", "peers.json"])
def test_files_that_cannot_be_read_are_explained(run: RunDir, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def transport(identity_path: Path, cache_file: Path, **arguments: Any) -> None:
        {"identity.key": identity_path, "peers.json": cache_file}[name].read_bytes()

    module = types.ModuleType("swarm_protocol.transports.p2p.transport")
    module.P2PTransport = transport  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swarm_protocol.transports.p2p.transport", module)
    (run.path / name).mkdir()
    with pytest.raises(UserError, match=f"run/{name}: Is a directory"):
        open_transport(NetworkConfig(), PLAIN, [], run, print)


def test_a_mounted_key_is_used_in_place_of_the_runs(run: RunDir) -> None:
    assert identity_file(NetworkConfig(), run) == run.identity
    with pytest.raises(UserError, match="no key file at secret.key"):
        identity_file(NetworkConfig(identity="secret.key"), run)
    Path("secret.key").write_text("no key")
    with pytest.raises(UserError, match=r"secret.key \(network.identity\) holds no key of a peer"):
        identity_file(NetworkConfig(identity="secret.key"), run)
    Path("secret.key").unlink()
    Identity.generate(bytes(32)).save(Path("secret.key"))
    Path("secret.key").chmod(0o400)
    assert identity_file(NetworkConfig(identity="secret.key"), run) == Path("secret.key")
    settings_of(NetworkConfig(identity="secret.key"), [])
    assert not run.identity.exists()


def test_settings_join_configuration_and_swarm() -> None:
    config = NetworkConfig(listen="127.0.0.1", announce=["a.example"], bootstrap=[address(1)], dial_only=True)
    settings = settings_of(config, [address(2), address(1)])
    assert settings.bootstrap == (address(1), address(2))
    assert settings.announce == ("a.example",)
    assert (settings.listen, settings.dial_only) == ("127.0.0.1", True)
    assert settings.named_ports == ()
    assert settings_of(NetworkConfig(port=31330), []).named_ports == ("port",)  # even if it is the default
    with pytest.raises(UserError, match="no address of a peer"):
        settings_of(NetworkConfig(bootstrap=["localhost:1"]), [])
