"""What a node does about another one that runs with its key: the second to start ends, the first warns once."""

from __future__ import annotations

from swarm_node.errors import UserError
from swarm_node.say import Once, Warned
from swarm_protocol.twins import Twins

REMEDY = "remove identity.key from its run directory (a start makes a new one), or give another --identity"


def check_twins(twins: Twins, peer_id: str, once: Once) -> None:
    """Raise UserError if a node with the key of this one, `peer_id`, was there before it; one that came later is told
    `once`."""
    if twins.found is None:
        return
    at = f" at {twins.found.addresses[0]}" if twins.found.addresses else ""
    told = f"another node{at} runs with this node's key, that of peer {peer_id}: neither hears the other"
    if twins.was_first:
        raise UserError(f"{told}. It was there first, so this one ends: {REMEDY}")
    once("twin", Warned(f"{told}. One key is for one node: there, {REMEDY}"))
