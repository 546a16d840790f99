"""A policy in stages, as the rest of a node sees it: text is handled here, the model's work by the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from swarm_node.config import PolicyConfig
from swarm_node.errors import Interrupted, NoRoom
from swarm_node.pipeline.driver import Driver
from swarm_node.pipeline.messages import StageLost
from swarm_node.pipeline.stage_calls import StageOutOfMemory
from swarm_node.policy.engines.base import BatchEngine, Cancelled, Completion
from swarm_node.policy.finite import check_updated, spoiled
from swarm_node.policy.logprobs import TokenBatch
from swarm_node.policy.policy import Policy
from swarm_node.types import Sampling

MICROBATCHES = 2
"""Microbatches for each stage: at worst a third of the time is spent waiting for the first and after the last."""


class StagedEngine(BatchEngine):
    """Decodes through all stages, again if a stage is lost. A request that is being decoded is not cancelled."""

    def __init__(self, driver: Driver, eos: list[int]) -> None:
        super().__init__()
        self._driver, self._eos = driver, torch.tensor(eos)

    def decode(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, cancelled: Cancelled
    ) -> list[Completion]:
        return self._driver.despite_losses(lambda: self._driver.generate(prompts, n, sampling, uniform, self._eos))


class StagedPolicy(Policy):
    """A policy of which this process holds the first stage.

    Its weights are those of the stages held here, by their names in the whole policy. If a stage is lost, `passes`
    raises StageLost; its caller, which adds up the gradient, then calls `again` and starts over.
    """

    def __init__(
        self,
        driver: Driver,
        tokenizer: PreTrainedTokenizerBase,
        config: PolicyConfig,
        report: Callable[[str], None] = print,
        longest: int = 2**31,
    ) -> None:
        """`longest`: most tokens of a row that the stages accept."""
        self.driver = driver
        self._longest = longest
        super().__init__(driver.workers[0].stage.model, tokenizer, config, report)
        self.is_lora = driver.workers[0].stage.is_lora
        self.microbatches = MICROBATCHES * driver.stages if driver.stages > 1 else 1
        self.split_head = True
        self.engine = StagedEngine(driver, self.eos_ids)

    @property
    def base(self) -> PreTrainedModel:
        return self.driver.workers[0].stage.base

    @property
    def max_positions(self) -> int:
        """Most tokens of a row, as the model and the other stages allow."""
        return min(super().max_positions, self._longest)

    def _passes(
        self, batches: Iterable[TokenBatch], temperature: float, entropy: bool, reference: bool, gradient: bool
    ) -> Iterator[tuple[TokenBatch, Tensor, Tensor | None]]:
        return self.driver.passes(batches, temperature, entropy, reference, gradient)

    def again(self, interrupted: Interrupted) -> None:
        if isinstance(interrupted, NoRoom) and isinstance(interrupted.error, StageOutOfMemory):
            stage = interrupted.error.stage
            if stage not in self.driver.workers:  # else the user must help
                interrupted = StageLost({stage}, "it says that it has no memory for the least work")
        if not isinstance(interrupted, StageLost):
            raise interrupted
        self.driver.again(interrupted, others=True)

    def check_finite(self) -> None:
        check_updated(self.trainable_state())
        raise spoiled("what its stages make of a question is")

    def trainable_state(self) -> dict[str, Tensor]:
        named: dict[str, nn.Parameter] = {}
        for worker in self.driver.workers.values():
            named = worker.stage.named() | named
        return {name: parameter.data for name, parameter in named.items()}

    def keep_reference(self) -> None:
        for worker in self.driver.workers.values():
            if worker.reference is None:  # else it was kept when the stage was built, before it had trained weights
                worker.keep_reference()
