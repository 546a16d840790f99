"""GRPO steps of models of real shapes or with real weights, on this machine's GPU or CPU: this package and TRL.

    python -m benchmarks.real_model [--shape 0.5B] [--prompts 8] [--new 256] [--steps 3]
    python -m benchmarks.real_model --shape 0.5B 1.7B 4B --weights bfloat16 nf4 --memory 24 16 12 8 --missing
    python -m benchmarks.real_model --real --missing --minutes 60       # SmolLM2 with real weights, on a CPU
    python -m benchmarks.real_model --quick          # a tiny shape, few tokens; nothing is stored

Without `--real`, weights are random, in the shape of Qwen models, so nothing is downloaded and every answer runs to its
full length. LoRA of rank 16 on all linear layers, bfloat16 or linear layers in 4 bits, 8 answers a prompt, rewards 0,
1, 0, 1 in each group, AdamW, no KL. `without graphs` is this package with the engine that CPUs use. `TRL, checkpointed`
computes activations again, and is measured where TRL runs out of memory. Each contestant runs in a process of its own.

`--real`: the model `smollm2`, or the one of `--model`, 8 answers to one question a step, each of exactly 16, 64 or 200
tokens; float32, bfloat16 and what `policy.dtype = auto` takes; LoRA and all weights. Both sides have all cores: leave
the machine idle. `benchmarks.real_sampling` samples from it, beside vLLM.

`--memory` is what torch may take of a GPU, in GiB. A contestant that fails with more memory is not tried with less, and
TRL, which does not look at what is free, makes the same step with every limit that it stays below. `--missing` leaves
out what is stored already, and after `--minutes` no contestant begins: the whole table can be made in several runs.

Figures are medians of the steps after two, with the range of whole steps. Memory is the most that torch reserved on the
GPU, or that of the process. `of the limit` compares the tokens sampled a second with those of a machine that only reads
the weights, once for a token of each answer, or only multiplies with them, at the rates measured here. `x the limit`
compares the whole step with such a machine; its update takes two products for each weight and token, or three if all
weights are trained.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, folder_of, machine, median, table, write
from swarm_node.cli.commands.bench import StepWork

ANSWERS, PROMPT, WARMUP = 8, 64, 2
TIMEOUT = 900  # seconds of a contestant
OURS, EAGER, TRL, TRL_AGAIN = CONTESTANTS = "this package", "without graphs", "TRL", "TRL, checkpointed"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    "1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, head_dim=128),
    "3B": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
    "4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, head_dim=128),
}
"""As Qwen2.5 of these sizes; those with a width of heads as Qwen3."""
REAL, REAL_NEW = "SmolLM2", (16, 64, 200)
"""The shape whose weights are real, and the tokens of its answers."""
LORA, ALL, AUTO = "lora", "all", "auto"
KEY = "device", "shape", "weights", "trained", "memory", "prompts", "new", "who"
"""What makes an arm. A memory of 0 is no limit."""


def config_of(shape: str) -> Any:
    """The transformers config of a shape."""
    from transformers import Qwen2Config, Qwen3Config

    sizes = dict(vocab_size=151_936, tie_word_embeddings=True, **SHAPES[shape])
    if "head_dim" in sizes:
        return Qwen3Config(num_key_value_heads=8, **sizes)
    return Qwen2Config(num_key_value_heads=2, **sizes)


def make_model(shape: str, folder: Path) -> None:
    """A model of that shape with random weights, and a tokenizer with fewer ids than it has."""
    import torch
    from transformers import AutoModelForCausalLM

    from swarm_node.policy.starter import build_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    torch.set_default_dtype(torch.float32)
    tokenizer = build_tokenizer(["a b c d e f"] * 8)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # for the contestants


def work_of(spec: dict[str, Any]) -> StepWork:
    return StepWork(spec["prompts"], ANSWERS, spec["new"], spec["steps"], WARMUP)


def questions(work: StepWork) -> list[str]:
    """Questions of PROMPT tokens, another for each step and place."""
    places = ((k, i) for k in range(work.warmup + work.steps) for i in range(work.prompts))
    return [("abcdef" * PROMPT)[k + i : k + i + PROMPT - 1] for k, i in places]


def policy_of(spec: dict[str, Any]) -> Any:
    """The settings of the model: of `PolicyConfig`."""
    from swarm_node.config import PolicyConfig

    weights, lora = spec["weights"], spec["trained"] == LORA
    if spec["shape"] == REAL:
        threads = os.cpu_count()
        return PolicyConfig(model=spec["path"], lora=lora, dtype=weights, system_prompt="", threads=threads)
    quantize = None if weights == "bfloat16" else weights
    settings = dict(lora=lora, lora_rank=16, dtype="bfloat16", quantize=quantize, prompt_template="{question}")
    return PolicyConfig(model=spec["path"], **settings)


def questions_of(spec: dict[str, Any]) -> list[str]:
    """The questions of all steps: of word problems for real weights."""
    work = work_of(spec)
    if spec["shape"] != REAL:
        return questions(work)
    from benchmarks.real_sets import pairs

    return list(pairs("words"))[: work.prompts * (work.warmup + work.steps)]


def run_ours(spec: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.decode import limit_of
    from swarm_node.cli.commands.bench_arms import config_of, endless_engine, our_steps, peak_bytes
    from swarm_node.policy.dtypes import name_of
    from swarm_node.policy.engines.native import NativeEngine
    from swarm_node.policy.loading import load_policy
    from swarm_node.types import Task

    work = work_of(spec)
    config = config_of(work)
    said = functools.partial(print, file=sys.stderr)
    policy = load_policy(policy_of(spec), config.rollouts, said, of_round=lambda policy: config)
    if spec["who"] == EAGER:
        policy.engine = policy.engine_of(NativeEngine)
    if spec["shape"] == REAL:
        policy.engine = endless_engine(policy)
    tasks = [Task(None, "x", question, None) for question in questions_of(spec)]  # type: ignore[arg-type]
    times = our_steps(policy, tasks, work, fit=True)
    peak_mib = peak_bytes() / 2**20
    answers, best = work.prompts * ANSWERS, limit_of(policy.base)
    step_s = work.new * best.pass_s(answers) + best.pass_s(answers * work.new, 2 if policy.is_lora else 3)
    return {
        "times": times,
        "peak_mib": peak_mib,
        "limit": answers / best.pass_s(answers),
        "limit_step_s": step_s,
        "checkpointing": policy.checkpointing is not None,
        "dtype": name_of(policy.dtype),
        "engine": type(policy.engine).__name__,
        "packing": policy.packing,
    }


def run_trl(spec: dict[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from swarm_node.cli.commands.bench_arms import peak_bytes, trl_steps
    from swarm_node.policy.chat_template import tokenizer_frame
    from swarm_node.policy.loading import load_base, prepare

    work, plan = work_of(spec), prepare(policy_of(spec))
    model = load_base(plan)[0].to(plan.device)
    tokenizer = AutoTokenizer.from_pretrained(spec["path"])
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if spec["trained"] == LORA else None
    again, asked = spec["who"] == TRL_AGAIN, questions_of(spec)
    settings: dict[str, Any] = {"gradient_checkpointing": again}
    if spec["shape"] == REAL:
        frame = tokenizer_frame(tokenizer, policy_of(spec))
        asked = [frame.around(question) for question in asked]
        settings["generation_kwargs"] = {"min_new_tokens": work.new}  # no token ends an answer before its full length
    times = trl_steps(model, tokenizer, asked, work, lora, **settings)
    return {"times": times, "peak_mib": peak_bytes() / 2**20, "checkpointing": again}


def child(spec: dict[str, Any]) -> None:
    """One contestant in this process: times and peak memory as JSON on the last line."""
    import torch

    if spec["memory"]:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(spec["memory"] * 2**30 / whole)
    found = (run_trl if spec["who"] in (TRL, TRL_AGAIN) else run_ours)(spec)
    times = found.pop("times")
    update = [whole - sampling for whole, sampling in zip(times.step, times.sampling, strict=True)]
    times = {"step": times.step, "sampling": times.sampling, "update": update, "tokens": times.tokens}
    print(json.dumps(found | {"times": times}))


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """A contestant's figures, or the end of its messages."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    if spec["shape"] == REAL:
        env["OMP_NUM_THREADS"] = str(os.cpu_count())
    command = [sys.executable, "-m", "benchmarks.real_model", "--child", json.dumps(spec)]
    print(shlex.join(["python", *command[1:]]), flush=True)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {TIMEOUT} s"}
    if done.returncode:
        print(done.stderr[-1500:], end="", file=sys.stderr)
        reason = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"failed": reason[-1][:300] if reason else f"exit code {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def is_for_memory(arm: dict[str, Any]) -> bool:
    """Whether there was too little memory for an arm."""
    return "memory" in arm.get("failed", "")


def foretold(spec: dict[str, Any], arms: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The figures of an arm, if a run with more memory tells them."""
    for other in arms:
        more = not other["memory"] or other["memory"] > spec["memory"] > 0
        if more and all(other[name] == spec[name] for name in KEY if name != "memory"):
            if is_for_memory(other):
                return {"failed": other["failed"]}
            if spec["who"] in (TRL, TRL_AGAIN) and other.get("peak_mib", math.inf) <= 1024 * spec["memory"]:
                return {name: value for name, value in other.items() if name not in KEY}
    return None


def arms_of(args: argparse.Namespace, device: str, shape: str) -> Iterator[dict[str, Any]]:
    """The arms of a shape, in order."""
    for memory, weights, trained, new in product(args.memory, args.weights, args.trained, args.new):
        for who in args.only or contestants(shape, weights, memory):
            if who == OURS or weights != AUTO:
                values = device, shape, weights, trained, memory, args.prompts, new, who
                yield dict(zip(KEY, values, strict=True))


def contestants(shape: str, weights: str, memory: int) -> list[str]:
    """Who takes part unless told otherwise. A CPU has no graphs."""
    if shape == REAL:
        return [OURS, TRL]
    return [who for who in CONTESTANTS if who != EAGER or (not memory and weights == "bfloat16")]


def key(arm: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arm[name] for name in KEY)


def measure(args: argparse.Namespace, device: str, file: str) -> list[dict[str, Any]]:
    """Run the arms that are due, and store each; all arms that were asked for and are known."""
    path, asked, until = RESULTS / f"{file}.json", set(), time.monotonic() + 60 * args.minutes
    arms = json.loads(path.read_text())["arms"] if path.exists() and not args.quick else []
    telling = list(arms) if args.missing else []  # arms whose figures may be those of others
    for shape in args.shape:
        with tempfile.TemporaryDirectory() as folder:
            for arm in arms_of(args, device, shape):
                asked.add(key(arm))
                known = {key(each): each for each in arms}
                beside = known.get(key(arm | {"who": TRL}), {})
                if arm["who"] == TRL_AGAIN and not is_for_memory(beside) and not args.only:
                    continue
                if (args.missing and key(arm) in known) or time.monotonic() > until:
                    continue
                figures = foretold(arm, telling)
                if figures is None:
                    if shape != REAL and not any(Path(folder).iterdir()):
                        make_model(shape, Path(folder))
                    model = folder_of(args.model) if shape == REAL else folder
                    figures = run(arm | {"path": model, "steps": args.steps})
                done = arm | figures | {"date": machine()["date"]}
                arms = [*(each for each in arms if key(each) != key(arm)), done]
                telling.append(done)
                print(*line_of(done), sep="  ", flush=True)
                if not args.quick:
                    write(file, {"arms": arms})
    return [arm for arm in arms if key(arm) in asked]


def line_of(arm: dict[str, Any]) -> list[str]:
    """A line of the table."""
    weights = arm["weights"] if arm["weights"] != AUTO else f"auto: {arm.get('dtype', '')}"
    memory = f"{arm['memory']} GiB" if arm["memory"] else "all"
    head = [arm["shape"], weights, arm["trained"], str(arm["new"]), memory, arm["who"]]
    if "failed" in arm:
        return [*head, arm["failed"].split(": ", 1)[-1][:60], "", "", "", "", "", ""]
    if arm["checkpointing"] and arm["who"] == OURS:
        head[-1] += ", checkpointed"
    step, sampling, update, tokens = (median(arm["times"][n]) for n in ("step", "sampling", "update", "tokens"))
    speed = tokens / sampling
    share = f"{speed / arm['limit']:.0%}" if "limit" in arm else ""
    times = f"{step / arm['limit_step_s']:.1f}" if "limit_step_s" in arm else ""
    whole = f"{step:.2f} ({min(arm['times']['step']):.2f} to {max(arm['times']['step']):.2f})"
    figures = [f"{sampling:.2f}", f"{speed:,.0f}", share, f"{update:.2f}", times, f"{arm['peak_mib']:,.0f}"]
    return [*head, whole, *figures]


COLUMNS = ["model", "weights", "trained", "new", "memory", "", "s a step", "sampling, s", "tokens sampled a second"]
COLUMNS += ["of the limit", "update, s", "x the limit", "peak MiB"]


def compared(arms: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on arms of real weights: TRL's seconds and memory against this package's, and the choice of dtype."""
    done = {key(arm): arm for arm in arms if "times" in arm and arm["shape"] == REAL}
    lines = []
    for arm in (arm for arm in done.values() if arm["who"] == OURS):
        seconds = median(arm["times"]["step"])
        name = f"{arm['trained']}, {arm['new']} tokens, {arm['weights']}"
        if (other := done.get(key(arm | {"who": TRL}))) is not None:
            times = median(other["times"]["step"]) / seconds
            lines.append(
                f"{name}: TRL takes {times:.1f}x the time and {other['peak_mib'] / arm['peak_mib']:.1f}x the memory"
            )
        if arm["weights"] == AUTO:
            fixed = [done.get(key(arm | {"weights": dtype})) for dtype in ("float32", "bfloat16")]
            known = {each["weights"]: median(each["times"]["step"]) for each in fixed if each is not None}
            if len(known) == 2:
                faster = min(known, key=lambda dtype: known[dtype])
                more = known[arm["dtype"]] / known[faster] - 1
                lines.append(f"{name} takes {arm['dtype']}, {more:+.0%} of the faster one, {faster}")
    return lines


def complete(args: argparse.Namespace) -> None:
    """What was not asked for otherwise."""
    args.weights = args.weights or (["float32", "bfloat16", AUTO] if args.real else ["bfloat16"])
    args.trained = args.trained or ([LORA, ALL] if args.real else [LORA])
    args.prompts = args.prompts or (1 if args.real else 8)
    args.new = args.new or (list(REAL_NEW) if args.real else [256])
    if args.real:
        args.shape = [REAL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["0.5B"])
    parser.add_argument("--real", action="store_true", help="real weights, on a CPU, in place of --shape")
    parser.add_argument("--model", default="smollm2", help="of --real: a name that `local` knows, or a directory")
    parser.add_argument("--weights", choices=("float32", "bfloat16", AUTO, "nf4"), nargs="+")
    parser.add_argument("--trained", choices=(LORA, ALL), nargs="+")
    parser.add_argument("--memory", type=int, nargs="+", default=[0], help="GiB; 0 = no limit")
    parser.add_argument("--prompts", type=int, help="8, or 1 with --real")
    parser.add_argument("--new", type=int, nargs="+", help="tokens of each answer: 256, or 16, 64 and 200 with --real")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=CONTESTANTS, action="append")
    parser.add_argument("--missing", action="store_true", help="leave out what was measured before")
    parser.add_argument("--minutes", type=float, default=600.0, help="no contestant begins later")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    import torch

    complete(args)
    gpu = torch.cuda.is_available()
    if args.real and gpu:
        parser.error("--real is for machines without a GPU")
    most = torch.cuda.get_device_properties(0).total_memory / 2**30 if gpu else 0
    if max(args.memory) > most:
        parser.error(f"--memory limits a GPU, and there is {f'one of {most:.0f} GiB' if gpu else 'none'}")
    if args.quick:
        args.prompts, args.new, args.steps = 2 - args.real, [8], 1
        if not args.real:
            args.shape, args.weights, args.only = ["tiny"], ["bfloat16", "nf4"], args.only or list(CONTESTANTS)
    device = torch.cuda.get_device_name() if gpu else machine()["cpu"]
    arms = measure(args, device, f"real_model/{'gpu' if gpu else 'cpu'}")
    print(table(COLUMNS, [line_of(arm) for arm in arms]), *compared(arms), sep="\n")
    if args.quick and any("failed" in arm for arm in arms):
        sys.exit(1)


if __name__ == "__main__":
    main()
