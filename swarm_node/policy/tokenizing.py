"""All calls of a tokenizer: its library's errors and panics become errors of ours.

    text --encode--> token ids --decode--> text        an error or a panic of the library -> TokenizerError

The library is written in Rust. Where it gives up, for example at a regular expression that needs too many steps for a
text, it raises a `PanicException`. That is no `Exception`, so outside `guarded` one text would end the process. Its
errors, for example that a text has a character without a token, are of the class `Exception` itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from swarm_node.errors import UserError
from swarm_node.say import in_short

READ = frozenset({"<think>", "</think>", "<answer>", "</answer>"})
"""Tokens that stay in a text though a tokenizer calls them special: answers and reasoning are found by them."""
RESIZE = "call model.resize_token_embeddings(len(tokenizer)) and save the model again, or take the tokenizer it had"
PANIC = "PanicException"  # each library in Rust has a class of this name, which no module exports


class TokenizerError(UserError):
    """The tokenizer's library failed at a text, at token ids or at a file. The same call fails again."""


@contextmanager
def guarded(at: str) -> Iterator[None]:
    """Within it, or in a function that it decorates, an error or a panic of the library is a TokenizerError; `at` says
    where. Other exceptions are left as they are."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != PANIC:
            raise
        detail = in_short(error)
        raise TokenizerError(f"the model's tokenizer fails at {at}: {detail}; take another model") from error


@guarded("a text")
def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool = False) -> list[list[int]]:
    """Token ids of each text, with the special tokens that the tokenizer puts around a text if `special`."""
    return tokenizer(list(texts), add_special_tokens=special, verbose=False)["input_ids"] if texts else []


@guarded("token ids")
def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], special: bool = False) -> str:
    """Text of token ids, without special tokens unless `special`; those of `READ` stay in any case."""
    if special:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    kept, dropped = _special_ids(tokenizer)
    if kept.isdisjoint(token_ids):
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    return tokenizer.decode([i for i in token_ids if i not in dropped], skip_special_tokens=False)


@lru_cache(maxsize=8)  # it takes longer than to decode a short answer
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[frozenset[int], frozenset[int]]:
    """Ids of the special tokens that stay in texts, and of the others."""
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    kept = frozenset(i for i, text in added.items() if text in READ)
    return kept, frozenset({*added, *tokenizer.all_special_ids}) - kept


@guarded("its own files")
def save_tokenizer(tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write the tokenizer's files into the directory `out`."""
    tokenizer.save_pretrained(out)


@guarded("its vocabulary")
def size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of tokens, added ones included."""
    return len(tokenizer)


@guarded("its vocabulary")
def ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens, added ones included."""
    return sorted(tokenizer.get_vocab().values())


@guarded("its vocabulary")
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()), default=0)


@guarded("its vocabulary")
def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of the vocabulary and merges: equal for tokenizers whose ids mean the same."""
    core = getattr(tokenizer, "backend_tokenizer", None)  # tokenizers written in Python have none
    merges = [] if core is None else json.loads(core.to_str())["model"].get("merges", [])
    table = [sorted(tokenizer.get_vocab().items()), merges]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]


@guarded("its special tokens")
def special_tokens(tokenizer: PreTrainedTokenizerBase, more: Iterable[int]) -> tuple[list[str], set[int]]:
    """Texts and ids of the special tokens but for those of `READ`; `more` ids count as special, too."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted({*added, *tokenizer.all_special_tokens} - READ), {*_special_ids(tokenizer)[1], *more}


@guarded("its special tokens")
def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int) -> list[int]:
    """All ids that end a completion, of the embedding's `rows`: those of the generation config and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    ids = {i for i in listed if isinstance(i, int)}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise UserError("this model has no end-of-sequence token; set one in its tokenizer")
    if not (known := [i for i in ids if 0 <= i < rows]):
        raise UserError(
            f"the end-of-sequence token has the id {max(ids)}, and this model's embedding has {rows} rows: {RESIZE}"
        )
    return sorted(known)
