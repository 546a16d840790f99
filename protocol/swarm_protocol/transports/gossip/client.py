"""The node's end of gossip: starts the gossip process (`sidecar`), talks to it, and restarts it when it dies. asyncio
only, because libp2p and hivemind cannot be imported into one process.

    publish -> bounded queue -> stdin  | sidecar |  stdout -> on_message

Nothing here waits for the process. While it is away, messages queue up to a limit and are then refused.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from swarm_protocol.transports.gossip import pipe
from swarm_protocol.transports.ports import Port

SIDECAR = "swarm_protocol.transports.gossip.sidecar"
SIDECAR_START_S = 30.0  # a start takes a second or two; on a machine that swaps, longer
SIDECAR_RESTART_S = 0.5, 30.0
"""First and longest pause before a restart; doubled each time, until a process has lived for `SIDECAR_SETTLED_S`."""
SIDECAR_SETTLED_S = 20.0
GOSSIP_STATUS_S = 5.0
PROBE_S = 10.0  # a sidecar that answers none of two probes in a row is killed: it hangs, or was stopped
MAX_QUEUED_MESSAGES, MAX_QUEUED_MESSAGE_BYTES = 64, 16 * 2**20  # messages waiting for the sidecar
MAX_COMMANDS = 1024  # other commands waiting for it
LOG_LINES, LOG_CHARS = 40, 400  # lines of the process's stderr that are kept, and characters of each
NO_STATUS = pipe.Status(0, [], {}, 0, 0, 0, 0, 0, {})  # the status of a process that was never asked


class GossipClient:
    """Lives in one asyncio loop. `publish` may be called from any thread, everything else from that loop."""

    def __init__(
        self,
        settings: pipe.GossipSettings,
        on_message: Callable[[str, bytes], None],
        report: Callable[[str], None],
        on_start: Callable[[], None],
        port: Port | None,
    ) -> None:
        """`on_message` is called with (topic, data), `report` with a sentence for people when something went wrong,
        `on_start` when a process is up: `gossip_id` and `addresses` have changed, and all connections are gone. With
        `port`, the process listens there and nowhere else; without, on the port of the settings or the next free one.
        """
        self.settings = settings
        self.on_message, self.report, self.on_start = on_message, report, on_start
        self._port = port
        self.gossip_id = ""  # gossip id of the process that runs now or ran last
        self.addresses: list[str] = []  # multiaddresses of it, those worth telling first; none if it only dials
        self.restarts = 0
        self.last_end = ""  # why the process before this one ended
        self.pid: int | None = None  # None while it is away
        self._topics: dict[str, None] = {}
        self._messages: deque[pipe.Publish] = deque()
        self._queued = 0  # bytes
        self._lock = threading.Lock()  # of the two above
        self._commands: deque[pipe.Command] = deque(maxlen=MAX_COMMANDS)
        self._wake = asyncio.Event()
        self._up = asyncio.Event()
        self._asked: dict[int, asyncio.Future[pipe.Status]] = {}
        self._asks = 0
        self._before = self._last = NO_STATUS
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Keep a sidecar running from now on; returns once the first listens."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._supervise())
        await self._up.wait()

    def publish(self, topic: str, data: bytes) -> bool:
        """Send to all subscribers of `topic`; False if the queue is full. Never waits. From any thread."""
        with self._lock:
            if len(self._messages) >= MAX_QUEUED_MESSAGES or self._queued + len(data) > MAX_QUEUED_MESSAGE_BYTES:
                return False
            self._messages.append(pipe.Publish(topic, data))
            self._queued += len(data)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)
        return True

    def subscribe(self, topic: str) -> None:
        """Have messages on `topic` delivered, also after restarts."""
        self._topics[topic] = None
        self._send(pipe.Subscribe(topic))

    def dial(self, address: str) -> None:
        """Connect to the gossip process at a multiaddress that ends in its id. `stat` shows whether that worked."""
        self._send(pipe.Dial(address))

    def drop(self, ids: list[str]) -> None:
        """Hang up on these gossip ids."""
        self._send(pipe.Drop(ids))

    async def stat(self) -> pipe.Status:
        """Ask the process for its status. Raises PeerUnreachable if it does not answer within `GOSSIP_STATUS_S`."""
        self._asks += 1
        number, answer = self._asks, asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send(pipe.Ask(number))
        try:
            return self._total(await asyncio.wait_for(answer, GOSSIP_STATUS_S))
        except TimeoutError as error:
            raise PeerUnreachable("the gossip process does not answer") from error
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        """Ends the sidecar; within a few seconds."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _supervise(self) -> None:
        pause = SIDECAR_RESTART_S[0]
        while not self._closing:
            began = asyncio.get_running_loop().time()
            try:
                code = await self._live()
            except (OSError, LocalProtocolError) as error:  # no memory, file descriptors or ports left: later, perhaps
                self._log.append(str(error))
                code = None
            self._up.clear()
            if asyncio.get_running_loop().time() - began > SIDECAR_SETTLED_S:
                pause = SIDECAR_RESTART_S[0]
            self.last_end = self._log[-1] if self._log else f"exit code {code}"
            self.report(f"the gossip process ended ({code}): {self.last_end}; it starts again in {pause:.1f} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, SIDECAR_RESTART_S[1])
            self.restarts += 1

    async def _live(self) -> int:
        """One process from start to end; its exit code. Raises OSError, and LocalProtocolError if no port is left."""
        if self._port is not None:
            self.settings = msgspec.structs.replace(self.settings, port=self._port.take())
        root = str(Path(__file__).parents[3])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            SIDECAR,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the node, which then closes our stdin
            env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
            limit=pipe.PIPE_READ_BYTES,
        )
        self.pid = process.pid
        self._log.clear()
        work = [asyncio.create_task(job) for job in (self._read(process), self._write(process), self._probe())]
        stderr = asyncio.create_task(self._keep_log(process))
        try:
            # The first to end, whichever, ends the others: EOF, a broken pipe, nonsense on stdout, no answer.
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.pid = None
            self._before = self._last
            for task in work:
                task.cancel()
            assert process.stdin is not None
            process.stdin.close()
            rest = [stderr, asyncio.create_task(_drain(process, reading=work[0]))]
            code = await _end(process, patience=2.0 if self._closing else 0.2)
            errors = await asyncio.gather(*work, return_exceptions=True)
            await asyncio.wait(rest, timeout=1.0)
            for task in rest:
                task.cancel()
        for error in errors:
            if isinstance(error, RemoteProtocolError):
                self._log.append(f"unreadable: {error}")
            elif isinstance(error, Exception) and not isinstance(error, ConnectionError):
                self._log.append(repr(error))
        return code

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        frames: pipe.Frames[pipe.Event] = pipe.Frames(pipe.Event)
        while data := await process.stdout.read(pipe.PIPE_READ_BYTES):
            for event in frames.feed(data):
                if isinstance(event, pipe.GossipReady) and self._is_elsewhere(event.port):
                    return
                try:
                    self._handle(event)
                except Exception as error:  # the port's promise: what handlers raise is dropped
                    self.report(f"{type(event).__name__} from gossip was dropped: {error!r}")

    def _is_elsewhere(self, port: int) -> bool:
        """Whether another program that claims no ports took this port first."""
        if self._port is None or (port == self._port.number and not self._port.is_shared()):
            return False
        self._log.append(f"port {self._port.number} was taken meanwhile")
        return True

    def _handle(self, event: pipe.Event) -> None:
        match event:
            case pipe.Message(topic, data):
                self.on_message(topic, data)
            case pipe.Status(number):
                self._last = self._total(event)
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            case pipe.GossipReady(gossip_id, addresses, port):
                self.gossip_id, self.addresses = gossip_id, addresses
                if port:
                    self.settings = msgspec.structs.replace(self.settings, port=port)  # where peers know to find us
                self._up.set()
                self.on_start()

    async def _write(self, process: asyncio.subprocess.Process) -> None:
        stdin = process.stdin
        assert stdin is not None
        stdin.write(pipe.frame(self.settings))
        left = [command for command in self._commands if not isinstance(command, pipe.Ask)]
        self._commands = deque([*map(pipe.Subscribe, self._topics), *left], maxlen=MAX_COMMANDS)
        while True:
            while (command := self._next()) is not None:
                stdin.write(pipe.frame(command))
                await stdin.drain()
            self._wake.clear()
            if not self._commands and not self._messages:
                await self._wake.wait()

    def _next(self) -> pipe.Command | None:
        if self._commands:
            return self._commands.popleft()
        with self._lock:
            if not self._messages:
                return None
            message = self._messages.popleft()
            self._queued -= len(message.data)
            return message

    async def _probe(self) -> None:
        """Returns when the sidecar has not answered twice; once is not enough, this process may have slept itself."""
        try:
            await asyncio.wait_for(self._up.wait(), SIDECAR_START_S)
        except TimeoutError:
            self._log.append("it did not start in time and was killed")
            return
        missed = 0
        while missed < 2:
            await asyncio.sleep(PROBE_S)
            try:
                await self.stat()
                missed = 0
            except PeerUnreachable:
                missed += 1
        self._log.append("it did not answer and was killed")

    async def _keep_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        rest = b""
        while data := await process.stderr.read(4096):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-LOG_CHARS:]
            self._log.extend(line[-LOG_CHARS:].decode(errors="replace") for line in lines if line.strip())

    def _send(self, command: pipe.Command) -> None:
        self._commands.append(command)
        self._wake.set()

    def _total(self, now: pipe.Status) -> pipe.Status:
        """`now`, with totals over all lives of the process."""
        before, counts = self._before, ("bytes_in", "bytes_out", "messages_in", "messages_out", "dropped")
        totals = {name: getattr(before, name) + getattr(now, name) for name in counts}
        rejected = dict(Counter(before.rejected) + Counter(now.rejected))
        return msgspec.structs.replace(now, **totals, rejected=rejected)


async def _drain(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    """Discard what is still on stdout: a pipe that nobody reads is never closed, and `wait` waits for that."""
    assert process.stdout is not None
    await asyncio.wait([reading])
    while await process.stdout.read(pipe.PIPE_READ_BYTES):
        pass


async def _end(process: asyncio.subprocess.Process, patience: float) -> int:
    """Exit code of the process. It is killed if it does not end by itself after its stdin was closed."""
    try:
        return await asyncio.wait_for(process.wait(), patience)
    except TimeoutError:
        pass
    finally:  # also if we are being closed ourselves
        if process.returncode is None:
            process.kill()
            await process.wait()
    return await process.wait()
