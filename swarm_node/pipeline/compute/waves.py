"""Generation as the leader sees it: prompts in as many waves as stages, which follow each other through the stages.

each wave: Prefill -> ... -> Tokens, Step -> ... -> Tokens, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from swarm_node.pipeline.messages import StageMessage
from swarm_node.policy.engines.base import Completion
from swarm_node.policy.engines.native import Rows, padded, picked
from swarm_node.types import Sampling
from swarm_protocol.pipeline import Prefill, Step, Tokens


class Waves:
    """Samples of some prompts, from the first message to the last token."""

    def __init__(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, eos: Tensor, count: int
    ) -> None:
        """`n`: samples of each prompt. `uniform`: numbers to draw with, [prompts * n, tokens]. `eos`: tokens that end a
        sample. `count`: most waves."""
        count = min(count, len(prompts))
        cuts = [len(prompts) * i // count for i in range(count + 1)]
        self._n = n
        self._sampling = sampling
        self._eos = eos
        self._waves: list[_Wave] = []
        for first, end in pairwise(cuts):
            rows = Rows(end - first, n, sampling.max_new_tokens, torch.device("cpu"))
            self._waves.append(_Wave(prompts[first:end], rows, uniform[first * n : end * n]))
        self._open = set(range(count))

    @property
    def done(self) -> bool:
        return not self._open

    def begin(self, turn: int) -> list[StageMessage]:
        """The messages to stage 0 that begin all waves."""
        sampling, messages = self._sampling, []
        for number, wave in enumerate(self._waves):
            head = Prefill(turn, number, self._n, sampling.max_new_tokens, sampling.temperature, sampling.top_p)
            lengths = torch.tensor([len(prompt) for prompt in wave.prompts])
            messages.append(StageMessage(0, head, (padded(wave.prompts), lengths, wave.uniform[:, 0])))
        return messages

    def expects(self, head: Tokens, tokens: Tensor) -> bool:
        """Whether these tokens [W] are the next ones of an open wave."""
        if head.wave not in self._open:
            return False
        wave = self._waves[head.wave]
        return head.step == wave.step and len(tokens) == wave.rows.origin.numel()

    def take(self, head: Tokens, tokens: Tensor, logprobs: Tensor) -> StageMessage | None:
        """Note the next tokens [W] of a wave. Returns the message for its next step; `None` = the wave is done."""
        following = self._waves[head.wave].take(tokens, logprobs, self._eos)
        if following is None:
            self._open.remove(head.wave)
            return None
        return StageMessage(0, Step(head.turn, head.wave, head.step, len(following) > 2), following)

    def samples(self) -> list[Completion]:
        """`n` samples of each prompt, in order."""
        return [sample for wave in self._waves for sample in wave.rows.samples()]


@dataclass
class _Wave:
    prompts: list[list[int]]
    rows: Rows
    uniform: Tensor  # numbers to draw with, [samples, tokens]
    step: int = 0

    def take(self, token: Tensor, logprob: Tensor, eos: Tensor) -> tuple[Tensor, ...] | None:
        """The tensors of the next step; `None` if this was the last one."""
        kept = None
        if self.rows.record(self.step, token, logprob, eos):
            if not self.rows.live.any():
                return None
            width = self.rows.live.shape[1]
            kept = self.rows.compact()
            if kept is not None:
                token = picked(token, width, *kept)
        self.step += 1
        if self.step == self.uniform.shape[1]:
            return None
        return token, self.uniform[self.rows.origin.flatten(), self.step], *(kept or ())
