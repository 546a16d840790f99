"""What a start says of the settings of the one before, in the same run directory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from swarm_node.cli.commands.export import policy_of_run
from swarm_node.config import NodeConfig, load_config
from swarm_node.errors import StopRequested, UserError
from swarm_node.observability.evaluations import HeldOutRecord, newest_checkpoint, record_of
from swarm_node.policy import dtypes
from swarm_node.rollouts import answer_length
from swarm_node.rollouts.evaluate import Evaluation, Held
from swarm_node.rollouts.probe_answers import ProbeAnswers
from swarm_node.runtime import records
from swarm_node.runtime.cost import CostMeter
from swarm_node.runtime.held_out import HeldOutFigures
from swarm_node.runtime.loop import Run
from swarm_node.runtime.resume import RunState
from swarm_node.storage.best import Best
from swarm_node.storage.checkpoints import CheckpointStore, read_checkpoint
from swarm_node.storage.run_settings import RunSettings
from swarm_node.storage.rundir import RunDir
from tests.support.run_files import read_jsonl
from tests.support.starting import train_locally


def start(rounds: int, **sections: Any) -> list[str]:
    """What it says, as events.jsonl has it."""
    usual = {
        "run_dir": "run",
        "rounds": rounds,
        "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
        "eval": {"questions": 0},
    }
    events = Path("run/events.jsonl")
    before = len(events.read_text().splitlines()) if events.exists() else 0
    assert train_locally(NodeConfig.model_validate(usual | sections), json_output=True) == 0
    return [json.loads(line)["text"] for line in events.read_text().splitlines()[before:]]


def changes(said: list[str]) -> list[str]:
    return [text for text in said if text.startswith("changed: ")]


def test_changed_settings_are_written_with_the_first_round() -> None:
    folder = Path("run")
    averaging = {"averaging": {"method": "none", "fragments": 4}}
    assert changes(start(1, **averaging)) == []
    first = (folder / "config.toml").read_bytes()
    assert changes(start(1, seed=7)) == [] and (folder / "config.toml").read_bytes() == first, "no round was trained"
    assert changes(start(2, **averaging)) == [], "more rounds are what one resumes for"
    [said] = changes(start(3, grpo={"learning_rate": 0.5, "loss": "gspo"}))
    assert said == (
        "changed: grpo.loss dapo -> gspo, grpo.learning_rate unset -> 0.5, averaging.method none -> noloco, "
        "averaging.fragments 4 -> 1, from round 3; the earlier settings are kept in config-0001.toml"
    )
    assert load_config(folder / "config-0001.toml").averaging.method == "none"
    assert load_config(folder / "config.toml").averaging.method == "noloco"
    assert "config-0002.toml" in changes(start(4))[0]
    assert changes(start(5, price_per_hour=0.5)) == [], "nothing about what is learned"
    assert {path.name for path in folder.glob("config*")} == {"config-0001.toml", "config-0002.toml", "config.toml"}


def test_the_type_that_was_measured_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start, `eval` and `export` have it, whatever a measurement would say now."""
    seconds = {torch.float32: 1.0, torch.bfloat16: 0.5}
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 1.0)
    monkeypatch.setattr(dtypes, "short_round", lambda policy, config: seconds[policy.dtype])
    of_adapter = {"policy": {"lora": True, "lora_rank": 2, "device": "cpu"}, "averaging": {"method": "none"}}
    start(1, **of_adapter)
    assert load_config(Path("run/config.toml")).policy.dtype == "bfloat16"
    seconds[torch.bfloat16] = 2.0
    assert changes(start(2, **of_adapter)) == []
    checkpoint = read_checkpoint(Path("run/checkpoints/round-00000002"), lambda state: None)
    assert checkpoint.state["settings"]["policy"]["dtype"] == "bfloat16"
    policy, config = policy_of_run(Path("run"), lambda text: None)
    assert policy.dtype == torch.bfloat16 and config.policy.dtype == "bfloat16"
    start(1, run_dir="anew", **of_adapter)
    assert load_config(Path("anew/config.toml")).policy.dtype == "float32"


def test_the_type_is_measured_with_rounds_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[NodeConfig] = []
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 1.0)
    monkeypatch.setattr(dtypes, "short_round", lambda policy, config: timed.append(config) or 1.0)
    monkeypatch.setattr(answer_length, "SMALL", 1)
    adapter = {"lora": True, "lora_rank": 2, "device": "cpu"}
    said = start(1, rollouts={"groups": 2, "group_size": 4}, policy=adapter, grpo={"answers": 2})
    assert sum(text.startswith("answers may take 32 tokens") for text in said) == 1, "it is measured in one type"
    assert [(each.rollouts.max_new_tokens, each.grpo.answers) for each in timed] == [(32, 2)] * 2
    assert load_config(Path("run/config.toml")).rollouts.max_new_tokens == 32


def test_moments_in_8_bits_resume_bit_for_bit() -> None:
    rollouts = {"groups": 8, "group_size": 4, "max_new_tokens": 8}
    packed = {"rollouts": rollouts, "grpo": {"optimizer": "adamw_8bit"}}
    start(2, **packed)
    start(4, **packed)
    start(4, **packed, run_dir="whole")
    broken, whole = (
        read_checkpoint(Path(run) / "checkpoints/round-00000004", lambda state: None).tensors
        for run in ("run", "whole")
    )
    for file, tensors in whole.items():
        assert tensors.keys() == broken[file].keys()
        assert all(torch.equal(tensor, broken[file][name]) for name, tensor in tensors.items())
    moments = whole["optimizer"]
    assert any(tensor.dtype == torch.uint8 and tensor.any() for tensor in moments.values())
    with pytest.raises(UserError, match="go on with --set grpo.optimizer=adamw_8bit"):
        start(5, rollouts=rollouts)


def test_a_full_disk_at_changes_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    start(1)
    first = Path("run/config.toml").read_bytes()
    write = RunDir.write

    def full(self: RunDir, name: str, text: str) -> None:
        if name == "config-0001.toml" and len(read_jsonl(self.metrics)) < 3:
            raise UserError("disk full")
        write(self, name, text)

    monkeypatch.setattr(RunDir, "write", full)
    said = start(3, grpo={"loss": "gspo"})
    sentence = "run/config.toml has the settings of earlier rounds: disk full"
    assert [text for text in said if "disk full" in text] == [sentence]
    assert Path("run/config-0001.toml").read_bytes() == first
    assert load_config(Path("run/config.toml")).grpo.loss == "gspo"


def test_a_checkpoint_has_the_settings_behind_its_weights() -> None:
    start(2, policy={"system_prompt": "Answer."})
    start(2, policy={"system_prompt": "Say nothing."})
    assert newest_settings()["policy"]["system_prompt"] == "Answer."
    start(3, policy={"system_prompt": "Say something."})
    assert newest_settings()["policy"]["system_prompt"] == "Say something."
    assert newest_settings().keys() == {"tasks", "policy", "rollouts", "eval"}, "nothing that names code or a password"
    assert "model" not in newest_settings()["policy"], "which may lie elsewhere by then"


NO_FIGURES = (
    "tasks, rewards, prompt or evaluation settings are not those this run began with: no figures from before training"
)


@pytest.mark.parametrize(("form", "kept"), [("any", True), ("tags", False)])
def test_figures_from_before_forms_of_answers_stay(
    form: str, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of versions without forms name none; then an answer counted as it was found."""
    save = CheckpointStore.save
    asks = {"eval": {"questions": 2, "samples": 2}}
    with monkeypatch.context() as earlier:

        def without_form(store: CheckpointStore, n: int, tensors: Any, state: dict[str, Any], best: Any) -> None:
            held_out = {key: value for key, value in state["held_out"].items() if key != "answer"}
            before = state.pop("held_out_figures")["before"]
            table = {label: [h["questions"], h["pass_1"], h["pass_k"]] for label, h in before["table"].items()}
            save(store, n, tensors, state | {"held_out": held_out, "before": table})

        earlier.setattr(CheckpointStore, "save", without_form)
        start(1, **asks)
    first = json.loads(capsys.readouterr().out)["held_out_before"]
    first = {label: figures | {"reward": None} for label, figures in first.items()}  # which they did not measure
    said = start(2, rewards={"answer": form}, **asks)
    assert json.loads(capsys.readouterr().out)["held_out_before"] == (first if kept else {})
    assert first and (NO_FIGURES in said) != kept


@pytest.mark.parametrize("version", ["this", "earlier"])
@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, True),
        ({"dtype": "float32"}, True),
        ({"system_prompt": "Short."}, False),
        ({"prompt_template": "{question} ="}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
    ids=str,
)
def test_figures_under_another_prompt_are_not_compared(
    version: str,
    changed: dict[str, Any],
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Conditions of earlier versions do not name the prompt, but their checkpoints do."""
    asks = {"eval": {"questions": 2, "samples": 2, "every": 1, "share": 1.0}}
    save = CheckpointStore.save

    def as_earlier(store: CheckpointStore, n: int, tensors: Any, state: dict[str, Any], best: Best | None) -> None:
        held_out = {key: value for key, value in state["held_out"].items() if key != "prompt"}
        best = best and msgspec.structs.replace(best, conditions=held_out)
        save(store, n, tensors, state | {"held_out": held_out}, best)

    with monkeypatch.context() as before:
        if version == "earlier":
            before.setattr(CheckpointStore, "save", as_earlier)
        start(1, policy={"system_prompt": "Think first."}, **asks)
    best = json.loads(Path("run/best.json").read_text())
    assert ("prompt" in best["conditions"]) == (version == "this")
    first = json.loads(capsys.readouterr().out)["held_out_before"]
    resumed: list[Best | None] = []
    measure = HeldOutFigures.measure_during
    monkeypatch.setattr(
        HeldOutFigures, "measure_during", lambda self, round: resumed.append(self.best) or measure(self, round)
    )
    said = start(2, policy={"system_prompt": "Think first."} | changed, **asks)
    assert json.loads(capsys.readouterr().out)["held_out_before"] == (first if kept else {})
    assert first and (NO_FIGURES in said) != kept
    assert [each is not None and each.round == 1 for each in resumed] == [kept]


MEASURES = "held-out questions, before training"


def stopped_before_round_1(monkeypatch: pytest.MonkeyPatch, **sections: Any) -> list[str]:
    """What a start says that ends when all is measured and no round was trained."""

    def stop(self: Run, began: float) -> None:
        raise StopRequested

    with monkeypatch.context() as at_once:
        at_once.setattr(Run, "_round", stop)
        return start(9, **sections)


def measured_before() -> tuple[HeldOutRecord, Any, Any]:
    _, state = newest_checkpoint(RunDir(Path("run")))
    return record_of(state), state["held_out"], state["judged"]


@pytest.mark.parametrize(
    "changed",
    [
        {"tasks": ["gcd"]},
        {"eval": {"questions": 3, "samples": 2}},
        {"eval": {"questions": 2, "samples": 3}},
        {"rewards": {"functions": ["mine.py:ones"], "checker_weight": 0}},
        {"rewards": {"functions": ["mine.py:ones"], "checker_weight": 0.5}},
        {"rewards": {"partial": True}},
        {"rewards": {"answer": "tags"}},
        {"policy": {"system_prompt": "Short."}},
        {"policy": {"prompt_template": "{question} ="}},
    ],
)
def test_where_nothing_was_trained_figures_are_measured_anew(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("def ones(completions, **columns):\n    return [1.0] * len(completions)\n")
    asks = {"eval": {"questions": 2, "samples": 2}, "tasks": ["chain_sum"]}
    stopped_before_round_1(monkeypatch, **asks)
    first = measured_before()
    assert first[0].before.table
    again = stopped_before_round_1(monkeypatch, **asks)
    assert not any(text.startswith(MEASURES) for text in again), "what was measured stays"
    assert measured_before() == first
    said = stopped_before_round_1(monkeypatch, **asks | changed)
    assert any(text.startswith(MEASURES) for text in said) and NO_FIGURES not in said
    second = measured_before()
    assert second[1:] != first[1:] and second[0].before.table, "the figures that were measured anew are saved"
    capsys.readouterr()
    said = start(1, **asks | changed)
    assert not any(text.startswith(MEASURES) for text in said)
    assert json.loads(capsys.readouterr().out)["held_out_before"] == msgspec.to_builtins(second[0].before.table)


def newest_settings() -> dict[str, Any]:
    newest = max(Path("run/checkpoints").iterdir(), key=lambda path: path.name)
    settings: dict[str, Any] = json.loads((newest / "state.json").read_text())["state"]["settings"]
    return settings


def test_a_checkpoint_has_what_unset_settings_stand_for() -> None:
    start(2, grpo={"schedule": "linear"})
    chosen = newest_checkpoint(RunDir(Path("run")))[1]["in_effect"]
    assert chosen["grpo.schedule_rounds"] == 2 and chosen["rollouts.groups"] == 2


def test_sinks_never_get_a_crew_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(records, "open_sinks", lambda names, folder, config, first: shown.append(config) or [])
    start(1)
    assert shown and "stages" in shown[0]["pipeline"] and "crew" not in shown[0]["pipeline"]


def test_a_configuration_of_another_version_is_no_obstacle() -> None:
    start(1)
    path = Path("run/config.toml")
    path.write_text("made_up = 1\n" + path.read_text())
    [said] = changes(start(2, grpo={"learning_rate": 0.5}))
    assert "made_up" not in said


def state_of_round_3(folder: Path, said: list[str]) -> RunState:
    """The state of a run in `folder` whose policy has no tensors."""
    store = CheckpointStore(folder / "checkpoints", 2, said.append)
    policy = SimpleNamespace(
        trainable_state=dict, check_finite=lambda: None, version=3, base_digest="b", start_digest="s"
    )
    trainer = SimpleNamespace(state_dict=lambda: ({}, {}))
    tasks = SimpleNamespace(names=[], kinds={})
    one = {"averager": None, "replay": None, "member": None, "in_effect": dict, "probe_answers": ProbeAnswers()}
    node = SimpleNamespace(round=3, trainer=trainer, policy=policy, tasks=tasks, **one)
    own = RunSettings(RunDir(folder), NodeConfig(), NodeConfig(), said.append)
    cost = CostMeter(None, 0.0)
    held_out = HeldOutFigures(NodeConfig(), cast(Any, policy), cast(Any, tasks), said.append, print, whole=True)
    return RunState(NodeConfig(), RunDir(folder), cast(Any, node), store, None, own, cost, held_out)


def test_an_unwritten_state_is_written_again(tmp_path: Path) -> None:
    said: list[str] = []
    state, folder = state_of_round_3(tmp_path, said), tmp_path / "checkpoints"
    store = state.checkpoints
    folder.write_text("a file, not a folder")
    state.save()
    store.wait()
    assert len(said) == 1 and "checkpoint of round 3" in said[0]
    folder.unlink()
    state.save()
    store.wait()
    [written] = folder.glob("round-*")
    state.save()
    store.close()
    assert list(folder.glob("round-*")) == [written], "once is enough"


def test_figures_of_a_saved_round_are_saved(tmp_path: Path) -> None:
    state, newest = state_of_round_3(tmp_path, []), tmp_path / "checkpoints/round-00000003-1/state.json"
    state.save()
    state.held_out.figures.last, state.held_out.figures.round = Evaluation({"all": Held(9, 0.5, 1.0)}), 3
    state.save()
    state.checkpoints.close()
    figures = json.loads(newest.read_text())["state"]["held_out_figures"]
    assert (figures["round"], figures["last"]["table"]["all"]["pass_1"]) == (3, 0.5)


def test_an_unwritten_best_checkpoint_sets_no_mark(tmp_path: Path) -> None:
    state = state_of_round_3(tmp_path, [])
    held_out, written = state.held_out, Best(3, 0.25, 1.0, state.held_out.conditions)
    for best in (written, Best(4, 0.75, 1.0, held_out.conditions)):
        held_out.best, held_out.is_new_best, state.node.round = best, True, best.round
        state.save()
        state.checkpoints.wait()
        (tmp_path / "best.tmp").mkdir(exist_ok=True)  # best.json cannot be written from here on
        state.settle_best()
        assert held_out.best is not None and held_out.best.pass_1 == written.pass_1
