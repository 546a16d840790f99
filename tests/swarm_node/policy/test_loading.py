"""Loading from Hugging Face layout: what is chosen, what is refused."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import logging as hub_logging
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import CheckpointError, UserError
from swarm_node.policy import dtypes, loading, probes
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.loading import load_policy, prepare, refusing
from swarm_node.policy.probes import bf16_slowdown
from swarm_node.storage.model_names import keep_name
from swarm_node.types import Sampling
from tests.support.tiny_models import save

# native, packing, split_head
PATHS = {
    "llama": (True, True, True),
    "llama_bias": (True, True, True),
    "qwen2": (True, True, True),
    "qwen3": (True, True, True),
    "mistral": (True, True, True),
    "mistral_window": (False, False, True),
    "gpt_neox": (False, True, True),
    "gemma2": (False, False, False),
}


def load(path, rollouts=None, **options):
    said = []
    policy = load_policy(
        PolicyConfig(model=str(path), **options), rollouts or RolloutsConfig(max_new_tokens=8), said.append
    )
    return policy, "\n".join(said)


def test_a_policy_from_a_cache_is_called_by_its_name(tmp_path):
    folder = save("llama", tmp_path / ("5" * 64))
    keep_name(folder, "smollm2")
    _, said = load(folder)
    assert "policy smollm2: " in said and "5" * 64 not in said


@pytest.mark.parametrize("kind", PATHS)
def test_fast_paths_are_taken_only_where_right(kind, tmp_path):
    policy, said = load(save(kind, tmp_path))
    native = isinstance(policy.engine, NativeEngine)
    assert (native, policy.packing, policy.split_head) == PATHS[kind], said
    assert ("decoding with the native engine" in said) == native
    assert f"{policy.num_parameters():,} parameters in float32 (all trained)" in said
    groups = policy.generate([[5, 6, 7], [8]], 2, Sampling(8), [1, 2])
    assert [len(g) for g in groups] == [2, 2]
    for rollout in (r for g in groups for r in g):
        ids = torch.tensor([[*([5, 6, 7] if rollout in groups[0] else [8]), *rollout.token_ids]])
        logits = policy.model(input_ids=ids.to(policy.device)).logits[0].cpu()
        start = 2 if rollout in groups[0] else 0
        expected = logits[start:-1].log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        rounding = 1e-4 if policy.device.type == "cpu" else 2e-2  # TF32
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=rounding, rtol=0)


@pytest.mark.parametrize(("device", "precision", "cudnn"), [("cuda", "high", False), ("cpu", "highest", True)])
def test_products_take_tf32_on_a_gpu_alone(monkeypatch, device, precision, cudnn):
    monkeypatch.setattr(loading, "_device", lambda name: torch.device(device))
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert prepare(PolicyConfig()).device.type == device
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cuda.enable_cudnn_sdp(before[1])


def test_adapters_start_equal_everywhere(tmp_path):
    save("llama", tmp_path)
    full, _ = load(tmp_path)
    first, _ = load(tmp_path, lora=True, lora_rank=4)
    torch.manual_seed(123)
    second, _ = load(tmp_path, lora=True, lora_rank=4)
    assert not full.is_lora and first.is_lora
    assert full.base_digest == first.base_digest
    assert all(torch.equal(a, second.trainable_state()[n]) for n, a in first.trainable_state().items())
    assert first.num_parameters(trainable=True) < 0.3 * full.num_parameters()


def test_a_saved_adapter_is_trained_on(tmp_path):
    save("llama", tmp_path / "base")
    policy, _ = load(tmp_path / "base", lora=True, lora_rank=2)
    for tensor in policy.trainable_state().values():
        tensor.add_(0.1)
    policy.save(tmp_path / "adapter")
    again, _ = load(tmp_path / "adapter")
    assert again.is_lora
    assert all(torch.equal(a, again.trainable_state()[n]) for n, a in policy.trainable_state().items())
    with pytest.raises(UserError, match="no-lora"):
        load(tmp_path / "adapter", lora=False)


def test_saved_policy_loads_in_plain_transformers(tmp_path):
    policy, _ = load(save("llama", tmp_path / "a"))
    policy.trainable_state()["model.norm.weight"].mul_(1.5)
    policy.save(tmp_path / "b")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "b").to(policy.device)
    ids = torch.tensor([[4, 5, 6]], device=policy.device)
    assert torch.equal(plain.eval()(ids).logits, policy.model.eval()(ids).logits)


def test_state_of_another_model_changes_nothing(tmp_path):
    policy, _ = load(save("llama", tmp_path))
    before = {n: t.clone() for n, t in policy.trainable_state().items()}
    wrong = {n: t + 1 for n, t in before.items()}
    wrong["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError):
        policy.load_trainable_state(wrong)
    assert all(torch.equal(t, policy.trainable_state()[n]) for n, t in before.items())


def test_models_without_chat_template_use_the_prompt_template(tmp_path):
    policy, said = load(save("llama", tmp_path, chat=False), prompt_template="Q: {question} A:")
    assert policy.tokenizer.decode(policy.encode("one {x} plus")) == "Q: one {x} plus A:"
    asked = ["one", "", "one {x} plus two"]
    assert policy.encode_questions(asked) == [policy.encode(each) for each in asked] and not policy.encode_questions([])
    assert "prompt_template" in said


def test_templates_without_system_role_get_one_message(tmp_path):
    policy, _ = load(save("llama", tmp_path), system_prompt="Be brief.")
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    assert policy.tokenizer.decode(policy.encode("one plus two")) == "Be brief.\n\none plus two"


def test_unloadable_models_are_refused_in_one_line(tmp_path):
    save("llama", tmp_path / "good")
    pickled = shutil.copytree(tmp_path / "good", tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save({}, pickled / "pytorch_model.bin")
    torn = shutil.copytree(tmp_path / "good", tmp_path / "torn")
    data = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    coded = shutil.copytree(tmp_path / "good", tmp_path / "coded")
    config = json.loads((coded / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (coded / "config.json").write_text(json.dumps(config))
    (coded / "evil.py").write_text("raise SystemExit('code of the model ran')")
    for path in (tmp_path / "nowhere", pickled, torn, coded, tmp_path):
        with pytest.raises(UserError) as refused:
            load(path)
        assert "\n" not in str(refused.value)
    for options in ({"device": "cuda:7"}, {"lora": True, "lora_targets": ["nothing"]}):
        with pytest.raises(UserError):
            load(tmp_path / "good", **options)
    with pytest.raises(UserError, match="native"):
        load(save("gpt_neox", tmp_path / "neox"), RolloutsConfig(max_new_tokens=8, engine="native"))


def test_an_unreachable_hub_is_one_sentence(caplog):
    name = "some/model"
    with pytest.raises(UserError) as refused, refusing("Config", name):
        hub_logging.get_logger("huggingface_hub.utils._http").warning("Retrying in 1s")
        try:
            raise LocalEntryNotFoundError("no connection, and not in the cache")
        except LocalEntryNotFoundError as error:
            raise OSError("We couldn't connect") from error
    assert f"{name}: the hub cannot be reached" in str(refused.value)
    assert "; give a directory with the model (--model ./DIR)" in str(refused.value)
    assert not caplog.records and hub_logging.get_verbosity() == hub_logging.ERROR


def test_the_hub_is_named_before_it_is_asked(monkeypatch):
    said, asked = [], []
    monkeypatch.setattr(loading, "is_offline_mode", lambda: False)
    monkeypatch.setattr(loading, "check_hub", lambda *arguments: asked.append(list(said)))
    monkeypatch.setattr(loading, "hub_answers", lambda: True)
    monkeypatch.setattr(loading, "adapter_base", lambda path: 1 / 0)
    for model in ("some/model", "starter"):
        with pytest.raises(ZeroDivisionError):
            prepare(PolicyConfig(model=model), report=said.append)
    [line] = said
    assert line.startswith("asking http") and line.endswith(" for some/model")
    assert asked == [said]


def test_a_silent_hub_is_not_asked_again(monkeypatch):
    said = []
    monkeypatch.setattr(loading.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loading, "check_hub", lambda *arguments: None)  # as if it had been downloaded before
    monkeypatch.setattr(loading, "hub_answers", lambda: False)
    with pytest.raises(UserError):
        prepare(PolicyConfig(model="some/model"), report=said.append)
    assert loading.is_offline_mode()
    assert said[1].endswith("some/model is taken from what was downloaded before")


def test_a_model_with_a_tensor_missing_is_refused(tmp_path):
    save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="layers.1.mlp.down_proj"):
        load(tmp_path)


@pytest.mark.parametrize("wrong", [{"hidden_size": "abc"}, {"num_attention_heads": 0}, {"hidden_act": "no such"}])
def test_a_config_that_makes_no_sense_is_refused(tmp_path, wrong):
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError):
        load(tmp_path)


def test_dropout_stays_off(tmp_path):
    policy, _ = load(save("gpt_neox", tmp_path))
    assert not policy.model.training
    policy.generate([[5, 6]], 2, Sampling(2), [0])
    assert not any(module.training for module in policy.model.modules())


def test_the_reference_leaves_the_trainable_weights_trainable(tmp_path):
    policy, _ = load(save("llama", tmp_path), lora=True, lora_rank=2, dtype="float32")
    names = policy.trainable_state().keys()
    with policy.reference():
        assert policy.trainable_state().keys() == names and names
    assert all(p.requires_grad for p in policy.trainable_parameters())


def test_a_model_without_end_or_pad_token(tmp_path):
    save("llama", tmp_path)
    policy, _ = load(tmp_path)
    assert policy.pad_id == 0
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    policy, _ = load(tmp_path)
    assert policy.pad_id == policy.tokenizer.eos_token_id == 2


def test_the_slowdown_is_of_the_best_times(monkeypatch):
    """By a clock that passes 3 s in a float32 layer, then 4 s, and twice as much in a bfloat16 one."""
    ticks = iter([*(0.0, 0, 3, 1, 0, 4, 9), *(0.0, 0, 8, 1, 0, 6, 9)])
    clock = SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: next(ticks))
    monkeypatch.setattr(probes, "time", clock)
    assert bf16_slowdown(8, seconds=4.0) == 2.0


def test_crews_choose_a_type_without_measuring(tmp_path, monkeypatch):
    save("llama", tmp_path)
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 0.1)
    config = PolicyConfig(model=str(tmp_path), device="cpu", lora=True)
    assert prepare(config).dtype == torch.bfloat16
    plan = prepare(config, alone=False)
    assert plan.dtype == torch.float32 and "as on every machine of a crew without a GPU" in plan.where
    assert "as asked" in prepare(config.model_copy(update={"dtype": "float32"}), alone=False).where


class _Cramped(NativeEngine):
    """The native engine with memory for `most` prompts at a time."""

    most = 2

    def __init__(self, *rest):
        super().__init__(*rest)
        self.calls = []  # of the port, in order

    def update(self, weights, version):
        self.calls.append("update")
        super().update(weights, version)

    def release(self):
        self.calls.append("release")
        super().release()

    def decode(self, prompts, *rest):
        self.calls.append(len(prompts))
        if len(prompts) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().decode(prompts, *rest)


def test_halving_a_batch_changes_no_sample(tmp_path, monkeypatch):
    policy, _ = load(save("llama", tmp_path))
    prompts, seeds = [[4 + i, 5] for i in range(7)], list(range(7))
    expected = policy.generate(prompts, 2, Sampling(6), seeds)
    policy.engine = policy.engine_of(_Cramped)
    said = []
    policy.report = said.append
    assert [[r.token_ids for r in g] for g in policy.generate(prompts, 2, Sampling(6), seeds)] == [
        [r.token_ids for r in g] for g in expected
    ]
    assert said and "1 prompts" in said[-1]
    again = ["release", "update"]
    assert policy.engine.calls == ["update", 7, *again, 3, *again, *[1] * 7, "release"], "no copy of weights stays"
    policy.engine.calls.clear()
    monkeypatch.setattr(_Cramped, "most", 0)
    with pytest.raises(UserError, match="group_size"):
        policy.generate(prompts, 2, Sampling(6), seeds)
    assert policy.engine.calls == ["update", 1, "release"]
