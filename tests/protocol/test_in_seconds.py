"""Lengths of time in messages."""

import pytest

from swarm_protocol.errors import in_seconds


@pytest.mark.parametrize(("value", "text"), [(0.25, "0.2 s"), (3.0, "3 s"), (9.8765, "9.9 s"), (12.3456, "12 s")])
def test_times_have_one_decimal_at_most(value: float, text: str) -> None:
    assert in_seconds(value) == text
