"""Which files of tests take most CPU time, with the processes that they start: printed where --durations is given.

Wall time says little about tests that wait while others work.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

FILES = 30
STARTED: pytest.StashKey[float] = pytest.StashKey()


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.when == "teardown" and STARTED in item.stash:
        report.user_properties.append(("cpu_s", cpu_s() - item.stash[STARTED]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("durations"):
        return
    took: Counter[str] = Counter()
    for report in terminalreporter.stats.get("", []):
        for name, seconds in getattr(report, "user_properties", []):
            if name == "cpu_s" and report.when == "teardown":
                took[report.nodeid.partition("::")[0]] += seconds
    terminalreporter.section(f"CPU seconds by file, {sum(took.values()):,.0f} in all")
    for file, seconds in took.most_common(FILES):
        terminalreporter.write_line(f"{seconds:8.1f}  {file}")
