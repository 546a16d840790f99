"""What the network costs and how quickly it works, beside what was promised.

    python -m benchmarks.overhead [--parts member bootstrap join recovery]

member      A swarm of four `P2PTransport`s: p2pd and gossip process of one, idle, at a message a second of all four
            together, and of each.
bootstrap   The real `swarm-node bootstrap` over all its processes, alone, and while two members send a message a
            second between them.
join        The real commands: from the start of a second `swarm-node join` to the first foreign group that it admits.
recovery    p2pd and the gossip process of one in four are killed by turns (SIGKILL).

CPU is in per cent of one core; memory resident, pages that processes share counted for each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from msgspec.structs import replace

from benchmarks.common import RESULTS, table, write
from benchmarks.gossip import SWARM, started
from benchmarks.gossip_nodes import STRAGGLERS_S, Spec
from benchmarks.processes import Meter, end, kind, merged, mind_signals, other_load, rss_mib, tree
from swarm_protocol.manifest import parse_link, parse_manifest

IDLE_S = 30.0
ROUNDS = 40
REPEATS = 3
"""Joins, and kills of each process."""
LOCAL = ("--listen", "127.0.0.1", "--port", "0", "--gossip-port", "0")
QUICK = ("--set", "rollouts.group_size=8", "--set", "eval.questions=0")
T = TypeVar("T")
Row = dict[str, Any]
Line = tuple[str, str, str]
"""What, promise, measured."""


def member() -> Row:
    """Of p2pd and gossip process of a member that is no bootstrap, the median of three."""
    figures: Row = {}
    for name, interval in (("at 1 message/s of all", 4.0), ("at 1 message/s of each", 1.0)):
        spec = Spec("gossip", "", SWARM, 4, rounds=int(ROUNDS / interval), interval_s=interval)
        with started(spec) as nodes:
            pids = {str(i): node.pid for i, node in enumerate(nodes)}
            if "idle" not in figures:
                time.sleep(10.0)  # the imports are long over
                with Meter(pids) as meter:
                    time.sleep(IDLE_S)
                figures["idle"] = _of_members(meter)
            with Meter(pids) as meter:
                begin_at = time.time() + 1.0
                for node in nodes:
                    node.tell(begin_at)
                time.sleep(spec.rounds * interval)
            figures[name] = _of_members(meter)
            results = [node.hear(STRAGGLERS_S + 60) for node in nodes]
            figures[name]["delivered"] = sum(len(r["latencies"]) for r in results) / (spec.rounds * 12)
    return figures


def _of_members(meter: Meter) -> Row:
    rows = []
    for name in list(meter.trees)[1:]:
        network = [process for process in meter.trees[name] if kind(process) != "node"]
        cpu = meter.cpu_s[name]
        rows.append(
            {
                "rss_mib": rss_mib(network),
                **{f"rss_mib_{kind(process)}": rss_mib([process]) for process in network},
                "cpu_percent": 100 * (cpu["p2pd"] + cpu["gossip"]) / meter.seconds,
                **{f"cpu_percent_{which}": 100 * cpu[which] / meter.seconds for which in ("p2pd", "gossip", "node")},
                "kb_per_s": sum(meter.bytes[name]) / 1000 / meter.seconds,
            }
        )
    return {key: median(row[key] for row in rows) for key in rows[0]}


def bootstrap() -> Row:
    """Of `swarm-node bootstrap`, alone and with two members that only this benchmark's node plays."""
    with commands() as (folder, run):
        manifest = _manifest(folder)
        hub = run("bootstrap", str(manifest), *LOCAL, "--run-dir", str(folder / "hub"))
        found = link_of(folder / "hub")
        time.sleep(15.0)
        with Meter({"hub": hub.pid}) as meter:
            time.sleep(IDLE_S)
        figures: Row = {"idle": _of_all(meter)}
        link, shards = parse_link(found), parse_manifest(manifest.read_bytes()).shards
        spec = Spec("gossip", "", link.swarm, 2, shards, link.peers, rounds=ROUNDS // 2, interval_s=2.0)
        with started(spec) as nodes:
            with Meter({"hub": hub.pid}) as meter:
                begin_at = time.time() + 1.0
                for node in nodes:
                    node.tell(begin_at)
                time.sleep(spec.rounds * spec.interval_s)
            figures["at 1 message/s"] = _of_all(meter)
            heard = [len(node.hear(STRAGGLERS_S + 60)["latencies"]) for node in nodes]
        figures["at 1 message/s"]["delivered"] = sum(heard) / (2 * spec.rounds)
        figures["at 1 message/s"]["messages_in"] = _status(folder / "hub")["traffic"]["messages_in"]
    return figures


def _of_all(meter: Meter) -> Row:
    [processes] = meter.trees.values()
    [cpu] = meter.cpu_s.values()
    return {
        "rss_mib": rss_mib(processes),
        **{f"rss_mib_{kind(process)}": rss_mib([process]) for process in processes},
        "processes": len(processes),
        "cpu_percent": 100 * sum(cpu.values()) / meter.seconds,
        "kb_per_s": sum(meter.bytes["hub"]) / 1000 / meter.seconds,
    }


def join() -> Row:
    """Seconds from `swarm-node join` to the line of metrics.jsonl with a foreign group admitted."""
    seconds: list[float] = []
    cpu_s: list[float] = []
    with commands() as (folder, run):
        manifest = _manifest(folder)
        run("bootstrap", str(manifest), *LOCAL, "--run-dir", str(folder / "hub"))
        link = link_of(folder / "hub")
        run("join", link, "--name", "first", *LOCAL, *QUICK, "--run-dir", str(folder / "first"))
        until(lambda: metrics(folder / "first"), 120)
        for i in range(REPEATS):
            path = folder / f"joiner{i}"
            began = time.monotonic()
            joiner = run("join", link, "--name", f"joiner{i}", *LOCAL, *QUICK, "--run-dir", str(path))
            until(lambda path=path: _admitted(path), 120)  # type: ignore[misc]
            seconds.append(time.monotonic() - began)
            cpu_s.append(sum(sum(process.cpu_times()[:2]) for process in tree(joiner.pid)))
            joiner.terminate()
            end([joiner], 20.0)
            print(f"joined in {seconds[-1]:.1f} s", flush=True)
    return {"seconds": seconds, "cpu_s": cpu_s}


def recovery() -> Row:
    """Seconds from a kill to work as usual."""
    spec = Spec("gossip", "", SWARM, 4, rounds=100_000, interval_s=0.4, groups=1, repeats=REPEATS)
    with started(spec, lambda its: replace(its, method="recovery") if its.folder.endswith("3") else its) as nodes:
        time.sleep(5.0)
        for node in nodes:
            node.tell(time.time() + 1.0)
        heard = nodes[3].hear(REPEATS * 2 * 60 + 60)
    kills, stats = heard["recoveries"], heard["stats"]
    return {
        "kills": kills,
        "restarts": {name: stats[f"restarts/{name}"] for name in ("gossip", "dht")},
        "seconds": {
            victim: {
                what: [round(kill[what], 2) for kill in kills if kill["killed"] == victim and what in kill]
                for what in ("runs", "hears", "heard", "answered")
            }
            for victim in ("gossip", "p2pd")
        },
    }


# --------------------------------------------------------------------- the real commands


@contextmanager
def commands(one_thread: bool = True) -> Iterator[tuple[Path, Callable[..., subprocess.Popen[str]]]]:
    """A folder, and a way to start `swarm-node` commands that end with the context: each with one thread of torch, or
    with as many as it chooses."""
    here = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    here |= {"OMP_NUM_THREADS": "1"} if one_thread else {}
    running: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)

        def run(*arguments: str, **variables: str) -> subprocess.Popen[str]:
            log = (path / f"{len(running)}.log").open("w")
            process = subprocess.Popen(
                [sys.executable, "-m", "swarm_node", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=here | variables,
            )
            running.append(process)
            return process

        try:
            yield path, run
        except BaseException:
            for log in sorted(path.glob("*.log")):
                print(log.name, *log.read_text().splitlines()[-10:], sep="\n  ", file=sys.stderr)
            raise
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
            end(running, 15.0)


def _manifest(folder: Path) -> Path:
    path = folder / "swarm.toml"
    command = [sys.executable, "-m", "swarm_node", "new", "--name", "bench", "--tasks", "small", "--out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def until(what: Callable[[], T | None], seconds: float) -> T:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"not within {seconds:g} s")


def _status(run_dir: Path) -> Row:
    try:
        return dict(json.loads((run_dir / "swarm.json").read_text()))
    except FileNotFoundError:
        return {}


def link_of(run_dir: Path) -> str:
    return str(until(lambda: _status(run_dir).get("link"), 60))


def metrics(run_dir: Path) -> list[Row]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _admitted(run_dir: Path) -> bool:
    return any(line.get("swarm/groups_admitted", 0) > 0 for line in metrics(run_dir))


# --------------------------------------------------------------------- promise and measurement


def lines(figures: Row) -> list[Line]:
    """The table, of the parts that there are figures for."""
    rows: list[Line] = []
    if "member" in figures:
        m = figures["member"]["figures"]
        one, each, idle = m["at 1 message/s of all"], m["at 1 message/s of each"], m["idle"]
        rows += [
            ("p2pd + gossip of a member in four, idle: memory", "<= 250 MiB", _memory(idle)),
            ("likewise: CPU", "", f"{idle['cpu_percent']:.1f} % of a core"),
            ("at 1 message/s altogether: CPU", "<= 5 % of a core", _cpu(one)),
            ("at 1 message/s from each, four in all: CPU", "<= 5 % of a core", _cpu(each)),
            ("likewise: memory", "", _memory(each)),
        ]
    if "bootstrap" in figures:
        b = figures["bootstrap"]["figures"]
        idle, busy = b["idle"], b["at 1 message/s"]
        rows += [
            ("`swarm-node bootstrap`, idle, all processes: memory", "<= 500 MiB", _memory(idle)),
            ("likewise: CPU", "", f"{idle['cpu_percent']:.1f} % of a core"),
            ("at 1 message/s of two members: memory", "<= 600 MiB", _memory(busy)),
            ("likewise: CPU", "", f"{busy['cpu_percent']:.1f} % of a core"),
        ]
    if "join" in figures:
        j = figures["join"]["figures"]
        rows.append(("`swarm-node join` to first foreign group admitted", "<= 20 s", _seconds(j["seconds"])))
        rows.append(("likewise: CPU time of all its processes", "", _seconds(j["cpu_s"])))
    if "recovery" in figures:
        seconds = figures["recovery"]["figures"]["seconds"]
        for victim, whats in (("gossip", ("runs", "hears", "heard")), ("p2pd", ("runs", "answered"))):
            for what in whats:
                title = {
                    "runs": "there is a new one",
                    "hears": "others' messages arrive",
                    "heard": "own messages arrive",
                    "answered": "requests are answered",
                }[what]
                rows.append((f"kill -9 of {victim}: {title}", "<= 5 s", _seconds(seconds[victim][what])))
    return rows


def _memory(row: Row) -> str:
    parts = ", ".join(f"{k.removeprefix('rss_mib_')} {v:.0f}" for k, v in row.items() if k.startswith("rss_mib_"))
    return f"{row['rss_mib']:.0f} MiB ({parts})"


def _cpu(row: Row) -> str:
    return f"{row['cpu_percent']:.1f} % (p2pd {row['cpu_percent_p2pd']:.1f}, gossip {row['cpu_percent_gossip']:.1f})"


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.1f} s, at most {max(values):.1f} s in {len(values)}" if values else "never"


PARTS: dict[str, Callable[[], Row]] = {"member": member, "bootstrap": bootstrap, "join": join, "recovery": recovery}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    mind_signals()
    path = RESULTS / "overhead.json"
    for part in args.parts:
        load = other_load()
        print(f"{part}: {load}", flush=True)
        write("overhead", merged(path, part, {"other load": load, "figures": PARTS[part]()}))
    print(table(["what", "promise", "measured"], [list(line) for line in lines(json.loads(path.read_text()))]))


if __name__ == "__main__":
    main()
