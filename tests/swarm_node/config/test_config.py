import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.config import NodeConfig, TaskConfig, dump_toml, load_config
from swarm_node.config.keys import all_keys
from swarm_node.config.own import read_own
from swarm_node.config.trl_names import NOT_HERE, NOTHING_HERE, TRL_NAMES
from swarm_node.config.writing import config_reference
from swarm_node.errors import UserError

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "x.toml"
    file.write_text(text)
    return file


def test_there_are_configs() -> None:
    assert {"demo.toml", "local.toml", "lora.toml"} <= {file.name for file in CONFIGS}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_config_file_loads_and_explains_itself(file: Path) -> None:
    config = load_config(file)
    assert config.run_dir == f"runs/{file.stem}"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_what_comments_offer_in_config_files_loads_too(file: Path) -> None:
    offers = re.findall(r"^# (\w+ = .*?)(?:  #.*)?$", file.read_text(), re.MULTILINE)
    assert offers or file.stem != "local"
    text = re.sub(r"^# (\w+ = |\[\w+\])", r"\1", file.read_text(), flags=re.MULTILINE)
    file = Path("offered.toml")
    file.write_text(text)
    load_config(file)


def test_precedence_is_defaults_file_environment_flags_set(tmp_path: Path) -> None:
    file = write(tmp_path, "rounds = 1\nseed = 1\nminutes = 1\n[grpo]\nbeta = 1\nwarmup = 1\n")
    env = {"SWARM_NODE_SEED": "2", "SWARM_NODE_MINUTES": "2", "SWARM_NODE_GRPO__WARMUP": "2"}
    config = load_config(file, env, {"minutes": 3.0, "seed": None}, ["grpo.warmup=4"])
    assert config.rollouts.groups == NodeConfig().rollouts.groups
    assert (config.rounds, config.grpo.beta) == (1, 1)
    assert config.seed == 2
    assert config.minutes == 3
    assert config.grpo.warmup == 4


def test_set_wins_over_flag_and_variable() -> None:
    assert load_config(flags={"rounds": 3}, sets=["rounds=4"]).rounds == 4
    assert load_config(env={"SWARM_NODE_ROUNDS": "3", "SWARM_NODE_SET": "rounds=4"}).rounds == 4
    assert load_config(env={"SWARM_NODE_SET": "rounds=4"}, flags={"rounds": 5}).rounds == 5


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("TASKS", "gcd,lcm", "tasks", ["gcd", "lcm"]),
        ("TASKS", "gcd", "tasks", ["gcd"]),
        ("TASKS", '["gcd", "lcm"]', "tasks", ["gcd", "lcm"]),
        ("TASKS", "[{env = 'gcd', weight = 2}]", "tasks", [TaskConfig(env="gcd", weight=2)]),
        ("MODEL", "some/model", "policy.model", "some/model"),
        ("MODEL", "2024", "policy.model", "2024"),
        ("POLICY__REVISION", "12e4567", "policy.revision", "12e4567"),
        ("POLICY__REVISION", "", "policy.revision", None),
        ("POLICY__SYSTEM_PROMPT", "", "policy.system_prompt", ""),
        ("POLICY__PROMPT_TEMPLATE", "[Q] {question}\n", "policy.prompt_template", "[Q] {question}\n"),
        ("POLICY__PROMPT_TEMPLATE", '"{question}\\n\\n"', "policy.prompt_template", "{question}\n\n"),
        ("POLICY__LORA_TARGETS", "all-linear", "policy.lora_targets", "all-linear"),
        ("POLICY__LORA_TARGETS", "['q_proj', 'v_proj']", "policy.lora_targets", ["q_proj", "v_proj"]),
        ("LORA", "1", "policy.lora", True),
        ("LORA", "false", "policy.lora", False),
        ("LORA", "", "policy.lora", None),
        ("MINUTES", "1.5", "minutes", 1.5),
        ("GRPO__LOSS", "gspo", "grpo.loss", "gspo"),
        ("GRPO__BETAS", "0.5, 0.6", "grpo.betas", (0.5, 0.6)),
        ("GRPO__LEARNING_RATE", "2e-5", "grpo.learning_rate", 2e-5),
        ("LOG", "", "log", []),
        ("SET", "rounds=7 'policy.system_prompt=Think first.'", "policy.system_prompt", "Think first."),
    ],
)
def test_environment_values(variable: str, text: str, key: str, value: object) -> None:
    found: object = load_config(env={f"SWARM_NODE_{variable}": text, "PATH": "/bin"})
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[grpo]\nlos = 'dapo'", "unknown key grpo.los in x.toml; did you mean grpo.loss?"),
        ("[gpro]\nloss = 'dapo'", "unknown key gpro in x.toml; did you mean grpo?"),
        ("learning_rate = 1e-4", "unknown key learning_rate in x.toml; did you mean grpo.learning_rate?"),
        ("env = 'gcd'", "unknown key env in x.toml; did you mean tasks[].env?"),
        ("[[tasks]]\nenv = 'gcd'\n[[tasks]]\nenv = 'lcm'\nwieght = 2", "did you mean tasks[1].weight?"),
        ("[[rewards.functions]]\npth = 'a:b'", "did you mean rewards.functions[0].path?"),
        ("zzzzzz = 1", "unknown key zzzzzz in x.toml; `swarm-node config reference` lists all"),
        (
            "num_generations = 8",
            "unknown key num_generations in x.toml; TRL's num_generations is rollouts.group_size here (docs/grpo.md)",
        ),
        ("[grpo]\nscale_rewards = 'batch'", "; TRL's scale_rewards is grpo.advantage here (docs/grpo.md)"),
        ("[grpo]\nbeta1 = 0.9", "; did you mean grpo.beta?"),
        ("[eval]\neval_steps = 5", "; TRL's eval_steps is eval.every here (docs/grpo.md)"),
        ("use_vllm = true", "; TRL's use_vllm is not here: the node samples by itself (rollouts.engine)"),
        ("min_p = 0.1", "; TRL's min_p has nothing like it here"),
    ],
)
def test_unknown_keys_name_the_nearest_one(text: str, message: str) -> None:
    file = Path("x.toml")
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(message) + "$"):
        load_config(file)


def test_names_of_trl_are_those_of_the_page() -> None:
    page = (CONFIGS[0].parents[1] / "docs/grpo.md").read_text()
    defaults = page.partition("### Defaults, and TRL's\n")[2].partition("\n### ")[0]
    rows = [line.split(" | ") for line in defaults.splitlines() if line.startswith("| `")]
    told = [(name, row[0].strip("| `")) for row in rows for name in re.findall(r"`(\w+)`", row[2])]
    renamed = {(name, key) for name, key in told if name != key.rpartition(".")[2]}
    assert renamed - {("num_generations", "rollouts.groups")} <= TRL_NAMES.items() and len(renamed) > 15
    assert all(f"`{name}`" in page for name in TRL_NAMES) and set(TRL_NAMES.values()) <= all_keys().keys()
    mentioned = re.findall(r"(?:eval|rewards|rollouts|checkpoints|grpo)\.\w+", " ".join(NOT_HERE.values()))
    assert set(mentioned) <= all_keys().keys() and not (NOT_HERE.keys() | NOTHING_HERE) & TRL_NAMES.keys()
    assert not {key.rpartition(".")[2] for key in all_keys()} & (TRL_NAMES.keys() | NOT_HERE.keys() | NOTHING_HERE)


def test_any_key_may_be_in_a_file() -> None:
    Path("crew").write_text("home\n")
    Path("rounds").write_text(" 7\n")
    env = {"SWARM_NODE_PIPELINE__CREW_FILE": "crew", "SWARM_NODE_ROUNDS_FILE": "rounds"}
    config = load_config(env=env | {"SWARM_NODE_PIPELINE__STAGES": "2"})
    assert (config.pipeline.crew, config.rounds) == ("home", 7)


@pytest.mark.parametrize("other", ["SWARM_NODE_CREW", "SWARM_NODE_PIPELINE__CREW"])
def test_a_value_and_its_file_are_refused(other: str) -> None:
    Path("crew").write_text("home")
    message = f"^both {other} and SWARM_NODE_CREW_FILE are set: pipeline.crew takes one of them$"
    with pytest.raises(UserError, match=message):
        load_config(env={other: "home", "SWARM_NODE_CREW_FILE": "crew"})


def test_a_bad_secret_file_is_named_not_shown() -> None:
    Path("bad").write_text("my secret \u0007")
    Path("empty").write_text("\n")
    Path("binary").write_bytes(b"\xff\xfe")
    Path("long").write_text("x" * 70_000)
    for file, message in (
        ("none", "cannot read 'none', which SWARM_NODE_CREW_FILE names: No such file or directory"),
        ("empty", "'empty', which SWARM_NODE_CREW_FILE names, is empty: it must hold one value"),
        ("binary", "'binary', which SWARM_NODE_CREW_FILE names, is not UTF-8 text"),
        ("long", "'long', which SWARM_NODE_CREW_FILE names, is longer than 65536 characters"),
        ("bad", "pipeline.crew = (hidden) in SWARM_NODE_CREW_FILE: must"),
    ):
        with pytest.raises(UserError) as caught:
            load_config(env={"SWARM_NODE_CREW_FILE": file})
        assert str(caught.value).startswith(message) and "my secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["s3cret", "swarm://s3cret", "swarm://" + "0" * 64 + "?s3cret=1"])
def test_a_bad_link_in_a_file_stays_hidden(text: str) -> None:
    Path("bad").write_text(text)
    with pytest.raises(UserError, match="^'bad', which SWARM_NODE_SWARM_FILE names, holds no ") as caught:
        load_config(env={"SWARM_NODE_SWARM_FILE": "bad"})
    assert "s3cret" not in str(caught.value)


def test_a_link_in_a_file_names_the_swarm() -> None:
    link = "swarm://" + "0" * 64
    Path("link").write_text(f"{link}\n")
    assert load_config(env={"SWARM_NODE_SWARM_FILE": "link"}).swarm == link


def test_unknown_variables_and_sets_name_the_nearest_one() -> None:
    with pytest.raises(
        UserError, match="^unknown environment variable SWARM_NODE_ROUND; did you mean SWARM_NODE_ROUNDS"
    ):
        load_config(env={"SWARM_NODE_ROUND": "3"})
    with pytest.raises(UserError, match="SWARM_NODE_SWRAM_FILE; did you mean SWARM_NODE_SWARM_FILE?"):
        load_config(env={"SWARM_NODE_SWRAM_FILE": "link"})
    with pytest.raises(UserError, match="did you mean SWARM_NODE_GRPO__LOSS?"):
        load_config(env={"SWARM_NODE_LOSS": "gspo"})
    with pytest.raises(UserError, match="did you mean SWARM_NODE_CONFIG?"):
        load_config(env={"SWARM_NODE_CONFIGS": "x"}, others={"SWARM_NODE_CONFIG"})
    for name, key in {"NUM_GENERATIONS": "ROLLOUTS__GROUP_SIZE", "GRPO__MAX_STEPS": "ROUNDS"}.items():
        with pytest.raises(UserError, match=f"; TRL's {name.removeprefix('GRPO__').lower()} is SWARM_NODE_{key} here"):
            load_config(env={f"SWARM_NODE_{name}": "4"})
    with pytest.raises(UserError, match="did you mean SWARM_NODE_GRPO__BETA?"):
        load_config(env={"SWARM_NODE_BETA": "0.1"})
    with pytest.raises(UserError, match="^unknown key grpo.group_size in --set; did you mean rollouts.group_size?"):
        load_config(sets=["grpo.group_size=4"])


@pytest.mark.parametrize(
    ("set_", "message"),
    [
        ("rollouts.group_size=1", "rollouts.group_size = 1 in --set: must be greater than or equal to 2"),
        ("policy.threads=1000000", "policy.threads = 1000000 in --set: must be less than or equal to 1024"),
        ("rounds=0", "rounds = 0 in --set: must be greater than 0"),
        ("rounds=many", "rounds = 'many' in --set: must be a valid integer"),
        ("rollouts.groups=", "rollouts.groups = '' in --set: must be a valid integer"),
        ("grpo.betas=[0.9,1.5]", "grpo.betas[1] = 1.5 in --set: must be less than 1"),
        (
            "grpo.loss=ppo",
            "grpo.loss = 'ppo' in --set: must be 'grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo' or package.module",
        ),
        ("grpo.loss=dappo", "or package.module:function; did you mean 'dapo'?"),
        ("grpo.loss=sapo", "or package.module:function; TRL's sapo is not here: write it as a plugin"),
        ("sharing.sampler=uniforn", "must be 'uniform' or package.module:function; did you mean 'uniform'?"),
        ("grpo.learning_rate=inf", "grpo.learning_rate = inf in --set: must be a finite number"),
        ("grpo=3", "grpo = 3 in --set: must be a table"),
        ("averaging.gamma=2.5", "averaging.gamma = 2.5 in --set: gamma must be less than 2 (1 - alpha^2) = 2: with"),
        (
            "averaging={gamma=1.0, alpha=0.9, probe=true}",
            "averaging = { gamma = 1.0, alpha = 0.9, probe = true } in --set: gamma must be less than 2 (1 - alpha",
        ),
        ("rollouts.top_p=1.5", "rollouts.top_p = 1.5 in --set: must be less than or equal to 1"),
        ("grpo.betas=0.9", "grpo.betas[1] is missing in --set"),
        ("grpo.betas=a,b", "grpo.betas[0] = 'a' in --set: must be a valid number"),
        ("name=al ice", "name = 'al ice' in --set: must be letters, digits, '.', '_' and '-', at most 32"),
        ("pipeline.crew=a b", "pipeline.crew = 'a b' in --set: must be letters, digits, '.', '_' and '-', at most 32"),
        (f"name={'a' * 33}", "in --set: must have at most 32 characters"),
        ("spot.endpoint=a b", "spot.endpoint = 'a b' in --set: must be HOST or HOST:PORT"),
        ("tasks=[3]", "tasks[0] = 3 in --set: "),
        ("tasks=[{env='gcd', weight=0}]", "tasks[0].weight = 0 in --set: must be greater than 0"),
        ("tasks=[{env='gcd', file='a.jsonl'}]", "tasks[0] must have either `env` or `file`"),
        ("tasks=[{weight=2}]", "tasks[0] must have either `env` or `file`"),
        ("eval.tasks=['a.jsonl', {weight=2}]", "eval.tasks[1] must have either `env` or `file`"),
        ("tasks=[{file='a.jsonl', config={a=1}}]", "tasks[0] must not have `config`, which is for `env`"),
        ("tasks=[{env='gcd', answer='a'}]", "tasks[0] must not name columns, which are for `file`"),
        ("rewards.functions=[{weight=1}]", "rewards.functions[0].path is missing in --set"),
        ("rewards.functions=[3]", "rewards.functions[0] = 3 in --set: must be a table"),
        ("rewards.checker_weight=0", "rewards.checker_weight = 0 leaves nothing to judge answers"),
        ("policy.prompt_template=Q", "policy.prompt_template = 'Q' lacks {question}"),
        ("network.max_connections=600", "network.max_connections = 600 in --set: must be less than or equal to 512"),
        ("network.announce=a,b,c,d,e,f,g,h,i", "network.announce = ['a', 'b', "),
        (
            "network.announce=/ip4/foo/tcp/1",
            "network.announce[0] = '/ip4/foo/tcp/1' in --set: must be an IP address, a ",
        ),
        ("network.announce=/ip6/1.2.3.4/tcp/1", "must be an IP address, a host name, or a multiaddress such as /ip4/"),
        ("network.announce=/ip4/1.2.3.4/tcp/0", "must be an IP address, a host name, or a multiaddress such as /ip4/"),
        (
            "network.announce=1.2.3.4:5",
            "network.announce[0] = '1.2.3.4:5' in --set: must be an IP address, a host name",
        ),
        ("network.listen=localhost", "network.listen = 'localhost' in --set: must be an IP address"),
        ("rounds", "--set rounds: write section.key=value"),
    ],
)
def test_wrong_values_are_explained_in_one_line(set_: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load_config(sets=[set_])
    assert "\n" not in str(caught.value)


def test_overridden_wrong_values_are_blamed_too() -> None:
    file = Path("x.toml")
    file.write_text("rounds = 0")
    with pytest.raises(UserError, match=r"^rounds = 0 in x\.toml: "):
        load_config(file, flags={"rounds": 5})
    with pytest.raises(UserError, match="^seed = -1 in SWARM_NODE_SEED: "):
        load_config(env={"SWARM_NODE_SEED": "-1"})
    with pytest.raises(UserError, match="^run_dir = 3 in --run-dir: "):
        load_config(flags={"run_dir": 3})


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["grpo.correction=a.py:F", "grpo.off_policy_mask=0.5"], "grpo.off_policy_mask needs grpo.correction"),
        (["grpo.correction=truncated", "rollouts.top_p=0.9"], "which rollouts.top_p = 0.9 alters"),
        (["grpo.advantage=pass_k", "rollouts.group_size=4"], "must be less than rollouts.group_size (4)"),
        (
            ["policy.quantize=nf4", "policy.lora=false"],
            "--quantize nf4 freezes the model's weights: leave out --no-lora",
        ),
        (["policy.quantize=int8", "pipeline.stages=2"], "--quantize int8 is not for policies in stages"),
        (["swarm=s.toml", "rollouts.groups=2", "sharing.own=4"], "sharing.own = 4 asks for more groups of its own"),
    ],
)
def test_settings_that_contradict_each_other(sets: list[str], message: str) -> None:
    for part in sets:
        load_config(sets=[part])
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(sets=sets)


@pytest.mark.parametrize(
    ("sets", "own"),
    [
        (["swarm=s.toml", "rollouts.groups=2"], 2),
        (["swarm=s.toml", "rollouts.groups=9"], 8),
        (["swarm=s.toml", "rollouts.groups=4", "sharing.own=3"], 3),
        (["rollouts.groups=2"], 8),
    ],
)
def test_a_member_samples_no_more_groups_than_were_asked_for(sets: list[str], own: int) -> None:
    config = load_config(sets=sets)
    assert config.sharing.own == own and config.rollouts.groups >= min(own, 2)


def test_a_run_with_a_correction_that_is_gone_reads(tmp_path: Path) -> None:
    file, said = tmp_path / "config.toml", list[str]()
    file.write_text('[grpo]\ncorrection = "icepop"\nk = 3\n')
    config = read_own(file, said.append)
    assert (config.grpo.correction, config.grpo.k) == ("recorded", 3)
    assert len(said) == 1 and said[0].endswith("a clone has it as benchmarks.corrections:IcePop")


def test_only_reward_functions_may_judge_alone() -> None:
    sets = ["rewards.checker_weight=0", "rewards.functions=a.py:f"]
    assert load_config(sets=sets).rewards.checker_weight == 0


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no configuration dmo: give a file, or one of this package, which are crew, demo"
    ):
        load_config(Path("dmo"))
    with pytest.raises(UserError, match=r"cannot read the configuration nowhere\.toml: No such file"):
        load_config(Path("nowhere.toml"))
    with pytest.raises(UserError, match="it is no file, or has more than"):
        load_config(tmp_path)
    with pytest.raises(UserError, match=r"x\.toml is not valid TOML: .*line 2"):
        load_config(write(tmp_path, "rounds = 1\nseed = x"))
    (tmp_path / "x.toml").write_bytes(b"run_dir = '\xe9'")
    with pytest.raises(UserError, match="is not valid TOML: .*utf-8"):
        load_config(tmp_path / "x.toml")
    with pytest.raises(UserError, match="^SWARM_NODE_SET: "):
        load_config(env={"SWARM_NODE_SET": "a='b"})


@given(prompt=st.text(), names=st.lists(st.text(), max_size=3), rate=st.floats(1e-300, 1e300))
def test_a_dumped_configuration_loads_equal(prompt: str, names: list[str], rate: float) -> None:
    config = NodeConfig.model_validate(
        {
            "tasks": [*names, {"env": "gcd", "config": {"max": 3, "names": names}}],
            "policy": {"system_prompt": prompt, "lora_targets": ["q_proj"]},
            "grpo": {"learning_rate": rate, "betas": [0.1, 0.2]},
            "rewards": {"functions": [{"path": prompt}]},
        }
    )
    file = Path("round-trip.toml")
    file.write_text(dump_toml(config), encoding="utf-8", newline="")
    assert load_config(file) == config


@given(key=st.sampled_from(["rounds", "tasks", "grpo", "grpo.betas", "policy.lora", "log", "x"]), value=st.text())
def test_any_text_is_value_or_user_error(key: str, value: str) -> None:
    try:
        load_config(sets=[f"{key}={value}"])
    except UserError as error:
        assert key in str(error)


@given(value=st.text().filter(lambda text: text[:1] not in ('"', "'")))
def test_text_keys_take_any_text_as_it_is(value: str) -> None:
    assert load_config(sets=[f"policy.system_prompt={value}"]).policy.system_prompt == value


def test_the_reference_explains_every_key() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \| (.+?) \| (.+) \|$", config_reference(), re.MULTILINE)
    meanings = {key: (kind, default, meaning) for key, kind, default, meaning in rows}
    top = {name for name, field in NodeConfig.model_fields.items() if not isinstance(field.default, type(None))}
    assert {"tasks", "pace_s"} <= top & meanings.keys()
    for name, field in NodeConfig.model_fields.items():
        for inner in getattr(field.annotation, "model_fields", {}):
            assert f"{name}.{inner}" in meanings
    assert meanings["rollouts.group_size"][:2] == ("integer ≥ 2", "`8`")
    assert meanings["minutes"][:2] == ("number > 0", "unset")
    assert meanings["rewards.functions[].path"][1] == "required"
    assert meanings["tasks[].weight"][0] == "number > 0"
    assert all(len(meaning) > 5 for _, _, meaning in meanings.values())


def test_related_values_may_come_in_any_order() -> None:
    Path("x.toml").write_text("[averaging]\ngamma = 1.4\n")
    for sets in (["averaging.gamma=0.5", "averaging.alpha=0.8"], ["averaging.alpha=0.8", "averaging.gamma=0.5"]):
        for file in (None, Path("x.toml")):
            averaging = load_config(file, sets=sets).averaging
            assert (averaging.alpha, averaging.gamma) == (0.8, 0.5)
    assert load_config(sets=["averaging.gamma=2.5", "averaging.gamma=0.5"]).averaging.gamma == 0.5


def test_conflicting_values_are_named_with_their_sources() -> None:
    Path("x.toml").write_text("[averaging]\ngamma = 1.4\n")
    message = (
        "averaging = { gamma = 1.4, alpha = 0.6 } in x.toml and --set: gamma must be less than 2 (1 - alpha^2) = 1.28"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(Path("x.toml"), {"SWARM_NODE_ROUNDS": "3"}, sets=["averaging.alpha=0.6"])
    with pytest.raises(UserError, match="^rounds = 0 in --set: must be greater than 0"):
        load_config(sets=["averaging.gamma=2.5", "rounds=0"])
