"""Who hears of a run, and how the run behaves towards the process that it is in. Loads no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_node.config.plugins import plugin_error
from swarm_node.observability.jsonl import each_record
from swarm_node.observability.summary import Figures

if TYPE_CHECKING:  # the module of the figures loads torch
    from swarm_node.observability.health import Health
    from swarm_node.rollouts.evaluate import Held


@dataclass(frozen=True)
class TrainResult:
    """A run that has ended."""

    run_dir: Path
    """The run directory, which `swarm-node eval`, `export`, `compare` and `dashboard` take."""
    rounds: int
    """Rounds done, over all starts of the run."""
    finished: bool
    """Whether all rounds are over; False after Ctrl-C, a limit of minutes, or a callback that ended the run."""
    figures: Figures
    """Reward, tokens, held-out figures, traffic: the numbers of the summary."""
    checkpoint: Path | None
    """Directory of the newest checkpoint, which has the policy; None if there is none, or a crew has its parts."""
    rounds_now: int = 0
    """Rounds that this start did; 0 if the run in the directory was complete already."""
    not_used: tuple[str, ...] = ()
    """Settings, as `key = value`, that differ from those of the run and were not used, since no round was left."""

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Each record of metrics.jsonl in turn: `round`, `reward`, `step_time` … A long run's old rounds share one."""
        return each_record(self.run_dir / "metrics.jsonl")


class Callback:
    """Hears of a run. Replace the methods that you need.

    All are called in the thread that called `train`, while the run waits. What they raise ends the run, after the
    finished rounds have been saved, and comes out of `train`.
    """

    def on_round(self, round: int, metrics: Mapping[str, Any]) -> bool | None:
        """A round ended. `round` counts from 1; `metrics` is its record in metrics.jsonl. True ends the run here."""

    def on_evaluation(self, round: int, figures: Mapping[str, Held]) -> None:
        """Held-out questions were answered after `round` rounds. `figures` has `questions`, `pass_1`, `pass_k` and
        `reward` (the mean) of each task by its label, and of all tasks under `all`. pass_1 and pass_k are in [0, 1],
        or None if no checker judges answers to these questions."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is complete; `path` is its directory."""

    def on_end(self, result: TrainResult) -> None:
        """The run ended without an error; not called after Ctrl-C before the first round."""


class Callbacks:
    """The callbacks of one run, called in their order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._each = list(callbacks)
        self.ends = False  # whether one of them ended the run

    def round(self, round: int, metrics: Mapping[str, Any]) -> None:
        for callback in self._each:
            self.ends = _called(callback.on_round, round, metrics) is True or self.ends

    def evaluation(self, round: int, figures: Mapping[str, Held]) -> None:
        """Pass on an evaluation, unless it is empty."""
        for callback in self._each if figures else ():
            _called(callback.on_evaluation, round, figures)

    def checkpoints(self, written: deque[Path]) -> None:
        """Pass on the checkpoints in `written` that newer ones have not displaced yet, and empty it."""
        while written:
            path = written.popleft()
            for callback in self._each if path.is_dir() else ():
                _called(callback.on_checkpoint, path)

    def end(self, result: TrainResult) -> TrainResult:
        for callback in self._each:
            _called(callback.on_end, result)
        return result


def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """What a callback's method returns. Raises PluginError if it fails."""
    try:
        return method(*arguments)
    except Exception as error:  # the user's code may raise anything
        raise plugin_error(f"callback {getattr(method, '__qualname__', 'method')} failed", error) from error


@dataclass(frozen=True)
class Manner:
    """How a run behaves towards the process that it is in."""

    json_output: bool = False  # standard output is for the final JSON document alone
    embedded: bool = False  # the process belongs to another program: never end it, and hear no signal but Ctrl-C
    quiet: bool = False  # show nothing
    callbacks: Sequence[Callback] = ()
    health: Health | None = None  # what answers at the node's port already; None = the run opens it
