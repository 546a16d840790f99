"""The network in one process, on a virtual clock, with faults: for tests and simulations. Equal seeds, equal events.

    clock = VirtualClock(); network = MemoryNetwork(clock, seed=3)
    a = network.join("a", swarm); b = network.join("b", swarm, bootstrap=a.addresses)
    clock.run_until(10.0)                  b has dialled a: they see each other's cards and hear each other's messages
    network.partition(["a"]); network.heal(); network.kill("a")

Who can hear whom follows from who has dialled whom: every node keeps a `PeerTable`, dials what it says, and connected
nodes make up a component. Cards spread within a component; messages and requests stay within it; components merge when
one of their nodes reaches another, and fall apart when nothing connects them any more.

Gossip goes in one hop to every subscriber, paid by the sender; with `degree`, hop by hop over a random mesh, so that
forwarding and duplicates are paid by who causes them. Bytes are those of gossip, requests, exchanges and channels: what
membership costs is measured on the real network. Everything runs on the thread that drives the clock.

    exchange      caller --latency--> acceptor asked --latency--> `answered` asked; then both ways at once: the body
                  leaves, sharing its uplink with gossip and other bodies, --latency--> both are here: both are taken
    channel       opener --latency--> taker asked --latency--> open; each end's messages leave like bodies, one after
                  the other, --latency--> judged, received. A goodbye, or SILENCE_S after a kill or a cut: closed
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.codec import seal_card
from protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from protocol.identity import Identity
from protocol.limits import (
    CARD_RENEWAL_S,
    CARD_TTL_S,
    MAX_BATCH_BYTES,
    MAX_CHUNK_BYTES,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
)
from protocol.messages import PeerCard
from protocol.peers import PeerTable
from protocol.transports.base import Accepted, Acceptor, Channel, Handler, Listener, Outgoing, Server, Sink
from protocol.transports.refusals import Refused
from protocol.transports.streams.channels import (
    CLOSED,
    MAX_CHANNELS,
    MAX_CHANNELS_PER_PEER,
    MAX_QUEUED_BYTES,
    SILENCE_S,
    SILENT,
    SLOW,
    check_method,
    parts_of,
)
from protocol.transports.streams.exchanges import MAX_EXCHANGES, MAX_EXCHANGES_PER_PEER, check_call, pieces_of

SPREAD_S = 2.0
"""A card is found by others, and components that meet become one, this much later."""
LOOKUP_S = 5.0
"""How often a node looks up cards and dials."""
LOOKUP_CARDS = 32
"""Cards of others that a node's own table holds; `members` sees all."""
HEARTBEAT_S = 1.0
"""A mesh is mended this often at most."""
MAX_BACKLOG_S = 10.0
"""What would wait longer for its sender's uplink is dropped."""
TURN_S = 0.25
"""A body has its uplink for so long at a time: what else there is to send waits no longer for it."""


class VirtualClock:
    """Time that passes only from event to event. Events of one time happen in the order they were asked for."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def now(self) -> float:
        """Seconds; what `start` means is up to the caller."""
        return self._now

    def call_at(self, t: float, fn: Callable[..., None], *args: Any) -> None:
        """Have `fn(*args)` called at time `t`, or next if that has passed."""
        self._asked += 1
        heapq.heappush(self._events, (max(t, self._now), self._asked, fn, args))

    def step(self, until: float = math.inf) -> bool:
        """Let the next event happen; False, and nothing changes, if there is none up to `until`."""
        if not self._events or self._events[0][0] > until:
            return False
        self._now, _, fn, args = heapq.heappop(self._events)
        fn(*args)
        return True

    def run_until(self, t: float) -> None:
        """Let everything up to and including `t` happen."""
        while self.step(t):
            pass
        self._now = max(self._now, t)


@dataclass(frozen=True)
class LinkModel:
    """A node's way to the rest of the world. A message passes its sender's and its receiver's: delays add up, and it
    must survive both."""

    latency_s: float = 0.02
    jitter_s: float = 0.0
    """Largest random delay on top."""
    bandwidth_bytes_s: float = math.inf
    """Of the uplink; messages leave one after the other."""
    loss: float = 0.0
    """Probability that a message is lost (requests are not: they run over streams)."""
    duplicate: float = 0.0
    """Probability that a message comes twice."""


class _Component:
    """Nodes that are connected, directly or through each other, and the cards that they hold together."""

    def __init__(self, nodes: Iterable[MemoryTransport], cards: Mapping[str, tuple[PeerCard, float]]) -> None:
        self.nodes = dict.fromkeys(nodes)
        self.cards = dict(cards)
        """Peer id -> card and when it runs out."""
        self.meshes: dict[str, _Mesh] = {}
        self.changes = 0
        """Counts nodes that came and went."""


@dataclass
class _Mesh:
    """Who forwards to whom on one topic in one component."""

    built: float
    state: tuple[int, int]
    neighbours: dict[MemoryTransport, dict[MemoryTransport, None]]


@dataclass(eq=False)
class _Message:
    topic: str
    data: bytes
    seen: set[MemoryTransport] = field(default_factory=set)


@dataclass
class _Topic:
    subscribers: dict[MemoryTransport, None] = field(default_factory=dict)
    changes: int = 0


class MemoryNetwork:
    """All nodes, and what happens between them."""

    def __init__(self, clock: VirtualClock, seed: int = 0, degree: int | None = None) -> None:
        """`degree`: mean number of neighbours in gossip meshes; `None` = one hop to everybody."""
        self.clock = clock
        self.rng = random.Random(seed)
        self.degree = degree
        self.faults: Counter[str] = Counter()
        """What befell messages: `lost`, `duplicated`, `cut` (their receiver was gone or cut off when they came)."""
        self._nodes: dict[str, MemoryTransport] = {}
        self._topics: dict[str, _Topic] = {}

    def join(
        self,
        who: Identity | str,
        swarm: str,
        link: LinkModel = LinkModel(),
        bootstrap: Sequence[str] = (),
        dial_only: bool = False,
    ) -> MemoryTransport:
        """A node starts. `who` is its identity or just its peer id (then its cards are not checked); a peer that was
        killed comes back by joining again. `dial_only`: nobody can dial it."""
        peer = who if isinstance(who, str) else who.peer_id
        if peer in self._nodes:
            raise LocalProtocolError(f"peer {peer} is already there")
        node = MemoryTransport(self, who, swarm, link, bootstrap, dial_only)
        self._nodes[peer] = node
        self.clock.call_at(self.clock.now(), node._tick)
        return node

    # ----------------------------------------------------------------- faults

    def kill(self, peer: str) -> None:
        """The node vanishes without a goodbye: its card runs out by itself, its channels when they have been silent."""
        for channel in list(self._nodes[peer]._channels):
            channel._cut()
        self._remove(self._nodes[peer])

    def partition(self, *groups: Collection[str]) -> None:
        """From now on nothing passes between these groups of peers, nor between them and everybody else (newcomers
        included). Channels between them do not survive it, however short it is."""
        for node in self._nodes.values():
            node._side = next((i for i, group in enumerate(groups, 1) if node.peer_id in group), 0)
        for node in self._nodes.values():
            for other in [other for other in node._edges if other._side != node._side]:
                del node._edges[other]
            for channel in node._channels:
                if channel._other._side != node._side:
                    channel._cut()
        for component in dict.fromkeys(node._component for node in self._nodes.values()):
            self._split(component)

    def heal(self) -> None:
        """Everything passes again; who was cut off is found when somebody dials it."""
        for node in self._nodes.values():
            node._side = 0

    # ----------------------------------------------------------------- connections

    def _dial(self, node: MemoryTransport, peer: str) -> None:
        other = self._nodes.get(peer)
        if other is None or other.dial_only or other is node or other._side != node._side:
            return
        node._edges[other] = other._edges[node] = None
        if other._component is not node._component:
            self.clock.call_at(self.clock.now() + SPREAD_S, self._merge, node, other)

    def _merge(self, node: MemoryTransport, other: MemoryTransport) -> None:
        """The components of two nodes become one, if they are still connected."""
        large, small = node._component, other._component
        if other not in node._edges or large is small:
            return
        if len(small.nodes) > len(large.nodes):
            large, small = small, large
        for moved in small.nodes:
            moved._component = large
        large.nodes |= small.nodes
        large.changes += 1
        for peer, entry in small.cards.items():
            if peer not in large.cards or large.cards[peer][0].created < entry[0].created:
                large.cards[peer] = entry

    def _split(self, component: _Component) -> None:
        """What is no longer connected becomes components of its own, each with all cards."""
        left = dict(component.nodes)
        pieces = []
        while left:
            piece = [left.popitem()[0]]
            for node in piece:  # grows meanwhile
                for other in node._edges:
                    if other in left:
                        del left[other]
                        piece.append(other)
            pieces.append(piece)
        component.changes += 1
        if len(pieces) == 1:
            return
        for piece in pieces:
            fresh = _Component(piece, component.cards)
            for node in piece:
                node._component = fresh

    def _remove(self, node: MemoryTransport) -> None:
        del self._nodes[node.peer_id]
        node._alive = False
        component = node._component
        for other in node._edges:
            del other._edges[node]
        for topic in node._handlers:
            self._topics[topic].subscribers.pop(node)
            self._topics[topic].changes += 1
        node._edges = {}
        del component.nodes[node]
        node._component = _Component([node], {})
        self._split(component)

    # ----------------------------------------------------------------- gossip

    def _subscribe(self, node: MemoryTransport, name: str) -> None:
        topic = self._topics.setdefault(name, _Topic())
        topic.subscribers[node] = None
        topic.changes += 1

    def _receivers(self, node: MemoryTransport, name: str) -> Iterable[MemoryTransport]:
        """Whom `node` sends a message on that topic to."""
        topic = self._topics.get(name)
        if topic is None:
            return ()
        if self.degree is None:
            return [other for other in topic.subscribers if other._component is node._component and other is not node]
        mesh = self._mesh(node._component, name, topic)
        if node in mesh.neighbours:
            return mesh.neighbours[node]
        reachable = [other for other in mesh.neighbours if not (node.dial_only and other.dial_only)]
        return self.rng.sample(reachable, min(self.degree, len(reachable)))  # publishes without listening

    def _mesh(self, component: _Component, name: str, topic: _Topic) -> _Mesh:
        """Everyone links to degree / 2 others that can be dialled, so that they have `degree` links in the mean; those
        that only dial link to `degree`."""
        state = component.changes, topic.changes
        mesh, now = component.meshes.get(name), self.clock.now()
        if mesh is not None and (mesh.state == state or now < mesh.built + HEARTBEAT_S):
            return mesh
        assert self.degree is not None
        nodes = [node for node in topic.subscribers if node._component is component]
        open_ = [node for node in nodes if not node.dial_only]
        neighbours: dict[MemoryTransport, dict[MemoryTransport, None]] = {node: {} for node in nodes}
        for node in nodes:
            links = self.degree if node.dial_only else (self.degree + 1) // 2
            chosen = self.rng.sample(open_, min(links + 1, len(open_)))
            for other in [other for other in chosen if other is not node][:links]:
                neighbours[node][other] = neighbours[other][node] = None
        component.meshes[name] = mesh = _Mesh(now, state, neighbours)
        return mesh

    def _send(self, sender: MemoryTransport, receiver: MemoryTransport, message: _Message) -> None:
        ours, theirs, rng, size = sender.link, receiver.link, self.rng, len(message.data)
        sender.bytes_out += size
        sender._uplink_free = max(sender._uplink_free, self.clock.now()) + size / ours.bandwidth_bytes_s
        if (ours.loss or theirs.loss) and rng.random() >= (1 - ours.loss) * (1 - theirs.loss):
            self.faults["lost"] += 1
            return
        copies = 1
        if (ours.duplicate or theirs.duplicate) and rng.random() >= (1 - ours.duplicate) * (1 - theirs.duplicate):
            self.faults["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            self.clock.call_at(sender._uplink_free + self._delay(sender, receiver), receiver._receive, sender, message)

    def _delay(self, sender: MemoryTransport, receiver: MemoryTransport) -> float:
        ours, theirs = sender.link, receiver.link
        delay = ours.latency_s + theirs.latency_s
        if ours.jitter_s or theirs.jitter_s:
            delay += self.rng.uniform(0.0, ours.jitter_s) + self.rng.uniform(0.0, theirs.jitter_s)
        return delay

    def _turn(self, sender: MemoryTransport, left: int) -> tuple[int, float]:
        """How much of a body leaves in one turn, and in how many seconds it will have: the uplink is free for others
        in between."""
        bandwidth = sender.link.bandwidth_bytes_s
        size = min(left, max(1, int(bandwidth * TURN_S))) if bandwidth < math.inf else left
        now = self.clock.now()
        sender._uplink_free = max(sender._uplink_free, now) + size / bandwidth
        sender.bytes_out += size
        return size, sender._uplink_free - now


class _Exchange:
    """One exchange, from event to event. Each finds out whether its peers are still connected; if not, all ends. Events
    that are yet to come then, like the end of its time, hold an empty shell: bodies may be large."""

    def __init__(
        self,
        network: MemoryNetwork,
        caller: MemoryTransport,
        acceptor: MemoryTransport,
        method: str,
        ours: Outgoing,
        answered: Callable[[bytes, int], Sink],
        timeout: float,
    ) -> None:
        self.future: Future[None] = Future()
        self._network = network
        self._caller = caller
        self._acceptor = acceptor
        self._method = method
        self._ours = ours
        self._answered = answered
        self._theirs: Accepted | None = None
        self._sink: Sink | None = None
        """The caller's."""
        self._missing = 2
        """Bodies that have not arrived."""
        self._over = False
        self.future.set_running_or_notify_cancel()
        self._after(timeout, self._fail, PeerUnreachable(f"no answer within {timeout:g} s"))
        self._after(network._delay(caller, acceptor), self._ask)

    def _after(self, seconds: float, step: Callable[..., None], *arguments: Any) -> None:
        self._network.clock.call_at(self._network.clock.now() + seconds, self._go_on, step, *arguments)

    def _go_on(self, step: Callable[..., None], *arguments: Any) -> None:
        if self._over:
            return
        if not (self._caller._alive and self._acceptor._alive and self._caller._side == self._acceptor._side):
            self._network.faults["cut"] += 1
            step, arguments = self._fail, (PeerUnreachable("the connection broke"),)
        step(*arguments)

    def _ask(self) -> None:
        caller, acceptor, running = self._caller, self._acceptor, self._acceptor._exchanging
        self._count(caller, acceptor, len(self._ours.head))
        accept = acceptor._acceptors.get(self._method)
        if accept is None:
            acceptor.rejected["method"] += 1
            self._end(PeerUnreachable(f"{acceptor.peer_id} does not know the method {self._method!r}"))
            return
        if running.total() >= MAX_EXCHANGES or running[caller.peer_id] >= MAX_EXCHANGES_PER_PEER:
            acceptor.rejected["busy"] += 1
            self._end(PeerUnreachable("busy"))
            return
        try:
            self._theirs = accept(caller.peer_id, self._ours.head, self._ours.size)
        except RemoteProtocolError as error:
            acceptor.rejected[error.reason] += 1
            self._end(error)
            return
        check_call(self._method, self._theirs.ours)
        running[caller.peer_id] += 1
        self._after(self._network._delay(acceptor, caller), self._answer)

    def _answer(self) -> None:
        assert self._theirs is not None
        ours, theirs = self._ours, self._theirs.ours
        self._count(self._acceptor, self._caller, len(theirs.head))
        try:
            self._sink = self._answered(theirs.head, theirs.size)
        except RemoteProtocolError as error:
            self._caller.rejected[error.reason] += 1
            self._end(error, _torn(self._method))
            return
        self._leave(self._caller, self._acceptor, ours.size)
        self._leave(self._acceptor, self._caller, theirs.size)

    def _leave(self, sender: MemoryTransport, receiver: MemoryTransport, left: int) -> None:
        size, seconds = self._network._turn(sender, left)
        if size < left:
            self._after(seconds, self._leave, sender, receiver, left - size)
        else:
            self._after(seconds + self._network._delay(sender, receiver), self._arrive)

    def _arrive(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        assert self._theirs is not None and self._sink is not None
        caller, acceptor = self._caller, self._acceptor
        caller.bytes_in += self._theirs.ours.size
        acceptor.bytes_in += self._ours.size
        try:
            _pour(self._ours, self._theirs.sink)
        except RemoteProtocolError as error:
            acceptor.rejected[error.reason] += 1
            self._end(_torn(self._method), error)
            return
        try:
            _pour(self._theirs.ours, self._sink)
        except RemoteProtocolError as error:
            caller.rejected[error.reason] += 1
            self._end(error, _torn(self._method))
            return
        self._end(None)

    def _fail(self, error: Exception) -> None:
        self._end(error, error)

    def _end(self, for_caller: Exception | None, for_acceptor: Exception | None = None) -> None:
        """Tell both, at once, and let go of all that was theirs."""
        future, theirs = self.future, self._theirs
        self._over = True
        self.future, self._ours, self._answered = Future(), Outgoing(b""), _nobody
        self._theirs = self._sink = None
        for error in (for_caller, for_acceptor):
            if error is not None:
                error.__traceback__ = None  # whose frames hold bodies
        if theirs is not None:
            self._acceptor._exchanging[self._caller.peer_id] -= 1
        if for_caller is None:
            future.set_result(None)
        else:
            future.set_exception(for_caller)
        if theirs is not None:
            theirs.done(for_acceptor)

    @staticmethod
    def _count(sender: MemoryTransport, receiver: MemoryTransport, size: int) -> None:
        sender.bytes_out += size
        receiver.bytes_in += size


def _nobody(head: bytes, size: int) -> Sink:
    raise AssertionError("an exchange that is over")


def _pour(ours: Outgoing, sink: Sink) -> None:
    """A body into a sink, in the same pieces as over a real stream."""
    piece = bytearray()
    for made in pieces_of(ours):
        piece += made
        if len(piece) >= MAX_CHUNK_BYTES:
            sink(memoryview(piece[:MAX_CHUNK_BYTES]))
            piece = piece[MAX_CHUNK_BYTES:]
    if piece:
        sink(memoryview(piece))


def _torn(method: str) -> RemoteProtocolError:
    return RemoteProtocolError("torn", f"{method}: the other side ended it")


class _Channel:
    """One end of a channel, of `owner`."""

    def __init__(
        self, network: MemoryNetwork, owner: MemoryTransport, other: MemoryTransport | None, peer: str
    ) -> None:
        self.peer = peer
        self._network = network
        self._owner = owner
        self._other = other or owner
        self._far: _Channel | None = None
        self._listener: Listener | None = None
        self._taken = False
        """By its owner, opened by the peer."""
        self._open = False
        """Whether messages may leave."""
        self._severed = False
        """Whether nothing arrives any more."""
        self._why = ""
        """Why it is closed, if it is."""
        self._queue: deque[tuple[bytes, list[memoryview], int]] = deque()
        """Head, body, size of both; the first is leaving if it is open."""
        self._queued = 0
        self._arrival = 0.0
        """Of what was sent last: nothing overtakes it."""

    # ----------------------------------------------------------------- the port

    def send(self, head: bytes, *body: bytes | memoryview) -> bool:
        parts = parts_of(head, body)
        size = len(head) + sum(map(len, parts))
        if self._why:
            return False
        if self._queued + size > MAX_QUEUED_BYTES:
            self._owner.rejected[SLOW] += 1
            self._stop(SLOW)
            return False
        self._queue.append((head, parts, size))
        self._queued += size
        if self._open and len(self._queue) == 1:
            self._leave(size)
        return True

    def close(self) -> None:
        self._stop(CLOSED)

    # ----------------------------------------------------------------- from event to event

    def _ask(self, method: str) -> None:
        """At the peer, which takes it or not."""
        owner, other = self._owner, self._other
        if self._why:
            return
        if self._severed or not (owner._alive and other._alive and owner._side == other._side):
            self._network.faults["cut"] += 1
            self._stop(f"{self.peer} cannot be reached")
            return
        taken = [channel.peer for channel in other._channels if channel._taken]
        opened = other._openings.get(method)
        refused = ""
        if len(taken) >= MAX_CHANNELS or taken.count(owner.peer_id) >= MAX_CHANNELS_PER_PEER:
            other.rejected["busy"] += 1
            refused = "busy"
        elif opened is None:
            other.rejected["method"] += 1
            refused = f"does not know the method {method!r}"
        else:
            far = _Channel(self._network, other, owner, owner.peer_id)
            try:
                far._listener = opened(far)
            except RemoteProtocolError as error:
                other.rejected[error.reason] += 1
                refused = str(error)
            else:
                far._taken, far._far, self._far = True, self, far
                other._channels[far] = None
                far._begin()
        back = self._network.clock.now() + self._network._delay(other, owner)
        if refused:
            self._network.clock.call_at(back, self._stop, f"refused: {refused}")
        else:
            self._network.clock.call_at(back, self._begin)

    def _begin(self) -> None:
        if self._severed:
            self._network.faults["cut"] += 1
        elif not self._why:
            self._open = True
            if self._queue:
                self._leave(self._queue[0][2])

    def _leave(self, left: int) -> None:
        """The first message, turn by turn; then the next."""
        if self._why:
            return
        size, seconds = self._network._turn(self._owner, left)
        self._network.clock.call_at(self._network.clock.now() + seconds, self._left, left - size)

    def _left(self, left: int) -> None:
        if self._why:
            return
        if left:
            self._leave(left)
            return
        assert self._far is not None
        head, parts, size = self._queue.popleft()
        self._queued -= size
        self._network.clock.call_at(self._next_arrival(), self._far._arrive, head, bytearray().join(parts))
        if self._queue:
            self._leave(self._queue[0][2])

    def _arrive(self, head: bytes, body: bytearray) -> None:
        if self._severed:
            self._network.faults["cut"] += 1
            return
        if self._why:
            return
        assert self._listener is not None
        self._owner.bytes_in += len(head) + len(body)
        try:
            self._listener.judge(head, len(body))
            self._listener.received(head, body)
        except RemoteProtocolError as error:  # anything else is a bug, and ends the simulation
            self._owner.rejected[error.reason] += 1
            self._stop(str(error))

    def _next_arrival(self) -> float:
        arrival = self._network.clock.now() + self._network._delay(self._owner, self._other)
        self._arrival = max(self._arrival, arrival)
        return self._arrival

    def _cut(self) -> None:
        """Nothing passes any more, either way; both ends find out."""
        for end in (self, self._far):
            if end is not None and not end._severed:
                end._severed = True
                self._network.clock.call_at(self._network.clock.now() + SILENCE_S, end._fall_silent)

    def _fall_silent(self) -> None:
        if not self._why:
            self._owner.rejected[SILENT] += 1
            self._stop(SILENT)

    def _stop(self, why: str) -> None:
        """Say goodbye, and tell the listener, next."""
        if self._why:
            return
        self._why = why
        self._queue.clear()
        self._network.clock.call_at(self._network.clock.now(), self._tell)
        if self._far is not None and not self._severed:
            self._network.clock.call_at(self._next_arrival(), self._far._goodbye)

    def _goodbye(self) -> None:
        if not self._severed:
            self._stop(CLOSED)

    def _tell(self) -> None:
        self._owner._channels.pop(self, None)
        if self._listener is not None:
            self._listener.closed(self._why)


class MemoryTransport:
    """One node's `Transport`. `table` is its peer table."""

    def __init__(
        self,
        network: MemoryNetwork,
        who: Identity | str,
        swarm: str,
        link: LinkModel,
        bootstrap: Sequence[str],
        dial_only: bool,
    ) -> None:
        self.peer_id = who if isinstance(who, str) else who.peer_id
        self.addresses = [] if dial_only else [f"/memory/p2p/{self.peer_id}"]
        self.swarm = swarm
        self.link = link
        self.dial_only = dial_only
        self.bytes_in = self.bytes_out = 0
        self.messages_in = self.messages_out = 0
        self.duplicates = self.dropped = 0
        self.rejected: Counter[str] = Counter()
        self.table = PeerTable(self.peer_id, random.Random(f"{network.rng.random()}"))
        self.table.learn(bootstrap, network.clock.now(), bootstrap=True)
        self._network = network
        self._identity = who if isinstance(who, Identity) else None
        self._alive = True
        self._side = 0
        self._edges: dict[MemoryTransport, None] = {}
        self._component = _Component([self], {})
        self._handlers: dict[str, list[Handler]] = {}
        self._servers: dict[str, Server] = {}
        self._acceptors: dict[str, Acceptor] = {}
        self._exchanging: Counter[str] = Counter()
        """Exchanges accepted and under way, by caller."""
        self._openings: dict[str, Callable[[Channel], Listener]] = {}
        self._channels: dict[_Channel, None] = {}
        self._card: PeerCard | None = None
        self._renewed = -math.inf
        self._uplink_free = 0.0

    # ----------------------------------------------------------------- the port

    def subscribe(self, topic: str, handler: Handler) -> None:
        if self._alive:
            self._handlers.setdefault(topic, []).append(handler)
            self._network._subscribe(self, topic)

    def publish(self, topic: str, data: bytes) -> bool:
        late = self._uplink_free - self._network.clock.now() > MAX_BACKLOG_S
        if not self._alive or late or len(data) > MAX_BATCH_BYTES:
            self.dropped += 1
            return False
        self.messages_out += 1
        message = _Message(topic, data, {self})
        for other in self._network._receivers(self, topic):
            self._network._send(self, other, message)
        return True

    def serve(self, method: str, server: Server) -> None:
        self._servers[method] = server

    def request(self, peer: str, method: str, payload: bytes = b"", timeout: float = 10.0, limit: int = 2**20) -> bytes:
        """Answered at once: the virtual clock stands still. A peer that only dials can be asked by those connected to
        it, nobody else."""
        if len(payload) > MAX_REQUEST_BYTES:
            raise LocalProtocolError(f"a request {method!r} of {len(payload)} bytes cannot be sent")
        other = self._network._nodes.get(peer)
        if other is None or other is self or not self._can_ask(other):
            raise PeerUnreachable(f"{peer} cannot be reached")
        server = other._servers.get(method)
        if server is None:
            raise PeerUnreachable(f"{peer} does not know the method {method!r}")
        self.bytes_out += len(payload)
        other.bytes_in += len(payload)
        try:
            response = server(self.peer_id, payload)
        except RemoteProtocolError as error:
            other.rejected[error.reason] += 1
            raise
        if len(response) > min(limit, MAX_RESPONSE_BYTES):
            raise RemoteProtocolError("size", f"{len(response)} bytes, allowed are {limit}")
        other.bytes_out += len(response)
        self.bytes_in += len(response)
        return response

    def accept(self, method: str, acceptor: Acceptor) -> None:
        self._acceptors[method] = acceptor

    def exchange(
        self,
        peer: str,
        method: str,
        ours: Outgoing,
        answered: Callable[[bytes, int], Sink],
        timeout: float,
    ) -> Future[None]:
        """Whom `request` reaches. The future is done, and callbacks are called, as the clock is driven; what they raise
        but should not ends the simulation. A peer that has gone or is cut off is noticed after a latency or `TURN_S`;
        whoever was killed is told as well."""
        check_call(method, ours)
        other = self._network._nodes.get(peer)
        if other is None or other is self or not self._can_ask(other):
            future: Future[None] = Future()
            future.set_exception(PeerUnreachable(f"{peer} cannot be reached"))
            return future
        return _Exchange(self._network, self, other, method, ours, answered, timeout).future

    def listen(self, method: str, opened: Callable[[Channel], Listener]) -> None:
        self._openings[method] = opened

    def connect(self, peer: str, method: str, opened: Callable[[Channel], Listener]) -> Channel:
        """Whom `request` reaches. Listeners are told as the clock is driven, those of a node that was killed or closed
        as well; what they raise but should not ends the simulation."""
        check_method(method)
        other = self._network._nodes.get(peer)
        reachable = other is not None and other is not self and self._can_ask(other)
        channel = _Channel(self._network, self, other, peer)
        channel._listener = opened(channel)
        self._channels[channel] = None
        if other is not None and reachable:
            self._network.clock.call_at(channel._next_arrival(), channel._ask, method)
        else:
            channel._stop(f"{peer} cannot be reached")
        return channel

    def announce(self, card: PeerCard) -> None:
        """The first card spreads at once, later ones take its place when it is renewed."""
        card = msgspec.structs.replace(card, addresses=self.addresses, gossip=self.addresses, gossip_id=self.peer_id)
        if self._identity is not None:
            seal_card(card, self._identity)  # raises what a real transport would
        first, self._card = self._card is None, card
        if first:
            self._renew()

    def members(self) -> Mapping[str, PeerCard]:
        now = self._network.clock.now()
        return {
            peer: card
            for peer, (card, expires) in self._component.cards.items()
            if expires > now and peer != self.peer_id and card.swarm == self.swarm
        }

    def too_new(self) -> str:
        """Empty: cards are not written here, so all are read."""
        return ""

    def refusals(self) -> Mapping[str, Refused]:
        return {}

    def stats(self) -> Mapping[str, float]:
        """As the port says, and `duplicates`: messages that came more than once."""
        return {
            "peers": len(self.members()),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "messages_in": self.messages_in,
            "messages_out": self.messages_out,
            "dropped": self.dropped,
            "duplicates": self.duplicates,
            "restarts/gossip": 0,
            "restarts/dht": 0,
            **{f"rejected/{reason}": count for reason, count in self.rejected.items()},
        }

    def close(self) -> None:
        """Its card goes with it, and its channels."""
        if self._alive:
            self._component.cards.pop(self.peer_id, None)
            for channel in list(self._channels):
                channel.close()
            self._network._remove(self)

    # ----------------------------------------------------------------- what happens to it

    def _can_ask(self, other: MemoryTransport) -> bool:
        if not self._alive or self._side != other._side:
            return False
        knows = self._component is other._component or bool(self.table.addresses_of(other.peer_id))
        return other in self._edges or (knows and not other.dial_only)

    def _receive(self, sender: MemoryTransport, message: _Message) -> None:
        if not self._alive or self._side != sender._side:
            self._network.faults["cut"] += 1
            return
        self.bytes_in += len(message.data)
        if self in message.seen:
            self.duplicates += 1
            return
        message.seen.add(self)
        if self._network.degree is not None:
            for other in self._network._receivers(self, message.topic):
                if other is not sender:
                    self._network._send(self, other, message)
        self.messages_in += 1
        for handler in self._handlers[message.topic]:
            try:
                handler(message.data)
            except RemoteProtocolError as error:  # anything else is a bug, and ends the simulation
                self.rejected[error.reason] += 1

    def _tick(self) -> None:
        """Renew the card, look up others', dial."""
        if not self._alive:
            return
        network, now = self._network, self._network.clock.now()
        if self._card is not None and now - self._renewed >= CARD_RENEWAL_S:
            self._renew()
        self._look_up(now)
        self.table.set_connected((other.peer_id for other in self._edges), now)
        for peer in self.table.to_dial(now):
            network._dial(self, peer)
        network.clock.call_at(now + LOOKUP_S * network.rng.uniform(0.9, 1.1), self._tick)

    def _look_up(self, now: float) -> None:
        cards = self._component.cards
        wanted: Iterable[str] = cards
        if len(cards) > LOOKUP_CARDS:
            known = list(self.table.members(now))
            wanted = known + self._network.rng.sample(list(cards), max(0, LOOKUP_CARDS - len(known)))
        for peer in wanted:
            card, expires = cards.get(peer, (None, 0.0))
            if card is not None and expires > now and card.swarm == self.swarm:
                self.table.see(peer, card, now)

    def _renew(self) -> None:
        assert self._card is not None
        self._renewed = now = self._network.clock.now()
        card = msgspec.structs.replace(self._card, created=now)
        self._network.clock.call_at(now + SPREAD_S, self._spread, card)

    def _spread(self, card: PeerCard) -> None:
        if not self._alive:
            return
        cards = self._component.cards
        cards[self.peer_id] = card, card.created + CARD_TTL_S
        if len(cards) > 2 * len(self._component.nodes):
            now = self._network.clock.now()
            self._component.cards = {peer: entry for peer, entry in cards.items() if entry[1] > now}
