"""The DHT and stream half of the network, over real p2pd processes on loopback (scenarios in plane_scenarios.py,
dht_scenarios.py and card_scenarios.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scenarios import Play, names, stage

pytestmark = pytest.mark.timeout(300)
PLANE, DHT, CARD = (Path(__file__).with_name(f"{name}_scenarios.py") for name in ("plane", "dht", "card"))

LONG = {
    "a_named_bystander_is_dialled_few_times",
    "an_exchange_fails_with_its_p2pd",
    "members_see_each_other_among_ground_keys",
    "nobody_relays_unless_told_to",
}
"""Scenarios that `make test-long` plays."""


def cases(program: Path) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in names(program)]


play_plane, play_dht, play_card = stage(PLANE), stage(DHT), stage(CARD)


@pytest.mark.parametrize("name", cases(PLANE))
def test_plane(play_plane: Play, name: str) -> None:
    assert not (failure := play_plane(name)), failure


@pytest.mark.parametrize("name", cases(DHT))
def test_dht(play_dht: Play, name: str) -> None:
    assert not (failure := play_dht(name)), failure


@pytest.mark.parametrize("name", cases(CARD))
def test_card(play_card: Play, name: str) -> None:
    assert not (failure := play_card(name)), failure
