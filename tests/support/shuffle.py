"""A pytest plugin: `--shuffle SEED` runs files, and the tests of each, in an order that the seed decides."""

from __future__ import annotations

import random
from itertools import groupby

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of each, in an order of this seed")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("shuffle")
    return f"shuffled: --shuffle {seed} repeats this order" if seed else None


@pytest.hookimpl(tryfirst=True)  # so that pytest brings together again what shares a costly fixture
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (seed := config.getoption("shuffle")):
        return
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    rng = random.Random(seed)
    rng.shuffle(files)
    for tests in files:
        rng.shuffle(tests)
    items[:] = [test for tests in files for test in tests]
