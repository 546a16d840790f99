"""Which swarm a path, an address or a link names, and the links that lead others to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from swarm_node.config import (
    NetworkConfig,
    NodeConfig,
)
from swarm_node.errors import UserError
from swarm_node.runtime.callbacks import Manner
from swarm_node.runtime.start import start
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm import links
from swarm_node.swarm.download import download
from swarm_node.swarm.links import Swarm, find_swarm, join_link, keep, living, reach_of, swarm_to_join
from swarm_node.swarm.manifests import render
from swarm_protocol.limits import MAX_MANIFEST_BYTES
from swarm_protocol.manifest import parse_link
from swarm_protocol.transports.ports import read_ports
from tests.support.fake_transport import address, card, peer_id
from tests.support.manifests import PLAIN


def test_path_address_and_link_name_one_swarm(run: RunDir, web: dict[str, Any]) -> None:
    Path("sums.toml").write_bytes(render(PLAIN))
    web["/sums.toml"] = render(PLAIN)
    by_path, by_url = find_swarm("sums.toml", run), find_swarm(f"{web['url']}/sums.toml", run)
    by_link = find_swarm(str(join_link(PLAIN.swarm_id, [address(2)], [])), run)
    assert by_path.id == by_url.id == by_link.id == PLAIN.swarm_id
    assert by_path.manifest == by_url.manifest == PLAIN
    assert by_link.manifest is None
    assert (by_path.peers, by_link.peers) == ([address(1)], [address(2)])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (None, "which swarm"),
        ("", "which swarm[?] Give a link, such as 'swarm://.*which `swarm-node bootstrap` and every member print"),
        (" ", "which swarm[?] Give a link"),
        ("no.toml", "no manifest no.toml"),
        (".", "cannot read the manifest"),
        ("bad.toml", "no swarm that can be joined"),
        ("huge.toml", "allowed are"),
        ("swarm://123", "no swarm that can be joined"),
        (f"swarm://{'0' * 64}?peer=/ip4/1.2.3.4/tcp/1", "no address of a peer"),
        ("http://example.org/sums.toml", "use https"),
        ("https://127.0.0.1:1/sums.toml", "cannot get"),
    ],
)
def test_what_is_no_swarm(run: RunDir, named: str | None, message: str) -> None:
    Path("bad.toml").write_text("name = 3\ntasks = []\n")
    Path("huge.toml").write_bytes(b"#" * (MAX_MANIFEST_BYTES + 1))
    with pytest.raises(UserError, match=message):
        find_swarm(named, run)


def test_a_restart_needs_nobody(run: RunDir) -> None:
    keep(PLAIN, run, "https://127.0.0.1:1/sums.toml")
    said: list[str] = []
    by_link = find_swarm(str(join_link(PLAIN.swarm_id, [address(2)], [])), run)
    assert by_link.manifest is not None
    assert by_link.id == by_link.manifest.swarm_id == PLAIN.swarm_id
    assert by_link.peers == [address(2), address(1)]
    assert find_swarm("https://127.0.0.1:1/sums.toml", run, said.append).manifest == PLAIN
    assert "going on with the swarm this run was in" in said[0]
    other = find_swarm(f"swarm://{'0' * 64}", run)
    assert other.manifest is None


@pytest.mark.parametrize("before", ["", "https://127.0.0.1:1/other.toml", "sums.toml", 'https://a"\n'])
def test_an_unreachable_address_opens_no_other_swarm(run: RunDir, before: str) -> None:
    keep(PLAIN, run, before)
    assert find_swarm(f"swarm://{PLAIN.swarm_id}", run).manifest == PLAIN  # whatever is written above it
    with pytest.raises(UserError, match="cannot get"):
        find_swarm("https://127.0.0.1:1/sums.toml", run)


def test_plain_http_addresses_are_never_resumed(run: RunDir) -> None:
    for named, message in (("http://example.org/sums.toml", "use https"), ("http://127.0.0.1:1/x.toml", "cannot get")):
        keep(PLAIN, run, named)
        with pytest.raises(UserError, match=message):
            find_swarm(named, run)


def test_a_link_copied_in_part_is_explained(run: RunDir) -> None:
    with pytest.raises(UserError, match="the id in this link has 63 characters instead of 64: copy the whole link"):
        find_swarm(f"swarm://{PLAIN.swarm_id[:-1]}?peer={address(1)}", run)
    with pytest.raises(UserError, match="and has no 'X'"):
        find_swarm(f"swarm://X{PLAIN.swarm_id[1:]}", run)


def test_a_manifest_that_leads_to_nobody_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sums.toml").write_bytes(render(replace(PLAIN, bootstrap=[])))
    Path("full.toml").write_bytes(render(PLAIN))
    config = NodeConfig(swarm="sums.toml", run_dir="run")
    swarm_to_join(config)
    assert "sums.toml names no other node, so this one begins alone" in capsys.readouterr().err
    swarm_to_join(config.model_copy(update={"network": NetworkConfig(bootstrap=[address(2)])}))
    swarm_to_join(config.model_copy(update={"swarm": "full.toml"}))
    cached = {"addresses": [address(3)], "seen": 1.0}
    run.peers.write_text(json.dumps([cached]))
    assert links.cached_addresses(run) == [address(3)]
    swarm_to_join(config)
    assert capsys.readouterr().err == ""


def test_a_damaged_copy_is_as_good_as_none(run: RunDir) -> None:
    keep(PLAIN, run)
    run.swarm.write_bytes(run.swarm.read_bytes()[:-9] + b"\xff")
    assert find_swarm(f"swarm://{PLAIN.swarm_id}", run).manifest is None


def test_a_pipe_is_as_good_as_no_copy(run: RunDir) -> None:
    for path in (run.swarm, run.peers, run.ports):
        os.mkfifo(path)
    assert links.kept_manifest(run) is None and links.cached_addresses(run) == [] and read_ports(run.ports) == {}
    assert links._joined_by(run) == ""


def test_a_swarm_is_found_before_directories_are_made(monkeypatch: pytest.MonkeyPatch, web: dict[str, Any]) -> None:
    class Entered(Exception):
        pass

    def enter(swarm: Swarm, *arguments: Any) -> None:
        assert swarm.manifest == PLAIN
        raise Entered

    requests: list[str] = []

    def counted(url: str, *arguments: Any) -> bytes:
        requests.append(url)
        assert not Path("run").exists()
        return download(url, *arguments)

    monkeypatch.setattr(links, "download", counted)
    monkeypatch.setattr("swarm_node.runtime.loop.join_swarm", enter)
    web["/sums.toml"] = render(PLAIN)
    with pytest.raises(Entered):
        config = NodeConfig(swarm=f"{web['url']}/sums.toml", run_dir="run")
        found = swarm_to_join(config)
        with RunDir.open(config.directory) as run:
            start(config, run, found, Manner())
    assert requests == [f"{web['url']}/sums.toml"]
    with pytest.raises(UserError, match="no manifest"):
        swarm_to_join(NodeConfig(swarm="mistyped.toml", run_dir="other"))
    with pytest.raises(UserError, match="names no peer"):
        swarm_to_join(NodeConfig(swarm=f"swarm://{'0' * 64}", run_dir="other"))
    assert not Path("other").exists()


def test_a_link_prefers_this_node_if_reachable() -> None:
    relayed = f"{address(1)}/p2p-circuit/p2p/{peer_id(0)}"
    link = parse_link(join_link(PLAIN.swarm_id, [relayed, address(0)], [address(1), address(0), address(2)]))
    assert link.swarm == PLAIN.swarm_id
    assert link.peers == [address(0), address(1), address(2), relayed]
    assert len(parse_link(join_link(PLAIN.swarm_id, [], [address(i) for i in range(20)])).peers) == 8


def test_links_name_a_few_reachable_members() -> None:
    relayed = f"{address(9)}/p2p-circuit/p2p/{peer_id(1)}"
    told = {1: [relayed, address(1)], 2: [], 3: [address(3), address(3, 31331)], 4: [address(4)], 5: [address(5)]}
    members = {peer_id(i): replace(card(), addresses=addresses) for i, addresses in told.items()}
    members[peer_id(4)] = replace(members[peer_id(4)], roles=["bootstrap"])
    assert living(members, [peer_id(8), peer_id(2), peer_id(3), peer_id(1)]) == [address(4), address(3), address(1)]
    assert living({peer_id(1): replace(card(), addresses=[relayed])}, []) == [relayed]
    assert len(living(members, [])) == 3 and living({}, [peer_id(1)]) == []


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (["ip4/192.168.1.7"], "only in this network"),
        (["ip4/127.0.0.1"], "only on this machine"),
        (["ip4/127.0.0.1", "ip4/10.0.0.3"], "only in this network"),
        (["ip4/192.168.1.7", "ip4/8.8.8.8"], ""),
        (["dns4/my.example.org"], ""),
        ([], ""),
    ],
)
def test_a_link_says_how_far_it_leads(hosts: list[str], says: str) -> None:
    link = join_link("0" * 64, [f"/{host}/tcp/31330/p2p/{peer_id(1)}" for host in hosts], [])
    assert says in reach_of(link) and bool(reach_of(link)) == bool(says)
