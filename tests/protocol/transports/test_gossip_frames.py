"""What waits in a gossip process for peers that ask for much (scenarios in frame_scenarios.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scenarios import Play, names, stage

PROGRAM = Path(__file__).with_name("frame_scenarios.py")
play = stage(PROGRAM)


@pytest.mark.parametrize("name", names(PROGRAM))
def test_frames(play: Play, name: str) -> None:
    assert not (failure := play(name)), failure
