"""Train the starter model, or a bigger one, on task questions: `swarm-node starter`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

from swarm_node.config import RewardsConfig
from swarm_node.errors import UserError
from swarm_node.policy.policy import save
from swarm_node.policy.starter import HEAD_DIM, in_some_form, train_starter
from swarm_node.storage.rundir import check_new_directory, os_errors_explained
from swarm_node.tasks.taskset import load_tasks

EXAMPLES_PER_TASK = 2500


def make_starter(out: Path, layers: int, hidden: int, steps: int, seed: int = 0, progress: bool = True) -> Path:
    """Train a starter on the training questions of the small tasks, and save it in Hugging Face layout to `out`. Raises
    UserError if `out` is not empty or the sizes do not fit together."""
    if hidden % HEAD_DIM:
        raise UserError(f"--hidden must be a multiple of {HEAD_DIM}")
    check_new_directory(out)
    transformers_logging.disable_progress_bar()
    tasks = load_tasks(["small"], RewardsConfig())
    rng = random.Random(seed)
    drawn = tasks.sample(rng, EXAMPLES_PER_TASK * len(tasks.labels))
    examples = [(task.question, in_some_form(str(task.answer), rng)) for task in drawn]
    with Progress(
        TextColumn("starter policy"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        disable=not progress or not sys.stderr.isatty(),
    ) as bar:
        shown = bar.add_task("", total=steps, loss=float("nan"))
        model, tokenizer = train_starter(
            examples, layers, hidden, steps, seed, lambda k, loss: bar.update(shown, completed=k, loss=loss)
        )
    with os_errors_explained(out):
        save(model, tokenizer, out)
    return out
