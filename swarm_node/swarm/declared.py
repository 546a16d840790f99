"""What members say of themselves on their cards, and what this node says on its own.

It is for people: nobody checks it, and nothing that a node trains on or admits depends on it. Each member weighs the
same in every figure over members, so a member that lies changes one voice of many.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from swarm_node import __version__
from swarm_node.swarm.question_files import names_of_files
from swarm_node.tasks.catalogue import SETS
from swarm_protocol.limits import (
    CONFIG_HASH_CHARS,
    MAX_DECLARED_ANSWERS,
    MAX_DECLARED_BYTES,
    MAX_DECLARED_KINDS,
    MAX_DECLARED_PEERS,
)
from swarm_protocol.manifest import Manifest
from swarm_protocol.messages import Declared, DeclaredKind, DeclaredUse, PeerCard
from swarm_protocol.topics import short_hash

MAX_KINDS = 64  # kinds of task that a table over all members has: those with most answers

_config = re.compile(rf"[0-9a-f]{{{CONFIG_HASH_CHARS}}}")
_decoder = msgspec.msgpack.Decoder(Declared)


def declare(
    since: float,
    kinds: Mapping[str, tuple[int, int]],
    held_out: tuple[float, int] | None,
    used_of: Mapping[str, int],
) -> Declared:
    """What a member declares, within `MAX_DECLARED_BYTES`; the rarest kinds and the peers used least give way.

    `since`: Unix time at which it joined; `kinds`: label -> (answers, right answers); `held_out`: (pass@1, questions);
    `used_of`: peer -> groups trained on.
    """
    frequent = sorted(kinds.items(), key=lambda item: (-item[1][0], item[0]))
    told = [
        DeclaredKind(kind, min(answers, MAX_DECLARED_ANSWERS), min(right, answers, MAX_DECLARED_ANSWERS))
        for kind, (answers, right) in frequent
        if answers
    ]
    most = sorted(used_of.items(), key=lambda item: (-item[1], item[0]))[:MAX_DECLARED_PEERS]
    record = Declared(
        since=since,
        version=__version__,
        kinds=[kind for kind in told if _fits(kind)][:MAX_DECLARED_KINDS],
        pass_1=None if held_out is None else round(held_out[0], 4),
        questions=0 if held_out is None else held_out[1],
        used=sum(used_of.values()),
        used_of=[DeclaredUse(short_hash(peer), groups) for peer, groups in most],
    )
    while len(msgspec.msgpack.encode(record)) > MAX_DECLARED_BYTES:
        longer = "kinds" if len(record.kinds) > len(record.used_of) else "used_of"
        record = msgspec.structs.replace(record, **{longer: getattr(record, longer)[:-1]})
    return record


def _fits(kind: DeclaredKind) -> bool:
    """Whether others may read the kind: a file of the user's own may have any name."""
    try:
        _decoder.decode(msgspec.msgpack.encode(Declared(kinds=[kind])))
    except msgspec.ValidationError:
        return False
    return True


def kinds_of(manifest: Manifest) -> frozenset[str]:
    """Names that kinds of task of this swarm may have: those of its environments and question files."""
    names = set(names_of_files(manifest).values())
    for task in manifest.tasks:
        if task.env:
            names |= set(SETS.get(task.env, ())) or {task.env.rpartition("/")[2]}
    return frozenset(names)


def is_known(kind: str, known: Collection[str]) -> bool:
    """Whether a declared kind is one of `kinds_of`. It may be told apart by its set (`sapo/bf`), and by the hash of its
    options too (`gcd:0123456789abcdef`), as labels are (`tasks.taskset`); strangers can write no other text there."""
    path, hashed, config = kind.partition(":")
    group, grouped, name = path.rpartition("/")
    if (hashed and not _config.fullmatch(config)) or (grouped and name not in SETS.get(group, ())):
        return False
    return name in known


def success_by_kind(cards: Mapping[str, PeerCard], known: Collection[str] | None) -> list[dict[str, Any]]:
    """For each kind of task that members declare: how many do, the mean of their success, and its share of their
    answers (each member weighs the same), the most frequent first, at most MAX_KINDS. `known`: `kinds_of` the swarm;
    None = not known yet, and then there is no row."""
    success: dict[str, list[float]] = {}
    share: dict[str, float] = {}
    records = [card.declared for card in cards.values() if card.declared is not None]
    for record in records:
        told = _known_kinds(record, known)
        answers = sum(k.answers for k in told.values())
        for kind, k in told.items():
            success.setdefault(kind, []).append(min(k.right, k.answers) / k.answers)
            share[kind] = share.get(kind, 0.0) + k.answers / answers
    speaking = sum(share.values())
    return [
        {"kind": kind, "members": len(success[kind]), "success": sum(success[kind]) / len(success[kind])}
        | {"share": part / speaking}
        for kind, part in sorted(share.items(), key=lambda item: (-item[1], item[0]))[:MAX_KINDS]
    ]


def _known_kinds(record: Declared, known: Collection[str] | None) -> dict[str, DeclaredKind]:
    return {} if known is None else {k.kind: k for k in record.kinds if is_known(k.kind, known)}


def share_of(peer: str, cards: Mapping[str, PeerCard]) -> tuple[float | None, int]:
    """(the share of `peer` in what a member says that it trained on of others' groups, mean over members; members that
    say so). A member names only the peers that it used most, so it is a lower bound."""
    name, shares = short_hash(peer), []
    for other, card in cards.items():
        if other != peer and card.declared is not None and card.declared.used:
            mine = sum(use.groups for use in card.declared.used_of if use.peer == name)
            shares.append(min(mine, card.declared.used) / card.declared.used)
    return (sum(shares) / len(shares) if shares else None), len(shares)


def pass_1_of(cards: Mapping[str, PeerCard]) -> list[float]:
    """The held-out pass@1 that members declare, ascending."""
    records = [card.declared for card in cards.values() if card.declared is not None]
    return sorted(record.pass_1 for record in records if record.pass_1 is not None)


def declared_table(declared: Declared | None, known: Collection[str] | None) -> dict[str, Any] | None:
    """A member's word as JSON carries it, without the peers whose groups it used. `known`: as in `success_by_kind`."""
    if declared is None:
        return None
    kinds = {kind: [k.answers, min(k.right, k.answers)] for kind, k in _known_kinds(declared, known).items()}
    return {
        "since": min(declared.since, time.time()) or None,
        "version": declared.version or None,
        "kinds": kinds,
        "pass_1": declared.pass_1,
        "questions": declared.questions,
        "used": declared.used,
    }
