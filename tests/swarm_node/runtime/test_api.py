"""`swarm_node.train` in somebody else's process: callbacks, Ctrl-C, threads, errors."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from typer.testing import CliRunner

import swarm_node
from swarm_node.cli.app import app
from swarm_node.cli.commands.evaluate import main as evaluate_main
from swarm_node.config.own import read_own
from swarm_node.runtime.api import resolve

TINY: dict[str, Any] = {
    "run_dir": "run",
    "rounds": 3,
    "tasks": ["small/gcd"],
    "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
    "eval": {"questions": 4, "samples": 2},
    "checkpoints": {"every": 1, "keep": 5},
}


class Recorder(swarm_node.Callback):
    """Keeps what it hears, and the threads in which it heard it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.threads: set[threading.Thread] = set()

    def keep(self, what: str, value: Any) -> None:
        self.heard.append((what, value))
        self.threads.add(threading.current_thread())

    def on_round(self, round: int, metrics: Mapping[str, Any]) -> None:
        self.keep("round", round)
        assert metrics["round"] == round and metrics["reward"] >= 0

    def on_evaluation(self, round: int, figures: Mapping[str, Any]) -> None:
        self.keep("evaluation", round)
        assert figures["all"].questions == figures["gcd"].questions == 4

    def on_checkpoint(self, path: Path) -> None:
        self.keep("checkpoint", path.name)
        assert (path / "SHA256SUMS").exists()

    def on_end(self, result: swarm_node.TrainResult) -> None:
        self.keep("end", result)


class Until(swarm_node.Callback):
    def __init__(self, last: int) -> None:
        self.last = last

    def on_round(self, round: int, metrics: Mapping[str, Any]) -> bool:
        return round == self.last


class Interrupt(swarm_node.Callback):
    """Sends Ctrl-C so many times in the first round."""

    def __init__(self, times: int) -> None:
        self.times = times

    def on_round(self, round: int, metrics: Mapping[str, Any]) -> None:
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)


def test_callbacks_hear_the_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    result = swarm_node.train(TINY, [recorder], quiet=True)
    assert [each for each in recorder.heard if each[0] in ("round", "evaluation")] == [
        ("evaluation", 0),
        *(("round", n) for n in (1, 2, 3)),
        ("evaluation", 3),
    ]
    saved = [name for what, name in recorder.heard if what == "checkpoint"]
    assert saved == sorted(saved) and saved[-1] == "round-00000003" and len(saved) > 1
    assert recorder.heard[-1] == ("end", result) and recorder.threads == {threading.current_thread()}
    assert (result.rounds, result.finished, result.figures.rounds_recorded) == (3, True, 3)
    assert result.figures.held_out is not None and result.figures.held_out.questions == 4
    assert result.checkpoint == Path("run/checkpoints/round-00000003")
    assert [record["round"] for record in result.metrics()] == [1, 2, 3]
    assert capsys.readouterr() == ("", "")


def test_a_callback_ends_the_run_and_train_resumes_it() -> None:
    recorder = Recorder()
    first = swarm_node.train(TINY, [Until(2), recorder], quiet=True)
    assert (first.rounds, first.finished) == (2, False)
    assert ("evaluation", 2) in recorder.heard, "as at the end of any run"
    again = swarm_node.train({"run_dir": "run"}, quiet=True)  # the run's own settings
    assert (again.rounds, again.finished, again.figures.resumed_at) == (3, True, 2)


def test_changed_settings_of_a_complete_run_are_named() -> None:
    first = swarm_node.train(TINY, quiet=True)
    assert (first.rounds_now, first.not_used) == (3, ())
    with pytest.warns(UserWarning, match="run: grpo.learning_rate = 0.5 was not used: nothing was left to train"):
        again = swarm_node.train(TINY | {"grpo": {"learning_rate": 0.5}}, quiet=True)
    assert (again.rounds, again.rounds_now, again.finished) == (3, 0, True)
    assert again.not_used == ("grpo.learning_rate = 0.5",)
    told = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert "grpo.learning_rate = 0.5 was not used: nothing was left to train" in [each["text"] for each in told]


def test_figures_of_two_rewards_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    swarm_node.train(TINY, quiet=True)
    Path("rew.py").write_text("def ones(prompts, completions, **columns):\n    return [5.0] * len(completions)\n")
    rewards = {"functions": [{"path": "rew.py:ones"}], "checker_weight": 0}
    more = swarm_node.train(TINY | {"rounds": 5, "rewards": rewards}, quiet=True)
    assert more.figures.rounds_recorded == 5 and more.figures.reward_rounds == 2
    assert more.figures.reward_first_tenth == more.figures.reward_last_tenth == 5.0
    again = swarm_node.train({"run_dir": "run", "rounds": 6})
    assert again.figures.reward_rounds == 3 and again.figures.held_out is None
    said = " ".join("".join(capsys.readouterr()).split())
    assert "reward 5.000 in the first, 5.000 in the last of the 3 rounds since tasks or rewards changed" in said
    assert "reward after" in said and "reward before" not in said, "the figures from after training stand alone"


def test_functions_of_the_program_reward_answers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rew.py").write_text("def ones(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    gave: list[float] = []

    def brevity(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        rewards = [1 / (1 + len(text)) for text in completions]
        gave.extend(rewards)
        return rewards

    config = TINY | {"rounds": 1, "eval": {"questions": 0}}
    functions: dict[str, Any] = {"reward_funcs": [brevity, "rew.py:ones"], "reward_weights": [0.5, 2.0]}
    (record,) = swarm_node.train(config, quiet=True, **functions).metrics()
    assert record["rewards/brevity/mean"] == pytest.approx(fmean(gave))
    assert record["rewards/brevity/std"] == pytest.approx(stdev(gave)) and record["rewards/ones/std"] == 0
    assert record["reward"] == pytest.approx(record["rewards/checker/mean"] + 0.5 * fmean(gave) + 2.0)
    kept = read_own(Path("run/config.toml")).rewards.functions
    assert [each.weight for each in kept] == [0.5, 2.0] and kept[1].path == "rew.py:ones"
    assert kept[0].path.endswith("test_api:test_functions_of_the_program_reward_answers.<locals>.brevity")
    with pytest.raises(swarm_node.UserError, match="brevity' is one that a program gave to swarm_node.train: give it"):
        swarm_node.train({"run_dir": "run", "rounds": 2}, quiet=True)
    refused = CliRunner().invoke(app, ["resume", "run", "--rounds", "2"])
    assert refused.exit_code == 2 and "put FILE.py:FUNCTION in its place" in " ".join(refused.output.split())
    capsys.readouterr()
    assert swarm_node.train({"run_dir": "run", "rounds": 2}, **functions).rounds == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert "to go on, start the program again that gave it the reward function" in said
    assert "swarm-node resume" not in said, "which would be refused"
    evaluate_main("run", samples=1, questions=4, json_output=True)
    out, words = capsys.readouterr()
    assert json.loads(out)["held_out"]["all"]["questions"] == 4
    words = " ".join(words.split())
    assert "left out, since they are code that only the run's directory names" in words
    assert '{path="FILE.py:FUNCTION", weight=0.5}' in words and '{path="rew.py:ones", weight=2}' in words


def test_reward_functions_that_cannot_be_taken_are_refused() -> None:
    for functions, weights, more, message in [
        ([len], [1.0, 2.0], {}, "reward_weights has 2 numbers for 1 reward functions"),
        ([len, max], [1.0, "x"], {}, r"reward_weights\[1\] is no number: 'x'"),
        ([len, 3], None, {}, r"reward_funcs\[1\] is neither a function nor a text"),
        ([len], None, {"pipeline": {"stages": 2}}, "other processes cannot take functions of this one"),
    ]:
        with pytest.raises(swarm_node.UserError, match=message):
            swarm_node.train(TINY | more, quiet=True, reward_funcs=functions, reward_weights=weights)  # type: ignore[arg-type]
    assert not Path("run").exists()


def test_a_failing_callback_loses_no_round() -> None:
    class Broken(swarm_node.Callback):
        def on_round(self, round: int, metrics: Mapping[str, Any]) -> None:
            if round == 2:
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        swarm_node.train(TINY | {"checkpoints": {"every": 100}}, Broken(), quiet=True)
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["round-00000002"]
    assert caught.value.__notes__[0].endswith("; rounds 1-2 are saved: mend it, then `swarm-node resume run` goes on")


def test_errors_of_the_users_code_come_out_as_they_are() -> None:
    """Their tracebacks have `train` and the user's frames alone, and a note says what failed."""

    class Broken(swarm_node.Callback):
        def on_round(self, round: int, metrics: Mapping[str, Any]) -> None:
            int("x")

    def fails(prompts: list[str], **columns: Any) -> list[float]:
        try:
            return [1 / 0]
        except ZeroDivisionError as error:
            raise KeyError("mine") from error

    config = TINY | {"rounds": 1, "eval": {"questions": 0}}
    for functions, callbacks, kind, name in [
        ([], [Broken()], ValueError, "on_round"),
        ([fails], [], KeyError, "fails"),
    ]:
        with pytest.raises(kind) as caught:
            swarm_node.train(config | {"run_dir": name}, callbacks, reward_funcs=functions, quiet=True)
        assert [frame.name for frame in caught.traceback] == [
            "test_errors_of_the_users_code_come_out_as_they_are",
            "train",
            name,
        ]
        (note,) = caught.value.__notes__
        assert f"{name}" in note and "failed in" in note and "test_api.py, line" in note
    cause = caught.value.__cause__
    assert isinstance(cause, ZeroDivisionError) and caught.value.__context__ is cause


def test_a_callback_called_wrongly_raises_its_own_error() -> None:
    class Broken(swarm_node.Callback):
        def on_round(self) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TypeError, match="3 were given") as caught:
        swarm_node.train(TINY | {"rounds": 1, "eval": {"questions": 0}}, [Broken()], quiet=True)
    assert [frame.name for frame in caught.traceback][1:] == ["train"]
    assert "on_round failed: TypeError" in caught.value.__notes__[0]


def test_a_caught_error_keeps_nothing_in_memory() -> None:
    class Weights:
        pass

    kept: list[weakref.ref[Any]] = []

    class Broken(swarm_node.Callback):
        def on_round(self, round: int, metrics: Mapping[str, Any]) -> None:
            mine = Weights()
            kept.append(weakref.ref(mine))
            raise ValueError("mine")

    def fails(prompts: list[str], **columns: Any) -> list[float]:
        mine = Weights()
        kept.append(weakref.ref(mine))
        raise ValueError("mine")

    config = TINY | {"rounds": 1, "eval": {"questions": 0}}
    gc.disable()
    try:
        for number, (functions, callbacks) in enumerate([([], [Broken()]), ([fails], [])]):
            try:
                swarm_node.train(config | {"run_dir": str(number)}, callbacks, reward_funcs=functions, quiet=True)
            except ValueError:
                assert kept[number]() is not None, "as long as the error is there, so is its traceback"
            assert kept[number]() is None
    finally:
        gc.enable()
    assert len(kept) == 2


def test_ctrl_c_saves_and_returns() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    result = swarm_node.train(TINY, [Interrupt(1)], quiet=True)
    assert (result.rounds, result.finished) == (1, False) and result.checkpoint is not None
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(KeyboardInterrupt):
        swarm_node.train(TINY, [Interrupt(2)], quiet=True)
    assert [record["round"] for record in result.metrics()] == [1, 2]
    assert signal.getsignal(signal.SIGINT) == before[0]


def test_another_thread_takes_no_signal() -> None:
    before, handlers, results = signal.getsignal(signal.SIGINT), [], []

    class Look(swarm_node.Callback):
        def on_round(self, round: int, metrics: Mapping[str, Any]) -> None:
            handlers.append(signal.getsignal(signal.SIGINT))

    def work() -> None:
        results.append(swarm_node.train(TINY | {"rounds": 1}, [Look()], quiet=True))
        with pytest.raises(swarm_node.UserError, match="main thread"):
            swarm_node.train(TINY | {"rounds": 2, "resources": {"max_cpu": 50}}, quiet=True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].finished and handlers == [before]


def test_wrong_settings_raise_a_users_error() -> None:
    for config, message in [
        ({"round": 3}, "unknown key round in config; did you mean rounds?"),
        ({"grpo": {"loss": "gpso"}}, "did you mean 'gspo'?"),
        ("nowhere.toml", "cannot read the configuration nowhere.toml"),
    ]:
        with pytest.raises(swarm_node.UserError) as caught:
            swarm_node.train(config)
        assert message in str(caught.value)
    assert not Path("runs").exists()


def test_tables_files_and_objects_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('rounds = 3\n[grpo]\nbetas = [0.8, 0.9]\nloss = "gspo"\n')
    table = {"rounds": 3, "grpo": {"betas": (0.8, 0.9), "loss": "gspo"}}
    found = [resolve(config) for config in (table, str(file), file, swarm_node.NodeConfig.model_validate(table))]
    assert all(each == found[0] for each in found) and found[0].grpo.loss == "gspo"


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, swarm_node; print({'torch', 'pydantic', 'typer'} & {*sys.modules}); swarm_node.train; "
    code += "print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["set()", "False"]
    assert all(getattr(swarm_node, name) for name in swarm_node.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = swarm_node.trian  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_example_runs(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "examples/train.py")], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "ended after" in done.stdout and Path("runs/example-model/model.safetensors").exists()


@pytest.mark.slow
def test_the_page_s_first_program_runs(root: Path) -> None:
    program = (root / "docs/api.md").read_text().split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "held-out pass@1 after" in done.stdout and Path("model/model.safetensors").exists()
