"""Faults of `test_cases.py` that show only in a round, in a judgement or between nodes."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import swarm_node
from swarm_node.config import NodeConfig, PolicyConfig, RewardsConfig, RolloutsConfig
from swarm_node.config.plugins import load_function
from swarm_node.errors import PluginError, UserError
from swarm_node.node import Node
from swarm_node.policy.loading import load_policy
from swarm_node.rollouts import Collected
from swarm_node.runtime.simulation import Peer, Simulation, manifest_for
from swarm_node.say import Once
from swarm_node.swarm.clock import say_clock
from swarm_node.swarm.twins import check_twins
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Sampling
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.twins import Twins
from tests.support.case_models import MODELS, SPECIAL, THINKING, put
from tests.support.fake_transport import FakeTransport
from tests.support.repository import ROOT
from tests.support.run_files import read_jsonl
from tests.support.simulated_peers import SPEED, total
from tests.swarm_node.test_cases import run

DATA = ROOT / "tests/data/cases"
SETTINGS: dict[str, Any] = {
    "tasks": [str(DATA / "ok.jsonl")],
    "rollouts": {"groups": 2, "group_size": 4, "max_new_tokens": 8},
    "eval": {"questions": 0},
    "rewards": {"checker_weight": 0.0},
    "checkpoints": {"every": 1},
}


def by_length(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text) % 3) for text in completions]


PAIRS = [  # fault, kind (empty = guessed), reference, completion, whether it is right
    ("04", "", "B", "(B)", True),
    ("04", "", "B", "B.", True),
    ("04", "", "B", "b", True),
    ("04", "", "B", r"\boxed{\text{B}}", True),
    ("04", "", "B", "A", False),
    ("06", "", "3 x 2 = 26\n#### €26", "26", True),
    ("06", "", "so it is\n#### **26**", "26", True),
    ("06", "", "so it is\n#### x = 26", "26", True),
    ("06", "", "so it is\n#### −26", "-26", True),
    ("06", "", "so it is\n#### $26", "27", False),
    ("09", "", 0.00000012, "0.00000012", True),
    ("09", "", 1e22, "10000000000000000000000", True),
    ("09", "", 1e22, "10000000000000000000001", False),
    ("11", "maths", r"\frac{1}{2}", "0.5", True),
    ("11", "maths", r"\dfrac{1}{2}", "$1/2$", True),
    ("11", "number", "7", "x=7", True),
    ("11", "number", "-5", "−5", True),
    ("11", "number", "7", "8", False),
]


@pytest.mark.parametrize(("fault", "kind", "right", "said", "is_right"), PAIRS)
def test_answers_that_mean_the_same_count(
    fault: str, kind: str, right: object, said: str, is_right: bool, tmp_path: Path
) -> None:
    other = "C" if right == "B" else right
    rows = [{"question": f"Question {i}?", "answer": right if i == 0 else other} for i in range(30)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = load_tasks(["q.jsonl"], RewardsConfig(kind=kind) if kind else RewardsConfig())
    task = next(task for task in tasks.every() if task.question == "Question 0?")
    assert [score.correct for score in tasks.score([task], [tasks.prompt(task)], [said])] == [is_right]


def test_reasoning_that_the_prompt_began_must_end(tmp_path: Path) -> None:
    """Fault 41."""
    model = put(tmp_path / "m", template=THINKING, special=(*SPECIAL, "<think>", "</think>"))
    policy = load_policy(PolicyConfig(model=str(model)), RolloutsConfig(max_new_tokens=8), lambda line: None)
    tasks = load_tasks([str(DATA / "ok.jsonl")], RewardsConfig())
    task = tasks.every()[0]
    prompt = tasks.prompt_text(policy.encode(tasks.prompt(task)), policy.text_of_prompt)
    guess, ended = f"so \\boxed{{{task.answer}}}, but wait", f"hm</think>{task.answer}"
    assert [score.correct for score in tasks.score([task] * 2, [prompt] * 2, [guess, ended])] == [False, True]


def test_tags_that_are_special_tokens_stay_in_texts(tmp_path: Path) -> None:
    """Fault 42."""
    MODELS["tags_are_special"](tmp_path / "m")
    options = PolicyConfig(model=str(tmp_path / "m"))
    policy = load_policy(options, RolloutsConfig(max_new_tokens=8), lambda line: None)
    text = "<think>3+4</think><answer>7</answer>"
    ids = policy.encode_completion(text, True)
    assert ids is not None and policy.decode(ids) == text


class Liar(Node):
    """It answers with tokens that the others' model has no rows for."""

    def share(self, collected: Collected) -> None:
        for group in collected.groups:
            for i, rollout in enumerate(group.rollouts):
                rollout.turns[0].text, rollout.reward = f"<doc>{'a' * i}", float(i)
                rollout.rewards, rollout.turns[0].finished = {name: rollout.reward for name in rollout.rewards}, True
        super().share(collected)


def test_a_peers_text_has_tokens_without_rows(tmp_path: Path) -> None:
    """Fault 43, over the network in memory: such answers are refused and counted, and the node goes on."""
    MODELS["tokens_added"](tmp_path / "m")
    table = SETTINGS | {
        "policy": {"model": str(tmp_path / "m")},
        "rewards": {"checker_weight": 0.0, "functions": [{"path": "tests.swarm_node.test_case_faults:by_length"}]},
        "sharing": {"own": 2, "foreign": 2},
        "tasks": ["small/count_bits"],
    }
    peers = [Peer(NodeConfig.model_validate(table), SPEED, node_type=kind) for kind in (Node, Liar)]
    simulation = Simulation(manifest_for(peers[0].config), peers, seed=1)
    simulation.run(12)
    honest = peers[0].metrics
    assert len(honest) == 12 and honest[-1]["swarm/rejected/text"] > 0
    assert honest[-1].get("swarm/groups_admitted", 0.0) == 0 and total(simulation, "swarm/groups_received") > 0


def test_finite_weights_may_make_numbers_that_are_not(tmp_path: Path) -> None:
    """Fault 53."""
    MODELS["ok"](tmp_path / "m")
    options = PolicyConfig(model=str(tmp_path / "m"))
    policy = load_policy(options, RolloutsConfig(max_new_tokens=8), lambda line: None)
    policy.check_finite()
    weights = policy.trainable_state()
    weights["model.norm.weight"].fill_(1e38)
    weights["model.embed_tokens.weight"].mul_(1e6)
    with pytest.raises(UserError, match="its logits are not finite; lower grpo.learning_rate"):
        policy.check_finite()
    with pytest.raises(UserError, match="its logits are not finite"):
        policy.generate([[5, 6, 7]], 2, Sampling(4), [1])


def test_a_round_that_spoils_the_weights_is_not_saved(tmp_path: Path) -> None:
    """Fault 53."""
    MODELS["ok"](tmp_path / "m")
    (tmp_path / "reward.py").write_text("def score(completions, **c): return [len(text) % 3 for text in completions]")
    config = SETTINGS | {"policy": {"model": "m"}, "run_dir": "run", "rounds": 2, "grpo": {"learning_rate": 1e-4}}
    swarm_node.train(config, reward_funcs=["reward.py:score"], quiet=True)
    before = {path: path.read_bytes() for path in (tmp_path / "run/checkpoints").rglob("*") if path.is_file()}
    code, said = run("resume", "run", "--rounds", "6", "--set", "grpo.learning_rate=1e38")
    assert code == 2 and "training has spoiled the policy" in said and "the checkpoint of round 2 is as it was" in said
    assert {path: path.read_bytes() for path in before} == before
    assert not list((tmp_path / "run/checkpoints").glob("round-00000003*"))
    assert run("resume", "run", "--rounds", "3", "--set", "grpo.learning_rate=1e-5")[0] == 0


def test_a_slow_reward_function_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 33."""
    real, spent = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + spent[0])

    def slow(completions: list[str], **columns: object) -> list[float]:
        spent[0] += 2000.0
        return by_length(completions)

    MODELS["ok"](tmp_path / "m")
    config = SETTINGS | {"policy": {"model": "m"}, "run_dir": "run", "rounds": 2}
    swarm_node.train(config, reward_funcs=[slow], quiet=True)
    events = [event["text"] for event in read_jsonl(tmp_path / "run/events.jsonl")]
    [told] = [text for text in events if "reward functions take" in text]
    assert re.match(r"reward functions take \d+% of a round, '.*slow' 4000\.0 s of 4\d\d\d\.\d s", told)
    assert all(0.5 < line["perf/reward_share"] <= 1 for line in read_jsonl(tmp_path / "run/metrics.jsonl"))


def test_each_plugin_has_its_own_helper(tmp_path: Path) -> None:
    """Fault 30: two files import a module of the same name, each from its own directory."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "its_helper.py").write_text(f"NAME = {name!r}")
        (tmp_path / name / "reward.py").write_text("from its_helper import NAME\ndef score(): return NAME")
    found = [load_function(f"{name}/reward.py:score", "reward function") for name in ("one", "two")]
    assert [function() for function in found] == ["one", "two"]


@pytest.mark.parametrize("raised", ["SystemExit(2)", "GeneratorExit()", "type('Own', (BaseException,), {})('no')"])
def test_a_plugin_that_ends_the_program_is_named(raised: str, tmp_path: Path) -> None:
    """Fault 31."""
    (tmp_path / "ends.py").write_text(f"raise {raised}")
    with pytest.raises(PluginError, match=r"ended the program when it was imported in ends\.py, line 1.*__main__"):
        load_function("ends.py:score", "reward function")


def test_ctrl_c_in_a_plugin_is_no_fault_of_it(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_function("stops.py:score", "reward function")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_layers_beside_an_adapter_are_trained_in_float32(tmp_path: Path) -> None:
    """Fault 62: in one number format at every start, and exported as they are in the checkpoint."""
    MODELS["saves_embedding"](tmp_path / "a")
    config = SETTINGS | {"policy": {"model": "a"}, "run_dir": "run", "rounds": 2}
    for rounds in (2, 3):
        swarm_node.train(config | {"rounds": rounds}, reward_funcs=[by_length], quiet=True)
    swarm_node.export("run", "out", quiet=True)
    trained = load_file(sorted((tmp_path / "run/checkpoints").glob("round*"))[-1] / "policy.safetensors")
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert len(trained) == len(written) > 4
    for name, tensor in trained.items():
        saved = written[name.replace(".modules_to_save.default", "").replace(".default", "")]
        assert tensor.dtype == saved.dtype == torch.float32 and torch.equal(tensor, saved), name


@pytest.mark.parametrize("gone", ["q.jsonl", "m"])
def test_a_run_says_from_where_its_paths_count(gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 66."""
    MODELS["ok"](tmp_path / "m")
    shutil.copy(DATA / "ok.jsonl", "q.jsonl")
    config = SETTINGS | {"tasks": ["q.jsonl"], "policy": {"model": "./m"}, "run_dir": "run", "rounds": 1, "rewards": {}}
    swarm_node.train(config, quiet=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for name in {"q.jsonl", "m"} - {gone}:
        Path(name).symlink_to(tmp_path / name)
    words = ("resume", "../run") if gone == "q.jsonl" else ("export", "../run", "out")
    code, said = run(*words)
    assert code == 2 and f"{gone} in ../run/config.toml is relative to where the run began" in said


def test_the_second_node_of_a_key_ends_and_the_first_is_told() -> None:
    """Fault 77."""
    said: list[str] = []
    card = PeerCard(PROTOCOL_VERSION, "0" * 64, 0.0, "n", ["trainer"], addresses=["/ip4/192.0.2.1/tcp/1/p2p/x"])
    twins = Twins(0.0)
    check_twins(twins, "peer", Once(said.append))
    twins.found = card
    for _ in range(2):
        check_twins(twins, "peer", Once(said.append) if not said else lambda key, line: None)
    assert len(said) == 1 and "another node at /ip4/192.0.2.1/tcp/1/p2p/x runs with this node's key" in said[0]
    twins.was_first = True
    with pytest.raises(UserError, match="It was there first, so this one ends: remove identity.key"):
        check_twins(twins, "peer", Once(said.append))


class Clock(FakeTransport):
    def __init__(self, ahead: float | None) -> None:
        super().__init__()
        self.ahead = ahead

    def clock_ahead(self) -> float | None:
        return self.ahead


@pytest.mark.parametrize(("ahead", "told"), [(None, ""), (5.0, ""), (60.0, "60 s ahead of"), (-900.0, "900 s behind")])
def test_a_wrong_clock_is_told_once(ahead: float | None, told: str) -> None:
    """Fault 78."""
    said: list[str] = []
    once = Once(said.append)
    for _ in range(2):
        say_clock(Clock(ahead), once)
    assert len(said) == bool(told) and all(told in line for line in said)
