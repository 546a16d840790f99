"""Peak memory of sampling, and the estimate of it that a start makes: by engine, dtype and rows.

    python -m benchmarks.memory --model DIR [--rows 8 64 256] [--engines native transformers]
                                [--dtypes float32 bfloat16] [--new 256] [--again] [--quick]

Eight answers to each question of 100 tokens; none ends before its limit. Every row is a process of its own with one
thread, an adapter of rank 16 and a limit of 10 GiB: the most main memory that it had after loading. A row that would
take more than the limit fails, and is not estimated away. A row that is there is not measured again, unless with
--again; --quick keeps none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import table, write

ANSWERS, PROMPT = 8, 100
LIMIT = 10 * 2**30
MIB = 2**20
KEY = ("engine", "dtype", "rows", "new")


def child(spec: dict[str, Any]) -> None:
    """One row in this process, as JSON on the last line."""
    from benchmarks.memory import peak
    from swarm_node.config import NodeConfig
    from swarm_node.grpo.memory import bytes_of_sampling, copy_of, shape_of
    from swarm_node.policy.engines.native import NativeEngine
    from swarm_node.policy.engines.transformers import TransformersEngine
    from swarm_node.policy.loading import load_policy
    from swarm_node.policy.sizes import RUNTIME_BYTES
    from swarm_node.types import Sampling

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    settings = {"model": spec["model"], "dtype": spec["dtype"], "lora": True, "threads": 1}
    config = NodeConfig.model_validate({"policy": settings})
    policy = load_policy(config.policy, config.rollouts, lambda text: print(text, file=sys.stderr))
    policy.eos_ids = [policy.vocabulary - 1]  # which is as good as never drawn
    policy.engine = policy.engine_of(NativeEngine if spec["engine"] == "native" else TransformersEngine)
    questions, shape = spec["rows"] // ANSWERS, shape_of(policy)
    prompts = [[100 + i] * PROMPT for i in range(questions)]
    before = peak()
    policy.generate(prompts, ANSWERS, Sampling(spec["new"]), [*range(questions)])
    sampling = bytes_of_sampling(policy, shape, questions, PROMPT, ANSWERS, spec["new"])
    estimate = RUNTIME_BYTES + shape.weights + copy_of(policy, shape) + sampling
    print(json.dumps({**spec, "before": before, "peak": peak(), "estimate": estimate}))


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """One row, in a process of its own."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "benchmarks.memory_sampling", json.dumps(spec)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{spec} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def sampled(args: argparse.Namespace) -> None:
    """Measure the rows that were asked for and are not there yet, write each and print the table of all."""
    from benchmarks.memory import known

    name = Path(args.model).name
    rows = [] if args.again or args.quick else known(f"sampling-{name}")
    there = [tuple(row[key] for key in KEY) for row in rows]
    for key in product(args.engines, args.dtypes, args.rows, [args.new]):
        if key in there:
            continue
        rows.append(run({"model": args.model} | dict(zip(KEY, key, strict=True))) | {"model": name})
        print(line(rows[-1]), flush=True)
        if not args.quick:
            write(f"memory/sampling-{name}", {"rows": rows})
    print(table(["engine", "dtype", "rows", "peak MiB", "estimate MiB", "off by"], list(map(line, rows))))


def line(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    figures = f"{row['peak'] / MIB:,.0f}", f"{row['estimate'] / MIB:,.0f}", f"{row['estimate'] / row['peak'] - 1:+.0%}"
    return [row["engine"], row["dtype"], f"{row['rows']:,}", *figures]


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
