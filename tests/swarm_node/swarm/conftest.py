"""A run directory, short waits, a driven clock and a web server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from swarm_node.storage.rundir import RunDir
from swarm_node.swarm import lookup, question_files
from tests.support.virtual_time import VirtualTime


@pytest.fixture
def run() -> RunDir:
    Path("run").mkdir()
    return RunDir("run")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(question_files, "HOLDER_S", 0.05)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    clock = VirtualTime(1000.0)
    monkeypatch.setattr(lookup, "time", clock)
    monkeypatch.setattr(question_files, "time", clock)
    monkeypatch.setattr(question_files, "HOLDER_S", 20.0)
    return clock


@pytest.fixture
def web() -> Iterator[dict[str, bytes | str]]:
    """Path -> page, or where it redirects to; served at `web["url"]`."""
    pages: dict[str, bytes | str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path, b"")
            self.send_response(302 if isinstance(page, str) else 200 if page else 404)
            if isinstance(page, str):
                self.send_header("Location", page)
            self.end_headers()
            if isinstance(page, bytes):
                self.wfile.write(page)

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    pages["url"] = f"http://127.0.0.1:{server.server_port}"
    yield pages
    server.shutdown()
    server.server_close()
    thread.join()
