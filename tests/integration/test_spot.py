"""Machines that their cloud takes back: one of them after a notice, all of them at once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from swarm_node.storage.rundir import RunDir
from tests.support.cloud_metadata import PREEMPTED, metadata_service
from tests.support.ports import free_port
from tests.support.processes import LOCAL, QUICK, NodeProcess, Start, make_manifest
from tests.support.repository import PYTHONPATH, ROOT
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
AVERAGING = (*QUICK, "averaging.method=noloco", "averaging.every=1")


def bootstrap(start: Start, manifest: Path, directory: Path) -> str:
    return start("bootstrap", str(manifest), *LOCAL, run_dir=directory, sets=()).link()


def get(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError as error:
        return 0, str(error)
    finally:
        connection.close()


def test_a_node_leaves_after_a_notice(start: Start, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, "--averaging-period-s", "15")  # no next turn comes soon
    link, port = bootstrap(start, manifest, tmp_path / "hub"), free_port()
    with metadata_service("gcp") as cloud:
        cloud.answers = {PREEMPTED: (200, b"FALSE")}
        options = "--spot", "gcp", "--health-port", str(port)
        sets = (*AVERAGING, f"spot.endpoint={cloud.endpoint}")
        a = start("join", link, "--name", "alice", *options, run_dir=tmp_path / "a", sets=sets)
        b = start("join", link, "--name", "bob", run_dir=tmp_path / "b", sets=AVERAGING)
        for node in (a, b):
            node.until(lambda node=node: node.last("averaging/exchanges") > 0)
        assert get(port, "/healthz")[0] == 200
        a.until_rounds(2)
        assert re.search(r"^swarm_node_averaging_exchanges [1-9]", get(port, "/metrics")[1], re.MULTILINE)
        cloud.answers = {PREEMPTED: (200, b"TRUE")}
        assert a.ended() == 0, a.output[-2000:]
    assert "gcp gives 30 s of notice" in a.output
    assert "gcp takes this machine back in 30 s: leaving" in a.output
    assert "averaged a last time" in a.output
    b.until(lambda: b.last("averaging/exchanges") > 1)
    assert get(port, "/healthz")[0] == 0
    assert any((tmp_path / "a" / "checkpoints").glob(f"round-{a.rounds:08}*/SHA256SUMS"))
    b.until(lambda: b.last("swarm/trainers") == 0)
    b.until_rounds(3)


def test_the_drill_of_the_guide_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guide has people type, but for its port."""
    part = (ROOT / "docker/spot.md").read_text().partition("### A drill\n")[2].partition("\n## ")[0]
    begin, notice = (text.replace("31700", str(free_port())) for text in re.findall("```sh\n(.*?)```", part, re.DOTALL))
    command = tmp_path / "swarm-node"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m swarm_node "$@"\n')
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("SWARM_NODE_SET", " ".join(QUICK))
    run = RunDir(tmp_path / "runs/drill")
    with (tmp_path / "log").open("w") as log:
        pipe = subprocess.PIPE
        shell = subprocess.Popen(
            ["sh"], cwd=tmp_path, stdin=pipe, stdout=log, stderr=log, text=True, start_new_session=True
        )
        assert shell.stdin is not None
        try:
            shell.stdin.write(begin)
            shell.stdin.flush()
            until(lambda: run.has_rounds, PATIENCE_S, lambda: Path(log.name).read_text())
            shell.communicate(notice, timeout=PATIENCE_S)
        finally:
            with suppress(ProcessLookupError):  # all of it has ended
                os.killpg(shell.pid, signal.SIGKILL)
    said = Path(log.name).read_text()
    assert "gcp takes this machine back in 30 s: leaving" in said and "exit code 0" in said, said
    assert not run.in_use and any(run.checkpoints.glob("round-*/SHA256SUMS"))


def test_a_lost_fleet_goes_on_from_its_copies(start: Start, tmp_path: Path) -> None:
    manifest, away = make_manifest(tmp_path), tmp_path / "away"
    away.mkdir()

    def fleet(era: str) -> list[NodeProcess]:
        link = bootstrap(start, manifest, tmp_path / era / "hub")
        options = "--checkpoint-to", f"file://{away}"
        return [
            start("join", link, "--name", name, *options, run_dir=tmp_path / era / name) for name in ("alice", "bob")
        ]

    (tmp_path / "first").mkdir()
    before = fleet("first")
    for node, name in zip(before, ("alice", "bob"), strict=True):
        node.until(lambda name=name: any(away.glob(f"*/{name}-*/checkpoints/*/SHA256SUMS")))
    for node in before:
        node.stop(signal.SIGKILL)
    shutil.rmtree(tmp_path / "first", ignore_errors=True)  # with its machines, their disks have gone
    (tmp_path / "second").mkdir()
    for node, name in zip(fleet("second"), ("alice", "bob"), strict=True):
        line = rf"continues from the checkpoints of {name}-\w{{8}} at \S+: checkpoints/round-0*([1-9][0-9]*)"
        found = node.until(lambda node=node, line=line: re.search(line, node.output))
        node.until(lambda node=node, found=found: node.rounds > int(found[1]))
        assert f"at round {found[1]}" in node.output
