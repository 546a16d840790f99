"""The best checkpoint: kept beside the newest ones, and named by best.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swarm_node.storage.best import BEST, Best, read_best
from swarm_node.storage.checkpoints import CheckpointStore

TENSORS = {"policy": {"weight": torch.zeros(2)}}


@pytest.fixture
def store() -> CheckpointStore:
    return CheckpointStore(Path("run/checkpoints"), 2, lambda text: pytest.fail(text))


def save(store: CheckpointStore, round: int, pass_1: float | None = None) -> None:
    best = None if pass_1 is None else Best(round, pass_1, 0.5, {"questions": 8})
    store.save(round, TENSORS, {}, best)
    store.wait()


def kept() -> list[str]:
    return sorted(path.name for path in Path("run/checkpoints").iterdir())


def test_the_best_stays_until_a_better_one(store: CheckpointStore) -> None:
    for round, pass_1 in [(1, 0.25), (2, None), (3, None), (4, None)]:
        save(store, round, pass_1)
    assert kept() == ["round-00000001", "round-00000003", "round-00000004"]
    assert read_best(Path("run")) == Best(1, 0.25, 0.5, {"questions": 8}, "round-00000001")
    save(store, 5, 0.5)
    assert kept() == ["round-00000004", "round-00000005"]
    save(store, 6)
    save(store, 7)
    assert kept() == ["round-00000005", "round-00000006", "round-00000007"]


def test_a_checkpoint_outlives_an_unwritten_best_file() -> None:
    said: list[str] = []
    store = CheckpointStore(Path("run/checkpoints"), 2, said.append)
    save(store, 1, 0.25)
    save(store, 2)
    Path("run/best.tmp").mkdir()
    save(store, 3, 0.5)
    assert store.best_failed and not store.failed and kept() == [f"round-0000000{n}" for n in (1, 2, 3)]
    assert len(said) == 1 and "checkpoint of round 3 is not recorded as the best" in said[0]
    store.close()
    Path("run/best.tmp").rmdir()
    save(store, 4, 0.5)
    assert not store.best_failed and kept() == ["round-00000003", "round-00000004"]


def test_figures_of_other_questions_do_not_count(store: CheckpointStore) -> None:
    save(store, 1, 0.25)
    assert read_best(Path("run"), {"questions": 8}) is not None
    assert read_best(Path("run"), {"questions": 9}) is None


def test_a_file_of_an_earlier_version_names_no_prompt(store: CheckpointStore) -> None:
    save(store, 1, 0.25)
    assert read_best(Path("run"), {"questions": 8, "prompt": ["Short.", "{question}"]}) is not None
    assert read_best(Path("run"), {"questions": 9, "prompt": ["Short.", "{question}"]}) is None


def test_a_file_of_an_earlier_version_goes_by_pass_1(store: CheckpointStore) -> None:
    save(store, 1, 0.25)
    document = json.loads(Path("run", BEST).read_text())
    Path("run", BEST).write_text(json.dumps({k: v for k, v in document.items() if k not in ("reward", "figure")}))
    found = read_best(Path("run"))
    assert found is not None and (found.figure, found.value) == ("pass_1", 0.25)


@pytest.mark.parametrize("name", ["round-00000009", "../checkpoints/round-00000001", ".", ""])
def test_a_name_of_no_checkpoint_is_not_taken(store: CheckpointStore, name: str) -> None:
    save(store, 1, 0.25)
    text = json.loads(Path("run", BEST).read_text()) | {"checkpoint": name}
    Path("run", BEST).write_text(json.dumps(text))
    assert read_best(Path("run")) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"round": "x"}', "[" * 100_000])
def test_a_damaged_file_names_nothing(store: CheckpointStore, text: str) -> None:
    save(store, 1, 0.25)
    Path("run", BEST).write_text(text)
    assert read_best(Path("run")) is None
    save(store, 2)
    save(store, 3)
    assert kept() == ["round-00000002", "round-00000003"]
