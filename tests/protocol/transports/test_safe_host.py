"""The gossip host against peers that say too much (scenarios in host_scenarios.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scenarios import Play, names, stage

PROGRAM = Path(__file__).with_name("host_scenarios.py")
play = stage(PROGRAM)


@pytest.mark.parametrize("name", names(PROGRAM))
def test_host(play: Play, name: str) -> None:
    assert not (failure := play(name)), failure
