from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.limits import CARD_RENEWAL_S
from swarm_node import doctor
from swarm_node.config import NetworkConfig, NodeConfig, dump_toml
from swarm_node.doctor import Check, begin, clock, dial, directory, examine, packages, people, ports, python, reachable
from swarm_node.rundir import RunDir
from tests.swarm_node.fake_transport import SWARM, FakeTransport, address, card, peer_id

PRIVATE, PUBLIC = "/ip4/192.168.1.5/tcp/31330/p2p/x", "/ip4/8.8.8.8/tcp/31330/p2p/x"
RELAYED = f"{PUBLIC}/p2p-circuit/p2p/y"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


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


def test_dialling_tells_who_answers(listener: int) -> None:
    answers, dead = address(1, listener), address(2, closed_port())
    found = dial([answers, dead, dead, RELAYED, "/nonsense", "/ip4/127.0.0.1/udp/x/p2p/z"])
    assert found == {answers: True, dead: False, "/nonsense": False, "/ip4/127.0.0.1/udp/x/p2p/z": False}
    assert begin({}).verdict == "warn"
    assert begin({answers: True}).verdict == "ok"
    assert begin({answers: True, dead: False}).verdict == "warn"
    assert begin({dead: False}).verdict == "fail"


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
    assert [check["name"] for check in checks] == ["python", "packages", "directory", "ports", "reachable"]
    assert all(check.keys() == {"name", "verdict", "detail", "remedy"} for check in checks)
    Path("file").touch()
    assert examine(None, config.model_copy(update={"run_dir": "file/x"}), json_output=False) == 1
    output = capsys.readouterr().out
    assert "fail  directory   " in output
    assert "-> change its owner" in output


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
        transport = FakeTransport()
        transport.cards = {peer_id(1): card(created=time.time())}
        yield transport

    monkeypatch.setattr(doctor, "visitor", visitor)
    monkeypatch.setattr(doctor, "look_around", lambda transport: transport.members())
    assert examine("runs/alice", NodeConfig(), json_output=True) == 0
    checks = {check["name"]: Check(**check) for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["ports"].detail == "the run is using its ports"
    assert "203.0.113.9" in checks["reachable"].detail
    assert checks["bootstrap"].detail == "1 of 1 addresses answer"
    assert checks["members"].verdict == checks["clock"].verdict == "ok"
    assert visited == [[mine, mine, other]]
