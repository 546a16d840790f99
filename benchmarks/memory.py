"""Peak memory of an update, and the estimate of it that a start makes: by size of the model, tokens and mode.

    python -m benchmarks.memory [--quick] [--sizes 0.44M 3M 0.5B] [--tokens 500 2000 8000] [--modes full lora nf4 int8]
                                [--again]
    python -m benchmarks.memory --model DIR    sampling in place of updates: see benchmarks/memory_sampling.py

Groups of 8 answers behind a prompt of 64 tokens, so many that one microbatch has about the given number of tokens;
rewards 0, 1, 0, 1; AdamW. Every row is a process of its own with one thread: the most main memory that it had while it
made one update. `full` trains all weights in float32, `lora` an adapter of rank 16, for 0.5B under bfloat16, `nf4` and
`int8` such an adapter over bfloat16 weights that are quantised. Weights are random; 0.5B is the shape of Qwen2.5-0.5B.
The same update is made in three ways: activations `kept` in the heap, as with ample memory; `mapped`, each large tensor
by itself; mapped and `checkpointed`.

A row that is there already is not measured again, unless with --again, which adds a peak to it: in the heap, peaks
differ from run to run. An update that would take more than this machine has free is not made. Estimates are computed
anew for all rows, from what the start of each one measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import RESULTS, table, write
from benchmarks.memory_sampling import sampled
from benchmarks.real_model import make_model

PROMPT, ANSWERS, NEW = 64, 8, 56
GROUP = PROMPT + ANSWERS * (NEW - 1)
SIZES = {"0.44M": (128, 2), "3M": (256, 4), "0.5B": None}
ENGINES, DTYPES = ("native", "transformers"), ("float32", "bfloat16")
WAYS = ("kept", "mapped", "checkpointed")
MODES = ("full", "lora", "nf4", "int8")
KEY = ("size", "mode", "tokens", "way")
MIB = 2**20


def make(size: str, folder: Path) -> None:
    """A model of that size with random weights."""
    from swarm_node.policy.starter import build_model, build_tokenizer

    if (shape := SIZES[size]) is None:
        make_model(size, folder)
        return
    hidden, layers = shape
    tokenizer = build_tokenizer(["a b c d e f"] * 8)
    build_model(400, layers, hidden, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def peak() -> int:
    """The most bytes of main memory that this process had since the last call (Linux)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")
    return int(lines["VmHWM"].split()[0]) * 1024


def child(spec: dict[str, Any]) -> None:
    """One row in this process, as JSON on the last line."""
    import peft
    import torch
    import transformers

    from swarm_node.config import NodeConfig
    from swarm_node.grpo.memory import Fitting, hardware_of
    from swarm_node.grpo.trainer import Trainer
    from swarm_node.policy.fitting import Hardware
    from swarm_node.policy.loading import load_policy
    from swarm_node.types import Group, Rollout, Sampling, Turn

    assert peft and transformers  # loaded before the base is taken
    torch.set_num_threads(1)
    base = psutil.Process().memory_info().rss
    groups, mode = max(1, round(spec["tokens"] / GROUP)), spec["mode"]
    config = NodeConfig.model_validate(
        {
            "policy": {
                "model": spec["path"],
                "lora": mode != "full",
                "quantize": mode if mode in ("nf4", "int8") else None,
                "threads": 1,
                "dtype": "bfloat16" if spec["size"] == "0.5B" and mode != "full" else "float32",
            },
            "rollouts": {"groups": groups, "group_size": ANSWERS, "max_new_tokens": NEW},
            "grpo": {
                "answers": 0,
                "batch_groups": 0,
                "microbatch_tokens": groups * GROUP,
                "gradient_checkpointing": "on" if spec["way"] == "checkpointed" else "off",
            },
        }
    )
    policy = load_policy(config.policy, config.rollouts, lambda text: print(text, file=sys.stderr))
    trainer = Trainer(policy, config.grpo, Sampling(NEW), lambda text: print(text, file=sys.stderr))
    start = time.process_time()
    fitting = Fitting(trainer, [[3] * PROMPT], config, Hardware("cpu", 0))  # as much as the update wants
    probe_s = time.process_time() - start
    fitting.mapped = spec["way"] == "mapped"
    fitting.fit()
    found = {"shape": asdict(fitting.shape), "kept": asdict(fitting.kept), "work": asdict(fitting.work())}
    found |= {"base": base, "before": peak(), "probe_s": probe_s}
    if estimate(found) <= hardware_of(policy.device).room:
        answer = [3 + i % 300 for i in range(NEW)]
        rollouts = [
            Rollout([Turn(answer, [0.0] * NEW, True)], rewards={"x": i % 2}, reward=i % 2) for i in range(ANSWERS)
        ]
        start = time.process_time()
        trainer.step([Group(None, [3] * PROMPT, rollouts) for _ in range(groups)])
        found |= {"update_s": time.process_time() - start, "peaks": [peak()]}
    print(json.dumps(found))


def estimate(row: dict[str, Any]) -> int:
    """The estimate of an update's memory with the whole process, from what its start measured."""
    from swarm_node.policy.sizes import Activations, Shape, Work, lasting_bytes, update_bytes

    shape = Shape(**row["shape"])
    return lasting_bytes(shape) + update_bytes(shape, Activations(**row["kept"]), Work(**row["work"]), gpu=False)


def run(spec: dict[str, Any]) -> dict[str, Any]:
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-m", "benchmarks.memory", "--child", json.dumps(spec)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{spec} failed:\n{done.stderr[-3000:]}")
    return {**spec, **json.loads(done.stdout.strip().splitlines()[-1])}


def known(size: str) -> list[dict[str, Any]]:
    """The rows of a size that are there already."""
    path = RESULTS / f"memory/{size}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def measured(args: argparse.Namespace, size: str, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a size that were asked for and are not there yet, or not as often as asked for."""
    keys = [(size, mode, tokens, way) for mode in args.modes for tokens in args.tokens for way in args.ways]
    missing = [key for key in keys if args.again or key not in {key_of(row) for row in rows}]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        make(size, Path(folder))
        for key in missing:
            found = run(dict(zip(KEY, key, strict=True)) | {"path": folder})
            del found["path"]
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[500, 2000, 8000])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["full", "lora"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--again", action="store_true", help="measure rows that are there once more")
    parser.add_argument("--quick", action="store_true", help="the two small sizes, 500 and 2,000 tokens; none is kept")
    parser.add_argument("--model", help="directory of a model: measure sampling from it instead of updates")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 256], help="answers sampled at a time")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        sampled(args)
        return
    if args.child:
        child(json.loads(args.child))
        return
    if args.quick:
        args.sizes, args.tokens = ["0.44M", "3M"], [500, 2000]
    every = []
    for size in args.sizes:
        rows = [] if args.quick else known(size)
        for found in measured(args, size, rows):
            for row in [row for row in rows if key_of(row) == key_of(found)]:
                found["peaks"] = row.get("peaks", []) + found.get("peaks", [])
                rows.remove(row)
            rows.append(found)
            print(line(found), flush=True)
            if not args.quick:
                rows.sort(key=lambda row: (MODES.index(row["mode"]), row["tokens"], WAYS.index(row["way"])))
                write(f"memory/{size}", {"rows": rows})
        every += rows
    columns = ["model", "trained", "activations", "tokens", "peak MiB", "estimate MiB", "off by"]
    print(table([*columns, "MiB", "update, CPU s"], list(map(line, every))))


def line(row: dict[str, Any]) -> list[str]:
    """A line of the table. Several peaks: the lowest and the highest, and how far the estimate is off both."""
    expected, peaks = estimate(row), row.get("peaks", [])
    ends = sorted({min(peaks), max(peaks)}) if peaks else []
    return [
        row["size"],
        row["mode"],
        row["way"],
        f"{row['work']['tokens']:,}",
        " to ".join(f"{end / MIB:,.0f}" for end in ends) or "does not fit",
        f"{expected / MIB:,.0f}",
        ", ".join(f"{expected / end - 1:+.0%}" for end in ends),
        ", ".join(f"{(expected - end) / MIB:+,.0f}" for end in ends),
        f"{row['update_s']:.2f}" if "update_s" in row else "",
    ]


if __name__ == "__main__":
    main()
