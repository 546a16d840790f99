"""The numbers of every round, in metrics.jsonl and in further sinks; events, as sentences, in events.jsonl.

Names are TRL's where it has one (`reward reward_std frac_reward_zero_std kl entropy clip_ratio/* completions/*
grad_norm step_time num_tokens`). Others are `step round time` and `perf/generated_tok_s perf/trained_tok_s`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm_node.errors import UserError
from swarm_node.observability.jsonl import JsonLines
from swarm_node.observability.sinks import HeldOutSink, Sink, TextSink
from swarm_node.observability.thinning import EACH, WHOLE, line_rounds, plan_lines, thinned
from swarm_node.say import Warned

EVENTS_BYTES = 16 << 20
"""Most bytes of events.jsonl: a month of a talkative run. When it is full, its newer half stays."""


TEXTS_S = 60.0  # least time between two samples that sinks get


class MetricsWriter:
    """Writes one record per round; old rounds share lines (`thinning`) unless all are to be kept.

    A sink that fails is reported once and left out from then on.
    """

    def __init__(
        self, path: Path, report: Callable[[str], None], sinks: Sequence[Sink] = (), keep_all: bool = False
    ) -> None:
        self._file = JsonLines(path, report)
        self._sinks = list(sinks)
        self._thins = not keep_all
        self._next_texts = -math.inf  # when sinks may get texts again
        self._until_thinning = 0  # rounds until lines are merged again

    def truncate_after(self, round: int) -> None:
        """Drop the records after the checkpoint of `round`, which will be recorded again. Raises UserError if a line is
        not a record."""
        self._file.cut_after(lambda record: record["round"] <= round)
        if self._thins:
            self._thin()

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record, which needs `round`, to the file, and its numbers to the sinks."""
        self._file.append(record)
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self._each_sink(lambda sink: sink.write(record["round"], numbers))
        self._until_thinning -= 1
        if self._thins and self._until_thinning <= 0:
            try:
                self._thin()
            except UserError as error:  # somebody else has damaged the file: no reason to end the run
                self._thins = False
                self._file.report(Warned(f"{error}; until then, old rounds are not thinned"))

    def write_samples(self, round: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Give records of samples.jsonl to the sinks that take texts, at most every TEXTS_S: each is a file to them."""
        if time.monotonic() < self._next_texts:
            return
        self._next_texts = time.monotonic() + TEXTS_S
        self._each_sink(lambda sink: sink.write_samples(round, samples) if isinstance(sink, TextSink) else None)

    def write_held_out(self, round: int, figures: Mapping[str, float]) -> None:
        """Give figures that belong to no record to the sinks that take them: the file has a record for each round."""
        self._each_sink(lambda sink: sink.write_held_out(round, figures) if isinstance(sink, HeldOutSink) else None)

    def _thin(self) -> None:
        rounds = line_rounds(self._file.path)
        groups = plan_lines(rounds)
        if len(groups) < len(rounds):
            self._file.replace(thinned(self._file.path, groups))
        single = sum(n == 1 for n in rounds)
        self._until_thinning = max(WHOLE + EACH - single, EACH if len(groups) < len(rounds) else 1)

    def close(self) -> None:
        """Flush everything. Raises UserError if the disk had no room for the file."""
        self._each_sink(lambda sink: sink.close())
        self._file.close()

    def _each_sink(self, do: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                do(sink)
            except Exception as error:  # a dashboard's hiccup must not cost a run: any failure, on purpose
                self._sinks.remove(sink)
                self._file.report(Warned(f"{sink.name} failed and is left out from now on: {error}"))


class EventLog(JsonLines):
    """Events as sentences with their time, kept over resumptions; when the file is full, the newest ones."""

    def write(self, kind: str, text: str) -> None:
        """Append an event; `kind` is a word to filter by, such as `resume` or `stop`."""
        self.append({"time": time.time(), "kind": kind, "text": text})
        self.bound(EVENTS_BYTES)
