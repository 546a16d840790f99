from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from swarm_node.config import NetworkConfig
from swarm_node.errors import UserError
from swarm_node.rundir import RunDir
from swarm_node.status import look_around, show_status
from tests.swarm_node.fake_transport import SWARM, FakeTransport, address, card, peer_id

STATUS: dict[str, Any] = {
    "swarm": SWARM,
    "swarm_name": "sums",
    "peer": peer_id(0),
    "name": "alice",
    "addresses": [address(0)],
    "link": f"swarm://{SWARM}?peer={address(0)}",
    "traffic": {"bytes_in": 2e6, "bytes_out": 1e6, "messages_in": 7, "restarts/gossip": 1, "rejected/seal": 2},
    "sent": {"swarm/groups_sent": 40, "swarm/unsent/zero": 5},
    "received": {
        "swarm/groups_received": 12,
        "swarm/groups_admitted": 8,
        "swarm/rejected/age": 1,
        "swarm/rejected/assignment": 3,
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


def make_run(path: str, age: float = 0.0, **more: Any) -> RunDir:
    run = RunDir(path)
    run.path.mkdir(parents=True)
    run.status.write_text(json.dumps({**STATUS, "time": time.time() - age, **more}))
    run.metrics.write_text('{"round": 41, "reward": 0.25, "swarm/groups_used": 4.0}\n')
    return run


def shown(capsys: pytest.CaptureFixture[str], target: str | None = None, json_output: bool = False) -> str:
    show_status(target, NetworkConfig(), json_output)
    return capsys.readouterr().out


def test_a_run_shows_who_is_there_what_was_admitted_and_why_the_rest_was_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run("runs/alice")
    with RunDir.open("runs/alice"):
        lines = shown(capsys, "runs/alice").splitlines()
    text = "\n".join(lines)
    for part in (
        "round      41, reward 0.250",
        "alice, peer 12D3KooW",
        STATUS["link"],
        "2.00 MB in, 1.00 MB out; 7 messages in",
        "1 restarts of gossip",
        "40 groups; not sent: zero 5",
        "12 groups, admitted 8, used 4 in the last round",
        "assignment 3, age 1; seal 2",
        "members    1 others",
    ):
        assert part in text
    table = lines[-2:]  # whoever sent most comes first
    assert table[0].split()[1:] == ["-", "gone", "-", "10", "6", "0", "muted;", "assignment", "3,", "age", "1"]
    assert table[1].split()[1:] == ["bob", "yes", "9", "2", "2", "1"]
    assert "ago" not in text
    assert "runs/alice, ended; as of 0 s ago" in shown(capsys, "runs/alice")


def test_without_a_target_the_newest_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/new", age=100.0)
    old = make_run("runs/old", name="bob")
    for path in (old.status, old.metrics):
        os.utime(path, (1e9, 1e9))
    with RunDir.open("runs/new"):
        text = shown(capsys)
    assert text.startswith("run        runs/new, as of 100 s ago: it stands still\n")


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/alice")
    found = json.loads(shown(capsys, "runs/alice", json_output=True))
    assert found["run"] == "runs/alice"
    assert found["swarm"]["peers"] == STATUS["peers"]
    assert found["metrics"]["round"] == 41


def test_a_run_without_a_swarm_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/local").status.unlink()
    assert shown(capsys, "runs/local").splitlines()[-1] == "swarm      none: this run trains alone"


@pytest.mark.parametrize(
    ("target", "message"),
    [(None, "no run below runs/"), ("empty", "nothing to show yet"), ("runs/no", "no manifest runs/no")],
)
def test_nothing_to_show(target: str | None, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    with pytest.raises(UserError, match=message):
        shown(capsys, target)


def test_a_damaged_status_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("runs/alice").status.write_text("{")
    with pytest.raises(UserError, match="cannot read runs/alice/swarm.json"):
        shown(capsys, "runs/alice")


def test_looking_around_ends_when_nobody_new_turns_up() -> None:
    now, ticks = [0.0], [0]
    transport = FakeTransport()

    def clock() -> float:
        now[0] += 0.1
        ticks[0] += 1
        if ticks[0] in (20, 40):
            transport.cards = {**transport.cards, peer_id(ticks[0]): card()}
        return now[0]

    assert set(look_around(transport, look_s=60.0, clock=clock, tick_s=0.0)) == {peer_id(20), peer_id(40)}
    assert 5.0 < now[0] < 20.0
    assert look_around(FakeTransport(), look_s=5.0, clock=clock, tick_s=0.0) == {}
