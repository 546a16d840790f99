"""Which source was refused what, as people see it."""

from __future__ import annotations

import pytest

from swarm_node.observability.reasons import HOSTILE, SAID, WORDS
from swarm_node.observability.refusals import MAX_ROWS, RefusalRow, refusal_rows, say_first_refusals
from swarm_node.say import Once
from swarm_node.sharing.peer_accounts import MALICIOUS, REASONS
from swarm_protocol.transports.refusals import Refused
from tests.support.fake_transport import peer_id

MALLORY, BOB = peer_id(1), peer_id(2)


def account(last_seen: float = 5.0, **rejected: int) -> dict[str, object]:
    return {"rejected": rejected, "last_seen": last_seen}


def test_every_reason_of_a_receiver_has_words() -> None:
    assert REASONS - {"echo"} <= WORDS.keys() and MALICIOUS <= HOSTILE and SAID <= WORDS.keys()


def test_the_worst_sources_come_first() -> None:
    sources = {
        MALLORY: Refused({"find": 1204, "schema": 3}, 90.0, "203.0.113.9"),
        "198.51.100.7": Refused({"connections": 5000}, 80.0),
    }
    authors = {MALLORY: account(95.0, assignment=8, age=2), BOB: account(zero=7), peer_id(3): account(7.0, cap=1)}
    found = refusal_rows(sources, authors, {MALLORY: "mallory"})
    assert found[0] == RefusalRow(
        source=MALLORY,
        says="1,204 × too many keys asked at once, 8 × not the sender's task, 3 × malformed",
        count=1215,
        hostile=1215,
        last=95.0,
        name="mallory",
        address="203.0.113.9",
    )
    assert [(row.place(), row.ip, row.hostile) for row in found] == [
        (f"mallory …{MALLORY[-8:]} at 203.0.113.9", "203.0.113.9", 1215),
        (f"…{peer_id(3)[-8:]}", "", 1),
        ("198.51.100.7", "198.51.100.7", 0),
    ]


def test_a_restarting_node_is_no_attacker() -> None:
    assert refusal_rows({}, {MALLORY: account(slot=5000)}, {}) == []
    assert refusal_rows({}, {MALLORY: account(slot=5000, assignment=1)}, {})[0].hostile == 1


def test_rows_and_their_reasons_are_few() -> None:
    many = {f"10.0.0.{i}": Refused({f"reason {j}": 2 for j in range(9)}, 0.0) for i in range(99)}
    many["honest"] = Refused({"busy": 9}, 0.0)
    found = refusal_rows(many, {}, {})
    assert len(found) == MAX_ROWS and found[0].says.count("×") == 4 and found[0].says.endswith("12 × something else")


@pytest.mark.parametrize(
    ("sources", "origin"),
    [
        ({}, ""),
        (
            {MALLORY: Refused({"find": 9}, 0.0, "203.0.113.9"), BOB: Refused({"key": 99}, 0.0)},
            f", from …{MALLORY[-8:]}",
        ),
    ],
)
def test_the_first_refusal_of_each_kind_is_said(sources: dict[str, Refused], origin: str) -> None:
    said: list[str] = []
    once = Once(said.append)
    for _ in range(3):
        say_first_refusals(once, ["find", "seen", "newer"], sources)
    assert len(said) == 1 and said[0].startswith(f"refused: too many keys asked at once{origin}")
    say_first_refusals(once, ["find", "key"], sources)
    assert len(said) == 2
