"""Errors that this package raises on purpose.

    SwarmNodeError
    ├── UserError          bad input or environment; the command line prints one line and exits with code 2
    ├── NobodyReached      no peer answered in the time that the user gave; one line, exit code 1
    ├── CheckpointError    a checkpoint is torn or of another run; resuming falls back to an older one
    ├── Interrupted        part of the work is lost, for example with a stage; it is repaired and done again
    └── Unworkable         the work failed however often it was begun anew; other work goes on

    StopRequested          a signal came; a BaseException, so that no handler of `Exception` swallows it

A fault of another *peer* is `protocol.errors.RemoteProtocolError` and never ends a run.
"""

from __future__ import annotations


class SwarmNodeError(Exception):
    """Base of the errors that this package raises on purpose."""


class UserError(SwarmNodeError):
    """A problem that only the user can solve; the message says what to do next."""


class NobodyReached(SwarmNodeError):
    """No peer answered in the time that the user gave; the same command may work later."""


class CheckpointError(SwarmNodeError):
    """A checkpoint that cannot be used; the message says why."""


class Interrupted(SwarmNodeError):
    """The present work cannot be finished; after `Policy.again` it can be done again from its beginning."""


class Unworkable(SwarmNodeError):
    """The present work fails however often it is begun anew; other work may succeed."""


class StopRequested(BaseException):
    """The first signal to stop came. Raised in the main thread, at any point where the run allows it."""
