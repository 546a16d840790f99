"""From an empty Debian to the first learning, as docs/install.md has it: no compiler; a clone needs make.

    python -m pytest -m long tests/install      as root, with debootstrap; about ten minutes on two cores

pip, pipx and uv get wheels that scripts/wheels.py builds, and all else from where this machine's pip gets it.
INSTALL_FIGURES is a file for what is measured: packages, megabytes and seconds of each way.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from scripts.wheels import build
from swarm_node.install import WHEELS
from tests.support.pages import fences
from tests.support.repository import ROOT

NEEDED = ("debootstrap", "unshare", "cc")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a Debian: as root"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
]
MIRROR = "http://deb.debian.org/debian"
BIND = """
set -e
root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for place in $PLACES; do mkdir -p "$root$place"; mount --bind "$place" "$root$place"; done
exec chroot "$root" /usr/bin/env --chdir=/root HOME=/root sh -ec "$1"
"""
LEARN = """
swarm-node local --rounds 2 --run-dir alone
swarm-node eval alone --questions 8
swarm-node export alone model
"""
PAGE = """
swarm-node dashboard alone --port 0 > page.log 2>&1 &
until address=$(grep -o 'http://[^ ]*' page.log); do kill -0 $!; sleep 0.2; done
python3 -c "import urllib.request; print(urllib.request.urlopen('$address').read().decode())"
kill -INT $!
wait
"""
SWARM = """
cd $(mktemp -d)
swarm-node new --name walk --tasks small
timeout 600 swarm-node bootstrap walk.toml --listen 127.0.0.1 --port 0 --gossip-port 0 --run-dir hub > hub.log 2>&1 &
until link=$(grep -o 'swarm://[^ ]*peer=[^ ]*' hub.log); do kill -0 $!; sleep 0.2; done
swarm-node join "$link" --listen 127.0.0.1 --port 0 --gossip-port 0 --rounds 2 --run-dir member
swarm-node stop hub
wait
"""


@cache
def pip_settings() -> dict[str, list[str]]:
    """What this machine's pip is told: key without its section -> values."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for section, key, value in re.findall(r"^(\S+)\.(\S+?)='(.*)'$", listed.stdout, re.MULTILINE):
        found.setdefault(key, []).extend(value.split() if section else [])
    return found


class Debian:
    """A fresh Debian with Python, in which nothing compiles."""

    def __init__(self, root: Path, wheels: Path) -> None:
        self.root, self.wheels = root, wheels
        packages = "python3,python3-venv,ca-certificates"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root), MIRROR]
        subprocess.run(command, check=True, capture_output=True)
        for file in ("/etc/pip.conf", "/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt"):
            if Path(file).exists():
                shutil.copy(file, f"{root}{file}")
        if Path("/etc/xdg/pip").is_dir():
            shutil.copytree("/etc/xdg/pip", root / "etc/xdg/pip")
        shutil.copy(ROOT / "constraints.txt", root / "root")  # the torch for CPUs
        assert self.run("command -v cc gcc make || echo none").stdout == "none\n"

    def run(self, script: str, path: str = "") -> subprocess.CompletedProcess[str]:
        """What a shell in /root prints, errors among it, with `path` in front of its PATH. Fails if the script does."""
        indexes = pip_settings().get("extra-index-url", [])
        links = [*dict.fromkeys(pip_settings().get("find-links", []))]
        urls = [urlsplit(each).path for each in (*indexes, *links) if each.startswith(("file:", "/"))]
        places = [str(Path(each).parent if Path(each).name == "simple" else each) for each in urls]
        env = {
            **{key: value for key, value in os.environ.items() if "CERT" in key or key.startswith("PIP_")},
            "PATH": f"{path}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PLACES": " ".join([str(self.wheels), *filter(os.path.isdir, places)]),
            "PIP_CONSTRAINT": "/root/constraints.txt",
            "PIP_FIND_LINKS": " ".join([*links, str(self.wheels)]),
            "UV_CONSTRAINT": "/root/constraints.txt",
            "UV_FIND_LINKS": ",".join([*links, str(self.wheels)]),
            "UV_EXTRA_INDEX_URL": " ".join(indexes),
            "UV_INDEX_STRATEGY": "unsafe-best-match",
            "UV_SYSTEM_CERTS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", BIND, "sh", str(self.root)]
        done = subprocess.run(
            [*command, script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2000
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-6000:]}"
        return done

    def install(self, what: str, command: str, python: str) -> None:
        """Run the command that installs; note seconds, and what is then there of the environment at `python`."""
        began = time.monotonic()
        self.run(command)
        seconds = time.monotonic() - began
        count = "import importlib.metadata as m; print(len({d.name for d in m.distributions()}))"
        packages = int(self.run(f"{python} -I -c '{count}'").stdout)
        megabytes = int(self.run(f"du -sm $(dirname $(dirname {python}))").stdout.split()[0])
        if file := os.environ.get("INSTALL_FIGURES"):
            row = {"what": what, "packages": packages, "megabytes": megabytes, "seconds": round(seconds)}
            with open(file, "a") as out:
                out.write(f"{json.dumps(row)}\n")


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Debian:
    folder = tmp_path_factory.mktemp("debian")
    (folder / "wheels").mkdir()
    build(folder / "wheels")
    return Debian(folder / "root", folder / "wheels")


def test_pip_then_the_extras(debian: Debian) -> None:
    debian.install("pip, plain", "python3 -m venv plain && plain/bin/pip install -q swarm-node", "plain/bin/python")
    path = "/root/plain/bin"
    said = debian.run(LEARN, path).stdout
    assert "tasks starter" in said and "round 2/2" in said and "exported to model" in said
    for command, extra in (
        (f"join swarm://{'0' * 64}", "swarm"),
        ("bootstrap walk.toml", "swarm"),
        ("local --tasks small", "puzzles"),
    ):
        said = debian.run(f"! swarm-node {command}", path).stdout
        assert f"needs the extra '{extra}'" in said and f"'swarm-node[{extra}]'" in said and "torch" not in said
    assert debian.run("swarm-node tasks", path).stdout.startswith("starter ")
    assert "<html" in debian.run(PAGE, path).stdout
    extras = "plain/bin/pip install -q 'swarm-node[swarm,puzzles]' && plain/bin/pip check"
    debian.install("pip, with swarm and puzzles", extras, "plain/bin/python")
    said = debian.run(SWARM, path).stdout
    assert "round 2/2" in said and "tasks basic_arithmetic" in said


def test_the_first_lines_of_readme(debian: Debian) -> None:
    """As they are typed: what is compiled elsewhere comes from a page with links, as of a release."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(debian.wheels))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as page:
        Thread(target=page.serve_forever, daemon=True).start()
        typed = fences(ROOT / "README.md")[0].text.replace(WHEELS, f"http://127.0.0.1:{page.server_port}/")
        links = " ".join(pip_settings().get("find-links", []))
        environment = f"PIP_FIND_LINKS={shlex.quote(links)} SWARM_NODE_ROUNDS=2"
        said = debian.run(f"python3 -m venv readme && . readme/bin/activate && export {environment}\n{typed}").stdout
        page.shutdown()
    assert "round 2/2" in said


def test_uv(debian: Debian) -> None:
    debian.run("python3 -m venv uv && uv/bin/pip install -q uv")
    command = "uv/bin/uv tool install -q 'swarm-node[swarm,puzzles]'"
    debian.install("uv tool", command, ".local/share/uv/tools/swarm-node/bin/python")
    assert "round 2/2" in debian.run(SWARM, "/root/.local/bin").stdout
    debian.run("swarm-node fetch smollm2", "/root/.local/bin")  # by pip, which uv's environments have not by themselves


def test_pipx(debian: Debian) -> None:
    debian.run("python3 -m venv pipx && pipx/bin/pip install -q pipx")
    wheels = shlex.quote(f"--pip-args=--find-links {debian.wheels} -c /root/constraints.txt")
    command = f"pipx/bin/pipx install --quiet {wheels} 'swarm-node[swarm,puzzles]'"
    debian.install("pipx", command, ".local/share/pipx/venvs/swarm-node/bin/python")
    assert "round 2/2" in debian.run(SWARM, "/root/.local/bin").stdout


def test_a_clone(debian: Debian) -> None:
    debian.run("apt-get update -qq && apt-get install -qq -y --no-install-recommends make && mkdir clone")
    files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-xC", str(debian.root / "root/clone")], input=files, check=True)
    said = debian.run(f"SWARM_NODE_ROUNDS=2 make -C clone demo dev WHEELS={shlex.quote(str(debian.wheels))}").stdout
    assert "round 2/2" in said and "installing the development tools" in said
    tested = debian.run(". clone/.venv/bin/activate && cd clone && pytest -q tests/swarm_node/test_say.py").stdout
    assert " passed" in tested
