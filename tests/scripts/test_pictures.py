"""The pictures of terminals: what is read from a screen, what is cut, and what is drawn."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.pictures import LEFT_OUT, cut, is_sharing
from scripts.terminal import COLOURS, COLUMNS, Run, Terminal, svg

PLAIN = COLOURS["default"]


def line(text: str) -> list[Run]:
    return [(text, PLAIN, False)]


def screen(command: str, folder: Path) -> list[list[Run]]:
    terminal = Terminal(command, folder, os.environ)
    try:
        terminal.ended()
        return terminal.lines()
    finally:
        terminal.stop()


def test_a_screen_has_command_colours_and_redrawn_lines(tmp_path: Path) -> None:
    script = tmp_path / "say"
    script.write_text(r"printf 'one\n\033[1;32mgood\033[0m bad\nround 1\r\033[2Kround 2\n'")
    found = screen("sh say", tmp_path)
    assert found[0] == line("$ sh say") and found[1] == line("one")
    assert found[2] == [("good", COLOURS["green"], True), (" bad", PLAIN, False)]
    assert found[3] == line("round 2") and len(found) == 4


def test_a_long_line_wraps_at_the_edge(tmp_path: Path) -> None:
    assert screen("printf %090d 0", tmp_path)[1:] == [line("0" * COLUMNS), line("0" * 10)]


def test_a_failing_command_draws_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit code 3:\n.*told why"):
        screen("echo told why; exit 3", tmp_path)


def test_stop_interrupts_all_processes_of_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal("echo here; cat | cat", tmp_path, os.environ)
    terminal.until(lambda text: "\nhere" in text)
    terminal.stop()
    assert "here" in terminal.text()


def test_what_is_cut_out_leaves_a_mark() -> None:
    lines = [line(text) for text in ("$ do", "a", "round 1", "b", "round 2", "c", "end")]
    assert cut(lines, ("$ ", "round"), ("round ", "end")) == [*lines[:2], LEFT_OUT, *lines[4:6]]
    assert cut(lines, ("end", "")) == lines[6:]
    with pytest.raises(SystemExit, match="no line begins with 'other'"):
        cut(lines, ("other", ""))


@pytest.mark.parametrize(("round", "groups", "shares"), [(150, "2.5", True), (149, "2.5", False), (2000, "0.0", False)])
def test_a_member_is_drawn_once_it_shares(round: int, groups: str, shares: bool) -> None:
    bar = f"round {round}, 0.27 s each\nreward 0.4\n1 other, {groups} of their groups a round"
    assert is_sharing(f"started\n{bar}") is shares


def test_a_picture_has_each_line_at_its_place() -> None:
    root = ElementTree.fromstring(svg("A & B", {"one": [line("a < b"), []], "two": [[("  x", PLAIN, True)]]}))
    spans = [span for span in root.iter() if span.tag.endswith("tspan")]
    assert [span.text for span in spans] == ["a < b", "  x"] and spans[1].get("class") == "b"
    rows = [float(text.get("y", 0)) for text in root.iter() if text.tag.endswith("}text")]
    assert rows == sorted(rows) and rows[-1] < float(root.get("viewBox", "").split()[3])
