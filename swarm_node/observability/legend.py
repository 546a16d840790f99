"""What the words of the screen mean, where they first appear: lines of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence


def running_legend(held_out: bool, member: bool, own_tasks: bool = False) -> list[str]:
    """Lines about the live lines of a run. `held_out`: it measures held-out figures; `own_tasks`: of `eval.tasks`."""
    words = [f"held-out = on questions {'of eval.tasks' if own_tasks else 'never trained on'}"] if held_out else []
    words += ["group = a question with its answers"] if member else []
    reward = "reward = mean score of its answers; from round 20 on, in the first -> last tenth"
    return [reward, *(["; ".join(words)] if words else [])]


def table_legend(columns: Sequence[str], samples: int) -> str:
    """A line about the columns of a table of held-out figures, each with `samples` answers to a question."""
    meanings = {
        f"pass@{samples}": f"share of questions with a right answer among {samples}",
        "pass@1": "share of right answers",
        "reward": "mean score",
    }
    there = [name for name in ("pass@1", *meanings) if any(name in column.split() for column in columns)]
    return "; ".join(f"{name} = {meanings[name]}" for name in dict.fromkeys(there))
