"""What some of the library's generators need before they may run unattended.

A generator that does not return stalls the whole node, and a peer could choose the index that does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DIVIDEND_DIGITS = 24
"""Up to here all divisors of a number are found in well under a second."""

ENDLESS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "arc_1d": (
        lambda c: c.max_size > 30,
        "max_size above 30: some rules hardly ever find a grid of that size",
    ),
    "base_conversion": (
        lambda c: c.min_base == c.max_base,
        "min_base equals max_base: it wants two bases",
    ),
    "basic_arithmetic": (
        lambda c: (
            "/" in c.operators
            and (c.max_terms * c.max_digits > MAX_DIVIDEND_DIGITS or (not c.allow_parentheses and c.max_digits > 5))
        ),
        "division of such long numbers: it lists all divisors; lower max_terms or max_digits",
    ),
    "bf": (
        lambda c: c.difficulty > 2,
        "difficulty 3: counters overflow, some programs never halt",
    ),
    "calendar_arithmetic": (lambda c: c.offset_upper_bound < 1, "offset_upper_bound below 1: no date fits"),
}
"""Environment -> options with which an item can take for ever, and why."""


def tame(name: str) -> None:
    """Replace what is noisy or slow in the generator of environment `name`; its items stay the same."""
    if name == "bf":
        from reasoning_gym.code.contrib.bfit.Compiler import Optimizer

        Optimizer.print = lambda *args, **kwargs: None  # prints a dot for each optimisation it makes
    if name == "basic_arithmetic":
        from reasoning_gym.arithmetic import basic_arithmetic

        basic_arithmetic.find_common_divisors = common_divisors


def common_divisors(a: int, b: int) -> list[int]:
    """Divisors d of g = gcd(a, b) in the library's order: by the smaller of d and g/d, that one first.

    The library tries every number up to sqrt(g), which takes a minute for g = 10^18; with default options,
    one item in 20 000 takes it longer than a second.
    """
    from math import gcd

    from sympy import divisors

    common = gcd(a, b)
    ordered = []
    for small in divisors(common) if common else ():
        if small * small > common:
            break
        ordered.append(small)
        if small * small != common:
            ordered.append(common // small)
    return ordered
