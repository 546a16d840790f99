"""What this package raises on purpose.

    SwarmNodeError
    ├── UserError          bad input or environment; the command line prints it as one line and exits 2
    ├── NobodyReached      nobody was reached in the time that the user gave; likewise, but it exits 1
    ├── CheckpointError      a checkpoint that is torn or foreign; resuming falls back to an older one
    ├── Interrupted        part of what was under way is lost; it is put right and done again
    └── Unworkable         what was asked for is refused however often it is begun; other work goes on

Whatever a *peer* does wrong is `protocol.errors.RemoteProtocolError` and never ends a run.
"""

from __future__ import annotations


class SwarmNodeError(Exception):
    """Base of everything this package raises on purpose."""


class UserError(SwarmNodeError):
    """Something only the user can mend; the message says what to do next."""


class NobodyReached(SwarmNodeError):
    """Nobody who could be asked was reached in the time that the user gave; the same command may work later."""


class CheckpointError(SwarmNodeError):
    """A checkpoint that cannot be used; the message says why."""


class Interrupted(SwarmNodeError):
    """What was under way cannot be finished; after `Policy.again` it can be done again from its beginning."""


class Unworkable(SwarmNodeError):
    """What was asked for cannot be done, though it was begun anew several times; something else can."""
