"""hivemind 1.1.12's accounts of the calls between it and p2pd, kept so that no peer can make them grow or stop.

hivemind forgets a handler's task only if the handler ran to its end and its answer could be sent: a caller that hangs
up leaves the task for ever. An answer to a call that was given up in the same moment raises in the loop that reads all
answers, and no call is answered from then on.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID


class Tasks(dict[UUID, "asyncio.Task[Any]"]):
    """Handlers under way: forgets a task as soon as it is done, however it ended."""

    def __setitem__(self, call: UUID, task: asyncio.Task[Any]) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))


class Calls(dict[UUID, "asyncio.Future[bytes]"]):
    """Calls that wait for an answer: one that was given up does not count any more."""

    def __contains__(self, call: object) -> bool:
        waiting = self.get(call)  # type: ignore[call-overload]
        return waiting is not None and not waiting.done()


def keep_accounts(control: Any) -> None:
    """Give a hivemind `ControlClient`, on which nobody calls yet, these accounts."""
    control._handler_tasks, control._pending_calls = Tasks(), Calls()
