"""The tables of memory and models in docs/own-model.md are what the estimate says; recipes fit their machines."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from scripts.model_sizes import GPUS, HEAD, MACHINES, MAIN_MEMORY, PAGE, RECIPES, ROOT, recipe, recipes, table
from swarm_node.config import load_config
from swarm_node.policy.fitting import Hardware, Training, option_that_fits
from swarm_node.policy.sizes import KNOWN


def test_the_page_has_the_table_of_the_estimate() -> None:
    rows = table().removeprefix(HEAD).splitlines()
    assert len(rows) == len(MAIN_MEMORY) + len(GPUS)
    for each in (table(), recipes()):
        assert each + "\n" in PAGE.read_text(), "run scripts/model_sizes.py --write"


def test_the_page_has_the_bytes_that_8_bits_save() -> None:
    text = " ".join(PAGE.read_text().split())
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-1.7B"):
        shape = next(model for model in KNOWN if model.name == name).whole()
        saved = shape.optimiser - replace(shape, adamw_8bit=True).optimiser
        assert f"{saved / 2**30:.1f} of {shape.optimiser / 2**30:.1f} GiB" in text


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_a_recipe_fits_each_machine_of_the_table(name: str, machine: Hardware) -> None:
    training = recipe(name, machine)
    if not training.fits(machine):
        words = shlex.split(option_that_fits(training, machine))
        assert words and "--model" not in words, "a machine of the table carries it"
        sets = [f"policy.quantize={words[1]}"] if words[0] == "--quantize" else [words[1]]
        config = load_config(ROOT / "configs" / f"{name}.toml", sets=sets)
        width = 2 if machine.gpu or config.policy.dtype == "bfloat16" else 4
        training = Training(training.model, config, True, width)
    assert training.least_bytes(machine.gpu) <= machine.room < machine.available


@pytest.mark.parametrize("name", [*RECIPES, "lora"])
def test_a_recipe_says_what_was_measured(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.toml")
    text = (ROOT / "configs" / f"{name}.toml").read_text()
    assert config.policy.lora and config.grpo.gradient_checkpointing == "auto"
    assert "not run yet" in text.lower(), "no table of this file's own figures exists"
