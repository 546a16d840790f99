"""Remedies for an installation are for the one that runs."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm_node import install as installed
from swarm_node.cli.commands.check_machine import packages
from swarm_node.errors import UserError
from swarm_node.install import (
    WHEELS,
    check_extra,
    extra_command,
    install_command,
    missing,
    reinstall_command,
    upgrade_command,
)
from swarm_node.say import own_command

HERE = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def made_of(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the package's metadata tells of where it came from."""
    told = SimpleNamespace(told=None)
    text = lambda name: told.told if told.told is None else json.dumps(told.told)  # noqa: E731
    monkeypatch.setattr(installed, "distribution", lambda name: SimpleNamespace(read_text=text, requires=None))
    return told


def test_commands_can_be_typed_as_this_one_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "swarm-node"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "__main__.py")])
    assert own_command() == f"{sys.executable} -m swarm_node"
    script.write_text("")
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert own_command() == str(script), "it is in no directory of the PATH that is searched for programs"
    script.chmod(0o755)
    assert own_command() == "swarm-node"


@pytest.mark.parametrize(
    ("told", "source"),
    [
        (None, "swarm-node"),
        ({"url": "file:///home/my%20clone", "dir_info": {}}, "'/home/my clone'"),
        ({"url": "file:///home/clone", "dir_info": {"editable": True}}, "-e /home/clone"),
        ({"url": "https://example.org/a.git", "vcs_info": {"vcs": "git"}}, "git+https://example.org/a.git"),
        ({"url": 3, "dir_info": []}, "swarm-node"),
    ],
)
def test_an_environment_is_mended_from_its_source(
    made_of: SimpleNamespace, told: object, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of.told = told
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    command = reinstall_command()
    assert sys.executable in command and command.endswith(f"pip install {source}")
    assert reinstall_command("torch").endswith("pip install --force-reinstall torch")
    assert install_command() == f"uv tool install --reinstall --python 3.11 {source}"  # for another Python
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/uv/tools/swarm-node")
    assert reinstall_command() == reinstall_command("torch") == install_command(HERE)
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/pipx/venvs/swarm-node")
    assert reinstall_command() == f"pipx reinstall swarm-node --python {HERE}"


@pytest.mark.parametrize(("editable", "way"), [(True, "-e "), (False, "")])
def test_a_clone_is_upgraded_from_its_clone(
    made_of: SimpleNamespace, editable: bool, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "my clone"
    (clone / ".git").mkdir(parents=True)
    made_of.told = {"url": clone.as_uri(), "dir_info": {"editable": editable}}
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    pulled, again = upgrade_command().split(" && ")
    assert pulled == f"git -C '{clone}' pull"
    assert sys.executable in again and again.endswith(f" --upgrade {way}'{clone}'")
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/uv/tools/swarm-node")
    assert upgrade_command() == f"{pulled} && {install_command(HERE)}"


@pytest.mark.parametrize(
    ("told", "source"),
    [
        (None, "swarm-node"),
        ({"url": "https://example.org/a.git", "vcs_info": {"vcs": "git"}}, "git+https://example.org/a.git"),
    ],
)
def test_other_installations_are_upgraded_from_their_source(
    made_of: SimpleNamespace, told: object, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of.told = told
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    assert sys.executable in upgrade_command() and upgrade_command().endswith(f" --upgrade {source}")
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/pipx/venvs/swarm-node")
    assert upgrade_command() == "pipx upgrade swarm-node"


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (None, "'swarm-node[plots]'"),
        ({"url": "file:///home/clone", "dir_info": {"editable": True}}, "-e '/home/clone[plots]'"),
        ({"url": "file:///home/my%20clone", "dir_info": {}}, "'/home/my clone[plots]'"),
        (
            {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git"}},
            "'swarm-node[plots] @ git+https://example.org/a.git'",
        ),
    ],
)
def test_extras_come_from_the_source_of_this_installation(
    made_of: SimpleNamespace, told: object, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of.told = told
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    assert sys.executable in extra_command("plots") and extra_command("plots").endswith(f" install {wanted}")
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/uv/tools/swarm-node")
    assert extra_command("plots") == f"uv tool install --reinstall --python {HERE} {wanted}"
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/pipx/venvs/swarm-node")
    assert extra_command("plots") == f"pipx install --force {wanted}"


def test_what_is_missing_is_installed_where_it_is(made_of: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    monkeypatch.setitem(packages.__globals__["TESTED"], "no-such-package", "1")
    assert sys.executable in packages().remedy and "uv tool" not in packages().remedy


def test_an_extra_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    check_extra("swarm", "a swarm")
    assert missing(ModuleNotFoundError("x", name="libp2p.host")) is None, "it is there, so something else is wrong"
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"a swarm needs the extra 'swarm'.*--find-links {re.escape(WHEELS)} "):
        check_extra("swarm", "a swarm")
    assert "needs libp2p, of the extra 'swarm'" in str(missing(ModuleNotFoundError("x", name="libp2p.host")))
    assert missing(ModuleNotFoundError("x", name="json")) is None


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("uv/tools", f"uv tool install --reinstall --python {HERE} --find-links {WHEELS} 'swarm-node[puzzles]'"),
        ("pipx/venvs", f"pipx install --force '--pip-args=--find-links {WHEELS}' 'swarm-node[puzzles]'"),
    ],
)
def test_wheels_of_the_release_are_found_by_all_installers(
    made_of: SimpleNamespace, prefix: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", f"/home/me/.local/share/{prefix}/swarm-node")
    assert extra_command("puzzles") == command


def test_an_extra_keeps_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    wants = ['hivemind>=1; extra == "swarm"', "typer>=1", 'matplotlib>=3; (python_version > "3") and extra == "plots"']
    there = {"swarm-node": SimpleNamespace(requires=wants, read_text=lambda name: None), "hivemind": None}

    def distribution(name: str) -> object:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(installed, "distribution", distribution)
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/uv/tools/swarm-node")
    wanted = f"--find-links {WHEELS} 'swarm-node[optuna,swarm]'"
    assert extra_command("optuna") == f"uv tool install --reinstall --python {HERE} {wanted}"
    assert install_command() == f"uv tool install --reinstall --python 3.11 --find-links {WHEELS} 'swarm-node[swarm]'"
