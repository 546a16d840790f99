"""Every protocol error says whose fault it is.

ProtocolError
├── LocalProtocolError     this node tried to say something that peers would refuse: a bug here
├── RemoteProtocolError    a peer said something wrong: counted by `reason`, never ends a run
└── PeerUnreachable        nobody answered in time: go on without
    └── NotOfSwarm         a peer is there, and speaks no protocol of this swarm
"""

from __future__ import annotations

MAX_DETAIL_CHARS = 400
"""Of what is said about a peer's mistake."""


def printable(text: str) -> str:
    """`text`, which a stranger may have written, in one line, without what a terminal takes for a command or for
    another direction of writing."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


class ProtocolError(Exception):
    """Base of everything this package raises on purpose."""


class LocalProtocolError(ProtocolError):
    """This node is about to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """A peer broke the protocol."""

    def __init__(self, reason: str, detail: str = "") -> None:
        detail = printable(detail[:MAX_DETAIL_CHARS])
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        """Short slug that rejections are counted by, for example `size`, `schema`, `task`."""
        self.detail = detail
        """What exactly was wrong, for people; the peer may have chosen the words."""


class PeerUnreachable(ProtocolError):
    """A peer that cannot be dialled, does not know the method, or did not answer in time."""


class NotOfSwarm(PeerUnreachable):
    """A peer that is there and speaks no protocol of this swarm: it is in another one, or has only begun to start."""
