"""The records that packages exchange: task -> group -> step.

Any package may import this module, which imports only `protocol`, and no torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from swarm_protocol.messages import TaskName


class Task(msgspec.Struct, frozen=True):
    """One question, with what its checker needs to judge an answer."""

    name: TaskName  # the name from which any machine generates this task
    label: str  # short name of the environment, for metrics and tables
    question: str  # the bare question, before chat template or prompt template
    answer: str | None  # reference answer; `None` when only reward functions judge
    metadata: dict[str, Any] = {}  # further data for the checker; never sent
    slot: tuple[int, int] | None = None
    """(epoch, slot) that assigned the task to the peer that samples it; None outside a swarm."""
    accepted: tuple[str, ...] = ()  # all accepted answers, `answer` first, where there are several
    kind: str = ""  # kind of its answers (`swarm_protocol.answer_form`); empty = its environment judges them


class Sampling(msgspec.Struct, frozen=True):
    """The distribution that completions are drawn from."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    drawn: int = 0  # tokens that random numbers are drawn for, if more: a cut answer begins as a whole one


class Turn(msgspec.Struct):
    """One answer of a dialogue."""

    token_ids: list[int]  # answer tokens; the end-of-sequence token is included if and only if `finished`
    logprobs: list[float]
    """Log-probability of each token under the distribution that it was drawn from (temperature, top-p); empty if that
    is not known."""
    finished: bool  # whether the model ended the answer, rather than the length limit
    text: str = ""  # decoded answer without special tokens
    context: list[int] = []
    """Tokens between the answer before and this one, in which the environment speaks; never trained on. Empty in the
    first turn, which follows the prompt."""
    asked: str = ""  # what the environment says there

    @property
    def is_own(self) -> list[bool]:
        """Of each token of context and answer, whether the policy drew it."""
        return [False] * len(self.context) + [True] * len(self.token_ids)


class Rollout(msgspec.Struct):
    """One sampled dialogue: at least one turn."""

    turns: list[Turn]
    extracted: str | None = None  # the part of the last answer that was judged
    rewards: dict[str, float | None] = {}  # reward by function name; `None` = this function does not judge this answer
    reward: float = 0.0  # weighted sum of `rewards`: what training maximises
    correct: bool = False
    """The task's own checker gave full marks (pass@k counts this, whatever the reward functions say)."""
    checked: bool = True  # whether the task's own checker judged it; without that, `correct` says nothing
    cut: bool = False  # whether the dialogue ended early, since the next answer had no room; such are not shared
    advantage: float | None = None  # with which the last update trained on it; None = it did not

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all answers, which training takes as targets."""
        return self.turns[0].token_ids if len(self.turns) == 1 else [id for turn in self.turns for id in turn.token_ids]

    @property
    def spoken(self) -> list[int]:
        """All tokens behind the prompt: answers, with what the environment says between them."""
        return [id for turn in self.turns for id in [*turn.context, *turn.token_ids]]

    @property
    def before_last(self) -> list[int]:
        """The tokens behind the prompt that the last answer continues; none if it is the only one."""
        spoken = self.spoken
        return spoken[: len(spoken) - len(self.turns[-1].token_ids)]

    @property
    def logprobs(self) -> list[float]:
        """Of `token_ids`; fewer if some are unknown."""
        return self.turns[0].logprobs if len(self.turns) == 1 else [x for turn in self.turns for x in turn.logprobs]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def finished(self) -> bool:
        """Whether the model ended its last answer."""
        return self.turns[-1].finished

    @property
    def text(self) -> str:
        """The last answer."""
        return self.turns[-1].text

    @property
    def transcript(self) -> str:
        """All answers, and between them what the environment says, in lines that begin with `> `."""
        first, *later = self.turns
        return "".join([first.text, *(f"\n> {turn.asked}\n{turn.text}" for turn in later)])


class Group(msgspec.Struct):
    """The rollouts of one task."""

    task: Task
    prompt_ids: list[int]  # encoded prompt, shared by all rollouts
    rollouts: list[Rollout]
    policy_version: int = 0  # optimiser updates behind the policy that sampled it
    peer: str | None = None  # the peer that sampled it; None = this node
    created: float = 0.0  # when it was sampled, in seconds since the Unix epoch; set when the group leaves its round
    advantages: list[float] | None = None  # one advantage per rollout; None = compute them from the group itself


class Score(msgspec.Struct, frozen=True):
    """The score of one completion."""

    extracted: str | None  # the answer found in the text; `None` if there was none to judge
    rewards: dict[str, float | None]  # reward by function name; `None` = not scored by that function
    reward: float  # weighted sum of the scored ones; 0.0 if none was
    correct: bool  # full marks from the task's own checker
    checked: bool = True  # whether that checker judged it


class Stop(Protocol):
    """How work that may take long learns that the process is to stop: `runtime.shutdown.Stopper`."""

    requested: bool  # whether a signal or a notice has come
    advised: bool  # whether this machine may soon be taken back: a checkpoint is due

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; infinite before a signal or a notice."""

    def allow(self) -> None:
        """From here on a signal raises StopRequested at any point; one that came before raises it now."""

    def hold(self) -> object:
        """From here on a signal only sets `requested`."""

    def check(self) -> None:
        """Raise StopRequested if a signal came."""
