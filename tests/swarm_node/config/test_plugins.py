"""Errors of the user's own code name its file and line, and show its frames alone."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm_node.config.plugins import (
    blamed,
    load_function,
    name_in_program,
    only_in_a_program,
    plugin_error,
    users_own,
)
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.errors import PluginError, UserError

CRASHES = """\
import json

def parse(text):
    return json.loads(text)

def nested(completions, **columns):
    return [parse(text) for text in completions]

def chained(completions, **columns):
    try:
        nested(completions)
    except ValueError as error:
        raise KeyError("no score") from error

def endless(completions, **columns):
    return endless(completions)
"""


@pytest.fixture
def crashes(tmp_path: Path) -> Path:
    path = tmp_path / "crashes.py"
    path.write_text(CRASHES)
    return path


def failure(path: Path, name: str) -> PluginError:
    function = load_function(f"{path}:{name}", "reward function")
    try:
        function(completions=["{"])
    except Exception as error:
        return plugin_error(f"reward function {name!r} failed", error)
    raise AssertionError("it did not fail")


def test_message_names_the_users_innermost_line(crashes: Path) -> None:
    """The frames of the library that the user called are shown, but the user can change line 4 only."""
    error = failure(crashes, "nested")
    assert "'nested' failed in crashes.py, line 4: JSONDecodeError: Expecting property name" in str(error)
    text = "\n".join(error.trace)
    assert f'File "{crashes}", line 7, in nested' in text and "return json.loads(text)" in text
    assert "json/decoder.py" in text and text.splitlines()[-1].startswith("json.decoder.JSONDecodeError")


def test_causes_of_an_error_are_shown(crashes: Path) -> None:
    text = "\n".join(failure(crashes, "chained").trace)
    assert "direct cause" in text and "KeyError: 'no score'" in text and "return json.loads(text)" in text


def test_endless_recursion_is_shown_in_short(crashes: Path) -> None:
    error = failure(crashes, "endless")
    assert "line 16: RecursionError" in str(error) and len(error.trace) < 70


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "typo.py"
    path.write_text("def close(:\n    pass\n")
    with pytest.raises(PluginError, match=r"cannot import .*typo.py in .*typo.py, line 1: SyntaxError") as caught:
        load_function(f"{path}:close", "reward function")
    assert "def close(:" in "\n".join(caught.value.trace)


class Incomparable(Exception):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = Exception.__hash__


def test_errors_that_cannot_be_compared_are_handed_over() -> None:
    own = Incomparable("second")
    own.__context__ = Incomparable("first")
    failed = plugin_error("grpo.loss failed", own)
    failed.__cause__ = own
    assert users_own(failed) is own and own.__notes__ == ["swarm_node: grpo.loss failed: Incomparable: second"]


def test_a_plugin_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    for name in ("folder", "pipe", "zero"):
        with pytest.raises(UserError, match=rf"grpo.loss '.*{name}.py:f': .*{name}.py is no file, but a directory"):
            load_function(f"{tmp_path / name}.py:f", "grpo.loss")


def test_a_module_that_is_not_there_is_no_users_own_error() -> None:
    with pytest.raises(UserError, match="cannot import nowhere.py") as caught:
        load_function("nowhere.py:f", "reward function")
    assert users_own(caught.value) is None


def test_only_plugins_are_blamed(crashes: Path) -> None:
    function = load_function(f"{crashes}:nested", "loss")
    with pytest.raises(ValueError) as caught:
        function(completions=["{"])
    assert isinstance(blamed(caught.value), PluginError)
    with pytest.raises(ZeroDivisionError) as other:
        _ = 1 / 0
    assert blamed(other.value) is None


LOSS = """
import torch
from swarm_node.grpo.objective import Loss

class Broken(Loss):
    def surrogate(self, tokens):
        return tokens.logprobs @ torch.ones(1, 2, 3)
"""


@pytest.mark.slow
def test_a_command_shows_the_users_frames(tmp_path: Path) -> None:
    """A method of the user's class is called by the package, and nothing around it expects an error."""
    (tmp_path / "own.py").write_text(LOSS)
    command = ["local", "--set", "grpo.loss=own.py:Broken", "--rounds", "1", "--set", "eval.questions=0"]
    done = subprocess.run(
        [sys.executable, "-m", "swarm_node", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2 and "own.py, line 7: RuntimeError" in last
    assert "return tokens.logprobs @ torch.ones(1, 2, 3)" in done.stderr
    assert "swarm_node/" not in done.stderr


def test_users_errors_are_one_line(crashes: Path) -> None:
    for name in ("nothing", "Judge.strict"):
        with pytest.raises(UserError, match=f"has no function '{name}'"):
            load_function(f"{crashes}:{name}", "reward function")


class Judge:
    def __call__(self, **columns: Any) -> list[float]:
        return []

    def strict(self, **columns: Any) -> list[float]:
        return []

    @staticmethod
    def plain(**columns: Any) -> list[float]:
        return []

    class Inner:
        pass


@pytest.mark.parametrize(
    ("function", "path", "name"),
    [
        (failure, "test_plugins:failure", "failure"),
        (lambda **columns: [], "test_plugins:<lambda>", "<lambda>"),
        (Judge(), "test_plugins:Judge()", "Judge"),
        (Judge().strict, "test_plugins:Judge.strict()", "strict"),
        (Judge.plain, "test_plugins:Judge.plain", "plain"),
        (Judge.Inner, "test_plugins:Judge.Inner", "Inner"),
        (functools.partial(failure), "functools:partial()", "partial"),
    ],
)
def test_functions_of_a_program_have_names(function: Callable[..., Any], path: str, name: str) -> None:
    """What an import finds is loaded by its name again, and nothing else is taken for it."""
    found = name_in_program(function)
    assert found.endswith(path) and RewardFunctionConfig(path=found).name == name
    assert only_in_a_program(found) == (function is not failure)
    if function is failure:
        assert load_function(found, "reward function") is failure
    else:
        with pytest.raises(UserError, match="is one that a program gave to swarm_node.train"):
            load_function(found, "reward function")
