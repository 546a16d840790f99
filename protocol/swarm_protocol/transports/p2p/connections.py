"""Connections of one p2pd with other peers: which there are, and how a peer is dialled."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from swarm_protocol.dials import Dials
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.peers import peer_of
from swarm_protocol.transports.dht.records import CardStorage
from swarm_protocol.transports.p2p.daemon import P2PD_CALL_S, Daemon
from swarm_protocol.transports.refusals import Refusals, ip_of
from swarm_protocol.transports.settings import endpoint

P2PD_DIAL_S = 8.0  # longest that p2pd may take to connect to a peer
KNOCK_S = 4.0  # longest that a TCP connection may take which only shows whether somebody listens at an address
LOCATE_EVERY_S = 1.0
"""Shortest time between two looks at where refused peers are connected from: a hostile one causes thousands of refusals
a second."""
ANOTHER_KEY = re.compile(r"\[(/\S+)\] [^\n]*peer id mismatch: expected \w+, but remote key matches (\w{46,64})")
"""go-libp2p's words when another peer than the one dialled answers at an address."""


class Connections:
    """The peers that are connected with one node."""

    def __init__(self, daemon: Daemon, dials: Dials, refusals: Refusals, storage: CardStorage) -> None:
        self.dials = dials
        self.count = 0  # connected peers when that was looked at last
        self.serving: dict[str, None] = {}  # connected peers that keep a part of the DHT, longest connected first
        self._daemon = daemon
        self._refusals = refusals
        self._storage = storage
        self._locating: asyncio.Task[None] | None = None
        refusals.unlocated = self._locate_soon

    async def connected(self) -> Mapping[str, list[str]]:
        """Peer id -> addresses at the other ends of its connections. These peers have proved their keys there. Raises
        PeerUnreachable."""
        peers = await self._daemon.bounded(self._daemon.running().list_peers(), P2PD_CALL_S)
        found = {str(peer.peer_id): [str(address) for address in peer.addrs] for peer in peers}
        for peer, addresses in found.items():
            self.dials.prove(peer, addresses, time.time())
        self._refusals.locate({peer: ip_of(addresses) for peer, addresses in found.items()})
        self._storage.connected = found.keys()
        self.count = len(found)
        self.serving = {peer: None for peer in self.serving if peer in found}
        return found

    async def dial(self, peer: str, addresses: Sequence[str]) -> PeerID:
        """Connect p2pd to a peer, if it is not connected, at those of these addresses that may be dialled now. Raises
        PeerUnreachable."""
        new = peer not in await self.connected()
        if new:
            own = [address for address in addresses if peer_of(address) == peer]
            allowed = [address for address in own if self.dials.take(address, time.time())]
            if own and not allowed:
                raise PeerUnreachable(f"{peer} was dialled at {', '.join(own)} not long ago")
            addresses = await _answering(allowed)
        try:
            to = PeerID.from_base58(peer)
            ways = [_way(address) for address in addresses]
        except (ValueError, MultiaddrError) as error:
            raise PeerUnreachable(f"{peer} at {addresses}: {error}") from error
        try:
            await self._daemon.bounded(self._daemon.running()._client.connect(to, ways), P2PD_DIAL_S)
        except PeerUnreachable as error:
            for address, other in ANOTHER_KEY.findall(str(error)):
                self.dials.hint(address, other, time.time())
            raise
        if new:
            if len(addresses) == 1 and "/dns" in addresses[0]:
                self.dials.prove(peer, addresses, time.time())  # of others, the connection shows the address
            await self.connected()
        return to

    def _locate_soon(self) -> None:
        if not self._daemon.closing and (self._locating is None or self._locating.done()):
            self._locating = asyncio.get_running_loop().create_task(self._locate())

    async def _locate(self) -> None:
        """Learn where refused peers are connected from while they still are: a hostile one may leave at once."""
        with suppress(PeerUnreachable):
            await self.connected()
        await asyncio.sleep(LOCATE_EVERY_S)


def _way(address: str) -> Multiaddr:
    """`address` without the peer id at its end, for p2pd. hivemind would write the Ed25519 id of a relay as a CID,
    which go-libp2p cannot read."""
    head = address.rpartition("/p2p/")[0]
    to_relay, circuit, _ = head.partition("/p2p-circuit")
    if not circuit:
        return Multiaddr(head)
    to_relay, _, relay = to_relay.rpartition("/p2p/")
    id = PeerID.from_base58(relay).to_bytes()
    return Multiaddr(Multiaddr(to_relay).to_bytes() + b"\xa5\x03" + bytes([len(id)]) + id + b"\xa2\x02")


async def _answering(addresses: Sequence[str]) -> list[str]:
    """The addresses at which somebody listens, and those that lead through a relay. Raises PeerUnreachable if there is
    none.

    p2pd must not find out by itself. It refuses to dial an address that failed, for up to five minutes, and would miss
    the return of a peer.
    """
    found = await asyncio.gather(*map(_answers, addresses))
    answering = [address for address, answers in zip(addresses, found, strict=True) if answers]
    if not answering:
        raise PeerUnreachable(f"nobody listens at {', '.join(addresses) or 'an unknown address'}")
    return answering


async def _answers(address: str) -> bool:
    target = endpoint(address)
    if target is None:
        return "/p2p-circuit" in address
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*target), KNOCK_S)
    except (OSError, TimeoutError, ValueError):  # the latter for names that cannot be any
        return False
    writer.close()
    return True
