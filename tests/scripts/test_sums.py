"""The questions that ship with `make demo-real` are those that its script writes."""

from __future__ import annotations

import json

from scripts.sums import rows
from swarm_node.config import load_config
from tests.support.repository import ROOT


def test_the_file_is_what_the_script_writes() -> None:
    lines = (ROOT / "examples/sums.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows()
    assert len({line for line in lines}) == 500


def test_answers_are_right_and_seeds_differ() -> None:
    for row in rows():
        a, sign, b = str(row["question"]).split()[2:5]
        assert row["answer"] == (int(a) + int(b.rstrip("?")) if sign == "+" else int(a) - int(b.rstrip("?")))
    assert rows(2) != rows()


def test_the_demo_asks_them() -> None:
    assert load_config(file=ROOT / "configs/demo-real.toml").tasks == ["examples/sums.jsonl"]
