"""Benchmarks of real models: their questions are those that a seed makes, runs are read from outside, rows told."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import real_learning, real_model, real_plot, real_sampling, real_trl
from benchmarks.real_held_out import as_ours
from benchmarks.real_judge import reward, right
from benchmarks.real_learning import NODE, TRL
from benchmarks.real_report import report
from benchmarks.real_sets import NEW_TOKENS, QUESTIONS, SETS, pairs, path_of, text
from swarm_node.config import RewardsConfig, load_config
from swarm_node.tasks.taskset import load_tasks
from tests.support.repository import ROOT

MOST_BYTES = 60_000
Row = dict[str, Any]


@pytest.mark.parametrize("name", SETS)
def test_the_stored_questions_are_those_that_the_seed_makes(name: str) -> None:
    stored = path_of(name).read_text()
    assert stored == text(name)
    assert len(stored) <= MOST_BYTES and len(pairs(name)) == QUESTIONS and name in NEW_TOKENS


def test_the_demo_of_a_real_model_asks_the_sums() -> None:
    [asked] = load_config(file=ROOT / "configs/demo-real.toml").tasks
    assert ROOT / str(asked) == path_of("sums")


@pytest.mark.parametrize("name", ["sums", "steps"])
def test_sums_have_the_right_answers(name: str) -> None:
    for question, answer in pairs(name).items():
        terms = re.search(r"\d+( [+-] \d+)+", question)
        assert terms is not None
        assert sum(int(each) for each in re.findall(r"[+-]?\d+", terms[0].replace(" ", ""))) == answer


def test_word_problems_have_the_right_answers() -> None:
    found = pairs("words")
    for question, answer in found.items():
        numbers = [int(each) for each in re.findall(r"\d+", question)]
        assert 0 <= answer <= 5 * 12 + 12 and len(numbers) in (2, 3)
        if "have together" in question:
            assert answer == sum(numbers)
        if "boxes with" in question:
            assert answer == numbers[0] * numbers[1] - sum(numbers[2:])
        if "gave away" in question:
            assert answer == numbers[0] - numbers[1]


def test_the_number_that_ends_an_answer_counts() -> None:
    texts = ["11 + 18 = 29", "The answer is 29.", "29 + 1 = 30", "none", "-29"]
    assert [right("29", each) for each in texts] == [True, True, False, False, False]
    chat = [[{"role": "assistant", "content": each}] for each in texts]
    assert reward(chat, chat, ["29"] * 5) == reward(texts, texts, ["29"] * 5) == [1, 1, 0, 0, 0]


def test_trl_trains_on_what_a_node_trains_on() -> None:
    file = str(path_of("sums"))
    trained = {each["prompt"][0]["content"] for each in real_trl.questions(file)}
    held_out = {task.question for task in load_tasks([file], RewardsConfig()).held_out(QUESTIONS)}
    assert trained and held_out and not trained & held_out and trained | held_out == set(pairs("sums"))


def test_adapters_of_peft_have_a_policys_names() -> None:
    ours = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert as_ours(ours.replace(".default", "")) == ours
    assert as_ours(ours) == ours and as_ours("model.norm.weight") == "model.norm.weight"


RUN = """
import json, pathlib, sys
for number in (1, 12):
    place = pathlib.Path(f"runs/local/checkpoints/round-{number:08}")
    place.mkdir(parents=True)
    (place / "policy.safetensors").write_text(str(number))
    (place / "SHA256SUMS").write_text("")
torn = pathlib.Path("runs/local/checkpoints/round-00000013")
torn.mkdir()
(torn / "policy.safetensors").write_text("torn")
pathlib.Path("runs/local/metrics.jsonl").write_text('{"reward": 0.25}\\n{"reward": 0.5}\\n{"rew')
print("said")
sys.exit(int(sys.argv[1]))
"""


def test_a_run_is_seen_from_outside(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    seen, screen = real_learning.watched([sys.executable, "-c", RUN, "0"], tmp_path, kept, 300.0, stop=True)
    assert screen == ["said"] and seen.code == 0
    assert Path(seen.adapters[-1][1]).read_text() == "12", "a checkpoint without its sums is not whole"
    assert [value for _, value in seen.rewards] == [0.25, 0.5]


def test_a_run_that_fails_is_no_row(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3:\nno"):
        fails = [sys.executable, "-c", "import sys; print('no'); sys.exit(3)"]
        real_learning.watched(fails, tmp_path, tmp_path, 300.0, stop=True)


def row(who: str, seed: int, curve: list[tuple[float, float]], part: str = "sums", first: float = 60.0) -> Row:
    looks = [{"seconds": at, "right": share, "finished": 1.0, "answers": 8} for at, share in curve]
    head = {"part": part, "set": "sums", "who": who, "seed": seed, "minutes": 10, "curve": looks}
    rewards = [(first + 12.0 * n, 0.5) for n in range(9)]
    said = ["08:00 INFO    a round takes about 15.0 s with answers of 20 tokens, their mean length so far"]
    return head | {"first_reward_s": first, "peak_rss_mib": 1000, "rewards": rewards, "screen": said}


def test_a_node_is_sooner_by_the_time_to_trls_end() -> None:
    slow = row(TRL[0], 1, [(0, 0.1), (600, 0.5)])
    rows = [row(NODE, 1, [(0, 0.1), (200, 0.9)]), slow, row(TRL[1], 1, [(0, 0.1), (600, 0.12)])]
    node, other, best = (line.split(" | ") for line in report(rows).splitlines()[2:])
    assert node[3:7] == ["0.100", "0.900", "100", "6.00"]
    assert best[4:7] == ["0.500", "600", "1.00"] and other[5:7] == ["never", "0.00"]


def test_a_rival_that_has_not_learned_is_no_level() -> None:
    text = report([row(NODE, 1, [(0, 0.1), (200, 0.9)]), row(TRL[0], 1, [(0, 0.1), (600, 0.12)])])
    assert text.count("TRL has not learned") == 2


def test_the_bar_wants_both() -> None:
    curve = [(0.0, 0.1), (600.0, 0.7)]
    rows = [row(NODE, 1, curve, "default"), row(NODE, 2, curve, "default", first=91.0)]
    rows.append(row(NODE, 3, [(0, 0.1), (600, 0.5)], "default"))
    assert ": 1 of 3 runs" in report(rows)
    assert "seed 2: 15.0 s, 12.0 s, +25%" in report(rows)
    assert report([]) == "no rows yet"


def test_rows_are_run_in_their_order() -> None:
    wanted = argparse.Namespace(parts=["default", "steps"], quick=False, arms=[NODE, TRL[0]], seeds=[1])
    found = [(name, who, seed) for name, who, seed, _ in real_learning.asked_for(wanted)]
    assert found == [("default", NODE, 1), ("default", TRL[0], 1), ("steps", NODE, 1), ("steps", TRL[0], 1)]
    every = list(real_learning.asked_for(argparse.Namespace(parts=["default"], quick=False, arms=None, seeds=None)))
    assert [who for _, who, seed, _ in every if seed == 1] == [NODE, *TRL, real_learning.FALLING]
    assert [who for _, who, seed, _ in every if seed == 3] == [NODE, TRL[0]]


def test_what_is_there_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_learning, "FOLDER", tmp_path)
    file = real_learning.file_of("default", NODE, 1)
    file.write_text(json.dumps(row(NODE, 1, [(0, 0.1), (600, 0.7)], "default")))
    monkeypatch.setattr(real_learning, "run", lambda *args: pytest.fail("it is there, or does not end in time"))
    command = ["--parts", "default", "steps", "--arms", NODE, "--model", str(tmp_path), "--minutes", "15", "--missing"]
    command += ["--seeds", "1"]
    monkeypatch.setattr(real_learning, "folder_of", lambda model: model)
    real_learning.main(command)
    real_learning.main(["--report"])
    assert "1 of 1 runs (seed 1: 60.0 s, +0.600, +0.5 after 500 s)" in capsys.readouterr().out


def test_curves_of_all_who_ran_are_drawn(tmp_path: Path) -> None:
    runs = [(0, 0.1), (300, 0.5), (600, 0.7)], [(0, 0.1), (300, 0.2)]
    rows = [row(NODE, 1, runs[0]), row(NODE, 2, runs[1]), row(TRL[0], 1, runs[1])]
    sizes = []
    for drawn in ([rows[0]], rows):
        real_plot.plot(drawn, tmp_path / "plot.png")
        sizes.append(len((tmp_path / "plot.png").read_bytes()))
    assert 1000 < sizes[0] < sizes[1]


def arm(who: str, weights: str, seconds: float, **more: Any) -> Row:
    values = "cpu", real_model.REAL, weights, real_model.LORA, 0, 1, 16, who
    times = {"step": [seconds] * 3, "sampling": [seconds / 2] * 3, "update": [seconds / 2] * 3, "tokens": [128] * 3}
    figures = {"times": times, "peak_mib": 100.0, "checkpointing": False}
    return dict(zip(real_model.KEY, values, strict=True)) | figures | more


def test_the_chosen_dtype_is_compared_with_the_faster_one() -> None:
    arms = [arm(real_model.OURS, "float32", 2.0), arm(real_model.OURS, "bfloat16", 4.0)]
    arms += [arm(real_model.TRL, "float32", 6.0, peak_mib=250.0)]
    arms += [arm(real_model.OURS, "auto", 4.2, dtype="bfloat16", limit_step_s=2.1, limit=100.0)]
    assert real_model.compared(arms) == [
        "lora, 16 tokens, float32: TRL takes 3.0x the time and 2.5x the memory",
        "lora, 16 tokens, auto takes bfloat16, +100% of the faster one, float32",
    ]
    assert real_model.line_of(arms[-1])[1] == "auto: bfloat16" and real_model.line_of(arms[-1])[-2] == "2.0"


def test_vllm_has_a_column_only_if_it_was_measured() -> None:
    values = ("cpu", "native", "float32", 16, 64)
    native = dict(zip(real_sampling.KEY, values, strict=True)) | {"seconds": [4.0, 4.0, 8.0]}
    assert real_sampling.report([native]).splitlines()[-1] == "| float32 | 16 | 64 | 256 (128 to 256) |"
    other = native | {"who": "vLLM", "seconds": [8.0, 8.0, 8.0]}
    assert real_sampling.report([native, other]).splitlines()[-1].endswith("| 128 (128 to 128) | 2.0x |")
    failed = native | {"who": "vLLM", "failed": "ended"}
    del failed["seconds"]
    assert real_sampling.report([native, failed]).splitlines()[-1].endswith("| ended |  |")
