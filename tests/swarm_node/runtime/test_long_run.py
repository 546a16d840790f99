"""A run of 300,000 rounds starts, is looked at and ends as cheaply as one of 3,000."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm_node.cli.commands.status import show_status
from swarm_node.config import NetworkConfig, NodeConfig
from swarm_node.observability.dashboard.gallery import Gallery, Told, news
from swarm_node.observability.metrics import MetricsWriter
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.rundir import RunDir
from tests.support.starting import train_locally

FEW, MANY = 3000, 300_000
READINGS = 8
"""Of metrics.jsonl, at most, by anything that looks at a run. What is read bounds what is held in memory."""
ALL_LINES_BYTES = MANY * 60
"""Of metrics.jsonl if nothing in it were thinned: a line takes more than that."""
SETTINGS: dict[str, Any] = {
    "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
    "eval": {"questions": 0},
    "price_per_hour": 1.0,
}


def start(path: Path, rounds: int, **settings: Any) -> None:
    config = NodeConfig.model_validate(SETTINGS | {"run_dir": str(path), "rounds": rounds} | settings)
    assert train_locally(config, json_output=True) == 0


def lines(rounds: int) -> Iterator[str]:
    rng = random.Random(0)
    for n in range(1, rounds + 1):
        yield f'{{"round": {n}, "reward": {rng.random():.3f}, "cost/spent": {n / 100}, "cost/groups": {n}}}\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs of FEW and of MANY rounds, of which two starts were made."""
    folder = tmp_path_factory.mktemp("runs")
    start(folder / "begun", 1)
    paths = {}
    for rounds in (FEW, MANY):
        path = paths[rounds] = folder / f"rounds-{rounds}"
        shutil.copytree(folder / "begun", path)
        run = RunDir(path)
        with open(run.metrics, "w") as file:
            file.writelines(lines(rounds))
        MetricsWriter(run.metrics, print).truncate_after(rounds)
        store = CheckpointStore(run.checkpoints, 2, print)
        checkpoint = store.load_latest(lambda state: None)
        assert checkpoint is not None
        store.save(rounds, checkpoint.tensors, checkpoint.state | {"tally": None, "cost": None})
        store.close()
        start(path, rounds + 1)  # the figures that its checkpoint lacks are in the next one
    return paths


@pytest.fixture
def runs(made: dict[int, Path], tmp_path: Path) -> dict[int, Path]:
    """Copies, which a test may go on with."""
    return {rounds: shutil.copytree(path, tmp_path / path.name) for rounds, path in made.items()}


def test_all_rounds_are_kept_only_on_request(runs: dict[int, Path]) -> None:
    run = RunDir(runs[MANY])
    newest = list(lines(MANY + 1))[-4000:]
    run.metrics.write_text("".join(newest))
    start(run.path, MANY + 2, metrics={"keep": "all"})
    kept = run.metrics.read_text()
    assert kept.startswith("".join(newest)) and kept.count("\n") == 4001
    start(run.path, MANY + 3)
    assert run.metrics.read_text().count("\n") < 3500


def bytes_read() -> int:
    """By this process so far, whatever it read from."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def resume_and_end(path: Path) -> None:
    rounds = json.loads(Path(path, "metrics.jsonl").read_bytes().splitlines()[-1])["round"]
    start(path, rounds + 1)


def ask_status(path: Path) -> None:
    show_status(str(path), NetworkConfig(), False)


def open_dashboard(path: Path) -> None:
    told = dict(news(Gallery([path]), [path.name], Told()))
    assert told["curves"]["rounds"] >= int(path.name.split("-")[1])


@pytest.mark.parametrize("use", [resume_and_end, ask_status, open_dashboard])
def test_a_long_run_costs_no_more(runs: dict[int, Path], use: Callable[[Path], None]) -> None:
    use(runs[FEW])  # what is loaded once
    cost = {}
    for rounds, path in runs.items():
        before = bytes_read()
        use(path)
        cost[rounds] = bytes_read() - before
    more_of_the_file = RunDir(runs[MANY]).metrics.stat().st_size - RunDir(runs[FEW]).metrics.stat().st_size
    assert cost[MANY] - cost[FEW] < READINGS * more_of_the_file < ALL_LINES_BYTES / 4, cost


def test_the_summary_is_of_all_rounds(runs: dict[int, Path], capsys: pytest.CaptureFixture[str]) -> None:
    rewards = [json.loads(line)["reward"] for line in lines(MANY)]
    resume_and_end(runs[MANY])
    document = json.loads(capsys.readouterr().out)
    assert document["rounds_recorded"] == document["rounds"] > MANY
    tenth = MANY // 10
    assert document["reward_first_tenth"] == pytest.approx(sum(rewards[:tenth]) / tenth, abs=1e-3)
    assert document["reward_last_tenth"] == pytest.approx(sum(rewards[-tenth:]) / tenth, abs=1e-3)
    told = json.loads(RunDir(runs[MANY]).events.read_bytes().splitlines()[-1])
    assert told["kind"] == "summary" and f"of {document['rounds']:,} rounds" in told["text"]
    assert MANY / 100 < document["cost"]["spent"] < MANY / 100 + 1
