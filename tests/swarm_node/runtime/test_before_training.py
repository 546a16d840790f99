"""Held-out questions before training: a start goes on with what an earlier one asked, in the time that is left."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swarm_node.config import NodeConfig, RewardsConfig
from swarm_node.errors import StopRequested
from swarm_node.policy.loading import load_policy
from swarm_node.rollouts import Collected
from swarm_node.rollouts import evaluate as evaluating
from swarm_node.rollouts.evaluate import Evaluation, Held
from swarm_node.runtime import held_out
from swarm_node.runtime.held_out import HeldOutFigures
from swarm_node.tasks.taskset import load_tasks


def figures_of(config: NodeConfig, policy: Any, tasks: Any) -> HeldOutFigures:
    return HeldOutFigures(config, policy, tasks, print, lambda round, found: None, True)


@pytest.mark.parametrize("stops", [(1,), (2, 3), (0, 4)], ids=str)
def test_a_start_goes_on_behind_what_an_earlier_one_asked(
    stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts that are stopped after so many parts in all, and one that is not, find what a single one finds."""
    rollouts, asks = {"max_new_tokens": 8}, {"questions": 40, "samples": 2, "before_s": 1e6}
    config = NodeConfig.model_validate({"rollouts": rollouts, "eval": asks})
    policy = load_policy(config.policy, config.rollouts, lambda sentence: None)
    tasks = load_tasks(config.tasks, RewardsConfig())
    monkeypatch.setattr(evaluating, "SMALL", 0)  # eight questions at a time
    collect, parts, ends = evaluating.collect, list[int](), [*stops, 99]

    def counted(*arguments: Any, **more: Any) -> Collected:
        if len(parts) == ends[0]:
            raise StopRequested
        parts.append(more["first"])
        return collect(*arguments, **more)

    monkeypatch.setattr(evaluating, "collect", counted)
    state: dict[str, Any] = {}

    def start() -> HeldOutFigures:
        ours = figures_of(config, policy, tasks)
        ours.restore({"held_out_figures": state} if state else {"before": {}})
        return ours

    for stop in stops:
        ours = start()
        with pytest.raises(StopRequested):
            ours.measure_before()
        assert len(ours.figures.before.labels) == 8 * stop and ours.figures.asked == 0
        state = json.loads(json.dumps(msgspec.to_builtins(ours.figures)))
        ends.pop(0)
    last = start()
    found = last.measure_before()
    assert len(parts) == 5, "no question is asked twice"
    whole, state, parts = figures_of(config, policy, tasks), {}, []
    assert found == whole.measure_before() and last.figures.asked == whole.figures.asked == 40
    one, other = (msgspec.structs.asdict(each.figures.before) for each in (last, whole))
    assert one.pop("per_token_s") > 0 and other.pop("per_token_s") > 0
    assert one.pop("table") == other.pop("table")
    assert [one.pop(name) for name in ("cut", "tokens")] == pytest.approx(
        [other.pop(name) for name in ("cut", "tokens")]
    )
    assert one == other
    assert last.measure_before() == {}, "all was asked"


def test_the_time_before_training_is_for_all_starts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []
    monkeypatch.setattr(held_out, "evaluate", lambda *arguments: left.append(arguments[6]) or Evaluation())
    ours = figures_of(NodeConfig(), None, SimpleNamespace(held_out=lambda n: [None] * n))
    ours.figures.before, ours.figures.seconds = Evaluation({"all": Held(8, 0.5, 0.5)}, asked=8), 25.0
    ours.measure_before()
    assert left == [pytest.approx(5.0)] and ours.figures.before.asked == ours.figures.asked == 8
    assert ours.figures.seconds >= 25.0
