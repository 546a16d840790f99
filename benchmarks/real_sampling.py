"""Tokens a second that the native engine samples from a model with real weights, beside vLLM's build for CPUs.

    python -m benchmarks.real_sampling [--rows 1 16 64] [--dtypes float32 bfloat16] [--missing] [--minutes 60]
    python -m benchmarks.real_sampling --vllm /path/to/venv/bin/python     # of an environment that has vLLM
    python -m benchmarks.real_sampling --quick       # one row, few tokens; nothing is stored

The model is `smollm2`, or that of `--model`. Each row is a word problem of its own, and gets exactly 64 tokens at
temperature 1. Each engine, dtype and number of rows is a process of its own, with as many threads as there are cores:
leave the machine idle. After a warm-up the same batch is sampled `--repeats` times. The native engine records
log-probabilities, as training needs them; vLLM does not, and has no seed for each request, which ends its server at 64
rows. Without `--vllm` its column is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, folder_of, machine, median, table, write
from benchmarks.processes import mind_signals

NEW = 64
NATIVE, VLLM = "native", "vLLM"
KEY = "cpu", "who", "dtype", "rows", "new"
FILE = "real_model/sampling"
TIMEOUT_S = 1800
SCRIPT = Path(__file__).with_name("vllm_speed.py")
Row = dict[str, Any]


def questions(rows: int) -> list[str]:
    from benchmarks.real_sets import pairs

    return list(pairs("words"))[:rows]


def child(spec: Row) -> None:
    """The native engine in this process: seconds of each batch as JSON on the last line."""
    from swarm_node.cli.commands.bench_arms import endless_engine, peak_bytes
    from swarm_node.config import PolicyConfig, RolloutsConfig
    from swarm_node.grpo.memory import fit_sampling, hardware_of
    from swarm_node.policy.engines.native import NativeEngine
    from swarm_node.policy.loading import load_policy
    from swarm_node.types import Sampling

    settings = PolicyConfig(
        model=spec["model"], lora=False, dtype=spec["dtype"], threads=os.cpu_count() or 1, system_prompt=""
    )
    rollouts = RolloutsConfig(max_new_tokens=spec["new"], max_prompt_tokens=256)
    policy = load_policy(settings, rollouts, lambda text: print(text, file=sys.stderr))
    if not isinstance(policy.engine, NativeEngine):
        raise SystemExit("Error: this model does not get the native engine in this dtype")
    policy.engine = endless_engine(policy)
    fit_sampling(policy, hardware_of(policy.device), rollouts, 1)
    prompts = policy.encode_questions(questions(spec["rows"]))
    times = []
    for _ in range(spec["repeats"] + 1):
        start = time.perf_counter()
        groups = policy.generate(prompts, 1, Sampling(spec["new"]), list(range(len(prompts))))
        times.append(time.perf_counter() - start)
    assert all(len(each.token_ids) == spec["new"] for group in groups for each in group)
    print("\n" + json.dumps({"seconds": times[1:], "peak_mib": peak_bytes() / 2**20}))


def prompt_texts(model: str, rows: int) -> list[str]:
    """The prompts as texts, for another engine: the model's chat template around the questions."""
    from swarm_node.config import PolicyConfig
    from swarm_node.policy.chat_template import tokenizer_frame
    from swarm_node.policy.loading import load_tokenizer

    config = PolicyConfig(model=model, system_prompt="")
    frame = tokenizer_frame(load_tokenizer(config), config)
    return [frame.around(question) for question in questions(rows)]


def run(spec: Row, python: str | None) -> Row:
    """The figures of one row, or why there are none."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["OMP_NUM_THREADS"] = str(os.cpu_count())
    if spec["who"] == VLLM:
        assert python is not None
        command = [python, str(SCRIPT)]
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        given = json.dumps(spec | {"prompts": prompt_texts(spec["model"], spec["rows"])})
    else:
        command, given = [sys.executable, "-m", "benchmarks.real_sampling", "--child", json.dumps(spec)], ""
    print(shlex.join(command), flush=True)
    try:
        done = subprocess.run(command, input=given, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {TIMEOUT_S} s"}
    if done.returncode:
        print(done.stderr[-1500:], end="", file=sys.stderr)
        reason = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"failed": reason[-1][:300] if reason else f"exit code {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def measure(args: argparse.Namespace) -> list[Row]:
    """Run the rows that are due, and store each; all rows that are known."""
    path, until = RESULTS / f"{FILE}.json", time.monotonic() + 60 * args.minutes
    rows = json.loads(path.read_text())["rows"] if path.exists() and not args.quick else []
    model, cpu = folder_of(args.model), machine()["cpu"]
    for number, dtype, who in product(args.rows, args.dtypes, [NATIVE, VLLM] if args.vllm else [NATIVE]):
        row = dict(zip(KEY, (cpu, who, dtype, number, args.new), strict=True))
        if (args.missing and key(row) in map(key, rows)) or time.monotonic() > until:
            continue
        figures = run(row | {"model": model, "repeats": args.repeats}, args.vllm)
        done = row | figures | {"date": machine()["date"]}
        rows = [*(each for each in rows if key(each) != key(row)), done]
        print(number, dtype, who, speed(done), flush=True)
        if not args.quick:
            write(FILE, {"rows": rows})
    return rows


def speed(row: Row) -> str:
    """Tokens a second: the median with the range."""
    if "failed" in row:
        return str(row["failed"])[:60]
    tokens = row["rows"] * row["new"]
    speeds = [tokens / seconds for seconds in row["seconds"]]
    return f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"


def report(rows: Sequence[Row]) -> str:
    """A Markdown table: a line for each number of rows and dtype, the engines beside each other."""
    known = {key(row): row for row in rows}
    with_vllm = any(row["who"] == VLLM for row in rows)
    lines = []
    for cpu, dtype, number, new in sorted({(r["cpu"], r["dtype"], r["rows"], r["new"]) for r in rows}):
        native, other = (known.get((cpu, who, dtype, number, new)) for who in (NATIVE, VLLM))
        cells = [speed(row) if row else "" for row in ((native, other) if with_vllm else (native,))]
        if with_vllm:
            both = native is not None and other is not None and "seconds" in native and "seconds" in other
            cells.append(f"{median(other['seconds']) / median(native['seconds']):.1f}x" if both else "")  # type: ignore[index]
        lines.append([dtype, number, new, *cells])
    columns = ["dtype", "rows", "new", NATIVE, *([VLLM, f"{NATIVE} / {VLLM}"] if with_vllm else [])]
    return table(columns, lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="smollm2", help="a name that `local` knows, or a directory")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--missing", action="store_true", help="leave out what was measured before")
    parser.add_argument("--minutes", type=float, default=600.0, help="no measurement begins later")
    parser.add_argument("--report", action="store_true", help="the table of what is stored")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(json.loads(args.child))
        return
    if args.report:
        path = RESULTS / f"{FILE}.json"
        print(report(json.loads(path.read_text())["rows"] if path.exists() else []))
        return
    mind_signals()
    if args.quick:
        args.rows, args.new, args.repeats, args.dtypes = [1], 4, 1, args.dtypes[:1]
    rows = measure(args)
    print(report(rows))
    if args.quick and any("failed" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
