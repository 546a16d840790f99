"""Finds the addresses of peers that others name in the DHT.

    a peer answers a find -> it names the peers nearest to the key, by id -> is one of them not connected:
    its card is known here -> dial it        it is not -> ask the peer that named it for the addresses on its card

p2pd has a DHT of its own for this (go-libp2p's Kademlia), which is off: it keeps strangers' data for a day, and dials
any addresses in it. Here an answer is a list of at most `MAX_ADDRESSES`, nothing is kept, and the addresses are dialled
under the same limits as those of any card.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm_protocol.codec import decode_as
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.identity import public_key_of
from swarm_protocol.limits import MAX_ADDRESSES
from swarm_protocol.messages import Address
from swarm_protocol.peers import peer_of

METHOD = "addresses"  # request: a peer id in ASCII. Answer: msgpack list of its addresses, empty if they are not known.
MAX_ADDRESSES_BYTES = 2048  # eight addresses of 192 characters, with room for their headers
WHEREABOUTS_S = 3.0  # time limit of the question: as long as a call in the DHT may take
MAX_NAMERS = 4096  # peers whose namer is remembered, some 200 bytes each. Those named longest ago are forgotten first.

_decoder = msgspec.msgpack.Decoder(Annotated[list[Address], Meta(max_length=2 * MAX_ADDRESSES)])


class Whereabouts:
    """Records which peer named which, and answers questions for addresses."""

    def __init__(self, told: Callable[[str], Sequence[str]]) -> None:
        """`told` returns the addresses on a peer's card, if this node has it. Addresses that the user gave are not
        passed on."""
        self._told = told
        self._namers: OrderedDict[str, str] = OrderedDict()

    def serve(self, caller: str, payload: bytes) -> bytes:
        """Answer `METHOD`. Raises RemoteProtocolError `identity` if the payload is no peer id."""
        try:
            peer = payload.decode("ascii")
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("identity", "not ASCII") from error
        public_key_of(peer)
        return msgspec.msgpack.encode(list(self._told(peer))[:MAX_ADDRESSES])

    def named(self, namer: str, peers: Iterable[object]) -> None:
        """Note that `namer` named these peers, whose ids have a checked length, as parts of the DHT."""
        for peer in map(str, peers):
            self._namers[peer] = namer
            self._namers.move_to_end(peer)
            if len(self._namers) > MAX_NAMERS:
                self._namers.popitem(last=False)

    def namer(self, peer: str) -> str:
        """The peer that named `peer` last; empty if none did."""
        return self._namers.get(peer, "")


def read_answer(peer: str, data: bytes) -> list[str]:
    """Addresses of `peer` in an answer; others are left out. Raises RemoteProtocolError `schema`."""
    addresses: list[str] = decode_as(_decoder, data)
    return [address for address in addresses if peer_of(address) == peer][:MAX_ADDRESSES]
