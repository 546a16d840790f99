"""The table of held-out figures."""

from __future__ import annotations

from swarm_node.rollouts.evaluate import Held, rows


def test_the_row_of_all_tasks_is_the_last() -> None:
    table = {"all": Held(4, 0.5, 1.0), "gcd": Held(2, 0.5, 1.0), "lcm": Held(2, 0.5, 1.0)}  # as a checkpoint sorts them
    assert [row[0] for row in rows(table, table, 8)[1]] == ["gcd", "lcm", "all"]
