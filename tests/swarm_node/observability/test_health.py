from __future__ import annotations

import math
import re
import socket
import threading
import time
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from swarm_node.config import load_config
from swarm_node.errors import UserError
from swarm_node.observability.health import MAX_REQUESTS, Health, main, metric_name, serving
from swarm_node.runtime.console import Console
from swarm_node.storage.rundir import RunDir
from tests.support.ports import free_port
from tests.support.virtual_time import VirtualTime

SAMPLE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*({[a-z]+=\"[a-z]+\"})? (-?[0-9.]+(e[+-]?[0-9]+)?|NaN|[+-]Inf)")


def get(port: int, path: str) -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def rounds(health: Health, clock: VirtualTime, count: int, seconds: float) -> None:
    for number in range(1, count + 1):
        clock.now += seconds
        health.write(number, {"reward": 0.5})


def test_only_a_node_that_trains_is_healthy() -> None:
    clock = VirtualTime()
    health = Health(clock=clock)
    clock.now += 9
    assert health.verdict() == (False, "starting for 9 s: no round has ended yet")
    rounds(health, clock, 3, 2.0)
    clock.now += 120
    assert health.verdict() == (True, "round 3 ended 120 s ago")
    clock.now += 1
    assert health.verdict() == (False, "no round has ended for 121 s; before that, one took 2.0 s at most")
    health.write(4, {})
    health.trouble = lambda: "checkpoint of round 4: disk full"
    assert health.verdict() == (True, "round 4 ended 0 s ago; checkpoint of round 4: disk full")


def test_slow_rounds_have_more_time() -> None:
    clock = VirtualTime()
    health = Health(clock=clock)
    rounds(health, clock, 20, 60.0)
    clock.now += 600
    assert health.verdict()[0]
    clock.now += 1
    assert not health.verdict()[0]


def test_only_a_stuck_node_is_not_alive() -> None:
    clock, why = VirtualTime(), ""
    health = Health(clock=clock)
    health.waiting = lambda: why
    clock.now += 7 * 24 * 3600
    assert health.alive() == (True, health.verdict()[1]), "a large model may load for long"
    rounds(health, clock, 3, 2.0)
    clock.now += 1800
    assert not health.verdict()[0] and health.alive()[0]
    clock.now += 1
    assert health.alive() == (False, "stuck: no round has ended for 1801 s")
    why = "paused: quiet hours"
    assert health.alive() == (True, "waiting: paused: quiet hours")
    health.leaving = True
    assert health.alive() == (True, "leaving")


def test_slow_rounds_are_alive_for_longer() -> None:
    clock = VirtualTime()
    health = Health(clock=clock)
    rounds(health, clock, 3, 600.0)
    clock.now += 100 * 600
    assert health.alive()[0]
    clock.now += 1
    assert not health.alive()[0]


def test_waiting_for_the_crew_is_healthy_leaving_not() -> None:
    health = Health()
    health.waiting = lambda: "stage 1 is missing"
    assert health.verdict() == (True, "waiting: stage 1 is missing")
    health.leaving = True
    assert health.verdict() == (False, "leaving")


def test_waiting_is_told_from_training() -> None:
    health, why = Health(), ""
    health.waiting = lambda: why
    health.write(1, {})

    def gauges() -> list[str]:
        lines = health.metrics().splitlines()
        return [line for line in lines if line.startswith(("swarm_node_training", "swarm_node_waiting"))]

    assert gauges() == ["swarm_node_training 1.0", "swarm_node_waiting 0.0"]
    why = "paused: quiet hours, 22:00-07:00"
    assert gauges() == ["swarm_node_training 1.0", "swarm_node_waiting 1.0"]
    health.leaving = True
    assert gauges() == ["swarm_node_training 0.0", "swarm_node_waiting 0.0"]


def test_waits_count_as_neither_silence_nor_rounds() -> None:
    clock = VirtualTime()
    health = Health(clock=clock)
    why = ""
    health.waiting = lambda: why
    rounds(health, clock, 5, 2.0)
    why = "paused: quiet hours"
    clock.now += 9 * 3600
    assert health.verdict() == (True, "waiting: paused: quiet hours")
    why = ""
    assert health.verdict() == (True, "round 5 ended 32400 s ago")
    clock.now += 120
    assert health.verdict()[0]
    clock.now += 1
    assert health.verdict() == (False, "no round has ended for 121 s; before that, one took 2.0 s at most")
    health.write(6, {})
    clock.now += 24 * 3600
    assert health.verdict() == (False, "no round has ended for 86400 s; before that, one took 121.0 s at most")


def test_waits_are_noticed_also_if_nobody_asks() -> None:
    clock = VirtualTime()
    health = Health(clock=clock)
    rounds(health, clock, 2, 2.0)
    looked, why = threading.Event(), "for the others of the crew"

    def waiting() -> str:
        looked.set()
        return why

    health.waiting = waiting
    with serving(health, "127.0.0.1", 0) as port:
        for _ in range(2):
            looked.clear()
            assert looked.wait(60)
        clock.now += 3600
        for _ in range(2):
            looked.clear()
            assert looked.wait(60)
        why = ""
        looked.clear()
        assert looked.wait(60)
        assert get(port, "/healthz")[2] == "round 2 ended 3600 s ago\n"


def test_it_is_answered_over_http() -> None:
    before = time.time()
    health = Health()
    with serving(health, "127.0.0.1", 0) as port:
        status, kind, text = get(port, "/healthz")
        assert (status, kind) == (503, "text/plain; charset=utf-8") and "no round has ended yet" in text
        assert get(port, "/livez")[0] == 200
        beginning, started = get(port, "/metrics")[2].split("swarm_node_start_time_seconds gauge\n")
        first, at, rest = started.partition("\n")
        assert before <= float(first.removeprefix("swarm_node_start_time_seconds ")) <= time.time() and at
        assert "Unix time, in seconds, at which this process began its run." in beginning
        assert rest == (
            "# HELP swarm_node_training Whether it does what it is for, as /healthz says: 1 or 0.\n"
            "# TYPE swarm_node_training gauge\nswarm_node_training 0.0\n"
            "# HELP swarm_node_waiting Whether it is paused, or waits for others of its crew: 1 or 0. While it does, "
            "training is 1 as well.\n# TYPE swarm_node_waiting gauge\nswarm_node_waiting 0.0\n"
        )
        rejected = {"swarm/rejected/size": 2, "swarm/rejected/age": 3}
        health.write(7, {"reward": 0.25, "kl": math.nan, "reward/gcd": -math.inf, **rejected})
        assert get(port, "/healthz")[:1] == (200,)
        status, kind, text = get(port, "/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert get(port, "/../etc/passwd")[0] == 404
    lines = text.splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples)
    families = list(dict.fromkeys(line.partition(" ")[0].partition("{")[0] for line in samples))
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == families
    assert {"swarm_node_round 7.0", "swarm_node_reward 0.25"} < set(samples)
    assert [line for line in samples if "rejected" in line] == [
        'swarm_node_swarm_rejected_total{reason="size"} 2.0',
        'swarm_node_swarm_rejected_total{reason="age"} 3.0',
    ]
    assert {"swarm_node_kl NaN", 'swarm_node_task_reward{task="gcd"} -Inf', "swarm_node_training 1.0"} < set(samples)
    with pytest.raises(OSError):
        get(port, "/healthz")


def test_held_out_figures_stay_until_newer_ones() -> None:
    health = Health()
    for round, numbers in enumerate([{"eval/pass_1": 0.25, "kl": 1.0}, {}, {"eval/pass_1": 0.5}], start=1):
        health.write(round, numbers)
        shown = health.metrics()
        assert f"swarm_node_eval_pass_1 {0.5 if round == 3 else 0.25}" in shown
        assert ("swarm_node_kl" in shown) == (round == 1)


def test_names_that_differ_in_signs_only_are_one() -> None:
    health = Health()
    health.write(1, {"a/b": 1.0, "a.b": 2.0})
    assert metric_name("a/b") == metric_name("a.b") == "swarm_node_a_b"
    assert health.metrics().count("\nswarm_node_a_b ") == 1


def test_idle_connections_keep_nobody_out() -> None:
    with serving(Health(), "127.0.0.1", 0) as port, ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(4 * MAX_REQUESTS)
        ]
        for _ in range(3):
            assert get(port, "/healthz")[0] == 503
        assert all(connection.recv(1) == b"" for connection in idle[: 3 * MAX_REQUESTS])  # the oldest made way


def test_a_request_that_trickles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.observability.health.REQUEST_S", 0.5)
    with serving(Health(), "127.0.0.1", 0) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(0.1)
        for _ in range(600):  # ten bytes a second: no single wait for a byte lasts half a second
            with suppress(TimeoutError):
                try:
                    slow.sendall(b"G")
                    ended = slow.recv(1) == b""
                except ConnectionError:
                    ended = True
                if ended:
                    return
        raise AssertionError("it is still open")


HOSTS = {
    "127.0.0.1:31390": 200,
    "localhost:80": 200,
    "LOCALHOST": 200,
    "[::1]:31390": 200,
    "10.42.0.7": 200,
    "node1.lan:31390": 200,
    "page.example:31390": 403,
    "localhost.page.example": 403,
    "127.0.0.1.page.example": 403,
    "node1": 403,
    "": 403,
}


def test_only_expected_names_are_answered() -> None:
    health = Health()
    health.identify("alice", "ab" * 32)
    health.write(1, {})

    def asked(port: int, header: str, path: str) -> tuple[int, str]:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n{header}\r\n".encode())
            text = connection.makefile().read()
            return int(text.split()[1]), text

    with serving(health, "127.0.0.1", 0, ["Node1.lan"]) as port:
        for path in ("/metrics", "/healthz", "/livez"):
            assert {host: asked(port, f"Host: {host}\r\n", path)[0] for host in HOSTS} == HOSTS
        assert "swarm_node_" not in asked(port, "Host: page.example\r\n", "/metrics")[1]
        assert asked(port, "", "/healthz")[0] == 200, "a probe of HTTP/1.0 names no host, a browser always does"
    with serving(health, "127.0.0.1", 0, ["*"]) as port:
        assert asked(port, "Host: anything.example\r\n", "/healthz")[0] == 200


def test_a_taken_port_is_a_user_error() -> None:
    with serving(Health(), "127.0.0.1", 0) as port:
        with pytest.raises(UserError, match="choose another --health-port"):
            with serving(Health(), "127.0.0.1", port):
                pass


def test_the_container_check_asks_its_machine_s_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    health = Health()
    with serving(health, "127.0.0.1", 0) as port:
        monkeypatch.setenv("SWARM_NODE_HEALTH_PORT", str(port))
        assert main() == 1
        health.write(1, {})
        assert main() == 0
    assert main() == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("starting") and out[1].startswith("round 1 ended") and out[2].startswith("no answer")


@pytest.mark.parametrize("port", ["http", "65536", "-1", "31390.0", "\u0663"])
def test_a_port_that_is_none_is_one_line(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_NODE_HEALTH_PORT", port)
    assert main() == 1
    told = capsys.readouterr().out
    assert told == f"SWARM_NODE_HEALTH_PORT = {port!r} is no TCP port: give a number from 1 to 65535\n"


@pytest.mark.parametrize("variable", ["SWARM_NODE_HEALTH_PORT", "SWARM_NODE_HEALTH__PORT"])
def test_a_node_told_to_answer_nobody_is_healthy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "0")
    assert main() == 0


@pytest.mark.parametrize("way", ["--health-port", "SWARM_NODE_HEALTH__PORT", "SWARM_NODE_SET"])
def test_the_check_finds_the_port_whatever_set_it(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    image = {"SWARM_NODE_RUN_DIR": str(tmp_path / "run"), "SWARM_NODE_HEALTH_PORT": str(free_port())}
    more = {"SWARM_NODE_HEALTH__PORT": str(port), "SWARM_NODE_SET": f"health.port={port}"}
    env = image | {name: value for name, value in more.items() if name == way}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    config = load_config(env=env, flags={"health_port": port if way == "--health-port" else None})
    assert config.health.port == port
    with ExitStack() as stack:
        screen = Console(config, stack.enter_context(RunDir.open(config.directory)), True, stack)
        assert main() == 1
        screen.health.write(1, {})
        assert main() == 0
    off = load_config(env=image, flags={"health_port": 0})
    with ExitStack() as stack:
        Console(off, stack.enter_context(RunDir.open(off.directory)), True, stack)
        assert main() == 0
    assert not (tmp_path / "run/health.json").exists()
    (tmp_path / "run/health.json").write_text('{"listen": "127.0.0.1"}')  # as of another version
    assert main() == 1, "the environment's, where nobody answers"
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("starting") and told[1].startswith("round 1 ended")
    assert told[2] == "health.port is 0: nobody is answered" and "no answer at 127.0.0.1" in told[3]


@pytest.mark.parametrize("answers", [False, True])
def test_a_killed_nodes_last_word_is_not_believed(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health()
    health.write(1, {})
    monkeypatch.setenv("SWARM_NODE_RUN_DIR", str(tmp_path))
    file = tmp_path / "health.json"
    with serving(health, "127.0.0.1", 0) as port:
        with RunDir.open(tmp_path) as run, run.answering("127.0.0.1", port if answers else 0):
            said = file.read_text()
            assert main() == 0
        file.write_text(said)  # as if it had been killed
        monkeypatch.setenv("SWARM_NODE_HEALTH_PORT", str(free_port()))
        assert main() == 1, "nobody runs: the environment's"
        with RunDir.open(tmp_path):
            assert not file.exists()
            assert main() == 1, "the next one has not said anything yet: likewise"


def test_the_check_asks_where_the_node_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    health = Health()
    health.write(1, {})
    with serving(health, "127.0.0.2", 0) as port:  # as an address of the local network
        monkeypatch.setenv("SWARM_NODE_HEALTH_PORT", str(port))
        assert main() == 1
        monkeypatch.setenv("SWARM_NODE_HEALTH__LISTEN", "127.0.0.2")
        assert main() == 0
    with serving(health, "0.0.0.0", 0) as port:
        monkeypatch.setenv("SWARM_NODE_HEALTH_PORT", str(port))
        monkeypatch.setenv("SWARM_NODE_HEALTH__LISTEN", "0.0.0.0")
        assert main() == 0
    assert "127.0.0.1" in capsys.readouterr().out.splitlines()[0]
