"""`swarm-node stop RUN`: a file in the run directory asks its node to stop, as Ctrl-C does.

    swarm-node stop -> RUN/stop -> watch thread of the node (0.5 s) -> Stopper.notice

A file, as for `pause`: the process id in a run directory may belong to another container or machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from swarm_node.errors import TemporaryError, UserError
from swarm_node.observability.jsonl import last_record
from swarm_node.runtime.shutdown import DEADLINE_S, NOTICE_RESERVE_S, Stopper
from swarm_node.say import Say
from swarm_node.storage.going_on import going_on
from swarm_node.storage.names import newest_round
from swarm_node.storage.nearby import names_near
from swarm_node.storage.rundir import BOOTSTRAP, RunDir, os_errors_explained

ASKED_CHECK_S = 0.5  # time between two looks of a node whether it was asked to stop
ENDED_CHECK_S = 0.1  # time between two looks of the command whether the node has ended
STOP_WAIT_S = 60.0  # longest that the command waits: a node needs seconds, a large state on a slow disk more
WATCH_END_S = 0.1  # longest that a node which ends waits for its watch thread


@contextmanager
def stopping_when_asked(run: RunDir, stop: Stopper, say: Say) -> Iterator[None]:
    """Within the context, `swarm-node stop` stops the run as a first signal does."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(ASKED_CHECK_S):
            if run.take_stop():
                stop.notice(DEADLINE_S + NOTICE_RESERVE_S, by_owner=True)
                say("asked to stop by `swarm-node stop`")
                return

    thread = threading.Thread(target=watch, name="stop-request", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(WATCH_END_S)


def stop_run(run: RunDir, say: Say, wait_s: float = STOP_WAIT_S) -> str:
    """Ask the node of `run` to stop and wait until it has ended; a sentence that says so. `say` takes what is said
    meanwhile. Raises UserError, TemporaryError if the node has not ended after `wait_s` seconds."""
    if not (run.exists or run.in_use):  # a run in its first seconds has no config.toml yet
        wants = "`swarm-node stop RUN` wants a run directory, such as runs/node"
        raise UserError(f"no run in {run.path}: {wants}{names_near(run.path)}")
    if not run.in_use:
        return f"no node runs in {run.path}; {_again(run)}"
    with os_errors_explained(run.stop):
        run.write_stop()
    say(f"stopping {run.path}: its node is asked to save and leave …")
    until = time.monotonic() + wait_s
    while run.in_use:
        if time.monotonic() > until:
            raise TemporaryError(_not_ended(run, wait_s))
        time.sleep(ENDED_CHECK_S)
    if run.take_stop():  # the node ended by itself before it saw the file
        say("the node ended by itself meanwhile")
    return f"{run.path} has stopped; {_again(run)}" if run.exists else f"{run.path} has stopped before it began"


def _not_ended(run: RunDir, wait_s: float) -> str:
    if run.stop.exists():
        return (
            f"the node of {run.path} (process {run.holder}) has not seen the request within {wait_s:.0f} s: it is busy "
            "or hangs; it stops once it looks, or end the process"
        )
    return (
        f"the node of {run.path} (process {run.holder}) has not ended within {wait_s:.0f} s: it is still saving; call "
        "this again to wait on, or end the process"
    )


def _again(run: RunDir) -> str:
    """The command that starts the run again, from where, and whether it is paused then, in a sentence."""
    paused = f"; it is still paused: `swarm-node unpause {run.quoted}` ends that" if run.paused.exists() else ""
    return _start_again(run) + paused


def _start_again(run: RunDir) -> str:
    way = going_on(run)
    if not way.command:
        return f"to go on with it, {way.instead}"
    again = f"`swarm-node {way.command}`"
    if run.read_role() == BOOTSTRAP:
        return f"{again} starts it again"
    if (run.path / "stages").is_dir():  # of a crew, whose other members have the rest of its checkpoint
        return f"{again} goes on with it"
    saved, last = newest_round(run.checkpoints), _last_round(run)
    if saved is None:
        return f"{again} begins it anew: nothing was saved" if last else f"{again} begins it: no round had ended"
    lost = f"; its last round was {last}, and nothing newer was saved" if last is not None and last > saved else ""
    return f"{again} goes on with it after round {saved}{lost}"


def _last_round(run: RunDir) -> int | None:
    """The last round that metrics.jsonl has; None if it has none, or cannot be read."""
    try:
        record = last_record(run.metrics) or {}
    except UserError:
        return None
    number = record.get("round")
    return number if isinstance(number, int) else None
