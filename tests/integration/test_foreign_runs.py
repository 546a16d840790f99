"""Commands that look at a run directory which somebody else made: no file of it hangs them, fills memory or reaches the
terminal as a control sequence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.errors import RemoteProtocolError
from protocol.manifest import parse_manifest
from swarm_node.cli.app import app
from swarm_node.config import NodeConfig
from swarm_node.config.own import dump_own
from swarm_node.observability.dashboard.tail import Tail
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
    return lambda run: ((run / name).unlink(missing_ok=True), os.mkfifo(run / name))


def device(name: str) -> Change:
    return lambda run: ((run / name).unlink(missing_ok=True), (run / name).symlink_to("/dev/zero"))


def text(name: str, content: str) -> Change:
    return lambda run: (run / name).write_text(content)


TYPES = {"role": 5, "swarm": None, "time": "x", "peers": [1], "traffic": "y", "received": 3, "refused": {}}
CHANGES: dict[str, Change] = {
    **{f"pipe {name}": pipe(name) for name in ("config.toml", "events.jsonl", "lock", "metrics.jsonl", "swarm.json")},
    **{f"device {name}": device(name) for name in ("best.json", "metrics.jsonl", "samples.jsonl", "swarm.json")},
    "toml brackets": text("config.toml", "a = " + "[" * 3000 + "]" * 3000),
    "toml dots": text("config.toml", "a" + ".a" * 40_000 + " = 1\n"),
    "toml long": text("config.toml", "# " + "x" * 2**21),
    "json brackets": text("swarm.json", "[" * 100_000),
    "json types": text("swarm.json", json.dumps(TYPES)),
    "number of 400 digits": text("metrics.jsonl", f'{{"round": 1{"0" * 400}, "reward": 1{"0" * 400}}}\n'),
}


@pytest.mark.parametrize("words", [("compare",), ("samples",), ("status",), ("status", "-v")], ids=" ".join)
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_an_odd_file_is_told_in_words(change: str, words: tuple[str, ...], tmp_path: Path) -> None:
    run, good = a_run(tmp_path / "run"), a_run(tmp_path / "good")
    CHANGES[change](run)
    more = [str(good)] if words == ("compare",) else []
    done = CliRunner().invoke(app, [*words, str(run), *more])
    assert done.exit_code in (0, 2), done.output
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


def test_the_page_reads_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="pipe"):
        Tail(tmp_path / "metrics.jsonl").read()


@pytest.mark.parametrize("key", ["licence", "source"])
def test_texts_of_a_manifest_are_plain(key: str) -> None:
    task = f'[[tasks]]\nsha256 = "{"0" * 64}"\n'
    assert parse_manifest(f'name = "m"\n{task}{key} = "https://x.org/MIT"\n'.encode())
    with pytest.raises(RemoteProtocolError):
        parse_manifest(f'name = "m"\n{task}{key} = {json.dumps("https://x" + ODD)}\n'.encode())
