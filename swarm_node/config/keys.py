"""Every key of the configuration, the parts of its type, and tables of keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from swarm_node.config.node import NodeConfig
from swarm_node.config.section import Section

Table = dict[str, Any]  # nested, as in a TOML file
OPTION_TABLES = {"policy.chat_template_kwargs"}  # keys whose value is a table of the user's own names
VARIABLE_PREFIX = "SWARM_NODE_"  # start of the names of environment variables
FILE_SUFFIX = "_FILE"  # end of the name of a variable that names a file with the value: a mounted secret


@cache
def all_keys(section: type[Section] | None = None, prefix: str = "") -> dict[str, FieldInfo]:
    """Every key with its field, sections included: `grpo`, `grpo.loss`, `tasks`, `tasks[].env`."""
    keys = {}
    for name, field in (section or NodeConfig).model_fields.items():
        keys[prefix + name] = field
        for suffix, part in subsections(field):
            keys |= all_keys(part, f"{prefix}{name}{suffix}.")
    return keys


@cache
def all_meanings(section: type[Section] | None = None, prefix: str = "") -> dict[str, str]:
    """Every key that is documented, with its documentation."""
    found = {f"{prefix}{name}": meaning for name, meaning in (section or NodeConfig).meanings().items()}
    for name, field in (section or NodeConfig).model_fields.items():
        for suffix, part in subsections(field):
            found |= all_meanings(part, f"{prefix}{name}{suffix}.")
    return found


def subsections(field: FieldInfo) -> Iterator[tuple[str, type[Section]]]:
    """The sections that a field holds: ("", S) for `S` itself, ("[]", S) for a list that may hold some."""
    for kind in alternatives(field.annotation):
        if _is_section(kind):
            yield "", kind
        if get_origin(kind) is list:
            yield from (("[]", item) for item in alternatives(get_args(kind)[0]) if _is_section(item))


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """`A | B` -> (A, B), anything else alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def nest(key: str, value: object) -> Table:
    """("a.b", 1) -> {"a": {"b": 1}}."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[return-value]


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """{"a": {"b": 1}} -> {"a.b": 1}; a table of `OPTION_TABLES` is one value."""
    found: Table = {}
    for key, value in table.items():
        is_section = isinstance(value, Mapping) and prefix + key not in OPTION_TABLES
        found |= flat(value, f"{prefix}{key}.") if is_section else {prefix + key: value}
    return found


def merged(below: Table, above: Table) -> Table:
    """`above` over `below`: sections are merged key by key, all other values are replaced."""
    both = dict(below)
    for key, value in above.items():
        are_tables = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if are_tables else value
    return both
