r"""Whether two answers of mathematics are equal: numbers, expressions, lists, sets, tuples, intervals, unions,
relations, matrices, short texts.

    text -> `cleaned` -> lists -> relations -> tuples and intervals -> `expressions`

`sentences` finds the expression in a sentence, `equal` compares two. What cannot be read is equal to the same
characters only. An answer that leaves arithmetic to be done is not equal to the number that it would give.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from swarm_node.tasks.judging import numbers
from swarm_node.tasks.judging.expressions import MAX_CHARS, Expression, Unreadable, parse_expression
from swarm_node.tasks.judging.spelling import NO_UNITS, WRAPPED, spelt
from swarm_node.tasks.judging.texts import plain
from swarm_node.tasks.judging.values import TooMuchWork, WorkDone, exact, proportional, same_value, symbols, undone

MAX_ITEMS = 16  # of a list, a set, a tuple or a row
MAX_NESTED = 4  # lists in lists

# --------------------------------------------------------------------- one spelling

_CHARACTERS = str.maketrans(
    {
        "×": "*", "⋅": "*", "·": "*", "÷": "/", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
        "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "√": r"\sqrt ", "≈": r"\approx ",
        "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∅": r"\emptyset ", "°": r"^\circ ",
        "∠": r"\angle ",
        "\u00a0": " ", "\u202f": " ", "\u2009": " ", "’": "'", "⁄": "/",
    }
)  # fmt: skip
_SPACING = re.compile(
    r"\\(?:[,;:!]|left(?![a-z])|right(?![a-z])|displaystyle|limits|quad|qquad|[bB]igg?[lrm]?(?![a-z])|angle|hspace\{[^{}]*\}|phantom\{[^{}]*\})|~|&(?==)"
)
_TEXT = re.compile(WRAPPED.pattern + r"(\s*\^\s*\{?\d\}?)?")
_UNIT = re.compile(
    rf"(?<=[\d}}%)\]])\s*(?!{NO_UNITS})(?:(?:square|cubic|sq)\s+)?(?:[kcdm]?m|km|in|ft|yd|mi|g|kg|mg|[mk]?l|s|h|min|hr|hrs|mph|units?|dollars?|cents?|euros?|yuan|degrees?"
    r"|[a-z]{4,})(?:\s*/\s*(?:[a-z]{1,6}))?(?:\s*\^\s*\{?[23]\}?)?(?=\s*\Z|\s*[,;])"
)
_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")


@lru_cache(maxsize=64)  # of an answer that cannot be read, `read` remembers nothing: each reference would clean it anew
def cleaned(text: str) -> str:
    """`text` in one spelling: LaTeX's own names, no spacing, no dollar signs, words for lists as commas."""
    text = spelt(text).translate(_CHARACTERS)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|,\\!|\\ )\s*(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<!\\)\\ ", " ", text.replace(r"\$", " "))
    text = text.replace("$", " ").replace(r"\%", "%").replace(r"\\!", " ").replace("\\\n", " ")
    text = re.sub(r"\b(?:percent|pct)\b", "%", text)
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text)
    text = re.sub(r"\\(?:overline|bar)\s*\{(\d+)\}", r"\\overline{\1}", text)
    text = _TEXT.sub(_worded, text)
    text = _SPACING.sub(" ", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)", " ", text)
    for sign, latex in (
        ("<=", r"\le "),
        (">=", r"\ge "),
        ("!=", r"\ne "),
        ("\\leq", "\\le"),
        ("\\geq", "\\ge"),
        ("\\neq", "\\ne"),
    ):
        text = text.replace(sign, latex)
    text = re.sub(r"\\lt(?![a-z])", "<", re.sub(r"\\gt(?![a-z])", ">", text))
    text = re.sub(r"\\\[|\\\]|\\\(|\\\)|\*\*(?=[\s\d\\]*\Z)|\A\s*\*\*", " ", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;: ").strip()


def _worded(match: re.Match[str]) -> str:
    """A text within mathematics: a word of a list, a constant, or a unit and the like."""
    inside = match[1].strip()
    if inside.lower() in ("and", "or"):
        return " , "
    if inside in ("e", "i", "pi") or inside.isdigit():
        return f" {inside}{match[2] or ''} "
    return f" {inside} " if len(inside) == 1 or not match[2] else f" {inside}{match[2]} "


# --------------------------------------------------------------------- structures


class Read(NamedTuple):
    """What was read: `kind` is `value` (of `node`), `list`, `row` (in brackets `marks`), `matrix`, `union`, `relation`
    (`marks` is its sign) or `text`. `name`: the letter that has this value, as in x = 3."""

    kind: str
    node: Expression | None = None
    parts: tuple[Read, ...] = ()
    marks: str = ""
    name: str = ""


_OPEN, _CLOSE = "([{", ")]}"
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|to)(?![a-z])|[=<>≡]")
_FLIPPED = {">": "<", r"\ge": r"\le"}
_NAME = re.compile(
    r"(?:\\?[A-Za-z]+(?:_(?:\w|\{[^{}]*\}))?'*|\|\s*[A-Z]{1,2}\s*\||\\frac\s*\{\s*[A-Z]{2}\s*\}\s*\{\s*[A-Z]{2}\s*\}"
    r"|[A-Za-z]\w?'*\s*\([^()]{1,20}\)|\(\s*[a-zA-Z]\s*(?:,\s*[a-zA-Z]\s*)+\)|[A-Z](?:_\{?\w\}?)?\s*:\s*[A-Z](?:_\{?\w\}?)?)"
)
_MATRIX = re.compile(
    r"\(?\s*\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?((?:(?!\\begin).)*)\\end\{\1\}\s*\)?", re.DOTALL
)
_NOTHING = re.compile(r"\\emptyset|\\varnothing|\\?\{\s*\\?\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")


@lru_cache(maxsize=512)
def read(text: str) -> Read:
    """What `text` says. Raises Unreadable."""
    text = cleaned(text)
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    return _read(text, 0)


def _read(text: str, nested: int) -> Read:
    if nested > MAX_NESTED:
        raise Unreadable("too deep")
    for group in reversed(_at_top(text, _GROUPS) if not nested else []):  # not in (1,200), which is a pair
        text = text[: group.start()] + group[0].replace(",", "") + text[group.end() :]
    text = _UNIT.sub("", text).strip()
    if _NOTHING.fullmatch(text):
        return Read("list")
    items = [item for item in _split(text, r",|;|\b(?:and|or)\b|\\(?:lor|land)(?![a-z])") if item.strip()]
    if len(items) > MAX_ITEMS:
        raise Unreadable("too many items")
    if len(items) > 1:
        return _list(_read(item, nested + 1) for item in items)
    return _related(text, nested)


def _related(text: str, nested: int) -> Read:
    """A relation, as the interval or the value that it gives to a name; or what stands without one."""
    pieces, signs = [], []
    start = 0
    for match in _at_top(text, _RELATION):
        pieces.append(text[start : match.start()].strip())
        signs.append(match[0])
        start = match.end()
    pieces.append(text[start:].strip())
    if not signs:
        return _united(text, nested)
    while signs and signs[-1] == r"\approx":
        if _NAME.fullmatch(pieces[-2]) and len(signs) == 1:
            return _named(pieces[-2], _united(pieces[-1], nested))
        pieces, signs = pieces[:-1], signs[:-1]
    if not signs:
        return _united(pieces[0], nested)
    if set(signs) == {"="}:
        return _equation(pieces, nested)
    if signs == [r"\in"]:
        return _named(pieces[0], _united(pieces[1], nested))
    return _inequality(pieces, signs)


def _equation(pieces: list[str], nested: int) -> Read:
    if _NAME.fullmatch(pieces[-1]) and not _has_name(pieces[0]):
        pieces = pieces[::-1]
    if _NAME.fullmatch(pieces[0]) or (len(pieces) > 2 and pieces[0] != pieces[-1]):
        return _named(pieces[0], _united(pieces[-1], nested))
    if pieces[0] != pieces[-1] and (_MATRIX.fullmatch(pieces[-1]) or not any(map(_has_name, pieces))):
        return _united(pieces[-1], nested)
    left, right = map(parse_expression, (pieces[0], pieces[-1]))
    return Read("relation", Expression("add", (left, Expression("neg", (right,)))), marks="=")


def _named(name: str, read: Read) -> Read:
    """`read` with a name of one letter; others, as x_1 and f(x), are not compared."""
    return read._replace(name=name.casefold()) if len(name) == 1 and name.isalpha() else read


def _has_name(text: str) -> bool:
    try:
        return bool(symbols(parse_expression(text)))
    except Unreadable:
        return True


def _inequality(pieces: list[str], signs: list[str]) -> Read:
    """An inequality of one name as an interval; another as the difference of its sides."""
    if all(sign in _FLIPPED for sign in signs):
        pieces, signs = pieces[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    if signs == ["="] or any(sign not in ("<", r"\le", r"\ne") for sign in signs):
        raise Unreadable("a relation of several kinds")
    infinite = Expression("infty")
    if len(signs) == 2 and _NAME.fullmatch(pieces[1]):
        low, high = parse_expression(pieces[0]), parse_expression(pieces[2])
        return _named(pieces[1], _interval(low, high, signs[0], signs[1]))
    if len(signs) != 1:
        raise Unreadable("a chain of relations")
    if signs[0] != r"\ne" and _NAME.fullmatch(pieces[0]) and not _has_name(pieces[1]):
        found = _interval(Expression("neg", (infinite,)), parse_expression(pieces[1]), "<", signs[0])
        return _named(pieces[0], found)
    if signs[0] != r"\ne" and _NAME.fullmatch(pieces[1]) and not _has_name(pieces[0]):
        return _named(pieces[1], _interval(parse_expression(pieces[0]), infinite, signs[0], "<"))
    left, right = map(parse_expression, pieces)
    return Read("relation", Expression("add", (left, Expression("neg", (right,)))), marks=signs[0])


def _interval(low: Expression, high: Expression, first: str, last: str) -> Read:
    marks = ("(" if first == "<" else "[") + (")" if last == "<" else "]")
    return Read("row", parts=(Read("value", low), Read("value", high)), marks=marks)


def _united(text: str, nested: int) -> Read:
    """A union of intervals, a tuple, a set, or one value."""
    if (matrix := _MATRIX.fullmatch(text)) is not None:
        return _matrix(matrix[2], nested)
    sets = _split(text, r"\\cup(?![a-z])|\bU\b(?=\s*[(\[])")
    if len(sets) > 1:
        if len(sets) > MAX_ITEMS:
            raise Unreadable("too many items")
        return Read("union", parts=tuple(_united(each.strip(), nested + 1) for each in sets))
    inside, marks = _bracketed(text)
    if inside is not None:
        items = _split(inside, r",|;") if "{" not in marks else [inside]
        if "{" in marks:
            return _list([_read(inside, nested + 1)])._replace(marks=marks)
        if len(items) > 1:
            if len(items) > MAX_ITEMS:
                raise Unreadable("too many items")
            return Read("row", parts=tuple(_read(each.strip(), nested + 1) for each in items), marks=marks)
    return _value(text)


def _value(text: str) -> Read:
    ratio = _split(text, ":")
    if len(ratio) > 1:
        return Read("row", parts=tuple(Read("value", parse_expression(each)) for each in ratio), marks=":")
    if r"\pm" in text or r"\mp" in text:
        signed = [re.sub(r"\\(pm|mp)(?![a-z])", lambda m, s=s: s[m[1] == "mp"], text) for s in ("+-", "-+")]  # type: ignore[misc]
        return _list(Read("value", parse_expression(each)) for each in signed)
    try:
        return Read("value", parse_expression(text))
    except Unreadable:
        words = re.sub(r"[()]", "", text).strip()
        if _WORDS.fullmatch(words):
            return Read("text", marks=plain(words))
        raise


def _matrix(rows: str, nested: int) -> Read:
    read: list[Read] = []
    for row in filter(str.strip, re.split(r"\\\\", rows)):
        cells = row.split("&")
        if len(cells) > MAX_ITEMS or len(read) == MAX_ITEMS:
            raise Unreadable("too large")
        read.append(Read("row", parts=tuple(_value(cell.strip()) for cell in cells)))
    return Read("matrix", parts=tuple(read))


def _list(items: Iterator[Read] | list[Read]) -> Read:
    """A list without lists in it, but for sets in braces."""
    flat: list[Read] = []
    for item in items:
        flat += item.parts if item.kind == "list" and not item.marks else (item,)
    if len(flat) > MAX_ITEMS:
        raise Unreadable("too many items")
    return Read("list", parts=tuple(flat))


def _bracketed(text: str) -> tuple[str | None, str]:
    """(what the brackets around all of `text` hold, the two brackets); None if there are none."""
    spelt = text.replace(r"\{", "\x01").replace(r"\}", "\x02").replace(r"\lbrace", "\x01").replace(r"\rbrace", "\x02")
    if len(spelt) < 2 or spelt[0] not in "([{\x01" or spelt[-1] not in ")]}\x02":
        return None, ""
    depth = 0
    for i, character in enumerate(spelt):
        depth += character in "([{\x01"
        depth -= character in ")]}\x02"
        if depth == 0 and i < len(spelt) - 1:
            return None, ""
    marks = (spelt[0] + spelt[-1]).replace("\x01", "{").replace("\x02", "}")
    return spelt[1:-1].replace("\x01", r"\{").replace("\x02", r"\}"), marks


def _split(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators that stand in no brackets."""
    parts, start = [], 0
    for match in _at_top(text, re.compile(separator)):
        parts.append(text[start : match.start()])
        start = match.end()
    return [*parts, text[start:]]


def _at_top(text: str, wanted: re.Pattern[str]) -> list[re.Match[str]]:
    """The matches that stand in no brackets."""
    depths, depth = [], 0
    for character in text:
        depths.append(depth)
        depth += character in _OPEN
        depth -= character in _CLOSE
        depths[-1] = min(depths[-1], depth)
    return [match for match in wanted.finditer(text) if depths[match.start()] == 0]


# --------------------------------------------------------------------- comparison


_BLANK = re.compile(r"(?<!\d)\s|\s(?!\d)")  # that says nothing: 3 4/5 is not 34/5


def equal(answer: str, references: Iterable[str]) -> bool:
    """Whether an answer is equal to one of the references, as far as `MAX_WORK` operations tell."""
    work = WorkDone()
    mine = cleaned(answer)
    try:
        return any(_is_equal(answer, mine, each, work) for each in references)
    except TooMuchWork:
        return False


def _is_equal(answer: str, mine: str, reference: str, work: WorkDone) -> bool:
    theirs = cleaned(reference)
    if mine and _BLANK.sub("", mine) == _BLANK.sub("", theirs):
        return True
    if (shares := _shares(mine, theirs, work)) is not None:
        return shares
    try:
        said, wanted = read(answer), read(reference)
    except (Unreadable, RecursionError):
        return False
    return _equal(said, wanted, work)


def _shares(mine: str, theirs: str, work: WorkDone) -> bool | None:
    """Whether two numbers are equal of which one has a percent sign; None if they are no such pair."""
    if mine.endswith("%") == theirs.endswith("%"):
        return None
    try:
        values = [exact(parse_expression(each.removesuffix("%").strip()), work) for each in (mine, theirs)]
    except Unreadable:
        return None
    if None in values:
        return None
    told = [
        numbers.Number("", value, each.endswith("%"))
        for value, each in zip(values, (mine, theirs), strict=True)
        if value is not None
    ]
    return numbers.same_number(told[0], told[1])


def _equal(said: Read, wanted: Read, work: WorkDone) -> bool:
    work.add(1)
    said, wanted = (each.parts[0] if each.kind == "list" and len(each.parts) == 1 else each for each in (said, wanted))
    if said.kind != wanted.kind or (said.name and wanted.name and said.name != wanted.name):
        return False
    if said.kind == "value":
        assert said.node is not None and wanted.node is not None
        return _same_value(said.node, wanted.node, work)
    if said.kind == "relation":
        assert said.node is not None and wanted.node is not None
        if said.marks in ("<", r"\le"):
            return said.marks == wanted.marks and same_value(said.node, wanted.node, work)
        return said.marks == wanted.marks and proportional(said.node, wanted.node, work)
    if (said.kind != "list" and said.marks != wanted.marks) or len(said.parts) != len(wanted.parts):
        return False
    if said.kind == "union" or (said.kind == "list" and not _is_ordered(said, wanted)):
        return _same_members(said.parts, wanted.parts, work)
    return all(_equal(mine, theirs, work) for mine, theirs in zip(said.parts, wanted.parts, strict=True))


def _is_ordered(said: Read, wanted: Read) -> bool:
    """Whether values without names answer to several names, as 3, 4 to x = 3, y = 4."""
    return len({each.name for each in wanted.parts} - {""}) > 1 and not any(each.name for each in said.parts)


def _same_members(said: tuple[Read, ...], wanted: tuple[Read, ...], work: WorkDone) -> bool:
    left = list(said)
    for each in wanted:
        found = next((i for i, mine in enumerate(left) if _equal(mine, each, work)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_value(said: Expression, wanted: Expression, work: WorkDone) -> bool:
    if undone(said, work) > undone(wanted, work) or not symbols(said) <= symbols(wanted):
        return False
    return same_value(said, wanted, work)


def is_readable(reference: str) -> bool:
    """Whether a reference can be compared otherwise than by its characters."""
    try:
        return len(reference) <= MAX_CHARS and bool(read(reference))
    except (Unreadable, RecursionError):
        return False
