"""A program that reads a Parquet file. `parquet` runs it in a process with a limit of memory.

    standard input  --the file--> frames: columns that hold bytes | up to 32 rows | … | no rows --> standard output

A frame is the length of a MessagePack value, and the value; in place of any, a text says what is wrong with the file.
All rows are kept to the end: if they fit here, they fit where they are read.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH_BYTES = 8
ROWS = 32  # decoded at a time
MAX_CHARS = 300  # of what is wrong


def _limit_memory(size: int) -> None:
    """Let this process have `size` bytes of address space more than it has."""
    pa.set_memory_pool(pa.system_memory_pool())  # others take address space in advance
    with suppress(ValueError, OSError):  # macOS does not have it
        whole = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + size
        resource.setrlimit(resource.RLIMIT_AS, (whole, whole))


def _tell(value: Any) -> None:
    """Write one frame."""
    frame = msgspec.msgpack.encode(value)
    sys.stdout.buffer.write(len(frame).to_bytes(LENGTH_BYTES) + frame)


def _tell_rows(data: pa.Buffer) -> None:
    """Write the frames of a file with this content. Raises pa.ArrowException, OSError, ValueError, MemoryError."""
    file = pq.ParquetFile(data)
    fields = list(file.schema_arrow)
    columns = [field.name for field in fields if not _holds_bytes(field.type)]
    _tell([field.name for field in fields if field.name not in columns])
    kept = []
    for batch in file.iter_batches(ROWS, columns=columns, use_threads=False):
        if batch.num_rows:
            kept.append(msgspec.to_builtins(batch.to_pylist(), builtin_types=(bytes,)))
            _tell(kept[-1])
    _tell([])


def _holds_bytes(kind: Any) -> bool:
    """Whether values of a type of pyarrow have bytes in them, as images have."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))


def main() -> int:
    data = pa.py_buffer(sys.stdin.buffer.read())
    _limit_memory(int(sys.argv[-1]))
    try:
        _tell_rows(data)
    except MemoryError:
        return 1
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, LookupError) as error:
        _tell(" ".join(f"{error}".split())[:MAX_CHARS] or type(error).__name__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
