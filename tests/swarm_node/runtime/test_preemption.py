"""What clouds say of taking a machine back: their documented answers, from services on this machine."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_node.config.machine import SpotConfig
from swarm_node.errors import StopRequested
from swarm_node.observability.health import Measures
from swarm_node.runtime.preemption import (
    AZURE_TAG,
    CLOUDS,
    MAX_BYTES,
    Notice,
    detect,
    reach,
    service,
    stopper,
    watch_cloud,
)
from tests.support.cloud_metadata import (
    ACTION,
    EVENTS,
    NAME,
    PREEMPTED,
    REBALANCE,
    Answer,
    MetadataService,
    metadata_service,
)
from tests.support.waiting import until

NOW = 1_505_722_800.0  # 2017-09-18T08:20:00Z
HANGS_S = 100.0
"""Nothing takes so long, unless it hangs."""


def look(server: MetadataService, now: float = NOW) -> Notice | None:
    ask = service(server.endpoint)
    return CLOUDS[server.cloud](ask).look() if server.cloud == "gcp" else CLOUDS[server.cloud](ask, lambda: now).look()  # type: ignore[call-arg]


def event(
    kind: str = "Preempt",
    when: str = "Mon, 18 Sep 2017 08:20:25 GMT",
    machines: list[str] | None = None,
    status: str = "Scheduled",
) -> Answer:
    listed = {
        "EventId": "f020ba2e-3bc0-4c40-a10b-86575a9eabd5",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["FrontEnd_IN_0"] if machines is None else machines,
        "EventStatus": status,
        "NotBefore": when,
        "EventSource": "Platform",
    }
    return 200, json.dumps({"DocumentIncarnation": 1, "Events": [listed]}).encode()


@pytest.mark.parametrize(
    ("cloud", "answers", "left_s"),
    [
        ("aws", {}, None),
        ("aws", {ACTION: (200, b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}')}, 120),
        ("aws", {ACTION: (200, b'{"action": "terminate", "time": "2017-09-18T08:20:31Z"}')}, 31),
        ("aws", {ACTION: (200, b'{"action": "terminate", "time": "2017-09-18T08:19:00Z"}')}, 10),
        ("aws", {ACTION: (200, b'{"action": "terminate", "time": "soon"}')}, 10),
        ("aws", {REBALANCE: (200, b'{"noticeTime": "2017-09-18T08:19:00Z"}')}, math.inf),
        ("gcp", {PREEMPTED: (200, b"FALSE")}, None),
        ("gcp", {PREEMPTED: (200, b"TRUE")}, 30),
        ("azure", {EVENTS: (200, b'{"DocumentIncarnation": 1, "Events": []}')}, None),
        ("azure", {EVENTS: event()}, 25),
        ("azure", {EVENTS: event("Terminate")}, 25),
        ("azure", {EVENTS: event("Reboot")}, None),
        ("azure", {EVENTS: event(when="")}, 10),  # blank for an event that has begun
        ("azure", {EVENTS: event(status="Started")}, 10),
        ("azure", {EVENTS: event(machines=["FrontEnd_IN_1"])}, None),
    ],
)
def test_documented_answers(cloud: str, answers: dict[str, Answer], left_s: float | None) -> None:
    with metadata_service(cloud) as server:
        server.answers = {NAME: (200, b"FrontEnd_IN_0")} | answers
        notice = look(server)
    assert (None if notice is None else notice.left_s) == left_s


def test_aws_tokens_are_renewed_when_old_or_refused() -> None:
    now = [NOW]
    with metadata_service("aws") as server:
        aws = CLOUDS["aws"](service(server.endpoint), lambda: now[0])  # type: ignore[call-arg]
        assert [aws.look() for _ in range(3)] == [None] * 3
        assert server.tokens == 1
        now[0] += 6 * 3600
        assert aws.look() is None
        assert server.tokens == 2
        server.tokens = 7  # as if it had forgotten ours
        with pytest.raises(ValueError, match="401"):
            aws.look()
        assert aws.look() is None


@pytest.mark.parametrize(
    ("cloud", "path", "answer"),
    [
        ("aws", ACTION, (500, b"")),
        ("aws", ACTION, (200, b"not JSON")),
        ("aws", ACTION, (200, b"[]")),
        ("aws", ACTION, (200, b"[" * 200_000)),
        ("aws", ACTION, (200, b"x" * (MAX_BYTES + 1))),
        ("gcp", PREEMPTED, (200, b"<html>captive portal</html>")),
        ("gcp", PREEMPTED, (302, b"/elsewhere")),
        ("azure", EVENTS, (200, b'"Events"')),
        ("azure", NAME, (410, b"")),
    ],
)
def test_a_malformed_answer_is_said_once_and_retried(
    cloud: str, path: str, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.runtime.preemption.FAILING_S", dict.fromkeys(CLOUDS, 0.0))
    said: list[str] = []
    with metadata_service(cloud) as server:
        server.answers = {NAME: (200, b"me"), EVENTS: (200, b"{}"), "/elsewhere": (200, b"TRUE"), path: answer}
        ended = threading.Event()
        noticed: list[float] = []
        stop: Any = SimpleNamespace(notice=noticed.append)
        work = (cloud, CLOUDS[cloud](service(server.endpoint)), ended, stop, said.append, 0.01)
        thread = threading.Thread(target=watch_cloud, args=work)
        thread.start()
        until(lambda: sum(path in asked for asked in server.asked) >= 4, HANGS_S)
        assert thread.is_alive()
        ended.set()
        thread.join()
    assert "GET /elsewhere" not in server.asked
    assert len(said) == 1 and said[0].startswith(f"{cloud} gives no notices (") and len(said[0]) < 400
    assert noticed == []


def test_nobody_there_is_survived() -> None:
    with metadata_service("gcp") as server:
        endpoint = server.endpoint
    with pytest.raises(OSError):
        service(endpoint)("/", {})


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with metadata_service("gcp") as proxy, metadata_service("gcp") as server:
        monkeypatch.setenv("http_proxy", f"http://{proxy.endpoint}")
        server.answers = {PREEMPTED: (200, b"TRUE")}
        assert look(server) is not None
        assert proxy.asked == []


def test_advice_counts_once_and_a_notice_ends_asking() -> None:
    said: list[str] = []
    noticed: list[float] = []
    stop: Any = SimpleNamespace(notice=noticed.append, advised=False)
    with metadata_service("aws") as server:
        server.answers = {REBALANCE: (200, b'{"noticeTime": "2017-09-18T08:19:00Z"}')}
        work = (server.cloud, CLOUDS["aws"](service(server.endpoint)), threading.Event(), stop, said.append, 0.01)
        thread = threading.Thread(target=watch_cloud, args=work)
        thread.start()
        until(lambda: stop.advised, HANGS_S)
        asked = len(server.asked)
        until(lambda: len(server.asked) >= asked + 6, HANGS_S)
        server.answers[ACTION] = 200, b'{"action": "terminate", "time": "no time"}'
        thread.join(HANGS_S)
        assert not thread.is_alive()
    assert noticed == [10.0]
    assert [sentence.partition(":")[0] for sentence in said] == [
        "aws says that it may well take this machine back soon",
        "aws will terminate this machine in 10 s",
    ]


def test_a_notice_stops_a_run_within_its_time() -> None:
    said: list[str] = []
    with metadata_service("gcp") as server:
        server.answers = {PREEMPTED: (200, b"TRUE")}
        config = SpotConfig(cloud="gcp", endpoint=server.endpoint)
        with stopper(config, lambda: None, said.append, {}) as stop:
            with pytest.raises(StopRequested):
                stop.allow()
                stop.wait(HANGS_S)
            assert 8 < stop.left_s <= 28  # a signal would leave eight seconds
    assert said == ["gcp takes this machine back in 30 s: leaving"]


class Silent:
    """A service that answers when nobody wants to know any more."""

    def __init__(self, ask: Any) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def look(self) -> Notice | None:
        self.asked.set()
        assert self.answers.wait(HANGS_S)
        return Notice("gcp takes this machine back", 30.0)


def test_a_leaving_node_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, said = Silent(None), list[str]()
    monkeypatch.setitem(CLOUDS, "gcp", lambda ask: silent)
    with stopper(SpotConfig(cloud="gcp"), lambda: None, said.append, {}):
        assert silent.asked.wait(HANGS_S)
    [thread] = [each for each in threading.enumerate() if each.name == "preemption"]
    silent.answers.set()
    thread.join(HANGS_S)
    assert not thread.is_alive() and said == []


@pytest.mark.parametrize(
    ("names", "cloud"),
    [
        ({}, None),
        ({"sys_vendor": "Amazon EC2", "product_name": "m5.large"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Google", "product_name": "Eve"}, None),  # a laptop
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE_TAG}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),  # Hyper-V at home
    ],
)
def test_the_cloud_is_known_by_its_firmware(names: dict[str, str], cloud: str | None, tmp_path: Path) -> None:
    for name, text in names.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert detect(tmp_path) == cloud


@pytest.mark.parametrize("cloud", ["auto", "off"])
def test_nothing_is_asked_where_no_cloud_is(cloud: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("swarm_node.runtime.preemption.detect", lambda: None if cloud == "auto" else "gcp")
    with metadata_service("gcp") as server:
        server.answers = {PREEMPTED: (200, b"TRUE")}
        config = SpotConfig.model_validate({"cloud": cloud, "endpoint": server.endpoint})
        measures: Measures = {}
        with stopper(config, lambda: None, print, measures):
            assert not any(thread.name == "preemption" for thread in threading.enumerate())
        assert measures == {}


def test_how_long_the_cloud_said_nothing_is_measured() -> None:
    said, measures = list[str](), Measures()
    with metadata_service("gcp") as server:
        server.answers = {PREEMPTED: (403, b"")}
        config = SpotConfig(cloud="gcp", endpoint=server.endpoint)
        with stopper(config, lambda: None, said.append, measures) as stop:
            began, since = stop.heard_at, measures["since_cloud_answer_seconds"]
            until(lambda: len(server.asked) >= 2, HANGS_S)
            silent = since()
            assert stop.heard_at == began and silent > 0
            server.answers = {PREEMPTED: (200, b"FALSE")}
            until(lambda: stop.heard_at > began, HANGS_S)
            assert since() + began < silent + stop.heard_at
    assert len(said) == 1 and "gcp gives no notices (it answers with status 403)" in said[0]


def test_the_work_that_fits_a_notice_is_said() -> None:
    assert reach("aws", 100.0, 5_000_000) == (
        "aws gives 120 s of notice: at 100 Mbit/s at most 1.5 GB can be handed over in it; what is held here is 5.0 MB"
    )
    assert reach("aws", 8.0) == "aws gives 120 s of notice: at 8 Mbit/s at most 118.0 MB can be handed over in it"
    assert "only what left before" in reach("gcp", 100.0, 350_000_001)
    assert "only what left before" not in reach("gcp", 100.0, 350_000_000)


@pytest.mark.parametrize(("advice", "first"), [("saving", "aws says so: saving"), ("", "aws says so")])
def test_advice_is_said_with_its_consequence(advice: str, first: str) -> None:
    said, heard = list[str](), list[tuple[float, bool]]()
    told = [Notice("aws says so", math.inf), None, Notice("aws says so", math.inf), Notice("it ends", 10.0)]
    cloud: Any = SimpleNamespace(look=iter(told).__next__)
    stop: Any = SimpleNamespace(notice=lambda left_s: heard.append((left_s, stop.advised)), advised=False)
    watch_cloud("aws", cloud, threading.Event(), stop, said.append, 0.0, advice)
    assert said == [first, "it ends: leaving"] and heard == [(10.0, True)]


def test_a_stopped_terminal_holds_up_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.runtime.preemption.SENTENCE_S", 0.01)
    goes_on, noticed, said = threading.Event(), threading.Event(), list[str]()

    def look() -> Iterator[Notice | None]:
        yield None
        yield Notice("aws says so", math.inf)
        yield Notice("it ends", 10.0)

    def say(sentence: str) -> None:
        assert goes_on.wait(HANGS_S)
        said.append(sentence)

    cloud: Any = SimpleNamespace(look=look().__next__)
    stop: Any = SimpleNamespace(notice=lambda left_s: noticed.set())
    work = ("aws", cloud, threading.Event(), stop, say, 0.0)
    thread = threading.Thread(target=watch_cloud, args=work)
    thread.start()
    assert noticed.wait(HANGS_S) and said == []
    goes_on.set()
    thread.join(HANGS_S)
    assert "it ends: leaving" in said
