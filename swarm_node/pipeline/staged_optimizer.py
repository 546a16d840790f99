"""The optimiser of a policy in stages: one update of all stages, with the norm of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from swarm_node.errors import CheckpointError
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.pipeline.driver import Driver


class StagedOptimizer:
    """Updates all stages; its state and weights are those of the stages held here. See `grpo.Optimizer`.

    `step` may raise StageLost. Then the gradient must be computed again from `zero_grad` on, and the step be repeated.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._updating: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def updates(self) -> int:
        """Updates that all stages have made."""
        return self.driver.updates

    @updates.setter
    def updates(self, updates: int) -> None:
        self.driver.updates = updates

    @property
    def updating(self) -> Callable[[], AbstractContextManager[object]]:
        """Held while weights here change."""
        return self._updating

    @updating.setter
    def updating(self, updating: Callable[[], AbstractContextManager[object]]) -> None:
        self._updating = updating
        for optimizer in self._own():
            optimizer.updating = updating

    def zero_grad(self) -> None:
        self.driver.zero()

    def step(self) -> tuple[float, float]:
        """One update of all stages, unless the gradient is not finite.

        Returns the norm of the gradient before clipping, and the learning rate."""
        optimizer = self._own()[0]
        norm, rate = self.driver.norm(), optimizer.rate()
        if math.isfinite(norm):
            self.driver.apply(self.updates + 1, min(1.0, optimizer.grad_clip / norm) if norm else 1.0, rate)
            self.updates += 1
        self.zero_grad()
        return norm, rate

    def weights(self) -> dict[str, Tensor]:
        """Live weights by name. A matrix that is here as embedding and as head is given once, as the embedding."""
        weights: dict[str, Tensor] = {}
        for optimizer in self._own():
            weights = optimizer.weights() | weights
        return weights

    @torch.no_grad()
    def publish(self) -> None:
        """Have the stages here use `weights()` after a change from outside."""
        weights = self.weights()
        for optimizer in self._own():
            for name, weight in optimizer.weights().items():
                weight.copy_(weights[name])
            optimizer.publish()

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for optimizer in self._own():
            state = optimizer.state_dict() | state
        return state

    def load_state_dict(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take over the result of `state_dict`.

        Raises CheckpointError, with nothing changed, if names or shapes differ."""
        mine, varies = self.state_dict(), ("step.", "rate_scale.")
        known = mine.keys() & tensors.keys()
        foreign = [name for name in mine.keys() ^ tensors.keys() if not name.startswith(varies)]
        if foreign or any(mine[k].shape != tensors[k].shape for k in known):
            raise CheckpointError("its optimiser state does not have the names and shapes of the stages held here")
        for optimizer in self._own():
            names = optimizer.weights()
            own = {key: tensor for key, tensor in tensors.items() if key.partition(".")[2] in names}
            optimizer.load_state_dict(own, updates)
        for worker in self.driver.workers.values():
            worker.updates = updates
        self.updates = updates

    def _own(self) -> list[Optimizer]:
        """Optimisers of the stages held here, stage 0 first."""
        return [self.driver.workers[stage].optimizer for stage in sorted(self.driver.workers)]
