"""A message of the lead that a stage does not take: the lead is told, and nobody leaves."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from swarm_node.pipeline.messages import LEADER, StageMessage
from swarm_protocol.pipeline import Forward, TurnFailed
from tests.support.crew_peers import Peers
from tests.support.crew_world import SETTINGS

HEAD = Forward(turn=7, total=1, microbatch=0, microbatches=1, place=1, temperature=1.0)


def forward(tokens: int, row: int = 0) -> StageMessage:
    return StageMessage(1, HEAD, (torch.ones(1, tokens, 4), *(torch.tensor([i]) for i in (row, 0, 0))))


@pytest.mark.parametrize(("message", "reason"), [(forward(9), "shape"), (forward(8, row=1), "values")])
def test_the_lead_is_told_of_refused_messages(message: StageMessage, reason: str) -> None:
    peers = Peers(3)
    for peer in ("a", "b", "c"):
        peers.start(peer, settings=replace(SETTINGS, microbatch=8))
    peers.run(30.0)
    lead, first = peers.at(0), peers.at(1)
    assert lead.mend(0.0)
    plan = lead.plan
    for n in range(1, 4):
        lead.send(message)
        peers.run(1.0)
        assert first.receive(0.0) is None and first.metrics()[f"stages/refused/{reason}"] == n
        peers.run(1.0)
        assert lead.receive(0.0) == StageMessage(LEADER, TurnFailed(7, 1, "refused"))
    lead.send(forward(8))
    peers.run(20.0)
    assert first.receive(0.0) is not None
    assert lead.plan == plan and lead.whole and "stages/lost" not in lead.metrics()
