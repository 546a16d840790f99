"""Cards that a newcomer gets together with the manifest, by the peer that gives it.

    request: CARDS_METHOD, no payload       answer: msgpack list of at most `MAX_FIRST_CARDS` signed cards

With these it knows members, and where these gossip, before it takes part in the DHT: the peer that it asked may be gone
in the next moment. Peers of earlier versions do not know the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm_protocol.codec import decode_as, verify_card
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import MAX_CARD_BYTES
from swarm_protocol.messages import PeerCard

CARDS_METHOD = "cards"
MAX_FIRST_CARDS = 8  # as many as a node wants connections
MAX_FIRST_BYTES = MAX_FIRST_CARDS * (MAX_CARD_BYTES + 8)

_decoder = msgspec.msgpack.Decoder(
    Annotated[list[Annotated[bytes, Meta(max_length=MAX_CARD_BYTES)]], Meta(max_length=MAX_FIRST_CARDS)]
)


def write_cards(signed: Sequence[bytes]) -> bytes:
    """The answer with these signed cards."""
    return msgspec.msgpack.encode(signed)


def read_cards(data: bytes, swarm: str) -> dict[str, PeerCard]:
    """Peer id -> card in an answer. Cards that their peers did not sign, or that are of another swarm, are left out.
    Raises RemoteProtocolError `size` or `schema`."""
    if len(data) > MAX_FIRST_BYTES:
        raise RemoteProtocolError("size", f"{len(data)} bytes, allowed are {MAX_FIRST_BYTES}")
    cards = {}
    for signed in decode_as(_decoder, data):
        try:
            peer, card = verify_card(signed, swarm)
        except RemoteProtocolError:  # perhaps of a version that this node does not read
            continue
        cards[peer] = card
    return cards
