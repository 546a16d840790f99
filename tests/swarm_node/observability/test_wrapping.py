"""Sentences on a narrow terminal, and the commands in them."""

from __future__ import annotations

import pytest

from swarm_node.observability.wrapping import wrapped

JOIN = "swarm-node join 'swarm://0031a11bb5ab429b?peer=/ip4/192.0.2.1/tcp/31330/p2p/12D3KooW' --name bob"


def test_short_lines_stay_as_they_are() -> None:
    assert wrapped("`swarm-node resume runs/a` goes on", 80) == "`swarm-node resume runs/a` goes on"


def test_words_are_broken_at_the_width() -> None:
    lines = wrapped("a sentence of several words that is longer than so many columns", 20, indent=2).split("\n")
    assert all(len(line) <= 20 for line in lines) and all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize("width", [20, 48, 80])
@pytest.mark.parametrize("command", [JOIN, "swarm-node resume 'runs/my run' --rounds 120"])
def test_a_command_is_never_broken(width: int, command: str) -> None:
    lines = wrapped(f"the node has stopped after so many rounds; `{command}` goes on with it", width).split("\n")
    assert sum(command in line for line in lines) == 1
    [own] = [line for line in lines if command in line]
    if len(command) > width - 3:
        assert own == command, "it stands alone, as it is typed"


@pytest.mark.parametrize("before", ["", "next      ", "          .venv/bin/", "          /usr/bin/python3 -m "])
def test_a_line_that_is_a_command_is_left_alone(before: str) -> None:
    line = before + (JOIN.replace("swarm-node", "swarm_node", 1) if before.endswith("-m ") else JOIN)
    assert wrapped(line, 80, indent=10) == line
