"""Answers of 32 to 64 tokens that write out their steps, for sums of five to seven terms.

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

from benchmarks.warm_starts import cached, taught
from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.policy.policy import save
from swarm_node.policy.starter import train_starter
from swarm_node.tasks import load_tasks
from swarm_node.types import Task

TERMS = (5, 6, 7)
TASKS = [
    TaskConfig(env="chain_sum", config={"min_terms": n, "max_terms": n, "min_digits": 1, "max_digits": 1})
    for n in TERMS
]
MAX_NEW_TOKENS = 72
EXAMPLES = 24_000
"""Questions that the base is taught, in both forms alike."""
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


def base(layers: int, hidden: int, steps: int) -> Path:
    """A policy taught both forms alike until it can do either: of the rare form it gets 97 % right. One for all seeds:
    teaching it takes 19 CPU minutes."""

    def make(out: Path) -> None:
        rng = random.Random("steps")
        tasks = load_tasks(TASKS, RewardsConfig()).sample(rng, EXAMPLES)
        examples = [(task.question, rng.choice((rare, frequent))(task)) for task in tasks]
        save(*train_starter(examples, layers, hidden, steps), out)

    return cached(f"steps-{layers}x{hidden}-{steps}", make)


def start(seed: int, share: float, layers: int = 4, hidden: int = 96, steps: int = 3000) -> Path:
    """`base`, then taught answers of which `share` have the rare form."""
    return taught(
        seed,
        f"steps{100 * share:g}-{layers}x{hidden}-{steps}",
        TASKS,
        lambda rng, task: (rare if rng.random() < share else frequent)(task),
        MIXED_STEPS,
        rate=MIXED_RATE,
        after=lambda seed: base(layers, hidden, steps),
    )
