"""A tokenizer whose library panics: the text that does it is refused, and nothing else is swallowed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from swarm_node.errors import UserError
from swarm_node.policy import loading, probes, tokenizing
from swarm_node.policy.engines.base import Request, Sample
from swarm_node.policy.policy import Policy
from swarm_node.policy.tokenizing import TokenizerError
from swarm_node.rollouts.collect import encode_each
from swarm_node.types import Sampling
from tests.support.panicking import KILLER, panicking_policy


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def hostile(said: list[str]) -> Policy:
    return panicking_policy(said)


@pytest.fixture(scope="module")
def killing_ids() -> list[int]:
    return tokenizing.encode(panicking_policy(encodes=False).tokenizer, [KILLER])[0]


def test_a_panic_is_an_error_and_the_tokenizer_works_on(hostile: Policy, killing_ids: list[int]) -> None:
    for call in (
        lambda: hostile.encode_completion(KILLER, True),
        lambda: hostile.is_surely_longer(KILLER, 40),
        lambda: hostile.encode(KILLER),
        lambda: hostile.decode(killing_ids),
        lambda: hostile.text_of_prompt(killing_ids),
        lambda: hostile.is_completion(killing_ids, KILLER, False),
    ):
        with pytest.raises(TokenizerError) as failed:
            call()
        assert "\n" not in str(failed.value) and str(failed.value).endswith("take another model")
    ids = hostile.encode_completion("12", False)
    assert ids and hostile.decode(ids) == "12"


def test_a_panic_at_the_text_of_the_probes_is_an_error(hostile: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TEXT", (KILLER, KILLER, KILLER))
    with pytest.raises(TokenizerError):
        probes.ProbeText.of(hostile)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_nothing_else_is_swallowed(kind: type[BaseException]) -> None:
    with pytest.raises(kind), tokenizing.guarded("a test"):
        raise kind


def test_an_error_of_the_library_is_one_of_ours() -> None:
    """Here of a vocabulary that does not fit its kind of model."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordPiece({"a": 0}, unk_token="[UNK]")))
    with pytest.raises(TokenizerError, match="WordPiece"):
        tokenizing.encode(tokenizer, ["a b"])


def test_an_own_answer_that_cannot_be_read_is_none(
    hostile: Policy, said: list[str], killing_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        """Samples the text that was planted, between harmless ones."""

        def submit(self, requests: list[Request]) -> None:
            self.requests = requests

        def samples(self) -> Iterator[Sample]:
            texts = [hostile.encode_completion("12", False) or [], killing_ids, killing_ids]
            for i, ids in enumerate(texts):
                yield Sample(self.requests[0].id, i, ids, [-1.0] * len(ids), [0] * len(ids), "length")

        def update(self, *given: Any) -> None: ...

        def release(self) -> None: ...

    monkeypatch.setattr(hostile, "engine", Engine())
    said.clear()
    (group,) = hostile.generate([[1, 2]], 3, Sampling(100), [0])
    assert [rollout.text for rollout in group] == ["12", "", ""]
    assert [rollout.token_ids for rollout in group[1:]] == [killing_ids] * 2
    (sentence,) = said
    assert "own answer" in sentence


def test_prompts_that_cannot_be_encoded_are_told_from_the_others(hostile: Policy, said: list[str]) -> None:
    said.clear()
    one, killer, two = encode_each(hostile, ["1 + 1?", KILLER, "2 + 2?"])
    assert killer is None and [one, two] == hostile.encode_questions(["1 + 1?", "2 + 2?"])
    assert len(said) == 1 and "left out" in said[0]


def test_a_panic_of_loading_is_one_sentence(hostile: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(*given: Any, **options: Any) -> None:
        hostile.tokenizer(KILLER)

    factory = SimpleNamespace(__name__="AutoTokenizer", from_pretrained=panics)
    monkeypatch.setattr(loading, "AutoTokenizer", factory)
    with pytest.raises(UserError) as refused:
        loading.load_tokenizer(hostile.config)
    assert "cannot load Tokenizer from" in str(refused.value) and "\n" not in str(refused.value)
