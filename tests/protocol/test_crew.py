"""What the peers of a crew say to each other: golden bytes, limits, versions, and no bytes that break the decoder."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from swarm_protocol.codec import SPOKEN
from swarm_protocol.crew import (
    CONTROL,
    MAX_CONTROL_BYTES,
    MAX_STAGE_SOURCES,
    Answer,
    Assignment,
    Broken,
    Hello,
    Holding,
    Kept,
    Load,
    Plan,
    Probe,
    Ready,
    Record,
    Refusal,
    Report,
    Settings,
    Source,
    Unable,
    Whole,
    crew_id,
    crew_key,
    decode_record,
    encode_record,
    proof,
)
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_STAGES
from swarm_protocol.lineage import MAX_SEGMENTS
from swarm_protocol.messages import PROTOCOL_VERSION
from tests.support.wire import SWARM, fields, mutations, refused, values

FIRST = 1  # protocol of the golden bytes; later ones keep the form of these records
REASONS = {"size", "schema", "version", "plan", "run"}
HELLO = Hello(
    protocol=FIRST,
    swarm=SWARM,
    crew="8899aabbccddeeff",
    proof="c3" * 32,
    architecture="00112233445566aa",
    stages=3,
    name="kitchen-laptop",
    wanted=1,
    leads=True,
    term=2,
    updates=40,
    started=1_800_000_000.5,
    holding=Holding((Kept(1, 40),), (Kept(2, 39),), (Kept(1, 30), Kept(1, 20))),
    spans=((0, 2), (2, 4), (4, 6)),
    capacity=2**30,
    run=(("0123456789abcdef", 0), ("fedcba9876543210", 30)),
    round=41,
)
SOURCES = (Source("mean", ("a", "c"), (0, 2), 40), Source("base"))
SETTINGS = Settings("int8", True, "auto", 20, False, 512, 1024, 4096, 0.01, (0.9, 0.999), 300)
PLAN = Plan(
    2,
    7,
    (Assignment("a", (0, 2)), Assignment("b", (2, 4), SOURCES), Assignment("c", (4, 6))),
    SETTINGS,
    ("d", "e"),
    HELLO.run,
)
RECORDS: list[Record] = [
    HELLO,
    Answer("", HELLO.proof, 3),
    Refusal("crew", "it does not know the name"),
    Refusal("model", "it has another model", HELLO.proof),
    PLAN,
    Ready(PLAN.mark, 1, 40, SOURCES[0]),
    Ready(PLAN.mark, 1, 40),
    Unable(PLAN.mark, 1, "no room"),
    Broken(PLAN.mark, "b", "gone", True),
    Report(HELLO.holding, HELLO.run),
    Probe(PLAN.mark),
    Load(PLAN.mark, 61.5),
    Whole(PLAN.mark),
]
GOLDEN = {
    "hello": (
        "de0012a46b696e64a568656c6c6fa870726f746f636f6c01a5737761726dd940356135613561356135613561356135613561"
        "35613561356135613561356135613561356135613561356135613561356135613561356135613561356135613561a4637265"
        "77b038383939616162626363646465656666a570726f6f66d940633363336333633363336333633363336333633363336333"
        "63336333633363336333633363336333633363336333633363336333633363336333633363336333ac617263686974656374"
        "757265b030303131323233333434353536366161a673746167657303a46e616d65ae6b69746368656e2d6c6170746f70a677"
        "616e74656401a56c65616473c3a47465726d02a77570646174657328a773746172746564cb41dad27480200000a7686f6c64"
        "696e6783a46c69766591920128a87265706c6963617391920227a9736e617073686f74739292011e920114a57370616e7393"
        "920002920204920406a86361706163697479ce40000000a372756e9292b0303132333435363738396162636465660092b066"
        "6564636261393837363534333231301ea5726f756e6429"
    ),
    "plan": (
        "87a46b696e64a4706c616ea47465726d02a66e756d62657207a573656174739393a1619200029093a1629202049294a46d65"
        "616e92a161a1639200022894a46261736590900093a16392040690a873657474696e67739ba4696e7438c3a46175746f14c2"
        "cd0200cd0400cd1000cb3f847ae147ae147b92cb3feccccccccccccdcb3feff7ced916872bcd012ca673706172657392a164"
        "a165a372756e9292b0303132333435363738396162636465660092b0666564636261393837363534333231301e"
    ),
}
each = pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)


def reason(data: bytes) -> str | None:
    return refused(lambda: decode_record(data), REASONS)


@each
def test_what_is_sealed_can_be_opened(record: Record) -> None:
    assert decode_record(encode_record(record)) == record
    assert decode_record(bytearray(encode_record(record))) == record


@pytest.mark.parametrize("record", [HELLO, PLAN], ids=["hello", "plan"])
def test_golden_bytes(record: Record) -> None:
    golden = bytes.fromhex(GOLDEN[type(record).__name__.lower()])
    assert encode_record(record) == golden
    assert decode_record(golden) == record


@each
def test_a_later_version_may_add_fields(record: Record) -> None:
    assert decode_record(msgspec.msgpack.encode({**fields(record), "later": [1, {"deep": 2}]})) == record


def test_other_heads_are_no_control_messages() -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(CONTROL)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, min(SPOKEN) - 1, None])
def test_versions_are_checked_before_schemas(version: int | None) -> None:
    assert reason(msgspec.msgpack.encode({"kind": "hello", "protocol": version, "everything": "else"})) == "version"


def test_size_is_checked_before_anything_else() -> None:
    assert reason(bytes(MAX_CONTROL_BYTES + 1)) == "size"
    assert reason(bytes(MAX_CONTROL_BYTES)) == "schema"


def test_the_largest_crew_fits() -> None:
    way = Source("mean", ("p" * 52, "q" * 52), (254, 255), 2**53 - 1)
    seats = tuple(Assignment("r" * 52, (4 * i, 4 * i + 4), (way,) * 3) for i in range(MAX_STAGES))
    assert len(encode_record(Plan(2**53 - 1, 2**53 - 1, seats, SETTINGS, ("s" * 52,) * 64))) < MAX_CONTROL_BYTES
    with pytest.raises(LocalProtocolError):
        encode_record(Plan(0, 0, (*seats, Assignment("r", (1020, 1021))), SETTINGS))


def plan(*spans: tuple[int, int]) -> bytes:
    seats = [["a", list(span), []] for span in spans]
    return msgspec.msgpack.encode({"kind": "plan", "term": 1, "number": 1, "seats": seats, "settings": SETTINGS})


@pytest.mark.parametrize(
    "spans", [[(1, 2)], [(0, 2), (3, 4)], [(0, 2), (1, 4)], [(0, 2), (2, 2)], [(0, 0)], [(0, 3), (3, 1)]]
)
def test_a_plan_must_cover_all_layers(spans: list[tuple[int, int]]) -> None:
    assert reason(plan((0, 2), (2, 4))) is None
    assert reason(plan(*spans)) == "plan"
    assert reason(msgspec.msgpack.encode(replace(HELLO, spans=spans))) == "plan"


SETTINGS_FIELDS = list(astuple(SETTINGS))
BAD: list[tuple[Record, dict[str, Any]]] = [
    (HELLO, {"crew": "red"}),
    (HELLO, {"proof": ""}),
    (HELLO, {"proof": "é" * 64}),
    (HELLO, {"name": "\x1b[2J"}),
    (HELLO, {"name": "n" * 33}),
    (HELLO, {"architecture": "0"}),
    (HELLO, {"stages": 0}),
    (HELLO, {"stages": MAX_STAGES + 1}),
    (HELLO, {"wanted": -1}),
    (HELLO, {"wanted": MAX_STAGES}),
    (HELLO, {"term": 2**53}),
    (HELLO, {"started": float("nan")}),
    (HELLO, {"spans": [[0, 1]] * (MAX_STAGES + 1)}),
    (HELLO, {"spans": [[0, 2**40]]}),
    (HELLO, {"holding": {"live": [[0, 1]] * (MAX_STAGES + 1)}}),
    (HELLO, {"holding": {"snapshots": [[0, -1]]}}),
    (PLAN, {"seats": []}),
    (PLAN, {"seats": [["", [0, 2], []]]}),
    (PLAN, {"seats": [["a\n", [0, 2], []]]}),
    (PLAN, {"seats": [["a", [0, 2], [["base"]] * (MAX_STAGE_SOURCES + 1)]]}),
    (PLAN, {"seats": [["a", [0, 2], [["magic"]]]]}),
    (PLAN, {"seats": [["a", [0, 2], [["mean", ["b", "c", "d"]]]]]}),
    (PLAN, {"spares": ["s"] * 65}),
    (PLAN, {"settings": ["float16", *SETTINGS_FIELDS[1:]]}),
    (PLAN, {"settings": [*SETTINGS_FIELDS[:3], 101, *SETTINGS_FIELDS[4:]]}),
    (PLAN, {"settings": [*SETTINGS_FIELDS[:5], 0, *SETTINGS_FIELDS[6:]]}),
    (PLAN, {"settings": [*SETTINGS_FIELDS[:-2], [0.9, 1.0], 0]}),
    (PLAN, {"settings": [*SETTINGS_FIELDS[:-2], [float("nan"), 0.9], 0]}),
    (PLAN, {"settings": [*SETTINGS_FIELDS[:-1], -1]}),
    (PLAN, {"run": "red"}),
    (HELLO, {"run": [["red", 0]]}),
    (HELLO, {"run": [["0123456789abcdef", -1]]}),
    (HELLO, {"run": [["0123456789abcdef"]]}),
    (HELLO, {"run": [[f"{number:016x}", number] for number in range(MAX_SEGMENTS + 1)]}),
    (HELLO, {"round": -1}),
    (Refusal("model"), {"detail": "\x1b[2J"}),
    (Refusal("model"), {"proof": "c3"}),
    (Refusal("model"), {"reason": "Of course!"}),
    (Unable(1, 1, ""), {"why": "w" * 201}),
    (Load(1, 0.0), {"held_s": float("inf")}),
    (Load(1, 0.0), {"held_s": -1.0}),
    (Answer("", HELLO.proof), {"lead": "/"}),
    (Answer("", HELLO.proof), {"proof": ""}),
    (Whole(1), {"kind": "hole"}),
    (Whole(1), {"plan": "1"}),
]


@pytest.mark.parametrize(("record", "change"), BAD, ids=[f"{type(r).__name__} {next(iter(c))}" for r, c in BAD])
def test_fields_out_of_range_are_refused(record: Record, change: dict[str, Any]) -> None:
    assert reason(msgspec.msgpack.encode(fields(record))) is None
    assert reason(msgspec.msgpack.encode({**fields(record), **change})) == "schema"


@pytest.mark.parametrize("record", [HELLO, PLAN, Report(HELLO.holding, HELLO.run)], ids=["hello", "plan", "report"])
@pytest.mark.parametrize("segments", [[["0" * 16, 0], ["0" * 16, 1]], [["0" * 16, 5], ["1" * 16, 4]]])
def test_segments_of_a_run_must_follow_each_other(record: Record, segments: list[Any]) -> None:
    assert reason(msgspec.msgpack.encode({**fields(record), "run": segments})) == "run"
    assert reason(msgspec.msgpack.encode({**fields(record), "run": [segments[0], ["1" * 16, 5]]})) is None


def test_marks_tell_plans_apart_but_not_spares() -> None:
    others = [
        replace(PLAN, term=3),
        replace(PLAN, number=8),
        replace(PLAN, assignments=(Assignment("z", (0, 2)), *PLAN.assignments[1:])),
    ]
    assert len({PLAN.mark, *(other.mark for other in others)}) == 4
    assert replace(PLAN, spares=()).mark == PLAN.mark < 2**53
    assert (PLAN.lead, PLAN.held_by("b"), PLAN.held_by("d"), PLAN.spans[1]) == ("a", (1,), (), (2, 4))


def test_a_crew_is_known_by_its_name() -> None:
    key = crew_key(SWARM, "home")
    assert crew_key(SWARM, "home") == key and len({key, crew_key(SWARM, "homes"), crew_key("0" * 64, "home")}) == 3
    assert crew_id(key) == "fd189051a39dc3f1"  # peers of other versions must have the same
    assert proof(key, "a", "b") == "b4ed2fcd5d41fd1845614b7444e621bb9208f9d977606848b5bc91789ff6188a"
    others = [proof(key, "b", "a"), proof(key, "a", "c"), proof(key, "c", "b"), proof(crew_key(SWARM, "x"), "a", "b")]
    assert proof(key, "a", "b") not in others
    assert crew_id(key) not in proof(key, "a", "b")


# --------------------------------------------------------------------- no bytes break it


@given(noise=st.binary(max_size=300))
def test_random_bytes(noise: bytes) -> None:
    assert reason(noise) is not None


@settings(max_examples=300)
@given(data=st.data(), record=st.sampled_from(RECORDS))
def test_mutated_records_keep_limits_or_are_refused(data: st.DataObject, record: Record) -> None:
    mutated = data.draw(mutations(encode_record(record)))
    if reason(mutated) is None:
        opened = decode_record(mutated)
        assert decode_record(encode_record(opened)) == opened


@given(data=st.data(), record=st.sampled_from(RECORDS))
def test_any_value_in_any_field(data: st.DataObject, record: Record) -> None:
    name = data.draw(st.sampled_from(sorted(fields(record))))
    changed = msgspec.msgpack.encode({**fields(record), name: data.draw(values())})
    if reason(changed) is None:
        encode_record(decode_record(changed))


@pytest.mark.parametrize(
    "nasty",
    [b"", b"\x91" * 1000, b"\x81\xa4kind\xdd\xff\xff\xff\xff", b"\xc1", encode_record(PLAN) + b"\xc0"],
)
def test_nonsense(nasty: bytes) -> None:
    assert reason(nasty) == "schema"
    with pytest.raises(RemoteProtocolError):
        decode_record(nasty)
