"""A dialogue between an environment and a policy, without I/O: no engine, no network, no clock.

    ask() -> token ids that the next answer continues | None, as it is over      answer(turn)      rollout

Three drive it. Collection and evaluation take answers from an engine; admission takes them from a stranger's message,
and what the environment says is said here anew, never believed.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm_node.errors import UserError
from swarm_node.tasks.base import Environment
from swarm_node.types import Rollout, Task, Turn
from swarm_protocol.limits import MAX_TEXT_CHARS, MAX_TURNS

Between = Callable[[str, bool], list[int] | None]
"""(what the environment says, whether the answer before it ended by itself) -> tokens up to the next answer; None if
they cannot be encoded."""


class Dialogue:
    """One dialogue about a task."""

    def __init__(
        self,
        task: Task,
        environment: Environment,
        prompt_ids: list[int],
        between: Between,
        opened: bool,
        failed: Callable[[Task, Exception], None],
    ) -> None:
        """`prompt_ids`: the environment's first message, framed and encoded. `opened`: prompts begin the reasoning of
        an answer, which then lacks its `<think>`. `failed` is told when the environment raises at an answer."""
        self.task = task
        self.prompt_ids = prompt_ids
        self.turns: list[Turn] = []
        self.over = False
        self.is_cut = False  # the next answer has no room: it ended early
        self.reward: float | None = None  # in [0, 1]; None = the environment does not judge
        self._environment, self._between, self._opened, self._failed = environment, between, opened, failed
        self._messages = environment.reset(task)
        self._context: list[int] = []
        self._asked = ""

    @property
    def said(self) -> str:
        """The last answer, from where its reasoning begins."""
        return f"<think>{self.turns[-1].text}" if self._opened else self.turns[-1].text

    @property
    def rollout(self) -> Rollout:
        """The answers so far, at least one."""
        return Rollout(self.turns, cut=self.is_cut)

    def ask(self) -> list[int] | None:
        """Token ids that the next answer continues; None if the dialogue is over."""
        if self.over:
            return None
        spoken = (id for turn in self.turns for id in [*turn.context, *turn.token_ids])
        return [*self.prompt_ids, *spoken, *self._context]

    def answer(self, turn: Turn) -> None:
        """Continue with an answer, whose context is what the environment said before it. UserError if the environment
        goes on for too long, or if the policy takes one turn only."""
        turn.context, self._context = self._context, []
        turn.asked, self._asked = self._asked, ""
        self.turns.append(turn)
        try:
            self._messages, reward, self.over = self._environment.step(self.task, self._messages, self.said)
        except Exception as error:  # library scorers raise on text that they did not expect: that is a wrong answer
            self._failed(self.task, error)
            reward, self.over = 0.0, True
        self.reward = None if reward is None else min(1.0, max(0.0, reward))
        if not self.over:
            self._asked = self._says()
            context = self._between(self._asked, turn.finished)
            if context is None:
                self.cut()
            else:
                self._context = context

    def cut(self) -> None:
        """End it, since the next answer has no room; the reward so far counts."""
        self.over = self.is_cut = True

    def _says(self) -> str:
        """What the environment says next."""
        last, label = self._messages[-1], self.task.label
        if len(self.turns) >= MAX_TURNS:
            raise UserError(f"task {label!r} asks for more than {MAX_TURNS} answers: let it end sooner")
        if last["role"] != "user" or len(last["content"]) > MAX_TEXT_CHARS:
            raise UserError(
                f"task {label!r} goes on with what is no message of a user of {MAX_TEXT_CHARS:,} characters"
            )
        return last["content"]
