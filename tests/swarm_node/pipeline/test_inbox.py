"""An inbox is bounded, and two channels in it never mix."""

from __future__ import annotations

import pytest
import torch

from swarm_node.pipeline import inbox as module
from swarm_node.pipeline.inbox import Expected, Inbox
from swarm_node.pipeline.membership.actions import PeerLink
from swarm_node.pipeline.messages import Limits, StageMessage, decode_message, encode_message
from swarm_protocol.crew import STAGE_METHOD
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import Backward, decode_envelope

LIMITS = Limits(
    plan=3,
    stages=2,
    here=frozenset({1}),
    sender=frozenset({0}),
    width=4,
    vocabulary=11,
    tokens=8,
    rows=8,
    prompt=8,
    length=8,
)


def gradient(value: float, tokens: int = 3) -> StageMessage:
    return StageMessage(1, Backward(turn=1, microbatch=0, place=1), (torch.full((1, tokens, 4), value),))


def encoded(link: PeerLink, message: StageMessage) -> tuple[Expected, bytearray]:
    head, pieces = encode_message(message, "float32", LIMITS.plan)
    body = bytearray(b"".join(pieces))
    return Expected(link, decode_envelope(head), len(body), LIMITS), body


def taken(inbox: Inbox) -> tuple[PeerLink, StageMessage]:
    waiting = inbox.take()
    assert waiting is not None and isinstance(waiting.content, tuple)
    expected, body = waiting.content
    return expected.link, decode_message(expected.envelope, body, expected.limits)


def links() -> tuple[PeerLink, PeerLink]:
    """Two channels of one peer."""
    return PeerLink("peer", STAGE_METHOD), PeerLink("peer", STAGE_METHOD)


def test_two_channels_of_one_peer_never_mix() -> None:
    inbox, (first, second) = Inbox(lambda: 7.0), links()
    short, long = encoded(first, gradient(1.0, tokens=2)), encoded(second, gradient(2.0, tokens=5))
    for expected, _ in (short, long):  # both bodies are on their way at once
        inbox.expect(expected)
    inbox.arrived(second, long[1])
    inbox.arrived(first, short[1])
    for link, message in ((second, gradient(2.0, tokens=5)), (first, gradient(1.0, tokens=2))):
        found, decoded = taken(inbox)
        assert found is link and torch.equal(decoded.tensors[0], message.tensors[0])
    assert inbox.take() is None and len(inbox) == 0


def test_the_end_of_a_channel_leaves_another_alone() -> None:
    inbox, (first, second) = Inbox(lambda: 7.0), links()
    gone, kept = encoded(first, gradient(1.0)), encoded(second, gradient(2.0))
    inbox.expect(gone[0])
    inbox.expect(kept[0])
    inbox.ended(first)
    inbox.arrived(first, gone[1])
    inbox.arrived(second, kept[1])
    assert taken(inbox)[0] is second and inbox.take() is None


def test_bodies_under_way_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bodies come on two channels at the same time; together they exceed the bound."""
    inbox, (first, second) = Inbox(lambda: 7.0), links()
    (expected, body), (again, _) = encoded(first, gradient(1.0)), encoded(second, gradient(2.0))
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2 * len(body) - 1)
    inbox.expect(expected)
    with pytest.raises(RemoteProtocolError, match="flood"):
        inbox.expect(again)
    inbox.ended(PeerLink("nobody", STAGE_METHOD))
    with pytest.raises(RemoteProtocolError, match="flood"):
        inbox.expect(again)
    inbox.arrived(first, body)
    with pytest.raises(RemoteProtocolError, match="flood"):
        inbox.expect(again)
    assert taken(inbox)[0] is first
    inbox.expect(again)


def test_the_oldest_message_is_known() -> None:
    now = [1.0]
    inbox = Inbox(lambda: now[0])
    assert inbox.oldest is None
    inbox.put(3, gradient(1.0))
    now[0] = 5.0
    inbox.put(3, gradient(2.0))
    assert inbox.oldest == 1.0 and inbox.take() is not None and inbox.oldest == 5.0
