"""What `make` says before it installs, on machines that lack something: programs in PATH are replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

WHOLE = "sudo apt-get install -y build-essential libgmp-dev python3-dev python3-venv"


def asked(folder: Path, *arguments: str, **programs: str) -> tuple[int, str]:
    """(exit status, errors) of the script on a Linux that has these programs: name -> what the shell does."""
    for name, does in ({"uname": "echo Linux"} | programs).items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    command = [shutil.which("sh") or "sh", str(ROOT / "scripts/check-prerequisites"), *arguments]
    done = subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("wheels", "programs", "line"),
    [
        ("", {"apt-get": ""}, WHOLE),
        ("wheels", {"apt-get": ""}, "sudo apt-get install -y python3-venv"),
        ("", {"brew": ""}, "brew install python@3.12 gcc gmp"),
        ("wheels", {"brew": ""}, "brew install python@3.12"),
        ("wheels", {}, "your package manager: Python 3.12 with venv"),
    ],
)
def test_a_machine_without_python(wheels: str, programs: dict[str, str], line: str, tmp_path: Path) -> None:
    status, said = asked(tmp_path, "python3", wheels, **programs)
    assert status == 1 and said.startswith("missing: Python (python3 does not run)")
    assert said.splitlines()[-1] == f"    {line}"
    assert ("compiler" in said) == (not wheels)


def test_a_compiler_is_not_missed_where_wheels_are(tmp_path: Path) -> None:
    status, said = asked(tmp_path, sys.executable, "")
    assert status == 1 and "a C compiler" in said
    assert asked(tmp_path, sys.executable, "wheels") == (0, "")


def test_a_mac_is_told_where_brew_installs(tmp_path: Path) -> None:
    programs = {"uname": "echo Darwin", "cc": "exit 1", "brew": "echo /opt/homebrew"}  # a compiler without the header
    status, said = asked(tmp_path, sys.executable, "", **programs)
    assert status == 1 and "the libgmp headers" in said and "a C compiler" not in said
    assert "export CFLAGS=-I/opt/homebrew/include LDFLAGS=-L/opt/homebrew/lib" in said
    assert asked(tmp_path, sys.executable, "wheels", **programs) == (0, "")


def test_another_python_is_named(tmp_path: Path) -> None:
    status, said = asked(tmp_path, "python3", "", python3="echo 3.9")
    assert status == 1 and "python3 is 3.9" in said


@pytest.mark.parametrize("wheels", ["", "wheels"])
def test_make_compiles_nothing_where_wheels_are_named(wheels: str, tmp_path: Path) -> None:
    """A folder that has none ends pip with a sentence."""
    command = ["make", "-n", "install", f"WHEELS={wheels}", f"VENV={tmp_path}"]
    env = {"PATH": os.environ["PATH"]}
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert ("--only-binary fastecdsa --only-binary pycosat" in said) == bool(wheels)
