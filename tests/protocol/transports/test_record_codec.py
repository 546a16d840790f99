"""Sealed batches and cards: golden bytes, who signed them, limits, versions, and no bytes that break the decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm_protocol.codec import (
    BATCH_TAG,
    CARD_TAG,
    SIGNED_HEAD_BYTES,
    SPOKEN,
    check_version,
    common_version,
    in_version,
    sign_batch,
    sign_card,
    spoken_by,
    verify_batch,
    verify_card,
    version_for,
)
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.limits import (
    MAX_BATCH_BYTES,
    MAX_CARD_BYTES,
    MAX_DECLARED_ANSWERS,
    MAX_DECLARED_KINDS,
    MAX_DECLARED_PEERS,
    MAX_GROUPS,
    MAX_ROLLOUTS,
    MAX_TEXT_CHARS,
    MAX_TURNS,
    SLOTS,
)
from swarm_protocol.messages import PROTOCOL_VERSION, BatchOfBefore, PeerCard, RolloutBatch, SharedRollout, SharedTurn
from tests.support.wire import (
    ADDRESSES,
    BATCH,
    BATCH_BEFORE,
    CARD,
    DECLARED,
    IDENTITY,
    STRANGER,
    SWARM,
    fields,
    mutations,
    refused,
    seal,
    values,
)

DATA = Path(__file__).parents[2] / "data"
REASONS = {"size", "signature", "version", "newer", "schema", "swarm"}


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of sealed record."""

    record: Any
    golden: str
    tag: bytes
    limit: int
    seal: Callable[[Any, Any], bytes]
    open: Callable[[bytes, str], tuple[str, Any]]


BATCHES = Kind(BATCH, "rollout_batch_v2.bin", BATCH_TAG, MAX_BATCH_BYTES, sign_batch, verify_batch)
CARDS = Kind(CARD, "peer_card_v2.bin", CARD_TAG, MAX_CARD_BYTES, sign_card, verify_card)
both = pytest.mark.parametrize("kind", [BATCHES, CARDS], ids=["batch", "card"])


# --------------------------------------------------------------------- what is sealed can be opened


@both
def test_golden_bytes(kind: Kind) -> None:
    golden = (DATA / kind.golden).read_bytes()
    assert kind.seal(kind.record, IDENTITY) == golden
    assert kind.open(golden, SWARM) == (IDENTITY.peer_id, kind.record)


@pytest.mark.parametrize(
    ("record", "golden", "kind"),
    [(BATCH_BEFORE, "rollout_batch_v1.bin", BATCHES), (replace(CARD, protocol=1), "peer_card_v1_crew.bin", CARDS)],
    ids=["batch", "card"],
)
def test_protocol_1_is_still_read_and_written(record: Any, golden: str, kind: Kind) -> None:
    data = (DATA / golden).read_bytes()
    assert kind.open(data, SWARM) == (IDENTITY.peer_id, record)
    assert kind.seal(record, IDENTITY) == data


def test_dialogues_without_what_was_heard_are_read() -> None:
    """As nodes sent them before any dialogue had a second turn."""
    assert BATCHES.open((DATA / "rollout_batch_v2_unheard.bin").read_bytes(), SWARM) == (IDENTITY.peer_id, BATCH)


def test_protocol_1_cannot_say_more_than_it_knows() -> None:
    (group,) = BATCH_BEFORE.groups
    two = SharedRollout([SharedTurn("a", True), SharedTurn("b", True)])
    for changed in (replace(group, kind="number"), replace(group, rollouts=[two, two])):
        with pytest.raises(LocalProtocolError, match="protocol 1"):
            sign_batch(replace(BATCH_BEFORE, groups=[changed]), IDENTITY)
        assert verify_batch(sign_batch(replace(BATCH, groups=[changed]), IDENTITY), SWARM)[1].groups == [changed]


@pytest.mark.parametrize("version", [1, 2])
def test_a_batch_says_where_its_sender_is(version: int) -> None:
    batch = replace(BATCH if version == 2 else BATCH_BEFORE, addresses=ADDRESSES)
    golden = (DATA / f"rollout_batch_v{version}_addresses.bin").read_bytes()
    assert sign_batch(batch, IDENTITY) == golden
    assert verify_batch(golden, SWARM) == (IDENTITY.peer_id, batch)


@pytest.mark.parametrize("schema", [RolloutBatch, BatchOfBefore])
def test_nodes_that_know_no_addresses_of_senders_read_past_them(schema: Any) -> None:
    known = [field for field in msgspec.structs.fields(schema) if field.name != "addresses"]
    earlier = msgspec.defstruct("Earlier", [(field.name, field.type) for field in known])
    record = {**fields(msgspec.convert(fields(BATCH), RolloutBatch)), "addresses": ADDRESSES}
    if schema is BatchOfBefore:
        record = msgspec.msgpack.decode((DATA / "rollout_batch_v1_addresses.bin").read_bytes()[SIGNED_HEAD_BYTES:])
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=earlier)
    assert fields(read) == {name: value for name, value in record.items() if name != "addresses"}


@pytest.mark.parametrize("addresses", [ADDRESSES * 3, [ADDRESSES[0] + "a" * 192], ["here"], [7], {}])
def test_addresses_of_a_sender_are_bounded(addresses: object) -> None:
    sealed = seal({**fields(BATCH), "addresses": addresses}, BATCH_TAG)
    assert refused(lambda: verify_batch(sealed, SWARM), REASONS) == "schema"


def test_a_card_with_what_its_peer_declares() -> None:
    card = replace(CARD, protocol=1, declared=DECLARED)
    golden = (DATA / "peer_card_v1_declared.bin").read_bytes()
    assert sign_card(card, IDENTITY) == golden
    assert verify_card(golden, SWARM) == (IDENTITY.peer_id, card)


def test_addresses_come_before_what_is_declared() -> None:
    longest = f"/dns4/{'a' * 110}/tcp/31330/p2p/{IDENTITY.peer_id}"
    crowded = replace(CARD, addresses=[longest] * 8, declared=DECLARED)
    assert verify_card(sign_card(crowded, IDENTITY), SWARM)[1] == replace(crowded, declared=None)


@pytest.mark.parametrize(
    "declared",
    [
        {"kinds": [["gcd", 8, 4]] * (MAX_DECLARED_KINDS + 1)},
        {"kinds": [["<b>", 8, 4]]},
        {"kinds": [["gcd", 0, 0]]},
        {"kinds": [["gcd", 8, -1]]},
        {"kinds": [["gcd", MAX_DECLARED_ANSWERS + 1, 4]]},
        {"pass_1": 1.5},
        {"pass_1": math.nan},
        {"version": "1 <script>"},
        {"used": -1},
        {"used_of": [["1f2e3d4c5b6a7988", 1]] * (MAX_DECLARED_PEERS + 1)},
        {"used_of": [["12D3KooW", 1]]},
        {"since": math.inf},
        [],
    ],
)
def test_what_is_declared_has_limits(declared: Any) -> None:
    sealed = seal({**fields(CARD), "declared": declared}, CARD_TAG)
    assert refused(lambda: verify_card(sealed, SWARM), REASONS) == "schema"


def test_a_card_from_before_there_were_crews() -> None:
    golden = (DATA / "peer_card_v1.bin").read_bytes()
    assert verify_card(golden, SWARM) == (IDENTITY.peer_id, replace(CARD, protocol=1, crew=None))


@both
def test_a_later_version_may_add_fields(kind: Kind) -> None:
    later = {**fields(kind.record), "later": {"deep": [1, [2, [3]]]}}
    assert kind.open(seal(later, kind.tag), SWARM) == (IDENTITY.peer_id, kind.record)


def test_later_versions_may_extend_groups_and_rollouts() -> None:
    batch: Any = fields(BATCH)
    batch["groups"][0]["later"] = 1
    batch["groups"][0]["task"]["later"] = 1
    batch["groups"][0]["rollouts"][0].append("later")  # rollouts are arrays, and so are turns
    batch["groups"][0]["rollouts"][0][0][0] += ["later"]
    assert verify_batch(seal(batch, BATCH_TAG), SWARM)[1] == BATCH


def test_fields_with_defaults_may_be_missing() -> None:
    needed = ("protocol", "swarm", "created", "name", "roles")
    card = {name: value for name, value in fields(CARD).items() if name in needed}
    assert verify_card(seal(card, CARD_TAG), SWARM)[1].shards == []


# --------------------------------------------------------------------- who said it


@both
def test_a_change_anywhere_breaks_the_signature(kind: Kind) -> None:
    sealed = kind.seal(kind.record, IDENTITY)
    for place in range(0, len(sealed), 7):
        forged = bytearray(sealed)
        forged[place] ^= 1
        assert refused(lambda data=bytes(forged): kind.open(data, SWARM), {"signature"}) == "signature"  # type: ignore[misc]


@both
def test_nobody_speaks_in_anothers_name(kind: Kind) -> None:
    forged = STRANGER.public_key + kind.seal(kind.record, IDENTITY)[len(STRANGER.public_key) :]
    with pytest.raises(RemoteProtocolError, match="signature"):
        kind.open(forged, SWARM)
    assert kind.open(kind.seal(kind.record, STRANGER), SWARM)[0] == STRANGER.peer_id


def test_a_batch_does_not_pass_for_a_card() -> None:
    body = msgspec.msgpack.encode({**fields(BATCH), **fields(CARD)})  # fits both schemas
    assert verify_card(seal(body, CARD_TAG), SWARM)[1] == CARD
    for opened, tag in ((verify_card, BATCH_TAG), (verify_batch, CARD_TAG)):
        with pytest.raises(RemoteProtocolError, match="signature"):
            opened(seal(body, tag), SWARM)


@both
def test_another_swarm(kind: Kind) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        kind.open(kind.seal(kind.record, IDENTITY), "5b" * 32)
    assert caught.value.reason == "swarm"


@both
@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, min(SPOKEN) - 1, -1, 2**63])
def test_versions_are_checked_before_schemas(kind: Kind, version: int) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        kind.open(seal({"protocol": version, "everything": "else"}, kind.tag), SWARM)
    assert caught.value.reason == ("newer" if version > PROTOCOL_VERSION else "version")


@both
def test_a_node_speaks_two_versions(kind: Kind) -> None:
    for version, reason in ((4, "version"), (5, None), (6, None), (7, "newer")):
        sealed = kind.seal(msgspec.structs.replace(kind.record, protocol=version), IDENTITY)
        if reason is None:
            assert kind.open(sealed, SWARM, spoken_by(6))[1].protocol == version
            continue
        with pytest.raises(RemoteProtocolError) as caught:
            kind.open(sealed, SWARM, spoken_by(6))
        assert caught.value.reason == reason
    assert spoken_by(1) == {1} and spoken_by(2) == {1, 2} == SPOKEN


def test_all_write_what_all_understand() -> None:
    def card(protocol: int, speaks: int = 0) -> PeerCard:
        return msgspec.structs.replace(CARD, protocol=protocol, speaks=speaks)

    spoken = spoken_by(6)
    assert common_version([], spoken) == 5  # whoever is there understands that, too, or none of it
    assert common_version([card(5), card(5, 6)], spoken) == 5
    assert common_version([card(5, 6), card(6)], spoken) == 6
    assert common_version([card(6, 7)], spoken) == 6
    assert common_version([card(3)], spoken) == 5
    assert common_version([], spoken, newer_heard=True) == 6  # those who are there do not read anything older
    assert common_version([card(5)], spoken, newer_heard=True) == 5
    members = {"older": card(5), "same": card(5, 6), "newer": card(6, 7)}
    assert [version_for(peer, members, spoken) for peer in (*members, "unknown")] == [5, 6, 6, 5]
    for version, speaks in ((5, 6), (6, 0)):
        written = in_version(CARD, version, spoken)
        assert (written.protocol, written.speaks) == (version, speaks)
        assert verify_card(sign_card(written, IDENTITY), SWARM, spoken)[1] == written


def test_unspoken_versions_are_explained_to_both_ends() -> None:
    for version, how in ((7, "new"), (4, "old")):
        with pytest.raises(
            RemoteProtocolError, match=f"protocol {version} is too {how} for a node that speaks 5 and 6"
        ):
            check_version(version, spoken_by(6))


# --------------------------------------------------------------------- what is refused


@both
def test_size_is_checked_before_anything_else(kind: Kind) -> None:
    for data in (b"", bytes(SIGNED_HEAD_BYTES), bytes(kind.limit + 1)):
        with pytest.raises(RemoteProtocolError) as caught:
            kind.open(data, SWARM)
        assert caught.value.reason == "size"
    with pytest.raises(RemoteProtocolError) as caught:
        kind.open(bytes(kind.limit), SWARM)
    assert caught.value.reason == "signature"


GROUP: Any = fields(BATCH)["groups"]
BAD_BATCHES: dict[str, Any] = {
    "no groups": {"groups": []},
    "too many groups": {"groups": GROUP * (MAX_GROUPS + 1)},
    "one rollout": {"groups": [{**GROUP[0], "rollouts": [[[["a", True]]]]}]},
    "too many rollouts": {"groups": [{**GROUP[0], "rollouts": [[[["a", True]]]] * (MAX_ROLLOUTS + 1)}]},
    "long text": {"groups": [{**GROUP[0], "rollouts": [[[["a", True]]], [[["a" * (MAX_TEXT_CHARS + 1), True]]]]}]},
    "text of bytes": {"groups": [{**GROUP[0], "rollouts": [[[["a", True]]], [[[b"a", True]]]]}]},
    "slot": {"groups": [{**GROUP[0], "slot": SLOTS}]},
    "epoch": {"groups": [{**GROUP[0], "epoch": -1}]},
    "huge epoch": {"groups": [{**GROUP[0], "epoch": 2**64 - 1}]},
    "prompt": {"groups": [{**GROUP[0], "prompt": bytes(15)}]},
    "token": {"groups": [{**GROUP[0], "rollouts": [[[["a", True, [-1]]]], [[["b", True]]]]}]},
    "no turn": {"groups": [{**GROUP[0], "rollouts": [[[]], [[]]]}]},
    "too many turns": {"groups": [{**GROUP[0], "rollouts": [[[["a", True]] * (MAX_TURNS + 1)]] * 2}]},
    "form of protocol 1": {"groups": [{**GROUP[0], "rollouts": [["a", True]] * 2}]},
    "kind": {"groups": [{**GROUP[0], "kind": "<b>"}]},
    "judge": {"groups": [{**GROUP[0], "judge": -1}]},
    "created NaN": {"created": math.nan},
    "created never": {"created": math.inf},
    "created before 1970": {"created": -1.0},
    "temperature NaN": {"sampling": {"max_new_tokens": 1, "temperature": math.nan, "top_p": 1.0}},
    "top_p NaN": {"sampling": {"max_new_tokens": 1, "temperature": 1.0, "top_p": math.nan}},
    "fingerprint": {"fingerprint": "0123456789ABCDEF"},
    "fingerprint and a line break": {"fingerprint": "0123456789abcdef\n"},
    "swarm": {"swarm": "5a" * 31},
    "sequence": {"sequence": 1.5},
}
CREW: Any = fields(CARD)["crew"]
BAD_CARDS: dict[str, Any] = {
    "created NaN": {"created": math.nan},
    "speed NaN": {"speed": math.nan},
    "speed": {"speed": math.inf},
    "role": {"roles": ["king"]},
    "roles": {"roles": ["trainer"] * 4},
    "name": {"name": "a b"},
    "terminal escape": {"name": "\x1b[2J"},
    "long name": {"name": "n" * 33},
    "address": {"addresses": ["ip4/1.2.3.4"]},
    "address with a blank": {"addresses": ["/ip4/1.2.3.4 /tcp/1"]},
    "long address": {"addresses": ["/" + "a" * 192]},
    "addresses": {"addresses": ["/a"] * 9},
    "shard": {"shards": [1024]},
    "gossip id": {"gossip_id": "/"},
    "stages": {"stages": [0, 1, 2]},
    "cohort": {"cohort": "0"},
    "crew": {"crew": "red"},
    "crew's name": {"crew": {**CREW, "id": "red"}},
    "crew without an id": {"crew": {**CREW, "id": ""}},
    "crew's architecture": {"crew": {**CREW, "architecture": "0"}},
    "crew of none": {"crew": {**CREW, "count": 0}},
    "seat": {"crew": {**CREW, "seats": [-1]}},
    "term": {"crew": {**CREW, "term": 2**53}},
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [(BATCHES, change) for change in BAD_BATCHES.values()] + [(CARDS, change) for change in BAD_CARDS.values()],
    ids=[f"batch: {name}" for name in BAD_BATCHES] + [f"card: {name}" for name in BAD_CARDS],
)
def test_fields_out_of_range_are_refused(kind: Kind, change: dict[str, Any]) -> None:
    kind.open(seal(fields(kind.record), kind.tag), SWARM)
    with pytest.raises(RemoteProtocolError) as caught:
        kind.open(seal({**fields(kind.record), **change}, kind.tag), SWARM)
    assert caught.value.reason == "schema"


BODY = {kind: msgspec.msgpack.encode(kind.record) for kind in (BATCHES, CARDS)}


def deep(kind: Kind) -> bytes:
    """A good record with one more field, of lists in lists up to the size limit."""
    head = 3 if BODY[kind][0] == 0xDE else 1
    body = b"\xde\x00" + bytes([len(fields(kind.record)) + 1]) + BODY[kind][head:] + b"\xa1x"  # map of one more
    return body + b"\x91" * (kind.limit - SIGNED_HEAD_BYTES - len(body))


NASTY: dict[str, Callable[[Kind], bytes]] = {
    "lists in lists": lambda kind: b"\x91" * (kind.limit - SIGNED_HEAD_BYTES),
    "lists in lists in an unknown field": deep,
    "claims four billion items": lambda kind: b"\x81\xa8protocol\xdd\xff\xff\xff\xff",
    "claims four billion bytes": lambda kind: b"\x81\xa5swarm\xc6\xff\xff\xff\xff",
    "text that is not utf-8": lambda kind: BODY[kind].replace(b"fedcba", b"fedcb\xff"),
    "surrogate": lambda kind: BODY[kind].replace(b"fedcba", b"fed\xed\xa0\x80"),
    "two values": lambda kind: BODY[kind] + b"\xc0",
    "cut off": lambda kind: BODY[kind][:-1],
    "extension": lambda kind: b"\xd4\x01\x00",
    "time": lambda kind: BODY[kind].replace(b"\xcb", b"\xc7\x08\xff", 1),
}


@both
@pytest.mark.parametrize("nasty", NASTY.values(), ids=NASTY)
def test_signed_nonsense_is_refused(kind: Kind, nasty: Callable[[Kind], bytes]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        kind.open(seal(nasty(kind), kind.tag), SWARM)
    assert caught.value.reason == "schema"


# --------------------------------------------------------------------- no bytes break it


@both
@given(data=st.data())
def test_random_bytes_signed_or_not(kind: Kind, data: st.DataObject) -> None:
    noise = data.draw(st.binary(max_size=400))
    assert refused(lambda: kind.open(noise, SWARM), REASONS) is not None
    assert refused(lambda: kind.open(seal(noise, kind.tag), SWARM), REASONS) is not None


@both
@given(data=st.data())
def test_mutated_bodies_keep_limits_or_are_refused(kind: Kind, data: st.DataObject) -> None:
    sealed = seal(data.draw(mutations(BODY[kind])), kind.tag)
    if refused(lambda: kind.open(sealed, SWARM), REASONS) is None:
        kind.seal(kind.open(sealed, SWARM)[1], IDENTITY)  # raises for a record beyond a limit


@both
@given(data=st.data())
def test_any_value_in_any_field(kind: Kind, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields(kind.record))))
    sealed = seal({**fields(kind.record), name: data.draw(values())}, kind.tag)
    if refused(lambda: kind.open(sealed, SWARM), REASONS) is None:
        kind.seal(kind.open(sealed, SWARM)[1], IDENTITY)


# --------------------------------------------------------------------- own mistakes


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (BATCHES, replace(BATCH, groups=[])),
        (BATCHES, replace(BATCH, swarm="x")),
        (BATCHES, replace(BATCH, created=math.nan)),
        (BATCHES, replace(BATCH, groups=BATCH.groups * (MAX_GROUPS + 1))),
        (CARDS, replace(CARD, name="a b")),
        (CARDS, replace(CARD, addresses=["/" + "a" * 191] * 8, gossip=["/" + "a" * 191] * 8)),  # each fits, not all
    ],
)
def test_what_peers_would_refuse_is_not_sealed(kind: Kind, record: RolloutBatch | PeerCard) -> None:
    with pytest.raises(LocalProtocolError):
        kind.seal(record, IDENTITY)
