r"""Expressions of mathematics in LaTeX or plain text: read by a small parser, and compared by their values.

    text -> tokens (a whitelist) -> tree -> exact fractions, or values to 50 digits -> the same at every point?

Nothing is evaluated as code. All is bounded before it is computed: characters, tokens, depth, digits, and the size of
every intermediate value, so `10^{10^{10}}` is refused and every machine comes to the same verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import mpmath

MAX_CHARS = 400
MAX_TOKENS = 200
MAX_DEPTH = 24
MAX_DIGITS = 120  # of one number
MAX_BITS = 4096  # of an exact fraction's halves, and of the exponent of any other value
MAX_FACTORIAL = 200
POINTS, TRIES = 3, 8  # points at which two expressions must agree, of so many that are tried

_CONTEXT = mpmath.MPContext()
_CONTEXT.dps = 50
_TOLERANCE = _CONTEXT.mpf(10) ** -35

Value = Any  # a Fraction, or a real or complex number of mpmath


class Unreadable(Exception):
    """The text is no expression that this module knows, or one that is too large."""


class Node(NamedTuple):
    """A part of an expression: `kind` is "number", "symbol", or the name of an operation on `parts`."""

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction | None = None
    name: str = ""


# --------------------------------------------------------------------- tokens

_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
).split()
_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "sin": _CONTEXT.sin,
    "cos": _CONTEXT.cos,
    "tan": _CONTEXT.tan,
    "cot": _CONTEXT.cot,
    "sec": _CONTEXT.sec,
    "csc": _CONTEXT.csc,
    "arcsin": _CONTEXT.asin,
    "arccos": _CONTEXT.acos,
    "arctan": _CONTEXT.atan,
    "sinh": _CONTEXT.sinh,
    "cosh": _CONTEXT.cosh,
    "tanh": _CONTEXT.tanh,
    "ln": _CONTEXT.log,
    "exp": _CONTEXT.exp,
}
_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "pi": "pi", "sqrt": "sqrt", "log": "log", "abs": "abs"}
_WORDS = {**{name: name for name in (*_FUNCTIONS, *_GREEK)}, **_NAMES, "infty": "infty", "infinity": "infty", "oo": "infty"}
_WORD = "|".join(sorted(_WORDS, key=len, reverse=True))
_TOKEN = re.compile(
    rf"(?P<number>\d+\.(?=\s*\\overline)|\d+(?:\.\d+)?(?:[eE][-+]?\d{{1,3}}(?![\d.a-zA-Z]))?|\.\d+)"
    rf"|\\(?P<command>frac|sqrt|binom|overline|lfloor|rfloor|lceil|rceil|{_WORD}|log|pi|cdot|times|div|circ|prime)(?![a-zA-Z])"
    rf"|(?P<word>(?:{_WORD})(?![a-zA-Z]))|(?P<letter>[a-zA-Z])|(?P<power>\*\*)|(?P<sign>[-+*/^!%|()\[\]{{}}_'])|(?P<space>\s+)"
)
_PROSE = re.compile(
    rf"(?<![\\a-zA-Z])(?!(?:{_WORD})(?![a-zA-Z]))(?:[a-zA-Z]{{4,}}|(?:is|of|so|the|and|or|it|to|we|if|in|at|be|by|an|are|not|no|for)(?![a-zA-Z]))"
)
_SIMPLE = {"cdot": "*", "times": "*", "div": "/"}


def _tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token. Raises Unreadable for anything else."""
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    if _PROSE.search(text):
        raise Unreadable("words")
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable(f"unknown {text[position : position + 8]!r}")
        position = match.end()
        kind, told = str(match.lastgroup), match[str(match.lastgroup)]
        if kind == "space":
            continue
        if kind == "power":
            kind, told = "sign", "^"
        if kind in ("command", "word"):
            told = _SIMPLE.get(told, _WORDS.get(told, told))
            kind = "sign" if told in "*/" else "symbol" if told in _GREEK else "command"
        elif kind == "letter":
            kind = "symbol"
        found.append((kind, told))
        if len(found) > MAX_TOKENS:
            raise Unreadable("too long")
    return found


# --------------------------------------------------------------------- trees


@lru_cache(maxsize=512)
def parse(text: str) -> Node:
    """The tree of one expression. Raises Unreadable."""
    parser = _Parser(_tokens(text))
    tree = parser.sum()
    if parser.peek() is not None:
        raise Unreadable(f"unexpected {parser.peek()}")
    return tree


def number(value: Fraction | int) -> Node:
    return Node("number", value=Fraction(value))


class _Parser:
    """Recursive descent of bounded depth over the tokens of one expression."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._at, self._depth, self._bars = tokens, 0, 0, 0

    def peek(self) -> str | None:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else None

    def _take(self, expected: str | None = None) -> tuple[str, str]:
        if self._at >= len(self._tokens) or expected not in (None, self._tokens[self._at][1]):
            raise Unreadable(f"expected {expected}")
        self._at += 1
        return self._tokens[self._at - 1]

    def sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        left = self._product()
        while self.peek() in ("+", "-"):
            sign = self._take()[1]
            right = self._product()
            left = Node("add", (left, right if sign == "+" else Node("neg", (right,))))
        self._depth -= 1
        return left

    def _product(self) -> Node:
        left = self._signed()
        while (following := self.peek()) is not None:
            if following in ("*", "/"):
                self._take()
                left = Node("mul" if following == "*" else "div", (left, self._signed()))
            elif self._begins_factor():
                left = self._beside(left, self._power())
            else:
                break
        return left

    def _beside(self, left: Node, right: Node) -> Node:
        """Two factors without a sign between: a mixed number, or a product."""
        if right.kind == "div" and all(part.kind == "number" for part in right.parts) and left.kind == "number":
            above, below = (part.value or Fraction(0) for part in right.parts)
            if left.value is not None and left.value.denominator == 1 and 0 < above < below:
                return Node("mixed", (left, right))
        if right.kind == "number" and self._is_digit_before_last(left):
            raise Unreadable("two numbers in a row")
        return Node("mul", (left, right))

    @staticmethod
    def _is_digit_before_last(left: Node) -> bool:
        return left.kind == "number" or (left.kind == "mul" and left.parts[1].kind == "number")

    def _begins_factor(self) -> bool:
        kind, told = self._tokens[self._at]
        if kind in ("number", "symbol") or told in "([{":
            return True
        if told == "|":
            return self._bars == 0
        return kind == "command" and told not in ("rfloor", "rceil", "circ", "prime")

    def _signed(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        try:
            if self.peek() == "-":
                self._take()
                return Node("neg", (self._signed(),))
            if self.peek() == "+":
                self._take()
                return self._signed()
            return self._power()
        finally:
            self._depth -= 1

    def _power(self) -> Node:
        base = self._postfix(self._atom())
        if self.peek() == "^":
            self._take()
            if self.peek() in ("circ", "prime"):
                self._take()
                return base
            base = self._postfix(Node("pow", (base, self._exponent())))
        return base

    def _exponent(self) -> Node:
        """What stands after `^`: a group, one digit or letter as LaTeX has it, or a signed factor."""
        if self.peek() in ("-", "+", "(", "["):
            return self._signed()
        return self._postfix(self._atom())

    def _postfix(self, node: Node) -> Node:
        while self.peek() in ("!", "%"):
            node = Node("fact" if self._take()[1] == "!" else "percent", (node,))
        return node

    def _group(self) -> Node:
        """`{…}`, or the one token that LaTeX takes for it."""
        if self.peek() == "{":
            self._take()
            inside = self.sum()
            self._take("}")
            return inside
        kind, told = self._take()
        if kind == "number" and len(told) > 1:  # \frac12: the first digit alone
            self._at -= 1
            self._tokens[self._at] = ("number", told[1:])
            return number(int(told[0]))
        self._at -= 1
        return self._atom()

    def _atom(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        try:
            kind, told = self._take()
            if kind == "number":
                return self._number(told)
            if kind == "symbol":
                return self._symbol(told)
            if told in ("(", "[", "{"):
                inside = self.sum()
                self._take({"(": ")", "[": "]", "{": "}"}[told])
                return inside
            if told == "|":
                self._bars += 1
                inside = self.sum()
                self._bars -= 1
                self._take("|")
                return Node("abs", (inside,))
            if kind == "command":
                return self._command(told)
            raise Unreadable(f"unexpected {told}")
        finally:
            self._depth -= 1

    def _number(self, told: str) -> Node:
        if len(told) > MAX_DIGITS:
            raise Unreadable("too many digits")
        node = number(Fraction(told))
        if self.peek() == "overline":
            self._take()
            period = self._repeating()
            place = len(told.partition(".")[2])
            node = number(Fraction(told.rstrip(".")) + Fraction(int(period), 10**place * (10 ** len(period) - 1)))
        if self.peek() == "_":  # 1010_2: its base
            self._take()
            base = self._group()
            if base.value is None:
                raise Unreadable("base")
            return Node("symbol", name=f"{told}_{base.value}")
        return node

    def _repeating(self) -> str:
        self._take("{")
        kind, period = self._take()
        self._take("}")
        if kind != "number" or not period.isdigit() or len(period) > MAX_DIGITS:
            raise Unreadable("period")
        return period

    def _symbol(self, told: str) -> Node:
        while self.peek() == "'":
            told += self._take()[1]
        if self.peek() == "_":
            self._take()
            told += f"_{self._subscript()}"
        return Node("symbol", name=told)

    def _subscript(self) -> str:
        if self.peek() != "{":
            return self._take()[1]
        self._take()
        inside = ""
        while self.peek() not in ("}", None):
            inside += self._take()[1]
        self._take("}")
        return inside

    def _command(self, told: str) -> Node:
        if told == "frac":
            return Node("div", (self._group(), self._group()))
        if told == "binom":
            return Node("binom", (self._group(), self._group()))
        if told == "sqrt":
            degree = number(2)
            if self.peek() == "[":
                self._take()
                degree = self.sum()
                self._take("]")
            return Node("root", (self._group(), degree))
        if told in ("lfloor", "lceil"):
            inside = self.sum()
            self._take("r" + told[1:])
            return Node(told[1:], (inside,))
        if told in ("pi", "infty"):
            return Node(told)
        if told in _FUNCTIONS or told in ("log", "abs"):
            return self._function(told)
        raise Unreadable(f"unexpected {told}")

    def _function(self, told: str) -> Node:
        power, base = None, None
        while self.peek() in ("^", "_"):
            if self._take()[1] == "^":
                power = self._exponent_group()
            else:
                base = self._group()
        bracketed = self.peek() in ("(", "[", "{", "|")
        argument = self._atom() if bracketed else self._argument()
        if told == "log":
            node = Node("log", (argument, base or number(10)))
        else:
            node = Node("abs" if told == "abs" else "call", (argument,), name=told)
        if power is None:
            return node
        if power.value == -1:
            raise Unreadable("an inverse function or a power")
        return Node("pow", (node, power))

    def _exponent_group(self) -> Node:
        return self._group() if self.peek() == "{" else self._postfix(self._atom())

    def _argument(self) -> Node:
        """The argument of a function without brackets: `sin 2x`, `cos a`."""
        left = self._signed()
        while self._at < len(self._tokens) and self._tokens[self._at][0] in ("number", "symbol"):
            left = self._beside(left, self._power())
        return left


# --------------------------------------------------------------------- values


def symbols(node: Node) -> frozenset[str]:
    """The names in an expression; `e` and `i` are numbers."""
    own = {node.name} if node.kind == "symbol" and node.name not in ("e", "i") else set()
    return frozenset(own.union(*(symbols(part) for part in node.parts)))


def undone(node: Node) -> int:
    """How many operations on plain numbers are left to do, as in 3 + 4, 2^{10}, 5! or 12 / 4: those are steps, not
    answers. A fraction, a mixed number, a percentage and 1.5 * 10^3 are numbers as they are."""
    return _steps(node)[0]


def _steps(node: Node) -> tuple[int, Fraction | None]:
    """(operations left to do, the value if it is a rational number) of a tree."""
    if not node.parts:
        return 0, node.value
    below = [_steps(part) for part in node.parts]
    steps = sum(count for count, _ in below)
    values = [value for _, value in below if value is not None]
    if len(values) < len(below):
        return steps, None
    try:
        value = _bounded(_COMPUTED[node.kind](node, *values))
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


def _is_power_of_ten(node: Node) -> bool:
    return node.kind == "pow" and node.parts[0].value == 10


def exact(node: Node) -> Fraction | None:
    """The value of an expression of rational numbers; None if it is none, or is too large."""
    return _steps(node)[1]


def same(answer: Node, reference: Node) -> bool:
    """Whether both have one value wherever both have any."""
    if answer == reference:
        return True
    names = symbols(answer) | symbols(reference)
    agreed = 0
    for attempt in range(TRIES if names else 1):
        points = {name: _point(name, attempt) for name in names}
        try:
            left, right = _value(answer, points), _value(reference, points)
        except (Unreadable, ArithmeticError, ValueError):
            continue
        if not _close(left, right):
            return False
        agreed += 1
        if agreed == POINTS or not names:
            return True
    return False


def proportional(answer: Node, reference: Node) -> bool:
    """Whether one is the other times a number that is not 0: equations of one solution."""
    names = sorted(symbols(answer) | symbols(reference))
    ratios = []
    for attempt in range(TRIES):
        points = {name: _point(name, attempt) for name in names}
        try:
            left, right = _value(answer, points), _value(reference, points)
            ratios.append(_as_float(left) / _as_float(right))
        except (Unreadable, ArithmeticError, ValueError):
            continue
        if ratios[-1] == 0 or not _close(ratios[-1], ratios[0]):
            return False
        if len(ratios) == POINTS:
            return True
    return False


def _point(name: str, attempt: int) -> Fraction:
    """A rational number for a name, the same on every machine: of every three tries, one is negative."""
    digest = int.from_bytes(sha256(f"{attempt}/{name}".encode()).digest()[:4], "big")
    value = Fraction(digest % 9973 + 101, 3571)
    return -value if attempt % 3 == 1 else value


def _close(left: Value, right: Value) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _as_float(left), _as_float(right)
    if _CONTEXT.isinf(left) or _CONTEXT.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= _TOLERANCE * max(abs(left), abs(right)))


def _as_float(value: Value) -> Value:
    if isinstance(value, Fraction):
        return _CONTEXT.mpf(value.numerator) / value.denominator
    return value


def _bounded(value: Value) -> Value:
    """`value`, unless it is too large or no number. Raises Unreadable."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            return _bounded(_as_float(value))
        return value
    for part in (value.real, value.imag):
        if _CONTEXT.isnan(part):
            raise Unreadable("not a number")
        if part and not _CONTEXT.isinf(part) and abs(_CONTEXT.mag(part)) > MAX_BITS:
            raise Unreadable("too large")
    return value.real if isinstance(value, _CONTEXT.mpc) and not value.imag else value


def _value(node: Node, points: Mapping[str, Fraction]) -> Value:
    """The value of a tree. Raises Unreadable, ArithmeticError or ValueError."""
    if node.value is not None:
        return node.value
    if node.kind == "symbol":
        if node.name in points:
            return points[node.name]
        if node.name not in ("e", "i"):
            raise Unreadable("a name")
        return +_CONTEXT.e if node.name == "e" else _CONTEXT.mpc(0, 1)
    if node.kind == "pi":
        return +_CONTEXT.pi
    if node.kind == "infty":
        return _CONTEXT.inf
    parts = [_value(part, points) for part in node.parts]
    return _bounded(_COMPUTED[node.kind](node, *parts))


def _exactly(both: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """An operation that stays exact for fractions, and else is done on numbers of mpmath."""

    def computed(node: Node, left: Value, right: Value) -> Value:
        if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
            left, right = _as_float(left), _as_float(right)
        return both(left, right)

    return computed


def _power(node: Node, base: Value, exponent: Value) -> Value:
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
    return _CONTEXT.power(base, exponent)


def _root(node: Node, inside: Value, degree: Value) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 < degree <= 64:
        raise Unreadable("degree")
    if isinstance(inside, Fraction):
        found = [_whole_root(part, int(degree)) for part in (inside.numerator, inside.denominator)]
        if None not in found:
            return Fraction(found[0] or 0, found[1] or 1)
    inside = _as_float(inside)
    if degree % 2 and not isinstance(inside, _CONTEXT.mpc) and inside < 0:
        return -_CONTEXT.root(-inside, int(degree))
    return _CONTEXT.root(inside, int(degree))


def _whole_root(value: int, degree: int) -> int | None:
    if value < 0:
        return None
    guess = int(_CONTEXT.nint(_CONTEXT.root(_CONTEXT.mpf(value), degree)))
    return guess if guess**degree == value else None


def _factorial(node: Node, value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise Unreadable("factorial")
    product = 1
    for factor in range(2, int(value) + 1):
        product *= factor
    return Fraction(product)


def _binomial(node: Node, above: Value, below: Value) -> Value:
    for value in (above, below):
        if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
            raise Unreadable("binomial")
    product = Fraction(1)
    for step in range(int(below)):
        product *= Fraction(int(above) - step, step + 1)
    return product


def _called(node: Node, argument: Value) -> Value:
    argument = _as_float(argument)
    if abs(argument) > MAX_BITS:
        raise Unreadable("too large")
    return _FUNCTIONS[node.name](argument)


def _logarithm(node: Node, argument: Value, base: Value) -> Value:
    found = _CONTEXT.log(_as_float(argument)) / _CONTEXT.log(_as_float(base))
    whole = _CONTEXT.nint(found.real)
    if isinstance(argument, Fraction) and isinstance(base, Fraction) and abs(whole) < 64 and base**int(whole) == argument:
        return Fraction(int(whole))
    return found


def _absolute(node: Node, value: Value) -> Value:
    return abs(value)


def _rounded(down: bool) -> Callable[[Node, Value], Value]:
    def computed(node: Node, value: Value) -> Value:
        if isinstance(value, Fraction):
            return Fraction(value.__floor__() if down else value.__ceil__())
        return _CONTEXT.floor(value) if down else _CONTEXT.ceil(value)

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
