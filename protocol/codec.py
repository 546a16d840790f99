"""Bytes to records and back: msgpack with a schema.

Decoding any bytes gives a record or `RemoteProtocolError`.
"""

from __future__ import annotations

import msgspec

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_TASK_NAME_BYTES
from protocol.messages import TaskName

_encoder = msgspec.msgpack.Encoder()
_task_name_decoder = msgspec.msgpack.Decoder(TaskName)


def encode_task_name(name: TaskName) -> bytes:
    """Raises `LocalProtocolError` for a name that peers would refuse."""
    data = _encoder.encode(name)
    try:
        decode_task_name(data)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"task name {name} cannot be sent: {error}") from error
    return data


def decode_task_name(data: bytes) -> TaskName:
    """Raises `RemoteProtocolError` with reason `size` or `schema`, and nothing else."""
    if len(data) > MAX_TASK_NAME_BYTES:  # before decoding: an oversized message costs nothing
        raise RemoteProtocolError("size", f"task name of {len(data)} bytes")
    try:
        return _task_name_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError("schema", str(error)) from error
