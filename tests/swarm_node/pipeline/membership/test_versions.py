"""Peers of one crew may be of neighbouring releases: each is written to in what it reads."""

from __future__ import annotations

from functools import partial

import pytest

from swarm_node.install import upgrade_command
from swarm_node.pipeline.membership import leadership
from swarm_node.pipeline.membership.actions import PeerLink, Say, Send
from swarm_protocol.codec import spoken_by, version_for
from swarm_protocol.crew import CREW_METHOD, decode_record, encode_record
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import CrewCard, PeerCard
from tests.support.crew_world import SWARM, World


@pytest.mark.parametrize(("protocol", "speaks", "expected"), [(4, 0, 4), (4, 5, 5), (5, 6, 5)])
def test_hello_is_said_in_the_newest_common_version(
    monkeypatch: pytest.MonkeyPatch, protocol: int, speaks: int, expected: int
) -> None:
    monkeypatch.setattr(leadership, "version_for", partial(version_for, spoken=spoken_by(5)))
    monkeypatch.setattr("swarm_protocol.codec.SPOKEN", spoken_by(5))
    crew = World(0, 2).start("me").crew
    leads = CrewCard(crew.spec.id, crew.spec.architecture, 2, (0,), 1)
    card = PeerCard(protocol, SWARM, 0.0, "lead", ["trainer"], crew=leads, speaks=speaks)
    [hello] = [action.record for action in crew.cards({"lead": card}, 10.0) if isinstance(action, Send)]
    assert decode_record(encode_record(hello)) == hello
    assert hello.protocol == expected


def test_a_peer_of_another_version_is_named_once() -> None:
    crew = World(0, 2).start("me").crew
    hello = crew.leadership.hello("lead")
    with pytest.raises(RemoteProtocolError) as caught:
        decode_record(encode_record(hello).replace(b"\xa8protocol\x01", b"\xa8protocol\x07"))
    assert caught.value.reason == "version"
    said = []
    for _ in range(2):
        actions = crew.unspoken(PeerLink("lead", CREW_METHOD), caught.value.detail, 10.0)
        said += [action.text for action in actions if isinstance(action, Say)]
    [text] = said
    assert "protocol 7 is too new for a node that speaks 1" in text and upgrade_command() in text
    assert crew.counts["refused/version"] == 2
