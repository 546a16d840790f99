"""The pairs of an outer round, which each peer computes alone.

    h(a)    = first 64 bits of sha256(seed, round, a)
    w(a, b) = mix(h(a) xor h(b))                              splitmix64's finaliser: symmetric, uniform
    pairs   = greedy matching by descending w: while some a and b are each other's heaviest, pair and remove them;
              first pairs of which one peer can be dialled, then pairs of two that can, last pairs of which none can

Peers never quite agree on who is there. In the shared random permutation of NoLoCo (arXiv 2506.10911), one peer more
changes all pairs; here it changes the few along a path of ever lighter edges, two of 32 on average. If two peers see a
pair differently, they do not average: a partner is always asked.

More than 1024 peers are first split into buckets by the leading bits of their hashes, anew each round. One peer of
each bucket of odd size has no partner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from swarm_protocol.messages import PeerCard
from swarm_protocol.peers import is_relayed

BUCKET = 1024  # most peers in a bucket, whose matrix of w takes 8 MiB


def partner(me: str, peers: Collection[str], round: int, seed: str, hidden: Collection[str] = ()) -> str | None:
    """The partner of `me` in this round among `peers`, which may include `me`. None if there is none. Peers in `hidden`
    cannot be dialled: two of them meet, through a relay, only if no other peer is left."""
    everyone = sorted({me, *peers})
    digests = [sha256(f"{seed} {round} {peer}".encode()).digest()[:8] for peer in everyone]
    hashes = np.array([int.from_bytes(digest, "big") for digest in digests], np.uint64)
    bits = ((len(everyone) - 1) // BUCKET).bit_length()
    bucket = hashes >> np.uint64(64 - bits) if bits else np.zeros_like(hashes)
    mine = everyone.index(me)
    (members,) = np.nonzero(bucket == bucket[mine])
    can_be_dialled = np.array([everyone[i] not in hidden for i in members])
    other = _match(hashes[members], can_be_dialled)[members.searchsorted(mine)]
    return None if other < 0 else everyone[members[other]]


def only_relayed(members: Mapping[str, PeerCard]) -> set[str]:
    """Peers that can be reached only through a relay."""
    return {peer for peer, card in members.items() if all(map(is_relayed, card.addresses))}


def _match(hashes: NDArray[np.uint64], can_be_dialled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Greedy matching: the index of the partner of each of the hashes [n], -1 = none.

    The heaviest edge left, the first of equal ones, joins two peers that are each other's heaviest. So each pass finds
    a pair, and on average a constant part of all pairs.
    """
    both = can_be_dialled[:, None].astype(np.uint64) + can_be_dialled  # how many of the two
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


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: one to one, 0 to 0, and each bit of the result depends on each bit of `x`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
