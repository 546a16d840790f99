"""Policies whose linear layers are in 4 or 8 bits: their numbers, their training, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_node.cli.commands.export import export_run, policy_of_run
from swarm_node.cli.commands.merge import MergeRequest, main
from swarm_node.cli.model import runs_of
from swarm_node.config import GrpoConfig, NodeConfig, PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.grpo.memory import shape_of
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy.digests import model_digest
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.engines.products import Layout, Name, joined
from swarm_node.policy.loading import load_policy, prepare
from swarm_node.policy.model_path import starter_path
from swarm_node.policy.packed import held_bytes, is_packed, plain_weight, values_of
from swarm_node.policy.policy import Policy
from swarm_node.policy.quantised import KIND, check_quantisable, original_lines
from swarm_node.policy.sizes import copying_bytes
from swarm_node.types import Group, Sampling, Task
from swarm_protocol.messages import TaskName
from tests.support.layouts import skip_if_missing
from tests.support.starting import train_locally
from tests.support.tiny_models import save

KINDS = ["nf4", "int8"]
IDS = torch.tensor([[5, 9, 200, 31, 7, 80]])


def load(path: Path, engine: str = "auto", **options: object) -> Policy:
    config = PolicyConfig.model_validate({"model": str(path), "device": "cpu", "lora_rank": 4, **options})
    return load_policy(config, RolloutsConfig(max_new_tokens=8, engine=engine), lambda sentence: None)


def stir(policy: Policy) -> None:
    """Give the adapter values that matter."""
    generator = torch.Generator().manual_seed(1)
    for tensor in policy.trainable_state().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)


def frozen_bytes(policy: Policy) -> dict[str, Tensor]:
    state = policy.model.state_dict()
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor) and ".lora_" not in name}


def by_hand(policy: Policy, path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model at `path`, with the policy's weights dequantised by the formula and by bitsandbytes' function."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for name, module in policy.base.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        layer = module.base_layer
        if policy.config.quantize == "nf4":
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        else:
            weight = layer.weight.data.float() * layer.state.SCB[:, None] / 127
        delta = module.lora_B["default"].weight @ module.lora_A["default"].weight * module.scaling["default"]
        plain.get_parameter(f"{name}.weight").data.copy_(weight + delta)
    return plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_dequantised_weights(kind: str, dtype: str, tmp_path: Path) -> None:
    policy = load(save("llama_bias", tmp_path), quantize=kind, dtype=dtype)
    stir(policy)
    plain = by_hand(policy, tmp_path, policy.dtype)
    with torch.no_grad():
        ours, theirs = policy.model(input_ids=IDS).logits.float(), plain(input_ids=IDS).logits.float()
    assert (ours - theirs).norm() <= (1e-4 if dtype == "float32" else 0.05) * theirs.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", get_args(Name))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_has_the_models_own_numbers(kind: str, layout: Name, dtype: str, tmp_path: Path) -> None:
    """In bfloat16, rounding makes 0.02 to 0.03 nats a token, and one layer's missing adapter 0.09 or more."""
    policy = load(save("qwen3", tmp_path), quantize=kind, dtype=dtype)
    skip_if_missing(layout, policy.dtype)
    assert isinstance(policy.engine, NativeEngine) and policy.packing and policy.split_head
    policy.engine.layout = Layout(layout, "")
    stir(policy)
    plain, off = by_hand(policy, tmp_path, policy.dtype), []
    for rollout in policy.generate([[5, 6, 7]], 8, Sampling(16), [1])[0]:
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([[5, 6, 7, *rollout.token_ids]])).logits[0, 2:-1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        off += (torch.tensor(rollout.logprobs) - expected).abs().tolist()
    assert len(off) > 64 and fmean(off) <= (1e-4 if dtype == "float32" else 0.06)


def most_bytes(make: Callable[[], object]) -> int:
    """The most bytes of tensors that there are at a time while `make` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _ = make()
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["joined", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_making_a_copy_takes_what_is_estimated(kind: str, layout: Name, dtype: str, tmp_path: Path) -> None:
    policy = load(save("qwen3", tmp_path), quantize=kind, dtype=dtype)
    skip_if_missing(layout, policy.dtype)
    mlp = policy.base.model.layers[0].mlp
    beside = []
    for modules in ([mlp.gate_proj, mlp.up_proj], [mlp.down_proj]):
        copied = sum(values_of(module.base_layer.weight) for module in modules) * policy.dtype.itemsize
        beside.append(most_bytes(lambda modules=modules: joined(modules, layout, policy.dtype)) - copied)
    estimate = copying_bytes(shape_of(policy))
    least = {("nf4", "float32"): 0.5, ("nf4", "bfloat16"): 0.25}.get((kind, dtype), 0.9)  # NF4 becomes `dtype` at once
    assert least * estimate <= max(beside) <= 1.01 * estimate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_pass_after_products_without_one(kind: str, dtype: str, tmp_path: Path) -> None:
    policy = load(save("llama", tmp_path), quantize=kind, dtype=dtype)
    stir(policy)
    plain = load(tmp_path, lora=True, dtype=dtype)
    stir(plain)
    for name, module in policy.base.named_modules():
        if hasattr(module, "base_layer"):
            plain.base.get_submodule(name).base_layer.weight.data.copy_(plain_weight(module.base_layer))
    with torch.no_grad():
        policy.model(input_ids=IDS)
    for each in (policy, plain):
        each.model(input_ids=IDS).logits.float().logsumexp(-1).sum().backward()
    for ours, theirs in zip(policy.trainable_parameters(), plain.trainable_parameters(), strict=True):
        assert theirs.grad.norm() > 0
        assert (ours.grad - theirs.grad).norm() <= (1e-3 if dtype == "float32" else 0.3) * theirs.grad.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_products_keep_no_input_for_the_backward_pass(kind: str, tmp_path: Path) -> None:
    """A layer's adapter keeps its input in float32, a copy."""
    policy = load(save("llama", tmp_path), quantize=kind, dtype="bfloat16")
    inputs: list[weakref.ref[Tensor]] = []
    for module in policy.base.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.register_forward_pre_hook(lambda module, given: inputs.append(weakref.ref(given[0])))
    logits = policy.model(input_ids=IDS, use_cache=False).logits
    assert inputs and logits.requires_grad and all(tensor() is None for tensor in inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_reward_over_frozen_weights(kind: str, tmp_path: Path) -> None:
    policy = load(save("llama", tmp_path), quantize=kind, dtype="float32")
    before, sampling = frozen_bytes(policy), Sampling(6)
    trainer = Trainer(policy, GrpoConfig(learning_rate=0.02, answers=0), sampling, lambda sentence: None)
    means = []
    for i in range(16):
        task = Task(TaskName("gcd", "0" * 16, "test 1", 0, i), "gcd", "question", "answer")
        rollouts = policy.generate([[5, 6, 7]], 32, sampling, [i])[0]
        for rollout in rollouts:
            rollout.reward = fmean(token % 2 for token in rollout.token_ids)
            rollout.rewards = {"odd": rollout.reward}
        means.append(fmean(rollout.reward for rollout in rollouts))
        trainer.step([Group(task, [5, 6, 7], rollouts, policy.version)])
    assert fmean(means[-3:]) > fmean(means[:3]) + 0.1, means
    after = frozen_bytes(policy)
    assert before.keys() == after.keys() and any("base_layer" in name for name in after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_digests_are_of_the_model_and_its_quantisation(tmp_path: Path) -> None:
    one, other = save("llama", tmp_path / "one"), save("llama", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    plain = load(one, lora=True)
    first, second = load(one, quantize="nf4", dtype="float32"), load(one, quantize="nf4", dtype="bfloat16")
    assert (first.base_digest, first.start) == (second.base_digest, second.start)
    starts = {policy.start for policy in (first, plain, load(one, quantize="int8"), load(other, quantize="nf4"))}
    assert len(starts) == 4
    names = first.trainable_state()
    assert all(torch.equal(tensor, names[name]) for name, tensor in plain.trainable_state().items())
    plan = prepare(first.config)
    original = original_lines([one / "model.safetensors"], plan.tensors, "nf4")
    assert original.pop(KIND) == "nf4"
    assert model_digest(original) == plain.base_digest, "of the weights before they were quantised"
    before = first.fingerprint
    stir(first)
    assert first.fingerprint != before and first.base_digest == second.base_digest


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_parameters_are_counted(kind: str, tmp_path: Path) -> None:
    policy = load(save("llama", tmp_path), quantize=kind, dtype="float32")
    plain, plan = load(tmp_path, lora=True, dtype="float32"), prepare(policy.config)
    assert policy.num_parameters() == plain.num_parameters()
    packed = [p for p in policy.model.parameters() if is_packed(p)]
    assert sum(map(values_of, packed)) == plan.linear
    assert plan.saved == pytest.approx(4 * plan.linear - held_bytes(packed), rel=0.02)
    assert shape_of(plain).weights - shape_of(policy).weights == 4 * plan.linear - held_bytes(packed)


def test_a_saved_adapter_is_trained_on_over_quantised_weights(tmp_path: Path) -> None:
    policy = load(save("llama", tmp_path / "base"), quantize="nf4")
    stir(policy)
    policy.save(tmp_path / "adapter")
    again = load(tmp_path / "adapter", quantize="nf4")
    mine, theirs = policy.trainable_state(), again.trainable_state()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert any(map(is_packed, again.model.parameters()))


def test_a_model_in_few_bits_already_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is quantised already: leave out --quantize"):
        load(tmp_path, quantize="nf4")


def test_devices_that_fetch_code_are_refused() -> None:
    with pytest.raises(UserError, match="for CPUs and NVIDIA GPUs: .* set policy.device = cpu"):
        check_quantisable("nf4", "a model", SimpleNamespace(), torch.device("mps"))


def test_bitsandbytes_is_loaded_without_fetched_kernels(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("raise SystemExit('kernels was imported')")
    code = "import sys, swarm_node.policy.loading, bitsandbytes; sys.exit(sys.modules['kernels'] is not None)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of two rounds; the second one was resumed after the first round."""
    folder = tmp_path_factory.mktemp("runs")
    for name, starts in (("whole", (2,)), ("resumed", (1, 2))):
        for rounds in starts:
            train(folder / name, rounds)
    return folder / "whole", folder / "resumed"


def parity(completions: list[str], **columns: object) -> list[float]:
    """A reward function under which any model has something to learn."""
    return [float(len(completion) % 2) for completion in completions]


def train(run_dir: Path, rounds: int) -> None:
    config = {
        "run_dir": str(run_dir),
        "rounds": rounds,
        "policy": {"quantize": "nf4", "lora_rank": 4},
        "rollouts": {"groups": 4, "group_size": 4, "max_new_tokens": 6},
        "rewards": {"functions": [{"path": f"{__file__}:parity"}], "checker_weight": 0},
        "eval": {"questions": 0, "samples": 2},
        "grpo": {"learning_rate": 1e-3},
    }
    train_locally(NodeConfig.model_validate(config), json_output=True)


def newest(run: Path, file: str) -> dict[str, Tensor]:
    return load_file(max((run / "checkpoints").iterdir(), key=lambda path: path.name) / f"{file}.safetensors")


def test_a_resumed_run_goes_on_bit_for_bit(runs: tuple[Path, Path]) -> None:
    for file in ("policy", "optimizer"):
        whole, resumed = (newest(run, file) for run in runs)
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(tensor.any() for name, tensor in newest(runs[0], "policy").items() if ".lora_B." in name)


def test_exports_and_merges_are_adapters(runs: tuple[Path, Path], tmp_path: Path) -> None:
    export_run(runs[0], tmp_path / "export", lambda sentence: None)
    main(runs_of(list(map(str, runs))), MergeRequest(tmp_path / "merged", questions=0, json_output=True))
    for out in ("export", "merged"):
        plain = AutoModelForCausalLM.from_pretrained(starter_path())
        state = PeftModel.from_pretrained(plain, tmp_path / out).state_dict()
        for name, tensor in newest(runs[0], "policy").items():
            torch.testing.assert_close(state[name], tensor)
    policy, _ = policy_of_run(runs[0], lambda sentence: None)
    assert any(map(is_packed, policy.model.parameters()))
