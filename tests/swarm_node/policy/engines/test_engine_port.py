"""The port of an engine: requests come and go, sequences carry log-probabilities and versions."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy.engines import ENGINES, base, find_engine
from swarm_node.policy.engines.base import Engine, Request, Sample, sample
from swarm_node.policy.engines.transformers import _Reserved, _reserved
from swarm_node.policy.loading import load_policy
from swarm_node.types import Sampling
from tests.support.tiny_models import make

PROMPT = [5, 9, 200, 31]


class Echo(Engine):
    """A fake of a remote endpoint: gives the prompt back, token by token, until it is cancelled."""

    exact = False

    def __init__(self, *_: object) -> None:
        self.waiting: dict[int, Request] = {}
        self.cancelled: set[int] = set()
        self.version = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting |= {request.id: request for request in requests}

    def samples(self) -> Iterator[Sample]:
        while self.waiting:
            request = self.waiting.pop(next(iter(self.waiting)))
            cancelled = request.id in self.cancelled
            ids = [] if cancelled else request.prompt_ids[: request.sampling.max_new_tokens]
            end = "cancelled" if cancelled else "length"
            for i in range(request.n):
                yield Sample(request.id, i, ids, [-1.0] * len(ids), [self.version] * len(ids), end)

    def cancel(self, requests: Collection[int]) -> None:
        self.cancelled |= set(requests)

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.version = version


def engine(kind: str) -> Engine:
    made = ENGINES[kind](make("llama"), [383], 0)
    assert made.exact
    return made


def sampled(kind: str, *requests: Request, version: int = 3) -> list[Sample]:
    made = engine(kind)
    made.update({}, version)
    made.submit(requests)
    return list(made.samples())


@pytest.mark.parametrize("kind", ENGINES)
def test_samples_follow_their_seed_in_any_company(kind):
    request = Request(1, PROMPT, Sampling(6), seed=7, n=2)
    others = [Request(2, [8], Sampling(6), seed=8, n=2), Request(3, [8], Sampling(3), seed=9)]
    alone, among = sampled(kind, request), sampled(kind, *others, request)
    assert [s.token_ids for s in alone] == [s.token_ids for s in among if s.request == 1]
    assert sorted((s.request, s.index) for s in among) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    for s in among:
        assert len(s.token_ids) == len(s.logprobs) == len(s.versions) > 0 and set(s.versions) == {3}
        assert s.end == ("stop" if s.token_ids[-1] == 383 else "length")


@pytest.mark.parametrize("kind", ENGINES)
def test_a_cancelled_request_hands_back_what_it_has(kind):
    requests = [Request(1, PROMPT, Sampling(6), seed=1), Request(2, [8, 9], Sampling(6), seed=2)]
    model, passes = make("llama"), itertools.count(1)
    made = ENGINES[kind](model, [383], 0)
    model.get_input_embeddings().register_forward_hook(lambda *_: made.cancel([1]) if next(passes) == 3 else None)
    made.submit(requests)
    first, second = sorted(made.samples(), key=lambda sample: sample.request)
    whole, other = sorted(sampled(kind, *requests), key=lambda sample: sample.request)
    assert first.end == "cancelled" and 0 < len(first.token_ids) < 6
    assert first.token_ids == whole.token_ids[: len(first.token_ids)] and second.token_ids == other.token_ids


@pytest.mark.parametrize("kind", ENGINES)
def test_waiting_requests_can_be_cancelled_and_resumed(kind):
    made = engine(kind)
    made.submit([Request(1, PROMPT, Sampling(4), seed=1), Request(2, PROMPT, Sampling(6), seed=2)])
    given = made.samples()
    first = next(given)
    made.cancel([2])
    (second,) = given
    assert (first.request, second.request, second.end) == (1, 2, "cancelled") and len(second.token_ids) < 6
    made.submit([Request(2, PROMPT + first.token_ids, Sampling(2), seed=3)])
    (rest,) = made.samples()
    expected = make("llama")(input_ids=torch.tensor([PROMPT + first.token_ids + rest.token_ids])).logits[0]
    start = len(PROMPT) + len(first.token_ids) - 1
    logprobs = expected[start:-1].log_softmax(-1).gather(1, torch.tensor(rest.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(rest.logprobs), logprobs, atol=1e-4, rtol=0)


def test_an_engine_of_ones_own_samples_for_the_policy():
    said: list[str] = []
    rollouts = RolloutsConfig(max_new_tokens=3, engine=f"{__name__}:Echo")
    policy = load_policy(PolicyConfig(), rollouts, said.append)
    policy.version = 4
    ((rollout, _),) = policy.generate([PROMPT], 2, Sampling(3), [0])
    assert rollout.token_ids == PROMPT[:3] and not rollout.finished and rollout.logprobs == [-1.0] * 3
    assert isinstance(policy.engine, Echo) and policy.engine.version == 4
    assert any("Echo, whose samples no seed repeats" in line for line in said)
    with pytest.raises(UserError, match="rollouts.engine"):
        find_engine("no.such:Engine")


class Broken(Echo):
    """A fake of an endpoint that is gone; it notes what is called."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.calls: list[str] = []

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.calls.append("update")

    def samples(self) -> Iterator[Sample]:
        self.calls.append("samples")
        raise ConnectionError("the endpoint is gone")

    def release(self) -> None:
        self.calls.append("release")


def test_an_engine_that_fails_is_released() -> None:
    policy = load_policy(PolicyConfig(), RolloutsConfig(), lambda line: None)
    broken = Broken()
    policy.engine = broken
    with pytest.raises(ConnectionError, match="the endpoint is gone"):
        policy.generate([PROMPT], 1, Sampling(3), [0])
    assert broken.calls == ["update", "samples", "release"]


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=0.5, top_p=0.9)])
def test_a_large_vocabulary_is_sampled_alike(sampling, monkeypatch):
    """Two levels of sums find the tokens that one finds, but for rounding at the border between two tokens."""
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 640, generator=rng)
    logits[:, 128:512] = -torch.inf  # whole blocks without any probability
    uniform = torch.rand(400, generator=rng)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])
    whole, expected = sample(logits, uniform, sampling)
    monkeypatch.setattr(base, "BLOCKS_ABOVE", 0)
    tokens, logprobs = sample(logits, uniform, sampling)
    assert (tokens == whole).sum() >= 398
    same = tokens == whole
    assert torch.equal(logprobs[same], expected[same])
    assert logprobs.isfinite().all()


def test_rows_are_drawn_alike_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniform = torch.randn(7, 300), torch.rand(7)
    whole = sample(logits, uniform, Sampling(1, top_p=0.9))
    monkeypatch.setattr(base, "SLICE_BYTES", 2 * 4 * 300)
    slices = sample(logits, uniform, Sampling(1, top_p=0.9))
    assert all(torch.equal(one, other) for one, other in zip(whole, slices, strict=True))


def test_a_cache_takes_its_memory_once() -> None:
    """It gives what a growing one gives."""
    reserved, growing, places = _Reserved(6), DynamicLayer(), set()
    for tokens in (3, 1, 1, 1):
        keys, values = torch.randn(2, 4, tokens, 8), torch.randn(2, 4, tokens, 8)
        for one, other in zip(reserved.update(keys, values), growing.update(keys, values), strict=True):
            assert torch.equal(one, other)
        places.add(reserved.keys.data_ptr())
    assert reserved.get_seq_length() == 6 and len(places) == 1


@pytest.mark.parametrize(("family", "served"), [("llama", True), ("gemma2", False)])
def test_only_a_cache_of_all_tokens_is_reserved(family: str, served: bool) -> None:
    """A layer with a sliding window keeps other tokens: its own cache knows which."""
    assert (_reserved(make(family), 8) is not None) == served
