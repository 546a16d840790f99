"""Every protocol error says whose fault it is.

ProtocolError
├── LocalProtocolError     this node tried to say something that peers would refuse: a bug here
├── RemoteProtocolError    a peer said something wrong: counted by `reason`, never ends a run
└── PeerUnreachable        nobody answered in time: go on without
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Base of everything this package raises on purpose."""


class LocalProtocolError(ProtocolError):
    """This node is about to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """A peer broke the protocol."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        """Short slug that rejections are counted by, for example `size`, `schema`, `task`."""
        self.detail = detail
        """What exactly was wrong, for people."""


class PeerUnreachable(ProtocolError):
    """A peer that cannot be dialled, does not know the method, or did not answer in time."""
