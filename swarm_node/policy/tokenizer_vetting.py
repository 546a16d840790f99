"""Refuse a tokenizer that takes endless time or memory for a text.

    tokenizer.json --check_tokenizer_file--> size, parts --library--> tokenizer --check_tokenizer--> the parts it has

The file is looked at before the library reads it, as loading already normalises added tokens. The loaded tokenizer is
looked at again, as transformers makes parts from other files, too. Both raise UserError with the part and what to do.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from transformers import PreTrainedTokenizerBase

from swarm_node.errors import UserError
from swarm_node.policy.tokenizing import guarded, longest_token
from swarm_node.say import in_short

MAX_FILE_BYTES = 64 * 2**20  # the longest known tokenizer.json, of 262,144 tokens, has 33 MB
MAX_PART_BYTES = 2 * 2**20  # the table of a SentencePiece normalizer has 0.4 MB
MAX_PARTS = 8  # parts in a sequence, those of sequences in it included
MAX_GROWTH = 2048
"""Characters that all parts together make of one: ALBERT, which has most, makes up to 1,296 of a rare one."""
MAX_REPLACED = 4  # times that a replacement may be as long as what it replaces
MAX_MAPPED_BYTES = 64  # longest text in the table of a SentencePiece normalizer; Unicode's longest has 33
MAX_TEXT = 64  # characters of a text that a part adds
MAX_ADDED = 16  # special tokens around a text, and ids of each
MAX_TOKEN_CHARS = 4096  # the longest known tokens are some hundred blanks
MAX_WORD_CHARS = 1024  # of a word that WordPiece cuts up, in time that grows with its square; usual are 100
ADVICE = "; take a model whose tokenizer has the usual parts"

NORMALIZERS = {"BertNormalizer": 12, "ByteLevel": 4, "Lowercase": 2, "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18} | (
    dict.fromkeys(("Nmt", "Precompiled", "Prepend", "Replace", "Strip", "StripAccents"), 1)
)
"""Known parts, and the characters that each makes of one at most, besides those of tables and replacements."""
PRE_TOKENIZERS = {"ByteLevel": 4, "Metaspace": 2} | dict.fromkeys(
    "BertPreTokenizer CharDelimiterSplit Digits FixedLength Punctuation Split UnicodeScripts Whitespace "
    "WhitespaceSplit".split(),
    1,
)
DECODERS = {"BPEDecoder": 2, "CTC": 2, "WordPiece": 2} | dict.fromkeys(
    ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"), 1
)
POST_PROCESSORS = dict.fromkeys(("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"), 1)
KINDS: dict[str, tuple[str, Mapping[str, int]]] = {
    "normalizer": ("normalizers", NORMALIZERS),
    "pre_tokenizer": ("pretokenizers", PRE_TOKENIZERS),
    "post_processor": ("processors", POST_PROCESSORS),
    "decoder": ("decoders", DECODERS),
}
"""Kind of part -> (key of a sequence's list, known parts)."""


class _Model(msgspec.Struct):
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int | None = None


class _File(msgspec.Struct):
    """What is looked at; the vocabulary is passed over."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")
    model: _Model = msgspec.field(default_factory=_Model)


def check_tokenizer_file(file: Path) -> None:
    """A tokenizer.json as it lies on disk."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{file} is larger than {MAX_FILE_BYTES // 2**20} MiB, which no tokenizer is")
        found = msgspec.json.decode(file.read_bytes(), type=_File)
        raw = {kind: bytes(getattr(found, kind)) for kind in KINDS}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {file}: {in_short(error)}") from error
    model = found.model
    if any(len(text or "") > MAX_TEXT for text in (model.continuing_subword_prefix, model.end_of_word_suffix)):
        raise UserError(f"{file}: its model adds a text longer than {MAX_TEXT} characters to each piece{ADVICE}")
    if (model.max_input_chars_per_word or 0) > MAX_WORD_CHARS:
        raise UserError(f"{file}: max_input_chars_per_word is more than {MAX_WORD_CHARS}{ADVICE}")
    _check_parts(str(file), raw)


@guarded("its parts")
def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """A loaded tokenizer; `name` is the model's. One that is written in Python has no parts."""
    if (longest := longest_token(tokenizer)) > MAX_TOKEN_CHARS:
        raise UserError(f"{name}: a token has {longest} characters, allowed are {MAX_TOKEN_CHARS}{ADVICE}")
    core = getattr(tokenizer, "backend_tokenizer", None)
    parts = {kind: getattr(core, kind, None) for kind in KINDS}
    _check_parts(name, {kind: part.__getstate__() for kind, part in parts.items() if part is not None})


def _check_parts(where: str, raw: Mapping[str, bytes]) -> None:
    growth = dict.fromkeys(KINDS, 1.0)
    for kind, data in raw.items():
        if len(data) > MAX_PART_BYTES:
            raise UserError(f"{where}: its {kind} is larger than {MAX_PART_BYTES // 2**20} MiB{ADVICE}")
        try:
            parts = list(_parts(json.loads(data), kind))
            if len(parts) > MAX_PARTS:
                raise ValueError(f"has {len(parts)} parts, allowed are {MAX_PARTS}")
            growth[kind] = math.prod(_growth(part, KINDS[kind][1]) for part in parts)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            detail = " ".join(f"{error}".split()) if type(error) is ValueError else "is not as the library writes it"
            raise UserError(f"{where}: its {kind} {detail}{ADVICE}") from error
    if max(growth["normalizer"] * growth["pre_tokenizer"], growth["decoder"]) > MAX_GROWTH:
        raise UserError(f"{where}: its parts make more than {MAX_GROWTH} characters of one{ADVICE}")


def _parts(value: Any, kind: str) -> Iterator[dict[str, Any]]:
    """The parts of a sequence, in order."""
    if value is None:
        return
    if value["type"] != "Sequence":
        yield value
        return
    for each in value[KINDS[kind][0]]:
        yield from _parts(each, kind)


def _growth(part: dict[str, Any], known: Mapping[str, int]) -> float:
    """Characters that a part makes of one at most. ValueError if it may take endless time or memory."""
    name = part["type"]
    if name not in known:
        raise ValueError(f"has a part of the unknown type {ascii(name)[:60]}")
    if name == "TemplateProcessing":
        _check_template(part)
    if name == "Precompiled":
        return _longest_mapped(part["precompiled_charsmap"])
    if name == "Prepend" and len(part["prepend"]) > MAX_TEXT:
        raise ValueError(f"adds a text longer than {MAX_TEXT} characters")
    if name not in ("Split", "Replace"):
        return known[name]
    ((way, pattern),) = part["pattern"].items()
    if way == "Regex" and not is_harmless(pattern):
        raise ValueError(f"has the regular expression {ascii(pattern[:80])}, which may take too long for some texts")
    if name == "Split":
        return 1
    content = part["content"]
    length = 1 if way == "Regex" else len(pattern)
    if len(content) > MAX_REPLACED * length:
        raise ValueError(f"replaces {ascii(pattern[:40])} by a text more than {MAX_REPLACED} times as long")
    return 1 + len(content) if way == "Regex" else max(1.0, len(content) / length)


def _check_template(part: dict[str, Any]) -> None:
    tokens = part["special_tokens"].values()
    if max(len(part["single"]), len(part["pair"])) > MAX_ADDED or any(len(each["ids"]) > MAX_ADDED for each in tokens):
        raise ValueError(f"adds more than {MAX_ADDED} tokens to a text")


def _longest_mapped(table: str) -> float:
    """Characters that a table of SentencePiece makes of one. It has 4 bytes with the size of a trie, the trie, and the
    texts with a zero byte after each."""
    data = base64.b64decode(table)
    start = 4 + int.from_bytes(data[:4], "little")
    longest = max(map(len, data[start:].split(b"\0")))
    if longest > MAX_MAPPED_BYTES:
        raise ValueError(f"puts a text of {longest} bytes for another, allowed are {MAX_MAPPED_BYTES}")
    return 18  # as Unicode's own table, whose bytes are those of 18 characters


# ----------------------------------------------------------------- regular expressions

MAX_PATTERN = 4096
MAX_WAYS = 40  # of all sequences of a pattern together; Llama 3's has 18
_SET = r"\[\^?(?:\\.|\[(?:\\.|[^\[\]\\])*\]|[^\[\]\\])+\]"
_ONE = rf"(?:{_SET}|\\[pP]\{{\^?\w+\}}|\\x[0-9A-Fa-f]{{2}}|\\[sSdDwWhHnrtfv]|\\\W|[^\\\[\](){{}}?*+|^$])"
_ITEM = re.compile(
    rf"(?P<place>\^|\$|\\[bBAzZ]|\(\?<?[=!]{_ONE}\))"  # takes no character
    rf"|(?P<many>{_ONE}(?:(?P<any>\*)[?+]?|\+[?+]?|\{{[0-9]{{1,2}},\}}(?![?+*{{])))"
    rf"|(?P<group>\((?:\?i?:)?{_ONE}*(?:\|{_ONE}*)*\))(?P<perhaps>\?[?+]?)?"
    rf"|{_ONE}(?P<few>\?[?+]?|\{{[0-9]{{1,3}}(?:,[0-9]{{1,3}})?\}}(?![?+*{{]))?"
)
KNOWN = frozenset(
    {
        r"\d{1,3}(?=(?:\d{3})*\b)",  # Cohere's Aya and Command
        r"(?=(\d{3})+(?!\d))",  # SuperBPE
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",  # Chameleon
    }
)
"""Patterns beyond the rule of `is_harmless` whose steps grow in proportion to the text, too."""


class _Item(NamedTuple):
    """A character, a set or a group of a sequence, with its quantifier."""

    ways: int  # numbers of repetitions, and alternatives, that are tried in turn
    most: int  # repetitions
    may_fail: bool
    is_many: bool  # repeated without bound


def is_harmless(pattern: str) -> bool:
    """Whether the steps of a regular expression from one place of a text grow at most in proportion to the text.

    That holds if it is in KNOWN, or an alternation of sequences of single characters, sets and groups of texts, each
    with one quantifier at most, such that in each sequence

    - only characters and sets are repeated, and groups are optional at most;
    - at most one thing is repeated without bound before the last that can fail;
    - things that are optional, counted or alternatives make at most MAX_WAYS ways in all, where a count behind such a
      repetition counts as so many ways.

    The patterns of GPT-2, Llama 3, Qwen, o200k, DeepSeek, Mistral, BLOOM, Falcon and CLIP are such.
    """
    if pattern in KNOWN:
        return True
    at, total = 0, 0
    while len(pattern) <= MAX_PATTERN:
        items = []
        while at < len(pattern) and pattern[at] != "|":
            found = _ITEM.match(pattern, at)
            if found is None:
                return False
            items.append(_item(found))
            at = found.end()
        total += _ways(items)
        if total > MAX_WAYS:
            return False
        if at == len(pattern):
            return True
        at += 1  # the bar
    return False


def _item(found: re.Match[str]) -> _Item:
    if found["place"]:
        return _Item(1, 1, True, False)
    if found["many"]:
        return _Item(1, 1, not found["any"], True)
    if found["group"]:
        return _Item(found["group"].count("|") + 1 + bool(found["perhaps"]), 1, not found["perhaps"], False)
    numbers = (
        [0, 1] if (found["few"] or "").startswith("?") else [int(n) for n in re.findall("[0-9]+", found["few"] or "1")]
    )
    return _Item(max(1, numbers[-1] - numbers[0] + 1), numbers[-1], numbers[0] > 0, False)


def _ways(items: Sequence[_Item]) -> int:
    """Ways that are tried before a sequence fails; more than MAX_WAYS if it is not harmless."""
    last = max((i for i, item in enumerate(items) if item.may_fail), default=-1)
    ways, many = 1, 0
    for i, item in enumerate(items[: last + 1]):
        ways *= item.ways * (max(1, item.most) if many else 1)
        many += item.is_many and i < last
    return ways if many <= 1 else MAX_WAYS + 1
