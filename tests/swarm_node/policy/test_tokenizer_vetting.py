"""Tokenizers that would take endless time or memory are refused in one sentence; the usual ones are not."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.policy.loading import load_tokenizer
from swarm_node.policy.starter import build_tokenizer
from swarm_node.policy.tokenizer_vetting import KNOWN, check_tokenizer, check_tokenizer_file, is_harmless
from swarm_node.policy.tokenizing import PANIC

ROOT = Path(__file__).parents[3]
BLOWS_UP = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_tokenizer(["what is one plus two"] * 8).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def change(**parts: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | parts))

    return do


def sequence(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def replace(pattern: str, content: str, way: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {way: pattern}, "content": content}


def table(*texts: bytes) -> dict[str, Any]:
    """A normalizer of SentencePiece with these texts behind an empty trie."""
    data = (4).to_bytes(4, "little") + bytes(4) + b"".join(text + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def in_another_file(folder: Path) -> None:
    """transformers reads the newest file that the settings name."""
    parts = json.loads((folder / "tokenizer.json").read_text()) | {"pre_tokenizer": BLOWS_UP}
    (folder / "tokenizer.4.0.0.json").write_text(json.dumps(parts))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["fast_tokenizer_files"] = ["tokenizer.4.0.0.json", "tokenizer.json"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def around(ids: int, often: int) -> dict[str, Any]:
    special = {"<x>": {"id": "<x>", "ids": [0] * ids, "tokens": ["<x>"] * ids}}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, *[{"SpecialToken": {"id": "<x>", "type_id": 0}}] * often]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def twice() -> dict[str, Any]:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}


def added(*texts: str) -> dict[str, Any]:
    """Added tokens of tokenizer.json, which are normalised."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    return {"added_tokens": [{"id": 9000 + i, "content": text, **usual} for i, text in enumerate(texts)]}


def written(file: str, found: dict[str, Any]) -> Callable[[Path], None]:
    """Puts these keys into a JSON file."""

    def do(folder: Path) -> None:
        before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(before | found))

    return do


GREW = {"content": "\ufdfa" * 4000, "normalized": True, "special": False}
"""An added token that becomes 18 times as long."""
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "split": (change(pre_tokenizer=sequence("pretokenizers", BLOWS_UP)), "pre_tokenizer has the regular expression"),
    "in another file": (in_another_file, "tokenizer.4.0.0.json: its pre_tokenizer has the regular expression"),
    "replace": (change(normalizer=replace("(x|x)*y", "z", "Regex")), "normalizer has the regular expression"),
    "decoder": (change(decoder=replace("(x+x+)+y", "", "Regex")), "decoder has the regular expression"),
    "normalizers that grow": (
        change(normalizer=sequence("normalizers", *[replace("e", "e" * 16)] * 8)),
        "more than 4 times as long",
    ),
    "little by little": (change(normalizer=sequence("normalizers", *[replace("e", "eeee")] * 7)), "characters of one"),
    "decoders that grow": (
        change(decoder=sequence("decoders", {"type": "Fuse"}, *[replace("[0-9]", "1111", "Regex")] * 6)),
        "characters of one",
    ),
    "replacement of nothing": (change(normalizer=replace("", "e")), "normalizer replaces a text of no characters"),
    "replacement of nothing by nothing": (change(decoder=replace("", "")), "decoder replaces a text of no characters"),
    "pattern that is a text": (
        change(pre_tokenizer=BLOWS_UP | {"pattern": "x"}),
        "pre_tokenizer is not as the library",
    ),
    "two patterns": (
        change(pre_tokenizer=BLOWS_UP | {"pattern": {"String": "a", "Regex": "b"}}),
        "pre_tokenizer has a pattern that is not as the library writes it",
    ),
    "list of special tokens": (
        change(post_processor={"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": []}),
        "post_processor is not as the library writes it",
    ),
    "many": (change(normalizer=sequence("normalizers", *[{"type": "NFC"}] * 9)), "has 9 parts"),
    "nested": (
        change(normalizer=reduce(lambda a, _: sequence("normalizers", a, {"type": "NFC"}), range(60), {"type": "NFC"})),
        "has 61 parts",
    ),
    "deep": (lambda folder: (folder / "tokenizer.json").write_text('{"normalizer":' * 200_000) and None, "cannot read"),
    "table": (change(normalizer=table(b"e" * 65)), "a text of 65 bytes"),
    "tables": (change(normalizer=sequence("normalizers", table(b"e" * 33), table(b"e" * 33))), "characters of one"),
    "prefix of each piece": (
        change(normalizer=sequence("normalizers", {"type": "Prepend", "prepend": "e" * 64}, replace("e", "eeee"))),
        "characters of one",
    ),
    "decoder of long tokens": (
        change(decoder=sequence("decoders", {"type": "Fuse"}, replace("e", "eeee"), replace("e", "eeee"))),
        "more than 8 characters of one",
    ),
    "decoder of nothing": (change(decoder=sequence("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 8)), "of one"),
    "added token": (change(**added("e" * 5000)), "a token has 5000 characters"),
    "added token of the settings": (
        written("tokenizer_config.json", {"added_tokens_decoder": {"9000": {"content": "e" * 5000}}}),
        "tokenizer_config.json: a token has 5000 characters",
    ),
    "added token of an old file": (
        written("added_tokens.json", {"e" * 5000: 9000}),
        "added_tokens.json: a token has 5000 characters",
    ),
    "added tokens that grow": (
        change(normalizer={"type": "NFKC"}, **added(*["\ufdfa" * 4000] * 60)),
        "added tokens have more than 4,194,304 characters",
    ),
    "added tokens that grow, of the settings": (
        lambda folder: (
            [
                change(normalizer={"type": "NFKC"})(folder),
                written("tokenizer_config.json", {"added_tokens_decoder": {str(9000 + i): GREW for i in range(60)}})(
                    folder
                ),
            ]
            and None
        ),
        "added tokens have more than 4,194,304 characters",
    ),
    "a text twice": (change(post_processor=twice()), "post_processor repeats a text"),
    "no text": (
        change(post_processor={"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
        "post_processor leaves out the text",
    ),
    "length that is a text": (
        written("tokenizer_config.json", {"model_max_length": "x"}),
        "model_max_length of its tokenizer is no number",
    ),
    "again and again": (change(pre_tokenizer=split(r"\s+\d")), "pre_tokenizer has the regular expression"),
    "slow ones": (
        change(pre_tokenizer=sequence("pretokenizers", split(r"\s+$"), split(r"\s+$"))),
        "two regular expressions that may take long",
    ),
    "pieces": (
        change(
            model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["e" * 129, -1.0]], "byte_fallback": False}
        ),
        "129 characters, allowed are 128 of Unigram",
    ),
    "prefix": (change(normalizer={"type": "Prepend", "prepend": "e" * 65}), "normalizer adds a text"),
    "unknown": (change(pre_tokenizer={"type": "Own\x1b"}), "unknown type 'Own\\x1b'"),
    "odd": (change(pre_tokenizer=[1]), "not as the library writes it"),
    "ids of a special token": (change(post_processor=around(100, 1)), "post_processor adds more than 16 tokens"),
    "special tokens": (change(post_processor=around(1, 300_000)), "post_processor"),
    "long token": (lambda folder: change(**with_token(folder, "e" * 5000))(folder), "a token has 5000 characters"),
    "words": (
        change(model={"type": "WordPiece", "unk_token": "a", "max_input_chars_per_word": 10**9, "vocab": {"a": 0}}),
        "max_input_chars_per_word",
    ),
    "file": (lambda folder: os.truncate(folder / "tokenizer.json", 65 * 2**20), "larger than 64 MiB"),
}


def with_token(folder: Path, text: str) -> dict[str, Any]:
    found = json.loads((folder / "tokenizer.json").read_text())
    found["model"]["vocab"][text] = max(found["model"]["vocab"].values()) + 1
    return {"model": found["model"]}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizers_are_refused_in_a_sentence(name: str, model: Path) -> None:
    spoil, said = HOSTILE[name]
    load_tokenizer(PolicyConfig(model=str(model)))
    spoil(model)
    with pytest.raises(UserError) as refused:
        load_tokenizer(PolicyConfig(model=str(model)))
    sentence = str(refused.value)
    assert said in sentence and str(model) in sentence and sentence.isprintable()
    if name not in ("deep", "file"):
        assert "take a model" in sentence, "what to do"


def test_parts_that_another_file_gives_are_looked_at_once_loaded() -> None:
    core = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    with pytest.raises(UserError, match="its pre_tokenizer has the regular expression"):
        check_tokenizer(PreTrainedTokenizerFast(tokenizer_object=core), "a model")


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Ling": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "DeepSeek V3": "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "DeepSeek, Chinese": "[一-龥぀-ゟ゠-ヿ]+",
    "DeepSeek, lines": "[\r\n]",
    "DeepSeek, letters": r"\s?\p{L}+",
    "DeepSeek, blanks": r"\s+$",
    "Jais 2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)"
    r"|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "Falcon": r"[0-9][0-9][0-9]",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "DeBERTa": r"\s{2,}|[\n\r\t]",
    "ALBERT": " {2,}",
    "SeamlessM4T": " +▁",
    "Gemma 4": r"[^\n]+|[\n]+",
    "EuroLLM's digits": r"\p{N}{1,3}",
    "the starter": r"[^A-Za-z \n]",
    **{f"{name} of llama.cpp": pattern for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items()},
    **{pattern: pattern for pattern in KNOWN},
}


def is_survived(pattern: str, text: str) -> bool:
    """Whether the library splits the text instead of giving up at its limit of ten million steps from one place."""
    try:
        pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        return False
    return True


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_patterns_of_known_tokenizers_are_harmless(name: str) -> None:
    assert is_harmless(PATTERNS[name])
    for unit in ("a", "A", "aA", " ", "\n", " \n", "1", "'", "!", "\u0301", " a", "é", "一", "▁"):
        assert is_survived(PATTERNS[name], unit * (4096 // len(unit)))
        assert is_survived(PATTERNS[name], unit * (4096 // len(unit)) + "\0")


@pytest.mark.parametrize(
    "pattern",
    [
        *("(q+q+)+y", "(x|x)*y", "(x+x+)+y", "x*x*x*y", "x+x+y", "(?:a?){30}", "a?" * 30 + "b", "(?i:a+b)+", "(?>a+)+"),
        *("(a)\\1", "(?<n>a)\\g<n>", "(?x) a", "a**", "a{1,3}+", "a{0,999}b", "a+a{999}b", "[a-z]+[a-z]+$", "\\X+"),
        *("(", "[a", "a{9}{9}", "(?:a|a){20}b", "(" * 5000, "a" * 5000, "|" * 100),
        # steps from all places together
        *(r"\s+\d", r"\s+x|\s|\s+", r"\s+(?!\S)", "a+b|c|a+", "a+b|a+?", "a*b"),
    ],
)
def test_other_patterns_are_not(pattern: str) -> None:
    assert not is_harmless(pattern)


pieces = st.tuples(
    st.sampled_from(["a", "b", "[ab]", ".", "\\w", "(a)", "(?:a|b)", "(a|ab)", "(?:a?)", "(?=a)", "(a+)", "$"]),
    st.sampled_from(["", "", "?", "*", "+", "{2}", "{1,3}", "{2,}", "+?", "*+"]),
)
patterns = st.lists(st.lists(pieces.map("".join), min_size=1, max_size=12).map("".join), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(patterns.map("|".join))
def test_what_is_said_to_be_harmless_is(pattern: str) -> None:
    if is_harmless(pattern):
        assert all(is_survived(pattern, text) for text in ("a" * 1000, "a" * 1000 + "!", "ab" * 500 + "!"))


def of(normalizer: Any = None, pre_tokenizer: Any = None, decoder: Any = None, processor: Any = None) -> Tokenizer:
    core = Tokenizer(models.BPE())
    for name, part in (("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer), ("decoder", decoder)):
        if part is not None:
            setattr(core, name, part)
    if processor is not None:
        core.post_processor = processor
    return core


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
N, P, D = normalizers, pre_tokenizers, decoders
KNOWN_PARTS: dict[str, Callable[[], Tokenizer]] = {
    "BERT": lambda: of(
        N.BertNormalizer(),
        P.BertPreTokenizer(),
        D.WordPiece(),
        processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]),
    ),
    "ALBERT": lambda: of(
        N.Sequence(
            [
                *(N.Replace("``", '"'), N.Replace("''", '"'), N.NFKD(), N.StripAccents(), N.Lowercase()),
                N.Replace(Regex(" {2,}"), " "),
            ]
        ),
        P.Metaspace(),
        D.Metaspace(),
    ),
    "Llama 2": lambda: of(
        N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")]),
        None,
        D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)]),
    ),
    "Gemma": lambda: of(N.Replace(" ", "▁"), P.Split(" ", "merged_with_previous")),
    "SmolLM2": lambda: of(
        None, P.Sequence([P.Digits(True), P.ByteLevel(add_prefix_space=False)]), D.ByteLevel(), processors.ByteLevel()
    ),
    "Falcon": lambda: of(
        None,
        P.Sequence(
            [P.Punctuation("contiguous"), P.ByteLevel(), P.Digits(False), P.Split(Regex("[0-9][0-9][0-9]"), "isolated")]
        ),
    ),
    "DeepSeek Coder": lambda: of(
        None,
        P.Sequence(
            [
                *(P.Split(Regex(each), "isolated") for each in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥]+")),
                *(P.Digits(True), BYTES),
            ]
        ),
    ),
    "RoBERTa": lambda: of(None, P.ByteLevel(), D.ByteLevel(), processors.RobertaProcessing(("</s>", 2), ("<s>", 0))),
}


@pytest.mark.parametrize("name", KNOWN_PARTS)
def test_parts_of_known_tokenizers_are_taken(name: str, tmp_path: Path) -> None:
    KNOWN_PARTS[name]().save(str(tmp_path / "tokenizer.json"))
    check_tokenizer_file(tmp_path / "tokenizer.json")


ODD: tuple[Any, ...] = (
    *(None, True, -1, 2.5, 10**30, "", "x", [], {}, [1], [[]], ["x"], {"x": 1}, {"x": "x"}, {"type": "NFC"}),
    *({"type": "Sequence"}, {"Regex": ""}, {"String": ""}, {"Regex": "x", "String": "x"}),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value in a document."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(each, (*at, key))


@pytest.mark.parametrize("name", KNOWN_PARTS)
def test_a_file_of_any_shape_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    file, whole = tmp_path / "tokenizer.json", json.loads(KNOWN_PARTS[name]().to_str())
    refused = 0
    for at in places(whole):
        for odd in ODD:
            spoilt = deepcopy(whole)
            reduce(getitem, at[:-1], spoilt)[at[-1]] = odd
            file.write_text(json.dumps(spoilt))
            try:
                check_tokenizer_file(file)
            except UserError:
                refused += 1
    assert refused > len(ODD)


def test_a_table_of_sentencepiece_is_taken(tmp_path: Path) -> None:
    of().save(str(tmp_path / "tokenizer.json"))
    change(
        normalizer=sequence("normalizers", table(b"e" * 33), replace(" {2,}", "▁", "Regex")),
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    )(tmp_path)
    check_tokenizer_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("folder", ["swarm_node/policy/starter_model", "benchmarks/steps_base"])
def test_tokenizers_of_this_repository_are_taken(folder: str) -> None:
    load_tokenizer(PolicyConfig(model=str(ROOT / folder)))
