"""Our own checkers: literal comparison and truth tables, for tasks whose library scorer is unsafe or missing.

Each returns a score in [0, 1], 1 = right, on the scale of the scorer it replaces. None of them evaluates the
answer as code; all are linear in its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

FULL_MARKS = 0.999  # a score from here on is right: the library adds floats up to 1


def matrix(answer: str, reference: str) -> float:
    """1 for the rows of `reference`, one on each line; 0.1 for the same cells written as a list of lists.

    reasoning-gym 0.1.25 tells the second case by `eval(answer)`.
    """
    wanted = [line.split() for line in reference.splitlines()]
    if [line.split() for line in answer.splitlines()] == wanted:
        return 1.0
    packed = "".join(answer.split())
    if packed.startswith("[[") and packed.endswith("]]"):
        if [row.split(",") for row in packed[2:-2].split("],[")] == wanted:
            return 0.1
    return 0.0


_BINDS = {"↔": 1, "→": 2, "∨": 3, "∧": 4, "¬": 5}
"""Operators, loosest first; binary ones associate to the left, as in reasoning-gym."""

MAX_VARIABLES = 11  # P to Z: the library names no more, and a truth table has 2^11 rows at most


def conclusion(answer: str, premises: list[str], variables: list[str]) -> float:
    """1 if `answer` follows from `premises` and says something, 0.25 if it is a tautology or a bare variable,
    0.05 if it does not follow, 0 if it is no formula over `variables`.

    A formula is its truth table: bit r of an integer is its value in row r, where variable j is bit j of r.
    It follows if (p_1 ∧ … ∧ p_k) ∧ ¬formula is empty. reasoning-gym 0.1.25 recurses once for each
    parenthesis and makes a table over all names in the answer, also unknown ones.
    """
    if len(variables) > MAX_VARIABLES:
        raise ValueError(f"{len(variables)} variables")
    rows = range(1 << len(variables))
    every = (1 << len(rows)) - 1
    tables = {name: sum(1 << row for row in rows if row >> j & 1) for j, name in enumerate(variables)}
    given = every
    for premise in premises:
        given &= _truth_table(premise, tables, every)[0]
    try:
        claim, bare = _truth_table(answer, tables, every)
    except ValueError:
        return 0.0
    if given & ~claim:
        return 0.05
    return 0.25 if bare or claim == every else 1.0


def _truth_table(formula: str, tables: Mapping[str, int], every: int) -> tuple[int, bool]:
    """Truth table of `formula`, and whether it is a bare variable. Raises `ValueError` if it is no formula.

    Dijkstra's shunting-yard: two stacks, no recursion.
    """
    values: list[int] = []
    operators: list[str] = []
    binary: dict[str, Callable[[int, int], int]] = {
        "∧": lambda left, right: left & right,
        "∨": lambda left, right: left | right,
        "→": lambda left, right: (every ^ left) | right,
        "↔": lambda left, right: every ^ left ^ right,
    }

    def reduce() -> None:
        operator, right = operators.pop(), values.pop()
        values.append(every ^ right if operator == "¬" else binary[operator](values.pop(), right))

    bare, operand_next = True, True
    for symbol in formula:
        if symbol.isspace():
            continue
        if operand_next and symbol in tables:
            values.append(tables[symbol])
            operand_next = False
        elif operand_next and symbol in "(¬":
            bare &= symbol == "("
            operators.append(symbol)
        elif not operand_next and symbol == ")":
            while operators and operators[-1] != "(":
                reduce()
            if not operators:
                raise ValueError("unbalanced parenthesis")
            operators.pop()
        elif not operand_next and symbol in _BINDS and symbol != "¬":
            while operators and operators[-1] != "(" and _BINDS[operators[-1]] >= _BINDS[symbol]:
                reduce()
            bare = False
            operators.append(symbol)
            operand_next = True
        else:
            raise ValueError(f"unexpected {symbol!r}")
    if operand_next or "(" in operators:
        raise ValueError("formula breaks off")
    while operators:
        reduce()
    return values[0], bare
