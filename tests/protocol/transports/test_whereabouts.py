"""What a node says of where other peers are, and what it believes of that."""

from __future__ import annotations

import msgspec
import pytest

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.limits import MAX_ADDRESSES
from swarm_protocol.transports.dht.whereabouts import MAX_NAMERS, Whereabouts, read_answer

PEER = Identity.generate(bytes(32)).peer_id
WAYS = [f"/ip4/192.0.2.{i}/tcp/1/p2p/{PEER}" for i in range(2 * MAX_ADDRESSES)]


def test_addresses_are_told_and_read() -> None:
    told = Whereabouts(lambda peer: WAYS if peer == PEER else [])
    assert read_answer(PEER, told.serve("caller", PEER.encode())) == WAYS[:MAX_ADDRESSES]
    assert read_answer(PEER, told.serve("caller", Identity.generate().peer_id.encode())) == []


@pytest.mark.parametrize("payload", [b"", b"\xff", b"x" * 1000, PEER.encode() + b" "])
def test_what_is_no_peer_id_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="identity"):
        Whereabouts(lambda peer: WAYS).serve("caller", payload)


def test_addresses_of_others_are_left_out() -> None:
    lie = msgspec.msgpack.encode([WAYS[0], "/ip4/192.0.2.1/tcp/1/p2p/other"])
    assert read_answer(PEER, lie) == WAYS[:1]
    for data in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode(["nothing"]),
        msgspec.msgpack.encode(["x" * 1000]),
    ):
        with pytest.raises(RemoteProtocolError, match="schema"):
            read_answer(PEER, data)


def test_the_latest_namers_are_remembered() -> None:
    where = Whereabouts(lambda peer: [])
    where.named("first", range(2 * MAX_NAMERS))
    where.named("second", [2 * MAX_NAMERS - 1])
    assert where.namer("0") == "" and where.namer(f"{2 * MAX_NAMERS - 2}") == "first"
    assert where.namer(f"{2 * MAX_NAMERS - 1}") == "second"
