"""A cloud takes a spot instance back: its metadata service, which only the machine itself can ask, tells so.

    cloud    asked, every two seconds                          answers                                    notice
    aws      spot/instance-action (IMDSv2, with a token)       404 | {"action", "time"}                   120 s
             events/recommendations/rebalance                  404 | {"noticeTime"}: may be soon          none
    gcp      instance/preempted                                FALSE | TRUE                               30 s
    azure    scheduledevents                                   {"Events": [{"EventType": "Preempt", …}]}  30 s

The firmware says which cloud this is; no other machine asks anything. A notice acts as a first SIGTERM does
(`shutdown`), with the time that the cloud leaves. Answers are bounded in size. A fault of the service is said once and
survived.

Sources: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
rebalance-recommendations.html; docs.cloud.google.com/compute/docs/instances/preemptible;
learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Protocol

from swarm_node.config.machine import SpotConfig
from swarm_node.observability.health import Measures
from swarm_node.runtime.shutdown import NOTICE_RESERVE_S, EmbeddedStopper, Stopper
from swarm_node.say import Once, Say, Warned

DMI = Path("/sys/class/dmi/id")
NOTICE_CHECK_S = 2.0
METADATA_TIMEOUT_S = 1.0
CLOUD_WATCH_END_S = 0.1
"""Longest that a node which leaves waits for the watch thread, which may be waiting for an answer."""
SENTENCE_S = 1.0  # longest that a sentence may take: a terminal may be stopped, a pipe be full
MAX_BYTES = 1 << 18  # longest answer; Azure lists up to a hundred machines in one
MAX_NOTICE_S = 120.0  # a longer notice counts as this one: a node that leaves is of no use meanwhile
OVERDUE_S = 10.0  # time left by a notice that is overdue, has begun, or does not say when it is due
TOKEN_LIFE_S = 21600  # lifetime of AWS's token in seconds; a new one is asked for after half of it
NOTICE_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
ADDRESS = "169.254.169.254"
"""Address of all three services. The name metadata.google.internal is this, too, but may take long to resolve."""
FAILING_S = {"aws": 0.0, "gcp": 0.0, "azure": 150.0}
"""Time of failures until they are said: Azure's first answer takes up to two minutes."""
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


@dataclass(frozen=True)
class Notice:
    text: str
    left_s: float  # seconds left; infinite = it may happen soon, but is not decided


class Cloud(Protocol):
    def look(self) -> Notice | None:
        """Ask once; None = no notice. Raises OSError or HTTPException, or ValueError for a malformed answer."""


Ask = Callable[..., tuple[int, bytes]]  # (path, headers, method) -> (status, body)


def detect(dmi: Path = DMI) -> str | None:
    """The cloud that this machine's firmware names; None = none of the three. Touches no network."""

    def text(name: str) -> str:
        try:
            return (dmi / name).read_bytes()[:256].decode(errors="replace").strip()
        except OSError:
            return ""

    if text("sys_vendor") == "Amazon EC2" or "amazon" in text("bios_version").lower():  # the latter on Xen
        return "aws"
    if text("product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if text("chassis_asset_tag") == AZURE_TAG else None


def cloud_of(config: SpotConfig) -> str | None:
    """The cloud whose notices are asked for; None = none."""
    if config.cloud == "auto":
        return detect()
    return None if config.cloud == "off" else config.cloud


def reach(cloud: str, uplink_mbit: float, state_bytes: int | None = None) -> str:
    """A sentence that says how much data, of `state_bytes` if known, can leave within one notice."""
    left_s = NOTICE_S[cloud] - NOTICE_RESERVE_S
    most = left_s * uplink_mbit * 125_000
    text = (
        f"{cloud} gives {NOTICE_S[cloud]:g} s of notice: at {uplink_mbit:g} Mbit/s at most {_size(most)} can be handed "
        "over in it"
    )
    if state_bytes is not None:
        text += f"; what is held here is {_size(state_bytes)}"
        if state_bytes > most:
            text += ": only what left before (averaging, a crew's replicas, --checkpoint-to) outlives this machine"
    return text


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


@contextmanager
def stopper(
    config: SpotConfig,
    last_resort: Callable[[], None],
    say: Say,
    measures: Measures,
    advice: str = "saving at the end of this round",
) -> Iterator[Stopper]:
    """A `Stopper` that hears the cloud's notices as well, and adds to `measures` how long it heard nothing. `advice`
    says what the node does when it is `advised`."""
    with Stopper(last_resort) as stop:
        name = cloud_of(config)
        if name is None:
            yield stop
            return
        cloud = CLOUDS[name](service(config.endpoint or ADDRESS))
        stop.heard_at, ended = time.monotonic(), threading.Event()
        measures["since_cloud_answer_seconds"] = lambda: time.monotonic() - stop.heard_at
        work = partial(watch_cloud, name, cloud, ended, stop, say, advice=advice)
        watch = threading.Thread(target=work, name="preemption", daemon=True)
        watch.start()
        try:
            yield stop
        finally:
            ended.set()
            watch.join(SENTENCE_S if stop.noticed else CLOUD_WATCH_END_S)


def stopping(
    embedded: bool,
    config: SpotConfig,
    last_resort: Callable[[], None],
    say: Say,
    measures: Measures,
    advice: str = "",
) -> AbstractContextManager[Stopper]:
    """What stops a run: signals and notices; only Ctrl-C if the run is `embedded` in another program."""
    if embedded:
        return EmbeddedStopper()
    return stopper(config, last_resort, say, measures, *([advice] if advice else []))


def watch_cloud(
    name: str,
    cloud: Cloud,
    ended: threading.Event,
    stop: Stopper,
    say: Say,
    look_s: float = NOTICE_CHECK_S,
    advice: str = "",
) -> None:
    """Ask until there is a notice, or `ended` is set. A notice is passed on before it is said."""
    since, once, told_advice = None, Once(partial(aside, say)), False
    while not ended.is_set():
        try:
            notice = cloud.look()
        except (OSError, HTTPException, ValueError) as error:
            if ended.is_set():
                return
            since = time.monotonic() if since is None else since
            if time.monotonic() - since >= FAILING_S[name]:
                failing = f"{name} gives no notices ({error or type(error).__name__})"
                remedy = "the node keeps asking, and --spot off stops that"
                once("failing", Warned(f"{failing}; {remedy}. docker/spot.md says what a container needs"))
        else:
            if ended.is_set():
                return
            since, stop.heard_at = None, time.monotonic()
            if notice is not None and notice.left_s < math.inf:
                stop.notice(notice.left_s)
                say(Warned(f"{notice.text}: leaving"))
                return
            if notice is not None and not told_advice:
                told_advice = stop.advised = True
                aside(say, f"{notice.text}: {advice}" if advice else notice.text)
        ended.wait(look_s)


def aside(say: Say, sentence: str) -> None:
    """Say a sentence, but go on if that takes long."""
    saying = threading.Thread(target=say, args=(sentence,), daemon=True)
    saying.start()
    saying.join(SENTENCE_S)


def service(endpoint: str) -> Ask:
    """A function that asks the service at HOST[:PORT]; it follows no redirect and uses no proxy."""

    def ask(path: str, headers: Mapping[str, str], method: str = "GET") -> tuple[int, bytes]:
        connection = HTTPConnection(endpoint, timeout=METADATA_TIMEOUT_S)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES + 1)
        finally:
            connection.close()
        if len(body) > MAX_BYTES:
            raise ValueError("the answer is too long")
        return answer.status, body

    return ask


@dataclass
class Aws:
    ask: Ask
    now: Callable[[], float] = time.time
    token: str = field(default="", repr=False)
    token_until: float = -math.inf

    def look(self) -> Notice | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            left_s = _left_s(self.now(), action.get("time"), datetime.fromisoformat)
            verb = action.get("action") if action.get("action") in ("stop", "hibernate") else "terminate"
            return Notice(f"aws will {verb} this machine in {left_s:.0f} s", left_s)
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            return Notice("aws says that it may well take this machine back soon", math.inf)
        return None

    def _get(self, path: str) -> dict[str, Any] | None:
        if self.now() >= self.token_until:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
            body = _good(*self.ask("/latest/api/token", header, "PUT"))
            if not body.isascii() or not body.decode().isprintable():
                raise ValueError("its token is none")
            self.token, self.token_until = body.decode(), self.now() + TOKEN_LIFE_S / 2
        status, body = self.ask(path, {"X-aws-ec2-metadata-token": self.token})
        if status == 404:
            return None
        if status == 401:
            self.token_until = -math.inf
        return _table(_good(status, body))


@dataclass
class Gcp:
    ask: Ask

    def look(self) -> Notice | None:
        header = {"Metadata-Flavor": "Google"}
        answer = _good(*self.ask("/computeMetadata/v1/instance/preempted", header)).strip()
        if answer not in (b"TRUE", b"FALSE"):
            raise ValueError(f"it answers {answer[:40]!r}")
        left_s = NOTICE_S["gcp"]
        return Notice(f"gcp takes this machine back in {left_s:.0f} s", left_s) if answer == b"TRUE" else None


@dataclass
class Azure:
    """Azure tells of all machines in this one's availability or scale set; others' events are skipped."""

    ask: Ask
    now: Callable[[], float] = time.time
    name: str = ""

    def look(self) -> Notice | None:
        if not self.name:
            name = self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
            self.name = name.decode(errors="replace").strip()
        listed = _table(self._get("/metadata/scheduledevents?api-version=2020-07-01")).get("Events")
        for event in listed if isinstance(listed, list) else []:
            if not isinstance(event, dict) or event.get("EventType") not in ("Preempt", "Terminate"):
                continue
            machines = event.get("Resources")
            if not isinstance(machines, list) or self.name in machines:
                begun = event.get("EventStatus") == "Started"
                left_s = OVERDUE_S if begun else _left_s(self.now(), event.get("NotBefore"), parsedate_to_datetime)
                return Notice(f"azure takes this machine back in {left_s:.0f} s ({event['EventType']})", left_s)
        return None

    def _get(self, path: str) -> bytes:
        return _good(*self.ask(path, {"Metadata": "true"}))


CLOUDS: dict[str, Callable[[Ask], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def _good(status: int, body: bytes) -> bytes:
    if status != 200:
        raise ValueError(f"it answers with status {status}")
    return body


def _table(body: bytes) -> dict[str, Any]:
    try:
        table = json.loads(body)
    except RecursionError as error:
        raise ValueError("its JSON is too deep") from error
    if not isinstance(table, dict):
        raise ValueError("its JSON is no object")
    return table


def _left_s(now: float, when: object, read: Callable[[str], datetime]) -> float:
    """Seconds until `when`, at most MAX_NOTICE_S. OVERDUE_S if that is past or unreadable: Azure leaves it blank for an
    event that has begun."""
    try:
        moment = read(str(when))
    except (ValueError, OverflowError):
        return OVERDUE_S
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    left_s = moment.timestamp() - now
    return min(left_s, MAX_NOTICE_S) if left_s > 0 else OVERDUE_S
