"""Every protocol error says which side made the mistake.

ProtocolError
├── LocalProtocolError     this node tried to send something that peers would refuse: a bug here
├── RemoteProtocolError    a peer sent something wrong: counted by `reason`, never ends a run
└── PeerUnreachable        nobody answered in time: continue without the peer
    └── NotOfSwarm         a peer is there, but speaks no protocol of this swarm
"""

from __future__ import annotations

MAX_DETAIL_CHARS = 400  # longest description of a peer's mistake


def visible(text: str) -> str:
    """`text`, which a stranger may have written, with ? for each control character of terminals and end of a line."""
    return "".join(c if c.isprintable() else "?" for c in text)


def printable(text: str) -> str:
    """`text`, which a stranger may have written, as one line without control characters of terminals."""
    return visible(" ".join(text.split()))


class ProtocolError(Exception):
    """Base of everything this package raises on purpose."""


class LocalProtocolError(ProtocolError):
    """This node is about to break the protocol."""


class RemoteProtocolError(ProtocolError):
    """A peer broke the protocol."""

    def __init__(self, reason: str, detail: str = "") -> None:
        detail = printable(detail[:MAX_DETAIL_CHARS])
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason  # short slug that rejections are counted by, for example `size`, `schema`, `task`
        self.detail = detail  # what exactly was wrong, for people. The peer may have chosen the words.


class PeerUnreachable(ProtocolError):
    """A peer that cannot be dialled, does not know the method, or did not answer in time."""


class NotOfSwarm(PeerUnreachable):
    """A peer that is there and speaks no protocol of this swarm: it is in another one, or has only begun to start."""


def in_seconds(value: float) -> str:
    """A length of time for people: whole seconds from ten on, else one decimal. 0.25 -> 0.2 s; 12.3 -> 12 s"""
    return f"{value:.0f} s" if value >= 9.95 or value == round(value) else f"{value:.1f} s"
