"""What members say of themselves on their cards: bounded, of the swarm's own tasks, and each member one voice."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from swarm_node.swarm.declared import (
    MAX_KINDS,
    declare,
    declared_table,
    is_known,
    kinds_of,
    pass_1_of,
    share_of,
    success_by_kind,
)
from swarm_node.swarm.page import HISTORY_S, MAX_POINTS, History
from swarm_node.swarm.uses import MAX_KEPT, Uses
from swarm_protocol.limits import MAX_DECLARED_ANSWERS, MAX_DECLARED_BYTES, MAX_DECLARED_KINDS, MAX_DECLARED_PEERS
from swarm_protocol.manifest import Manifest, ManifestTask
from swarm_protocol.messages import Declared, DeclaredKind, DeclaredUse, PeerCard
from swarm_protocol.topics import short_hash
from tests.support.wire import CARD, DECLARED


def says(**fields: object) -> PeerCard:
    return replace(CARD, declared=msgspec.convert(fields, Declared))


def test_a_node_declares_within_its_share_of_the_card() -> None:
    kinds = {f"{'k' * 40}_{i}": (i, i) for i in range(1, 60)}
    used = {f"peer {i}": i for i in range(1, 30)}
    record = declare(1_800_000_000.0, kinds, (1 / 3, 200), used)
    assert len(msgspec.msgpack.encode(record)) <= MAX_DECLARED_BYTES
    assert 0 < len(record.kinds) <= MAX_DECLARED_KINDS and 0 < len(record.used_of) <= MAX_DECLARED_PEERS
    assert record.kinds[0].answers == 59 and record.used_of[0] == DeclaredUse(short_hash("peer 29"), 29)
    assert record.used == sum(used.values()), "the sum counts those that are not named, too"
    assert record.pass_1 == 0.3333 and record.questions == 200


def test_a_name_that_others_would_refuse_stays_here() -> None:
    record = declare(0.0, {"my questions": (8, 4), "gcd": (8, 4), "lcm": (0, 0)}, None, {})
    assert record.kinds == [DeclaredKind("gcd", 8, 4)] and record.pass_1 is None


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        *[(kind, True) for kind in ("gcd", "small/gcd", "letters", "bf", "sapo/bf")],
        *[(f"{kind}:0123456789abcdef", True) for kind in ("gcd", "small/gcd")],
        *[(kind, False) for kind in ("gcdd", "evil.example/gcd", "a/small/gcd", "small/letters", "/gcd", "")],
        *[(f"gcd:{text}", False) for text in ("anything", "", "0123", "0123456789abcdef0", "0123456789abcdef/gcd")],
    ],
)
def test_kinds_are_those_of_the_manifest(kind: str, known: bool) -> None:
    tasks = [ManifestTask(env="small"), ManifestTask(env="sapo/bf"), ManifestTask(sha256="0" * 64, name="letters")]
    assert is_known(kind, kinds_of(Manifest("sums", tasks))) is known


def test_files_of_one_name_are_kinds_of_their_own() -> None:
    twins = [ManifestTask(sha256=digit * 64, name="letters") for digit in "011"]
    kinds = kinds_of(Manifest("sums", [*twins, ManifestTask(env="gcd"), ManifestTask(sha256="2" * 64)]))
    assert kinds == {"letters", "letters-2", "gcd", "questions"}


def test_a_liar_is_one_voice_of_many() -> None:
    honest = says(kinds=[["gcd", 100, 20], ["lcm", 100, 10]])
    liar = says(kinds=[["gcd", MAX_DECLARED_ANSWERS, MAX_DECLARED_ANSWERS], ["unheard_of", 1, 1]])
    cards = {"a": honest, "b": honest, "c": honest, "liar": liar, "silent": CARD}
    gcd, lcm = success_by_kind(cards, {"gcd", "lcm"})
    assert gcd == {"kind": "gcd", "members": 4, "success": pytest.approx(0.4), "share": pytest.approx(2.5 / 4)}
    assert lcm["members"] == 3 and lcm["success"] == pytest.approx(0.1)
    more_right_than_answers = says(kinds=[["gcd", 1, 1000]])
    assert success_by_kind({"liar": more_right_than_answers}, {"gcd"})[0]["success"] == 1.0


def test_liars_cannot_fill_the_table_of_kinds() -> None:
    liars = {f"liar {i}": says(kinds=[[f"gcd:{i:016x}", 1, 1]]) for i in range(2 * MAX_KINDS)}
    honest = {name: says(kinds=[["gcd", 100, 20]]) for name in "ab"}
    table = success_by_kind(liars | honest, {"gcd"})
    assert len(table) == MAX_KINDS and table[0]["kind"] == "gcd"


def test_no_kind_is_shown_before_the_manifest_is_known() -> None:
    assert success_by_kind({"a": says(kinds=[["gcd", 1, 1]])}, None) == []
    table = declared_table(DECLARED, None)
    assert table is not None and table["kinds"] == {} and table["version"] == "0.1.0"


def test_a_history_is_bounded_and_keeps_its_start() -> None:
    history, cards = History(), {"a": says(kinds=[["gcd", 4, 1]]), "b": says(kinds=[["gcd", 4, 3]], pass_1=0.25)}
    assert history.add(0.0, {"silent": CARD}, {"gcd"}) == []
    for tick in range(10 * MAX_POINTS):
        points = history.add(tick * HISTORY_S, cards, {"gcd"})
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points[0] == (0.0, 0.5, 0.25) and points[-1][0] > 9 * MAX_POINTS * HISTORY_S


def test_the_share_of_what_others_used() -> None:
    me = short_hash("me")
    cards = {
        "a": says(used=100, used_of=[[me, 30], [short_hash("b"), 70]]),
        "b": says(used=10, used_of=[[me, 10**6]]),
        "c": says(used=50),
        "d": says(used=0),
        "me": says(used=8, used_of=[[me, 8]]),
        "silent": CARD,
    }
    assert share_of("me", cards) == (pytest.approx((0.3 + 1.0 + 0.0) / 3), 3)
    assert share_of("me", {}) == (None, 0)


def used(groups: int, since: float) -> PeerCard:
    return says(used=100, used_of=[[short_hash("me"), groups]] if groups else [], since=since)


def test_too_many_members_count_only_once() -> None:
    uses, cards = Uses("me"), {str(i): used(1, 1.0) for i in range(MAX_KEPT + 9)}
    assert [uses.look(cards) for _ in range(3)] == [MAX_KEPT] * 3
    assert uses.look({"0": used(5, 1.0), str(MAX_KEPT): used(5, 1.0)}) == MAX_KEPT + 4


def test_what_others_used_never_falls_as_they_restart() -> None:
    uses = Uses("me")
    assert uses.look({"a": used(30, 1.0), "b": used(5, 1.0), "me": used(9, 1.0), "silent": CARD}) == 35
    assert uses.look({"a": used(0, 2.0), "b": used(7, 1.0)}) == 37, "a has restarted"
    assert uses.look({"a": used(4, 2.0)}) == 41, "b has left"
    assert uses.look({"a": used(0, 2.0)}) == 41, "a names others for now"
    resumed = Uses("me")
    resumed.load(uses.state())
    assert resumed.look({"a": used(6, 2.0), "b": used(7, 1.0)}) == 43


def test_figures_of_members_that_declare_none_are_left_out() -> None:
    cards = {"a": says(pass_1=0.5, questions=10), "b": says(pass_1=0.25, questions=10), "c": says(), "d": CARD}
    assert pass_1_of(cards) == [0.25, 0.5]
    assert declared_table(None, {"gcd"}) is None
    table = declared_table(DECLARED, {"gcd"})
    assert table is not None and table["kinds"] == {"gcd": [640, 211]} and table["version"] == "0.1.0"
    assert "used_of" not in table
