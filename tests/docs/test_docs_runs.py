"""What the documentation has people type does what it says: the pages' own words, run.

    a page     what ends by itself, from top to bottom, in an empty directory: make, train, measure, export, merge
    README     two terminals train in a swarm, a third is where they meet; docs/stages.md: two that hold one policy

Nothing is added but the environment: few rounds, short answers, ports on this machine only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from tests.support.pages import (
    PAGES,
    Command,
    Fence,
    commands,
    fences,
    lines,
    name_of,
    split,
    stands_for_something,
)
from tests.support.placing import HERE
from tests.support.processes import LINK
from tests.support.repository import ROOT
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first import of everything takes minutes on a busy machine
    pytest.mark.filterwarnings("default"),  # commands are run in this process, which imports what warns
]
README = ROOT / "README.md"
QUICK = {
    "SWARM_NODE_ROLLOUTS__GROUP_SIZE": "5",
    "SWARM_NODE_ROLLOUTS__MAX_NEW_TOKENS": "8",
    "SWARM_NODE_EVAL__QUESTIONS": "0",
    "SWARM_NODE_METRICS__SAMPLES_EVERY": "1",
}
ONCE = {"SWARM_NODE_ROUNDS": "2", "SWARM_NODE_QUESTIONS": "7", "SWARM_NODE_SAMPLES": "2", "SWARM_NODE_STEPS": "2"}
LOOPBACK = {
    "SWARM_NODE_NETWORK__LISTEN": "127.0.0.1",
    "SWARM_NODE_NETWORK__PORT": "0",
    "SWARM_NODE_NETWORK__GOSSIP_PORT": "0",
    "SWARM_NODE_PACE_S": "1",
}
ENDS_WELL = {"doctor": (0, 1)}
"""Exit codes; the doctor says with 1 that something is wrong with the machine."""
OF_RUNS = {"compare", "doctor", "eval", "export", "merge", "pause", "resume", "samples", "status", "stop", "unpause"}
HUB_ID = re.compile(r"[A-Za-z][\w-]*/[\w.-]+")
STARTER = ROOT / "swarm_node/policy/starter_model"


def runs_here(command: Command) -> bool:
    """It ends by itself and needs neither the internet nor a swarm nor anything that the reader is to fill in."""
    if command.program != "swarm-node" or not command.typed or len(command.words) < 2:
        return False
    if command.words[1] in OF_RUNS and command.words[2:3] and command.words[2].endswith(".toml"):
        return False  # a swarm
    models = [w.rpartition("=")[2] for w in command.words if w.startswith(("--model=", "policy.model="))]
    models += [after for word, after in zip(command.words, command.words[1:], strict=False) if word == "--model"]
    return (
        command.words[1] in HERE | {"local"}
        and not any(map(stands_for_something, command.words))
        and not any(map(HUB_ID.fullmatch, models))
        and not any(model == "smollm2" or model.endswith(".gguf") for model in models)
        and not any(word.startswith("hf:") for word in command.words)
        and not {"--nice", "--stages"} & {*command.words}  # who is nice stays so; processes are started by the README
    )


class Reader:
    """Somebody who types what a page says, in a directory of their own."""

    def __init__(self, page: Path, folder: Path, base: Callable[[bool], Path]) -> None:
        self.page = page
        self.folder = folder
        self.base = base
        self.config = ""
        (folder / "configs").symlink_to(ROOT / "configs")

    def read(self) -> int:
        """From top to bottom; the number of things that were run."""
        done = 0
        for fence in fences(self.page):
            if fence.language == "toml":
                self.config = fence.text
            elif fence.language == "python":
                self.execute(fence)
                done += 1
            elif fence.is_shell and not fence.is_script:
                for line in lines(fence.text):
                    for words in split(line):
                        command = Command(fence.where, tuple(words), True)
                        if runs_here(command):
                            self.run(command)
                            done += 1
        return done

    def run(self, command: Command) -> None:
        self.provide(command)
        unset = ["SWARM_NODE_QUESTIONS"] if "--all" in command.words else []
        unset += ["SWARM_NODE_ROLLOUTS__GROUP_SIZE"] if command.words[1] == "eval" else []  # it refuses that one
        done = CliRunner().invoke(app, list(command.words[1:]), env=dict.fromkeys(unset))
        assert done.exit_code in ENDS_WELL.get(command.words[1], (0,)), f"{command}\n{done.output}\n{done.exception!r}"

    def provide(self, command: Command) -> None:
        """What the page takes for granted: runs, question files, the configuration that it shows."""
        verb, *words = command.words[1:]
        if words == [] and verb == "status":
            words = ["runs/node"]
        for word in [*words, *re.findall(r'"([^"]+\.jsonl)"', " ".join(words))]:
            path = self.folder / word
            if path.exists():
                continue
            if re.fullmatch(r"runs/\w+", word) and verb in OF_RUNS:
                shutil.copytree(self.base("import PeftModel" in self.page.read_text()), path)
            elif word.endswith(".jsonl") and ("--out", word) not in pairwise(words):
                asked = [(f"{n} + {n} =", 2 * n) for n in range(10, 40)]
                rows = [{"question": q, "answer": a, "prompt": q, "extra_info": {"answer": a}} for q, a in asked]
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            elif word.endswith(".toml") and words[words.index(word) - 1] == "--config":
                path.write_text(self.config)

    def execute(self, fence: Fence) -> None:
        """Python, with the starter in place of models of the hub."""

        def offline(m: re.Match[str]) -> str:
            return m[0] if (self.folder / m[1]).exists() or not HUB_ID.fullmatch(m[1]) else f'"{STARTER}"'

        try:
            exec(
                compile(re.sub(r'"([^"\n]+)"', offline, fence.text), fence.where, "exec", dont_inherit=True),
                {"__name__": "__main__"},
            )
        except Exception as error:
            raise AssertionError(f"{fence.where}: {error!r}") from error


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The run that `make demo` makes, two rounds of it; with an adapter if the page loads one."""

    @cache
    def made(adapter: bool) -> Path:
        path = tmp_path_factory.mktemp("base") / "run"
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        demo = subprocess.check_output(["make", "-n", "demo"], cwd=ROOT, env=alone, text=True)
        [words] = split(next(line for line in demo.splitlines() if "--config" in line))
        words += ["--run-dir", str(path), *(["--lora"] if adapter else [])]
        words[words.index("--config") + 1] = str(ROOT / words[words.index("--config") + 1])
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, done.output
        return path

    return made


TYPED = [page for page in PAGES if any(map(runs_here, commands(page))) or page.name == "develop.md"]


@pytest.mark.parametrize("page", TYPED, ids=name_of)
def test_what_a_page_has_people_type_runs(
    page: Path, base: Callable[[bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (QUICK | ONCE).items():
        monkeypatch.setenv(name, value)
    assert Reader(page, tmp_path, base).read()


class Terminals:
    """Shells in one directory, as of somebody who tries the README."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: list[subprocess.Popen[bytes]] = []
        program = folder / ".venv/bin/swarm-node"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m swarm_node "$@"\n')
        program.chmod(0o755)
        self.env = os.environ | QUICK | LOOPBACK | {"PATH": f"{program.parent}:{os.environ['PATH']}"}

    def type(self, text: str) -> subprocess.Popen[bytes]:
        """A block, in a terminal of its own; its output is in `outputs`."""
        with (self.folder / f"terminal-{len(self.open)}.txt").open("wb") as output:
            shell = subprocess.Popen(
                ["bash", "-ec", text],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.open.append(shell)
        return shell

    @property
    def outputs(self) -> str:
        """The end of what is on all of them."""
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("terminal-*.txt")))

    def until(self, what: Callable[[], Any], seconds: float = 200.0) -> Any:
        def while_open() -> Any:
            assert not any(shell.poll() for shell in self.open), self.outputs
            return what()

        return until(while_open, seconds, lambda: self.outputs)

    def last(self, run: str, metric: str) -> float:
        path = self.folder / "runs" / run / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return json.loads(whole[-1]).get(metric, 0.0) if whole else 0.0

    def press_ctrl_c(self, shell: subprocess.Popen[bytes]) -> int:
        os.killpg(shell.pid, signal.SIGINT)
        return shell.wait(120)

    def close(self) -> None:
        for shell in self.open:
            try:
                os.killpg(shell.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            shell.wait()


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    opened = Terminals(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


def blocks(page: Path, *words: str) -> list[str]:
    """Of shell on the page, those with all of these words and a name."""
    shell = [fence.text for fence in fences(page) if fence.is_shell and "--name" in fence.text]
    found = [text for text in shell if all(word in text for word in words)]
    assert found, f"{page} has no block with {words}: mend tests/docs/test_docs_runs.py"
    return found


def ask(*words: str) -> str:
    """What a command that ends says."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code in (0, 1), done.output
    return done.output


@pytest.mark.long
def test_the_terminals_of_the_readme_are_a_swarm(terminals: Terminals, monkeypatch: pytest.MonkeyPatch) -> None:
    (meeting, joining), told = blocks(README, "link.txt"), terminals.folder / "link.txt"
    terminals.type(meeting)
    link = terminals.until(lambda: told.exists() and (m := LINK.search(told.read_text())) and m.group())
    shells = [terminals.type(line) for line in lines(joining)]
    names = re.findall(r"--name (\w+)", joining)
    assert len(names) == len(shells) == 2
    for name in names:
        terminals.until(lambda name=name: terminals.last(name, "swarm/groups_used") > 0)  # type: ignore[misc]

    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    terminals.until(lambda: names[1] in ask("status", f"runs/{names[0]}"))
    assert names[0] in ask("status", link)
    assert "members" in ask("doctor", link)
    [dashboard] = re.findall(r"`(dashboard [^`]+)` shows the swarm", README.read_text())
    shells.append(terminals.type(f"swarm-node {dashboard}"))
    shown = terminals.folder / f"terminal-{len(shells)}.txt"
    address = terminals.until(lambda: (m := re.search(r"http://\S+", shown.read_text())) and m.group())

    def page(path: str) -> str:
        with urllib.request.urlopen(f"{address.rstrip('/')}/api/runs{path}", timeout=60) as answer:
            return answer.read().decode()

    [swarm] = json.loads(page(""))["runs"]
    terminals.until(lambda: all(f'"{name}"' in page(f"/{urllib.parse.quote(swarm['id'])}") for name in names))

    assert "runs/" in ask("pause", f"runs/{names[0]}")
    events = terminals.folder / "runs" / names[0] / "events.jsonl"
    terminals.until(lambda: "pause" in events.read_text())
    ask("unpause", f"runs/{names[0]}")
    rounds = terminals.last(names[0], "round")
    terminals.until(lambda: terminals.last(names[0], "round") > rounds)
    assert [terminals.press_ctrl_c(shell) for shell in shells] == [0, 0, 0], terminals.outputs


@pytest.mark.long
def test_two_terminals_of_the_page_on_stages_hold_one_policy(terminals: Terminals) -> None:
    first, second = blocks(ROOT / "docs/stages.md", "--stages 2", "--name")[:2]
    a = terminals.type(first)
    printed = terminals.folder / "terminal-0.txt"
    link = terminals.until(lambda: (m := re.search(r"join '(swarm://\S+)' --stages", printed.read_text())) and m[1])
    assert "swarm://…" in second
    b = terminals.type(second.replace("swarm://…", link))
    terminals.until(lambda: terminals.last("a", "round") >= 2)
    assert [terminals.press_ctrl_c(shell) for shell in (b, a)] == [0, 0], terminals.outputs
