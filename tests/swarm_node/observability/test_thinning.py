"""metrics.jsonl of long runs: bounded, true to the curve, and whole at any moment."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from swarm_node.observability.curves import Curves
from swarm_node.observability.dashboard.tail import Tail
from swarm_node.observability.jsonl import each_record, last_record
from swarm_node.observability.metrics import EventLog, MetricsWriter
from swarm_node.observability.metrics_reference import COUNTERS, LAST_VALUE, METRICS
from swarm_node.observability.thinning import EACH, LEVEL, WHOLE, merged_record, plan_lines, rounds_of
from tests.support.run_files import read_jsonl, tallied

LONG = 20_000


def record(round: int) -> dict[str, Any]:
    reward = random.Random(round).random() + round / LONG
    return {"round": round, "reward": round_6(reward), "step_time": 0.5, "swarm/groups_sent": float(4 * round)}


def round_6(value: float) -> float:
    """As the file has it."""
    return float(f"{value:.6g}")


def write(path: Path, first: int, last: int, **options: Any) -> None:
    writer = MetricsWriter(path, print, **options)
    writer.truncate_after(first - 1)
    for number in range(first, last + 1):
        writer.write(record(number))
    writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run of LONG rounds, in two starts."""
    path = tmp_path_factory.mktemp("long") / "metrics.jsonl"
    write(path, 1, LONG - 3000)
    write(path, LONG - 2999, LONG)
    return path


def test_the_newest_rounds_stay_whole(long: Path) -> None:
    lines = read_jsonl(long)
    assert lines[-WHOLE:] == [record(number) for number in range(LONG - WHOLE + 1, LONG + 1)]
    rounds = [rounds_of(line) for line in lines]
    assert rounds == sorted(rounds, reverse=True) and sum(rounds) == LONG and rounds[0] <= LONG / 190
    assert len(lines) < WHOLE + EACH + LEVEL * (LONG // WHOLE).bit_length()


def test_no_line_stands_for_many_rounds() -> None:
    rounds: list[int] = []
    for _ in range(300):
        rounds += [1] * (EACH if rounds else WHOLE + EACH)
        lines = iter(rounds)
        rounds = [sum(next(lines) for _ in range(n)) for n in plan_lines(rounds)]
        assert sum(rounds) >= 190 * rounds[0] or rounds[0] == 1


def test_few_or_requested_rounds_stay_whole(path: Path) -> None:
    write(path, 1, WHOLE + EACH - 1)
    assert not any("rounds" in line for line in read_jsonl(path))
    path.unlink()
    write(path, 1, 4 * EACH, keep_all=True)
    assert read_jsonl(path) == [record(number) for number in range(1, 4 * EACH + 1)]


def test_curve_and_totals_survive(long: Path) -> None:
    whole, thinned = Curves(), Curves()
    whole.add([record(number) for number in range(1, LONG + 1)])
    thinned.add(read_jsonl(long))
    assert whole.rounds == thinned.rounds and 190 < thinned.rows
    n, old, new = thinned.per_row // whole.per_row, whole.points(), thinned.points()
    rewards = [old["reward"]["mean"][i : i + n] for i in range(0, whole.rows, n)]
    assert new["reward"]["mean"] == pytest.approx([fmean(values) for values in rewards], rel=1e-4)
    assert new["round"]["mean"] == [*old["round"]["mean"][n - 1 :: n], float(LONG)][: thinned.rows]
    old, new = tallied(map(record, range(1, LONG + 1))), tallied(each_record(long))
    assert (new.rounds, new.seconds, new.totals) == (LONG, LONG / 2, old.totals)
    for k in (LONG // 10, LONG // 3):
        assert new.rewards.first(k)[0] == pytest.approx(old.rewards.first(k)[0], rel=1e-3)
        assert new.rewards.last(k)[0] == pytest.approx(old.rewards.last(k)[0], rel=1e-3)


@pytest.mark.parametrize("last", [LONG - 10, LONG - WHOLE - 1, 7001, 1, 0])
def test_a_resumed_run_drops_what_came_after(long: Path, path: Path, last: int) -> None:
    path.write_bytes(long.read_bytes())
    before = [line for line in read_jsonl(path) if line["round"] <= last]
    write(path, last + 1, last + 3)
    lines = read_jsonl(path)
    assert lines == [*before, *(record(last + number) for number in (1, 2, 3))]


def test_a_thinned_line_has_means_and_last_totals() -> None:
    first = {"round": 1, "loss": 1.0, "kl": None, "time": 5.0, "swarm/rejected/age": 1.0, "reward/gcd": 0.5}
    second = {"round": 4, "rounds": 3, "loss": 3.0, "kl": 2.0, "time": 9.0, "swarm/rejected/age": 7.0}
    expected = {"round": 4, "rounds": 4, "loss": 2.5, "kl": 2.0, "time": 9.0, "swarm/rejected/age": 7.0}
    assert merged_record([first, second]) == expected | {"reward/gcd": 0.5}
    assert LAST_VALUE - COUNTERS <= {name for names in METRICS.values() for name in names}


def test_an_old_long_file_is_thinned_at_once() -> None:
    groups = plan_lines([1] * 1_000_000)
    assert sum(groups) == 1_000_000 and len(groups) < WHOLE + EACH + 12 * LEVEL
    assert groups[-WHOLE:] == [1] * WHOLE
    kept = [sum(groups[: i + 1]) - sum(groups[:i]) for i in range(len(groups))]
    assert plan_lines(kept) == [1] * len(kept), "what is thinned stays as it is"


def test_readers_that_follow_notice_a_thinning(path: Path) -> None:
    tail, curves, voids = Tail(path), Curves(), 0
    writer = MetricsWriter(path, print)
    for number in range(1, WHOLE + 3 * EACH + 101):
        writer.write(record(number))
        if number % 100 == 0:
            void, records = tail.read()
            voids += void
            if void:
                curves = Curves()
            curves.add(records)
            assert curves.rounds == number and last_record(path) == record(number)
    writer.close()
    assert voids == 3


KILLED = """
import os, signal, sys
from pathlib import Path
from statistics import fmean
from swarm_node.observability import jsonl
from swarm_node.observability.metrics import MetricsWriter
writer = MetricsWriter(Path(sys.argv[1]), print)
writer.truncate_after(int(sys.argv[2]))
real = os.fsync if sys.argv[3] == "before" else os.close
def die(descriptor):
    real(descriptor)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(jsonl.os, "fsync" if sys.argv[3] == "before" else "close", die)
writer.write({"round": int(sys.argv[2]) + 1, "reward": 0.5})
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_within_a_thinning_nothing_is_lost(path: Path, moment: str) -> None:
    last = WHOLE + EACH - 1
    write(path, 1, last)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), str(last), moment])
    assert killed.returncode == -signal.SIGKILL
    temporary = path.with_suffix(".tmp")
    assert temporary.exists() == (moment == "before")
    lines = read_jsonl(path)
    assert sum(map(rounds_of, lines)) == lines[-1]["round"] == last + 1
    assert ("rounds" in lines[0]) == (moment == "after")
    write(path, last + 1, last + 2)
    assert not temporary.exists()
    lines = read_jsonl(path)
    assert sum(map(rounds_of, lines)) == last + 2 and lines[-WHOLE:] == [
        record(number) for number in range(last + 3 - WHOLE, last + 3)
    ]


def test_a_full_disk_postpones_thinning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writer = MetricsWriter(path, said.append)
    for number in range(1, WHOLE + EACH):
        writer.write(record(number))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        writer.write(record(WHOLE + EACH))
    assert len(said) == 1 and "disk full" in said[0] and not path.with_suffix(".tmp").exists()
    assert read_jsonl(path) == [record(number) for number in range(1, WHOLE + EACH + 1)]
    last = WHOLE + 2 * EACH
    for number in range(WHOLE + EACH + 1, last + 1):
        writer.write(record(number))
    writer.close()
    lines = read_jsonl(path)
    assert sum(map(rounds_of, lines)) == last and len(lines) < WHOLE + EACH and len(said) == 1


def test_a_damaged_line_ends_no_run(path: Path) -> None:
    said: list[str] = []
    writer = MetricsWriter(path, said.append)
    writer.write(record(1))
    with open(path, "a") as file:
        file.write("broken\n")
    for number in range(2, WHOLE + 2 * EACH):
        writer.write(record(number))
    writer.close()
    assert said == [f"line 2 of {path} is not a record: delete that line; until then, old rounds are not thinned"]


def test_files_removed_meanwhile_do_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.observability.metrics.EVENTS_BYTES", 1000)
    said: list[str] = []
    log, writer = EventLog(tmp_path / "events.jsonl", said.append), MetricsWriter(tmp_path / "m.jsonl", said.append)
    writer.write(record(1))
    for path in tmp_path.iterdir():
        path.unlink()
    for number in range(2, WHOLE + 2 * EACH):
        writer.write(record(number))
        log.write("note", f"event {number}")
    log.close()
    writer.close()
    assert len(said) == 2 and all("No such file" in sentence for sentence in said)


def test_of_many_events_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.observability.metrics.EVENTS_BYTES", 10_000)
    log = EventLog(tmp_path / "events.jsonl", print)
    for number in range(1000):
        log.write("note", f"event {number}")
        assert (tmp_path / "events.jsonl").stat().st_size <= 10_000
    log.close()
    texts = [event["text"] for event in read_jsonl(tmp_path / "events.jsonl")]
    assert len(texts) > 50 and texts == [f"event {number}" for number in range(1000 - len(texts), 1000)]
