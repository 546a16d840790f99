"""Which known model a machine is told that it carries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import memory
from swarm_node.config import NodeConfig
from swarm_node.grpo import batch
from swarm_node.policy.sizes import (
    KNOWN,
    MOST_ON_CPU,
    PART,
    KnownModel,
    Work,
    bytes_with,
    largest_fitting,
    program_bytes,
    round_bytes,
)
from tests.support.repository import ROOT

GIB = 2**30


def test_an_adapter_has_the_size_that_was_computed() -> None:
    known = KnownModel("tiny", 0, layers=3, hidden=64, inner=96, heads=4, kv_heads=2, head=16)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert known.shape(8, 4).trained == trained


def test_models_are_listed_by_size() -> None:
    assert [model.parameters for model in KNOWN] == sorted(model.parameters for model in KNOWN)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_proposal_fits_and_no_larger_one_does(gpu: bool) -> None:
    config = NodeConfig()
    assert largest_fitting(config, GIB // 2, gpu) is None and largest_fitting(config, 0, gpu) is None
    for free in (6 * GIB, 16 * GIB, 80 * GIB):
        found = largest_fitting(config, free, gpu)
        assert found is not None and bytes_with(found, config, gpu) <= PART * free
        larger = [model for model in KNOWN if model.parameters > found.parameters]
        assert all(bytes_with(m, config, gpu) > PART * free or (not gpu and m.parameters > MOST_ON_CPU) for m in larger)


def test_all_weights_take_more_than_an_adapter() -> None:
    adapter = NodeConfig()
    whole = NodeConfig.model_validate({"policy": {"lora": False}})
    for model in KNOWN:
        assert bytes_with(model, whole, True) - bytes_with(model, adapter, True) > 12 * model.parameters


def test_a_gpu_carries_more_than_main_memory() -> None:
    config = NodeConfig()
    with_gpu, without = largest_fitting(config, 80 * GIB, True), largest_fitting(config, 80 * GIB, False)
    assert with_gpu is not None and without is not None and with_gpu.parameters > without.parameters


@pytest.mark.parametrize(
    ("size", "model"),
    [
        ("0.5B", KnownModel("0.5B", 494_032_768, 24, 896, 4864, 14, 2, 64)),
        ("3B", KnownModel("3B", 3_085_938_688, 36, 2048, 11008, 16, 2, 128)),
    ],
)
def test_the_estimate_is_near_what_a_gpu_reserved(size: str, model: KnownModel) -> None:
    """benchmarks.real_model: 8 questions of 64 tokens, 8 answers each, of which 4 are trained on."""
    found = json.loads((ROOT / f"benchmarks/results/real_model/{size}-gpu.json").read_text())
    (measured,) = (each["peak_mib"] for each in found["contestants"] if each["who"] == "this package")
    prompts, new, answers = found["prompts"], found["new"], 4
    rows = [batch.Row([0] * 64, [[0] * new] * answers, i * answers) for i in range(prompts)]
    largest = batch.plan(rows, True, NodeConfig().grpo.microbatch_tokens, model.hidden)[0]
    tokens, longest = batch.tokens(largest), largest[0].length
    work = Work(8 * prompts, 8 * prompts * new + 64 * prompts, tokens, longest, tokens)
    shape = model.shape(16, 2)
    needed = round_bytes(shape, shape.activations, work, gpu=True)
    assert needed / 2**20 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("size", memory.SIZES)
def test_the_estimate_is_near_what_updates_took(size: str) -> None:
    """benchmarks.memory: within 15 %, or above where the heap had fewer gaps."""
    rows = memory.known(size)
    assert len(rows) > 5
    for row in rows:
        for peak in row.get("peaks", []):
            assert memory.estimate(row) >= 0.85 * peak
            assert memory.estimate(row) <= 1.15 * peak or row["way"] == "kept"


@pytest.mark.parametrize("peak", [5360, 5431])
def test_the_estimate_is_near_what_a_real_model_took(peak: int) -> None:
    """MiB of `python -m benchmarks.memory --model smollm2 --engines native --dtypes float32 --rows 64 --new 32`: eight
    questions of 100 tokens with eight answers each. Four of the eight were trained on, which was the default then."""
    shape = next(model for model in KNOWN if "135M" in model.name).shape(16, 4)
    row = 100 + 4 * 31
    update = {"tokens": 8 * row, "longest": row, "targets": 8 * 4 * 32, "several": False, "mapped": False}
    work = Work(64, 8 * (8 * 32 + 100), copied=shape.weights, prefilled=800, **update)
    assert 1 <= round_bytes(shape, shape.activations, work) / 2**20 / peak <= 1.15


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_a_torch_for_gpus_takes_more_memory_on_a_cpu_too(kind: str, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    without = program_bytes(str(tmp_path / "__init__.py"))
    (tmp_path / f"lib/libtorch_{kind}.so").touch()
    assert program_bytes(str(tmp_path / "__init__.py")) > without == program_bytes("/")
