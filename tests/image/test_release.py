"""What .github/workflows/release.yml tries before it publishes, and which files and names it publishes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import swarm_node
from scripts.wheels import SOURCES
from tests.image.test_deployment_files import RELEASE
from tests.install.test_walks import LEARN, PAGE, SWARM
from tests.support.docker_files import DOCKER
from tests.support.repository import ROOT


def test_the_release_builds_the_image_there_is() -> None:
    [build] = [step for step in release_steps() if "build-push" in step.get("uses", "")]
    given = {line.partition("=")[0] for line in build["with"]["build-args"].splitlines()}
    known = set(re.findall(r"^ARG (\w+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    assert given <= known and "BASE" in given
    assert build["with"]["platforms"] == "linux/amd64,linux/arm64" and (ROOT / build["with"]["file"]).is_file()


def release_jobs() -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(RELEASE.read_text())["jobs"]
    return jobs


def release_steps() -> list[dict[str, Any]]:
    return [step for job in release_jobs().values() for step in job["steps"]]


def test_nothing_is_published_before_the_wheel_was_tried() -> None:
    jobs = release_jobs()
    assert set(jobs["try"]["needs"]) == {"wheels", "package"} and "container" in jobs["try"]
    writes = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writes == {"publish", "image"} and all({"try", "test"} <= {*jobs[name]["needs"]} for name in writes)
    assert "make check test" in jobs["test"]["steps"][-1]["run"]
    [build] = [step for step in jobs["wheels"]["steps"] if "run" in step]
    assert all(f"build {each} " in build["run"] for each in SOURCES) and "CIBW_TEST_COMMAND" in build["run"]


def test_the_release_tries_its_own_version_as_the_walks_do() -> None:
    [script] = [step["run"] for step in release_jobs()["try"]["steps"] if "run" in step]
    ways = "swarm-node", "swarm-node[swarm,puzzles]"
    plain, extras = (f'pip install -q --find-links dist "{what}==${{GITHUB_REF_NAME#v}}"\n' for what in ways)
    places = [script.index(each.lstrip()) for each in (plain, LEARN, PAGE, extras, SWARM)]
    assert places == sorted(places)
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)


def test_only_wheels_and_the_package_are_published() -> None:
    steps = release_steps()
    given = [step["with"]["name"] for step in steps if "upload-artifact" in step.get("uses", "")]
    taken = [step["with"]["pattern"] for step in steps if "download-artifact" in step.get("uses", "")]
    assert given == ["dist-${{ matrix.machine }}", "dist-package"] and taken == ["dist-*"] * 2
    [image] = [step for step in steps if "build-push" in step.get("uses", "")]
    assert image["env"] == {"DOCKER_BUILD_RECORD_UPLOAD": False}


def test_the_release_pins_actions_by_commit() -> None:
    used = re.findall(r"uses: (\S+)(.*)$", RELEASE.read_text(), re.MULTILINE)
    assert len(used) == sum("uses" in step for step in release_steps()) > 3
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action}: of which version?"


def of_a_tag(step: str, tag: str, folder: Path, **env: str) -> str:
    """The output that a step of the release writes for this tag. Fails if the step does."""
    [found] = [each for each in release_steps() if each.get("id") == step]
    out = folder / step
    env |= {"GITHUB_REPOSITORY": "Some-Owner/Swarm", "GITHUB_REF_NAME": tag, "GITHUB_OUTPUT": str(out)}
    subprocess.run(["bash", "-e", "-c", found["run"]], env=os.environ | env, cwd=folder, check=True)
    return out.read_text()


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@needs_bash
@pytest.mark.parametrize(
    ("tag", "tags"),
    [
        ("v1.2.3", ["v1.2.3", "latest"]),
        ("v1.2.3rc1", ["v1.2.3rc1"]),
        ("v10.0.0a1", ["v10.0.0a1"]),
        ("v1.2.3.4", ["v1.2.3.4"]),
    ],
)
def test_only_a_release_becomes_the_latest_image(tag: str, tags: list[str], tmp_path: Path) -> None:
    (tmp_path / "swarm_node").mkdir()
    (tmp_path / "swarm_node/__init__.py").write_text(f'"""The package."""\n__version__ = "{tag[1:]}"\n')
    name, _, final = of_a_tag("tag", tag, tmp_path).strip().partition("=")
    names = ",".join(f"ghcr.io/some-owner/swarm:{each}" for each in tags)
    assert name == "final" and of_a_tag("names", tag, tmp_path, FINAL=final) == f"tags={names}\n"
    jobs = release_jobs()
    assert jobs["package"]["outputs"] == {"final": "${{ steps.tag.outputs.final }}"}
    conditions = [each for step in release_steps() for each in step.get("env", {}).values() if "needs." in str(each)]
    assert len(conditions) == 2 and all("needs.package.outputs.final" in each for each in conditions)
    assert all("package" in jobs[name]["needs"] for name in ("publish", "image"))


@needs_bash
def test_a_tag_is_the_version(tmp_path: Path) -> None:
    """Links made of the version lead to the page of its tag."""
    (tmp_path / "swarm_node").symlink_to(ROOT / "swarm_node")
    assert of_a_tag("tag", f"v{swarm_node.__version__}", tmp_path).startswith("final=")
    for wrong in ("-rc1", "rc1", ".0"):
        with pytest.raises(subprocess.CalledProcessError):
            of_a_tag("tag", f"v{swarm_node.__version__}{wrong}", tmp_path)
