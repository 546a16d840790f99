"""On a CPU the number format of a policy is that in which a round takes less time, with the paths that it gets."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from swarm_node.config import NodeConfig, PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import dtypes
from swarm_node.policy.dtypes import DtypeChoice, expected, fastest, short_round, with_dtype
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.loading import load_policy, prepare
from swarm_node.policy.probes import update_seconds
from tests.support.tiny_models import make, save

ROLLOUTS = RolloutsConfig(max_prompt_tokens=20, max_new_tokens=8)
F32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")


def of_round(policy):
    return NodeConfig(rollouts=ROLLOUTS)


def adapter_of(folder, **options):
    """A policy that trains an adapter, and what was said."""
    said = []
    config = PolicyConfig(model=str(folder), lora=True, lora_rank=2, device="cpu", **options)
    return load_policy(config, ROLLOUTS, said.append), said


@pytest.mark.parametrize(("layer", "seconds", "dtype"), [(0.1, 2.0, F32), (1.5, 0.5, BF16), (0.1, 0.98, F32)])
def test_a_round_decides_and_not_a_layer(layer, seconds, dtype, tmp_path, monkeypatch):
    """`layer`, `seconds`: in bfloat16, where float32 takes 1. Little is not worth the rounding."""
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: layer)
    monkeypatch.setattr(dtypes, "short_round", lambda policy, config: seconds if policy.dtype == BF16 else 1.0)
    policy, said = adapter_of(save("llama", tmp_path))
    assert policy.dtype == dtype and isinstance(policy.engine, NativeEngine)
    assert all(p.dtype == F32 for p in policy.trainable_parameters())
    assert any(f"{str(dtype).removeprefix('torch.')} (a short round" in line for line in said), said


def test_no_round_is_timed_where_a_layer_is_hopeless_or_none_will_be(tmp_path, monkeypatch):
    monkeypatch.setattr(dtypes, "short_round", lambda policy, config: 1 / 0)
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 5.0)
    config = PolicyConfig(model=str(save("llama", tmp_path)), lora=True, device="cpu")
    assert load_policy(config, ROLLOUTS, lambda text: None).dtype == F32
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 0.1)
    assert load_policy(config, ROLLOUTS, lambda text: None, samples=False).dtype == F32
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 1 / 0)
    assert load_policy(config.model_copy(update={"dtype": "bfloat16"}), ROLLOUTS, lambda text: None).dtype == BF16


def test_a_large_model_is_not_loaded_twice(monkeypatch):
    config = make("llama").config
    for ratio, dtype in ((0.5, BF16), (1.0, F32)):
        monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden, ratio=ratio: ratio)
        choice = expected("auto", CPU, True, config, timed=False, alone=True)
        assert choice.dtype == dtype and not choice.timed and "one layer" in choice.why
        assert expected("auto", CPU, True, config, timed=True, alone=True).timed


@pytest.mark.parametrize("layer", [0.1, 1.5])
def test_memory_for_bfloat16_alone_decides(layer, tmp_path, monkeypatch):
    """Also where a layer in float32 is faster."""
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: layer)
    monkeypatch.setattr(dtypes, "short_round", lambda policy, config: 1 / 0)

    def check(plan):
        if plan.dtype == F32:
            raise UserError("too large")

    def refuse(plan):
        raise UserError(f"{plan.dtype} is too large")

    said = []
    config = PolicyConfig(model=str(save("llama", tmp_path)), lora=True, device="cpu")
    assert load_policy(config, ROLLOUTS, said.append, check=check).dtype == BF16
    assert any("float32 does not fit into memory" in line for line in said)
    with pytest.raises(UserError, match=r"torch\.bfloat16 is too large"):
        load_policy(config, ROLLOUTS, said.append, check=refuse)


class _Made:
    """A policy of that type, of which only one may exist."""

    alive = weakref.WeakSet()

    def __init__(self, dtype):
        assert not self.alive
        self.alive.add(self)
        self.dtype, self.report = dtype, lambda text: self


@pytest.mark.parametrize(
    ("times", "made"), [({F32: 1.0, BF16: 0.5}, [F32, BF16]), ({F32: 1.0, BF16: 2.0}, [F32, BF16, F32])]
)
def test_one_policy_exists_at_a_time(times, made, monkeypatch):
    monkeypatch.setattr(dtypes, "short_round", lambda policy, config: times[policy.dtype])
    asked = []
    policy, choice = fastest(DtypeChoice(BF16, "", True), lambda dtype: asked.append(dtype) or _Made(dtype), of_round)
    assert asked == made and policy.dtype == choice.dtype == made[-1]


def test_a_type_in_which_the_model_is_refused_is_not_taken(monkeypatch):
    monkeypatch.setattr(dtypes, "short_round", lambda policy, config: 1.0)

    def only(*possible):
        def made(dtype):
            if dtype not in possible:
                raise UserError(f"not in {dtype}")
            return _Made(dtype)

        return made

    for dtype in (F32, BF16):
        policy, choice = fastest(DtypeChoice(BF16, "", True), only(dtype), of_round)
        assert policy.dtype == choice.dtype == dtype and "cannot be trained" in choice.why
        del policy
    with pytest.raises(UserError, match="not in torch.bfloat16"):
        fastest(DtypeChoice(BF16, "", True), only(), of_round)


def test_an_adapter_with_whole_layers_is_in_float32(tmp_path, monkeypatch):
    """Updates of whole layers would be rounded away in bfloat16."""
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 0.1)
    policy, _ = adapter_of(save("llama", tmp_path / "base"), dtype="float32")
    policy.save(tmp_path / "adapter")
    config = PolicyConfig(model=str(tmp_path / "adapter"), device="cpu")
    assert prepare(config).choice.timed
    for change in ({"modules_to_save": ["lm_head"]}, {"bias": "all"}):
        folder = shutil.copytree(tmp_path / "adapter", tmp_path / next(iter(change)))
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        choice = prepare(config.model_copy(update={"model": str(folder)})).choice
        assert choice.dtype == F32 and not choice.timed and "small updates" in choice.why


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_short_round_leaves_the_policy_as_it_was(kind, tmp_path):
    policy, _ = adapter_of(save(kind, tmp_path), dtype="bfloat16")
    before = policy.fingerprint
    assert short_round(policy, of_round(policy)) > 0
    assert policy.fingerprint == before and all(p.grad is None for p in policy.trainable_parameters())


@pytest.mark.parametrize(("answers", "kept"), [(4, 4), (0, 8), (16, 8)])
@pytest.mark.parametrize("packing", [True, False])
def test_a_short_round_trains_what_a_round_does(answers, kept, packing, tmp_path, monkeypatch):
    """Sampling takes no time here, and a token of an update one second."""
    monkeypatch.setattr(dtypes, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(dtypes, "update_seconds", lambda policy, row, read: float(len(row)))
    policy, _ = adapter_of(save("llama", tmp_path), dtype="float32")
    prompt = min(dtypes.PROMPT, policy.max_positions - ROLLOUTS.max_new_tokens)
    grpo = {"answers": answers, "packing": packing, "iterations": 2}
    tokens = 4 * (8 * kept + prompt * (1 if packing else kept))
    assert policy.packing and short_round(policy, NodeConfig(rollouts=ROLLOUTS, grpo=grpo)) == pytest.approx(2 * tokens)


@pytest.mark.parametrize("apart", [True, False])
def test_the_head_of_a_measured_update_reads_answers_alone(apart, tmp_path):
    policy, _ = adapter_of(save("llama", tmp_path), dtype="float32")
    policy.split_head, read = apart, []
    policy.base.get_output_embeddings().register_forward_hook(lambda head, found, out: read.append(out.shape[-2]))
    assert update_seconds(policy, list(range(10)), 4) > 0
    assert read == [4 if apart else 10] and all(p.grad is None for p in policy.trainable_parameters())


def test_a_short_round_keeps_to_the_room(tmp_path, monkeypatch):
    """Each policy is fitted into memory before its round is timed."""
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 0.1)
    sizes, decode = [], NativeEngine.decode
    monkeypatch.setattr(
        NativeEngine, "decode", lambda self, prompts, *more: sizes.append(len(prompts)) or decode(self, prompts, *more)
    )

    def fit(policy):
        policy.prompts_at_once = lambda prompt, n, new: 2

    config = PolicyConfig(model=str(save("llama", tmp_path)), lora=True, device="cpu")
    load_policy(config, ROLLOUTS, lambda text: None, fit=fit)
    assert sizes == [2] * len(sizes) and len(sizes) >= 8, "four questions, twice in each type"


def test_the_configuration_gets_the_type_of_an_adapter_alone(tmp_path):
    save("llama", tmp_path)
    policy, _ = adapter_of(tmp_path, dtype="bfloat16")
    assert with_dtype(NodeConfig(), policy).policy.dtype == "bfloat16"
    asked = NodeConfig(policy=PolicyConfig(dtype="float16"))
    assert with_dtype(asked, policy) == asked
    full = load_policy(PolicyConfig(model=str(tmp_path)), ROLLOUTS, lambda text: None)
    assert with_dtype(NodeConfig(), full) == NodeConfig()


def test_a_plan_says_why(tmp_path):
    plan = prepare(PolicyConfig(model=str(save("llama", tmp_path)), device="cpu", lora=True, dtype="bfloat16"))
    assert replace(plan, choice=DtypeChoice(F32, "so")).where.endswith("float32 (so)")
