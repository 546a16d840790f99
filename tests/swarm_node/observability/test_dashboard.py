from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from swarm_node.errors import UserError
from swarm_node.observability.curves import POINTS
from swarm_node.observability.dashboard import app as answering
from swarm_node.observability.dashboard import gallery as finding
from swarm_node.observability.dashboard import tail as tailing
from swarm_node.observability.dashboard.app import HEADERS, STATIC, make_app
from swarm_node.observability.dashboard.gallery import SHOWN, Gallery, Told, news
from swarm_node.observability.dashboard.serve import CONNECTIONS, LOCAL_NAMES, PORT, serve
from swarm_node.observability.dashboard.tail import Tail
from swarm_node.observability.dashboard.view import View
from swarm_node.observability.jsonl import JsonLines
from swarm_node.storage.rundir import BOOTSTRAP, RunDir
from tests.support.run_files import metrics, write

NAME = "<img src=x onerror=alert(1)>"


def make_run(name: str = "runs/alice", rounds: int = 3, config: str = "rounds = 9\n") -> RunDir:
    run = RunDir(name)
    run.path.mkdir(parents=True)
    run.config.write_text(config)
    write(run.metrics, *(metrics(round) for round in range(1, rounds + 1)))
    write(run.events, {"time": 1000.0, "kind": "start", "text": "it begins"})
    return run


def seen(run: RunDir) -> View:
    view = View("alice", run)
    view.refresh()
    return view


def client(hosts: frozenset[str] | None = LOCAL_NAMES, token: str | None = None, host: str = "127.0.0.1") -> TestClient:
    app = make_app(Gallery([]), hosts, token)
    return TestClient(app, base_url=f"http://{host}:31380", follow_redirects=False)


# ----------------------------------------------------------------- tailing


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert tail.read() == (False, [{"a": 1}])
    assert tail.read() == (False, [])
    with open(path, "ab") as file:
        file.write(b'2}\n{"a"')
    assert tail.read() == (False, [{"a": 2}])
    assert tail.damaged == []


def test_what_the_run_itself_writes_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines, tail = JsonLines(path, print), Tail(path)
    for round in range(5):
        lines.append(metrics(round))
        assert [record["round"] for record in tail.read()[1]] == [round]
    lines.cut_after(lambda record: record["round"] < 2)  # a resumed run cuts what comes after its checkpoint
    lines.append(metrics(2, reward=0.5))
    void, records = tail.read()
    assert void
    assert [record["round"] for record in records] == [0, 1, 2]
    lines.close()


def test_a_rewritten_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, metrics(1), metrics(2))
    tail = Tail(path)
    tail.read()
    write(path, metrics(1), metrics(2, reward=9.9), metrics(3), mode="w")
    void, records = tail.read()
    assert void
    assert [record["round"] for record in records] == [1, 2, 3]


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, metrics(1))
    tail = Tail(path)
    tail.read()
    path.rename(tmp_path / "m.jsonl.1")
    assert tail.read() == (True, [])
    assert tail.read() == (False, [])
    write(path, metrics(7))
    assert [record["round"] for record in tail.read()[1]] == [7]
    write(tmp_path / "next", metrics(8), metrics(9))
    (tmp_path / "next").replace(path)
    void, records = tail.read()
    assert void
    assert [record["round"] for record in records] == [8, 9]


def test_damaged_lines_are_left_out_and_numbered(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\nnonsense\n[1]\n\xff\xfe\n{"a": NaN}\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    tail = Tail(path)
    assert tail.read() == (False, [{"a": 1}, {"a": 2}])
    assert tail.damaged == [2, 3, 4, 5, 6]


def test_an_endless_line_is_skipped_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailing, "CHUNK", 100)
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 350 + b'\n{"a": 2}\n')
    tail, records = Tail(path), []
    for _ in range(10):
        records += tail.read()[1]
    assert records == [{"a": 1}, {"a": 2}]
    assert tail.damaged == [2]


def test_only_a_file_s_end_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, *(metrics(round) for round in range(100)))
    _, records = Tail(path, last=200).read()
    assert 1 <= len(records) <= 3
    assert records[-1]["round"] == 99
    exactly = len((json.dumps(metrics(99)) + "\n").encode())
    assert [record["round"] for record in Tail(path, last=exactly).read()[1]] == [99]


# ----------------------------------------------------------------- a run


def test_key_figures_equal_the_files() -> None:
    run = make_run(rounds=40)
    own = {"swarm/groups_own": 4.0, "swarm/groups_used": 3.0, "swarm/peers": 2.0, "perf/generated_tok_s": 100.0}
    write(run.metrics, metrics(41, **own), metrics(42, **own | {"swarm/groups_used": 1.0}))
    summary = seen(run).summary(now=1042.0)
    assert (summary["rounds"], summary["of"], summary["peers"]) == (42, 9, 2.0)
    assert summary["reward_first"] == pytest.approx((0.01 + 0.02 + 0.03 + 0.04) / 4)
    assert summary["reward_last"] == pytest.approx((0.39 + 0.40 + 0.41 + 0.42) / 4)
    assert (summary["own"], summary["foreign"], summary["tok_s"]) == (8.0, 4.0, 100.0)
    assert (summary["seconds"], summary["ended_at"]) == (42.0, 1042.0)
    assert summary["problems"] == []


def test_a_run_s_state_follows_its_files() -> None:
    run = make_run(rounds=0)
    assert seen(run).state(1000.0) == "unclear"
    with RunDir.open(run.path):
        view = seen(run)
        assert view.state(1000.0) == "starting"
        write(run.metrics, metrics(1, step_time=20.0))
        view.refresh()
        assert view.state(1000.0 + 75) == "training"
        assert view.state(1000.0 + 100) == "waiting"
        crew = {"lead": {"peer": "a"}, "whole": True, "held": [1]}
        run.write_status({"time": 1100.0, "peer": "b", "crew": crew})
        view.refresh()
        assert view.state(1101.0) == "serving"
        run.write_status({"time": 1100.0, "peer": "b", "crew": crew | {"whole": False}})
        view.refresh()
        assert view.state(1101.0) == "waiting"
    view.refresh()
    (run.path / "lock").write_text("17\nof another machine\n")
    view.refresh()
    for now, state, over in ((1159.0, "unclear", False), (1181.0, "killed", True)):  # after four rounds of 20 s
        summary = view.summary(now)
        assert (summary["state"], summary["over"], "go on" in summary["commands"]) == (state, over, over)
    assert summary["ended"] == "killed or crashed {ago}, or the machine went down"
    assert Gallery([]).list()[0]["end"] == "killed"
    write(run.events, {"time": 900.0, "kind": "stop", "text": "stopping"})  # the clock was set back
    view.refresh()
    assert (view.state(1200.0), view.summary(1200.0)["ended"]) == ("ended", "ended {ago}")


def test_a_paused_run_is_paused_and_says_why() -> None:
    run = make_run()
    run.write_status({"time": 1100.0, "peer": "b", "sent": {}, "paused": "quiet hours, 22:00-07:00"})
    assert seen(run).state(1161.0) == "killed"
    with RunDir.open(run.path):
        os.utime(run.path / "lock", (1, 1))  # its files are of this start
        view = seen(run)
        assert view.summary(1101.0)["state"] == "paused"
        assert view.summary(1101.0)["paused"] == "quiet hours, 22:00-07:00"
        assert view.state(1131.0) == "waiting"  # the sentence is stale
        run.write_status({"time": 1100.0, "peer": "b", "sent": {}, "paused": ""})
        view.refresh()
        assert view.summary(1005.0)["state"] == "training"
        assert view.summary(1005.0)["paused"] is None


def test_a_lone_paused_run_says_why() -> None:
    run = make_run()
    with RunDir.open(run.path) as held:
        view = seen(run)
        assert view.state(1005.0) == "starting", "its files are of the start before"
        os.utime(run.path / "lock", (1, 1))
        assert view.state(1005.0) == "training"
        held.write_waits("quiet hours, 22:00-07:00")
        view.refresh()
        assert view.summary(1005.0)["state"] == "paused"
        assert view.summary(1005.0)["paused"] == "quiet hours, 22:00-07:00"
    view.refresh()
    assert view.state(1005.0) == "killed", "its process was one of this machine"


def test_an_ended_run_s_lock_is_left_alone() -> None:
    run = make_run()
    write(run.events, {"time": 1003.0, "kind": "stop", "text": "stopping"})
    with RunDir.open(run.path):
        pass
    view = seen(run)
    assert view.state(1000.0) == "ended"
    with open(run.path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        view.refresh()
        assert view.state(1000.0) == "ended"
        os.utime(run.path / "lock", ns=(1, 1))
        view.refresh()
        assert view.state(1000.0) == "training"
    view.refresh()
    assert view.state(1000.0) == "ended"


def test_damage_is_named_and_costs_nothing_else() -> None:
    run = make_run()
    with open(run.metrics, "a") as file:
        file.write('broken\n{"round": 4, "time": 1004.0, "reward": 0.5}\n{"round": 5, "ti')
    run.status.write_text('{"half')
    run.config.write_text("rounds = ")
    view = seen(run)
    summary = view.summary(0.0)
    assert summary["rounds"] == 4
    assert summary["problems"] == [
        f"{run.config} is damaged and is left out",
        f"{run.status} is damaged and is left out",
        f"line 4 of {run.metrics} is no record and is left out",
    ]
    write(run.events, *({"text": "x" * 1000} for _ in range(600)))
    with open(run.events, "a") as file:
        file.write("broken\nand more\n")
    run.config.write_text("rounds = 8")
    run.write_status({"time": 5.0, "peers": {}})
    view.refresh()
    summary = view.summary(0.0)
    assert summary["of"] == 8
    assert summary["problems"] == [
        f"line 4 of {run.metrics} is no record and is left out",
        f"line 602 of {run.events} and 1 more are no records and are left out",
    ]
    assert (
        f"a line near the end of {run.events} and 1 more are no records and are left out"
        in seen(run).summary(0.0)["problems"]
    )
    assert view.status == {"time": 5.0, "peers": {}}


def test_status_and_events_are_bounded() -> None:
    run = make_run()
    run.write_status(
        {"name": "x" * 10**6, "peers": {str(i): {"a": {}} for i in range(10**4)}, "deep": [[[[[[[[[[1]]]]]]]]]]}
    )
    write(run.events, *({"time": i, "kind": "note", "text": "y" * 9000} for i in range(400)))
    view = seen(run)
    assert view.status is not None
    assert len(json.dumps(view.status)) < 30_000
    assert len(view.events) <= 300
    assert all(len(event["text"]) <= 4000 for event in view.events)


@pytest.mark.parametrize(
    ("traffic", "restarted", "said"),
    [
        (
            {"restarts/gossip": 3.0, "restarts/dht": 1.0},
            {"gossip": "grown to 513 MiB, 20 of them for 203.0.113.9", "dht": "exit code 2"},
            [
                "gossip process started again 3 times, last because it ended: grown to 513 MiB, 20 of them for "
                "203.0.113.9",
                "p2pd started again once, because it ended: exit code 2",
            ],
        ),
        ({"restarts/gossip": 0.0}, {}, []),
        ({"restarts/gossip": "9", "restarts/dht": 1e300}, [], []),
        ({"restarts/gossip": 1}, {"gossip": ["x"]}, ["gossip process started again once"]),
        (None, 7, []),
    ],
)
def test_restarts_of_the_network_are_said(traffic: object, restarted: object, said: list[str]) -> None:
    run = make_run()
    run.write_status({"time": 5.0, "peers": {}, "traffic": traffic, "restarted": restarted, "restarts": "made up"})
    view = seen(run)
    assert view.status is not None and view.status.get("restarts", []) == said


def test_a_crew_s_name_is_not_shown() -> None:
    run = make_run(config='[pipeline]\ncrew = "home sweet"\n')
    run.write_status({"time": 1.0, "crew": {"name": "home sweet", "whole": True}})
    write(
        run.events,
        {"time": 2.0, "kind": "link", "text": "swarm-node join 'swarm://a' --stages 2 --crew 'home sweet'"},
        {"time": 3.0, "kind": "note", "text": "crew home sweet waits for 1 more peer"},
    )
    view = seen(run)
    shown = json.dumps([view.status, list(view.events), view.summary(0.0)])
    assert "home sweet" not in shown
    assert [event["text"] for event in view.events][1:] == [
        "swarm-node join 'swarm://a' --stages 2 --crew …",
        "crew … waits for 1 more peer",
    ]


# ----------------------------------------------------------------- which runs


def test_active_then_newest_runs_are_listed() -> None:
    for age, name in enumerate(["b", "a", "c"]):
        run = make_run(f"runs/{name}")
        os.utime(run.config, (1000 - age, 1000 - age))
    Path("runs/other").mkdir()
    gallery = Gallery([])
    with RunDir.open("runs/c"):
        assert [each["id"] for each in gallery.list()] == ["c", "b", "a"]
    late = make_run("runs/late")
    os.utime(late.config, (2000, 2000))
    assert set(gallery.runs()) == {"a", "b", "c", "late"}


def test_bootstraps_are_listed_after_trainers() -> None:
    make_run("runs/alice")
    boot = make_run("runs/bootstrap", rounds=0)
    boot.write_status({"role": BOOTSTRAP, "time": 1100.0, "peers": {}})
    with RunDir.open("runs/alice") as alice, RunDir.open(boot.path):
        os.utime(alice.path / "lock", (1000, 1000))
        alice.write_waits("quiet hours, 22:00-07:00")
        listed = Gallery([]).list()
        assert [(each["id"], each["trains"], each["paused"]) for each in listed] == [
            ("alice", True, True),
            ("bootstrap", False, False),
        ]
    assert not any(each["paused"] for each in Gallery([]).list())


def test_a_bootstrap_has_no_model() -> None:
    run = make_run(rounds=0, config='[policy]\nmodel = "starter"\n')
    assert seen(run).summary(1.0)["settings"]["model"] == "starter"
    run.write_status({"role": BOOTSTRAP, "time": 1.0, "peers": {}})
    summary = seen(run).summary(1.0)
    assert (summary["trains"], summary["settings"]["model"]) == (False, "")


def test_runs_of_one_name_are_told_apart() -> None:
    make_run("x/run")
    make_run("y/run")
    assert set(Gallery([Path("x/run"), Path("y")]).runs()) == {"run", "run (2)"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "no run below runs/: name a run directory, or start a run with `swarm-node local`"),
        ("nowhere", "nowhere is not there: name the directory of a run, or one of runs"),
        ("empty", "empty is no run and holds none: name the directory of a run (with its config.toml), or one of runs"),
    ],
)
def test_a_missing_run_is_said_in_one_line(path: str | None, message: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(UserError) as caught:
        Gallery([] if path is None else [Path(path)])
    assert str(caught.value) == message


@pytest.fixture
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "AT_MOST_EACH_S", 0.0)


@pytest.mark.usefixtures("looks_each_time")
def test_a_page_is_told_only_what_is_new() -> None:
    run = make_run(rounds=3)
    gallery, told = Gallery([]), Told()

    def now() -> dict[str, Any]:
        return dict(news(gallery, ["alice"], told))

    first = now()
    assert list(first) == ["list", "summary", "curves", "status", "config", "events", "held_out", "samples"]
    assert first["curves"]["points"]["round"]["mean"] == [1, 2, 3]
    assert now() == {}
    write(run.metrics, metrics(4))
    second = now()
    assert list(second) == ["list", "summary", "curves"]
    assert (second["curves"]["first"], second["curves"]["points"]["round"]["mean"]) == (3, [4])
    write(run.metrics, *(metrics(round) for round in range(5, POINTS + 2)))
    merged = now()["curves"]
    assert (merged["first"], merged["per_row"], len(merged["points"]["round"]["mean"])) == (0, 2, POINTS // 2 + 1)
    write(run.metrics, metrics(POINTS + 2))
    last = now()["curves"]
    assert (last["first"], last["points"]["round"]["mean"]) == (POINTS // 2, [POINTS + 2])
    run.metrics.rename(run.path / "metrics.jsonl.1")
    write(run.metrics, metrics(1))
    anew = now()["curves"]
    assert (anew["first"], anew["points"]["round"]["mean"]) == (0, [1])


def test_a_removed_run_is_told_once() -> None:
    run = make_run()
    gallery, told = Gallery([]), Told()
    dict(news(gallery, ["alice"], told))
    for file in run.path.iterdir():
        file.unlink()
    run.path.rmdir()
    assert dict(news(gallery, ["alice"], told))["gone"] == {"id": "alice"}
    assert "gone" not in dict(news(gallery, ["alice"], told))


@pytest.mark.usefixtures("looks_each_time")
def test_a_returning_run_is_told_anew() -> None:
    run, aside = make_run(), Path("aside")
    run.write_status({"time": 1.0})
    gallery, told = Gallery([Path("runs")]), Told()

    def now() -> dict[str, Any]:
        return dict(news(gallery, ["alice"], told))

    parts = {"summary", "curves", "status", "events"}
    assert parts < now().keys()
    for _ in range(2):
        run.path.rename(aside)
        assert "gone" in now()
        assert "gone" not in now()
        aside.rename(run.path)
        back = now()
        assert parts <= back.keys() and "gone" not in back
        assert back["curves"]["first"] == 0
        run.status.unlink(missing_ok=True)
    assert back["status"]["status"] is None


def test_runs_are_looked_for_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(SHOWN):
        make_run(f"runs/r{i}")
    gallery, told, scans = Gallery([]), Told(), []
    runs = gallery.runs
    monkeypatch.setattr(gallery, "runs", lambda: scans.append(1) or runs())
    monkeypatch.setattr(finding, "AT_MOST_EACH_S", 1e6)
    for _ in range(3):
        list(news(gallery, [f"r{i}" for i in range(SHOWN)], told))
    assert len(scans) == 1
    monkeypatch.setattr(finding, "AT_MOST_EACH_S", 0.0)
    list(news(gallery, [], told))
    assert len(scans) == 2


# ----------------------------------------------------------------- HTTP


def test_page_and_data_are_served_with_strict_headers() -> None:
    make_run()
    for path, type in (("/", "text/html"), ("/dashboard.js", "text/javascript"), ("/api/runs", "application/json")):
        answer = client().get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(type)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    document = client().get("/api/runs/alice").json()
    assert document["summary"]["rounds"] == 3
    assert document["curves"]["points"]["reward"]["mean"] == [0.01, 0.02, 0.03]
    assert document["events"][0]["text"] == "it begins"
    for path in ("/api/runs/nobody", "/api/runs/../alice/config.toml", "/config.toml", "/../view.py", "/static/"):
        assert client().get(path).status_code == 404


def test_the_page_loads_nothing_and_sets_no_html() -> None:
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\binnerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\s*\(", text), (
            file
        )


def test_it_only_shows() -> None:
    make_run()
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client().request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "LOCALHOST"])
def test_this_machine_may_be_called_by_its_names(host: str) -> None:
    make_run()
    assert client().get("/api/runs", headers={"host": f"{host}:9"}).status_code == 200
    assert client().get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:31380", "127.0.0.1.evil.example", "", "localhost:x"])
def test_foreign_host_names_are_refused(host: str) -> None:
    make_run()
    answer = client().get("/api/runs", headers={"host": host})
    assert answer.status_code == 403
    assert "alice" not in answer.text


def test_only_the_token_opens_the_page() -> None:
    make_run()
    asking = client(hosts=None, token="secret-token", host="node.example")
    for given in ("/", "/api/runs", "/api/stream", "/?token=", "/?token=wrong", "/?token=s%E9cret"):
        answer = asking.get(given)
        assert answer.status_code == 401
        assert answer.headers["content-security-policy"]
    assert asking.get("/api/runs", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert asking.get("/api/runs", headers={"authorization": "Bearer secret-token"}).status_code == 200
    assert asking.get("/api/runs", headers={"cookie": "swarm_node_dashboard_31380=wrong"}).status_code == 401
    entered = asking.get("/?token=secret-token")
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert {"httponly", "samesite=lax"} <= set(entered.headers["set-cookie"].lower().split("; "))
    assert asking.get("/api/runs").status_code == 200  # by the cookie


def test_a_quiet_connection_hears_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    make_run()
    monkeypatch.setattr(answering, "FILES_CHECK_S", 0.0)
    monkeypatch.setattr(answering, "PAGE_ALIVE_S", 0.0)
    looks = iter([False, False, False, True])
    app = make_app(Gallery([]), LOCAL_NAMES, None, stopping=lambda: next(looks))
    lines = iter(TestClient(app, base_url="http://127.0.0.1").get("/api/stream?run=alice").text.splitlines())
    assert list(events(lines))[-2:] == [("alive", {})] * 2


def test_a_refusal_ends_the_connection() -> None:
    make_run()
    assert client().post("/api/runs").headers["connection"] == "close"
    assert client(host="evil.example").get("/").headers["connection"] == "close"
    assert client(token="secret-token").get("/").headers["connection"] == "close"


# ----------------------------------------------------------------- the command


@contextmanager
def dashboard(*arguments: str) -> Iterator[tuple[str, Any]]:
    """The address it prints, and the process."""
    command = [sys.executable, "-m", "swarm_node", "dashboard", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def test_a_new_round_arrives_and_ctrl_c_ends() -> None:
    run = make_run()
    with dashboard("--port", "0") as (url, process):
        with httpx.stream("GET", f"{url}api/stream?run=alice", timeout=60) as answer:
            told = events(answer.iter_lines())
            kinds = [kind for kind, _ in (next(told) for _ in range(8))]
            assert kinds == ["list", "summary", "curves", "status", "config", "events", "held_out", "samples"]
            with open(run.metrics, "a") as file:
                file.write('{"round": 4, "time": 1004.0, ')
                file.flush()
                file.write('"reward": 0.75}\n')
            curves = next(message for kind, message in told if kind == "curves")
            assert (curves["first"], curves["points"]["reward"]["mean"]) == (3, [0.75])
            process.send_signal(2)
            assert list(told) == []
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""


def test_other_addresses_need_a_token() -> None:
    make_run()
    with dashboard("--port", "0", "--host", "0.0.0.0") as (url, _):
        match = re.fullmatch(r"http://[^/]+:(\d+)/\?token=([\w-]{32})", url)
        assert match
        here = f"http://127.0.0.1:{match[1]}/api/runs"
        assert httpx.get(here).status_code == 401
        assert httpx.get(here, headers={"authorization": f"Bearer {match[2]}"}).status_code == 200


def is_closed_while_bytes_come(connection: socket.socket) -> bool:
    connection.settimeout(0.3)
    for _ in range(200):
        try:
            connection.sendall(b"x")
            if not connection.recv(1):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_idle_connections_shut_nobody_out() -> None:
    run, half = make_run(), b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n"
    with dashboard("--port", "0") as (url, _), httpx.stream("GET", f"{url}api/stream?run=alice", timeout=60) as answer:
        told = events(answer.iter_lines())
        address = "127.0.0.1", int(re.findall(r":(\d+)/", url)[0])
        strangers = [socket.create_connection(address, timeout=60) for _ in range(CONNECTIONS + 6)]
        for number, stranger in enumerate(strangers):
            if number % 3:
                stranger.sendall(half)
        strangers[0].sendall(half + b"\r\n" + half)  # one whole request before
        assert is_closed_while_bytes_come(strangers[1])
        for stranger in strangers:
            with suppress(ConnectionResetError):
                while stranger.recv(1 << 16):
                    pass
            stranger.close()
        assert httpx.get(f"{url}api/runs").status_code == 200
        write(run.metrics, metrics(4))
        assert next(message["rounds"] for kind, message in told if kind == "curves" and message["first"]) == 4


def test_a_port_in_use_is_explained_or_avoided() -> None:
    make_run()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^port {port} is in use: choose another with --port, or --port 0 for any"):
            serve([], "127.0.0.1", port, print)
    with pytest.raises(UserError, match="^--host nowhere.invalid is no address of this machine"):
        serve([], "nowhere.invalid", 0, print)
    with pytest.raises(
        UserError, match="^cannot listen on 192.0.2.1: .*; choose an address of this machine with --host"
    ):
        serve([], "192.0.2.1", 0, print)
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            first.bind(("127.0.0.1", PORT))
            first.listen()
        except OSError:
            pass  # somebody has it: just as well
        with dashboard() as (url, _):
            assert PORT < int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", url)[1]) < PORT + 20  # type: ignore[index]


@pytest.mark.usefixtures("looks_each_time")
def test_looks_from_many_threads_agree() -> None:
    run, gallery, together = make_run(rounds=1), Gallery([Path("runs")]), threading.Barrier(5)

    def look() -> list[int]:
        found = []
        for _ in range(2, 60):
            together.wait()
            view = gallery.view("alice")
            assert view is not None
            found.append(view.curves.rounds)
        return found

    with ThreadPoolExecutor(4) as pool:
        looks = [pool.submit(look) for _ in range(4)]
        for round in range(2, 60):
            together.wait()
            write(run.metrics, metrics(round))
    assert all(look.result() == sorted(look.result()) for look in looks)
    view = gallery.view("alice")
    assert view is not None
    assert view.curves.points()["round"]["mean"] == list(range(1, 60))


def test_selecting_more_runs_than_fit_shows_the_first() -> None:
    for i in range(SHOWN + 2):
        make_run(f"runs/r{i}")
    told = list(news(Gallery([]), [f"r{i}" for i in range(SHOWN + 2)], Told()))
    assert len([kind for kind, _ in told if kind == "curves"]) == SHOWN
