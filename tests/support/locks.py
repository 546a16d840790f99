"""A lock that says when a second thread has to wait for it: tests of exclusion need no fixed time then."""

from __future__ import annotations

import threading


class Watched:
    """A `threading.Lock` that sets `wanted` when a thread finds it held."""

    def __init__(self, wanted: threading.Event) -> None:
        self._lock = threading.Lock()
        self._wanted = wanted

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self._wanted.set()
        return self._lock.acquire(blocking, timeout if blocking else -1)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
