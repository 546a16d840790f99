"""The real transport: DHT and streams over p2pd, gossip over the gossip process, in one loop and one thread.

Nothing waits for the network but `request`: it comes up, goes away and comes back in the background.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarm_protocol.errors import PeerUnreachable, ProtocolError, in_seconds
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import ManifestLimits
from swarm_protocol.messages import PeerCard
from swarm_protocol.transports.base import Acceptor, Channel, Handler, Listener, Outgoing, Server, Sink
from swarm_protocol.transports.gossip.pipe import gossip_settings
from swarm_protocol.transports.p2p.gossip_side import GossipSide
from swarm_protocol.transports.p2p.membership import Membership, standing_of
from swarm_protocol.transports.ports import choose_ports
from swarm_protocol.transports.refusals import Refused
from swarm_protocol.transports.reports import Reports
from swarm_protocol.transports.settings import NetworkSettings
from swarm_protocol.transports.streams.exchanges import check_call
from swarm_protocol.transports.streams.services import Services
from swarm_protocol.transports.streams.stream import check_method
from swarm_protocol.twins import Twins

if TYPE_CHECKING:  # imports torch, which takes seconds: the network's own thread does it
    from swarm_protocol.transports.p2p.peer_streams import PeerStreams
    from swarm_protocol.transports.p2p.plane import HivemindPlane

T = TypeVar("T")
Work = Callable[["PeerStreams"], Coroutine[Any, Any, T]]
CLOSE_S = 8.0  # longest that `close` takes
LEFT_TASKS_S = 1.0  # longest wait for tasks that are left when everything else has ended


class P2PTransport:
    """`swarm_protocol.transports.base.Transport` over real processes: p2pd and the gossip sidecar.

    Handlers and servers run on the network's thread; `request` waits for that thread, so they must not call it.
    """

    def __init__(
        self,
        identity_path: Path,
        swarm: str,
        settings: NetworkSettings,
        shards: int = 1,
        limits: ManifestLimits | None = None,
        cache_file: Path | None = None,
        ports_file: Path | None = None,
        report: Callable[[str], None] = lambda sentence: None,
        report_port: Callable[[str], None] | None = None,
        report_end: Callable[[str], None] | None = None,
    ) -> None:
        """Returns at once; the network comes up in the background. `limits` are the swarm's. `cache_file` keeps
        the addresses of peers from run to run, `ports_file` the ports. `report` is called with sentences for people, on
        another thread, and ever more rarely for a sentence that repeats; `report_port`, if given, with those about a
        port that is another than the wanted one, and `report_end` with those about a process that ended.

        Raises LocalProtocolError for an identity file, a listen address or settings that cannot be used.
        """
        self._identity = Identity.load_or_create(identity_path)
        self._identity_path, self._swarm, self._settings = identity_path, swarm, settings
        self._report = Reports(report)
        self._report_end = Reports(report_end or report)
        self._wake = asyncio.Event()
        self._dht_port, self._gossip_port = choose_ports(settings, ports_file, report_port or self._report)
        told = gossip_settings(swarm, shards, limits or ManifestLimits(), settings)
        self._gossip = GossipSide(told, self._gossip_port, self._report_end, self._wake.set)
        self._services = Services(settings, self._report)
        self._traffic = self._services.traffic
        self._membership = Membership(
            self.peer_id, settings, self._gossip, self._traffic, cache_file, ports_file, self._report, self._wake
        )
        self._plane: HivemindPlane | None = None
        self._calls: set[Future[Any]] = set()  # requests, exchanges and channels that this node began
        self._loose_ends = 0
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._live())
        self._closed = threading.Event()
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the port; any thread

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def addresses(self) -> list[str]:
        return [] if self._plane is None else self._membership.own_addresses(self._plane)

    def subscribe(self, topic: str, handler: Handler) -> None:
        self._soon(self._gossip.subscribe, topic, handler)

    def publish(self, topic: str, data: bytes) -> bool:
        return self._gossip.publish(topic, data)

    def serve(self, method: str, server: Server) -> None:
        self._services.answers.servers[method] = server

    def request(self, peer: str, method: str, payload: bytes = b"", timeout: float = 10.0, limit: int = 2**20) -> bytes:
        return self._wait(lambda streams: streams.request(peer, method, payload, timeout, limit), timeout)

    def accept(self, method: str, acceptor: Acceptor) -> None:
        self._services.exchanges.acceptors[method] = acceptor

    def exchange(
        self, peer: str, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink], timeout: float
    ) -> Future[None]:
        """Callbacks added to the future run on the network's thread, which must not wait for it."""
        check_call(method, ours)
        return self._begin(lambda streams: streams.exchange(peer, method, ours, answered, timeout))

    def listen(self, method: str, opened: Callable[[Channel], Listener]) -> None:
        self._services.channels.openings[method] = opened

    def connect(self, peer: str, method: str, opened: Callable[[Channel], Listener]) -> Channel:
        """If the network is closed, the listener's `closed` is called before this returns."""
        check_method(method)
        channels = self._services.channels
        channel = channels.new(peer, self._loop)
        channel.listener = opened(channel)

        def ended(living: Future[None]) -> None:
            error = None if living.cancelled() else living.exception()
            channel.end(str(error or "the network is closed"))  # if it was not told otherwise

        living = self._begin(lambda streams: channels.call(channel, method, lambda: streams.open(peer)))
        living.add_done_callback(ended)
        return channel

    def dial_back(self, peer: str, ports: Sequence[int], timeout: float = 10.0) -> list[bool]:
        """For each of this machine's TCP ports, whether `peer` could connect to it. Waits and raises like `request`."""
        return self._wait(lambda streams: streams.dial_back(peer, ports), timeout)

    def made(self) -> Mapping[str, float]:
        """Peer id -> when its newest card was made (Unix seconds, by its own clock). Covers some of all peers whose
        cards were seen, also those whose cards are not valid by this machine's clock."""
        return {} if self._plane is None else dict(self._plane.validator.made)

    def announce(self, card: PeerCard) -> None:
        before, self._membership.card = self._membership.card, card
        if before is None or standing_of(before) != standing_of(card):  # newcomers are to find whoever leads now
            self._soon(self._wake.set)

    def hear(self, peer: str, addresses: Sequence[str]) -> None:
        if peer not in self._membership.members:
            self._soon(self._membership.hear, peer, addresses)

    def meet(self, cards: Mapping[str, PeerCard]) -> None:
        self._soon(self._membership.meet, cards)

    def members(self) -> Mapping[str, PeerCard]:
        return self._membership.members

    def left(self) -> Mapping[str, PeerCard]:
        return self._membership.left

    def too_new(self) -> str:
        return "" if self._plane is None else self._plane.validator.too_new

    def clock_ahead(self) -> float | None:
        return None if self._plane is None else self._plane.validator.clock_ahead

    def twins(self) -> Twins:
        return self._membership.twins

    def stats(self) -> Mapping[str, float]:
        stat, plane, gossip, membership = self._gossip.stat, self._plane, self._gossip, self._membership
        rejected = Counter({"handler": gossip.handler_faults})
        for reasons in (stat.rejected, self._traffic.rejected, membership.dials.refused):
            rejected.update(dict(reasons))  # a copy: the other thread goes on counting
        totals = {
            "peers": len(membership.members),
            "bytes_in": stat.bytes_in + self._traffic.bytes_in,
            "bytes_out": stat.bytes_out + self._traffic.bytes_out,
            "messages_in": stat.messages_in,
            "messages_out": stat.messages_out,
            "dropped": stat.dropped + gossip.refused,
            "restarts/gossip": gossip.client.restarts,
            "restarts/dht": 0 if plane is None else plane.daemon.restarts,
            "connections/gossip": len(stat.peers),
            "connections/dht": len(membership.connected),
            "loose_ends": self._loose_ends + membership.failed_steps,
            **{f"rejected/{reason}": count for reason, count in rejected.items()},
        }
        return {name: float(total) for name, total in totals.items()}

    def restarted(self) -> Mapping[str, str]:
        ended = {"gossip": self._gossip.client, "dht": None if self._plane is None else self._plane.daemon}
        return {name: process.last_end for name, process in ended.items() if process is not None and process.restarts}

    def refusals(self) -> Mapping[str, Refused]:
        return self._traffic.refusals.by_source() | self._gossip.stat.sources

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._soon(self._main.cancel)
        self._thread.join(CLOSE_S)

    def _begin(self, work: Work[T]) -> Future[T]:
        """Have the network's thread do some work. The future fails if the network is closed, or when it is."""
        with self._close_lock:  # the loop, if it is not closed yet, looks at all that are begun before it is
            if not self._closed.is_set():
                future = asyncio.run_coroutine_threadsafe(self._do(work), self._loop)
                self._calls.add(future)
                future.add_done_callback(self._calls.discard)
                return future
        closed: Future[T] = Future()
        closed.set_exception(PeerUnreachable("the network is closed"))
        return closed

    def _wait(self, work: Work[T], timeout: float) -> T:
        call = self._begin(work)
        try:
            return call.result(timeout + 1.0)
        except (TimeoutError, CancelledError) as error:
            call.cancel()
            raise PeerUnreachable(f"no answer within {in_seconds(timeout)}") from error

    def _soon(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: too late
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._on_loose_end)
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # this thread may end, the node must not
            self._report(f"the network ended: {error!r}")
        finally:
            with self._close_lock:
                self._closed.set()
            _end_tasks(self._loop)
            self._loop.close()
            for port in (self._dht_port, self._gossip_port):
                if port is not None:
                    port.release()
            for future in list(self._calls):
                with suppress(InvalidStateError):  # it is done, or its caller has just given it up
                    future.set_exception(PeerUnreachable("the network is closed"))

    async def _live(self) -> None:
        """The life of the network, from the first import to the last goodbye."""
        membership, gossip = self._membership, asyncio.create_task(self._gossip.client.start())
        try:
            module = await asyncio.to_thread(importlib.import_module, "swarm_protocol.transports.p2p.plane")
            self._plane = plane = module.HivemindPlane(
                self._identity,
                self._identity_path,
                self._swarm,
                self._settings,
                self._dht_port,
                self._services,
                self._report_end,
                membership.on_restart,
                membership.dials,
                known=membership.table.addresses_of,
                told=membership.table.told_by,
            )
            try:
                await plane.daemon.start()
                while True:
                    await membership.round(plane)
                    await membership.pause()
            finally:
                await membership.goodbye(plane)
                await plane.close()
        except ProtocolError as error:
            self._report(f"no network: {error}")
        finally:
            gossip.cancel()
            await self._gossip.client.close()

    async def _do(self, work: Work[T]) -> T:
        if self._plane is None:
            raise PeerUnreachable("the network is not up yet")
        try:
            return await work(self._plane.streams)
        except ProtocolError:
            raise
        except Exception as error:  # of hivemind, which does not say what it may raise
            self._report(f"the network stumbled: {error!r}")
            raise PeerUnreachable(repr(error)) from error

    def _on_loose_end(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count an error that nobody waits for: hivemind leaves tasks behind when p2pd dies or a peer sends
        nonsense."""
        self._loose_ends += 1


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Close the tasks that hivemind left, in their own loop rather than by the garbage collector after it."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=LEFT_TASKS_S))
