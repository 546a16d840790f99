"""A node of the DHT among peers that a table of canned answers stands for: no p2pd, no sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from protocol.codec import seal_card
from protocol.errors import PeerUnreachable
from protocol.identity import Identity
from protocol.messages import PeerCard
from protocol.topics import bucket_of
from protocol.transports.dht import CardDHT
from protocol.transports.dht_wire import Record, encode_bucket, node_id_of
from protocol.transports.records import CardStorage, CardValidator
from protocol.transports.refusals import Refusals

SWARM = "ab" * 32
Find = Callable[[dht_pb2.FindRequest], dht_pb2.FindResponse]


def record(peer: Identity) -> Record:
    """The card of a peer, as it lies in the DHT."""
    now = time.time()
    return peer.peer_id, msgspec.msgpack.encode(seal_card(PeerCard(1, SWARM, now, "me", []), peer)), now + 30.0


class Node:
    """One `CardDHT`, and what the peers that it calls answer to a find; those that are not there cannot be dialled."""

    def __init__(self) -> None:
        self.identity = Identity.generate()
        self.validator = CardValidator(SWARM, 60.0)
        self.refused: Counter[str] = Counter()
        self.names: list[tuple[str, set[PeerID]]] = []
        self.dht = CardDHT(
            None,  # type: ignore[arg-type]
            self.identity.peer_id,
            self.validator,
            CardStorage(),
            Refusals(self.refused),
            named=lambda namer, peers: self.names.append((namer, set(peers))),
        )
        self.answers: dict[str, Find] = {}
        self.dht.get_stub = self._stub

    def _stub(self, p2p: object, peer: PeerID) -> Any:
        async def find(request: dht_pb2.FindRequest, timeout: float) -> dht_pb2.FindResponse:
            if str(peer) not in self.answers:
                raise PeerUnreachable("nobody listens there")
            return self.answers[str(peer)](request)

        return SimpleNamespace(rpc_find=find)

    def meets(self, peer: Identity, answer: Find) -> PeerID:
        """`peer` answers finds from now on, and is in the routing table."""
        id = PeerID.from_base58(peer.peer_id)
        self.answers[peer.peer_id] = answer
        self.dht.table.add_or_update_node(node_id_of(id), id)
        return id

    def finds(self) -> set[str]:
        return set(asyncio.run(self.dht.find_cards(self.validator.keys, 2, (), ())))


def answer(node: Node, *records: Record, named: list[bytes]) -> Find:
    """Answers each find with these cards, and with these names for each key."""

    def find(request: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
        response = dht_pb2.FindResponse()
        for key in request.keys:
            here = [r for r in records if node.validator.keys[bucket_of(r[0])] == key]
            result = response.results.add(type=dht_pb2.FOUND_DICTIONARY if here else dht_pb2.NOT_FOUND)
            result.value = encode_bucket(here) if here else b""
            result.nearest_peer_ids.extend(named)
            result.nearest_node_ids.extend(node_id_of(PeerID(id)).to_bytes() if len(id) < 99 else b"" for id in named)
        return response

    return find


def test_a_name_of_nobody_ends_no_lookup() -> None:
    node, bob, nobody = Node(), Identity.generate(), PeerID.from_base58(Identity.generate().peer_id)
    node.meets(bob, answer(node, record(bob), named=[nobody.to_bytes()]))
    assert node.finds() == {bob.peer_id}
    assert node.dht._is_avoided(nobody) and node.names == [(bob.peer_id, {nobody})]


@pytest.mark.parametrize("id", [b"", bytes(65), bytes(2**20)])
def test_no_name_of_a_wrong_length_is_remembered(id: bytes) -> None:
    node, bob = Node(), Identity.generate()
    node.meets(bob, answer(node, named=[id] * 20))
    assert node.finds() == set() and node.names == [(bob.peer_id, set())]
    assert node.refused == {"node_id": 20 * len(node.validator.keys)}
