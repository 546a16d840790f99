"""The DHT and stream half of the network, over real p2pd processes on loopback (scenarios in plane_scenarios.py,
dht_scenarios.py and card_scenarios.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.scenarios import Play, names, player

PLANE, DHT, CARD = (Path(__file__).with_name(f"{name}_scenarios.py") for name in ("plane", "dht", "card"))


@pytest.fixture(scope="module")
def play_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with player(PLANE, tmp_path_factory.mktemp("plane")) as play:
        yield play


@pytest.fixture(scope="module")
def play_dht(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with player(DHT, tmp_path_factory.mktemp("dht")) as play:
        yield play


@pytest.fixture(scope="module")
def play_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with player(CARD, tmp_path_factory.mktemp("card")) as play:
        yield play


@pytest.mark.parametrize("name", names(PLANE))
def test_plane(play_plane: Play, name: str) -> None:
    assert not (failure := play_plane(name)), failure


@pytest.mark.parametrize("name", names(DHT))
def test_dht(play_dht: Play, name: str) -> None:
    assert not (failure := play_dht(name)), failure


@pytest.mark.parametrize("name", names(CARD))
def test_card(play_card: Play, name: str) -> None:
    assert not (failure := play_card(name)), failure
