"""One GRPO step (sample, score, update): this package, TRL's GRPOTrainer and a plain Hugging Face loop.

    python -m benchmarks.step [--sizes 0.44M 3.2M] [--threads 1 2] [--steps 12] [--repeats 3] [--seed 0] [--quick]

8 tasks x 8 completions of at most 16 tokens, the small tasks' own prompts, all weights trained, AdamW, DAPO loss, no
KL. Two policies of each size: `trained` ones answer like the starter (about 4 tokens), `fresh` ones have random
weights, so that nearly every completion runs to its 16 tokens. The size 0.5B has the shape of Qwen2.5-0.5B with random
weights in bfloat16 (`-float32`, `-nf4`: in these), LoRA of rank 16 on all linear layers, and 1 task x 8 completions of
64 tokens, without the plain loop; `tiny` is a tiny one like it. Their second table has the seconds of a step in
sampling and in the rest of it, and what memory and products of this machine allow: all weights are read once a token,
and the update takes two products for each weight and token, forward and backward.

Rewards alternate 0, 1, 0, 1 within each group: every group has a signal, nothing is skipped by anyone. Each contestant
runs in a process of its own, in turn, with the same number of threads, which wait as the environment says
(OMP_WAIT_POLICY; torch's default is to spin), and with the malloc settings of this package. Figures are the median step
with quartiles over all steps (CPU time with one thread, which a busy machine disturbs least; wall time with two or
more), ratios of the medians with quartiles over the repeats, and the process's peak memory. At the end (of a run with
the size 0.44M), peak memory of the update alone at a vocabulary of 152k, where logits dominate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from benchmarks.common import median, table, write
from swarm_node.cli.commands.bench import StepWork, quartiles
from swarm_node.config import PolicyConfig, RewardsConfig, RolloutsConfig

GROUPS, GROUP_SIZE, WARMUP = 8, 8, 2
TEACHING_STEPS = 80
"""Supervised steps of the trained policies: enough to answer in the right form."""
MEMORY = {"vocabulary": 152_064, "hidden": 64, "layers": 2, "prompt": 32, "new": 64}
LEARNING_RATE = 1e-4
LEAVES = "answers end early, and their rows leave"
"""Beside trained rows. The other two compute every row until the longest answer has ended."""


@dataclass(frozen=True)
class Size:
    """A model and the work of its step."""

    hidden: int = 0  # 0 = the shape that real_model calls by the name of the size
    layers: int = 0
    groups: int = GROUPS
    new: int = 16
    dtype: str = "float32"
    quantize: Literal["nf4"] | None = None

    @property
    def lora(self) -> bool:
        return not self.hidden

    @property
    def policies(self) -> list[str]:
        return ["fresh"] if self.lora else ["fresh", "trained"]

    @property
    def contestants(self) -> list[str]:
        return ["ours", "trl"] if self.lora else list(CONTESTANTS)

    def config(self, path: str, threads: int = 0) -> PolicyConfig:
        return PolicyConfig(model=path, lora=self.lora, dtype=self.dtype, quantize=self.quantize, threads=threads)


SIZES = {
    "0.44M": Size(128, 2),
    "3.2M": Size(256, 4),
    "0.5B": Size(groups=1, new=64, dtype="bfloat16"),
    "0.5B-float32": Size(groups=1, new=64),
    "0.5B-nf4": Size(groups=1, new=64, dtype="bfloat16", quantize="nf4"),
    "tiny": Size(groups=1, new=8, dtype="bfloat16"),
}


def make_policies(folder: Path, sizes: list[str]) -> None:
    """The policies of these sizes, once for all contestants."""
    from transformers import AutoTokenizer

    from benchmarks.real_model import make_model
    from swarm_node.cli.commands.starter import make_starter
    from swarm_node.policy.starter import build_model

    for name in sizes:
        size = SIZES[name]
        if size.lora:
            make_model(name.partition("-")[0], folder / f"{name} fresh")
            continue
        print(f"teaching the {name} policy for {TEACHING_STEPS} steps", flush=True)
        trained = make_starter(folder / f"{name} trained", size.layers, size.hidden, TEACHING_STEPS, progress=False)
        tokenizer = AutoTokenizer.from_pretrained(trained)
        build_model(len(tokenizer), size.layers, size.hidden, seed=0).save_pretrained(folder / f"{name} fresh")
        tokenizer.save_pretrained(folder / f"{name} fresh")


# --------------------------------------------------------------------- contestants


def work_of(spec: dict) -> StepWork:
    size = SIZES[spec["size"]]
    return StepWork(size.groups, GROUP_SIZE, size.new, spec["steps"], WARMUP, LEARNING_RATE, spec["seed"])


def tasks_of(work: StepWork) -> list:
    """The tasks of all steps."""
    from swarm_node.tasks.taskset import load_tasks

    count = work.prompts * (work.warmup + work.steps)
    return load_tasks(["small"], RewardsConfig()).sample(random.Random(work.seed), count)


def load(spec: dict):
    """(model, tokenizer, LoRA settings or None) of a contestant that is not this package."""
    from swarm_node.policy.adapters import lora_config
    from swarm_node.policy.loading import load_base, load_tokenizer, prepare

    config = SIZES[spec["size"]].config(spec["path"])
    model, _ = load_base(prepare(config))
    return model, load_tokenizer(config), lora_config(config) if config.lora else None


def run_ours(spec: dict):
    from swarm_node.cli.commands.bench_arms import our_steps
    from swarm_node.policy.loading import load_policy

    work = work_of(spec)
    settings = SIZES[spec["size"]].config(spec["path"], int(os.environ["OMP_NUM_THREADS"]))
    rollouts = RolloutsConfig(groups=work.prompts, group_size=work.group_size, max_new_tokens=work.new)
    policy = load_policy(settings, rollouts, lambda text: None)
    return our_steps(policy, tasks_of(work), work, _now, fit=True)


def run_plain(spec: dict):
    """What one writes first: `generate`, a forward pass over the same rows, the loss, AdamW."""
    import torch

    from swarm_node.cli.commands.bench_arms import Times, rewards

    work, tasks = work_of(spec), tasks_of(work_of(spec))
    model, tokenizer, lora = load(spec)
    torch.manual_seed(work.seed)
    if lora is not None:
        from peft import get_peft_model

        model = get_peft_model(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def step(k: int) -> int:
        part = tasks[k * work.prompts : (k + 1) * work.prompts]
        texts = [task.question.strip() + "<sep>" for task in part for _ in range(GROUP_SIZE)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        model.eval()
        with torch.no_grad():
            ids = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=work.new,
                do_sample=True,
                top_k=0,
            )
        model.train()
        completions = ids[:, inputs["input_ids"].shape[1] :]
        ended = (completions == tokenizer.eos_token_id).cumsum(1)
        mask = ((ended - (completions == tokenizer.eos_token_id).long()) == 0).float()
        tokenizer.batch_decode(completions, skip_special_tokens=True)
        grouped = torch.tensor(rewards(len(completions))).view(work.prompts, GROUP_SIZE)
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        attention = torch.cat([inputs["attention_mask"], mask.long()], 1)
        keep = completions.shape[1] + 1
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=keep, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(2, completions[..., None])[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        optimizer.zero_grad()
        ((loss * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return int(mask.sum())

    times = Times()
    for k in range(work.warmup + work.steps):
        start = _now()
        tokens = step(k)
        if k >= work.warmup:
            times.step.append(_now() - start)
            times.tokens.append(tokens)
    return times


def run_trl(spec: dict):
    from swarm_node.cli.commands.bench_arms import trl_steps

    work = work_of(spec)
    model, tokenizer, lora = load(spec)
    prompts = [task.question.strip() + "<sep>" for task in tasks_of(work)]
    clipping = {"adam_beta2": 0.95, "epsilon": 0.2, "epsilon_high": 0.28}
    return trl_steps(model, tokenizer, prompts, work, lora, _now, **clipping)


def limit_s(spec: dict) -> dict[str, float]:
    """Seconds that memory and products of this machine allow a step, in its two parts."""
    from benchmarks.decode import limit_of

    size, model = SIZES[spec["size"]], load(spec)[0]
    limit = limit_of(model)
    answers = size.groups * GROUP_SIZE
    trained = answers * size.new  # and the prompt, once a group, which is short
    products = 2 if size.lora else 3  # forward, to the inputs and, if all weights are trained, to these
    return {"sampling": size.new * limit.pass_s(answers), "rest": limit.pass_s(trained, products)}


def _now() -> float:
    return time.process_time() if os.environ["OMP_NUM_THREADS"] == "1" else time.perf_counter()


# --------------------------------------------------------------------- memory at a large vocabulary


def update_memory(contestant: str) -> None:
    """Forward and backward over 8 x 8 completions at a vocabulary of 152k."""
    import torch

    from swarm_node.policy.starter import build_model

    v, new, length = MEMORY["vocabulary"], MEMORY["new"], MEMORY["prompt"]
    model = build_model(v, MEMORY["layers"], MEMORY["hidden"], 0)
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, v, (GROUPS, length), generator=rng)
    completions = torch.randint(3, v, (GROUPS * GROUP_SIZE, new), generator=rng)
    if contestant == "ours":
        _update_ours(model, prompts.tolist(), completions.tolist())
    elif contestant == "plain":
        ids = torch.cat([prompts.repeat_interleave(GROUP_SIZE, 0), completions], 1)
        logits = model(input_ids=ids, logits_to_keep=new + 1, use_cache=False).logits[:, :-1]
        torch.log_softmax(logits, -1).gather(2, completions[..., None]).mean().backward()
    else:
        _update_trl(model, prompts.repeat_interleave(GROUP_SIZE, 0), completions)


def _update_ours(model, prompts: list[list[int]], completions: list[list[int]]) -> None:
    from swarm_node.config import GrpoConfig
    from swarm_node.grpo.trainer import Trainer
    from swarm_node.policy.policy import Policy
    from swarm_node.policy.starter import build_tokenizer
    from swarm_node.types import Group, Rollout, Sampling, Turn

    policy = Policy(model, build_tokenizer(["a b"] * 8), PolicyConfig())
    policy.packing = policy.split_head = True
    groups = []
    for g, prompt in enumerate(prompts):
        mine = completions[g * GROUP_SIZE : (g + 1) * GROUP_SIZE]
        rollouts = [
            Rollout([Turn(c, [0.0] * len(c), True)], rewards={"x": float(i % 2)}, reward=float(i % 2))
            for i, c in enumerate(mine)
        ]
        groups.append(Group(None, prompt, rollouts))
    Trainer(policy, GrpoConfig(answers=0), Sampling(MEMORY["new"])).step(groups)


def _update_trl(model, prompts, completions) -> None:
    import datasets
    import torch
    from trl import GRPOConfig, GRPOTrainer

    from swarm_node.policy.starter import build_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(prompts),
            num_generations=GROUP_SIZE,
            max_completion_length=MEMORY["new"],
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 8}),
            processing_class=build_tokenizer(["a b"] * 8),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        inputs = dict(
            prompt_ids=prompts,
            prompt_mask=torch.ones_like(prompts),
            completion_ids=completions,
            completion_mask=torch.ones_like(completions),
            advantages=torch.tensor([1.0, -1.0]).repeat(len(prompts) // 2),
            num_items_in_batch=torch.tensor(completions.numel()),
        )
        trainer.compute_loss(trainer.model, inputs).backward()


# --------------------------------------------------------------------- the contest

CONTESTANTS = {"ours": run_ours, "plain": run_plain, "trl": run_trl}


def child(spec: dict) -> None:
    """One contestant in this process: times and peak memory as JSON on the last line."""
    from swarm_node.cli.commands.bench_arms import Times, peak_bytes
    from swarm_node.policy.oom import keep_freed_memory

    if spec["what"] == "limit":
        print("\n" + json.dumps(limit_s(spec)))
        return
    if spec["what"] == "step":
        keep_freed_memory()  # of this package for all, since it changes the speed of the others too
        times = CONTESTANTS[spec["who"]](spec)
    else:
        times = Times()
        update_memory(spec["who"])
    found = {"times": times.step, "sampling": times.sampling, "tokens": times.tokens}
    print("\n" + json.dumps(found | {"peak_mib": peak_bytes() / 2**20}))


def run(spec: dict, threads: int) -> dict:
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-m", "benchmarks.step", "--child", json.dumps(spec)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{spec} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compete(folder: Path, size: str, policy: str, threads: int, args: argparse.Namespace) -> dict:
    """The figures of all contestants, in turn, for one policy."""
    path = str(folder / f"{size} {policy}")
    contestants = SIZES[size].contestants
    results: dict[str, list[dict]] = {who: [] for who in contestants}
    for seed in range(args.seed, args.seed + args.repeats):
        for who in contestants:
            spec = {"what": "step", "who": who, "path": path, "steps": args.steps, "seed": seed, "size": size}
            results[who].append(run(spec, threads))
    ours = [median(each["times"]) for each in results["ours"]]
    answers = SIZES[size].groups * GROUP_SIZE
    return {
        "policy": f"{size} {policy}",
        "threads": threads,
        "tokens_an_answer": median([n / answers for each in results["ours"] for n in each["tokens"]]),
        "ms": {who: quartiles([1e3 * t for each in part for t in each["times"]]) for who, part in results.items()},
        "times_ours": {
            who: quartiles([median(each["times"]) / mine for each, mine in zip(results[who], ours, strict=True)])
            for who in contestants
        },
        "sampling_ms": {
            who: quartiles([1e3 * t for each in part for t in each["sampling"]]) for who, part in results.items()
        },
        "limit_ms": {part: 1e3 * s for part, s in run({"what": "limit", "path": path, "size": size}, threads).items()},
        "peak_mib": {who: median([each["peak_mib"] for each in part]) for who, part in results.items()},
    }


COLUMNS = ["policy", "threads", "tokens an answer", "ours, ms", "plain loop", "TRL", "plain / ours", "TRL / ours"]
COLUMNS += ["peak MiB: ours / plain / TRL", ""]


def row(figures: dict) -> list[str]:
    """The row of a policy in the table: medians with quartiles."""
    measured = figures["ms"]
    ms = ["{1:.0f} ({0:.0f}-{2:.0f})".format(*measured[who]) if who in measured else "" for who in CONTESTANTS]
    ratios = [
        "{1:.1f}x ({0:.1f}-{2:.1f})".format(*figures["times_ours"][who]) if who in measured else ""
        for who in ("plain", "trl")
    ]
    peaks = " / ".join(f"{figures['peak_mib'][who]:.0f}" if who in measured else "" for who in CONTESTANTS)
    why = LEAVES if figures["policy"].endswith("trained") else ""
    tokens = f"{figures['tokens_an_answer']:.1f}"
    return [figures["policy"], str(figures["threads"]), tokens, *ms, *ratios, peaks, why]


PARTS = ["policy", "threads", "sampling, ms: ours", "TRL", "limit", "the rest: ours", "TRL", "limit"]
PARTS += ["ours / limit", "TRL / limit"]


def parts(figures: dict) -> list[str]:
    """The row of a policy in the table of a step's parts: medians."""
    limits, cells, of_limit = figures["limit_ms"], {"sampling": [], "rest": []}, []
    for who in ("ours", "trl"):
        whole, sampling = figures["ms"][who][1], figures["sampling_ms"][who][1]
        cells["sampling"].append(sampling)
        cells["rest"].append(whole - sampling)
        of_limit.append(f"{whole / sum(limits.values()):.1f}x")
    both = [f"{ms:.0f}" for part, own in cells.items() for ms in (*own, limits[part])]
    return [figures["policy"], str(figures["threads"]), *both, *of_limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.44M", "3.2M"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="0.44M and tiny, one thread, 2 steps; writes no figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.threads, args.steps, args.repeats = ["0.44M", "tiny"], [1], 2, 1
    if args.child:
        child(json.loads(args.child))
        return
    if args.make:
        make_policies(Path(args.make), args.sizes)
        return
    rows, in_parts = [], []
    with tempfile.TemporaryDirectory() as folder:
        # in a process of its own: this one stays small, and so do its children's peaks where the system adds them
        make = [sys.executable, "-m", "benchmarks.step", "--make", folder, "--sizes", *args.sizes]
        subprocess.run(make, check=True)
        for size in args.sizes:
            found = []
            for policy, threads in product(SIZES[size].policies, args.threads):
                found.append(compete(Path(folder), size, policy, threads, args))
                rows.append(row(found[-1]))
                print(rows[-1], flush=True)
                if SIZES[size].lora:
                    in_parts.append(parts(found[-1]))
            if not args.quick:
                write(f"step/{size}", {"seed": args.seed, "steps": args.steps, "repeats": args.repeats, "rows": found})
    print(table(COLUMNS, rows))
    if in_parts:
        print(table(PARTS, in_parts))
    if "0.44M" in args.sizes and not args.quick:
        memory = {who: run({"what": "memory", "who": who}, 1)["peak_mib"] for who in CONTESTANTS}
        print(table(["peak MiB at 152k vocabulary", *CONTESTANTS], [["", *(f"{m:.0f}" for m in memory.values())]]))
        write("step/update", {"update_at_152k_vocabulary_peak_mib": memory})


if __name__ == "__main__":
    main()
