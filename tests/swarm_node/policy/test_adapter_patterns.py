"""Patterns of a stranger's adapter, which PEFT would match for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarm_node.errors import UserError
from swarm_node.policy import adapter_patterns
from swarm_node.policy.adapter_patterns import MAX_NAMES, check_patterns

NAMES = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(3) for part in "qkvo"] + ["model." + 40 * "a"]
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp).*?(?:k_proj|v_proj|q_proj).*?)|(?:\bmodel\.layers)"
)


def adapter(folder: Path, **config: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "(.*a*)*(a+a+)+$"]},  # a list has names, no patterns
        {"target_modules": "all-linear"},
        {"target_modules": UNSLOTH, "exclude_modules": r".*\.0\..*"},
        {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}, "layers_pattern": "layers"},
    ],
)
def test_patterns_as_people_have_them_pass(config: dict[str, Any], tmp_path: Path) -> None:
    check_patterns(adapter(tmp_path, **config), NAMES)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "(.*a*)*(a+a+)+$b"},
        {"exclude_modules": r"((a|b|model|layers|proj|_|\.|[0-9a-z])+)+!"},
        {"target_modules": ["q_proj"], "rank_pattern": {"(a|a.|.a)+b": 4}},
        {"target_modules": ["q_proj"], "alpha_pattern": {"(": 4}},
        {"target_modules": ["q_proj"], "layers_pattern": ["layers", "(a|a.|.a)+b"]},
    ],
    ids=lambda config: json.dumps(config),
)
def test_patterns_without_end_are_refused(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_patterns, "CPU_S", 1)
    with pytest.raises(UserError, match="cannot be matched with the names of modules"):
        check_patterns(adapter(tmp_path, **config), NAMES)


def test_endless_lists_of_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more than 20,000 modules"):
        check_patterns(adapter(tmp_path, target_modules=[f"m{i}" for i in range(MAX_NAMES + 1)]), NAMES)
