"""The end of a run: the held-out table, the summary, the next commands, the JSON document, the plot."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from swarm_node.averaging.skipping import happened
from swarm_node.observability.evaluations import question_pairs
from swarm_node.observability.falling import lower_tasks
from swarm_node.observability.jsonl import each_record, last_record
from swarm_node.observability.legend import table_legend
from swarm_node.observability.plots import CAN_DRAW, no_picture, plot_reward
from swarm_node.observability.summary import INDENT, answered, figures, next_steps, summary, whereabouts
from swarm_node.observability.tally import Tally
from swarm_node.observability.worth import Worth
from swarm_node.rollouts.evaluate import rows
from swarm_node.runtime.console import Console
from swarm_node.runtime.held_out import HeldOutFigures
from swarm_node.storage.going_on import going_on
from swarm_node.storage.rundir import RunDir


@dataclass
class RunReport:
    """The report of a run that has ended."""

    run: RunDir
    tally: Tally  # of all rounds
    resumed_at: int  # round after which the last start resumed
    rounds: int  # number of rounds done
    held_out: HeldOutFigures
    worth: Worth | None = None  # what the swarm gave this node

    def __post_init__(self) -> None:
        self._plot = self.run.plots / "reward.png"
        self._before, self._now = self.held_out.figures.before, self.held_out.figures.last
        self.figures = figures(self.tally, self.resumed_at, self.held_out.compared(self.rounds), self.worth)

    def tell(self, console: Console, whole: bool, evaluates: bool) -> None:
        """Show the report in words; the other parameters are those of `next_steps`."""
        path = str(self.run.path)
        written = [self.run.metrics, self.run.events, *([self._plot] if CAN_DRAW else [])]
        files = [str(file.relative_to(self.run.path)) for file in written]
        words = [*summary(self.figures, happened), *whereabouts(path, files)] if self.figures.rounds_recorded else []
        if words:
            console.events.write("summary", "\n".join(words))
        if console.tell_as_json("\n".join(words) or "no round was made", self.document):
            return
        held = self.figures.held_out
        if self._now.table:
            columns, table = rows(self._before.table, self._now.table, self.held_out.samples, self.held_out.rewards)
            title = "held-out questions, which are never trained on"
            if self.held_out.has_own_tasks:
                known = self.held_out.also_trained
                title = "questions of eval.tasks" + (f", of which training may draw {known:,}" if known else "")
            if held is not None and held.round:
                title += f"; after = after round {held.round:,}"
            console.progress.table(title, columns, table)
            console.progress.paragraphs([table_legend(columns, self.held_out.samples)], indent=2)
            if self._before.labels == self._now.labels:
                figure, told = self.held_out.figure, self.held_out.figures.worse
                values = question_pairs(self._before, self._now, figure)
                console.progress.paragraphs(lower_tasks(*values, self.held_out.samples, figure, told), indent=2)
        if not words:
            return
        console.progress.paragraphs(answered(held), INDENT + 2)
        console.progress.paragraphs(words, INDENT)
        best = held is not None and held.best is not None and held.best[1] > max(held.main)
        for line in next_steps(path, going_on(self.run), whole, evaluates, best, self.run.samples.exists()):
            console.progress.say(line, lasting=False)
        if not CAN_DRAW:
            console.progress.say(no_picture(), lasting=False)

    @property
    def document(self) -> dict[str, Any]:
        """The report as a document; docs/fleet.md says what its keys mean."""
        document: dict[str, Any] = {
            "run_dir": str(self.run.path),
            "rounds": self.rounds,
            "reward_first_tenth": None,
            "reward_last_tenth": None,
            "held_out_before": to_builtins(self._before.table),
            "held_out_after": to_builtins(self._now.table),
        }
        return document | to_builtins(self.figures)

    def dump(self) -> None:
        """Write the report as one JSON document to standard output."""
        json.dump(self.document, sys.stdout)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def draw(self) -> None:
        """Draw the reward curve, if the extra `plots` is installed. It comes last: it takes longest, and is missed
        least if the process is ended."""
        held = self.figures.held_out
        if CAN_DRAW and last_record(self.run.metrics) is not None:
            records = each_record(self.run.metrics)
            plot_reward(records, self._plot, str(self.run.path), held.main if held else None, self.held_out.figure)
