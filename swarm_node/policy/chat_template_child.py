"""A program that finds what a chat template puts around a question. `chat_template` runs it in a process with limits.

    standard input  --{"template", "system", "special", "arguments"} as JSON--> frame
    frame  --{"frame": …} | {"error": …} as JSON--> standard output

A template is a program by a stranger, so it runs only here, once, and never on a question. It is rendered with a marker
in the question's place, and the text around the marker is the frame of all questions. This module imports only Jinja.
"""

from __future__ import annotations

import json
import re
import resource
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import cycle, product
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 2**30  # address space of the process; Python and Jinja map a quarter of it
MAX_CHARS = 2**18  # longest frame: as long as a prompt of 65,536 tokens
HALF = re.compile("[\ud800-\udfff]")  # of characters in two code units; no tokenizer takes one
PADDING = " \n\t \n"  # blanks around the marker, which show whether the template strips the question
PROBES = ("x", " two words,\n\n  two lines \n", "0123456789 " * 400)
"""Questions for which frame and template must give the same text."""
ANSWERS = ("7", "two lines\n\nof text")
"""Answers likewise. They have no reasoning, which many templates leave out of answers that have passed."""
SYSTEM = "{system}\n\n{question}"  # the question for a template that knows no system role


class FrameError(Exception):
    """The template has no frame; the text says why."""


class Frame(NamedTuple):
    """Text pieces, with the question between each two of them."""

    pieces: list[str]
    lstrip: bool  # whether the question loses blanks at its beginning
    rstrip: bool
    parts: bool = False
    """Whether the template takes contents in parts, [{"type": "text", "text": …}], as those of models that also see."""
    between: Sequence[str] = ()
    """Text pieces from the end of an answer to the next one, with the user's text between each two of them. Empty if
    the template has none: then only one answer is possible."""

    def around(self, question: str) -> str:
        """The prompt of a question."""
        return self._stripped(question).join(self.pieces)

    def after_answer(self, text: str) -> str:
        """What follows an answer, up to the next one, if the user says `text`."""
        return self._stripped(text).join(self.between)

    def _stripped(self, text: str) -> str:
        text = text.lstrip() if self.lstrip else text
        return text.rstrip() if self.rstrip else text


def frame_of(template: str, system: str, special: dict[str, Any], arguments: dict[str, Any] | None = None) -> Frame:
    """The frame of a chat template for one question after the `system` prompt (empty = none). Raises FrameError.

    `special` has the tokenizer's special tokens by name, and `arguments` what the user gives to the template. Contents
    are texts; where the template then fails or leaves the question out, they are parts.
    """
    compiled = _compiled(template)
    given = {**special, **(arguments or {})}
    try:
        return _of_contents(compiled, system, given, parts=False)
    except Exception as error:  # whatever a template raises at a text where it wants parts
        try:
            return _of_contents(compiled, system, given, parts=True)._replace(parts=True)
        except Exception:
            raise error from None


def _of_contents(compiled: jinja2.Template, system: str, given: dict[str, Any], parts: bool) -> Frame:
    """The frame for contents that are texts, or `parts`. Raises what the template raises, and FrameError."""

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}

    def render(messages: list[dict[str, Any]]) -> str:
        text = compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **given)
        if len(text) > MAX_CHARS:
            raise FrameError(f"it makes {len(text)} characters of one question")
        if HALF.search(text):
            raise FrameError("it writes half a character, which no text has")
        return text

    def apart(*texts: str) -> str:
        head = [message("system", system)] if system else []
        return render([*head, *map(message, cycle(("user", "assistant")), texts)])

    def joined(question: str, *texts: str) -> str:
        first = message("user", SYSTEM.format(system=system, question=question))
        return render([first, *map(message, cycle(("assistant", "user")), texts)])

    try:
        return _frame(apart)
    except FrameError:
        raise
    except Exception:  # templates are programs and raise what they like at a role they do not know
        if not system:
            raise
        return _frame(joined)


def _frame(render: Callable[..., str]) -> Frame:
    """The frame, from `render`, which takes question, answer, question … and gives the text of the prompt."""
    marker = f"question{secrets.token_hex(8)}"
    frame = _around(render(PADDING + marker + PADDING), marker)
    if any(frame.around(question) != render(question) for question in PROBES):
        raise FrameError("it does more to a question than to put text around it")
    return frame._replace(between=_between(render, frame))


def _between(render: Callable[..., str], frame: Frame) -> list[str]:
    """The pieces between an answer and the next one; none if the template fails there, if an answer stands elsewhere
    than where it is asked for, or if what follows it depends on more than the text that is said next."""
    answer, marker = f"answer{secrets.token_hex(8)}", f"question{secrets.token_hex(8)}"
    try:
        head, said, rest = render("x", answer, PADDING + marker + PADDING).partition(answer)
        found = _around(rest, marker)
        if (
            not said
            or not frame.around("x").startswith(head)
            or (found.lstrip, found.rstrip) != (frame.lstrip, frame.rstrip)
        ):
            return []
        frame = frame._replace(between=found.pieces)
        for question, reply, text in product(PROBES, ANSWERS, PROBES):
            if not render(question, reply, text).endswith(reply + frame.after_answer(text)):
                return []
    except Exception:  # templates are programs and raise what they like at a role that they do not know
        return []
    return found.pieces


def _around(text: str, marker: str) -> Frame:
    """The pieces of a rendered text around the marker, which has PADDING on both sides. Raises FrameError."""
    pieces = text.split(marker)
    if len(pieces) < 2:
        raise FrameError("it leaves the question out")
    lstrip = not all(piece.endswith(PADDING) for piece in pieces[:-1])
    rstrip = not all(piece.startswith(PADDING) for piece in pieces[1:])
    if not lstrip:
        pieces = [*(piece.removesuffix(PADDING) for piece in pieces[:-1]), pieces[-1]]
    if not rstrip:
        pieces = [pieces[0], *(piece.removeprefix(PADDING) for piece in pieces[1:])]
    return Frame(pieces, lstrip, rstrip)


def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": Namespace,
    }
    return environment.from_string(template)


class _Generation(Extension):
    """{% generation %} marks what the assistant says; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    x: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def main() -> int:
    """Limit this process to the CPU seconds of its last argument, then read a template and print its frame."""
    cpu_s = int(sys.argv[-1])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with suppress(ValueError, OSError):  # macOS does not have it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    asked = json.load(sys.stdin)
    try:
        told: dict[str, Any] = {"frame": frame_of(**asked)}
    except MemoryError:
        told = {"error": "it takes more memory than a text needs"}
    except Exception as error:  # whatever a stranger's program raises
        told = {"error": " ".join(f"{error}".split())[:300] or type(error).__name__}
    json.dump(told, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
