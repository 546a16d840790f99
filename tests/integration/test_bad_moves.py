"""Mistakes of somebody at a terminal: what each is answered, with which exit code, and that nothing is left behind.

Most are answered in this process, which loads no torch for them. `swarm-node` as a process of its own answers a few.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.manifests import make_manifest, write_manifest
from swarm_protocol.transports.ports import Port
from tests.support.disks import leave
from tests.support.fake_transport import address
from tests.support.waiting import PATIENCE_S

SWARM = "ab" * 32
DEAD = f"swarm://{SWARM}?peer=/ip4/127.0.0.1/tcp/9/p2p/{address(1).rpartition('/')[2]}"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in [name for name in os.environ if name.startswith("SWARM_NODE_")]:
        monkeypatch.delenv(name)
    Path("bad.toml").write_text("rounds = \n")
    Path("grpo.toml").write_text("[grpo]\nlos = 'gspo'\n")
    Path("broken.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\nnot json\n')
    Path("q.tsv").write_text("frage\tantwort\n1+1?\t2\n")
    Path("a_file").write_text("")
    write_manifest(make_manifest("demo", ["gcd"]), Path("demo.toml"))
    yield tmp_path


def answer(*words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), env=env, prog_name="swarm-node")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


MOVES: list[tuple[list[str], str]] = [
    (["local", "--set", "grpo.los=gspo"], "unknown key grpo.los in --set; did you mean grpo.loss?"),
    (["local", "--config", "grpo.toml"], "unknown key grpo.los in grpo.toml; did you mean grpo.loss?"),
    (["local", "--set", "grpo.loss=gsop"], "or package.module:function; did you mean 'gspo'?"),
    (["local", "--config", "bad.toml"], "bad.toml is not valid TOML"),
    (["loacl"], "Did you mean 'local'?"),
    (["local", "--round", "3"], "--rounds"),
    (["local", "-v", "-q"], "contradict each other"),
    (["join", "swarm://abc"], "the id in this link has 3 characters instead of 64: copy the whole link"),
    (["join", f"swarm://{SWARM}"], "this link names no peer to ask"),
    (["join", "nowhere.toml"], "there is no manifest nowhere.toml"),
    (["join"], "which swarm?"),
    (["join", ""], "which swarm? Give a link, such as 'swarm://"),
    (["join", " "], "which swarm? Give a link, such as 'swarm://"),
    (["local", "--set", "rewards.functions=[3]"], "must be a table, such as { path = "),
    (["local", "--set", "grpo=3"], "must be a table; set its keys one by one, such as grpo."),
    (["local", "--set", "tasks=[3]"], "must be a table, such as { "),
    (["local", "--reward", "nowhere.py:close"], "there is no file nowhere.py"),
    (["local", "--model", "nope"], "there is no directory nope, and a model of the hub is named OWNER/NAME"),
    (
        ["local", "--model", "./nope"],
        "no model at nope: give a directory in Hugging Face layout, a GGUF file or a hub id",
    ),
    (["local", "--run-dir", "a_file"], "a_file is not a directory; choose another"),
    (["local", "--tasks", "gdc"], "unknown task 'gdc'; did you mean 'gcd'?"),
    (["local", "--tasks", "countdown"], "'countdown' is refused: its scorer executes"),
    (["local", "--tasks", "broken.jsonl"], "task file broken.jsonl, line 2"),
    (["local", "--tasks", "q.tsv"], "no column `question`; it has `frage`, `antwort`. Name its columns in"),
    (["local", "--tasks", "openai/gsm8k"], "a data set of the Hugging Face hub is called hf:openai/gsm8k"),
    (["eval", "nothing"], "there is no directory nothing"),
    (["eval", "runs/nothing"], "no run in runs/nothing"),
    (["export", "runs/nothing", "out"], "no run in runs/nothing"),
    (["resume", "runs/nothing"], "no run in runs/nothing: `swarm-node resume RUN` takes a run directory"),
    (["unpause", "runs/nothing"], "no run in runs/nothing"),
    (["pause", "runs/nothing"], "no run in runs/nothing"),
]


@pytest.mark.parametrize(("words", "said"), MOVES, ids=[" ".join(words)[:50] for words, _ in MOVES])
def test_a_mistake_is_named_at_once(words: list[str], said: str, place: Path) -> None:
    before = sorted(path.name for path in place.iterdir())
    code, told = answer(*words)
    assert code == 2 and said in " ".join(told.split()), told
    assert "Traceback" not in told and "starting" not in told
    assert sorted(path.name for path in place.iterdir()) == before, "nothing is left behind"


def test_a_mistake_in_the_environment_is_named() -> None:
    code, told = answer("local", env={"SWARM_NODE_GRPO__LOS": "gspo"})
    assert code == 2 and "did you mean SWARM_NODE_GRPO__LOSS?" in told


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_chosen_port_that_is_taken_ends_the_start(taken: int, place: Path) -> None:
    listen = ["--listen", "127.0.0.1", "--port", str(taken)]
    for command in (["join", "demo.toml"], ["bootstrap", "demo.toml"]):
        code, told = answer(*command, *listen)
        assert code == 75 and f"port {taken} of 127.0.0.1 is taken" in told and "choose another --port" in told
    assert not (place / "runs").exists()


def test_a_port_of_the_node_s_own_choice_moves_on(taken: int) -> None:
    said: list[str] = []
    port = Port("127.0.0.1", taken, report=said.append, named=False)
    try:
        assert port.take() != taken and said == [f"port {taken} is taken: listening on {port.number}"]
    finally:
        port.release()


def test_the_port_of_health_that_is_taken_ends_the_start(taken: int, place: Path) -> None:
    code, told = answer("local", "--health-port", str(taken))
    assert code == 75 and "choose another --health-port" in told and not (place / "runs").exists()


def test_a_second_node_in_one_directory_is_refused() -> None:
    Path("runs/a").mkdir(parents=True)
    with RunDir.open("runs/a"):
        code, told = answer("local", "--run-dir", "runs/a")
    assert (
        code == 75
        and f"runs/a is in use by process {os.getpid()}: stop it, or choose another --name or --run-dir" in told
    )


def test_a_disk_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 2**22)
    code, told = answer("local", "--run-dir", "r")
    assert code == 75 and "for three checkpoints of 5.0 MiB: 4.0 MiB are free" in told and not Path("r").exists()


def process(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarm_node", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_dead_link_obeys_minutes() -> None:
    done = process("join", DEAD, "--minutes", "0.03", "--run-dir", "r", "--listen", "127.0.0.1")
    assert done.returncode == 1, done.stderr
    assert "0.03 minutes are over before training began: nobody answers at" in done.stderr
    first = done.stdout.splitlines()[0]
    assert re.fullmatch(r"\S+Z INFO    starting \(loading torch\) …", first)


REWARDS = """
def few(prompts, completions, **columns):
    return [1.0]

def crash(prompts, completions, **columns):
    return [1 / 0 for _ in completions]
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("few", ["reward function 'few' in rewards.py, line ", "gave 1 rewards for"]),
        ("crash", ["ZeroDivisionError: division by zero", "rewards.py", "line 6"]),
    ],
)
def test_a_failing_reward_function_is_located(function: str, said: list[str]) -> None:
    Path("rewards.py").write_text(REWARDS)
    small: list[Any] = ["--set", "rollouts.groups=2", "--set", "eval.questions=0", "--rounds", "1", "--run-dir", "r"]
    done = process("local", "--reward", f"rewards.py:{function}", *small)
    assert done.returncode == 2, done.stderr
    assert all(part in done.stderr for part in said), done.stderr
    shutil.rmtree("r", ignore_errors=True)
