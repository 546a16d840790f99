"""Nodes as real processes: start them by the command line, watch what they write, end them one by one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from swarm_node.cli.app import app
from tests.support.forked import Forked, can_fork
from tests.support.waiting import PATIENCE_S, until

LINK = re.compile(r"(?<!\S)swarm://[0-9a-f]{64}\?peer=\S+$", re.MULTILINE)
QUICK = (
    "rollouts.group_size=4",
    "rollouts.max_new_tokens=8",
    "eval.questions=0",
    "checkpoints.every=1",
    "network.listen=127.0.0.1",
    "network.port=0",
    "network.gossip_port=0",
    "pace_s=0.2",
)
"""Settings under which a round of the starter takes a fifth of a second, most of which it leaves to other processes."""


LOCAL = ("--listen", "127.0.0.1", "--port", "0", "--gossip-port", "0")
"""Options of `swarm-node bootstrap` on this machine."""


def make_manifest(folder: Path, *options: str, tasks: str = "small") -> Path:
    """Of a new swarm, as `swarm-node new` makes it."""
    path = folder / "swarm.toml"
    done = CliRunner().invoke(app, ["new", "--name", "test", "--tasks", tasks, "--out", str(path), *options])
    assert done.exit_code == 0, done.output
    return path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class NodeProcess:
    """One `swarm-node` process, its output in a file."""

    def __init__(
        self,
        *arguments: str,
        run_dir: Path,
        sets: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        program: tuple[str, ...] = ("swarm_node",),
    ) -> None:
        """`prefix` comes before Python, `program` is its module and what comes first of its arguments."""
        self.run_dir = run_dir
        self.log = run_dir.with_name(f"{run_dir.name}-{time.monotonic_ns()}.log")
        command = [*prefix, sys.executable, "-m", *program, *arguments, "--run-dir", str(run_dir)]
        for pair in sets:
            command += ["--set", pair]
        self.file = self.log.open("w")
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process: subprocess.Popen[bytes] | Forked
        if not prefix and program == ("swarm_node",) and can_fork(env):
            self.process = Forked(command[3:], self.log, env)
        else:
            out = {"stdout": self.file, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, env=env, start_new_session=True, **out)

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    @property
    def rounds(self) -> int:
        metrics = self.metrics
        return metrics[-1]["round"] if metrics else 0

    def last(self, name: str) -> float:
        """The newest value of a metric; 0 if there is none."""
        metrics = self.metrics
        return metrics[-1].get(name, 0.0) if metrics else 0.0

    def link(self) -> str:
        """The join link that it prints."""
        return str(self.until(lambda: (m := LINK.search(self.output)) and m.group()))

    def until(self, what: Callable[[], Any]) -> Any:
        """As `until`, with this process's last output in the error; fails at once if it ends."""

        def alive() -> Any:
            found = what()
            assert found or self.process.poll() is None, f"ended with {self.process.returncode}\n{self.output[-3000:]}"
            return found

        return until(alive, PATIENCE_S, lambda: f"{self.output[-3000:]}\n{self.metrics[-1:]}")

    def until_rounds(self, more: int) -> None:
        """Until it has had `more` rounds from now on."""
        goal = self.rounds + more
        self.until(lambda: self.rounds >= goal)

    def until_says(self, text: str) -> re.Match[str]:
        """Until what it prints matches."""
        found: re.Match[str] = self.until(lambda: re.search(text, self.output))
        return found

    def children(self) -> dict[str, int]:
        """Kind (`p2pd`, `gossip`) -> pid of its child processes."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
                command = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if command and int(fields[1]) == self.process.pid and fields[0] != "Z":  # one that ends has no command
                kind = "p2pd" if "p2pd" in command.split()[0] else "gossip" if "gossip.sidecar" in command else command
                found[kind] = int(path.parent.name)
        return found

    def ended(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(PATIENCE_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.ended()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.file.close()


def learns_from_others(node: NodeProcess, more: int = 1) -> None:
    """Until `node` has admitted and used foreign groups again."""
    admitted = node.last("swarm/groups_admitted")
    node.until(lambda: node.last("swarm/groups_admitted") >= admitted + more)
    node.until(lambda: node.last("swarm/groups_used") > 0)


Start = Callable[..., NodeProcess]


@contextmanager
def nodes() -> Iterator[Start]:
    """A starter of processes, all of which are gone at the end."""
    started: list[NodeProcess] = []

    def start(*arguments: str, run_dir: Path, sets: tuple[str, ...] = QUICK, **rest: tuple[str, ...]) -> NodeProcess:
        started.append(NodeProcess(*arguments, run_dir=run_dir, sets=sets, **rest))
        return started[-1]

    try:
        yield start
    finally:
        for node in started:
            node.stop(signal.SIGKILL)
