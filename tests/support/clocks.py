"""An event loop whose time passes only when nothing else can happen: a timeout of a minute costs nothing, and a slow
machine makes nobody late."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
HANG_S = 3600.0
"""Of this clock: longer than any limit of the product, so that only a test that waits for nothing reaches it."""


class Clock(selectors.DefaultSelector):
    """Seconds; sockets of this process are always faster. While a thread of an executor works, time passes as usual."""

    now = 0.0
    working = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(timeout if self.working else 0)
        if not events:
            self.now += timeout
        return events


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        self.clock.working += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._worked)
        return future

    def _worked(self, future: asyncio.Future[Any]) -> None:
        self.clock.working -= 1


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on such a loop."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(scenario)


def hold_up(seconds: float) -> None:
    """As if this process had not run for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.clock.now += seconds


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.01)


async def settle() -> None:
    """Until all has happened that does not wait for time to pass, nor for a thread."""
    await asyncio.sleep(0.01)
