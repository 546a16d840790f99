"""One node's p2pd (go-libp2p, started by hivemind), and what keeps it running.

    p2pd gone -> fail the calls in flight, start it again: same key, same port

p2pd starts without bootstrap peers and dials them afterwards, so that dead ones cannot delay a start. Every call is
bounded in time, because hivemind's calls would wait for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import UUID

import psutil
from filelock import lock_descriptor
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, in_seconds
from swarm_protocol.transports.ports import Port
from swarm_protocol.transports.settings import NetworkSettings, announced, listen_address
from swarm_protocol.transports.streams.stream import Traffic

P2PD_START_S = 15.0
P2PD_CALL_S = 10.0  # longest that p2pd may take over a call that does not have a time limit of its own
DAEMON_GOODBYE_S = 2.0  # longest that p2pd may take to end before it is killed
MAX_RESTART_WAIT_S = 10.0  # longest pause before p2pd is started again
STEADY_S = 10.0  # a p2pd that lived this long did not die of its own start
ASKED_TO_END = 0, -signal.SIGINT, -signal.SIGTERM
"""Exit codes that are not reported: systemd, for example, may end all processes of a node at once."""
IN_ITS_OWN_SESSION = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
"""Starts p2pd in a session of its own: Ctrl-C is for the node, which says goodbye through p2pd and then ends it."""
_FAILURES = (P2PDaemonError, P2PHandlerError, OSError, EOFError)
"""Errors that calls to p2pd raise, besides running into their time limit."""
NO_WAY = "failed to dial"  # go-libp2p's words when it has no address of a peer, or nobody answers there
MAX_CALL_ANSWER_BYTES = DEFAULT_MAX_MSG_SIZE - 2**16
"""Size of the largest answer to a call that fits, with its envelope, into a message to p2pd."""
SHORT_CHARACTERS = 40
"""Longest path of a folder for sockets. A Unix socket's path has 104 bytes on macOS; ours need half of the rest."""
NEW_S = 60.0  # a folder younger than this may belong to a process that has not locked it yet
MAX_P2PD_RSS = 512 * 2**20
"""A p2pd of a node with `FEW` connections takes 60 to 100 MB; four large exchanges and four large answers at a time may
have go-libp2p's largest window, 16 MB, in flight each way: 256 MB."""
FEW = 64  # connections that `MAX_P2PD_RSS` is for
RSS_PER_CONNECTION = 256 * 2**10
"""Bytes for each further connection. An idle one takes 75 KB (measured with 25 to 200); three times that leaves room
for calls under way and for memory that Go frees late."""
MOST_CONNECTIONS = 4096
"""Connections beyond these, with which p2pd may take 1.5 GB, add nothing: strangers can make many."""
P2PD_MEMORY_CHECK_S = 5.0  # time between two checks; at 100 Mbit/s, p2pd can grow by 60 MB in it
T = TypeVar("T")

logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "CRITICAL"))  # faults are counted instead


class _Plane(Protocol):
    """Whose p2pd it is, as `plane.HivemindPlane`."""

    @property
    def connections(self) -> _Counted: ...

    @property
    def restarted(self) -> Callable[[], None]: ...

    async def begin(self, p2pd: P2P) -> None:
        """p2pd has started."""

    def ended(self) -> None:
        """p2pd has ended."""

    async def reach(self, peer: str) -> None:
        """Dial a peer that another peer named. Raises PeerUnreachable."""


class _Counted(Protocol):
    count: int  # connected peers when that was looked at last


class Daemon:
    """Keeps one p2pd running. All coroutines belong to the loop in which `start` was called."""

    def __init__(
        self,
        plane: _Plane,
        identity_path: Path,
        settings: NetworkSettings,
        port: Port | None,
        traffic: Traffic,
        report: Callable[[str], None],
    ) -> None:
        """`port` is None for a node that only dials."""
        self.plane, self.settings, self.traffic = plane, settings, traffic
        self.port = port
        self.port_number = settings.port  # TCP port on which p2pd listens, or listened last
        self.restarts = 0
        self.last_end = ""  # why the p2pd before this one ended
        self.p2pd: P2P | None = None
        self.panic = ""  # why p2pd died, if it said so before its last line
        self.folder = ""  # folder of the sockets of p2pd
        self.closing = False
        self._is_ready = False  # whether p2pd has started and takes calls
        self._folder_lock = -1
        self._identity_path = identity_path
        self._report = report
        self._ended: asyncio.Future[int] = asyncio.Future()  # exit code of the p2pd that runs now
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start p2pd and keep it running; returns when it is up. Raises LocalProtocolError for settings it refuses."""
        self.folder, self._folder_lock = _private_folder()
        self._p2pd_class = _p2pd_class(self)
        up = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(up))
        await up

    def cancel(self) -> set[asyncio.Task[None]]:
        """Keep p2pd running no longer. Returns the tasks that will end."""
        self.closing = True
        if self._keeper is None:
            return set()
        self._keeper.cancel()
        return {self._keeper}

    def release(self) -> None:
        """Remove the folder, after `stop`."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._folder_lock)
            self.folder = ""

    async def _keep(self, up: asyncio.Future[None]) -> None:
        """Start p2pd whenever none runs. `up` is done when the first one is ready."""
        wait = 0.0
        while not self.closing:
            try:
                await self._start_p2pd()
            except LocalProtocolError as error:
                if not up.done():
                    up.set_exception(error)
                    return
                self._report(str(error))
                wait = MAX_RESTART_WAIT_S
            except Exception as error:  # whatever hivemind raises: this node lives on, and tries again
                self._report(f"p2pd does not start: {self.panic or error or type(error).__name__}")
                wait = min(MAX_RESTART_WAIT_S, wait + 1.0)
            else:
                started = time.monotonic()
                if up.done():
                    self.restarts += 1
                    self.plane.restarted()
                else:
                    up.set_result(None)
                code = await self._end_of_p2pd()
                self.last_end = self.panic or f"exit code {code}"
                wait = 0.0 if time.monotonic() - started > STEADY_S else min(MAX_RESTART_WAIT_S, wait + 0.25)
                if code not in ASKED_TO_END:
                    why = f" ({self.panic})" if self.panic else ""
                    self._report(f"p2pd ended with code {code}{why}; starting it again")
            await self.stop()
            await asyncio.sleep(wait)

    async def _start_p2pd(self) -> None:
        settings = self.settings
        port = 0 if self.port is None else self.port.take()
        p2pd = await asyncio.wait_for(
            self._p2pd_class.create(
                identity_path=str(self._identity_path),
                check_if_identity_free=False,  # would start a second p2pd, with port mapping
                host_maddrs=None if settings.dial_only else [listen_address(settings.listen, port)],
                announce_maddrs=announced(settings.announce, port) or None,
                no_listen=settings.dial_only,
                force_reachability="public" if settings.serve_relay else "private" if settings.dial_only else None,
                auto_nat=settings.relay,
                use_relay=settings.relay or settings.serve_relay,
                use_auto_relay=False,  # wants p2pd's own DHT, which is off; `P2PTransport` asks relays for places
                nat_port_map=settings.nat_port_map,
                startup_timeout=P2PD_START_S,
            ),
            P2PD_START_S + 5.0,
        )
        self._ended = asyncio.ensure_future(p2pd._child.wait())
        if self.port is not None and self.port.is_shared():  # with a program that claims none
            raise P2PDaemonError(f"port {port} was taken meanwhile")
        self.port_number, self._is_ready = port, True
        await self.plane.begin(p2pd)

    async def _end_of_p2pd(self) -> int:
        """Exit code of p2pd, which is killed if it grows too large."""
        assert self.p2pd is not None
        watch = asyncio.create_task(end_if_grown(self.p2pd._child, lambda: self.plane.connections.count))
        try:
            code = await self._ended
            if watch.done() and not watch.exception():
                self.panic = watch.result()
            return code
        finally:
            watch.cancel()

    async def stop(self) -> None:
        """End p2pd, whatever state it is in."""
        p2pd, self.p2pd, self._is_ready = self.p2pd, None, False
        self.plane.ended()
        if p2pd is None:
            return
        try:
            await asyncio.wait_for(p2pd.shutdown(), DAEMON_GOODBYE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                p2pd._child.kill()
        for left in Path(self.folder).glob("*.sock"):
            left.unlink(missing_ok=True)  # of a p2pd that was killed

    @property
    def pid(self) -> int | None:
        return None if self.p2pd is None or self.p2pd._child is None else int(self.p2pd._child.pid)

    def running(self) -> P2P:
        """The p2pd that runs now. Raises PeerUnreachable if none does."""
        if self.p2pd is None or not self._is_ready or self._ended.done():
            raise PeerUnreachable("the network is not up")
        return self.p2pd

    async def bounded(self, call: Awaitable[T], timeout: float) -> T:
        """The result of a call to p2pd. Raises PeerUnreachable if it takes too long or fails, or if p2pd dies."""
        task, ended = asyncio.ensure_future(call), self._ended
        either: set[asyncio.Future[Any]] = {task, ended}
        try:
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
        except _FAILURES as error:
            raise PeerUnreachable(str(error) or type(error).__name__) from error
        finally:
            task.cancel()
            task.add_done_callback(_forget)
        if ended.done():
            raise PeerUnreachable("p2pd ended meanwhile")
        raise PeerUnreachable("closed meanwhile" if self.closing else f"no answer within {in_seconds(timeout)}")


def _p2pd_class(daemon: Daemon) -> type[P2P]:
    """hivemind's `P2P`, with these changes: p2pd runs in a session of its own, its sockets lie in a private folder, it
    relays only if that is wanted, and its bytes are counted. `daemon` knows it from its creation, so that no p2pd is
    left over if its start fails half-way."""
    traffic, plane, serves = daemon.traffic, daemon.plane, int(daemon.settings.serve_relay)

    class CountedP2P(P2P):  # type: ignore[misc]
        _UNIX_SOCKET_PREFIX = f"/unix{daemon.folder}/"
        DHT_MODE_MAPPING = {"server": {"relayService": serves}}  # without its own DHT: see `whereabouts`

        def __init__(self) -> None:
            super().__init__()
            daemon.p2pd, daemon.panic = self, ""

        @classmethod
        async def create(cls, *arguments: Any, **options: Any) -> P2P:
            p2pd = await super().create(*arguments, **options)
            control = p2pd._client.control  # on which nobody calls yet
            control._handler_tasks, control._pending_calls = _HandlerTasks(), _PendingCalls()
            return p2pd

        @staticmethod
        def _make_process_args(*arguments: Any, **options: Any) -> list[str]:
            return [sys.executable, "-ISc", IN_ITS_OWN_SESSION, *P2P._make_process_args(*arguments, **options)]

        @staticmethod
        def _log_p2pd_message(line: str) -> None:  # told every line: hivemind keeps the last, of a trace of many
            if line.startswith(("panic: ", "fatal error: ")):
                daemon.panic = daemon.panic or line
            P2P._log_p2pd_message(line)

        async def call_protobuf_handler(self, peer_id: PeerID, name: str, input: Any, output_type: Any) -> Any:
            traffic.bytes_out += input.ByteSize()
            traffic.upload.take(input.ByteSize())
            try:
                output = await super().call_protobuf_handler(peer_id, name, input, output_type)
            except P2PDaemonError as error:
                if NO_WAY not in str(error):
                    raise
                await plane.reach(str(peer_id))
                output = await super().call_protobuf_handler(peer_id, name, input, output_type)
            traffic.bytes_in += output.ByteSize()
            traffic.download.take(output.ByteSize())
            return output

        async def add_protobuf_handler(self, name: str, handler: Any, input_type: Any, **options: Any) -> None:
            async def counted(request: Any, context: P2PContext) -> Any:
                traffic.bytes_in += request.ByteSize()
                traffic.download.take(request.ByteSize())
                response = await handler(request, context)
                if response.ByteSize() > MAX_CALL_ANSWER_BYTES:  # hivemind's own way of refusing it raises
                    raise LocalProtocolError(f"an answer of {response.ByteSize()} bytes is too large")
                traffic.bytes_out += response.ByteSize()
                traffic.upload.take(response.ByteSize())
                return response

            await super().add_protobuf_handler(name, counted, input_type, **options)

    return CountedP2P


def rss(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def most_rss(connections: int) -> int:
    """Bytes of memory that a p2pd with so many connections may hold."""
    return MAX_P2PD_RSS + RSS_PER_CONNECTION * max(0, min(connections, MOST_CONNECTIONS) - FEW)


async def end_if_grown(process: asyncio.subprocess.Process, connections: Callable[[], int]) -> str:
    """Returns why, in words, when `process`, a p2pd with so many `connections`, was ended because it grew too large."""
    while (size := rss(process.pid)) <= most_rss(connections()):
        await asyncio.sleep(P2PD_MEMORY_CHECK_S)
    process.kill()
    return f"it had grown to {size >> 20} MiB"


class _HandlerTasks(dict[UUID, "asyncio.Task[Any]"]):
    """Handlers under way: forgets a task as soon as it is done, however it ended. hivemind 1.1.12 does so only if its
    answer was sent, so a caller that hangs up leaves the task for ever."""

    def __setitem__(self, call: UUID, task: asyncio.Task[Any]) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))


class _PendingCalls(dict[UUID, "asyncio.Future[bytes]"]):
    """Calls that wait for an answer: one that was given up does not count any more. In hivemind 1.1.12, its answer
    raises in the loop that reads all answers."""

    def __contains__(self, call: object) -> bool:
        waiting = self.get(call)  # type: ignore[call-overload]
        return waiting is not None and not waiting.done()


def _private_folder() -> tuple[str, int]:
    """A new folder for sockets, with a short path, and its lock, which the kernel drops when this process ends. Removes
    folders of processes that were killed."""
    prefix = f"swarm-node-{os.getuid()}-"
    root = tempfile.gettempdir() if len(tempfile.gettempdir()) <= SHORT_CHARACTERS else "/tmp"
    for old in Path(root).glob(f"{prefix}*"):
        with suppress(OSError):  # it is another's, is in use, or another process was quicker
            lock = _open_folder(old)
            try:
                if lock_descriptor(lock, blocking=False) and time.time() - os.fstat(lock).st_mtime > NEW_S:
                    shutil.rmtree(old)
            finally:
                os.close(lock)
    folder = tempfile.mkdtemp(prefix=prefix, dir=root)
    lock = _open_folder(folder)
    lock_descriptor(lock)
    return folder, lock


def _open_folder(path: str | Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _forget(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned call, or asyncio complains that nobody did."""
    if not task.cancelled():
        task.exception()
