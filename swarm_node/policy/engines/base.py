"""The port of a sampling engine: requests of token ids in, sampled token ids out. It knows nothing of text or tasks.

`BatchEngine` is the port for engines of this process. They draw with `sample`, one uniform number a token: a completion
then depends on the logits and its own numbers only, not on which other rows share the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from swarm_node.policy.sizes import SLICE_BYTES
from swarm_node.types import Sampling

End = Literal["stop", "length", "cancelled"]
"""How a sequence ended: by itself, at `max_new_tokens`, or by `Engine.cancel`."""


class Request(msgspec.Struct, frozen=True):
    """`n` sequences to be sampled after one prompt."""

    id: int  # chosen by the caller; requests under way have different ones
    prompt_ids: list[int]  # for a continuation: the prompt and what was sampled before
    sampling: Sampling
    seed: int = 0
    n: int = 1


class Sample(msgspec.Struct, frozen=True):
    """One sampled sequence, without its prompt."""

    request: int
    index: int  # which of the request's `n` sequences it is, from 0
    token_ids: list[int]  # the end-of-sequence token is included if and only if `end` is "stop"
    logprobs: list[float]  # log-probability of each token under the distribution that it was drawn from
    versions: list[int]  # version of the weights that each token was drawn with
    end: End


class Engine:
    """Samples sequences. `submit` and `cancel` may be called from any thread, and while `samples` is under way.

    An engine of this process is made with `(model, eos, pad_id)`: the policy's model, the ids that end a sequence, and
    a token id for padding. If `samples` raises, all requests are forgotten.
    """

    exact: bool = False
    """Whether samples are a function of prompt, weights and the request's seed, whatever else is under way."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests."""
        raise NotImplementedError

    def samples(self) -> Iterator[Sample]:
        """Give the sequences of all requests as they end, in any order, until none is under way."""
        raise NotImplementedError

    def cancel(self, requests: Collection[int]) -> None:
        """End these requests soon: `samples` gives all their sequences; those that are cut short are "cancelled"."""
        raise NotImplementedError

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights of the policy, by name, from the next batch on. The tensors are the live ones.

        `Policy.generate` begins with it, also if nothing has changed. Other weights have another version.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Let go of copies of the weights, since an update needs the memory. `Policy.generate` ends with it, also if
        `samples` raised; `update` comes before any more samples."""


Completion = tuple[list[int], list[float], bool]  # token ids, log-probabilities, whether it ended by itself
Cancelled = Callable[[], Collection[int]]
"""Gives the numbers of prompts whose completions may end where they are; it is cheap to ask."""


class BatchEngine(Engine):
    """An engine of this process: requests with the same `n` and the same sampling are decoded together."""

    exact = True

    def __init__(self) -> None:
        self._version = 0
        self._lock = threading.Lock()
        self._waiting: list[Request] = []
        self._cancelled: set[int] = set()

    def decode(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, cancelled: Cancelled
    ) -> list[Completion]:
        """`n` completions of each prompt, in order. `uniform` [len(prompts) * n, max_new_tokens] decides them."""
        raise NotImplementedError

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self._waiting += requests

    def cancel(self, requests: Collection[int]) -> None:
        with self._lock:
            self._cancelled |= set(requests)

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._version = version

    def samples(self) -> Iterator[Sample]:
        try:
            while batch := self._next_batch():
                yield from self._sampled(batch)
        finally:
            with self._lock:
                self._waiting.clear()
                self._cancelled.clear()

    def _next_batch(self) -> list[Request]:
        with self._lock:
            kinds = [(request.n, request.sampling) for request in self._waiting]
            batch = [r for r, kind in zip(self._waiting, kinds, strict=True) if kind == kinds[0]]
            self._waiting = [r for r, kind in zip(self._waiting, kinds, strict=True) if kind != kinds[0]]
        return batch

    def _sampled(self, batch: list[Request]) -> Iterator[Sample]:
        n, sampling, version = batch[0].n, batch[0].sampling, self._version
        length = sampling.max_new_tokens
        drawn = uniforms([request.seed for request in batch], n, max(length, sampling.drawn))
        numbers = {request.id: i for i, request in enumerate(batch)}
        completions = self.decode(
            [request.prompt_ids for request in batch],
            n,
            sampling,
            drawn[:, :length].contiguous(),
            lambda: [numbers[id] for id in self._cancelled.copy() if id in numbers] if self._cancelled else (),
        )
        for i, (ids, logprobs, stopped) in enumerate(completions):
            end: End = "stop" if stopped else "length" if len(ids) == sampling.max_new_tokens else "cancelled"
            yield Sample(batch[i // n].id, i % n, ids, logprobs, [version] * len(ids), end)


# u * total must stay below total after rounding, or the index would run past the last token with any probability.
_BELOW_ONE = 1.0 - 1e-6
BLOCKS_ABOVE = 2**15
"""Vocabulary above which the sum is inverted in two levels: first over blocks of tokens, then inside one of them."""


def sample(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample from `logits` [R, V] at `uniform` [R] in [0, 1): token ids [R] and their log-probabilities [R].

        token = min { v : sum_{i<=v} p_i > u * sum_i p_i },   p = nucleus_top_p(softmax(logits / temperature))

    The log-probabilities are those of p. Inverting its sum is 10x cheaper than drawing an exponential for every entry
    of the vocabulary.
    """
    rows = max(1, SLICE_BYTES // (4 * logits.shape[-1]))
    if logits.device.type == "cpu" and len(logits) > rows:
        parts = [_sample(*part, sampling) for part in zip(logits.split(rows), uniform.split(rows), strict=True)]
        tokens, logprobs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)
    return _sample(logits, uniform, sampling)


def _sample(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    probs = logprobs.exp()
    if sampling.top_p < 1.0:
        probs = _nucleus(probs, sampling.top_p)
        logprobs = torch.log(probs / probs.sum(-1, keepdim=True))
    block = probs.shape[-1] & -probs.shape[-1]  # the largest power of two that divides it
    if probs.shape[-1] > BLOCKS_ABOVE and block > 16:
        token = _inverted_by_blocks(probs, uniform[:, None], min(block, 512))
    else:
        cumulative = probs.cumsum(-1)
        token = torch.searchsorted(cumulative, _point(cumulative, uniform[:, None]), right=True)
    token.clamp_(max=probs.shape[-1] - 1)  # of sums that are NaN, the end is found
    return token[:, 0], logprobs.gather(1, token)[:, 0]


def _point(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """`uniform` [R, 1] as a part of the last sum of each row [R, n]."""
    return uniform.to(cumulative) * (cumulative[:, -1:] * _BELOW_ONE)


def _inverted_by_blocks(probs: Tensor, uniform: Tensor, block: int) -> Tensor:
    """The token [R, 1] at which the running sum of `probs` [R, V] passes `uniform` [R, 1] of its total. A running sum
    over all of a large vocabulary takes a tenth of a step of a GPU; here it has V / block + block terms."""
    blocks = probs.unflatten(-1, (-1, block))
    sums = blocks.sum(-1)
    cumulative = sums.cumsum(-1)
    point = _point(cumulative, uniform)
    number = torch.searchsorted(cumulative, point, right=True).clamp_(max=blocks.shape[1] - 1)  # of the block
    inside = blocks.gather(1, number[..., None].expand(-1, -1, block))[:, 0].cumsum(-1)
    rest = point - (cumulative.gather(1, number) - sums.gather(1, number))
    rest = torch.minimum(rest.clamp_min(0.0), inside[:, -1:] * _BELOW_ONE)  # rounding must not lead out of the block
    return number * block + torch.searchsorted(inside, rest, right=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Zero every token outside the smallest set whose probability reaches `top_p` [R, V] (Holtzman et al. 2020)."""
    ordered, order = probs.sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return probs.masked_fill(outside.scatter(1, order, outside), 0.0)


def uniforms(seeds: list[int], n: int, length: int) -> Tensor:
    """Uniform numbers [len(seeds) * n, length], `n` rows for each seed, on the CPU."""
    generator = torch.Generator()
    return torch.cat([torch.rand(n, length, generator=generator.manual_seed(seed)) for seed in seeds])
