"""Peak memory of an update, and the estimate of it that a start makes: by size of the model, tokens and mode.

    python -m benchmarks.memory [--quick] [--sizes 0.44M 3M 0.5B] [--tokens 500 2000 8000]

Groups of 8 answers behind a prompt of 64 tokens, so many that one microbatch has about the given number of tokens;
rewards 0, 1, 0, 1; AdamW. Every row is a process of its own with one thread: the most main memory that it had, above
what it had before weights were loaded. `full` trains all weights in float32, `lora` an adapter of rank 16, for 0.5B
under bfloat16. Weights are random; 0.5B is the shape of Qwen2.5-0.5B. The same update is made in three ways:
activations `kept` in the heap, as with ample memory; `mapped`, each large tensor by itself; mapped and `checkpointed`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import table, write
from benchmarks.real_model import make_model

PROMPT, ANSWERS, NEW, UPDATES = 64, 8, 56, 1
GROUP = PROMPT + ANSWERS * (NEW - 1)
SIZES = {"0.44M": (128, 2), "3M": (256, 4), "0.5B": None}
WAYS = ("kept", "mapped", "checkpointed")
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


def child(spec: dict[str, Any]) -> None:
    """One row in this process, as JSON on the last line."""
    import peft
    import torch
    import transformers

    from swarm_node.config import NodeConfig
    from swarm_node.grpo.memory import Fitting, hardware_of
    from swarm_node.grpo.trainer import Trainer
    from swarm_node.policy.loading import load_policy
    from swarm_node.types import Group, Rollout, Sampling

    assert peft and transformers  # loaded before the base is taken
    torch.set_num_threads(1)
    base = psutil.Process().memory_info().rss
    groups = max(1, round(spec["tokens"] / GROUP))
    lora = spec["mode"] == "lora"
    config = NodeConfig.model_validate(
        {
            "policy": {"model": spec["path"], "lora": lora, "threads": 1, "dtype": spec["dtype"]},
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
    fitting = Fitting(trainer, [[3] * PROMPT], config, hardware_of(policy.device))
    probe_s = time.process_time() - start
    fitting.mapped = spec["way"] == "mapped"
    needed = fitting.fit()
    answer = [3 + i % 300 for i in range(NEW)]
    rollouts = [Rollout(answer, [0.0] * NEW, True, rewards={"x": i % 2}, reward=i % 2) for i in range(ANSWERS)]
    start = time.process_time()
    for _ in range(spec["updates"]):
        trainer.step([Group(None, [3] * PROMPT, rollouts) for _ in range(groups)])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "peak": peak - base,
                "estimate": needed - base,
                "whole": peak,
                "whole_estimate": needed,
                "base": base,
                "tokens": groups * GROUP,
                "probe_s": probe_s,
                "update_s": (time.process_time() - start) / spec["updates"],
            }
        )
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[500, 2000, 8000])
    parser.add_argument("--modes", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--quick", action="store_true", help="the two small sizes, 500 and 2,000 tokens")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    sizes, lengths = (("0.44M", "3M"), (500, 2000)) if args.quick else (args.sizes, args.tokens)
    found = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make(size, Path(folder))
            for mode in args.modes:
                for tokens in lengths:
                    for way in args.ways:
                        spec = {"path": folder, "mode": mode, "tokens": tokens, "way": way}
                        spec |= {"dtype": "bfloat16" if size == "0.5B" and mode == "lora" else "float32"}
                        found.append({"size": size} | run(spec | {"updates": args.updates}))
                        print(row(found[-1]), flush=True)
    columns = ["model", "mode", "way", "tokens", "peak MiB", "estimate MiB", "off by", "with the program", "off by"]
    print(table([*columns, "probe s", "update, CPU s"], list(map(row, found))))
    for each in found:
        del each["path"]
    if not args.quick:
        write(f"memory/{'-'.join(sizes)}", {"rows": found})


def row(each: dict[str, Any]) -> list[str]:
    """A line of the table."""
    return [
        each["size"],
        each["mode"],
        each["way"],
        f"{each['tokens']:,}",
        f"{each['peak'] / MIB:,.0f}",
        f"{each['estimate'] / MIB:,.0f}",
        f"{each['estimate'] / each['peak'] - 1:+.0%}",
        f"{each['whole'] / MIB:,.0f}",
        f"{each['whole_estimate'] / each['whole'] - 1:+.0%}",
        f"{each['probe_s']:.3f}",
        f"{each['update_s']:.2f}",
    ]


if __name__ == "__main__":
    main()
