"""`swarm-node merge` on runs that `swarm-node local` made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from swarm_node.averaging.merge import clip_factors, task_norms
from swarm_node.cli.app import app
from swarm_node.cli.commands import merge as merging
from swarm_node.cli.commands.evaluate import main as evaluate_main
from swarm_node.cli.commands.export import export_run
from swarm_node.cli.commands.merge import MergeRequest, cohort_of_runs, halves, main, scales
from swarm_node.cli.model import runs_of
from swarm_node.config import NodeConfig, PolicyConfig, RolloutsConfig, dump_toml, load_config
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.errors import UserError
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.loading import load_policy
from swarm_node.policy.sizes import RUNTIME_BYTES
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.manifests import make_manifest, write_manifest
from swarm_node.tasks.one_turn import is_held_out
from swarm_node.tasks.taskset import load_tasks
from tests.support.starting import train_locally
from tests.support.tiny_models import save

CASES = ["one", "two", "three"]


def parity(completions, **columns):
    """A reward function under which any model has something to learn."""
    return [float(len(completion) % 2) for completion in completions]


def train(run_dir, seed, rounds=2, tasks=("small/gcd",), **policy):
    config = {
        "run_dir": str(run_dir),
        "rounds": rounds,
        "seed": seed,
        "tasks": list(tasks),
        "policy": policy,
        "rollouts": {"groups": 4, "group_size": 4, "max_new_tokens": 6},
        "rewards": {"functions": [{"path": f"{__file__}:parity"}], "checker_weight": 0},
        "eval": {"questions": 0, "samples": 2},
        "grpo": {"learning_rate": 1e-3},
    }
    train_locally(NodeConfig.model_validate(config), json_output=True)
    return run_dir


def trained(run_dir):
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: path.name)
    return load_file(newest / "policy.safetensors")


def mean(states):
    return {name: torch.stack([s[name].double() for s in states]).mean(0).float() for name in states[0]}


OWN = [RewardFunctionConfig(path=f"{__file__}:parity")]


def quietly(sources, out, *args, **options):
    options = {"functions": OWN} | options
    main(runs_of([str(source) for source in sources]), MergeRequest(out, *args, json_output=True, **options))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Three runs of the starter policy, two rounds each."""
    folder = tmp_path_factory.mktemp("full")
    return [train(folder / name, seed) for seed, name in enumerate(CASES)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save("qwen2", tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def lora(tmp_path_factory, base):
    """Three runs of an adapter."""
    folder = tmp_path_factory.mktemp("lora")
    options = {"model": str(base), "lora": True, "lora_rank": 4, "dtype": "float32"}
    return [train(folder / name, seed, **options) for seed, name in enumerate(CASES)]


# --------------------------------------------------------------------- what comes out


def test_the_mean_of_runs_loads_in_transformers(full, tmp_path, capsys):
    quietly(full, tmp_path / "out", questions=0)
    result = json.loads(capsys.readouterr().out)
    assert result["rounds"] == {str(run): 2 for run in full} and result["runs"] == result["merged"] == {}
    states = [trained(run) for run in full]
    assert not torch.equal(states[0]["model.norm.weight"], states[1]["model.norm.weight"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in mean(states).items())


def test_the_mean_of_adapters_loads_in_peft(lora, base, tmp_path):
    quietly(lora, tmp_path / "out", questions=0)
    states = [trained(run) for run in lora]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    assert len(states[0]) == 28
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in mean(states).items())
    assert any("lora_B" in name and tensor.abs().max() > 0 for name, tensor in mean(states).items())


def test_task_arithmetic_adds_clipped_changes_to_the_start(full, tmp_path, capsys):
    quietly(full, tmp_path / "out", "task-arithmetic", 0.5, questions=0)
    result = json.loads(capsys.readouterr().out)
    assert result["scale"] == 0.5 and result["tried"] == []
    start = load_policy(PolicyConfig(), RolloutsConfig(), lambda text: None).trainable_state()
    states = {str(run): trained(run) for run in full}
    norms = task_norms(states, start)
    assert result["norms"] == pytest.approx(norms) and len(set(norms.values())) == 3
    factors = clip_factors(norms)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, origin in start.items():
        change = sum(factors[run] * (state[name] - origin) for run, state in states.items())
        assert torch.allclose(model.get_parameter(name), origin + 0.5 * change, atol=1e-6)


def test_figures_are_those_of_eval(full, tmp_path, capsys):
    quietly(full[:2], tmp_path / "out", questions=12)
    result = json.loads(capsys.readouterr().out)
    figures = [*result["runs"].values(), result["merged"]]
    for target, held in zip([*full[:2], tmp_path / "out"], figures, strict=True):
        functions = {"functions": OWN, "given": {"rewards": {"checker_weight": 0.0}}}
        evaluate_main(str(target), tasks=["small/gcd"], samples=2, questions=12, json_output=True, **functions)
        assert json.loads(capsys.readouterr().out)["held_out"] == held
    assert result["questions"] == 12 and result["samples"] == 2
    ones = [held["all"]["reward"] for held in figures]
    assert max(ones) > 0
    assert result["mean"] == pytest.approx(sum(ones[:2]) / 2)


def test_the_scale_is_chosen_on_other_questions(full, tmp_path, capsys, monkeypatch):
    asked, evaluate_on = [], merging.evaluate_on

    def watched(questions, policy, *args):
        table = evaluate_on(questions, policy, *args)
        table["all"].reward = 0.9 if len(asked) == 3 else table["all"].reward / 2  # the fourth scale is the best
        asked.append({task.question for task in questions})
        return table

    monkeypatch.setattr(merging, "evaluate_on", watched)
    quietly(full, tmp_path / "out", "task-arithmetic", questions=20)
    result = json.loads(capsys.readouterr().out)
    assert [tried["scale"] for tried in result["tried"]] == scales(3)
    assert result["scale"] == scales(3)[3] and result["questions"] == 10
    choosing, reported = asked[: len(scales(3))], asked[len(scales(3)) :]
    assert len(reported) == 4 and all(questions == choosing[0] for questions in choosing)
    assert all(questions == reported[0] for questions in reported)
    assert choosing[0].isdisjoint(reported[0]) and len(choosing[0] | reported[0]) == 20


def test_halves_share_out_every_task():
    questions = load_tasks(["small"], NodeConfig().rewards).held_out(28)
    one, other = halves(questions)
    for half in (one, other):
        assert len(half) == 14 and len({task.label for task in half}) == 7
    assert {task.question for task in one}.isdisjoint(task.question for task in other)


def test_one_over_k_comes_first_and_once():
    assert scales(2) == [0.5, 0.3, 0.4, 0.7, 1.0]
    assert scales(3)[0] == 1 / 3 and len(scales(3)) == 6


def test_without_json_tables_show_runs_and_merge(full, tmp_path):
    args = ["merge", *map(str, full[:2]), "--out", "out", "--method", "task-arithmetic", "--questions", "8"]
    args += ["--reward", f"{__file__}:parity"]
    result = CliRunner().invoke(app, args, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "scale tried" in result.stdout and "4 held-out questions" in result.stdout
    for row in [*map(str, full[:2]), "mean of these", "merged (task-arithmetic)"]:
        assert row in result.stdout
    assert "are clipped to it" in result.stderr and "from_pretrained" in result.stderr
    assert "are clipped to it" not in result.stdout


def test_code_that_only_runs_name_does_not_run(full, tmp_path):
    with pytest.raises(UserError, match=r"nothing is left to judge answers.*--reward .*:parity"):
        quietly(full[:2], tmp_path / "out", questions=8, functions=None)


def test_the_order_of_runs_does_not_matter(full, tmp_path):
    quietly(full, tmp_path / "a", questions=0)
    quietly(full[::-1], tmp_path / "b", questions=0)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_checkpoints_pruned_meanwhile_are_still_merged(full, tmp_path):
    copies = [shutil.copytree(run, tmp_path / run.name) for run in full]
    expected = mean([trained(run) for run in copies])
    cohort = cohort_of_runs([RunDir(copy) for copy in copies], lambda text: None)
    for copy in copies:
        shutil.rmtree(copy / "checkpoints")
    (tmp_path / "out").mkdir()
    merging.merge(cohort, MergeRequest(tmp_path / "out", questions=0), lambda text: None)
    assert all(torch.equal(load_file(tmp_path / "out/model.safetensors")[name], expected[name]) for name in expected)


def test_a_torn_checkpoint_is_passed_over(full, tmp_path, capsys):
    run = train(shutil.copytree(full[0], tmp_path / "run"), 0, rounds=4)
    torn = run / "checkpoints/round-00000004/policy.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    quietly([run, full[1]], tmp_path / "out", questions=0)
    captured = capsys.readouterr()
    assert "round-00000004 refused" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["rounds"] == {str(run): 2, str(full[1]): 2}


def test_questions_come_from_all_runs_and_swarms(full, tmp_path):
    other = train(tmp_path / "other", 7, tasks=["small/lcm"])
    member = shutil.copytree(full[0], tmp_path / "member")
    write_manifest(make_manifest("sums", ["small/products"]), member / "swarm.toml")
    config = load_config(member / "config.toml")
    (member / "config.toml").write_text(dump_toml(config.model_copy(update={"swarm": "sums.toml"})))
    cohort = cohort_of_runs([RunDir(run) for run in (full[0], other, member)], lambda text: None)
    assert load_tasks(cohort.tasks, config.rewards).labels == ["gcd", "lcm", "products"]


def test_questions_that_a_run_trained_on_are_counted(full, tmp_path, capsys):
    file = tmp_path / "test.jsonl"
    file.write_text("".join(f'{{"question": "{n} plus 1?", "answer": "{n + 1}"}}\n' for n in range(40)))
    examined = shutil.copytree(full[0], tmp_path / "examined")
    config = load_config(examined / "config.toml")
    asked = config.eval.model_copy(update={"tasks": [str(file)]})
    (examined / "config.toml").write_text(dump_toml(config.model_copy(update={"eval": asked})))
    other = train(tmp_path / "other", 7, tasks=[str(file)])
    capsys.readouterr()
    quietly([examined, other], tmp_path / "out", questions=40)
    said = " ".join(capsys.readouterr().err.split())
    trained = sum(not is_held_out(f"{n} plus 1?") for n in range(40))
    remark = f"could train on {trained} of these questions, so the figures may show what was remembered"
    assert f"{other} {remark}" in said and said.count("could train on") == 1 and trained > 0


# --------------------------------------------------------------------- what is refused


def refused(sources, out, message, *args, **options):
    with pytest.raises(UserError, match=message):
        quietly(sources, out, *args, **{"questions": 0} | options)
    assert not out.exists() or list(out.iterdir()) == []


def test_one_run_alone_is_no_merge(full, tmp_path):
    refused(full[:1], tmp_path / "out", "at least two different run directories")
    refused([full[0], full[0] / "checkpoints" / ".."], tmp_path / "out", "at least two different run directories")
    assert not (tmp_path / "out").exists()


def test_no_run_and_no_checkpoint(full, tmp_path):
    (tmp_path / "empty").mkdir()
    refused([full[0], tmp_path / "empty"], tmp_path / "out", "no run in .*empty")
    (tmp_path / "empty/config.toml").write_text("")
    refused([full[0], tmp_path / "empty"], tmp_path / "out", "empty has no checkpoint yet")


@pytest.mark.parametrize("better", [True, False])
def test_a_source_better_than_merged_is_named(full, tmp_path, capsys, monkeypatch, better):
    evaluate_on, asked = merging.evaluate_on, []

    def rigged(*args):
        table = evaluate_on(*args)
        asked.append(1)  # the merged model first
        table["all"].reward = [0.5, 0.25, 0.75 if better else 0.5][len(asked) - 1]
        return table

    monkeypatch.setattr(merging, "evaluate_on", rigged)
    quietly(full[:2], tmp_path / "out", questions=4)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["better"] == (str(full[1]) if better else "")
    figures = "mean reward 0.750 against 0.500"
    advice = f"{full[1]} alone is better on these questions ({figures}): `swarm-node export {full[1]} DIR` keeps it"
    assert (advice in " ".join(captured.err.split())) == better
    assert ("alone is better" in captured.err) == better


def test_hopeless_merges_are_refused_before_loading_torch(full, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thing").touch()
    program = (
        "import json, sys; from swarm_node.cli.app import app\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    try: app(['merge', *args])\n"
        "    except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    hopeless = (
        ([full[0], full[1], "--out", tmp_path / "precious"], "precious is not empty"),
        ([full[0], "--out", tmp_path / "new"], "at least two different run directories"),
        ([full[0], "--max-memory", 4, "--out", tmp_path / "new"], "at least two different run directories"),
        ([full[0], "--model", "starter", "--out", tmp_path / "new"], "--model and --set are for merging a swarm"),
        (["swarm://x", "--out", tmp_path / "precious"], "precious is not empty"),
        (["swarm://x", full[0], "--out", tmp_path / "new"], "a merge is of one swarm, or of run directories"),
    )
    arguments = json.dumps([list(map(str, args)) for args, _ in hopeless])
    ended = subprocess.run([sys.executable, "-c", program, arguments], capture_output=True, text=True, timeout=100)
    assert ended.stdout == "2 False\n" * len(hopeless), ended.stderr
    said = ended.stderr.splitlines()
    assert all(message in line for (_, message), line in zip(hopeless, said, strict=True)), said
    assert not (tmp_path / "new").exists()


def test_held_out_questions_keep_to_the_memory(full, tmp_path, monkeypatch):
    sizes, decode = [], NativeEngine.decode
    monkeypatch.setattr(
        NativeEngine, "decode", lambda self, prompts, *more: sizes.append(len(prompts)) or decode(self, prompts, *more)
    )
    quietly(full[:2], tmp_path / "out", questions=4)
    assert sizes == [4] * 3
    sizes.clear()
    quietly(full[:2], tmp_path / "one", questions=4, max_memory_gb=(RUNTIME_BYTES + 7 * 2**19) / 2**30)
    assert sizes == [1] * 12
    with pytest.raises(UserError, match="takes about 0.49 GiB, more than --max-memory 0.1: choose a smaller model"):
        quietly(full[:2], tmp_path / "none", questions=4, max_memory_gb=0.1)
    assert not list((tmp_path / "none").iterdir())


def test_a_non_empty_directory_is_left_alone(full, tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(UserError, match="is not empty"):
        quietly(full, tmp_path, questions=0)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_runs_of_other_bases(full, tmp_path):
    for kind in ("llama", "qwen2"):
        other = train(tmp_path / kind, 0, model=str(save(kind, tmp_path / f"{kind}-base")))
        refused([full[0], other], tmp_path / "out", "cannot be merged: they began from different base models")


def test_a_base_that_is_no_longer_there(lora, tmp_path):
    copies = [shutil.copytree(run, tmp_path / run.name) for run in lora]
    config = load_config(copies[0] / "config.toml")
    config.policy.model = str(save("qwen2", tmp_path / "other", seed=1))
    (copies[0] / "config.toml").write_text(dump_toml(config))
    refused(copies, tmp_path / "out", "other as it is here cannot be merged: .* different base models")


def test_adapters_of_other_rank_or_scale(lora, base, tmp_path):
    options = {"model": str(base), "lora": True, "dtype": "float32"}
    rank = train(tmp_path / "rank", 0, **options, lora_rank=8)
    refused([lora[0], rank], tmp_path / "out", r"they train different weights .*lora_A.* is \[4, .*\[8, ")
    alpha = train(tmp_path / "alpha", 0, **options, lora_rank=4, lora_alpha=8)
    refused([lora[0], alpha], tmp_path / "out", r"lora_alpha differs \(\[8, 32\]\)")
    everything = train(tmp_path / "everything", 0, model=str(base), lora=False)
    refused([lora[0], everything], tmp_path / "out", "they train different weights .* names differ")


def test_adapters_that_did_not_start_alike(lora, tmp_path):
    export_run(lora[0], tmp_path / "adapter", lambda text: None)
    other = train(tmp_path / "other", 0, model=str(tmp_path / "adapter"))
    refused([lora[1], other], tmp_path / "out", "their LoRA adapters did not start alike")


def test_the_checkpoint_before_is_merged_where_a_run_diverged(full, tmp_path, capsys):
    run = shutil.copytree(full[0], tmp_path / "run")
    store = CheckpointStore(run / "checkpoints", 2, print)
    checkpoint = store.load_latest(lambda state: None)
    checkpoint.tensors["policy"]["model.norm.weight"][0] = torch.nan
    store.save(3, checkpoint.tensors, checkpoint.state)
    store.close()
    quietly([run, full[1]], tmp_path / "out", questions=0)
    assert "model.norm.weight has values that are not finite" in "".join(capsys.readouterr())


def test_a_scale_that_means_nothing(full, tmp_path):
    refused(full, tmp_path / "out", "--scale is a number for --method task-arithmetic", "uniform", 0.5)
    refused(full, tmp_path / "out", "--scale is a number", "task-arithmetic", float("nan"))
    refused(full, tmp_path / "out", "at least two held-out questions", "task-arithmetic")
    refused(full, tmp_path / "out", "at least two held-out questions", "task-arithmetic", questions=1)


def test_the_command_line_says_it_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["merge", "runs/a", "runs/b", "--out", "out", "--json"])
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert result.stderr == "swarm-node: no run in runs/a (there is no such directory)\n"
    assert json.loads(result.stdout) == {"error": "no run in runs/a (there is no such directory)"}
    wrong = CliRunner().invoke(app, ["merge", "runs/a", "runs/b", "--out", "out", "--method", "median"])
    assert wrong.exit_code == 2 and "'task-arithmetic'" in wrong.stderr
