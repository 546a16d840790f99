"""Peak memory of sampling and of rounds, and the estimates of them that a start says: by engine, dtype and rows.

    python -m benchmarks.memory --model DIR [--rows 8 64 256] [--engines native transformers]
                                [--dtypes float32 bfloat16] [--new 256] [--again] [--quick]

Eight answers to each question of 100 tokens; none ends before its limit. Every row is a process of its own with one
thread, an adapter of rank 16, and rounds that are fitted into 8 GiB as `--max-memory 8` does it. First questions are
asked, all at a time, as held-out ones are; then two updates are made of the default number of groups, with the
questions asked again between them. `asking` compares the peak of the first part with what `Fitting.asking` says of it,
and `whole` the peak of all with the larger of that and of `Fitting.fit`: the bytes in the sentence of a start.

A row in which memory ran out fails, and is not estimated away. A row that is there is not measured again, unless with
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
SHORT = 8  # tokens of the answers between the updates: the copy of the weights is what takes memory there
LIMIT = 8 * 2**30
LIBRARIES = 4 * 2**30  # address space of Python and its libraries, most of which is no memory
MIB = 2**20
KEY = ("engine", "dtype", "rows", "new")
PARTS = ("asking", "whole")


def say(sentence: str) -> None:
    """Show a sentence. Raises SystemExit where memory ran out: less was done at a time then."""
    print(sentence, file=sys.stderr)
    if "out of memory" in sentence:
        raise SystemExit(sentence)


def child(spec: dict[str, Any]) -> None:
    """One row in this process, as JSON on the last line."""
    from benchmarks.memory import peak
    from swarm_node.config import NodeConfig
    from swarm_node.grpo.memory import Fitting
    from swarm_node.grpo.trainer import Trainer
    from swarm_node.policy.engines.native import NativeEngine
    from swarm_node.policy.engines.transformers import TransformersEngine
    from swarm_node.policy.fitting import Hardware
    from swarm_node.policy.loading import load_policy
    from swarm_node.types import Group, Rollout, Sampling, Turn

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT + LIBRARIES,) * 2)
    questions, new = spec["rows"] // ANSWERS, spec["new"]
    settings = {"model": spec["model"], "dtype": spec["dtype"], "lora": True, "threads": 1}
    rollouts = {"groups": questions, "group_size": ANSWERS, "max_new_tokens": new}
    config = NodeConfig.model_validate({"policy": settings, "rollouts": rollouts})
    policy = load_policy(config.policy, config.rollouts, say)
    policy.eos_ids = [policy.vocabulary - 1]  # which is as good as never drawn
    policy.engine = policy.engine_of(NativeEngine if spec["engine"] == "native" else TransformersEngine)
    prompts, seeds = [[100 + i] * PROMPT for i in range(questions)], [*range(questions)]
    fitting = Fitting(Trainer(policy, config.grpo, Sampling(new), say), prompts, config, Hardware("cpu", 0, LIMIT))
    whole = fitting.fit()
    asking = fitting.asking(prompts, ANSWERS, questions)
    before = peak()
    sampled = policy.generate(prompts, ANSWERS, Sampling(new), seeds)
    peaks = [peak()]
    rollouts_of = [
        [Rollout([Turn(r.token_ids, r.logprobs, True)], rewards={"x": i % 2}, reward=i % 2) for i, r in enumerate(each)]
        for each in sampled[: config.grpo.batch_groups]
    ]
    groups = [Group(None, prompt, each) for prompt, each in zip(prompts, rollouts_of, strict=False)]
    for _ in range(2):
        fitting.trainer.step(groups)
        policy.generate(prompts, ANSWERS, Sampling(SHORT), seeds)
    peaks.append(max(*peaks, peak()))
    estimates = asking, max(asking, whole)
    found = {part: {"peak": p, "estimate": e} for part, p, e in zip(PARTS, peaks, estimates, strict=True)}
    print(json.dumps({**spec, "before": before, "limit": fitting.trainer.limit, **found}))


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
    columns = [f"{part} {what}" for part in PARTS for what in ("peak MiB", "estimate MiB", "off by")]
    print(table([*KEY, *columns], list(map(line, rows))))


def line(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    cells = [row["engine"], row["dtype"], f"{row['rows']:,}", str(row["new"])]
    for part in PARTS:
        found, expected = (row[part][what] for what in ("peak", "estimate"))
        cells += [f"{found / MIB:,.0f}", f"{expected / MIB:,.0f}", f"{expected / found - 1:+.0%}"]
    return cells


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
