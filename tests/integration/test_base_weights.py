"""Base weights travel between real processes: one machine has them, the hub is closed, the others have empty disks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from swarm_node.swarm.base_weights.files import list_model, pieces_of, read_piece, starter_folder
from tests.support.processes import LOCAL, QUICK, NodeProcess, Start, make_manifest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SMALL = (*QUICK, "rollouts.groups=1", "rollouts.max_new_tokens=2", "sharing.own=1", "sharing.foreign=1")
SLOWLY = "network.max_download_mbit=32"


def save_model(folder: Path) -> Path:
    """Six million random parameters in shards: several pieces, in Hugging Face layout."""
    tokenizer = AutoTokenizer.from_pretrained(starter_folder())
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=4,
            max_position_embeddings=256,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="10MB")
    tokenizer.save_pretrained(folder)
    return folder


def disk(tmp_path: Path, name: str) -> tuple[str, ...]:
    """In front of a command: a machine with a disk of its own."""
    return "env", f"HF_HOME={tmp_path / 'disks' / name}", "HF_HUB_OFFLINE=1"


def trains(node: NodeProcess) -> None:
    node.until(lambda: node.rounds > 0)


def test_members_give_weights_to_newcomers(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "maker"))
    folder = save_model(tmp_path / "models" / "llama-6m")
    manifest = make_manifest(tmp_path, "--model", str(folder))
    hub = ("bootstrap", str(manifest), "--model", str(folder), *LOCAL)
    a = start(*hub, run_dir=tmp_path / "a", sets=(), prefix=disk(tmp_path, "a"))
    link = a.link()

    def bob(*sets: str) -> NodeProcess:
        arguments = "join", link, "--name", "bob"
        return start(*arguments, run_dir=tmp_path / "b", sets=(*SMALL, *sets), prefix=disk(tmp_path, "b"))

    b = bob(SLOWLY)

    wanted = pieces_of(list_model(folder))

    def pieces() -> int:
        partial = (tmp_path / "disks" / "b").glob("swarm-node/*.partial")
        return sum(read_piece(path, piece) is not None for path in partial for piece in wanted)

    b.until(lambda: pieces() >= 5)  # three small files, and weights
    assert b.stop(signal.SIGKILL) == -signal.SIGKILL
    assert b.rounds == 0
    b = bob()
    trains(b)
    assert "MiB of it are here" in b.output and "from 1 member, all checked" in b.output
    (found,) = [path for path in (tmp_path / "disks" / "b" / "swarm-node").iterdir() if path.is_dir()]
    assert list_model(found) == list_model(folder)

    link = b.link()
    a.stop(signal.SIGKILL)
    c = start(
        *("join", link, "--name", "carol", "--model", "llama-6m"),
        run_dir=tmp_path / "c",
        sets=SMALL,
        prefix=disk(tmp_path, "c"),
    )
    trains(c)
    assert "all checked" in c.output
