"""One GRPO step (sample, score, update): this package, TRL's GRPOTrainer and a plain Hugging Face loop.

    python -m benchmarks.step [--steps 12] [--repeats 3] [--seed 0]

8 tasks x 8 completions of at most 16 tokens, the small tasks' own prompts, AdamW, DAPO loss, no KL. Two policies of
each size: `trained` ones answer like the starter (about 4 tokens), `fresh` ones have random weights, so that nearly
every completion runs to its 16 tokens. Rewards alternate 0, 1, 0, 1 within each group: every group has a signal,
nothing is skipped by anyone. Each contestant runs in a process of its own, in turn; figures are the median step (CPU
time with one thread, which a busy machine disturbs least; wall time with two) and the process's peak memory. At the
end, peak memory of the update alone at a vocabulary of 152k, where logits dominate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from benchmarks.common import median, table, write

GROUPS, GROUP_SIZE, NEW, WARMUP = 8, 8, 16, 2
SIZES = {"0.44M": (128, 2), "3.2M": (256, 4)}
TEACHING_STEPS = 80
"""Supervised steps of the trained policies: enough to answer in the right form."""
MEMORY = {"vocabulary": 152_064, "hidden": 64, "layers": 2, "prompt": 32, "new": 64}
LEARNING_RATE = 1e-4


def make_policies(folder: Path) -> None:
    """Both policies of both sizes, once for all contestants."""
    from transformers import AutoTokenizer

    from swarm_node.cli.commands.starter import make_starter
    from swarm_node.policy.starter import build_model

    for size, (hidden, layers) in SIZES.items():
        print(f"teaching the {size} policy for {TEACHING_STEPS} steps", flush=True)
        trained = make_starter(folder / f"{size} trained", layers, hidden, TEACHING_STEPS, progress=False)
        tokenizer = AutoTokenizer.from_pretrained(trained)
        build_model(len(tokenizer), layers, hidden, seed=0).save_pretrained(folder / f"{size} fresh")
        tokenizer.save_pretrained(folder / f"{size} fresh")


def load(path: str, seed: int):
    """(model, tokenizer, tasks) of a contest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from swarm_node.config import RewardsConfig
    from swarm_node.tasks import load_tasks

    tasks = load_tasks(["small"], RewardsConfig()).sample(random.Random(seed), 2000)
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path), tasks


def rewards(n: int) -> list[float]:
    """0, 1, 0, 1, …"""
    return [float(i % 2) for i in range(n)]


# --------------------------------------------------------------------- contestants


def run_ours(path: str, steps: int, seed: int) -> list[float]:
    from swarm_node.config import GrpoConfig, PolicyConfig, RewardsConfig, RolloutsConfig
    from swarm_node.grpo.trainer import Trainer
    from swarm_node.policy.loading import load_policy
    from swarm_node.rollouts import collect
    from swarm_node.tasks import load_tasks
    from swarm_node.types import Sampling, Score

    tasks = load_tasks(["small"], RewardsConfig()).sample(random.Random(seed), 2000)
    rollouts = RolloutsConfig(groups=GROUPS, group_size=GROUP_SIZE, max_new_tokens=NEW)
    threads = int(os.environ["OMP_NUM_THREADS"])
    policy = load_policy(PolicyConfig(model=path, lora=False, threads=threads), rollouts, lambda text: None)
    trainer = Trainer(policy, GrpoConfig(learning_rate=LEARNING_RATE), Sampling(NEW))

    def score(tasks, prompts, completions):
        return [Score(None, {"turn": r}, r, False) for r in rewards(len(completions))]

    judge = SimpleNamespace(prompt=lambda task: task.question, score=score)

    def step(k: int) -> None:
        part = tasks[k * GROUPS : (k + 1) * GROUPS]
        trainer.step(collect(policy, lambda n: part, judge, rollouts, str(k)).groups)

    return _timed(step, steps)


def run_plain(path: str, steps: int, seed: int) -> list[float]:
    """What one writes first: `generate`, a forward pass over the same rows, the loss, AdamW."""
    import torch

    model, tokenizer, tasks = load(path, seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def step(k: int) -> None:
        part = tasks[k * GROUPS : (k + 1) * GROUPS]
        texts = [task.question.strip() + "<sep>" for task in part for _ in range(GROUP_SIZE)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        model.eval()
        with torch.no_grad():
            ids = model.generate(
                inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=NEW,
                do_sample=True,
                top_k=0,
            )
        model.train()
        completions = ids[:, inputs["input_ids"].shape[1] :]
        ended = (completions == tokenizer.eos_token_id).cumsum(1)
        mask = ((ended - (completions == tokenizer.eos_token_id).long()) == 0).float()
        tokenizer.batch_decode(completions, skip_special_tokens=True)
        grouped = torch.tensor(rewards(len(completions))).view(GROUPS, GROUP_SIZE)
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        attention = torch.cat([inputs["attention_mask"], mask.long()], 1)
        keep = completions.shape[1] + 1
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=keep, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, completions[..., None])[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        optimizer.zero_grad()
        ((loss * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return _timed(step, steps)


def run_trl(path: str, steps: int, seed: int) -> list[float]:
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer, tasks = load(path, seed)
    tokenizer.padding_side = "left"
    tokenizer.chat_template = None
    data = datasets.Dataset.from_list([{"prompt": task.question.strip() + "<sep>"} for task in tasks])
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(_now())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GROUPS * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=NEW,
            learning_rate=LEARNING_RATE,
            adam_beta2=0.95,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            max_steps=steps + WARMUP,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            temperature=1.0,
            top_k=0,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            seed=seed,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **kwargs: rewards(len(completions)),
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return [b - a for a, b in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False)]


def _now() -> float:
    return time.process_time() if os.environ["OMP_NUM_THREADS"] == "1" else time.perf_counter()


def _timed(step, steps: int) -> list[float]:
    times = []
    for k in range(WARMUP + steps):
        start = _now()
        step(k)
        times.append(_now() - start)
    return times[WARMUP:]


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
    from swarm_node.config import GrpoConfig, PolicyConfig
    from swarm_node.grpo.trainer import Trainer
    from swarm_node.policy.policy import Policy
    from swarm_node.policy.starter import build_tokenizer
    from swarm_node.types import Group, Rollout, Sampling

    policy = Policy(model, build_tokenizer(["a b"] * 8), PolicyConfig())
    policy.packing = policy.split_head = True
    groups = []
    for g, prompt in enumerate(prompts):
        mine = completions[g * GROUP_SIZE : (g + 1) * GROUP_SIZE]
        rollouts = [
            Rollout(c, [0.0] * len(c), True, rewards={"x": float(i % 2)}, reward=float(i % 2))
            for i, c in enumerate(mine)
        ]
        groups.append(Group(None, prompt, rollouts))
    Trainer(policy, GrpoConfig(), Sampling(MEMORY["new"])).step(groups)


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
    if spec["what"] == "step":
        times = CONTESTANTS[spec["who"]](spec["path"], spec["steps"], spec["seed"])
    else:
        times = []
        update_memory(spec["who"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps({"times": times, "peak_mib": peak}))


def run(spec: dict, threads: int) -> dict:
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-m", "benchmarks.step", "--child", json.dumps(spec)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{spec} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    if args.make:
        make_policies(Path(args.make))
        return
    figures, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        # in a process of its own: children inherit the peak memory that their parent had when it forked
        subprocess.run([sys.executable, "-m", "benchmarks.step", "--make", folder], check=True)
        for policy, threads in product(sorted(os.listdir(folder)), (1, 2)):
            results: dict[str, list[dict]] = {who: [] for who in CONTESTANTS}
            for seed in range(args.seed, args.seed + args.repeats):
                for who in CONTESTANTS:
                    path = str(Path(folder) / policy)
                    spec = {"what": "step", "who": who, "path": path, "steps": args.steps, "seed": seed}
                    results[who].append(run(spec, threads))
            ms = {who: 1e3 * median([t for r in part for t in r["times"]]) for who, part in results.items()}
            peak = {who: median([r["peak_mib"] for r in part]) for who, part in results.items()}
            figures.append({"policy": policy, "threads": threads, "ms": ms, "peak_mib": peak})
            ratios = [f"{ms[who] / ms['ours']:.1f}x" for who in ("trl", "plain")]
            peaks = " / ".join(f"{peak[who]:.0f}" for who in CONTESTANTS)
            rows.append([policy, threads, *(f"{ms[who]:.0f}" for who in CONTESTANTS), *ratios, peaks])
            print(rows[-1], flush=True)
    columns = ["policy", "threads", "ours, ms", "plain", "TRL", "TRL / ours", "plain / ours", "peak MiB o/p/T"]
    print(table(columns, rows))
    memory = {who: run({"what": "memory", "who": who}, 1)["peak_mib"] for who in CONTESTANTS}
    print(table(["peak MiB at 152k vocabulary", *CONTESTANTS], [["", *(f"{m:.0f}" for m in memory.values())]]))
    write("step", {"seed": args.seed, "steps": figures, "update_at_152k_vocabulary_peak_mib": memory})


if __name__ == "__main__":
    main()
