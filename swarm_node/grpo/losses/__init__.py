"""Losses by name: `grpo.loss` names one of `LOSSES`, or code of the user's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from swarm_node.config.plugins import load_function, plugin_error
from swarm_node.grpo.losses.cispo import Cispo
from swarm_node.grpo.losses.dapo import Dapo
from swarm_node.grpo.losses.dr_grpo import DrGrpo
from swarm_node.grpo.losses.grpo import Grpo
from swarm_node.grpo.losses.gspo import Gspo
from swarm_node.grpo.objective import Loss, Tokens
from swarm_node.policy.oom import is_out_of_memory

LOSSES: dict[str, type[Loss]] = {"grpo": Grpo, "dr_grpo": DrGrpo, "dapo": Dapo, "gspo": Gspo, "cispo": Cispo}


def find_loss(name: str) -> Loss:
    """The loss that `grpo.loss` names. UserError if it is code of the user's own that cannot be loaded."""
    if name in LOSSES:
        return LOSSES[name]()
    found = load_function(name, "grpo.loss")
    return found() if isinstance(found, type) and issubclass(found, Loss) else FunctionLoss(found)


class FunctionLoss(Loss):
    """A function of the user's own, `f(logprobs, old, advantage, sequence) -> l_t`, all [N]; weighed like DAPO."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def surrogate(self, tokens: Tokens) -> Tensor:
        """UserError if the function fails. Out of memory is passed on."""
        try:
            return self.function(tokens.logprobs, tokens.old, tokens.advantage, tokens.sequence)
        except Exception as error:  # the user's code may raise anything
            if is_out_of_memory(error):
                raise
            raise plugin_error("grpo.loss failed", error) from error
