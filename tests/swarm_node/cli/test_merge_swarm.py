"""`swarm-node merge SWARM`, over the memory transport: which cohort, whose weights, and who is left out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from swarm_node.averaging.averager import CohortPlace, cohort_id
from swarm_node.averaging.cohort import cohorts_of, make_averager
from swarm_node.averaging.cohort_weights import AT_ONCE, PACE, LateJoin
from swarm_node.averaging.fragments import Fragments
from swarm_node.averaging.merge import State
from swarm_node.cli.app import app
from swarm_node.cli.commands import merge as merging
from swarm_node.cli.commands.merge import Cohort, Merged, MergeRequest, merge
from swarm_node.cli.commands.merge_swarm import (
    MAX_SOURCES,
    QUIET_S,
    astray,
    called,
    choose,
    cohorts,
    gather,
    look_for_cohorts,
    mapped,
    sources,
)
from swarm_node.cli.options import is_swarm, note
from swarm_node.config import AveragingConfig, NodeConfig, PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.rollouts.evaluate import Held
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.tensors import WeightsHead, encode_head
from swarm_protocol.transports.memory import LinkModel, MemoryNetwork, MemoryTransport, VirtualClock
from tests.support.donors import answers, body_bytes, refuses, with_a_nan
from tests.support.fake_transport import FakeTransport, card, peer_id
from tests.support.tiny_models import save

SWARM = "a" * 64
FAST = LinkModel(latency_s=0.02, bandwidth_bytes_s=1e6)
NOLOCO = AveragingConfig(method="noloco")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(PolicyConfig(), RolloutsConfig(), lambda sentence: None)


@dataclass(eq=False)
class Peer:
    """A member that stands still, with weights of its own."""

    transport: MemoryTransport
    weights: State
    late_join: LateJoin

    @property
    def id(self) -> str:
        return self.transport.peer_id


class Swarm:
    """Members that train `policy`, and a visitor."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.clock = VirtualClock(1000.0)
        self.network = MemoryNetwork(self.clock)
        self.first: list[str] = []
        self.numbers = count()
        self.said: list[str] = []

    def join(self, version: int = 100, config: AveragingConfig = NOLOCO, link: LinkModel = FAST, **card: Any) -> Peer:
        number = next(self.numbers)
        transport = self.network.join(f"peer{number:08}", SWARM, link=link, bootstrap=self.first)
        self.first = self.first or transport.addresses[:1]
        noise = torch.Generator().manual_seed(number)
        start = self.policy.trainable_state()
        weights = {name: tensor.clone() for name, tensor in start.items()}
        cohort = cohort_id(Fragments(start, config.fragments).layout, self.policy.start, SWARM, config)
        place = CohortPlace(SWARM, cohort, transport.peer_id)
        averager = make_averager(config, place, weights, transport, self.clock.now, self.said.append)
        for tensor in weights.values():
            tensor += 0.01 * torch.randn(tensor.shape, generator=noise)
        late_join = LateJoin(averager, random.Random(number))
        late_join.version = version
        fields = {
            "protocol": PROTOCOL_VERSION,
            "swarm": SWARM,
            "created": self.clock.now(),
            "name": f"n{number}",
            "roles": ["trainer"],
            "cohort": cohort,
            "family": self.policy.family,
            "tokenizer": self.policy.tokenizer_hash,
            "policy_version": version,
        }
        transport.announce(PeerCard(**fields | card))
        return Peer(transport, weights, late_join)

    @cached_property
    def visitor(self) -> MemoryTransport:
        return self.network.join("visitor", SWARM, bootstrap=self.first, dial_only=True)

    def look(self) -> dict[str, dict[str, PeerCard]]:
        """Cohorts, when cards have spread."""
        visitor = self.visitor
        self.clock.run_until(self.clock.now() + 20.0)
        return cohorts(visitor.members())

    def gather(
        self, folder: Path, timeout_s: float = 600.0, wanted: str | None = None
    ) -> tuple[dict[str, State], dict[str, int]]:
        found = self.look()
        cohort, fragments = choose(found, self.policy, SWARM, wanted, self.said.append)
        return gather(
            self.visitor,
            (SWARM, cohort),
            found[cohort],
            fragments,
            self.policy,
            folder,
            timeout_s,
            self.said.append,
            self.clock.now,
            lambda seconds: self.clock.run_until(self.clock.now() + seconds),
        )

    def name(self, peer: Peer) -> str:
        return called(peer.id, self.visitor.members()[peer.id])

    def left_out(self) -> list[str]:
        return [sentence.removeprefix("left out: ") for sentence in self.said if sentence.startswith("left out: ")]


@pytest.fixture
def swarm(policy: Policy) -> Iterator[Swarm]:
    start = {name: tensor.clone() for name, tensor in policy.trainable_state().items()}
    yield Swarm(policy)
    policy.load_trainable_state(start)


def same(one: State, other: State) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# --------------------------------------------------------------------- it goes well


@pytest.mark.parametrize("options", [{}, {"fragments": 3}, {"method": "diloco", "codec": "4bit"}], ids=str)
def test_members_present_weights_are_merged(swarm: Swarm, tmp_path: Path, options: dict[str, Any]) -> None:
    config = AveragingConfig(**{"method": "noloco", **options})
    peers = [swarm.join(100 + i, config) for i in range(AT_ONCE + 2)]
    before = [{name: tensor.clone() for name, tensor in peer.weights.items()} for peer in peers]
    weights, versions = swarm.gather(tmp_path)
    assert versions == {swarm.name(peer): 100 + i for i, peer in enumerate(peers)}
    for peer, state in zip(peers, before, strict=True):
        assert same(weights[swarm.name(peer)], state), "in the order of the policy's own"
        assert same(peer.weights, state)
    assert not swarm.left_out()

    cohort = Cohort(swarm.policy, NodeConfig(), [], weights, versions=versions)
    result = merge(cohort, MergeRequest(tmp_path / "out", questions=0), swarm.said.append)
    assert result.versions == versions and result.rounds == {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name in before[0]:
        mean = torch.stack([state[name].double() for state in before]).mean(0).float()
        assert torch.equal(model.get_parameter(name), mean)


def test_adapters_are_merged_too(tmp_path: Path) -> None:
    base = save("qwen2", tmp_path / "base")
    config = PolicyConfig(model=str(base), lora=True, lora_rank=4, dtype="bfloat16")
    swarm = Swarm(load_policy(config, RolloutsConfig(), lambda text: None))
    peers = [swarm.join() for _ in range(2)]
    weights, versions = swarm.gather(tmp_path)
    cohort = Cohort(swarm.policy, NodeConfig(policy=config), [], weights, versions=versions)
    merge(cohort, MergeRequest(tmp_path / "out", "task-arithmetic", 0.5, 0), swarm.said.append)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    for name in peers[0].weights:
        both = [weights[swarm.name(peer)][name] for peer in peers]
        assert both[0].dtype == torch.float32 and torch.equal(both[0], peers[0].weights[name].float())
        assert torch.allclose(model.get_parameter(name).float(), sum(both) / 2, rtol=0.02, atol=1e-3)


def test_the_table_shows_versions(capsys: pytest.CaptureFixture[str]) -> None:
    held = {"all": Held(8, 0.5, 0.75)}
    result = Merged("out", "uniform", 0.5, versions={"ann …12345678": 417}, questions=8, samples=4)
    result.runs, result.merged, result.mean = {"ann …12345678": held}, held, 0.5
    merging.print_result(result, Console(width=100))
    shown = capsys.readouterr().out
    assert "version" in shown and "rounds" not in shown and "ann …12345678" in shown and "417" in shown
    unchecked = {"all": Held(8, None, None, 0.375)}
    result.runs, result.merged, result.figure = {"ann …12345678": unchecked}, unchecked, "reward"
    merging.print_result(result, Console(width=100))
    shown = capsys.readouterr().out
    assert "mean reward" in shown and "0.375" in shown and "pass@" not in shown


def test_weights_are_on_disk_not_in_memory(policy: Policy, tmp_path: Path) -> None:
    start = policy.trainable_state()
    fragments = Fragments(start, 2)
    values = [torch.arange(float(n)) for n in fragments.sizes]
    state = mapped(tmp_path / "w", values, fragments, start)
    assert (tmp_path / "w").stat().st_size == 4 * sum(fragments.sizes)
    again = Fragments(state, 2)
    assert all(torch.equal(again.gather(i), values[i]) for i in range(2))
    assert all(state[name].shape == tensor.shape for name, tensor in start.items())


def test_a_busy_member_is_asked_again(swarm: Swarm, tmp_path: Path) -> None:
    peers = [swarm.join() for _ in range(3)]
    swarm.look()
    held = peers[0].late_join.accept("somebody", encode_head(_head(peers[0])), 0)
    swarm.clock.call_at(swarm.clock.now() + 32.0, held.done, None)
    weights, _ = swarm.gather(tmp_path)
    assert len(weights) == 3 and not swarm.left_out()
    assert peers[0].transport.rejected["busy"] >= 2


def test_it_ends_in_time(swarm: Swarm, tmp_path: Path) -> None:
    quick = [swarm.join() for _ in range(2)]
    slow = swarm.join(link=LinkModel(latency_s=0.02, bandwidth_bytes_s=30_000.0))
    busy = swarm.join()
    refuses(busy.transport, "busy")
    began = swarm.clock.now()
    weights, _ = swarm.gather(tmp_path, timeout_s=PACE.grace_s)
    assert swarm.clock.now() < began + 20 + PACE.grace_s + 1
    assert set(weights) == {swarm.name(peer) for peer in quick}
    left_out = " ".join(swarm.left_out())
    assert f"{swarm.name(slow)} (unreachable" in left_out and f"{swarm.name(busy)} (busy" in left_out
    assert slow.transport.bytes_out > 500_000


# --------------------------------------------------------------------- it goes wrong


def _head(peer: Peer, **changes: Any) -> WeightsHead:
    place = peer.late_join.averager.place
    return WeightsHead(
        **{"protocol": PROTOCOL_VERSION, "swarm": SWARM, "cohort": place.cohort, "version": 100} | changes
    )


def gives(liar: Peer, body: bytes, **changes: Any) -> None:
    """Have it answer with this."""
    answers(liar.transport, _head(liar, **changes), body)


def whole(peer: Peer) -> int:
    return body_bytes(peer.late_join.averager)


def not_a_number(liar: Peer) -> None:
    gives(liar, with_a_nan(whole(liar)))


def too_much(liar: Peer) -> None:
    gives(liar, bytes(whole(liar) + 4))


def older_than_its_card(liar: Peer) -> None:
    gives(liar, bytes(whole(liar)), version=99)


def never_trained(liar: Peer) -> None:
    liar.late_join.version = 0


def says_no(liar: Peer) -> None:
    refuses(liar.transport, "no", "[/mine]")


def far_away(liar: Peer) -> None:
    for tensor in liar.weights.values():
        tensor.mul_(1e3)


LIES = {
    not_a_number: "values",
    too_much: "size",
    older_than_its_card: "claim",
    never_trained: "early",
    says_no: "no [/mine]",
    far_away: "from the start, where",
}


@pytest.mark.parametrize(("lie", "why"), LIES.items(), ids=[lie.__name__ for lie in LIES])
def test_members_with_useless_weights_are_left_out(swarm: Swarm, tmp_path: Path, lie: Any, why: str) -> None:
    peers = [swarm.join() for _ in range(4)]
    lie(peers[1])
    weights, versions = swarm.gather(tmp_path)
    assert set(weights) == set(versions) == {swarm.name(peer) for peer in (peers[0], *peers[2:])}
    [left_out] = swarm.left_out()
    assert left_out.startswith(f"{swarm.name(peers[1])} (") and why in left_out


def test_a_strangers_words_are_shown_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    note("left out: a (no [/mine])")
    assert capsys.readouterr().err == "left out: a (no [/mine])\n"


def test_a_peer_that_dies_is_left_out(swarm: Swarm, tmp_path: Path) -> None:
    slow = LinkModel(latency_s=0.02, bandwidth_bytes_s=200_000.0)
    peers = [swarm.join(link=slow) for _ in range(3)]
    swarm.look()
    swarm.clock.call_at(swarm.clock.now() + 23.0, partial(swarm.network.kill, peers[2].id))
    name = swarm.name(peers[2])
    weights, _ = swarm.gather(tmp_path)
    assert swarm.network.faults["cut"] and len(weights) == 2 and name not in weights
    assert [sentence.split(" (")[0] for sentence in swarm.left_out()] == [name]


def test_one_is_no_merge(swarm: Swarm, tmp_path: Path) -> None:
    swarm.join(), never_trained(swarm.join())
    with pytest.raises(UserError, match="two members at least; 1 of 2 gave them"):
        swarm.gather(tmp_path)


def test_of_two_members_none_is_called_astray(policy: Policy) -> None:
    start = policy.trainable_state()
    near = {name: tensor + 1e-3 for name, tensor in start.items()}
    far = {name: tensor + 1.0 for name, tensor in start.items()}
    assert astray({"near": near, "far": far}, start) == {}
    assert list(astray({"near": near, "far": far, "too": near}, start)) == ["far"]
    assert astray({"a": start, "b": start, "far": far}, start) == {}, "those that have not moved are no measure"


# --------------------------------------------------------------------- who is there


class Arrivals(FakeTransport):
    """Members that turn up at some second of a clock that goes on when it is looked at: second -> their cohort."""

    def __init__(self, cohorts: dict[float, str]) -> None:
        super().__init__()
        self.now = 0.0
        self.coming = [(at, peer_id(int(at)), replace(card(), cohort=cohort)) for at, cohort in cohorts.items()]
        self.said: list[str] = []

    def clock(self) -> float:
        self.now += 0.1
        return self.now

    def members(self) -> dict[str, PeerCard]:
        return {peer: card for at, peer, card in self.coming if at <= self.now}

    def look(self, timeout_s: float, wanted: str | None = None) -> dict[str, dict[str, PeerCard]]:
        return look_for_cohorts(self, SWARM, wanted, timeout_s, self.said.append, self.clock, tick_s=0.0)


def test_members_that_turn_up_late_are_waited_for() -> None:
    there = Arrivals({45.0: "", 80.0: "a", 81.0: "a", 90.0: "b"})
    assert {cohort: len(members) for cohort, members in there.look(200.0).items()} == {"a": 2}
    assert 84.0 < there.now < 90.0
    nobody = "no member of swarm aaaaaaaaaaaaaaaa has answered: still looking"
    somebody = "1 members of swarm aaaaaaaaaaaaaaaa, of whom none average weights: still looking"
    assert there.said == [nobody, nobody, somebody]


def test_a_cohort_that_is_wanted_is_waited_for() -> None:
    assert Arrivals({1.0: "a", 2.0: "a", 30.0: "b", 31.0: "b"}).look(200.0, "b").keys() == {"a", "b"}
    lonely = Arrivals({1.0: "a", 2.0: "a", 30.0: "b"})
    assert lonely.look(200.0, "b").keys() == {"a", "b"}  # what can be said of it is said afterwards
    assert 30.0 + QUIET_S < lonely.now < 40.0 + QUIET_S


def test_that_nobody_answers_is_not_that_nobody_averages() -> None:
    empty, other = Arrivals({}), Arrivals({1.0: "", 2.0: ""})
    with pytest.raises(UserError, match="no member of swarm aaaaaaaaaaaaaaaa has answered: `swarm-node status`"):
        empty.look(150.0)
    assert 150.0 <= empty.now < 160.0
    with pytest.raises(UserError, match="2 members of swarm aaaaaaaaaaaaaaaa, of whom none average weights"):
        other.look(150.0)
    assert QUIET_S < other.now < 80.0
    with pytest.raises(UserError, match="2 members"):
        Arrivals({1.0: "", 2.0: ""}).look(10.0)


# --------------------------------------------------------------------- which cohort


def test_the_largest_cohort_of_this_model_is_chosen(swarm: Swarm, policy: Policy) -> None:
    for config in [NOLOCO] * 3 + [AveragingConfig(method="diloco")] * 2:
        swarm.join(config=config)
    for _ in range(4):
        swarm.join(cohort="d" * 16)
    swarm.join(cohort="")
    found = swarm.look()
    assert [len(members) for members in found.values()] == [4, 3, 2]
    strangers, pairs, groups = found
    cohort, fragments = choose(found, policy, SWARM, None, swarm.said.append)
    assert cohort == pairs and len(fragments.sizes) == 1
    assert swarm.said == [
        f"cohort {pairs}, 3 members, noloco",
        f"there are others, which --cohort chooses: {strangers} (4 members, not of this model), "
        f"{groups} (2 members, also of this model)",
    ]
    assert choose(found, policy, SWARM, groups, swarm.said.append)[0] == groups
    with pytest.raises(UserError, match="no cohort ffff in this swarm, but dddd"):
        choose(found, policy, SWARM, "ffff", print)
    with pytest.raises(UserError, match="cohort dddd.* did not begin with starter: other weights, or other LoRA"):
        choose(found, policy, SWARM, strangers, print)


def test_it_says_what_differs(swarm: Swarm, policy: Policy, tmp_path: Path) -> None:
    for _ in range(2):
        swarm.join()
    found = swarm.look()
    other = load_policy(PolicyConfig(model=str(save("qwen2", tmp_path / "q"))), RolloutsConfig(), lambda text: None)
    with pytest.raises(UserError, match="its members train a llama, this is a qwen2"):
        choose(found, other, SWARM, None, print)
    adapter = load_policy(PolicyConfig(lora=True), RolloutsConfig(), lambda text: None)
    with pytest.raises(UserError, match="other LoRA settings"):
        choose(found, adapter, SWARM, None, print)
    with pytest.raises(UserError, match="did not begin with starter"):
        choose(found, policy, "b" * 64, None, print)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 7},
        {"gamma": 0.4},
        {"beta": 0.5, "gamma": 0.5, "codec": "4bit", "every": 3},
        *(
            {"method": method, "codec": codec}
            for method in ("diloco", "per_step")
            for codec in ("float32", "8bit", "4bit")
        ),
    ],
    ids=str,
)
def test_a_cohorts_settings_are_found_by_id(policy: Policy, options: dict[str, Any]) -> None:
    config = AveragingConfig(**{"method": "noloco", **options})
    tensors: dict[str, Tensor] = policy.trainable_state()
    cohort = cohort_id(Fragments(tensors, config.fragments).layout, policy.start, SWARM, config)
    fragments, method = cohorts_of(tensors, policy.start, SWARM)[cohort]
    assert (len(fragments.sizes), method) == (config.fragments, config.method)


def test_members_are_left_out_by_name_or_id(swarm: Swarm) -> None:
    peers = [swarm.join() for _ in range(3)]
    [members] = swarm.look().values()
    names = [members[peer.id].name for peer in peers]
    assert set(sources(members, [names[0], peers[1].id[-8:]], print)) == {peers[2].id}
    for nobody in ("nobody", peers[1].id[-7:]):
        with pytest.raises(UserError, match=f"nobody in this cohort is called {nobody}"):
            sources(members, [nobody], print)


def test_of_very_many_some_are_asked() -> None:
    card = PeerCard(PROTOCOL_VERSION, SWARM, 0.0, "x", ["trainer"], cohort="c" * 16)
    members = {f"peer{i:08}": card for i in range(MAX_SOURCES + 9)}
    said: list[str] = []
    chosen = sources(members, [], said.append)
    assert len(chosen) == MAX_SOURCES and chosen.keys() < members.keys() and said
    assert sources(members, [], said.append).keys() != chosen.keys()


# --------------------------------------------------------------------- the command line


def test_what_a_swarm_is(tmp_path: Path) -> None:
    (tmp_path / "swarm.toml").touch()
    assert is_swarm("swarm://abc") and is_swarm("https://example.org/s.toml") and is_swarm(str(tmp_path / "swarm.toml"))
    assert not is_swarm(str(tmp_path)) and not is_swarm("runs/a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swarm.toml", "runs/a"], "a merge is of one swarm, or of run directories"),
        (["swarm.toml"], "swarm.toml is no swarm that can be joined"),
        (["swarm.toml", "--scale", "0.5"], "--scale is a number for --method task-arithmetic"),
        (["runs/a", "runs/b", "--cohort", "c" * 16], "--cohort, --without, --model and --set are for merging a swarm"),
        (["runs/a", "runs/b", "--set", "policy.lora=true"], "are for merging a swarm"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_are_said_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    Path("swarm.toml").write_text("")
    result = CliRunner().invoke(app, ["merge", *arguments, "--out", "out", "--json"])
    assert result.exit_code == 2 and message in json.loads(result.stdout)["error"]
    assert not Path("out").exists()
