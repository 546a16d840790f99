import errno
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import swarm_node
from swarm_node.cli.app import app
from swarm_node.cli.options import COMMAND_VARIABLES
from swarm_node.config import load_config
from swarm_node.config.keys import all_keys
from swarm_node.config.options import OPTIONS, all_variables, explanation
from swarm_node.errors import TEMPORARY
from swarm_node.storage.rundir import RunDir
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import parse_manifest


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words, command) of everything below `swarm-node`."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def run(*args: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, list(args), env=env, prog_name="swarm-node")


def process(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarm_node", *args]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=100)


def test_there_is_every_command() -> None:
    names = {" ".join(words) for words, _ in commands()}
    assert {"local", "eval", "export", "starter", "tasks", "dashboard", "config show", "config validate"} <= names
    assert {"merge", "new", "bootstrap", "join", "status", "doctor", "identity show", "identity new"} <= names


@pytest.mark.parametrize("words", [(), *(words for words, _ in commands())], ids=" ".join)
def test_help_explains_every_option(words: tuple[str, ...]) -> None:
    result = run(*words, "--help", env={"COLUMNS": "200"})
    assert result.exit_code == 0
    command = dict(commands()).get(words)
    for parameter in command.params if command else []:
        assert getattr(parameter, "help", None), parameter.name
        if parameter.opts[0].startswith("--") and not getattr(parameter, "hidden", False):
            assert parameter.opts[0] in result.output
    assert "completion" not in result.output.replace("completions", "")


def test_help_of_join_begins_with_a_volunteer_s_needs() -> None:
    shown = run("join", "--help", env={"COLUMNS": "80"}).output
    first, *panels = shown.partition("╭─ Options")[2].split("╭─ ")
    options = re.findall(r"^│ (--[\w-]+)", first, re.MULTILINE)
    volunteer = ["--name", "--model", "--gentle", "--normal", "--all", "--minutes", "--rounds", "--run-dir"]
    assert options == [*volunteer, "--json", "--verbose", "--quiet", "--help"]
    names = ["Resource limits", "Training", "Pipeline stages", "Network", "Cloud", "Logs", "Configuration"]
    assert [panel.partition(" ─")[0] for panel in panels] == names


@pytest.mark.parametrize("words", [("resume",), ("pause",), ("stop",), ("samples",)])
def test_a_directory_of_another_user_is_one_line(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, as whom tests may run, is refused nothing; so the refusal is made up."""

    def refuse(run: RunDir) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(run.config))

    monkeypatch.setattr(RunDir, "exists", property(refuse))
    result = run(*words, "of-others/run")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("swarm-node: no permission for of-others/run/config.toml: change its owner")
    assert result.stderr.count("\n") == 1


def test_every_command_has_verbose_and_quiet() -> None:
    for words, command in commands():
        if not hasattr(command, "commands"):
            flags = {flag for parameter in command.params for flag in parameter.opts}
            assert {"-v", "--verbose", "-q", "--quiet"} <= flags, words


def test_verbose_and_quiet_contradict_each_other() -> None:
    result = run("config", "validate", "-v", "-q")
    assert result.exit_code == 2 and "contradict each other" in result.stderr


def test_quiet_leaves_the_result_alone(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.toml").write_text("[grpo]\nloss = 'gspo'\n")
    told = run("local", "--run-dir", str(tmp_path / "r"), "--dry-run")
    quiet = run("local", "--run-dir", str(tmp_path / "r"), "--dry-run", "-q")
    assert "goes on with its own settings" in told.stderr and not quiet.stderr
    assert quiet.stdout == told.stdout


def test_kept_settings_may_be_a_json_line(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.toml").write_text("[grpo]\nloss = 'gspo'\n")
    told = run("resume", str(tmp_path / "r"), "--log-format", "json", "--dry-run")
    [record] = map(json.loads, told.stderr.splitlines())
    assert (record["kind"], record["level"], record["node"]) == ("settings", "info", "r")
    assert "goes on with its own settings: grpo.loss = gspo" in record["message"]


def test_json_lines_are_all_in_one_stream(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.toml").write_text("[grpo]\nloss = 'gspo'\n")
    words = "local", "--run-dir", str(tmp_path / "r"), "--log-format", "json", "--tasks", "no.jsonl"
    refused, as_document = run(*words), run(*words, "--json")
    settings, error = map(json.loads, refused.stdout.splitlines())
    assert (settings["kind"], error["kind"], error["level"]) == ("settings", "error", "error")
    assert not refused.stderr
    assert json.loads(as_document.stdout).keys() == {"error"} and '"settings"' in as_document.stderr


@pytest.mark.parametrize(
    ("words", "env", "found"),
    [
        ("join x --port x", {}, "Invalid value for '--port'"),
        ("join x --nmae a", {}, "No such option: --nmae"),
        ("local --config none.toml", {}, "none.toml"),
        ("local --quiet-hours 25", {}, "resources.quiet_hours"),
        ("local --set grpo.los=x", {}, "grpo.los"),
        ("local", {"SWARM_NODE_ROUNDSS": "1"}, "unknown environment variable SWARM_NODE_ROUNDSS"),
        ("local", {"SWARM_NODE_SEED": "1", "SWARM_NODE_SEED_FILE": "seed"}, "both SWARM_NODE_SEED and"),
        ("local", {"SWARM_NODE_SEED_FILE": "none"}, "cannot read 'none'"),
        ("resume none", {}, "no run in none"),
    ],
)
def test_refused_settings_are_json_lines_too(words: str, env: dict[str, str], found: str) -> None:
    env = env | {"SWARM_NODE_NAME": "bob"}
    by_variable = run(*words.split(), env=env | {"SWARM_NODE_LOG_FORMAT": "json"})
    by_option = run(*words.split(), "--log-format=json", env=env)
    for refused in (by_variable, by_option):
        assert refused.exit_code == 2 and not refused.stderr
        record = json.loads(refused.stdout)
        assert found in record["message"] and record["level"] == record["kind"] == "error" and record["node"] == "bob"
    assert found in run(*words.split(), env=env | {"COLUMNS": "200"}).stderr, "people get a sentence"


def test_a_bootstrap_has_one_name_in_its_log() -> None:
    words = "bootstrap", "none.toml", "--run-dir", "bz", "--log-format", "json"
    for more in ([], ["--health-port", "x"], ["--max-cpu", "5"]):
        refused = run(*words, *more)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert json.loads(refused.stderr)["node"] == "bootstrap"


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, TEMPORARY), (errno.EDQUOT, TEMPORARY)])
def test_a_full_disk_is_temporary_anywhere(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **rest: Any) -> None:
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr(RunDir, "check_usable", full)
    refused = run("local")
    assert refused.exit_code == code
    assert refused.stderr.startswith("swarm-node: disk full: cannot write some/file; free some space")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_errors_of_files_are_in_the_log_too(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.toml").write_text("log_format = 'json'\n")

    def fails(*arguments: Any, **rest: Any) -> None:
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr(RunDir, "check_usable", fails)
    refused = run("local", "--config", str(tmp_path / "json.toml"))
    [error] = map(json.loads, refused.stdout.splitlines())
    assert error["kind"] == "error" and "some/file" in error["message"]
    assert refused.stderr == f"swarm-node: {error['message']}\n"


LOADS = """
import importlib, sys
heavy = "torch", "transformers", "peft", "hivemind", "libp2p", "reasoning_gym", "matplotlib"
for step in sys.argv[1:]:
    if step == "--help":
        try:
            sys.modules["swarm_node.cli.app"].app(["--help"])
        except SystemExit as end:
            assert not end.code
        heavy = (*heavy, "numpy")
    else:
        importlib.import_module(step)
    print("loaded", step, *[name for name in heavy if name in sys.modules])
    heavy = heavy[:7]
"""


def test_start_up_loads_neither_torch_nor_transformers() -> None:
    steps = [f"swarm_node.{name}" for name in ("types", "config", "storage.rundir", "cli.app")] + ["--help"]
    steps += ["swarm_node.runtime.bootstrap", "swarm_node.observability.plots"]
    done = subprocess.run([sys.executable, "-c", LOADS, *steps], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("loaded ")]
    assert told == [f"loaded {step}" for step in steps]


def test_version_is_that_of_the_package() -> None:
    assert run("--version").output == f"swarm-node {swarm_node.__version__}\n"


CONFIGURED = "local", "join", "bootstrap", "identity", "config"
"""Commands whose options are keys of the configuration wherever a key has that name."""


def variable(option: str) -> str:
    return "SWARM_NODE_" + option.upper().replace("-", "_")


def test_every_option_has_an_environment_variable() -> None:
    variables, known = set(), all_variables()
    keys = {option.name: option.key for option in OPTIONS}
    for words, command in commands():
        for parameter in command.params:
            name = parameter.opts[0].removeprefix("--")
            if not parameter.opts[0].startswith("--") or name == "help":
                continue
            if parameter.envvar is None and any(o.flag == f"--{name}" and o.value for o in OPTIONS):
                continue  # a flag for one value of a key, whose own variable is SWARM_NODE_RESOURCES__PRESET
            is_key = name.replace("-", "_") in keys
            if is_key and parameter.envvar is None:  # load_config reads it
                assert variable(name) in known
            elif name != "set":
                others = {("dashboard", "port"): "dashboard-port", ("eval", "all"): "all-questions"}
                read = others.get((words[0], name), name)  # not the node's port, nor a preset of its resources
                assert parameter.envvar == variable(read)
                variables.add(parameter.envvar)
                load_config(env={parameter.envvar: "3"}, others=COMMAND_VARIABLES)  # nobody takes it for a mistyped key
            assert not (is_key and words[0] in CONFIGURED and parameter.envvar), f"{name} would be read twice"
            variables.add(variable(name))
    assert variables >= COMMAND_VARIABLES
    load_config(env={name: "" for name in COMMAND_VARIABLES}, others=COMMAND_VARIABLES)


def test_defaults_and_explanations_of_keys_stand_in_one_module() -> None:
    modules = [" ".join(path.read_text().split()) for path in (Path(swarm_node.__file__).parent).rglob("*.py")]
    for key in {option.key for option in OPTIONS}:
        said = explanation(key).removesuffix(".")
        assert sum(said in text for text in modules) == 1, f"{key}: {said}"
    rows = {(option.name, command): option for option in OPTIONS for command in option.commands.split()}
    for words, command in commands():
        for parameter in command.params:
            row = rows.get((parameter.name, words[0]))
            if row is not None and not parameter.envvar:
                assert parameter.default is None, f"{words}: {row.flag} has a default beside that of {row.key}"
                assert parameter.help.startswith(row.says.get(words[0]) or explanation(row.key))
    assert {option.key for option in OPTIONS} <= all_keys().keys()


def test_dry_run_prints_settings_and_touches_nothing() -> None:
    Path("x.toml").write_text("rounds = 3\nseed = 3\n[policy]\nmodel = 'a'\n")
    env = {"SWARM_NODE_CONFIG": "x.toml", "SWARM_NODE_SEED": "4", "SWARM_NODE_TASKS": "gcd,lcm"}
    args = ["local", "--dry-run", "--rounds", "5", "--no-lora", "--run-dir", "r", "--set", "grpo.loss=gspo"]
    config = tomllib.loads(run(*args, env=env).output)
    assert (config["rounds"], config["seed"], config["policy"]["model"]) == (5, 4, "a")
    assert config["tasks"] == ["gcd", "lcm"]
    assert config["run_dir"] == "r"
    assert config["policy"]["lora"] is False
    assert config["grpo"]["loss"] == "gspo"
    assert [path.name for path in Path().iterdir()] == ["x.toml"]


def test_tasks_is_repeatable_and_takes_commas() -> None:
    result = run("local", "--dry-run", "--json", "--tasks", "gcd,lcm", "--tasks", "my questions.jsonl")
    assert json.loads(result.stdout)["tasks"] == ["gcd", "lcm", "my questions.jsonl"]


def test_an_option_may_describe_a_table() -> None:
    table = '{file="q.jsonl", question="prompt", weight=2}'
    reward = '{path="mine.py:brevity", weight=0.2}'
    shown = json.loads(
        run("local", "--dry-run", "--json", "--tasks", "gcd", "--tasks", table, "--reward", reward).stdout
    )
    assert shown["tasks"][0] == "gcd" and shown["tasks"][1]["question"] == "prompt" and shown["tasks"][1]["weight"] == 2
    assert shown["rewards"]["functions"] == [{"path": "mine.py:brevity", "weight": 0.2}]
    Path("q.jsonl").write_text("".join(f'{{"prompt": "{n} + 1?", "answer": {n + 1}}}\n' for n in range(30)))
    assert " + 1?" in run("tasks", table).stdout
    for wrong, message in [("{file=q.jsonl}", "is no table such as"), ("{}\nrounds = 3", "must be one table")]:
        assert message in run("local", "--tasks", wrong).stderr


def test_config_show_validate_and_reference() -> None:
    Path("x.toml").write_text("rounds = 3\n")
    assert tomllib.loads(run("config", "show", "--config", "x.toml").output)["rounds"] == 3
    assert json.loads(run("config", "show", "--json", "--set", "rounds=4").output)["rounds"] == 4
    assert run("config", "validate", "--config", "x.toml").output == "x.toml is valid\n"
    assert json.loads(run("config", "validate", "--json").output) == {"valid": True}
    assert "| `grpo.loss` |" in run("config", "reference").output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["local", "--set", "grpo.los=gspo"], "unknown key grpo.los in --set; did you mean grpo.loss?"),
        (["local", "--rounds", "0"], "rounds = 0 in --rounds: must be greater than 0"),
        (["local", "--set", "rollouts.group_size=1"], "must be greater than or equal to 2"),
        (
            ["local", "--config", "no.toml"],
            "cannot read the configuration no.toml: No such file or directory",
        ),
        (["config", "validate", "--config", "bad.toml"], "bad.toml is not valid TOML"),
    ],
)
def test_user_errors_are_one_line_exit_2(args: list[str], message: str) -> None:
    Path("bad.toml").write_text("rounds = ")
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("swarm-node: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    result = run(*args, "--json")
    assert result.exit_code == 2
    assert message in json.loads(result.stdout)["error"]


def test_user_errors_end_a_process_without_traceback() -> None:
    done = process("local", "--dry-run", SWARM_NODE_ROUND="3")
    assert done.returncode == 2
    assert done.stderr == (
        "swarm-node: unknown environment variable SWARM_NODE_ROUND; did you mean SWARM_NODE_ROUNDS?\n"
    )


@pytest.mark.parametrize(
    "args", [["lokal"], ["local", "--round-s", "3"], ["starter"], ["eval"], ["local", "--rounds", "x"]]
)
def test_wrong_usage_exits_2_without_a_traceback(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ("local --num-generations 8", "; TRL's num_generations is --set rollouts.group_size=VALUE here"),
        ("local --max_steps 8", "; TRL's max_steps is --rounds here"),
        ("local --report-to wandb", "; TRL's report_to is --log here"),
        ("local --use-vllm", "; TRL's use_vllm is not here: the node samples by itself"),
        ("local --learning-rate 1e-4", "; did you mean --set grpo.learning_rate=VALUE?"),
        ("join swarm.toml --nmae alice", "No such option: --nmae"),
        ("eval starter --learning-rate 1", "No such option: --learning-rate"),
        ("eval starter --temperature 1", "; did you mean --set rollouts.temperature=VALUE?"),
        ("bootstrap swarm.toml --max-cpu 50", "No such option: --max-cpu: it is not for a bootstrap, which others"),
    ],
)
def test_unknown_options_name_what_they_may_stand_for(args: str, hint: str) -> None:
    result = run(*args.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2 and hint in result.stderr and ("--set" in result.stderr) == ("--set" in hint)


def test_mistakes_in_programs_show_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.cli.train.dump_toml", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["config", "show"], catch_exceptions=False)


def test_tasks_lists_names_sets_and_an_example() -> None:
    entries = {entry["name"]: entry for entry in json.loads(run("tasks", "--json").stdout)}
    assert "small" in entries["gcd"]["sets"]
    assert "sapo" in entries["bf"]["sets"]
    assert entries["gcd"]["question"]
    lines = run("tasks", env={"COLUMNS": "100"}).stdout.splitlines()
    assert len(lines) == len(entries)
    assert all(len(line) <= 100 for line in lines)


def test_starter_refuses_a_directory_that_is_not_empty() -> None:
    Path("out").mkdir()
    Path("out/precious").touch()
    result = run("starter", "--out", "out")
    assert result.exit_code == 2
    assert result.stderr.startswith("swarm-node: out is not empty")


def test_export_and_eval_name_a_missing_run() -> None:
    for args in (["export", "runs/no", "out"], ["eval", "runs/no"]):
        result = run(*args)
        assert result.exit_code == 2, result.output
        assert result.stderr.splitlines()[-1].startswith("swarm-node: ")
        assert "runs/no" in result.stderr
        assert not Path("runs").exists()


def test_log_sends_metrics_elsewhere_too() -> None:
    assert json.loads(run("local", "--log", "tensorboard,wandb", "--dry-run", "--json").stdout)["log"] == [
        "tensorboard",
        "wandb",
    ]
    wrong = run("local", "--log", "wandbb", "--dry-run")
    assert wrong.exit_code == 2 and "in --log: must be" in wrong.stderr


@pytest.mark.parametrize("of_the_run", [["--set", "policy.lora=true"], ["--config", "x.toml"]])
def test_settings_that_would_not_count_are_refused(of_the_run: list[str]) -> None:
    Path("x.toml").touch()
    for name in ("a", "b"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.toml").touch()
    for args in (["doctor", "runs/a"], ["merge", "runs/a", "runs/b", "--out", "out"]):
        result = run(*args, *of_the_run, "--json")
        assert result.exit_code == 2 and of_the_run[0] in json.loads(result.stdout)["error"]
    assert not Path("out").exists()


def test_a_strangers_text_moves_no_cursor() -> None:
    Path("evil.toml").write_text('name = "x"\n"\\u001b]0;title\\u0007\\u202e" = 1\n[[tasks]]\nenv = "gcd"\n')
    result = run("join", "evil.toml")
    assert result.exit_code == 2 and "]0;title" in result.stderr
    assert result.stderr.removesuffix("\n").isprintable()


# --------------------------------------------------------------------- swarm


def test_new_writes_a_manifest_and_prints_links() -> None:
    address = f"/ip4/203.0.113.5/tcp/31330/p2p/{Identity.generate().peer_id}"
    result = run("new", "--name", "sums", "--tasks", "gcd,small/lcm", "--bootstrap", address, "--max-age-s", "60")
    assert result.exit_code == 0, result.output
    manifest = parse_manifest(Path("sums.toml").read_bytes())
    assert [task.env for task in manifest.tasks] == ["gcd", "small/lcm"]
    assert manifest.limits.max_age_s == 60
    lines = result.stdout.splitlines()
    assert f"swarm id {manifest.swarm_id}" in lines
    assert lines[-1] == f"swarm://{manifest.swarm_id}?peer={address}"
    again = run("new", "--name", "sums", "--json")
    assert again.exit_code == 2
    assert "sums.toml exists already" in json.loads(again.stdout)["error"]
    other = json.loads(run("new", "--out", "x.toml", "--json", env={"SWARM_NODE_TASKS": "lcm"}).stdout)
    assert other["manifest"] == "x.toml"
    assert other["link"] == f"swarm://{other['swarm']}"
    assert parse_manifest(Path("x.toml").read_bytes(), other["swarm"]).tasks[0].env == "lcm"


def test_new_takes_the_tasks_of_a_configuration_file() -> None:
    Path("x.toml").write_text('tasks = [{ env = "gcd", config = { max_value = 30 }, weight = 2 }]\n')
    assert run("new", "--config", "x.toml", "--answer", "tags").exit_code == 0
    made = parse_manifest(Path("swarm.toml").read_bytes())
    assert made.answer == "tags" and made.model and made.model.name == "starter", "a form needs a model that writes it"
    (task,) = made.tasks
    assert (task.env, task.config, task.weight) == ("gcd", {"max_value": 30}, 2.0)


def test_join_takes_local_s_options_and_more() -> None:
    words = (
        "join s.toml --name alice --model m --tasks gcd --rounds 3 --minutes 2 --seed 1 --no-lora --own 3 --foreign 5"
    )
    words += " --listen 127.0.0.1 --announce a.example,b.example --port 1 --gossip-port 2 --bootstrap /x --dial-only"
    words += " --log tensorboard --log wandb"
    config = json.loads(run(*words.split(), "--dry-run", "--json").stdout)
    assert config["swarm"] == "s.toml"
    assert (config["name"], config["rounds"], config["seed"]) == ("alice", 3, 1)
    assert (config["sharing"]["own"], config["sharing"]["foreign"]) == (3, 5)
    network = config["network"]
    assert (network["listen"], network["port"], network["gossip_port"]) == ("127.0.0.1", 1, 2)
    assert network["announce"] == ["a.example", "b.example"]
    assert network["bootstrap"] == ["/x"]
    assert network["dial_only"] is True
    assert config["log"] == ["tensorboard", "wandb"]
    options = {words: {p.opts[0] for p in command.params} for words, command in commands()}
    own = {"--answer", "--kind"}
    assert options["local",] - options["join",] == own, "a member's answers have form and kind of its manifest"


def test_averaging_is_turned_off_by_a_flag() -> None:
    method = json.loads(run("join", "a.toml", "--dry-run", "--json", "--no-averaging").stdout)["averaging"]["method"]
    assert method == "none"


def test_the_swarm_may_come_from_the_environment() -> None:
    result = run("join", "--dry-run", "--json", env={"SWARM_NODE_SWARM": "a.toml", "SWARM_NODE_PORT": "4"})
    assert json.loads(result.stdout)["swarm"] == "a.toml"
    assert json.loads(result.stdout)["network"]["port"] == 4
    assert (
        json.loads(run("join", "b.toml", "--dry-run", "--json", env={"SWARM_NODE_SWARM": "a"}).stdout)["swarm"]
        == "b.toml"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bootstrap"], "which swarm?"),
        (["bootstrap", "no.toml"], "there is no manifest no.toml"),
        (["bootstrap", "swarm://x"], "no swarm that can be joined"),
        (["new", "--tasks", "codeio"], "it executes Python programs"),
        (["new", "--bootstrap", "localhost"], "'localhost' is no address of a peer"),
        (["status"], "no run below runs/"),
        (["status", "no.toml"], "there is no manifest no.toml"),
        (["doctor", "no.toml"], "there is no manifest no.toml"),
        (["status", "runs/no"], "there is no run directory or manifest runs/no"),
        (
            ["join", "no.toml", "--crew", "home"],
            "a crew needs to know in how many stages it holds its policy: --stages N",
        ),
        (["identity", "show"], "no identity in runs/node"),
    ],
)
def test_mistakes_about_swarms_leave_nothing_behind(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_identity_is_made_once() -> None:
    made = run("identity", "new", "--run-dir", "runs/a")
    assert made.exit_code == 0
    peer = made.stdout.splitlines()[0]
    assert Identity.load(Path("runs/a/identity.key")).peer_id == peer
    assert Path("runs/a/identity.key").stat().st_mode & 0o777 == 0o600
    again = run("identity", "new", "--run-dir", "runs/a")
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    assert run("identity", "show", env={"SWARM_NODE_RUN_DIR": "runs/a"}).stdout.splitlines()[0] == peer
    RunDir.open("runs/a").close()  # a run may begin where only its identity is
    Path("runs/a/identity.key").write_bytes(b"x")
    assert "restore it" in run("identity", "show", "--run-dir", "runs/a").stderr


def test_a_key_moves_to_another_run() -> None:
    peer = run("identity", "new", "--run-dir", "runs/a").stdout.splitlines()[0]
    exported = run("identity", "export", "--run-dir", "runs/a", "backup.key")
    assert exported.exit_code == 0 and exported.stdout.splitlines()[0] == peer
    assert Path("backup.key").stat().st_mode & 0o777 == 0o600
    assert run("identity", "import", "--run-dir", "runs/b", "backup.key").stdout.splitlines()[0] == peer
    assert Path("runs/b/identity.key").read_bytes() == Path("runs/a/identity.key").read_bytes()
    assert Path("runs/b/identity.key").stat().st_mode & 0o777 == 0o600
    shown = run("identity", "show", "--run-dir", "runs/none", "--identity", "backup.key")
    assert shown.stdout.splitlines() == [peer, "backup.key"]


def test_the_key_that_a_run_is_told_is_its_own() -> None:
    peer = run("identity", "new", "--run-dir", "a").stdout.splitlines()[0]
    Path("hub").mkdir()
    Path("hub/config.toml").write_text("[network]\nidentity = 'a/identity.key'\n")
    exported = run("identity", "export", "--run-dir", "hub", "hub.key")
    assert exported.stdout.splitlines()[0] == peer and Identity.load(Path("hub.key")).peer_id == peer
    assert run("identity", "show", "--run-dir", "hub").stdout.splitlines() == [peer, "a/identity.key"]
    refused = run("identity", "new", "--run-dir", "hub")
    assert refused.exit_code == 2 and "names a key elsewhere, a/identity.key (in hub/config.toml)" in refused.stderr
    assert not Path("hub/identity.key").exists()


def test_no_key_is_replaced_by_another() -> None:
    run("identity", "new", "--run-dir", "runs/a")
    run("identity", "new", "--run-dir", "runs/b")
    key = Path("runs/b/identity.key").read_bytes()
    for arguments in (
        ["import", "--run-dir", "runs/b", "runs/a/identity.key"],
        ["export", "--run-dir", "runs/a", "runs/b/identity.key"],
    ):
        refused = run("identity", *arguments)
        assert refused.exit_code == 2 and "runs/b/identity.key exists already" in refused.stderr
    assert Path("runs/b/identity.key").read_bytes() == key


def test_a_key_that_no_node_would_use_is_refused() -> None:
    run("identity", "new", "--run-dir", "runs/a")
    for words in (["new"], ["import", "runs/a/identity.key"]):
        refused = run("identity", *words, "--run-dir", "runs/b", "--identity", "mounted.key")
        assert refused.exit_code == 2 and "names a key elsewhere, mounted.key" in refused.stderr
    assert not Path("runs/b").exists()


def test_what_is_no_key_is_not_imported() -> None:
    Path("notes.txt").write_text("x" * 68)
    for file, message in (("notes.txt", "(the file to import) holds no key"), ("none.key", "no key file at none.key")):
        refused = run("identity", "import", "--run-dir", "runs/a", file)
        assert refused.exit_code == 2 and message in refused.stderr
    assert not Path("runs").exists()


def test_ending_runs_no_garbage_collection() -> None:
    program = (
        "import gc, sys; from swarm_node.cli.app import main; gc.disable()\n"
        "class Cycle:\n"
        "    def __del__(self): print('looked')\n"
        "cycle = Cycle(); cycle.me = cycle; del cycle\n"
        "sys.argv = ['swarm-node', '--version']; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and ended.stdout == f"swarm-node {swarm_node.__version__}\n", ended.stderr


def test_a_resumption_without_a_run_names_those_here() -> None:
    assert "none that can go on here is below runs/" in run("resume").stderr
    for name in ("a", "b c"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.toml").touch()
    with RunDir.open("runs/a"):
        result = run("resume")
    assert result.exit_code == 2
    assert result.stderr.strip().endswith("below runs/ there are: `swarm-node resume 'runs/b c'`")
    Path("runs/b c/config.toml").write_text('rewards.functions = ["__main__:short"]\n')
    assert "none that can go on here" not in run("resume").stderr, "the other is free again"


def test_what_may_heal_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """A supervisor starts the node again then, and not after a wrong setting."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.toml").touch()
    small = ["--set", "eval.questions=0", "--rounds", "1"]
    with RunDir.open(folder):
        assert run("resume", str(folder)).exit_code == 75
        assert run("local", "--run-dir", str(folder), *small).exit_code == 75
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run("local", "--run-dir", str(tmp_path / "b"), "--health-port", port, *small)
        assert result.exit_code == 75 and f"port {port} of 127.0.0.1 is taken" in result.stderr
    assert run("local", "--run-dir", str(tmp_path / "b"), "--tasks", "nonsense", *small).exit_code == 2


def test_a_task_names_its_set_too() -> None:
    result = run("tasks", "gcd")
    assert "small/gcd has others" in result.stdout
    assert "has others" not in run("tasks", "small/gcd").stdout


def test_a_link_without_a_peer_says_so() -> None:
    assert "this link names no peer" in run("new", "--name", "sums").stderr
