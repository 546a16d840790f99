"""What losing stages costs in time: the CheckFree paper's figures for 500 M parameters in six stages.

    anew of neighbours   STEP_S a step, RECOVERY_S whenever stages are lost
    redundant            REDUNDANT_S a step (each stage also runs the next one's forward pass), RECOVERY_S
    checkpoint, k        STEP_S a step, SAVE_S every k steps; RECOVERY_S, and all steps since the last one again
    replica              STEP_S a step; RECOVERY_S, and one step again: neighbours hold each other's state of a step ago

A loss comes at the beginning of a step that is run, whether for the first time or again. RECOVERY_S is to get a new
machine and to move one stage to it, which all methods have to. The last three are exact: the same text gives the same
weights, so after n steps they have the loss of a run without failures, and only the time is another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

STEP_S, REDUNDANT_S, RECOVERY_S = 91.0, 151.0, 30.0
SAVE_S = 30.0
"""To get all stages, side by side, to a store: as long as to get one from it."""


def rebuilt_s(trace: Sequence[tuple[int, ...]], step_s: float = STEP_S) -> list[float]:
    """Seconds after 0, 1, ... steps, if the step itself goes on whenever stages are lost."""
    return list(accumulate((step_s + RECOVERY_S * bool(lost) for lost in trace), initial=0.0))


def checkpoint_s(
    trace: Iterable[tuple[int, ...]], steps: int, every: int, save_s: float = SAVE_S, recovery_s: float = RECOVERY_S
) -> list[float]:
    """Seconds after 0, 1, ..., `steps` steps, if the last checkpoint is gone back to whenever stages are lost; when a
    step is done again, the last time counts. `trace` is of steps as they are run; ValueError if it is too short."""
    runs, done, saved, now = iter(trace), 0, 0, 0.0
    ends = [0.0] * (steps + 1)
    while done < steps:
        lost = next(runs, None)
        if lost is None:  # a StopIteration would end whoever maps this, and nobody would know
            raise ValueError(f"the trace ends before {steps} steps are done, with a checkpoint every {every}")
        if lost:
            done, now = saved, now + recovery_s
        done, now = done + 1, now + STEP_S
        ends[done] = now
        if done % every == 0:
            saved, now = done, now + save_s
    return ends


def replica_s(trace: Sequence[tuple[int, ...]]) -> list[float]:
    """Seconds after 0, 1, ... steps, if the last step is done again whenever stages are lost."""
    return list(accumulate((STEP_S + (RECOVERY_S + STEP_S) * bool(lost) for lost in trace), initial=0.0))


def best_interval(rate: float, stages: int, save_s: float = SAVE_S) -> int:
    """Steps between checkpoints that cost least: sqrt(2 save / (step x losses a step)) (Young, 1974)."""
    return max(1, round(math.sqrt(2 * save_s / (STEP_S * (1 - (1 - rate) ** stages)))))


def at(ends: Sequence[float], step: float) -> float:
    """Seconds after `step` steps, which need not be whole."""
    whole = min(int(step), len(ends) - 2)
    return ends[whole] + (step - whole) * (ends[whole + 1] - ends[whole])


def reached(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Steps after which `curve` ([steps, loss]) is first at `target` or below, linear in between."""
    for (s0, l0), (s1, l1) in zip(curve, curve[1:], strict=False):
        if l1 <= target < l0:
            return s0 + (s1 - s0) * (l0 - target) / (l0 - l1)
    return None
