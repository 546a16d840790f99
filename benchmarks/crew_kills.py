"""A crew of real processes that learns while a random stage of it is killed every so often: what `crew` runs.

    bootstrap, terminals t0 t1 ... (one stage each) -> first round -> every 30 s: kill -9, same command again -> curve

Times come from what the survivors write: events.jsonl and metrics.jsonl. Nothing here changes what a terminal does.
"""

from __future__ import annotations

import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.overhead import LOCAL, commands, link_of
from benchmarks.processes import tree
from benchmarks.warm_starts import plain

LAYERS, HIDDEN = 8, 96
POLL_S = 0.5
START_S = 240.0
"""A crew that has not finished a round by then is no crew."""
CREW = "home"
AFTER = 10
"""Rounds on either side of a kill whose reward is compared."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "copies": ("checkpoints.every=1000000",),
    "checkfree": ("pipeline.replica=ends", "checkpoints.every=1000000"),
    "swap": ("pipeline.swap=true", "checkpoints.every=1000000"),
}
CONFIG = """
[policy]
model = "{model}"
threads = 1
[rollouts]
group_size = 8
max_new_tokens = 8
[grpo]
microbatch_tokens = 64
[sharing]
own = 8
foreign = 0
[eval]
questions = 0
"""
"""Microbatches of about a group each: with a single one nothing is pipelined, and nothing swapped."""
Row = dict[str, Any]
WAYS = {
    "handed over": "live",
    "rebuilt from the replica": "replica",
    "taken from": "cohort",
    "rebuilt as the mean": "mean",
    "rebuilt as a copy": "copy",
    "rebuilt from the checkpoint": "snapshot",
    "begins with the base model": "base",
}
"""How a sentence about a stage that came back begins (`recovery.paths.tell`) -> `swarm_protocol.crew.Source.way`."""
LOST = re.compile(r"(?:the leader|stage \d+) of crew \S+ is lost \((\S+?)[ :]")
BACK = re.compile(r"stage [\d, ]+ is back after [\d.]+ s, held by (.*)")
WHOLE = re.compile(r"crew \S+ is whole: (?:stage ([^;]*)|all stages with ([^;]*))")


# --------------------------------------------------------------------- what terminals say


def named(text: str, by: str, names: Mapping[str, str]) -> str:
    """A sentence of terminal `by` with all terminals called by their names; `names`: end of a peer id -> name."""
    text = text.replace("this node", by)
    return re.sub(r"(?:peer )?…(\w{8})", lambda found: names.get(found[1], found[0]), text)


def way_of(text: str) -> tuple[int, str] | None:
    """(stage, way) of a sentence that says how a stage was come by."""
    found = re.match(rf"stage (\d+) ({'|'.join(WAYS)})\b", text)
    return (int(found[1]), WAYS[found[2]]) if found else None


def holders_of(text: str, stages: Sequence[int]) -> set[str] | None:
    """Who holds `stages`, which were lost, of a sentence that says that the crew is whole (again)."""
    if found := BACK.match(text):
        return set(found[1].split(", "))
    if found := WHOLE.match(text):
        if found[2]:
            return {found[2]}
        holders = dict(part.split(" ", 1) for part in found[1].split(", "))
        return {holders[str(stage)] for stage in stages}
    return None


def outcome(kill: Row, events: Iterable[Row], rounds: Iterable[Row]) -> Row:
    """What became of a kill, as far as it is known.

    kill     `at`, `stages` (that the victim held), `name` (of the victim)
    events   of all terminals: `time`, `text` (as `named`);  rounds: lines of all metrics: `time`, ...

    Seconds from the kill: `detected`, `whole` (all stages are held again), `round` (a round ends, the first after
    that); `ways`: lost stage -> how it was come by; `by`: who holds what was lost.
    """
    result: Row = {"detected": None, "whole": None, "round": None, "ways": {}, "by": []}
    later = sorted((e for e in events if e["time"] > kill["at"]), key=lambda event: float(event["time"]))
    lost = ((event["time"], LOST.match(event["text"])) for event in later)
    noticed = next((time_ for time_, found in lost if found and found[1] == kill["name"]), None)
    if noticed is None:
        return result
    result["detected"] = noticed - kill["at"]
    for event in later:
        if event["time"] < noticed:
            continue
        way = way_of(event["text"])
        if way is not None and way[0] in kill["stages"]:
            result["ways"].setdefault(str(way[0]), way[1])
        holders = holders_of(event["text"], kill["stages"])
        if holders is not None:
            result["whole"] = event["time"] - kill["at"]
            result["by"] = sorted(holders)
            ended = [line["time"] for line in rounds if line["time"] > event["time"]]
            result["round"] = min(ended) - kill["at"] if ended else None
            break
    return result


class Follower:
    """New lines of a file of JSON lines, which its writer may cut back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> list[Row]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._at:  # rounds that are done again: those that were read keep their place by time
                self._at = 0
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


# --------------------------------------------------------------------- terminals


@dataclass
class Terminal:
    """A terminal with the same command in it, again and again."""

    name: str
    path: Path
    command: tuple[str, ...]
    process: subprocess.Popen[str]
    began: float
    """Creation time of the process, as the kernel says."""
    starts: int = 1
    files: tuple[Follower, Follower] = field(init=False)

    def __post_init__(self) -> None:
        self.files = Follower(self.path / "events.jsonl"), Follower(self.path / "metrics.jsonl")

    def is_same(self) -> bool:
        """Whether the process is still the one that was started last."""
        if self.process.poll() is not None:
            return False
        return psutil.Process(self.process.pid).create_time() == self.began

    def kill(self) -> None:
        """SIGKILL to it and to what it started: as if the machine had gone."""
        kin = tree(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        for relative in kin[1:]:
            try:
                relative.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(20)
        psutil.wait_procs(kin[1:], timeout=20)


class World:
    """A crew, and what it has said so far."""

    def __init__(self, folder: Path, run: Any, stages: int, sets: Sequence[str], seed: int) -> None:
        self.run = run
        (folder / "settings.toml").write_text(CONFIG.format(model=plain(seed, layers=LAYERS, hidden=HIDDEN)))
        new = ["new", "--name", "bench", "--tasks", "small", "--out", str(folder / "swarm.toml")]
        subprocess.run([sys.executable, "-m", "swarm_node", *new], check=True, capture_output=True)
        run("bootstrap", str(folder / "swarm.toml"), *LOCAL, "--run-dir", str(folder / "hub"))
        link = link_of(folder / "hub")
        self.names: dict[str, str] = {}
        """End of a peer id -> terminal."""
        self.events: list[Row] = []
        self.rounds: dict[float, Row] = {}
        """By the time they ended."""
        self.kills: list[Row] = []
        self.died: list[Row] = []
        self.terminals = []
        for k in range(stages):
            path = folder / f"t{k}"
            settings = ["--config", str(folder / "settings.toml"), "--seed", str(seed)]
            settings += [part for one in sets for part in ("--set", one)]
            part = ["--stages", str(stages), "--crew", CREW]
            command = ("join", link, "--name", path.name, *part, *LOCAL, *settings, "--run-dir", str(path))
            process = run(*command)
            self.terminals.append(Terminal(path.name, path, command, process, _began(process)))

    def look(self) -> None:
        """Read what is new; note and start again who ended by itself."""
        for terminal in self.terminals:
            events, lines = (file.read() for file in terminal.files)
            for event in events:
                found = re.search(r"this is peer (\S+)", event["text"])
                if found:
                    self.names[found[1][-8:]] = terminal.name
                self.events.append({"time": event["time"], "text": named(event["text"], terminal.name, self.names)})
            self.rounds |= {line["time"]: line for line in lines}
            if not terminal.is_same():
                self.died.append({"at": time.time(), "name": terminal.name, "code": terminal.process.poll()})
                self.again(terminal)
        for kill in self.kills[-1:]:
            kill |= outcome(kill, self.events, self.rounds.values())

    def again(self, terminal: Terminal) -> None:
        """The same command, in the same directory."""
        terminal.process = self.run(*terminal.command)
        terminal.began, terminal.starts = _began(terminal.process), terminal.starts + 1

    def holders(self) -> list[str]:
        """Terminals that hold stage 0, 1, ...; nobody if the crew is not whole, or has not written so since the last
        kill."""
        since = max((kill["at"] + kill["whole"] for kill in self.kills if kill["whole"] is not None), default=0.0)
        found = [status for terminal in self.terminals if (status := _status(terminal.path)).get("crew")]
        found = [status for status in found if status["time"] > since and status["crew"]["whole"]]
        if not found:
            return []
        newest = max(found, key=lambda status: float(status["time"]))
        return [self.names.get(seat["peer"][-8:], "") for seat in newest["crew"]["stages"]]

    def kill(self, holders: Sequence[str], stage: int) -> None:
        """Whoever holds that stage, at once with all other stages it holds."""
        name = holders[stage]
        terminal = next(one for one in self.terminals if one.name == name)
        stages = [k for k, holder in enumerate(holders) if holder == name]
        at = time.time()
        terminal.kill()
        self.kills.append({"at": at, "stages": stages, "name": name, "lead": 0 in stages})
        self.again(terminal)


def _status(path: Path) -> Row:
    file = path / "swarm.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _began(process: subprocess.Popen[str]) -> float:
    return psutil.Process(process.pid).create_time()


# --------------------------------------------------------------------- a run


def run_one(settings: str, seed: int, stages: int, seconds: float, every: float, kills: bool) -> Row:
    """One crew, from its first round on for `seconds`. Without `kills`: the control, otherwise the same."""
    rng = random.Random(f"kills/{seed}")
    with commands() as (folder, run):
        world = World(folder, run, stages, SETTINGS[settings], seed)
        deadline = time.monotonic() + START_S
        while not world.rounds:
            time.sleep(POLL_S)
            world.look()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no round within {START_S:g} s")
        began = min(world.rounds)
        due = [began + every * k for k in range(1, math.ceil(seconds / every))] if kills else []
        skipped = 0
        while time.time() < began + seconds:
            time.sleep(POLL_S)
            world.look()
            if due and time.time() >= due[0]:
                if world.kills and world.kills[-1]["round"] is None:
                    due.pop(0)
                    skipped += 1
                elif holders := world.holders():
                    due.pop(0)
                    world.kill(holders, rng.randrange(stages))
                    print(f"{time.time() - began:5.0f} s: killed {world.kills[-1]}", flush=True)
        lines = [world.rounds[at] for at in sorted(world.rounds)]
        starts = {terminal.name: terminal.starts for terminal in world.terminals}
        killed = {name: sum(kill["name"] == name for kill in world.kills) for name in starts}
        died = world.died
    return {
        "settings": settings,
        "seed": seed,
        "stages": stages,
        "seconds": seconds,
        "every": every,
        "killed": kills,
        "kills": [kill | {"at": kill["at"] - began} | _rewards(kill["at"], lines) for kill in world.kills],
        "skipped": skipped,
        "died": died,
        "survivors_restarted": sum(starts[name] - 1 - killed[name] for name in starts),
        "rounds": [[round(line["time"] - began, 2), line["round"], round(line["reward"], 4)] for line in lines],
        "recovered": _recovered(lines),
    }


def _rewards(at: float, lines: Sequence[Row]) -> Row:
    """Mean reward of the last rounds before a kill, and of the first after it."""
    before = [line["reward"] for line in lines if line["time"] <= at][-AFTER:]
    after = [line["reward"] for line in lines if line["time"] > at][:AFTER]
    return {"before": fmean(before), "after": fmean(after) if after else None}


def _recovered(lines: Sequence[Row]) -> dict[str, float]:
    """`stages/...` of the last line: the last lead's own counts."""
    return {key: value for key, value in lines[-1].items() if key.startswith("stages/")}


# --------------------------------------------------------------------- figures of runs


def quantile(values: Sequence[float | None], q: float) -> float:
    """The smallest value that a share `q` of all does not exceed; `None` = never, that is infinity."""
    ordered = sorted(math.inf if value is None else value for value in values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def curve(rounds: Sequence[Sequence[float]], ends: Sequence[float], column: int) -> list[float]:
    """Mean reward of the rounds whose time (`column` 0) or number (1) is up to each of `ends`, from the one before."""
    means = []
    for low, high in zip([-math.inf, *ends], ends, strict=False):
        inside = [line[2] for line in rounds if low < line[column] <= high]
        means.append(fmean(inside) if inside else math.nan)
    return means


def final(rounds: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Each round once, as it was done last, in order: those after a lost lead may be done again."""
    latest = {line[1]: line for line in rounds}
    return [latest[number] for number in sorted(latest)]
