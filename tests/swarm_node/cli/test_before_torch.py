"""What a start does before torch is loaded, in processes whose torch never is."""

from __future__ import annotations

import os
import re
import signal
from http.client import HTTPConnection
from pathlib import Path

import pytest

from swarm_node.errors import TEMPORARY
from tests.support.ports import free_port
from tests.support.processes import make_manifest, nodes

LOADING = "torch is being loaded"
FRESH = ("env",)  # a process of its own, which has not loaded torch yet


@pytest.fixture(autouse=True)
def endless_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python find modules beside the real ones: a torch that waits at a pipe, and a driver that is not there."""
    os.mkfifo(tmp_path / "pipe")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text(f"print({LOADING!r}, flush=True)\nopen({str(tmp_path / 'pipe')!r}).read()\n")
    (modules / "s3fs.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(modules), os.environ.get("PYTHONPATH")])))


def get(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize("command", ["local", "join"])
def test_the_port_opens_before_torch_is_loaded(command: str, tmp_path: Path) -> None:
    swarm, port = [str(make_manifest(tmp_path))] if command == "join" else [], free_port()
    with nodes() as start:
        node = start(command, *swarm, "--health-port", str(port), run_dir=tmp_path / "run", prefix=FRESH)
        node.until_says(LOADING)
        code, said = get(port, "/livez")
        assert code == 200 and said.startswith("starting for ")
        assert get(port, "/healthz")[0] == 503
        code, figures = get(port, "/metrics")
        assert code == 200 and "swarm_node_training 0.0" in figures
        [found] = re.findall('swarm_node_info{name="run",role="trainer",swarm="(.*)",version=".*"} 1.0', figures)
        assert len(found) == (64 if swarm else 0)
        assert node.stop(signal.SIGTERM) == 0
    assert not (tmp_path / "run").exists(), "a start that had not begun leaves nothing"


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("file:///nowhere/copies", TEMPORARY, "there is no such folder; mount the share"),
        ("s3://bucket/swarm", 2, "--checkpoint-to s3://bucket/swarm needs a package"),
    ],
)
def test_copies_that_cannot_be_are_refused_before_torch_is_loaded(
    url: str, code: int, words: str, tmp_path: Path
) -> None:
    with nodes() as start:
        node = start("local", "--checkpoint-to", url, run_dir=tmp_path / "run", prefix=FRESH)
        assert node.ended() == code
        assert words in node.output and LOADING not in node.output
    assert not (tmp_path / "run").exists()
