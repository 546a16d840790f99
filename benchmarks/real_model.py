"""GRPO steps of models of real shapes, with an adapter, on this machine's GPU or CPU: this package and TRL.

    python -m benchmarks.real_model [--shape 0.5B] [--prompts 8] [--new 256] [--steps 3]
    python -m benchmarks.real_model --shape 0.5B 1.7B 4B --weights bfloat16 nf4 --memory 24 16 12 8 --missing
    python -m benchmarks.real_model --quick          # a tiny shape, few tokens; nothing is stored

Weights are random, in the shape of Qwen models, so nothing is downloaded and every answer runs to its full length. LoRA
of rank 16 on all linear layers, bfloat16 or linear layers in 4 bits, 8 answers a prompt, rewards 0, 1, 0, 1 in each
group, AdamW, no KL. `without graphs` is this package with the engine that CPUs use. `TRL, checkpointed` computes
activations again, and is measured where TRL runs out of memory. Each contestant runs in a process of its own.

`--memory` is what torch may take of a GPU, in GiB. A contestant that fails with more memory is not tried with less, and
TRL, which does not look at what is free, makes the same step with every limit that it stays below. `--missing` leaves
out what is stored already, and after `--minutes` no contestant begins: the whole table can be made in several runs.

Figures are medians of the steps after two. Memory is the most that torch reserved on the GPU, or that of the process.
`of the limit` compares the tokens sampled a second with those of a machine that only reads the weights, once for a
token of each answer, or only multiplies with them, at the rates measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine, median, table, write
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
KEY = "device", "shape", "weights", "memory", "prompts", "new", "who"
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

    quantize = None if spec["weights"] == "bfloat16" else spec["weights"]
    settings = dict(lora=True, lora_rank=16, dtype="bfloat16", quantize=quantize, prompt_template="{question}")
    return PolicyConfig(model=spec["path"], **settings)


def run_ours(spec: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.decode import limit_of
    from swarm_node.cli.commands.bench_arms import our_steps, peak_bytes
    from swarm_node.config import RolloutsConfig
    from swarm_node.policy.engines.native import NativeEngine
    from swarm_node.policy.loading import load_policy
    from swarm_node.types import Task

    work = work_of(spec)
    rollouts = RolloutsConfig(groups=work.prompts, group_size=work.group_size, max_new_tokens=work.new)
    policy = load_policy(policy_of(spec), rollouts, lambda text: print(text, file=sys.stderr))
    if spec["who"] == EAGER:
        policy.engine = policy.engine_of(NativeEngine)
    tasks = [Task(None, "x", question, None) for question in questions(work)]  # type: ignore[arg-type]
    times = our_steps(policy, tasks, work, fit=True)
    peak_mib = peak_bytes() / 2**20
    answers = work.prompts * ANSWERS
    limit = answers / limit_of(policy.base).pass_s(answers)
    return {"times": times, "peak_mib": peak_mib, "limit": limit, "checkpointing": policy.checkpointing is not None}


def run_trl(spec: dict[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from swarm_node.cli.commands.bench_arms import peak_bytes, trl_steps
    from swarm_node.policy.loading import load_base, prepare

    work, plan = work_of(spec), prepare(policy_of(spec))
    model = load_base(plan)[0].to(plan.device)
    tokenizer = AutoTokenizer.from_pretrained(spec["path"])
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    again = spec["who"] == TRL_AGAIN
    times = trl_steps(model, tokenizer, questions(work), work, lora, gradient_checkpointing=again)
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
    command = [sys.executable, "-m", "benchmarks.real_model", "--child", json.dumps(spec)]
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
    for memory in args.memory:
        for weights in args.weights:
            for who in args.only or (w for w in CONTESTANTS if w != EAGER or (not memory and weights == "bfloat16")):
                values = device, shape, weights, memory, args.prompts, args.new, who
                yield dict(zip(KEY, values, strict=True))


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
                    if not any(Path(folder).iterdir()):
                        make_model(shape, Path(folder))
                    figures = run(arm | {"path": folder, "steps": args.steps})
                done = arm | figures | {"date": machine()["date"]}
                arms = [*(each for each in arms if key(each) != key(arm)), done]
                telling.append(done)
                print(*line_of(done), sep="  ", flush=True)
                if not args.quick:
                    write(file, {"arms": arms})
    return [arm for arm in arms if key(arm) in asked]


def line_of(arm: dict[str, Any]) -> list[str]:
    """A line of the table."""
    head = [arm["shape"], arm["weights"], f"{arm['memory']} GiB" if arm["memory"] else "all", arm["who"]]
    if "failed" in arm:
        return [*head, arm["failed"].split(": ", 1)[-1][:60], "", "", "", "", ""]
    if arm["checkpointing"] and arm["who"] == OURS:
        head[-1] += ", checkpointed"
    step, sampling, update, tokens = (median(arm["times"][n]) for n in ("step", "sampling", "update", "tokens"))
    speed = tokens / sampling
    share = f"{speed / arm['limit']:.0%}" if "limit" in arm else ""
    return [*head, f"{step:.2f}", f"{sampling:.2f}", f"{speed:,.0f}", share, f"{update:.2f}", f"{arm['peak_mib']:,.0f}"]


COLUMNS = ["model", "weights", "memory", "", "s a step", "sampling, s", "tokens sampled a second", "of the limit"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["0.5B"])
    parser.add_argument("--weights", choices=("bfloat16", "nf4"), nargs="+", default=["bfloat16"])
    parser.add_argument("--memory", type=int, nargs="+", default=[0], help="GiB; 0 = no limit")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=256)
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

    gpu = torch.cuda.is_available()
    most = torch.cuda.get_device_properties(0).total_memory / 2**30 if gpu else 0
    if max(args.memory) > most:
        parser.error(f"--memory limits a GPU, and there is {f'one of {most:.0f} GiB' if gpu else 'none'}")
    if args.quick:
        args.shape, args.prompts, args.new, args.steps = ["tiny"], 2, 8, 1
        args.weights, args.only = ["bfloat16", "nf4"], args.only or list(CONTESTANTS)
    device = torch.cuda.get_device_name() if gpu else machine()["cpu"]
    arms = measure(args, device, f"real_model/{'gpu' if gpu else 'cpu'}")
    print(table([*COLUMNS, "update, s", "peak MiB"], [line_of(arm) for arm in arms]))
    if args.quick and any("failed" in arm for arm in arms):
        sys.exit(1)


if __name__ == "__main__":
    main()
