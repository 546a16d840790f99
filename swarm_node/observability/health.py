"""Whether this node trains, over HTTP, for container runtimes, load balancers and Prometheus.

    GET /healthz    200 and what it does, while rounds end or it waits for others of its crew; else 503 and why
    GET /metrics    Prometheus text: `swarm_node_training`, and the numbers of the last round under sanitised names

A process that runs but trains nothing answers 503: before the first round, when one takes far longer than those before
it, and while it leaves. `python -m swarm_node.observability.health` asks the node of this machine, for HEALTHCHECK.
"""

from __future__ import annotations

import errno
import math
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from swarm_node.errors import UserError

LEAST_S = 120.0
TIMES = 10
"""Silence is a fault after so many times the longest of the last so many rounds, but not before LEAST_S."""
REQUEST_S = 5.0
MAX_REQUESTS = 16
"""At a time."""
PREFIX = "swarm_node_"
CONTENT = {"/healthz": "text/plain; charset=utf-8", "/metrics": "text/plain; version=0.0.4; charset=utf-8"}


class Health:
    """What is known of a node. A sink of its metrics; from any thread."""

    name = "health"

    def __init__(self, what: str = "round", least_s: float = LEAST_S, clock: Callable[[], float] = time.monotonic):
        """`what` it does again and again."""
        self.waiting: Callable[[], str] = str
        """For whom it waits, rightly, in words; empty = for nobody."""
        self.leaving = False
        self._what = what
        self._least_s = least_s
        self._clock = clock
        self._began = clock()
        self._ended: deque[float] = deque(maxlen=TIMES + 1)
        self._numbers: dict[str, float] = {}

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        """`round` has ended."""
        self._numbers = {"round": float(round), **numbers}
        self._ended.append(self._clock())

    def close(self) -> None:
        """Another run may go on after this one: a crew's node leads it now and then."""

    def verdict(self) -> tuple[bool, str]:
        """(does it do what it is for, what it does or why not)."""
        ended, now = list(self._ended), self._clock()
        if self.leaving:
            return False, "leaving"
        if waiting := self.waiting():
            return True, f"waiting: {waiting}"
        if not ended:
            return False, f"starting for {now - self._began:.0f} s: no {self._what} has ended yet"
        longest = max((b - a for a, b in zip(ended, ended[1:], strict=False)), default=0.0)
        silent = now - ended[-1]
        if silent > max(self._least_s, TIMES * longest):
            return False, f"no {self._what} has ended for {silent:.0f} s; before that, one took {longest:.1f} s at most"
        return True, f"{self._what} {self._numbers['round']:.0f} ended {silent:.0f} s ago"

    def metrics(self) -> str:
        """In Prometheus's text format, version 0.0.4."""
        numbers, ended = self._numbers, list(self._ended)
        own = {"training": float(self.verdict()[0])}
        if ended:
            own["seconds_since_round"] = self._clock() - ended[-1]
        figures = {metric_name(name): value for name, value in {**numbers, **own}.items()}
        return "".join(f"# TYPE {name} gauge\n{name} {_number(value)}\n" for name, value in sorted(figures.items()))


def metric_name(name: str) -> str:
    """`swarm/rejected/age` -> `swarm_node_swarm_rejected_age`."""
    return PREFIX + re.sub("[^a-zA-Z0-9_]+", "_", name)


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


@contextmanager
def serving(health: Health, listen: str, port: int) -> Iterator[int]:
    """Answer at that address, 0 being any free port, until the context is left; gives the port. Raises UserError."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    kind = type("_Family", (_Server,), {"address_family": family})
    try:
        server = kind((listen, port), type("_Asked", (_Handler,), {"health": health}))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        raise UserError(f"health.port {port} of {listen}: {error.strerror}; choose another --health-port") from error
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

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of whoever hangs up in the middle."""


class _Handler(BaseHTTPRequestHandler):
    health: Health
    timeout = REQUEST_S
    server_version = "swarm-node"
    sys_version = ""

    def do_GET(self) -> None:
        code, text = 200, ""
        if self.path == "/healthz":
            good, text = self.health.verdict()
            code, text = 200 if good else 503, f"{text}\n"
        elif self.path == "/metrics":
            text = self.health.metrics()
        else:
            code, text = 404, "/healthz or /metrics\n"
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", CONTENT.get(self.path, CONTENT["/healthz"]))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> int:
    """Ask the node of this machine; 0 if it trains."""
    port = os.environ.get("SWARM_NODE_HEALTH_PORT") or os.environ.get("SWARM_NODE_HEALTH__PORT") or "31390"
    connection = HTTPConnection("127.0.0.1", int(port), timeout=REQUEST_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        print(answer.read(4096).decode(errors="replace").strip())
    except (OSError, HTTPException) as error:
        print(f"no answer at port {port}: {error}")
        return 1
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
