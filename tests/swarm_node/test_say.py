"""Sentences that are said once."""

from __future__ import annotations

from swarm_node.say import Once


def test_a_key_is_said_once_until_it_is_over() -> None:
    said: list[str] = []
    once = Once(said.append)
    for key, sentence in (("disk", "full"), ("disk", "still full"), ("net", "down")):
        once(key, sentence)
    assert said == ["full", "down"]
    once.over("disk")
    once("disk", "full again")
    assert said == ["full", "down", "full again"]
