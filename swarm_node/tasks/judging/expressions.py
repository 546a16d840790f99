r"""Expressions of mathematics in LaTeX or plain text, read by a small parser: text -> tokens (a whitelist) -> tree.

Characters, tokens, depth and digits are bounded. `values` compares trees.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MAX_CHARS = 400
MAX_TOKENS = 200
MAX_DEPTH = 24
MAX_DIGITS = 120  # of one number


class Unreadable(Exception):
    """The text is no expression that this module knows, or one that is too large."""


class Expression(NamedTuple):
    """A part of an expression: `kind` is "number", "symbol", or the name of an operation on `parts`."""

    kind: str
    parts: tuple[Expression, ...] = ()
    value: Fraction | None = None
    name: str = ""


# --------------------------------------------------------------------- tokens

_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
).split()
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln exp".split()
_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "pi": "pi", "sqrt": "sqrt", "log": "log", "abs": "abs"}
_WORDS = {
    **{name: name for name in (*FUNCTIONS, *_GREEK)},
    **_NAMES,
    "infty": "infty",
    "infinity": "infty",
    "oo": "infty",
}
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
def parse_expression(text: str) -> Expression:
    """The tree of one expression. Raises Unreadable."""
    parser = _Parser(_tokens(text))
    try:
        tree = parser.sum()
    except ValueError as error:  # of a number in an unusual spelling
        raise Unreadable(str(error)) from error
    if parser.peek() is not None:
        raise Unreadable(f"unexpected {parser.peek()}")
    return tree


def _number(value: Fraction | int) -> Expression:
    return Expression("number", value=Fraction(value))


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

    def sum(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        left = self._product()
        while self.peek() in ("+", "-"):
            sign = self._take()[1]
            right = self._product()
            left = Expression("add", (left, right if sign == "+" else Expression("neg", (right,))))
        self._depth -= 1
        return left

    def _product(self) -> Expression:
        left = self._signed()
        while (following := self.peek()) is not None:
            if following in ("*", "/"):
                self._take()
                left = Expression("mul" if following == "*" else "div", (left, self._signed()))
            elif self._begins_factor():
                left = self._beside(left, self._power())
            else:
                break
        return left

    def _beside(self, left: Expression, right: Expression) -> Expression:
        """Two factors without a sign between: a mixed number, or a product."""
        if right.kind == "div" and all(part.kind == "number" for part in right.parts) and left.kind == "number":
            above, below = (part.value or Fraction(0) for part in right.parts)
            if left.value is not None and left.value.denominator == 1 and 0 < above < below:
                return Expression("mixed", (left, right))
        if right.kind == "number" and self._is_digit_before_last(left):
            raise Unreadable("two numbers in a row")
        return Expression("mul", (left, right))

    @staticmethod
    def _is_digit_before_last(left: Expression) -> bool:
        return left.kind == "number" or (left.kind == "mul" and left.parts[1].kind == "number")

    def _begins_factor(self) -> bool:
        kind, told = self._tokens[self._at]
        if kind in ("number", "symbol") or told in "([{":
            return True
        if told == "|":
            return self._bars == 0
        return kind == "command" and told not in ("rfloor", "rceil", "circ", "prime")

    def _signed(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        try:
            if self.peek() == "-":
                self._take()
                return Expression("neg", (self._signed(),))
            if self.peek() == "+":
                self._take()
                return self._signed()
            return self._power()
        finally:
            self._depth -= 1

    def _power(self) -> Expression:
        base = self._postfix(self._atom())
        if self.peek() == "^":
            self._take()
            if self.peek() in ("circ", "prime"):
                self._take()
                return base
            base = self._postfix(Expression("pow", (base, self._exponent())))
        return base

    def _exponent(self) -> Expression:
        """What stands after `^`: a group, a letter, a whole number as people mean it, or a signed factor."""
        if self.peek() in ("-", "+", "(", "["):
            return self._signed()
        return self._postfix(self._atom())

    def _postfix(self, node: Expression) -> Expression:
        while self.peek() in ("!", "%"):
            node = Expression("fact" if self._take()[1] == "!" else "percent", (node,))
        return node

    def _digit_or_atom(self) -> Expression:
        r"""`{…}`, or the one token that LaTeX takes for it: of `\frac12` the first digit alone. Elsewhere people and
        models mean the whole number, as in `\sqrt13`."""
        kind, told = self._take()
        self._at -= 1
        if kind != "number" or len(told) == 1:
            return self._atom()
        if not told.isdecimal():
            raise Unreadable("a number without braces")
        self._tokens[self._at] = ("number", told[1:])
        return _number(int(told[0]))

    def _atom(self) -> Expression:
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
                return Expression("abs", (inside,))
            if kind == "command":
                return self._command(told)
            raise Unreadable(f"unexpected {told}")
        finally:
            self._depth -= 1

    def _number(self, told: str) -> Expression:
        if len(told) > MAX_DIGITS:
            raise Unreadable("too many digits")
        node = _number(Fraction(told))
        if self.peek() == "overline":
            self._take()
            period = self._repeating()
            place = len(told.partition(".")[2])
            node = _number(Fraction(told.rstrip(".")) + Fraction(int(period), 10**place * (10 ** len(period) - 1)))
        if self.peek() == "_":  # 1010_2: its base
            self._take()
            base = self._atom()
            if base.value is None:
                raise Unreadable("base")
            return Expression("symbol", name=f"{told}_{base.value}")
        return node

    def _repeating(self) -> str:
        self._take("{")
        kind, period = self._take()
        self._take("}")
        if kind != "number" or not period.isdigit() or len(period) > MAX_DIGITS:
            raise Unreadable("period")
        return period

    def _symbol(self, told: str) -> Expression:
        while self.peek() == "'":
            told += self._take()[1]
        if self.peek() == "_":
            self._take()
            told += f"_{self._subscript()}"
        return Expression("symbol", name=told)

    def _subscript(self) -> str:
        if self.peek() != "{":
            return self._take()[1]
        self._take()
        inside = ""
        while self.peek() not in ("}", None):
            inside += self._take()[1]
        self._take("}")
        return inside

    def _command(self, told: str) -> Expression:
        if told == "frac":
            return Expression("div", (self._digit_or_atom(), self._digit_or_atom()))
        if told == "binom":
            return Expression("binom", (self._digit_or_atom(), self._digit_or_atom()))
        if told == "sqrt":
            degree = _number(2)
            if self.peek() == "[":
                self._take()
                degree = self.sum()
                self._take("]")
            return Expression("root", (self._atom(), degree))
        if told in ("lfloor", "lceil"):
            inside = self.sum()
            self._take("r" + told[1:])
            return Expression(told[1:], (inside,))
        if told in ("pi", "infty"):
            return Expression(told)
        if told in FUNCTIONS or told in ("log", "abs"):
            return self._function(told)
        raise Unreadable(f"unexpected {told}")

    def _function(self, told: str) -> Expression:
        power, base = None, None
        while self.peek() in ("^", "_"):
            if self._take()[1] == "^":
                power = self._exponent()
            else:
                base = self._atom()
        bracketed = self.peek() in ("(", "[", "{", "|")
        argument = self._atom() if bracketed else self._argument()
        if told == "log":
            node = Expression("log", (argument, base or _number(10)))
        else:
            node = Expression("abs" if told == "abs" else "call", (argument,), name=told)
        if power is None:
            return node
        if power == Expression("neg", (_number(1),)):
            if told not in ("sin", "cos", "tan"):
                raise Unreadable("an inverse function or a power")
            return Expression("call", (argument,), name=f"arc{told}")
        return Expression("pow", (node, power))

    def _argument(self) -> Expression:
        """The argument of a function without brackets: `sin 2x`, `cos a`."""
        left = self._signed()
        while self._at < len(self._tokens) and self._tokens[self._at][0] in ("number", "symbol"):
            left = self._beside(left, self._power())
        return left
