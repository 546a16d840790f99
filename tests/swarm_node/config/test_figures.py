"""The held-out figure that says how good a run is."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_node.config import RewardsConfig
from swarm_node.config.figures import figure_of, reports_reward

OWN = {"functions": ["mine.py:f"]}


@pytest.mark.parametrize(
    ("rewards", "figure", "reported"),
    [
        ({}, "pass_1", False),
        ({"partial": True}, "pass_1", True),
        (OWN, "pass_1", True),
        ({**OWN, "checker_weight": 0.0}, "reward", True),
    ],
)
def test_the_checker_decides_where_it_counts(rewards: dict[str, Any], figure: str, reported: bool) -> None:
    config = RewardsConfig.model_validate(rewards)
    assert (figure_of(config), reports_reward(config)) == (figure, reported)
