"""A transport whose other members answer from a table. Nothing travels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.transports.base import Acceptor, Handler, Outgoing, Server, Sink
from swarm_protocol.transports.refusals import Refused
from swarm_protocol.twins import Twins

SWARM = "0" * 64


def peer_id(number: int) -> str:
    return Identity.generate(bytes([number] * 32)).peer_id


def address(number: int, port: int = 31330) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id(number)}"


def card(name: str = "bob", created: float = 0.0) -> PeerCard:
    return PeerCard(PROTOCOL_VERSION, SWARM, created, name, ["trainer"])


class FakeTransport:
    """Peer 0; `others` = peer id -> method -> server, asked in any order."""

    def __init__(self, others: Mapping[str, Mapping[str, Server]] | None = None) -> None:
        self.peer_id = peer_id(0)
        self.addresses: list[str] = []
        self.others = others or {}
        self.cards: dict[str, PeerCard] = {peer: card() for peer in self.others}
        self.served: dict[str, Server] = {}
        self.asked: Counter[tuple[str, str]] = Counter()

    def request(self, peer: str, method: str, payload: bytes = b"", timeout: float = 10.0, limit: int = 2**20) -> bytes:
        self.asked[peer, method] += 1
        if method not in self.others.get(peer, {}):
            raise PeerUnreachable("nobody")
        return self.others[peer][method](self.peer_id, payload)

    def members(self) -> Mapping[str, PeerCard]:
        return self.cards

    def serve(self, method: str, server: Server) -> None:
        self.served[method] = server

    def accept(self, method: str, acceptor: Acceptor) -> None: ...

    def exchange(
        self, peer: str, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink], timeout: float
    ) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(PeerUnreachable("nobody"))
        return future

    def subscribe(self, topic: str, handler: Handler) -> None: ...

    def publish(self, topic: str, data: bytes) -> bool:
        return True

    def announce(self, card: PeerCard) -> None: ...

    def hear(self, peer: str, addresses: Sequence[str]) -> None: ...

    def meet(self, cards: Mapping[str, PeerCard]) -> None:
        self.cards.update(cards)

    def left(self) -> Mapping[str, PeerCard]:
        return {}

    def too_new(self) -> str:
        return ""

    def clock_ahead(self) -> float | None:
        return None

    def twins(self) -> Twins:
        return Twins(0.0)

    def stats(self) -> Mapping[str, float]:
        return {}

    def restarted(self) -> Mapping[str, str]:
        return {}

    def refusals(self) -> Mapping[str, Refused]:
        return {}

    def close(self) -> None: ...
