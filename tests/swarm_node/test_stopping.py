"""Signals, in real processes: at once while computing, after the bookkeeping while not, by the watchdog if need be."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PRELUDE = """
import signal, sys, time
from swarm_node.stopping import Stopper, StopRequested
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
        end = time.monotonic() + 1
        while time.monotonic() < end: pass
        print("bookkeeping done", flush=True)
        stop.allow()
        print("never", flush=True)
    except StopRequested:
        print("stopped", flush=True)
"""
STUCK = """
import hashlib, threading
with Stopper(last_resort, deadline_s=0.5) as stop:
    stop.allow()
    threading.Timer(0.3, ready).start()  # says so once the call below is under way
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 60_000_000)  # one call into C that releases the lock, as torch does
"""


started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_stays():
    """Some of these compute for ever: not longer than their test, also if that fails."""
    yield
    while started:
        process = started.pop()
        process.kill()
        process.wait()


def start(body: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", PRELUDE + body], stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_computation_ends_at_once(number):
    process = start(INTERRUPTIBLE)
    process.send_signal(number)
    out, _ = process.communicate(timeout=5)
    assert (out, process.returncode) == ("stopped\n", 0)


def test_bookkeeping_is_finished_first():
    process = start(HELD)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=5)
    assert (out, process.returncode) == ("bookkeeping done\nstopped\n", 0)


def test_one_long_call_into_c_is_left_by_the_last_resort():
    process = start(STUCK)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (out, process.returncode) == ("last resort\n", 0)
    assert time.monotonic() - began < 8


ALARMED = """
import signal
signal.signal(signal.SIGALRM, lambda *args: None)
with Stopper(last_resort, deadline_s=0.2) as stop:
    stop.allow()
    signal.setitimer(signal.ITIMER_REAL, 0.05)  # as reward functions do to bound a computation
    time.sleep(1)
    ready()
"""


def test_signals_of_others_are_left_to_them():
    process = start(ALARMED)
    out, _ = process.communicate(timeout=5)
    assert (out, process.returncode) == ("", 0)


def test_the_second_signal_quits_at_once():
    process = start(HELD.replace("+ 1", "+ 30"))
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=5)
    assert (out, process.returncode) == ("", 130)


def test_a_terminal_that_is_closed_may_say_so_twice_and_a_signal_follow():
    process = start(HELD)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.1)
    out, _ = process.communicate(timeout=5)
    assert (out, process.returncode) == ("bookkeeping done\nstopped\n", 0)


def test_who_does_not_want_to_hear_of_a_closed_terminal_goes_on():
    process = start("signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + INTERRUPTIBLE)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=5)
    assert (out, process.returncode) == ("stopped\n", 0)


def test_leaving_restores_the_handlers():
    from swarm_node.stopping import Stopper

    before = signal.getsignal(signal.SIGINT)
    with Stopper(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


LEFT = """
with Stopper(last_resort, deadline_s=5.0) as stop:
    try:
        assert stop.left_s == float("inf")
        stop.allow(); ready()
        while True: sum(range(1000))
    except StopRequested:
        assert 3 < stop.left_s <= 5
        print("some is left", flush=True)
"""


def test_it_is_known_how_much_time_is_left():
    process = start(LEFT)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=5)
    assert (out, process.returncode) == ("some is left\n", 0)


NOTICED = """
import os, signal, threading
def told(): threading.Thread(target=stop.notice, args=(30.0,)).start()
with Stopper(last_resort, deadline_s=5.0) as stop:
    try:
        stop.allow()
        threading.Timer(0.2, told).start()
        BODY
    except StopRequested:
        assert 20 < stop.left_s <= 28, stop.left_s
        ready()
        end = time.monotonic() + 30
        while stop.left_s > 5 and time.monotonic() < end: time.sleep(0.01)
        print("the machine stops", flush=True)
        if AGAIN: time.sleep(30)
stop.notice(3.0)  # nobody listens any more, and nobody is harmed
print("left", flush=True)
"""


@pytest.mark.parametrize("body", ["while True: sum(range(1000))", "stop.wait(60)"])
def test_a_notice_stops_with_a_deadline_of_its_own_which_a_signal_brings_forward(body):
    process = start(NOTICED.replace("BODY", body).replace("AGAIN", "False"))
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=15)
    assert (out, process.returncode) == ("the machine stops\nleft\n", 0)


def test_a_second_signal_after_a_notice_quits_at_once():
    process = start(NOTICED.replace("BODY", "stop.wait(60)").replace("AGAIN", "True"))
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "the machine stops\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=15)
    assert (out, process.returncode) == ("", 143)


def test_a_notice_during_one_long_call_into_c_is_left_by_the_last_resort():
    process = start(STUCK.replace("0.3, ready", "0.3, lambda: (ready(), stop.notice(2.5))"))
    out, _ = process.communicate(timeout=15)
    assert (out, process.returncode) == ("last resort\n", 0)


def test_a_last_resort_that_fails_is_the_end_all_the_same():
    process = start("def last_resort(): raise OSError('disk full')\n" + STUCK)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (out, process.returncode) == ("", 0)
    assert time.monotonic() - began < 8


HANGS = """
with Stopper(last_resort, deadline_s=0.5) as stop:
    try:
        stop.allow(); ready()
        while True: sum(range(1000))
    except StopRequested:
        stop.hold()
        SAFE
        time.sleep(60)  # a disk or a network that does not answer
"""


@pytest.mark.parametrize(("safe", "said"), [("", "last resort\n"), ("stop.safe()", "")])
def test_what_is_done_after_the_signal_has_no_longer_than_anything_else(safe, said):
    process = start(HANGS.replace("SAFE", safe))
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == (said, 0)


SWALLOWED = """
class Slow:
    def __del__(self):
        ready()
        end = time.monotonic() + 60
        while time.monotonic() < end: sum(range(1000))  # Python swallows what is raised here
with Stopper(last_resort, deadline_s=2.0) as stop:
    stop.allow()
    one = Slow()
    del one
    end = time.monotonic() + 60
    while time.monotonic() < end: sum(range(1000))
"""


def test_a_stop_that_a_finalizer_swallows_still_has_its_deadline():
    process = start(SWALLOWED)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("last resort\n", 0)


def test_the_second_signal_also_ends_a_last_resort_that_hangs():
    process = start("def last_resort(): print('saving', flush=True); time.sleep(60)\n" + STUCK)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", 143)


LEAVES = """
import threading
hangs = threading.Event()
def last_resort(): print("saving", flush=True); hangs.wait(60)
with Stopper(last_resort, deadline_s=0.3) as stop:
    ready()
    while not stop.requested: time.sleep(0.01)
    time.sleep(1)
print("left after all", flush=True)
hangs.set()
"""


def test_who_gets_through_meanwhile_needs_no_last_resort():
    process = start(LEAVES)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("saving\nleft after all\n", 0)


ALLOWED = """
with Stopper(last_resort) as stop:
    try:
        with stop.allowed():
            ready()
            while True: sum(range(1000))
    except StopRequested:
        print("stopped", flush=True)
    print("held" if not stop._interruptible else "not held", flush=True)
"""


def test_what_may_be_broken_off_is_at_once():
    process = start(ALLOWED)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("stopped\nheld\n", 0)
