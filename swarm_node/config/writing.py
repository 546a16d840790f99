"""Write a configuration as TOML, and the reference of all keys as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic.fields import FieldInfo

from swarm_node.config.keys import alternatives, subsections
from swarm_node.config.node import NodeConfig
from swarm_node.config.options import OPTIONS
from swarm_node.config.section import Section


def dump_toml(config: NodeConfig) -> str:
    """The whole configuration as TOML that `load_config` reads back to an equal one, without control characters."""
    text = tomli_w.dumps(config.model_dump(exclude_none=True))
    return "".join(c if c.isprintable() or c == "\n" else f"\\U{ord(c):08X}" for c in text)


def config_reference() -> str:
    """A Markdown table of keys, types, defaults and meanings for each section."""
    return "\n".join(_reference(NodeConfig, "", "Top level"))


def _reference(section: type[Section], prefix: str, title: str) -> Iterator[str]:
    yield f"### {title}\n\n{section.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|"
    inner = []
    for name, field in section.model_fields.items():
        parts = [(f"{prefix}{name}{suffix}", part) for suffix, part in subsections(field)]
        inner += parts
        if (f"{prefix}{name}", field.annotation) not in parts:
            meaning = f"{section.meanings()[name]} {_option_text(prefix + name)}"
            cells = f"`{prefix}{name}`", _type_text(field), _default_text(field), meaning
            yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
    yield ""
    for name, part in inner:
        yield from _reference(part, f"{name}.", f"`{name}`")


def _type_text(field: FieldInfo) -> str:
    bounds = "".join(_bound(item) for item in field.metadata)
    names = [_kind_text(kind) for kind in alternatives(field.annotation) if kind is not NoneType]
    return " or ".join(names) + bounds


def _kind_text(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _kind_text(get_args(kind)[0]) + "".join(_bound(item) for item in get_args(kind)[1:])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return "list of " + " or ".join(_kind_text(item) for item in alternatives(get_args(kind)[0]))
    if get_origin(kind) is tuple:
        return f"list of {len(get_args(kind))} {_kind_text(get_args(kind)[0])}s"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(kind, "table")


def _bound(item: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return "".join(f" {sign} {getattr(item, name)}" for name, sign in signs.items() if hasattr(item, name))


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "unset" if field.default is None else f"`{json.dumps(field.default)}`"


def _option_text(key: str) -> str:
    flags = dict.fromkeys(option.flag for option in OPTIONS if option.key == key and option.flag.startswith("--"))
    return f"Option: `{', '.join(flags)}`." if flags else ""
