"""`swarm-node local` as a whole: it learns, stops, resumes, exports and refuses."""

from __future__ import annotations

import json
import math
import shutil
import signal

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.cli.commands.evaluate import main as evaluate_main
from swarm_node.cli.commands.export import export_run
from swarm_node.config import NodeConfig, load_config
from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir
from tests.support.disks import file_size_limit
from tests.support.run_files import read_jsonl
from tests.support.starting import train_locally
from tests.support.tiny_models import save


def settings(run_dir, rounds=6, **sections):
    base = {
        "run_dir": str(run_dir),
        "rounds": rounds,
        "rollouts": {"groups": 7, "group_size": 4, "max_new_tokens": 8},
        "eval": {"questions": 0},
        "checkpoints": {"every": 2},
    }
    return NodeConfig.model_validate(base | sections)


def newest(run_dir):
    return max((run_dir / "checkpoints").iterdir(), key=lambda path: path.name)


def same_tensors(a, b):
    ours, theirs = load_file(a), load_file(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six rounds with held-out tables."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert train_locally(settings(run_dir, eval={"questions": 14, "samples": 4}), json_output=True) == 0
    return run_dir


def test_a_run_leaves_metrics_events_plot_and_checkpoints(finished):
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for name in ["step", "time", "reward", "reward_std", "frac_reward_zero_std", "entropy", "grad_norm", "step_time"]:
        assert all(math.isfinite(line[name]) for line in lines), name
    assert lines[-1]["num_tokens"] > lines[0]["num_tokens"] > 0
    assert {"reward/gcd", "perf/generated_tok_s", "completions/mean_length"} <= lines[0].keys()
    assert max(line["sampling/logp_difference"] for line in lines) < 1e-4  # sampled from the weights it trains
    assert (finished / "plots/reward.png").read_bytes().startswith(b"\x89PNG")
    assert newest(finished).name == "round-00000006"
    kinds = [json.loads(line)["kind"] for line in (finished / "events.jsonl").read_text().splitlines()]
    assert kinds[-1] == "summary" and "start" in kinds


def test_weights_change_every_round_that_has_a_signal(finished):
    lines = read_jsonl(finished / "metrics.jsonl")
    assert lines[-1]["step"] == sum(line["frac_reward_zero_std"] < 1 for line in lines)
    before, after = (load_file(p / "policy.safetensors") for p in sorted((finished / "checkpoints").iterdir()))
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_resuming_a_finished_run_adds_nothing(finished, capsys):
    content = (finished / "metrics.jsonl").read_text()
    train_locally(settings(finished, eval={"questions": 14, "samples": 4}), json_output=True)
    assert (finished / "metrics.jsonl").read_text() == content
    summary = json.loads(capsys.readouterr().out)
    assert summary["rounds"] == 6 and summary["held_out_before"]["all"]["questions"] == 14


def test_export_loads_in_plain_transformers(finished, tmp_path):
    export_run(finished, tmp_path / "out", lambda text: None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    trained = load_file(newest(finished) / "policy.safetensors")
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in trained.items())
    with pytest.raises(UserError, match="not empty"):
        export_run(finished, tmp_path / "out", lambda text: None)


def test_eval_takes_a_run_or_a_model(finished, tmp_path, capsys):
    export_run(finished, tmp_path / "out", lambda text: None)
    for target in (finished, tmp_path / "out"):
        evaluate_main(str(target), tasks=["small"], samples=2, questions=7, json_output=True)
    run, model = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert run["held_out"] == model["held_out"] and run["held_out"]["all"]["questions"] == 7


# --------------------------------------------------------------------- a run keeps its own settings


def swarm_node(*words):
    result = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A finished run with settings of its own, and its held-out figures."""
    run_dir = tmp_path_factory.mktemp("own") / "run"
    sets = [
        *("rollouts.groups=7", "rollouts.group_size=4", "rollouts.max_new_tokens=9", "rollouts.temperature=0.9"),
        *("policy.system_prompt=Answer.", "eval.questions=21", "eval.samples=3"),
    ]
    words = [word for pair in sets for word in ("--set", pair)]
    report, _ = swarm_node("local", "--run-dir", run_dir, "--rounds", 4, "--tasks", "small/gcd,small/products", *words)
    return run_dir, report["held_out_after"]


def test_a_finished_run_keeps_settings_and_figure(own):
    run_dir, held_out = own
    assert held_out["all"]["pass_1"] > 0
    config = (run_dir / "config.toml").read_bytes()
    other = "--set", "rollouts.max_new_tokens=1", "--set", "policy.system_prompt=", "--tasks", "small/lcm"
    assert swarm_node("local", "--run-dir", run_dir, "--rounds", 4, *other)[0]["rounds"] == 4
    assert (run_dir / "config.toml").read_bytes() == config
    assert swarm_node("eval", run_dir, "--samples", 3)[0]["held_out"] == held_out
    assert swarm_node("local", "--run-dir", run_dir)[0]["held_out_after"] == held_out, "a bare start"
    (run_dir / "config.toml").write_text("rounds = 4\n[rollouts]\nmax_new_tokens = 1\n")
    assert swarm_node("eval", run_dir)[0]["held_out"] == held_out, "as its checkpoint was trained"
    (run_dir / "config.toml").write_bytes(config)


def test_an_export_is_asked_as_its_run_was(own, tmp_path):
    run_dir, held_out = own
    export_run(run_dir, tmp_path / "out", lambda text: None)
    assert swarm_node("eval", tmp_path / "out")[0]["held_out"] == held_out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.generation_config.temperature, model.generation_config.max_new_tokens) == (0.9, 9)
    assert "leaves system prompts out" in (tmp_path / "out/README.md").read_text()  # as the starter's template does


def test_an_export_chooses_no_options_beyond_bounds(own, tmp_path):
    export_run(own[0], tmp_path / "out", lambda text: None)
    file = tmp_path / "out/swarm-node.json"
    tasks = [{"env": "gcd", "config": {"max_numbers": 10**9}}, {"env": "products", "config": {"max_digits": 1}}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tasks": tasks}))
    measured, said = swarm_node("eval", tmp_path / "out")
    assert measured["held_out"].keys() == {"products", "all"}
    assert "left out, unless it is given as --tasks" in said and "max_numbers" in said


def test_changed_settings_come_with_their_first_round(own, tmp_path):
    run_dir = shutil.copytree(own[0], tmp_path / "run")
    before = (run_dir / "config.toml").read_bytes()
    more = "--rounds", 5, "--set", "rollouts.max_new_tokens=4", "--set", "eval.questions=0"
    said = swarm_node("local", "--run-dir", run_dir, *more)[1]
    sentence = "changed: rollouts.max_new_tokens 9 -> 4, eval.questions 21 -> 0, from round 5; the earlier settings are"
    assert f"{sentence} kept in config-0001.toml" in " ".join(said.split())
    assert (run_dir / "config-0001.toml").read_bytes() == before
    config = load_config(run_dir / "config.toml")
    assert (config.rollouts.max_new_tokens, config.rounds, config.rollouts.groups) == (4, 5, 7)
    assert swarm_node("local", "--run-dir", run_dir)[0]["rounds"] == 5
    assert len(list(run_dir.glob("config*"))) == 2


def test_an_adapter_run_trains_and_exports_the_adapter(tmp_path):
    base = save("qwen2", tmp_path / "base")
    policy = {"model": str(base), "lora": True, "lora_rank": 4, "dtype": "float32"}
    config = settings(tmp_path / "run", rounds=3, policy=policy, rollouts={"groups": 4, "max_new_tokens": 6})
    config.rewards.functions = []
    config = NodeConfig.model_validate(
        config.model_dump() | {"rewards": {"functions": [{"path": f"{__file__}:parity"}], "checker_weight": 0}}
    )
    train_locally(config, json_output=True)
    assert read_jsonl(tmp_path / "run/metrics.jsonl")[-1]["step"] == 3
    export_run(tmp_path / "run", tmp_path / "out", lambda text: None)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    trained = load_file(newest(tmp_path / "run") / "policy.safetensors")
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: peft" in card and "## How to ask it" in card and str(tmp_path) not in card
    assert len(trained) == 28  # 2 layers x 7 matrices x (A, B)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in trained.items())
    assert any("lora_B" in name and tensor.abs().max() > 0 for name, tensor in trained.items())


def parity(completions, **columns):
    """A reward function as users write them."""
    return [float(len(c) % 2) for c in completions]


# --------------------------------------------------------------------- stopping and resuming


SETS = (
    *("rollouts.groups=7", "rollouts.group_size=4", "rollouts.max_new_tokens=8"),
    *("eval.questions=0", "checkpoints.every=2"),
)
"""As `settings` has them."""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_stopped_run_ends_as_if_never_stopped(start, tmp_path, number):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    node = start("local", "--rounds", "100000", run_dir=parts, sets=(*SETS, "grpo.replay=3"))
    node.until(lambda: node.rounds >= 5)
    code = node.stop(number)
    done = len(read_jsonl(parts / "metrics.jsonl"))
    if number == signal.SIGTERM:
        assert code == 0 and f"stopping after round {done}" in node.output
        assert newest(parts).name == f"round-{done:08}"
    rounds = done + 3
    train_locally(settings(parts, rounds, grpo={"replay": 3}), json_output=True)
    train_locally(settings(whole, rounds, grpo={"replay": 3}), json_output=True)
    replays = [json.loads((newest(run) / "state.json").read_text())["state"]["replay"] for run in (parts, whole)]
    assert replays[0] == replays[1] and replays[0]["answers"]
    assert same_tensors(newest(parts) / "policy.safetensors", newest(whole) / "policy.safetensors")
    assert same_tensors(newest(parts) / "optimizer.safetensors", newest(whole) / "optimizer.safetensors")
    ours, theirs = (read_jsonl(d / "metrics.jsonl") for d in (parts, whole))
    for a, b in zip(ours, theirs, strict=True):
        assert {k: a[k] for k in ("round", "step", "reward", "loss", "num_tokens")} == {
            k: b[k] for k in ("round", "step", "reward", "loss", "num_tokens")
        }


def test_a_torn_checkpoint_is_passed_over(tmp_path, capsys):
    run_dir = tmp_path / "run"
    train_locally(settings(run_dir, rounds=4), json_output=True)
    torn = newest(run_dir) / "policy.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    train_locally(settings(run_dir, rounds=6), json_output=True)
    assert "round-00000004 refused" in capsys.readouterr().err
    assert [line["round"] for line in read_jsonl(run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_run_of_another_model_is_left_alone(tmp_path, finished):
    content = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file() and p.name not in ("lock", "events.jsonl")}
    other = save("llama", tmp_path / "other")
    with pytest.raises(UserError, match="belongs to another run.*--run-dir"):
        train_locally(settings(finished, policy={"model": str(other)}), json_output=True)
    assert all(p.read_bytes() == data for p, data in content.items())


def test_rounds_without_reward_show_what_was_answered(tmp_path, capsys):
    model = save("llama", tmp_path / "model")
    config = settings(tmp_path / "run", rounds=10, policy={"model": str(model)}, tasks=["small/products"])
    train_locally(config, json_output=True)
    shown = [line for line in capsys.readouterr().err.splitlines() if "extracted" in line]
    assert len(shown) == 3 and all("expected" in line and "completion" in line for line in shown)


def test_a_resumed_run_keeps_its_first_reference_policy(tmp_path):
    config = settings(
        tmp_path / "run",
        rounds=4,
        grpo={"beta": 0.05, "loss": "grpo", "iterations": 2},
        rollouts={"groups": 6, "group_size": 4, "max_new_tokens": 8},
    )
    train_locally(config, json_output=True)
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert all(0 < line["kl"] < 1 for line in lines) and lines[-1]["step"] == 8
    whole = settings(tmp_path / "whole", rounds=8).model_copy(update={"grpo": config.grpo, "rollouts": config.rollouts})
    train_locally(whole, json_output=True)
    train_locally(config.model_copy(update={"rounds": 8}), json_output=True)
    assert same_tensors(  # the reference of a resumed run is the policy it began with, not the one it resumed with
        newest(tmp_path / "run") / "policy.safetensors", newest(tmp_path / "whole") / "policy.safetensors"
    )


def test_resuming_with_other_tasks_trains_on_them(tmp_path, capsys):
    questions = tmp_path / "sums.jsonl"
    questions.write_text(
        "".join(json.dumps({"question": f"Calculate {i} * 1.", "answer": str(i)}) + "\n" for i in range(40))
    )
    held = {"questions": 7, "samples": 2}
    train_locally(settings(tmp_path / "run", rounds=2, eval=held), json_output=True)
    train_locally(settings(tmp_path / "run", rounds=4, eval=held, tasks=[str(questions)]), json_output=True)
    out = capsys.readouterr()
    assert "no figures from before training" in out.err
    assert json.loads(out.out.splitlines()[-1])["held_out_after"]["all"]["questions"] > 0
    assert "reward/sums" in read_jsonl(tmp_path / "run/metrics.jsonl")[-1]


def test_starting_anew_keeps_the_metrics_that_were_there(tmp_path, capsys):
    run_dir = tmp_path / "run"
    train_locally(settings(run_dir, rounds=2), json_output=True)
    content = (run_dir / "metrics.jsonl").read_text()
    (newest(run_dir) / "policy.safetensors").write_bytes(b"torn")
    train_locally(settings(run_dir, rounds=2), json_output=True)
    assert (run_dir / "metrics.jsonl.1").read_text() == content
    assert "starting anew" in capsys.readouterr().err


def test_minutes_alone_lift_the_limit_on_rounds():
    assert NodeConfig().total_rounds == 200
    assert NodeConfig(minutes=3).total_rounds == math.inf
    assert NodeConfig(minutes=3, rounds=7).total_rounds == 7


def broken_after_three_calls(completions, **columns):
    """A reward function that fails in mid-run."""
    calls.append(1)
    if len(calls) > 7 * 3:  # seven groups a round
        raise RuntimeError("the judge is out of order")
    return [float(len(c) % 2) for c in completions]


calls: list[int] = []


def test_a_failing_reward_function_saves_finished_rounds(tmp_path):
    rewards = {"functions": [{"path": f"{__file__}:broken_after_three_calls"}]}
    with pytest.raises(UserError, match="out of order"):
        train_locally(settings(tmp_path / "run", rewards=rewards), json_output=True)
    assert newest(tmp_path / "run").name == "round-00000003"
    assert len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 3


def test_a_full_disk_leaves_the_configuration_whole(tmp_path):
    with RunDir.open(tmp_path / "run") as run:
        run.write("config.toml", "seed = 1\n")
        with file_size_limit(10), pytest.raises(UserError, match="disk full"):
            run.write("config.toml", "seed = 2\n" * 100)
    assert run.config.read_text() == "seed = 1\n"
    assert [p.name for p in run.path.glob("config*")] == ["config.toml"]
