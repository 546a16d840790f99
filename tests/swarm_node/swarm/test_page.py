"""The page of a swarm: what it shows of members, and how it comes from the network into a file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from swarm_node.config import NetworkConfig
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm import looking
from swarm_node.swarm.declared import kinds_of
from swarm_node.swarm.looking import looked_at
from swarm_node.swarm.manifests import render
from swarm_node.swarm.network import serve_swarm
from swarm_node.swarm.page import MAX_LISTED, page_directory, page_of
from swarm_protocol.identity import Identity
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock
from tests.support.fake_transport import address
from tests.support.manifests import PLAIN
from tests.support.waiting import until
from tests.support.wire import CARD, DECLARED

SAYING = replace(CARD, declared=DECLARED)


def test_a_page_names_members_and_no_address() -> None:
    page = page_of({"peer a": SAYING, "peer b": replace(CARD, name="bob", speed=9000.0)}, "swarm://link", {"gcd"})
    assert [row["name"] for row in page["rows"]] == ["bob", "kitchen-laptop"], "the fastest first"
    assert (page["members"], page["training"], page["declaring"]) == (2, 2, 1)
    assert page["tokens_per_s"] == CARD.speed + 9000
    assert [row["kind"] for row in page["kinds"]] == ["gcd"], "the other kind is none of this swarm"
    text = json.dumps(page)
    for hidden in ("203.0.113.7", "/ip4/", CARD.gossip_id, CARD.cohort):
        assert hidden not in text


def test_a_page_is_as_old_as_its_oldest_figures() -> None:
    old, boot = replace(CARD, created=50.0), replace(CARD, created=5.0, roles=["bootstrap"])
    assert page_of({"a": CARD, "b": old, "c": boot}, "", None)["as_of"] == 50.0
    assert page_of({"a": CARD}, "", None)["as_of"] <= time.time(), "its clock is ahead"
    assert page_of({"c": boot}, "", None)["as_of"] is None


def test_a_page_lists_a_bounded_number_of_members() -> None:
    page = page_of({f"peer {i}": CARD for i in range(MAX_LISTED + 7)}, "", None)
    assert len(page["rows"]) == MAX_LISTED and page["members"] == MAX_LISTED + 7


@pytest.mark.parametrize(
    ("name", "folder"), [("sums", "sums"), ("..", "swarm"), (".hidden", "hidden"), (". .", "swarm")]
)
def test_a_swarm_does_not_choose_another_directory(name: str, folder: str) -> None:
    assert page_directory(Path("pages"), name) == Path("pages") / folder


def test_a_swarm_is_looked_at_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a link: the manifest comes from a member, and tells which kinds of task there are."""
    clock = VirtualClock(1_800_000_000.0)
    network = MemoryNetwork(clock)
    member = network.join(Identity.generate(), PLAIN.swarm_id)
    serve_swarm(member, PLAIN, {})
    member.announce(replace(SAYING, swarm=PLAIN.swarm_id, created=clock.now()))
    visitor = network.join(Identity.generate(), PLAIN.swarm_id, bootstrap=member.addresses)
    clock.run_until(clock.now() + 30.0)

    @contextmanager
    def visit(*arguments: object) -> Iterator[Any]:
        yield visitor

    monkeypatch.setattr(looking, "visitor", visit)
    monkeypatch.setattr(looking, "LOOK_S", 0.01)
    monkeypatch.setattr(visitor, "request", lambda *arguments, **more: render(PLAIN))  # no thread moves the clock
    link = f"swarm://{PLAIN.swarm_id}?peer={address(1)}"
    with looked_at(link, NetworkConfig(), tmp_path, lambda line: None) as path:
        run = RunDir(path)
        assert run.in_use

        def seen() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(run.status.read_bytes())
            return found if (found["page"] or {}).get("members") else {}

        status = until(seen, 20.0)
    assert status["role"] == "page" and status["swarm_name"] == PLAIN.name
    assert status["page"]["link"] == link, "no address but those of the link"
    assert [row["name"] for row in status["page"]["rows"]] == [CARD.name]
    assert {row["kind"] for row in status["page"]["kinds"]} <= kinds_of(PLAIN)
    assert not run.in_use


def test_strangers_do_not_read_why_no_network_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def visit(*arguments: object) -> Any:
        raise UserError("no port of 203.0.113.7 is free")

    said: list[str] = []
    monkeypatch.setattr(looking, "visitor", visit)
    with looked_at(f"swarm://{PLAIN.swarm_id}?peer={address(1)}", NetworkConfig(), tmp_path, said.append) as path:
        status = RunDir(path).status
        until(lambda: json.loads(status.read_bytes()).get("problem") == looking.NO_NETWORK, 20.0)
        assert "no port of 203.0.113.7 is free" in said[0]


def test_a_link_without_an_address_cannot_be_looked_at(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="no address to ask"),
        looked_at(f"swarm://{PLAIN.swarm_id}", NetworkConfig(), tmp_path, print),
    ):
        pass
