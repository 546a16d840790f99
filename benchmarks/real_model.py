"""One GRPO step of a model of a real shape, with an adapter, on this machine's GPU or CPU: this package and TRL.

    python -m benchmarks.real_model [--shape 0.5B] [--prompts 8] [--new 256] [--steps 3]

Weights are random, in the shape of Qwen2.5-0.5B and others, so nothing is downloaded and every answer runs to its full
length. LoRA of rank 16 on all linear layers, bfloat16, 8 answers a prompt, rewards 0, 1, 0, 1 in each group, AdamW, no
KL. `without graphs` is this package with the engine that CPUs use. Each contestant runs in a process of its own.
Figures are medians of the steps after two. Memory is the most that torch reserved on the GPU, or that of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import median, table, write
from swarm_node.cli.commands.bench import StepWork

ANSWERS, PROMPT, WARMUP = 8, 64, 2
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    "3B": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
}
"""As Qwen2.5 of these sizes."""


def make_model(shape: str, folder: Path) -> None:
    """A model of that shape with random weights, and a tokenizer with fewer ids than it has."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from swarm_node.policy.starter import build_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen2Config(vocab_size=151_936, num_key_value_heads=2, tie_word_embeddings=True, **SHAPES[shape])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    tokenizer = build_tokenizer(["a b c d e f"] * 8)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def work_of(spec: dict[str, Any]) -> StepWork:
    return StepWork(spec["prompts"], ANSWERS, spec["new"], spec["steps"], WARMUP)


def questions(work: StepWork) -> list[str]:
    """Questions of PROMPT tokens, another for each step and place."""
    places = ((k, i) for k in range(work.warmup + work.steps) for i in range(work.prompts))
    return [("abcdef" * PROMPT)[k + i : k + i + PROMPT - 1] for k, i in places]


def run_ours(spec: dict[str, Any]) -> Any:
    from swarm_node.cli.commands.bench_arms import our_steps
    from swarm_node.config import PolicyConfig, RolloutsConfig
    from swarm_node.policy.engines.native import NativeEngine
    from swarm_node.policy.loading import load_policy
    from swarm_node.types import Task

    work = work_of(spec)
    rollouts = RolloutsConfig(groups=work.prompts, group_size=work.group_size, max_new_tokens=work.new)
    settings = PolicyConfig(model=spec["path"], lora=True, lora_rank=16, dtype="bfloat16", prompt_template="{question}")
    policy = load_policy(settings, rollouts, lambda text: print(text, file=sys.stderr))
    if spec["who"] == "without graphs":
        policy.engine = policy.engine_of(NativeEngine)
    tasks = [Task(None, "x", question, None) for question in questions(work)]  # type: ignore[arg-type]
    return our_steps(policy, tasks, work)


def run_trl(spec: dict[str, Any]) -> Any:
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from swarm_node.cli.commands.bench_arms import trl_steps

    work = work_of(spec)
    model = AutoModelForCausalLM.from_pretrained(spec["path"], dtype=torch.bfloat16)
    if torch.cuda.is_available():
        model = model.cuda()
    tokenizer = AutoTokenizer.from_pretrained(spec["path"])
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return trl_steps(model, tokenizer, questions(work), work, lora)


def child(spec: dict[str, Any]) -> None:
    """One contestant in this process: times and peak memory as JSON on the last line."""
    import torch

    from swarm_node.cli.commands.bench_arms import peak_bytes

    found = (run_trl if spec["who"] == "TRL" else run_ours)(spec)
    update = [whole - sampling for whole, sampling in zip(found.step, found.sampling, strict=True)]
    times = {"step": found.step, "sampling": found.sampling, "update": update, "tokens": found.tokens}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({"times": times, "peak_mib": peak_bytes() / 2**20, "device": device}))


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """A contestant's figures, or the end of its messages."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "benchmarks.real_model", "--child", json.dumps(spec)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        print(done.stderr[-1500:], end="", file=sys.stderr)
        reason = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"who": spec["who"], "failed": reason[-1][:300] if reason else f"exit code {done.returncode}"}
    return {"who": spec["who"], **json.loads(done.stdout.strip().splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=("this package", "without graphs", "TRL"), action="append")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    found = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(args.shape, Path(folder))
        for who in args.only or ("this package", "without graphs", "TRL"):
            spec = {"who": who, "path": folder, "prompts": args.prompts, "new": args.new, "steps": args.steps}
            found.append(run(spec))
    rows = []
    for each in found:
        if "failed" in each:
            rows.append([each["who"], "failed", "", "", "", ""])
            continue
        step, sampling, update, tokens = (median(each["times"][n]) for n in ("step", "sampling", "update", "tokens"))
        figures = [f"{step:.2f}", f"{sampling:.2f}", f"{tokens / sampling:,.0f}", f"{update:.2f}"]
        rows.append([each["who"], *figures, f"{each['peak_mib']:,.0f}"])
    columns = [args.shape, "s a step", "sampling, s", "tokens sampled a second", "update, s", "peak MiB"]
    print(table(columns, rows))
    where = {each["device"] for each in found if "device" in each}
    name = f"real_model/{args.shape}-{'cpu' if where == {'cpu'} else 'gpu'}"
    write(name, {"shape": args.shape, "prompts": args.prompts, "new": args.new, "contestants": found})


if __name__ == "__main__":
    main()
