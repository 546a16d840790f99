"""Why an exchange of weights was skipped, in words, and what its user can do. Loads no torch."""

from __future__ import annotations

from swarm_node.install import upgrade_command
from swarm_node.say import Detail

NOTHING = "nothing to do"
WORDS = {
    "absent": "the partner was away",
    "alone": "no other member that trains the same model was here",
    "busy": "the partner was busy",
    "cancellederror": "it was broken off",
    "claim": "the partner's weights were not those that it had announced",
    "codec": "the two encode weights differently",
    "cohort": "the partner averages with others",
    "crossed": "both called each other at once",
    "diverged": "this node's weights are not finite, or went too far",
    "early": "the partner was not ready yet",
    "fault": "this node failed",
    "fragment": "the partner sent another part of the weights",
    "gates": "the partner's weights are unlike those of its cohort",
    "group": "the partner saw other members",
    "hash": "the partner's weights are not what it had promised",
    "late": "it came too late",
    "odd": "the number of members was odd, and this one was left over",
    "partner": "the partner had chosen another one",
    "probe": "with those weights, this node's right answers became less likely",
    "refused": "the partner refused",
    "replaced": "weights were replaced meanwhile",
    "round": "the partner was in another round",
    "schema": "the partner's message was malformed",
    "size": "the weights had another size than expected",
    "slow": "it took too long",
    "torn": "the connection broke",
    "unreachable": "the partner did not answer",
    "values": "the partner's weights were damaged",
    "version": "the partner runs another version of the protocol",
}
"""Reason -> what happened; all reasons that are counted by their own name."""
REMEDIES = {
    "codec": "set the same averaging.codec on all members",
    "diverged": "lower grpo.learning_rate",
    "fault": "please report it, with events.jsonl",
    "slow": f"{NOTHING}, unless it happens often: then raise averaging.timeout_s",
    "unreachable": NOTHING + ", unless it happens often: then see `swarm-node doctor {run}`",
}
"""Reason -> what to do; for all others, nothing."""


def happened(reason: str) -> str:
    """What happened."""
    return WORDS.get(reason, reason)


def skipped(reason: str, detail: str, partner: str, then: str, run: str) -> str:
    """The sentence about an exchange with `partner` (empty = none) that was skipped; `then` says how it goes on, `run`
    names the run directory. It is a detail if its user has nothing to do."""
    of = f" with {partner}" if partner else ""
    more = f" ({detail})" if detail else ""
    remedy = f"upgrade the older one: {upgrade_command()}" if reason == "version" else REMEDIES.get(reason, NOTHING)
    remedy = remedy.replace("{run}", run)
    sentence = f"an exchange of weights{of} was skipped: {happened(reason)}{more}; {remedy}; {then}"
    return Detail(sentence) if remedy == NOTHING else sentence
