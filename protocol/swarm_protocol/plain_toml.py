"""TOML of strangers: of a manifest, and of the settings in a run directory."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_DOTS = 200
"""Dots in one line, enough for 64 addresses. tomllib takes half a minute and gigabytes over a key of 30,000 parts."""
TEXTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')


def parsed_toml(text: str) -> dict[str, Any]:
    """The table in a TOML text, in which at most MAX_DOTS dots of a line are outside of strings. Raises ValueError and
    RecursionError."""
    without = text if '"""' in text or "'''" in text else TEXTS.sub("", text)
    if any(line.count(".") > MAX_DOTS for line in without.split("\n")):
        raise ValueError(f"a line with more than {MAX_DOTS} dots")
    return tomllib.loads(text)
