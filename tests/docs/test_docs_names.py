"""Options, keys and configuration files that the documentation shows are real, and its Python is Python."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from benchmarks.sweep import grid_settings, read_grid
from swarm_node.cli.app import app
from swarm_node.cli.commands.sweep import Sweep
from swarm_node.config import load_config
from swarm_node.config.keys import all_keys
from swarm_node.install import WHEELS
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import parse_manifest
from tests.support.pages import ELSEWHERE, PAGES, Fence, fences, name_of, spans
from tests.support.repository import ROOT

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
SECTIONS = {key.partition(".")[0] for key in all_keys() if "." in key and "[]" not in key}
FILES = (".md", ".py", ".toml", ".json", ".jsonl", ".png")


@cache
def options() -> frozenset[str]:
    """Of all commands and benchmarks."""

    def walk(command: Any) -> Iterator[str]:
        for parameter in command.params:
            yield from parameter.opts
            yield from parameter.secondary_opts
        for part in getattr(command, "commands", {}).values():
            yield from walk(part)

    benchmarks = "".join(path.read_text() for path in ROOT.glob("benchmarks/**/*.py"))
    ours = {*walk(typer.main.get_command(app)), "--help", "--version"}
    return frozenset(ours | set(re.findall(r'add_argument\("(--[\w-]+)"', benchmarks)))


def options_of_others(page: Path, paragraph: str) -> str:
    """Where an option that is not ours may come from: commands of others on the page, or named in the paragraph."""
    others = re.compile(rf"`(?:{'|'.join(ELSEWHERE)}) ")
    shell = "".join(fence.text for fence in fences(page) if fence.is_shell)
    return shell + (paragraph if others.search(paragraph) else "")


@every_page
def test_options_in_backticks_exist(page: Path) -> None:
    for where, text, paragraph in spans(page):
        for option in re.findall(r"(?:^|[\s(])(--[a-z][\w-]*)", text):
            known = option in options() or option in options_of_others(page, paragraph)
            assert known, f"{where}: no command and no benchmark has {option}"


@every_page
def test_keys_in_backticks_exist(page: Path) -> None:
    for where, text, _ in spans(page):
        m = re.match(r"([a-z_]+(?:\.[a-z_]+)+)(?= ?=|$)", text)
        if m and m[1].partition(".")[0] in SECTIONS and not m[1].endswith(FILES):
            assert m[1] in all_keys(), f"{where}: the configuration has no {m[1]}"


@every_page
def test_keys_in_tables_of_a_section_exist(page: Path) -> None:
    """A table whose first heading is `pipeline.…` lists keys of that section."""
    for m in re.finditer(r"^\| `(\w+)\.…` .*\n\|[ -|]*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
        names = [name for row in m[2].splitlines() for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])]
        assert names
        for name in names:
            assert f"{m[1]}.{name}" in all_keys(), f"{name_of(page)}: the configuration has no {m[1]}.{name}"


@every_page
def test_python_files_of_the_tests_exist(page: Path) -> None:
    known = [path.as_posix() for path in (ROOT / "tests").rglob("*.py")]
    for name in re.findall(r"(?<![\w/])[\w/]*(?:test_\w+|_scenarios|_attacks)\.py", page.read_text()):
        assert any(path.endswith(f"/{name}") for path in known), f"{name_of(page)}: there is no {name}"


@every_page
def test_configuration_files_are_read(page: Path, tmp_path: Path) -> None:
    for fence in fences(page):
        if fence.language == "toml":
            try:
                read_toml(fence, tmp_path / "shown.toml")
            except Exception as error:
                raise AssertionError(f"{fence.where}: {error}") from error


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/fleet.md", "docker/skypilot.yaml"])
def test_wheels_are_of_this_version(page: str) -> None:
    pages = re.findall(r"https://\S*/expanded_assets/\S*", (ROOT / page).read_text())
    assert pages == [WHEELS]


def read_toml(fence: Fence, path: Path) -> None:
    """By who would read it: a manifest, a grid or a configuration. What is left out with `…` is filled in."""
    text = re.sub(r'"[0-9a-f]*…"', f'"{"0" * 64}"', fence.text)
    text = re.sub(r"12D3KooW…", Identity.generate().peer_id, text)
    path.write_text(text)
    table = tomllib.loads(text)
    if "search" in table:
        assert Sweep(path)
    elif "grid" in table:
        assert list(grid_settings(read_grid(path)))
    elif {"limits", "created", "shards", "averaging_period_s"} & table.keys():
        assert parse_manifest(text.encode()).tasks
    else:
        load_config(path)


def test_wrong_files_are_noticed(tmp_path: Path) -> None:
    for text in ("[grpo]\nlsos = 1", 'name = "x"\nshards = 0', "[grid]\nnothing = [1]"):
        with pytest.raises(Exception, match="lsos|shards|nothing"):
            read_toml(Fence("here.md:1", "toml", text), tmp_path / "shown.toml")


@every_page
def test_python_and_json_are_what_they_say(page: Path) -> None:
    for fence in fences(page):
        if fence.language == "python":
            compile(fence.text, fence.where, "exec")
        if fence.language == "json":
            msgspec.json.decode(fence.text)
