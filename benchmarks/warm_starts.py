"""Policies that the benchmarks start from: starters taught a little more, one for each seed, kept in `.cache`.

    starter(seed) -> further(examples) -> model directory

A seed decides everything: the starter's weights and examples, the examples taught after it, their order.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from swarm_node.cli.commands.starter import EXAMPLES_PER_TASK
from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.policy.policy import save
from swarm_node.policy.starter import EOS, SEP, in_some_form, train_starter
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Task

CACHE = Path(__file__).parent / ".cache"
BATCH = 64
WARMUP = 10


def shipped(seed: int, layers: int = 2, hidden: int = 128) -> Path:
    """A starter like the one that ships with the package, from other seeds: it writes tags in 10 % of its answers."""
    return cached(f"shipped-{layers}x{hidden}-{seed}", lambda out: _starter(out, seed, in_some_form, layers, hidden))


def plain(seed: int, steps: int = 500, layers: int = 2, hidden: int = 128) -> Path:
    """The same, taught bare answers only."""
    name = f"starter-{layers}x{hidden}-{steps}-{seed}"
    return cached(name, lambda out: _starter(out, seed, lambda answer, rng: answer, layers, hidden, steps))


def _starter(
    out: Path,
    seed: int,
    written: Callable[[str, random.Random], str],
    layers: int = 2,
    hidden: int = 128,
    steps: int = 500,
) -> None:
    tasks, rng = load_tasks(["small"], RewardsConfig()), random.Random(f"starter/{seed}")
    drawn = tasks.sample(rng, EXAMPLES_PER_TASK * len(tasks.labels))
    examples = [(task.question, written(str(task.answer), rng)) for task in drawn]
    save(*train_starter(examples, layers, hidden, steps, seed), out)


Answer = Callable[[random.Random, Task], str]
"""What is taught as the answer to a task."""


def taught(
    seed: int,
    name: str,
    tasks: Sequence[str | TaskConfig],
    answer: Answer,
    steps_taught: int = 80,
    after: Callable[[int], Path] | None = None,
    rate: float = 1e-3,
    **start: int,
) -> Path:
    """`plain`, or what `after` makes of a seed, after `steps_taught` supervised steps on `tasks`, whose targets
    `answer` makes; `name` tells recipes apart."""

    def make(out: Path) -> None:
        folder = plain(seed, **start) if after is None else after(seed)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        rng = random.Random(f"{name}/{seed}")
        drawn = load_tasks(list(tasks), RewardsConfig()).sample(rng, EXAMPLES_PER_TASK * len(tasks))
        teach(model, tokenizer, [(task.question, answer(rng, task)) for task in drawn], steps_taught, rate, rng)
        save(model, tokenizer, out)

    return cached("-".join([name, *map(str, start.values()), str(seed)]), make)


def now_and_then(share: float, before: str, after: str = "") -> Answer:
    """The right answer, in `share` of the cases with `before` and `after` around it."""
    return lambda rng, task: f"{before}{task.answer}{after}" if rng.random() < share else str(task.answer)


def teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[tuple[str, str]],
    steps: int,
    rate: float,
    rng: random.Random,
) -> None:
    """Supervised steps on (question, answer) pairs: AdamW, cross-entropy on the answers, linear decay to 5 %."""
    rows = [(tokenizer(q.strip() + SEP)["input_ids"], tokenizer(a + EOS)["input_ids"]) for q, a in examples]
    rows.sort(key=lambda row: ((len(row[0]) + len(row[1])) // 8, rng.random()))
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    for step, batch in enumerate(rng.sample(batches * math.ceil(steps / len(batches)), steps)):
        width = max(len(p) + len(a) for p, a in batch)
        ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in batch])
        labels = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in batch])
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARMUP) * max(0.05, 1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The directory of that name, made whole or not at all; another process may make it at the same time."""
    folder = CACHE / name
    if not folder.exists():
        torch.set_num_threads(1)
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{name}.") as parent:
            half = Path(parent) / name
            half.mkdir()
            make(half)
            if not folder.exists():
                half.rename(folder)
    return folder
