"""What a node takes from its machine, by its own processes and files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swarm_node.observability.metrics_reference import find_metric
from swarm_node.observability.usage import SAMPLE_S, Usage, UsageSampler, bytes_below, cpus, usage_of

MIB = 2**20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def burn(seconds: float) -> None:
    """Take CPU time in this process."""
    began = psutil.Process().cpu_times()
    while sum(psutil.Process().cpu_times()[:2]) - sum(began[:2]) < seconds:
        sum(range(10_000))


def test_nothing_is_told_before_the_first_look(tmp_path: Path) -> None:
    clock = Clock()
    sampler = UsageSampler(tmp_path, clock)
    assert (sampler.now(), sampler.words(), sampler.metrics()) == (None, "", {})
    clock.now = SAMPLE_S - 0.1
    assert sampler.now() is None


def test_cpu_time_is_divided_by_the_time_that_passed(tmp_path: Path) -> None:
    clock = Clock()
    sampler = UsageSampler(tmp_path, clock)
    burn(0.3)
    clock.now = SAMPLE_S
    usage = sampler.now()
    assert usage is not None and usage.cores == cpus()
    assert 0.25 / SAMPLE_S <= usage.cpu < 2.0
    assert usage.memory >= psutil.Process().memory_info().rss / 2
    clock.now += SAMPLE_S / 2
    assert sampler.now() is usage, "it is looked at every few seconds only"


def test_children_count(tmp_path: Path) -> None:
    clock = Clock()
    script = "import sys; block = bytearray(200 << 20); print(len(block), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        sampler = UsageSampler(tmp_path, clock)
        clock.now = SAMPLE_S
        usage = sampler.now()
        child.stdin.close()
    assert usage is not None and usage.memory > psutil.Process().memory_info().rss + 150 * MIB


def test_the_run_directory_is_measured(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/state").write_bytes(bytes(3000))
    (tmp_path / "metrics.jsonl").write_bytes(bytes(500))
    os.symlink("/nowhere", tmp_path / "broken")
    clock = Clock()
    sampler = UsageSampler(tmp_path, clock)
    clock.now = SAMPLE_S
    usage = sampler.now()
    assert usage is not None and 3500 <= usage.disk < 3600
    assert bytes_below(tmp_path / "none") == 0


def test_a_checkpoint_has_it_measured_again(tmp_path: Path) -> None:
    clock, saved_at = Clock(), [math.inf]
    sampler = UsageSampler(tmp_path, clock)
    sampler.saved_s = lambda: abs(clock.now - saved_at[0])
    seen: list[int] = []
    for size, saved in ((10, math.inf), (20, math.inf), (30, 2.5 * SAMPLE_S), (40, 2.5 * SAMPLE_S)):
        (tmp_path / "state").write_bytes(bytes(size))
        clock.now, saved_at[0] = clock.now + SAMPLE_S, saved
        usage = sampler.now()
        assert usage is not None
        seen.append(usage.disk)
    assert seen == [10, 10, 30, 30]


@pytest.mark.parametrize("gpu", [0, 3 * 2**30])
def test_a_line_of_metrics_gives_the_usage_again(gpu: int) -> None:
    usage = Usage(1.04, 2.0, round(0.54 * 2**30), 10_000_000, gpu)
    line = usage.metrics()
    assert usage_of(line) == usage
    assert {name for name in line if find_metric(name) is None} == set()
    words = "1.0 of 2 cores, 0.54 GiB"
    assert usage.words() == (f"{words}, 3.00 GiB of the GPU" if gpu else words)


@pytest.mark.parametrize("line", [{}, {"machine/cpu_cores": 1.0}, {"machine/cpu_cores": None, "machine/cores": "2"}])
def test_lines_of_other_versions_have_none(line: dict[str, object]) -> None:
    assert usage_of(line) is None
