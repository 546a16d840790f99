"""Signals, in real processes: at once while computing, after the bookkeeping while not, by the watchdog if need be."""

from __future__ import annotations

import signal
import subprocess
import sys
import weakref

import pytest

from swarm_node.errors import StopRequested
from swarm_node.runtime.shutdown import Stopper

PRELUDE = """
import signal, sys, time
from swarm_node.errors import StopRequested
from swarm_node.runtime.shutdown import Stopper
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs these tests may have it ignored
def ready(): print("ready", flush=True)
def last_resort(): print("last resort", flush=True)
"""
INTERRUPTIBLE = """
with Stopper(last_resort) as stop:
    try:
        stop.allow(); ready()
        while True: sum(range(1000))
    except StopRequested:
        print("stopped", flush=True)
"""
HELD = """
with Stopper(last_resort) as stop:
    try:
        stop.allow(); stop.hold(); ready()
        while not stop.requested: pass
        print("bookkeeping done", flush=True)
        stop.allow()
        print("never", flush=True)
    except StopRequested:
        print("stopped", flush=True)
"""
STUCK = """
import hashlib, threading
def watch(computing, then):
    begun = time.clock_gettime(computing)
    while time.clock_gettime(computing) < begun + 0.1: time.sleep(0.01)  # nothing but the long call takes so much
    then()
with Stopper(last_resort, deadline_s=0.5) as stop:
    stop.allow()
    threading.Thread(target=watch, args=(time.pthread_getcpuclockid(threading.get_ident()), ready)).start()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000_000)  # one call into C that releases the lock, as torch does
"""


started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_stays():
    """Some of these compute for ever: not longer than their test, also if that fails."""
    yield
    while started:
        with started.pop() as process:
            process.kill()


def start(body: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", PRELUDE + body], stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen) -> tuple[str, int]:
    """What it says from now on, and its exit code. One that hangs is ended by the time limit of all tests."""
    return process.stdout.read(), process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_computation_ends_at_once(number):
    process = start(INTERRUPTIBLE)
    process.send_signal(number)
    assert ended(process) == ("stopped\n", 0)


def test_bookkeeping_is_finished_first():
    process = start(HELD)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("bookkeeping done\nstopped\n", 0)


def test_a_long_c_call_is_ended():
    process = start(STUCK)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("last resort\n", 0)


ALARMED = """
signal.signal(signal.SIGALRM, lambda *args: None)
with Stopper(last_resort, deadline_s=0.01) as stop:
    stop.allow()
    signal.raise_signal(signal.SIGALRM)  # as reward functions do to bound a computation
    time.sleep(0.5)  # the watchdog would end it
    ready()
"""


def test_signals_of_others_are_left_to_them():
    process = start(ALARMED)
    assert ended(process) == ("", 0)


def test_the_second_signal_quits_at_once():
    process = start(HELD.replace("        print", "        ready(); time.sleep(100)\n        print", 1))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert ended(process) == ("", 130)


def test_hangups_and_then_a_signal_are_one_stop():
    """The shell and the kernel may both say that the terminal was closed, and a SIGTERM follow."""
    signals = "for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM): signal.raise_signal(number)"
    process = start(HELD.replace("while not stop.requested: pass", signals))
    assert ended(process) == ("bookkeeping done\nstopped\n", 0)


def test_an_ignored_hangup_stops_nothing():
    signals = "signal.raise_signal(signal.SIGHUP); ready()"
    process = start("signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + INTERRUPTIBLE.replace("ready()", signals))
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("stopped\n", 0)


EARLY = """
from swarm_node.runtime.shutdown import leaving_at_once
with leaving_at_once(lambda: print("left", flush=True)):
    BODY
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_a_run_signals_end_the_process(number):
    process = start(EARLY.replace("BODY", "ready(); time.sleep(100)"))
    process.send_signal(number)
    assert ended(process) == ("left\n", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_takes_signals_over_from_its_start(number):
    process = start(EARLY.replace("BODY", "    ".join(INTERRUPTIBLE.splitlines(keepends=True))))
    process.send_signal(number)
    assert ended(process) == ("stopped\n", 0)


def test_leaving_restores_the_handlers():
    from swarm_node.runtime.shutdown import Stopper

    before = signal.getsignal(signal.SIGINT)
    with Stopper(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_holding_tells_whether_a_signal_would_raise():
    from swarm_node.runtime.shutdown import Stopper

    with Stopper(lambda: None) as stop:
        assert not stop.hold(), "nothing was allowed yet"
        stop.allow()
        assert stop.hold() and not stop.hold()
        with stop.allowed():
            pass
        assert not stop.hold(), "what may be broken off is over"


LEFT = """
with Stopper(last_resort, deadline_s=200.0) as stop:
    try:
        assert stop.left_s == float("inf")
        stop.allow(); ready()
        while True: sum(range(1000))
    except StopRequested:
        assert 0 < stop.left_s <= 200
        print("some is left", flush=True)
"""


def test_it_is_known_how_much_time_is_left():
    process = start(LEFT)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("some is left\n", 0)


NOTICED = """
import os, signal, threading
def told(): threading.Thread(target=stop.notice, args=(1000.0,)).start()
with Stopper(last_resort, deadline_s=200.0) as stop:
    try:
        stop.allow()
        threading.Timer(0.2, told).start()
        BODY
    except StopRequested:
        assert 200 < stop.left_s <= 998, stop.left_s
        ready()
        while stop.left_s > 200: time.sleep(0.01)
        print("the machine stops", flush=True)
        if AGAIN: time.sleep(100)
stop.notice(3.0)  # nobody listens any more, and nobody is harmed
print("left", flush=True)
"""


@pytest.mark.parametrize("body", ["while True: sum(range(1000))", "stop.wait(100)"])
def test_a_signal_brings_a_notices_deadline_forward(body):
    process = start(NOTICED.replace("BODY", body).replace("AGAIN", "False"))
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("the machine stops\nleft\n", 0)


def test_two_signals_after_a_notice_quit_at_once():
    process = start(NOTICED.replace("BODY", "stop.wait(100)").replace("AGAIN", "True"))
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "the machine stops\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("", 143)


def test_a_notice_ends_a_long_c_call():
    process = start(STUCK.replace("ready))", "lambda: (ready(), stop.notice(2.5))))"))
    assert ended(process) == ("last resort\n", 0)


def test_a_process_ended_at_the_deadline_has_the_code_of_the_reason():
    process = start(STUCK.replace("ready))", "lambda: (ready(), stop.notice(2.5, exit_code=75))))"))
    assert ended(process) == ("last resort\n", 75)


def test_a_failing_last_resort_ends_the_process_too():
    process = start("def last_resort(): raise OSError('disk full')\n" + STUCK)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("", 0)


HANGS = """
with Stopper(last_resort, deadline_s=2.0) as stop:
    try:
        stop.allow(); ready()
        while True: sum(range(1000))
    except StopRequested:
        stop.hold()
        SAFE
        time.sleep(100)  # a disk or a network that does not answer
"""


@pytest.mark.parametrize(("safe", "said"), [("", "last resort\n"), ("stop.safe()", "")])
def test_a_call_that_hangs_after_the_signal_is_ended(safe, said):
    process = start(HANGS.replace("SAFE", safe))
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (said, 0)


SWALLOWED = """
class Slow:
    def __del__(self):
        ready()
        time.sleep(100)  # Python swallows what is raised here
with Stopper(last_resort, deadline_s=0.5) as stop:
    stop.allow()
    one = Slow()
    del one
    time.sleep(100)
"""


def test_a_stop_swallowed_by_finalizers_keeps_its_deadline():
    process = start(SWALLOWED)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("last resort\n", 0)


def test_a_second_signal_ends_a_hanging_last_resort():
    process = start("def last_resort(): print('saving', flush=True); time.sleep(100)\n" + STUCK)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("", 143)


LEAVES = """
import threading
saves, hangs = threading.Event(), threading.Event()
def last_resort(): print("saving", flush=True); saves.set(); hangs.wait(100)
with Stopper(last_resort, deadline_s=0.1) as stop:
    ready()
    saves.wait(100)
print("left after all", flush=True)
hangs.set()
"""


def test_a_save_in_time_needs_no_last_resort():
    process = start(LEAVES)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("saving\nleft after all\n", 0)


ALLOWED = """
with Stopper(last_resort) as stop:
    try:
        with stop.allowed():
            ready()
            while True: sum(range(1000))
    except StopRequested:
        print("stopped", flush=True)
    signal.raise_signal(signal.SIGHUP)  # which would raise StopRequested again
    print("held", flush=True)
"""


def test_work_that_may_be_broken_off_is_at_once():
    process = start(ALLOWED)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ("stopped\nheld\n", 0)


def test_a_stop_that_a_callback_swallows_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched:
        pass

    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: printed.append(type(error.exc_value)))
    with Stopper(lambda: None):
        for error in (StopRequested(), ValueError("another")):

            def fail(_: object, error: BaseException = error) -> None:
                raise error

            watched = Watched()
            known = weakref.ref(watched, fail)
            del watched
            assert known() is None
    assert printed == [ValueError]
