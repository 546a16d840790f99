"""What the documentation tells people to type, as data.

page -> fences (language, text) -> lines of shell -> commands (words)
     -> spans (`in backticks`)  ------------------^
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("docker/*.md")),
]

SHELL = {"sh", "bash", "shell", "console"}
OURS = {"swarm-node", "make", "python", "python3"}
ELSEWHERE = {
    *("apt-get", "aws", "az", "brew", "curl", "docker", "gcloud", "kubectl", "pip", "pipx", "scp", "ssh", "sudo", "uv"),
    *("cat", "cd", "command", "echo", "export", "git", "grep", "gzip", "head", "journalctl", "mkdir", "rm", "rsync"),
    *(
        "cp",
        "jq",
        "kill",
        "llama-gguf-split",
        "printf",
        "prometheus",
        "promtool",
        "sh",
        "source",
        "systemd-analyze",
        "systemctl",
        "tail",
        "tee",
        "tensorboard",
        "trackio",
        "wait",
        "watch",
    ),
}
"""Programs of others, that a test has no business starting. What is typed for them is checked for its shell syntax, its
SWARM_NODE_* variables and its paths in the repository."""
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """One program with its arguments."""

    where: str
    """Page and line."""
    words: tuple[str, ...]
    """Without the shell's quotes, and without what sets variables."""
    typed: bool
    """In a block to be copied, rather than mentioned in a sentence."""

    @property
    def program(self) -> str:
        return self.words[0].removeprefix(".venv/bin/")

    def __str__(self) -> str:
        return f"{self.where}: `{' '.join(self.words)}`"


@dataclass(frozen=True)
class Fence:
    """A fenced block."""

    where: str
    language: str
    text: str

    @property
    def is_shell(self) -> bool:
        """Also without a language, if it starts with a program of ours."""
        first = self.text.split(maxsplit=1)[0].removeprefix(".venv/bin/") if self.text.strip() else ""
        return self.language in SHELL or (not self.language and first in OURS)

    @property
    def is_script(self) -> bool:
        """A file of its own, not lines to type."""
        return self.text.startswith("#!")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> list[Fence]:
    text = page.read_text()
    return [
        Fence(f"{name_of(page)}:{text.count(chr(10), 0, m.start()) + 1}", m[2], re.sub(rf"(?m)^{m[1]}", "", m[3]))
        for m in FENCE.finditer(text)
    ]


def spans(page: Path) -> Iterator[tuple[str, str, str]]:
    """(place, text in backticks, paragraph that it stands in), outside fences."""
    text = FENCE.sub(lambda m: "\n" * m[0].count("\n"), page.read_text())
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        for m in SPAN.finditer(paragraph):
            yield f"{name_of(page)}:{line + paragraph.count(chr(10), 0, m.start())}", " ".join(m[1].split()), paragraph
        line += paragraph.count("\n")


def lines(script: str) -> list[str]:
    """Of shell, those that continue joined."""
    return [line for line in re.sub(r"\\\n\s*", "", script).splitlines() if line.strip()]


def split(line: str) -> list[list[str]]:
    """The simple commands of a line, as words: what is between `|`, `&&`, `;`, without comments and redirections."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if re.match(r"[0-9]?[<>]", word):
            if word.endswith((">", "<")):
                lexer.get_token()
        elif set(word) <= set("|&;"):
            found.append([])
        else:
            found[-1].append(word)
    assigned = re.compile(r"[A-Z_]+=")
    for words in found:
        while words and assigned.match(words[0]):
            del words[0]
    return [words for words in found if words]


def alternatives(span: str) -> list[str]:
    """`swarm-node pause | unpause RUN` -> `swarm-node pause`, `swarm-node unpause RUN`."""
    first, *others = re.split(r" \| ", span)
    prefix = first.rpartition(" ")[0]
    return [first, *(other if other.split()[0] in OURS | ELSEWHERE else f"{prefix} {other}" for other in others)]


def commands(page: Path) -> Iterator[Command]:
    """All that a page has people type or mentions as something to type."""
    for fence in fences(page):
        if fence.is_shell and not fence.is_script:
            for line in lines(fence.text):
                yield from (Command(fence.where, tuple(words), True) for words in split(line))
    for where, text, _ in spans(page):
        if re.match(rf"(\.venv/bin/)?({'|'.join(OURS | ELSEWHERE)}) ", text):
            plain = re.sub(r"<[^>]*>", "PLACE", text)
            for alternative in alternatives(plain):
                yield from (Command(where, tuple(words), False) for words in split_mention(alternative))
    for m in re.finditer(r"^ {4}(swarm-node .*)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        yield from (Command(name_of(page), tuple(words), True) for words in split(m[1]))


def split_mention(text: str) -> Iterator[list[str]]:
    """Of a sentence: `[RUN|SWARM]` is a word that may be left out."""
    for part in text.split(" && "):
        yield shlex.split(part.replace("[", "").replace("]", ""))


def stands_for_something(word: str) -> bool:
    """`RUN`, `DIR/x`, `battery|hot`, `swarm://…`: for the reader to fill in."""
    return bool(re.fullmatch(r"[A-Z][A-Z_/|…]*", word)) or "…" in word or "|" in word
