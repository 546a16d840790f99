"""Arguments of a chat template, a table of the user's own names among the settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swarm_node.config import NodeConfig, load_config
from swarm_node.config.keys import flat
from swarm_node.config.own import dump_own, own_layer
from swarm_node.errors import UserError

KEY = "policy.chat_template_kwargs"


@pytest.mark.parametrize(
    "given",
    [
        {"sets": [f"{KEY}={{enable_thinking=false, budget=8}}"]},
        {"env": {"SWARM_NODE_POLICY__CHAT_TEMPLATE_KWARGS": "{enable_thinking=false, budget=8}"}},
        {"file": Path("c.toml")},
    ],
)
def test_the_table_is_one_value_of_a_run(given: dict) -> None:
    Path("c.toml").write_text("[policy.chat_template_kwargs]\nenable_thinking = false\nbudget = 8\n")
    config = load_config(**given)
    assert config.policy.chat_template_kwargs == {"enable_thinking": False, "budget": 8}
    assert flat(config.model_dump())[KEY] == {"enable_thinking": False, "budget": 8}
    Path("config.toml").write_text(dump_own(config, config))
    assert own_layer(Path("config.toml"), print) == {
        "policy": {"chat_template_kwargs": config.policy.chat_template_kwargs}
    }
    assert NodeConfig.model_validate(own_layer(Path("config.toml"), print)) == NodeConfig(policy=config.policy)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "a b", "1"])
def test_what_the_node_gives_itself_is_no_argument(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"{name!r} cannot be an argument")):
        load_config(sets=[f'{KEY}={{"{name}"=1}}'])


@pytest.mark.parametrize("value", ["2026-01-01", "nan", "[inf]"])
def test_values_that_a_template_cannot_get(value: str) -> None:
    with pytest.raises(UserError, match="values are texts, numbers, true or false, lists and tables"):
        load_config(sets=[f"{KEY}={{a={value}}}"])


def test_trl_s_name_is_known() -> None:
    with pytest.raises(UserError, match=re.escape("did you mean policy.chat_template_kwargs?")):
        load_config(sets=["chat_template_kwargs={enable_thinking=false}"])
