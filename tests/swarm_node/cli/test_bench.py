import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.cli.commands import bench
from swarm_node.cli.commands.bench import Arm, BenchRequest, Result, Spec, StepWork, describe, quartiles, table
from swarm_node.cli.commands.bench_arms import endless_engine, goes_on, measure_arm, rewards
from swarm_node.config import NodeConfig, PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import dtypes
from swarm_node.policy.loading import load_policy
from swarm_node.types import Sampling

REQUEST = BenchRequest(minutes=10.0, group_size=2, length=4, prompts=1, file=None)


def arm(step: list[float], **values: Any) -> Arm:
    usual = {
        "engine": "native",
        "device": "cpu",
        "device_bytes": 0,
        "threads": 1,
        "dtype": "float32",
        "parameters": 438_912,
        "lora": False,
        "prompts": 1,
        "step_s": step,
        "sampling_s": step,
        "tokens": [8] * len(step),
        "peak_bytes": 2**29,
    }
    return msgspec.convert(usual | values, Arm)


def config(model: str = "starter") -> NodeConfig:
    return NodeConfig.model_validate({"policy": {"model": model}})


@pytest.mark.slow
def test_both_arms_do_the_same_work() -> None:
    results = bench.measure_arms(config(), REQUEST, lambda sentence: None, repeats=1)
    ours, trl = results["ours"], results["trl"]
    assert not ours.failed and not trl.failed
    for result in (ours, trl):
        [one] = result.arms
        assert one.tokens == [8] * bench.STEPS == [8] * len(one.step_s)  # 2 answers of 4 tokens: no token ends them
        assert all(0 < sampling < step for sampling, step in zip(one.sampling_s, one.step_s, strict=True))
        assert 2**27 < one.peak_bytes < 2**32
    assert (ours.arms[0].dtype, ours.arms[0].threads) == (trl.arms[0].dtype, trl.arms[0].threads)
    document = json.loads(json.dumps(describe(config(), REQUEST, results)))
    assert document["arms"]["ours"]["engine"] == "native" and document["arms"]["trl"]["engine"].startswith("TRL")
    assert any(line.startswith("TRL takes ") for line in table(document))


def test_the_type_is_chosen_for_the_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[NodeConfig] = []
    monkeypatch.setattr(dtypes, "bf16_slowdown", lambda hidden: 1.0)
    monkeypatch.setattr(dtypes, "short_round", lambda policy, config: timed.append(config) or 1.0)
    adapter = {"model": "starter", "lora": True, "lora_rank": 2, "device": "cpu"}
    measure_arm(Spec("ours", adapter, StepWork(prompts=1, group_size=6, new=4, steps=1)))
    found = [(each.rollouts.group_size, each.rollouts.max_new_tokens, each.grpo.answers) for each in timed]
    assert found == [(6, 4, 0)] * 2, "all answers are trained on"


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_no_token_ends_an_answer(kind: Any) -> None:
    policy = load_policy(PolicyConfig(), RolloutsConfig(engine=kind), lambda sentence: None)
    prompt, sampling = policy.encode("What is 3 + 4?"), Sampling(24)
    assert any(rollout.finished for rollout in policy.generate([prompt], 8, sampling, [1])[0])
    before = type(policy.engine)
    policy.engine = endless_engine(policy)
    [rollouts] = policy.generate([prompt], 8, sampling, [1])
    assert type(policy.engine) is before and {len(rollout.token_ids) for rollout in rollouts} == {24}


def test_time_that_does_not_suffice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(spec: Spec, seconds: float, say: Callable[[str], None]) -> Arm | str:
        asked.append(spec.side)
        return arm([1.0]) if spec.side == "ours" else bench.OUT_OF_MEMORY if not spec.checkpointing else "too slow"

    monkeypatch.setattr(bench, "run", run)
    results = bench.measure_arms(config(), REQUEST, lambda sentence: None)
    assert asked == ["ours", "trl", "trl", "ours", "ours"]
    assert results["trl"].failed == "too slow" and results["trl"].checkpointing and len(results["ours"].arms) == 3


def test_repeats_that_time_does_not_allow_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run", lambda spec, seconds, say: arm([1.0]))
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    said: list[str] = []
    results = bench.measure_arms(config(), replace(REQUEST, minutes=0.0), said.append)
    assert said == ["swarm-node, 1 of 3 …", "time was up after 1 of 3: --minutes gives more"]
    assert len(results["ours"].arms) == 1


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="--length 200: this model takes at most 128"):
        bench.run(Spec("ours", config().policy.model_dump(mode="json"), StepWork(1, 2, 200)), 600, print)


@pytest.mark.parametrize(
    ("script", "reason", "said"),
    [
        ("echo 'OSError: /srv/secret/model is gone' >&2; exit 1", "OSError", ["OSError: /srv/secret/model is gone"]),
        ("echo '/srv/secret: not found' >&2; exit 3", "exit code 3", ["/srv/secret: not found"]),
        ('echo \'{"failed": "no /srv/s", "refused": true}\'', "it does not load this model", ["no /srv/s"]),
        ("kill -9 $$", "ended by signal 9, probably for want of memory", []),
    ],
)
def test_a_process_that_dies_says_why_without_paths(
    script: str, reason: str, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, told = tmp_path / "python", list[str]()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert bench.run(Spec("trl", {}, StepWork(1, 2, 4)), 60, told.append) == reason
    assert told == said


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("arm", 1)

    monkeypatch.setattr(subprocess, "run", late)
    assert "no step ended in time" in str(bench.run(Spec("trl", {}, StepWork(1, 2, 4)), 1, print))


def test_steps_end_when_another_would_be_late() -> None:
    work = StepWork(1, 2, 4, steps=3, warmup=1, until=100.0)
    assert goes_on(1, 50.0, work, now=99.0)  # one step after the warm-up is always done
    assert goes_on(2, 50.0, work, now=50.0) and not goes_on(2, 50.0, work, now=50.1)
    assert goes_on(3, 1.0, work, now=0.0) and not goes_on(4, 1.0, work, now=0.0)


def test_rewards_give_each_group_a_signal() -> None:
    assert rewards(4) == [0.0, 1.0, 0.0, 1.0]


def test_the_table_has_quartiles_and_ratios() -> None:
    ours = Result([arm([1.0, 2.0, 3.0]), arm([2.0, 2.5, 1.0])])
    trl = Result([arm([4.0, 4.0, 4.0], engine="TRL 1.16.0"), arm([8.0, 8.0, 8.0])], checkpointing=True)
    lines = table(describe(config(), REQUEST, {"ours": ours, "trl": trl}))
    assert any(
        line.startswith("| swarm-node, native") and "| 2 (1.25-2.38) " in line and "| 512" in line for line in lines
    )
    assert any(line.startswith("| TRL 1.16.0, checkpointing") and "| 6 (4-8) " in line for line in lines)
    assert "TRL takes 3.0 times as long a step (2.5 to 3.5)" in lines
    once = table(describe(config(), REQUEST, {"ours": Result([arm([2.0])]), "trl": Result([arm([3.0])])}))
    assert lines[-1].startswith(
        "medians (quartiles) of all steps after the first of each process (swarm-node 6, TRL 6);"
    )
    assert "TRL takes 1.5 times as long a step; with so few steps, that is rough" in once and any(
        "native | 2 " in line and "(" not in line for line in once
    )
    assert quartiles([]) == [] and quartiles([1.0]) == [1.0, 1.0, 1.0]


def test_a_failed_or_missing_rival_is_said() -> None:
    ours = Result([arm([1.0, 2.0])])
    lines = table(describe(config(), REQUEST, {"ours": ours, "trl": Result([], "out of memory")}))
    assert any("failed: out of memory" in line for line in lines)
    assert any("TRL is not installed" in line for line in table(describe(config(), REQUEST, {"ours": ours})))
    with pytest.raises(UserError, match="nothing was measured: swarm-node: killed"):
        describe(config(), REQUEST, {"ours": Result([], "killed")})


def test_the_file_names_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "secret" / "my-model"
    folder.mkdir(parents=True)
    document = describe(config(str(folder)), REQUEST, {"ours": Result([arm([1.0])])})
    assert document["model"] == "my-model"
    assert "secret" not in json.dumps(document)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "./nowhere"], "no model at nowhere"),
        (["--quantize", "nf3"], "policy.quantize"),
    ],
)
def test_wrong_options_are_refused_at_once(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *args], prog_name="swarm-node")
    assert done.exit_code == 2 and message in " ".join(done.stderr.split())
