"""A browser for the pages of runs and swarms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.chromium import Chromium, find_chromium


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are typed as `swarm-node`, wherever the tests run."""
    for module in (
        "observability.dashboard.view",
        "observability.progress",
        "observability.summary",
        "storage.going_on",
    ):
        monkeypatch.setattr(f"swarm_node.{module}.own_command", lambda: "swarm-node")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A Chromium. Where there is none, tests that ask for it are skipped."""
    if (program := find_chromium()) is None:
        pytest.skip("needs Chromium")
    browser = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
