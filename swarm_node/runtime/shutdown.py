"""Stop on SIGINT, SIGTERM, SIGHUP or a cloud's notice: cleanly where possible, within the deadline in any case.

The run tells this module which state it is in:

    interruptible   computing, weights unchanged: a signal raises StopRequested at once
    held            changing weights or files: a signal waits for the next `allow` or `check`
    safe            nothing is left to lose: at the deadline a watchdog waits one more second, and exits

At the deadline of a run that is not safe the watchdog calls `last_resort` and exits, whatever the main thread does. It
does not rely on StopRequested having been raised: a `__del__` may swallow that, and the code after it may hang.

A notice (`notice`, from any thread) acts as a first signal does, with a deadline of its own. A second signal exits at
once. A first signal after a notice, which is how the machine itself stops, only sets its own deadline.

Before a run has a Stopper, while the program loads, `leaving_at_once` holds: there is nothing to finish.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from swarm_node.errors import StopRequested

DEADLINE_S = 8.0  # time from a signal to the last resort; spot instances and `docker stop` give at least ten seconds
STOPPING = (signal.SIGINT, signal.SIGTERM)
HANGUP = signal.SIGHUP
"""The terminal was closed. It never counts as a first signal, since the shell and the kernel may both send it, and a
SIGTERM may follow. A process that ignores it (nohup) goes on."""
NOTICE = signal.SIGUSR1  # the signal with which a notice reaches the main thread
NOT_BEGUN = "stopping before training began; the same command begins here again"
SAFE_EXIT_S = 1.0  # time after the deadline for a run that is safe
LAST_RESORT_S = 600.0  # longest time for the last resort: writing a large state takes long
NOTICE_RESERVE_S = 2.0  # part of a notice's time that is kept free for writing, and for clocks that differ


class Stopper:
    """Context manager that owns SIGINT, SIGTERM and SIGHUP. Use it from the main thread."""

    def __init__(self, last_resort: Callable[[], None], deadline_s: float = DEADLINE_S) -> None:
        self.requested = False
        self.advised = False  # whether this machine may soon be taken back: a checkpoint is due
        self.noticed = False  # whether a notice has come
        self.heard_at = 0.0  # `time.monotonic()` when the cloud last answered; at first, when it was first asked
        self.hurried = False  # whether it was not by the node's owner: the machine, or its memory, is about to end
        self.exit_code = 0  # of the process if it has to be ended at the deadline
        self._ends = math.inf
        self._signalled = False  # whether a first signal has come, for the main thread
        self._signal_seen = False  # the same, for the watchdog
        self._notice_s = deadline_s
        self._interruptible = False
        self._raised = False  # whether StopRequested was raised, and may have been swallowed
        self._safe = False
        self._last_resort = last_resort
        self._deadline_s = deadline_s
        self._left = threading.Event()
        self._woken = threading.Event()

    def __enter__(self) -> Stopper:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._handle) for number in [*_heard(), NOTICE]}
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._unraised
        self._watchdog = threading.Thread(target=self._watch, name="stop-watchdog", daemon=True)
        self._watchdog.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.hold()
        self._left.set()
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        sys.unraisablehook = self._unraisable
        self._write.close()  # ends the watchdog's wait
        self._watchdog.join()
        self._read.close()

    def allow(self) -> None:
        """From here on a signal raises StopRequested at any point; one that came before raises it now."""
        self._interruptible = True
        self.check()

    def hold(self) -> bool:
        """From here on a signal only sets `requested`. Returns whether it raised StopRequested until now, or whether
        one was raised before."""
        raises, self._interruptible = self._interruptible or self._raised, False
        return raises

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within the context, a signal raises StopRequested at any point."""
        self.allow()
        try:
            yield
        finally:
            self.hold()

    def check(self) -> None:
        """Raise StopRequested if a signal came."""
        if self.requested:
            self._interruptible, self._raised = False, True
            raise StopRequested

    def safe(self) -> None:
        """Tell that everything is saved: no last resort is needed any more."""
        self._safe = True

    def wait(self, seconds: float) -> None:
        """Sleep; a notice or a signal ends it. Raises StopRequested."""
        self._woken.wait(seconds)
        self.check()

    def notice(self, left_s: float, by_owner: bool = False, exit_code: int = 0) -> None:
        """Tell that this machine goes away in `left_s` seconds, or that its owner ends the run within them. A process
        that is ended at the deadline has this `exit_code`. From any thread, also after the context was left."""
        self.hurried = self.hurried or not by_owner
        self.exit_code = self.exit_code or exit_code
        self.noticed, self._notice_s = True, max(1.0, left_s - NOTICE_RESERVE_S)
        self._woken.set()
        interrupt_main(NOTICE)  # calls the handler between bytecodes, if there is one, and wakes the watchdog

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; infinite before a signal or a notice."""
        return max(0.0, self._ends - time.monotonic())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == NOTICE:
            left_s = self._notice_s
        elif number == HANGUP:
            left_s = self._deadline_s
        elif self._signalled:
            _quit(128 + number)
        else:
            self._signalled, left_s = True, self._deadline_s
        self.requested, self._ends = True, min(self._ends, time.monotonic() + left_s)
        if self._interruptible:
            self.check()

    def _unraised(self, error: sys.UnraisableHookArgs) -> None:
        """Print no traceback of a StopRequested that a callback of Python swallowed: `check` raises it again."""
        if not isinstance(error.exc_value, StopRequested):
            self._unraisable(error)

    def _watch(self) -> None:
        """Keep the deadline. Python runs `_handle` only between bytecodes, C writes to the wake-up socket at once."""
        ends = math.inf
        while (number := self._signal_before(ends)) is not None:
            ends = min(ends, time.monotonic() + (self._notice_s if number == NOTICE else self._deadline_s))
        if not self._left.is_set() and not self._safe:
            threading.Thread(target=self._resort, name="last-resort", daemon=True).start()
            until = time.monotonic() + LAST_RESORT_S
            while self._signal_before(until) is not None:
                pass
        elif not self._left.is_set():
            self._left.wait(SAFE_EXIT_S)
        if not self._left.is_set():
            _quit(self.exit_code)

    def _resort(self) -> None:
        try:
            self._last_resort()
        finally:  # whatever could not be saved has been said
            if not self._left.is_set():
                _quit(self.exit_code)

    def _signal_before(self, ends: float) -> int | None:
        """The number of the next stopping signal; None at the time `ends`, or once the context is left. A second signal
        ends the process."""
        while True:
            self._read.settimeout(None if ends == math.inf else max(0.001, ends - time.monotonic()))
            try:
                received = self._read.recv(1)
            except TimeoutError:
                return None
            if not received:
                return None
            number = received[0]
            if number in STOPPING:
                if self._signal_seen:
                    _quit(128 + number)
                self._signal_seen = True
            # Others' signals, such as a reward function's alarm, come here too.
            if number in (*STOPPING, HANGUP, NOTICE):
                return number


class EmbeddedStopper(Stopper):
    """Stops a run that is part of another program. It never ends the process, and has no deadline.

    In the main thread it owns SIGINT: the first stops the run, the second raises KeyboardInterrupt. In another thread
    it owns nothing.
    """

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self._restore: Callable[[], object] = lambda: None

    def __enter__(self) -> EmbeddedStopper:
        if threading.current_thread() is threading.main_thread():
            self._restore = partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, self._handle))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.hold()
        self._restore()

    def notice(self, left_s: float, by_owner: bool = False, exit_code: int = 0) -> None:
        """Tell the run to stop at the next point where it allows that."""
        self.hurried = self.hurried or not by_owner
        self.exit_code = self.exit_code or exit_code
        self.requested = self.noticed = True
        self._ends = min(self._ends, time.monotonic() + left_s)
        self._woken.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        super()._handle(number, frame)


@contextmanager
def leaving_at_once(leave: Callable[[], None]) -> Iterator[None]:
    """Within the context, a signal calls `leave` and ends the process with exit code 0, until a Stopper takes over. Use
    it from the main thread.

    No exception is raised: the signal may come at any point of an import, and libraries catch all sorts there.
    """

    def end(number: int, frame: FrameType | None) -> None:
        try:
            leave()
        finally:
            _quit(0)

    before = {number: signal.signal(number, end) for number in _heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard() -> list[signal.Signals]:
    """The signals that stop this process."""
    return [*STOPPING, *([HANGUP] if signal.getsignal(HANGUP) != signal.SIG_IGN else [])]


def _quit(code: int) -> None:
    """Exit without unwinding, but give the terminal its cursor back."""
    for stream in (1, 2):
        if os.isatty(stream):
            os.write(stream, b"\x1b[?25h\n")
            break
    os._exit(code)
