"""A model whose files are made to attack the one that loads it: all are refused in one sentence, and soon."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.integrations import hub_kernels

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import vetting
from swarm_node.policy.loading import load_policy, prepare, skeleton
from swarm_node.policy.policy import Policy
from tests.support.stages import load_part
from tests.support.tiny_models import SIZES, save


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("good"))


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


def load(path: Path) -> Policy:
    return load_policy(PolicyConfig(model=str(path)), RolloutsConfig(max_new_tokens=8), lambda sentence: None)


class Touch:
    """What a pickle does when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def pickled(model: Path, name: str) -> None:
    (model / name).write_bytes(pickle.dumps(Touch(model / "ran")))


def alone(model: Path) -> None:
    (model / "model.safetensors").unlink()
    pickled(model, "pytorch_model.bin")


def indexed(model: Path, name: str = "model-00001-of-00001.bin") -> None:
    names = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    pickled(model, "model-00001-of-00001.bin")


def adapter(model: Path, **config: object) -> None:
    """Of the model itself, moved one directory down."""
    base = shutil.copytree(model, model / "base")
    for file in ("config.json", "model.safetensors"):
        (model / file).unlink()
    table = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": str(base)}
    (model / "adapter_config.json").write_text(json.dumps(table | config))
    if not config:
        pickled(model, "adapter_model.bin")
    else:
        save_file({"x": torch.zeros(1)}, model / "adapter_model.safetensors")


def embedded(model: Path) -> None:
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model), "r": 2}))
    base = shutil.copytree(model, model / "base")
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": 2}))
    save_file({"x": torch.zeros(1)}, model / "adapter_model.safetensors")
    pickled(base, "adapter_model.bin")


def header(model: Path, tensors: int, entry: str = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}') -> None:
    """A file of so many empty tensors."""
    text = ("{" + ",".join(f'"t{i}":{entry}' for i in range(tensors)) + "}").encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


PICKLES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickle alone": (alone, "pytorch_model.bin, a pickle"),
    "index of a pickle": (indexed, "model-00001-of-00001.bin, a pickle"),
    "index of a pickle of another name": (lambda model: indexed(model, "weights.pt"), "weights.pt, a pickle"),
    "index of no weights": (lambda model: indexed(model, "config.json"), "none of weights"),
    "index of a file elsewhere": (lambda model: indexed(model, "../x.safetensors"), "elsewhere"),
    "adapter": (adapter, "adapter_model.bin, a pickle"),
    "adapter of an adapter": (embedded, "a model and an adapter"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_are_refused_before_they_are_read(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(torch, "load", lambda *args, **options: read.append(args))
    spoil, said = PICKLES[name]
    spoil(model)
    for loading in (load, lambda path: load_part(PolicyConfig(model=str(path)), 0, 2)):
        with pytest.raises(UserError) as refused:
            loading(model)
        assert said in str(refused.value) and "\n" not in str(refused.value)
        if "pickle" in said:
            assert "safetensors" in str(refused.value), "what to do"
    assert not read and not (model / "ran").exists()


CODE, LARGER = "names code to be fetched and run", "larger than any that is known"
CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "kernel as attention": ({"attn_implementation": "evil-org/evil-kernel"}, CODE),
    "kernel behind another attention": ({"attn_implementation": "paged|evil-org/evil-kernel:attention"}, CODE),
    "kernel of a part": ({"text_config": {"attn_implementation": {"": "evil-org/evil-kernel"}}}, CODE),
    "kernel by an internal name": ({"_attn_implementation": "evil-org/evil-kernel"}, CODE),
    "kernel by a more internal name": ({"_attn_implementation_internal": "evil-org/evil-kernel"}, CODE),
    "kernel of experts": ({"experts_implementation": "evil-org/evil-kernel"}, CODE),
    "kernels": ({"kernel_config": {"RMSNorm": "evil-org/evil-kernel:RMSNorm"}}, "names kernels to be fetched and run"),
    "another config": ({"configuration_files": ["config.4.0.0.json"]}, "names another config"),
    "another file of weights": ({"transformers_weights": "pytorch_model.bin"}, "names another file of weights"),
    "another model": ({"use_pretrained_backbone": True, "backbone": "evil-org/evil-model"}, "names another model"),
    "quantised by fetched kernels": ({"quantization_config": {"quant_method": "mxfp4"}}, "fetched or compiled"),
    "quantised by unknown code": (
        {"quantization_config": {"quant_method": "torchao", "quant_type": "evil"}},
        "fetched or compiled",
    ),
    "layers": ({"num_hidden_layers": 1_000_000}, "num_hidden_layers is more than"),
    "layers by another name": ({"n_layer": 10**12}, "n_layer is more than"),
    "labels": ({"num_labels": 10**9}, "num_labels is more than"),
    "widths": ({"hidden_size": 2**20, "vocab_size": 2**22}, LARGER),
    "width": ({"intermediate_size": 2**40}, LARGER),
    "heads": ({"head_dim": 2**40}, LARGER),
    "vocabulary": ({"vocab_size": 2**24}, "do not belong together"),
    "no room for a prompt": ({"max_position_embeddings": 1}, "max_position_embeddings = 1, allowed"),
    "less than no room": ({"max_position_embeddings": -1}, "max_position_embeddings = -1, allowed"),
    "nested": ({"a": "[" * 100_000}, "cannot read"),
}
"""Name -> what a config says, and what it is refused with: by this project, before a library acts on it."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gets_nothing_fetched_run_or_grown(name: str, model: Path) -> None:
    changes, said = CONFIGS[name]
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    if name == "nested":
        file.write_text(str(changes["a"]))
    with pytest.raises(UserError, match=said) as refused:
        load(model)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_modules_without_values_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting, "MAX_TENSORS", 10)
    with vetting.bounded_modules("it"):
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(10)))
    with pytest.raises(UserError, match=LARGER), vetting.bounded_modules("it"):
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))


def test_another_attention_is_transformers_own_choice(model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": "flash_attention_2"}))
    policy = load(model)
    assert policy.base.config._attn_implementation == "sdpa"
    stage = load_part(PolicyConfig(model=str(model)), 0, 2)
    assert stage.base.config._attn_implementation == "sdpa"


HEADERS: dict[str, Callable[[Path], None]] = {
    "many empty tensors": lambda model: header(model, 1_400_000),
    "empty tensors in a small header": lambda model: header(model, 2**17 + 1),
    "length of 2**63": lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 7 + b"\x7f{}"),
    "nothing": lambda model: (model / "model.safetensors").write_bytes(b""),
    "nesting": lambda model: header(model, 1, "[" * 100_000),
    "shape of 2**80": lambda model: header(
        model, 1, '{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,0]}'
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_weights_is_bounded_first(name: str, model: Path) -> None:
    HEADERS[name](model)
    with pytest.raises(UserError) as refused:
        load(model)
    assert "model.safetensors" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {"r": 2**30},
        {"rank_pattern": {"q_proj": 2**30}},
        {"peft_type": "XLORA"},
        {"megatron_config": {"x": 1}},
        {"layer_replication": [[0, 1]] * 10**5},
        {"init_lora_weights": "pissa_niter_1000000"},
    ],
)
def test_an_adapter_gets_nothing_run_or_grown(config: dict[str, object], model: Path) -> None:
    adapter(model, **config)
    with pytest.raises(UserError):
        prepare(PolicyConfig(model=str(model)))


@pytest.mark.parametrize("named", ["evil-org/evil-kernel", "kernels-community/flash-attn2"])
def test_the_hub_is_never_asked_for_kernels(named: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package `kernels` is installed."""
    asked: list[object] = []
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **options: asked.append(args))
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": named}))
    with pytest.raises(UserError, match="code to be fetched"):
        load(model)
    skeleton(LlamaConfig(**SIZES, attn_implementation=named))
    assert not asked


def test_several_threads_make_models_at_once() -> None:
    """Nodes in one process do. torch's hooks belong to the process."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as threads:
            made = list(threads.map(lambda _: skeleton(LlamaConfig(**SIZES | {"num_hidden_layers": 4})), range(60)))
    finally:
        sys.setswitchinterval(usual)
    assert len({sum(p.numel() for p in model.parameters()) for model in made}) == 1
