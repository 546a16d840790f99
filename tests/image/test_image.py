"""The image, built from docker/Dockerfile on a Debian that debootstrap makes, and run without a container engine.

    IMAGE_TEST=1 python -m pytest -s -m image tests/image      as root, with buildah and debootstrap; twenty minutes

No engine is needed because `Container` does what one does: process 1 of a namespace, user 1000 without privileges, a
root that cannot be written, an empty /tmp, volumes, and in the test of compose.yaml a network of its own.

IMAGE_TEST_OPTIONS are further options of the build (`--build-arg PIP_INDEX_URL=…`), IMAGE_TEST_FIGURES is a file for
what is measured: bytes of the image, seconds to the first round, seconds to leave. IMAGE_TEST_STORAGE is a folder that
keeps the image: what is there already is not built again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.docker_files import COMPOSE, NODES
from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.waiting import until

NEEDED = ("buildah", "debootstrap", "ip", "unshare")
IMAGE = "localhost/swarm-node"
MOST_BYTES = 1.6e9
BUSY_S = 5.0
"""More than compose.yaml gives a node to leave in (`stop_grace_period`): four of them share what may be two cores with
whoever measures them, who looks in from outside the namespaces. A node that is stuck ends itself after nine seconds."""
LINK = re.compile(r"(?<!\S)swarm://[0-9a-f]{64}\?peer=\S+$", re.MULTILINE)
pytestmark = [
    pytest.mark.image,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("IMAGE_TEST"), reason="builds an image: IMAGE_TEST=1"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {' and '.join(NEEDED)}"),
]
QUICK = {
    "SWARM_NODE_ROLLOUTS__GROUP_SIZE": "4",
    "SWARM_NODE_ROLLOUTS__MAX_NEW_TOKENS": "8",
    "SWARM_NODE_EVAL__QUESTIONS": "0",
    "SWARM_NODE_PACE_S": "0.2",
    "SWARM_NODE_LISTEN": "127.0.0.1",
    "SWARM_NODE_PORT": "0",
    "SWARM_NODE_GOSSIP_PORT": "0",
    "SWARM_NODE_SPOT": "off",
}
START = """
root=$1; hosts=$2; folder=$3; volumes=$4; shift 4
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=64m tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$hosts" "$root/etc/hosts"
for volume in $volumes; do
    IFS=: read -r here there mode <<END
$volume
END
    mount --bind "$here" "$root$there"
    [ -z "$mode" ] || mount -o "remount,bind,$mode" "$root$there"
done
mortal="setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs"
exec chroot "$root" /usr/bin/env --chdir="$folder" $mortal /usr/bin/env -i "$@"
"""


class Buildah:
    """The command, with a storage of its own."""

    def __init__(self, folder: Path, storage: Path) -> None:
        self.folder = folder
        self.command = ["buildah", "--root", str(storage / "root"), "--runroot", str(storage / "run")]

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([*self.command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()


class Image:
    """The image, mounted, and what it says on how it is started."""

    def __init__(self, buildah: Buildah, root: Path, config: dict[str, Any]) -> None:
        self.buildah = buildah
        self.root = root
        self.config = config
        self.env = dict(pair.split("=", 1) for pair in config["Env"])
        (root / "etc/hosts").touch()  # as an engine does

    def volume(self, name: str, owner: int = 1000) -> Path:
        """A new one; a folder of the image that is mounted for the first time gives its owner and mode."""
        path = self.buildah.folder / name
        path.mkdir(mode=0o700)
        os.chown(path, owner, owner)
        return path


class Container:
    """One process of the image, as an engine starts it; its output in a file."""

    def __init__(
        self,
        image: Image,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        volumes: list[str],
        hosts: str = "127.0.0.1 localhost",
        network: str = "",
    ) -> None:
        folder = image.buildah.folder
        (folder / f"{name}.hosts").write_text(f"{hosts}\n")
        namespace = ["ip", "netns", "exec", network] if network else []
        start = ["unshare", "--mount", "--pid", "--fork", "--", "sh", "-ec", START, name]
        what = [str(image.root), str(folder / f"{name}.hosts"), image.config["WorkingDir"], " ".join(volumes)]
        self.file = (folder / f"{name}-{time.monotonic_ns()}.log").open("w+")
        self.data = Path(next((volume.partition(":")[0] for volume in volumes if ":/data" in volume), "/nonexistent"))
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*namespace, *start, *what, *(f"{key}={value}" for key, value in env.items()), *command],
            stdout=self.file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return Path(self.file.name).read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.data / "run" / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    @property
    def rounds(self) -> int:
        return len(self.metrics)

    def last(self, name: str) -> float:
        metrics = self.metrics
        return metrics[-1].get(name, 0.0) if metrics else 0.0

    @property
    def pids(self) -> list[int]:
        """Its process 1, as it is called out here; none if it has ended."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(child) for child in children.read_text().split()] if children.exists() else []

    def until(self, what: Callable[[], Any], seconds: float) -> Any:
        def while_it_runs() -> Any:
            found = what()
            assert found or self.process.poll() is None, self.output[-3000:]
            return found

        return until(while_it_runs, seconds, lambda: self.output[-3000:])

    def stop(self, seconds: float = 60.0) -> float:
        """As `docker stop`: how long it takes to exit with 0."""
        began = time.monotonic()
        os.kill(self.pids[0], signal.SIGTERM)
        assert self.process.wait(seconds) == 0, self.output[-3000:]
        return time.monotonic() - began

    def kill(self) -> None:
        for pid in self.pids:  # all others of its namespace go with it
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.file.close()


Start = Callable[..., Container]


@contextmanager
def containers(image: Image) -> Iterator[Start]:
    """A starter of containers, all of which are gone at the end."""
    started: list[Container] = []

    def start(name: str, command: list[str], env: Mapping[str, str], volumes: list[str], **more: str) -> Container:
        started.append(Container(image, name, command, {**image.env, **env}, volumes, **more))
        return started[-1]

    try:
        yield start
    finally:
        for container in started:
            container.kill()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    folder, kept = tmp_path_factory.mktemp("buildah"), os.environ.get("IMAGE_TEST_STORAGE")
    buildah = Buildah(folder, Path(kept) if kept else folder)
    try:
        yield buildah
    finally:
        for what in [["rm", "--all"], *([] if kept else [["rmi", "--all", "--force"]])]:
            subprocess.run([*buildah.command, *what], stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def image(buildah: Buildah) -> Image:
    if IMAGE not in buildah("images", "--format", "{{.Name}}").split():
        debian = buildah.folder / "debian"
        subprocess.run(
            ["debootstrap", "--variant=minbase", "bookworm", str(debian)], check=True, stdout=subprocess.DEVNULL
        )
        shutil.rmtree(debian / "var/cache/apt/archives")
        base = buildah("from", "scratch")
        buildah("add", base, str(debian), "/")
        buildah("commit", "--rm", base, "base")
        options = shlex.split(os.environ.get("IMAGE_TEST_OPTIONS", ""))
        buildah(
            *("bud", "--isolation", "chroot", "--format", "docker", "--build-arg", "BASE=localhost/base", *options),
            *("-f", "docker/Dockerfile", "-t", IMAGE, "."),
        )
    root = Path(buildah("mount", buildah("from", IMAGE)))
    return Image(buildah, root, json.loads(buildah("inspect", IMAGE))["Docker"]["config"])


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, float]]:
    figures: dict[str, float] = {}
    yield figures
    print(figures)
    if path := os.environ.get("IMAGE_TEST_FIGURES"):
        Path(path).write_text(json.dumps(figures) + "\n")


def test_it_is_small_without_compiler_or_secret(buildah: Buildah, image: Image, figures: dict[str, float]) -> None:
    files = [path.lstat() for path in image.root.rglob("*") if not path.is_symlink() and path.is_file()]
    figures["image_bytes"] = float(sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values()))
    assert figures["image_bytes"] <= MOST_BYTES
    commands = {path.name for folder in ("usr/bin", "opt/swarm-node/bin") for path in (image.root / folder).iterdir()}
    assert "swarm-node" in commands and not commands & {"cc", "gcc", "g++", "make"}
    assert list(image.root.glob("opt/swarm-node/lib/python3*/site-packages/swarm_node/configs/demo.toml"))
    assert not list((image.root / "data").iterdir()) and not list(image.root.glob("**/identity.key"))
    assert "PIP_" not in buildah("inspect", IMAGE)
    config = image.config
    assert config["User"] == "1000:1000" and set(config["Volumes"]) == {"/data"}
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "-m", "swarm_node.observability.health"]
    assert (config["Entrypoint"], config["Cmd"]) == (["swarm-node"], ["join"])


def test_the_images_user_cannot_change_it(image: Image) -> None:
    places = {path: path.lstat() for path in image.root.rglob("*") if not path.is_symlink()}
    open_ = {path for path, its in places.items() if 1000 in (its.st_uid, its.st_gid) or its.st_mode & 0o002}
    found = {f"/{path.relative_to(image.root)}" for path in open_ if image.root / "dev" not in path.parents}
    assert found <= {"/data", "/swarm", "/tmp", "/var/tmp", "/run/lock"} and "/data" in found


def test_a_preempted_node_hands_its_stage_over(image: Image, figures: dict[str, float]) -> None:
    with containers(image) as start:

        def node(name: str, *command: str, **env: str) -> Container:
            settings = QUICK | {"SWARM_NODE_NAME": name, **env}
            return start(name, list(command), settings, [f"{image.volume(name)}:/data"])

        making = "swarm-node new --tasks small --out swarm.toml; exec swarm-node bootstrap swarm.toml"
        hub = node("hub", "sh", "-ec", making, SWARM_NODE_HEALTH_PORT="0")
        link = hub.until(lambda: (m := LINK.search(hub.output)) and m.group(), 60)
        crew = {"SWARM_NODE_SWARM": link, "SWARM_NODE_STAGES": "2", "SWARM_NODE_CREW": "home"}
        port = str(free_port())
        alice = node("alice", "swarm-node", "join", SWARM_NODE_HEALTH_PORT=port, **crew)
        bob = node("bob", "swarm-node", "join", SWARM_NODE_HEALTH_PORT="0", **crew)
        alice.until(lambda: alice.rounds + bob.rounds >= 1, 180)
        figures["first_round_s"] = time.monotonic() - bob.began
        status = Path(f"/proc/{alice.pids[0]}/status").read_text()
        assert re.search(r"^Uid:(\s+1000){4}$", status, re.MULTILINE)
        assert re.search(r"^NSpid:\s+\d+\s+1$", status, re.MULTILINE)
        alice.until(lambda: alice.rounds + bob.rounds >= 5, 120)
        lead, other = (alice, bob) if alice.rounds else (bob, alice)
        asked = start("health", image.config["Healthcheck"]["Test"][1:], {"SWARM_NODE_HEALTH_PORT": port}, [])
        assert asked.process.wait(60) == 0, asked.output
        figures["leave_s"] = other.stop()
        assert re.search(r"keeps stage \d for the node that holds it next", other.output), other.output
        rounds = lead.rounds
        lead.until(lambda: lead.rounds >= rounds + 3, 120)


@pytest.mark.parametrize(
    ("env", "owner", "mode", "code", "said"),
    [
        ({"SWARM_NODE_SPOT": "ovh"}, 1000, "", 2, "spot.cloud = 'ovh' in SWARM_NODE_SPOT: must be 'auto', 'aws'"),
        ({"SWARM_NODE_SWARM": ""}, 1000, "", 2, "which swarm?.*SWARM_NODE_SWARM"),
        ({}, 0, "", 2, "no permission for /data/run/config.toml: change its owner"),
        ({}, 1000, ":ro", 2, "/data is on a file system that is read-only"),
        ({}, None, "", 2, "/data is on a file system that is read-only"),
        ({"SWARM_NODE_HEALTH_PORT": "taken"}, 1000, "", 75, "port [0-9]+ of 0.0.0.0 is taken"),
    ],
    ids=["no such cloud", "no swarm", "of another user", "read-only", "no volume", "port in use"],
)
def test_a_wrong_start_is_one_line(
    image: Image,
    env: dict[str, str],
    owner: int | None,
    mode: str,
    code: int,
    said: str,
    request: pytest.FixtureRequest,
) -> None:
    place = None if owner is None else image.volume(request.node.callspec.id.replace(" ", "-"), owner)
    with socket.create_server(("0.0.0.0", 0)) as taken, containers(image) as start:
        env = {key: str(taken.getsockname()[1]) if value == "taken" else value for key, value in env.items()}
        settings = {"SWARM_NODE_HEALTH_PORT": "0", **QUICK, **env}
        command = ["join"] if "SWARM_NODE_SWARM" in env else ["local"]
        done = start("wrong", ["swarm-node", *command], settings, [] if place is None else [f"{place}:/data{mode}"])
        assert done.process.wait(90) == code, done.output
        assert re.match(f"swarm-node: .*{said}", done.output.splitlines()[-1]), done.output
    assert place is None or not list(place.rglob("*.key"))


@contextmanager
def networks(names: list[str]) -> Iterator[dict[str, tuple[str, str]]]:
    """Name -> (namespace, address): hosts of one network, as compose makes it."""
    spaces = {name: f"swarm-{os.getpid()}-{name}" for name in ("switch", *names)}

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for space in spaces.values():
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", spaces["switch"], "link", "add", "bridge", "type", "bridge")
        ip("-n", spaces["switch"], "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            peer = ("peer", "name", "eth0", "netns", spaces[name])
            ip("link", "add", f"to{i}", "netns", spaces["switch"], "type", "veth", *peer)
            ip("-n", spaces["switch"], "link", "set", f"to{i}", "master", "bridge", "up")
            ip("-n", spaces[name], "address", "add", f"10.78.0.{i + 2}/24", "dev", "eth0")
            ip("-n", spaces[name], "link", "set", "eth0", "up")
        yield {name: (spaces[name], f"10.78.0.{i + 2}") for i, name in enumerate(names)}
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def test_what_compose_starts_learns_and_goes_on(image: Image, figures: dict[str, float]) -> None:
    volumes = {name: image.volume(f"compose-{name}") for name in COMPOSE["volumes"]}
    names = ["manifest", "bootstrap", *NODES]
    with networks(names) as hosts, containers(image) as start:
        table = "\n".join(["127.0.0.1 localhost", *(f"{address} {name}" for name, (_, address) in hosts.items())])

        def up(name: str, *command: str) -> Container:
            service = COMPOSE["services"][name]
            its = [*service.get("entrypoint", image.config["Entrypoint"]), *service.get("command", image.config["Cmd"])]
            mounts = [
                f"{volumes[volume.partition(':')[0]]}:{volume.partition(':')[2]}" for volume in service["volumes"]
            ]
            what = list(command) or [word.replace("$$", "$") for word in its]
            return start(name, what, service.get("environment", {}), mounts, hosts=table, network=hosts[name][0])

        def fleet() -> list[Container]:
            made = up("manifest")
            assert made.process.wait(60) == 0, made.output
            return [up(name) for name in names[1:]]

        bootstrap, *nodes = fleet()
        for node in nodes:
            node.until(lambda node=node: node.last("swarm/groups_admitted") > 0, 240)  # type: ignore[misc]
            node.until(lambda node=node: node.last("averaging/exchanges") > 0, 240)  # type: ignore[misc]
        for name in names[1:]:
            healthy = up(name, *image.config["Healthcheck"]["Test"][1:])
            assert healthy.process.wait(60) == 0, healthy.output
        grace_s = float(COMPOSE["services"]["alice"]["stop_grace_period"].removesuffix("s"))
        figures["compose_down_s"] = max(container.stop(grace_s + BUSY_S) for container in (*nodes, bootstrap))
        for node in fleet()[1:]:
            resumed = node.until(lambda node=node: re.search(r"resumed /data/run at round (\d+)", node.output), 120)  # type: ignore[misc]
            node.until(lambda node=node, resumed=resumed: node.rounds > int(resumed[1]), 120)  # type: ignore[misc]
