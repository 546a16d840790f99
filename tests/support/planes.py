"""One node's plane, with a real p2pd, for scenarios."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from swarm_protocol.dials import Dials
from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.messages import PeerCard
from swarm_protocol.topics import bucket_of
from swarm_protocol.transports.base import Acceptor, Server
from swarm_protocol.transports.p2p.plane import HivemindPlane
from swarm_protocol.transports.ports import Port
from swarm_protocol.transports.settings import NetworkSettings
from swarm_protocol.transports.streams.services import Services

SWARM = "ab" * 32
TTL_S = 20.0
HANG_S = 60.0
EVERYWHERE = range(16)


class Node:
    """A plane with what tests want to know of it."""

    def __init__(self, folder: Path, name: str, **settings: Any) -> None:
        self.said: list[str] = []
        path = folder / f"{name}.key"
        self.name, self.identity = name, Identity.load_or_create(path)
        self.id = self.identity.peer_id
        defaults = dict(listen="127.0.0.1", port=0, relay=False, card_ttl_s=TTL_S)
        self.ways: dict[str, list[str]] = {}  # peer id -> addresses that this node was told of
        network, say = NetworkSettings(**(defaults | settings)), self.said.append
        port = None if network.dial_only else Port(network.listen, network.port, report=say)
        self.services = Services(network, say)
        self.plane = HivemindPlane(
            self.identity,
            path,
            SWARM,
            network,
            port,
            self.services,
            say,
            lambda: None,
            Dials(),
            known=lambda peer: self.ways.get(peer) or self.stored_ways(peer),
            told=self.stored_ways,
        )

    def serve(self, method: str, server: Server) -> None:
        self.services.answers.servers[method] = server

    def accept(self, method: str, acceptor: Acceptor) -> None:
        self.services.exchanges.acceptors[method] = acceptor

    def stored_ways(self, peer: str) -> list[str]:
        """Addresses on the card of a peer that is stored here."""
        try:
            records = self.plane._storage.records(self.plane.validator.keys[bucket_of(peer)], time.time())
        except RemoteProtocolError:  # no peer's id
            return []
        held = {name: value for name, value, _ in records}
        return list(self.plane.validator.card(held[peer])[1].addresses) if peer in held else []

    def card(self, **changes: Any) -> PeerCard:
        card = PeerCard(1, SWARM, time.time(), self.name, ["trainer"], self.plane.addresses)
        return msgspec.structs.replace(card, **changes)

    async def names(self) -> set[str]:
        """Of all members that this node finds."""
        return {card.name for card in (await self.plane.get_cards(EVERYWHERE)).values()}

    async def ask(
        self, peer: Node, method: str, payload: bytes = b"", timeout: float = HANG_S, limit: int = 1024
    ) -> bytes:
        return await self.plane.streams.request(peer.id, method, payload, timeout, limit)

    async def refused(self, peer: Node, method: str, payload: bytes = b"", timeout: float = HANG_S) -> str:
        """How a request fails: the reason, or `unreachable`."""
        try:
            await self.ask(peer, method, payload, timeout)
        except RemoteProtocolError as error:
            return error.reason
        except PeerUnreachable:
            return "unreachable"
        return "answered"
