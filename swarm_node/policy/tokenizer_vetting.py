"""Refuse a tokenizer that takes endless time or memory for a text.

    tokenizer.json --check_tokenizer_file--> size, parts --library--> tokenizer --check_tokenizer--> the parts it has

The file is looked at before the library reads it, as loading already normalises added tokens. The loaded tokenizer is
looked at again, as transformers makes parts from other files, too. Both raise UserError with the part and what to do.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from transformers import PreTrainedTokenizerBase

from swarm_node.errors import UserError
from swarm_node.policy.tokenizing import guarded, longest_token
from swarm_node.policy.vetting import read_json
from swarm_node.say import in_short
from swarm_node.storage.plain_files import read_plain

MAX_FILE_BYTES = 64 * 2**20  # the longest known tokenizer.json, of 262,144 tokens, has 33 MB
MAX_PART_BYTES = 2 * 2**20  # the table of a SentencePiece normalizer has 0.4 MB
MAX_PARTS = 8  # parts in a sequence, those of sequences in it included
MAX_GROWTH = 150
"""Characters that all parts together make of one: T5, which has most, makes up to 132 of a rare one. Each of 32,768
characters takes some 200 bytes, after that."""
MAX_DECODED = 8  # characters that a decoder makes of one: the text of 8,192 long tokens has 33 million before that
MAX_REPLACED = 4  # times that a replacement may be as long as what it replaces
MAX_MAPPED_BYTES = 64  # longest text in the table of a SentencePiece normalizer; Unicode's longest has 33
MAX_TEXT = 64  # characters of a text that a part adds
MAX_ADDED = 16  # special tokens around a text, and ids of each
MAX_TOKEN_CHARS = 4096  # the longest known tokens are some hundred blanks
MAX_ADDED_CHARS = 2**22
"""Characters of all added tokens, which loading normalises, after that; 65,536 tokens of speech have a million."""
TEMPLATES = {"chat_template", "response_schema", "response_template"}  # keys of long texts that are no tokens
MAX_WORD_CHARS = 256  # of a word that WordPiece cuts up, in time that grows with its third power; usual are 100
MAX_PIECE_CHARS = 128  # of a token of Unigram, which tries as many at each place of a text; usual are 16
ADVICE = "; take a model whose tokenizer has the usual parts"

UNICODE = {"BertNormalizer": 12, "Lowercase": 2, "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}
"""Parts that go by Unicode, and the characters that each makes of one at most. What one of them has made of a text does
not grow by another."""
NORMALIZERS = dict.fromkeys((*UNICODE, "Nmt", "Precompiled", "Prepend", "Replace", "Strip", "StripAccents"), 1) | {
    "ByteLevel": 4
}
"""Known parts, and the characters that each makes of one at most, besides those of Unicode, tables and replacements."""
PRE_TOKENIZERS = {"ByteLevel": 4, "Metaspace": 2} | dict.fromkeys(
    "BertPreTokenizer CharDelimiterSplit Digits FixedLength Punctuation Split UnicodeScripts Whitespace "
    "WhitespaceSplit".split(),
    1,
)
DECODERS = {"BPEDecoder": 3, "CTC": 3, "WordPiece": 2} | dict.fromkeys(
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


class _Added(msgspec.Struct):
    content: str
    normalized: bool = True


class _Special(msgspec.Struct):
    ids: list[int]


class _Part(msgspec.Struct):
    """What is looked at of a part, or of a sequence of parts."""

    type: str
    normalizers: list[_Part] = []
    pretokenizers: list[_Part] = []
    processors: list[_Part] = []
    decoders: list[_Part] = []
    pattern: dict[str, str] = {}  # its kind, Regex or String -> the text
    content: str = ""
    prepend: str = ""
    precompiled_charsmap: str = ""
    single: list[dict[str, Any]] = []
    pair: list[dict[str, Any]] = []
    special_tokens: dict[str, _Special] = {}


class _File(msgspec.Struct):
    """What is looked at; the vocabulary is passed over."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")
    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: list[_Added] = []


def check_tokenizer_file(file: Path) -> float:
    """A tokenizer.json as it lies on disk. Gives the characters that its normalizer makes of one at most."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{file} is larger than {MAX_FILE_BYTES // 2**20} MiB, which no tokenizer is")
        found = msgspec.json.decode(read_plain(file, MAX_FILE_BYTES), type=_File)
        raw = {kind: bytes(getattr(found, kind)) for kind in KINDS}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {file}: {in_short(error)}") from error
    model = found.model
    if any(len(text or "") > MAX_TEXT for text in (model.continuing_subword_prefix, model.end_of_word_suffix)):
        raise UserError(f"{file}: its model adds a text longer than {MAX_TEXT} characters to each piece{ADVICE}")
    if (model.max_input_chars_per_word or 0) > MAX_WORD_CHARS:
        raise UserError(f"{file}: max_input_chars_per_word is more than {MAX_WORD_CHARS}{ADVICE}")
    growth = _check_parts(str(file), raw)
    _check_added(file, ((token.content, token.normalized) for token in found.added_tokens), growth)
    return growth


def check_tokens(file: Path, growth: float) -> None:
    """Another file with tokens, such as tokenizer_config.json, as it lies on disk. `growth`: see
    `check_tokenizer_file`."""
    _check_added(file, _texts(read_json(file), True), growth)


def _texts(value: Any, normalized: bool) -> Iterator[tuple[str, bool]]:
    """Texts in `value` that may be tokens, with whether the tokenizer normalises them."""
    if isinstance(value, str):
        yield value, normalized
    elif isinstance(value, dict):
        normalized = value.get("normalized", not value.get("special")) is not False
        for key, each in value.items():
            if type(each) is int:  # the key is a token, and this its number
                yield key, True
            elif key not in TEMPLATES:
                yield from _texts(each, normalized)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, normalized)


def _check_added(file: Path, texts: Iterable[tuple[str, bool]], growth: float) -> None:
    total = 0.0
    for text, normalized in texts:
        if len(text) > MAX_TOKEN_CHARS:
            raise UserError(f"{file}: a token has {len(text)} characters, allowed are {MAX_TOKEN_CHARS}{ADVICE}")
        total += len(text) * (growth if normalized else 1)
    if total > MAX_ADDED_CHARS:
        raise UserError(
            f"{file}: its added tokens have more than {MAX_ADDED_CHARS:,} characters once normalised{ADVICE}"
        )


@guarded("its parts")
def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """A loaded tokenizer; `name` is the model's. One that is written in Python has no parts."""
    if (longest := longest_token(tokenizer)) > MAX_TOKEN_CHARS:
        raise UserError(f"{name}: a token has {longest} characters, allowed are {MAX_TOKEN_CHARS}{ADVICE}")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise UserError(f"{name}: model_max_length of its tokenizer is no number{ADVICE}")
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is not None and type(core.model).__name__ == "Unigram":
        longest = max(map(len, core.get_vocab(with_added_tokens=False)), default=0)
        if longest > MAX_PIECE_CHARS:
            raise UserError(
                f"{name}: a token has {longest} characters, allowed are {MAX_PIECE_CHARS} of Unigram{ADVICE}"
            )
    parts = {kind: getattr(core, kind, None) for kind in KINDS}
    _check_parts(name, {kind: part.__getstate__() for kind, part in parts.items() if part is not None})


def _check_parts(where: str, raw: Mapping[str, bytes]) -> float:
    """Gives the characters that the normalizer makes of one at most."""
    growth = dict.fromkeys(KINDS, 1.0)
    for kind, data in raw.items():
        if len(data) > MAX_PART_BYTES:
            raise UserError(f"{where}: its {kind} is larger than {MAX_PART_BYTES // 2**20} MiB{ADVICE}")
        try:
            parts = list(_parts(msgspec.json.decode(data, type=_Part | None), kind))
            if len(parts) > MAX_PARTS:
                raise ValueError(f"has {len(parts)} parts, allowed are {MAX_PARTS}")
            if sum(_is_known(part) for part in parts) > 1:
                raise ValueError("has two regular expressions that may take long")
            growth[kind] = math.prod(_growth(part, KINDS[kind][1]) for part in parts)
            growth[kind] *= max((UNICODE.get(part.type, 1) for part in parts), default=1)
        except (ValueError, RecursionError) as error:
            detail = " ".join(f"{error}".split()) if type(error) is ValueError else "is not as the library writes it"
            raise UserError(f"{where}: its {kind} {detail}{ADVICE}") from error
    for found, most in ((growth["normalizer"] * growth["pre_tokenizer"], MAX_GROWTH), (growth["decoder"], MAX_DECODED)):
        if found > most:
            raise UserError(f"{where}: its parts make more than {most} characters of one{ADVICE}")
    return growth["normalizer"]


def _parts(part: _Part | None, kind: str) -> Iterator[_Part]:
    """The parts of a sequence, in order."""
    if part is None:
        return
    if part.type != "Sequence":
        yield part
        return
    for each in getattr(part, KINDS[kind][0]):
        yield from _parts(each, kind)


def _growth(part: _Part, known: Mapping[str, int]) -> float:
    """Characters that a part makes of one at most. ValueError if it may take endless time or memory."""
    name = part.type
    if name not in known:
        raise ValueError(f"has a part of the unknown type {ascii(name)[:60]}")
    if name == "TemplateProcessing":
        _check_template(part)
    if name == "Precompiled":
        return _longest_mapped(part.precompiled_charsmap)
    if name == "Prepend":
        if len(part.prepend) > MAX_TEXT:
            raise ValueError(f"adds a text longer than {MAX_TEXT} characters")
        return 1 + len(part.prepend)  # added tokens cut a text into pieces, and each gets it
    if name not in ("Split", "Replace"):
        return known[name]
    if len(part.pattern) != 1:
        raise ValueError("has a pattern that is not as the library writes it")
    ((way, pattern),) = part.pattern.items()
    if way == "Regex" and not is_harmless(pattern):
        raise ValueError(f"has the regular expression {ascii(pattern[:80])}, which may take too long for some texts")
    if name == "Split":
        return 1
    content = part.content
    length = 1 if way == "Regex" else len(pattern)
    if not pattern:
        raise ValueError("replaces a text of no characters")
    if len(content) > MAX_REPLACED * length:
        raise ValueError(f"replaces {ascii(pattern[:40])} by a text more than {MAX_REPLACED} times as long")
    return 1 + len(content) if way == "Regex" else max(1.0, len(content) / length)


def _is_known(part: _Part) -> bool:
    return part.type in ("Split", "Replace") and part.pattern.get("Regex") in KNOWN


def _check_template(part: _Part) -> None:
    added: list[Sequence[Any]] = [part.single, part.pair, *(each.ids for each in part.special_tokens.values())]
    if max(map(len, added)) > MAX_ADDED:
        raise ValueError(f"adds more than {MAX_ADDED} tokens to a text")
    texts = [sum("Sequence" in piece for piece in way) for way in (part.single, part.pair)]
    if texts[0] != 1 or texts[1] > 2:
        raise ValueError("repeats a text" if max(texts) > 1 else "leaves out the text")


def _longest_mapped(table: str) -> float:
    """Characters that a table of SentencePiece makes of one. It has 4 bytes with the size of a trie, the trie, and the
    texts with a zero byte after each."""
    data = base64.b64decode(table.encode())
    start = 4 + int.from_bytes(data[:4], "little")
    longest = max(map(len, data[start:].split(b"\0")))
    if longest > MAX_MAPPED_BYTES:
        raise ValueError(f"puts a text of {longest} bytes for another, allowed are {MAX_MAPPED_BYTES}")
    return max(1, longest)


# ----------------------------------------------------------------- regular expressions

MAX_PATTERN = 4096
_QUANTIFIER = re.compile(r"(.*?)((?:[*+]|\{[0-9]+,\})[?+]?)", re.DOTALL)
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
        r"\s+$",  # DeepSeek
        " +▁",  # SeamlessM4T
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}",  # Jais 2
    }
)
"""Patterns beyond the rules of `is_harmless` whose steps from one place grow in proportion to the text, too."""


class _Item(NamedTuple):
    """A character, a set or a group of a sequence, with its quantifier."""

    text: str  # of what is repeated without bound; empty if as little as possible is taken
    ways: int  # numbers of repetitions, and alternatives, that are tried in turn
    most: int  # repetitions
    may_fail: bool
    is_many: bool  # repeated without bound


def is_harmless(pattern: str) -> bool:
    """Whether the steps of a regular expression from one place of a text grow at most in proportion to the text, and
    those from all places together, too.

    The first holds if it is in KNOWN, or an alternation of sequences of single characters, sets and groups of texts,
    each with one quantifier at most, such that in each sequence

    - only characters and sets are repeated, and groups are optional at most;
    - at most one thing is repeated without bound before the last that can fail;
    - things that are optional, counted or alternatives make at most MAX_WAYS ways in all, where a count behind such a
      repetition counts as so many ways.

    The second holds if what is repeated without bound, before something that can fail, is repeated by the next sequence
    as well, and so on up to one that takes it in any case: else the same text is gone through again from each place.

    The patterns of GPT-2, Llama 3, Qwen, o200k, DeepSeek, Mistral, BLOOM, Falcon and CLIP are such.
    """
    if pattern in KNOWN:
        return True
    at, total = 0, 0
    tried = set[str]()  # what was repeated without bound in vain
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
        last = _last_to_fail(items)
        again = {item.text for item in items[: max(0, last)] if item.is_many}
        if last >= 0 and items[last].text and not any(item.may_fail for item in items[:last]):
            tried.discard(items[last].text)
        if not tried <= again:
            return False
        tried = again
        if at == len(pattern):
            return not tried
        at += 1  # the bar
    return False


def _item(found: re.Match[str]) -> _Item:
    if found["place"]:
        return _Item("", 1, 1, True, False)
    if found["many"]:
        text, quantifier = _QUANTIFIER.fullmatch(found["many"]).groups()  # type: ignore[union-attr]
        return _Item("" if quantifier.endswith("?") else text, 1, 1, not found["any"], True)
    if found["group"]:
        return _Item("", found["group"].count("|") + 1 + bool(found["perhaps"]), 1, not found["perhaps"], False)
    numbers = (
        [0, 1] if (found["few"] or "").startswith("?") else [int(n) for n in re.findall("[0-9]+", found["few"] or "1")]
    )
    return _Item("", max(1, numbers[-1] - numbers[0] + 1), numbers[-1], numbers[0] > 0, False)


def _last_to_fail(items: Sequence[_Item]) -> int:
    return max((i for i, item in enumerate(items) if item.may_fail), default=-1)


def _ways(items: Sequence[_Item]) -> int:
    """Ways that are tried before a sequence fails; more than MAX_WAYS if it is not harmless."""
    last = _last_to_fail(items)
    ways, many = 1, 0
    for i, item in enumerate(items[: last + 1]):
        ways *= item.ways * (max(1, item.most) if many else 1)
        many += item.is_many and i < last
    return ways if many <= 1 else MAX_WAYS + 1
