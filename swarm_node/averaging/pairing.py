"""Who averages with whom: every peer works out the same pairs alone.

    h(a)    = first 64 bits of sha256(seed, round, a)
    w(a, b) = mix(h(a) xor h(b))                              splitmix64's finaliser: symmetric, uniform
    pairs   = greedy matching by descending w: while some a and b are each other's heaviest, pair and remove them;
              those of which one can be dialled come first, then both, and those of which neither can last

NoLoCo (arXiv 2506.10911) draws a shared random permutation instead, in which one peer more or less changes all pairs.
Peers never quite agree on who is there; here one of whom only some know changes the few pairs along a path of ever
lighter edges (two of 32, on average). Pairs that two peers see differently come to nothing: partners ask each other.

More than 1024 peers are first split into groups by leading bits of their hashes, anew each round. One peer of each
group of odd size is left over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from protocol.messages import PeerCard
from protocol.peers import is_relayed

GROUP = 1024  # a matrix of weights takes 8 MiB then


def partner(me: str, peers: Collection[str], round: int, seed: str, hidden: Collection[str] = ()) -> str | None:
    """Whom `me` averages with in this round, among `peers` (`me` may be one of them); None = left over. Those `hidden`
    can only dial: two of them meet, through a relay, only if there is nobody else."""
    everyone = sorted({me, *peers})
    hashes = np.array([_hash(peer, round, seed) for peer in everyone], np.uint64)
    bits = ((len(everyone) - 1) // GROUP).bit_length()
    group = hashes >> np.uint64(64 - bits) if bits else np.zeros_like(hashes)
    mine = everyone.index(me)
    (members,) = np.nonzero(group == group[mine])
    can_be_dialled = np.array([everyone[i] not in hidden for i in members])
    other = _match(hashes[members], can_be_dialled)[members.searchsorted(mine)]
    return None if other < 0 else everyone[members[other]]


def only_relayed(members: Mapping[str, PeerCard]) -> set[str]:
    """Peers that can be reached only through a relay."""
    return {peer for peer, card in members.items() if all(map(is_relayed, card.addresses))}


def _match(hashes: NDArray[np.uint64], can_be_dialled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Greedy matching: for each of the hashes [n] the index of its partner, -1 = none.

    The heaviest edge left always joins two who are each other's heaviest, and of equal edges the first in order does;
    so every pass finds a pair, and on average it finds a constant part of all.
    """
    both = can_be_dialled[:, None].astype(np.uint64) + can_be_dialled  # 0 to 2 of them
    rank = np.array([0, 2, 1], np.uint64)[both.astype(np.intp)]
    weights = _mix(hashes[:, None] ^ hashes) >> np.uint64(2) | rank << np.uint64(62)
    np.fill_diagonal(weights, 0)
    partners = np.full(len(hashes), -1)
    left = np.arange(len(hashes))
    while len(left) > 1:
        heaviest = weights.argmax(1)
        mutual = heaviest[heaviest] == np.arange(len(left))
        partners[left[mutual]] = left[heaviest[mutual]]
        left, weights = left[~mutual], weights[~mutual][:, ~mutual]
    return partners


def _hash(peer: str, round: int, seed: str) -> int:
    return int.from_bytes(sha256(f"{seed} {round} {peer}".encode()).digest()[:8], "big")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: one to one, 0 to 0, every bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
