"""A run's own settings: its config.toml, where a later start of the run begins.

    # given: rollouts.max_new_tokens tasks      what its user had set, for a few keys mean more if a user names them
    rounds = 60                                 the whole configuration, resolved
    ...

A later start takes from it what its user had set, and what is not the default (any more): a new version's defaults do
not change a run.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic import ValidationError

from swarm_node.config.explaining import explain
from swarm_node.config.node import NodeConfig
from swarm_node.config.writing import dump_toml
from swarm_node.errors import UserError

Table = dict[str, Any]
GIVEN = "# given:"
FROM_THE_SWARM = {"tasks", "policy.model", "policy.revision", "seed"}
"""What a member takes from its swarm unless its user has set it; the next start takes it from there again."""
GIVEN_ANEW = {
    *("swarm", "name", "run_dir", "rounds", "minutes", "log", "log_format", "price_per_hour"),
    *("network", "guest", "checkpoints", "metrics", "spot", "health"),
}
"""Settings that change nothing about what is learned: a change of one is not said, and keeps no earlier file."""
UNSAID = {"swarm", "name", "run_dir", "rounds", "minutes"}
"""Settings that a later start takes over without a word, since it shows them anyway. It names all others: --relay or
--max-cpu stay in force even if they are not given again."""
SECRET = "pipeline.crew"
"""The name of a crew is its password: it is on no screen."""
MAX_LISTED = 8
"""Settings in one sentence; more do not help."""
MAX_VALUE_CHARS = 60
"""Of a value in a sentence: system prompts are long."""
HOW_LONG = {"rounds", "minutes"}
"""A start that gives one of these takes neither from the run: 60 rounds done must not end `--minutes 5` at once."""


def dump_own(config: NodeConfig, asked: NodeConfig) -> str:
    """config.toml of a run that goes by `config`, of which its user had set the fields set in `asked`."""
    given = sorted(flat(asked.model_dump(mode="json", exclude_unset=True)))
    return f"{' '.join([GIVEN, *given])}\n{dump_toml(config)}"


def read_own(file: Path, say: Callable[[str], None] = lambda sentence: None) -> NodeConfig:
    """The configuration in a run's config.toml. A key that this version does not know is said and left out.

    Raises UserError if the file cannot be read, or another value in it is wrong.
    """
    return NodeConfig.model_validate(_known(file, _read(file), say))


def own_layer(file: Path, say: Callable[[str], None]) -> Table:
    """What a later start begins with, of a run's config.toml, as a partial table. Raises as `read_own`."""
    text = _read(file)
    table = _known(file, text, say)
    first = text.partition("\n")[0]
    given = set(first.removeprefix(GIVEN).split()) if first.startswith(GIVEN) else None
    usual = flat(NodeConfig().model_dump(mode="json"))
    kept = {
        key: value
        for key, value in flat(table).items()
        if (given is not None and key in given)
        or (value != usual.get(key) and (given is None or key not in FROM_THE_SWARM))
    }
    return _nested(kept)


def say_kept(own: Table, above: Table, directory: Path, say: Callable[[str], None]) -> None:
    """Say which settings of the run a start goes by without naming them: those that nothing `above` gives."""
    named = flat(above)
    words = [
        f"{key} = {shown(key, value)}" for key, value in flat(own).items() if key not in named and key not in UNSAID
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
    return shorten(text, MAX_VALUE_CHARS, placeholder=" …")


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found: Table = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _nested(table: Table) -> Table:
    """Undo `flat`."""
    nested: Table = {}
    for key, value in table.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return nested


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the run's settings {file}: {error}") from None


def _known(file: Path, text: str, say: Callable[[str], None]) -> Table:
    """The table in `text`, without keys that this version does not know."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}") from None
    while True:
        try:
            NodeConfig.model_validate(table)
            return table
        except ValidationError as error:
            unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
            if not any([_take_out(table, location) for location in unknown]):  # all of them, so that it is said once
                raise UserError(explain(error, str(file))) from None
            say(f"{file} has settings that this version does not know; left out: {', '.join(map(_dotted, unknown))}")


def _take_out(table: Table, location: Collection[int | str]) -> bool:
    """Whether there was something at `location`, which is outside of any list."""
    *sections, name = location
    place: Any = table
    for section in sections:
        place = place.get(section) if isinstance(place, dict) else None
    if not isinstance(place, dict) or name not in place:
        return False
    del place[name]
    return True


def _dotted(location: Collection[int | str]) -> str:
    return ".".join(map(str, location))
