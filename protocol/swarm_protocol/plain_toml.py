"""TOML of strangers: of a manifest, and of the settings in a run directory."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

MAX_DOTS = 200
"""Dots in one line, enough for 64 addresses. tomllib takes half a minute and gigabytes over a key of 30,000 parts."""
MAX_WORK = 10**6
"""Squares of the dots of each line, in all: so tomllib's time grows, and takes ten seconds at 10**8."""
MAX_INT = 2**63  # of TOML, which tomllib does not check; Python refuses to write integers of thousands of digits
TEXTS = re.compile(r'"(?:[^"\\\n]|\\.)*"?|\'[^\'\n]*\'?')
"""Texts in quotes, up to the end of the line where the second quote is missing: else each quote in the rest of the line
would be tried as the first, in time that grows with its square."""


def parsed_toml(text: str) -> dict[str, Any]:
    """The table in a TOML text, in which at most MAX_DOTS dots of a line are outside of strings, few lines have so
    many, and no integer is beyond MAX_INT. Raises ValueError and RecursionError."""
    without = text if '"""' in text or "'''" in text else TEXTS.sub("", text)
    dots = [line.count(".") for line in without.split("\n")]
    if max(dots) > MAX_DOTS:
        raise ValueError(f"a line with more than {MAX_DOTS} dots")
    if sum(count**2 for count in dots) > MAX_WORK:
        raise ValueError("too many lines with many dots")
    table = tomllib.loads(text)
    if any(abs(number) > MAX_INT for number in _integers(table)):
        raise ValueError(f"an integer beyond {MAX_INT}")
    return table


def _integers(table: dict[str, Any]) -> Iterator[int]:
    """The integers in a table, at any depth."""
    waiting: list[Any] = [table]  # a stranger's tables may be nested deeper than Python calls functions
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int):
            yield value
