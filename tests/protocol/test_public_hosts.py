"""Which addresses count as public, for everything that asks."""

from __future__ import annotations

import pytest

from swarm_node.swarm.download import public_addresses
from swarm_protocol.hosts import is_public
from swarm_protocol.transports.p2p.dial_back import may_look_at
from swarm_protocol.transports.settings import best_first

PUBLIC = ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
NOT_PUBLIC = [
    *("10.0.0.1", "127.0.0.1", "169.254.169.254", "192.88.99.1", "224.0.0.1"),
    *("::1", "fe80::1", "fc00::1", "fec0::1", "ff0e::1", "::", "2001:db8::1", "3fff::1"),
    *("::ffff:10.0.0.1", "::ffff:0:10.0.0.1", "::10.0.0.1", "::127.0.0.1", "::1.1.1.1"),
    *("64:ff9b::a00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "64:ff9b:1::101:101"),
    *("2002:a00:1::1", "2002:101:101::1", "2001:0:a00:1::1"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_hosts_of_the_internet_are_public(address: str) -> None:
    assert is_public(address) and may_look_at(address, [])
    assert public_addresses(address, 443) == [address] or "ffff" in address


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_other_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)
    assert not may_look_at(address, [])
    with pytest.raises(OSError):
        public_addresses(address, 443)


def test_a_public_address_is_dialled_first() -> None:
    tunnel, public = "/ip6/2002:a00:1::1/tcp/1", "/ip4/1.1.1.1/tcp/1"
    assert best_first([tunnel, public]) == [public, tunnel]
