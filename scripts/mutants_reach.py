"""A pytest plugin for scripts/mutants.py: which test reaches which line, in its own process and in those it starts.

Coverage is started in every process by `COVERAGE_PROCESS_START` (coverage's `.pth` file). Its configuration takes the
context of a new process from `MUTANTS_TEST`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measured = coverage.Coverage.current()
    os.environ["MUTANTS_TEST"] = item.nodeid
    measured.switch_context(item.nodeid)
    began = time.monotonic()
    try:
        return (yield)
    finally:
        measured.switch_context("")
        row = {"test": item.nodeid, "seconds": time.monotonic() - began, "passed": item.nodeid not in failed}
        with Path(os.environ["MUTANTS_TIMES"]).open("a") as times:
            times.write(json.dumps(row) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.skipped:
        failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    if measured := coverage.Coverage.current():  # a process of pytest-xdist ends without saying so
        measured.stop()
        measured.save()
