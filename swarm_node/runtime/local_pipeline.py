"""A crew of processes on this machine: `swarm-node local --stages N`.

    private swarm             with the tasks of the run, on 127.0.0.1
    this process              holds stage 0 and leads; it draws the tasks that `swarm-node local` draws
    N - 1 other processes     `swarm-node join`, with run directories `peers/1`, ... and output in `peers/1.log`, ...

The other processes end when their standard input does, so also when this process is killed. A process that dies earlier
is started again.
"""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm_node.config import NodeConfig, dump_toml
from swarm_node.errors import USER_ERROR
from swarm_node.runtime.callbacks import Manner, TrainResult
from swarm_node.runtime.children import close_input, end_children, start_child
from swarm_node.runtime.pipeline_run import run_crew
from swarm_node.say import Warned
from swarm_node.storage.plain_files import read_plain
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.links import Swarm
from swarm_node.swarm.manifests import make_manifest
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import MAX_MANIFEST_BYTES
from swarm_protocol.manifest import parse_manifest

CREW = "local"
PROCESS_CHECK_S = 0.5
PROCESS_LEAVE_S = 10.0
"""Time that the other processes have to save; then they are killed. They need at most eight seconds."""
RESTART_S, MAX_RESTART_S = 1.0, 60.0
"""A process that died starts again after this time, which doubles each time it does not live longer than the maximum.
"""
ENDED_RESTART_S = 10.0
"""A process that ended well restarts no sooner: it may have heard that the run is over before this one has."""


def run_local_crew(config: NodeConfig, run: RunDir, manner: Manner) -> TrainResult:
    """Train a policy in `pipeline.stages` stages on this machine. Raises UserError."""
    config = private(config.model_copy(update={"swarm": None}))
    swarm = _swarm(config, run)
    own = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"stage": 0}), "name": "stage-0"})

    @contextmanager
    def beside(link: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
        with StageProcesses(config, run.path / "peers", link, say).running():
            yield

    return run_crew(own, run, manner, swarm, beside)


def private(config: NodeConfig) -> NodeConfig:
    """The configuration for a network of its own, without sharing, with the processor's cores divided."""
    network = {"listen": "127.0.0.1", "announce": [], "port": 0, "gossip_port": 0, "bootstrap": [], "identity": None}
    sharing = {"foreign": 0}
    threads = config.policy.threads or max(1, (os.cpu_count() or 1) // config.pipeline.stages)
    return config.model_copy(
        update={
            "run_dir": str(config.directory),
            "seed": config.seed or 0,  # as `local` without stages: a swarm's peers each have one of their own
            "rounds": config.rounds or (None if config.minutes else int(config.total_rounds)),
            "pipeline": config.pipeline.model_copy(update={"crew": CREW}),
            "network": config.network.model_copy(update=network),
            "sharing": config.sharing.model_copy(update=sharing),
            "averaging": config.averaging.model_copy(update={"method": "none"}),
            "policy": config.policy.model_copy(update={"threads": threads}),
        }
    )


def _swarm(config: NodeConfig, run: RunDir) -> Swarm:
    """The private swarm: that of the last start if it had the same tasks, else a new one."""
    manifest = make_manifest(CREW, config.tasks, kind=config.rewards.kind, answer=config.rewards.answer)
    try:
        kept = parse_manifest(read_plain(run.swarm, MAX_MANIFEST_BYTES))
    except (OSError, RemoteProtocolError):
        kept = None
    if kept is not None and (kept.tasks, kept.answer) == (manifest.tasks, manifest.answer):
        manifest = kept
    return Swarm(manifest.swarm_id, manifest, [], Path.cwd())


@dataclass
class StageProcess:
    """The process of a stage other than the first."""

    stage: int
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    again: float = -math.inf  # when it is to start, at first or again
    wait_s: float = RESTART_S  # time after which it starts again if it dies next


@dataclass
class StageProcesses:
    """Starts the processes of all stages but the first, and restarts those that die."""

    config: NodeConfig
    folder: Path
    link: Callable[[], str]
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic  # in seconds

    def __post_init__(self) -> None:
        self._processes = [StageProcess(stage) for stage in range(1, self.config.pipeline.stages)]
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the processes until the context is left. Raises UserError if the folder cannot be written."""
        with os_errors_explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            config = self.config.model_copy(
                update={
                    "run_dir": None,
                    "name": None,
                    "swarm": None,
                    "spot": self.config.spot.model_copy(update={"cloud": "off"}),  # this process ends the others
                    "health": self.config.health.model_copy(update={"port": 0}),
                }
            )
            (self.folder / "config.toml").write_text(dump_toml(config))
        watch = threading.Thread(target=self._watch, name="stages", daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._ended.set()
            watch.join()
            self._end()

    def _watch(self) -> None:
        while not self._ended.wait(PROCESS_CHECK_S):
            link = self.link()
            for other in self._processes if link else ():
                if other.again <= self.now():
                    other.started, other.again = self.now(), math.inf
                    other.process = self.launch(other.stage, link)
                elif other.process is not None and (code := other.process.poll()) is not None:
                    close_input(other.process)
                    other.process = None
                    self._dead(other, code)

    def launch(self, stage: int, link: str) -> subprocess.Popen[bytes]:
        """Start the process of a stage, which ends when its standard input does."""
        folder = self.folder / str(stage)
        log = folder.with_suffix(".log")
        arguments = ["join", link, "--config", str(self.folder / "config.toml"), "--run-dir", str(folder)]
        arguments += ["--name", f"stage-{stage}", "--stage", str(stage)]
        return start_child(arguments, log)

    def _dead(self, other: StageProcess, code: int) -> None:
        """Plan when a process starts again: never if it said what the user has to do, and rarely if it never lives
        long."""
        now, log = self.now(), self.folder / f"{other.stage}.log"
        if code == USER_ERROR:
            self.say(Warned(f"the process of stage {other.stage} ended: {log.read_text().strip().splitlines()[-1]}"))
            return
        wait_s = RESTART_S if now - other.started > MAX_RESTART_S else other.wait_s
        other.wait_s = min(MAX_RESTART_S, 2 * wait_s)
        other.again = now + (wait_s if code else max(wait_s, ENDED_RESTART_S))
        self.say(Warned(f"the process of stage {other.stage} ended with {code} (see {log}); it is started again"))

    def _end(self) -> None:
        processes = [other.process for other in self._processes if other.process is not None]
        end_children(processes, PROCESS_LEAVE_S)
