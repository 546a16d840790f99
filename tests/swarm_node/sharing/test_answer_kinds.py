"""Groups of question files say by which kind of answer and which judge they were judged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.tasks.judging import JUDGE
from swarm_node.tasks.taskset import load_tasks
from swarm_protocol.answer_form import AnswerKind
from swarm_protocol.codec import sign_batch, verify_batch
from tests.support.gossip_room import PEER, World, edit, rejected


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{n}+1?", "answer": n + 1}) for n in range(60)))
    return str(path)


def of_kind(world: World, file: str, kind: AnswerKind) -> World:
    return dataclasses.replace(world, tasks=load_tasks([TaskConfig(file=file, kind=kind)], RewardsConfig()))


def test_members_of_one_kind_share(world: World, file: str) -> None:
    """Also if a node of protocol 1 seems to be there: it cannot be a member, since it refused the manifest."""
    numbers = of_kind(world, file, "number")
    numbers.publisher(version=lambda: 1).publish([numbers.group(["it is $", "no"])])
    _, batch = verify_batch(numbers.sent[0], numbers.manifest.swarm_id)
    assert (batch.protocol, batch.groups[0].kind, batch.groups[0].judge) == (2, "number", JUDGE)
    receiver = numbers.receiver()
    receiver.take(numbers.sent[0])
    assert receiver.admit() == 1 and [r.correct for r in numbers.admitted[0].rollouts] == [True, False]


def test_text_is_written_in_protocol_1_and_read(world: World, file: str) -> None:
    texts = of_kind(world, file, "text")
    texts.publisher(version=lambda: 1).publish([texts.group(["$", "no"])])
    _, batch = verify_batch(texts.sent[0], texts.manifest.swarm_id)
    assert (batch.protocol, batch.groups[0].kind, batch.groups[0].judge) == (1, "", 0)
    receiver = texts.receiver()
    receiver.take(texts.sent[0])
    assert receiver.admit() == 1


@pytest.mark.parametrize("change", [{"kind": "text"}, {"judge": JUDGE + 1}, {"kind": "", "judge": 0}])
def test_a_group_that_was_judged_otherwise_is_refused(world: World, file: str, change: dict[str, str | int]) -> None:
    numbers = of_kind(world, file, "number")
    batch = numbers.batch(numbers.group(["$", "no"]))
    receiver = numbers.receiver()
    receiver.take(sign_batch(edit(batch, **change), PEER))
    assert receiver.admit() == 0 and rejected(receiver) == {"judge": 1.0}
    assert "judge" in receiver.by_peer()[PEER.peer_id]["rejected"]
