"""What a start says of the settings of the one before, in the same run directory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm_node import run
from swarm_node.config import NodeConfig, load_config
from swarm_node.cost import CostMeter
from swarm_node.recovery.snapshots import SnapshotStore
from swarm_node.resuming import RunState
from swarm_node.run import run_local
from swarm_node.rundir import RunDir


def start(rounds: int, **sections: Any) -> list[str]:
    """What it says, as events.jsonl has it."""
    usual = {
        "run_dir": "run",
        "rounds": rounds,
        "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
        "eval": {"questions": 0},
    }
    events = Path("run/events.jsonl")
    before = len(events.read_text().splitlines()) if events.exists() else 0
    assert run_local(NodeConfig.model_validate(usual | sections), json_output=True) == 0
    return [json.loads(line)["text"] for line in events.read_text().splitlines()[before:]]


def changes(said: list[str]) -> list[str]:
    return [text for text in said if text.startswith(("this run averaged", "not as when"))]


def test_a_run_that_no_longer_averages_says_so_and_what_else_is_not_as_it_was() -> None:
    averaging = {"averaging": {"method": "noloco", "fragments": 4}}
    assert changes(start(1, **averaging)) == []
    assert changes(start(2, **averaging)) == [], "more rounds are what one resumes for"
    said = start(3, grpo={"learning_rate": 0.5, "loss": "gspo"})
    default = NodeConfig().grpo
    until_now, not_as = changes(said)
    assert until_now == "this run averaged weights (noloco) until now; without averaging.method it does not any more"
    start_of_it, _, listed = not_as.partition(": ")
    assert start_of_it == "not as when this run was last started"
    assert set(listed.split(", ")) == {
        f"grpo.loss = gspo (was {default.loss})",
        f"grpo.learning_rate = 0.5 (was {default.learning_rate})",
    }
    assert load_config(Path("run/config.toml")).averaging.method == "none"
    assert len(changes(start(4, price_per_hour=0.5))) == 1, "once: from then on it is a run that does not average"


def test_the_name_of_a_crew_is_not_for_dashboards(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "open_sinks", lambda names, folder, config, first: shown.append(config) or [])
    start(1)
    assert shown and "count" in shown[0]["stages"] and "crew" not in shown[0]["stages"]


def test_a_configuration_of_another_version_says_nothing() -> None:
    start(1)
    path = Path("run/config.toml")
    path.write_text("made_up = 1\n" + path.read_text())
    assert changes(start(2, grpo={"learning_rate": 0.5})) == []


def test_a_state_that_could_not_be_written_is_written_again(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "snapshots"
    store = SnapshotStore(folder, 2, said.append)
    policy = SimpleNamespace(trainable_state=dict, version=3, base_digest="b", start_digest="s")
    trainer = SimpleNamespace(state_dict=lambda: ({}, {}))
    node = SimpleNamespace(round=3, trainer=trainer, policy=policy, averager=None, tasks=SimpleNamespace(names=[]))
    state = RunState(NodeConfig(), RunDir(tmp_path), cast(Any, node), store, said.append, None, CostMeter(None, 0.0))
    folder.write_text("a file, not a folder")
    state.save()
    store.wait()
    assert len(said) == 1 and "snapshot of round 3" in said[0]
    folder.unlink()
    state.save()
    store.wait()
    [written] = folder.glob("round-*")
    state.save()
    store.close()
    assert list(folder.glob("round-*")) == [written], "once is enough"
