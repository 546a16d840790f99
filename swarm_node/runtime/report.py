"""The end of a run: the held-out table, the summary, the next commands, the JSON document, the plot."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from swarm_node.observability.jsonl import each_record, last_record
from swarm_node.observability.plots import plot_reward
from swarm_node.observability.summary import INDENT, HeldOut, figures, interval, next_steps, summary, whereabouts
from swarm_node.observability.tally import Tally
from swarm_node.observability.worth import Worth
from swarm_node.rollouts.evaluate import Evaluation, rows
from swarm_node.runtime.console import Console
from swarm_node.storage.rundir import RunDir


@dataclass
class RunReport:
    """The report of a run that has ended."""

    run: RunDir
    tally: Tally  # of all rounds
    resumed_at: int  # round after which the last start resumed
    before: Evaluation
    after: Evaluation
    samples: int  # answers to each held-out question
    worth: Worth | None = None  # what the swarm gave this node

    def __post_init__(self) -> None:
        self._plot = self.run.plots / "reward.png"
        held_out = compared(self.before, self.after, self.samples)
        self.figures = figures(self.tally, self.resumed_at, held_out, self.worth)

    def tell(self, console: Console, whole: bool, evaluates: bool, rounds: int | None = None) -> None:
        """Show the report in words; the other parameters are those of `next_steps`."""
        path = str(self.run.path)
        if self.before.table and self.after.table:
            columns, table = rows(self.before.table, self.after.table, self.samples)
            console.progress.table("held-out questions", columns, table)
        if not self.figures.rounds_recorded:
            return
        files = [file.relative_to(self.run.path) for file in (self.run.metrics, self.run.events, self._plot)]
        words = [*summary(self.figures), *whereabouts(path, list(map(str, files)))]
        console.progress.paragraphs(words, INDENT)
        for line in next_steps(path, whole, evaluates, rounds):
            console.progress.say(line, lasting=False)
        console.events.write("summary", "; ".join(" ".join(line.split()) for line in words))

    def dump(self, rounds: int) -> None:
        """Write the report as one JSON document to standard output; `rounds` is the number of rounds done."""
        document: dict[str, Any] = {
            "run_dir": str(self.run.path),
            "rounds": rounds,
            "reward_first_tenth": None,
            "reward_last_tenth": None,
            "held_out_before": to_builtins(self.before.table),
            "held_out_after": to_builtins(self.after.table),
        }
        json.dump(document | to_builtins(self.figures), sys.stdout)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def draw(self) -> None:
        """Draw the reward curve. It comes last: it takes longest, and is missed least if the process is ended."""
        held = self.figures.held_out
        if last_record(self.run.metrics) is not None:
            records = each_record(self.run.metrics)
            plot_reward(records, self._plot, str(self.run.path), held.pass_1 if held else None)


def compared(before: Evaluation, after: Evaluation, samples: int) -> HeldOut | None:
    """Held-out figures over all tasks, if they exist for before and after training."""
    if "all" not in before.table or "all" not in after.table:
        return None
    old, new = before.table["all"], after.table["all"]
    return HeldOut(
        questions=new.questions,
        samples=samples,
        pass_1=(old.pass_1, new.pass_1),
        pass_k=(old.pass_k, new.pass_k),
        interval=interval(before.by_question, after.by_question),
    )
