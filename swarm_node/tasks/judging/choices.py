"""The choice that an answer names (`(B)`, `B) Paris`, `option B`), and the yes or no that it says."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from swarm_node.tasks.judging.spelling import MAX_READ_CHARS, WRAPPED, behind, is_unsure

_MARKUP = re.compile(r"\*\*|__|`|[$]|\\[()\[\],;: ]|(?<![\w*])\*(?=\w)|(?<=\w)\*(?![\w*])")
_BLANKS = re.compile(r"\s{2,}")
_LABEL_ALONE = re.compile(
    r"(?:the\s+)?(?:(?:correct|right|final)\s+)?(?:option|choice|answer|letter)?\s*[:#]?\s*[(\[{\"']?\s*([A-Za-z]|\d{1,2})\s*[)\]}\"']?\s*[.:,!]?",
    re.IGNORECASE,
)
_LABELLED = re.compile(r"[(\[]?(?:([A-Za-z]|\d{1,2})(?:[)\]]+[.:]?|[.:])|([B-HJ-Z])(?=\s+[A-Z]))\s+(\S.*)", re.DOTALL)

_NUMBERED = re.compile(r"[(\[]?(\d{1,2})(?:[)\]]+[.:]?|[.:])\s+[^\d\s].*")
_ONE = r"(?:option|choice|answer|letter)?\s*[(\[\"']*([A-Za-z]|\d{1,2})(?![\w'’]|\.\d)"
_MARKED = re.compile(
    rf"\b(?:answer|choice|option|solution)s?\b[^.\n:()]{{0,60}}?(?:\bis\b|\bbe\b|:|=)\s*[:=]?\s*"
    r"(?:\b(?:therefore|thus|definitely|clearly|probably|indeed|simply|for sure|surely|certainly|obviously|most likely)"
    rf"\b,?\s*)?{_ONE}"
    rf"|\b(?:choose|pick|select|selected|chose|go with|going with)\s+{_ONE}"
    rf"|\A\W*([A-Z])[)\].:,]?\s+(?:because|since|as it)\b"
    r"|(?<![\w'’(\[])[(\[]?\b([A-Z])[)\]]?\s+(?:is|must be|would be|should be)\s+(?:the\s+)?"
    r"(?:correct|right|best|answer)\b",
    re.IGNORECASE,
)
_DECORATED = re.compile(
    r"[(\[]([A-Za-z]|\d{1,2})[)\]]|(?<![\w'’.(\[])([A-Z])[).:](?=\s|\Z)|\b(?:option|choice|letter)\s+([A-Z]|\d{1,2})(?![\w'’]|\.\d)"
)
_BARE = re.compile(r"(?<![\w'’.])([B-HJ-Z])(?![\w'’]|\.\w)")
_LINE = re.compile(r"(?m)^[ \t]*[(\[]?([A-Za-z]|\d{1,2})[)\].:]+[ \t]+(\S.*)$")
_LIST_LINE = re.compile(r"\s*[(\[]?(?:[A-Za-z]|\d{1,2})[)\].:]+\s+\S")
_OR = re.compile(
    r"[)\]\"']*\s*(?:(?:,|\(|[—–-])?\s*\b(?:[Oo]r|and|through|to|plus|as well as)\b|/|,|&|\|)\s*"
    r"(?:maybe|perhaps|possibly|even)?\s*(?:option|choice)?\s*[(\[\"']*([A-Zb-hj-z]|\d{1,2})(?![\w'’])"
)
_TAKEN_BACK = re.compile(
    r"[^\w]{1,4}\s*(?:[Nn]o|[Ww]ait|[Aa]ctually|[Ss]orry|[Cc]orrection)\b[,:]?\s*(?:no,?\s*)?(?:(?:it's|it is)\s+)?"
    r"(?:(?:option|choice)\s+)?[(\[]*([B-HJ-Z]|A(?!\s+[a-z]))(?![\w'’])"
)
_BEFORE_OR = re.compile(
    r"(?<![\w'’])([A-Z]|\d{1,2})[)\]\"']*\s*(?:,?\s*\b(?:or|and|through|to)\b|/|,|&)\s*(?:option|choice)?\s*[(\[\"']*\Z"
)
_NOT = re.compile(
    r"(?:\bnot|n't|n’t|\b(?:never|neither|nor|rule out|eliminate|exclude|reject|except|wrong is|incorrect is"
    r"|than|instead of|over|unlike|discard|ignore|none of|(?:anything|everything|all|any \w+) but))\s+"
    r"(?:be\s+)?(?:option\s+|choice\s+)?[(\[]*\Z",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"[)\]]?\s+(?:(?:is|are|was|would be|must be|seems|looks)\s*"
    r"(?:n't|n’t|\s+not|\s+(?:the |a )?(?:wrong|incorrect|false|ruled|trap|distractor))"
    r"|(?:can|could|may) be (?:ruled|eliminated|excluded)|(?:can|could)(?:'t|n't|’t|n’t| ?not) be|fails\b)",
    re.IGNORECASE,
)
_WORD_AFTER = re.compile(r"\s+(?!(?:because|since|as|is|which|due|for|that)\b)[a-z]")
_TEXT_BEHIND = re.compile(r"\b(?:answer|choice|option)\b[^.\n:]{0,60}?(?:\bis\b|:)\s*", re.IGNORECASE)


class Choice(NamedTuple):
    """What a reference or an answer names."""

    label: str = ""  # a letter in upper case, or a number
    text: str = ""


def plain_words(text: str) -> str:
    """The end of `text` in one spelling, without markup and LaTeX around words, with one blank or line break in place
    of several: patterns with optional parts between blanks would try all ways to share these out."""
    text = unicodedata.normalize("NFKC", text[-MAX_READ_CHARS:])[-MAX_READ_CHARS:]
    words = _MARKUP.sub("", WRAPPED.sub(r" \1", text)).strip()
    return _BLANKS.sub(lambda blanks: "\n" if "\n" in blanks[0] else " ", words)


def same_text(text: str) -> str:
    """What is compared of a choice's text: no case, no quotes, no full stop, no leading article."""
    text = " ".join(text.casefold().split()).strip(" .,;:!\"'“”()[]")
    return re.sub(r"^(?:the|an?)\s+", "", text)


def choice_of(reference: str) -> Choice:
    """The label of a reference, its text, or both."""
    text = plain_words(reference)
    if (alone := _LABEL_ALONE.fullmatch(text)) is not None:
        return Choice(alone[1].upper())
    if (both := _LABELLED.fullmatch(text)) is not None:
        return Choice((both[1] or both[2]).upper(), both[3].strip())
    return Choice(text=text)


def with_texts(question: str, accepted: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the accepted answers, labels with the text that the question has for them; the texts of its other choices), if
    it lists choices in lines. A text that could be a label itself, as a number, does not count."""
    listed = {match[1].upper(): match[2].strip() for match in _LINE.finditer(question)}
    texts = {label: text for label, text in listed.items() if _LABEL_ALONE.fullmatch(plain_words(text)) is None}
    named = [choice_of(each) for each in accepted]
    told = [f"{one.label}) {texts[one.label]}" for one in named if not one.text and one.label in texts]
    right = {same_text(one.text) for one in [*named, *map(choice_of, told)]}
    wrong = [text for label, text in texts.items() if label not in {one.label for one in named}]
    return (*accepted, *told), tuple(text for text in wrong if same_text(plain_words(text)) not in right)


def with_or_without_label(place: str) -> list[Choice]:
    """What `place` names if it holds a choice's whole text: as it is, behind "answer is", and both without a label in
    front."""
    text = plain_words(place)
    texts = text, behind(_TEXT_BEHIND, text)
    return [*(Choice(text=each) for each in texts), *map(choice_of, texts)]


def read_choice(place: str) -> Choice:
    """What the text in `place` names: its label, and the text that stands there besides. Both are empty if it names
    none, or several."""
    text = plain_words(place)
    if (alone := _LABEL_ALONE.fullmatch(text)) is not None:
        return Choice(alone[1].upper())
    if "\n" not in text and (first := _NUMBERED.fullmatch(text)) is not None:
        return Choice("" if _denied(first, text) else first[1])
    if (alone := _LABEL_ALONE.fullmatch(text.rpartition("\n")[2])) is not None:
        return Choice(alone[1].upper())
    return Choice(_label_in(text), behind(_TEXT_BEHIND, text).partition("\n")[0])


def _label_in(text: str) -> str:
    marked = [match for match in _MARKED.finditer(text) if _is_label(match, text)]
    if marked:
        return _unless_one_of_several(marked[-1], text)
    named = [match for match in _DECORATED.finditer(text) if not _denied(match, text)]
    labels = {_name(match) for match in named}
    if len(labels) > 1:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) > 1 and _LIST_LINE.match(lines[-1]) and _LIST_LINE.match(lines[-2]):
            return ""  # the choices, told again
        start = text.rfind(lines[-1])
        named = [match for match in named if match.start() >= start]
        labels = {_name(match) for match in named}
    if len(labels) == 1:
        return _unless_one_of_several(named[-1], text)
    if not labels and not _DECORATED.search(text):
        bare = [match for match in _BARE.finditer(text) if not _denied(match, text)]
        if len({match[1] for match in bare}) == 1:
            return _unless_one_of_several(bare[-1], text)
    return ""


def _name(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).upper()


def _is_label(match: re.Match[str], text: str) -> bool:
    """Whether the letter is no word: `the answer is a city`, `I am sure`."""
    index = match.lastindex or 0
    letter, end = match[index], match.end(index)
    if text[end : end + 1] in ("'", "’"):
        return False
    if letter.isdigit():
        return True
    if letter in ("A", "I") or letter.islower():
        wrapped = text[match.start(index) - 1 : match.start(index)] in ("(", "[", '"', "'")
        return wrapped or not _WORD_AFTER.match(text, end)
    return True


def _denied(match: re.Match[str], text: str) -> bool:
    start, end = match.start(), match.end(match.lastindex or 0)
    return bool(is_unsure(text, start) or _NOT.search(text[max(0, start - 30) : start]) or _WRONG.match(text, end))


def _unless_one_of_several(match: re.Match[str], text: str) -> str:
    index = match.lastindex or 0
    start, end = match.span(index)
    name = match[index].upper()
    others = _OR.match(text, end), _TAKEN_BACK.match(text, end), _BEFORE_OR.search(text[max(0, start - 20) : start])
    if _denied(match, text) or any(other is not None and other[1].upper() != name for other in others):
        return ""
    return name


# --------------------------------------------------------------------- yes and no

_YES = {"yes", "true", "correct", "y", "t", "yeah", "yep"}
_NO = {"no", "false", "incorrect", "n", "f", "nope"}
_SAID = r"(yes|no|true|false|correct|incorrect|wrong|yeah|yep|nope)\b"
_ALONE = re.compile(r"\W*([a-z]+)\W*", re.IGNORECASE)
_ANSWER_IS = re.compile(
    rf"\b(?:answer|conclusion)\b[^.\n:]{{0,60}}?(?:\bis\b|:)\s*(?:definitely|clearly|simply|a|therefore|thus|:)?\s*[\"'“(]*(not\s+)?{_SAID}",
    re.IGNORECASE,
)
_STARTS = re.compile(rf"\W*{_SAID}(?=\s*(?:[,.!:;\n—-]|\Z))", re.IGNORECASE)
_ENDS = re.compile(
    r"(?:\A|[.!?\n]|\b(?:so|thus|hence|therefore|wait|actually|rather),?)\s*"
    r"(?:the answer,? |so,? |thus,? |hence,? |therefore,? )?"
    rf"[\"'(]*{_SAID}[\"')]*[.!]?\s*\Z",
    re.IGNORECASE,
)
_ASKED = re.compile(rf"\?\s*{_SAID}\W*\Z|\({_SAID}\)\W*\Z", re.IGNORECASE)
_IS_SO = re.compile(
    r"\b(?:statement|claim|it|this|that|proposition|sentence)\s+(?:is|'s|must be)\s+"
    r"(?:therefore\s+|indeed\s+|thus\s+)?(not\s+)?(true|false|correct|incorrect)\b",
    re.IGNORECASE,
)
_EITHER = re.compile(
    r"\s*[\"')]*\s*(?:or|and|/|,?\s*but|)\s*[\"'(]*(?:yes|no|true|false|maybe)\b"
    r"|,?\s+(?:if|when|unless|only|in some|sometimes)\b",
    re.IGNORECASE,
)
_ENDS_WITH = re.compile(
    r"\W{1,4}(?:(?:but|also|wait|actually|sorry|rather|just kidding)\W{1,3}){0,3}(?:the answer is\s+)?"
    rf"{_SAID}\W*\Z",
    re.IGNORECASE,
)
_EITHER_BEFORE = re.compile(
    r"(?:yes|no|true|false)[\"')]*\s*(?:or|and|/)\s*[\"'(]*(?:not\s+)?\Z|\bneither\s+\Z"
    r"|\b(?:doubt|deny|false|wrong|incorrect|unlikely|if|suppose|assum(?:e|ing)|whether"
    r"|not (?:the case|true|clear|sure))(?:\s+(?:that|whether|if|to say))?"
    r"\s+(?:(?:it|this|that|the (?:statement|claim|proposition|sentence))\s+is\s+)?\Z",
    re.IGNORECASE,
)


def yes_or_no(reference: str) -> bool | None:
    """What a reference says; None if it is neither."""
    alone = _ALONE.fullmatch(plain_words(reference))
    word = alone[1].lower() if alone else ""
    return True if word in _YES else False if word in _NO else None


def read_yes_no(place: str) -> tuple[str, bool] | None:
    """The word of the text in `place` that says yes or no, and which; None if it says neither or both."""
    text = plain_words(place)
    alone = _ALONE.fullmatch(text)
    if alone is not None:
        word = alone[1]
        return (word, word.lower() in _YES) if word.lower() in _YES | _NO else None
    if (last := _last(_ANSWER_IS, text)) is not None:
        return _said(last, 2, text, bool(last[1]))
    if (asked := _ASKED.search(text)) is not None:
        return _said(asked, asked.lastindex or 1, text)
    said = [found for found in (_STARTS.match(text), _ENDS.search(text)) if found is not None]
    if said:
        read = {verdict for found in said if (verdict := _said(found, 1, text)) is not None}
        meant = {yes for _, yes in read}
        return next(iter(sorted(read))) if len(meant) == 1 else None
    last = _last(_IS_SO, text)
    return None if last is None else _said(last, 2, text, bool(last[1]))


def _last(wanted: re.Pattern[str], text: str) -> re.Match[str] | None:
    return max(wanted.finditer(text), key=lambda match: match.start(), default=None)


def _said(match: re.Match[str], group: int, text: str, denied: bool = False) -> tuple[str, bool] | None:
    start, end = match.span(group)
    if _EITHER.match(text, end) or _EITHER_BEFORE.search(text[max(0, start - 60) : start]):
        return None
    word = match[group]
    yes = word.lower() in _YES
    other = _ENDS_WITH.match(text, end)
    if is_unsure(text, match.start()) or (other is not None and (other[1].lower() in _YES) != yes):
        return None
    if denied:
        word = "no" if yes else "yes"
    return word, yes != denied
