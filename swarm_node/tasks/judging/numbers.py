r"""The number that an answer ends with: `84 apples`, `$1,200`, `**84**`, `x = -3`, `\(\frac{1}{2}\)`, `1.2 x 10^5`.

    text -> `plain_digits` -> what stands behind an explicit "answer is", else all of it -> its last number

Nothing is evaluated, and a number has bounded digits and exponent. A number that is part of something else is none:
the power in `2^3`, the factor in `2x`, `5:30`, `3, 5`, `7 or 8`, `less than 8`.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from typing import NamedTuple

from swarm_node.tasks.judging.spelling import NO_UNITS, WRAPPED, behind, spelt

MAX_DIGITS = 400
MAX_EXPONENT = 400

# --------------------------------------------------------------------- one spelling

_SIGNS = str.maketrans({"—": " - ", "⁄": "/", "∕": "/"})
_NEGATIVE = re.compile(r"(?<![\d)%])(?<![\d)%] )(?<!\b[a-zA-Z] )(?:negative|minus)\s+(?=[$€£]?[\d.])", re.IGNORECASE)
_DROPPED = re.compile(
    r"\*\*|__|`|\\[,!;:]|\\(?:left|right|displaystyle|bigl?|bigr?)(?![a-zA-Z])|\\[()\[\]]|[$€£¥₹]|\{(?=,\})|(?<=,)\}"
    r"|(?<![a-zA-Z])(?:USD|EUR|US)(?=\s*[-+]?[\d.])|\^\s*\{?\s*\\circ\s*\}?|°"
)
_GROUPED = re.compile(r"(?<=\d),(?:\\!\s*|\s*\\!\s*)(?=\d{3})")  # 11,\! 111
_RAISED = r"\s*\^\s*\{?[23]\}?"
_LENGTH = r"(?:[kcdm]?m|in|ft|yd|mi|inch(?:es)?|feet|foot|units?|met(?:er|re)s?)"
_PER = rf"(?<=\d)\s*[a-zA-Z]+(?:{_RAISED})?\s*/\s*(?:{_LENGTH}|s(?:ec(?:ond)?)?|h(?:r|our)?|min)"  # kg/m, m^2/s
_UNIT_POWER = re.compile(rf"(?:(?<=[\d\s]){_LENGTH}|{_PER}){_RAISED}")
_CHUNK = re.compile(r"(?<![\w.,'(\[])\d[\d.,']*\d")
_SPACED = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/])")
_FRACTION = re.compile(r"(?P<whole>\d\s*)?\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_LOOSE_SIGN = re.compile(r"(^|[=(:])\s*([-+])\s+(?=[\d.])")


def plain_digits(text: str) -> str:
    """The end of `text`, digits and signs in one spelling, without markup, currency signs and LaTeX around numbers."""
    text = _NEGATIVE.sub("-", spelt(text).translate(_SIGNS))
    text = text.replace(r"\$", "").replace(r"\%", "%").replace("\\ ", " ").replace("~", " ")
    text = _DROPPED.sub("", _GROUPED.sub(",", WRAPPED.sub(r" \1", text)))
    text = _CHUNK.sub(_with_point, _UNIT_POWER.sub(lambda m: re.sub(_RAISED, "", m[0]), text))
    text = _SPACED.sub(lambda m: m[0].replace(" ", ""), text)
    return _LOOSE_SIGN.sub(r"\1 \2", _FRACTION.sub(_slashed, text)).strip()


def _with_point(match: re.Match[str]) -> str:
    """A number with a decimal comma, or with points or apostrophes between thousands, as `1234.5`; others as they
    are."""
    text = match[0]
    if re.fullmatch(r"\d{1,3}(?:'\d{3})+(?:\.\d+)?", text):
        return text.replace("'", "")
    if re.fullmatch(r"[1-9]\d{0,2}(?:\.\d{3}){2,}|[1-9]\d{0,2}(?:\.\d{3})+,\d+", text):
        return text.replace(".", "").replace(",", ".")
    if re.fullmatch(r"\d+,\d{1,2}|0,\d+|\d{4,},\d+", text):
        return text.replace(",", ".")
    return text


def _slashed(match: re.Match[str]) -> str:
    above, below = match[2] or match[4], match[3] or match[5]
    return f"{match['whole'].strip()} {above}/{below}" if match["whole"] else f"{above}/{below}"


# --------------------------------------------------------------------- one number in digits

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+|(?=\.\d))(?:\.\d+)?"
_POWER_OF_TEN = (
    r"(?:[eE][-+]?\d+(?![\w.])|\s*(?:\*|x|×|·|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+))"
)
_TOKEN = re.compile(
    rf"(?P<sign>(?:(?<![\w.)\]}}%])[-+])?)(?P<head>{_UNSIGNED})(?P<power>{_POWER_OF_TEN}?)"
    r"(?:(?P<mixed>\s+\d+(?=\s*/\s*\d))?\s*/\s*(?P<below>\d+))?"
)
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")
_PERCENT = re.compile(r"\s*(?:%|percent\b)")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"\s+({'|'.join(_SCALES)})\b", re.IGNORECASE)
_UNITS = frozenset("gmshLlCFNJWVA")  # single letters behind a number that are units, not variables: 5 m, 20 C
_ATTACHED = re.compile(  # behind a number that is part of something else
    r"[ \t]*(?:[\^!·×÷±∓‰_]|\\(?!end|q?quad|approx|\\)|\*(?!\*)|\+[ \t]*[\w\\(]|"
    r"[-/][ \t]*(?:[a-zA-Z](?![a-zA-Z])|\d|\\|\())"
    r"|[a-zA-Z](?![a-zA-Z])|[α-λν-ωΑ-Ψ√∛∜∞]|\+(?=\s|\Z)|\([a-zA-Z]\)|[.,:/']\d"
    r"|\s+(?:less|more|fewer) than|\s+or\s+(?:more|less|fewer|higher|lower)\b"
    rf"|[ \t]+(?:{NO_UNITS}|(?:pi|π|[xyz]|bn|mn|mln)(?![\w']))"
    r"|\s+(?:is|are|was)(?:n't|n’t|\s+(?:not|wrong|incorrect|false)\b)"
)
_BEFORE = re.compile(  # before such a number
    r"(?:\\sqrt\s*(?:\[[^\]]*\])?\s*\{?|[√∛∜^_#!~≈≠¬∝<>≤≥≲≳≪≫±∓]|[!/<>]=|\*\*|\^\s*[({]?\s*-?|\\(?:[lg]eq?|pm|mp|neg)|-\(\s*|"
    r"(?:\d|\b[a-zA-Z]|\))[ \t]*[-+*/×÷·⋅∙•∗%&]{1,2}[ \t]*|\d[ \t]*x[ \t]*|(?:\b[a-zA-Z][(\[]|[\d)]\()\s*"
    r"|\b(?:sqrt|log|ln|sin|cos|tan|exp)\s*(?:_\s*(?:\{[^{}]*\}|\w+))?\s*[({]?\s*"
    r"|(?:\b(?:root|half|third|quarter|fourth|fifth|tenth|percent)|%)\s+of"
    r"|\b(?:[pb]?mod|modulo|choose|negative|minus|plus|times|divided by|out of|twice|double|triple|point)"
    r"|\b(?:less|more|fewer|greater|larger|smaller|higher|lower) than(?: or equal to)?|\bat (?:least|most)"
    r"|\b(?:over|under|above|below|almost|nearly|up to))\s*[({]?\Z|\d[,.:/']\Z",
    re.IGNORECASE,
)
_NOT = re.compile(
    r"(?:\bnot|n't|n’t|≠|!=|\\neq?|\b(?:nor|never|cannot|except|other than|(?:anything|everything|all) but))\s+"
    r"(?:(?:equal to|be|just|exactly|necessarily|really)\s+)*\Z",
    re.IGNORECASE,
)


class Number(NamedTuple):
    """A number as it was written, and its value."""

    text: str
    value: Fraction
    percent: bool = False


def same_number(answer: Number, reference: Number) -> bool:
    """Whether both are one number; a percent sign may be left out, or 50 % be written 0.5."""
    if answer.value == reference.value:
        return answer.percent == reference.percent or abs(reference.value) >= 1 or not reference.value
    if answer.percent != reference.percent:
        share, other = (answer, reference) if answer.percent else (reference, answer)
        return share.value / 100 == other.value
    return False


def _understood(match: re.Match[str], text: str) -> Number | None:
    """The number in a match, unless what stands around it makes it part of something else."""
    start, end = match.span()
    before = text[max(0, start - 40) : start]
    if _glued(text, start) or before[-1:].isdigit() or is_denied(before):
        return None
    value = _value(match)
    if value is None:
        return None
    if scale := _SCALE.match(text, end):
        value, end = value * 10 ** _SCALES[scale[1].lower()], scale.end()
    sign = _PERCENT.match(text, end)
    end = sign.end() if sign else end
    after = _ATTACHED.match(text, end)
    if after and after[0] not in _UNITS:
        return None
    return Number(text[start:end].strip(), value, sign is not None)


def is_denied(before: str) -> bool:
    """Whether what stands before a number makes it another one, a bound, or a number that it is not."""
    return bool(_BEFORE.search(before) or _NOT.search(before))


def _glued(text: str, start: int) -> bool:
    """Whether it belongs to what stands before it, as in CO2, H_{2}O and 101_2."""
    return re.search(r"(?:[a-zA-ZÀ-ɏΑ-ω_]|_\{)\Z", text[max(0, start - 2) : start]) is not None


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a match; None for too many digits, a fraction by zero, or one that is a whole number: a division
    left to do."""
    if len(match[0]) > MAX_DIGITS:
        return None
    value = Fraction(match["head"].replace(",", ""))
    if match["power"]:
        exponent = int(re.findall(r"[-+]?\d+", match["power"])[-1])
        if abs(exponent) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** exponent
    if match["below"]:
        below = int(match["below"])
        above = int(match["mixed"]) if match["mixed"] else value.numerator
        if match["power"] or value.denominator != 1 or below == 0 or above % below == 0:
            return None
        value = value + Fraction(above, below) if match["mixed"] else Fraction(above, below)
    return -value if match["sign"] == "-" else value


# --------------------------------------------------------------------- the one that counts

_LISTED = re.compile(r"(?m)^\s*\d{1,3}[.)][ \t]+(?=\S)")
_MARK = re.compile(
    r"\b(?:answers?|final result)\b(?:\s+(?:to|of|for)\b[^.\n:=]{0,80}?)?\s*"
    r"(?:\b(?:is|are|equals|would be|should be|must be|will be|comes to)\b|[:=])+\s*[:=]?",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"\b(?:wait|actually|correction|sorry|mistake|instead|rather|recheck)\b", re.IGNORECASE)
_TO_LAST_DIGIT = re.compile(r".*\d", re.DOTALL)
_CLAUSE_END = re.compile(r"\n|[;!?]|[.,](?=\s|\Z)|\b(?:because|since|as)\b", re.IGNORECASE)
_DENIED = re.compile(r".*\bbut\s", re.IGNORECASE | re.DOTALL)  # if it has a "not"
_JOINED = re.compile(
    r"\d[^\s,;]{0,12}(?:\s*[,;]\s*(?:and|or)?|\s+(?:or|and|to|through|vs\.?|versus))\s*(?:[a-zA-Z]\w{0,2}\s*=\s*)?\Z"
    r"|\d[ \t]+\Z|\d\s+\d+\s+\Z",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"\s*(?:(?:,\s*)?\b(?:or|and)\s+(?:[a-zA-Z]\w{0,2}\s*=\s*)?-?[\d.]|[,;]\s*(?:[a-zA-Z]\w{0,2}\s*=\s*)?-?[\d.])",
    re.IGNORECASE,
)


def read_number(place: str) -> Number | None:
    """The number that the text in `place` ends with, or that stands behind its last "answer is"; in words where it has
    no digit."""
    text = plain_digits(place)
    after = behind(_MARK, text)
    numbers = _TO_LAST_DIGIT.match(after)
    if numbers is None:
        return read_words(after)
    if after is not text and not _CORRECTED.search(numbers[0]):
        end = _CLAUSE_END.search(after, len(after) - len(after.lstrip()))
        clause = after[: end.start()] if end else after
        if re.search(r"\d", clause):
            return _number_in(clause, after)
    return _last(_LISTED.sub("", after))


def number_of(reference: str) -> Number | None:
    """The only number of a reference, or the one it ends with; None if it has none."""
    text = plain_digits(reference)
    return _last(text) if re.search(r"\d", text) else read_words(text)


def _number_in(clause: str, whole: str) -> Number | None:
    """The number of the clause behind "answer is": after its last equals sign, else its first."""
    denied = _DENIED.match(clause)
    rest = clause[denied.end() :] if denied and re.search(r"\bnot\b", denied[0], re.IGNORECASE) else clause
    left, _, right = rest.rpartition("=")
    rest = right if re.search(r"\d", right) else left
    for match in _TOKEN.finditer(rest):
        if _ORDINAL.match(rest, match.end()):
            return None
        found = _understood(match, rest)
        after = whole[whole.index(rest) + match.end() :]
        return None if found is None or _GOES_ON.match(after.lstrip("%")) else found
    return None


def _last(text: str) -> Number | None:
    """The last number of the text; None if it belongs to something else."""
    last = None
    for match in _TOKEN.finditer(text):
        if not _ORDINAL.match(text, match.end()) and not _glued(text, match.start()):
            last = match
    if last is None or _JOINED.search(text[max(0, last.start() - 40) : last.start()]):
        return None
    return _understood(last, text)


# --------------------------------------------------------------------- numbers in words

_SMALL = {
    word: i
    for i, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen".split()
    )
}
_TENS = {word: 10 * i for i, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
_WORDS = re.compile(r"[a-z]+|[^a-z\s-]+", re.IGNORECASE)
_SAID_NEGATIVE = re.compile(r"(?:\b([a-z]+)\s+)?\b(?:negative|minus)\s+\Z")
_SAID_PART = re.compile(rf"\W+(?:{NO_UNITS}|and an? |quarters?\b|point\b|over\b|times\b|plus\b|minus\b|or\b)")


def read_words(text: str) -> Number | None:
    """The number in words that the text ends with: `One + Four = Five.`, `twenty-five`. A single `one` is a pronoun
    unless it is all there is."""
    runs: list[list[str]] = [[]]
    text = text.lower()
    words = _WORDS.findall(text)
    for i, word in enumerate(words):
        joins = word == "and" and runs[-1][-1:] and words[i + 1 : i + 2] and runs[-1][-1] in _SCALES
        if word in _SMALL or word in _TENS or (word in _SCALES and runs[-1]):
            runs[-1].append(word)
        elif not joins and runs[-1]:
            runs.append([])
    spoken = [run for run in runs if run]
    if not spoken or (spoken[-1] == ["one"] and len(words) > 2):
        return None
    if len(spoken) > 1 and re.search(rf"\b{spoken[-2][-1]}\s*(?:,|or|and)\s*{spoken[-1][0]}\b", text):
        return None
    value = _spoken(spoken[-1])
    if value is None:
        return None
    found = deque(re.finditer(r"\W+(?:and\W+)?".join(rf"\b{word}\b" for word in spoken[-1]), text), maxlen=1)
    if not found:
        return None
    before, after = text[max(0, found[0].start() - 40) : found[0].start()], text[found[0].end() :]
    sign = _SAID_NEGATIVE.search(before)
    if (sign is None and is_denied(before)) or _SAID_PART.match(after):
        return None
    if sign is not None and sign[1] in {**_SMALL, **_TENS, **_SCALES}:  # ten minus five
        return None
    return Number(("minus " if sign else "") + " ".join(spoken[-1]), Fraction(-value if sign else value))


def _spoken(words: list[str]) -> int | None:
    """The value of words such as two hundred five; None if they are several numbers in a row."""
    total, part, least = 0, 0, 10**15
    for word in words:
        if word == "hundred":
            if not 0 < part < 100:
                return None
            part *= 100
        elif word in _SCALES:
            scale = 10 ** _SCALES[word]
            if not part or scale >= least:
                return None
            total, part, least = total + part * scale, 0, scale
        else:
            value = _SMALL.get(word, _TENS.get(word, 0))
            room = (
                100
                if part % 1000 and not part % 100
                else 10
                if part % 100 >= 20 and not part % 10
                else 0
                if part
                else 1000
            )
            if value >= room:
                return None
            part += value
    return total + part
