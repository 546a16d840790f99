"""`swarm-node dashboard`: serves its page at an address until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm_node.errors import UserError
from swarm_node.observability.dashboard.app import make_app
from swarm_node.observability.dashboard.gallery import Gallery

PORT = 31380
TRIED = 20  # number of ports to try from PORT on, if the user asks for none
CONNECTIONS = 64
UNASKED_S = 5.0
"""Longest time that a connection may be without a whole request. uvicorn has no such limit, and CONNECTIONS strangers
who each send half a request would shut everyone out."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def serve(paths: Sequence[Path], host: str, port: int | None, say: Callable[[str], None], public: bool = False) -> None:
    """Show the runs at `paths` until a signal; without a `port`, at the first free one of a few.

    On an address that other machines reach, only requests with the token in the link are answered, unless it is
    `public`: then everybody may read, and only pages of swarms are shown. Raises UserError.
    """
    gallery = Gallery(paths, public)
    local = _is_local(host)
    with _listen(host, port) as listener:
        bound = listener.getsockname()[1]
        token = None if local or public else secrets.token_urlsafe(24)
        hosts = LOCAL_NAMES | {host} if local and not public else None
        app = make_app(gallery, hosts, token, stopping=lambda: server.should_exit)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=Brisk,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS,
                timeout_graceful_shutdown=2,
            )
        )
        say(f"http://{_shown(host)}:{bound}/" + (f"?token={token}" if token else ""))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service's end is as good as Ctrl-C
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
            server.run(sockets=[listener])


class Brisk(H11Protocol):
    """Closes a connection that made no whole request for UNASKED_S, however many bytes of one arrive."""

    _unasked: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._unasked is not None:
            self._unasked.cancel()

    def _watch(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._unasked is not None:
            self._unasked.cancel()
            self._unasked = None
        elif not answering and self._unasked is None:
            self._unasked = self.loop.call_later(UNASKED_S, self.transport.close)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int | None) -> socket.socket:
    wanted = range(PORT, PORT + TRIED) if port is None else [port]
    for each in wanted:
        try:
            family, *_, address = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except (OSError, UnicodeError) as error:
            raise UserError(f"--host {host} is no address of this machine: {error}") from None
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        try:
            return socket.create_server(address, family=family, backlog=CONNECTIONS, dualstack_ipv6=both)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and each != wanted[-1]:
                continue
            raise UserError(_cannot_listen(host, each, error)) from None
    raise AssertionError("there is a port to try")


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: choose another with --port, or --port 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"no permission to listen on port {port}: choose one above 1023 with --port"
    return f"cannot listen on {host}: {os.strerror(error.errno or 0)}; choose an address of this machine with --host"
