"""Held-out figures while a run trains: curve, best checkpoint, remarks, and a training that they do not change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from swarm_node.cli.commands.evaluate import main as evaluate_main
from swarm_node.cli.commands.export import export_run, policy_of_run
from swarm_node.config import NodeConfig
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.errors import StopRequested, UserError
from swarm_node.observability.comparing import read_run
from swarm_node.observability.evaluations import newest_checkpoint
from swarm_node.observability.falling import EARLY_ROUNDS
from swarm_node.rollouts import Collected
from swarm_node.rollouts.evaluate import SHOWN, Evaluation, Held
from swarm_node.runtime import held_out
from swarm_node.runtime.held_out import HeldOutFigures
from swarm_node.say import Warned
from swarm_node.storage.best import BEST
from swarm_node.storage.rundir import RunDir
from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.messages import TaskName
from tests.support.run_files import read_jsonl
from tests.support.starting import train_locally

ALWAYS = {"questions": 14, "samples": 3, "every": 1, "share": 1.0}
STOPPING = """
import os, signal
calls = 0
def stop(prompts, completions, **columns):
    global calls
    calls += len(completions) == 3  # held-out questions have three answers, others have two
    if calls == 7 + 2 and len(completions) == 3:  # the second question after the first round
        print("stopping in the middle", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    return [0.0] * len(completions)
"""


def settings(rounds: int, run_dir: str = "run", **sections: Any) -> NodeConfig:
    base: dict[str, Any] = {
        "run_dir": run_dir,
        "rounds": rounds,
        "rollouts": {"groups": 4, "group_size": 2, "max_new_tokens": 8},
        "grpo": {"learning_rate": 1e-2},
        "eval": ALWAYS,
    }
    return NodeConfig.model_validate(base | sections)


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The document of a run of four rounds in `run` that was evaluated after each; it began in two starts."""
    assert train_locally(settings(2), json_output=True) == 0
    capsys.readouterr()
    assert train_locally(settings(4), json_output=True) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


POEMS = """
def vowels(prompts, completions, **columns):
    return [sum(c in "aeiou" for c in text) / (1 + len(text)) - 0.25 for text in completions]
"""


def test_a_run_with_own_rewards_goes_by_mean_reward(capsys: pytest.CaptureFixture[str]) -> None:
    Path("poems.py").write_text(POEMS)
    Path("q.jsonl").write_text("".join(f'{{"question": "Write poem {n}."}}\n' for n in range(60)))
    own = {"tasks": ["q.jsonl"], "rewards": {"checker_weight": 0, "functions": ["poems.py:vowels"]}}
    for rounds in (1, 2):
        assert train_locally(settings(rounds, **own, metrics={"samples_every": 1}), json_output=True) == 0
        out, words = capsys.readouterr()
    document, words = json.loads(out), " ".join(words.split())
    held, curve = document["held_out"], [line["eval/reward"] for line in read_jsonl(Path("run/metrics.jsonl"))]
    assert (held["figure"], held["pass_1"], held["interval"]) == ("reward", None, None)
    assert len(curve) == 2 and held["reward"][1] == pytest.approx(curve[-1], rel=1e-5)
    assert document["held_out_before"]["all"]["pass_k"] is None
    assert "held-out mean reward" in words and "reward before" in words and "pass@" not in words
    line = read_jsonl(Path("run/metrics.jsonl"))[0]
    assert not any(name.startswith("eval/pass") for name in line)
    assert line["rewards/vowels/mean"] == pytest.approx(line["reward"]) and "rewards/checker/mean" not in line
    best = json.loads(Path("run", BEST).read_text())
    assert best["round"] == curve.index(max(curve)) + 1 and best["figure"] == "reward"
    assert held["best"] == [best["round"], best["reward"]]
    final = read_run(Path("run")).final
    better = best["reward"] if best["reward"] > held["reward"][0] else None
    assert final.get("held-out mean reward, best checkpoint") == better
    assert final["held-out mean reward, before"] == held["reward"][0] and not any("pass@" in name for name in final)
    assert [x for x in read_run(Path("run")).curves["round", "held_out_reward"][0]] == [0, 1, 2]
    answers = [answer for record in read_jsonl(Path("run/samples.jsonl")) for answer in record["answers"]]
    assert answers and all(answer["correct"] is None for answer in answers)
    evaluate_main("run", json_output=True, which="best", functions=[RewardFunctionConfig(path="poems.py:vowels")])
    out, words = capsys.readouterr()
    assert json.loads(out)["held_out"]["all"] == {
        "questions": held["questions"],
        "pass_1": None,
        "pass_k": None,
        "reward": best["reward"],
    }
    assert f"best held-out mean reward {best['reward']:.3f}" in words


def test_a_test_file_is_asked_while_training(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f'{{"question": "{n}+1?", "answer": "{n + 1}"}}\n' for n in range(40)]
    Path("test.jsonl").write_text("".join(lines[:13]))
    Path("train.jsonl").write_text("".join(lines[13:]))
    asked = ALWAYS | {"questions": 100, "tasks": ["test.jsonl"]}
    assert train_locally(settings(1, eval=asked, tasks=["train.jsonl"]), json_output=True) == 0
    out, words = capsys.readouterr()
    document = json.loads(out)
    assert document["held_out_before"].keys() == {"test", "all"} and document["held_out"]["questions"] == 13
    assert "drawn in training too" not in words and "train: 27 questions trained on\n" in words
    _, state = newest_checkpoint(RunDir(Path("run")))
    assert "tasks" not in state["settings"]["eval"], "a checkpoint names no file of one machine"
    for target, tasks, whole in (
        ("run", None, False),
        ("run", ["test.jsonl"], True),
        ("starter", ["test.jsonl"], True),
    ):
        evaluate_main(target, tasks=tasks, samples=1, json_output=True, every=whole)
        out, words = capsys.readouterr()
        assert json.loads(out)["held_out"]["all"]["questions"] == 13
        many = "all 13 questions" if whole else "13 held-out questions"
        assert f"asking {many} of test, 1 answer to each\n" in words
    evaluate_main("run", tasks=["train.jsonl"], samples=1, json_output=True)
    out, words = capsys.readouterr()
    known = json.loads(out)["held_out"]["all"]["questions"]
    assert "; --all asks every question of a file" in " ".join(words.split())
    assert f"the run could train on {known} of these questions" in words
    Path("train.jsonl").rename("moved.jsonl")
    evaluate_main("run", tasks=["moved.jsonl"], samples=1, json_output=True)
    assert "whether the run trained on these questions is not known: cannot read" in capsys.readouterr().err
    Path("moved.jsonl").rename("train.jsonl")
    with pytest.raises(UserError, match="gcd never ends"):
        evaluate_main("starter", tasks=["gcd"], samples=1, json_output=True, every=True)
    assert train_locally(settings(2, eval=asked | {"tasks": ["train.jsonl"]}, tasks=["train.jsonl"])) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "questions of eval.tasks can be drawn in training too" in said
    assert "no figures from before training" in said, "other questions are not compared"


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "policy.safetensors")


def test_each_round_has_held_out_figures(evaluated: dict[str, Any]) -> None:
    curve = [line["eval/pass_1"] for line in read_jsonl(Path("run/metrics.jsonl"))]
    assert len(curve) == 4 and all(0 <= value <= 1 for value in curve)
    assert curve[-1] == pytest.approx(evaluated["held_out"]["pass_1"][1], rel=1e-5)
    assert "round" not in {k: v for k, v in evaluated["held_out"].items() if v}, "the last figures are of the end"


def test_a_resumed_run_shows_answers_before_and_after(evaluated: dict[str, Any]) -> None:
    answers, asked = evaluated["held_out"]["answers"], evaluated["held_out"]["questions"]
    assert len({one["question"] for one in answers}) == len(answers) == 3
    assert evaluated["held_out"]["answers_of"] == min(SHOWN, asked)
    assert all(one["question"] and one["right"] and isinstance(one["before_correct"], bool) for one in answers)


def test_the_best_checkpoint_is_kept_and_used(evaluated: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    best = json.loads(Path("run", BEST).read_text())
    curve = [line["eval/pass_1"] for line in read_jsonl(Path("run/metrics.jsonl"))]
    assert best["pass_1"] == pytest.approx(max(curve), rel=1e-5) and best["round"] == curve.index(max(curve)) + 1
    assert evaluated["held_out"]["best"] == [best["round"], best["pass_1"]]
    evaluate_main("run", json_output=True, which="best")
    measured = json.loads(capsys.readouterr().out)["held_out"]["all"]
    assert (measured["pass_1"], measured["pass_k"]) == (best["pass_1"], best["pass_k"])
    export_run(Path("run"), Path("out"), print, "best")
    there = load_file("out/model.safetensors")
    assert all(
        torch.equal(there[name], tensor)
        for name, tensor in weights(Path("run/checkpoints", best["checkpoint"])).items()
        if name in there
    )


def test_a_best_checkpoint_below_the_start_is_warned_of(evaluated: dict[str, Any]) -> None:
    file = Path("run", BEST)
    best = json.loads(file.read_text())
    start = evaluated["held_out"]["pass_1"][0]
    said: list[str] = []
    for value in (start, start - 0.001):
        file.write_text(json.dumps(best | {"pass_1": value}))
        policy_of_run(Path("run"), said.append, which="best")
    told = [sentence for sentence in said if sentence.startswith("best held-out")]
    assert [isinstance(each, Warned) for each in told] == [False, True]
    assert told[1].endswith(f"below the start's {start:.3f}")


def test_evaluations_do_not_change_training(evaluated: dict[str, Any]) -> None:
    for share in ({"questions": 0}, ALWAYS | {"every": 0}):
        name = f"other-{share['questions']}"
        assert train_locally(settings(4, name, eval=share), json_output=True) == 0
        ours, theirs = (weights(Path(run, "checkpoints/round-00000004")) for run in ("run", name))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert not Path(name, BEST).exists()


def test_without_a_best_checkpoint_the_newest_is_offered() -> None:
    assert train_locally(settings(1, eval=ALWAYS | {"every": 0}), json_output=True) == 0
    with pytest.raises(UserError, match=r"no best checkpoint.*eval\.every.*leave out --checkpoint"):
        export_run(Path("run"), Path("out"), print, "best")
    with pytest.raises(UserError, match="no run directory"):
        evaluate_main("starter", json_output=True, which="best")


def test_a_torn_best_checkpoint_is_refused(evaluated: dict[str, Any]) -> None:
    best = json.loads(Path("run", BEST).read_text())["checkpoint"]
    Path("run/checkpoints", best, "policy.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=f"{best} is not usable.*take the newest"):
        export_run(Path("run"), Path("out"), print, "best")


def test_a_signal_ends_an_evaluation_and_keeps_the_round(capsys: pytest.CaptureFixture[str]) -> None:
    Path("stopping.py").write_text(STOPPING)
    rewards = {"functions": [{"path": "stopping.py:stop"}]}
    config = settings(3, eval=ALWAYS | {"questions": 7}, rewards=rewards)
    assert train_locally(config) == 0
    assert capsys.readouterr().out.count("stopping in the middle") == 1, "no question was asked after the signal"
    [line] = read_jsonl(Path("run/metrics.jsonl"))
    assert line["round"] == 1 and "eval/pass_1" not in line
    assert Path("run/checkpoints/round-00000001").is_dir()


def test_a_stopped_run_tells_before_and_now(capsys: pytest.CaptureFixture[str]) -> None:
    Path("stopping.py").write_text(STOPPING.replace("7 + 2", "7 + 7 + 2"))
    rewards = {"functions": [{"path": "stopping.py:stop"}]}
    assert train_locally(settings(5, eval=ALWAYS | {"questions": 7}, rewards=rewards), json_output=True) == 0
    out, words = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert (document["rounds"], document["held_out"]["round"]) == (2, 1)
    assert "held-out pass@1" in words and "after round 1, not measured since" in words


def test_a_run_that_stops_as_it_trains_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    Path("stopping.py").write_text(STOPPING.replace("== 3", "== 2").replace("7 + 2", "4 + 1"))  # in the second round
    rewards = {"functions": [{"path": "stopping.py:stop"}]}
    assert train_locally(settings(5, eval=ALWAYS | {"every": 0}, rewards=rewards), json_output=True) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["rounds"], document["held_out"]["round"]) == (1, 0), "0 = its last one"
    round, state = newest_checkpoint(RunDir(Path("run")))
    assert (round, state["held_out_figures"]["round"]) == (1, 1)


def test_only_a_quick_measurement_is_repeated_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Evaluation({"all": Held(14, 0.5, 0.5)})
    monkeypatch.setattr(held_out, "evaluate", lambda *settings: found)
    ours = figures()
    for took, left_s in ((0.0, 8.0), (2.0, 8.0), (1.0, 2.0)):  # never measured, slow, no time
        ours.figures.seconds = took
        assert ours.measure_stopped(5, left_s) == {} and ours.figures.round == 0
    ours.figures.seconds = 1.0
    assert ours.measure_stopped(5, 8.0) == {"eval/pass_1": 0.5, "eval/pass_k": 0.5}
    ours.figures.seconds = 1.0
    assert ours.measure_stopped(5, 8.0) == {}, "that round was measured"


LATER = range(EARLY_ROUNDS, EARLY_ROUNDS + 6)


def figures(**sections: Any) -> HeldOutFigures:
    tasks = cast(Any, type("Tasks", (), {"names": ["gcd"], "kinds": {}, "held_out": lambda self, n: [None] * n})())
    return HeldOutFigures(settings(9, **sections), cast(Any, None), tasks, print, lambda round, found: None, whole=True)


def test_evaluations_get_their_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(held_out, "say", lambda text, kind: said.append(text))
    ours = figures(eval=ALWAYS | {"every": 5, "share": 0.05})
    assert [round for round in range(1, 12) if ours.due(round)] == [5, 10], "its cost is not known yet"
    ours.figures.seconds = 1e9
    assert not said and not ours.due(5) and not ours.due(10)
    share = "5 % of the time; `--set eval.share=1` makes them all"
    assert said == [f"evaluations are left out that would take more than {share}"]
    unlimited = figures()
    unlimited.figures.seconds = 1e9
    assert unlimited.due(5)
    assert not figures(eval=ALWAYS | {"every": 0}).due(5)
    assert not figures(eval=ALWAYS | {"questions": 0}).due(5)


def test_a_fall_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluation(share: float) -> Evaluation:
        return Evaluation({"all": Held(60, share, share)}, [share] * 60, ["gcd"] * 60)

    said: list[str] = []
    shares = iter([0.5, 0.1, 0.5, 0.1, 0.1, 0.1])  # one bad evaluation may be noise
    monkeypatch.setattr(held_out, "evaluate", lambda *arguments: evaluation(next(shares)))
    monkeypatch.setattr(held_out, "say", lambda text, kind: said.append(f"{kind}: {text}"))
    ours = figures()
    ours.measure_before()
    found = [ours.measure_during(round)["eval/pass_1"] for round in LATER[:5]]
    assert found == [0.1, 0.5, 0.1, 0.1, 0.1]
    assert len(said) == 1 and said[0].startswith("held_out: held-out pass@1 of gcd fell by more than noise")
    assert ours.best is not None and ours.best.round == LATER[1]
    assert list(ours.figures.worse) == ["task gcd"]


def test_an_early_fall_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.1, 0.1, 0.1, 0.1])
    evaluations = ([share] * 60 for share in shares)
    asked = (Evaluation({"all": Held(60, each[0], each[0])}, each, ["gcd"] * 60) for each in evaluations)
    said: list[str] = []
    monkeypatch.setattr(held_out, "evaluate", lambda *arguments: next(asked))
    monkeypatch.setattr(held_out, "say", lambda text, kind: said.append(text))
    ours = figures()
    ours.measure_before()
    for round in (1, 2, EARLY_ROUNDS - 1):
        ours.measure_during(round)
    assert said == [] and ours.figures.worse == {}
    ours.measure_after(EARLY_ROUNDS, again=False)
    early = ours.compared(EARLY_ROUNDS)
    assert early is not None and early.remarks == list(ours.figures.worse.values()) != []


def test_a_fall_that_is_over_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    shares = iter([0.5, 0.1, 0.1, 0.5, 0.5, 0.1, 0.1])
    evaluations = ([share] * 60 for share in shares)
    asked = (Evaluation({"all": Held(60, each[0], each[0])}, each, ["gcd"] * 60) for each in evaluations)
    monkeypatch.setattr(held_out, "evaluate", lambda *arguments: next(asked))
    monkeypatch.setattr(held_out, "say", lambda text, kind: said.append(text))
    ours = figures()
    ours.measure_before()
    for round in LATER:
        ours.measure_during(round)
    assert len(said) == 3 and said[0].startswith("held-out pass@1 of gcd fell") and said[2] == said[0]
    assert said[1] == "the latest held-out figures no longer show that pass@1 of gcd fell"


def test_a_remedy_in_force_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    before = Evaluation({"all": Held(128, 0.125, 1.0)}, [0.125] * 128, ["gcd"] * 128)
    now = Evaluation({"all": Held(128, 0.3125, 0.3125)}, [1.0] * 40 + [0.0] * 88, ["gcd"] * 128)
    asked = iter([before, now, now])
    monkeypatch.setattr(held_out, "evaluate", lambda *arguments: next(asked))
    monkeypatch.setattr(held_out, "say", lambda text, kind: said.append(text))
    ours = figures(grpo={"advantage": "pass_k"}, eval=ALWAYS | {"samples": 8}, rollouts={"group_size": 16})
    ours.measure_before()
    for round in LATER[:2]:
        ours.measure_during(round)
    assert "become alike" in said[0] and "grpo.advantage" not in said[0]
    summary = ours.compared(LATER[1])
    assert summary is not None and summary.remarks == said


def test_what_was_asked_before_a_stop_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    doing: list[str] = []

    def asked_twice(*arguments: Any) -> Evaluation:
        asked = arguments[5]
        for _ in range(2):
            answered = Group(
                Task(TaskName("gcd", "0" * 16, "g", 0, 0), "gcd", "?", "1"), [1], [Rollout([Turn([1], [0.0], True)])]
            )
            asked.add(Collected([answered], seconds=1.0), 1)
            doing.append(ours.doing)
        raise StopRequested

    monkeypatch.setattr(held_out, "evaluate", asked_twice)
    named = {"names": ["gcd"], "labels": ["gcd"], "kinds": {}}
    tasks = cast(Any, type("Tasks", (), named | {"held_out": lambda self, n: [None] * n})())
    ours = HeldOutFigures(settings(9), cast(Any, None), tasks, print, lambda round, found: None, True)
    with pytest.raises(StopRequested):
        ours.measure_before()
    assert ours.figures.before.table["all"].questions == 2 and ours.figures.asked == 0, "the next start asks the others"
    assert doing[1].startswith("held-out questions, before training: 2 of at most 14, ") and ours.doing == ""


def test_later_evaluations_ask_what_was_asked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answers(*arguments: Any) -> Evaluation:
        asked.append(arguments[3])
        return Evaluation({"all": Held(8, 0.5, 0.5)}, [0.5] * 8, ["gcd"] * 8, asked=8)

    monkeypatch.setattr(held_out, "evaluate", answers)
    ours = figures()
    ours.measure_before()
    ours.measure_during(1)
    assert asked == [14, 8]
    assert ours.measure_before() == {} and len(asked) == 2, "a start that did no round has its figures"


def test_only_questions_are_asked_interruptibly(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    @contextmanager
    def allowed() -> Iterator[None]:
        order.append("allowed")
        yield
        order.append("held")

    def answers(*arguments: object) -> Evaluation:
        order.append("asked")
        return Evaluation({"all": Held(60, 0.5, 0.5)}, [0.5] * 60, ["gcd"] * 60)

    def measured(round: int, found: Evaluation) -> None:
        order.append("told")
        assert (ours.figures.before if round == 0 else ours.figures.last) is found, "kept before anybody is told"

    monkeypatch.setattr(held_out, "evaluate", answers)
    tasks = cast(Any, type("Tasks", (), {"names": ["gcd"], "kinds": {}, "held_out": lambda self, n: [None] * n})())
    ours = HeldOutFigures(settings(9), cast(Any, None), tasks, print, measured, True, allowed)
    ours.measure_before()
    ours.measure_during(1)
    ours.measure_after(2, again=False)
    assert order == ["allowed", "asked", "held", "told"] * 3


def test_figures_of_a_repeated_last_evaluation_are_saved() -> None:
    Path("stopping.py").write_text(STOPPING)
    rewards = {"functions": [{"path": "stopping.py:stop"}]}
    config = settings(1, eval=ALWAYS | {"questions": 7, "every": 0}, rewards=rewards)
    for measured in (0, 1):  # a signal ends the evaluation after training, and the next start repeats it
        assert train_locally(config) == 0
        round, state = newest_checkpoint(RunDir(Path("run")))
        assert (round, state["held_out_figures"]["round"]) == (1, measured)
    assert "held-out pass@1, at the end" in read_run(Path("run")).final
