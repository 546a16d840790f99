"""Which skipped exchanges of weights a user hears of."""

from __future__ import annotations

import pytest

from swarm_node.averaging.skipping import skipped
from swarm_node.say import Detail


@pytest.mark.parametrize(
    ("reason", "shown"), [("late", False), ("busy", False), ("codec", True), ("unreachable", True)]
)
def test_nothing_to_do_is_a_detail(reason: str, shown: bool) -> None:
    sentence = skipped(reason, "", "bob", "the next round tries again", "runs/a")
    assert sentence.startswith("an exchange of weights with bob was skipped: ")
    assert isinstance(sentence, Detail) != shown
    assert ("`swarm-node doctor runs/a`" in sentence) == (reason == "unreachable")
