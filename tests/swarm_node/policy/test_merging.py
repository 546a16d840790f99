"""An adapter merged into its base answers as base and adapter do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import merging
from swarm_node.policy.loading import load_policy, prepare
from swarm_node.policy.merging import check_room_to_merge, dtype_of_base, merged_model
from swarm_node.policy.policy import Policy
from swarm_node.policy.policy import save as save_model
from tests.support.tiny_models import make, save

pytestmark = pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")  # of PEFT
IDS = torch.tensor([[5, 80, 130, 7, 220, 91, 33, 12]])


def policy_of(model: Path, **settings: object) -> Policy:
    """A policy with an adapter that changes something."""
    config = PolicyConfig.model_validate({"model": str(model), "lora": True, "dtype": "float32"} | settings)
    policy = load_policy(config, RolloutsConfig(), lambda line: None, samples=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, tensor in policy.trainable_state().items():
            if ".lora_B." in name or ".lora_embedding_" in name:
                tensor.normal_(std=0.05)
    return policy


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=IDS).logits.float()


def written(policy: Policy, out: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The merged model, as transformers loads it from files."""
    tokenizer = policy.tokenizer
    save_model(merged_model(policy, dtype), tokenizer, out)
    return AutoModelForCausalLM.from_pretrained(out).eval()


@pytest.mark.parametrize("kind", ["llama", "llama_bias", "qwen3", "gpt_neox", "gemma2"])
def test_merged_weights_give_the_logits_of_base_and_adapter(tmp_path: Path, kind: str) -> None:
    policy = policy_of(save(kind, tmp_path / "base"))
    with_adapter = logits(policy.model)
    with policy.model.disable_adapter():
        assert (logits(policy.model) - with_adapter).abs().max() > 0.1
    merged = written(policy, tmp_path / "out")
    torch.testing.assert_close(logits(merged), with_adapter, rtol=1e-4, atol=1e-3)
    assert not (tmp_path / "out/adapter_config.json").exists()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    merged = written(policy_of(save("llama", tmp_path / "base")), tmp_path / "out")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight and merged.config.tie_word_embeddings


@pytest.mark.parametrize("targets", [["embed_tokens", "q_proj"], ["lm_head", "q_proj"]])
def test_an_adapter_of_one_tied_matrix_unties_them(tmp_path: Path, targets: list[str]) -> None:
    policy = policy_of(save("llama", tmp_path / "base"), lora_targets=targets)
    with_adapter = logits(policy.model)
    merged = written(policy, tmp_path / "out")
    torch.testing.assert_close(logits(merged), with_adapter, rtol=1e-4, atol=1e-3)
    assert not merged.config.tie_word_embeddings


def test_whole_layers_beside_an_adapter_are_merged(tmp_path: Path) -> None:
    save("llama", tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"
    )
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    policy_of(save("llama", tmp_path / "tokenizer")).tokenizer.save_pretrained(tmp_path / "adapter")
    policy = policy_of(tmp_path / "adapter", lora=None)
    with torch.no_grad():
        for name, tensor in policy.trainable_state().items():
            if "modules_to_save" in name:
                tensor += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
    with_adapter = logits(policy.model)
    torch.testing.assert_close(logits(written(policy, tmp_path / "out")), with_adapter, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bases_in_four_and_eight_bits_are_dequantised(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    policy = policy_of(save("llama", tmp_path / "base"), quantize=kind)
    with_adapter = logits(policy.model)
    merged = written(policy, tmp_path / "out")
    assert getattr(merged.config, "quantization_config", None) is None
    torch.testing.assert_close(logits(merged), with_adapter, rtol=1e-3, atol=1e-2)


def test_a_merge_that_changes_answers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_untie", lambda base: None)
    policy = policy_of(save("llama", tmp_path / "base"), lora_targets=["embed_tokens", "q_proj"])
    with pytest.raises(UserError, match="gives other probabilities than base and adapter"):
        merged_model(policy, torch.float32)


def test_the_dtype_of_a_base_is_that_of_its_files(tmp_path: Path) -> None:
    save("llama", tmp_path / "base")
    assert dtype_of_base(PolicyConfig(model=str(tmp_path / "base"), lora=True)) == "float32"
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    assert dtype_of_base(PolicyConfig(model=str(tmp_path / "base"), lora=True)) == "bfloat16"
    assert dtype_of_base(PolicyConfig(model=str(tmp_path / "base"), lora=False)) is None


def test_a_merge_that_does_not_fit_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    plan = prepare(PolicyConfig(model=str(save("llama", tmp_path / "base")), lora=True, dtype="float32"))
    size = plan.size * 4
    check_room_to_merge(plan, torch.float32, tmp_path / "out", 1e12, size)
    check_room_to_merge(plan, torch.float32, tmp_path / "out", 0, size)
    with pytest.raises(UserError, match=r"merging takes about .* GiB of memory.*--dtype bfloat16"):
        check_room_to_merge(plan, torch.float32, tmp_path / "out", size, size)
    with pytest.raises(UserError, match="no room at .*out for a model of"):
        check_room_to_merge(plan, torch.float32, tmp_path / "out", 1e12, size - 1)
