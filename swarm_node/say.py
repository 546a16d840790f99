"""How any part of a node tells its user something: one sentence, and some sentences only once."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]  # takes one sentence for the user, from any thread


class Warned(str):
    """A sentence of level `warning`: something failed or was lost, and the node goes on. Any `Say` takes it."""


class Once:
    """Says a sentence of each key once, until what it is about is over."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said: set[str] = set()

    def __call__(self, key: str, sentence: str) -> None:
        """Say the sentence, unless one of this key was said and `over` was not called since."""
        if key not in self._said:
            self._said.add(key)
            self._say(sentence)

    def over(self, key: str) -> None:
        """Let the next sentence of this key be said."""
        self._said.discard(key)
