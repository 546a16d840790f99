"""Parquet files that ask for more memory than a file of questions needs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm_node.errors import UserError
from swarm_node.tasks import parquet
from swarm_node.tasks.files import QuestionFile
from tests.support.repository import PYTHONPATH

pa = pytest.importorskip("pyarrow")
MIB = 2**20
LIMIT = 48 * MIB
READ = """
import resource, sys
from swarm_node.errors import UserError
from swarm_node.tasks import parquet
parquet.MAX_BYTES = int(sys.argv[1])
for path in sys.argv[2:]:
    try:
        print(len(parquet.read_parquet(path, open(path, "rb").read())[1]))
    except UserError as error:
        print(error)
    print(*(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


def write(path: Path, **columns: Any) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table(columns), path, compression="zstd", row_group_size=2**20)


def hostile(folder: Path) -> Iterator[str]:
    """Short files whose rows take some hundred MiB."""
    often = pa.array([0] * 500, pa.int32())
    of_dictionary = pa.DictionaryArray.from_arrays(often, pa.array(["b" * MIB]))
    length = 6_000_000
    columns: dict[str, dict[str, Any]] = {
        "page": {"question": ["a" * 100 * MIB]},  # of one page that is a short compressed one
        "repeated": {"question": ["b" * MIB] * 500},  # of one entry of a dictionary
        "dictionary": {"question": of_dictionary},  # which the schema calls one, so that its rows are short in Arrow
        "list": {"question": pa.ListArray.from_arrays(pa.array([0, length], pa.int32()), pa.nulls(length))},
        "rows": {"question": pa.nulls(2_000_000)},
        "wide": {f"c{number}": pa.nulls(2000) for number in range(1000)},
        "name": {"n" * (MIB // 4): pa.nulls(2000)},  # which stands once here, and in each row
    }
    for name, each in columns.items():
        write(folder / f"{name}.parquet", **each)
        yield f"{name}.parquet"


def read(folder: Path, *names: str) -> list[str]:
    """What a process of its own says of the files, and of the most KiB that it and its children had until then."""
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", READ, str(LIMIT), *names], cwd=folder, env=env, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_no_short_file_takes_more_memory_than_the_limit(tmp_path: Path) -> None:
    write(tmp_path / "good.parquet", question=["1+1?"] * 100, answer=["2"] * 100)
    names = list(hostile(tmp_path))
    assert all((tmp_path / name).stat().st_size < 2 * MIB for name in names)
    before, after = read(tmp_path, "good.parquet"), read(tmp_path, *names)
    assert before[0] == "100"
    for name, said in zip(names, after[::2], strict=True):
        assert said.startswith(f"task file {name} is damaged, or its rows take more than"), said
    (own, child), (own_after, child_after) = (list(map(int, lines[-1].split())) for lines in (before, after))
    assert (child_after - child) * 1024 < LIMIT + 32 * MIB, "the rest is of libraries, which are mapped before"
    assert (own_after - own) * 1024 < 2 * LIMIT


def test_a_file_that_ends_its_reader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "isolated", lambda *arguments: [sys.executable, "-c", "import os; os.abort()"])
    (tmp_path / "q.parquet").write_bytes(parquet_of_a_row(tmp_path))
    with pytest.raises(UserError, match=r"q.parquet is damaged, or its rows take more than 2 GiB of memory: write"):
        QuestionFile(str(tmp_path / "q.parquet"))


def test_a_time_zone_of_no_place_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = pa.array([1], pa.timestamp("ns", "Nowhere/At_all"))
    write(tmp_path / "q.parquet", question=["1+1?"], answer=["2"], asked=times)
    with pytest.raises(UserError, match=r"q.parquet is no Parquet that can be read: .*Nowhere/At_all"):
        QuestionFile(str(tmp_path / "q.parquet"))
    assert "Traceback" not in capfd.readouterr().err


def parquet_of_a_row(folder: Path) -> bytes:
    write(folder / "x", question=["1+1?"], answer=["2"])
    return (folder / "x").read_bytes()


def test_the_limit_is_the_child_s_alone(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    (tmp_path / "q.parquet").write_bytes(parquet_of_a_row(tmp_path))
    task = QuestionFile(str(tmp_path / "q.parquet")).task(0)
    assert task is not None and (task.question, task.answer) == ("1+1?", "2")
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
