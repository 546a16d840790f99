from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import NetworkConfig, NodeConfig
from swarm_node.errors import TemporaryError, UserError
from swarm_node.observability.health import Health
from swarm_node.runtime import bootstrap
from swarm_node.runtime.bootstrap import run_bootstrap
from swarm_node.runtime.pause import pause_run
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.manifests import make_manifest, write_manifest
from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import FILE_METHOD, MANIFEST_METHOD, parse_link, parse_manifest
from swarm_protocol.messages import PeerCard
from tests.support.fake_transport import FakeTransport, address, card, peer_id
from tests.support.ports import free_port
from tests.support.run_files import read_jsonl

QUESTIONS = (
    b'{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n{"question": "a?", "answer": "b"}\n'
)


class Hub(FakeTransport):
    """Comes up, meets a peer, moves to another port; then somebody presses Ctrl-C."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.topics: list[str] = []
        self.announced: list[PeerCard] = []
        self.closed = False

    def subscribe(self, topic: str, handler: Any) -> None:
        self.topics.append(topic)

    def announce(self, card: PeerCard) -> None:
        self.announced.append(card)

    def stats(self) -> Mapping[str, float]:
        self.looks += 1
        if self.looks == 2:
            self.addresses = [address(0, 1)]
        if self.looks == 4:
            self.cards = {peer_id(1): card("bob")}
        if self.looks == 6:
            self.addresses = [address(0, 2)]
        if self.looks == 8:
            signal.raise_signal(signal.SIGINT)
        return dict.fromkeys(("bytes_in", "bytes_out", "messages_in"), 0.0)

    def close(self) -> None:
        self.closed = True


def test_a_bootstrap_serves_shards_and_tells_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("q.jsonl").write_bytes(QUESTIONS)
    manifest = make_manifest("sums", ["gcd", "q.jsonl"], expected_peers=100, bootstrap=[address(3)])
    write_manifest(manifest, Path("sums.toml"))
    hub, opened, written = Hub(), list[NetworkConfig](), list[Mapping[str, float]]()

    def open_transport(config: NetworkConfig, *arguments: Any) -> Hub:
        opened.append(config)
        return hub

    monkeypatch.setattr(Health, "write", lambda self, looks, numbers: written.append(numbers))
    monkeypatch.setattr(bootstrap, "open_transport", open_transport)
    monkeypatch.setattr(bootstrap, "MEMBERS_CHECK_S", 0.01)
    monkeypatch.setattr(bootstrap, "STATUS_S", 0.0)
    assert run_bootstrap(NodeConfig(swarm="sums.toml", run_dir="hub")) == 0
    assert hub.closed
    seen = [(numbers["swarm/peers"], numbers["swarm/trainers"]) for numbers in written]
    assert seen[0] == (0, 0) and seen[-1] == (1, 1)

    output = capsys.readouterr()
    links = [parse_link(line) for line in output.out.splitlines()]
    assert [link.peers for link in links] == [[address(0, 1), address(3)], [address(0, 2), address(3)]]
    assert "1 other member;" in output.err
    assert output.err.count("this link works only on this machine") == 1
    assert output.err.splitlines()[-1].endswith(" INFO    leaving")
    kinds = {event["text"].partition(";")[0]: event["kind"] for event in read_jsonl(Path("hub/events.jsonl"))}
    assert (kinds["leaving"], kinds["this link works only on this machine"]) == ("stop", "link")
    assert hub.topics == [ROLLOUTS.topic(manifest.swarm_id, shard) for shard in range(4)]
    assert hub.announced[0].roles == ["bootstrap"]
    assert hub.announced[0].shards == []
    assert not opened[0].serve_relay
    assert output.err.count("first time in this swarm") == 1
    assert output.err.count("giving the swarm's questions to members that lack them: q\n") == 1
    assert "This node relays nothing (--relay)" in output.err
    assert parse_manifest(hub.served[MANIFEST_METHOD]("", b""), manifest.swarm_id).tasks == manifest.tasks
    assert hub.served[FILE_METHOD]("", manifest.tasks[1].sha256.encode()) == QUESTIONS  # it lay beside the manifest
    status = json.loads(Path("hub/swarm.json").read_text())
    assert status["peers"][peer_id(1)]["name"] == "bob"
    assert status["link"] == output.out.splitlines()[-1]
    assert parse_manifest(Path("hub/swarm.toml").read_bytes()).swarm_id == manifest.swarm_id


def test_resume_starts_it_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    Identity.generate().save(Path("own.key"))
    opened: list[NetworkConfig] = []
    monkeypatch.setattr(bootstrap, "open_transport", lambda network, *rest: opened.append(network) or Hub())
    monkeypatch.setattr(bootstrap, "MEMBERS_CHECK_S", 0.01)
    options = ["--identity", "own.key", "--listen", "127.0.0.1", "--port", str(free_port()), "--gossip-port", "0"]
    first = CliRunner().invoke(app, ["bootstrap", "sums.toml", "--run-dir", "hub", *options])
    config = Path("hub/config.toml").read_text()
    again = CliRunner().invoke(app, ["resume", "hub"])
    assert (first.exit_code, again.exit_code) == (0, 0), again.output
    assert opened[0] == opened[1] and opened[1].identity == "own.key" and not Path("hub/identity.key").exists()
    assert Path("hub/config.toml").read_text() == config
    assert "hub goes on with its own settings: network.identity = own.key, network.listen = 127.0.0.1" in again.stderr


def test_a_signal_while_the_network_loads_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    monkeypatch.setattr(bootstrap, "open_transport", lambda *arguments: pytest.fail("it started"))
    module = "swarm_protocol.transports.p2p.transport"
    package, loaded = importlib.import_module("swarm_protocol.transports.p2p"), importlib.import_module(module)
    monkeypatch.setattr(package, "transport", loaded)  # as it is again after this test
    monkeypatch.delitem(sys.modules, module)

    class Interrupting:
        """The importer, in the middle of which somebody presses Ctrl-C."""

        def find_spec(self, name: str, *rest: Any) -> None:
            if name == module:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert run_bootstrap(NodeConfig(swarm="sums.toml", run_dir="hub")) == 0
    assert capsys.readouterr().err.splitlines()[-1].endswith(" INFO    leaving")
    assert not Path("hub").exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_signal_while_the_network_starts_leaves_no_new_key(is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    if not is_new:
        Path("hub").mkdir()

    class Unreachable(Hub):
        """Has no address by the time that somebody presses Ctrl-C."""

        def stats(self) -> Mapping[str, float]:
            signal.raise_signal(signal.SIGINT)
            return {}

    def open_transport(*arguments: Any) -> Hub:
        Identity.generate().save(Path("hub/identity.key"))
        return Unreachable()

    monkeypatch.setattr(bootstrap, "open_transport", open_transport)
    assert run_bootstrap(NodeConfig(swarm="sums.toml", run_dir="hub")) == 0
    assert Path("hub/identity.key").exists() == (not is_new), "a directory that was there is left alone"


def test_health_says_how_many_members_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    write, said = Health.write, list[str]()

    def written(health: Health, looks: int, numbers: Mapping[str, float]) -> None:
        write(health, looks, numbers)
        said.append(health.verdict()[1])

    monkeypatch.setattr(Health, "write", written)
    monkeypatch.setattr(bootstrap, "open_transport", lambda *arguments: Hub())
    monkeypatch.setattr(bootstrap, "MEMBERS_CHECK_S", 0.01)
    assert run_bootstrap(NodeConfig(swarm="sums.toml", run_dir="hub")) == 0
    assert (said[0], said[-1]) == ("0 members seen, checked 0 s ago", "1 member seen, checked 0 s ago")


def test_it_relays_if_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    hub = Hub()
    monkeypatch.setattr(bootstrap, "open_transport", lambda *arguments: hub)
    monkeypatch.setattr(bootstrap, "MEMBERS_CHECK_S", 0.01)
    network = NetworkConfig(serve_relay=True)
    assert run_bootstrap(NodeConfig(swarm="sums.toml", network=network, name="hub")) == 0
    assert hub.announced[0].roles == ["bootstrap", "relay"]
    assert hub.announced[0].name == "hub"
    assert Path("runs/hub/swarm.json").exists()


def test_a_closed_pipe_ends_no_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    hub = Hub()
    monkeypatch.setattr(bootstrap, "open_transport", lambda *arguments: hub)
    monkeypatch.setattr(bootstrap, "MEMBERS_CHECK_S", 0.01)
    monkeypatch.setattr(bootstrap, "STATUS_S", 0.0)
    read, write = os.pipe()
    os.close(read)  # as `| head -1` does
    with os.fdopen(write, "w") as stdout, monkeypatch.context() as patch:  # closing it raises nothing, either
        patch.setattr(sys, "stdout", stdout)
        assert run_bootstrap(NodeConfig(swarm="sums.toml", run_dir="hub")) == 0
    assert hub.looks >= 8  # it was there until the signal
    assert parse_link(json.loads(Path("hub/swarm.json").read_text())["link"]).peers == [address(0, 2)]


def test_each_line_is_one_write() -> None:
    script = (
        "import sys\n"
        "from swarm_node.runtime.bootstrap import _print\n"
        "_print('0 members'); _print('swarm://', sys.stdout)"
    )
    ours, theirs = socket.socketpair(type=socket.SOCK_DGRAM)  # each write is a message
    with ours, theirs:
        subprocess.run([sys.executable, "-u", "-c", script], stdout=theirs, stderr=theirs, check=True)
        ours.settimeout(60)
        assert [ours.recv(100), ours.recv(100)] == [b"0 members\n", b"swarm://\n"]


@pytest.mark.parametrize(("key", "value"), [("max_cpu", 50), ("quiet_hours", "22:00-07:00"), ("pause_on", ["hot"])])
def test_it_is_not_held_up(key: str, value: Any) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    config = NodeConfig.model_validate({"swarm": "sums.toml", "run_dir": "hub", "resources": {key: value}})
    with pytest.raises(UserError, match=f"resources.{key} is not for a bootstrap"):
        run_bootstrap(config)


def test_it_leaves_if_it_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    hub = Hub()
    monkeypatch.setattr(bootstrap, "open_transport", lambda *arguments: hub)
    config = NodeConfig.model_validate({"swarm": "sums.toml", "run_dir": "hub", "resources": {"max_memory_gb": 0.01}})
    with pytest.raises(TemporaryError, match=r"the bootstrap took .* GiB, more than --max-memory 0.01: lower network"):
        run_bootstrap(config)
    assert hub.closed


def test_it_is_not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    monkeypatch.setattr(bootstrap, "open_transport", lambda *arguments: Hub())
    monkeypatch.setattr(bootstrap, "MEMBERS_CHECK_S", 0.01)
    monkeypatch.setattr(bootstrap, "STATUS_S", 0.0)
    assert run_bootstrap(NodeConfig(swarm="sums.toml", run_dir="hub")) == 0
    run = RunDir("hub")
    with pytest.raises(UserError, match="is a bootstrap, which others join by at any time"):
        pause_run(run, None, now=0.0)
    assert not run.paused.exists()
    run.write_paused(None)
    with pytest.raises(UserError, match=r"which a bootstrap cannot be: `swarm-node unpause hub` first"):
        run_bootstrap(NodeConfig(swarm="sums.toml", run_dir="hub"))


def test_its_limits_reach_the_network_and_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[NodeConfig] = []
    monkeypatch.setattr(bootstrap, "run_bootstrap", lambda config: seen.append(config) or 0)
    monkeypatch.setattr("swarm_node.runtime.limits.be_nice", lambda limits: seen.append(limits))
    options = ["--max-upload", "5", "--max-download", "20", "--nice", "10", "--max-memory", "1"]
    assert CliRunner().invoke(app, ["bootstrap", "sums.toml", *options]).exit_code == 0
    limits, config = seen
    assert limits is config.resources and (limits.nice, limits.max_memory_gb) == (10, 1.0)
    assert (config.network.max_upload_mbit, config.network.max_download_mbit) == (5.0, 20.0)


def test_a_lost_port_is_said_to_kill_links(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_manifest(make_manifest("sums", ["gcd"]), Path("sums.toml"))
    monkeypatch.setattr(bootstrap, "open_transport", lambda *arguments: Hub())
    monkeypatch.setattr(bootstrap, "MEMBERS_CHECK_S", 0.01)

    def told(dial_only: bool = False) -> list[str]:
        network = NetworkConfig(listen="127.0.0.1", dial_only=dial_only)
        assert run_bootstrap(NodeConfig(swarm="sums.toml", run_dir="hub", network=network)) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "where this bootstrap was last time" in line]

    Path("hub").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        Path("hub/ports.json").write_text(json.dumps({31330: port}))
        (sentence,) = told()
        assert told(dial_only=True) == []
    taken = f"WARNING port {port}, where this bootstrap was last time, is taken"
    assert sentence.split(maxsplit=1)[1].startswith(taken)
    assert "links handed out before lead nowhere until it has it back" in sentence and f"--port {port}" in sentence
    assert told() == []
