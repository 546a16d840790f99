"""The wheel, its declared dependencies and the pinned set agree with the code."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import swarm_node
from swarm_node.install import EXTRA_OF
from tests.support.repository import ROOT

PACKAGES = {"swarm_node": ROOT, "swarm_protocol": ROOT / "protocol"}
"""Package -> the directory that it lies in."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDS_CLONE = "demo-real.toml"  # its questions are a file of the clone
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is left behind in the repository and nothing stale gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ["swarm_node", "protocol", "configs", "tests", "pyproject.toml", "LICENSE", "README.md"]:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", out, source], check=True)
    return zipfile.ZipFile(next(out.glob("swarm_node-*.whl")))


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(place))
        for package, place in PACKAGES.items()
        for path in (place / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } | {f"swarm_node/configs/{file.name}" for file in (ROOT / "configs").glob("*.toml") if file.name != NEEDS_CLONE}
    assert {
        "swarm_node/py.typed",
        "swarm_protocol/py.typed",
        "swarm_node/policy/starter_model/model.safetensors",
    } <= expected
    built = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert built == expected


def test_the_sdist_makes_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], cwd=ROOT, check=True)
    [sdist] = tmp_path.glob("swarm_node-*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", tmp_path, sdist], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as other:
        assert sorted(other.namelist()) == sorted(wheel.namelist())


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    info = f"swarm_node-{swarm_node.__version__}.dist-info"
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["Version"] == swarm_node.__version__
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "swarm-node = swarm_node.cli.app:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert metadata["Author"] and metadata.get_all("Project-URL")
    page = metadata.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", page)  # an index has none of the files beside README
    assert len(links) > 20 and all(link.startswith(("https://", "#")) for link in links)
    assert f"/v{swarm_node.__version__}/docs/images/real-model.png" in page
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")


def test_the_wheel_runs_without_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    script = "import swarm_node, sys; from swarm_node.cli.app import main; print(swarm_node.__file__); main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "local", "--dry-run"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    origin, dumped = done.stdout.split("\n", 1)
    assert Path(origin).is_relative_to(tmp_path / "site")
    assert tomllib.loads(dumped)["policy"]["model"] == "starter"


def test_starter_is_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "swarm_node/policy/starter_model").iterdir()) <= 2.5e6


RIVALS = {"trl", "datasets"}
"""`swarm-node bench` measures these beside this package where they are installed."""


def test_every_third_party_import_is_a_declared_dependency() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = PROJECT["dependencies"] + extras["wandb"] + extras["tensorboard"] + extras["trackio"]
    declared += extras["optuna"] + extras["quantize"] + extras["parquet"]
    declared += extras["plots"] + extras["swarm"] + extras["puzzles"]
    names = {canonicalize_name(Requirement(text).name) for text in declared} | RIVALS
    distributions = packages_distributions()
    undeclared = set()
    for package, place in PACKAGES.items():
        for file in (place / package).rglob("*.py"):
            for module in imported(ast.parse(file.read_text())):
                homes = {canonicalize_name(name) for name in distributions.get(module, [module])}
                if module not in sys.stdlib_module_names and module not in PACKAGES and not homes & names:
                    undeclared.add(f"{file.relative_to(ROOT)}: {module}")
    assert not undeclared


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of absolute imports, those inside functions included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_pins_are_plain_and_satisfy_the_declared_ranges() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert len(PINS) == len(lines)
    extras = PROJECT["optional-dependencies"]
    chosen = [extras[name] for name in ("swarm", "puzzles", "dev", "docs", "wandb", "tensorboard")]
    for text in [*PROJECT["dependencies"], *chain.from_iterable(chosen)]:
        requirement = Requirement(text)
        pin = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin, prereleases=True), text
    assert PINS["torch"] == "2.13.0"


def test_the_pinned_set_is_complete() -> None:
    seen = all_of("swarm", "puzzles", "dev")
    assert not seen - PINS.keys()
    assert len(seen) > 100


def test_a_plain_installation_has_nothing_to_compile() -> None:
    """libp2p and reasoning-gym want packages of which the index has sources alone."""
    plain = all_of()
    of_extras = set(map(canonicalize_name, packages_of(*EXTRA_OF)))
    assert not plain & ({"fastecdsa", "pycosat"} | of_extras) and "typer" in plain
    assert "fastecdsa" in all_of("swarm") and "pycosat" in all_of("puzzles")


def test_extras_are_named_for_what_they_bring() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRA_OF.items():
        assert set(packages_of(package)) & {canonicalize_name(Requirement(r).name) for r in extras[extra]}


def packages_of(*modules: str) -> list[str]:
    """The names of the packages that have these modules."""
    return [canonicalize_name(name) for module in modules for name in packages_distributions()[module]]


def all_of(*extras: str) -> set[str]:
    """The packages that an installation with these extras has, torch's CUDA packages aside."""
    environment = default_environment() | {"extra": ""}
    asked = [PROJECT["dependencies"], *map(PROJECT["optional-dependencies"].__getitem__, extras)]
    todo = [canonicalize_name(Requirement(r).name) for r in chain.from_iterable(asked)]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name == "torch":  # its CUDA packages differ by platform, and it pins them itself
            continue
        try:
            below = requires(name) or []
        except PackageNotFoundError:
            pytest.fail(f"{name} is not installed: make test")
        requirements = [Requirement(text) for text in below]
        todo += [canonicalize_name(r.name) for r in requirements if not r.marker or r.marker.evaluate(environment)]
    return seen
