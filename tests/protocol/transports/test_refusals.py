from __future__ import annotations

from collections import Counter

import pytest

from swarm_protocol.transports.refusals import MAX_REFUSED_SOURCES, Refusals, Refused, ip_of


def test_refusals_are_counted_by_source() -> None:
    totals: Counter[str] = Counter(schema=1)
    clock = [100.0]
    refusals = Refusals(totals, lambda: clock[0])
    for i in range(MAX_REFUSED_SOURCES):
        refusals.note(f"peer {i}", "schema")
    clock[0] = 200.0
    refusals.note("peer 0", "node_id", 3)
    copy = refusals.by_source()
    refusals.note("203.0.113.9", "find")
    assert totals == {"schema": MAX_REFUSED_SOURCES + 1, "node_id": 3, "find": 1}
    assert copy["peer 0"] == Refused({"schema": 1, "node_id": 3}, 200.0) and "203.0.113.9" not in copy
    assert len(refusals.by_source()) == MAX_REFUSED_SOURCES and "peer 1" not in refusals.by_source()


def test_a_source_keeps_its_last_address() -> None:
    refusals = Refusals(Counter())
    refusals.note("mallory", "find")
    refusals.locate({"mallory": "203.0.113.9", "bob": "192.0.2.1"})
    refusals.locate({})
    refusals.note("mallory", "find")
    assert refusals.by_source().keys() == {"mallory"}
    assert refusals.by_source()["mallory"].address == "203.0.113.9"


@pytest.mark.parametrize(
    ("addresses", "ip"),
    [
        ([], ""),
        (["/ip4/203.0.113.9/tcp/31330"], "203.0.113.9"),
        (["/ip4/192.0.2.1/tcp/1/p2p/x/p2p-circuit", "/ip6/2001:db8::1/tcp/31330"], "2001:db8::1"),
        (["/dns4/example.org/tcp/1", "/ip4/not an address", "nonsense"], ""),
    ],
)
def test_the_first_direct_way_gives_the_ip(addresses: list[str], ip: str) -> None:
    assert ip_of(addresses) == ip
