"""Where a start begins in a directory that has a run: with the run's own settings, and in no other role."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import NodeConfig, dump_toml, load_config
from swarm_node.config.loading import load_run_config, read_layers
from swarm_node.config.own import dump_own
from swarm_node.errors import TEMPORARY, UserError
from swarm_node.storage.run_settings import RunSettings, as_trained, with_kept_choices
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.links import swarm_to_join
from swarm_node.swarm.manifests import make_manifest, write_manifest
from swarm_node.tasks.one_turn import in_form

RUN = Path("r")


def a_run(given: dict[str, Any], resolved: dict[str, Any] | None = None, trained: bool = True) -> bytes:
    """A run directory as a start with `given` leaves it; its config.toml."""
    asked = NodeConfig.model_validate(given)
    config = NodeConfig.model_validate({**asked.model_dump(exclude_none=True), **(resolved or {})})
    (RUN / "checkpoints/round-00000001").mkdir(parents=True) if trained else RUN.mkdir()
    (RUN / "config.toml").write_text(dump_own(config, asked))
    return (RUN / "config.toml").read_bytes()


def a_manifest(name: str, tasks: list[str], folder: Path = Path()) -> Path:
    path = folder / f"{name}.toml"
    write_manifest(make_manifest(name, [*tasks]), path)
    return path


def start(*words: str, **env: str) -> dict[str, Any]:
    """The configuration that this command line would go by."""
    result = CliRunner().invoke(app, [*words, "--dry-run"], env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return tomllib.loads(result.stdout)


def notes(*words: str) -> list[str]:
    """What a start says of its settings, without the time and level of each line."""
    lines = CliRunner().invoke(app, [*LOCAL, "--dry-run", *words]).stderr.splitlines()
    assert {line.split()[1] for line in lines} <= {"INFO", "WARNING"}
    return [line.split(maxsplit=2)[2] for line in lines]


def refused(*words: str, code: int = 2) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stderr


LOCAL = "local", "--run-dir", "r"


@pytest.mark.parametrize(
    ("words", "env", "temperature"),
    [
        ((), {}, 0.1),
        (("--config", "x.toml"), {}, 0.2),
        (("--config", "x.toml"), {"SWARM_NODE_ROLLOUTS__TEMPERATURE": "0.3"}, 0.3),
        (("--set", "rollouts.temperature=0.4"), {"SWARM_NODE_ROLLOUTS__TEMPERATURE": "0.3"}, 0.4),
    ],
)
def test_own_settings_come_right_above_the_defaults(
    words: tuple[str, ...], env: dict[str, str], temperature: float
) -> None:
    a_run({"rounds": 60, "rollouts": {"temperature": 0.1, "max_new_tokens": 16}})
    Path("x.toml").write_text("[rollouts]\ntemperature = 0.2\n")
    config = start(*LOCAL, *words, **env)
    assert config["rollouts"]["temperature"] == temperature
    assert (config["rollouts"]["max_new_tokens"], config["rounds"]) == (16, 60)


def test_a_start_says_which_settings_it_takes_over() -> None:
    crew = {"stages": 2, "crew": "secret-name"}
    a_run(
        {"grpo": {"loss": "gspo", "beta": 1}, "rounds": 9, "pipeline": crew, "policy": {"system_prompt": "word " * 30}}
    )
    [said] = notes("--set", "grpo.beta=0.2")
    assert said.startswith("r goes on with its own settings: ")
    assert "grpo.loss = gspo" in said and "pipeline.crew = (hidden)" in said and "word …" in said
    assert "secret" not in said and "beta" not in said and "rounds" not in said


def test_tasks_that_are_taken_over_have_their_names() -> None:
    a_run({"tasks": ["gcd", {"file": "questions.jsonl", "weight": 2}]})
    assert notes() == ["r goes on with its own settings: tasks = gcd, questions.jsonl×2"]


def test_a_start_says_that_it_still_relays() -> None:
    a_run({"network": {"serve_relay": True}, "rounds": 9, "name": "alice"})
    assert notes() == ["r goes on with its own settings: network.serve_relay = true"]


def test_a_file_may_name_the_run_directory() -> None:
    a_run({"grpo": {"loss": "gspo"}, "rounds": 60})
    Path("x.toml").write_text("run_dir = 'r'\nrounds = 80\n")
    config = start("local", "--config", "x.toml")
    assert (config["grpo"]["loss"], config["rounds"]) == ("gspo", 80)


def test_a_new_length_replaces_both_of_the_run() -> None:
    a_run({"rounds": 60})
    assert "rounds" not in start(*LOCAL, "--minutes", "5"), "60 rounds are done, and five minutes are wanted"


def test_a_copied_run_trains_in_its_own_directory() -> None:
    a_run({"run_dir": "elsewhere", "name": "alice"})
    assert start(*LOCAL)["run_dir"] == "r"
    RUN.rename("runs-r")
    assert start("local", "--run-dir", "runs-r")["run_dir"] == "runs-r"


def test_settings_of_another_version_are_left_out_aloud() -> None:
    a_run({"grpo": {"loss": "gspo"}})
    file = RUN / "config.toml"
    file.write_text(file.read_text().replace("[grpo]", "[grpo]\nmade_up = 1\nanother = 2"))
    assert start(*LOCAL)["grpo"]["loss"] == "gspo"
    assert notes() == [
        "r/config.toml has settings that this version does not know; left out: grpo.made_up, grpo.another",
        "r goes on with its own settings: grpo.loss = gspo",
    ]
    file.write_text(file.read_text().replace('"gspo"', '"nonsense"'))
    assert "grpo.loss = 'nonsense' in r/config.toml" in refused(*LOCAL)


@pytest.mark.parametrize("write", [dump_own, lambda config, asked: dump_toml(config)], ids=["now", "before"])
def test_old_defaults_are_no_user_settings(write: Any) -> None:
    """Ports are taken as given, and tasks as chosen, only where a user names them."""
    given = {"swarm": "swarm://x", "network": {"port": 4711}}
    RUN.mkdir()
    config, asked = NodeConfig.model_validate({**given, "seed": 5}), NodeConfig.model_validate(given)
    (RUN / "config.toml").write_text(write(config, asked))
    again = load_run_config(read_layers(None, {}, {"run_dir": "r"}, (), ()), True, print)
    assert again.swarm == "swarm://x" and again.network.model_fields_set == {"port"}
    assert "tasks" not in again.model_fields_set


def test_only_a_member_s_own_choices_are_kept() -> None:
    chosen = {"tasks": ["small"], "swarm": "swarm://x"}
    a_run(chosen, {"policy": {"model": "/cache/of/the/swarm"}})
    again = load_run_config(read_layers(None, {}, {"run_dir": "r"}, (), ()), True, print)
    assert again.tasks == ["small"] and "tasks" in again.model_fields_set
    assert again.policy.model == "starter", "the swarm's model is found again by its digest"


@pytest.mark.parametrize("own", [{}, {"system_prompt": "You are terse.", "prompt_template": "Q: {question}"}])
def test_the_swarm_s_form_becomes_no_user_s_choice(own: dict[str, str]) -> None:
    given = {"swarm": "swarm://x", **({"policy": own} if own else {})}
    told = in_form(NodeConfig.model_validate(given), "tags")
    a_run(given, told.model_dump(include={"policy", "rewards"}))
    again = load_run_config(read_layers(None, {}, {"run_dir": "r"}, (), ()), True, print)
    assert again.rewards == NodeConfig().rewards, "the manifest says the form at each start"
    assert again.policy.model_fields_set & {"system_prompt", "prompt_template"} == own.keys()
    assert in_form(again, "tags").policy == told.policy
    assert in_form(again, "boxed").policy == in_form(NodeConfig.model_validate(given), "boxed").policy


def test_local_leaves_a_member_s_run_alone() -> None:
    before = a_run({"swarm": "swarm://x", "name": "alice"})
    said = refused(*LOCAL)
    assert "r is a run in a swarm: `swarm-node resume r` goes on with it" in said and "--run-dir" in said
    assert (RUN / "config.toml").read_bytes() == before
    assert sorted(path.name for path in RUN.iterdir()) == ["checkpoints", "config.toml"]


def test_join_resumes_the_run_s_own_swarm() -> None:
    a_run({"swarm": "gone.toml", "name": "alice"})
    kept = a_manifest("swarm", ["small/gcd"], RUN)
    config = start("join", "--run-dir", "r")
    assert (config["swarm"], config["name"]) == (str(kept), "alice")
    assert start("join", "swarm://other", "--run-dir", "r")["swarm"] == "swarm://other"


def test_resume_needs_the_run_alone() -> None:
    a_run({"rounds": 60, "grpo": {"loss": "gspo"}, "run_dir": "elsewhere"})
    config = start("resume", "r")
    assert (config["rounds"], config["grpo"]["loss"], config["run_dir"]) == (60, "gspo", "r")
    assert "swarm" not in config
    assert start("resume", "r", "--rounds", "80", "--set", "seed=3").items() >= {"rounds": 80, "seed": 3}.items()


def test_resume_goes_on_in_the_run_s_swarm() -> None:
    a_run({"swarm": "gone.toml", "name": "alice"})
    kept = a_manifest("swarm", ["small/gcd"], RUN)
    assert start("resume", "r").items() >= {"swarm": str(kept), "name": "alice", "run_dir": "r"}.items()


def test_resume_says_what_else_to_do() -> None:
    assert "no run in nowhere: `swarm-node resume RUN` takes a run directory" in refused("resume", "nowhere")
    a_run({"swarm": "swarm://x"})
    run = RunDir("r")
    with RunDir.open("r"):
        run.write_paused(None)
        said = refused("resume", "r", code=TEMPORARY)
        assert f"running already, as process {os.getpid()}; `swarm-node unpause r` ends its pause" in said
    run.write_status({"role": "bootstrap"})
    assert "r is of a bootstrap, which ends with no document: leave out --json" in refused("resume", "r", "--json")


def test_a_bootstrap_starts_again_with_its_settings() -> None:
    other, asked = a_manifest("swarm", ["small/gcd"]), {"port": 33130, "gossip_port": 33131, "listen": "127.0.0.1"}
    a_run({"swarm": str(other), "name": "hub", "network": asked | {"identity": "a/identity.key"}}, trained=False)
    RunDir("r").write_status({"role": "bootstrap"})
    network = start("resume", "r")["network"]
    assert network.items() >= {**asked, "identity": "a/identity.key"}.items()
    for words in (["resume", "r"], ["bootstrap", str(other), "--run-dir", "r"]):  # however it is started
        said = CliRunner().invoke(app, words).stderr
        assert "no key file at a/identity.key (network.identity)" in said, said
    assert not (RUN / "identity.key").exists()


@pytest.mark.parametrize("trained", [True, False])
def test_joining_another_swarm_spares_a_trained_run(trained: bool) -> None:
    before = a_run({"swarm": "swarm.toml"}, trained=trained)
    a_manifest("swarm", ["small/gcd"], RUN)
    other = a_manifest("other", ["small/lcm"])
    config = load_config(flags={"run_dir": "r", "swarm": str(other)})
    if not trained:
        assert swarm_to_join(config).id
        return
    with pytest.raises(UserError, match="r is a run in swarm swarm .*: choose another --name or --run-dir"):
        swarm_to_join(config)
    assert "choose another --name or --run-dir" in refused("join", str(other), "--run-dir", "r")
    assert "choose another --run-dir" in refused("bootstrap", str(other), "--run-dir", "r")
    assert (RUN / "config.toml").read_bytes() == before


def test_json_says_why_a_start_is_refused() -> None:
    a_run({"swarm": "swarm://x"})
    result = CliRunner().invoke(app, [*LOCAL, "--json"])
    assert "goes on with it" in json.loads(result.stdout)["error"]


@pytest.mark.parametrize("given", [{}, {"tasks": ["small/gcd"]}], ids=["all", "some"])
def test_a_member_s_checkpoint_names_chosen_tasks(given: dict[str, Any]) -> None:
    asked = NodeConfig.model_validate({"swarm": "swarm://x", **given})
    config = NodeConfig.model_validate(asked.model_dump(exclude_none=True) | {"seed": 7})
    behind = RunSettings(RunDir("r"), config, asked, print).of_weights
    assert as_trained(config, behind).tasks == given.get("tasks", []), "none = all of the swarm's"


@pytest.mark.parametrize("settings", [None, [], "x", {"rewards": {"functions": [{"path": "evil.py:run"}]}}])
def test_a_checkpoint_s_settings_choose_no_code(settings: object) -> None:
    assert as_trained(NodeConfig(), settings) == NodeConfig()


@pytest.mark.parametrize("settings", [{"policy": []}, {"rollouts": {"made_up": 1}}, {"tasks": 3}])
def test_newer_checkpoint_settings_are_refused(settings: object) -> None:
    with pytest.raises(UserError, match="the checkpoint has settings that this version does not know"):
        as_trained(NodeConfig(), settings)


@pytest.mark.parametrize(("grpo", "jumps"), [({}, True), ({"schedule_rounds": 20}, False)])
def test_a_stretched_schedule_is_told(grpo: dict[str, Any], jumps: bool) -> None:
    grpo = {"schedule": "cosine", **grpo}
    a_run({"rounds": 20, "grpo": grpo})
    said: list[str] = []
    config = NodeConfig.model_validate({"rounds": 40, "grpo": grpo})
    own = RunSettings(RunDir(RUN), config, config, said.append)
    own.begin(trained=True)
    own.announce("from round 21")
    told = "the learning rate jumps from round 21: grpo.schedule = cosine now falls over 40 rounds instead of 20; "
    assert [line.startswith(told) for line in said] == [True] * jumps


@pytest.mark.parametrize(
    ("before", "now", "schedule", "over"),
    [
        ({"minutes": 5}, {"minutes": 5}, "linear", "falls anew over the 5 minutes of this start"),
        ({"rounds": 20}, {"minutes": 5}, "linear", "falls anew over the 5 minutes of this start"),
        ({"minutes": 5}, {"rounds": 40}, "linear", "now falls over 40 rounds instead of 5 minutes"),
        ({}, {"rounds": 400}, "linear", "now falls over 400 rounds instead of 200"),
        ({"minutes": 5}, {"minutes": 5}, "constant", ""),
        ({"rounds": 20}, {"rounds": 20}, "linear", ""),
    ],
)
def test_an_unset_schedule_that_begins_anew_is_told(
    before: dict[str, Any], now: dict[str, Any], schedule: str, over: str
) -> None:
    a_run(before)
    said: list[str] = []
    config = NodeConfig.model_validate(now)
    own = RunSettings(RunDir(RUN), config, config, said.append)
    own.begin(trained=True)
    own.announce("from round 21", schedule)
    told = f"the learning rate jumps from round 21: grpo.schedule = {schedule} {over}; "
    assert [line.startswith(told) for line in said if "learning rate" in line] == [True] * bool(over)


@pytest.mark.parametrize(
    ("sets", "dtype"),
    [
        ([], "bfloat16"),
        (["policy.dtype=float16"], "float16"),
        (["policy.lora=false"], "auto"),
        (["policy.model=starter"], "auto"),
        (["policy.quantize=int8"], "auto"),
    ],
    ids=str,
)
def test_a_chosen_dtype_stays_as_long_as_the_same_is_trained(sets: list[str], dtype: str) -> None:
    a_run(
        {"policy": {"model": "org/m", "lora": True}}, {"policy": {"model": "org/m", "lora": True, "dtype": "bfloat16"}}
    )
    config = load_run_config(read_layers(None, {}, {"run_dir": "r"}, sets, ()), False, print)
    assert with_kept_choices(config, RunDir(RUN)).policy.dtype == dtype


@pytest.mark.parametrize(
    ("sets", "length"),
    [
        ([], 32),
        (["policy.dtype=float16"], 32),
        (["policy.model=starter"], 256),
        (["rollouts.max_new_tokens=100"], 100),
        (['tasks=["words.jsonl"]'], 256),
        (["rewards.answer=tags"], 256),
        (["rewards.kind=number"], 256),
        (["policy.system_prompt=Explain."], 256),
        (["policy.prompt_template=Q: {question}"], 256),
        (["policy.chat_template_kwargs={enable_thinking=true}"], 256),
    ],
    ids=str,
)
def test_a_chosen_length_of_answers_stays_as_long_as_the_same_is_asked(sets: list[str], length: int) -> None:
    own = {"policy": {"model": "org/m"}}
    a_run(own, own | {"rollouts": {"max_new_tokens": 32}})
    config = load_run_config(read_layers(None, {}, {"run_dir": "r"}, [*sets], ()), False, print)
    assert with_kept_choices(config, RunDir(RUN)).rollouts.max_new_tokens == length


def test_a_dtype_that_the_user_has_set_stays() -> None:
    a_run({"policy": {"dtype": "bfloat16"}})
    again = load_run_config(read_layers(None, {}, {"run_dir": "r"}, ["policy.model=org/m"], ()), False, print)
    assert again.policy.dtype == "bfloat16"


@pytest.mark.parametrize(("groups", "own"), [(2, 2), (16, 8)])
def test_own_groups_that_nobody_set_follow_the_groups_of_each_start(groups: int, own: int) -> None:
    layers = read_layers(None, {}, {"run_dir": "r", "swarm": "s.toml"}, ["rollouts.groups=4"], ())
    config = load_run_config(layers, True, print)
    assert config.sharing.own == 4
    RUN.mkdir()
    (RUN / "config.toml").write_text(dump_own(config, config))
    again = read_layers(None, {}, {"run_dir": "r"}, [f"rollouts.groups={groups}"], ())
    assert load_run_config(again, True, print).sharing.own == own
