"""Curves of a run, in bounded size."""

from __future__ import annotations

import json

import pytest

from swarm_node.observability.curves import MAX_NAMES, POINTS, Curves
from tests.support.run_files import metrics


def test_few_rounds_are_shown_as_they_are() -> None:
    curves = Curves()
    curves.add([metrics(1, **{"reward/gcd": 1.0}), metrics(2, text="no number", flag=True, big=10**400)])
    points = curves.points()
    assert points["reward"] == {"mean": [0.01, 0.02]}
    assert points["reward/gcd"] == {"mean": [1.0, None]}
    assert not {"text", "flag", "big"} & points.keys()
    assert curves.points(first=1)["round"]["mean"] == [2.0]


def test_many_rounds_become_bounded_points() -> None:
    names = [f"metric/{i}" for i in range(55)]
    values = [{**metrics(round), **dict.fromkeys(names, float(round % 7))} for round in range(1, 50_001)]
    whole, parts = Curves(), Curves()
    whole.add(values)
    for start in range(0, len(values), 777):
        parts.add(values[start : start + 777])
    points = whole.points()
    assert POINTS // 2 <= whole.rows <= POINTS
    assert points == parts.points()
    per_row = whole.per_row
    assert points["round"]["mean"][:2] == [per_row, 2 * per_row]
    assert points["round"]["mean"][-1] == 50_000
    first = [value["reward"] for value in values[:per_row]]
    assert points["reward"]["mean"][0] == pytest.approx(sum(first) / per_row, rel=1e-5)
    assert (points["reward"]["least"][0], points["reward"]["most"][0]) == (first[0], first[-1])
    assert whole.total("metric/3") == sum(round % 7 for round in range(1, 50_001))
    assert len(json.dumps(points)) < 2_500_000


def test_only_so_many_metrics_are_shown() -> None:
    curves = Curves()
    curves.add([{f"x{i}": 1.0 for i in range(MAX_NAMES + 5)}])
    assert len(curves.points()) == MAX_NAMES
    assert curves.left_out == 5
