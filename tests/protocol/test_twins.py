"""Which cards under a node's own peer id are those of another node with its key."""

from __future__ import annotations

from msgspec.structs import replace

from swarm_protocol.limits import CARD_RENEWAL_S, MAX_CLOCK_SKEW_S
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.twins import Twins

BEGAN = 1_800_000_000.0
CARD = PeerCard(PROTOCOL_VERSION, "0" * 64, BEGAN, "n", ["trainer"], gossip_id="mine")


def seen(*cards: tuple[str, float]) -> Twins:
    """What a node that began at BEGAN knows after cards of (gossip id, seconds after BEGAN)."""
    twins = Twins(BEGAN)
    twins.is_mine("mine")
    twins.is_mine("mine-after-a-restart")
    for gossip_id, made in cards:
        twins.see(replace(CARD, gossip_id=gossip_id, created=BEGAN + made))
    return twins


LATE = MAX_CLOCK_SKEW_S + 1


def test_own_cards_are_of_no_twin() -> None:
    assert seen(("mine", 1), ("mine-after-a-restart", LATE), ("mine", LATE + CARD_RENEWAL_S)).found is None


def test_an_earlier_start_is_no_twin() -> None:
    before = [("earlier", -40.0), ("earlier", -25.0), ("earlier", -10.0)]
    assert seen(*before, ("mine", 5)).found is None
    assert seen(("earlier", LATE)).found is None  # one card of a clock that was ahead
    assert seen(("earlier", 1), ("", LATE)).found is None  # it said goodbye


def test_a_card_that_is_renewed_is_of_a_twin() -> None:
    twins = seen(("mine", 5), ("twin", 10), ("mine", 20), ("twin", LATE))
    assert twins.found is not None and not twins.was_first
    assert seen(("twin", -5), ("mine", 5), ("twin", LATE)).was_first
