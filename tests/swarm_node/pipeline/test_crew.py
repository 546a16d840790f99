"""Nodes of a crew, in one process: who leads goes on where the last lead was, whatever is lost meanwhile."""

from __future__ import annotations

import gc
import math
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec import structs

from swarm_node.config import NodeConfig, PipelineConfig, PolicyConfig
from swarm_node.pipeline.announcing import LeaderSubscriptions
from swarm_node.pipeline.compute.partition import UNKNOWN
from swarm_node.pipeline.driver import Driver
from swarm_node.pipeline.footprint import Footprint
from swarm_node.pipeline.leaving import GATHER_S, SAVE_S
from swarm_node.pipeline.messages import LEADER, StageMessage
from swarm_node.pipeline.recovery.stage_checkpoints import stage_files
from swarm_node.pipeline.status_text import StatusText
from swarm_node.policy.loading import prepare
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.mirror import Mirror
from swarm_protocol.crew import Holding, Kept, Plan, Progress
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import Forward, GradientNorm, GradientNormRequest
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock
from tests.support.crew_nodes import CrewWorld, Machine
from tests.support.pipeline_crew import save

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


@pytest.mark.parametrize(
    ("kind", "successor"), [pytest.param("llama", "b", marks=pytest.mark.long), ("llama_tied", "spare")]
)
def test_every_stage_trains_on_under_another_lead(form: Callable[..., CrewWorld], kind: str, successor: str) -> None:
    world = form(kind, 3)
    if successor == "spare":
        spare = world.start("spare").node.stage_transport
        world.until(lambda: spare.plan is not None and spare.plan.spares == ("spare",))
    world.train(3)
    heard = [world.machines[name].node.stage_transport for name in "bc"]
    world.until(
        lambda: all(
            stage_transport.progress is not None and stage_transport.progress.round == 3 for stage_transport in heard
        )
    )
    gone = world.kill("a")
    lead = world.lead()
    gone.end(politely=False)
    assert lead.name == successor and any("stage 0 begins with the base model" in line for line in lead.said), lead.said
    assert lead.node.parts.cohort.absent() == lead.node.stage_transport.absent, "a dead leader is no partner"
    assert lead.node.policy.version == lead.node.driver.updates == 3  # though stage 0 knew of none
    before = {name: machine.weights() for name, machine in world.machines.items()}
    world.train(1)
    for name, machine in world.machines.items():
        world.until(lambda machine=machine: set(machine.updates.values()) == {4})
        assert all(changed(machine, before[name]).values()), name
    assert {stage for machine in world.machines.values() for stage in machine.updates} == {0, 1, 2}
    assert lead.node.progress.round == 4


@pytest.mark.parametrize(
    ("lies", "words"),
    [
        ([None], "that its gradient is not finite"),
        ([1e300], "that its gradient has norm 1e[+]150, where .* is usual"),
        ([None, 1e300, 0], "that its gradient .*"),
    ],
    ids=["not finite", "absurd", "now and then"],
)
def test_a_stage_that_says_what_cannot_be_is_named_and_given_up(
    form: Callable[..., CrewWorld], lies: list[float | None], words: str
) -> None:
    """The lies are told in turn; 0 stands for the truth."""
    world = form("llama", 2)
    spare = world.start("spare").node.stage_transport
    world.until(lambda: spare.plan is not None and spare.plan.spares == ("spare",))
    liar, told = world.machines["b"].node.held_stages.workers[1], cycle(lies)
    squares = liar._squares

    def lie() -> StageMessage:
        true, said = squares(), next(told)
        assert isinstance(true.head, GradientNorm)
        return true if said == 0 else StageMessage(LEADER, structs.replace(true.head, squares=said))

    liar._squares = lie  # type: ignore[method-assign]
    lead = world.lead()
    world.train(6)
    skipped = [line for line in lead.said if re.fullmatch(f"stage 1 says {words}: update skipped", line)]
    assert len(skipped) == 2, lead.said
    assert any(re.fullmatch(rf"stage 1 of crew home is lost \(peer \S+: it says {words}\)", line) for line in lead.said)
    assert world.machines["spare"].updates == {1: 4} and lead.node.driver.updates == 4 and lead.leads
    assert lead.node.stage_transport.plan is not None
    assert [seat.peer for seat in lead.node.stage_transport.plan.assignments] == ["a", "spare"]


def test_a_stage_with_log_probabilities_above_0_is_given_up_at_once(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 2)
    spare = world.start("spare").node.stage_transport
    world.until(lambda: spare.plan is not None and spare.plan.spares == ("spare",))
    liar = world.machines["b"].node.held_stages.workers[1]
    forward = liar._forward

    def lie(message: StageMessage, head: Forward) -> list[StageMessage]:
        out = forward(message, head)
        return [replace(each, tensors=(each.tensors[0] + 300, *each.tensors[1:])) for each in out]

    liar._forward = lie  # type: ignore[method-assign]
    world.train(2)
    lead = world.lead()
    assert any("is lost" in line and "what it says is refused: values" in line for line in lead.said), lead.said
    plan = lead.node.stage_transport.plan
    assert plan is not None and [seat.peer for seat in plan.assignments] == ["a", "spare"]


@pytest.mark.long
def test_a_stage_lost_as_leads_change_returns(form: Callable[..., CrewWorld], monkeypatch: pytest.MonkeyPatch) -> None:
    world = form("llama_tied", 3)
    world.train(2)
    agree, gone = Driver.agree, []

    def lost_meanwhile(driver: Driver, least: int) -> None:
        if not gone:
            gone.append(world.kill("c"))
        agree(driver, least)

    monkeypatch.setattr(Driver, "agree", lost_meanwhile)
    gone_lead = world.kill("a")
    lead = world.lead()
    for machine in (gone_lead, *gone):
        machine.end(politely=False)
    assert lead.name == "b" and len(gone) == 1
    assert any("stage 2 is back" in line and "held by this node" in line for line in lead.said), lead.said
    world.train(1)
    assert set(lead.updates) == {0, 1, 2} and len(set(lead.updates.values())) == 1


def test_a_peer_with_two_stages_tells_of_both(
    form: Callable[..., CrewWorld], policies: dict[str, PolicyConfig]
) -> None:
    world = form("llama", 3, a={"capacity_gb": room_for_one(policies["llama"])})
    reports: list[Holding] = []
    holder = world.machines["c"].node
    report = holder.stage_transport.report
    holder.stage_transport.report = lambda holding: (reports.append(holding), report(holding))[1]  # type: ignore[method-assign]
    gone = world.kill("b")
    world.train(1)
    gone.end(politely=False)
    assert set(world.machines["c"].updates) == {1, 2}
    world.train(2)
    n = world.machines["a"].updates[0]
    world.until(lambda: reports[-1].live == (Kept(1, n), Kept(2, n)))


def test_a_former_lead_frees_the_first_stage(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 2)
    world.train(1)
    machine = world.machines["a"]
    machine.stop.requested = True
    machine.thread.join()
    node = machine.node
    model = weakref.ref(node.policy.model)
    node.leave_lead()
    node.held_stages.leave(0)
    gc.collect()
    assert model() is None


def test_people_are_told_of_missing_stages_and_links(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 2, a={"spare_wait_s": 1000.0}, b={"wire": "int8"})
    lead, b = world.machines["a"], world.machines["b"]
    assert b.node.config.pipeline.wire == "float32" and b.node.parts.own.pipeline.wire == "int8"
    assert any('pipeline.wire = "float32" (here "int8")' in line for line in b.said)
    world.until(lambda: b.transport.addresses[0] in lead.node.parts.join_command.link)
    for _ in range(3):
        lead.node.invite()
    links = [line for line in lead.said if line.startswith("swarm-node join")]
    assert links[-1].count("peer=") == 2 and len(links) == len(set(links)) <= 2
    assert lead.node.waiting() == "" and lead.node.status()["whole"]
    gone = world.kill("b")
    world.until(lead.node.waiting)
    status = lead.node.status()
    gone.end(politely=False)
    assert re.fullmatch(r"stage 1 is missing for \d+ s: waiting for a peer", lead.node.waiting())
    assert not status["whole"] and status["stages"][0]["missing"] is None
    assert status["stages"][1]["missing"]["taker"] is None and status["stages"][1]["peer"] == "b"
    world.until(lambda: lead.node.stage_transport.absent == {"b"} or "b" not in lead.transport.members())
    world.until(lambda: b.transport.addresses[0] not in lead.node.parts.join_command.link)


def test_a_lead_out_of_minutes_hands_over(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 3)
    world.train(1)
    b = world.machines["b"]
    world.until(lambda: any("is whole" in line for line in b.said))  # from then on minutes count
    b.node.config = b.node.config.model_copy(update={"minutes": 1e-6})
    gone = world.kill("a")
    world.until(lambda: not b.thread.is_alive())
    assert b.error is None and "minutes are over" in b.said[-1]
    world.machines.pop("b").end()
    assert world.lead().name == "c"
    gone.end(politely=False)
    assert not any("is over after round" in line for line in world.machines["c"].said)
    world.train(1)


@pytest.mark.parametrize(("leaver", "keeper", "taker"), [("a", "b", "b"), ("b", "c", "spare")])
def test_nothing_is_lost_when_a_peer_leaves_politely(
    form: Callable[..., CrewWorld], leaver: str, keeper: str, taker: str
) -> None:
    world = form("llama", 3)
    if taker == "spare":
        spare = world.start("spare").node.stage_transport
        world.until(lambda: spare.plan is not None and spare.plan.spares == ("spare",))
    world.train(3)
    gone = world.machines.pop(leaver)
    (stage,) = gone.updates
    world.until(lambda: gone.updates == {stage: 3})
    expected = gone.weights()[stage]
    gone.end()
    assert f"{keeper} keeps stage {stage} for the node that holds it next" in gone.said
    assert stage in world.machines[keeper].node.parts.weight_transfer.replicas or taker == keeper
    world.until(lambda: stage in world.machines[taker].updates)
    assert all(torch.equal(*pair) for pair in zip(world.machines[taker].weights()[stage], expected, strict=True))
    lead = world.lead()
    world.train(1)
    assert any(re.search("rebuilt from the replica that .* kept; nothing is lost", line) for line in lead.said)
    for machine in world.machines.values():
        world.until(lambda machine=machine: set(machine.updates.values()) == {4})
        world.until(lambda machine=machine: machine.node.parts.weight_transfer.replicas == {})


def test_an_update_under_way_is_made_before_leaving(
    form: Callable[..., CrewWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.pipeline.leaving.SETTLE_S", 600.0)  # this machine may be busy
    world = form("llama", 2)
    world.train(2)
    b = world.machines["b"]
    worker = b.node.held_stages.workers[1]
    handle = worker.handle

    def told(message: StageMessage) -> list[StageMessage]:
        b.stop.requested |= isinstance(message.head, GradientNormRequest)
        return handle(message)

    worker.handle = told  # type: ignore[method-assign]
    world.todo = 1
    world.until(lambda: not b.thread.is_alive())
    assert b.updates == {1: 2} and worker.midway
    world.machines.pop("b").end()
    world.until(lambda: world.todo == 0)
    assert worker.updates == 3 and not worker.midway
    world.train(1)
    said = world.machines["a"].said
    assert any(re.search("stage 1 rebuilt from the replica that .* kept; nothing is lost", line) for line in said), said


def test_a_crew_that_ends_together_waits_for_nobody(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 2)
    world.train(2)
    a, b = world.machines.pop("a"), world.machines.pop("b")
    a.stop.requested = b.stop.requested = True
    b.thread.join()
    a.end()
    b.end()
    assert any("keeps stage 0 (leaving" in line for line in a.said), a.said
    # b may have noticed that a has gone, and knows of nobody to ask then
    assert any(" keeps stage 1 (" in line or "the leader of crew home is lost" in line for line in b.said), b.said
    assert not a.node.parts.weight_transfer.replicas and not b.node.parts.weight_transfer.replicas
    for stage, machine in enumerate((a, b)):
        assert list((machine.node.parts.run.path / "stages" / str(stage)).glob("round-*"))


def test_a_keeper_without_room_passes_the_copy_on(
    form: Callable[..., CrewWorld],
) -> None:
    world = form("llama", 3)
    world.train(1)
    world.machines["c"].node.parts.weight_transfer.room = lambda: 1
    world.machines.pop("b").end()
    assert world.machines["a"].node.parts.weight_transfer.replicas.keys() | world.machines["a"].updates.keys() == {0, 1}
    world.train(1)
    assert any("nothing is lost" in line for line in world.machines["a"].said)


def test_only_the_askers_stage_is_kept(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 3)
    world.train(1)
    c = world.machines["c"].node
    with pytest.raises(RemoteProtocolError, match="stranger"):
        c.parts.shelf("a", 1)
    with pytest.raises(RemoteProtocolError, match="stranger"):
        c.parts.shelf("x", 1)
    assert c.parts.shelf("b", 1).keys() == world.machines["b"].node.held_stages.workers[1].stage.named().keys()
    world.machines["a"].node.stage_transport.tell(Progress(1, 0.5, over=True))
    world.until(lambda: c.stage_transport.progress is not None and c.stage_transport.progress.over)
    with pytest.raises(RemoteProtocolError, match="leaving"):
        c.parts.shelf("b", 1)
    b = world.machines.pop("b")
    b.end()
    assert not any("keeps stage" in line for line in b.said)


@pytest.mark.long
def test_a_crew_ignores_files_of_another_run(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 2)
    world.train(3)
    ours = world.machines["a"].node.held_stages.checkpoints.run
    assert world.machines["b"].node.held_stages.checkpoints.run == ours
    for name in "ab":
        world.machines.pop(name).end()
    world.start("c", stage=0), world.start("d", stage=1)
    world.lead()
    world.train(5)
    theirs = world.machines["d"].node.held_stages.checkpoints.run
    for name in "cd":
        world.machines.pop(name).end()
    assert len(ours) == len(theirs) == 1 and ours != theirs
    world.start("a", stage=0), world.start("d", stage=1)
    lead = world.lead()
    again = lead.node.held_stages.checkpoints.run
    assert lead.name == "a" and again == world.machines["d"].node.held_stages.checkpoints.run and again[:-1] == ours
    assert again[-1][1] == 3
    assert any("stage 0 rebuilt from the checkpoint after update 3; nothing is lost" in line for line in lead.said)
    metrics = lead.node.stage_transport.metrics()
    assert metrics["stages/recovered/checkpoint"] == metrics["stages/recovered/base"] == 1
    assert lead.node.progress.round == 3
    world.machines.pop("d").end()
    world.start("b", stage=1)
    world.train(1)
    world.until(lambda: world.machines["b"].node.held_stages.checkpoints.run == again)


def room_for_one(policy: PolicyConfig) -> float:
    """GiB that the first of three stages takes, and no more."""
    config = NodeConfig(policy=policy, pipeline=PipelineConfig(stages=3, crew="home", replica="off"))
    memory = Footprint(config, prepare(policy))
    return (memory.costs(memory.divide([UNKNOWN] * 3))[0] + 1) / 2**30


@pytest.mark.parametrize(
    ("holders", "words"),
    [("aa", "all stages with this node"), ("bb", "all stages with peer …b"), ("ab", "stage 0 this node, 1 peer …b")],
)
def test_stages_that_one_node_holds_are_not_listed(holders: str, words: str) -> None:
    transport = SimpleNamespace(peer_id="a", members=dict)
    plan = SimpleNamespace(assignments=[SimpleNamespace(peer=peer) for peer in holders])
    stage_transport = SimpleNamespace(plan=plan, planned_stages=(0,), name_of=lambda peer: "")
    assert (
        StatusText(cast(Any, transport), cast(Any, stage_transport), "home", "a").whole()
        == f"crew home is whole: {words}"
    )


def test_a_node_that_leads_twice_hears_everything_once() -> None:
    clock = VirtualClock(0.0)
    network = MemoryNetwork(clock, seed=0)
    mine = network.join("a", SWARM)
    other = network.join("b", SWARM, bootstrap=mine.addresses)
    subscriptions = LeaderSubscriptions(mine)
    first: list[bytes] = []
    second: list[bytes] = []
    subscriptions.subscribe("topic", first.append)
    clock.run_until(5.0)
    for data in (b"1", b"2"):
        assert other.publish("topic", data)
        clock.run_until(clock.now() + 5.0)
        if data == b"1":
            subscriptions.end()  # another leads meanwhile
            other.publish("topic", b"not heard")
            clock.run_until(clock.now() + 5.0)
            subscriptions.subscribe("topic", second.append)
    assert (first, second) == ([b"1"], [b"2"])


def written(machine: Machine) -> set[tuple[int, int]]:
    """Stage and updates of its checkpoints."""
    return {(file.stage, file.updates) for file in stage_files(machine.node.parts.run.path / "stages")}


def test_a_machine_advised_to_go_saves_its_stage(form: Callable[..., CrewWorld]) -> None:
    world = form("llama", 2)
    a, b = world.machines["a"], world.machines["b"]
    world.train(2)
    world.until(lambda: b.updates == {1: 2})
    assert written(a) == written(b) == set()
    a.stop.advised = b.stop.advised = True
    world.until(lambda: written(b) == {(1, 2)})
    world.train(1)
    world.until(lambda: written(a) == {(0, 3)})


def test_a_crew_waits_for_no_busy_disk(form: Callable[..., CrewWorld], monkeypatch: pytest.MonkeyPatch) -> None:
    world = form("llama", 2)
    a, b = world.machines["a"], world.machines["b"]
    busy = [True]
    monkeypatch.setattr(CheckpointStore, "busy", property(lambda store: busy[0]))
    for machine in (a, b):
        machine.stop.advised = True
    world.train(2)
    a.stop.advised = False  # the run has saved
    world.until(lambda: not b.stop.advised and b.updates == {1: 2})
    assert written(a) == written(b) == set()
    busy[0] = False
    world.train(1)
    world.until(lambda: written(a) == {(0, 3)} and written(b) > set())
    assert {stage for stage, _ in written(b)} == {1}


@pytest.mark.parametrize("told_s", [118.0, math.inf])
def test_stages_are_handed_over_within_the_notice(
    form: Callable[..., CrewWorld], monkeypatch: pytest.MonkeyPatch, told_s: float
) -> None:
    world, given = form("llama", 2), list[float]()
    world.train(1)
    b = world.machines.pop("b")

    def hand_over(plan: Plan, left_s: Callable[[], float]) -> dict[int, tuple[str, str]]:
        given.append(left_s())
        return {}

    monkeypatch.setattr(b.node.held_stages, "hand_over", hand_over)
    b.stop.left_s = told_s
    b.end()
    assert given == [told_s - SAVE_S] if told_s < math.inf else 0 < given[0] <= GATHER_S


def test_a_crew_resumes_the_newest_common_mirrored_update(form: Callable[..., CrewWorld], tmp_path: Path) -> None:
    world, url, said = form("llama", 2), f"file://{tmp_path}/away", list[str]()
    (tmp_path / "away").mkdir()

    def mirror(name: str) -> Mirror:
        return Mirror(url, SWARM, name, "", tmp_path / name, said.append)

    weights = {}
    for updates, names in ((2, "ab"), (3, "a")):  # the last copy of b's stage does not arrive
        world.train(updates - world.done)
        for stage, name in enumerate("ab"):
            machine = world.machines[name]
            made = {stage: updates}
            world.until(lambda machine=machine, made=made: machine.updates == made)
            weights[name, updates] = machine.weights()[stage]
            machine.node.held_stages.save(stage)
            machine.node.held_stages.checkpoints.store(stage).wait()
        for name in names:
            copies = mirror(name)
            copies.start()
            copies.finish(30)
    for machine in [world.kill(name) for name in "ab"]:
        machine.end(politely=False)
        shutil.rmtree(machine.node.parts.run.path)
    for stage, name in enumerate("ab"):
        mirror(name).restore(crew=True)
        world.start(name, stage=stage)
    world.lead()
    for stage, name in enumerate("ab"):
        machine = world.machines[name]
        assert machine.updates == {stage: 2}
        assert all(torch.equal(*pair) for pair in zip(machine.weights()[stage], weights[name, 2], strict=True))
    assert {line.rpartition(": ")[2] for line in said} == {
        "stages/0/round-00000003, stages/0/round-00000002",
        "stages/1/round-00000002",
    }
