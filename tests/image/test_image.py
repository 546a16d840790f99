"""The image, built from docker/Dockerfile on a Debian that debootstrap makes, and run without a container engine.

    IMAGE_TEST=1 python -m pytest -s -m image tests/image      as root, with buildah and debootstrap; twenty minutes

IMAGE_TEST_OPTIONS are further options of the build (`--build-arg PIP_INDEX_URL=…`), IMAGE_TEST_FIGURES is a file for
what is measured: bytes of the image, seconds to the first round, seconds to leave.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("buildah", "debootstrap")
MOST_BYTES = 1.6e9
LINK = re.compile(r"^swarm://[0-9a-f]{64}\?peer=\S+$", re.MULTILINE)
pytestmark = [
    pytest.mark.image,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("IMAGE_TEST"), reason="builds an image: IMAGE_TEST=1"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {' and '.join(NEEDED)}"),
]
QUICK = {
    "SWARM_NODE_RUN_DIR": "/swarm/run",
    "SWARM_NODE_ROLLOUTS__GROUP_SIZE": "4",
    "SWARM_NODE_ROLLOUTS__MAX_NEW_TOKENS": "8",
    "SWARM_NODE_EVAL__QUESTIONS": "0",
    "SWARM_NODE_PACE_S": "0.2",
    "SWARM_NODE_LISTEN": "127.0.0.1",
    "SWARM_NODE_PORT": "0",
    "SWARM_NODE_GOSSIP_PORT": "0",
    "SWARM_NODE_SPOT": "off",
}


class Buildah:
    """The command, with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = ["buildah", "--root", str(folder / "root"), "--runroot", str(folder / "run")]

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([*self.command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()


class Container:
    """One process of the image, its run directory in a folder (volumes are not), its output in a file."""

    def __init__(self, buildah: Buildah, image: str, name: str, *command: str, **env: str) -> None:
        self.data = buildah.folder / name
        self.data.mkdir()
        os.chown(self.data, 1000, 1000)
        container = buildah("from", "--name", name, image)
        variables = {"SWARM_NODE_NAME": name, **QUICK, **env}
        options = [f"--env={key}={value}" for key, value in variables.items()]
        run = ["run", "--isolation", "chroot", "--volume", f"{self.data}:/swarm", *options, container, "--", *command]
        self.file = (buildah.folder / f"{name}.log").open("w+")
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*buildah.command, *run], stdout=self.file, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def output(self) -> str:
        return Path(self.file.name).read_text()

    @property
    def rounds(self) -> int:
        path = self.data / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def until(self, what: Callable[[], Any], seconds: float) -> Any:
        end = time.monotonic() + seconds
        while not (found := what()):
            assert self.process.poll() is None and time.monotonic() < end, self.output[-3000:]
            time.sleep(0.1)
        return found

    def send(self, number: int) -> None:
        """To the node, as a container engine does."""
        lock = (self.data / "run" / "lock").read_text()
        os.kill(int(lock), number)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    buildah = Buildah(tmp_path_factory.mktemp("buildah"))
    try:
        yield buildah
    finally:
        for what in (["rm", "--all"], ["rmi", "--all", "--force"]):
            subprocess.run([*buildah.command, *what], stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def image(buildah: Buildah) -> str:
    debian = buildah.folder / "debian"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(debian)], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(debian / "var/cache/apt/archives")
    base = buildah("from", "scratch")
    buildah("add", base, str(debian), "/")
    buildah("commit", "--rm", base, "base")
    options = shlex.split(os.environ.get("IMAGE_TEST_OPTIONS", ""))
    buildah(
        *("bud", "--isolation", "chroot", "--format", "docker", "--build-arg", "BASE=localhost/base", *options),
        *("-f", "docker/Dockerfile", "-t", "swarm-node", "."),
    )
    return "localhost/swarm-node"


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, float]]:
    figures: dict[str, float] = {}
    yield figures
    print(figures)
    if path := os.environ.get("IMAGE_TEST_FIGURES"):
        Path(path).write_text(json.dumps(figures) + "\n")


def test_it_is_small_and_holds_no_compiler_no_identity_and_no_root(
    buildah: Buildah, image: str, figures: dict[str, float]
) -> None:
    container = buildah("from", image)
    root = Path(buildah("mount", container))
    files = [path.lstat() for path in root.rglob("*") if not path.is_symlink() and path.is_file()]
    figures["image_bytes"] = float(sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values()))
    assert figures["image_bytes"] <= MOST_BYTES
    assert not [name for name in ("cc", "gcc", "g++", "make", "pip") if (root / "usr/bin" / name).exists()]
    assert not list((root / "data").iterdir()) and not list(root.glob("**/identity.key"))
    config = json.loads(buildah("inspect", image))["Docker"]["config"]
    assert config["User"] == "swarm"
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "-m", "swarm_node.observability.health"]
    assert (config["Entrypoint"], config["Cmd"]) == (["swarm-node"], ["join"])
    buildah("umount", container)


def test_a_node_that_is_preempted_hands_its_stage_over(buildah: Buildah, image: str, figures: dict[str, float]) -> None:
    started: list[Container] = []

    def start(name: str, *command: str, **env: str) -> Container:
        started.append(Container(buildah, image, name, *command, **env))
        return started[-1]

    try:
        hub = start(
            "hub",
            *("sh", "-ec", "swarm-node new --tasks small --out swarm.toml; exec swarm-node bootstrap swarm.toml"),
            SWARM_NODE_HEALTH_PORT="31490",
        )
        link = hub.until(lambda: (m := LINK.search(hub.output)) and m.group(), 60)
        crew = {"SWARM_NODE_SWARM": link, "SWARM_NODE_STAGES": "2", "SWARM_NODE_CREW": "home"}
        alice = start("alice", "swarm-node", "join", SWARM_NODE_HEALTH_PORT="31491", **crew)
        bob = start("bob", "swarm-node", "join", SWARM_NODE_HEALTH_PORT="31492", **crew)
        alice.until(lambda: alice.rounds + bob.rounds >= 1, 180)
        figures["first_round_s"] = time.monotonic() - bob.began
        alice.until(lambda: alice.rounds + bob.rounds >= 5, 120)
        lead, other = (alice, bob) if alice.rounds else (bob, alice)
        health = start("health", "python3", "-m", "swarm_node.observability.health", SWARM_NODE_HEALTH_PORT="31491")
        assert health.process.wait(60) == 0, health.output
        began = time.monotonic()
        other.send(signal.SIGTERM)
        assert other.process.wait(60) == 0, other.output
        figures["leave_s"] = time.monotonic() - began
        assert re.search(r"keeps stage \d for whoever holds it next", other.output), other.output
        rounds = lead.rounds
        lead.until(lambda: lead.rounds >= rounds + 3, 120)
    finally:
        for container in started:
            if container.process.poll() is None:
                if (container.data / "run" / "lock").exists():
                    container.send(signal.SIGTERM)
                try:
                    container.process.wait(30)
                except subprocess.TimeoutExpired:
                    container.process.kill()
                    container.process.wait()
            container.file.close()
