"""Does a real model learn, and how soon? This package and TRL on the same questions, for the same wall time.

    python -m benchmarks.real_learning --missing --minutes 150      # what is not there yet and ends in time
    python -m benchmarks.real_learning --parts default              # ten minutes of `local`, nothing else, and of TRL
    python -m benchmarks.real_learning --report
    python -m benchmarks.real_learning --quick                      # two minutes each, few questions; nothing is stored

`node` is `swarm-node local --model smollm2 --tasks FILE --minutes M --seed S`: its defaults are what is measured.
`trl …` is `benchmarks.real_trl`, by rate and dtype; `falling`: the rate falls to 0. Runs follow one another, each alone
on all cores: leave the machine idle. Both save an adapter a minute. They are kept as the run writes them, and measured
when it has ended (`benchmarks.real_held_out`): the share of right answers to held-out questions, alike for both.

Seconds count from the start of the command, which has as many as TRL, loading and questions before training included.
`first reward` is when the first round's could be read. Memory is the largest sum over the run's processes. Each row is
kept as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import real_judge, real_trl
from benchmarks.common import RESULTS, folder_of, machine, write_row
from benchmarks.processes import end, mind_signals, other_load, tree
from benchmarks.real_held_out import Asked, measure
from benchmarks.real_report import report
from benchmarks.real_sets import NEW_TOKENS, path_of

FOLDER = RESULTS / "real_learning"
HERE = str(Path(__file__).parent.parent)
WATCH_S = 0.5
END_S = 600.0  # longest wait for a run to save and end after its time
SCREEN_LINES = 30  # that are kept of the start and of the end
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Rows that belong together."""

    set: str
    minutes: float
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    once: tuple[str, ...] = ()  # arms of the first seed alone


NODE, TRL = "node", ("trl 2e-4 float32", "trl 2e-4 bfloat16")
FALLING = f"{TRL[0]} falling"  # to 0 over the run's time, as the node's rate does
PARTS = {
    "default": Part("sums", 10, (1, 2, 3), (NODE, TRL[0]), (TRL[1], FALLING)),
    "steps": Part("steps", 45, (1,), (NODE, TRL[0])),
    "words": Part("words", 45, (1,), (NODE, TRL[0])),
}
"""In all four and a half hours, and about a third more for held-out questions. Where a processor multiplies in
bfloat16, that one is faster for TRL: ask for it by `--arms`."""
QUICK = Part("sums", 2, (1,), (NODE, TRL[0]))


@dataclass
class Seen:
    """What was seen of a run from outside."""

    adapters: list[tuple[float, str]] = field(default_factory=list)  # seconds since the start, copied file
    rewards: list[tuple[float, float]] = field(default_factory=list)  # seconds since the start, mean of a round
    peak_mib: float = 0.0
    cpu_s: float = 0.0  # of all its processes
    seconds: float = 0.0
    code: int | None = None  # with which it ended


def next_look(seconds: float) -> float:
    """When the next adapter is due: each minute for ten minutes, then every three minutes."""
    return seconds + (55 if seconds < 600 else 175)  # a little less, since rounds end as they end


# --------------------------------------------------------------------- one run


def node_command(model: str, file: Path, minutes: float, seed: int) -> list[str]:
    """The command of a node, with no option that changes how it learns."""
    command = [sys.executable, "-m", "swarm_node", "local", "--model", model, "--tasks", str(file)]
    return [*command, "--minutes", f"{minutes:g}", "--seed", str(seed)]


def trl_command(spec: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.real_trl", json.dumps(spec)]


def newest_adapter(folder: Path) -> Path | None:
    """The newest whole file of adapters in a run's folder, of a node or of TRL's script."""
    sums = folder.glob("runs/*/checkpoints/round-*/SHA256SUMS")  # written last
    files = [*(each.with_name("policy.safetensors") for each in sums), *folder.glob("adapters/*/*.safetensors")]
    return max(files, key=lambda file: file.parent.name, default=None)


def rewards_in(folder: Path) -> list[float]:
    """The mean rewards of the rounds so far."""
    files = [*folder.glob("runs/*/metrics.jsonl"), *folder.glob("metrics.jsonl")]
    lines = files[0].read_text().split("\n")[:-1] if files else []
    return [json.loads(line)["reward"] for line in lines]


class Watch:
    """Looks at a running command from outside: copies adapters, notes rewards and memory."""

    def __init__(self, process: subprocess.Popen[str], began: float, folder: Path, kept: Path) -> None:
        self.process, self.began, self.folder, self.kept = process, began, folder, kept
        self.seen = Seen()
        self._due, self._last = 0.0, Path()

    def until(self, seconds: float) -> bool:
        """Watch until so many seconds after the start; whether the command still runs."""
        while (now := time.monotonic() - self.began) < seconds:
            if self.process.poll() is not None:
                return False
            self.look(now)
            time.sleep(WATCH_S)
        return self.process.poll() is None

    def look(self, now: float, last: bool = False) -> None:
        self.seen.seconds = now
        costs = [_cost(process) for process in tree(self.process.pid)]
        self.seen.peak_mib = max(self.seen.peak_mib, sum(rss for rss, _ in costs) / 2**20)
        self.seen.cpu_s = max(self.seen.cpu_s, sum(cpu_s for _, cpu_s in costs))
        self.seen.rewards += [(round(now, 1), each) for each in rewards_in(self.folder)[len(self.seen.rewards) :]]
        newest = newest_adapter(self.folder)
        if newest is None or newest == self._last or (now < self._due and not last):
            return
        copy = self.kept / f"{len(self.seen.adapters):04}.safetensors"
        try:
            shutil.copyfile(newest, copy)
        except FileNotFoundError:  # the run removed it meanwhile, since there is a newer one
            return
        self.seen.adapters.append((now, str(copy)))
        self._last, self._due = newest, next_look(now)


def _cost(process: psutil.Process) -> tuple[int, float]:
    """Resident bytes and CPU seconds of a process, those of its ended children included."""
    try:
        return process.memory_info().rss, sum(process.cpu_times()[:4])
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0, 0.0


def without_places(text: str) -> str:
    """A text that is stored, without paths of this machine."""
    folders = {f"{sys.prefix}/": "", f"{HERE}/": "", f"{Path.home()}/": "~/"}
    for path, shown in {sys.executable: "python", **folders}.items():
        text = text.replace(path, shown)
    return text


def watched(command: Sequence[str], folder: Path, kept: Path, seconds: float, stop: bool) -> tuple[Seen, list[str]]:
    """Run a command in `folder` for so many seconds. `stop`: it is then told to save and end, which others do by
    themselves. What was seen, and what it printed. RuntimeError if it fails before it has saved anything."""
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE}/protocol",
    }
    screen = folder / "screen.log"
    with screen.open("w") as out:
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=out, stderr=subprocess.STDOUT)
        watch = Watch(process, began, folder, kept)
        try:
            if watch.until(seconds) and stop:
                process.send_signal(signal.SIGINT)
            if watch.until(seconds + END_S):
                raise RuntimeError(f"still running {END_S:g} s after its time")
        finally:
            end([process], 0.0)
    watch.look(time.monotonic() - began, last=True)
    watch.seen.code = process.returncode
    lines = without_places(screen.read_text()).splitlines()
    if process.returncode and not watch.seen.adapters:
        raise RuntimeError(f"ended with {process.returncode}:\n" + "\n".join(lines[-SCREEN_LINES:]))
    return watch.seen, lines


# --------------------------------------------------------------------- a row


def trained_policy(who: str, model: str, folder: Path) -> dict[str, Any]:
    """The policy that a run trained, as `PolicyConfig` takes it."""
    if who != NODE:
        rank, alpha = real_trl.RANK, real_trl.ALPHA
        return {"model": model, "lora": True, "lora_rank": rank, "lora_alpha": alpha, "system_prompt": ""}
    from swarm_node.config.own import read_own

    (file,) = folder.glob("runs/*/config.toml")
    return read_own(file, print).policy.model_dump(exclude_unset=True)


def run(args: argparse.Namespace, name: str, who: str, seed: int, part: Part) -> Row:
    """One row: a run, then its held-out shares."""
    questions, minutes = path_of(part.set), args.each or part.minutes
    asked = Asked(str(questions), args.questions, args.samples, args.thorough, NEW_TOKENS[part.set])
    load = other_load()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folder, kept = Path(first), Path(second)
        if who == NODE:
            command = node_command(args.model, questions, minutes, seed)
        else:
            _, rate, dtype, *falls = who.split()
            spec = {"model": folder_of(args.model), "file": str(questions), "out": first, "seed": seed}
            spec |= {"rate": float(rate), "falls": bool(falls), "dtype": dtype, "new": asked.new}
            spec |= {"until": time.time() + 60 * minutes}
            command = trl_command(spec)
        print(f"{name}, {who}, seed {seed}: {shlex.join(command)}", flush=True)
        seen, screen = watched(command, folder, kept, 60 * minutes, who == NODE)
        print(f"ran for {seen.seconds:.0f} s; measuring {len(seen.adapters)} adapters", flush=True)
        looks = measure(trained_policy(who, args.model, folder), asked, seen.adapters)
    return {
        "part": name,
        "set": part.set,
        "who": who,
        "seed": seed,
        "minutes": minutes,
        "command": without_places(shlex.join(command)),
        "curve": [asdict(each) for each in looks],
        "first_reward_s": seen.rewards[0][0] if seen.rewards else None,
        "rewards": seen.rewards,
        "peak_rss_mib": round(seen.peak_mib),
        "seconds": round(seen.seconds, 1),
        "cpu_s": round(seen.cpu_s, 1),
        "asked": asdict(asked) | {"file": questions.name, "temperature": 1.0, "dtype": "float32"},
        "judge": real_judge.NAME,
        "exit": seen.code,
        "screen": screen if len(screen) <= 2 * SCREEN_LINES else screen[:SCREEN_LINES] + screen[-SCREEN_LINES:],
        "load": load,
        "machine": machine(),
    }


def file_of(name: str, who: str, seed: int) -> Path:
    return FOLDER / f"{name}-{who.replace(' ', '-')}-{seed}.json"


def asked_for(args: argparse.Namespace) -> Iterator[tuple[str, str, int, Part]]:
    """The rows in their order: for each seed the node first."""
    for name in args.parts:
        part = QUICK if args.quick else PARTS[name]
        for seed in part.seeds:
            for who in part.arms + (part.once if seed == part.seeds[0] else ()):
                if (not args.arms or who in args.arms) and (not args.seeds or seed in args.seeds):
                    yield name, who, seed, part


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arms = (NODE, *TRL, FALLING)
    parser.add_argument("--arms", nargs="+", choices=arms, metavar="ARM", help="node, or 'trl RATE DTYPE [falling]'")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--model", default="smollm2", help="a name that `local` knows, or a directory")
    parser.add_argument("--each", type=float, help="minutes of each run, in place of the part's own")
    parser.add_argument("--questions", type=int, default=96, help="held-out questions at most")
    parser.add_argument("--samples", type=int, default=2, help="answers to each while a run trains")
    parser.add_argument("--thorough", type=int, default=4, help="answers to each at the start and the end")
    parser.add_argument("--missing", action="store_true", help="leave out rows that are there")
    parser.add_argument("--minutes", type=float, default=1200.0, help="no run begins that would end later")
    parser.add_argument("--report", action="store_true", help="tables of all rows that are there")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    if args.report:
        print(report([json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]))
        return
    mind_signals()
    folder_of(args.model)  # which may have to be fetched first
    if args.quick:
        args.parts, args.questions, args.samples, args.thorough = ["default"], 8, 1, 2
    until = time.monotonic() + 60 * args.minutes
    rows = []
    for name, who, seed, part in asked_for(args):
        file = file_of(name, who, seed)
        late = time.monotonic() + 60 * (args.each or part.minutes) > until
        if late or (args.missing and file.exists() and not args.quick):
            continue
        rows.append(run(args, name, who, seed, part))
        if not args.quick:
            write_row(file, rows[-1])
        print(report(rows), flush=True)


if __name__ == "__main__":
    main()
