"""Addresses and ports."""

from __future__ import annotations

import socket

import pytest

from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.transports.settings import (
    announced,
    best_first,
    endpoint,
    free_port,
    listen_address,
)

PEER = "12D3KooWJyxp9or857hV95SVFhoYMvHEgrykTdAzobpW2NdXboKz"


def test_taken_ports_give_way_to_the_next() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert free_port("127.0.0.1", taken) > taken
        assert free_port("0.0.0.0", taken) > taken
    assert free_port("127.0.0.1", taken) == taken
    assert free_port("127.0.0.1", 0) > 0


def test_other_machines_addresses_cannot_be_listened_on() -> None:
    with pytest.raises(LocalProtocolError, match="192.0.2.1"):
        free_port("192.0.2.1", 31330)


def test_multiaddresses_of_what_people_write() -> None:
    announce = "203.0.113.7", "2001:db8::1", "home.example", f"/ip4/203.0.113.8/tcp/5/p2p/{PEER}"
    named = ["/ip4/203.0.113.7/tcp/7", "/ip6/2001:db8::1/tcp/7", "/dns4/home.example/tcp/7"]
    assert announced(announce, 7) == [*named, "/ip4/203.0.113.8/tcp/5"]
    assert listen_address("0.0.0.0", 7) == "/ip4/0.0.0.0/tcp/7" and listen_address("::", 7) == "/ip6/::/tcp/7"


def test_the_addresses_that_most_can_reach_come_first() -> None:
    relayed = f"/ip4/1.1.1.1/tcp/1/p2p/{PEER}/p2p-circuit"
    public, private, loopback = "/ip4/8.8.8.8/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip4/127.0.0.1/tcp/1"
    assert best_first([loopback, relayed, private, "/ip4/8.8.8.8/udp/1/quic", public]) == [public, private, relayed]
    assert best_first([loopback]) == [loopback]


def test_where_to_knock() -> None:
    assert endpoint(f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}") == ("1.2.3.4", 5)
    assert endpoint(f"/dns4/home.example/tcp/5/p2p/{PEER}") == ("home.example", 5)
    for elsewhere in (f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "/ip4/1.2.3.4/udp/5/quic", "/junk", ""):
        assert endpoint(elsewhere) is None
