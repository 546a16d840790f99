"""The small faults that scripts/mutants.py puts into a file: one changed operator, condition, constant or statement.

Only what functions do when they are called is changed. Code that runs once at import (constants, default values,
decorators) has no test of its own in the coverage contexts, and a constant that is one larger is rarely a fault.
Annotations, logging, assertions and the texts of errors are left alone as well.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
LEFT_ALONE = {"annotation", "returns", "decorator_list", "type_params"}
"""Fields of the syntax tree that are never changed."""


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    """Qualified name within the file: `Class.method`."""
    line: str
    """The source line on which the changed text begins, without indentation."""
    change: str
    """`old -> new`, each as one line of Python."""
    nth: int
    """Which of the equal changes to equal lines of the function."""
    statement: tuple[int, int]
    """First and last line of the statement's own lines (for `if` and loops: of the header)."""
    span: tuple[int, int]
    """The changed bytes of the file."""
    new: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What finds the mutant again after lines have moved, or the file has."""
        return self.function, self.line, self.change

    @property
    def id(self) -> str:
        return f"{self.file}::{self.function}  {self.line}  [{self.change}] {self.nth}"

    def rank(self, seed: int) -> str:
        """The draw takes the lowest ranks, so code that changes elsewhere does not change what is drawn here."""
        return hashlib.sha256(repr((seed, self.key, self.nth)).encode()).hexdigest()

    def applied(self, source: bytes) -> bytes:
        return source[: self.span[0]] + self.new.encode() + source[self.span[1] :]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for text in lines:
        starts.append(starts[-1] + len(text))
    found: list[Mutant] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for function, statement, node, new in _changes(ast.parse(source)):
        line = lines[node.lineno - 1].decode().strip()
        change = f"{ast.unparse(node)} -> {new}".replace("\n", " ")
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        seen[key] = nth = seen[key := (function, line, change)] + 1
        found.append(Mutant(file, function, line, change, nth, _own_lines(statement), span, new))
    return found


def _own_lines(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    return statement.lineno, max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno


Change = tuple[str, ast.stmt, ast.AST, str]
"""(function, innermost statement, node to replace, its new text)."""


def _changes(tree: ast.Module) -> Iterator[Change]:
    def walk(node: ast.AST, names: tuple[str, ...], inside: bool, statement: ast.stmt | None) -> Iterator[Change]:
        if isinstance(node, ast.stmt):
            statement = node
        if inside:
            yield from ((".".join(names), statement, old, new) for old, new in _of(node))
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)) or _logs(node):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            calls = not isinstance(node, ast.ClassDef)
            for child in node.body:
                yield from walk(child, (*names, node.name), calls, statement)
            return
        for field, value in ast.iter_fields(node):
            if field not in LEFT_ALONE:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from walk(child, names, inside, statement)

    yield from walk(tree, (), False, None)


def _logs(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in {"logger", "log", "logging"}


def _of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(the node or a part of it, the text in its place)."""
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                yield node, _with(node, "ops", [*node.ops[:i], COMPARISONS[type(operator)](), *node.ops[i + 1 :]])
        case ast.BinOp() | ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield node, _with(node, "op", ARITHMETIC[type(node.op)]())
        case ast.BoolOp():
            yield node, _with(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int() | float()):
            yield node, repr(node.value + 1 if node.value + 1 != node.value else 2 * node.value)  # 1e30 + 1 is 1e30
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield node, "return None"
        case ast.Raise():
            yield node, "pass"
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())) if not _logs(node):
            yield node, "pass"
    if isinstance(node, (ast.If, ast.IfExp)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def _with(node: ast.AST, field: str, value: object) -> str:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return ast.unparse(changed) if isinstance(node, ast.stmt) else f"({ast.unparse(changed)})"
