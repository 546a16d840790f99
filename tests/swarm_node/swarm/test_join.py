"""What is said before a node joins, and faults that end it."""

from __future__ import annotations

import textwrap
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import swarm_node
from swarm_node.config import (
    AveragingConfig,
    NetworkConfig,
    NodeConfig,
    PipelineConfig,
    RewardsConfig,
    SharingConfig,
)
from swarm_node.config.own import dump_own
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.introduction import DECIDE_S
from swarm_node.swarm.join import join_swarm, say_what_leaves
from swarm_node.swarm.links import Swarm, keep
from swarm_node.swarm.manifests import render
from swarm_node.tasks.one_turn import FORM_PROMPTS
from swarm_protocol.codec import sign_card
from swarm_protocol.first_cards import CARDS_METHOD, write_cards
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import MANIFEST_METHOD, Manifest, ManifestModel, ManifestTask
from tests.support.fake_transport import FakeTransport, address, card, peer_id
from tests.support.manifests import PLAIN


def test_an_identity_that_cannot_be_read_is_explained(run: RunDir) -> None:
    run.identity.mkdir()
    with ExitStack() as stack, pytest.raises(UserError, match="run/identity.key is not an Ed25519 identity file"):
        join_swarm(Swarm(PLAIN.swarm_id, PLAIN, []), NodeConfig(), run, print, stack)


def test_what_becomes_public_is_said_once_before(monkeypatch: pytest.MonkeyPatch, run: RunDir) -> None:
    class Dialled(Exception):
        pass

    def dialled(*arguments: Any) -> None:
        raise Dialled

    def enter(swarm: Swarm, config: NodeConfig | None = None, into: RunDir = run) -> list[str]:
        said: list[str] = []
        with ExitStack() as stack, pytest.raises(Dialled):
            join_swarm(swarm, config or NodeConfig(), into, said.append, stack)
        return [sentence for sentence in said if sentence.startswith("first time in this swarm")]

    monkeypatch.setattr(
        "swarm_node.swarm.join.visitor", dialled
    )  # the first to show itself, if the manifest is not known
    monkeypatch.setattr("swarm_node.swarm.join.open_transport", dialled)
    for _ in range(2):  # until something of this machine has left
        (told,) = enter(Swarm(PLAIN.swarm_id, None, [address(1)]))
        assert "IP address" in told and "every answer that your model writes" in told
        assert told.endswith("\nPress Ctrl-C now if you do not want this (a terminal waits 5 seconds).")
        assert f"kept in {run.path}" in told and "This node relays nothing (--relay)" in told
        assert 3 <= told.count("\n  - ") <= 7 and max(map(len, told.splitlines())) < 80
    assert len(enter(Swarm(PLAIN.swarm_id, PLAIN, []))) == 1
    assert enter(Swarm(PLAIN.swarm_id, PLAIN, [])) == []
    relays = NodeConfig(network=NetworkConfig(serve_relay=True))
    (told,) = enter(Swarm("ab" * 32, None, [address(1)]), relays)
    assert "Others may connect through this node (--relay)" in told


def test_a_swarm_within_one_machine_makes_nothing_public(run: RunDir) -> None:
    said: list[str] = []
    here = NodeConfig(network=NetworkConfig(listen="127.0.0.1"))
    say_what_leaves(Swarm(PLAIN.swarm_id, PLAIN, []), here, run, said.append)
    assert said == []
    say_what_leaves(Swarm(PLAIN.swarm_id, PLAIN, [], named="demo.toml"), here, run, said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("sections", "weights"),
    [
        ({}, True),
        ({"averaging": AveragingConfig(method="none")}, False),
        ({"pipeline": PipelineConfig(stages=2, crew="home")}, True),
    ],
)
def test_all_that_becomes_public_is_named(run: RunDir, sections: dict[str, Any], weights: bool) -> None:
    def told(manifest: Manifest | None, trains: bool = True, give: bool = True) -> str:
        said: list[str] = []
        config = NodeConfig(**sections, sharing=SharingConfig(give_model=give))
        say_what_leaves(Swarm(PLAIN.swarm_id, manifest, []), config, run, said.append, trains)
        return said[0]

    assert "the node's name, its speed and its kind of model" in told(PLAIN)
    assert ("the weights that it trains" in told(PLAIN)) == weights
    assert ("(off: --no-averaging)" in told(PLAIN)) == (weights and "pipeline" not in sections)
    bootstrap = told(PLAIN, trains=False)
    assert "IP address and the node's name\n" in bootstrap and "weights" not in bootstrap and "speed" not in bootstrap
    with_model = replace(PLAIN, model=ManifestModel("tiny", "ab" * 32, 1000))
    given = "the files of the swarm's model"
    assert f"{given}\n    (off: --set sharing.give_model=false)" in told(with_model)
    assert f"{given}\n    (off: --set sharing.give_model=false)" in told(with_model, trains=False)
    assert f"{given}, if it has one" in told(None)
    assert given not in told(with_model, give=False) and given not in told(PLAIN)
    assert "question files, if it has any" in told(None) and "question files" not in told(PLAIN)


def test_the_page_about_swarms_shows_this_notice() -> None:
    said: list[str] = []
    say_what_leaves(Swarm(PLAIN.swarm_id, None, [address(1)]), NodeConfig(), RunDir("runs/alice"), said.append)
    page = Path(swarm_node.__file__).parents[1] / "docs" / "swarm.md"
    assert textwrap.indent(said[0], "    ") in page.read_text()


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"network": {"dial_only": True}}, "It listens nowhere (--dial-only)."),
        ({"network": {"listen": "127.0.0.1"}}, "It listens on this machine alone"),
        ({"network": {"listen": "::1", "port": 0}}, "It listens at ::1 on two TCP ports, open to others"),
        ({"resources": {"preset": "gentle"}}, "It takes up to half of the cores at lowest priority.\n"),
        ({"resources": {"preset": "normal"}}, "It takes up to all cores at lower priority\n(--gentle: half"),
        ({}, "No battery or desktop found, so it takes up to all cores at usual priority\n(--gentle"),
        ({"resources": {"max_cpu": 25.0}}, "It takes up to 25 % of the cores at usual priority.\n"),
    ],
)
def test_ports_and_processor_are_named(run: RunDir, sections: dict[str, Any], sentence: str) -> None:
    said: list[str] = []
    swarm = Swarm(PLAIN.swarm_id, PLAIN, [], named="demo.toml")
    say_what_leaves(swarm, NodeConfig.model_validate(sections), run, said.append)
    assert sentence in said[0] and max(map(len, said[0].splitlines())) < 80


@pytest.mark.parametrize(("declare", "trains"), [(True, True), (False, True), (True, False)])
def test_what_is_declared_is_named_unless_off(run: RunDir, declare: bool, trains: bool) -> None:
    said: list[str] = []
    config = NodeConfig(sharing=SharingConfig(declare=declare))
    say_what_leaves(Swarm(PLAIN.swarm_id, PLAIN, []), config, run, said.append, trains)
    assert ("(off: --set sharing.declare=false)" in said[0]) == (declare and trains)


@pytest.mark.parametrize(("declare", "trains"), [(True, True), (False, True), (True, False)])
def test_a_run_of_an_earlier_version_hears_of_declaring_once(run: RunDir, declare: bool, trains: bool) -> None:
    said: list[str] = []
    config = NodeConfig(sharing=SharingConfig(declare=declare))
    keep(PLAIN, run, "")
    run.config.write_text("rounds = 60\n[sharing]\ngive_model = true\n")
    swarm = Swarm(PLAIN.swarm_id, PLAIN, [], named="demo.toml")
    assert not say_what_leaves(swarm, config, run, said.append, trains)
    assert ["(off: --set sharing.declare=false)" in line for line in said] == [True] * (declare and trains)
    run.config.write_text(dump_own(config, config))
    assert not say_what_leaves(swarm, config, run, said.append, trains)
    assert len(said) == (declare and trains)


def test_members_are_met_with_the_manifest(monkeypatch: pytest.MonkeyPatch, run: RunDir) -> None:
    """Whole cards: where they gossip as well."""
    hub, transport = {MANIFEST_METHOD: lambda caller, payload: render(PLAIN)}, FakeTransport()
    theirs = replace(card(), swarm=PLAIN.swarm_id, gossip=[address(3)], gossip_id=peer_id(3))
    answer = write_cards([sign_card(theirs, Identity.generate(bytes([2] * 32)))])
    visit = FakeTransport({peer_id(1): hub | {CARDS_METHOD: lambda caller, payload: answer}})
    monkeypatch.setattr("swarm_node.swarm.join.visitor", lambda *arguments: nullcontext(visit))
    monkeypatch.setattr("swarm_node.swarm.join.open_transport", lambda *arguments: transport)
    with ExitStack() as stack:
        join_swarm(Swarm(PLAIN.swarm_id, None, [address(1)]), NodeConfig(), run, lambda line: None, stack)
    assert transport.members()[peer_id(2)] == theirs


@pytest.mark.parametrize("own", [{}, {"answer": "boxed", "partial": True}])
def test_a_member_judges_by_its_swarms_form(monkeypatch: pytest.MonkeyPatch, run: RunDir, own: dict[str, Any]) -> None:
    monkeypatch.setattr("swarm_node.swarm.join.open_transport", lambda *arguments: FakeTransport())
    manifest = Manifest(name="sums", tasks=[ManifestTask(env="small/gcd")], answer="tags")
    config = NodeConfig.model_validate({"rewards": own})
    with ExitStack() as stack:
        joined = join_swarm(Swarm(manifest.swarm_id, manifest, []), config, run, lambda line: None, stack)
    (task,) = joined.tasks.held_out(1)
    texts = [form.format(task.answer) for form in ("{}", "<answer>{}</answer>", r"\boxed{{{}}}")]
    assert [score.reward for score in joined.tasks.score([task] * 3, [""] * 3, texts)] == [0, 1, 0]
    told = joined.of_a_member(config)
    assert told.rewards == RewardsConfig.model_validate(own | {"answer": "tags"})
    assert told.policy.system_prompt.endswith(FORM_PROMPTS["tags"])


@pytest.mark.parametrize(("terminal", "waits"), [(True, [DECIDE_S]), (False, [])])
def test_a_newcomer_at_a_terminal_has_time_to_refuse(
    monkeypatch: pytest.MonkeyPatch, run: RunDir, terminal: bool, waits: list[float]
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr("swarm_node.swarm.join.time", clock)
    screen = SimpleNamespace(isatty=lambda: terminal)
    monkeypatch.setattr("swarm_node.swarm.join.sys", SimpleNamespace(stdin=screen, stdout=screen))
    monkeypatch.setattr("swarm_node.swarm.join.open_transport", lambda *arguments: FakeTransport())
    swarm = Swarm(PLAIN.swarm_id, PLAIN, [], named="demo.toml")
    for _ in range(2):  # the second time it is no newcomer
        with ExitStack() as stack:
            join_swarm(swarm, NodeConfig(), run, lambda line: None, stack)
    assert slept == waits
