from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from protocol.codec import in_version
from protocol.errors import PeerUnreachable
from protocol.limits import CARD_RENEWAL_S
from protocol.messages import PROTOCOL_VERSION
from swarm_node import doctor, memory
from swarm_node.config import NetworkConfig, NodeConfig, PolicyConfig, dump_toml
from swarm_node.doctor import (
    Check,
    begin,
    clock,
    compiler,
    dial,
    directory,
    disk,
    examine,
    nvidia_gpus,
    packages,
    people,
    ports,
    python,
    reachable,
    room,
    seen_from_others,
    torch_and_device,
    versions,
)
from swarm_node.installed import upgrade_command
from swarm_node.policy.loading import prepare
from swarm_node.rundir import RunDir
from tests.swarm_node.fake_transport import SWARM, FakeTransport, address, card, peer_id

PRIVATE, PUBLIC = "/ip4/192.168.1.5/tcp/31330/p2p/x", "/ip4/8.8.8.8/tcp/31330/p2p/x"
RELAYED = f"{PUBLIC}/p2p-circuit/p2p/y"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class Visitor(FakeTransport):
    def dial_back(self, peer: str, ports: Sequence[int]) -> list[bool]:
        return [True] * len(ports)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_this_machine_can_run_it() -> None:
    assert python().verdict == packages().verdict == "ok"


def test_packages_that_are_missing_or_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.TESTED, "torch", "1")
    assert packages().verdict == "warn"
    monkeypatch.setitem(doctor.TESTED, "no-such-package", "1")
    check = packages()
    assert (check.verdict, check.detail) == ("fail", "missing: no-such-package")


def test_a_gpu_that_torch_cannot_use_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert nvidia_gpus(tmp_path) == []
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    gpus = nvidia_gpus(tmp_path)
    assert gpus == [str(tmp_path / "dev/nvidia0")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert torch_and_device([]).verdict == "ok"
    check = torch_and_device(gpus)
    assert check.verdict == "fail" and "CPU alone" in check.detail
    assert "torch==2.13.0" in check.remedy and "+cpu" not in check.remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check = torch_and_device(gpus)
    assert check.verdict == "fail" and "driver" in check.detail and check.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as was asked for
    assert torch_and_device(gpus).verdict == "ok"


def test_a_compiler_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = compiler()
    assert check.verdict == "warn" and check.detail.startswith("none") and "gmp" in check.remedy
    cc = tmp_path / "cc"
    for code, verdict in ((1, "warn"), (0, "ok")):
        cc.write_text(f"#!/bin/sh\nexit {code}\n")
        cc.chmod(0o755)
        assert compiler().verdict == verdict


def test_memory_and_disk_for_the_chosen_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdicts(free: int, running: bool = False) -> list[str]:
        monkeypatch.setattr(memory, "free_memory", lambda: free)
        return [check.verdict for check in room(NodeConfig(), Path("runs/new"), running)]

    needed = 16 * prepare(PolicyConfig()).size  # weights, gradients, two moments
    assert verdicts(2**30) == ["ok", "ok"]
    assert verdicts(0) == ["ok", "ok"]  # not known
    assert verdicts(needed // 2) == ["fail", "ok"]
    assert verdicts(needed // 2, running=True) == ["ok", "ok"]
    assert verdicts(int(1.2 * needed)) == ["warn", "ok"]
    (check,) = room(NodeConfig(policy=PolicyConfig(model="no/such")), Path("runs/new"), False)
    assert (check.verdict, check.remedy) == ("fail", "hf download no/such")


def test_snapshots_and_weights_that_share_a_disk_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("hub").absolute()))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert disk(NodeConfig(), Path("runs/new"), 600, 400).verdict == "ok"
    assert "HF_HOME" in disk(NodeConfig(), Path("runs/new"), 600, 401).remedy
    assert "--run-dir" in disk(NodeConfig(), Path("runs/new"), 1001, 0).remedy


def test_directory() -> None:
    Path("file").touch()
    assert directory(Path("runs/new")).verdict == "ok"
    assert directory(Path("file/run")).verdict == "fail"
    Path("locked").mkdir(mode=0o500)
    if os.geteuid() != 0:  # root may write anywhere
        assert directory(Path("locked/run")).verdict == "fail"


def test_ports(listener: int) -> None:
    free = closed_port()
    config = NetworkConfig(listen="127.0.0.1", port=free, gossip_port=0)
    assert ports(config).verdict == "ok"
    taken = config.model_copy(update={"port": listener})
    assert ports(taken).verdict == "warn"
    assert str(listener) in ports(taken).detail
    assert ports(taken, running=True).verdict == "ok"
    assert ports(taken.model_copy(update={"dial_only": True})).verdict == "ok"
    assert ports(config.model_copy(update={"listen": "203.0.113.1"})).verdict == "fail"


@pytest.mark.parametrize(
    ("network", "addresses", "verdict", "said"),
    [
        ({}, [PUBLIC, PRIVATE], "ok", "public"),
        ({}, ["/dns4/a.example/tcp/1/p2p/x"], "ok", "public"),
        ({}, [PRIVATE], "warn", "private addresses only"),
        ({}, [PRIVATE, RELAYED], "warn", "only through a relay"),
        ({}, ["/ip4/127.0.0.1/tcp/1"], "warn", "no address but"),
        ({"listen": "127.0.0.1"}, ["/ip4/127.0.0.1/tcp/1"], "warn", "this machine only"),
        ({"announce": ["203.0.113.9"]}, [PRIVATE], "ok", "203.0.113.9"),
        ({"dial_only": True}, [], "ok", "only dials"),
    ],
)
def test_reachable(network: dict[str, Any], addresses: list[str], verdict: str, said: str) -> None:
    check = reachable(NetworkConfig(**network), addresses)
    assert check.verdict == verdict
    assert said in check.detail
    assert bool(check.remedy) == (verdict == "warn")


def test_members_connect_back(listener: int) -> None:
    network = NetworkConfig(listen="127.0.0.1", port=closed_port(), gossip_port=0)
    guess = Check("reachable", "warn", "as it seems")
    members = {peer_id(i): replace(card(), addresses=[address(i)]) for i in range(1, 8)}

    def connects(peer: str, ports: Sequence[int]) -> list[bool]:
        asked.append(peer)
        return [doctor._answers(address(0, port)) for port in ports]

    def silent(peer: str, ports: Sequence[int]) -> list[bool]:
        asked.append(peer)
        raise PeerUnreachable("of another version")

    asked: list[str] = []
    check = seen_from_others(connects, members, network, False, guess)
    assert check.verdict == "ok" and str(network.port) in check.detail and "this network" in check.detail
    assert len(set(asked)) == 2
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", network.port))  # was listened on only meanwhile
    half = network.model_copy(update={"port": listener, "gossip_port": network.port})
    check = seen_from_others(connects, members, half, True, guess)  # the run listens by itself
    assert check.verdict == "warn" and f"not at port {network.port}," in check.detail and check.remedy
    asked.clear()
    assert seen_from_others(silent, members, network, False, guess) is guess
    assert len(asked) == 5
    hidden = {peer_id(1): replace(card(), addresses=[RELAYED])}
    assert seen_from_others(connects, hidden, network, False, guess) is guess
    assert seen_from_others(connects, members, NetworkConfig(dial_only=True), False, guess) is guess


def test_versions_are_compared() -> None:
    members = {peer_id(1): card()}
    assert versions({}, {}).verdict == versions(members, {}).verdict == "ok"
    old = {peer_id(1): replace(card(), protocol=PROTOCOL_VERSION - 1)}
    assert "1 of the members" in versions(old, {}).detail
    assert "1 of" not in versions({peer_id(1): in_version(card(), 0)}, {}).detail
    newer = versions(members, {"rejected/newer": 1.0})
    assert (newer.verdict, newer.remedy) == ("warn", upgrade_command())
    assert versions({}, {"rejected/newer": 1.0}).verdict == "fail"
    assert versions(members, {"rejected/version": 1.0}).verdict == "warn"


def test_dialling_tells_who_answers(listener: int) -> None:
    answers, dead = address(1, listener), address(2, closed_port())
    found = dial([answers, dead, dead, RELAYED, "/nonsense", "/ip4/127.0.0.1/udp/x/p2p/z"])
    assert found == {answers: True, dead: False, "/nonsense": False, "/ip4/127.0.0.1/udp/x/p2p/z": False}
    assert begin({}).verdict == "warn"
    assert begin({answers: True}).verdict == "ok"
    assert begin({answers: True, dead: False}).verdict == "warn"
    assert begin({dead: False}).verdict == "fail"
    assert begin({answers: True}, {peer_id(1): card()}).verdict == "ok"
    assert "not for members" in begin({answers: True}, {peer_id(2): card()}).detail


@pytest.mark.parametrize(
    ("off", "verdict"), [(0, "ok"), (-14, "ok"), (20, "warn"), (-20, "warn"), (40, "fail"), (-3600, "fail")]
)
def test_the_clock_is_compared_with_the_cards_of_others(off: float, verdict: str) -> None:
    now = 1e9
    ages = (1.0, CARD_RENEWAL_S / 2, CARD_RENEWAL_S - 1)
    members = {peer_id(i): card(created=now - age - off) for i, age in enumerate(ages)}
    assert clock(members, now).verdict == verdict
    assert clock({}, now).verdict == people({}).verdict == "warn"
    assert people(members).verdict == "ok"


def test_a_machine_is_examined_and_a_failure_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    config = NodeConfig(network=NetworkConfig(port=0, gossip_port=0))
    assert examine(None, config, json_output=True) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["name"] for check in checks] == (
        "python compiler packages torch memory disk directory ports reachable versions".split()
    )
    assert all(check.keys() == {"name", "verdict", "detail", "remedy"} for check in checks)
    Path("file").touch()
    assert examine(None, config.model_copy(update={"run_dir": "file/x"}), json_output=False) == 1
    output = capsys.readouterr().out
    assert "fail  directory   " in output
    assert "-> swarm-node join SWARM --run-dir DIR" in output


def test_a_run_is_examined_with_its_own_settings_and_from_outside(
    listener: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir("runs/alice")
    run.path.mkdir(parents=True)
    run.write_config(dump_toml(NodeConfig(network=NetworkConfig(announce=["203.0.113.9"], port=listener))))
    mine, other = address(0, listener), address(1, listener)
    run.write_status({"swarm": SWARM, "time": time.time(), "peer": peer_id(0), "addresses": [mine]})
    run.swarm.write_text(f'name = "sums"\nbootstrap = ["{mine}"]\ntasks = [{{env = "gcd"}}]\n')
    run.peers.write_text(json.dumps([{"addresses": [other], "seen": 1.0}]))
    visited: list[list[str]] = []

    @contextmanager
    def visitor(swarm: Any, network: NetworkConfig, say: Any) -> Iterator[FakeTransport]:
        visited.append(swarm.peers)
        transport = Visitor()
        transport.cards = {peer_id(1): replace(card(created=time.time()), addresses=[other])}
        yield transport

    monkeypatch.setattr(doctor, "visitor", visitor)
    monkeypatch.setattr(doctor, "look_around", lambda transport: transport.members())
    assert examine("runs/alice", NodeConfig(), json_output=True) == 0
    checks = {check["name"]: Check(**check) for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["ports"].detail == "the run is using its ports"
    assert checks["bootstrap"].detail == "1 of 1 addresses answer"
    assert checks["members"].verdict == checks["clock"].verdict == "ok"
    assert visited == [[mine, mine, other]]
    assert "bob" in checks["reachable"].detail and "203.0.113.9" not in checks["reachable"].detail
