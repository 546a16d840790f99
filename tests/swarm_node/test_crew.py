"""Nodes of a crew, in one process: who leads goes on where the last lead was, whatever is lost meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from protocol.crew import NO_RUN, Holding, Kept
from protocol.transports.memory import MemoryNetwork, VirtualClock
from swarm_node.config import NodeConfig, PolicyConfig, StagesConfig
from swarm_node.crew import Ear
from swarm_node.memory import Memory
from swarm_node.policy.loading import prepare
from swarm_node.stages.partition import UNKNOWN
from swarm_node.stages.pipeline import Lead
from tests.swarm_node.crew_nodes import CrewWorld, Machine
from tests.swarm_node.stages.harness import save

SWARM = "ab" * 32


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PolicyConfig]:
    return {kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "llama_tied")}


@pytest.fixture
def form(
    policies: dict[str, PolicyConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., CrewWorld]]:
    """A crew that is whole; options by machine."""
    worlds: list[CrewWorld] = []

    def make(kind: str, stages: int, **options: dict[str, object]) -> CrewWorld:
        world = CrewWorld(policies[kind], stages, tmp_path, monkeypatch)
        worlds.append(world)
        for stage, name in enumerate("abcd"[:stages]):
            world.start(name, **{"stage": stage, **options.get(name, {})})
        assert world.lead().name == "a"
        return world

    yield make
    for world in worlds:
        world.close()


def changed(machine: Machine, before: dict[int, list[torch.Tensor]]) -> dict[int, bool]:
    now = machine.weights()
    return {k: any(not torch.equal(*pair) for pair in zip(now[k], old, strict=True)) for k, old in before.items()}


@pytest.mark.parametrize(("kind", "successor"), [("llama", "b"), ("llama", "spare"), ("llama_tied", "spare")])
def test_whoever_leads_next_has_every_stage_go_on_training(
    form: Callable[..., CrewWorld], kind: str, successor: str
) -> None:
    world = form(kind, 3)
    if successor == "spare":
        spare = world.start("spare").node.mates
        world.until(lambda: spare.plan is not None and spare.plan.spares == ("spare",))
    world.train(3)
    heard = [world.machines[name].node.mates for name in "bc"]
    world.until(lambda: all(mates.progress is not None and mates.progress.round == 3 for mates in heard))
    gone = world.kill("a")
    lead = world.lead()
    gone.end(politely=False)
    assert lead.name == successor and any("stage 0 begins with the base model" in line for line in lead.said), lead.said
    assert lead.node.policy.version == lead.node.lead.updates == 3  # though stage 0 knew of none
    before = {name: machine.weights() for name, machine in world.machines.items()}
    world.train(1)
    for name, machine in world.machines.items():
        world.until(lambda machine=machine: set(machine.updates.values()) == {4})
        assert all(changed(machine, before[name]).values()), name
    assert {stage for machine in world.machines.values() for stage in machine.updates} == {0, 1, 2}
    assert lead.node.progress.round == 4


def test_a_stage_may_be_lost_while_a_new_lead_has_the_others_agree(
    form: Callable[..., CrewWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = form("llama_tied", 3)
    world.train(2)
    agree, gone = Lead.agree, []

    def lost_meanwhile(lead: Lead) -> None:
        if not gone:
            gone.append(world.kill("c"))
        agree(lead)

    monkeypatch.setattr(Lead, "agree", lost_meanwhile)
    gone_lead = world.kill("a")
    lead = world.lead()
    for machine in (gone_lead, *gone):
        machine.end(politely=False)
    assert lead.name == "b" and len(gone) == 1
    assert any("stage 2 is back" in line and "held by this node" in line for line in lead.said), lead.said
    world.train(1)
    assert set(lead.updates) == {0, 1, 2} and len(set(lead.updates.values())) == 1


def test_who_holds_two_stages_tells_of_both(form: Callable[..., CrewWorld], policies: dict[str, PolicyConfig]) -> None:
    world = form("llama", 3, a={"capacity_gb": room_for_one(policies["llama"])})
    reports: list[Holding] = []
    holder = world.machines["c"].node
    report = holder.mates.report
    holder.mates.report = lambda holding: (reports.append(holding), report(holding))[1]  # type: ignore[method-assign]
    gone = world.kill("b")
    world.train(1)
    gone.end(politely=False)
    assert set(world.machines["c"].updates) == {1, 2}
    world.train(2)
    n = world.machines["a"].updates[0]
    world.until(lambda: reports[-1].live == (Kept(1, n), Kept(2, n)))


def test_who_leads_no_more_keeps_nothing_of_the_first_stage(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 2)
    world.train(1)
    machine = world.machines["a"]
    machine.stop.requested = True
    machine.thread.join()
    node = machine.node
    model = weakref.ref(node.policy.model)
    node.leave_lead()
    node.seats.leave(0)
    gc.collect()
    assert model() is None


def test_who_is_out_of_minutes_leaves_the_lead_to_another(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 3)
    world.train(1)
    b = world.machines["b"]
    b.node.config = b.node.config.model_copy(update={"minutes": 1e-6})
    gone = world.kill("a")
    world.until(lambda: not b.thread.is_alive())
    assert b.error is None and "minutes are over" in b.said[-1]
    world.machines.pop("b").end()
    assert world.lead().name == "c"
    gone.end(politely=False)
    assert not any("is over after round" in line for line in world.machines["c"].said)
    world.train(1)


def test_files_of_another_run_are_of_no_use_to_a_crew(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 2)
    world.train(3)
    ours = world.machines["a"].node.seats.run
    assert world.machines["b"].node.seats.run == ours
    for name in "ab":
        world.machines.pop(name).end()
    world.start("c", stage=0), world.start("d", stage=1)
    world.lead()
    world.train(5)
    theirs = world.machines["d"].node.seats.run
    for name in "cd":
        world.machines.pop(name).end()
    assert len({ours, theirs, NO_RUN}) == 3
    world.start("a", stage=0), world.start("d", stage=1)
    lead = world.lead()
    assert lead.name == "a" and lead.node.seats.run == world.machines["d"].node.seats.run == ours
    assert any("stage 0 rebuilt from the snapshot after update 3; nothing is lost" in line for line in lead.said)
    metrics = lead.node.mates.metrics()
    assert metrics["stages/recovered/snapshot"] == metrics["stages/recovered/base"] == 1
    assert lead.node.progress.round == 3
    world.machines.pop("d").end()
    world.start("b", stage=1)
    world.train(1)
    assert world.machines["b"].node.seats.run == ours


def room_for_one(policy: PolicyConfig) -> float:
    """GiB that the first of three stages takes, and no more."""
    config = NodeConfig(policy=policy, stages=StagesConfig(count=3, crew="home", replica="off"))
    memory = Memory(config, prepare(policy))
    return (memory.costs(memory.divide([UNKNOWN] * 3))[0] + 1) / 2**30


def test_a_node_that_leads_twice_hears_everything_once() -> None:
    clock = VirtualClock(0.0)
    network = MemoryNetwork(clock, seed=0)
    mine = network.join("a", SWARM)
    other = network.join("b", SWARM, bootstrap=mine.addresses)
    ear = Ear(mine)
    first: list[bytes] = []
    second: list[bytes] = []
    ear.subscribe("topic", first.append)
    clock.run_until(5.0)
    for data in (b"1", b"2"):
        assert other.publish("topic", data)
        clock.run_until(clock.now() + 5.0)
        if data == b"1":
            ear.end()  # another leads meanwhile
            other.publish("topic", b"not heard")
            clock.run_until(clock.now() + 5.0)
            ear.subscribe("topic", second.append)
    assert (first, second) == ([b"1"], [b"2"])
