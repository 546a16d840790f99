"""Stages take as much memory as was computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swarm_node.config import GrpoConfig, PolicyConfig
from swarm_node.errors import UserError
from swarm_node.pipeline.compute.partition import FAMILIES
from swarm_node.pipeline.footprint import Footprint, Sizes
from swarm_node.storage.cgroups import free_main_memory
from tests.support.held_stages_world import Peer, World
from tests.support.pipeline_crew import save
from tests.support.tiny_models import MAKERS, make

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
Saved = Callable[..., PolicyConfig]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    configs: dict[str, PolicyConfig] = {}

    def load(kind: str, lora: bool = False, dtype: str = "float32") -> PolicyConfig:
        if kind not in configs:
            configs[kind] = save(kind, tmp_path_factory.mktemp(kind))
        return configs[kind].model_copy(update={"lora": lora, "lora_rank": 2, "dtype": dtype})

    return load


def size(tensors: object) -> int:
    found = {t.data_ptr(): t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.ndim}  # type: ignore[attr-defined]
    return sum(found.values())


def measured(peer: Peer, stage: int) -> int:
    """Bytes of all tensors of a stage in an update, and of the replicas that its peer keeps."""
    worker, optimizer = peer.held_stages.workers[stage], peer.held_stages.workers[stage].optimizer
    own = list(worker.stage.named(trainable=False).values())
    for parameter in worker.stage.named().values():
        parameter.grad = torch.zeros_like(parameter)
    masters = [t for t in optimizer.masters.values()]
    gradients = [p.grad for p in worker.stage.named().values()] + [t.clone() for t in masters]
    reference = [] if worker.reference is None else list(worker.reference.named(trainable=False).values())
    moments = [value for state in optimizer.adamw.state.values() for value in state.values()]
    copies = [t.float() for t in optimizer.weights().values()]  # on their way to whoever keeps a replica
    replicas = [t for state in peer.weight_transfer.replicas.values() for t in state.tensors.values()]
    twice = size(replicas)  # the next one comes before the last one goes
    return sum(map(size, (own, reference, gradients, masters, moments, copies, replicas))) + twice


@pytest.mark.parametrize(
    ("kind", "lora", "dtype"),
    [
        ("llama", False, "float32"),
        ("llama_tied", False, "bfloat16"),
        ("gpt_neox", True, "float32"),
        ("llama_tied", True, "bfloat16"),
    ],
)
def test_costs_are_what_stages_take(saved: Saved, tmp_path: Path, kind: str, lora: bool, dtype: str) -> None:
    world = World(saved(kind, lora, dtype), 3, tmp_path)
    world.config = world.config.model_copy(update={"grpo": GrpoConfig(learning_rate=1e-3, beta=0.1)})
    peers = [world.peer(name) for name in "abc"]
    plan = world.plan(*peers)
    for stage, peer in enumerate(peers):
        peer.take(stage)
    for _ in range(3):
        for stage, peer in enumerate(peers):
            peer.train(stage, seed=stage)
            peer.held_stages.updated(plan)
        world.run(5.0)
    assert [sorted(peer.weight_transfer.replicas) for peer in peers] == [[], [0, 2], [1]]
    costs = Footprint(world.config, world.loading).costs(world.spans)
    assert costs == pytest.approx([measured(peer, stage) for stage, peer in enumerate(peers)], rel=0.01)


def test_layers_go_where_there_is_room(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    memory = Footprint(world.config, world.loading)
    alike = memory.divide([0, 0])
    layers = world.loading.config.num_hidden_layers
    assert alike[0][0] == 0 and alike[0][1] == alike[1][0] and alike[1][1] == layers
    costs = memory.costs(alike)
    assert memory.divide([2 * costs[0], 0]) == alike  # nobody knows what the other has
    large = 20 * sum(costs)
    (_, first), _ = memory.divide([large, large / 8])
    assert first == layers - 1
    assert memory.divide([large / 8, large])[0] == (0, 1)
    with pytest.raises(ValueError, match=r"GiB|fit"):
        memory.divide([costs[0] / 10, costs[1] / 10])
    with pytest.raises(UserError, match="layers"):
        memory.divide([0] * (layers + 1))


def test_traffic_follows_width_and_tokens(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    quiet = world.config.pipeline.model_copy(update={"replica": "off", "wire": "bfloat16"})
    rollouts = world.config.rollouts.model_copy(update={"groups": 4, "group_size": 8})
    grpo = world.config.grpo.model_copy(update={"answers": 2})
    config = world.config.model_copy(update={"pipeline": quiet, "rollouts": rollouts, "grpo": grpo})
    width = world.loading.config.hidden_size
    sampled, trained = 4 * 8 * (10 + 30), 4 * 2 * (10 + 30)
    assert Footprint(config, world.loading).traffic(10, 30) == 2 * width * (sampled + 2 * trained)
    kept = config.model_copy(update={"pipeline": quiet.model_copy(update={"replica": "on", "replica_every": 5})})
    footprint = Footprint(kept, world.loading)
    [*each] = footprint.checkpoints(footprint.divide([0, 0]))
    replica = footprint.traffic(10, 30) - 2 * width * (sampled + 2 * trained)
    assert replica == pytest.approx(max(each) / 3 / 5, abs=1), "its values, four bytes each, in every fifth round"


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "gemma2"])
def test_sizes_are_those_of_the_model(kind: str) -> None:
    model = make(kind)
    assert model.config.model_type in FAMILIES
    found = Sizes.among(dict(model.named_parameters()), model.config)
    assert found.layers == [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    matrix = model.get_input_embeddings().weight.numel()
    assert found.embed == matrix
    whole = sum(p.numel() for p in model.parameters())
    assert sum(found.layers) + found.embed + found.head == whole + matrix * model.config.tie_word_embeddings


def test_a_model_of_another_family_has_no_stages() -> None:
    with pytest.raises(UserError, match="gpt_neox, llama, mistral, qwen2, qwen3"):
        Sizes.among({}, make("gemma2").config)


def test_ends_count_with_first_and_last_stage() -> None:
    sizes = Sizes([1, 2, 4], 10, 20)
    assert sizes.of([(0, 1), (1, 3)]) == [11, 26]
    assert sizes.of([(0, 1), (1, 3)], layers=False) == [10, 20]
    assert sizes.of([(0, 3)]) == [37]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8192),
        ({"proc/self/cgroup": "0::/\n"}, 8192),  # bounded by nothing
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/memory.max": "5000\n",  # of all steps
                "sys/fs/cgroup/job/memory.current": "4000\n",
                "sys/fs/cgroup/job/memory.stat": "anon 3000\ninactive_file 500\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
            },
            1500,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/ab\n1:name=systemd:/\n0::/\n",  # seen from inside
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 250\n",
            },
            1250,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "1000\n",
                "sys/fs/cgroup/memory.stat": "anon 1000\n",
            },
            1,  # 0 would be `not known`
        ),
    ],
)
def test_a_container_has_less_memory_than_its_machine(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free_main_memory(tmp_path) == 0  # another system
    meminfo = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8 kB\n"}
    for name, text in (files | meminfo).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_main_memory(tmp_path) == expected
