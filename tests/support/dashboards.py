"""A dashboard in a thread of a test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from swarm_node.observability.dashboard.app import make_app
from swarm_node.observability.dashboard.gallery import Gallery
from swarm_node.observability.dashboard.serve import LOCAL_NAMES


@contextmanager
def served(paths: list[Path]) -> Iterator[str]:
    """The address of a page of the runs in `paths`, or of those in the working directory."""
    server: uvicorn.Server
    app = make_app(Gallery(paths), LOCAL_NAMES, None, stopping=lambda: server.should_exit)
    server = uvicorn.Server(
        uvicorn.Config(app, ws="none", loop="asyncio", lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.run, [listener])
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
        running.result()
