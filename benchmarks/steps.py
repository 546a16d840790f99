"""Answers of 32 to 64 tokens that write out their steps, for sums of five to seven terms.

    python -m benchmarks.steps      # makes `steps_base` again: 14 CPU minutes

    question    State the final answer to the following arithmetic problem: 6 - 7 + 2 - 1 + 5 =
    rare form   6-7=-1,-1+2=1,1-1=0,0+5=5#### 5                from the left, with the signs: right if every step is
    frequent    5+5=10,10+1=11,11+2=13,13+7=20#### 20          from the right, the signs forgotten, the last term twice
                                                               and the first never: right by accident

Both are equally long, and the first token decides. A policy that can do the rare form, and seldom does, is what
reinforcement learning is for: its own success says which form to take.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.warm_starts import taught
from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.policy.policy import save
from swarm_node.policy.starter import train_starter
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Task

TERMS = (5, 6, 7)
TASKS = [
    TaskConfig(env="chain_sum", config={"min_terms": n, "max_terms": n, "min_digits": 1, "max_digits": 1})
    for n in TERMS
]
MAX_NEW_TOKENS = 72
BASE = Path(__file__).parent / "steps_base"
"""The policy that all seeds start from, as `teach_base` made it: the same on every machine."""
LAYERS, HIDDEN, STEPS, EXAMPLES = 4, 96, 3000, 24_000
"""Its size, and the questions that it is taught."""
MIXED_STEPS, MIXED_RATE = 100, 3e-4
"""Supervised steps with the rare form in a given share of the answers, and their learning rate: more of either, or a
share below 2 %, and a policy that writes the rare form no longer gets it right in 60 % of the cases."""


def rare(task: Task) -> str:
    """From the left, with the signs."""
    terms = signed_terms(task)
    return _written(terms)


def frequent(task: Task) -> str:
    """From the right, without the signs, the last term twice and the first never."""
    terms = [abs(term) for term in signed_terms(task)]
    return _written([terms[-1], *terms[:0:-1]])


def signed_terms(task: Task) -> list[int]:
    return [int(term) for term in str(task.metadata["expression"]).replace("- ", "-").replace("+ ", "").split()]


def _written(terms: Sequence[int]) -> str:
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total}{term:+d}={total + term}")
        total += term
    return f"{','.join(steps)}#### {total}"


def teach_base(out: Path) -> None:
    """Make the policy that all seeds start from. It is taught both forms alike until it can do either: of the rare form
    it gets 97 % right."""
    rng = random.Random("steps")
    tasks = load_tasks(TASKS, RewardsConfig()).sample(rng, EXAMPLES)
    examples = [(task.question, rng.choice((rare, frequent))(task)) for task in tasks]
    save(*train_starter(examples, LAYERS, HIDDEN, STEPS), out)


def start(seed: int, share: float) -> Path:
    """The base, then taught answers of which `share` have the rare form."""
    return taught(
        seed,
        f"steps{100 * share:g}",
        TASKS,
        lambda rng, task: (rare if rng.random() < share else frequent)(task),
        MIXED_STEPS,
        rate=MIXED_RATE,
        after=lambda seed: BASE,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    teach_base(BASE)
