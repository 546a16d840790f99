"""A GGUF file becomes an ordinary model's directory, once, the same everywhere."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import TemporaryError, UserError
from swarm_node.policy.gguf_files import converting, store
from swarm_node.policy.gguf_files.header import read_header
from swarm_node.policy.gguf_files.store import folder_of, kept, kept_as, kept_from, sha256_of, swarm_name
from swarm_node.policy.loading import load_policy
from swarm_node.policy.model_path import checked, local_folder, located
from swarm_node.say import Warned
from tests.support.gguf_files import TEMPLATE, tensors, write_gguf


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files are dequantised in this process, which saves ten seconds; returns those that were."""
    done: list[Path] = []

    def convert(file: Path, out: Path) -> None:
        done.append(file)
        converting.convert(file, out)

    monkeypatch.setattr(store, "_convert", convert)
    return done


def test_a_file_is_dequantised_once(tiny: Path, cached: Path) -> None:
    said: list[str] = []
    folder = folder_of(tiny, said.append)
    assert folder == cached / sha256_of(tiny)
    assert [*map(str, said)] == [
        f"reading {tiny}: dequantised once to float32, which takes up to minutes, and kept in {folder} (0.1 MB)"
    ]
    assert folder_of(tiny, said.append) == folder and len(said) == 1
    assert not list(cached.glob("*.partial"))
    assert {path.name for path in folder.iterdir()} == {
        *("chat_template.jinja", "config.json", "generation_config.json", "gguf.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_1])
def test_weights_are_those_of_the_file(kind: Type, tmp_path: Path, quick: list[Path]) -> None:
    file = write_gguf(tmp_path / "a.gguf", kind)
    model = AutoModelForCausalLM.from_pretrained(folder_of(file, print))
    assert model.dtype == torch.float32
    found = model.state_dict()
    for ours, theirs in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    ]:
        wanted = gguf.dequantize(gguf.quantize(tensors()[theirs], kind), kind)
        np.testing.assert_array_equal(found[ours].numpy(), wanted, err_msg=ours)


def test_the_same_file_gives_the_same_bytes_under_any_name(tmp_path: Path, quick: list[Path], cached: Path) -> None:
    first = folder_of(write_gguf(tmp_path / "a.gguf"), print)
    there = {path.name: path.read_bytes() for path in first.iterdir() if path.name != store.RECORD}
    shutil.rmtree(cached)
    (tmp_path / "elsewhere").mkdir()
    again = folder_of(write_gguf(tmp_path / "elsewhere/b.gguf"), print)
    assert again == first and len(quick) == 2
    assert {path.name: path.read_bytes() for path in again.iterdir() if path.name != store.RECORD} == there
    assert not any(b"transformers_version" in content for content in there.values())
    assert not any(str(tmp_path).encode() in content for content in there.values())


def test_tokenizer_and_template_are_those_of_the_file(tiny: Path, quick: list[Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder_of(tiny, print))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<s>", "</s>", TEMPLATE)
    assert tokenizer.tokenize("the the<s>") == ["the", "Ġthe", "<s>"]
    assert tokenizer.decode(tokenizer("1  23 the")["input_ids"]) == "1  23 the"


def test_digits_are_split_as_the_model_learned_it(tmp_path: Path, quick: list[Path]) -> None:
    split = {}
    for splitting in ("smollm", "gpt-2"):
        file = write_gguf(tmp_path / f"{splitting}.gguf", splitting=splitting)
        tokenizer = AutoTokenizer.from_pretrained(folder_of(file, print))
        split[splitting] = [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(" 12  3")]
    assert split == {"smollm": ["Ġ", "1", "2", "ĠĠ", "3"], "gpt-2": ["Ġ12", "Ġ", "Ġ3"]}


def test_a_directory_that_changed_is_made_anew(tiny: Path, quick: list[Path]) -> None:
    folder = folder_of(tiny, print)
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    weights.touch()
    assert kept(folder.name) == folder, "another time, the same bytes"
    weights.write_bytes(before[:-1] + b"x")
    said: list[str] = []
    assert kept(folder.name) is None
    assert folder_of(tiny, said.append) == folder
    assert "has changed since it was made" in said[0] and isinstance(said[0], Warned)
    assert weights.read_bytes() == before and len(quick) == 2
    (folder / store.RECORD).write_bytes(b"{")
    assert kept(folder.name) is None


def test_what_was_made_serves_when_the_file_is_gone(tiny: Path, quick: list[Path]) -> None:
    folder = located(str(tiny))
    tiny.unlink()
    assert checked(str(tiny)) == str(tiny)
    said: list[str] = []
    assert located(str(tiny), said.append) == folder and "is not there any more" in said[0]
    assert local_folder(str(tiny)) == kept_from(tiny) == Path(folder)


def test_members_call_it_by_its_digest(tiny: Path, quick: list[Path]) -> None:
    folder = folder_of(tiny, print)
    assert swarm_name(folder) == f"gguf-{sha256_of(tiny)[:16]}"
    assert kept_as(swarm_name(folder)) == folder
    assert kept_as("gguf-0123456789abcdef") is None and kept_as("gguf-*") is None and kept_as("some/model") is None


def test_one_process_reads_a_file_and_others_wait(
    tiny: Path, quick: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    found: list[Path] = []
    convert = store._convert

    def slow(file: Path, out: Path) -> None:
        begun.set()
        assert go_on.wait(60)
        convert(file, out)

    monkeypatch.setattr(store, "_convert", slow)
    first = threading.Thread(target=lambda: found.append(folder_of(tiny, print)))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=lambda: found.append(folder_of(tiny, lambda said: waits.set())))
    second.start()
    assert waits.wait(60), "it says that it waits"
    go_on.set()
    first.join(60)
    second.join(60)
    assert found == [found[0]] * 2 and len(quick) == 1


def test_another_file_in_the_same_place_is_another_model(tmp_path: Path, quick: list[Path]) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    before = located(str(file))
    write_gguf(file, Type.F16)
    assert located(str(file)) == str(local_folder(str(file))) != before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "nonsense"}, "nonsense"),
        ({"without": "blk.1.ffn_down.weight"}, "lacks weights that its header asks for.*mlp.down_proj"),
        ({"entries": {"llama.expert_count": 2**31 - 1}}, ""),
        ({"layers": 30, "inner": 2**18}, r"asks for 755,\d+,\d+ values, and its tensors have 26,944"),  # of 3 GB
    ],
)
def test_a_broken_file_ends_in_one_sentence(
    changes: dict[str, object], said: str, tmp_path: Path, cached: Path
) -> None:
    file = write_gguf(tmp_path / "broken.gguf", **changes)  # type: ignore[arg-type]
    if not said:  # experts that a Llama does not have are no matter
        assert folder_of(file, print).is_dir()
        return
    with pytest.raises(UserError, match=said) as refused:
        folder_of(file, print)
    assert str(refused.value).startswith(f"cannot read {file}: ") and "\n" not in str(refused.value)
    assert not list(cached.glob("*.partial")) and not list(cached.glob(f"*/{store.RECORD}"))


def test_reading_a_file_has_a_limit_of_time(tiny: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "STARTS_S", 0.01)
    with pytest.raises(UserError, match="to dequantise it took more than"):
        folder_of(tiny, print)
    assert not [*cached.glob("*.partial")] and not [*cached.glob(f"{sha256_of(tiny)}/*")]


def test_a_file_that_does_not_fit_is_refused(tiny: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(tiny)
    monkeypatch.setattr(store, "free_bytes", lambda folder: 1000.0)
    with pytest.raises(TemporaryError, match="make room, or choose another disk with HF_HOME"):
        store.check_fits(tiny, header, cached / "x")
    monkeypatch.setattr(store, "COPIES", 2**40)
    with pytest.raises(UserError, match="GiB of memory to be dequantised, where .* are free"):
        store.check_fits(tiny, header, cached / "x")


def test_the_limit_of_a_container_counts(tiny: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "free_main_memory", lambda: store.PROGRAM_BYTES)
    with pytest.raises(UserError, match=r"where 0\.7 GiB are free: close other programs, or take a smaller model"):
        store.check_fits(tiny, read_header(tiny), cached / "x")


def test_a_policy_is_loaded_from_a_file(tiny: Path, quick: list[Path]) -> None:
    said: list[str] = []
    policy = load_policy(PolicyConfig(model=str(tiny), system_prompt=""), RolloutsConfig(), said.append)
    assert any(sentence.startswith(f"policy {tiny}: 26,944 parameters") for sentence in said)
    assert policy.frame.around("2 + 3?") == "<s>2 + 3?</s>"
    weights = tiny.parent / "adapter"
    load_policy(PolicyConfig(model=str(tiny), lora=True), RolloutsConfig(), said.append).save(weights)
    named = json.loads((weights / "adapter_config.json").read_text())
    (weights / "adapter_config.json").write_text(json.dumps(named | {"base_model_name_or_path": str(tiny)}))
    adapted = load_policy(PolicyConfig(model=str(weights)), RolloutsConfig(), said.append)
    assert (
        adapted.base_digest
        == load_policy(PolicyConfig(model=located(str(tiny)), lora=True), RolloutsConfig(), said.append).base_digest
    )
