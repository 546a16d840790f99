"""The numbers of every round, in metrics.jsonl always and in further sinks by choice; events in sentences.

Names are TRL's where it has one (`reward reward_std frac_reward_zero_std kl entropy clip_ratio/*
completions/* grad_norm step_time num_tokens`), besides `step round time` and
`perf/generated_tok_s perf/trained_tok_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm_node.observability.jsonl import JsonLines, read_jsonl
from swarm_node.observability.sinks import Sink

read_metrics = read_jsonl


class MetricsWriter:
    """One record a round. A further sink that fails is reported once and left out from then on."""

    def __init__(self, path: Path, report: Callable[[str], None], sinks: Sequence[Sink] = ()) -> None:
        self._file = JsonLines(path, report)
        self._report = report
        self._sinks = list(sinks)

    def truncate_after(self, round: int) -> None:
        """On resuming: drop what was recorded after the snapshot of `round`: it will be recorded again."""
        self._file.keep_while(lambda record: record["round"] <= round)

    def write(self, record: Mapping[str, Any]) -> None:
        """`record` needs `round`; numbers only go to the further sinks, everything to the file."""
        self._file.append(record)
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self._each_sink(lambda sink: sink.write(record["round"], numbers))

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
                self._report(f"{sink.name} failed and is left out from now on: {error}")


class EventLog:
    """What happened, when, in sentences: one record an event, kept over resumptions."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._file = JsonLines(path, report)

    def write(self, kind: str, text: str, **details: Any) -> None:
        """`kind` is a word to filter by, for example `snapshot` or `signal`."""
        self._file.append({"time": time.time(), "kind": kind, "text": text, **details})

    def close(self) -> None:
        self._file.close()
