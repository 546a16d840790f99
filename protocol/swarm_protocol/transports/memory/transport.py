"""One node of the network in memory."""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import msgspec

from swarm_protocol.codec import sign_card
from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.limits import CARD_RENEWAL_S, CARD_TTL_S, MAX_BATCH_BYTES, MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES
from swarm_protocol.messages import PeerCard
from swarm_protocol.peers import PeerTable
from swarm_protocol.transports.base import Acceptor, Channel, Handler, Listener, Outgoing, Server, Sink
from swarm_protocol.transports.memory.channels import MemoryChannel
from swarm_protocol.transports.memory.exchanges import MemoryExchange
from swarm_protocol.transports.memory.gossip import MemoryGossip
from swarm_protocol.transports.memory.links import LinkModel
from swarm_protocol.transports.memory.station import Air, GossipMessage, Station
from swarm_protocol.transports.refusals import Refused
from swarm_protocol.transports.streams.exchanges import check_call
from swarm_protocol.transports.streams.stream import check_method
from swarm_protocol.twins import Twins

SPREAD_S = 2.0  # delay until others find a card, and until components that meet become one
LOOKUP_S = 5.0  # mean time between two lookups of cards by a node; after each, it dials
LOOKUP_CARDS = 32  # number of other peers' cards in a node's own table. `members` returns all of them.
MAX_BACKLOG_S = 10.0  # a gossip message that would wait longer than this for its sender's uplink is dropped


class Network(Air):
    """What a node uses of its network."""

    gossip: MemoryGossip
    nodes: dict[str, MemoryTransport]  # peer id -> node, if it is running
    left: dict[str, PeerCard]  # peer id -> last card, of nodes that were closed

    @abstractmethod
    def dial(self, node: MemoryTransport, peer: str) -> None:
        """Connect `node` with a peer, if that can be dialled. Their components merge after `SPREAD_S`."""

    @abstractmethod
    def remove(self, node: MemoryTransport) -> None:
        """The node is gone."""


class MemoryTransport(Station):
    """One node's `Transport`. `table` is its peer table."""

    def __init__(
        self,
        network: Network,
        who: Identity | str,
        swarm: str,
        link: LinkModel,
        bootstrap: Sequence[str],
        dial_only: bool,
    ) -> None:
        super().__init__(who if isinstance(who, str) else who.peer_id, link, dial_only)
        self.addresses = [] if dial_only else [f"/memory/p2p/{self.peer_id}"]
        self.swarm = swarm
        self.messages_in = self.messages_out = 0
        self.duplicates = self.dropped = 0
        self.table = PeerTable(self.peer_id, random.Random(f"{network.rng.random()}"))
        self.table.learn(bootstrap, network.clock.now(), bootstrap=True)
        self._network = network
        self._identity = who if isinstance(who, Identity) else None
        self.handlers: dict[str, list[Handler]] = {}
        self._servers: dict[str, Server] = {}
        self._card: PeerCard | None = None
        self._renewed = -math.inf

    @property
    def bytes_out(self) -> int:
        return self.uplink.bytes_out

    def subscribe(self, topic: str, handler: Handler) -> None:
        if self.alive:
            self.handlers.setdefault(topic, []).append(handler)
            self._network.gossip.subscribe(self, topic)

    def publish(self, topic: str, data: bytes) -> bool:
        late = self.uplink.free_at - self._network.clock.now() > MAX_BACKLOG_S
        if not self.alive or late or len(data) > MAX_BATCH_BYTES:
            self.dropped += 1
            return False
        self.messages_out += 1
        message = GossipMessage(topic, data, {self})
        for other in self._network.gossip.receivers(self, topic):
            self._network.gossip.send(self, other, message)
        return True

    def serve(self, method: str, server: Server) -> None:
        self._servers[method] = server

    def request(self, peer: str, method: str, payload: bytes = b"", timeout: float = 10.0, limit: int = 2**20) -> bytes:
        """The answer comes at once, without a step of the virtual clock. A peer that only dials can be asked only by
        peers connected to it."""
        if len(payload) > MAX_REQUEST_BYTES:
            raise LocalProtocolError(f"a request {method!r} of {len(payload)} bytes cannot be sent")
        other = self._reach(peer)
        if other is None:
            raise PeerUnreachable(f"{peer} cannot be reached")
        server = other._servers.get(method)
        if server is None:
            raise PeerUnreachable(f"{peer} does not know the method {method!r}")
        self.uplink.bytes_out += len(payload)
        other.bytes_in += len(payload)
        try:
            response = server(self.peer_id, payload)
        except RemoteProtocolError as error:
            other.rejected[error.reason] += 1
            raise
        if len(response) > min(limit, MAX_RESPONSE_BYTES):
            raise RemoteProtocolError("size", f"{len(response)} bytes, allowed are {limit}")
        other.uplink.bytes_out += len(response)
        self.bytes_in += len(response)
        return response

    def accept(self, method: str, acceptor: Acceptor) -> None:
        self.acceptors[method] = acceptor

    def exchange(
        self, peer: str, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink], timeout: float
    ) -> Future[None]:
        """Reaches the same peers as `request`. The future and callbacks complete as the clock is driven; an unexpected
        exception in a callback ends the simulation. A peer that has gone or is cut off is noticed after a latency or
        `UPLINK_TURN_S`; callbacks of a killed node are called too."""
        check_call(method, ours)
        other = self._reach(peer)
        if other is None:
            future: Future[None] = Future()
            future.set_exception(PeerUnreachable(f"{peer} cannot be reached"))
            return future
        return MemoryExchange(self._network, self, other, method, ours, answered).begin(timeout)

    def listen(self, method: str, opened: Callable[[Channel], Listener]) -> None:
        self.openings[method] = opened

    def connect(self, peer: str, method: str, opened: Callable[[Channel], Listener]) -> Channel:
        """Reaches the same peers as `request`. Listeners are called as the clock is driven, also those of a killed or
        closed node; an unexpected exception in a listener ends the simulation."""
        check_method(method)
        other = self._reach(peer)
        channel = MemoryChannel(peer, other or self, self, self._network)
        channel.listener = opened(channel)
        self.channels[channel] = None
        if other is not None:
            self._network.clock.call_at(channel.next_arrival(), channel.ask, method)
        else:
            channel.stop(f"{peer} cannot be reached")
        return channel

    def announce(self, card: PeerCard) -> None:
        """The first card spreads at once, a later one at the next renewal."""
        card = msgspec.structs.replace(card, addresses=self.addresses, gossip=self.addresses, gossip_id=self.peer_id)
        if self._identity is not None:
            sign_card(card, self._identity)  # raises what a real transport would
        first, self._card = self._card is None, card
        if first:
            self._renew()

    def hear(self, peer: str, addresses: Sequence[str]) -> None:
        """It is dialled after the next lookup."""
        if peer not in self.members():
            self.table.hear(peer, addresses, self._network.clock.now())

    def meet(self, cards: Mapping[str, PeerCard]) -> None:
        for peer, card in cards.items():
            self.table.see(peer, card, self._network.clock.now())

    def members(self) -> Mapping[str, PeerCard]:
        now = self._network.clock.now()
        return {
            peer: card
            for peer, (card, expires) in self.component.cards.items()
            if expires > now and peer != self.peer_id and card.swarm == self.swarm
        }

    def left(self) -> Mapping[str, PeerCard]:
        now = self._network.clock.now()
        return {
            peer: card
            for peer, card in self._network.left.items()
            if card.created + CARD_TTL_S > now and peer != self.peer_id and card.swarm == self.swarm
        }

    def too_new(self) -> str:
        """Always empty: cards are not encoded here, so none can be too new."""
        return ""

    def clock_ahead(self) -> float | None:
        """None, as all nodes of this network have one clock."""
        return None

    def twins(self) -> Twins:
        """None, as no two nodes of this network have one key."""
        return Twins(0.0)

    def restarted(self) -> Mapping[str, str]:
        return {}

    def refusals(self) -> Mapping[str, Refused]:
        return {}

    def stats(self) -> Mapping[str, float]:
        """The totals that `Transport` describes, and `duplicates`: messages that arrived more than once."""
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
        """Remove the node, its card and its channels from the network."""
        if self.alive:
            self.component.cards.pop(self.peer_id, None)
            if self._card is not None:
                gone = {"created": self._network.clock.now(), "addresses": [], "gossip": [], "gossip_id": ""}
                self._network.left[self.peer_id] = msgspec.structs.replace(self._card, **gone)
            for channel in list(self.channels):
                channel.close()
            self._network.remove(self)

    def _reach(self, peer: str) -> MemoryTransport | None:
        """The node of a peer, if it can be asked."""
        other = self._network.nodes.get(peer)
        if other is None or other is self or not self.can_reach(other):
            return None
        knows = self.component is other.component or bool(self.table.addresses_of(peer))
        return other if other in self.edges or (knows and not other.dial_only) else None

    def receive(self, sender: Station, message: GossipMessage) -> None:
        if not self.alive or self.side != sender.side:
            self._network.faults["cut"] += 1
            return
        self.bytes_in += len(message.data)
        if self in message.seen:
            self.duplicates += 1
            return
        message.seen.add(self)
        if self._network.gossip.degree is not None:
            for other in self._network.gossip.receivers(self, message.topic):
                if other is not sender:
                    self._network.gossip.send(self, other, message)
        self.messages_in += 1
        for handler in self.handlers[message.topic]:
            try:
                handler(message.data)
            except RemoteProtocolError as error:  # anything else is a bug, and ends the simulation
                self.rejected[error.reason] += 1

    def tick(self) -> None:
        if not self.alive:
            return
        now = self._network.clock.now()
        if self._card is not None and now - self._renewed >= CARD_RENEWAL_S:
            self._renew()
        self._look_up(now)
        self.table.set_connected((other.peer_id for other in self.edges), now)
        for peer in self.table.to_dial(now):
            self._network.dial(self, peer)
        self._network.clock.call_at(now + LOOKUP_S * self._network.rng.uniform(0.9, 1.1), self.tick)

    def _look_up(self, now: float) -> None:
        cards = self.component.cards
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
        self._network.clock.call_in(SPREAD_S, self._spread, card)

    def _spread(self, card: PeerCard) -> None:
        if not self.alive:
            return
        cards = self.component.cards
        cards[self.peer_id] = card, card.created + CARD_TTL_S
        if len(cards) > 2 * len(self.component.nodes):
            now = self._network.clock.now()
            self.component.cards = {peer: entry for peer, entry in cards.items() if entry[1] > now}
