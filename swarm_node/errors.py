"""Errors that this package raises on purpose.

A fault of another *peer* is `swarm_protocol.errors.RemoteProtocolError` and never ends a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

USER_ERROR = 2  # exit code after any other UserError, the same as for a wrong option
TEMPORARY = 75  # exit code after a TemporaryError: EX_TEMPFAIL of sysexits.h


class SwarmNodeError(Exception):
    """Base of these errors."""

    document: Mapping[str, Any] | None = None  # what was found before the error, for --json to show beside it
    logged = False  # whether the log of a run has it


class UserError(SwarmNodeError):
    """A problem that only the user can solve. The message, one line with exit code 2, says what to do next."""


class TemporaryError(UserError):
    """A problem that time, another process or a new start may end as well: exit code TEMPORARY, upon which a supervisor
    should start the node again."""


class PluginError(UserError):
    """Code of the user's own failed. The message has the file and the line."""

    def __init__(self, message: str, trace: Sequence[str]) -> None:
        """`trace`: lines of the traceback, without frames of this package."""
        super().__init__(message)
        self.trace = list(trace)


class NobodyReached(SwarmNodeError):
    """No peer answered in the time that the user gave: one line, exit code 1. The same command may work later."""


class CheckpointError(SwarmNodeError):
    """A checkpoint that is torn or of another run; the message says why. Resuming falls back to an older one."""


class Interrupted(SwarmNodeError):
    """The present work cannot be finished; after `Policy.again` it can be done again from its beginning."""


class NoRoom(UserError, Interrupted):
    """Even the least work needs more memory than there is; another machine may have it."""

    def __init__(self, message: str, error: BaseException) -> None:
        """`error`: what the least work failed with."""
        super().__init__(message)
        self.error = error


class Unworkable(SwarmNodeError):
    """The present work fails however often it is begun anew; other work may succeed."""


class StopRequested(BaseException):
    """The first signal to stop came. Raised in the main thread, at any point where the run allows it.

    No handler of `Exception` swallows it.
    """
