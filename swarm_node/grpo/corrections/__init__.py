"""Off-policy corrections by name: `grpo.correction` names one of `CORRECTIONS`, or a class of the user's own."""

from __future__ import annotations

from swarm_node.config import GrpoConfig
from swarm_node.config.plugins import load_function, plugin_error
from swarm_node.errors import UserError
from swarm_node.grpo.corrections.recorded import Recorded
from swarm_node.grpo.corrections.sequence_mask import SequenceMask
from swarm_node.grpo.corrections.truncated import Truncated
from swarm_node.grpo.objective import Correction

CORRECTIONS: dict[str, type[Correction]] = {"recorded": Recorded, "truncated": Truncated}


def find_correction(config: GrpoConfig) -> Correction:
    """The correction that `grpo.correction` asks for, or `grpo.off_policy_mask`, which goes with `recorded` alone.

    UserError if it is code of the user's own that cannot be loaded.
    """
    if config.off_policy_mask is not None:
        return SequenceMask(config.off_policy_mask)
    if config.correction in CORRECTIONS:
        return CORRECTIONS[config.correction]()
    kind = load_function(config.correction, "grpo.correction")
    try:
        correction = kind()
    except Exception as error:  # the user's code may raise anything
        raise plugin_error("grpo.correction failed", error) from error
    if not isinstance(correction, Correction):
        raise UserError("grpo.correction must name a subclass of swarm_node.grpo.objective.Correction")
    return correction
