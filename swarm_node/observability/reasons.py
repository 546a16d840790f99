"""Reasons of refusals in words: the one table for the console, `status`, `doctor`, reports and the dashboard."""

from __future__ import annotations

WORDS = {
    "age": "too old",
    "assignment": "not the sender's task",
    "balance": "commoner in kind, answer or length than own ones",
    "busy": "asked while all places were taken",
    "cap": "over the swarm's limits",
    "connections": "connected while all places were taken",
    "crowded": "too many connections from one address",
    "digest": "not what its digest says",
    "dials": "addresses that were dialled too often",
    "duplicate": "known already",
    "error": "texts that could not be judged",
    "expiration": "cards of another time",
    "find": "too many keys asked at once",
    "flood": "more than any honest peer sends",
    "forged": "a forged signature",
    "frame": "broken gossip frames",
    "future": "dated ahead of this machine's clock",
    "graylist": "too many bad gossip messages",
    "handler": "a fault of this node",
    "handshake": "handshakes that did not end",
    "identity": "not a peer id",
    "judge": "answers judged in another way",
    "key": "cards in the wrong place",
    "length": "answers too long",
    "memory": "disconnected to save memory",
    "method": "requests that this node does not know",
    "muted": "sender muted",
    "newcomers": "too many new peers at once",
    "newer": "newer protocol",
    "node_id": "places in the DHT that are not the sender's",
    "payload": "right answers with text that nothing asks for",
    "peer": "cards in another peer's name",
    "pool": "no room",
    "prompt": "another question",
    "quota": "over the sender's quota",
    "rate": "above what one member may send a minute",
    "schema": "malformed",
    "seen": "heard before",
    "shard": "on a topic that is not the sender's",
    "signature": "not signed",
    "size": "of a size that is not allowed",
    "slot": "answers to the same task for the third time",
    "slow": "too slow",
    "store": "malformed lists of cards",
    "stuck": "a peer that does not read",
    "surplus": "more than could be examined",
    "swarm": "of another swarm",
    "task": "task unknown here",
    "text": "texts that this model cannot say",
    "torn": "broken off",
    "turns": "dialogues of several turns",
    "unsigned": "gossip without a signature",
    "version": "older protocol",
    "zero": "all rewarded alike",
}
"""Reason -> noun phrase; a reason that is not here stands for itself."""

HOSTILE = frozenset(
    "assignment cap find flood forged frame graylist key node_id peer schema shard signature size store "
    "unsigned".split()
)
"""Reasons that an honest node of this version hardly ever causes. `slot` is not among them: a node that restarts within
a minute answers its slots anew, and no peer gets more of those past `rate` than of any other answers."""

UNUSED = frozenset("age balance busy duplicate error pool seen surplus text zero".split())
"""Reasons that say nothing against the sender of a group: this node had no use for it. All others are refusals."""

SAID = HOSTILE | {"connections", "crowded", "handshake", "memory", "newcomers", "stuck"}
"""Reasons of the network whose first refusal is said: the other reasons come with honest traffic."""


def words(reason: str) -> str:
    """The noun phrase for `reason`."""
    return WORDS.get(reason, reason)
