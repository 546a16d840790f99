"""The names of the peers of a node's cohort, for messages.

cards of members -> partners now, last known names -> a message when the first partner is here, and when there is none
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarm_node.say import Say
from swarm_protocol.messages import PeerCard

MAX_NAMES = 1024  # partners whose names are remembered, the latest ones; a card costs its maker nothing
LISTED = 5  # names in a message


class CohortRoster:
    """The partners of a node of `cohort`. Says after `patience_s` that there are none, and repeats it no sooner."""

    def __init__(self, cohort: str, patience_s: float, say: Say) -> None:
        self.partners: dict[str, str] = {}
        """Peer id -> name of the peers here; replaced as a whole, so that other threads may read it."""
        self._cohort = cohort
        self._patience_s = patience_s
        self._say = say
        self._names: dict[str, str] = {}
        self._together = False
        self._alone_since: float | None = None
        self._told: tuple[int, int] | None = (0, 0)
        """Members that average other weights, and single stages, as said last; a node alone has nothing to say."""

    def look(self, members: Mapping[str, PeerCard], now: float) -> None:
        """Note which members are here at the time `now`."""
        partners = {peer: card.name for peer, card in members.items() if card.cohort == self._cohort}
        gone = {peer: name for peer, name in self._names.items() if peer not in partners}
        self._names = dict([*gone.items(), *partners.items()][-MAX_NAMES:])
        self.partners = partners
        if partners:
            if not self._together:
                here = "1 partner is here" if len(partners) == 1 else f"{len(partners)} partners are here"
                self._say(f"averaging: {here}: {self.listed(sorted(partners))}")
            self._together, self._alone_since, self._told = True, None, None
            return
        if self._alone_since is None:
            self._alone_since = now
        averaging = [card for card in members.values() if card.cohort]
        stages = sum(card.crew is not None for card in averaging)
        others = len(averaging) - stages, stages
        if now - self._alone_since >= self._patience_s and others != self._told:
            self._together, self._alone_since, self._told = False, now, others
            what = [f"{_average(others[0])} other models or with other settings"] if others[0] or not stages else []
            what += [f"{_average(stages)} single stages of a policy"] if stages else []
            self._say(f"averaging: nobody of this node's cohort is here; {' and '.join(what)}")

    def called(self, peer: str) -> str:
        """The last known name of `peer`, with the end of its id if the name is not unique."""
        name = self._names.get(peer, "")
        alone = sum(name == other for other in self._names.values()) == 1
        return name if alone else f"{name}…{peer[-8:]}"

    def listed(self, peers: Collection[str]) -> str:
        """`alice, bob and 3 more`."""
        names = ", ".join(self.called(peer) for peer in list(peers)[:LISTED])
        return f"{names} and {len(peers) - LISTED} more" if len(peers) > LISTED else names


def _average(members: int) -> str:
    return "1 member averages" if members == 1 else f"{members or 'no'} members average"
