"""Measure GRPO steps on this machine, and TRL's where it is installed: `swarm-node bench`.

    ours, TRL, ours, TRL, …   each in a process of its own (`bench_arms`), until three of each are done or time is up
    -> a table, and a file that says what was measured and on what machine, and nothing else of it

Loads no torch: a process that starts another can leave it the peak of its own memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from swarm_node import __version__
from swarm_node.config import NodeConfig
from swarm_node.errors import UserError
from swarm_node.install import pip
from swarm_node.observability.usage import cpus
from swarm_node.storage.model_names import model_name
from swarm_node.storage.rundir import os_errors_explained
from swarm_protocol.errors import printable

FORMAT = 1
REPEATS = 3  # processes of each arm
FEW_STEPS = 3  # with fewer of an arm, a ratio is rough
STEPS = 10  # counted steps of a process, at most
FOREVER = 1e18
CLASS = re.compile(r"[A-Za-z_][\w.]{0,79}")  # of an exception
LONGEST_REASON = 300  # characters
PACKAGES = ("torch", "transformers", "peft", "trl", "bitsandbytes")
MIB = 2**20

Side = Literal["ours", "trl"]
NAMES: dict[Side, str] = {"ours": "swarm-node", "trl": "TRL"}


class StepWork(msgspec.Struct, frozen=True):
    """The work of a step, and the number of steps."""

    prompts: int  # 0 = as many as are usual for the model
    group_size: int  # answers to each prompt
    new: int  # tokens of an answer, at most
    steps: int = STEPS
    warmup: int = 1  # steps before the first that counts
    learning_rate: float = 1e-5
    seed: int = 0
    until: float = FOREVER  # time.monotonic() by which the last step should end


class Spec(msgspec.Struct, frozen=True):
    """The task of an arm's process."""

    side: Side
    policy: dict[str, Any]  # `PolicyConfig`
    work: StepWork
    checkpointing: bool = False  # TRL: recompute activations, for less memory


class Arm(msgspec.Struct, frozen=True):
    """The figures of a process."""

    engine: str
    device: str
    device_bytes: int  # memory of the GPU; 0 without one
    threads: int
    dtype: str
    parameters: int
    lora: bool
    prompts: int
    step_s: list[float]
    sampling_s: list[float]  # empty if it is not known
    tokens: list[int]  # of the answers of each step
    peak_bytes: int
    checkpointing: bool = False  # this package: whether activations are recomputed, for want of memory


@dataclass(frozen=True)
class BenchRequest:
    """The choices of the command line."""

    minutes: float
    group_size: int
    length: int
    prompts: int  # 0 = as many as are usual for the model
    file: Path | None  # None = one named after the model


@dataclass
class Result:
    """The figures of an arm's processes, or why there are none."""

    arms: list[Arm]
    failed: str = ""
    checkpointing: bool = False

    def all(self, values: Callable[[Arm], Sequence[float]]) -> list[float]:
        """A measure of all counted steps."""
        return [value for arm in self.arms for value in values(arm)]


def main(config: NodeConfig, request: BenchRequest, say: Callable[[str], None]) -> None:
    """Measure, print the table and write the file. Raises UserError if this package cannot train the model."""
    model = Path(model_name(config.policy.model)).name
    file = request.file or Path(f"bench-{'-'.join(filter(None, (model, config.policy.quantize)))}.json")
    with os_errors_explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        results = measure_arms(config, request, say)
        document = describe(config, request, results)
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for line in table(document):
        print(line)
    print(f"wrote {file}")


def measure_arms(
    config: NodeConfig, request: BenchRequest, say: Callable[[str], None], repeats: int = REPEATS
) -> dict[Side, Result]:
    """Run the arms in turn. Raises UserError if this package cannot train the model."""
    until = time.monotonic() + 60 * request.minutes
    sides: list[Side] = ["ours", *(["trl"] if importlib.util.find_spec("trl") else [])]  # type: ignore[list-item]
    results: dict[Side, Result] = {side: Result([]) for side in sides}
    policy = config.policy.model_dump(mode="json")
    work = StepWork(request.prompts, request.group_size, request.length)
    took: dict[Side, float] = {}
    for repeat in range(repeats):
        if repeat and until - time.monotonic() < sum(took.values()):
            say(f"time was up after {repeat} of {repeats}: --minutes gives more")
            break
        for i, side in enumerate(sides):
            result = results[side]
            left, processes = until - time.monotonic(), (repeats - repeat) * len(sides) - i
            if result.failed:
                continue
            say(f"{NAMES[side]}, {repeat + 1} of {repeats} …")
            began = time.monotonic()
            work = msgspec.structs.replace(work, until=began + left / processes)
            spec = Spec(side, policy, work, result.checkpointing)
            found = run(spec, left, say)
            if found == OUT_OF_MEMORY and side == "trl" and not result.arms:
                result.checkpointing = True
                say("TRL ran out of memory: again with gradient checkpointing …")
                found = run(msgspec.structs.replace(spec, checkpointing=True), until - time.monotonic(), say)
            took[side] = time.monotonic() - began
            if isinstance(found, str):
                result.failed = "" if result.arms else found
                continue
            result.arms.append(found)
            policy["dtype"] = found.dtype
            work = msgspec.structs.replace(work, prompts=found.prompts)
    return results


OUT_OF_MEMORY = "out of memory"


def run(spec: Spec, seconds: float, say: Callable[[str], None]) -> Arm | str:
    """Measure an arm in a process of its own, within so many seconds. Gives its figures, or why there are none, in
    words that name no path; `say` takes the rest. Raises UserError if this package refuses the model or a setting."""
    command = [sys.executable, "-m", "swarm_node.cli.commands.bench_arms", msgspec.json.encode(spec).decode()]
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return "no step ended in time: give more --minutes, or a lower --length, --group-size or --prompts"
    if done.returncode == 0:
        told = msgspec.json.decode(done.stdout.strip().rpartition("\n")[2])
        if "failed" not in told:
            return msgspec.convert(told, Arm)
        if told.get("refused"):
            if spec.side == "ours":
                raise UserError(told["failed"])
            say(_shown(told["failed"]))
            return "it does not load this model"
        return str(told["failed"])
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}" + (
            ", probably for want of memory" if done.returncode == -9 else ""
        )
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    say(_shown(errors[-1] if errors else f"exit code {done.returncode}"))
    kind = errors[-1].partition(":")[0] if errors else ""
    return kind if CLASS.fullmatch(kind) else f"exit code {done.returncode}"


def _shown(reason: str) -> str:
    """A reason for the terminal."""
    return printable(reason)[:LONGEST_REASON]


def describe(config: NodeConfig, request: BenchRequest, results: Mapping[Side, Result]) -> dict[str, Any]:
    """The document of the file. It names no path, host or user."""
    whole = [arm for result in results.values() for arm in result.arms]
    if not whole:
        reasons = "; ".join(f"{NAMES[side]}: {result.failed}" for side, result in results.items())
        raise UserError(f"nothing was measured: {reasons}")
    one = whole[0]
    is_local = Path(config.policy.model).expanduser().exists()
    return {
        "format": FORMAT,
        "date": date.today().isoformat(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": processor(),
            "cores": cpus(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "device": one.device,
            "device_gib": round(one.device_bytes / 2**30, 1),
        },
        "versions": {"swarm-node": __version__, "python": platform.python_version()} | _versions(),
        "model": Path(model_name(config.policy.model)).name if is_local else config.policy.model,
        "quantize": config.policy.quantize,
        "prompts": one.prompts,
        "group_size": request.group_size,
        "length": request.length,
        "arms": {side: _figures(result) for side, result in results.items()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _figures(result: Result) -> dict[str, Any]:
    if not result.arms:
        return {"failed": result.failed}
    steps = result.all(lambda arm: arm.step_s)
    first = result.arms[0]
    return {
        "engine": first.engine,
        "dtype": first.dtype,
        "lora": first.lora,
        "parameters": first.parameters,
        "threads": first.threads,
        "gradient_checkpointing": result.checkpointing or first.checkpointing,
        "step_s": quartiles(steps),
        "sampling_s": quartiles(result.all(lambda arm: arm.sampling_s)),
        "tokens_s": quartiles([n / s for n, s in zip(result.all(lambda arm: arm.tokens), steps, strict=True)]),
        "peak_mib": quartiles([arm.peak_bytes / MIB for arm in result.arms]),
        "processes": msgspec.to_builtins(result.arms),
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """[first quartile, median, third quartile]; empty without values."""
    if len(values) < 2:
        return [*values] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


COLUMNS = ["", "s a step", "sampling, s", "tokens/s", "peak MiB"]


def table(document: Mapping[str, Any]) -> list[str]:
    """Lines that show a document: on what, one row for each arm, and how much longer TRL takes."""
    arms: Mapping[str, Any] = document["arms"]
    measured = {side: arm for side, arm in arms.items() if "failed" not in arm}
    one, machine = next(iter(measured.values())), document["machine"]
    gpu = f"{machine['device']}, " if machine["device_gib"] else ""
    kind = f"{'LoRA' if one['lora'] else 'all weights'}, {document['quantize'] or one['dtype']}"
    size = f"{document['prompts']} x {document['group_size']} answers of {document['length']} tokens"
    lines = [
        f"{document['model']} ({one['parameters'] / 1e6:,.4g} M parameters, {kind}), a step of {size}",
        f"{gpu}{machine['cpu']}, {one['threads']} of {machine['cores']:g} cores, {document['date']}",
        "",
        *_aligned([COLUMNS, *(_row(side, arm) for side, arm in arms.items())]),
        "",
    ]
    if len(measured) == 2:
        ratios = _ratios(measured)
        low, middle, high = quartiles(ratios)
        spread = f" ({low:.1f} to {high:.1f})" if len(ratios) > 1 else ""
        rough = "; with so few steps, that is rough" if min(_steps(measured).values()) < FEW_STEPS else ""
        lines.append(f"TRL takes {middle:.1f} times as long a step{spread}{rough}")
    elif "trl" not in arms:
        lines.append(f"TRL is not installed; to measure it too: {pip('trl')}")
    counted = ", ".join(f"{NAMES[side]} {n}" for side, n in _steps(measured).items())  # type: ignore[index]
    return [
        *lines,
        f"medians (quartiles) of all steps after the first of each process ({counted}); tokens/s: of answers, by the "
        "whole step",
    ]


def _steps(measured: Mapping[str, Any]) -> dict[str, int]:
    """Side -> the number of its steps that count."""
    return {side: sum(len(one["step_s"]) for one in arm["processes"]) for side, arm in measured.items()}


def _ratios(measured: Mapping[str, Any]) -> list[float]:
    """The other arm's median step by ours, for each pair of processes that ran in turn."""
    pairs = zip(measured["ours"]["processes"], measured["trl"]["processes"], strict=False)
    return [statistics.median(trl["step_s"]) / statistics.median(ours["step_s"]) for ours, trl in pairs]


def _row(side: str, arm: Mapping[str, Any]) -> list[str]:
    name = NAMES[side]  # type: ignore[index]
    if "failed" in arm:
        return [name, f"failed: {arm['failed']}"]
    name = f"swarm-node, {arm['engine']}" if side == "ours" else arm["engine"]
    name += ", checkpointing" if arm["gradient_checkpointing"] else ""
    step, sampling, tokens = arm["step_s"], arm["sampling_s"], arm["tokens_s"]
    return [name, _spread(step), _spread(sampling), f"{tokens[1]:,.0f}", f"{arm['peak_mib'][1]:,.0f}"]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "not known"
    return f"{values[1]:.3g}" + ("" if values[0] == values[2] else " ({:.3g}-{:.3g})".format(*values[::2]))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns are as wide as their cells, but for the last cell of a short row."""
    width = len(rows[0])
    widths = [max(len(row[i]) for row in rows if len(row) == width) for i in range(width)]
    whole = [[*row, *[""] * (width - len(row))] for row in rows]
    lines = ["| " + " | ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) + " |" for row in whole]
    lines.insert(1, "| " + " | ".join("-" * max(3, n) for n in widths) + " |")
    return lines


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        if named:
            return named[0]
    if sys.platform == "darwin" and (tool := shutil.which("sysctl")):
        done = subprocess.run([tool, "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()
