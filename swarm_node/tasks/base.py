"""The ports of tasks: an environment holds a dialogue about a task, and a task source makes the tasks of one.

`sources.ENVIRONMENTS` has the sources by name. docs/develop.md shows how to write one.
"""

from __future__ import annotations

from swarm_node.types import Task
from swarm_protocol.answer_form import AnswerForm

Messages = list[dict[str, str]]
"""A dialogue: `{"role": "user" | "assistant", "content": text}` for each message, oldest first."""


class Environment:
    """A dialogue about a task. The task's name and the answers decide it: every machine comes to the same rewards.

    One object serves all dialogues at once, so it keeps nothing of any of them.
    """

    def reset(self, task: Task) -> Messages:
        """The messages that begin the dialogue."""
        raise NotImplementedError

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        """Continue the dialogue with `answer`: all messages, the reward so far, whether it is over.

        The reward is from 0 to 1, 1 = right; None = this environment does not judge. Any error at an unexpected answer
        makes it a wrong answer.
        """
        raise NotImplementedError


class TaskSource(Environment):
    """An environment with its options, and the tasks that it makes; both are named so that others can make them too."""

    environment: str  # its name, the same on every machine: of a-z, 0-9 and _, else peers refuse its tasks
    config: str  # hash of its options: 16 hex digits
    generator: str
    """Name and version of the code that makes the tasks. Other versions may make other tasks of one name."""
    label: str  # short name for people
    path: str  # how the user asked for it, for example `small/gcd`
    size: int  # indices of tasks run from 0 to here
    turns = 1  # most answers in one dialogue
    form: AnswerForm = "any"  # `rewards.answer`: the form in which an answer counts
    finite = False  # whether all of them can be asked, as those of a file

    def task(self, index: int) -> Task | None:
        """Task number `index`; None if there is none."""
        raise NotImplementedError
