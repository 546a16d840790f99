"""Values from files that may be anybody's, in bounded size for the page."""

from __future__ import annotations

from typing import Any

TEXT = 4000  # most characters shown of a sentence (TEXT), and of shorter texts (NAME)
NAME = 200
ITEMS = 1000  # most items shown of a list or table in the status


def cut_text(value: Any, most: int = NAME) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def within(table: Any, *keys: str) -> Any:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def bounded_value(value: Any, depth: int = 8) -> Any:
    """A JSON value with bounded texts and lists, and with numbers that floats can hold."""
    if isinstance(value, str):
        return cut_text(value, TEXT)
    if isinstance(value, dict) and depth:
        return {cut_text(key): bounded_value(item, depth - 1) for key, item in list(value.items())[:ITEMS]}
    if isinstance(value, list) and depth:
        return [bounded_value(item, depth - 1) for item in value[:ITEMS]]
    return value if value is None or isinstance(value, bool | int | float) else None
