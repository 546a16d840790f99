"""Stop on SIGINT or SIGTERM: cleanly where that is possible, within the deadline in any case.

The loop tells this module which of three states it is in:

    interruptible   computing, weights unchanged: a signal raises StopRequested at once
    held            changing weights or files: a signal waits for the next `allow` or `check`
    (deadline)      the main thread sits in one long torch call: a watchdog thread runs `last_resort` and exits

A second signal exits at once.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

DEADLINE_S = 8.0
"""From the signal to the last resort; spot instances and `docker stop` give ten seconds at the least."""
STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """Raised in the main thread by the first signal; no handler for `Exception` swallows it."""


class Stopper:
    """Context manager that owns SIGINT and SIGTERM. Use it from the main thread."""

    def __init__(self, last_resort: Callable[[], None], deadline_s: float = DEADLINE_S) -> None:
        self.requested = False
        self._ends = math.inf
        self._interruptible = False
        self._reacted = False
        self._last_resort = last_resort
        self._deadline_s = deadline_s
        self._left = threading.Event()

    def __enter__(self) -> Stopper:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._old = {s: signal.signal(s, self._handle) for s in STOPPING}
        self._watchdog = threading.Thread(target=self._watch, name="stop-watchdog", daemon=True)
        self._watchdog.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold()
        self._left.set()
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._write.close()  # ends the watchdog's wait
        self._watchdog.join()
        self._read.close()

    def allow(self) -> None:
        """From here on a signal raises StopRequested at any point; raises it now if one came in the meantime."""
        self._interruptible = True
        self.check()

    def hold(self) -> None:
        """From here on a signal only sets `requested`."""
        self._interruptible = False

    def check(self) -> None:
        """Raise StopRequested if a signal came."""
        if self.requested:
            self._interruptible = False
            self._reacted = True
            raise StopRequested

    @property
    def left_s(self) -> float:
        """Until the deadline; infinite before a signal has come."""
        return max(0.0, self._ends - time.monotonic())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            _quit(128 + number)
        self.requested, self._ends = True, time.monotonic() + self._deadline_s
        if self._interruptible:
            self.check()

    def _watch(self) -> None:
        """Python runs `_handle` between bytecodes only; the wake-up socket is written from C at once."""
        if self._signal_within(None) is None:
            return
        second = self._signal_within(self._deadline_s)
        if second is not None:
            _quit(128 + second)
        if not self._reacted and not self._left.is_set():
            try:
                self._last_resort()
            finally:  # whatever could not be saved has been said
                _quit(0)

    def _signal_within(self, seconds: float | None) -> int | None:
        """The next stopping signal's number; `None` after `seconds` or once the context is left."""
        ends = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            self._read.settimeout(None if seconds is None else max(0.001, ends - time.monotonic()))
            try:
                received = self._read.recv(1)
            except TimeoutError:
                return None
            if not received:
                return None
            if received[0] in STOPPING:  # other handlers' signals, such as a reward function's alarm, come here too
                return received[0]


def _quit(code: int) -> None:
    """Leave without unwinding, but give the terminal its cursor back."""
    for stream in (1, 2):
        if os.isatty(stream):
            os.write(stream, b"\x1b[?25h\n")
            break
    os._exit(code)
