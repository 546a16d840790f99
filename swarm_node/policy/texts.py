"""Texts and token ids of a policy: its prompts, its answers, and what is said between two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.policy import tokenizing
from swarm_node.policy.chat_template import tokenizer_frame
from swarm_node.policy.chat_template_child import Frame
from swarm_node.policy.tokenizing import TokenizerError
from swarm_node.storage.model_names import model_name
from swarm_protocol.limits import CHARS_PER_TOKEN

PIECE_CHARS = 128  # characters of a piece in which a text of uncertain length in tokens is encoded; at most 0.2 ms each
CUT_TOKENS = 8
"""Tokens that a cut between two pieces may add: in practice a token that is cut in two falls into no more."""
NAMED = 3  # most tokens that a message names


class Texts(ABC):
    """A tokenizer with the settings of its policy, and the rows of that policy's embedding."""

    tokenizer: PreTrainedTokenizerBase
    config: PolicyConfig
    eos_ids: list[int]
    eos_id: int
    _framed: tuple[object, Frame] | None = None  # the chat template and its frame

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Token ids that the embedding has a row for."""

    def encode(self, question: str) -> list[int]:
        """`encode_questions` of one question."""
        return self.encode_questions([question])[0]

    def encode_questions(self, questions: Sequence[str]) -> list[list[int]]:
        """Prompt ids of questions: the tokenizer's chat template if it has one, else `prompt_template`.

        TokenizerError if one has a token without a row in the embedding."""
        if self.tokenizer.chat_template:
            texts, special = list(map(self.frame.around, questions)), False
        else:
            texts, special = [self.config.prompt_template.replace("{question}", each) for each in questions], True
        encoded = tokenizing.encode(self.tokenizer, texts, special)
        if without := self._without_row({i for ids in encoded for i in ids}):
            raise TokenizerError(f"the model's embedding has no row for {self._named(without)}: {tokenizing.RESIZE}")
        return encoded

    def _without_row(self, token_ids: Iterable[int]) -> list[int]:
        """Those of these ids for which the embedding has no row, in order."""
        rows = self.vocabulary
        return sorted(i for i in token_ids if not 0 <= i < rows)

    def check_rows(self) -> str:
        """A sentence about tokens that have no row in the embedding; empty if all have one. UserError if the frame
        around questions has such a token."""
        if not (without := self._without_row(tokenizing.ids(self.tokenizer))):
            return ""
        name, rows = model_name(self.config.model), self.vocabulary
        told = f"{name}: its embedding has {rows} rows, and none for {self._named(without)}"
        try:
            self.encode("?")
        except TokenizerError as error:
            raise UserError(f"{told}, which the prompt around each question has: {tokenizing.RESIZE}") from error
        return f"{told}: texts with such tokens are left out; {tokenizing.RESIZE}"

    def _named(self, without: Sequence[int]) -> str:
        """Some of these tokens in words."""
        names = [tokenizing.decode(self.tokenizer, [i], special=True) for i in without[:NAMED]]
        more = f" and {len(without) - NAMED} more tokens" if len(without) > NAMED else ""
        return f"{', '.join(names)}{more}"

    @property
    def frame(self) -> Frame:
        """The chat template's frame around questions. UserError if the template is refused."""
        template = self.tokenizer.chat_template
        if self._framed is None or self._framed[0] is not template:
            self._framed = template, tokenizer_frame(self.tokenizer, self.config)
        return self._framed[1]

    def after_answer(self, text: str, ended: bool) -> list[int]:
        """Token ids from the end of an answer to the next one, if the user says `text`. `ended`: the answer ended by
        itself, with its end-of-sequence token. UserError if the chat template allows one answer only; TokenizerError if
        the text has a token without a row in the embedding."""
        if not self.tokenizer.chat_template or not self.frame.between:
            name = model_name(self.config.model)
            raise UserError(f"{name} takes one turn only: its chat template says nothing stable after an answer")
        said = self.frame.after_answer(text)
        ends = (tokenizing.decode(self.tokenizer, [i], special=True) for i in self.eos_ids)
        if ended and (end := next(filter(said.startswith, ends), None)):
            said = said.removeprefix(end)
        (ids,) = tokenizing.encode(self.tokenizer, [said])
        if without := self._without_row(ids):
            raise TokenizerError(f"the model's embedding has no row for {self._named(without)}: {tokenizing.RESIZE}")
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without special tokens."""
        return tokenizing.decode(self.tokenizer, token_ids)

    def text_of_prompt(self, token_ids: list[int]) -> str:
        """A prompt's text, special tokens included."""
        return tokenizing.decode(self.tokenizer, token_ids, special=True)

    def encode_completion(self, text: str, finished: bool) -> list[int] | None:
        """`encode_completions` of one text."""
        return self.encode_completions([(text, finished)])[0]

    def encode_completions(self, answers: Sequence[tuple[str, bool]]) -> list[list[int] | None]:
        """For each (text, whether it ended by itself) the ids with which this policy would have sampled it, with the
        end-of-sequence token if it ended.

        None if the text spells a special token or one without a row in the embedding, or holds text that the tokenizer
        has no token for: no completion of this policy decodes to that.
        """
        names, special = self._special
        possible = [i for i, (text, _) in enumerate(answers) if not any(name in text for name in names)]
        found: list[list[int] | None] = [None] * len(answers)
        if possible:
            texts = [answers[i][0] for i in possible]
            encoded = tokenizing.encode(self.tokenizer, texts)
            for i, ids in zip(possible, encoded, strict=True):
                if special.isdisjoint(ids) and not self._without_row(ids):
                    found[i] = [*ids, self.eos_id] if answers[i][1] else ids
        return found

    def is_surely_longer(self, text: str, tokens: int) -> bool:
        """Whether `text` has clearly more than `tokens` tokens. It is read no further than needed: that takes little
        more time than encoding `tokens` tokens."""
        if len(text) > tokens * self._chars_per_token:
            return True
        if len(text.encode()) <= tokens:  # a token has at least one byte
            return False
        counted = 0
        for start in range(0, len(text), PIECE_CHARS):
            (piece,) = tokenizing.encode(self.tokenizer, [text[start : start + PIECE_CHARS]])
            counted += len(piece) - CUT_TOKENS
            if counted > tokens:
                return True
        return False

    @cached_property
    def _chars_per_token(self) -> int:
        """Characters that a text may have for each token: those of the longest token, or the swarm's limit."""
        return min(CHARS_PER_TOKEN, tokenizing.longest_token(self.tokenizer))

    def is_completion(self, token_ids: list[int], text: str, finished: bool) -> bool:
        """Whether this policy could have sampled these ids for `text`, so that they can be trained on unchanged."""
        body = token_ids[:-1] if finished else token_ids
        known = range(min(tokenizing.size(self.tokenizer), self.vocabulary))
        return (
            (not finished or token_ids[-1:] in ([eos] for eos in self.eos_ids))
            and all(i in known for i in token_ids)
            and self._special[1].isdisjoint(body)
            and self.decode(body) == text
        )

    @cached_property
    def _special(self) -> tuple[list[str], set[int]]:
        """Texts and ids of the special tokens."""
        return tokenizing.special_tokens(self.tokenizer, self.eos_ids)
