"""Commands that look at a run directory which somebody else made: no file of it hangs them, fills memory or reaches the
terminal as a control sequence."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import NodeConfig
from swarm_node.config.own import dump_own
from swarm_node.errors import UserError
from swarm_node.observability.dashboard.tail import Tail
from swarm_node.storage.checkpoints import CheckpointStore, read_checkpoint
from swarm_node.storage.rundir import RunDir
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.manifest import parse_manifest
from tests.support.run_files import answered, metrics, write

Change = Callable[[Path], object]
ODD = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\u200b"


def a_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(dump_own(NodeConfig(), NodeConfig()))
    write(folder / "metrics.jsonl", metrics(1), metrics(2))
    write(folder / "samples.jsonl", answered(1, {"text": "3", "reward": 1.0, "times": 1}))
    write(folder / "events.jsonl", {"time": 1.0, "kind": "note", "text": "began"})
    (folder / "swarm.json").write_text(json.dumps({"role": "member", "swarm": "ab" * 32, "time": 1.0}))
    return folder


def pipe(name: str) -> Change:
    def do(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return do


def device(name: str) -> Change:
    return lambda run: ((run / name).unlink(missing_ok=True), (run / name).symlink_to("/dev/zero"))


def text(name: str, content: str) -> Change:
    def do(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content)

    return do


def status(**odd: object) -> Change:
    """Other values in swarm.json."""
    return lambda run: (run / "swarm.json").write_text(json.dumps(json.loads((run / "swarm.json").read_text()) | odd))


def alone(*changes: Change) -> Change:
    """These changes to a run that was never in a swarm."""
    return lambda run: ((run / "swarm.json").unlink(), [change(run) for change in changes])


def task(name: str) -> Change:
    """Another task in config.toml."""
    return lambda run: (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace('"small"', json.dumps(name))
    )


def digits(key: str) -> Change:
    """A number of 4,800 decimal digits in config.toml, which Python reads in hexadecimal, and refuses to show."""
    number = f"{key} = 0x{'f' * 4000}\n"
    return lambda run: (run / "config.toml").write_text(
        number + re.sub(rf"(?m)^{key} = .*\n", "", (run / "config.toml").read_text())
    )


def sparse(name: str) -> Change:
    """A file of 1 TiB that takes no room, with one whole line at its end."""

    def do(run: Path) -> None:
        with (run / name).open("wb") as file:
            file.write(b"{}\n")
            file.seek(2**40)
            file.write(b'\n{"round": 1, "reward": 0.5}\n')

    return do


STATE = "checkpoints/round-00000001/state.json"
TYPES = {"role": 5, "swarm": None, "time": "x", "peers": [1], "traffic": "y", "received": 3, "refused": {}}
CHANGES: dict[str, Change] = {
    **{f"pipe {name}": pipe(name) for name in ("config.toml", "events.jsonl", "lock", "metrics.jsonl", "swarm.json")},
    **{f"device {name}": device(name) for name in ("best.json", "metrics.jsonl", "samples.jsonl", "swarm.json")},
    "toml brackets": text("config.toml", "a = " + "[" * 3000 + "]" * 3000),
    "toml dots": text("config.toml", "a" + ".a" * 40_000 + " = 1\n"),
    "toml quotes": text("config.toml", 'a = "' + '\\"' * 2**18),
    **{f"toml digits of {name}": digits(name) for name in ("name", "rounds", "seed")},
    "toml number": text("config.toml", "grpo = 1\n"),
    "toml list": text("config.toml", '[grpo]\ncorrection = ["a"]\n'),
    "toml long": text("config.toml", "# " + "x" * 2**21),
    "json brackets": text("swarm.json", "[" * 100_000),
    "json types": text("swarm.json", json.dumps(TYPES)),
    **{f"pipe {name}": pipe(name) for name in (STATE, "paused", "waits", "health.json", "best.json", "samples.jsonl")},
    "state of odd types": text(
        STATE, json.dumps({"state": {"tally": 1, "held_out": [], "held_out_figures": {"round": "x"}}})
    ),
    "state brackets": text(STATE, '{"state":' * 5000),
    "time of 400 digits": status(time=10**400),
    "time before all": status(time=-math.inf),
    "no time": status(time=math.nan),
    "crew of no layers": status(
        crew={"whole": 1, "lead": None, "name": "", "count": 1, "updates": 1, "stages": [{"layers": []}], "held": []}
    ),
    "traffic without end": status(traffic={"restarts/gossip": math.inf, "bytes_in": 10**400}),
    "round that is a text": alone(text("metrics.jsonl", '{"round": "x"}\n')),
    "reward that is a table": alone(text("metrics.jsonl", '{"round": 1, "reward": {}}\n')),
    "home of nobody": task("~nobody-here/x.jsonl"),
    "long name": task("x" * 300 + ".jsonl"),
    "zero byte": task("a\0.jsonl"),
    **{f"sparse {name}": sparse(name) for name in ("events.jsonl", "metrics.jsonl", "samples.jsonl")},
    "number of 400 digits": text("metrics.jsonl", f'{{"round": 1{"0" * 400}, "reward": 1{"0" * 400}}}\n'),
}


READERS = {
    **{name: f"{name} {{run}}" for name in ("doctor", "eval", "samples", "status", "status -v")},
    "compare": "compare {run} {good}",
    "export": "export {run} {out}",
    "merge": "merge {run} {good} --out {out}",
    "resume": "resume {run} --dry-run",
}


@pytest.mark.parametrize("command", sorted(READERS))
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_an_odd_file_is_told_in_words(change: str, command: str, tmp_path: Path) -> None:
    run, good = a_run(tmp_path / "run"), a_run(tmp_path / "good")
    CHANGES[change](run)
    done = CliRunner().invoke(app, READERS[command].format(run=run, good=good, out=tmp_path / "out").split())
    assert done.exit_code in ((0, 1, 2) if command == "doctor" else (0, 2)), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 0 or done.output.strip()


def test_no_control_character_reaches_the_terminal(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    status = {
        "role": "member", "swarm": "ab" * 32, "swarm_name": ODD, "time": 1.0, "link": f"swarm://{ODD}",
        "received": {f"swarm/rejected/{ODD}": 3}, "peers": {ODD: {"name": ODD, "present": True, "used": 2}},
        "addresses": [ODD], "name": ODD,
    }  # fmt: skip
    (run / "swarm.json").write_text(json.dumps(status))
    prompt = NodeConfig.model_validate({"policy": {"system_prompt": ODD}})
    (run / "config.toml").write_text(dump_own(prompt, prompt))
    for words in (["status", str(run)], ["status", "-v", str(run)], ["compare", str(run), str(a_run(tmp_path / "b"))]):
        shown = CliRunner().invoke(app, words).output
        assert not any(character in shown for character in "\x1b\x07\x9b\u202e\u2066\u200b"), words


PROMPT = "\\u009b31m\\u202e"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round, in whose settings there is a reward function, and a key of no version."""
    run = tmp_path_factory.mktemp("trained") / "run"
    words = ["local", "--tasks", "small", "--rounds", "1", "--run-dir", str(run), "--set", "eval.questions=0"]
    sets = [word for each in ("groups=2", "max_new_tokens=8") for word in ("--set", f"rollouts.{each}")]
    assert CliRunner().invoke(app, [*words, *sets]).exit_code == 0
    settings = (run / "config.toml").read_text()
    function = '[{ path = "\\u001b]0;owned\\u0007\\u202ex.py:f" }]'
    for before, after in (
        ("functions = []", f"functions = {function}"),
        ('system_prompt = ""', f'system_prompt = "{PROMPT}"'),
    ):
        assert before in settings
        settings = settings.replace(before, after)
    (run / "config.toml").write_text(f'"\\u001b[2J\\u009b" = 1\n{settings}')
    return run


COMMANDS = {
    "compare": "compare {run} {run}",
    "doctor": "doctor {run}",
    "eval": "eval {run} --questions 7",
    "export": "export {run} {out}",
    "merge": "merge {run} {other} --out {out} --questions 0",
    "merge with questions": "merge {run} {other} --out {out} --questions 14",
    "resume": "resume {run}",
    "resume that shows settings": "resume {run} --dry-run --set rewards.functions=[]",
    "resume that shows them as JSON": "resume {run} --dry-run --json --set rewards.functions=[]",
    "samples": "samples {run}",
    "status": "status -v {run}",
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_no_command_prints_what_a_strangers_settings_say(command: str, trained: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    words = COMMANDS[command].format(run=trained, other=other, out=tmp_path / "out").split()
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code in (0, 1, 2) and not any(character in shown.output for character in "\x1b\x07\x9b\u202e")
    if command not in ("compare", "samples", "status"):
        assert "left out: ?[2J?" in shown.output
    if "shows" in command:
        assert "\\u009b" in shown.output.lower().replace("\\u0000", "\\u")
    if command in ("eval", "merge with questions"):
        assert "?]0;owned??x.py:f" in shown.output


@pytest.mark.parametrize("command", ["eval", "export", "merge"])
@pytest.mark.parametrize("odd", ["type", "shape", "names"])
def test_odd_weights_are_told_in_words(odd: str, command: str, trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    newest = read_checkpoint(max((run / "checkpoints").iterdir()), lambda state: None)
    policy = {name: tensor.to(torch.int8) for name, tensor in newest.tensors["policy"].items()}
    if odd == "shape":
        policy = {name: torch.zeros(3) for name in policy}
    store = CheckpointStore(run / "checkpoints", 2, print)
    store.save(2, {"policy": {} if odd == "names" else policy}, newest.state)
    store.close()
    words = COMMANDS[command].format(run=run, other=trained, out=tmp_path / "out").split()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 or (odd == "type" and command != "export" and not done.exit_code), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception


@pytest.mark.parametrize("figures", [{"held_out": "x"}, {"held_out_figures": {"trained_s": True}}], ids=str)
def test_odd_figures_end_a_resume_in_words(figures: dict[str, object], trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    newest = read_checkpoint(max((run / "checkpoints").iterdir()), lambda state: None)
    store = CheckpointStore(run / "checkpoints", 2, print)
    store.save(2, newest.tensors, newest.state | figures)
    store.close()
    settings = (run / "config.toml").read_text().replace(PROMPT, "")
    (run / "config.toml").write_text(settings)
    done = CliRunner().invoke(app, ["resume", str(run), "--rounds", "3", "--set", "rewards.functions=[]"])
    assert done.exit_code == 2 and "is not as a node of this version writes it" in done.output, done.output


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "metrics.jsonl", "metrics.tmp", "config.tmp", "peers.new"])
def test_a_strangers_run_writes_no_file_elsewhere(name: str, trained: Path, tmp_path: Path) -> None:
    """`resume` of a directory in which one of the run's own files is a link."""
    run, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(trained, run)
    mine.write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine)
    done = CliRunner().invoke(app, ["resume", str(run), "--rounds", "2", "--set", "rewards.functions=[]"])
    assert done.exit_code == 2 and f"{run / name} is no file, but a link" in done.output, done.output
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "below"),
    [
        *[("files", "ab/q.jsonl"), ("peers", "config.toml"), ("plots", "rewards.png"), ("export", "config.json")],
        *[("checkpoints", "round-00000001/state.json"), ("stages", "0/round-00000001/state.json")],
    ],
)
def test_no_linked_directory_leads_to_files_elsewhere(name: str, below: str, tmp_path: Path) -> None:
    run, mine, other = a_run(tmp_path / "run"), tmp_path / "mine", tmp_path / "run/other"
    mine.touch()
    (other / below).parent.mkdir(parents=True)
    (other / below).symlink_to(mine)
    (run / name).symlink_to("other")
    with pytest.raises(UserError, match="is no file, but a link"):
        RunDir.open(run)


@pytest.mark.parametrize("name", ["export", "files", "peers", "plots", "wandb-id.txt"])
def test_only_what_is_large_may_be_on_another_disk(name: str, tmp_path: Path) -> None:
    run, other = a_run(tmp_path / "run"), tmp_path / "other"
    other.mkdir()
    for large in ("checkpoints", "stages"):
        (run / large).symlink_to(other)
    RunDir(run).check_usable()
    (run / name).symlink_to(other)
    with pytest.raises(UserError, match=f"{name} is no file, but a link"):
        RunDir.open(run)


def test_a_directory_that_shows_nothing_is_refused(tmp_path: Path) -> None:
    """Its files cannot be listed, but opened by name."""
    run, folder = a_run(tmp_path / "run"), tmp_path / "run/files/ab"
    folder.mkdir(parents=True)
    (folder / "q.jsonl").symlink_to(tmp_path / "mine")
    folder.chmod(0o311)
    with pytest.raises(UserError):
        RunDir.open(run)
    folder.chmod(0o755)


def test_the_page_reads_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="pipe"):
        Tail(tmp_path / "metrics.jsonl").read()


def test_the_page_passes_over_holes(tmp_path: Path) -> None:
    sparse("metrics.jsonl")(tmp_path)
    tail = Tail(tmp_path / "metrics.jsonl")
    _, records = tail.read()
    while tail.behind:
        records += tail.read()[1]
    assert records == [{}, {"round": 1, "reward": 0.5}] and tail.damaged == [2]


@pytest.mark.parametrize("key", ["licence", "source"])
def test_texts_of_a_manifest_are_plain(key: str) -> None:
    task = f'[[tasks]]\nsha256 = "{"0" * 64}"\n'
    assert parse_manifest(f'name = "m"\n{task}{key} = "https://x.org/MIT"\n'.encode())
    with pytest.raises(RemoteProtocolError):
        parse_manifest(f'name = "m"\n{task}{key} = {json.dumps("https://x" + ODD)}\n'.encode())
