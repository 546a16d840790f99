"""One exchange of weights between two real processes on loopback: how fast, in how much memory, and how much of it
training notices.

    python -m benchmarks.averaging_exchange [--sizes 50 500] [--codecs float32 8bit 4bit]      MB of float32 weights

Two processes, each a `P2PTransport` (p2pd, encrypted libp2p streams) and a `PairAverager` with its usual checks, over
weights that drift between exchanges.

speed      From the call to the moment when both know, bodies hashed and decoded, partner checked, new momentum made:
           (bytes of both bodies) / time, and the same for the float32 weights that they stand for.
memory     Resident peak of the process (VmHWM, set back before each exchange), beside the averaged tensors: W = their
           float32 bytes. `growth` is what an exchange takes beyond what a node holds anyhow; `state` is that (weights,
           slow weights, momentum, and a half for the mean direction that the gates remember); `all` is both and the
           interpreter. p2pd is a process of its own.
boundary   Time that training stands still: all of `Averager.step` from the call to the change of weights. In brackets,
           how much of it its thread had a core: the rest it waited for one, or for another thread of Python.
overlap    Both processes also train (matrix products, 50 ms a step, one thread): extra wall time of the steps from the
           beginning to the end of an exchange, beside as many steps without one; once with `averaging.overlap`, once
           without (training waits). hidden = 1 - extra / extra where training waits: the part of what an exchange costs
           that overlapping saves. With `link`, bodies leave at so many Mbit/s, as over home links.

This is the worst case for overlapping: two nodes, their p2pd and all hashing share two cores that training keeps busy
already. So whatever CPU an exchange takes (`CPU of a node`) is time that training loses, and only waiting for the link
can be hidden. What a node hides that has a core to spare is not measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import machine, table, write
from benchmarks.processes import Child, end, kind, mind_signals, other_load, tree

SWARM, COHORT = "e" * 64, "c" * 16
CODECS = ("float32", "8bit", "4bit")
PERIOD_S = 2.0
REPEATS = 3
STEP_S = 0.05
BASELINE_STEPS = 40
LINKS = (0.0, 12.5e6, 2.5e6)
"""Bytes per second that leave a node: as fast as they can, a good home link, a usual one."""
LINKS_MB = 50.0
"""Weights up to this size are sent over all of them: more would take minutes."""
READY_S = 60.0
EXCHANGE_S = 300.0
TENSOR = 2**20
"""Values of one tensor, at most."""
Row = dict[str, Any]


# --------------------------------------------------------------------- one of the two processes


class Node:
    """Does what stdin says, a line of JSON each; prints the result."""

    def __init__(self, folder: Path, name: str, values: int, codec: str, bootstrap: Sequence[str]) -> None:
        import torch

        from swarm_node.averaging.averager import CohortPlace
        from swarm_node.averaging.pair_averager import PairAverager
        from swarm_node.config import AveragingConfig
        from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
        from swarm_protocol.transports.p2p.transport import P2PTransport
        from swarm_protocol.transports.settings import NetworkSettings

        torch.set_num_threads(1)
        network = {"listen": "127.0.0.1", "port": 0, "gossip_port": 0, "relay": False, "lookup_s": 0.5}
        settings = NetworkSettings(bootstrap=list(bootstrap), **network)
        self.transport = P2PTransport(folder / f"{name}.key", SWARM, settings)
        while not self.transport.addresses:  # whatever the network needs is loaded by now
            time.sleep(0.05)
        self.noise = torch.randn(TENSOR, generator=torch.Generator().manual_seed(ord(name[0])))
        self.matrix = torch.randn(384, 384)
        self.products = 1
        while (seconds := self.train_step()) < STEP_S:
            self.products += max(1, int(self.products * (STEP_S / seconds - 1)))
        self.rss_before = _memory("VmRSS")
        self.weights = {f"layers.{i}.w": torch.zeros(min(TENSOR, values - at)) for i, at in _parts(values)}
        config = AveragingConfig(method="noloco", every=1, codec=codec, timeout_s=EXCHANGE_S)  # type: ignore[arg-type]
        place = CohortPlace(SWARM, COHORT, self.transport.peer_id, PERIOD_S)
        self.averager = PairAverager(config, place, self.weights, self.transport, time.time, _complain)
        self.bytes = 4 * values
        self.updates = 0
        self.seconds = self.boundary = self.boundary_cpu = 0.0
        self.rate = 0.0
        self._instrument()
        self.transport.announce(PeerCard(PROTOCOL_VERSION, SWARM, 0.0, name, ["trainer"], cohort=COHORT))

    def _instrument(self) -> None:
        """Note when an exchange begins and ends, and slow bodies down to `rate`."""
        averager = self.averager
        over, send = averager.slot.end, averager._half

        def ended(exchange: Any, error: BaseException | None) -> None:
            if error is None:
                self.seconds = time.monotonic() - exchange.began
            over(exchange, error)

        def half(exchange: Any) -> Any:
            exchange.began = time.monotonic()
            ours = send(exchange)
            return replace(ours, pieces=partial(self._slowed, ours.pieces))

        averager.slot.end, averager._half = ended, half  # type: ignore[method-assign]

    def _slowed(self, pieces: Callable[[], Iterator[memoryview]]) -> Iterator[memoryview]:
        leave_at = time.monotonic()
        for piece in pieces():
            if self.rate:
                leave_at += len(piece) / self.rate
                time.sleep(max(0.0, leave_at - time.monotonic()))
            yield piece

    def train_step(self) -> float:
        """Seconds that it took."""
        began, x = time.perf_counter(), self.matrix
        for _ in range(self.products):
            x = (self.matrix @ x).clamp_(-1, 1)
        return time.perf_counter() - began

    def drift(self) -> None:
        """As if trained: partly in the partner's direction."""
        with self.averager.changing():
            for tensor in self.weights.values():
                tensor.add_(self.noise[: len(tensor)], alpha=1e-4).add_(1e-4)

    def boundary_step(self) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        self.averager.step(self.updates)
        self.boundary += time.perf_counter() - began
        self.boundary_cpu += time.thread_time() - cpu

    def rest(self) -> None:
        self.averager.woken.wait(0.02)
        self.averager.woken.clear()

    def until_exchanged(self, meanwhile: Callable[[], object]) -> None:
        goal, deadline = self.averager.counts["exchanges"] + 1, time.monotonic() + EXCHANGE_S
        self.updates += 1
        self.boundary = self.boundary_cpu = 0.0
        while self.averager.counts["exchanges"] < goal:
            meanwhile()
            self.boundary_step()
            if time.monotonic() > deadline:
                raise TimeoutError(str(self.averager.metrics()))

    def do_ready(self) -> Row:
        return {"addresses": self.transport.addresses, "members": len(self.transport.members())}

    def do_exchange(self) -> Row:
        """One, and nothing else."""
        self.drift()
        processes = tree(_pid())
        cpu = sum(sum(process.cpu_times()[:2]) for process in processes)
        p2pd = next(process.pid for process in processes if kind(process) == "p2pd")
        before = _memory("VmRSS")
        for pid in (_pid(), p2pd):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        bytes_out = self.averager.counts["bytes"]
        self.until_exchanged(self.rest)
        peak = _memory("VmHWM")
        return {
            "seconds": self.seconds,
            "bytes": self.averager.counts["bytes"] - bytes_out,
            "boundary_s": self.boundary,
            "boundary_cpu_s": self.boundary_cpu,
            "cpu_s": sum(sum(process.cpu_times()[:2]) for process in processes) - cpu,
            "growth": (peak - before) / self.bytes,
            "state": (before - self.rss_before) / self.bytes,
            "all": peak / self.bytes,
            "p2pd_peak_mib": _memory("VmHWM", p2pd) / 2**20,
            "apart": self.averager.spread,
            "skipped": {name: n for name, n in self.averager.counts.items() if name.startswith("skipped/")},
        }

    def do_overlap(self, begin_at: float, rate: float, overlap: bool) -> Row:
        """Steps without an exchange, then with one, during which training goes on or waits."""
        self.rate = rate
        self.averager.config = self.averager.config.model_copy(update={"overlap": overlap})
        self.drift()
        time.sleep(max(0.0, begin_at - time.time()))
        plain = []
        for _ in range(BASELINE_STEPS):
            began = time.perf_counter()
            self.train_step()
            self.boundary_step()
            plain.append(time.perf_counter() - began)
        steps = 0

        def meanwhile() -> None:
            nonlocal steps
            if self.averager.waiting():
                self.rest()
            else:
                self.train_step()
                steps += 1

        began = time.perf_counter()
        self.until_exchanged(meanwhile)
        wall = time.perf_counter() - began
        self.rate = 0.0
        extra = wall - steps * sum(plain) / len(plain)
        return {"seconds": self.seconds, "steps": steps, "extra_s": extra, "boundary_s": self.boundary}

    def do_leave(self) -> Row:
        self.transport.close()
        return {}


def _parts(values: int) -> Iterator[tuple[int, int]]:
    return enumerate(range(0, values, TENSOR))


def _pid() -> int:
    return int(Path("/proc/self").resolve().name)


def _memory(field: str, pid: int | str = "self") -> int:
    """Bytes, from /proc/<pid>/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def _complain(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def serve(folder: str, name: str, values: str, codec: str, *bootstrap: str) -> None:
    """The process: commands from stdin until it ends."""
    node = Node(Path(folder), name, int(values), codec, bootstrap)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(node, f"do_{command}")(*arguments)), flush=True)


# --------------------------------------------------------------------- the measurement


@contextmanager
def pair(values: int, codec: str) -> Iterator[list[Child]]:
    """Two such processes that know each other."""
    children: list[Child] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            addresses: list[str] = []
            for name in ("one", "two"):
                module = "benchmarks.averaging_exchange"
                children.append(Child(module, "--node", folder, name, str(values), codec, *addresses))
                addresses = ask(children[-1], "ready")["addresses"]
            deadline = time.monotonic() + READY_S
            while not all(ask(child, "ready")["members"] for child in children):
                if time.monotonic() > deadline:
                    raise TimeoutError("they do not find each other")
                time.sleep(0.2)
            yield children
            both(children, "leave")
        finally:
            for child in children:
                child.process.terminate()
            end([child.process for child in children], 10.0)
            for child in children:
                for pipe in (child.process.stdin, child.process.stdout):
                    assert pipe is not None
                    pipe.close()


def ask(child: Child, command: str, *arguments: Any) -> Row:
    child.tell([command, *arguments])
    return child.hear(EXCHANGE_S + 60.0)


def both(children: Sequence[Child], command: str, *arguments: Any) -> list[Row]:
    """Their answers to what they are told at once."""
    for child in children:
        child.tell([command, *arguments])
    return [child.hear(EXCHANGE_S + 60.0) for child in children]


def overlapped(children: Sequence[Child], rate: float) -> Row:
    """An exchange at `rate` (bytes/s, 0 = any) while both train, and one for which training waits."""
    rows, waited = (both(children, "overlap", time.time() + 1.0, rate, overlap) for overlap in (True, False))
    extra, waiting = (max(0.0, *(row["extra_s"] for row in side)) for side in (rows, waited))
    return {
        "exchange_s": max(row["seconds"] for row in rows),
        "extra_s": [row["extra_s"] for row in rows],
        "boundary_s": [row["boundary_s"] for row in rows],
        "not_at_boundary": 1 - max(row["boundary_s"] / row["seconds"] for row in rows),
        "waiting_exchange_s": max(row["seconds"] for row in waited),
        "waiting_extra_s": [row["extra_s"] for row in waited],
        "hidden": 1 - extra / waiting if waiting else 0.0,
    }


def exchanges(megabytes: float, codec: str, repeats: int = REPEATS, links: Sequence[float] = (0.0,)) -> Row:
    """Figures of exchanges of so many MB of float32 weights; those of `links` (bytes/s, 0 = any) with training."""
    values = int(megabytes * 1e6 / 4)
    with pair(values, codec) as children:
        first = both(children, "exchange")  # fills what a node holds anyhow
        runs = [both(children, "exchange") for _ in range(repeats)]
        overlap = {f"{8 * rate / 1e6:g} Mbit/s" if rate else "loopback": overlapped(children, rate) for rate in links}
    seconds = [max(row["seconds"] for row in run) for run in runs]
    rows = [row for run in runs for row in run]
    body = median(row["bytes"] for row in rows)
    return {
        "weights_mb": megabytes,
        "codec": codec,
        "body_mb": body / 1e6,
        "seconds": seconds,
        "mb_per_s": 2 * body / 1e6 / median(seconds),
        "weights_mb_per_s": 2 * megabytes / median(seconds),
        "growth": max(row["growth"] for row in rows),
        "first_growth": max(row["growth"] for row in first),
        "state": max(row["state"] for row in rows),
        "all": max(row["all"] for row in rows),
        "p2pd_peak_mib": max(row["p2pd_peak_mib"] for row in rows),
        "boundary_s": median(row["boundary_s"] for row in rows),
        "boundary_cpu_s": median(row["boundary_cpu_s"] for row in rows),
        "cpu_s": median(row["cpu_s"] for row in rows),
        "overlap": overlap,
        "skipped": rows[-1]["skipped"],
    }


def speeds(rows: Sequence[Row]) -> str:
    """The first table."""
    columns = ["weights", "codec", "body", "seconds", "MB/s both ways", "as float32", "RSS growth", "state", "all"]
    return table(
        [*columns, "p2pd", "boundary (its CPU)", "CPU of a node"],
        [
            [
                f"{row['weights_mb']:g} MB",
                row["codec"],
                f"{row['body_mb']:.1f} MB",
                f"{median(row['seconds']):.2f}",
                f"{row['mb_per_s']:.0f}",
                f"{row['weights_mb_per_s']:.0f}",
                f"{row['growth']:.2f} W",
                f"{row['state']:.2f} W",
                f"{row['all']:.2f} W",
                f"{row['p2pd_peak_mib']:.0f} MiB",
                f"{row['boundary_s']:.2f} s ({row['boundary_cpu_s']:.2f} s)",
                f"{row['cpu_s']:.1f} s",
            ]
            for row in rows
        ],
    )


def overlaps(rows: Sequence[Row]) -> str:
    """The second."""
    columns = ["weights", "codec", "link", "exchange", "extra time of training", "if it waits", "hidden"]
    return table(
        [*columns, "boundary", "not at boundary"],
        [
            [
                f"{row['weights_mb']:g} MB",
                row["codec"],
                link,
                f"{one['exchange_s']:.2f} s",
                f"{max(one['extra_s']):.2f} s",
                f"{max(one['waiting_extra_s']):.2f} s",
                f"{one['hidden']:.0%}",
                f"{max(one['boundary_s']):.2f} s",
                f"{one['not_at_boundary']:.0%}",
            ]
            for row in rows
            for link, one in row["overlap"].items()
        ],
    )


def main() -> None:
    if sys.argv[1:2] == ["--node"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=float, default=[50.0, 500.0], help="MB of float32 weights")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    args = parser.parse_args()
    mind_signals()
    load = other_load()
    about = machine()
    print(f"{about['date']}, {about['cores']} cores of {about['cpu']}; {load}", flush=True)
    rows = []
    for size in args.sizes:
        for codec in args.codecs:
            links = LINKS if size <= LINKS_MB else LINKS[:1]
            rows.append(exchanges(size, codec, links=links))
            print(speeds(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{speeds(rows)}\n\n{overlaps(rows)}")
    write("averaging_exchange", {"other load": load, "period_s": PERIOD_S, "step_s": STEP_S, "exchanges": rows})


if __name__ == "__main__":
    main()
