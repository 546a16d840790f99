"""`swarm-node export` of an adapter, as it is and merged into its base, and `eval` of the result."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.cli.commands import export
from swarm_node.cli.commands.evaluate import main as evaluate_main
from swarm_node.cli.commands.export import export_run
from swarm_node.cli.commands.export_card import base_of
from swarm_node.config import NodeConfig, PolicyConfig
from swarm_node.config.own import read_own
from swarm_node.errors import UserError
from swarm_node.say import Warned
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.rundir import RunDir
from tests.support.gguf_files import write_gguf
from tests.support.run_files import read_jsonl
from tests.support.starting import train_locally
from tests.support.tiny_models import save

REWARD = "def parity(completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter of a tiny model, whose base and reward function lie beside it."""
    folder = tmp_path_factory.mktemp("trained")
    save("llama", folder / "base")
    (folder / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    (folder / "mine.py").write_text(REWARD)
    config = {
        "run_dir": str(folder / "run"),
        "rounds": 2,
        "tasks": ["small/gcd"],
        "policy": {"model": str(folder / "base"), "lora": True, "lora_rank": 4, "dtype": "float32"},
        "rollouts": {"groups": 4, "group_size": 4, "max_new_tokens": 6, "temperature": 0.9, "top_p": 0.95},
        "rewards": {"functions": [{"path": f"{folder / 'mine.py'}:parity", "weight": 0.5}]},
        "eval": {"questions": 12, "samples": 2},
        "grpo": {"learning_rate": 1e-2},
    }
    train_locally(NodeConfig.model_validate(config), json_output=True)
    return folder


def test_a_run_whose_only_checkpoint_cannot_be_used_is_told_why(tmp_path: Path) -> None:
    run, said = RunDir(tmp_path / "run"), list[str]()
    with pytest.raises(UserError, match="run has no checkpoint yet: the first comes after 10 rounds"):
        export.newest_of(run, NodeConfig(), said.append)
    store = CheckpointStore(run.checkpoints, 2, said.append)
    state = {"model": {"base": "b", "start": "s"}, "policy_version": 4}
    store.save(4, {"policy": {"w": torch.tensor([1.0, torch.nan])}}, state)
    store.close()
    why = "the newest, round-00000004: w has values that are not finite"
    with pytest.raises(UserError, match=f"no checkpoint of .*run can be used; {why}"):
        export.newest_of(run, NodeConfig(), said.append)
    assert not any("anew" in text for text in said), "an export starts nothing"


def quietly(trained: Path, out: str, **options: Any) -> list[str]:
    said: list[str] = []
    export_run(trained / "run", out, said.append, **options)
    return said


def answers(target: object, file: str, **options: Any) -> list[list[str]]:
    """The texts of all answers to the questions of an evaluation."""
    evaluate_main(str(target), json_output=True, out=Path(file), **options)
    return [[answer["text"] for answer in line["answers"]] for line in read_jsonl(Path(file))]


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_exports_answer_as_their_run_does(trained: Path) -> None:
    quietly(trained, "adapter")
    quietly(trained, "merged", merged=True)
    run = answers(trained / "run", "run.jsonl")
    assert len(run) == 12 and len(run[0]) == 2 and len({text for each in run for text in each}) > 12
    assert answers("adapter", "adapter.jsonl") == run
    assert answers("merged", "merged.jsonl") == run
    assert answers(trained / "base", "base.jsonl", like=trained / "run") != run


def test_a_merged_export_is_one_ordinary_model(trained: Path) -> None:
    said = quietly(trained, "merged", merged=True)
    assert said[-1].endswith("load it with AutoModelForCausalLM.from_pretrained('merged')")
    assert not Path("merged/adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained("merged")
    assert model.dtype == torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight
    used = model.generation_config
    assert (used.do_sample, used.temperature, used.top_p, used.max_new_tokens) == (True, 0.9, 0.95, 6)
    assert (used.eos_token_id, used.pad_token_id) == (2, 0)
    quietly(trained, "half", merged=True, dtype="bfloat16")
    assert {tensor.dtype for tensor in tensors(Path("half")).values()} == {torch.bfloat16}
    assert json.loads(Path("half/config.json").read_text())["dtype"] == "bfloat16"


def test_generate_reads_the_sampling_of_an_adapter_if_it_is_given(trained: Path) -> None:
    quietly(trained, "adapter")
    model = AutoModelForCausalLM.from_pretrained("adapter")
    assert model.generation_config.max_new_tokens is None, "transformers reads the settings of the base"
    tokenizer, settings = AutoTokenizer.from_pretrained("adapter"), GenerationConfig.from_pretrained("adapter")
    message = [{"role": "user", "content": "2 + 2?"}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**inputs, generation_config=settings)
    assert answer.shape[1] - inputs["input_ids"].shape[1] <= 6
    assert "generation_config=settings" in Path("adapter/README.md").read_text()


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")  # of PEFT
def test_no_tensor_is_rounded_unless_asked(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers beside an adapter were trained in float32; an export that starts in bfloat16 must not round them."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(trained / "base"), lora).save_pretrained("start")
    AutoTokenizer.from_pretrained(trained / "base").save_pretrained("start")
    config = {"run_dir": "run", "rounds": 2, "tasks": ["small/gcd"], "eval": {"questions": 0}}
    more = {"policy": {"model": "start"}, "rollouts": {"groups": 4, "group_size": 4, "max_new_tokens": 6}}
    rewards = {"rewards": {"functions": [f"{trained / 'mine.py'}:parity"]}, "grpo": {"learning_rate": 1e-3}}
    train_locally(NodeConfig.model_validate(config | more | rewards), json_output=True)
    settings_in = export.settings_in

    def in_bfloat16(state: Mapping[str, Any], config: NodeConfig) -> NodeConfig:
        config = settings_in(state, config)
        return config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": "bfloat16"})})

    monkeypatch.setattr(export, "settings_in", in_bfloat16)
    there = load_file(max(Path("run/checkpoints").glob("round-*")) / "policy.safetensors")
    assert any("modules_to_save" in name and tensor.dtype == torch.float32 for name, tensor in there.items())
    for dtype in (None, "bfloat16"):
        export_run("run", f"out-{dtype}", lambda sentence: None, dtype=dtype)
        found = tensors(Path(f"out-{dtype}"))
        assert len(found) == len(there)
        for name, tensor in there.items():
            written = found[name.replace(".default", "").replace(".modules_to_save", "")]
            assert torch.equal(written, tensor if dtype is None else tensor.bfloat16())


def test_the_card_tells_of_the_training_and_of_no_machine(trained: Path) -> None:
    said = quietly(trained, "adapter")
    card = ModelCard.load("adapter/README.md")
    assert card.data.library_name == "peft" and card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0" and card.data.base_model is None and "lora" in card.data.tags
    assert "More Information Needed" not in card.content and str(trained) not in card.content
    assert "trained in 2 rounds" in card.text and "`small/gcd`" in card.text
    assert "12 questions that were not trained on, 2 answers to each, before training and after round 2" in card.text
    assert "| mean reward | 0." in card.text and "| trained | LoRA, rank 4, alpha 32 |" in card.text
    assert "| learning rate | 0.01 |\n| schedule of the learning rate | constant |" in card.text
    assert (
        "swarm-node local --model MODEL --tasks small/gcd" in card.text and "--set grpo.learning_rate=0.01" in card.text
    )
    assert "REWARD.py:FUNCTION" in card.text and "mine.py" not in card.text
    named = json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(trained / "base"), "it loads from any directory here"
    warned = [sentence for sentence in said if isinstance(sentence, Warned)]
    assert len(warned) == 1 and "--base OWNER/NAME" in warned[0] and "--merged" in warned[0]


@pytest.mark.parametrize("kind", [None, "maths"])
def test_the_kind_of_answers_leaves_with_a_run(kind: str | None) -> None:
    """It was guessed, or a table named it. The command for the same training has it, the columns and a length."""
    lines = [{"prompt": f"What is {n} + {n}?", "solution": str(2 * n)} for n in range(20)]
    Path("sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = {"file": "sums.jsonl", "question": "prompt", "answer": "solution", "kind": kind}
    config = {"run_dir": "run", "rounds": 2, "tasks": [table], "rollouts": {"groups": 2, "max_new_tokens": 4}}
    train_locally(NodeConfig.model_validate(config | {"eval": {"questions": 0}}), json_output=True)
    own = read_own(Path("run/config.toml")).model_dump(mode="json", exclude_none=True)
    own["minutes"] = float(own.pop("rounds"))
    Path("run/config.toml").write_text(tomli_w.dumps(own))
    export_run("run", "out", lambda sentence: None)
    assert json.loads(Path("out/swarm-node.json").read_text())["kind"] == (kind or "number")
    card, named = Path("out/README.md").read_text(), f', kind = "{kind}"' if kind else ""
    asked = f'{{file = "QUESTIONS.jsonl", question = "prompt", answer = "solution"{named}}}'
    assert f"swarm-node local --tasks '{asked}' --rounds 2" in card and "sums.jsonl" not in card
    columns = '{file="sums.jsonl", question="prompt", answer="solution"}'
    for target, judged in (("out", kind or "number"), ("starter", "number")):
        found, _ = measured(target, "--tasks", columns, "--all", "--samples", "1")
        assert found["settings"]["kind"] == judged


@pytest.mark.parametrize("merged", [False, True])
def test_a_base_is_named_as_the_user_says(trained: Path, merged: bool) -> None:
    said = quietly(trained, "out", merged=merged, base="me/my-base")
    card = ModelCard.load("out/README.md")
    assert card.data.base_model == "me/my-base" and card.data.library_name == ("transformers" if merged else "peft")
    assert "--model me/my-base" in card.text and not any("--base" in sentence for sentence in said)
    if not merged:
        assert json.loads(Path("out/adapter_config.json").read_text())["base_model_name_or_path"] == "me/my-base"
    assert str(trained) not in "".join(file.read_text() for file in Path("out").glob("*.json"))


def test_a_base_made_of_a_gguf_file_is_named_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub has other weights: an adapter over them would not give the figures in the card."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    file = write_gguf(tmp_path / "tiny.gguf")
    config = {"run_dir": "run", "rounds": 1, "tasks": ["small/gcd"], "rollouts": {"groups": 2, "max_new_tokens": 4}}
    more = {"policy": {"model": str(file), "lora": True, "dtype": "float32"}, "eval": {"questions": 0}}
    train_locally(NodeConfig.model_validate(config | more), json_output=True)
    made = f"weights dequantised from tiny.gguf, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"
    for out, base in (("plain", None), ("named", "me/base"), ("merged", "me/base")):
        said: list[str] = []
        export_run("run", out, said.append, base=base, merged=out == "merged")
        card = ModelCard.load(f"{out}/README.md")
        assert made in card.text and "--model MODEL" in card.text and card.data.base_model == base
        warned = [each for each in said if isinstance(each, Warned) and "adapter_config.json" in each]
        assert not any("--base" in sentence for sentence in said) and len(warned) == (out != "merged")
        assert all("--merged" in sentence for sentence in warned)
    assert base_of(PolicyConfig(model="plain"), None).in_words == made, "an adapter that was trained further"


def test_all_weights_need_no_merge() -> None:
    config = {"run_dir": "run", "rounds": 1, "tasks": ["small/gcd"], "rollouts": {"groups": 2, "max_new_tokens": 4}}
    train_locally(NodeConfig.model_validate(config | {"eval": {"questions": 0}}), json_output=True)
    said: list[str] = []
    export_run("run", "out", said.append, merged=True, dtype="bfloat16")
    assert any("--merged changes nothing" in sentence for sentence in said)
    assert {tensor.dtype for tensor in tensors(Path("out")).values()} == {torch.bfloat16}
    card = ModelCard.load("out/README.md")
    assert "It started from the starter" in card.text and card.data.base_model is None


@pytest.mark.parametrize("name", ["base", "./base", "a/b/c", "me/../base", ""])
def test_a_base_has_the_name_of_a_hub_s_model(trained: Path, name: str) -> None:
    done = CliRunner().invoke(app, ["export", str(trained / "run"), "out", "--base", name])
    assert done.exit_code == 2 and "a model of the hub is named OWNER/NAME" in done.output and not Path("out").exists()


def measured(*words: object) -> tuple[dict[str, Any], str]:
    done = CliRunner().invoke(app, ["eval", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def test_a_base_is_measured_as_a_run_measures_itself(trained: Path) -> None:
    """The first figures of a run are those of its base."""
    before = json.loads(max((trained / "run/checkpoints").glob("round-*")).joinpath("state.json").read_text())
    start = before["state"]["held_out_figures"]["before"]["table"]["all"]
    reward = "--reward", f'{{path="{trained}/mine.py:parity", weight=0.5}}'
    base, said = measured(trained / "base", "--like", trained / "run", *reward)
    assert base["held_out"]["all"] == start and base["samples"] == 2
    run, _ = measured(trained / "run", "--like", trained / "run", *reward)
    assert run["settings"] == base["settings"] and base["settings"]["max_new_tokens"] == 6
    assert base["settings"]["dtype"] == "float32" and "left out" not in said


def test_code_that_only_a_run_names_does_not_run(trained: Path) -> None:
    """A run directory may be a stranger's."""
    trap = f"from pathlib import Path\nPath({str(Path.cwd() / 'ran')!r}).touch()\n{REWARD}"
    file = trained / "mine.py"
    before = file.read_text()
    try:
        file.write_text(trap)
        for words in ([trained / "run"], [trained / "base", "--like", trained / "run"]):
            found, said = measured(*words)
            assert found["rewards"].keys() == {"checker"} and not Path("ran").exists()
            again = f"""--reward '{{path="{file}:parity", weight=0.5}}'"""
            assert "since they are code that only the run's directory names" in said and again in " ".join(said.split())
        measured(trained / "run", "--set", f'rewards.functions=["{file}:parity"]')
        assert Path("ran").exists(), "it runs if its user names it"
    finally:
        file.write_text(before)


def strangers(run: Path) -> Path:
    """A copy of a run whose files name tasks and an engine that are code."""
    shutil.copytree(run, "theirs")
    Path("evil.py").write_text(f"from pathlib import Path\nPath({str(Path.cwd() / 'ran')!r}).touch()\n{REWARD}")
    config = Path("theirs/config.toml")
    own = read_own(config).model_dump(exclude_none=True)
    own["eval"]["tasks"], own["tasks"] = [f"{Path.cwd()}/evil.py:parity"], ["small/gcd", f"{Path.cwd()}/evil.py:parity"]
    config.write_text(tomli_w.dumps(own))
    for folder in Path("theirs/checkpoints").glob("round-*"):
        document = json.loads((folder / "state.json").read_text())
        settings = document["state"]["settings"]
        settings["rollouts"]["engine"], settings["tasks"] = f"{Path.cwd()}/evil.py:parity", own["tasks"]
        (folder / "state.json").write_text(json.dumps(document))
        files = [folder / line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
        sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
        (folder / "SHA256SUMS").write_text("".join(sums))
    return Path("theirs")


def test_no_task_or_engine_of_a_strangers_run_runs(trained: Path) -> None:
    run = strangers(trained / "run")
    for words in (["eval", run, "--json"], ["merge", run, trained / "run", "--out", "merged"], ["export", run, "out"]):
        done = CliRunner().invoke(app, [*map(str, words)])
        assert done.exit_code == 0 and not Path("ran").exists(), done.output
        assert f"left out, since it is code that only {run}/config.toml names" in " ".join(done.output.split())
    assert CliRunner().invoke(app, ["resume", str(run)]).exit_code == 2 and not Path("ran").exists()
    CliRunner().invoke(app, ["eval", str(run), "--tasks", f"{Path.cwd()}/evil.py:parity"])
    assert Path("ran").exists(), "it runs if its user names it"


def test_settings_change_one_measurement(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("short.toml").write_text("rounds = 3\n[rollouts]\nmax_new_tokens = 3\ntemperature = 0.5\n[grpo]\nk = 2\n")
    monkeypatch.setenv("SWARM_NODE_EVAL__QUESTIONS", "5")
    monkeypatch.setenv("SWARM_NODE_HEALTH__PORT", "31390")
    words = "--config", "short.toml", "--set", "rollouts.temperature=0.7", "--set", "policy.system_prompt=Be brief."
    for target in ([trained / "run"], [trained / "base", "--tasks", "small/gcd"]):
        found, said = measured(*target, *words)
        assert found["settings"] | {"max_new_tokens": 3, "temperature": 0.7, "prompt": "Be brief."} == found["settings"]
        assert found["held_out"]["all"]["questions"] == 5
        left_out = "not used by a measurement: rounds, grpo.k, SWARM_NODE_HEALTH__PORT"
        assert left_out in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        (["--set", "grpo.loss=gspo"], {}, "--set grpo.loss: `eval` does not use it"),
        (["--set", "rollouts.group_size=4"], {}, "eval.samples is the number of answers"),
        (["--set", "policy.model=other"], {}, "name the model itself"),
        (["--set", "seed=3"], {}, "samples with the same seeds"),
        (["--set", "rollouts.temprature=1"], {}, "temprature"),
        (["--set", "rollouts.temperature=hot"], {}, "rollouts.temperature"),
        (["--set", "policy.prompt_template=none"], {}, "lacks {question}"),
        ([], {"SWARM_NODE_ROLLOUTS__GROUPS": "4"}, "SWARM_NODE_ROLLOUTS__GROUPS rollouts.groups: `eval` does not use"),
        ([], {"SWARM_NODE_SET": "eval.every=3"}, "SWARM_NODE_SET eval.every: `eval` does not use it"),
        (["--like", "nowhere"], {}, "no run in nowhere"),
    ],
)
def test_settings_that_mean_nothing_to_it_are_refused(
    words: list[str], variable: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["eval", "starter", "--tasks", "small/gcd", "--questions", "2", *words])
    assert done.exit_code == 2 and message in " ".join(done.output.split())


def test_functions_alone_must_be_named(trained: Path) -> None:
    with pytest.raises(UserError, match=r"nothing is left to judge answers.*--reward .*mine.py:parity"):
        evaluate_main(str(trained / "run"), given={"rewards": {"checker_weight": 0.0}})
