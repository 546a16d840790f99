"""The crew benchmark: what it reads out of the sentences of terminals, and its figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import crew
from benchmarks import crew_speed as speed
from benchmarks.crew_kills import Follower, curve, final, holders_of, named, outcome, quantile, way_of
from swarm_node.pipeline.membership.roster import short
from swarm_node.pipeline.recovery.sources import tell
from swarm_protocol.crew import Source

ONE, OTHER = "12D3KooWaaaaAAAAAAAA", "12D3KooWbbbbBBBBBBBB"
B = OTHER[-8:]
KILL = {"at": 100.0, "stages": [1], "name": "t1"}


def event(at: float, text: str) -> dict[str, Any]:
    return {"time": at, "kind": "note", "text": text}


LOST = event(101.0, "stage 1 of crew home is lost (t1: closed)")
WHOLE = event(104.0, "stage 1 is back after 3.0 s, held by t0")


@pytest.mark.parametrize("way", ["live", "replica", "cohort", "mean", "copy", "snapshot", "base"])
def test_every_way_is_known_by_its_sentence(way: Any) -> None:
    source = Source(way, (ONE, OTHER), (0, 2), 3)
    assert way_of(tell(1, source, 3, 3)) == (1, way)
    assert way_of(tell(1, source, 3, 3, adapters=True)) == (1, way)


def test_other_sentences_name_no_way() -> None:
    assert way_of(f"stage 1 passes from {short(ONE)} to {short(OTHER)}") is None


def test_terminals_are_called_by_their_names() -> None:
    text = f"crew home is whole: stage 0 this node, 1 peer {short(OTHER)}, 2 …cccccccc"
    assert named(text, "t0", {B: "t1"}) == "crew home is whole: stage 0 t0, 1 t1, 2 …cccccccc"


def test_holders_are_those_of_the_lost_stages() -> None:
    whole = "crew home is whole: stage 0 t0, 1 t0, 2 t2"
    assert holders_of("crew home is whole: all stages with t0; this node waits until one is free", [1, 2]) == {"t0"}
    assert holders_of(whole, [0, 1]) == holders_of(f"{whole}; 3 updates so far", [1]) == {"t0"}
    assert holders_of("stage 1, 2 is back after 3.0 s, held by t0, t2", [1, 2]) == {"t0", "t2"}
    assert holders_of("stage 1 passed to t2", [1]) is None


def test_a_kill_is_followed_until_the_next_round() -> None:
    way = event(103.0, "stage 1 rebuilt from the replica that t0 kept; nothing is lost")
    rounds = [{"time": 99.0}, {"time": 100.5}, {"time": 103.5}, {"time": 104.6}, {"time": 106.0}]
    assert outcome(KILL, [WHOLE, way, LOST], rounds) == {
        "detected": 1.0,
        "whole": 4.0,
        "round": pytest.approx(4.6),
        "ways": {"1": "replica"},
        "by": ["t0"],
    }


def test_the_lead_may_be_lost() -> None:
    lost = event(102.0, "the leader of crew home is lost (t1: gone)")
    assert outcome(KILL, [lost], [])["detected"] == 2.0


def test_only_the_victims_loss_after_the_kill_counts() -> None:
    other = event(101.0, "stage 0 of crew home is lost (t0: closed)")
    before = [event(99.0, one["text"]) for one in (LOST, WHOLE)]
    assert outcome(KILL, [*before, other], [{"time": 101.0}])["detected"] is None
    assert outcome(KILL, [*before, LOST], [{"time": 101.5}])["whole"] is None
    assert outcome(KILL, [*before, LOST, WHOLE], [{"time": 103.0}])["round"] is None


def test_a_follower_reads_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    path.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert follower.read() == [{"round": 1}, {"round": 2}]
    assert follower.read() == []
    path.write_text('{"round": 1}\n')
    assert follower.read() == [{"round": 1}]


def test_quantiles_count_what_never_came() -> None:
    values = [float(k) for k in range(1, 20)]
    assert quantile(values, 0.5) == 10.0 and quantile(values, 0.95) == 19.0
    assert quantile([1.0, None], 0.5) == 1.0 and math.isinf(quantile([1.0, None], 0.95))


def test_curves_take_each_line_once() -> None:
    rounds = [[1.0, 1, 0.0], [2.0, 2, 1.0], [3.0, 2, 0.5], [4.0, 3, 0.25]]
    assert curve(rounds, [2.0, 4.0], 0) == [0.5, 0.375]
    assert curve(final(rounds), [2, 3], 1) == [0.25, 0.25]
    assert math.isnan(curve(rounds, [0.5], 0)[0])


def test_overhead_is_per_token() -> None:
    assert speed.ratio([[1.0, 2.0, 1.0], [3.0, 3.0, 3.0]], [[10, 10, 10], [20, 20, 20]]) == pytest.approx(1.5)


def test_the_report_says_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(crew, "FOLDER", tmp_path)
    assert crew.report(4, 60.0) == ""
    kill = KILL | {
        "at": 30.0,
        "lead": False,
        "detected": 1.0,
        "whole": 2.0,
        "round": None,
        "by": ["t0"],
        "ways": {"1": "mean"},
    }
    run = {"settings": "default", "seed": 0, "stages": 4, "every": 30.0, "skipped": 0, "survivors_restarted": 0}
    rounds = [[float(k), k, 0.5] for k in range(1, 61)]
    for killed in (True, False):
        crew.write(
            crew.kills_folder(4, 60.0) / f"{killed}.json",
            run | {"killed": killed, "kills": [kill] * killed, "rounds": rounds},
        )
    text = crew.report(4, 60.0)
    assert "| default | 1 | 1 | 0 | 0 | 1.0, 1.0, 1.0 | 2.0, 2.0, 2.0 | inf, inf, inf | 0 | 0 |" in text
    assert "| default | middle | mean | neighbour | 1 |" in text
    assert "| default | 1 | killed, by rounds | 60 | 0.500 |" in text


def test_what_is_there_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def run_one(settings: str, seed: int, stages: int, seconds: float, every: float, killed: bool) -> dict[str, Any]:
        asked.append((settings, killed))
        return {"settings": settings, "killed": killed}

    monkeypatch.setattr(crew, "FOLDER", tmp_path)
    monkeypatch.setattr(crew, "other_load", lambda: "none")
    monkeypatch.setattr(crew.kills, "run_one", run_one)
    monkeypatch.setattr(crew, "mind_signals", lambda: None)
    crew.main(["--seeds", "0", "--settings", "swap", "--no-kills"])
    crew.main(["--seeds", "0", "--settings", "swap"])
    crew.main(["--seeds", "0", "--settings", "swap"])
    assert asked == [("swap", False), ("swap", True)]
    found = json.loads((crew.kills_folder(4, 600.0) / "swap-killed-0.json").read_text())
    assert found["killed"] and found["machine"]
