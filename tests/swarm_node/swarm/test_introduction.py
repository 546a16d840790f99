"""What a member is told about its swarm when it first joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from swarm_node.config import NodeConfig, RewardsConfig
from swarm_node.swarm.introduction import say_what_for
from swarm_node.tasks.taskset import load_tasks
from swarm_protocol.manifest import ManifestModel, ManifestTask
from tests.support.manifests import PLAIN

GIB = 2**30


def told(tasks: list[str], free: int = 16 * GIB, gpu: bool = False, manifest: Any = PLAIN, **config: Any) -> str:
    said: list[str] = []
    task_set = load_tasks(tasks, RewardsConfig())
    say_what_for(manifest, task_set, NodeConfig.model_validate(config), said.append, lambda: (free, gpu))
    [sentence] = said
    return sentence


def test_kinds_of_questions_come_with_examples() -> None:
    lines = told(["small"]).splitlines()
    assert lines[0].endswith("7 kinds of questions: basic_arithmetic, chain_sum, fraction_simplification and 4 more")
    examples = [line for line in lines if line.startswith("  - ") and ": " in line]
    assert len(examples) == 3 and all(len(line) < 90 for line in lines[1:])
    assert "1 kind of questions: gcd" in told(["gcd"])


def test_a_stranger_s_question_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    lines = "".join(f'{{"question": "\\u001b[2J{n} and more", "answer": "2"}}\n' for n in range(40))
    (tmp_path / "q.jsonl").write_text(lines)
    assert "\x1b" not in told([str(tmp_path / "q.jsonl")])


def test_the_form_of_answers_is_shown() -> None:
    assert "answers count only in the form <answer>…</answer>" in told(["gcd"], manifest=replace(PLAIN, answer="tags"))


def test_a_swarm_s_own_model_is_named() -> None:
    with_model = replace(PLAIN, model=ManifestModel("Qwen/Qwen3-0.6B", "ab" * 32, 1_500_000_000))
    assert "its model is Qwen/Qwen3-0.6B, 1,500.0 MB, from members that have it" in told(["gcd"], manifest=with_model)


def test_who_gives_model_and_question_files_is_said() -> None:
    of_the_hub = ManifestModel("Qwen/Qwen3-0.6B", "ab" * 32, 1_500_000_000, "c" * 40)
    files = [ManifestTask(sha256=f"{n:064x}", name=name, bytes=1) for n, name in enumerate(("sums", "words", "a", "b"))]
    said = told(["gcd"], manifest=replace(PLAIN, model=of_the_hub, tasks=files[:2]))
    assert "1,500.0 MB, from the hub or members that have it" in said
    assert "its question files come from members: sums, words" in said
    sourced = [*files[:3], replace(files[3], source="https://example.org/b.jsonl")]
    said = told(["gcd"], manifest=replace(PLAIN, tasks=sourced))
    assert "its question files come from their addresses or members: sums, words, a and 1 more" in said
    assert "question files" not in told(["gcd"])


@pytest.mark.parametrize(
    ("free", "gpu", "proposed"),
    [
        (16 * GIB, False, "Qwen/Qwen2.5-0.5B-Instruct"),
        (80 * GIB, True, "Qwen/Qwen3-8B"),
        (GIB // 2, False, None),
        (0, False, None),
    ],
)
def test_a_model_is_proposed_where_none_is_named(free: int, gpu: bool, proposed: str | None) -> None:
    said = told(["gcd"], free, gpu)
    assert "yours is the starter, a toy" in said
    assert f"    --model {proposed}\n" in said if proposed else "--model" not in said
    assert ("GB to download" in said) == bool(proposed) and ("on a CPU" in said) == (bool(proposed) and not gpu)
    assert ("--model smollm2\n" in said) == (bool(proposed) and not gpu)


def test_a_proposal_says_what_it_takes() -> None:
    said = told(["gcd"], 16 * GIB, False)
    small, larger = said.index("--model smollm2"), said.index("--model Qwen/Qwen2.5-0.5B-Instruct")
    assert small < larger, "a model that trains here comes before one that only fits"
    assert "(93 MB to download; 310 times the starter's work for each token)" in said
    slow = "1,100 times the starter's work for each token,\n    so that a round takes minutes on a CPU)"
    assert f"(about 1.0 GB to download; {slow}" in said
    assert "a round takes minutes" not in told(["gcd"], 80 * GIB, True)
    little = told(["gcd"], 2 * GIB, False)
    assert "--model smollm2" in little and "minutes" not in little


def test_nothing_is_proposed_to_who_has_chosen() -> None:
    said = told(["gcd"], policy={"model": "my/model"})
    assert "yours is my/model" in said and "--model" not in said
    assert "--model" not in told(["gcd"], pipeline={"stages": 2, "crew": "home"})
