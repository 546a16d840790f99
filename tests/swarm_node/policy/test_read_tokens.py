"""Tags that a tokenizer calls special: answers and reasoning are found by them, so they stay in texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from tests.support.tiny_models import save

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@pytest.fixture
def tagged(tmp_path: Path) -> Policy:
    """A policy whose tags are special tokens, and `<tool>` besides."""
    folder = save("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in [*TAGS, "<tool>"]], special_tokens=True)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    return load_policy(PolicyConfig(model=str(folder)), RolloutsConfig(), lambda line: None)


def test_tags_stay_and_other_special_tokens_go(tagged: Policy) -> None:
    text = "<think>one</think><answer>1</answer>"
    ids = tagged.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [tag for tag in TAGS if tagged.tokenizer.convert_tokens_to_ids(tag) in ids] == TAGS
    tool = tagged.tokenizer.convert_tokens_to_ids("<tool>")
    assert tagged.decode([*ids, tool, tagged.eos_id]) == text
    assert tagged.decode([tool]) == ""


def test_texts_of_others_may_have_tags(tagged: Policy) -> None:
    text = "<think>one</think><answer>1</answer>"
    ids = tagged.encode_completion(text, True)
    assert ids is not None and ids[-1] == tagged.eos_id
    assert tagged.is_completion(ids, text, True) and tagged.decode(ids) == text
    assert tagged.encode_completion(f"{text}<tool>", True) is None
