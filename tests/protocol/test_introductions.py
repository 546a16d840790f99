"""Which connection may bring whom, with a clock by hand."""

from __future__ import annotations

from swarm_protocol.introductions import Introductions


def bring(introductions: Introductions, bringer: str, count: int, now: float = 0.0) -> int:
    """How many of `count` peers that `bringer` made up are let in."""
    return sum(introductions.admits(f"{bringer}'s {i}", bringer, now + 60.0, now) for i in range(count))


def test_connections_that_fill_all_places_keep_nobody_out() -> None:
    introductions = Introductions(10, 40)
    assert [bring(introductions, f"mallory {i}", 10) for i in range(5)] == [10, 10, 10, 10, 8]
    assert bring(introductions, "alice", 6) == 6 and len(introductions) == 40
    for bringer in ("mallory 0", "alice"):  # what is told is what happens
        for peer in ("one more", "alice's 0", "alice"):
            assert introductions.may_admit(peer, bringer, 0.0) == introductions.admits(peer, bringer, 60.0, 0.0)
