"""The card of an exported model: README.md, as a hub shows it.

front matter    what programs read: library, tags, base model, licence
What was trained, Held-out figures, Settings, How to ask it, How to repeat it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarm_node.storage.plain_files import read_plain

LICENCE = re.compile(r"^license:[ \t]*['\"]?([A-Za-z0-9][A-Za-z0-9.\-]{0,39})['\"]?[ \t\r]*$", re.MULTILINE)
MAX_CARD_BYTES = 1 << 20
NAMES = {"pass_1": "share of right answers (pass@1)", "pass_k": "any answer right (pass@{})", "reward": "mean reward"}


@dataclass(frozen=True)
class FigureChange:
    """A held-out figure before and after training."""

    figure: str  # a key of `NAMES`
    before: float
    after: float
    interval: tuple[float, float] | None  # of the change, 95 %; None with too few questions


@dataclass(frozen=True)
class About:
    """What a card tells of a training. It names no place on the machine that trained."""

    base: str = ""  # name of the base on the hub, or one that the package knows; empty = not known
    base_in_words: str | None = None  # the same for people; empty = a directory on that machine, None = not said
    licence: str = ""  # the base's, as the hub writes it
    merged: bool = False  # whether an adapter was trained and merged into the base
    rounds: int = 0
    tasks: Sequence[str] = ()
    question_files: int = 0
    changes: Sequence[FigureChange] = ()
    questions: int = 0
    samples: int = 0
    measured: int = 0  # the round after which the later figures were measured
    settings: Mapping[str, str] = field(default_factory=dict)  # in words -> value
    command: str = ""


def front_matter(about: About, adapter: bool) -> str:
    """The card's YAML for hubs, with the lines of three dashes."""
    tags = ["swarm-node", "grpo", "reinforcement-learning", *(["lora"] if adapter else [])]
    lines = [
        f"library_name: {'peft' if adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {about.base}"] if about.base else []),
        *([f"license: {about.licence}"] if about.licence else []),
        "tags:",
        *(f"- {tag}" for tag in tags),
    ]
    return "\n".join(["---", *lines, "---"])


def licence_of(card: Path) -> str:
    """The licence that a model's README.md names in its front matter; empty if it names none."""
    try:
        text = read_plain(card, MAX_CARD_BYTES).decode("utf-8")
    except (OSError, ValueError):
        return ""
    opened, front, _ = (text.split("---", 2) + ["", ""])[:3]
    found = None if opened.strip() else LICENCE.search(front)
    return found[1] if found else ""


def sections(about: About, adapter: bool) -> str:
    """The sections about the training of an `adapter`, or of a whole model."""
    kind = "an adapter (LoRA)" if adapter else "a model with an adapter (LoRA) merged in" if about.merged else "a model"
    base = about.base_in_words
    if base is not None:
        base = f" It started from {base or 'a model in a directory of the machine that trained'}."
    rounds = f"in {about.rounds:,} round{'' if about.rounds == 1 else 's'} " if about.rounds else ""
    named = ", ".join(f"`{task}`" for task in about.tasks)
    files = about.question_files
    own = "" if not files else "a question file" if files == 1 else f"{files} question files"
    tasks = " and ".join(filter(None, (named, own))) or "its user's own tasks"
    parts = [f"This is {kind}, trained {rounds}with GRPO by swarm-node on {tasks}.{base or ''}"]
    if about.changes:
        parts.append(_figures(about))
    if about.settings:
        rows = "\n".join(f"| {name} | {value} |" for name, value in about.settings.items())
        parts.append(f"## Settings\n\n| setting | value |\n|---|---|\n{rows}")
    return "\n\n".join(parts)


def repeated(about: About) -> str:
    """The section with the command; empty without one."""
    if not about.command:
        return ""
    fence = "````" if "```" in about.command else "```"
    told = "Names in capitals stand for files of your own."
    return f"\n## How to repeat it\n\n{fence}sh\n{about.command}\n{fence}\n\n{told}\n"


def _figures(about: About) -> str:
    rows = []
    for each in about.changes:
        name = NAMES[each.figure].format(about.samples)
        between = "-" if each.interval is None else f"{each.interval[0]:+.3f} to {each.interval[1]:+.3f}"
        rows.append(f"| {name} | {each.before:.3f} | {each.after:.3f} | {each.after - each.before:+.3f} | {between} |")
    table = "\n".join(rows)
    after = f"after round {about.measured:,}" if about.measured else "after"
    return (
        f"## Held-out figures\n\n{about.questions:,} questions that were not trained on, {about.samples} "
        f"answers to each, before training and {after}:\n\n"
        f"| figure | before | after | change | 95 % interval of the change |\n|---|---|---|---|---|\n{table}"
    )
