"""What a node takes of a machine that is not its own, beside what it was allowed, with and without other work there.

    python -m benchmarks.resources [--parts member cpu pause memory traffic] [--seconds 25] [--report]

The real commands: a bootstrap, a member that trains slowly, and the node in question, all on this machine; watched from
outside, over its process and all below it. Each limit beside the same node without it. The other work is one process
for each core that counts without end.

member     One of two members as README starts them, with and without averaging: memory and traffic over two minutes.
cpu        --max-cpu 25 and 50, and --nice 19: a policy of 6 million parameters that wants all cores, over `--seconds`
           and in the worst five of them.
pause      `swarm-node pause`, and quiet hours that it is started in: CPU meanwhile, whether the bootstrap lists it as a
           member, which round comes next.
memory     --max-memory below the estimate, and with a reward function that keeps 100 MB of each second for itself:
           how far above the limit it came, and what it did.
traffic    --max-upload and --max-download 4, all weights to and from another member after each update; as the kernel
           counts TCP.

CPU is in per cent of all cores. Memory is resident, and pages that processes share are counted for each. `--report`
prints the table of the figures that are there. Some fourteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import RESULTS, table, write
from benchmarks.overhead import LOCAL, commands, metrics, until
from benchmarks.processes import Meter, end, merged, mind_signals, other_load, tree
from swarm_node.observability.usage import cores, cpus

WINDOW_S, WORST_S, TRAFFIC_S, MEMBER_S = 25.0, 5.0, 15.0, 120.0
SAMPLE_S, FINE_S = 0.25, 0.02
KIN_S = 1.0
"""Between two looks for new child processes."""
SETTLE_S, FREE_S = 3.0, 15.0
PATIENCE_S = 300.0
QUICK = ("--set", "eval.questions=0", "--set", "checkpoints.every=1")
SMALL = ("--set", "rollouts.group_size=4", "--set", "rollouts.max_new_tokens=8")
MBIT = 4
LEAK_MB_S, LEAK_AFTER = 100, 20
"""Calls of the reward function before it begins to."""
LEAK = f"""
import time

kept, calls, begins = [], 0, 0.0

def leak(completions, **columns):
    global calls, begins
    calls += 1
    begins = begins if calls > {LEAK_AFTER} else time.monotonic()
    while len(kept) < {LEAK_MB_S} * (time.monotonic() - begins):
        kept.append(b"x" * 2**20)
    return [0.0] * len(completions)
"""
LOAD = "while True: pass"
Row = dict[str, Any]
Run = Callable[..., "subprocess.Popen[str]"]


class Watch(threading.Thread):
    """CPU seconds and memory of a process and all below it, from outside."""

    def __init__(self, pid: int, every_s: float = SAMPLE_S) -> None:
        super().__init__(daemon=True)
        self._pid, self._every_s = pid, every_s
        self._kin: list[psutil.Process] = []
        self._cpu_s: dict[int, float] = {}
        """Also of those that ended meanwhile."""
        self._done = threading.Event()
        self.samples: list[tuple[float, float, int]] = []
        """Monotonic time, CPU seconds so far, bytes of memory."""

    def run(self) -> None:
        look_at = 0.0
        while not self._done.is_set():
            if time.monotonic() >= look_at:
                self._kin, look_at = tree(self._pid), time.monotonic() + KIN_S
            rss = 0
            for process in self._kin:
                with suppress(psutil.Error):
                    self._cpu_s[process.pid] = sum(process.cpu_times()[:2])
                    rss += process.memory_info().rss
            self.samples.append((time.monotonic(), sum(self._cpu_s.values()), rss))
            self._done.wait(self._every_s)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self.join()

    def cpu(self) -> Row:
        """Per cent of all cores, on the whole and in the worst five seconds."""
        worst, first = 0.0, 0
        for now, taken, _ in self.samples[1:]:
            while now - self.samples[first + 1][0] >= WORST_S:
                first += 1
            then, before, _ = self.samples[first]
            if now - then >= WORST_S:
                worst = max(worst, (taken - before) / (now - then))
        (began, before, _), (ended, taken, _) = self.samples[0], self.samples[-1]
        return {
            "cpu_percent": 100 * (taken - before) / (ended - began) / cpus(),
            "cpu_percent_worst": 100 * worst / cpus(),
            "rss_mib": max(rss for _, _, rss in self.samples) / 2**20,
        }


@contextmanager
def load(wanted: bool) -> Iterator[None]:
    """Other programs want all cores."""
    programs = [subprocess.Popen([sys.executable, "-c", LOAD], text=True) for _ in range(cores() if wanted else 0)]
    try:
        yield
    finally:
        for program in programs:
            program.terminate()
        end(programs, 5.0)


@contextmanager
def swarm(*options: str) -> Iterator[tuple[Path, Run, Callable[..., subprocess.Popen[str]]]]:
    """A folder, a way to start commands, and one to join the swarm that a bootstrap is in."""
    with commands() as (folder, run):
        manifest = folder / "swarm.toml"
        new = ["new", "--name", "limits", "--tasks", "small", "--out", str(manifest), *options]
        subprocess.run([sys.executable, "-m", "swarm_node", *new], check=True, capture_output=True)
        run("bootstrap", str(manifest), *LOCAL, "--run-dir", str(folder / "hub"))
        link = str(until(lambda: _status(folder / "hub").get("link"), PATIENCE_S))

        def join(name: str, *options: str) -> subprocess.Popen[str]:
            return run("join", link, "--name", name, *LOCAL, *QUICK, *options, "--run-dir", str(folder / name))

        yield folder, run, join


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    end([process], 30.0)


def rounds(path: Path) -> int:
    lines = metrics(path)
    return int(lines[-1]["round"]) if lines else 0


def member(folder: Path, name: str) -> bool:
    """Whether the bootstrap lists it."""
    peers = _status(folder / "hub").get("peers", {}).values()
    return any(peer["name"] == name and peer["present"] for peer in peers)


def _has_made(count: int, folder: Path) -> bool:
    """Whether the node is a member, and has made that many rounds."""
    return member(folder, "node") and rounds(folder / "node") >= count


def _status(path: Path) -> Row:
    with suppress(FileNotFoundError):
        return dict(json.loads((path / "swarm.json").read_text()))
    return {}


def make_policy(folder: Path) -> str:
    """A policy that has something to do for several cores: 6 million random parameters, the starter's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from swarm_node.policy.model_path import starter_path
    from swarm_node.policy.policy import save

    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    size = {"hidden_size": 320, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 5}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **size, **ids))
    save(model, tokenizer, folder / "policy")
    return str(folder / "policy")


# --------------------------------------------------------------------- parts


def member_of_two(seconds: float) -> Row:
    """Of one of two members that train as fast as this machine lets them."""
    figures: Row = {}
    for case, options in (("as shipped", ()), ("--no-averaging", ("--no-averaging",))):
        with swarm() as (folder, run, _):
            link = _status(folder / "hub")["link"]
            for name in ("other", "node"):
                node = run("join", link, "--name", name, *LOCAL, *options, "--run-dir", str(folder / name))
            until(partial(_has_made, 100, folder), PATIENCE_S)
            with Watch(node.pid) as watch, Meter({"node": node.pid}) as meter:
                time.sleep(max(MEMBER_S, seconds))
            out, in_ = (n / meter.seconds * 3600 / 1e9 for n in meter.bytes["node"])
            memory = [rss / 2**30 for _, _, rss in watch.samples]
            row = {"least_gib": min(memory), "most_gib": max(memory), "gb_an_hour_out": out, "gb_an_hour_in": in_}
            figures[case] = row | {"exchanges": _exchanges(folder / "node")}
            print(case, figures[case], flush=True)
    return figures


def cpu(seconds: float) -> Row:
    """Of the node without and with each limit, alone and beside other work."""
    cases = {"no limit": (), "--max-cpu 50": ("--max-cpu", "50"), "--max-cpu 25": ("--max-cpu", "25")}
    figures: Row = {}
    with swarm() as (folder, _, join):
        busy = (
            "--model",
            make_policy(folder),
            "--set",
            f"policy.threads={cores()}",
            "--set",
            "rollouts.max_new_tokens=32",
        )
        join("slow", *SMALL, "--set", "pace_s=5")
        for i, (case, limit) in enumerate({**cases, "--nice 19": ("--nice", "19")}.items()):
            path = folder / f"node{i}"
            node = join(path.name, *busy, *limit)
            until(lambda path=path: rounds(path) >= 1, PATIENCE_S)  # type: ignore[misc]
            for wanted in (True,) if case == "--nice 19" else (False, True):
                with load(wanted):
                    time.sleep(SETTLE_S)
                    with Watch(node.pid) as watch:
                        time.sleep(seconds)
                row = watch.cpu() | {"member": member(folder, path.name)}
                figures.setdefault(case, {})["beside other work" if wanted else "alone"] = row
                print(case, row, flush=True)
            stop(node)
    return figures


def pause(seconds: float) -> Row:
    """Of `swarm-node pause` and `resume`, and of quiet hours."""
    with swarm() as (folder, run, join):
        join("slow", *SMALL, "--set", "pace_s=5")
        now = datetime.now()
        ends = now.replace(second=0, microsecond=0) + timedelta(minutes=2 if now.second > 20 else 1)
        hours = f"{now:%H:%M}-{ends:%H:%M}"
        quiet_began = time.time()
        quiet = join("quiet", *SMALL, "--quiet-hours", hours)
        path = folder / "node"
        node = join("node", *SMALL, "--set", "pace_s=0.5")
        until(lambda: _paused(folder / "quiet"), PATIENCE_S)
        time.sleep(SETTLE_S)
        left = (ends - datetime.now()).total_seconds() - 2
        if left < 2 * WORST_S:
            raise TimeoutError("the machine is too busy: quiet hours were over before there was anything to see")
        quiet_cpu = _watched(quiet, min(2 * WORST_S, left))
        until(lambda: rounds(path) >= 3, PATIENCE_S)
        figures: Row = {"trains": _watched(node, 2 * WORST_S)}
        run("pause", str(path)).wait(60)
        until(lambda: _paused(path), PATIENCE_S)
        time.sleep(SETTLE_S)
        before = rounds(path)
        figures["paused"] = _watched(node, 20.0) | {"member": member(folder, "node"), "rounds": rounds(path) - before}
        run("unpause", str(path)).wait(60)
        until(lambda: rounds(path) > before, PATIENCE_S)
        numbers = [int(line["round"]) for line in metrics(path)]
        figures["resumed"] = {"went_on_with": numbers[before] - before, "in_order": numbers == sorted(set(numbers))}
        until(lambda: rounds(folder / "quiet") >= 1, PATIENCE_S)
        first = metrics(folder / "quiet")[0]["time"]
        figures["quiet hours"] = quiet_cpu | {
            "hours": hours,
            "waited_s": first - quiet_began,
            "first_round_after_end_s": first - ends.timestamp(),
        }
        return figures


def _watched(process: subprocess.Popen[str], seconds: float) -> Row:
    with Watch(process.pid) as watch:
        time.sleep(seconds)
    return watch.cpu()


def _paused(path: Path) -> bool:
    with suppress(FileNotFoundError, ValueError):
        return any(json.loads(line)["text"].startswith("paused") for line in (path / "events.jsonl").open())
    return False


def memory(seconds: float) -> Row:
    """Of a run that the estimate refuses, and of one that grows."""
    with swarm() as (folder, _, join):
        path = folder / "big"
        began = time.monotonic()
        refused = join("big", *SMALL, "--max-memory", "0.2")
        code = refused.wait(PATIENCE_S)
        figures: Row = {"too small": {"exit_code": code, "rounds": rounds(path), "seconds": time.monotonic() - began}}
        (folder / "rewards.py").write_text(LEAK)
        function = '[{path="' + str(folder / "rewards.py") + ':leak"}]'
        for case, limit in (("no limit", ()), ("--max-memory 1.5", ("--max-memory", "1.5"))):
            path = folder / ("bound" if limit else "free")
            node = join(path.name, *SMALL, "--set", f"rewards.functions={function}", *limit)
            with Watch(node.pid, FINE_S) as watch:
                if limit:
                    node.wait(PATIENCE_S)
                else:
                    until(lambda path=path: rounds(path) >= 3, PATIENCE_S)  # type: ignore[misc]
                    time.sleep(FREE_S)
            left = node.poll()
            stop(node)
            most = max(rss for _, _, rss in watch.samples) / 2**30
            row = {"peak_gib": most, "exit_code": left, "rounds": rounds(path)}
            if limit:
                above = [at for at, _, rss in watch.samples if rss > 1.5 * 2**30]
                row |= {
                    "over_gib": most - 1.5,
                    "over_s": above[-1] - above[0] if above else 0.0,
                    "seconds_to_end": watch.samples[-1][0] - above[0] if above else 0.0,
                    "saved_round": max(
                        (int(p.name.split("-")[1]) for p in (path / "checkpoints").glob("round-*")), default=0
                    ),
                }
            figures[case] = row
            print(case, row, flush=True)
        return figures


def traffic(seconds: float) -> Row:
    """Of a node that exchanges all weights with another after each update, without and with limits."""
    figures: Row = {}
    averaging = ("--set", "averaging.method=per_step", "--set", "averaging.codec=float32")
    limits = ("--max-upload", str(MBIT), "--max-download", str(MBIT))
    for case, limit in (("no limit", ()), (" ".join(limits), limits)):
        with swarm() as (folder, _, join):
            join("other", *SMALL, *averaging)
            node = join("node", *SMALL, *averaging, *limit)
            until(lambda folder=folder: _exchanges(folder / "node") >= 1, PATIENCE_S)  # type: ignore[misc]
            for wanted in (False, True) if limit else (False,):
                with load(wanted):
                    time.sleep(SETTLE_S)
                    before = _exchanges(folder / "node")
                    with Meter({"node": node.pid}) as meter:
                        time.sleep(max(TRAFFIC_S, seconds / 2))
                out, in_ = (8e-6 * n / meter.seconds for n in meter.bytes["node"])
                row = {"upload_mbit": out, "download_mbit": in_, "exchanges": _exchanges(folder / "node") - before}
                figures.setdefault(case, {})["beside other work" if wanted else "alone"] = row
                print(case, row, flush=True)
    return figures


def _exchanges(path: Path) -> float:
    lines = metrics(path)
    return float(lines[-1].get("averaging/exchanges", 0.0)) if lines else 0.0


# --------------------------------------------------------------------- the table


def lines(results: Row) -> list[list[str]]:
    """What, beside what, measured."""
    rows: list[list[str]] = []
    for case, row in results.get("member", {}).get("figures", {}).items():
        sent = f"{row['gb_an_hour_out']:.2f} GB an hour out, {row['gb_an_hour_in']:.2f} in"
        rows.append([f"one of two members, {case}", "the other", f"{row['most_gib']:.2f} GiB at most; {sent}"])
    for case, beside in results.get("cpu", {}).get("figures", {}).items():
        for where, row in beside.items():
            worst = f"at most {row['cpu_percent_worst']:.1f} % in any {WORST_S:g} s"
            rows.append([case, where, f"{row['cpu_percent']:.1f} % of all cores, {worst}"])
    if "pause" in results:
        f = results["pause"]["figures"]
        rows.append(
            ["small rounds, half a second each", "not paused", f"{f['trains']['cpu_percent']:.1f} % of all cores"]
        )
        stays = "listed as a member" if f["paused"]["member"] else "no longer listed as a member"
        rows.append(["`swarm-node pause`", "alone", f"{f['paused']['cpu_percent']:.1f} % of all cores; {stays}"])
        rows.append(["`swarm-node unpause`", "alone", f"goes on {f['resumed']['went_on_with']} round later"])
        quiet = f["quiet hours"]
        rest = f"first round {quiet['first_round_after_end_s']:.0f} s after their end"
        rows.append([f"--quiet-hours {quiet['hours']}", "alone", f"{quiet['cpu_percent']:.1f} % of all cores; {rest}"])
    if "memory" in results:
        f = results["memory"]["figures"]
        small, free = f["too small"], f["no limit"]
        bound = f["--max-memory 1.5"]
        rows.append(["--max-memory 0.2", "alone", f"ends with {small['exit_code']} before its first round"])
        rows.append(
            [f"reward function that takes {LEAK_MB_S} MB/s", f"no limit, {FREE_S:g} s", f"{free['peak_gib']:.2f} GiB"]
        )
        text = f"{bound['over_gib']:.2f} GiB above the limit at most; ends with {bound['exit_code']}"
        text += f" {bound['seconds_to_end']:.1f} s later, round {bound['saved_round']} of {bound['rounds']} saved"
        rows.append(["the same with --max-memory 1.5", "alone", text])
    for case, beside in results.get("traffic", {}).get("figures", {}).items():
        for where, row in beside.items():
            rows.append([case, where, f"{row['upload_mbit']:.1f} Mbit/s out, {row['download_mbit']:.1f} in"])
    return rows


PARTS: dict[str, Callable[[float], Row]] = {
    "member": member_of_two,
    "cpu": cpu,
    "pause": pause,
    "memory": memory,
    "traffic": traffic,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=WINDOW_S, help="of each look at CPU")
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args()
    path = RESULTS / "resources.json"
    if not args.report:
        mind_signals()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for part in args.parts:
            busy = other_load()
            print(f"{part}: {busy}", flush=True)
            write("resources", merged(path, part, {"other load": busy, "figures": PARTS[part](args.seconds)}))
    if not path.exists():
        parser.error(f"there are no figures in {path} yet: run it without --report")
    print(table(["what", "beside", "measured"], lines(json.loads(path.read_text()))))


if __name__ == "__main__":
    main()
