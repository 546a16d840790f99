from __future__ import annotations

import math
import re
import socket
from http.client import HTTPConnection

import pytest

from swarm_node.errors import UserError
from swarm_node.observability.health import MAX_REQUESTS, Health, main, metric_name, serving

SAMPLE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]* (-?[0-9.]+(e[+-]?[0-9]+)?|NaN|[+-]Inf)")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def get(port: int, path: str) -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def rounds(health: Health, clock: Clock, count: int, seconds: float) -> None:
    for number in range(1, count + 1):
        clock.now += seconds
        health.write(number, {"reward": 0.5})


def test_who_trains_is_healthy_and_who_merely_runs_is_not() -> None:
    clock = Clock()
    health = Health(clock=clock)
    clock.now += 9
    assert health.verdict() == (False, "starting for 9 s: no round has ended yet")
    rounds(health, clock, 3, 2.0)
    clock.now += 120
    assert health.verdict() == (True, "round 3 ended 120 s ago")
    clock.now += 1
    assert health.verdict() == (False, "no round has ended for 121 s; before that, one took 2.0 s at most")
    health.write(4, {})
    assert health.verdict()[0]


def test_slow_rounds_have_more_time() -> None:
    clock = Clock()
    health = Health(clock=clock)
    rounds(health, clock, 20, 60.0)
    clock.now += 600
    assert health.verdict()[0]
    clock.now += 1
    assert not health.verdict()[0]


def test_to_wait_for_others_of_the_crew_is_healthy_and_to_leave_is_not() -> None:
    health = Health()
    health.waiting = lambda: "stage 1 is missing"
    assert health.verdict() == (True, "waiting: stage 1 is missing")
    health.leaving = True
    assert health.verdict() == (False, "leaving")


def test_it_is_answered_over_http() -> None:
    health = Health()
    with serving(health, "127.0.0.1", 0) as port:
        status, kind, text = get(port, "/healthz")
        assert (status, kind) == (503, "text/plain; charset=utf-8") and "no round has ended yet" in text
        assert get(port, "/metrics")[2] == "# TYPE swarm_node_training gauge\nswarm_node_training 0.0\n"
        health.write(7, {"reward": 0.25, "swarm/rejected/age": 3, "kl": math.nan, "reward/gcd": -math.inf})
        assert get(port, "/healthz")[:1] == (200,)
        status, kind, text = get(port, "/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert get(port, "/../etc/passwd")[0] == 404
    lines = text.splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples)
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == [line.split()[0] for line in samples]
    assert {"swarm_node_round 7.0", "swarm_node_reward 0.25", "swarm_node_swarm_rejected_age 3.0"} < set(samples)
    assert {"swarm_node_kl NaN", "swarm_node_reward_gcd -Inf", "swarm_node_training 1.0"} < set(samples)
    with pytest.raises(OSError):
        get(port, "/healthz")


def test_names_that_differ_in_signs_only_are_one() -> None:
    health = Health()
    health.write(1, {"a/b": 1.0, "a.b": 2.0})
    assert metric_name("a/b") == metric_name("a.b") == "swarm_node_a_b"
    assert health.metrics().count("\nswarm_node_a_b ") == 1


def test_those_who_ask_and_then_say_nothing_do_not_keep_others_out_for_good() -> None:
    with serving(Health(), "127.0.0.1", 0) as port:
        silent = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(2 * MAX_REQUESTS)]
        ended = 0
        for connection in silent[MAX_REQUESTS:]:  # one more than may wait is turned away at once
            ended += connection.recv(1) == b""
        assert ended == MAX_REQUESTS
        for connection in silent:
            connection.close()
        for _ in range(100):
            try:
                assert get(port, "/healthz")[0] == 503
                break
            except OSError:  # until the threads have seen that they are gone
                continue
        else:
            raise AssertionError("nobody is answered any more")


def test_a_port_that_is_taken_is_the_users_to_mend() -> None:
    with serving(Health(), "127.0.0.1", 0) as port:
        with pytest.raises(UserError, match="choose another --health-port"):
            with serving(Health(), "127.0.0.1", port):
                pass


def test_the_check_of_a_container_asks_the_node_of_its_machine(
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
