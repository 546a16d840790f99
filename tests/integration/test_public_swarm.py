"""A standing swarm as docs/public-swarm.md makes it: two bootstraps, of which one may be gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.processes import nodes
from tests.support.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]
PUBLIC = ROOT / "configs/public-swarm"


def test_one_bootstrap_of_two_is_enough(tmp_path: Path) -> None:
    ports = {"a": free_port(), "b": free_port()}
    command = tmp_path / "swarm-node"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m swarm_node "$@"\n')
    command.chmod(0o700)
    hosts = [f"127.0.0.1:{port}" for port in ports.values()]
    subprocess.run(
        [PUBLIC / "make-swarm", tmp_path / "made", *hosts, "--name", "commons", "--tasks", "small"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    manifest = str(tmp_path / "made/swarm.toml")
    with nodes() as start:
        bootstraps = {
            name: start(
                *("bootstrap", manifest, "--config", str(PUBLIC / "bootstrap.toml"), "--listen", "127.0.0.1"),
                *("--identity", str(tmp_path / "made" / name / "identity.key"), "--health-port", str(free_port())),
                *("--port", str(port), "--gossip-port", "0"),
                run_dir=tmp_path / name,
                sets=(),
            )
            for name, port in ports.items()
        }
        links = {name: each.link() for name, each in bootstraps.items()}
        assert all(f"tcp/{port}/" in link for link in links.values() for port in ports.values()), "both, in each link"
        first = start("join", manifest, "--name", "first", run_dir=tmp_path / "first")
        first.until(lambda: first.last("swarm/peers") >= 2 and first.rounds >= 2)
        assert bootstraps["a"].stop() == 0
        late = start("join", links["b"], "--name", "late", run_dir=tmp_path / "late")
        late.until(lambda: late.last("swarm/groups_received") > 0)
    assert not list(tmp_path.glob("[ab]/identity.key")), "keys stay where they were given"
