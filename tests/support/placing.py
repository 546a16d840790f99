"""What can be known of a command without running it. Every function raises AssertionError with what to do."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.cli.options import COMMAND_VARIABLES
from swarm_node.config import load_config
from swarm_node.config.keys import FILE_SUFFIX
from swarm_node.config.options import all_variables
from swarm_node.errors import UserError
from tests.support.pages import ELSEWHERE, Command, stands_for_something
from tests.support.repository import ROOT

HERE = set(
    "compare config doctor eval export fetch identity merge new pause resume samples starter status stop tasks "
    "unpause".split()
)
"""Verbs that do something and end: test_docs_runs runs them."""
TRAINS = {"local", "join"}
SERVES = {"bootstrap", "dashboard"}
LONG = {"sweep", "bench", "fetch"}
REFUSED: Any = typer.BadParameter.__base__
"""What a parser raises (typer has a click of its own)."""
INCOMPLETE = {"MissingParameter", "BadOptionUsage"}
"""What a sentence may leave out: `new --averaging-period-s`."""
VARIABLE = re.compile(r"\bSWARM_NODE_[A-Z][A-Z_]*[A-Z]\b")


class Parsed(Exception):
    """A parser has taken what it was given."""


def check(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can be checked of it, by whose program it is."""
    words = list(command.words[1:])
    try:
        if command.program == "swarm-node" or words[:2] == ["-m", "swarm_node"]:
            check_swarm_node(words if command.program == "swarm-node" else words[2:], command.typed)
        elif command.program == "make":
            check_make(words)
        elif command.program in {"python", "python3"} and words[:1] == ["-m"] and words[1].startswith("benchmarks."):
            check_benchmark(words[1], words[2:], monkeypatch)
        elif command.program == "python3" and words[:2] == ["-m", "http.server"]:
            pass  # Python's own, which a test of the drill runs
        elif command.program not in ELSEWHERE:
            raise AssertionError(
                f"no test knows what {command.program!r} is. If it is a program of others that cannot be run here, add "
                "it to ELSEWHERE in tests/support/pages.py; if it is ours, say in tests/support/placing.py how it is "
                "checked"
            )
        check_paths(words)
    except (AssertionError, UserError) as error:
        raise AssertionError(f"{command}: {error}") from error


def check_swarm_node(words: Sequence[str], typed: bool) -> None:
    """The command line takes these options and values, and the configuration that they make is one."""
    verb = words[0] if words else ""
    if not verb or verb in {"--help", "-h", "--version"}:
        return
    assert verb in HERE | TRAINS | SERVES | LONG, f"say in tests/support/placing.py whether `{verb}` ends by itself"
    given = parse(words, typed)
    if given is None:
        return
    sets = [pair for pair in given.get("sets", ()) if not stands_for_something(pair)]
    load_config(sets=sets)
    if typed and verb in TRAINS and not any(map(stands_for_something, flat(given, but="swarm"))):
        config = given.get("config")
        shown = [word for word in words if Path(str(config)).exists() or word not in ("--config", config)]
        done = CliRunner().invoke(app, [*shown, "--dry-run"])
        assert done.exit_code == 0, done.output


def parse(words: Sequence[str], complete: bool) -> dict[str, Any] | None:
    """Parameter -> what was given for it, by the real parser. A mention (not `complete`) may leave things out: None."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "get_command"):
        if not rest:
            assert not complete, "a command is missing"
            return None
        known = command.get_command(None, rest[0])
        assert known is not None, f"there is no command {rest[0]!r}"
        command, rest = known, rest[1:]
    context = command.make_context(command.name, [], resilient_parsing=True)
    context.resilient_parsing = False  # or its parser is silent about options that there are not
    try:
        given, _, _ = command.make_parser(context).parse_args(list(rest))
        for parameter in command.params:
            value = given.get(parameter.name)
            if not any(map(stands_for_something, flat({"": value}))):
                parameter.process_value(context, value)
    except REFUSED as error:
        if complete or type(error).__name__ not in INCOMPLETE:
            raise AssertionError(error.format_message()) from error
        return None
    return {name: value for name, value in given.items() if value is not None}


def flat(given: dict[str, Any], but: str | None = None) -> list[str]:
    """All texts among what was given, without those of one parameter."""
    values = [value for name, value in given.items() if name != but]
    return [str(item) for value in values for item in (value if isinstance(value, list | tuple) else [value])]


def check_make(words: Sequence[str]) -> None:
    """The target exists, and so do the variables."""
    known = set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in (word.partition("=")[0] for word in words if "=" in word):
        assert name in known, f"the Makefile knows no variable {name}, only {sorted(known)}"
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.strip()


def check_benchmark(module: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The module exists and its parser takes these arguments. Nothing of it is run."""
    if (ROOT / module.replace(".", "/")).is_dir():  # a package is run by its __main__
        module += ".__main__"
    path = ROOT / (module.replace(".", "/") + ".py")
    assert path.exists(), f"there is no {module}"
    assert "parse_args(" in path.read_text(), f"{module} has no parser: it takes whatever it is given"
    real = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            real(parser, list(words))
        except SystemExit:
            raise AssertionError(f"its parser does not take {' '.join(words)!r}") from None
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [module, *words])
        with pytest.raises(Parsed):
            importlib.import_module(module).main()


def check_paths(words: Sequence[str]) -> None:
    """Files of the repository that are named are there; what commands write into it is not the repository's."""
    written = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    for word in words:
        top, slash, _ = word.partition("/")
        if slash and top and (ROOT / top).is_dir() and not top.startswith(".") and top not in written:
            assert list(ROOT.glob(word.rstrip("/"))), f"the repository has no {word}"


def check_syntax(script: str) -> None:
    """The shell can read it."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.strip()


def check_variables(text: str) -> None:
    """Each SWARM_NODE_* variable sets something."""
    for name in VARIABLE.findall(text):
        known = name.removesuffix(FILE_SUFFIX) in all_variables() or name in COMMAND_VARIABLES
        assert known, f"{name} sets nothing: no key of the configuration and no option has it"
