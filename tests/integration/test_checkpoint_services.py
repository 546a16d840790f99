"""Copies of checkpoints with S3, Google Cloud Storage and Azure Blob Storage, each played by a local stand-in.

    pip install 'swarm-node[s3,gcs,azure]' 'moto[server]' gcp-storage-emulator; npm install azurite
    PATH=$PWD/node_modules/.bin:$PATH python -m pytest tests/integration/test_checkpoint_services.py

What is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.processes import LOCAL, NodeProcess, Start, make_manifest
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of the account that azurite has; Microsoft publishes it."""
DRIVERS = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "gcp_storage_emulator"), "az": ("adlfs",)}


class Service:
    """A stand-in for a cloud's storage, with one bucket, empty."""

    def __init__(self, scheme: str, port: int) -> None:
        self.url = f"{scheme}://bucket/swarm"
        address = f"http://127.0.0.1:{port}"
        python = [sys.executable, "-c"]
        if scheme == "s3":
            command = [*python, "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
            self.env = {"AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
            self.env |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        elif scheme == "gs":
            run = "from gcp_storage_emulator.__main__ import main; main()"
            bucket = ["--in-memory", "--default-bucket=bucket"]
            command = [*python, run, "start", "--host=127.0.0.1", f"--port={port}", *bucket]
            self.env = {"STORAGE_EMULATOR_HOST": address, "FSSPEC_GS_TOKEN": "anon"}
        else:
            options = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence"]
            command = ["azurite-blob", *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
            account = f"AccountName=devstoreaccount1;AccountKey={AZURE_KEY};BlobEndpoint={address}/devstoreaccount1;"
            self.env = {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}"}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._port = port

    def make_bucket(self, scheme: str) -> None:
        until(lambda: _answers(self._port))
        if scheme == "s3":
            import boto3

            boto3.client("s3").create_bucket(Bucket="bucket")
        elif scheme == "az":
            from azure.storage.blob import BlobServiceClient

            BlobServiceClient.from_connection_string(*self.env.values()).create_container("bucket")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=list(DRIVERS))
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    missing = [name for name in DRIVERS[request.param] if importlib.util.find_spec(name) is None]
    missing += [] if request.param != "az" or shutil.which("azurite-blob") else ["azurite"]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    service = Service(request.param, free_port())
    try:
        for name, value in service.env.items():
            monkeypatch.setenv(name, value)
        service.make_bucket(request.param)
        yield service
    finally:
        service.process.kill()
        service.process.wait()


def test_a_lost_fleet_goes_on_from_its_copies(start: Start, service: Service, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path)
    names = "alice", "bob"

    def fleet(era: str) -> list[NodeProcess]:
        (tmp_path / era).mkdir()
        link = start("bootstrap", str(manifest), *LOCAL, run_dir=tmp_path / era / "hub", sets=()).link()
        options = "--checkpoint-to", service.url
        return [start("join", link, "--name", name, *options, run_dir=tmp_path / era / name) for name in names]

    before = fleet("first")
    there = listing(service)
    for node, name in zip(before, names, strict=True):
        # the third takes the place of the first
        node.until(lambda name=name: whole(there(), name) and min(whole(there(), name)) > 2)
    for node in before:
        node.stop(signal.SIGKILL)
    left = {name: whole(there(), name) for name in names}
    shutil.rmtree(tmp_path / "first", ignore_errors=True)  # with its machines, their disks have gone
    for node, name in zip(fleet("second"), names, strict=True):
        line = rf"continues from the checkpoints of {name}-\w{{8}} at \S+: checkpoints/round-0*([1-9][0-9]*)"
        found = node.until(lambda node=node, line=line: re.search(line, node.output))
        assert int(found[1]) == max(left[name])
        node.until(lambda node=node, found=found: node.rounds > int(found[1]))
        assert "checkpoints do not get to" not in node.output and "old copies stay" not in node.output


def test_a_service_that_hangs_holds_up_nobody(start: Start, service: Service, tmp_path: Path) -> None:
    node = start("local", "--checkpoint-to", service.url, run_dir=tmp_path / "run")
    there = listing(service)
    node.until(lambda: whole(there(), "run"))
    service.process.send_signal(signal.SIGSTOP)
    try:
        node.until_rounds(5)
        assert node.stop(signal.SIGTERM) == 0, node.output
        again = start("local", "--checkpoint-to", service.url, run_dir=tmp_path / "new")
        code = again.ended()
    finally:
        service.process.send_signal(signal.SIGCONT)
    assert f"the last checkpoint is not at {service.url}; there: checkpoints/round-" in node.output
    newest = max(path.name for path in (tmp_path / "run" / "checkpoints").glob("round-*"))
    assert newest == f"round-{node.rounds:08}"
    assert code == 75, again.output
    assert "no answer within 60 s" in again.output and "Traceback" not in again.output


def listing(service: Service) -> Callable[[], list[str]]:
    """What is there, as others than the node see it."""
    import fsspec

    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

    def look() -> list[str]:
        fs, root = fsspec.core.url_to_fs(service.url, use_listings_cache=False, skip_instance_cache=True)
        try:
            return list(fs.find(root))
        except FileNotFoundError:
            return []

    return look


def whole(paths: list[str], name: str) -> list[int]:
    """Rounds of which all is there."""
    found = [re.search(rf"/{name}(-\w{{8}})?/checkpoints/round-(\d+)/SHA256SUMS$", path) for path in paths]
    return sorted(int(match[2]) for match in found if match)
