"""Questions to peers before a node joins: their cards, the manifest, and whether anything answers at an address.

Nothing that a peer says is believed: a manifest counts only if its hash is the swarm's id.
"""

from __future__ import annotations

import math
import random
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from swarm_node.errors import UserError
from swarm_node.say import Say, Warned
from swarm_node.swarm.links import MAX_NAMED, Swarm, distinct, join_link, with_bootstrap
from swarm_protocol.errors import NotOfSwarm, PeerUnreachable, RemoteProtocolError
from swarm_protocol.first_cards import CARDS_METHOD, MAX_FIRST_BYTES, read_cards
from swarm_protocol.limits import MAX_MANIFEST_BYTES
from swarm_protocol.manifest import MANIFEST_METHOD, Manifest, parse_manifest
from swarm_protocol.messages import PeerCard
from swarm_protocol.peers import is_relayed, peer_of
from swarm_protocol.transports.base import Transport

MANIFEST_S, LEAST_MANIFEST_S = 10.0, 0.5
"""How long a member may take to give the manifest, also when the user's time (`--minutes`) is nearly over."""
FIRST_REPORT_S, REPORT_EVERY_S, REPORT_MOST_S = 5.0, 20.0, 600.0
"""When a node first says that it is still waiting for an answer, and when again: each time after twice as long."""
ASK_AGAIN_S, MAX_ASK_AGAIN_S = 0.2, 3.0
ASKED_IN_A_ROW = 8  # members asked for one thing, in random order, before the list of members is read again
LOOK_AROUND_S = 20.0  # how long to look for members of a swarm before calling it empty
SETTLE_S = 3.0  # if no new member turns up for so long, all are found
FIRST_MEMBERS_S = 1.0
"""How long a node that has the manifest waits for cards: from the peer that gave it, and from a lookup."""
DIAL_S = 3.0
MAX_DIALS = 32
T = TypeVar("T")


class _AnotherSwarm(RemoteProtocolError):
    """A peer is in another swarm."""

    def __init__(self, swarm_id: str = "") -> None:
        """`swarm_id` of the manifest that it gave; empty if it refused because it is not in this swarm."""
        super().__init__("swarm", f"one is in swarm {swarm_id[:16]}" if swarm_id else "one is in another swarm")
        self.swarm_id = swarm_id


def fetch_manifest(
    transport: Transport,
    swarm: Swarm,
    say: Say,
    wait_s: float | None = None,
    met: dict[str, PeerCard] | None = None,
) -> Manifest:
    """The manifest from the first member that gives the right one, with the swarm's addresses added to its bootstrap
    list. Cards that this member gives as well are added to `met`. Raises PeerUnreachable after `wait_s`, if given, and
    UserError if the link's peers are in another swarm."""
    if swarm.manifest is not None:
        return swarm.manifest
    until = math.inf if wait_s is None else time.monotonic() + wait_s

    def ask(peer: str) -> Manifest:
        seconds = max(LEAST_MANIFEST_S, min(MANIFEST_S, until - time.monotonic()))
        try:
            data = transport.request(peer, MANIFEST_METHOD, timeout=seconds, limit=MAX_MANIFEST_BYTES)
        except NotOfSwarm as error:
            raise _AnotherSwarm from error
        found = parse_manifest(data)
        if found.swarm_id != swarm.id:
            raise _AnotherSwarm(found.swarm_id)
        if met is not None:
            met.update(_first_cards(transport, peer, swarm.id))
        return found

    manifest = ask_around(transport, swarm, ask, f"the manifest of swarm {swarm.id[:16]}", say, wait_s)
    return with_bootstrap(manifest, swarm.peers)


def ask_around(
    transport: Transport, swarm: Swarm, ask: Callable[[str], T], wanted: str, say: Say, wait_s: float | None
) -> T:
    """The first answer that `ask` returns, which takes a peer id and raises RemoteProtocolError for a wrong one.
    Raises PeerUnreachable after `wait_s`, and UserError if all peers that answer are in another swarm. It waits
    `REPORT_EVERY_S` for that, unless all gave the other manifest: a peer that is just starting refuses, too."""
    began = time.monotonic()
    report_at, report_s = began + FIRST_REPORT_S, REPORT_EVERY_S
    refused: set[str] = set()
    answers: dict[str, RemoteProtocolError] = {}
    while True:
        known = distinct([*map(peer_of, swarm.peers), *transport.members()])
        peers = [peer for peer in known if peer != transport.peer_id]
        for peer in random.sample(peers, min(ASKED_IN_A_ROW, len(peers))):
            if peer in refused:
                continue
            try:
                return ask(peer)
            except PeerUnreachable:
                continue
            except RemoteProtocolError as error:
                refused.add(peer)
                answers[peer] = error
        failure = f"none of {len(peers)} members gives {wanted}"
        if len(answers) == 1:
            failure = f"the only member that answers does not give {wanted}"
        if peers and not answers:
            where = ", ".join(swarm.peers[:MAX_NAMED]) or f"the addresses of {len(peers)} members"
            failure = f"nobody answers at {where} when asked for {wanted}"
        now = time.monotonic()
        over = wait_s is not None and now - began > wait_s
        _check_swarm(swarm, answers, len(peers), over or now - began > REPORT_EVERY_S)
        if over:
            raise PeerUnreachable(failure)
        if now > report_at:
            report_at, report_s = now + report_s, min(2 * report_s, REPORT_MOST_S)
            if answers and all(isinstance(error, _AnotherSwarm) for error in answers.values()):
                peer = "a peer answers" if len(answers) == 1 else f"{len(answers)} peers answer"
                most = REPORT_EVERY_S if wait_s is None else min(REPORT_EVERY_S, wait_s)
                left = max(0.0, most - (now - began))
                say(Warned(f"{peer}, but not as a member of swarm {swarm.id[:16]}: asking for {left:.0f} s more"))
            else:
                why = "".join(f" ({error.detail or error.reason})" for error in [*answers.values()][:1])
                link = shlex.quote(swarm.named or join_link(swarm.id, swarm.peers, []))
                say(Warned(f"{failure}{why}: still trying; `swarm-node doctor {link}` may say why"))
        if peers and len(refused) == len(peers):
            refused.clear()
        pause = min(MAX_ASK_AGAIN_S, ASK_AGAIN_S + (now - began) / 10)
        time.sleep(pause if wait_s is None else max(0.0, min(pause, began + wait_s - now)))


def _check_swarm(swarm: Swarm, answers: Mapping[str, RemoteProtocolError], peers: int, waited: bool) -> None:
    """Raise UserError if there are answers and all are from another swarm. They are final if all `peers` gave a
    manifest, or after a long wait (`waited`)."""
    theirs = [error.swarm_id[:16] for error in answers.values() if isinstance(error, _AnotherSwarm)]
    final = waited or (all(theirs) and len(answers) >= peers)
    if final and theirs and len(theirs) == len(answers):
        where = f"in swarm {max(theirs)}" if any(theirs) else "not in it"
        raise UserError(
            f"the link is of swarm {swarm.id[:16]}, but its peers are {where}: take the link that "
            "`swarm-node bootstrap` or a member of your swarm prints"
        )


def _first_cards(transport: Transport, peer: str, swarm_id: str) -> dict[str, PeerCard]:
    """Peer id -> card of the members that a member tells of; none if it does not, as those of earlier versions."""
    try:
        return read_cards(transport.request(peer, CARDS_METHOD, b"", FIRST_MEMBERS_S, MAX_FIRST_BYTES), swarm_id)
    except (PeerUnreachable, RemoteProtocolError):
        return {}


def first_members(transport: Transport, wait_s: float = FIRST_MEMBERS_S) -> Mapping[str, PeerCard]:
    """Peer id -> card of the members that the first lookup finds, or of none if that takes longer than `wait_s`."""
    until = time.monotonic() + wait_s
    while not transport.members() and time.monotonic() < until:
        time.sleep(FIRST_MEMBERS_S / 20)
    return transport.members()


def look_around(
    transport: Transport,
    look_s: float = LOOK_AROUND_S,
    clock: Callable[[], float] = time.monotonic,
    tick_s: float = 0.2,
) -> Mapping[str, PeerCard]:
    """Peer id -> card of the members, once no new ones turn up, or after `look_s`."""
    began = changed = clock()
    members: Mapping[str, PeerCard] = {}
    while clock() - began < look_s and (not members or clock() - changed < SETTLE_S):
        time.sleep(tick_s)
        if transport.members().keys() != members.keys():
            members, changed = dict(transport.members()), clock()
    return members


def dial(addresses: Sequence[str]) -> dict[str, bool]:
    """Address -> whether something accepts a TCP connection there. Tries the first `MAX_DIALS` that are not relayed."""
    direct = [address for address in dict.fromkeys(addresses) if not is_relayed(address)][:MAX_DIALS]
    with ThreadPoolExecutor(MAX_DIALS) as pool:
        return dict(zip(direct, pool.map(_answers, direct), strict=True))


def _answers(address: str) -> bool:
    _, _, host, _, port, *_ = [*address.split("/"), "", "", ""]
    try:
        with socket.create_connection((host, int(port)), DIAL_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False
