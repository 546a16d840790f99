"""A new row in the table of kinds is all that the gossip processes need to check messages and pass them on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from swarm_protocol.identity import Identity
from swarm_protocol.messages import PROTOCOL_VERSION
from tests.support.gossip_peers import SWARM, swarm, until_stat
from tests.support.notes import ADD, KIND, NOTES, Note


def note(author: Identity, text: str, created: float) -> bytes:
    return NOTES.sign(Note(PROTOCOL_VERSION, SWARM, created, text), author)


def test_a_new_kind_crosses_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(ADD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    topic, author = KIND.topic(SWARM), Identity.generate()

    async def run() -> list[bytes]:
        async with swarm(3) as (hub, sender, receiver):
            for peer in (hub, sender, receiver):
                peer.subscribe(topic)
            for peer in (sender, receiver):
                peer.dial(hub.addresses[0])
            await until_stat(hub, lambda stat: stat.mesh.get(topic, 0) == 2)
            await until_stat(sender, lambda stat: stat.mesh.get(topic, 0) == 1)
            now = time.time()
            for data in (note(author, "old", now - 90), note(author, "hello", now)):
                assert sender.publish(topic, data)
            await until_stat(receiver, lambda stat: bool(receiver.heard))
            await until_stat(hub, lambda stat: stat.rejected.get("age", 0) == 1)
            return receiver.heard

    heard = [NOTES.verify(data, SWARM) for data in asyncio.run(run())]
    assert [(who, said.text) for who, said in heard] == [(author.peer_id, "hello")]
