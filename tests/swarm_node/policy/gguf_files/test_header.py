"""Headers of GGUF files, of strangers as well, before any library reads them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from swarm_node.errors import UserError
from swarm_node.policy.gguf_files import header
from swarm_node.policy.gguf_files.header import read_header
from tests.support.gguf_files import tensors, write_gguf

WORDS = ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 1) + b"a")
LLAMA = ("general.architecture", 8, struct.pack("<Q", 5) + b"llama")
ONE = ("w", [32], 0, 0)
Entry = tuple[str, int, bytes]
TensorEntry = tuple[str, list[int], int, int]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def made(
    entries: tuple[Entry, ...] = (LLAMA, WORDS),
    tensors: tuple[TensorEntry, ...] = (ONE,),
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 4096,
) -> bytes:
    """A file with these entries (key, type, bytes) and tensors (name, sizes, type, offset), and zeros as data."""
    number_of_tensors, number_of_entries = counts or (len(tensors), len(entries))
    whole = b"GGUF" + struct.pack("<IQQ", version, number_of_tensors, number_of_entries)
    for key, kind, value in entries:
        whole += text(key) + struct.pack("<I", kind) + value
    for name, sizes, kind, offset in tensors:
        whole += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return whole + bytes(data)


def test_a_header_tells_architecture_and_size(tiny: Path) -> None:
    found = read_header(tiny)
    assert (found.architecture, found.splitting) == ("llama", "smollm")
    assert found.values == sum(each.size for each in tensors().values())


def test_the_smallest_header_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(made())
    assert read_header(tmp_path / "a.gguf").values == 32


HUGE = 2**63
HOSTILE: list[tuple[str, bytes, str]] = [
    ("nothing in it", b"", "is no GGUF file"),
    ("a pickle", b"\x80\x04", "is no GGUF file"),
    ("ends in the magic", b"GGUF\x03", "ends within its header"),
    ("version 1", made(version=1), "of version 1"),
    ("other byte order", made(version=0x03000000), "of version"),
    ("many tensors", made(counts=(HUGE, 2)), "declares 9,223,372,036,854,775,808 tensors"),
    ("many entries", made(counts=(1, 5000)), "5,000 entries"),
    ("entries that are not there", made(counts=(1, 4000)), "is there twice"),
    ("a key of any length", made((("k", 8, b""),))[:24] + struct.pack("<Q", HUGE), "ends within its header"),
    ("a text of any length", made((LLAMA, ("k", 8, struct.pack("<Q", HUGE)))), "ends within its header"),
    ("a text that is none", made((("general.architecture", 8, struct.pack("<Q", 1) + b"\xff"),)), "not text"),
    ("an array of any length", made((LLAMA, ("k", 9, struct.pack("<IQ", 8, HUGE)))), "items and more, allowed are"),
    ("numbers past the end", made((LLAMA, ("k", 9, struct.pack("<IQ", 12, 2**20)))), "ends within its header"),
    ("texts past the end", made((LLAMA, ("k", 9, struct.pack("<IQQ", 8, 2, HUGE)))), "ends within its header"),
    ("arrays in arrays", made((LLAMA, ("k", 9, struct.pack("<IQ", 9, 1)))), "k is of type 9"),
    ("a type that is none", made((LLAMA, ("k", 77, b""))), "k is of type 77"),
    ("a key twice", made((LLAMA, LLAMA)), "general.architecture is there twice"),
    ("no architecture", made((WORDS,)), "does not say what model it is"),
    ("an architecture that is a number", made((("general.architecture", 4, bytes(4)), WORDS)), "does not say"),
    ("no tokenizer", made((LLAMA,)), "has no tokenizer"),
    ("a part", made((LLAMA, WORDS, ("split.count", 2, struct.pack("<H", 3)))), "is one of 3 parts .* --merge"),
    (
        "layers",
        made((LLAMA, WORDS, ("llama.block_count", 4, struct.pack("<I", 2**31)))),
        "block_count is 2,147,483,648",
    ),
    ("layers below none", made((LLAMA, WORDS, ("llama.block_count", 5, struct.pack("<i", -1)))), "block_count is -1"),
    ("alignment", made((LLAMA, WORDS, ("general.alignment", 4, struct.pack("<I", 3)))), "no power of two"),
    ("no alignment", made((LLAMA, WORDS, ("general.alignment", 4, bytes(4)))), "no power of two"),
    ("a tensor of any size", made(tensors=(("w", [2**40, 2**40], 0, 0),)), "lacks .* of the bytes"),
    ("a tensor behind the end", made(tensors=(("w", [32], 0, 2**40),)), "lacks .* of the bytes"),
    ("a tensor without values", made(tensors=(("w", [0, 32], 0, 0),)), "of 0 values"),
    ("a tensor without dimensions", made(tensors=(("w", [], 0, 0),)), "has 0 dimensions"),
    ("many dimensions", made(tensors=(("w", [1] * 9, 0, 0),)), "has 9 dimensions"),
    ("rows that are no blocks", made(tensors=(("w", [33], 3, 0),)), "33 values in rows of 33 is no Q4_1"),
    ("an unknown type", made(tensors=(("w", [32], 4711, 0),)), "tensor w is of type 4711, which is not read"),
    ("whole numbers", made(tensors=(("w", [32], 26, 0),)), "tensor w is of type I32, which is not read"),
    ("a tensor twice", made(tensors=(ONE, ONE)), "tensor w is there twice"),
    ("tensors over each other", made(tensors=(ONE, ("v", [32], 0, 0))), "lie over each other"),
    ("a long name", made(tensors=(("w" * 2000, [32], 0, 0),)), "a name of 2000 characters"),
]


@pytest.mark.parametrize(("content", "said"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_hostile_headers_are_refused_in_a_sentence(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "stranger.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match=said) as refused:
        read_header(file)
    assert str(file) in str(refused.value)


def test_a_header_is_bounded_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 64)
    (tmp_path / "a.gguf").write_bytes(made())
    with pytest.raises(UserError, match="its header takes more than"):
        read_header(tmp_path / "a.gguf")


@pytest.mark.parametrize("lost", [64, 1000, 20_000])
def test_a_file_that_is_cut_off_is_refused(lost: int, tiny: Path) -> None:
    tiny.write_bytes(tiny.read_bytes()[:-lost])
    with pytest.raises(UserError, match="lacks .* of the bytes that its header declares: download or copy it again"):
        read_header(tiny)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_1])
def test_sizes_are_those_of_the_library(kind: Type, tmp_path: Path) -> None:
    found = gguf.GGUFReader(write_gguf(tmp_path / "a.gguf", kind))
    assert read_header(tmp_path / "a.gguf").values == sum(int(each.n_elements) for each in found.tensors)


def test_types_that_are_dequantised_are_those_of_the_library() -> None:
    def is_read(kind: Type) -> bool:
        data: Any = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            return bool(gguf.dequantize(data, kind).size)
        except NotImplementedError:
            return False

    assert {kind.name: header._block(kind)[1] > 0 for kind in Type} == {kind.name: is_read(kind) for kind in Type}
