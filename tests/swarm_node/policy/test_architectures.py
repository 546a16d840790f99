"""Every causal language model of transformers is trained with right numbers, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from scripts.architectures import PAGE
from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy.architecture import is_windowed, largest, without_adapter
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.loading import load_policy
from swarm_node.types import Sampling
from tests.support import architectures
from tests.support.architecture_rounds import ROLLOUTS, outcomes, refusals, rows, table
from tests.support.architectures import MODEL_TYPES, save

COMMON = {
    "bart": "one length of prompts at a time",
    "gemma3": "`generate`",
    "gemma4_text": "`generate`",
    "gpt2": "`generate`",
    "llama": "native",
    "mamba": "`generate`",
    "mixtral": "`generate`",
    "phi3": "`generate`",
    "qwen3": "native",
    "qwen3_5": "`generate`",
    "qwen3_moe": "`generate`",
}
"""Well-known architectures of all kinds, and what samples them."""


@pytest.mark.parametrize("model_type", COMMON)
def test_well_known_architectures_train(model_type):
    for outcome in outcomes(model_type):
        assert COMMON[model_type] in outcome.sampled, outcome.refused


@pytest.mark.long
@pytest.mark.parametrize("model_type", [t for t in MODEL_TYPES if t not in COMMON])
def test_each_architecture_trains_or_is_refused(model_type):
    assert len(refusals(model_type)) + sum(bool(outcome.sampled) for outcome in outcomes(model_type)) == 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_page_has_all_architectures():
    assert table() in PAGE.read_text(), "run scripts/architectures.py --write"


def test_the_page_names_each_architecture():
    named = PAGE.read_text()
    assert [t for t in MODEL_TYPES if f"`{t}`" not in named] == []


def test_an_encoder_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="BertLMHeadModel.*not causal.*is_decoder"):
        load_policy(PolicyConfig(model=str(save("bert", tmp_path))), ROLLOUTS)


def test_a_selection_of_tokens_bounds_rows(tmp_path):
    model = str(save("deepseek_v32", tmp_path))
    with pytest.raises(UserError, match="DeepseekV32ForCausalLM.*selects 128 tokens.*max_new_tokens"):
        load_policy(PolicyConfig(model=model), RolloutsConfig(max_prompt_tokens=100, max_new_tokens=100))


def test_towers_beside_the_text_are_not_trained(tmp_path):
    model, said = str(save("gemma3", tmp_path)), []
    policy = load_policy(PolicyConfig(model=model, lora=False), ROLLOUTS, said.append)
    assert policy.num_parameters() > policy.num_parameters(trainable=True)
    assert not any("vision" in name for name in policy.trainable_state())
    assert any(f"({policy.num_parameters(trainable=True):,} of them trained)" in line for line in map(str, said))
    adapted = load_policy(PolicyConfig(model=model, lora=True, dtype="float32"), ROLLOUTS)
    assert adapted.trainable_state() and not any("vision" in name for name in adapted.trainable_state())


def test_an_adapter_with_lost_tensors_is_refused(tmp_path):
    base = save("llama", tmp_path / "base")
    policy = load_policy(PolicyConfig(model=str(base), lora=True, lora_rank=2, dtype="float32"), ROLLOUTS)
    policy.save(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="adapter"):
        load_policy(PolicyConfig(model=str(tmp_path / "adapter")), ROLLOUTS)


class _Router(nn.Linear):
    """Gives scores and the best of them."""

    def forward(self, x):
        scores = super().forward(x)
        return scores, scores.topk(1).indices


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class _StateSpace(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d, self.out_proj, self.D = nn.Conv1d(2, 2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(2))


def test_no_adapter_goes_on_what_is_not_linear():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": _Router(2, 4), "c": _Doubled(2, 2), "d": _StateSpace()})
    model.config = SimpleNamespace()
    model.config.get_text_config = lambda: model.config
    assert without_adapter(model) == ["b", "d.out_proj"]


def test_numbers_may_differ_from_layer_to_layer():
    config = architectures.config_of("gemma4_text")
    assert largest(config, "head_dim", 1) == 512
    assert largest(config, "no such number", 7) == 7
    assert is_windowed(config, architectures.WINDOW + 1) and not is_windowed(config, architectures.WINDOW)


def test_equal_lengths_are_decoded_together(tmp_path):
    """Prompts come back in order, cancelled ones included, and samples do not depend on how they are grouped."""
    policy = load_policy(PolicyConfig(model=str(save("gpt2", tmp_path)), lora=False), ROLLOUTS)
    prompts, uniform = [[5, 6, 7], [8], [9, 10, 11]], torch.rand(6, 5, generator=torch.Generator().manual_seed(1))
    padded, apart = (TransformersEngine(policy.model, [2], 0, padded=padded) for padded in (True, False))
    expected = padded.decode(prompts, 2, Sampling(5), uniform, tuple)
    assert [row[0] for row in apart.decode(prompts, 2, Sampling(5), uniform, tuple)] == [row[0] for row in expected]
    cut = apart.decode(prompts, 2, Sampling(5), uniform, lambda: [2])
    assert [len(row[0]) for row in cut] == [len(row[0]) for row in expected[:4]] + [1, 1]
    uncached = TransformersEngine(policy.model, [2], 0, padded=False, cached=False)
    assert [r[0] for r in uncached.decode(prompts, 2, Sampling(5), uniform, tuple)] == [r[0] for r in expected]


def test_the_table_says_what_only_one_way_trains():
    from tests.support.architecture_rounds import Outcome

    fast, refused = Outcome("the native engine", "packed"), Outcome(refused="X is not causal")
    made = rows({"b": (refused, fast), "a": (fast, fast), "c": (refused, refused)}).splitlines()
    assert made[2:] == ["| the native engine | packed | `a`, `b` (LoRA only) |", "| refused: not causal |  | `c` |"]
