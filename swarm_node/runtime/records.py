"""The records of a run's rounds: metrics and samples of answers, in their files and in further sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from swarm_node.config import NodeConfig
from swarm_node.observability.metrics import MetricsWriter
from swarm_node.observability.samples import SampleLog
from swarm_node.observability.sinks import Sink, open_sinks
from swarm_node.runtime.console import say
from swarm_node.storage.rundir import RunDir
from swarm_node.types import Group


class RunRecords:
    """Writes metrics.jsonl, samples.jsonl and the sinks of one run, until the stack is closed."""

    def __init__(
        self,
        config: NodeConfig,
        run: RunDir,
        done: int,
        health: Sink,
        stack: ExitStack,
        prompt_text: Callable[[list[int]], str],
    ) -> None:
        """`done`: rounds done in earlier starts; records of later ones are dropped. `prompt_text` decodes a prompt.
        Raises UserError."""
        shown = config.model_dump(mode="json", exclude={"pipeline": {"crew"}})  # the crew's name is its password
        sinks = [*open_sinks(config.log, run.path, shown, done + 1), health]
        self._metrics = MetricsWriter(run.metrics, say, sinks, keep_all=config.metrics.keep == "all")
        stack.callback(self._metrics.close)
        self._metrics.truncate_after(done)
        self._samples = SampleLog(run.samples, config.metrics, say, prompt_text)
        stack.callback(self._samples.close)
        self._samples.truncate_after(done)

    def sample(self, round: int, own: Sequence[Group], trained: Sequence[Group]) -> None:
        """Record some groups, if a round of samples is due; see `SampleLog.write`."""
        if self._samples.due(round):
            self._metrics.write_samples(round, self._samples.write(round, own, trained))

    def evaluated(self, round: int, figures: Mapping[str, float]) -> None:
        """Give held-out figures from before or after training to the sinks that take them."""
        if figures:
            self._metrics.write_held_out(round, figures)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the metrics of a round."""
        self._metrics.write(record)
