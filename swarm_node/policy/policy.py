"""A node's own language model: text in, samples out, weights that can be trained, saved and compared.

`loading.load_policy` makes one; `grpo.Trainer` updates it and counts `version` up.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from swarm_node.config import PolicyConfig
from swarm_node.errors import CheckpointError, Interrupted, NoRoom, UserError
from swarm_node.policy import tokenizing
from swarm_node.policy.chat_template import tokenizer_frame
from swarm_node.policy.chat_template_child import Frame
from swarm_node.policy.checkpointing import Checkpointing
from swarm_node.policy.digests import digest, is_of_adapter, lines, model_digest
from swarm_node.policy.engines.base import Engine, Request
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.finite import check_updated, is_finite, spoiled
from swarm_node.policy.logprobs import TokenBatch, token_logprobs
from swarm_node.policy.oom import NO_ROOM_TO_SAMPLE, is_out_of_memory
from swarm_node.policy.packed import values_of
from swarm_node.policy.tokenizing import TokenizerError
from swarm_node.say import Once, Warned
from swarm_node.storage.model_names import model_name
from swarm_node.types import Rollout, Sampling, Turn
from swarm_protocol.limits import CHARS_PER_TOKEN

PIECE_CHARS = 128  # characters of a piece in which a text of uncertain length in tokens is encoded; at most 0.2 ms each
CUT_TOKENS = 8
"""Tokens that a cut between two pieces may add: in practice a token that is cut in two falls into no more."""
NAMED = 3  # most tokens that a message names
PROBED = 8  # token ids of which logits are computed where finite ones are asked for


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


class Policy(Texts):
    """The model, its tokenizer and what was found out about them."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: PolicyConfig,
        report: Callable[[str], None] = print,
        original: Mapping[str, str] | None = None,
    ) -> None:
        """`original`: `lines` of the model's weights before they were quantised; None if they are as they were."""
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.report = report
        self.once = Once(lambda sentence: self.report(sentence))  # reports failures of one kind once
        self.version = 0
        self.packing = False  # whether packed rows reproduce this model's own numbers (measured at load)
        self.split_head = False  # whether the head apart from the backbone does
        self.is_lora = hasattr(model, "peft_config")
        if original is None:
            original = lines(self.base.named_parameters(), adapters=False)
        self.base_digest = model_digest(original)
        adapters = [(name, p) for name, p in self.base.named_parameters() if is_of_adapter(name)]
        self.start_digest = model_digest({**original, **lines(adapters, adapters=True)})
        self._trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self._reference: nn.Module | None = None
        self.microbatches = 1
        """Microbatches that a step should have, more or less; above 1 where several are worked on at a time."""
        self.checkpointing: Checkpointing | None = None  # how updates compute layers again; None = they do not
        self.prompts_at_once: Callable[[int, int, int], int] = lambda prompt, n, new: 2**16
        """Prompts of which `n` answers of `new` tokens are sampled at a time, given the tokens of the longest one."""
        self._prompts_per_batch = 2**16
        self.eos_ids = tokenizing.eos_ids(self.base, tokenizer, self.vocabulary)
        self.eos_id: int = tokenizer.eos_token_id if tokenizer.eos_token_id in self.eos_ids else self.eos_ids[0]
        pad = tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None and 0 <= pad < self.vocabulary else self.eos_ids[0]
        self.engine = self.engine_of(TransformersEngine)

    # ----------------------------------------------------------------- what it is

    @property
    def base(self) -> PreTrainedModel:
        """The Hugging Face model under the adapter, if there is one."""
        return self.model.get_base_model() if self.is_lora else self.model

    @property
    def device(self) -> torch.device:
        return self.base.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base.get_input_embeddings().weight.dtype

    @property
    def max_positions(self) -> int:
        return getattr(self.base.config, "max_position_embeddings", None) or 2**31

    @property
    def vocabulary(self) -> int:
        """Token ids that the embedding has a row for."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def width(self) -> int:
        """Length of a hidden state."""
        return self.model.get_input_embeddings().weight.shape[1]

    def num_parameters(self, trainable: bool = False) -> int:
        return sum(values_of(p) for p in self.model.parameters() if p.requires_grad or not trainable)

    @property
    def family(self) -> str:
        """Name of the architecture, for example `llama`."""
        return self.base.config.model_type

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the present policy: family, names, shapes and a few hundred exact values of every tensor.
        They are computed anew each time (0.3 ms for the starter), so they are never those of older weights."""
        return hashlib.sha256(f"{self.family} {digest(self.base, adapters=True, exact=True)}".encode()).hexdigest()[:16]

    @cached_property
    def tokenizer_hash(self) -> str:
        """16 hex digits of the tokenizer's vocabulary and merges: equal for tokenizers whose ids mean the same."""
        return tokenizing.fingerprint(self.tokenizer)

    @property
    def start(self) -> str:
        """A text that is equal for peers whose weights can be averaged: the model as it was loaded, adapter included,
        and the adapter's scale."""
        return f"{self.start_digest} {self.config.lora_alpha if self.is_lora else ''}"

    # ----------------------------------------------------------------- samples

    def engine_of(self, kind: Callable[..., Engine]) -> Engine:
        """A sampling engine of this kind for this policy."""
        return kind(self.model, self.eos_ids, self.pad_id)

    def generate(self, prompts: list[list[int]], n: int, sampling: Sampling, seeds: list[int]) -> list[list[Rollout]]:
        """Sample `n` completions of each prompt; with an exact engine, `seeds` (one a prompt) decide them."""
        self.engine.update(self.trainable_state(), self.version)
        try:
            return self._in_parts(prompts, n, sampling, seeds)
        finally:
            self.engine.release()

    def _in_parts(self, prompts: list[list[int]], n: int, sampling: Sampling, seeds: list[int]) -> list[list[Rollout]]:
        """`generate` with as many prompts at a time as there is memory for."""
        groups: list[list[Rollout]] = []
        start = 0
        at_once = self.prompts_at_once(max(map(len, prompts), default=0), n, sampling.max_new_tokens)
        while start < len(prompts):
            stop = start + min(self._prompts_per_batch, at_once)
            try:
                groups += self._generate(prompts[start:stop], n, sampling, seeds[start:stop])
            except (RuntimeError, MemoryError) as exc:
                if not is_out_of_memory(exc):
                    raise
                self._prompts_per_batch = min(self._prompts_per_batch, len(prompts[start:stop])) // 2
                if self._prompts_per_batch == 0:
                    self.again(NoRoom(NO_ROOM_TO_SAMPLE, exc))
                    self._prompts_per_batch = 2**16
                    continue
                self.report(Warned(f"out of memory while sampling: now {self._prompts_per_batch} prompts at a time"))
                self.engine.release()
                self.engine.update(self.trainable_state(), self.version)
            else:
                start = stop
        return groups

    def _generate(self, prompts: list[list[int]], n: int, sampling: Sampling, seeds: list[int]) -> list[list[Rollout]]:
        pairs = enumerate(zip(prompts, seeds, strict=True))
        self.engine.submit([Request(i, prompt, sampling, seed, n) for i, (prompt, seed) in pairs])
        samples = sorted(self.engine.samples(), key=lambda sample: (sample.request, sample.index))
        if not all(is_finite(s.logprobs) for s in samples):
            self.check_finite()
        rollouts = [Rollout([Turn(s.token_ids, s.logprobs, s.end == "stop", self._said(s.token_ids))]) for s in samples]
        return [rollouts[i : i + n] for i in range(0, len(rollouts), n)]

    def _said(self, token_ids: list[int]) -> str:
        """Text of an own completion; empty, so no answer, where the tokenizer fails. The first is reported."""
        try:
            return self.decode(token_ids)
        except TokenizerError as error:
            self.once("answer", Warned(f"an own answer that cannot be read counts as none: {error}"))
            return ""

    # ----------------------------------------------------------------- log-probabilities

    def passes(
        self, batches: Iterable[TokenBatch], temperature: float, entropy: bool = False, reference: bool = False
    ) -> Iterator[tuple[TokenBatch, Tensor, Tensor | None]]:
        """(batch, log-probabilities [N] of its targets, entropies [N] or None) of each batch, in order.

        They have a gradient if grad mode is on at the call, unless they are the `reference`'s. Call `backward()` on a
        loss before asking for the next batch: later there may be nothing to go back through.
        """
        return self._passes(batches, temperature, entropy, reference, torch.is_grad_enabled() and not reference)

    def _passes(
        self, batches: Iterable[TokenBatch], temperature: float, entropy: bool, reference: bool, gradient: bool
    ) -> Iterator[tuple[TokenBatch, Tensor, Tensor | None]]:
        for batch in batches:
            with (
                torch.set_grad_enabled(gradient),
                self.reference() if reference else nullcontext(self.model) as model,
                self.checkpointing.on() if gradient and self.checkpointing else nullcontext(),
            ):
                logprobs, entropies = token_logprobs(model, batch, temperature, entropy, not self.split_head)
            yield batch, logprobs, entropies

    def again(self, interrupted: Interrupted) -> None:
        """Repair the interruption of `passes` or of an update, so that it can be done again; raises `interrupted` if
        that is not possible. A policy in one process is not interrupted."""
        raise interrupted

    # ----------------------------------------------------------------- weights

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.model.get_parameter(name) for name in self._trainable]

    def trainable_state(self) -> dict[str, Tensor]:
        """Trainable tensors by name (the live ones: clone before changing)."""
        return {name: self.model.get_parameter(name).data for name in self._trainable}

    def check_finite(self) -> None:
        """Raise NotFinite if training has left weights, or logits of a few tokens, that are not finite."""
        check_updated(self.trainable_state())
        ids = torch.arange(min(PROBED, self.vocabulary), device=self.device)[None]
        with torch.no_grad():
            if not torch.isfinite(self.model(input_ids=ids, use_cache=False).logits).all():
                raise spoiled("its logits are")

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        """Copy `state` into the weights, a new version; CheckpointError, with nothing changed, if it does not fit."""
        mine = self.trainable_state()
        if mine.keys() != state.keys() or any(mine[k].shape != state[k].shape for k in mine):
            raise CheckpointError("its tensors do not have the names and shapes of this policy")
        for name, tensor in mine.items():
            tensor.copy_(state[name])
        self.version += 1

    def keep_reference(self) -> None:
        """Remember the present weights for `reference` (an adapter needs no copy: switched off, it is the base)."""
        if not self.is_lora:
            self._reference = copy.deepcopy(self.model).requires_grad_(False).eval()

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The policy before training, for the KL term: the adapter off, or the copy of `keep_reference`."""
        if self.is_lora:
            with self.model.disable_adapter():
                yield self.model
        else:
            assert self._reference is not None, "keep_reference() was not called"
            yield self._reference

    def save(self, out: Path) -> None:
        """Write Hugging Face layout: `from_pretrained` (or PEFT, for an adapter) loads it."""
        save(self.model, self.tokenizer, out)


def save(model: nn.Module, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write Hugging Face layout, readable as other files are (safetensors makes its own files private)."""
    model.save_pretrained(out)
    tokenizing.save_tokenizer(tokenizer, out)
    for file in out.glob("*.safetensors"):
        file.chmod((out / "tokenizer_config.json").stat().st_mode)
