"""A run's own settings: its config.toml, from which a later start of the run takes them.

    # given: rollouts.max_new_tokens tasks      keys that the user had set
    # code: 4f1a…                               only with code, such as reward functions: see `own_code`
    rounds = 60                                 the whole configuration, resolved
    ...

A later start takes the keys that the user had set, and values that differ from the defaults of this version. So a new
version's defaults do not change a run, but for what it works out where a key is unset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from textwrap import shorten

from pydantic import ValidationError

from swarm_node.config.explaining import explain
from swarm_node.config.keys import Table, flat, merged, nest
from swarm_node.config.node import NodeConfig
from swarm_node.config.own_code import mark_of
from swarm_node.config.writing import dump_toml
from swarm_node.errors import UserError
from swarm_node.say import Warned
from swarm_protocol.errors import printable
from swarm_protocol.plain_toml import parsed_toml

GIVEN = "# given:"
FROM_THE_SWARM = {
    *("tasks", "seed", "policy.model", "policy.revision"),
    *("rewards.answer", "policy.system_prompt", "policy.prompt_template"),
}
"""Keys that a member takes from its swarm at each start, unless the user has set them."""
WORKED_OUT = {"policy.dtype", "rollouts.max_new_tokens", "sharing.own"}
"""Keys whose values a start works out itself, from other settings or by measuring, unless the user has set them."""
GIVEN_ANEW = {
    *("swarm", "name", "run_dir", "rounds", "minutes", "log", "log_format", "price_per_hour"),
    *("network", "resources", "checkpoints", "metrics", "spot", "health"),
}
"""Settings that do not affect learning. A change of one is not reported and keeps no copy of the earlier file."""
UNREPORTED = {"swarm", "name", "run_dir", "rounds", "minutes"}
"""Settings that a later start does not report, because it shows them anyway. It reports all others: --relay or
--max-cpu stay in force even if they are not given again."""
SECRET = "pipeline.crew"  # the name of a crew is its password, so it is never shown
GONE = {
    "truncated_sequence": "benchmarks.corrections:TruncatedSequence",
    "icepop": "benchmarks.corrections:IcePop",
}
"""Values of `grpo.correction` in earlier versions, and the plugin that is the same."""
MAX_LISTED = 8  # most settings in one sentence
MAX_VALUE_CHARS = 60  # longest value in a sentence; system prompts are longer
MAX_BYTES = 1 << 20  # a longer config.toml is not read
HOW_LONG = {"rounds", "minutes"}
"""A start that sets one of these takes neither from the run: 60 rounds done must not end `--minutes 5` at once."""


def dump_own(config: NodeConfig, asked: NodeConfig) -> str:
    """The text of config.toml for a run with `config`; the user had set those fields that are set in `asked`."""
    given = sorted(flat(asked.model_dump(mode="json", exclude_unset=True)))
    return f"{' '.join([GIVEN, *given])}\n{mark_of(config)}{dump_toml(config)}"


def read_toml(file: Path, what: str) -> Table:
    """The table in a file, which is `what` in messages. It may be somebody else's, so it must be a regular file of
    bounded size. Raises UserError."""
    try:
        if file.exists() and (not file.is_file() or file.stat().st_size > MAX_BYTES):
            raise UserError(f"cannot read {what} {file}: it is no file, or has more than {MAX_BYTES:,} bytes")
        return parsed_toml(file.read_bytes().decode())
    except OSError as error:
        raise UserError(f"cannot read {what} {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid TOML: {error or 'too deep'}") from None


def read_own(file: Path, say: Callable[[str], None] = lambda sentence: None) -> NodeConfig:
    """The configuration in a run's config.toml. A key that this version does not know is reported and left out. Raises
    UserError if the file cannot be read, or another value in it is wrong."""
    table = read_toml(file, "the run's settings")
    grpo = table.get("grpo")
    gone = grpo.get("correction") if isinstance(grpo, dict) else None
    if isinstance(gone, str) and gone in GONE:
        del table["grpo"]["correction"]
        say(Warned(f'{file} has grpo.correction = "{gone}", which is no more; a clone has it as {GONE[gone]}'))
    try:
        config = NodeConfig.model_validate(table, extra="ignore")
    except ValidationError as error:
        raise UserError(explain(error, str(file))) from None
    if unknown := ", ".join(_unknown(table)):
        say(Warned(f"{file} has settings that this version does not know; left out: {unknown}"))
    return config


def _unknown(table: Table) -> list[str]:
    """The keys in a table of a configuration that this version does not know."""
    try:
        NodeConfig.model_validate(table)
    except ValidationError as error:
        return [".".join(map(str, each["loc"])) for each in error.errors() if each["type"] == "extra_forbidden"]
    return []


def own_layer(file: Path, say: Callable[[str], None]) -> Table:
    """The part of a run's config.toml that a later start takes. Raises UserError as `read_own` does."""
    table = read_own(file, say).model_dump(mode="json", exclude_unset=True)
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    given = set(first.removeprefix(GIVEN).split()) if first.startswith(GIVEN) else None
    usual = flat(NodeConfig().model_dump(mode="json"))
    kept = {
        key: value
        for key, value in flat(table).items()
        if (given is not None and key in given)
        or (value != usual.get(key) and (given is None or key not in FROM_THE_SWARM | WORKED_OUT))
    }
    return reduce(merged, (nest(key, value) for key, value in kept.items()), {})


def say_kept(own: Table, above: Table, directory: Path, say: Callable[[str], None]) -> None:
    """Report the settings that a start takes from the run: those that no source `above` sets."""
    named = flat(above)
    words = [
        f"{key} = {in_brief(key, value)}"
        for key, value in flat(own).items()
        if key not in named and key not in UNREPORTED
    ]
    if words:
        say(f"{directory} goes on with its own settings: {listed(words)}")


def listed(words: Sequence[str]) -> str:
    """The first few of `words`, and how many more there are."""
    more = f", and {len(words) - MAX_LISTED} more" if len(words) > MAX_LISTED else ""
    return ", ".join(words[:MAX_LISTED]) + more


def shown(key: str, value: object) -> str:
    """The value of a setting in a sentence."""
    if key == SECRET:
        return "(hidden)"
    text = "unset" if value is None else value if isinstance(value, str) and value else json.dumps(value)
    return shorten(printable(text), MAX_VALUE_CHARS, placeholder=" …")


def in_brief(key: str, value: object) -> str:
    """`shown`, but tables in a list have their names and weights alone, as `brevity×0.2`; an empty list is `none`."""
    if value == []:
        return "none"
    if not isinstance(value, list) or not any(isinstance(each, dict) for each in value):
        return shown(key, value)
    tables = [each if isinstance(each, dict) else {"env": each} for each in value]
    names = [str(each.get("path") or each.get("file") or each.get("env")).rpartition(":")[2] for each in tables]
    weights = [each.get("weight", 1) for each in tables]
    words = (name if weight == 1 else f"{name}×{weight:g}" for name, weight in zip(names, weights, strict=True))
    return shorten(printable(", ".join(words)), MAX_VALUE_CHARS, placeholder=" …")
