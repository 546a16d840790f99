"""Every command in the documentation is one: its program, options, keys, variables and files exist.

What can be run here is run by test_docs_runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import PAGES, Command, commands, fences, name_of, split
from tests.support.placing import check, check_syntax, check_variables
from tests.support.repository import ROOT

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@every_page
def test_the_commands_of_a_page_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in dict.fromkeys(commands(page)):
        check(command, monkeypatch)


@every_page
def test_scripts_parse_and_variables_set_something(page: Path) -> None:
    check_variables(page.read_text())
    for fence in fences(page):
        if fence.is_shell:
            check_syntax(fence.text)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("swarm-node join swarm.toml --nmae alice", "No such option: --nmae"),
        ("swarm-node joyn swarm.toml", "joyn"),
        ("swarm-node join swarm.toml --rounds many", "'many' is not a valid int"),
        ("swarm-node join swarm.toml --set sharing.onw=4", "unknown key sharing.onw"),
        ("swarm-node doctor --fxi", "No such option: --fxi"),
        ("swarm-node export", "Missing argument 'RUN… OUT'"),
        ("make dmeo", "No rule to make target 'dmeo'"),
        ("make demo TROCH_INDEX=x", "knows no variable TROCH_INDEX"),
        ("python -m benchmarks.sharnig", "there is no benchmarks.sharnig"),
        ("python -m benchmarks.sharing --setting none", "its parser does not take"),
        ("docker build -f docker/Dockerfiel .", "the repository has no docker/Dockerfiel"),
        ("rl-swarm start", "add it to ELSEWHERE"),
    ],
)
def test_a_wrong_command_is_noticed(line: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [words] = split(line)
    with pytest.raises(AssertionError, match="here.md:1"):
        try:
            check(Command("here.md:1", tuple(words), True), monkeypatch)
        except AssertionError as error:
            assert reason in str(error)
            raise


def test_wrong_variables_and_scripts_are_noticed() -> None:
    with pytest.raises(AssertionError, match="SWARM_NODE_GRPO__LSOS sets nothing"):
        check_variables("`SWARM_NODE_GRPO__LSOS=gspo`, not SWARM_NODE_*")
    with pytest.raises(AssertionError, match="syntax error"):
        check_syntax("if true; then echo")
