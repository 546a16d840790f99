"""Waiting for what another thread, task or process does; a test fails if it does not happen."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 300.0
"""Only what hangs takes so long, on however busy a machine."""
PAUSE_S = 0.05
"""Between two looks: a look that reads a file or two then takes a small part of a processor."""


def until(
    what: Callable[[], Any],
    seconds: float = PATIENCE_S,
    describe: Callable[[], str] = lambda: "",
    pause_s: float = PAUSE_S,
) -> Any:
    """The first true result of `what`. AssertionError with what `describe` gives if none comes within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(pause_s)
    raise AssertionError(f"not within {seconds:g} s\n{describe()}")


async def until_async(what: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """As `until`, while tasks of the event loop go on; `what` may be a coroutine function."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(PAUSE_S)
    raise AssertionError(f"not within {seconds:g} s")
