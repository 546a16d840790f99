"""What a run writes into its directory, made up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swarm_node.observability.jsonl import each_record
from swarm_node.observability.tally import Tally


def metrics(round: int, **more: Any) -> dict[str, Any]:
    """A record of metrics.jsonl."""
    return {"round": round, "time": 1000.0 + round, "reward": round / 100, "step_time": 1.0, **more}


def write(path: Path, *records: Mapping[str, Any], mode: str = "a") -> None:
    """Lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file."""
    return list(each_record(path))


def tallied(records: Iterable[Mapping[str, Any]]) -> Tally:
    """The tally of `records`, in their order."""
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally


def answered(round: int, *answers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A record of samples.jsonl."""
    asked = {"round": round, "time": 1.7e9, "task": "gcd", "peer": None, "question": f"What is {round}?", "right": "7"}
    return asked | {"reward": 0.5, "of": len(answers), "answers": list(answers)} | more
