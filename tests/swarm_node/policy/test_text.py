"""Text to tokens and what a policy says of itself: the starter, and a tiny model of another family and tokenizer."""

from __future__ import annotations

from unicodedata import normalize

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.types import Sampling
from tests.support.tiny_models import save

ROLLOUTS = RolloutsConfig(max_new_tokens=16)


def load(model: str, **options) -> Policy:
    return load_policy(PolicyConfig(model=model, **options), ROLLOUTS, lambda line: None)


@pytest.fixture(scope="module")
def starter() -> Policy:
    return load("starter")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load(str(save("qwen2", tmp_path_factory.mktemp("qwen2"))))


def test_family_fingerprint_and_tokenizer_tell_policies_apart(starter, other, tmp_path):
    assert (starter.family, other.family) == ("llama", "qwen2")
    assert starter.fingerprint != other.fingerprint and starter.tokenizer_hash != other.tokenizer_hash
    for policy in (starter, other):
        for value in (policy.fingerprint, policy.tokenizer_hash):
            assert len(value) == 16 and set(value) <= set("0123456789abcdef")
    again = load("starter")
    assert (again.fingerprint, again.tokenizer_hash) == (starter.fingerprint, starter.tokenizer_hash)
    save("qwen2", tmp_path, chat=False, seed=3)  # other weights, no template: the same shapes, the same tokens
    twin = load(str(tmp_path))
    assert twin.fingerprint != other.fingerprint and twin.tokenizer_hash == other.tokenizer_hash


@pytest.mark.parametrize("options", [{}, {"lora": True, "lora_rank": 2}, {"dtype": "bfloat16"}], ids=str)
def test_other_weights_have_another_fingerprint_at_once(options):
    """By as little as training changes them."""
    policy = load("starter", **options)
    for tensor in policy.trainable_state().values():
        before, value = policy.fingerprint, tensor.flatten()[0].clone()
        tensor.view(-1)[0] = torch.nextafter(value, value.new_tensor(9.0))
        changed = policy.fingerprint
        tensor.view(-1)[0] = value
        assert changed != before == policy.fingerprint


def test_own_completions_are_encoded_as_sampled(starter):
    """Where the sampled tokens are the tokenizer's own for that text: for short answers nearly always."""
    samples = starter.generate([starter.encode("What is 3 + 4?")], 64, Sampling(16), [1])[0]
    same = [starter.encode_completion(r.text, r.finished) == r.token_ids for r in samples]
    assert sum(same) > 50
    assert all(starter.is_completion(r.token_ids, r.text, r.finished) for r in samples)


@pytest.mark.parametrize("text", ["<eos>", "12<pad>", "<sep>", "a<eos>b"])
def test_text_spelling_special_tokens_has_no_encoding(starter, other, text):
    assert starter.encode_completion(text, True) is None
    assert other.encode_completion(text, False) is None
    assert starter.encode_completion(text.replace(">", ""), True)


@given(text=st.text(max_size=50), finished=st.booleans())
def test_any_text_comes_back_or_has_no_encoding(starter, other, text, finished):
    for policy in (starter, other):
        ids = policy.encode_completion(text, finished)
        if ids is None:
            assert any(name in text for name in ("<eos>", "<pad>", "<sep>"))
            continue
        back = text if policy is starter else normalize("NFC", text)  # as tokenizers of that family do
        assert finished == (ids[-1:] == [policy.eos_id]) and policy.decode(ids) == back
        assert policy.is_completion(ids, back, finished) and not policy.is_completion(ids, back + "x", finished)


def test_impossible_ids_are_no_completion(starter):
    one, two, eos = starter.encode_completion("12", True)
    assert starter.is_completion([one, two, eos], "12", True) and starter.is_completion([one, two], "12", False)
    for ids, finished in (
        ([one, two, eos], False),  # goes on after its end
        ([one, two], True),  # has no end
        ([one, eos, two, eos], True),
        ([one, starter.pad_id, two, eos], True),
        ([one, two, 2**30, eos], True),
        ([one, -1, two, eos], True),
        ([], True),
    ):
        assert not starter.is_completion(ids, "12", finished)


def test_text_without_tokens_has_no_encoding(starter):
    words = Tokenizer(WordLevel({"<unk>": 0, "one": 1, "<eos>": 2, "two": 3}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    policy = Policy(starter.base, tokenizer, PolicyConfig())
    assert policy.encode_completion("one two", False) == [1, 3]
    assert policy.encode_completion("one three", False) is None
    assert policy.tokenizer_hash != starter.tokenizer_hash and policy.fingerprint == starter.fingerprint
