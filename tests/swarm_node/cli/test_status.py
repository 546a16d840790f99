from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import typer

from swarm_node.cli.commands import status, status_text
from swarm_node.cli.commands.status import show_status
from swarm_node.cli.commands.status_text import status_lines
from swarm_node.config import NetworkConfig
from swarm_node.config.machine import ResourcesConfig
from swarm_node.errors import UserError
from swarm_node.observability.evaluations import Evaluation, Held, HeldOutRecord
from swarm_node.observability.tally import Tally
from swarm_node.runtime.limits import ResourceLimits
from swarm_node.runtime.pause import pause_run, unpause_run
from swarm_node.storage.best import Best, write_best
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm import lookup
from swarm_node.swarm.links import find_swarm
from swarm_node.swarm.manifests import render
from swarm_protocol.manifest import MANIFEST_METHOD
from swarm_protocol.messages import PROTOCOL_VERSION, CrewCard, Declared, DeclaredKind, PeerCard
from swarm_protocol.transports.base import Server
from tests.support.fake_transport import SWARM, FakeTransport, address, card, peer_id
from tests.support.ports import free_port
from tests.support.run_files import write

NOW = 1_800_000_000.0
STATUS: dict[str, Any] = {
    "swarm": SWARM,
    "swarm_name": "sums",
    "peer": peer_id(0),
    "name": "alice",
    "addresses": [address(0)],
    "link": f"swarm://{SWARM}?peer={address(0)}",
    "traffic": {"bytes_in": 2e6, "bytes_out": 1e6, "messages_in": 7, "restarts/gossip": 1, "rejected/seal": 2},
    "restarted": {"gossip": "grown to 555 MiB, 15 of them for 192.0.2.7"},
    "sent": {"swarm/groups_sent": 40, "swarm/unsent/zero": 5},
    "received": {
        "swarm/groups_received": 12,
        "swarm/groups_admitted": 8,
        "swarm/rejected/age": 1,
        "swarm/rejected/assignment": 3,
        "swarm/rejected/seal": 2,
    },
    "peers": {
        peer_id(1): {"name": "bob", "present": True, "policy_version": 9, "received": 2, "admitted": 2, "used": 1},
        peer_id(2): {
            "name": "",
            "present": False,
            "policy_version": None,
            "received": 10,
            "admitted": 6,
            "rejected": {"age": 1, "assignment": 3},
            "muted": True,
            "used": 0,
        },
    },
}


AVERAGING: dict[str, Any] = {
    "cohort": "0123456789abcdef",
    "method": "noloco",
    "codec": "8bit",
    "when": "in pairs every 60 s, after 5 updates or more",
    "partners": {peer_id(1): "bob", peer_id(2): "carol"},
    "exchanges": 12,
    "bytes": 1_250_000,
    "spread": 0.1,
    "last": {"time": NOW - 20.0, "peers": [peer_id(1)], "with": "bob"},
    "skipped": {"odd": 1, "late": 3},
    "refused": {"crossed": 2},
}


def make_run(path: str, age: float = 0.0, **more: Any) -> RunDir:
    run = RunDir(path)
    run.path.mkdir(parents=True)
    run.status.write_text(json.dumps({**STATUS, "time": NOW - age, **more}))
    os.utime(run.status, (NOW, NOW))  # by the process that holds it
    run.metrics.write_text('{"round": 41, "reward": 0.25, "swarm/groups_used": 4.0}\n')
    run.config.write_text('swarm = "demo.toml"\n')
    return run


@pytest.fixture(autouse=True)
def clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_text, "own_command", lambda: "swarm-node")
    still = SimpleNamespace(time=lambda: NOW, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(status, "time", still)


def shown(capsys: pytest.CaptureFixture[str], target: str | None = None, json_output: bool = False) -> str:
    show_status(target, NetworkConfig(), json_output)
    return capsys.readouterr().out


def detailed(capsys: pytest.CaptureFixture[str], target: str) -> list[str]:
    """The lines with -v."""
    return list(status_lines(json.loads(shown(capsys, target, json_output=True)), NOW, verbose=True))


def test_a_run_is_shown_shortly(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/alice", since=NOW - 600)
    with RunDir.open("runs/alice"):
        assert shown(capsys, "runs/alice").splitlines() == [
            "run        runs/alice, running (-v says more)",
            "round      41; its reward 0.250",
            f"swarm      sums {SWARM[:16]}",
            "this start 10 min: 2.0 MB in, 1.0 MB out; 12 groups received, 8 admitted; 40 sent",
            "refused    3 × not the sender's task, 2 × seal",
            f"network    gossip process started again once, because it ended: {STATUS['restarted']['gossip']}",
            "members    1 other; groups used: bob 1",
            f"join link  {STATUS['link']}",
            "next       swarm-node samples runs/alice",
            "           swarm-node pause runs/alice",
        ]
    ended = shown(capsys, "runs/alice").splitlines()
    assert ended[0] == "run        runs/alice, ended 0 s ago (-v says more)"
    assert ended[-3:] == [
        "members    1 other when this run ended; groups used: bob 1",
        "next       swarm-node resume runs/alice",
        "           swarm-node samples runs/alice",
    ]


def test_all_counts_of_a_run_are_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/alice")
    lines = detailed(capsys, "runs/alice")
    text = "\n".join(lines)
    for part in (
        "alice, peer 12D3KooW",
        STATUS["link"],
        "last start 2.0 MB in, 1.0 MB out; 12 groups received, 8 admitted; 40 sent\n           7 messages in",
        "network    gossip process started again once, because it ended: grown to 555 MiB, 15 of them for 192.0.2.7",
        "not sent   5 × all rewarded alike: nothing to do",
        "not used   1 × too old",
        "was here",
    ):
        assert part in text
    at = next(i for i, line in enumerate(lines) if line.startswith("peer "))
    table = lines[at + 1 : at + 3]  # whoever sent most comes first
    assert table[0].split()[1:8] == ["-", "gone", "-", "10", "6", "0", "muted;"]
    assert table[0].endswith("muted; 3 × not the sender's task, 1 × too old")
    assert table[1].split()[1:] == ["bob", "yes", "9", "2", "2", "1"]
    assert text.count("seal") == 1, "what the transport refused is among what was refused"
    assert "averaging" not in text
    make_run("runs/bob", sent={"swarm/unsent/zero": 5, "swarm/unsent/cap": 1})
    (unsent,) = [line for line in detailed(capsys, "runs/bob") if line.startswith("not sent")]
    assert unsent.endswith("1 × over the swarm's limits: this node used them all the same")


def checkpoint_at(run: RunDir, round: int) -> Path:
    """The folder of an empty checkpoint."""
    folder = run.checkpoints / f"round-{round:08}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"state": {}}')
    return folder


def trained_run(age: float, *kinds: str) -> RunDir:
    """A run whose round 41 ended, and that wrote its status and events of these kinds, `age` seconds ago."""
    run = make_run("runs/alice", age=age)
    write(run.metrics, {"round": 41, "time": NOW - age}, mode="w")
    write(run.events, *({"time": NOW - age, "kind": kind, "text": ""} for kind in kinds))
    return run


def test_a_killed_run_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained_run(180, "stop", "resume", "start", "note")
    assert json.loads(shown(capsys, "runs/alice", json_output=True))["end"] == "killed"
    text = shown(capsys, "runs/alice")
    assert "runs/alice, killed or crashed 3 min ago, or the machine went down" in text
    assert "saved      nothing yet: the run has to begin anew\n" in text and "swarm-node resume runs/alice\n" in text
    for round, left in ((40, "; 1 round has to be trained again"), (41, ": nothing is lost")):
        checkpoint_at(run, round)
        assert f"saved      up to round {round}{left}\n" in shown(capsys, "runs/alice")


def test_a_run_that_may_live_elsewhere_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    trained_run(59, "start")
    text = shown(capsys, "runs/alice")
    assert "runs/alice, no process of this machine holds it; last heard 59 s ago" in text
    assert "resume" not in text and "saved" not in text and "when this run ended" not in text and "join link" in text


def test_a_failed_start_hides_no_lost_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint_at(trained_run(600, "start", "note", "error"), 38)
    text = shown(capsys, "runs/alice")
    assert "ended 10 min ago" in text and "up to round 38; 3 rounds have to be trained again\n" in text


def test_a_run_says_whether_it_learned(capsys: pytest.CaptureFixture[str]) -> None:
    run, tally = make_run("runs/alice", worth={"theirs": [0.3, 0.5]}), Tally()
    for round, reward in enumerate([0.25] * 10 + [0.75] * 10, 1):
        tally.add({"round": round, "reward": reward})
    before, last = (Evaluation({"all": Held(128, share, None, share)}) for share in (0.2, 0.4))
    held = HeldOutRecord(before, Evaluation())
    checkpoint = checkpoint_at(run, 20)
    for figures, words in (
        (held, "0.200 before training"),
        (HeldOutRecord(before, last, round=20), "0.200 -> 0.400 after round 20"),
        (HeldOutRecord(before, last, round=20, worse={"pass_k": "pass@8 fell"}), "0.200 -> 0.400 after round 20"),
        (HeldOutRecord(before, last, round=50, worse={"pass_k": "pass@8 fell"}), "0.200 before training"),
    ):
        state = {"tally": tally, "held_out_figures": figures, "held_out": {"samples": 8}}
        (checkpoint / "state.json").write_bytes(msgspec.json.encode({"state": state}))
        text = shown(capsys, "runs/alice")
        assert "round      41; reward 0.250 -> 0.750, first and last tenth of 20 rounds\n" in text
        assert f"held-out   pass@1 {words}; 2 members say 0.300 to 0.500 (self-declared)\n" in text
        assert ("\nworse      pass@8 fell\n" in text) == (bool(figures.worse) and figures.round == 20)


@pytest.mark.parametrize(("age", "words"), [(90, "90 s"), (600, "10 min"), (7300, "2 h"), (260_000, "3 days")])
def test_figures_of_the_last_start_are_told_apart(capsys: pytest.CaptureFixture[str], age: float, words: str) -> None:
    make_run("runs/alice", since=NOW - age, worth={"others_groups": 2}, averaging=AVERAGING)
    labels = [line.split()[0] for line in shown(capsys, "runs/alice").splitlines() if line[0] != " "]
    assert labels.index("worth") < labels.index("averaging") < labels.index("last") < labels.index("refused")
    assert f"\nlast start {words}: 2.0 MB in" in shown(capsys, "runs/alice")
    with RunDir.open("runs/alice"):
        assert f"\nthis start {words}: 2.0 MB in" in shown(capsys, "runs/alice")


def test_a_run_that_loads_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    uses = {"machine/cpu_cores": 0.7, "machine/cores": 1, "machine/memory_bytes": 1e9, "machine/disk_bytes": 1e6}
    run = make_run("runs/alice", age=240, since=NOW - 600)
    run.metrics.write_text(json.dumps({"round": 41, **uses}) + "\n")
    for path in (run.status, run.metrics):
        os.utime(path, (1e9, 1e9))
    with RunDir.open("runs/alice"):
        loading = shown(capsys, "runs/alice")
        assert "runs/alice, starting (loading); what follows is as of 4 min ago, when it last ended" in loading
        assert "last start 6 min: " in loading and "when this run ended" in loading and "uses" not in loading
        assert json.loads(shown(capsys, "runs/alice", json_output=True))["starting"] is True
        run.write_status({**STATUS, "time": NOW, "since": NOW - 5, "averaging": AVERAGING})
        begun = shown(capsys, "runs/alice")
        assert "starting" not in begun and "this start 5 s: " in begun and "uses       0.7 of 1 core" in begun
        assert "           partners here: 2, bob, carol" in detailed(capsys, "runs/alice")
        run.write_waits("on battery")
        assert "uses" not in shown(capsys, "runs/alice"), "those figures are of before the pause"


def test_the_worst_sources_of_refusals_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    says = "1,204 × too many keys asked at once"
    row = {"source": peer_id(2), "says": says, "count": 1204, "hostile": 1204, "last": NOW - 400}
    first = row | {"name": "bob", "address": "203.0.113.9", "last": NOW - 3}
    make_run("runs/alice", refused=[first, *[row] * 7])
    lines = detailed(capsys, "runs/alice")
    start = next(i for i, line in enumerate(lines) if line.startswith("refused"))
    assert lines[start + 1].startswith(f"           {says}, from bob …{peer_id(2)[-8:]} at 203.0.113.9, last ")
    assert lines[start + 2].endswith("7 min ago") and lines[start + 6] == "           3,612 from 3 others"
    make_run("runs/hub", refused=[first], received={})
    assert f"refused    {says}, from bob" in shown(capsys, "runs/hub")


def test_a_terminal_breaks_no_word_and_no_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("runs/alice")
    with RunDir.open(run.path):
        whole = shown(capsys, "runs/alice")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "50")
        lines = shown(capsys, "runs/alice").splitlines()
    assert " ".join(" ".join(lines).split()) == " ".join(whole.split())
    assert all(len(line) <= 50 or " " not in line[11:] for line in lines), "only what is one word goes beyond the edge"
    assert f"join link  {STATUS['link']}" in lines


def test_a_nameless_swarm_goes_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/alice", swarm_name="")
    assert f"swarm      {SWARM[:16]}\n" in shown(capsys, "runs/alice")


def test_without_a_target_the_newest_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/new", age=100.0)
    old = make_run("runs/old", name="bob")
    for path in (old.status, old.metrics):
        os.utime(path, (1e9, 1e9))
    with RunDir.open("runs/new"):
        text = shown(capsys)
    assert text.startswith("run        runs/new, as of 100 s ago: it stands still (-v says more)\n")


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/alice")
    found = json.loads(shown(capsys, "runs/alice", json_output=True))
    assert found["run"] == "runs/alice"
    assert found["swarm"]["peers"] == STATUS["peers"]
    assert found["metrics"]["round"] == 41


def test_the_best_held_out_figure_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("runs/alice")
    assert "held-out" not in shown(capsys, "runs/alice")
    (run.checkpoints / "round-00000030").mkdir(parents=True)
    best = Best(30, None, None, reward=0.266, figure="reward")
    write_best(run.path, best, "round-00000030")
    assert "held-out   mean reward best 0.266 after round 30\n" in shown(capsys, "runs/alice")
    found = json.loads(shown(capsys, "runs/alice", json_output=True))
    assert found["best"] == {"round": 30, "figure": "reward", "value": 0.266}
    write_best(run.path, msgspec.structs.replace(best, reward=None), "round-00000030")  # damaged
    assert "held-out" not in shown(capsys, "runs/alice")


def test_groups_that_wait_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"swarm/groups_received": 12, "swarm/groups_admitted": 8, "swarm/groups_waiting": 4}
    run = make_run("runs/alice", received=counts)
    assert "12 groups received, 8 admitted, 4 never examined" in shown(capsys, "runs/alice")
    with RunDir.open(run.path):
        assert "12 groups received, 8 admitted, 4 not examined yet" in shown(capsys, "runs/alice")


def test_a_run_without_a_swarm_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/local").status.unlink()
    assert "swarm      none: this run trains alone" in shown(capsys, "runs/local").splitlines()


def test_a_run_before_its_first_round_says_what_it_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    Path("early").mkdir()
    Path("early/events.jsonl").write_text('{"time": 1.0, "kind": "start", "text": "held-out questions\\u001b[2J"}\n')
    with RunDir.open("early"):
        lines = shown(capsys, "early").splitlines()
    assert "round      none yet; it said last: held-out questions?[2J" in lines


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "no run below runs/"),
        ("empty", "nothing to show yet"),
        ("runs/no", "no run directory or manifest runs/no"),
    ],
)
def test_nothing_to_show(target: str | None, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    with pytest.raises(UserError, match=message):
        shown(capsys, target)


def test_a_damaged_status_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/alice").status.write_text("{")
    with pytest.raises(UserError, match="cannot read runs/alice/swarm.json"):
        shown(capsys, "runs/alice")


def test_a_crew_has_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    crew = {
        "name": "home",
        "count": 2,
        "lead": {"peer": peer_id(1), "name": "bob"},
        "whole": True,
        "updates": 12,
        "round": 12,
        "stages": [
            {"layers": [0, 5], "peer": peer_id(1), "name": "bob"},
            {"layers": [6, 11], "peer": peer_id(0), "name": "alice"},
        ],
        "spares": 1,
        "held": [1],
        "replicas": {0: 11},
        "recovered": {"replica": 2, "base": 1},
    }
    make_run("runs/alice", crew=crew)
    lines = shown(capsys, "runs/alice").splitlines()
    bob = f"bob (…{peer_id(1)[-8:]})"
    assert f"crew       home: 2 stages, whole, led by {bob}, 12 updates" in lines
    assert f"           stage 0 (layers 0-5): {bob}" in lines
    assert "           stage 1 (layers 6-11): this node" in lines
    assert "           spares 1; replicas kept here: stage 0 after update 11" in lines
    assert "           stages built so far: 2 by replica, 1 by base" in lines


@pytest.mark.parametrize("taker", [None, {"peer": peer_id(0), "name": "alice"}])
def test_a_lost_stage_is_shown_as_lost(taker: dict[str, str] | None, capsys: pytest.CaptureFixture[str]) -> None:
    missing = {"since": NOW - 12.0, "taker": taker}
    stages = [
        {"layers": [0, 5], "peer": peer_id(0), "name": "alice", "missing": None},
        {"layers": [6, 11], "peer": peer_id(1), "name": "bob", "missing": missing},
    ]
    crew = {"name": "home", "count": 2, "lead": stages[0], "whole": False, "updates": 12, "round": 12, "stages": stages}
    crew |= {"spares": 0, "held": [0], "replicas": {}, "recovered": {}, "absent": [peer_id(1)]}
    make_run("runs/alice", crew=crew)
    text = "\n".join(detailed(capsys, "runs/alice"))
    by = "held by nobody" if taker is None else f"being rebuilt by alice (…{peer_id(0)[-8:]})"
    assert f"           stage 1 (layers 6-11): lost 12 s ago, {by}" in text.splitlines()
    assert re.search(r"bob +silent", text) and "members    0 others" in text


def test_an_incomplete_crew_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    crew = {"name": "home", "count": 2, "lead": None, "whole": False, "updates": 0, "round": 0, "stages": []}
    make_run("runs/alice", crew=crew | {"spares": 0, "held": [], "replicas": {}, "recovered": {}})
    text = shown(capsys, "runs/alice")
    assert "home: 2 stages, not whole, nobody leads yet, 0 updates" in text and "kept here: none" in text
    assert "built so far" not in text


def test_averaging_has_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/alice", averaging=AVERAGING)
    lines = detailed(capsys, "runs/alice")
    at = lines.index("averaging  weights averaged 12 times, 1.25 MB sent, last with bob 20 s before the end")
    assert [line.strip() for line in lines[at + 1 : at + 4]] == [
        "noloco, in pairs every 60 s, after 5 updates or more, 8bit; cohort 0123456789abcdef",
        "skipped: 3 × it came too late, 1 × the number of members was odd, and this one was left over",
        "refused to others in this start: 2 × both called each other at once",
    ]
    found = json.loads(shown(capsys, "runs/alice", json_output=True))
    assert found["swarm"]["averaging"] == AVERAGING
    assert "skipped" not in shown(capsys, "runs/alice")
    make_run("runs/bob", averaging=AVERAGING | {"partners": {}, "last": None, "exchanges": 0, "skipped": {}})
    text = "\n".join(detailed(capsys, "runs/bob"))
    assert "partners" not in text and "averaged 0 times" in text and "skipped" not in text


def test_members_that_train_nothing_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    boots = {"name": "boot", "present": True, "trains": False, "policy_version": 0}
    make_run("runs/alice", peers=STATUS["peers"] | {peer_id(3): boots})
    ended = "1 of them training when this run ended; groups used: bob 1"
    assert f"members    2 others, {ended}\n" in shown(capsys, "runs/alice")
    make_run("runs/bob", peers={peer_id(3): boots})
    assert "members    1 other, none of them training when this run ended\n" in shown(capsys, "runs/bob")


# --------------------------------------------------------------------- a swarm


def make_swarm(*addresses: str) -> str:
    """A manifest of the tests' swarm."""
    listed = ", ".join(f'"{each}"' for each in addresses)
    Path("sums.toml").write_text(f'name = "sums"\nbootstrap = [{listed}]\n[[tasks]]\nenv = "small"\n')
    return "sums.toml"


def visiting(
    monkeypatch: pytest.MonkeyPatch,
    cards: Mapping[str, PeerCard],
    others: Mapping[str, Mapping[str, Server]] | None = None,
    **stats: float,
) -> None:
    """What a visitor sees, and what others answer it."""

    class Seen(FakeTransport):
        def stats(self) -> Mapping[str, float]:
            return {name.replace("_", "/"): value for name, value in stats.items()}

    @contextmanager
    def visitor(*_: object) -> Iterator[FakeTransport]:
        transport = Seen(others)
        transport.cards = dict(cards)
        yield transport

    monkeypatch.setattr(status, "visitor", visitor)
    monkeypatch.setattr(status, "PATIENT_S", 0.5)
    monkeypatch.setattr(lookup, "SETTLE_S", 0.1)


@pytest.fixture
def listening() -> Iterator[int]:
    """A port of this machine at which something answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    """One at which nothing does."""
    return free_port()


def test_a_manifest_without_address_dials_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "visitor", None)
    with pytest.raises(UserError, match=r"sums.toml has no address to ask: use a link"):
        shown(capsys, make_swarm())


def test_nobody_answering_is_not_an_empty_swarm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listening: int, closed: int
) -> None:
    dead = make_swarm(address(1, closed))
    monkeypatch.setattr(status, "visitor", None)  # nothing is started for it
    for json_output in (False, True):
        with pytest.raises(typer.Exit) as end:
            shown(capsys, dead, json_output)
        assert end.value.exit_code == 1
        out = capsys.readouterr().out
        if json_output:
            assert json.loads(out)["swarm"]["answered"] is False
        else:
            assert out.endswith(f"members    unknown: nobody answered at {address(1, closed)}\n")
    swarm = make_swarm(address(1, listening))
    visiting(monkeypatch, {}, connections_dht=0)
    with pytest.raises(typer.Exit):
        shown(capsys, swarm)
    assert "members    unknown: something answers at /ip4/127.0.0.1/tcp" in capsys.readouterr().out
    visiting(monkeypatch, {}, connections_dht=1)
    assert shown(capsys, swarm).endswith("members    0\n")


def test_members_are_shown_with_their_cohorts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    boot = PeerCard(PROTOCOL_VERSION, SWARM, 0.0, "boot", ["bootstrap"])  # all else is left at its default
    cards = {peer_id(1): boot, peer_id(2): card("bob")}
    swarm = make_swarm(address(1, listening))
    visiting(monkeypatch, cards)
    text = shown(capsys, swarm)
    assert "members    2, 1 of them training\n" in text and "cohort" not in text
    assert "updates" in text and "version" not in text
    cards[peer_id(3)] = PeerCard(PROTOCOL_VERSION, SWARM, 0.0, "carol", ["trainer"], cohort="0123456789abcdef")
    visiting(monkeypatch, cards)
    lines = shown(capsys, swarm).splitlines()
    at = lines[-4].split().index("cohort")
    assert {line.split()[1]: line.split()[at] for line in lines[-3:]} == {
        "boot": "-",
        "bob": "-",
        "carol": "0123456789abcdef",
    }


def test_figures_without_a_round_are_dashes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    came, trains = PeerCard(PROTOCOL_VERSION, SWARM, 0.0, "came", ["trainer"]), card("trains")
    visiting(monkeypatch, {peer_id(2): came, peer_id(3): msgspec.structs.replace(trains, speed=5.0)})
    header, *rows = [line.split() for line in shown(capsys, make_swarm(address(1, listening))).splitlines()[-3:]]
    at = header.index("updates")
    assert {row[1]: row[at : at + 2] for row in rows} == {"came": ["-", "-"], "trains": ["0", "5"]}


def test_on_a_terminal_it_says_that_it_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    visiting(monkeypatch, {peer_id(2): card("bob")})
    swarm = make_swarm(address(1, listening))
    show_status(swarm, NetworkConfig(), False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show_status(swarm, NetworkConfig(), False)
    assert capsys.readouterr().err == "looking for members: some seconds, on a busy machine half a minute\n"


def test_what_members_say_of_themselves_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    kinds = [DeclaredKind("gcd", 100, 25), DeclaredKind("lcm", 100, 0), DeclaredKind("strange", 9, 9)]
    says = Declared(since=NOW - 60, version="0.1.0", kinds=kinds, pass_1=0.375, questions=100)
    bob = PeerCard(PROTOCOL_VERSION, SWARM, 0.0, "bob", ["trainer"], declared=says)
    visiting(monkeypatch, {peer_id(2): bob, peer_id(3): card("carol")})
    lines = shown(capsys, make_swarm(address(1, listening))).splitlines()
    (success,) = [line for line in lines if line.startswith("success")]
    assert "gcd 0.25, lcm 0.00" in success and "unchecked" in success
    assert "           nobody solves lcm" in lines
    header, row, other = lines[-3:]
    assert header.split()[-3:] == ["success", "held-out", "address"]
    assert row.split()[-3:] == ["0.12", "0.38", "-"] and other.split()[-3:-1] == ["-", "-"]
    assert "strange" not in "".join(lines), "it is no task of this swarm"


@pytest.mark.parametrize("given", [True, False])
def test_by_a_link_kinds_of_task_need_the_manifest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listening: int, given: bool
) -> None:
    """A member gives it; until then a declared kind may be any stranger's text."""
    manifest = find_swarm(make_swarm()).manifest
    assert manifest is not None
    kinds = [DeclaredKind("gcd", 100, 25), DeclaredKind("strange", 9, 9)]
    bob = PeerCard(PROTOCOL_VERSION, manifest.swarm_id, 0.0, "bob", ["trainer"], declared=Declared(kinds=kinds))
    serves = {MANIFEST_METHOD: lambda peer, payload: render(manifest)} if given else {}
    visiting(monkeypatch, {peer_id(2): bob}, {peer_id(2): serves})
    monkeypatch.setattr(status, "MANIFEST_S", 0.1)
    link = f"swarm://{manifest.swarm_id}?peer={address(2, listening)}"
    found = json.loads(shown(capsys, link, json_output=True))
    assert [each["kind"] for each in found["kinds"]] == ["gcd"] * given
    assert list(found["members"][0]["declared"]["kinds"]) == ["gcd"] * given
    assert found["swarm"]["swarm_name"] == "sums" * given


def test_a_run_says_what_the_swarm_gave_it(capsys: pytest.CaptureFixture[str]) -> None:
    worth = {"by_others": {"kinds": ["gcd"], "first": 0.1, "now": 0.6}, "unsolved": 124, "theirs": [0.3, 0.5]}
    worth |= {"own_groups": 168, "others_groups": 312}
    make_run("runs/alice", worth=worth)
    lines = shown(capsys, "runs/alice").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("worth"))
    learned = "others gave 312 of the 480 groups it learned from (65%)"
    assert lines[at : at + 2] == [
        f"worth      {learned}; 124 questions only others solved",
        "           success where others taught it 0.100 -> 0.600",
    ]
    named = "           success on kinds taught mostly by others (gcd) 0.100 -> 0.600"
    assert named in detailed(capsys, "runs/alice")
    make_run("runs/later", worth={"by_others": "of another version"})
    assert "worth" not in shown(capsys, "runs/later")


# --------------------------------------------------------------------- for programs


def test_the_json_lists_members_and_totals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    head = PROTOCOL_VERSION, SWARM, 0.0
    cohort = "0123456789abcdef"
    crew = CrewCard(id="1" * 16, architecture="2" * 16, count=2, held=(1,))
    cards = {
        peer_id(1): PeerCard(*head, "boot", ["bootstrap"], [address(1)]),
        peer_id(2): PeerCard(*head, "bob", ["trainer"], cohort=cohort, family="llama", policy_version=7, speed=100.0),
        peer_id(3): PeerCard(*head, "carol", ["trainer", "relay"], speed=20.0, stages=(6, 11), crew=crew),
        peer_id(4): PeerCard(*head, "dave", ["trainer"], cohort=cohort, speed=3.0),
    }
    visiting(monkeypatch, cards)
    found = json.loads(shown(capsys, make_swarm(address(1, listening)), json_output=True))
    assert (found["schema"], found["run"], found["answered"], found["connected"]) == (1, None, True, True)
    members = {member["name"]: member for member in found["members"]}
    assert [member["peer"] for member in found["members"]] == sorted(cards)
    assert members["bob"] == {
        "peer": peer_id(2),
        "name": "bob",
        "present": True,
        "roles": ["trainer"],
        "family": "llama",
        "cohort": cohort,
        "policy_version": 7,
        "tokens_per_s": 100.0,
        "layers": None,
        "crew": None,
        "stages": [],
        "addresses": [],
        "declared": None,
    }
    carol = members["carol"]
    assert (carol["layers"], carol["crew"], carol["stages"], carol["cohort"]) == ([6, 11], "1" * 16, [1], None)
    assert members["boot"]["addresses"] == [address(1)] and members["boot"]["family"] is None
    assert found["totals"] == {
        "members": 4,
        "trainers": 3,
        "tokens_per_s": 123.0,
        "cohorts": {cohort: {"members": 2, "trainers": 2, "tokens_per_s": 103.0}},
    }


@pytest.mark.parametrize("swarm_age", [None, 3600.0])
def test_a_lone_run_s_pause_is_told(swarm_age: float | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a run was a member once, whose last words are of then."""
    run = make_run("runs/alice", age=swarm_age or 0.0, paused="on battery")
    run.config.touch()
    if swarm_age is None:
        run.status.unlink()

    def paused() -> str | None:
        found: str | None = json.loads(shown(capsys, "runs/alice", json_output=True))["paused"]
        return found

    with RunDir.open("runs/alice") as held:
        limits = ResourceLimits(ResourcesConfig(), held, lambda sentence: None)
        limits.look()
        assert paused() is None
        pause_run(run, None, time.time())
        limits.look()
        assert paused() == "by `swarm-node pause`"
        assert "paused     by `swarm-node pause`" in shown(capsys, "runs/alice").splitlines()
        unpause_run(run)
        limits.look()
        assert paused() is None
        pause_run(run, None, time.time())
        limits.look()
    assert paused() is None, "it has ended"
    run.paused.unlink()
    with RunDir.open("runs/alice"):
        assert paused() is None, "what another process left is not of this one"


def test_a_run_s_json_says_what_fleets_ask(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("runs/alice", paused="quiet hours", averaging={"method": "noloco"}, crew={"name": "home"})
    run.metrics.write_text('{"round": 1, "reward": 0.1, "cost/spent": 0.5, "cost/groups": 4}\n')
    with RunDir.open("runs/alice"):
        found = json.loads(shown(capsys, str(run.path), json_output=True))
    assert (found["schema"], found["in_use"], found["paused"]) == (1, True, "quiet hours")
    assert (found["averaging"], found["crew"]) == ({"method": "noloco"}, {"name": "home"})
    assert found["cost"] == {"spent": 0.5, "groups": 4}
    run.status.unlink()
    run.metrics.write_text('{"round": 1, "reward": 0.1}\n')
    found = json.loads(shown(capsys, str(run.path), json_output=True))
    assert [found[key] for key in ("in_use", "paused", "crew", "averaging", "cost", "swarm")] == [False] + [None] * 5
