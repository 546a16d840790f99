"""Which cards of others are let in, by the connection that brings them: stored here, or found in a peer's answer.

    store by X -> X's own card: always    others': `STORED_EACH` at a time over one connection, `STORED_ALL` in all
    answer of X -> X's own card: always   others': `FOUND_EACH` at a time over one connection, `FOUND_ALL` in all

A card is stored by its own peer every few seconds; what others bring is a help in the meantime. So no card that its own
peer brings is kept out by those that others brought.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from protocol.introductions import Introductions

STORED_EACH, STORED_ALL = 128, 512
"""Cards of others that one connection, and all together, may have stored here: a node that joins gets those of its
buckets from its neighbours, some 60 a bucket in a swarm of 1,000; their own peers renew them within 15 s anyhow."""
FOUND_EACH, FOUND_ALL = 1024, 8192
"""Cards of others that are believed at a time from one peer's answers, and from those of all: a quarter of, and twice,
what the peer table holds."""

_bringing: ContextVar[tuple[Introductions, str] | None] = ContextVar("bringing", default=None)
"""Of the call under way: its account, and the peer at the other end."""


class Newcomers:
    """The accounts of one node."""

    def __init__(self) -> None:
        self._stored = Introductions(STORED_EACH, STORED_ALL)
        self._found = Introductions(FOUND_EACH, FOUND_ALL)

    def admits(self, peer: str, expires: float, now: float) -> bool:
        """Whether the card of `peer` is let in by the call under way; outside of calls it is this node's own doing."""
        bringing = _bringing.get()
        return bringing is None or bringing[0].admits(peer, bringing[1], expires, now)

    def may_admit(self, peer: str, now: float) -> bool:
        """Whether `admits` would let in a card that says it is of `peer`."""
        bringing = _bringing.get()
        return bringing is None or bringing[0].may_admit(peer, bringing[1], now)

    def is_own(self, peer: str) -> bool:
        """Whether the call under way is of the card's own peer, or of this node."""
        bringing = _bringing.get()
        return bringing is None or bringing[1] == peer

    def stored_by(self, peer: str) -> None:
        """From here to the end of this task, `peer` stores cards here."""
        _bringing.set((self._stored, peer))

    def finding(self, find: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """`find(peer, ...)`, whose cards are brought by that peer."""

        async def found(peer: Any, *arguments: Any) -> Any:
            token = _bringing.set((self._found, str(peer)))
            try:
                return await find(peer, *arguments)
            finally:
                _bringing.reset(token)

        return found

    def clear(self) -> None:
        """Forget all accounts: the clock was set back."""
        self._stored.clear()
        self._found.clear()
