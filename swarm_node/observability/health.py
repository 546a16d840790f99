"""Whether this node trains, over HTTP, for container runtimes, load balancers and Prometheus.

    GET /livez      200 unless no round has ended for so long that only a new start helps; else 503 and the reason
    GET /healthz    200 and a status text while rounds end or the node waits for its crew; else 503 and the reason
    GET /metrics    Prometheus text: `swarm_node_training`, the node's identity (`swarm_node_info`), and the numbers of
                    the last round under sanitised names, with meaning and type from `metrics_reference`;
                    `swarm/rejected/age` is `swarm_node_swarm_rejected_total{reason="age"}`, `step_time` is
                    `swarm_node_step_time_seconds`

A process that runs but does not train answers 503 at /healthz: before the first round, when a round takes far longer
than those before it, and while it leaves. At /livez all these are 200, because a new start would mend none of them.
Time in which the node waits for a good reason belongs to no round: neither to the silence since the last one, nor to
the longest one.

`python -m swarm_node.observability.health` asks the node of this machine, for HEALTHCHECK. It asks at the address in
the run directory (SWARM_NODE_RUN_DIR) or, if no process holds that, at the address in the environment.

Only requests that call this machine by an expected name are answered (`hosts`). A connection has REQUEST_S for its
request and the answer; when MAX_REQUESTS are open, the oldest makes way for a new one.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from swarm_node import __version__
from swarm_node.errors import TemporaryError, UserError
from swarm_node.observability.hosts import is_expected
from swarm_node.observability.metrics_reference import PREFIX, describe_metric, labelled, metric_name
from swarm_node.storage.rundir import RunDir

if TYPE_CHECKING:  # of the extra `swarm`, which --health-port needs, and nothing else here
    from prometheus_client.metrics_core import Metric

LEAST_SILENCE_S = 120.0
TIMES = 10
"""Silence is a fault after so many times the longest of the last so many rounds, but not before LEAST_SILENCE_S."""
STUCK_S = 1800.0
STUCK_TIMES = 100
"""A node is stuck after so many times the longest of the last rounds, but not before STUCK_S: the model may be
evaluated meanwhile, or a last checkpoint be written to a slow disk."""
REQUEST_S = 5.0  # longest life of a connection: the request and the answer are a few kilobytes
MAX_REQUESTS = 16  # most connections, and so threads, at a time
DEFAULT_PORT = "31390"  # the port of the container image
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address of a server that listens on all addresses -> the address to ask it at."""
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
OWN = {
    "info": "Who this is, and what its role is: `trainer` or `bootstrap`; always 1.",
    "restart_info": "Why a process of the network ended that was started again; always 1.",
    "training": "Whether it does what it is for, as /healthz says: 1 or 0.",
    "waiting": "Whether it is paused, or waits for others of its crew: 1 or 0. While it does, training is 1 as well.",
    "since_round_seconds": "Seconds since the last round ended, waiting included.",
    "start_time_seconds": "Unix time, in seconds, at which this process began its run.",
    "disk_free_bytes": "Free space on the disk of the run directory.",
    "since_checkpoint_seconds": "Seconds since a checkpoint was written, or since the start if none was since then.",
    "since_copy_seconds": "Seconds since a checkpoint was copied to `checkpoints.to`, or since the start if none was "
    "since then. Missing without `checkpoints.to`.",
    "since_cloud_answer_seconds": "Seconds since the cloud last said whether it takes this machine back, or since the "
    "start if it never did. Missing where no cloud is asked.",
    "until_end_seconds": "Seconds until it has done its `rounds` or `minutes`, at the pace of its last rounds; +Inf "
    "where there is no end, or it is not known yet.",
}
"""Metrics besides the numbers of a round, and their meanings."""
Measures = dict[str, Callable[[], float]]
"""Name of OWN -> what measures it, whenever somebody asks."""
TEXT = "text/plain; charset=utf-8"


class Health:
    """The state of a node. It is a sink of its metrics; from any thread."""

    name = "health"

    def __init__(
        self,
        what: str = "round",
        least_s: float = LEAST_SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
        done: Callable[[Mapping[str, float]], str] | None = None,
    ):
        """`what` names the work that repeats. `done` makes the status text of its last time from the numbers of that,
        up to `12 s ago`."""
        self.waiting: Callable[[], str] = str  # returns what the node waits for with good reason; empty = nothing
        self.trouble: Callable[[], str] = str  # returns what fails while the node goes on; empty = nothing
        self.leaving = False
        self.measures: Measures = {}
        self.restarted: Callable[[], Mapping[str, str]] = dict
        """Returns why each process of the network that was started again had ended."""
        self._what = what
        self._done = done or (lambda numbers: f"{what} {numbers['round']:.0f} ended")
        self._least_s = least_s
        self._clock = clock
        self._began = self._looked = clock()
        self._start_time = time.time()
        self._waits = False
        self._waited = 0.0
        self._looking = threading.Lock()
        self._last = 0.0  # when the last round ended
        self._ended: deque[float] = deque(maxlen=TIMES + 1)
        """When the last rounds ended, on a clock that stands still while the node waits."""
        self._numbers: dict[str, float] = {}
        self._info: dict[str, str] = {}

    def identify(self, name: str, swarm: str, role: str = "trainer") -> None:
        """Set the name of the node, the id of its swarm (empty = none) and its role."""
        name = name.encode(errors="replace").decode()  # a run directory may have any name
        self._info = {"name": name, "role": role, "swarm": swarm, "version": __version__}

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        """Record that `round` has ended, with its numbers. Most rounds have no held-out figures: the latest stay."""
        self.look()
        held_out = {name: value for name, value in self._numbers.items() if name.startswith("eval/")}
        self._numbers = {"round": float(round), **held_out, **numbers}
        self._last = self._clock()
        self._ended.append(self._last - self._waited)

    def close(self) -> None:
        """Do nothing: a node of a crew may run again after this run."""

    def look(self) -> str:
        """The reason why the node waits now; empty = it does not. Call it often: it adds up the time of waiting."""
        waiting = self.waiting()
        with self._looking:
            now = self._clock()
            if waiting or self._waits:
                self._waited += now - self._looked
            self._looked, self._waits = now, bool(waiting)
        return waiting

    def verdict(self) -> tuple[bool, str]:
        """(whether the node does its work, a status text or the reason why not)"""
        waiting = self.look()
        if self.leaving:
            return False, "leaving"
        if waiting:
            return True, f"waiting: {waiting}"
        if not self._ended:
            return False, f"starting for {self._clock() - self._began:.0f} s: no {self._what} has ended yet"
        silent, longest = self._silence()
        if silent > max(self._least_s, TIMES * longest):
            before = f"before that, one took {longest:.1f} s at most"
            return False, f"no {self._what} has ended for {silent:.0f} s; {before}"
        trouble = self.trouble()
        text = f"{self._done(self._numbers)} {self._clock() - self._last:.0f} s ago"
        return True, f"{text}; {trouble}" if trouble else text

    def alive(self) -> tuple[bool, str]:
        """(whether the node may still do its work without a new start, a status text or the reason why not)"""
        waiting = self.look()
        if self.leaving or waiting or not self._ended:
            return True, self.verdict()[1]
        silent, longest = self._silence()
        if silent > max(STUCK_S, STUCK_TIMES * longest):
            return False, f"stuck: no {self._what} has ended for {silent:.0f} s"
        return True, self.verdict()[1]

    def _silence(self) -> tuple[float, float]:
        """(seconds since the last round, seconds of the longest round before it), both without waiting."""
        ended = list(self._ended)
        return self._clock() - self._waited - ended[-1], max((b - a for a, b in pairwise(ended)), default=0.0)

    def metrics(self) -> str:
        """The metrics in Prometheus's text format, version 0.0.4."""
        from prometheus_client.exposition import generate_latest

        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """The metrics, as a collector of prometheus_client."""
        from prometheus_client.core import InfoMetricFamily
        from prometheus_client.metrics_core import Metric

        training, _ = self.verdict()
        own = {"training": float(training), "waiting": float(self._waits and not self.leaving)}
        own["start_time_seconds"] = self._start_time
        own |= {name: measure() for name, measure in list(self.measures.items())}
        if self._ended:
            own["since_round_seconds"] = self._clock() - self._last
        if self._info:
            yield InfoMetricFamily(PREFIX.rstrip("_"), OWN["info"], value=self._info)
        restarts = InfoMetricFamily(f"{PREFIX}restart", OWN["restart_info"])
        for process, reason in self.restarted().items():
            restarts.add_metric((), {"process": process, "reason": reason})
        if restarts.samples:
            yield restarts
        families: dict[str, Metric] = {}
        for key, value in {**self._numbers, **own}.items():
            stem, labels = labelled(key)
            meaning, is_counter = describe_metric(key) or (OWN.get(key, ""), False)
            name = metric_name(stem)
            family = families.setdefault(name, Metric(name, meaning, "counter" if is_counter else "gauge"))
            if all(sample.labels != labels for sample in family.samples):  # else two names differ in signs only
                family.add_sample(f"{name}_total" if is_counter else name, labels, value)
        yield from (families[name] for name in sorted(families))


@contextmanager
def serving(health: Health, listen: str, port: int, hosts: Collection[str] = ()) -> Iterator[int]:
    """Answer requests at that address until the context is left; gives the port. Port 0 is any free one.

    `hosts` are names by which requests may call this machine, besides IP addresses and localhost. Raises UserError.
    """
    try:
        server = _Server(listen, port, health, frozenset(name.lower() for name in hosts))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        kind = TemporaryError if error.errno == errno.EADDRINUSE else UserError
        raise kind(f"health.port {port} of {listen}: {error.strerror}; choose another --health-port") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="health", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * MAX_REQUESTS

    def __init__(self, listen: str, port: int, health: Health, hosts: frozenset[str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen else socket.AF_INET
        self.health = health
        self.hosts = hosts
        self._changing = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # connection -> when it began, the oldest first
        super().__init__((listen, port), _Handler)

    def service_actions(self) -> None:
        """Look ten times a second, so that no wait is missed."""
        self.health.look()
        self._hang_up(before=time.monotonic() - REQUEST_S)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._hang_up(leaving=MAX_REQUESTS - 1)
        with self._changing:
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def _hang_up(self, leaving: int = MAX_REQUESTS, before: float = -math.inf) -> None:
        """Close the oldest connections until at most `leaving` are open, and all that began `before`. Their threads see
        the end and leave."""
        with self._changing:
            while self._open:
                oldest, began = next(iter(self._open.items()))
                if len(self._open) <= leaving and began > before:
                    return
                del self._open[oldest]
                with suppress(OSError):  # its thread has closed it meanwhile
                    oldest.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hangs up before its answer."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = "swarm-node"
    sys_version = ""

    def do_GET(self) -> None:
        health, content = self.server.health, TEXT
        code, text = 404, "/livez, /healthz or /metrics\n"
        if not is_expected(self.headers.get("Host"), self.server.hosts):
            code, text = 403, "unknown host: ask by an IP address, or list this name in health.hosts\n"
        elif self.path in ("/livez", "/healthz"):
            good, text = health.alive() if self.path == "/livez" else health.verdict()
            code, text = 200 if good else 503, f"{text}\n"
        elif self.path == "/metrics":
            code, text, content = 200, health.metrics(), PROMETHEUS_TEXT
        body = text.encode(errors="replace")
        self.send_response(code)
        self.send_header("Content-Type", content)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> int:
    """Ask the node of this machine; 0 if it trains, or if its port is 0."""
    try:
        listen, port = _where()
    except ValueError as error:
        print(error)
        return 1
    if port == 0:
        print("health.port is 0: nobody is answered")
        return 0
    connection = HTTPConnection(ANYWHERE.get(listen, listen), port, timeout=REQUEST_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        print(answer.read(4096).decode(errors="replace").strip())
    except (OSError, HTTPException) as error:
        print(f"no answer at {connection.host}, port {port}: {error}")
        return 1
    return 0 if answer.status == 200 else 1


def _where() -> tuple[str, int]:
    """(IP address, port) of the node: as its run directory says, or else its environment. Raises ValueError."""
    folder = os.environ.get("SWARM_NODE_RUN_DIR")
    said = RunDir(folder).read_health() if folder else None
    if said is not None:
        return said
    variables = ("SWARM_NODE_HEALTH__PORT", "SWARM_NODE_HEALTH_PORT")  # which of them wins for the node does here
    variable, port = next(((name, text) for name in variables if (text := os.environ.get(name))), ("", DEFAULT_PORT))
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"{variable} = {port!r} is no TCP port: give a number from 1 to 65535")
    return os.environ.get("SWARM_NODE_HEALTH__LISTEN") or "127.0.0.1", int(port)


if __name__ == "__main__":
    sys.exit(main())
