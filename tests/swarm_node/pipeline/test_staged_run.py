"""The policy of a crew becomes a model for plain transformers, or an adapter for PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_node.cli.commands.export import export_run, policy_of_run
from swarm_node.config import PolicyConfig, dump_toml
from swarm_node.errors import UserError
from swarm_node.storage.checkpoints import read_checkpoint
from swarm_node.storage.rundir import RunDir
from swarm_protocol.crew import Source
from tests.support.held_stages_world import RUN, Peer, World, same
from tests.support.pipeline_crew import Saved, saver

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saver(tmp_path_factory)


class Runs:
    """Two machines of a crew, each with a run directory of its own."""

    def __init__(self, policy: PolicyConfig, folder: Path, stages: int = 2) -> None:
        self.world = World(policy, stages, folder)
        self.peers = [self.world.peer(name) for name in "ab"]
        for stage in range(stages):
            self.peers[stage % 2].take(stage)
        self.paths = [folder / peer.name for peer in self.peers]
        for path in self.paths:
            path.mkdir(exist_ok=True)
            RunDir(path).write("config.toml", dump_toml(self.world.config))
        self.said: list[str] = []

    def train(self, updates: int = 1, peers: list[Peer] | None = None, seed: int = 0) -> None:
        """Train, and write checkpoints."""
        for peer in peers or self.peers:
            for stage in peer.held_stages.workers:
                peer.train(stage, seed=seed + stage, updates=updates)
                peer.held_stages.save(stage)
            for stage in peer.held_stages.workers:
                peer.held_stages.checkpoints.store(stage).wait()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for peer in reversed(self.peers):
            for stage in sorted(peer.held_stages.workers, reverse=True):
                found |= peer.weights(stage)
        return found

    def export(self, out: Path, *paths: Path) -> Path:
        return export_run(paths or self.paths, out, self.said.append)


@pytest.mark.parametrize(
    ("kind", "stages"), [("llama", 2), ("llama_tied", 2), ("gpt_neox", 3), ("qwen2", 5), ("llama_tied", 1)]
)
def test_an_exported_crew_has_its_stages_weights(saved: Saved, tmp_path: Path, kind: str, stages: int) -> None:
    runs = Runs(saved(kind), tmp_path, stages)
    runs.train(updates=4)
    out = runs.export(tmp_path / "out")
    assert runs.said[-1].endswith(f"load it with AutoModelForCausalLM.from_pretrained({str(out)!r})")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert same({name: p.detach() for name, p in model.named_parameters()}, runs.weights)
    base = AutoModelForCausalLM.from_pretrained(runs.world.config.policy.model)
    assert model.config.architectures == base.config.architectures
    assert model.generation_config.eos_token_id == base.generation_config.eos_token_id
    ids = torch.arange(4, 12)[None]
    assert model(ids).logits.shape == base(ids).logits.shape and not torch.equal(model(ids).logits, base(ids).logits)
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(runs.world.config.policy.model))
    assert f"all {stages} stages after update 4" in runs.said and "AutoModelForCausalLM" in runs.said[-1]


def test_an_exported_adapter_is_pefts(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama", lora=True), tmp_path)
    runs.train(updates=3)
    out = runs.export(tmp_path / "out")
    assert not list(out.glob("model*"))
    base = AutoModelForCausalLM.from_pretrained(runs.world.config.policy.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        model = PeftModel.from_pretrained(base, out)
    found = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
    assert same(found, runs.weights) and "PeftModel" in runs.said[-1]
    assert len(load_file(out / "adapter_model.safetensors")) == len(found)
    again = PolicyConfig(model=str(out), dtype="float32", device="cpu")  # trained on from there
    other = World(again, 2, tmp_path / "other").peer("c")
    other.take(1)
    mine = other.weights(1)
    assert mine and all(torch.equal(tensor, runs.weights[name]) for name, tensor in mine.items())


def test_a_stage_that_is_missing_is_named(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama"), tmp_path)
    runs.train()
    with pytest.raises(UserError, match=r"stage 1 of 2 is not in .*/a: name the run directories") as caught:
        runs.export(tmp_path / "out", runs.paths[0])
    assert "swarm-node export" in str(caught.value)
    with pytest.raises(UserError, match="stage 0 of 2"):
        runs.export(tmp_path / "out2", runs.paths[1])


def test_a_stage_without_weights_is_told_in_words(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama"), tmp_path)
    runs.train()
    store = runs.peers[1].held_stages.checkpoints.store(1)
    assert store.newest is not None
    state = read_checkpoint(store.newest, lambda state: None).state
    store.save(1, {}, state)
    store.close()
    with pytest.raises(UserError, match="is not as a node of this version writes it"):
        runs.export(tmp_path / "out")


def test_stages_are_taken_after_the_same_update(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama"), tmp_path)
    runs.train(updates=2)
    expected = runs.weights
    runs.train(updates=2, peers=runs.peers[:1], seed=5)
    out = runs.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert same({name: p.detach() for name, p in model.named_parameters()}, expected)
    runs.train(updates=1, peers=runs.peers[1:], seed=6)
    runs.train(updates=1, peers=runs.peers[1:], seed=7)
    runs.train(updates=3, peers=runs.peers[:1], seed=8)
    runs.export(tmp_path / "out2")
    assert "all 2 stages after update 4" in runs.said
    runs.train(updates=3, peers=runs.peers[:1], seed=9)
    runs.train(updates=1, peers=runs.peers[:1], seed=10)  # 11, 10 and 7: no more than three are kept
    runs.export(tmp_path / "out3")
    assert any("no update has a checkpoint of every stage: stage 0 after update 11" in line for line in runs.said)


def test_a_torn_checkpoint_is_passed_over(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama"), tmp_path)
    runs.train(updates=1)
    expected = runs.weights
    runs.train(updates=1, seed=5)
    (torn,) = (runs.paths[1] / "stages" / "1").glob("round-00000002")
    (torn / "policy.safetensors").write_bytes(b"nothing")
    model = AutoModelForCausalLM.from_pretrained(runs.export(tmp_path / "out"), dtype=torch.float32)
    assert same({name: p.detach() for name, p in model.named_parameters()}, expected)
    assert any("round-00000002 refused" in line for line in runs.said)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"crew": "other"}, "not of the crew"), ({"stages": 3}, "not of the crew"), ({"stages": 0}, "runs of one")],
)
def test_runs_of_different_crews_do_not_go_together(
    saved: Saved, tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    runs = Runs(saved("llama"), tmp_path)
    runs.train()
    config = runs.world.config
    other = config.model_copy(update={"pipeline": config.pipeline.model_copy(update=changes)})
    RunDir(runs.paths[1]).write("config.toml", dump_toml(other))
    with pytest.raises(UserError, match=why):
        runs.export(tmp_path / "out")


def test_stages_of_another_model_are_refused(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama"), tmp_path)
    runs.train()
    config = runs.world.config.model_copy(update={"policy": saved("qwen2")})
    for path in runs.paths:
        RunDir(path).write("config.toml", dump_toml(config))
    with pytest.raises(UserError, match="not all of|not of it|in these stages"):
        runs.export(tmp_path / "out")


def test_a_crews_run_can_be_evaluated(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama_tied"), tmp_path)
    runs.train(updates=4)
    (runs.paths[1] / "stages" / "1").rename(runs.paths[0] / "stages" / "1")  # as the lead gathers them
    policy, config = policy_of_run(runs.paths[0], runs.said.append)
    assert policy.version == 4 and config.pipeline.stages == 2 and same(policy.trainable_state(), runs.weights)


def test_an_earlier_runs_stages_are_not_mixed_in(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama"), tmp_path)
    runs.train(updates=500)
    for peer in runs.peers:  # a new run in the same directories
        (stage,) = peer.held_stages.workers
        peer.held_stages.go_to((("ef" * 8, 0),))
        peer.take(stage)
    runs.train(updates=3, seed=7)
    out = runs.export(tmp_path / "out")
    assert "all 2 stages after update 3" in runs.said
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert same({name: p.detach() for name, p in model.named_parameters()}, runs.weights)


def test_stages_of_two_branches_are_not_mixed(saved: Saved, tmp_path: Path) -> None:
    runs = Runs(saved("llama"), tmp_path)
    runs.train(updates=40)
    before = runs.weights
    branches = [(*RUN, (name * 8, 40)) for name in ("0a", "0b")]
    for peer, branch in zip(runs.peers, branches, strict=True):  # each goes on alone
        assert not peer.held_stages.go_to(branch)
        runs.train(updates=20, peers=[peer], seed=7)
    out = runs.export(tmp_path / "out")
    assert "all 2 stages after update 40" in runs.said
    assert any(line.endswith("than the newest: 1") for line in runs.said)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert same({name: p.detach() for name, p in model.named_parameters()}, before)
    runs.peers[0].held_stages.go_to(branches[1])  # they meet: the first takes its stage up again
    runs.peers[0].take(0, Source("snapshot", (runs.peers[0].transport.peer_id,), updates=40))
    runs.train(updates=20, peers=runs.peers[:1], seed=9)
    runs.said.clear()
    model = AutoModelForCausalLM.from_pretrained(runs.export(tmp_path / "again"), dtype=torch.float32)
    assert "all 2 stages after update 60" in runs.said
    assert same({name: p.detach() for name, p in model.named_parameters()}, runs.weights)
