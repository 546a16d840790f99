from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import Start, nodes


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts nodes as processes, all of which are gone at the end."""
    with nodes() as starter:
        yield starter
