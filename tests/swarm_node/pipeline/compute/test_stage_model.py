"""Stages of a policy in a row give the policy's numbers, gradients, names and adapters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.pipeline.compute.partition import Span
from swarm_node.pipeline.compute.stage_model import load_stage, weights_digest
from swarm_node.policy.digests import lines, model_digest
from swarm_node.policy.loading import load_policy, load_tokenizer, prepare
from tests.support.stages import load_part
from tests.support.tiny_models import GROUPED, SIZES
from tests.support.tiny_models import save as save_tiny

LAYERS = 5
DEEP, DEEP_GROUPED = dict(SIZES, num_hidden_layers=LAYERS), dict(GROUPED, num_hidden_layers=LAYERS)
TIED, APART = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DEEP_GROUPED, **APART)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**DEEP_GROUPED, **TIED, attention_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**DEEP_GROUPED, **APART, sliding_window=64)),
    "mistral_tied": lambda: MistralForCausalLM(MistralConfig(**DEEP_GROUPED, **TIED, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**DEEP_GROUPED, **APART)),
    "qwen2_tied": lambda: Qwen2ForCausalLM(Qwen2Config(**DEEP_GROUPED, **TIED)),
    "qwen2_window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**DEEP_GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=3)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**DEEP_GROUPED, **APART, head_dim=16)),
    "qwen3_tied": lambda: Qwen3ForCausalLM(Qwen3Config(**DEEP_GROUPED, **TIED, head_dim=16)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**DEEP, **APART)),
    "gpt_neox_tied": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**DEEP, **TIED)),
}
IDS = torch.randint(4, 384, (2, 11), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.tensor([[*range(7), *range(4, 8)]]).expand(2, -1)
MASK = torch.ones(11, 11, dtype=torch.bool).tril()
MASK[7:, 4:7] = False
MASK = MASK.expand(2, 1, 11, 11)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Kind -> directory of a model with random weights."""
    made = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_tiny("llama", tmp_path_factory.mktemp(kind))  # for its tokenizer
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = MODELS[kind]()
                for name, p in model.named_parameters():
                    if name.endswith(("bias", "norm.weight")):
                        torch.nn.init.normal_(p, mean=0.5, std=0.3)
            (made[kind] / "model.safetensors").unlink()
            model.save_pretrained(made[kind])
        return made[kind]

    return of


def quiet(text):
    pass


def whole(path, **options):
    return load_policy(PolicyConfig(model=str(path), **options), RolloutsConfig(max_new_tokens=8), quiet)


def crew(path, count, **options):
    return [load_part(PolicyConfig(model=str(path), **options), i, count) for i in range(count)]


def chain(stages, ids, **options):
    """(input of the head, logits)."""
    hidden = stages[0].hidden(ids)
    for stage in stages:
        hidden = stage.layers(hidden, **options)
    hidden = stages[-1].final(hidden)
    return hidden, stages[-1].head(hidden)


def of_whole(policy, ids, position_ids=None, attention_mask=None):
    if attention_mask is not None:
        attention_mask = torch.zeros(attention_mask.shape).masked_fill(~attention_mask, torch.finfo(torch.float32).min)
    hidden = policy.base.get_decoder()(
        input_ids=ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
    ).last_hidden_state
    return hidden, policy.base.get_output_embeddings()(hidden)


def union(stages, trainable=True):
    """Global name -> the parameters of that name."""
    found: dict[str, list[torch.nn.Parameter]] = {}
    for stage in stages:
        for name, p in stage.named(trainable).items():
            found.setdefault(name, []).append(p)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_stages_in_a_row_are_the_whole_model(kind, saved):
    policy = whole(saved(kind))
    weights = torch.randn(*IDS.shape, 384, generator=torch.Generator().manual_seed(2))
    passes = [{}, {"position_ids": POSITIONS, "attention_mask": MASK}]
    if kind == "qwen2_window":
        passes.pop()  # a mask of one's own replaces the window's
    expected = [of_whole(policy, IDS, **options) for options in passes]
    sum((logits.log_softmax(-1) * weights).mean() for _, logits in expected).backward()
    for count in (1, 2, 4) if kind in ("llama", "gpt_neox_tied") else (3,):
        stages = crew(saved(kind), count)
        ours = [chain(stages, IDS, **options) for options in passes]
        sum((logits.log_softmax(-1) * weights).mean() for _, logits in ours).backward()
        for (hidden, logits), (whole_hidden, whole_logits) in zip(ours, expected, strict=True):
            assert torch.equal(hidden, whole_hidden) and torch.equal(logits, whole_logits)
        named = union(stages)
        assert named.keys() == {name for name, _ in policy.model.named_parameters()}
        for name, p in policy.model.named_parameters():
            assert p.grad.abs().max() > 0
            assert all(torch.equal(p, mine) for mine in named[name])
            torch.testing.assert_close(sum(mine.grad for mine in named[name]), p.grad, atol=1e-5, rtol=1e-5)
        assert [stage.embed is not None for stage in stages] == [i == 0 for i in range(count)]
        assert [stage.head is not None for stage in stages] == [i == count - 1 for i in range(count)]
        assert all(stage.tied == kind.endswith("tied") for stage in stages)
        twice = [name for name, parameters in named.items() if len(parameters) > 1]
        assert len(twice) == (count > 1 and kind.endswith("tied"))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama_tied", "all-linear"),
        ("qwen3", ["q_proj", "dense"]),
        ("gpt_neox", r".*layers\.(0|3)\..*(up_proj|dense_h_to_4h)"),
    ],
    ids=str,
)
def test_adapters_learn_in_stages_as_in_the_whole(kind, targets, saved):
    options = {"lora": True, "lora_rank": 3, "dtype": "float32", "lora_targets": targets}
    policy = whole(saved(kind), **options)
    torch.manual_seed(7)
    stages = crew(saved(kind), 4, **options)
    named = union(stages)
    assert named.keys() == policy.trainable_state().keys()
    assert all(torch.equal(named[name][0], tensor) for name, tensor in policy.trainable_state().items())
    assert union(stages, trainable=False).keys() == {name for name, _ in policy.model.named_parameters()}
    for name, tensor in policy.trainable_state().items():
        torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(len(name)))
        named[name][0].data.copy_(tensor)
    _, logits = of_whole(policy, IDS)
    _, ours = chain(stages, IDS)
    assert torch.equal(ours, logits)
    logits.logsumexp(-1).sum().backward()
    ours.logsumexp(-1).sum().backward()
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(named[name][0].grad, p.grad, atol=1e-5, rtol=1e-5)
    if targets != "all-linear" and not isinstance(targets, list):
        assert [bool(stage.named()) for stage in stages].count(False) == 2  # layers without an adapter


def test_new_adapters_differ_and_are_not_zero(saved):
    state = whole(saved("llama"), lora=True, lora_rank=4, dtype="float32").trainable_state()
    starts = [tensor for name, tensor in state.items() if "lora_A" in name]
    assert all(tensor.std() > 0.01 for tensor in starts)
    assert not any(torch.equal(a, b) for i, a in enumerate(starts) for b in starts[:i] if a.shape == b.shape)
    bound = (1 / starts[0].shape[1]) ** 0.5  # Kaiming, a = sqrt 5
    assert 0.9 * bound < starts[0].abs().max() <= bound
    assert all(not tensor.any() for name, tensor in state.items() if "lora_B" in name)


def test_an_adapter_on_a_tied_embedding_is_refused(saved):
    options = {"lora": True, "lora_rank": 2, "lora_targets": ["embed_tokens", "lm_head"], "dtype": "float32"}
    policy, stages = whole(saved("llama"), **options), crew(saved("llama"), 2, **options)
    named = union(stages)
    assert named.keys() == policy.trainable_state().keys() and len(named) == 4
    assert all(torch.equal(named[name][0], tensor) for name, tensor in policy.trainable_state().items())
    with pytest.raises(UserError, match="one matrix"):
        with pytest.warns(UserWarning):
            crew(saved("llama_tied"), 2, **options)


def test_a_saved_adapter_is_cut(saved, tmp_path):
    policy = whole(saved("qwen3"), lora=True, lora_rank=2, dtype="float32")
    for name, tensor in policy.trainable_state().items():
        torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(len(name)))
    policy.save(tmp_path)
    stages = crew(tmp_path, 3, dtype="float32")
    named = union(stages)
    assert all(torch.equal(named[name][0], tensor) for name, tensor in policy.trainable_state().items())
    assert torch.equal(chain(stages, IDS)[1], of_whole(policy, IDS)[1])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {"q_proj": 5}}))
    with pytest.raises(UserError, match="alpha_pattern"):
        crew(tmp_path, 3)


@pytest.mark.parametrize("options", [{}, {"lora": True, "lora_rank": 2}], ids=str)
def test_stages_contribute_their_lines_to_the_digest(saved, options):
    options |= {"dtype": "float32"}
    policy, stages = whole(saved("llama_tied"), **options), crew(saved("llama_tied"), 3, **options)

    def together(adapters):
        named = [lines(stage.named(False).items(), adapters) for stage in reversed(stages)]
        return model_digest({name: digest for part in named for name, digest in part.items()})

    assert together(adapters=False) == policy.base_digest
    assert together(adapters=True) == policy.start_digest
    assert (policy.base_digest == policy.start_digest) == ("lora" not in options)
    next(iter(stages[1].named().values())).data.add_(1)
    assert together(adapters=True) != policy.start_digest


def test_weights_are_cast_and_frequencies_are_not(saved):
    policy, stages = whole(saved("llama"), dtype="bfloat16"), crew(saved("llama"), 2, dtype="bfloat16")
    assert all(stage.dtype == torch.bfloat16 for stage in stages)
    assert stages[1].base.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(chain(stages, IDS)[1], of_whole(policy, IDS)[1])


def test_what_ends_an_answer_is_known(saved, tmp_path):
    shutil.copytree(saved("llama"), tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 17]}))
    config = PolicyConfig(model=str(tmp_path / "m"))
    assert load_part(config, 0, 2).base.generation_config.eos_token_id == [2, 17]
    assert load_tokenizer(config).eos_token_id == 2


# --------------------------------------------------------------------- files


def test_the_old_name_of_gpt_neox_heads_works(saved, tmp_path):
    shutil.copytree(saved("gpt_neox"), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    other = {"embed_out.weight": "lm_head.weight", "lm_head.weight": "embed_out.weight"}
    save_file({other.get(n, n): t for n, t in tensors.items()}, tmp_path / "m" / "model.safetensors")
    assert torch.equal(
        load_part(PolicyConfig(model=str(tmp_path / "m")), 1, 2).head.weight,
        load_part(PolicyConfig(model=str(saved("gpt_neox"))), 1, 2).head.weight,
    )


def altered(source, out, change):
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_tied_matrix_has_one_of_two_names(saved, tmp_path):
    def renamed(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def two(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    policy = whole(saved("llama_tied"))
    stages = crew(altered(saved("llama_tied"), tmp_path / "a", renamed), 2)
    assert torch.equal(chain(stages, IDS)[1], of_whole(policy, IDS)[1])
    with pytest.raises(UserError, match="tie_word_embeddings"):
        crew(altered(saved("llama_tied"), tmp_path / "b", two), 2)


def test_missing_or_misshapen_tensors_are_refused_where_needed(saved, tmp_path):
    name = "model.layers.4.mlp.down_proj.weight"
    for i, change in enumerate(
        [
            lambda tensors: tensors.pop(name),
            lambda tensors: tensors.update({name: torch.zeros(3, 3)}),
            lambda tensors: tensors.update({name: torch.zeros_like(tensors[name], dtype=torch.int8)}),
        ]
    ):
        config = PolicyConfig(model=str(altered(saved("qwen2"), tmp_path / str(i), change)))
        load_part(config, 0, 2)
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            load_part(config, 1, 2)


@pytest.mark.parametrize(
    "span", [Span(2, 2, 3, 5, 5), Span(-1, 2, 0, 3, 5), Span(0, 2, 0, 6, 5), Span(0, 2, 0, 3, 8), Span(1, 2, 3, 4, 5),
             Span(1, 2, 0, 5, 5), Span(0, 2, 0, 5, 5), Span(1, 3, 3, 3, 5), Span(1, 3, 3, 2, 5), Span(1, 3, -1, 2, 5)]
)  # fmt: skip
def test_a_stage_beyond_the_model_is_refused(span, saved):
    with pytest.raises(UserError):
        load_stage(PolicyConfig(model=str(saved("llama"))), span, quiet)


def test_a_given_span_is_taken(saved):
    said = []
    stage = load_stage(PolicyConfig(model=str(saved("llama"))), Span(1, 3, 1, 4, 5), said.append)
    assert {int(name.split(".")[2]) for name in stage.named()} == {1, 2, 3}
    assert "stage 1 of 3 (layers 1-3 of 5)" in said[0] and len(said) == 2


def test_models_that_cannot_be_cut_are_refused(saved, tmp_path):
    with pytest.raises(UserError, match="gpt_neox, llama, mistral, qwen2, qwen3"):
        load_part(PolicyConfig(model=str(save_tiny("gemma2", tmp_path / "gemma"))), 0, 2)
    shutil.copytree(saved("llama"), tmp_path / "quantised")
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    (tmp_path / "quantised" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(UserError, match="quantised"):
        load_part(PolicyConfig(model=str(tmp_path / "quantised")), 0, 2)
    shutil.copytree(saved("llama"), tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        load_part(PolicyConfig(model=str(tmp_path / "pickled")), 0, 2)


def test_torn_files_and_stray_indices_are_refused(saved, tmp_path):
    torn, index = shutil.copytree(saved("llama"), tmp_path / "a"), shutil.copytree(saved("llama"), tmp_path / "b")
    data = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    tensors = load_file(index / "model.safetensors")
    (index / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    table = {"weight_map": dict.fromkeys(tensors, "../elsewhere.safetensors")}
    for text in (json.dumps(table), "{", "[]", '{"weight_map": 3}'):
        (index / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UserError) as refused:
            load_part(PolicyConfig(model=str(index)), 0, 2)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError):
        load_part(PolicyConfig(model=str(torn)), 0, 2)


PEAK = """
import sys, json
from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from tests.support.stages import load_part

def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))

def stage(model):
    return load_part(PolicyConfig(model=model, lora=False, threads=1), 1, 4)

def whole(model):
    config, rollouts = PolicyConfig(model=model, lora=False, threads=1), RolloutsConfig(engine="transformers")
    return load_policy(config, rollouts, lambda text: None).model

small, one, many = sys.argv[1:]
stage(small), whole(small)  # whatever the libraries load on first use
kept = []  # so that nothing is loaded into the memory of what was loaded before
for load, model in [(stage, one), (stage, many), (whole, one)]:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = peak()
    kept.append(load(model))
    print(json.dumps([peak() - before, sum(p.numel() * 4 for p in kept[-1].parameters())]))
"""


def in_shards(model, like, folder, size):
    """Save `model` in files of that size, with the tokenizer of another model."""
    shutil.copytree(like, folder, ignore=lambda *_: ["model.safetensors"])
    model.save_pretrained(folder, max_shard_size=size)
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak of a process is asked of Linux")
def test_a_stage_takes_its_own_tensors_memory(tmp_path, saved):
    """Peak memory with a model of 200 MB, in one file and in many."""
    sizes = dict(vocab_size=16000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, **APART))
    one, many = (in_shards(model, saved("llama"), tmp_path / size, size) for size in ("1GB", "30MB"))
    assert len(list(many.glob("*.safetensors"))) >= 6 and len(list(one.glob("*.safetensors"))) == 1
    command = [sys.executable, "-c", PEAK, str(saved("llama")), str(one), str(many)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *stages, (everything, all_of_it) = map(json.loads, done.stdout.splitlines())
    assert all_of_it > 190e6
    for grown, own in stages:
        assert 30e6 < own < 70e6
        assert grown < 1.5 * own
        assert everything > all_of_it > 2 * grown


def test_only_the_stages_own_shards_are_fetched(saved, tmp_path, monkeypatch):
    """A hub's cache, offline, which lacks the other shards."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--some--model"
    model = LlamaForCausalLM(LlamaConfig(**DEEP_GROUPED | {"num_hidden_layers": 8}, **APART))
    checkpoint = in_shards(model, saved("llama"), home / "snapshots" / "0123", "80KB")  # a layer takes half of that
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123")
    where = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in where.items() if name.startswith(("model.layers.2.", "model.layers.3."))}
    for file in set(where.values()) - needed:
        (checkpoint / file).unlink()
    config = PolicyConfig(model="some/model", lora=False)
    assert len(load_stage(config, Span(1, 4, 2, 4, 8), quiet).named()) == 18
    with pytest.raises(UserError, match="some/model has no model-0.*, which its index names|cannot load model-0"):
        load_stage(config, Span(2, 4, 4, 6, 8), quiet)


@pytest.mark.parametrize("kind", ["llama_tied", "gpt_neox"])
def test_different_weights_of_equal_shapes_are_told_apart(saved, tmp_path, kind):
    def digest(path):
        return weights_digest(prepare(PolicyConfig(model=str(path))))

    def changed(name, at):
        """A copy of the model with another value in one tensor."""
        out = tmp_path / f"{name}-{at}"
        shutil.copytree(saved(kind), out)
        tensors = load_file(out / "model.safetensors")
        tensors[name].view(-1)[at] += 1
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        return out

    mine = digest(saved(kind))
    names = sorted(load_file(saved(kind) / "model.safetensors"))
    norm = next(name for name in names if ".layers." not in name and "norm.weight" in name)
    last = next(name for name in names if f".layers.{LAYERS - 1}.mlp" in name and name.endswith("weight"))
    assert digest(changed(norm, 0)) != mine and digest(changed(last, 5)) != mine
    sharded = tmp_path / "sharded"
    type(MODELS[kind]()).from_pretrained(saved(kind)).save_pretrained(sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert digest(sharded) == mine
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    (sharded / index["weight_map"][last]).unlink()  # it cannot say that it has the same
    assert digest(sharded) != mine
    assert digest("starter") == digest("starter") != mine


def test_the_digest_of_weights_reads_little(saved, monkeypatch):
    plan = prepare(PolicyConfig(model=str(saved("llama"))))

    def never(self, name):
        raise AssertionError(name)

    monkeypatch.setattr("swarm_node.pipeline.compute.stage_model._Tensors._get", never)
    assert len(weights_digest(plan)) == 64


def test_the_digest_of_hub_weights_is_their_commit(saved, monkeypatch):
    plan = prepare(PolicyConfig(model=str(saved("llama"))))
    monkeypatch.setattr("swarm_node.pipeline.compute.stage_model._weights", None)
    plan.config._commit_hash = "abc"
    one = weights_digest(plan)
    plan.config._commit_hash = "abd"
    assert weights_digest(plan) != one


def test_adapters_that_are_trained_on_are_told_apart(saved, tmp_path):
    digests = set()
    for number in range(2):
        policy = whole(saved("llama"), lora=True, lora_rank=2)
        with torch.no_grad():
            for parameter in policy.trainable_parameters():
                parameter += number
        policy.save(tmp_path / str(number))
        digests.add(weights_digest(prepare(PolicyConfig(model=str(tmp_path / str(number))))))
    assert len(digests) == 2
