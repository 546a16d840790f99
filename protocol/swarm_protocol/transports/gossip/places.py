"""Which connections of a gossip process may stay when there are too many.

    TCP accepted -> arriving (handshake: Noise, yamux) -> a place -> proven

Arriving. `MAX_ARRIVING` at a time. One more, and the connection that was silent for longest at the busiest address is
hung up on. Each has `HANDSHAKE_S`, and `PATIENCE_S` while half of that room is free.

Places. While any is free, no address is limited. When all are taken, a newcomer gets the place of another connection,
or none. A connection may lose its place if

    its address holds more places than the newcomer's would                           at once
    its address holds as many, and it is not proven                                    after `STAY_S`
    it is of the newcomer's own address, which would hold more than a quarter          unproven: at once
                                                                                       proven: after `PLACE_TURN_S`

Of those, addresses with more than a quarter of the places come first, then connections that are not proven, then the
busiest address, then the oldest connection. The two pauses keep honest peers, who dial again when they are dropped,
from driving each other out in circles.

Proven is a connection that brought a message which the gate let in, or that has kept its place for `SETTLED_S`. The
second is for honest leaves that only listen: they cannot be told from idle attackers by what they say, and an attacker
can buy the first with one signed batch. An attacker with few addresses gains nothing by either, since the busier
address gives way, proven or not.

Connections that this node dialled never give way, and a sixteenth of the places is kept for them: an attacker at
many addresses can fill the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MAX_ARRIVING = 128
"""A handshake takes 10 to 50 ms on an idle machine, and some 50 KB; with 512 places the process stays below the 1,024
file descriptors that systems usually allow."""
HANDSHAKE_S = 3.0  # four round trips by satellite; honest peers on a line need a tenth
PATIENCE_S = 10.0  # while half of the room is free, a machine that is busy training may take longer
MAX_HANDSHAKE_BYTES = 2**16
"""Bytes of a handshake. An honest one takes less than 2 KB; the library would buffer any length that it is told."""
WINDOW_BYTES = 4 * 2**20
"""Largest receive window of a stream: 13 MB/s at 300 ms, as much as one connection may bring (`gate`)."""
MAX_BUFFERED = 2 * WINDOW_BYTES
"""Bytes that a connection may have lying unread: one gossip stream's, and room for another after the first broke."""
STAY_S = 10.0
"""The messages of the last seconds are sent to a newcomer again: with ten seconds each, nobody hears nothing."""
PLACE_TURN_S = 60.0  # a hundred peers behind one address lose their link to a full hub at most once a minute
SETTLED_S = 60.0  # the node hangs up within some ten seconds on ids that are on no member's card, so this is a member's
OWN_SHARE = 16  # one in this many places is for connections that this node dials: 4 of 64, twice what a mesh needs


@dataclass(eq=False)
class Link:
    """One TCP connection, as far as admission goes."""

    address: str  # neighbourhood of the connection's other end (`hosts`)
    inbound: bool
    since: float  # when it arrived, or took its place (seconds of a monotonic clock)
    heard: float = 0.0  # when it last sent anything
    heard_bytes: int = 0  # bytes that it sent during its handshake
    valid: bool = False  # whether it brought a message that was accepted

    def proven(self, now: float) -> bool:
        return self.valid or now - self.since >= SETTLED_S


class ConnectionPlaces:
    """Pure: it decides, the caller hangs up and calls `leave`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.quarter = max(1, most // 4)
        self.arriving: set[Link] = set()
        self.seated: set[Link] = set()

    def arrive(self, link: Link) -> Link | None:
        """An inbound connection begins its handshake; the connection that must be hung up on, if any."""
        self.arriving.add(link)
        if len(self.arriving) <= MAX_ARRIVING:
            return None
        held = Counter(other.address for other in self.arriving)
        loser = min(self.arriving - {link}, key=lambda other: (-held[other.address], max(other.heard, other.since)))
        self.leave(loser)
        return loser

    def late(self, now: float) -> list[Link]:
        """Connections whose handshake has taken too long."""
        patience = HANDSHAKE_S if 2 * len(self.arriving) > MAX_ARRIVING else PATIENCE_S
        return [link for link in self.arriving if now - link.since > patience]

    def has_room(self, inbound: bool) -> bool:
        """Whether a connection gets a place without another giving way."""
        dialled = sum(not link.inbound for link in self.seated)
        kept = max(0, self.most // OWN_SHARE - dialled) if inbound else 0
        return len(self.seated) + kept < self.most

    def take(self, link: Link, now: float) -> Link | None:
        """A connection has finished its handshake; the connection that must be hung up on, if any: perhaps itself."""
        self.arriving.discard(link)
        loser = None if self.has_room(link.inbound) else self._loser(link, now)
        if loser is not None:
            self.leave(loser)
        if loser is not link:
            link.since = now
            self.seated.add(link)
        return loser

    def leave(self, link: Link) -> None:
        self.arriving.discard(link)
        self.seated.discard(link)

    def _loser(self, newcomer: Link, now: float) -> Link:
        if not newcomer.inbound:
            return newcomer
        inbound = [link for link in self.seated if link.inbound]
        held = Counter(link.address for link in (*inbound, newcomer))
        return min(
            (link for link in inbound if self._may_lose(link, newcomer, held, now)),
            key=lambda link: (held[link.address] <= self.quarter, link.proven(now), -held[link.address], link.since),
            default=newcomer,
        )

    def _may_lose(self, link: Link, newcomer: Link, held: Counter[str], now: float) -> bool:
        theirs, ours, stayed, proven = (held[link.address], held[newcomer.address], now - link.since, link.proven(now))
        if link.address == newcomer.address and ours > self.quarter:
            return not proven or stayed >= PLACE_TURN_S
        return theirs > ours or (theirs == ours and not proven and stayed >= STAY_S)
