"""What a run costs to start, look at and stop after 3,000 rounds and after 3,000,000.

    python -m benchmarks.long_run [--rounds 3000 3000000] [--repeats 3] [--folder FOLDER]

Each run begins with two real rounds. The rest is written by the program's own writers of metrics, events and
checkpoints, from synthetic numbers under the names that a member of a swarm records, so that old rounds are thinned as
they would have been. With `--folder`, runs that are there already are measured again.

start       seconds from the start of `swarm-node local` to its first new round
stop        seconds from Ctrl-C (SIGINT) to the end of that process, without held-out questions; its summary must be on
            the screen
status      seconds of `swarm-node status RUN`
dashboard   seconds from the request to the whole answer of /api/runs/RUN, the first one that a dashboard gets

Lengths take turns; each figure is the median. Memory is the peak of resident memory, as the kernel counts it. Goal: the
longer run takes less than twice the time of the shorter one, and less than 100 MiB more.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import median, table, write
from swarm_node.observability.jsonl import last_record
from swarm_node.observability.metrics import EventLog, MetricsWriter
from swarm_node.observability.metrics_reference import METRICS
from swarm_node.observability.tally import Tally
from swarm_node.runtime.cost import CostMeter
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.rundir import RunDir

QUICK = ("--price-per-hour", "0.9", "--set", "eval.questions=0", "--set", "rollouts.group_size=4")
REASONS = ("age", "cap", "duplicate", "length", "quota", "schema", "task", "zero")
EVENT_EACH = 100
"""Rounds between two events, so that a run of 3,000,000 has 30,000 of them."""
ROUND_S = 0.06
"""Of the starter policy: 3,000,000 rounds are 50 hours."""
PATIENCE_S = 300.0
MIB = 1 << 20
Figures = dict[str, float]


def build(path: Path, rounds: int) -> None:
    """The directory of a run that has trained so many rounds."""
    local = [sys.executable, "-m", "swarm_node", "local", "--run-dir", str(path), "--rounds", "2", *QUICK]
    subprocess.run(local, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run, began = RunDir(path), time.process_time()
    store = CheckpointStore(run.checkpoints, 2, print)
    checkpoint = store.load_latest(lambda state: None)
    last = last_record(run.metrics)
    assert checkpoint is not None and last is not None
    writer, events = MetricsWriter(run.metrics, print), EventLog(run.events, print)
    writer.truncate_after(0)
    tally, cost = Tally(), CostMeter(0.9, 0.0)
    rng = random.Random(0)
    for number in range(1, rounds + 1):
        record = synthetic(last, number, rng, rounds)
        record |= cost.round(record["reward"], 8, number * ROUND_S)
        writer.write(record)
        tally.add(record)
        if number % EVENT_EACH == 0:
            events.write("note", f"a synthetic sentence of usual length after round {number}, which nobody reads")
    writer.close()
    events.close()
    figures = {"tally": msgspec.to_builtins(tally), "cost": msgspec.to_builtins(cost.costs)}
    store.save(rounds, checkpoint.tensors, checkpoint.state | figures)
    store.close()
    print(f"{path}: {rounds:,} rounds, {time.process_time() - began:.0f} CPU s, {run.metrics.stat().st_size:,} bytes")


def synthetic(last: dict[str, Any], number: int, rng: random.Random, rounds: int) -> dict[str, Any]:
    """The record of a round of a member of a swarm."""
    noise = rng.random()
    record = dict(last)
    for name in METRICS["The swarm"]:
        names = [name.replace("<reason>", reason) for reason in REASONS] if "<reason>" in name else [name]
        record |= dict.fromkeys(names, float(number * 3))
    begun = time.time() - rounds * ROUND_S
    return record | {
        "round": number,
        "step": number,
        "time": begun + number * ROUND_S,
        "step_time": ROUND_S,
        "num_tokens": number * 900,
        "reward": 0.2 + 0.2 * number / rounds + 0.1 * noise,
        "loss": noise,
        "swarm/groups_own": 4.0,
        "swarm/groups_used": float(number % 3),
    }


def measure(path: Path) -> dict[str, Figures]:
    """Seconds and MiB of each thing, once."""
    start, stop = start_and_stop(path)
    return {"start": start, "stop": stop, "status": status(path), "dashboard": dashboard(path)}


def start_and_stop(path: Path) -> tuple[Figures, Figures]:
    """Of `swarm-node local`. Raises RuntimeError if it ends without a summary."""
    run = RunDir(path)
    known = last_record(run.metrics)
    assert known is not None
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        command = ["local", "--run-dir", str(path), "--rounds", "1000000000", *QUICK]
        with started(command, output) as process:
            while (last := last_record(run.metrics)) is None or last["round"] <= known["round"]:
                if process.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                    raise RuntimeError(f"no new round in {path}")
                time.sleep(0.01)
            start = {"s": time.perf_counter() - began, "mib": peak_mib(process.pid)}
            told = time.perf_counter()
            process.send_signal(signal.SIGINT)
            _, _, used = os.wait4(process.pid, 0)
            stop = {"s": time.perf_counter() - told, "mib": used.ru_maxrss * 1024 / MIB}
            process.returncode = 0
        output.seek(0)
        if b"first and last tenth of" not in output.read():
            raise RuntimeError(f"{path} ended without a summary")
    return start, stop


def status(path: Path) -> Figures:
    """Of `swarm-node status`."""
    began = time.perf_counter()
    with started(["status", str(path)], subprocess.DEVNULL) as process:
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise RuntimeError(f"status of {path} ended with {process.returncode}")
    return {"s": time.perf_counter() - began, "mib": used.ru_maxrss * 1024 / MIB}


def dashboard(path: Path) -> Figures:
    """Of the first answer of `swarm-node dashboard`, once it listens."""
    with started(["dashboard", str(path), "--port", "0"], subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise RuntimeError(f"the dashboard says {line!r}")
        began = time.perf_counter()
        with urllib.request.urlopen(f"{found[0]}api/runs/{path.name}", timeout=PATIENCE_S) as answer:
            answer.read()
        return {"s": time.perf_counter() - began, "mib": peak_mib(process.pid)}


@contextmanager
def started(command: list[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`swarm-node` with its output there; killed in the end if it still runs."""
    process = subprocess.Popen([sys.executable, "-m", "swarm_node", *command], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


def peak_mib(pid: int) -> float:
    """Peak resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, nargs=2, default=[3_000, 3_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        paths = {rounds: folder / f"rounds-{rounds}" for rounds in args.rounds}
        for rounds, path in paths.items():
            if not path.exists():
                build(path, rounds)
        bytes_kept = {rounds: RunDir(path).metrics.stat().st_size for rounds, path in paths.items()}
        taken: dict[int, list[dict[str, Figures]]] = {rounds: [] for rounds in args.rounds}
        for _ in range(args.repeats):
            for rounds, path in paths.items():
                taken[rounds].append(measure(path))
    figures = {
        what: {
            str(n): {unit: median([once[what][unit] for once in all]) for unit in ("s", "mib")}
            for n, all in taken.items()
        }
        for what in taken[args.rounds[0]][0]
    }
    short, long = map(str, args.rounds)
    rows = []
    for what, of in figures.items():
        of["ratio"] = {"s": of[long]["s"] / of[short]["s"], "mib_more": of[long]["mib"] - of[short]["mib"]}
        values = [f"{of[short]['s']:.2f}", f"{of[long]['s']:.2f}", f"{of['ratio']['s']:.2f}"]
        rows.append([what, *values, f"{of[short]['mib']:.0f}", f"{of[long]['mib']:.0f}"])
    columns = ["", f"{args.rounds[0]:,} rounds, s", f"{args.rounds[1]:,}, s", "ratio", "MiB", "MiB"]
    print(table(columns, rows))
    write("long_run", {"rounds": args.rounds, "repeats": args.repeats, "metrics_bytes": bytes_kept, "figures": figures})


if __name__ == "__main__":
    main()
