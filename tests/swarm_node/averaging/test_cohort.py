"""Equal stages of different crews average right after an update, and a matrix of two stages stays one. The larger the
weights, the longer the rounds of their cohort."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from swarm_node.averaging.cohort import join_cohort, outer_period
from swarm_node.config import AveragingConfig, PolicyConfig
from swarm_node.pipeline.recovery import rebuild
from swarm_node.pipeline.stage_cohort import StageCohort
from swarm_node.say import Detail
from swarm_protocol.crew import Source
from swarm_protocol.errors import ProtocolError
from swarm_protocol.tensors import AVERAGE_METHOD
from swarm_protocol.transports.base import Outgoing
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock
from tests.support import held_stages_world
from tests.support.held_stages_world import PERIOD_S, Peer, World, same
from tests.support.pipeline_crew import Crew, save, some_groups

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
Saved = Callable[..., PolicyConfig]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    configs: dict[str, PolicyConfig] = {}

    def load(kind: str, lora: bool = False) -> PolicyConfig:
        if kind not in configs:
            configs[kind] = save(kind, tmp_path_factory.mktemp(kind))
        return configs[kind].model_copy(update={"lora": lora, "lora_rank": 2})

    return load


@pytest.fixture(autouse=True)
def clock_moves_when_a_seat_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "WAIT_S", 0.0)


def seated(world: World, name: str, stage: int, crew: str = "home") -> Peer:
    peer = world.peer(name, crew)
    peer.take(stage)
    peer.cohort.look()
    peer.announce()
    return peer


def updates(world: World, peers: list[Peer], n: int, each_s: float = 1.0) -> None:
    """Train each stage of each peer `n` times, differently on each peer, and step its cohort after each update."""
    for i in range(n):
        for number, peer in enumerate(peers):
            for stage in peer.held_stages.workers:
                peer.train(stage, seed=100 * i + number)
            peer.cohort.step()
            peer.announce()
        world.run(each_s)


def distance(one: Peer, other: Peer, stage: int) -> float:
    mine, theirs = one.weights(stage), other.weights(stage)
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in mine.items())


def weights(*sizes: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.empty(size, device="meta") for i, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [
        ((10,), 1),
        ((3_000_000, 3_000_000), 1),  # 60 s of a node that sends 100,000 values a second
        ((3_000_000, 3_000_001), 2),
        ((60_000_000,), 10),
        ((60_000_000, 1), 11),
    ],
)
def test_large_weights_meet_in_fewer_rounds(sizes: tuple[int, ...], rounds: int) -> None:
    assert outer_period(60.0, weights(*sizes)) == 60.0 * rounds
    assert outer_period(60.0, weights(*reversed(sizes))) == 60.0 * rounds, "the same for all members"
    assert outer_period(600.0, weights(*sizes)) == 600.0 * max(1, -(-rounds // 10))


@pytest.mark.parametrize("peer", ["12D3KooWone", "12D3KooWtwo"])
def test_a_cohort_goes_by_its_weights_period(peer: str) -> None:
    transport = MemoryNetwork(VirtualClock(0.0)).join(peer, "ab" * 32)
    said: list[str] = []
    config, large = AveragingConfig(), {"w": torch.zeros(250_000)}
    joined = join_cohort(
        config, "ab" * 32, 1.0, "start", large, transport, lambda: 0.0, said.append, lambda: None, lambda: None
    )
    assert joined.averager.place.period_s == 3.0 and "in pairs every 3 s" in said[0]
    assert isinstance(said[0], Detail)


@pytest.mark.parametrize("lora", [False, True])
def test_only_equal_stages_of_crews_average(saved: Saved, tmp_path: Path, lora: bool) -> None:
    world = World(saved("llama", lora), 3, tmp_path)
    red, blue = seated(world, "a", 1, "red"), seated(world, "b", 1, "blue")
    other = seated(world, "c", 2, "blue")
    assert len(red.cohort.id) == 16
    assert red.cohort.id == blue.cohort.id != other.cohort.id
    world.run(30.0)
    before = other.weights(2)
    updates(world, [red, blue], 1, 0.0)
    apart = distance(red, blue, 1)
    averagers = [peer.cohort.averager for peer in (red, blue)]
    for _ in range(60):
        updates(world, [red, blue], 1)
        if all(averager is not None and averager.counts["exchanges"] == 3 for averager in averagers):
            break
    else:
        pytest.fail("too few exchanges")
    assert distance(red, blue, 1) < 3 * apart
    assert averagers[0] is not None and dict(averagers[0].roster.partners) == {"b": "b"}
    assert same(other.weights(2), before)
    named = red.held_stages.workers[1].stage.named()
    assert all(torch.equal(named[name], tensor) for name, tensor in red.weights(1).items())
    for peer in (red, blue):
        peer.cohort.leave()
    updates(world, [red, blue], 30)
    assert distance(red, blue, 1) > 3 * apart  # so much for those who do not average


def test_arrivals_are_applied_only_after_updates(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    red, blue = seated(world, "a", 1, "red"), seated(world, "b", 1, "blue")
    world.run(3 * PERIOD_S)
    for peer, seed in ((red, 1), (blue, 2)):
        peer.train(1, seed)
        peer.cohort.step()
    world.run(2.0)
    kept = red.weights(1), blue.weights(1)
    for peer in (red, blue):  # messages that are no updates
        peer.cohort.step()
        peer.cohort.look()
    assert same(red.weights(1), kept[0]) and same(blue.weights(1), kept[1])
    middle = {name: (tensor + kept[1][name]) / 2 for name, tensor in kept[0].items()}
    for peer in (red, blue):
        peer.held_stages.workers[1].updates += 1  # an update that changed nothing
        peer.cohort.step()
        assert peer.cohort.averager is not None and peer.cohort.averager.counts["exchanges"] == 1
        for name, tensor in peer.weights(1).items():
            torch.testing.assert_close(tensor, middle[name], atol=1e-6, rtol=1e-5)


def test_other_starts_are_other_cohorts(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    red = seated(world, "a", 1)
    blue = world.peer("b", "blue")
    blue.take(1)
    blue.held_stages.starts[1] = "another"
    blue.cohort.look()
    assert blue.cohort.id and blue.cohort.id != red.cohort.id


def test_a_trained_stage_stays_in_its_cohort(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    red = seated(world, "a", 1)
    red.train(1, seed=1, updates=9)
    blue = world.peer("b", "blue")
    blue.take(1, Source("cohort", ("a",)))
    blue.cohort.look()
    assert blue.cohort.id == red.cohort.id and same(red.weights(1), blue.weights(1))


def test_a_newcomer_takes_its_cohort_s_weights(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    old = seated(world, "a", 1, "red")
    updates(world, [old], 20)
    world.run(70.0)
    new = seated(world, "b", 1, "blue")
    for _ in range(40):
        new.train(1, seed=7)
        new.cohort.step()
        world.run(1.0)
        if any("goes on with the weights of a" in line for line in new.said):
            break
    else:
        pytest.fail("it never did")
    assert distance(old, new, 1) < 0.2


def test_a_stage_that_goes_takes_its_cohort_along(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 3, tmp_path)
    peer, stranger = seated(world, "a", 1), world.peer("b")
    first = peer.cohort.id
    peer.take(2)
    peer.cohort.look()
    assert peer.cohort.id == first and peer.cohort.stage == 1
    said = [line for line in peer.said if line.startswith("this node averages stage")]
    assert said == ["this node averages stage 1 with other crews, but not stage 2"]
    peer.take(1)  # built anew: other tensors
    peer.cohort.look()
    assert peer.cohort.id == first and peer.cohort.averager is not None
    peer.train(1, seed=1)
    assert same(dict(peer.cohort.averager.tensors), peer.weights(1))
    peer.held_stages.leave(1)
    peer.cohort.look()
    assert peer.cohort.stage == 2 and peer.cohort.id not in ("", first)
    peer.held_stages.leave(2)
    peer.cohort.look()
    assert peer.cohort.id == "" and peer.cohort.averager is None
    called = stranger.transport.exchange("a", AVERAGE_METHOD, Outgoing(b"x"), lambda head, size: print, 5.0)
    world.run(10.0)
    assert isinstance(called.exception(0), ProtocolError)


def test_the_leads_stage_is_not_averaged_here(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    assert seated(world, "a", 0).cohort.id == ""


def test_nothing_is_averaged_unless_asked(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    world.averaging = world.averaging.model_copy(update={"method": "none"})
    peer = seated(world, "a", 1)
    peer.train(1, seed=1)
    peer.cohort.step()
    assert peer.cohort.id == "" and not any("averag" in line for line in peer.said)


def test_a_shared_matrix_is_averaged_once(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama_tied"), 2, tmp_path)
    peer = seated(world, "a", 1)
    assert peer.cohort.averager is not None
    held, averaged = peer.weights(1).keys(), peer.cohort.averager.tensors.keys()
    assert held - averaged == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("averaged", [True, False])
def test_both_ends_have_the_same_matrix_again(saved: Saved, averaged: bool) -> None:
    crew = Crew(saved("llama_tied"), 3)
    crew.trainer.step(some_groups())
    first, last = crew.workers[0], crew.workers[2]
    name = first.stage.shared
    assert name == last.stage.shared == "model.embed_tokens.weight"
    other, giver = (last, first) if averaged else (first, last)
    with torch.no_grad():
        giver.stage.named()[name].add_(1)
    expected = giver.stage.named()[name].clone()
    moments = [worker.optimizer.state_dict()[f"exp_avg.{name}"].clone() for worker in (first, last)]
    last.updates += not averaged  # the first stage was rebuilt from an older copy
    assert not torch.equal(first.stage.named()[name], last.stage.named()[name])
    crew.driver.join_ends(averaged)
    assert torch.equal(other.stage.named()[name], expected) and torch.equal(giver.stage.named()[name], expected)
    for worker, before in zip((first, last), moments, strict=True):
        assert bool(before.any())
        assert torch.equal(worker.optimizer.state_dict()[f"exp_avg.{name}"], before if averaged else 0 * before)


def test_ends_that_hold_nothing_together_are_left_alone(saved: Saved) -> None:
    crew = Crew(saved("llama"), 2)
    crew.driver.join_ends(averaged=True)
    crew.driver.join_ends(averaged=False)
    assert not crew.seen[0, "Share"] and not crew.refused


def test_a_stage_waits_only_a_moment(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(saved("llama"), 2, tmp_path)
    world.averaging = world.averaging.model_copy(update={"method": "per_step", "overlap": False})
    # the clock of the swarm stands still meanwhile: nobody would ever give up
    monkeypatch.setattr(held_stages_world, "StageCohort", partial(StageCohort, most_s=0.2))
    red, blue = seated(world, "a", 1, "red"), seated(world, "b", 1, "blue")
    world.run(30.0)
    red.train(1, seed=1)
    red.cohort.step()
    averager = red.cohort.averager
    assert averager is not None and averager.waiting()
    blue.train(1, seed=2)
    blue.cohort.step()
    for _ in range(20):
        world.run(1.0)
        for peer in (red, blue):
            peer.held_stages.workers[1].updates += 1  # an update that changed nothing
            peer.cohort.step()
    assert averager.counts["exchanges"] and distance(red, blue, 1) < 1e-6  # it came about later
