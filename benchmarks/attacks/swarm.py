"""A swarm to attack: a bootstrap and members as real processes on 127.0.0.1, of any checkout of this project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.attacks.hostile import lives
from benchmarks.processes import end, kind, tree

START_S = 180.0
"""Longest until a process of the swarm is up: two cores, and a few at a time."""
T = TypeVar("T")


def until(what: Callable[[], T | None], seconds: float) -> T | None:
    """The first true result of `what`; its last one after `seconds`."""
    end_at = time.monotonic() + seconds
    found = what()
    while not found and time.monotonic() < end_at:
        time.sleep(0.2)
        found = what()
    return found


@dataclass
class Target:
    """One node of the swarm."""

    name: str
    process: subprocess.Popen[str]
    run_dir: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lives(self) -> bool:
        return lives(self.pid)

    @property
    def link(self) -> str:
        """The link that it printed last, or nothing yet."""
        words = self.run_dir.with_suffix(".log").read_text().split()
        return next((word for word in reversed(words) if word.startswith("swarm://")), "")

    @property
    def address(self) -> str:
        """Multiaddress of its DHT port."""
        return self.link.partition("peer=")[2].partition("&")[0]

    def part(self, which: str) -> int:
        """Process id of its `p2pd` or `gossip` process; 0 if there is none."""
        return next((process.pid for process in tree(self.pid) if kind(process) == which), 0)

    def status(self) -> dict[str, Any]:
        """What it last wrote of the swarm; empty before the first time."""
        try:
            return dict(json.loads((self.run_dir / "swarm.json").read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def sees(self) -> set[str]:
        """Names of the members that it sees."""
        return {peer["name"] for peer in self.status().get("peers", {}).values() if peer.get("present")}

    def refused(self) -> dict[str, float]:
        """Reason -> how often it refused something."""
        status = self.status()
        counts = {**status.get("traffic", {}), **status.get("received", {})}
        return {name.rpartition("rejected/")[2]: n for name, n in counts.items() if "rejected/" in name}


@dataclass
class Swarm:
    """Nodes of one swarm; `folder` is theirs."""

    folder: Path
    checkout: Path
    options: Sequence[str] = ()
    targets: dict[str, Target] = field(default_factory=dict)
    id: str = ""

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "swarm_node", *arguments]

    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}

    def start(self, name: str, *arguments: str) -> Target:
        """A node; returns at once."""
        run_dir = self.folder / name
        local = ["--listen", "127.0.0.1", "--port", "0", "--gossip-port", "0", "--run-dir", str(run_dir)]
        with run_dir.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(
                self.command(*arguments, *local),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment(),
                start_new_session=True,
                text=True,
            )
        self.targets[name] = target = Target(name, process, run_dir)
        return target

    def found(self) -> Target:
        """The bootstrap of a new swarm, up."""
        new = self.command("new", "--name", "attacked", "--tasks", "small")
        subprocess.run(new, cwd=self.folder, env=self.environment(), check=True, stdout=subprocess.DEVNULL)
        boot = self.start("boot", "bootstrap", "attacked.toml")
        if not until(lambda: boot.link, START_S):
            raise RuntimeError(f"the bootstrap did not start: {boot.run_dir.with_suffix('.log').read_text()}")
        self.id = boot.link[len("swarm://") :].partition("?")[0]
        return boot

    def join(self, *names: str) -> None:
        """Members; returns at once."""
        for name in names:
            quick = ["--set", "pace_s=2", "--set", "eval.questions=0", *self.options]
            self.start(name, "join", self.targets["boot"].link, "--name", name, *quick)

    def all_see_all(self) -> bool:
        """Whether every node that runs sees all others by name."""
        names = {name for name, target in self.targets.items() if target.lives and name != "boot"}
        return all(target.sees() >= names - {name} for name, target in self.targets.items() if target.lives)

    def alive(self) -> list[str]:
        return [name for name, target in self.targets.items() if target.lives]


@contextmanager
def swarm(folder: Path, checkout: Path, members: Sequence[str] = ("alice", "bob")) -> Iterator[Swarm]:
    """A swarm whose members see each other; ended with the context."""
    folder.mkdir(parents=True)
    it = Swarm(folder, checkout.resolve())
    try:
        it.found()
        it.join(*members)
        if not until(it.all_see_all, START_S):
            logs = {name: target.run_dir.with_suffix(".log").read_text()[-2000:] for name, target in it.targets.items()}
            raise RuntimeError(f"the members do not see each other: {logs}")
        yield it
    finally:
        for target in it.targets.values():
            if target.lives:
                target.process.terminate()
        end((target.process for target in it.targets.values()), patience=15.0)
