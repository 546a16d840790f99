"""The gossip host against peers that say too much (scenarios in host_scenarios.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.scenarios import Play, names, player

PROGRAM = Path(__file__).with_name("host_scenarios.py")


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with player(PROGRAM, tmp_path_factory.mktemp("host")) as play:
        yield play


@pytest.mark.parametrize("name", names(PROGRAM))
def test_host(play: Play, name: str) -> None:
    assert not (failure := play(name)), failure
