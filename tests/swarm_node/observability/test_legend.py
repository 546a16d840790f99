"""The words of the screen are explained, shortly, where they are."""

from __future__ import annotations

import pytest

from swarm_node.config import RewardsConfig
from swarm_node.observability.legend import running_legend, table_legend
from swarm_node.rollouts.evaluate import Held, rows


@pytest.mark.parametrize(
    ("samples", "rewards", "explained"),
    [
        (8, {}, ["pass@1", "pass@8"]),
        (1, {}, ["pass@1"]),
        (4, {"partial": True}, ["pass@1", "pass@4", "reward"]),
    ],
)
def test_a_table_of_held_out_figures_is_explained(samples: int, rewards: dict[str, bool], explained: list[str]) -> None:
    held = {"all": Held(questions=56, pass_1=0.25, pass_k=0.5, reward=0.4)}
    columns, _ = rows(held, held, samples, RewardsConfig.model_validate(rewards))
    line = table_legend(columns, samples)
    assert [part.partition(" = ")[0] for part in line.split("; ")] == explained
    assert all(column.split()[0] in [*explained, "task", "questions"] for column in columns)


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("member", [True, False])
def test_live_words_are_explained_in_80_columns(held_out: bool, member: bool) -> None:
    lines = running_legend(held_out, member)
    text = "\n".join(lines)
    assert "reward" in text and ("held-out" in text) == held_out and ("group" in text) == member
    assert all(len(line) <= 80 for line in lines)
