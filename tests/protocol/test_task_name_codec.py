"""Task names on the wire: golden bytes, limits, and no bytes that break the decoder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol import limits
from swarm_protocol.codec import RecordCodec
from swarm_protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from swarm_protocol.messages import TaskName

GOLDEN = Path(__file__).parents[1] / "data" / "task_name_v1.msgpack"
MAX_BYTES = 512
NAMES: RecordCodec[TaskName] = RecordCodec(TaskName, MAX_BYTES)
encode_task_name, decode_task_name = NAMES.encode, NAMES.decode
NAME = TaskName("gcd", "0123456789abcdef", "reasoning-gym 0.1.25", seed=0, index=123_456_789)


def names() -> st.SearchStrategy[TaskName]:
    return st.builds(
        TaskName,
        environment=st.from_regex(r"[a-z0-9_]{1,64}", fullmatch=True),
        config=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
        generator=st.from_regex(r"[ -~]{1,64}", fullmatch=True),
        seed=st.integers(0, limits.TASK_SEEDS - 1),
        index=st.integers(0, limits.TASK_INDICES - 1),
    )


def test_golden_bytes() -> None:
    assert encode_task_name(NAME) == GOLDEN.read_bytes()
    assert decode_task_name(GOLDEN.read_bytes()) == NAME


@given(names())
def test_round_trip_within_the_limit(name: TaskName) -> None:
    data = encode_task_name(name)
    assert decode_task_name(data) == name
    assert len(data) <= MAX_BYTES // 2  # the limit leaves room for later fields


@given(st.binary(max_size=MAX_BYTES + 1))
def test_random_bytes_raise_remote_protocol_error_only(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_task_name(data)
    assert caught.value.reason in {"size", "schema"}


@given(names(), st.data())
def test_mutated_bytes_decode_or_raise_remote_protocol_error(name: TaskName, data: st.DataObject) -> None:
    mutated = bytearray(encode_task_name(name))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(mutated) - 1))
        mutated[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not mutated:
            break
    try:
        decoded = decode_task_name(bytes(mutated))
    except RemoteProtocolError as error:
        assert error.reason in {"size", "schema"}
    else:
        encode_task_name(decoded)  # whatever decodes is within every limit


@pytest.mark.parametrize(
    "field",
    [
        {"environment": ""},
        {"environment": "../gcd"},
        {"environment": "gcd\n"},
        {"environment": "a" * 65},
        {"config": "0123456789abcdeF"},
        {"config": "0123"},
        {"generator": "reasoning-gym\x00"},
        {"generator": "x" * 65},
        {"seed": -1},
        {"seed": limits.TASK_SEEDS},
        {"index": -1},
        {"index": limits.TASK_INDICES},
        {"index": 1.5},
        {"index": True},
    ],
)
def test_fields_out_of_range_are_refused(field: dict[str, object]) -> None:
    data = msgspec.msgpack.encode({**msgspec.to_builtins(NAME), **field})
    with pytest.raises(RemoteProtocolError, match="schema"):
        decode_task_name(data)


def test_size_is_checked_before_decoding() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_task_name(encode_task_name(NAME) + bytes(MAX_BYTES))
    assert caught.value.reason == "size"


def test_a_later_version_may_add_fields() -> None:
    data = msgspec.msgpack.encode({**msgspec.to_builtins(NAME), "later": [1, 2, 3]})
    assert decode_task_name(data) == NAME


def test_own_mistakes_are_local_errors() -> None:
    with pytest.raises(LocalProtocolError, match="index"):
        encode_task_name(TaskName("gcd", "0" * 16, "jsonl 1", seed=0, index=limits.TASK_INDICES))
    assert issubclass(LocalProtocolError, ProtocolError)
    assert not issubclass(LocalProtocolError, RemoteProtocolError)
