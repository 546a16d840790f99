"""The header of a GGUF file, which may be a stranger's: bounded and checked before any library reads it.

    "GGUF", version, numbers of tensors and of entries | entries: key, type, value | tensors: name, sizes, type, offset
    | padding | the tensors' data

Loads no torch. The file must be able to hold the tensors that its header declares, and `converting` makes no model that
is larger than these, so nothing that is allocated for it later is larger than some multiple of the file.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from swarm_node.errors import UserError
from swarm_protocol.limits import MAX_LAYERS

MAX_HEADER_BYTES = 64 * 2**20  # the longest known, with 262,144 words, have 16 MB
MAX_ENTRIES, MAX_TENSORS = 2**12, 2**14  # experts lie in one tensor, so the largest models have some thousands
MAX_ITEMS = 2**21  # of all arrays together: words, their scores and kinds, and merges
MAX_NAME_BYTES = 2**10
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**16
VERSIONS = (2, 3)
AGAIN = "download or copy it again"
OTHER_FILE = "take a GGUF file of another kind, or the model in safetensors"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_COUNTED = re.compile(r"(^|[._])(block|layer)s?_count$")  # numbers that become loops in the library


@dataclass(frozen=True)
class Header:
    """What is known of a GGUF file before it is read."""

    architecture: str  # as llama.cpp names it, for example `llama`
    values: int  # of all tensors together
    splitting: str  # how its tokenizer splits a text before it merges, as llama.cpp names it; empty = not said


@dataclass
class _Entries:
    """The entries of a header, as far as they matter here."""

    scalars: dict[str, object] = field(default_factory=dict)  # numbers and texts
    items: dict[str, int] = field(default_factory=dict)  # lengths of arrays


class _Ended(Exception):
    """The header goes on after the bytes that were read."""


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def skip(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise _Ended
        return start

    def number(self, code: str) -> int:
        """A number of a `struct` type."""
        (value,) = struct.unpack_from(f"<{code}", self._data, self.skip(struct.calcsize(f"<{code}")))
        return value

    def text(self) -> str:
        """A text after its length in bytes."""
        size = self.number("Q")
        start = self.skip(size)
        return self._data[start : start + size].decode("utf-8")


def read_header(file: Path) -> Header:
    """The header of a file. Raises UserError if it is no GGUF file, or one that no model has, or is cut off."""
    try:
        stat = file.stat()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    return _read(file, (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@lru_cache(maxsize=16)
def _read(file: Path, mark: tuple[int, int, int]) -> Header:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_HEADER_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    try:
        return _parsed(file, data, mark[0])
    except _Ended:
        if len(data) < mark[0]:
            raise UserError(
                f"{file}: its header takes more than {MAX_HEADER_BYTES // 2**20} MiB, which none does"
            ) from None
        raise UserError(f"{file} ends within its header: {AGAIN}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} has a header that is not text where it should be: {AGAIN}") from None


def _parsed(file: Path, data: bytes, size: int) -> Header:
    if data[:4] != b"GGUF":
        raise UserError(f"{file} is no GGUF file, whatever its name says: {AGAIN}")
    cursor = _Cursor(data)
    cursor.skip(4)
    version = cursor.number("I")
    if version not in VERSIONS:
        raise UserError(f"{file} is a GGUF file of version {version}; versions 2 and 3 are read, {OTHER_FILE}")
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    if tensors > MAX_TENSORS or entries > MAX_ENTRIES:
        raise UserError(
            f"{file} declares {tensors:,} tensors and {entries:,} entries; allowed are {MAX_TENSORS:,} and "
            f"{MAX_ENTRIES:,}"
        )
    found = _entries(file, cursor, entries)
    values, needed = _tensors(file, cursor, tensors)
    alignment = found.scalars.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise UserError(f"{file}: general.alignment is {alignment!r}, which is no power of two up to {MAX_ALIGNMENT}")
    if (missing := cursor.at + needed - size) > 0:
        raise UserError(f"{file} lacks {missing:,} of the bytes that its header declares: {AGAIN}")
    architecture = _checked_entries(file, found)
    return Header(architecture, values, str(found.scalars.get("tokenizer.ggml.pre", "")))


def _entries(file: Path, cursor: _Cursor, count: int) -> _Entries:
    found, items = _Entries(), 0
    for _ in range(count):
        key = _name(file, cursor)
        if key in found.scalars or key in found.items:
            raise UserError(f"{file}: {key} is there twice; {AGAIN}")
        kind = cursor.number("I")
        if kind in _SCALARS:
            found.scalars[key] = cursor.number(_SCALARS[kind])
        elif kind == _TEXT:
            found.scalars[key] = cursor.text()
        elif kind == _ARRAY:
            kind, length = cursor.number("I"), cursor.number("Q")
            items += length
            if items > MAX_ITEMS:
                raise UserError(f"{file}: its arrays have {items:,} items and more, allowed are {MAX_ITEMS:,}")
            _skip_items(file, cursor, key, kind, length)
            found.items[key] = length
        else:
            raise _unknown(file, key, kind)
    return found


def _skip_items(file: Path, cursor: _Cursor, key: str, kind: int, length: int) -> None:
    if kind == _TEXT:
        for _ in range(length):
            cursor.skip(cursor.number("Q"))
    elif kind in _SCALARS:
        cursor.skip(length * struct.calcsize(f"<{_SCALARS[kind]}"))
    else:  # arrays of arrays: no model has them
        raise _unknown(file, key, kind)


def _unknown(file: Path, key: str, kind: int) -> UserError:
    return UserError(f"{file}: {key} is of type {kind}, which is not read; {OTHER_FILE}")


def _name(file: Path, cursor: _Cursor) -> str:
    name = cursor.text()
    if len(name) > MAX_NAME_BYTES:
        raise UserError(f"{file} has a name of {len(name)} characters in its header: {AGAIN}")
    return name


def _tensors(file: Path, cursor: _Cursor, count: int) -> tuple[int, int]:
    """(values of all tensors together, bytes of data in the file). The tensors' bytes may not overlap."""
    names, values, taken, end = set[str](), 0, 0, 0
    for _ in range(count):
        name = _name(file, cursor)
        dimensions = cursor.number("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise UserError(f"{file}: tensor {name} has {dimensions} dimensions")
        sizes = [cursor.number("Q") for _ in range(dimensions)]
        kind, offset = cursor.number("I"), cursor.number("Q")
        if name in names:
            raise UserError(f"{file}: tensor {name} is there twice; {AGAIN}")
        names.add(name)
        number = math.prod(sizes)
        size = _bytes_of(file, name, kind, sizes[0], number)
        values, taken, end = values + number, taken + size, max(end, offset + size)
    if taken > end:
        raise UserError(f"{file}: its tensors lie over each other; {AGAIN}")
    return values, end


def _bytes_of(file: Path, name: str, kind: int, row: int, number: int) -> int:
    """Bytes of a tensor of `number` values in rows of `row`. Raises UserError for a type that is not dequantised."""
    block, width, called = _block(kind)
    if not width:
        raise UserError(f"{file}: tensor {name} is of type {called}, which is not read; {OTHER_FILE}")
    if number == 0 or row % block:
        raise UserError(f"{file}: tensor {name} of {number:,} values in rows of {row:,} is no {called}")
    return number // block * width


@lru_cache(maxsize=64)
def _block(kind: int) -> tuple[int, int, str]:
    """(values, bytes) of a block of a type of tensors, and the type's name; 0 bytes if it is not dequantised."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    if kind not in set(GGMLQuantizationType):
        return 1, 0, str(kind)
    quantised = GGMLQuantizationType(kind)
    block, width = GGML_QUANT_SIZES[quantised]
    try:
        dequantize(np.zeros((1, width), np.uint8), quantised)
    except NotImplementedError:
        width = 0
    return block, width, quantised.name


def _checked_entries(file: Path, found: _Entries) -> str:
    """The architecture; raises UserError for entries that no model of text has."""
    architecture = found.scalars.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise UserError(f"{file} does not say what model it is (general.architecture): {OTHER_FILE}")
    parts = found.scalars.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UserError(split_text(file, parts))
    for key, value in found.scalars.items():
        if _COUNTED.search(key) and isinstance(value, int | float) and not 0 <= value <= MAX_LAYERS:
            raise UserError(f"{file}: {key} is {value:,}, allowed are {MAX_LAYERS:,}")
    if not found.items.get("tokenizer.ggml.tokens"):
        raise UserError(f"{file} has no tokenizer, so it is no model of text by itself: {OTHER_FILE}")
    return architecture


def split_text(file: Path, parts: int) -> str:
    """The sentence about a model in several files."""
    return (
        f"{file} is one of {parts} parts of a model: join them first (`llama-gguf-split --merge FIRST.gguf "
        "WHOLE.gguf`), and name the whole"
    )
