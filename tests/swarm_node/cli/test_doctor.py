from __future__ import annotations

import json
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from swarm_node.cli.commands import check_machine, check_network, doctor
from swarm_node.cli.commands.check import Check, StartCommand
from swarm_node.cli.commands.check_machine import (
    answers,
    directory,
    disk,
    nvidia_gpus,
    packages,
    python,
    room,
    torch_and_device,
)
from swarm_node.cli.commands.check_network import (
    LATELY_S,
    begin,
    clock,
    people,
    ports,
    reachable,
    refusals,
    restarted,
    seen_from_others,
    versions,
)
from swarm_node.cli.commands.doctor import examine
from swarm_node.config import NetworkConfig, NodeConfig, PipelineConfig, PolicyConfig, dump_toml
from swarm_node.config.own import dump_own, read_own
from swarm_node.install import upgrade_command
from swarm_node.observability.refusals import RefusalRow
from swarm_node.pipeline import footprint
from swarm_node.policy import extras
from swarm_node.policy.loading import prepare
from swarm_node.policy.model_path import starter_path
from swarm_node.policy.sizes import RUNTIME_BYTES
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.lookup import dial
from swarm_node.swarm.manifests import render
from swarm_node.tasks.one_turn import in_form
from swarm_protocol.answer_form import AnswerForm
from swarm_protocol.codec import in_version
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.limits import CARD_RENEWAL_S, CARD_TTL_S
from swarm_protocol.manifest import MANIFEST_METHOD, Manifest, ManifestTask
from swarm_protocol.messages import PROTOCOL_VERSION
from tests.support.disks import leave
from tests.support.fake_transport import SWARM, FakeTransport, address, card, peer_id
from tests.support.placing import parse
from tests.support.ports import free_port

PRIVATE, PUBLIC = "/ip4/192.168.1.5/tcp/31330/p2p/x", "/ip4/8.8.8.8/tcp/31330/p2p/x"
RELAYED = f"{PUBLIC}/p2p-circuit/p2p/y"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def usable_remedies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever these tests find, the command line takes each command of its own that is to mend it."""
    wrong: list[str] = []

    def checked(*arguments: Any, **named: Any) -> Check:
        check = Check(*arguments, **named)
        words = shlex.split(check.remedy, comments=True)
        try:
            if words[:1] == ["swarm-node"]:
                parse(words[1:], complete=True)
        except AssertionError as error:
            wrong.append(f"{check.remedy}: {error}")
        return check

    for module in (check_machine, check_network, doctor):
        monkeypatch.setattr(module, "Check", checked)
    yield
    assert not wrong


class Visitor(FakeTransport):
    def made(self) -> dict[str, float]:
        return {peer: card.created for peer, card in self.cards.items()}

    def dial_back(self, peer: str, ports: Sequence[int]) -> list[bool]:
        return [True] * len(ports)


def test_this_machine_can_run_it() -> None:
    assert python().verdict == packages().verdict == "ok"


def test_packages_that_are_missing_or_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_machine.TESTED, "torch", "1")
    assert packages().verdict == "warn"
    monkeypatch.setitem(check_machine.TESTED, "no-such-package", "1")
    check = packages()
    assert (check.verdict, check.detail) == ("fail", "missing: no-such-package")


def test_a_gpu_unusable_by_torch_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_memory_and_disk_for_the_chosen_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdicts(free: int, running: bool = False) -> list[str]:
        monkeypatch.setattr(footprint, "free_memory", lambda device: free)
        return [check.verdict for check in room(NodeConfig(), Path("runs/new"), running)]

    needed = RUNTIME_BYTES + 16 * prepare(PolicyConfig()).size  # weights, gradients, two moments
    assert verdicts(2**30) == ["ok", "ok"]
    assert verdicts(0) == ["ok", "ok"]  # not known
    assert verdicts(needed // 2) == ["fail", "ok"]
    assert verdicts(needed // 2, running=True) == ["ok", "ok"]
    assert verdicts(int(1.2 * needed)) == ["warn", "ok"]
    monkeypatch.setattr(footprint, "free_memory", lambda device: 2**30)
    limited = NodeConfig.model_validate({"resources": {"max_memory_gb": 0.25}})
    check, _ = room(limited, Path("runs/new"), False)
    assert check.verdict == "fail" and "more than --max-memory 0.25 allows" in check.detail
    assert check.remedy.endswith("--max-memory 1") and next(room(limited, Path("runs/new"), True)).verdict == "ok"
    (check,) = room(NodeConfig(policy=PolicyConfig(model="no/such")), Path("runs/new"), False)
    assert (check.verdict, check.remedy) == ("fail", "hf download no/such")
    (check,) = room(NodeConfig(policy=PolicyConfig(model="/no/such/model")), Path("runs/new"), False)
    assert (check.verdict, check.remedy) == ("fail", "") and "no model at /no/such/model" in check.detail


def test_an_optimizer_that_a_start_refuses_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(stages: int) -> Check:
        settings = {"grpo": {"optimizer": "adamw_8bit"}, "pipeline": {"stages": stages}}
        (check,) = room(NodeConfig.model_validate(settings), Path("runs/new"), False)
        assert check.verdict == "fail"
        return check

    monkeypatch.setattr(extras, "BITSANDBYTES", (999, 0))  # no version is as new
    assert failed(0).name == "packages" and "pip install" in failed(0).remedy
    assert failed(2).remedy == "" and "not for pipeline stages" in failed(2).detail, "no package helps"


def test_what_fits_is_said_of_a_model_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(free: int, **policy: object) -> str:
        monkeypatch.setattr(footprint, "free_memory", lambda device: free)
        config = NodeConfig.model_validate({"policy": {"model": starter_path(), "lora": True} | policy})
        checks = {check.name: check for check in room(config, Path("runs/new"), False)}
        assert [*checks] == ["memory", "lengths", "disk"]
        return checks["lengths"].detail

    assert "as set: 8 answers of 128 tokens or 256 of 128; --quantize int8: " in lengths(2**33)
    assert "as set: none" in lengths(2**20) and "--quantize nf4: none" in lengths(2**20)


def test_the_form_of_answers_is_told() -> None:
    tags, boxed = answers("tags", own_prompt=False).detail, answers("boxed", own_prompt=True).detail
    assert "<answer>…</answer> at the end" in tags and "your own" not in tags
    assert r"\boxed{…} at the end" in boxed and "after your own" in boxed


def test_needs_on_one_disk_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("hub").absolute()))
    leave(monkeypatch, 1000)
    assert disk(Path("runs/new"), 600, 400).verdict == "ok"
    assert "HF_HOME" in disk(Path("runs/new"), 600, 401).remedy
    assert "--run-dir" in disk(Path("runs/new"), 1001, 0).remedy


def test_directory() -> None:
    Path("file").touch()
    assert directory(Path("runs/new")).verdict == "ok"
    assert directory(Path("file/run")).verdict == "fail"
    Path("locked").mkdir(mode=0o500)
    if os.geteuid() != 0:  # root may write anywhere
        assert directory(Path("locked/run")).verdict == "fail"


def test_ports(listener: int) -> None:
    free = free_port()
    config = NetworkConfig(listen="127.0.0.1", port=free, gossip_port=0)
    assert ports(config).verdict == "ok"
    taken = config.model_copy(update={"port": listener})
    assert (ports(taken).verdict, ports(taken).remedy) == ("ok", ""), "a node takes others by itself"
    assert str(listener) in ports(taken).detail and "instead" in ports(taken).detail
    lost = ports(taken, start=StartCommand("bootstrap", "a.toml"))  # links name its port
    assert lost.verdict == "warn" and lost.remedy.startswith("swarm-node bootstrap a.toml --port")
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
    network = NetworkConfig(listen="127.0.0.1", port=free_port(), gossip_port=0)
    guess = Check("reachable", "warn", "as it seems")
    members = {peer_id(i): replace(card(), addresses=[address(i)]) for i in range(1, 8)}

    def connects(peer: str, ports: Sequence[int]) -> list[bool]:
        asked.append(peer)
        return [*dial([address(0, port) for port in ports]).values()]

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


def test_dialling_tells_which_addresses_answer(listener: int) -> None:
    answers, dead = address(1, listener), address(2, free_port())
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
def test_the_clock_is_compared_with_others_cards(off: float, verdict: str) -> None:
    now = 1e9
    ages = (1.0, CARD_RENEWAL_S / 2, CARD_RENEWAL_S - 1)
    members = {peer_id(i): card(created=now - age - off) for i, age in enumerate(ages)}
    assert clock(members, now).verdict == verdict
    assert clock({}, now) == Check("clock", "ok", "not compared: no other node has been seen")
    assert people({}).verdict == "warn"
    assert people(members).verdict == "ok"


@pytest.mark.parametrize("off", [-3600.0, -300.0, -60.0, 70.0, 3600.0])
def test_a_clock_that_expires_everybody_fails(off: float) -> None:
    now = 1e9
    made = {peer_id(i): now - age - off for i, age in enumerate((1.0, CARD_RENEWAL_S / 2, CARD_RENEWAL_S - 1))}
    check = clock({}, now, made)
    assert (check.verdict, check.detail.split()[0]) == ("fail", f"{abs(off):.0f}")
    assert ("ahead" in check.detail) == (off > 0)
    assert "3" in people({}, made, True).detail and people({}, made, True).verdict == "warn"


def test_a_process_that_ended_is_a_warning() -> None:
    assert restarted({"restarts/gossip": 0.0}, {}).verdict == "ok"
    check = restarted({"restarts/gossip": 2.0, "restarts/dht": 1.0}, {"gossip": "grown to 555 MiB"})
    assert check.verdict == "warn"
    assert "gossip process started again 2 times, last because it ended: grown to 555 MiB; p2pd" in check.detail


@pytest.mark.parametrize(
    ("hostile", "where", "ago", "verdict", "remedy"),
    [
        (9, "1.2.3.4", 0, "ok", ""),
        (10, "1.2.3.4", 0, "warn", "sudo ufw insert 1 deny from 1.2.3.4"),
        (10, "2a00:1:2:3::/64", 0, "warn", "sudo ufw insert 1 deny from 2a00:1:2:3::/64"),
        (10, "1.2.3.4", LATELY_S + 1, "ok", ""),
        (10, "172.17.0.1", 0, "warn", ""),
        (10, "", 0, "warn", ""),
    ],
)
def test_a_peer_that_keeps_sending_rubbish_is_named(
    hostile: int, where: str, ago: float, verdict: str, remedy: str
) -> None:
    row = RefusalRow(peer_id(2), f"{hostile} × malformed", 100, hostile, 1e9 - ago, "bob", where)
    check = refusals([row, replace(row, hostile=0)], 1e9)
    assert (check.verdict, check.remedy) == (verdict, remedy)
    assert verdict == "ok" or f"10 × malformed, from bob …{peer_id(2)[-8:]}" in check.detail


def test_unexpired_members_alone_do_not_decide() -> None:
    now, off = 1e9, 50.0
    made = {peer_id(i): now - CARD_RENEWAL_S * i / 8 - off for i in range(8)}
    members = {peer: card(created=at) for peer, at in made.items() if at + CARD_TTL_S > now}
    assert 0 < len(members) < len(made) and clock(members, now, made).verdict == "fail"


def test_strangers_do_not_outvote_members_on_time() -> None:
    now = 1e9
    members = {peer_id(i): card(created=now - 7.0) for i in range(2)}
    strangers = {peer_id(i): now - 3600.0 for i in range(2, 20)}
    made = strangers | {peer: each.created for peer, each in members.items()}
    assert clock(members, now, made).verdict == "ok"


def test_nobody_there_is_told_from_no_peer() -> None:
    assert "none is a member of this swarm" in people({}, {}, True).detail
    assert "not as a peer" in people({}, {}, False).detail
    assert people({}, {}, answers=False).detail == "nobody answers"


LINK = f"swarm://{SWARM}?peer={address(1)}&peer={address(2)}"
IN_THAT_RUN = StartCommand("join", "sums.toml", "runs/my run")


@pytest.mark.parametrize(
    ("start", "started", "elsewhere"),
    [
        (StartCommand(), "swarm-node join SWARM", "swarm-node join SWARM --run-dir DIR"),
        (StartCommand(swarm=LINK), f"swarm-node join '{LINK}'", f"swarm-node join '{LINK}' --run-dir DIR"),
        (IN_THAT_RUN, "swarm-node join sums.toml --run-dir 'runs/my run'", "swarm-node join sums.toml --run-dir DIR"),
        (
            StartCommand("local", run_dir="runs/a"),
            "swarm-node local --run-dir runs/a",
            "swarm-node local --run-dir DIR",
        ),
    ],
)
def test_remedies_say_what_is_known(
    start: StartCommand, started: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start.having() == started
    Path("file").touch()
    assert directory(Path("file/run"), start).remedy == elsewhere
    monkeypatch.setattr(footprint, "free_memory", lambda device: 1)
    (tight, _) = room(NodeConfig(), Path("runs/new"), False, start)
    assert tight.remedy == f"{started} --lora"
    named = NodeConfig(policy=PolicyConfig(lora=True), pipeline=PipelineConfig(stages=2, crew="home"))
    (tight, _) = room(named, Path("runs/new"), False, start)
    assert tight.remedy == start.having("--stages 4 --crew home").replace(" local ", " join SWARM ")
    (tight, _) = room(NodeConfig(policy=PolicyConfig(lora=True)), Path("runs/new"), False, start)
    assert len(tight.remedy.rpartition("--stages 2 --crew ")[2]) == 12


@pytest.mark.parametrize(
    "start", [StartCommand(), StartCommand(swarm=LINK), IN_THAT_RUN, StartCommand("bootstrap", "sums.toml", "hub")]
)
def test_remedies_of_the_network_say_what_is_known(start: StartCommand) -> None:
    started = start.having()
    network = NetworkConfig(listen="127.0.0.1", port=free_port(), gossip_port=0)
    assert reachable(network, [], start).remedy == f"{started} --listen 0.0.0.0"
    assert reachable(network, [PRIVATE], start).remedy == f"{started} --set network.nat_port_map=true"
    away = network.model_copy(update={"listen": "203.0.113.1"})
    assert ports(away, start=start).remedy.startswith(f"{started} --listen")


def test_dead_addresses_are_replaced_by_live_ones() -> None:
    dead = {address(1): False}
    assert begin(dead, start=StartCommand()).remedy == "swarm-node bootstrap MANIFEST"
    assert begin(dead, start=StartCommand(swarm="my swarm.toml")).remedy == "swarm-node bootstrap 'my swarm.toml'"
    asked = "swarm-node join LINK --run-dir runs/a  # LINK: ask for a new one, where this one came from"
    assert begin(dead, start=StartCommand(swarm=LINK, run_dir="runs/a")).remedy == asked
    assert (
        begin(dead, start=StartCommand("bootstrap", "a.toml", "hub")).remedy
        == "swarm-node bootstrap a.toml --run-dir hub"
    )
    some = {address(1): False, address(2): True}
    members = {peer_id(3): replace(card(), addresses=[address(3)])}
    hub = begin(some, members, StartCommand("bootstrap", LINK, "hub"))
    assert hub.remedy == f"swarm-node bootstrap 'swarm://{SWARM}?peer={address(3)}' --run-dir hub"
    found = begin(some, members, StartCommand(swarm=LINK, run_dir="runs/a"))
    assert found.verdict == "warn"
    assert found.remedy == f"swarm-node join 'swarm://{SWARM}?peer={address(3)}' --run-dir runs/a"
    assert people({}, {}, True, StartCommand(swarm="a.toml")).remedy == "swarm-node bootstrap a.toml"


def test_older_peers_remedy_is_an_upgrade() -> None:
    assert (
        "pip install --upgrade 'swarm-node[swarm]' --find-links"
        in versions({peer_id(1): card()}, {"rejected/version": 1.0}).remedy
    )


def test_a_failed_check_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    config = NodeConfig(network=NetworkConfig(port=0, gossip_port=0))
    assert examine(None, config, json_output=True) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["name"] for check in checks] == (
        "python packages torch memory disk directory ports reachable versions".split()
    )
    assert all(check.keys() == {"name", "verdict", "detail", "remedy"} for check in checks)
    Path("file").touch()
    assert examine(None, config.model_copy(update={"run_dir": "file/x"}), json_output=False) == 1
    output = capsys.readouterr().out
    assert "fail  directory   " in output
    assert "-> swarm-node join SWARM --run-dir DIR" in output


def test_a_run_is_examined_with_own_settings(
    listener: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir("runs/alice")
    run.path.mkdir(parents=True)
    settings = dump_toml(NodeConfig(network=NetworkConfig(announce=["203.0.113.9"], port=listener)))
    run.write("config.toml", f"{settings}\n[of_another_version]\n")
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
    with RunDir.open(run.path):
        assert examine("runs/alice", NodeConfig(), json_output=True) == 0
    printed = capsys.readouterr()
    assert "left out: of_another_version" in printed.err
    checks = {check["name"]: Check(**check) for check in json.loads(printed.out)["checks"]}
    assert checks["ports"].detail == "the run is using its ports"
    assert checks["bootstrap"].detail == "1 of 1 addresses answer"
    assert checks["members"].verdict == checks["clock"].verdict == "ok"
    assert visited == [[mine, mine, other]]
    assert "bob" in checks["reachable"].detail and "203.0.113.9" not in checks["reachable"].detail


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
def test_a_wrong_clock_is_exit_code_1(
    off: float, listener: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Alone(Visitor):
        def made(self) -> dict[str, float]:
            return {peer_id(1): time.time() - off}

        def stats(self) -> dict[str, float]:
            return {"connections/dht": 1.0}

    @contextmanager
    def visitor(swarm: Any, network: NetworkConfig, say: Any) -> Iterator[FakeTransport]:
        yield Alone()

    monkeypatch.setattr(doctor, "visitor", visitor)
    monkeypatch.setattr(doctor, "look_around", lambda transport: transport.members())
    monkeypatch.setattr(doctor, "MANIFEST_S", 0.0)  # nobody gives one
    config = NodeConfig(network=NetworkConfig(port=0, gossip_port=0))
    assert examine(f"swarm://{SWARM}?peer={address(1, listener)}", config, json_output=True) == 1
    checks = {check["name"]: Check(**check) for check in json.loads(capsys.readouterr().out)["checks"]}
    assert [name for name, check in checks.items() if check.verdict == "fail"] == ["clock"]
    assert "cards of 1" in checks["members"].detail


def names(capsys: pytest.CaptureFixture[str]) -> dict[str, Check]:
    return {check["name"]: Check(**check) for check in json.loads(capsys.readouterr().out)["checks"]}


@pytest.mark.parametrize("stages", [0, 2])
def test_a_lone_run_needs_no_network(
    stages: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(footprint, "free_memory", lambda device: 1)
    crew = PipelineConfig(stages=stages, crew="local" if stages else "")
    with RunDir.open("runs/alone") as run:
        run.write("config.toml", dump_toml(NodeConfig(run_dir="runs/alone", pipeline=crew)))
        if stages:  # in a swarm of its own processes
            run.swarm.write_text('name = "local"\ntasks = [{env = "gcd"}]\n')
        assert examine("runs/alone", NodeConfig(), json_output=True) == 0
        checks = names(capsys)
        assert [*checks] == "python packages torch memory disk directory versions".split()
        assert "the run has it" in checks["memory"].detail
    assert examine("runs/alone", NodeConfig(), json_output=True) == 1
    assert names(capsys)["memory"].remedy == "swarm-node local --run-dir runs/alone --lora"


def a_member_run(role: str = "") -> RunDir:
    """Of a swarm in which nobody answers."""
    run = RunDir("runs/alice")
    run.path.mkdir(parents=True)
    network = NetworkConfig(port=0, gossip_port=0, listen="127.0.0.1")
    run.write("config.toml", dump_toml(NodeConfig(swarm="sums.toml", network=network)))
    run.write_status({"swarm": SWARM, "time": 0.0, "role": role, "peer": peer_id(0), "addresses": []})
    run.swarm.write_text(f'name = "sums"\nbootstrap = ["{address(1, free_port())}"]\ntasks = [{{env = "gcd"}}]\n')
    return run


def test_a_run_that_just_ended_is_not_running(capsys: pytest.CaptureFixture[str]) -> None:
    run = a_member_run()
    run.write_status({"swarm": SWARM, "time": time.time(), "peer": peer_id(0), "addresses": []})
    examine("runs/alice", NodeConfig(), json_output=True)
    assert "is using" not in names(capsys)["ports"].detail
    with RunDir.open(run.path):
        examine("runs/alice", NodeConfig(), json_output=True)
    assert names(capsys)["ports"].detail == "the run is using its ports"


def test_a_cure_is_named_once(
    listener: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_member_run()
    run.write_status({"swarm": SWARM, "time": 0.0, "peer": peer_id(0), "addresses": [address(0, listener)]})
    monkeypatch.setattr(doctor, "visitor", lambda *arguments: nullcontext(Visitor()))
    monkeypatch.setattr(doctor, "look_around", lambda transport: {})
    examine("runs/alice", NodeConfig(), json_output=True)
    checks = names(capsys)
    assert (checks["bootstrap"].verdict, checks["members"].verdict) == ("fail", "warn")
    assert checks["bootstrap"].remedy == "swarm-node bootstrap sums.toml" and not checks["members"].remedy


def test_a_bootstrap_needs_no_room_for_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(footprint, "free_memory", lambda device: 1)
    monkeypatch.setattr(check_network, "own_address", lambda: PRIVATE)
    a_member_run("bootstrap")
    examine("runs/alice", NodeConfig(), json_output=True)
    checks = names(capsys)
    assert not {"memory", "disk"} & checks.keys()
    started = "swarm-node bootstrap sums.toml --run-dir runs/alice"
    assert checks["reachable"].remedy == f"{started} --set network.nat_port_map=true"
    assert checks["bootstrap"].remedy == started


@pytest.mark.parametrize("own", [{}, {"system_prompt": "You are terse."}], ids=["usual", "own"])
def test_a_runs_manifest_tells_the_form(own: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run = a_member_run()
    run.swarm.write_text(f'answer = "boxed"\n{run.swarm.read_text()}')
    asked = read_own(run.config).model_copy(update={"policy": PolicyConfig(**own)})
    run.write("config.toml", dump_own(in_form(asked, "boxed"), asked))
    examine("runs/alice", NodeConfig(), json_output=True)
    check = names(capsys)["answers"]
    assert check.verdict == "ok" and r"\boxed{…}" in check.detail and ("after your own" in check.detail) == bool(own)


@pytest.mark.parametrize("form", ["any", "tags"])
def test_a_links_members_tell_the_form(
    form: AnswerForm, listener: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest(name="sums", tasks=[ManifestTask(env="gcd")], answer=form)
    transport = Visitor({peer_id(1): {MANIFEST_METHOD: lambda caller, payload: render(manifest)}})
    monkeypatch.setattr(doctor, "visitor", lambda *arguments: nullcontext(transport))
    monkeypatch.setattr(doctor, "look_around", lambda transport: transport.members())
    settings = {"network": {"port": 0, "gossip_port": 0}, "rewards": {"answer": "boxed"}}
    link = f"swarm://{manifest.swarm_id}?peer={address(1, listener)}"
    examine(link, NodeConfig.model_validate(settings), json_output=True)
    checks = names(capsys)
    assert transport.asked[peer_id(1), MANIFEST_METHOD] == 1 and checks["directory"].detail.startswith("runs/node")
    assert checks.keys() >= {"reachable", "members", "clock"} and ("answers" in checks) == (form != "any")
    assert form == "any" or "<answer>…</answer>" in checks["answers"].detail


def test_a_model_alone_needs_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    examine(None, NodeConfig.model_validate({"policy": {"model": "starter"}}), json_output=True)
    assert not names(capsys).keys() & {"ports", "reachable"}


def test_alone_the_settings_tell_the_form(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"network": {"port": 0, "gossip_port": 0}, "rewards": {"answer": "tags"}}
    examine(None, NodeConfig.model_validate(settings), json_output=True)
    assert "<answer>…</answer>" in names(capsys)["answers"].detail


@pytest.mark.parametrize("text", ["{", "\xff", '{"time": "now"}', '{"addresses": [1]}'])
def test_a_damaged_status_is_one_finding(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_member_run()
    run.status.write_bytes(text.encode("latin-1"))
    examine("runs/alice", NodeConfig(), json_output=True)
    checks = names(capsys)
    assert checks["status"].verdict == "warn" and "swarm.json" in checks["status"].detail
    assert {"python", "memory", "ports", "bootstrap", "versions"} <= checks.keys()


@pytest.mark.parametrize("claimed", ["/ip4", "/ip4/999.1.1.1/tcp/1", "/ip6/1/tcp/x", "/"])
def test_false_member_addresses_break_nothing(claimed: str, listener: int) -> None:
    network = NetworkConfig(listen="127.0.0.1", port=free_port(), gossip_port=0)
    members = {peer_id(1): replace(card(), addresses=[claimed])}
    guess = Check("reachable", "warn", "as it seems")
    check = seen_from_others(lambda peer, ports: [True, True], members, network, False, guess)
    assert check.verdict == "ok"
    assert reachable(NetworkConfig(), [claimed]).verdict == "warn"
    assert dial([f"/ip4/127.0.0.1/tcp/{number}" for number in (-1, 70_000, 2**70)]).keys()


@pytest.mark.parametrize("json_output", [True, False])
def test_findings_before_a_crash_are_shown(
    json_output: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> Check:
        raise ZeroDivisionError("\x1b[2J by a stranger")

    monkeypatch.setattr(check_network, "ports", broken)
    assert examine(None, NodeConfig(), json_output) == 1
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "ZeroDivisionError: ?[2J by a stranger" in shown
    assert all(name in shown for name in ("python", "memory", "directory")) and "versions" not in shown
