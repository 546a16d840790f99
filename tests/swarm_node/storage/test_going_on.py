"""By which command a stopped run goes on, and what is said where none works."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_node.cli.options import CommandSettings
from swarm_node.config import NodeConfig
from swarm_node.config.node import DEFAULT_ROUNDS
from swarm_node.config.own import dump_own
from swarm_node.config.plugins import only_in_a_program
from swarm_node.storage.going_on import USUAL_ROUNDS, going_on, of_a_program, who_goes_on
from swarm_node.storage.rundir import RunDir

RUN = RunDir("runs/a b")


def begun(saved: int | None = None, **settings: object) -> None:
    """A run with these settings that has stopped, with a checkpoint of the round `saved`."""
    config = NodeConfig.model_validate({"run_dir": str(RUN.path), **settings})
    RUN.path.mkdir(parents=True, exist_ok=True)
    RUN.config.write_text(dump_own(config, config))
    if saved is not None:
        (RUN.checkpoints / f"round-{saved:08}").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(
    ("saved", "settings", "more"),
    [
        (None, {}, ""),
        (3, {"rounds": 4}, ""),
        (4, {"rounds": 4}, " --rounds 8"),
        (DEFAULT_ROUNDS - 1, {}, ""),
        (DEFAULT_ROUNDS, {}, f" --rounds {2 * DEFAULT_ROUNDS}"),
        (DEFAULT_ROUNDS, {"minutes": 3}, ""),
        (DEFAULT_ROUNDS, {"swarm": "demo.toml"}, ""),
    ],
)
def test_a_complete_run_needs_more_rounds(saved: int | None, settings: dict[str, object], more: str) -> None:
    begun(saved, **settings)
    way = going_on(RUN)
    assert (way.command, way.instead) == (f"resume 'runs/a b'{more}", "") and way.typed.endswith(way.command)
    asked = 2 * (saved or 0) if more else None
    again = CommandSettings(None, {"rounds": asked}, [], False).load_again(RUN.path, err=False)
    assert again.total_rounds > (saved or 0), "the command that is offered trains"


def test_a_run_that_lacked_memory_is_given_more() -> None:
    begun(2, rounds=4, resources={"max_memory_gb": 1.5})
    assert going_on(RUN, lacked_gib=2.0).command == "resume 'runs/a b' --max-memory 3"


@pytest.mark.parametrize("path", ["__main__:f", "job:<lambda>", "job:Judge.f", "job:outer.<locals>.f", "job:Judge()"])
def test_a_program_s_functions_are_of_that_program(path: str) -> None:
    begun(2, rewards={"functions": [path]})
    way = going_on(RUN)
    assert way.command == way.typed == ""
    assert way.instead == f"start the program again that gave it the reward function {path!r}"
    assert who_goes_on(RUN, [path]) == f"the program that gave it {path!r}"
    assert who_goes_on(RUN, [path], "--rounds N") == f"the program that gave it {path!r} (with --rounds N)"
    assert who_goes_on(RUN, ["job.py:f"], "--rounds N") == "`swarm-node resume 'runs/a b' --rounds N`"


def test_the_rules_are_those_of_the_configuration() -> None:
    assert USUAL_ROUNDS == DEFAULT_ROUNDS
    for path in ("__main__:f", "a.py:f", "a.py:A.f", "a.b:f", "a:A.f", "a:f()", "a:<lambda>", "f", "", "a b:é"):
        assert of_a_program(path) == only_in_a_program(path)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"rewards": {"functions": ["judge.py:f"]}}, "judge.py"),
        ({"grpo": {"loss": "lib/loss.py:f"}}, "lib/loss.py"),
        ({"tasks": ["gcd", "riddles.py:Riddles"]}, "riddles.py"),
        ({"tasks": ["gcd", "sums.jsonl"]}, "sums.jsonl"),
        ({"tasks": [{"file": "table.csv"}]}, "table.csv"),
        ({"eval": {"tasks": ["test.csv"]}}, "test.csv"),
        ({"policy": {"model": "./model"}}, "./model"),
    ],
)
def test_files_that_are_gone_are_named(settings: dict[str, object], needed: str) -> None:
    begun(2, **settings)
    way = going_on(RUN)
    where = ", or go to the directory where it began"
    assert (way.command, way.instead) == ("", f"put {needed!r} back, which its settings name{where}")
    Path(needed).parent.mkdir(exist_ok=True)
    Path(needed).touch()
    assert going_on(RUN).command == "resume 'runs/a b'"


def test_what_a_swarm_gives_need_not_be_here() -> None:
    begun(2, swarm="demo.toml", tasks=["sums.jsonl"], policy={"model": "/cache/model"})
    assert going_on(RUN).command == "resume 'runs/a b'"
    begun(2, policy={"model": "OWNER/NAME"}, tasks=["gcd", "hf:OWNER/NAME"])
    assert going_on(RUN).command == "resume 'runs/a b'"


@pytest.mark.parametrize("text", [None, "rounds = ", "\xff", "a = " + "[" * 5000])
def test_settings_that_cannot_be_read_are_no_way_on(text: str | None) -> None:
    RUN.path.mkdir(parents=True)
    if text is not None:
        RUN.config.write_bytes(text.encode("latin1"))
    assert going_on(RUN).instead == "begin anew: its config.toml is not there, or cannot be read"


def test_names_of_strangers_are_made_printable() -> None:
    begun(2, rewards={"functions": ["a\u001b[2J.py:f"]})
    assert "\x1b" not in going_on(RUN).instead
