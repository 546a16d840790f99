"""Which addresses count as one host."""

from __future__ import annotations

import pytest

from swarm_protocol.hosts import neighbourhood, neighbourhood_of_stream


@pytest.mark.parametrize(
    ("host", "same"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("64:ff9b::203.0.113.7", "203.0.113.7"),
        ("::203.0.113.7", "203.0.113.7"),
        ("2002:cb00:7107::1", "203.0.113.7"),
        ("2002:cb00:7107:ffff::1", "203.0.113.7"),  # it has 65,536 networks of 64 bits
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("::", "::/64"),
        ("nowhere", "nowhere"),
    ],
)
def test_neighbouring_addresses_count_as_one(host: str, same: str) -> None:
    assert neighbourhood(host) == same
    family = "ip6" if ":" in host else "ip4"
    assert neighbourhood_of_stream(f"/{family}/{host}/tcp/1234/p2p/x") == same
    assert neighbourhood_of_stream("/p2p-circuit") == ""
