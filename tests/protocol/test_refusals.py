from __future__ import annotations

from collections import Counter

from protocol.transports.refusals import MAX_PEERS, Refusals


def test_refusals_are_counted_by_peer_and_forgotten_oldest_first() -> None:
    totals: Counter[str] = Counter(schema=1)
    refusals = Refusals(totals)
    for i in range(MAX_PEERS):
        refusals.note(f"peer {i}", "schema")
    refusals.note("peer 0", "node_id", 3)
    copy = refusals.by_peer()
    refusals.note("late", "find")
    assert totals == {"schema": MAX_PEERS + 1, "node_id": 3, "find": 1}
    assert copy["peer 0"] == {"schema": 1, "node_id": 3} and "late" not in copy
    assert len(refusals.by_peer()) == MAX_PEERS and "peer 1" not in refusals.by_peer()
    assert refusals.by_peer()["peer 0"] == copy["peer 0"]
