"""Stages are built from any source, kept, and let go."""

from __future__ import annotations

import json
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import torch

from swarm_node.config import GrpoConfig, NodeConfig, PipelineConfig
from swarm_node.pipeline.compute.partition import layer_of
from swarm_node.pipeline.recovery import replicas
from swarm_node.pipeline.recovery.checkfree import RATE, Neighbour, checkfree
from swarm_node.pipeline.recovery.replicas import kept_for, replica_every, replicated, takers
from swarm_node.pipeline.recovery.sources import elsewhere, tell
from swarm_node.pipeline.recovery.stage_checkpoints import StageFile, newest, stage_files
from swarm_node.pipeline.recovery.weight_transfer import MAX_ASKS, StageWeights, WeightTransfer
from swarm_node.pipeline.settings import crew_settings
from swarm_protocol.crew import Assignment, Kept, Plan, Source, crew_id, crew_key
from tests.support.held_stages_world import ARCHITECTURE, KINDS, RUN, SWARM, World, same, source
from tests.support.pipeline_crew import Saved
from tests.support.stages import load_part

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it


@pytest.mark.parametrize(
    ("kind", "lora", "stage"),
    [("llama", False, 1), ("llama_tied", False, 0), ("llama_tied", True, 2), ("gpt_neox", False, 2)],
)
def test_a_stage_is_handed_over_live(saved: Saved, tmp_path: Path, kind: str, lora: bool, stage: int) -> None:
    world = World(saved(kind, lora), 3, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    assert a.take(stage) == (0, Source("base"))
    assert b.take(stage) == (0, Source("base")) and same(a.weights(stage), b.weights(stage))
    a.train(stage, seed=1, updates=3)
    assert not same(a.weights(stage), b.weights(stage))
    way = source("live", a)
    assert b.take(stage, way) == (3, way)
    assert same(a.weights(stage), b.weights(stage)) and b.held_stages.updates == 3
    assert (
        b.held_stages.workers[stage].optimizer.updates == 3 and b.held_stages.workers[stage].optimizer.rate_scale == 1.0
    )
    assert b.held_stages.holding().live == (Kept(stage, 3),)
    named = b.held_stages.workers[stage].stage.named()  # what computes, not only what is stepped
    assert all(torch.equal(named[name], tensor) for name, tensor in b.weights(stage).items())


def test_no_update_changes_what_is_being_handed_over(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 3, tmp_path)
    a, b, watched = world.peer("a"), world.peer("b"), []
    a.take(1)
    a.held_stages.workers[1].optimizer.updating = lambda: nullcontext(watched.append(1))
    assert b.take(1, source("live", a)) == (0, source("live", a)) and watched == [1]


def test_replicas_of_a_former_neighbour_are_forgotten(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b, c = (world.peer(name) for name in "abc")
    a.take(0), b.take(1)
    a.train(0, seed=1), b.train(1, seed=2)
    for peer in (a, b):
        peer.held_stages.updated(world.plan(a, b))
    world.run(5.0)
    assert b.held_stages.holding().replicas == (Kept(0, 1),)
    b.held_stages.leave(1), c.take(1)
    b.held_stages.updated(world.plan(a, c))
    assert b.held_stages.holding().replicas == ()


def test_a_replica_without_room_is_not_kept(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    a.take(0), b.take(1)
    a.train(0, seed=1), b.train(1, seed=2)
    size = 4 * sum(tensor.numel() for tensor in b.held_stages.shapes_of(0, world.spans).values())
    for free, kept in ((2 * size - 1, ()), (2 * size, (Kept(0, 1),))):
        b.weight_transfer.room = lambda free=free: free  # type: ignore[misc]
        b.held_stages.updated(world.plan(a, b))
        b.held_stages.updated(world.plan(a, b))
        world.run(5.0)
        assert b.held_stages.holding().replicas == kept
    assert sum("no replica of stage 0" in text for text in b.said) == 1


def test_a_leavers_stage_is_kept_until_another_updates(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path, replica="off")
    a, b, c = (world.peer(name) for name in "abc")
    a.take(0), b.take(1)
    a.train(0, seed=1), b.train(1, seed=2)
    plan = world.plan(a, b)
    a.held_stages.replicas.asked = {1: plan.mark}
    a.weight_transfer.keep(1, b.transport.peer_id, a.held_stages.shapes_of(1, world.spans))
    world.run(5.0)
    a.train(0, seed=3)
    a.held_stages.updated(plan)
    assert a.held_stages.holding().replicas == (Kept(1, 1),)
    a.held_stages.updated(msgspec.structs.replace(world.plan(a, c), number=2))
    assert a.held_stages.holding().replicas == () and a.held_stages.replicas.asked == {}


def test_neighbours_are_offered_a_stage_before_others() -> None:
    plan = msgspec.structs.replace(plan_of(*"abcab"), spares=("s", "t"))
    assert takers(plan, 0, "a") == ["b", "c", "s", "t"]
    assert takers(plan, 2, "c") == ["a", "b", "s", "t"]
    assert takers(plan, 4, "b") == ["a", "c", "s", "t"]
    assert takers(plan_of("a", "a"), 1, "a") == takers(plan_of("a"), 0, "a") == []


def test_a_leaving_keeper_writes_the_only_copy(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    a.take(0), b.take(1)
    b.train(1, seed=1, updates=3)
    plan = world.plan(a, b)
    a.held_stages.updated(plan)
    world.run(5.0)
    world.network.kill("b")
    assert a.held_stages.save_copies(plan) == {1: 3}
    assert a.held_stages.save_copies(plan) == {}  # it is there
    expected = b.weights(1)
    a.held_stages.save_all()
    a.held_stages = a.new_held_stages()
    way = source("snapshot", a)
    assert a.take(1, Source(way.way, way.peers, updates=3)) == (3, Source(way.way, way.peers, updates=3))
    assert same(a.weights(1), expected)


@KINDS
def test_a_neighbours_replica_outlives_the_holder(saved: Saved, tmp_path: Path, kind: str, lora: bool) -> None:
    world = World(saved(kind, lora), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    a.take(0), b.take(1)
    for peer, stage in ((a, 0), (b, 1)):
        peer.train(stage, seed=stage)
    plan = world.plan(a, b)
    for peer in (a, b):
        peer.held_stages.updated(plan)
    world.run(5.0)
    assert a.held_stages.holding().replicas == (Kept(1, 1),) and b.held_stages.holding().replicas == (Kept(0, 1),)
    expected = a.weights(0)
    world.network.kill("a")
    way = source("replica", b)
    assert b.take(0, way) == (1, way) and same(b.weights(0), expected)
    assert b.held_stages.holding().replicas == ()


def test_another_crews_copy_of_a_stage_is_used(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 3, tmp_path)
    theirs, ours = world.peer("a", crew="red"), world.peer("b", crew="blue")
    theirs.take(1)
    theirs.cohort.look()
    theirs.train(1, seed=1, updates=40)
    theirs.announce()
    world.run(90.0)
    red, blue = (crew_id(crew_key(SWARM, name)) for name in ("red", "blue"))
    found = elsewhere(ours.transport.members(), blue, ARCHITECTURE, 3, world.spans[1], 1)
    assert found == {theirs.transport.peer_id: 40}
    assert elsewhere(ours.transport.members(), red, ARCHITECTURE, 3, world.spans[1], 1) == {}
    way = Source("cohort", tuple(found), updates=40)
    assert ours.take(1, way) == (40, way) and same(ours.weights(1), theirs.weights(1))
    said = tell(1, way, 40, 42)
    assert said.startswith("stage 1 taken from peer …") and "of another crew" in said
    assert said.endswith("lost: what it learned since the two crews last averaged")


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("no cohort", "is not in the cohort of this stage"),
        ("another start", "is not in the cohort of this stage"),
        ("nothing is averaged here", "nothing is averaged with other crews"),
        ("far", "absurdly far"),
    ],
)
def test_untrusted_copies_of_a_stage_are_passed_over(saved: Saved, tmp_path: Path, trouble: str, why: str) -> None:
    world = World(saved("llama"), 3, tmp_path)
    theirs, ours = world.peer("a", crew="red"), world.peer("b", crew="blue")
    theirs.take(1)
    if trouble == "another start":
        theirs.held_stages.starts[1] = "another"
    if trouble != "no cohort":
        theirs.cohort.look()
    theirs.train(1, seed=1, updates=40)
    if trouble == "far":
        with torch.no_grad():
            for tensor in theirs.held_stages.workers[1].optimizer.weights().values():
                tensor += 100.0
    theirs.announce()
    world.run(90.0)
    if trouble == "nothing is averaged here":
        averaging = world.averaging.model_copy(update={"method": "none"})
        ours.held_stages.config = world.config.model_copy(update={"averaging": averaging})
    base = Source("base")
    assert ours.take(1, source("cohort", theirs), base) == (0, base)
    assert any(why in line for line in ours.said), ours.said


@pytest.mark.parametrize("lora", [False, True])
def test_a_middle_stage_is_the_weighted_mean(saved: Saved, tmp_path: Path, lora: bool) -> None:
    world = World(saved("llama", lora), 3, tmp_path)
    a, b, c = world.peer("a"), world.peer("b"), world.peer("c")
    a.take(0), c.take(2)
    a.train(0, seed=1, updates=5), c.train(2, seed=3, updates=6)
    way = source("mean", a, c, stages=(0, 2))
    assert b.take(1, way) == (6, way)
    first, end = world.spans[1]
    before, after = Neighbour(inner(a.weights(0)), 1.5), Neighbour(inner(c.weights(2)), 3.5)
    expected = checkfree(before, after, end - first, first)
    assert same(b.weights(1), expected) and len(expected) == len(b.held_stages.workers[1].stage.named())
    assert b.held_stages.workers[1].optimizer.rate_scale == RATE
    plain = checkfree(Neighbour(before.tensors), Neighbour(after.tensors), end - first, first)
    assert not same(expected, plain)  # the weights count


def inner(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if layer_of(name) is not None}


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
@pytest.mark.parametrize(("lost", "model"), [(0, 1), (3, 2)])
def test_a_lost_end_is_copied_with_embedding(saved: Saved, tmp_path: Path, kind: str, lost: int, model: int) -> None:
    world = World(saved(kind), 4, tmp_path, replica="off", swap=True)
    end, near, taker = world.peer("a"), world.peer("b"), world.peer("c")
    end.take(lost), near.take(model)
    end.train(lost, seed=1), near.train(model, seed=2)
    holders = {lost: end, model: near}
    plan = world.plan(*(holders.get(stage, taker) for stage in range(4)))
    for _ in range(2):
        end.held_stages.updated(plan), near.held_stages.updated(plan)
        world.run(5.0)
    rest = {name: tensor for name, tensor in end.weights(lost).items() if layer_of(name) is None}
    assert rest and near.weight_transfer.replicas[lost].tensors.keys() == rest.keys()
    assert model not in near.weight_transfer.replicas
    world.network.kill("a")
    way = source("copy", near, stages=(model,))
    assert taker.take(lost, way) == (1, way)
    first, until = world.spans[lost]
    copied = checkfree(Neighbour(inner(near.weights(model))), None, until - first, first)
    assert same(taker.weights(lost), copied | rest)
    assert taker.held_stages.workers[lost].optimizer.rate_scale == RATE


def test_another_runs_files_and_copies_do_not_count(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, base = world.peer("a"), Source("base")
    a.take(1)
    a.train(1, seed=1, updates=500)
    a.held_stages.checkpoints.round = 77
    a.held_stages.save_all()
    a.held_stages = a.new_held_stages()
    assert a.held_stages.recall(world.spans) == 77
    assert a.held_stages.holding().replicas == a.held_stages.holding().checkpoints == (Kept(1, 500),)
    assert not a.held_stages.go_to(RUN) and a.held_stages.holding().replicas
    other = (("ef" * 8, 0),)
    assert a.held_stages.go_to(other) and a.said[-1].endswith("another run or branch: 1")
    assert (
        a.held_stages.holding().replicas == a.held_stages.holding().checkpoints == ()
        and a.held_stages.checkpoints.round == 0
    )
    for way in ("snapshot", "replica"):
        assert a.take(1, source(way, a, updates=500), base) == (0, base)
    a.train(1, seed=2, updates=3)
    a.held_stages.save_all()
    assert a.held_stages.holding().checkpoints == (Kept(1, 3),)
    last = newest(stage_files(tmp_path / "a" / "stages"))
    assert last is not None and (last.run, last.updates) == (other, 3)  # by time, not by count


def test_stages_stay_in_their_run_and_leave_forks(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 3, tmp_path)
    a = world.peer("a")

    def files() -> list[StageFile]:
        for stage in range(3):
            a.held_stages.checkpoints.store(stage).wait()
        return stage_files(tmp_path / "a" / "stages")

    for stage, updates in ((0, 41), (1, 43), (2, 40)):
        a.take(stage)
        a.train(stage, seed=stage, updates=updates)
    a.held_stages.weight_transfer.let_go(2)
    kept = StageWeights({}, 41, 1.0)
    a.held_stages.workers.pop(2)
    a.weight_transfer.replicas = {2: kept}
    a.held_stages.checkpoints.round = 39
    ours = (*RUN, ("0a" * 8, 40))
    assert not a.held_stages.go_to(ours)
    assert a.held_stages.workers.keys() == {0, 1}  # what becomes of the second is for the crew to say
    assert a.weight_transfer.replicas == {2: kept} and a.held_stages.checkpoints.round == 39
    assert [(file.stage, file.updates, file.run) for file in files()] == [(1, 43, RUN)]
    a.held_stages.save(0)
    assert (0, 41, ours) in [(file.stage, file.updates, file.run) for file in files()]
    a.weight_transfer.replicas[1] = StageWeights({}, 30, 1.0)
    weights = a.weights(0)
    theirs = (*RUN, ("0b" * 8, 30))
    a.train(0, seed=7, updates=9)
    assert a.held_stages.go_to(theirs) and a.held_stages.checkpoints.round == 0
    assert (
        a.held_stages.workers == {}
        and list(a.weight_transfer.replicas) == [1]
        and a.held_stages.holding().checkpoints == ()
    )
    assert files()[0].updates == 50 and files()[0].run == ours  # it is not lost
    assert not any(file.counts(theirs) for file in files())
    assert a.held_stages.go_to(ours) and Kept(0, 41) in a.held_stages.holding().checkpoints
    a.take(0, source("snapshot", a, updates=41))
    assert same(a.weights(0), weights)


def test_old_files_belong_to_single_segment_runs(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a = world.peer("a")
    a.take(1)
    for _ in range(2):
        a.train(1, seed=1, updates=20)
        a.held_stages.save(1)
    a.held_stages.save_all()
    for file in stage_files(tmp_path / "a" / "stages"):
        text = file.path / "state.json"
        text.write_text(text.read_text().replace(json.dumps(RUN), json.dumps(RUN[0][0])))
    assert [(file.run, file.updates) for file in stage_files(tmp_path / "a" / "stages")] == [(RUN, 40), (RUN, 20)]
    a.held_stages = a.new_held_stages()
    assert a.held_stages.holding().checkpoints == (Kept(1, 40), Kept(1, 20))
    a.held_stages.go_to((*RUN, ("0a" * 8, 30)))
    assert a.held_stages.holding().checkpoints == (Kept(1, 20),)


def test_the_next_source_is_tried_when_one_fails(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b, c = world.peer("a"), world.peer("b"), world.peer("c")
    c.take(1)
    c.train(1, seed=1, updates=2)
    gone = Source("live", ("nobody",))
    without = source("replica", b)
    checkpoint = source("snapshot", b)  # on another machine
    good = source("live", c)
    assert a.take(1, gone, without, checkpoint, good, Source("base")) == (2, good)
    assert same(a.weights(1), c.weights(1))
    assert [line.split(" could not be built from ")[1].split(":")[0] for line in a.said if "could not" in line] == [
        "live",
        "replica",
        "snapshot",
    ]
    refused = b.take(0, source("replica", a))
    assert isinstance(refused, str) and 0 not in b.held_stages.workers


def test_weights_of_other_shapes_leave_the_base_model(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    a.take(1)
    a.weight_transfer.hold(1, lambda: StageWeights({"model.norm.weight": torch.zeros(3)}, 9, 0.0), nullcontext)
    base = Source("base")
    assert b.take(1, source("live", a), base) == (0, base)
    fresh = world.peer("c")
    fresh.take(1)
    assert same(b.weights(1), fresh.weights(1))


def test_an_order_withdrawn_meanwhile_is_given_up(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    a.take(1)
    a.train(1, seed=1)
    b.gives_up_after = 2  # once before the source is tried, once while its weights travel
    assert b.take(1, source("live", a), Source("base")) == "it is not wanted any more"
    assert 1 not in b.held_stages.workers and b.held_stages.holding().live == ()


def test_a_stage_once_left_is_not_handed_over(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    a.take(1)
    a.train(1, seed=1)
    a.held_stages.leave(1)
    assert a.held_stages.updates == 0
    assert b.take(1, source("live", a), Source("base"))[1] == Source("base")


@pytest.mark.parametrize(
    ("kind", "lora"), [("llama_tied", False), ("llama", True), ("gpt_neox", False), ("qwen2", True)]
)
def test_shapes_are_those_of_the_stages(saved: Saved, tmp_path: Path, kind: str, lora: bool) -> None:
    policy = saved(kind, lora)
    world = World(policy, 3, tmp_path)
    peer = world.peer("a")
    for index in range(3):
        named = load_part(policy, index, 3).named()
        shapes = peer.held_stages.shapes_of(index, world.spans)
        assert {name: p.shape for name, p in named.items()} == {name: t.shape for name, t in shapes.items()}
        assert all(tensor.is_meta for tensor in shapes.values()) and shapes


def plan_of(*peers: str) -> Plan:
    seats = tuple(Assignment(peer, (stage, stage + 1)) for stage, peer in enumerate(peers))
    return Plan(1, 1, seats, crew_settings(NodeConfig()))


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ("ab", {"a": [1], "b": [0]}),
        ("abc", {"a": [], "b": [0, 2], "c": [1]}),
        ("abcd", {"a": [], "b": [0], "c": [1, 3], "d": [2]}),
        ("abcde", {"b": [0], "c": [1], "d": [2, 4], "e": [3]}),
        ("aab", {"a": [2], "b": [0, 1]}),  # beside stage 0 is its own holder
        ("aba", {"a": [1], "b": [0, 2]}),
        ("aa", {"a": []}),
        ("a", {"a": []}),
        ("abba", {"a": [1, 2], "b": [0, 3]}),
        ("abcab", {"a": [2, 4], "b": [0, 3], "c": [1]}),
    ],
)
def test_each_replica_has_its_keeper(holders: str, expected: dict[str, list[int]]) -> None:
    plan = plan_of(*holders)
    assert {peer: kept_for(plan, peer) for peer in expected} == expected
    for peer in set(holders):
        assert all(plan.assignments[stage].peer != peer for stage in kept_for(plan, peer))


@pytest.mark.parametrize(
    ("setting", "swap", "expected"),
    [
        ("auto", False, [["whole"] * 2, ["whole"] * 3, ["whole"] * 4]),
        ("auto", True, [["whole"] * 2, ["whole"] * 3, ["rest", "", "", "rest"]]),
        ("off", False, [[""] * 2, [""] * 3, [""] * 4]),
        ("off", True, [["rest"] * 2, ["rest", "", "rest"], ["rest", "", "", "rest"]]),
        ("on", True, [["whole"] * 2, ["whole"] * 3, ["whole"] * 4]),
        ("ends", False, [["whole"] * 2, ["whole", "", "whole"], ["whole", "", "", "whole"]]),
        ("ends", True, [["whole"] * 2, ["whole", "", "whole"], ["whole", "", "", "whole"]]),
    ],
)
def test_where_replicas_are_kept(setting: str, swap: bool, expected: list[list[str]]) -> None:
    for stages, kept in enumerate(expected, 2):
        config = NodeConfig(pipeline=PipelineConfig(stages=stages, replica=setting, swap=swap))
        assert [replicated(config, stage) for stage in range(stages)] == kept


@pytest.mark.parametrize(
    ("lora", "stages", "option", "expected"),
    [(False, 3, 0, 1), (False, 4, 0, 20), (True, 4, 0, 1), (False, 4, 7, 7), (True, 2, 7, 7)],
)
def test_how_often_replicas_are_renewed(lora: bool, stages: int, option: int, expected: int) -> None:
    config = NodeConfig(pipeline=PipelineConfig(stages=stages, replica_every=option))
    assert replica_every(config, lora) == expected


def test_a_replica_is_renewed_when_old(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 4, tmp_path, replica_every=3)
    peers = [world.peer(name) for name in "abcd"]
    for stage, peer in enumerate(peers):
        peer.take(stage)
    ages = []
    for _ in range(8):
        for stage, peer in enumerate(peers):
            peer.train(stage, seed=stage)
            peer.held_stages.updated(world.plan(*peers))
        world.run(5.0)
        ages.append(peers[1].held_stages.updates - peers[1].weight_transfer.replicas[0].updates)
    assert ages == [0, 1, 2, 0, 1, 2, 0, 1]


def run_while_fetching(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass at each fetch: nobody moves the clock while the lead waits for it."""
    started = WeightTransfer.fetch

    def fetch(self, *args):
        fetched = started(self, *args)
        world.run(30.0)
        return fetched

    monkeypatch.setattr(WeightTransfer, "fetch", fetch)


def test_at_the_end_the_lead_has_all_stages(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(saved("llama_tied"), 3, tmp_path)
    a, b, c = world.peer("a"), world.peer("b"), world.peer("c")
    for stage, peer in enumerate((a, b, c)):
        peer.take(stage)
        peer.train(stage, seed=stage, updates=4)
    world.network.kill("c")
    run_while_fetching(world, monkeypatch)
    missing = a.held_stages.gather(world.plan(a, b, c), 0.0)
    a.held_stages.save_all()
    assert list(missing) == [2]
    assert set(a.held_stages.holding().checkpoints) == {Kept(0, 4), Kept(1, 4)}
    a.held_stages = a.new_held_stages()
    way = source("snapshot", a, updates=4)
    assert a.take(1, way) == (4, way) and same(a.weights(1), b.weights(1))  # with new moments


@pytest.mark.parametrize(("later", "missing"), [(0, {}), (1, {1: "unreachable"})])
def test_a_holder_that_leaves_as_well_is_replaced_by_its_copy(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int, missing: dict[int, str]
) -> None:
    world = World(saved("llama_tied"), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    for stage, peer in enumerate((a, b)):
        peer.take(stage)
        peer.train(stage, seed=stage, updates=4)
    a.held_stages.updated(world.plan(a, b))
    world.run(5.0)
    if later:  # the copy is not the newest
        a.train(0, seed=0, updates=later)
    world.network.kill("b")
    run_while_fetching(world, monkeypatch)
    assert a.held_stages.gather(world.plan(a, b), 0.0) == missing
    a.held_stages.save_all()
    copied = Kept(1, 4) in a.held_stages.holding().checkpoints
    assert copied is not bool(missing)
    assert a.held_stages.save_copies(world.plan(a, b)) == ({1: 4} if missing else {})


@pytest.mark.parametrize("lora", [False, True])
def test_a_stage_goes_by_its_crews_agreement(saved: Saved, tmp_path: Path, lora: bool) -> None:
    world = World(saved("llama", lora), 2, tmp_path)
    a = world.peer("a")
    a.take(1)
    before = a.weights(1)
    a.train(1, seed=1, updates=3)
    grpo = GrpoConfig(weight_decay=0.25, betas=(0.5, 0.75), beta=0.1)
    stages = world.config.pipeline.model_copy(update={"wire": "int8"})
    a.held_stages.go_by(world.config.model_copy(update={"grpo": grpo, "pipeline": stages}), reference=True)
    a.take(0)
    for stage in (0, 1):  # whether it comes then or was there before
        worker, groups = a.held_stages.workers[stage], a.held_stages.workers[stage].optimizer.adamw.param_groups
        assert worker.codec == "int8" and (worker.reference is None) == lora
        assert {group["betas"] for group in groups} == {(0.5, 0.75)}
        assert {group["weight_decay"] for group in groups if group["params"]} <= {0.25, 0.0}
        assert any(group["weight_decay"] == 0.25 for group in groups)
    reference = a.held_stages.workers[1].reference
    assert a.held_stages.workers[1].updates == 3
    if reference is not None:
        named = reference.named(trainable=False)
        assert all(torch.equal(tensor, named[name]) for name, tensor in before.items())


def test_a_long_notice_is_used_with_few_requests(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, now, asks = World(saved("llama"), 2, tmp_path), [0.0], list[float]()
    a, b = world.peer("a"), world.peer("b")
    a.take(0), b.take(1)
    a.train(0, seed=1, updates=3)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def offer(peer: str, stage: int, updates: int, timeout: float) -> Future[int]:
        asks.append(now[0])
        kept: Future[int] = Future()
        kept.set_result(updates if now[0] > 110.0 else 0)
        return kept

    monkeypatch.setattr(replicas.time, "sleep", sleep)
    monkeypatch.setattr(a.weight_transfer, "offer", offer)
    assert a.held_stages.hand_over(world.plan(a, b), lambda: 114.0 - now[0]) == {0: (b.transport.peer_id, "")}
    assert len(asks) <= MAX_ASKS
    assert [at for at in asks if at < 2.0][5] < 1.0, "what is small is there soon"
