"""The values of expressions, and whether two expressions have the same ones.

    tree -> exact fractions, or numbers of 50 digits -> the same at every point that is tried?

The size of every intermediate value is bounded before it is computed, so `10^{10^{10}}` is refused. The operations of a
verdict are counted and bounded as well (`WorkDone`). So every machine comes to the same verdict in bounded time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from hashlib import sha256
from typing import Any

from swarm_node.tasks.judging.expressions import Expression, Unreadable

MAX_BITS = 4096  # of an exact fraction's halves, and of the exponent of any other value
MAX_FACTORIAL = 200
POINTS, TRIES = 3, 8  # points at which two expressions must agree, of so many that are tried
MAX_WORK = 3_000  # of a verdict: operations of a few microseconds each
_WORK = dict.fromkeys(("call", "log", "root", "pow"), 20)  # of an operation that takes longer
_WORK_BITS = 256  # of a fraction, that take as long as one more operation

_INVERSE = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}

Value = Any  # a Fraction, or a real or complex number of mpmath


@cache
def _mp() -> Any:
    """Numbers of 50 digits. mpmath is loaded for the first of them, since its import is long for a command's start."""
    import mpmath

    context = mpmath.MPContext()
    context.dps = 50
    return context


@cache
def _function(name: str) -> Callable[[Value], Value]:
    found: Callable[[Value], Value] = getattr(_mp(), _INVERSE.get(name, name))
    return found


class TooMuchWork(Exception):
    """The comparison is longer than a verdict may take."""


class WorkDone:
    """Counts the operations of a verdict, and keeps what they found: members of lists are compared several times."""

    def __init__(self) -> None:
        self.done = 0
        self.undone: dict[Expression, int] = {}
        self.values: dict[tuple[Expression, int], Value] = {}

    def add(self, operations: int) -> None:
        """Count that many more. Raises TooMuchWork."""
        self.done += operations
        if self.done > MAX_WORK:
            raise TooMuchWork


def symbols(node: Expression) -> frozenset[str]:
    """The names in an expression; `e` and `i` are numbers."""
    own = {node.name} if node.kind == "symbol" and node.name not in ("e", "i") else set()
    return frozenset(own.union(*(symbols(part) for part in node.parts)))


def undone(node: Expression, work: WorkDone) -> int:
    """How many operations on plain numbers are left to do, as in 3 + 4, 2^{10}, 5! or 12 / 4: those are steps, not
    answers. A fraction, a mixed number, a percentage and 1.5 * 10^3 are numbers as they are."""
    if node not in work.undone:
        work.undone[node] = _steps(node, work)[0]
    return work.undone[node]


def _steps(node: Expression, work: WorkDone) -> tuple[int, Fraction | None]:
    """(operations left to do, the value if it is a rational number) of a tree."""
    if not node.parts:
        return 0, node.value
    below = [_steps(part, work) for part in node.parts]
    steps = sum(count for count, _ in below)
    values = [value for _, value in below if value is not None]
    if len(values) < len(below):
        return steps, None
    try:
        value = _operation(node, values, work)
    except (Unreadable, ArithmeticError, ValueError):
        return steps, None
    if not isinstance(value, Fraction):
        return steps, None
    if node.kind in ("neg", "mixed", "percent"):
        return steps, value
    if node.kind == "div" and value.denominator != 1 and all(part.kind in ("number", "neg") for part in node.parts):
        return steps, value
    if node.kind == "mul" and _is_power_of_ten(node.parts[1]):
        return max(0, steps - 1), value
    return steps + 1, value


def _is_power_of_ten(node: Expression) -> bool:
    return node.kind == "pow" and node.parts[0].value == 10


def exact(node: Expression, work: WorkDone) -> Fraction | None:
    """The value of an expression of rational numbers; None if it is none, or is too large."""
    return _steps(node, work)[1]


def same_value(answer: Expression, reference: Expression, work: WorkDone) -> bool:
    """Whether both have one value wherever both have any."""
    if answer == reference:
        return True
    names = symbols(answer) | symbols(reference)
    agreed = 0
    for attempt in range(TRIES if names else 1):
        left, right = _value_at(answer, attempt, work), _value_at(reference, attempt, work)
        if left is None or right is None:
            continue
        if not _close(left, right):
            return False
        agreed += 1
        if agreed == POINTS or not names:
            return True
    return False


def proportional(answer: Expression, reference: Expression, work: WorkDone) -> bool:
    """Whether one is the other times a number that is not 0: equations of one solution."""
    ratios = []
    for attempt in range(TRIES):
        left, right = _value_at(answer, attempt, work), _value_at(reference, attempt, work)
        if left is None or right is None or not right:
            continue
        ratios.append(_as_float(left) / _as_float(right))
        if ratios[-1] == 0 or not _close(ratios[-1], ratios[0]):
            return False
        if len(ratios) == POINTS:
            return True
    return False


def _value_at(node: Expression, attempt: int, work: WorkDone) -> Value:
    """The value of a tree at one point; None if it has none there."""
    key = node, attempt
    if key not in work.values:
        try:
            work.values[key] = _value(node, {name: _point(name, attempt) for name in symbols(node)}, work)
        except (Unreadable, ArithmeticError, ValueError):
            work.values[key] = None
    return work.values[key]


def _point(name: str, attempt: int) -> Fraction:
    """A rational number for a name, the same on every machine: of every three tries, one is negative."""
    digest = int.from_bytes(sha256(f"{attempt}/{name}".encode()).digest()[:4], "big")
    value = Fraction(digest % 9973 + 101, 3571)
    return -value if attempt % 3 == 1 else value


def _close(left: Value, right: Value) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _as_float(left), _as_float(right)
    if _mp().isinf(left) or _mp().isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= _mp().mpf(10) ** -35 * max(abs(left), abs(right)))


def _as_float(value: Value) -> Value:
    if isinstance(value, Fraction):
        return _mp().mpf(value.numerator) / value.denominator
    return value


def _bounded(value: Value) -> Value:
    """`value`, unless it is too large or no number. Raises Unreadable."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            return _bounded(_as_float(value))
        return value
    for part in (value.real, value.imag):
        if _mp().isnan(part):
            raise Unreadable("not a number")
        if part and not _mp().isinf(part) and abs(_mp().mag(part)) > MAX_BITS:
            raise Unreadable("too large")
    return value.real if isinstance(value, _mp().mpc) and not value.imag else value


def _value(node: Expression, points: Mapping[str, Fraction], work: WorkDone) -> Value:
    """The value of a tree. Raises Unreadable, ArithmeticError, ValueError or TooMuchWork."""
    if node.value is not None:
        return node.value
    if node.kind == "symbol":
        if node.name in points:
            return points[node.name]
        if node.name not in ("e", "i"):
            raise Unreadable("a name")
        return +_mp().e if node.name == "e" else _mp().mpc(0, 1)
    if node.kind == "pi":
        return +_mp().pi
    if node.kind == "infty":
        return _mp().inf
    return _operation(node, [_value(part, points, work) for part in node.parts], work)


def _operation(node: Expression, parts: Sequence[Value], work: WorkDone) -> Value:
    work.add(_WORK.get(node.kind, 1))
    value = _bounded(_COMPUTED[node.kind](node, *parts))
    if isinstance(value, Fraction):
        work.add((value.numerator.bit_length() + value.denominator.bit_length()) // _WORK_BITS)
    return value


def _exactly(both: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """An operation that stays exact for fractions, and else is done on numbers of mpmath."""

    def computed(node: Expression, left: Value, right: Value) -> Value:
        if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
            left, right = _as_float(left), _as_float(right)
        return both(left, right)

    return computed


def _power(node: Expression, base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        times = exponent.numerator
        if abs(times) > 2 * MAX_BITS:
            raise Unreadable("too large")
        if isinstance(base, Fraction):
            size = max(base.numerator.bit_length(), base.denominator.bit_length(), 1)
            if size * abs(times) <= 2 * MAX_BITS:
                return base**times
        return _as_float(base) ** times
    base, exponent = _as_float(base), _as_float(exponent)
    if base == 0 or abs(exponent) > 2 * MAX_BITS:
        raise Unreadable("a power of 0, or too large")
    return _mp().power(base, exponent)


def _root(node: Expression, inside: Value, degree: Value) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 < degree <= 64:
        raise Unreadable("degree")
    if isinstance(inside, Fraction):
        found = [_whole_root(part, int(degree)) for part in (inside.numerator, inside.denominator)]
        if None not in found:
            return Fraction(found[0] or 0, found[1] or 1)
    inside = _as_float(inside)
    if degree % 2 and not isinstance(inside, _mp().mpc) and inside < 0:
        return -_mp().root(-inside, int(degree))
    return _mp().root(inside, int(degree))


def _whole_root(value: int, degree: int) -> int | None:
    if value < 0:
        return None
    guess = int(_mp().nint(_mp().root(_mp().mpf(value), degree)))
    return guess if guess**degree == value else None


def _factorial(node: Expression, value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise Unreadable("factorial")
    return Fraction(math.factorial(int(value)))


def _binomial(node: Expression, above: Value, below: Value) -> Value:
    for value in (above, below):
        if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
            raise Unreadable("binomial")
    return Fraction(math.comb(int(above), int(below)))


def _called(node: Expression, argument: Value) -> Value:
    argument = _as_float(argument)
    if abs(argument) > MAX_BITS:
        raise Unreadable("too large")
    return _function(node.name)(argument)


def _logarithm(node: Expression, argument: Value, base: Value) -> Value:
    found = _mp().log(_as_float(argument)) / _mp().log(_as_float(base))
    whole = _mp().nint(found.real)
    if (
        isinstance(argument, Fraction)
        and isinstance(base, Fraction)
        and abs(whole) < 64
        and base ** int(whole) == argument
    ):
        return Fraction(int(whole))
    return found


def _absolute(node: Expression, value: Value) -> Value:
    return abs(value)


def _rounded(down: bool) -> Callable[[Expression, Value], Value]:
    def computed(node: Expression, value: Value) -> Value:
        if isinstance(value, Fraction):
            return Fraction(value.__floor__() if down else value.__ceil__())
        return _mp().floor(value) if down else _mp().ceil(value)

    return computed


_COMPUTED: dict[str, Callable[..., Value]] = {
    "add": _exactly(lambda left, right: left + right),
    "mixed": _exactly(lambda left, right: left + right),
    "mul": _exactly(lambda left, right: left * right),
    "div": _exactly(lambda left, right: left / right),
    "neg": lambda node, value: -value,
    "percent": lambda node, value: value / 100,
    "pow": _power,
    "root": _root,
    "fact": _factorial,
    "binom": _binomial,
    "call": _called,
    "log": _logarithm,
    "abs": _absolute,
    "floor": _rounded(True),
    "ceil": _rounded(False),
}
