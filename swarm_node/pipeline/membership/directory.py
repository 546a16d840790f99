"""Which peers of the swarm show that they are of this crew, and why one of them is refused.

Nothing that a peer says counts unless it has proved that it knows the crew's name: with its Hello if it opened the
channel, else with its Answer. A card proves nothing, it only says whom to ask.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_node.pipeline.compute.fingerprint import difference
from swarm_node.pipeline.membership.actions import ActionQueue, PeerSpec
from swarm_node.pipeline.membership.leader import Leader
from swarm_node.pipeline.membership.roster import note_latest, short
from swarm_protocol.crew import Hello, Refusal
from swarm_protocol.messages import CrewCard, PeerCard

MAX_NAMES = 512  # peers whose names are remembered
NAMELESS = "it does not know the crew's name"


class Directory:
    """Cards and names of the crew's peers."""

    def __init__(self, spec: PeerSpec, queue: ActionQueue) -> None:
        self.members: Mapping[str, PeerCard] = {}  # members of the swarm, as last looked up
        self.cards: dict[str, CrewCard] = {}  # cards of other peers of this crew
        self.names: dict[str, str] = {}  # names that peers of the crew give themselves, latest last
        self._spec = spec
        self._queue = queue

    def look_up(self, members: Mapping[str, PeerCard], forming: bool) -> None:
        """Sort the members of the swarm. `forming`: this peer leads a crew that has not found together yet."""
        self.members, self.cards, spec = members, {}, self._spec
        for peer, card in members.items():
            crew = card.crew
            if crew is None or peer == spec.me:
                continue
            alike, as_many = crew.architecture == spec.architecture, crew.count == len(spec.spans)
            if crew.id != spec.id:
                if forming and alike and as_many:
                    self._queue.say_once(
                        f"another crew of this policy is in the swarm: if it is the one that was meant, its name is "
                        f"not {spec.crew}"
                    )
            elif not alike:
                self._refuse_card(peer, "model", difference(spec.architecture, crew.architecture))
            elif not as_many:
                self._refuse_card(peer, "stages", "another number of stages")
            else:
                self.cards[peer] = crew

    def _refuse_card(self, peer: str, reason: str, what: str) -> None:
        text = f"peer {short(peer)} of crew {self._spec.crew} has {what}: it and this node cannot hold one policy"
        if self._queue.say_of_peer(text):
            self._queue.counts[f"refused/{reason}"] += 1

    def admit(self, peer: str, hello: Hello, leader: Leader | None) -> Refusal | None:
        """Remember a peer of this crew; a Refusal if it cannot be in it, with a proof if it knows the crew's name."""
        problem = self._objection(peer, hello, leader)
        known = problem is None or problem[0] not in ("swarm", "crew")
        if known:
            note_latest(self.names, peer, hello.name, MAX_NAMES)
        if problem is None:
            return None
        reason, detail = problem
        self._queue.counts[f"refused/{reason}"] += 1
        self._queue.say_of_peer(f"peer {short(peer)} is refused in crew {self._spec.crew}: {detail}")
        return Refusal(reason, detail, self._spec.proof_to(peer) if known else "")

    def _objection(self, peer: str, hello: Hello, leader: Leader | None) -> tuple[str, str] | None:
        """Reason (one word) and explanation why a peer cannot be in this crew; `None` if it can."""
        spec = self._spec
        if hello.swarm != spec.swarm:
            return "swarm", "it is of another swarm"
        if hello.crew != spec.id or not spec.is_proof_of(peer, hello.proof):
            return "crew", NAMELESS
        if hello.architecture != spec.architecture:
            return "model", f"it has {difference(spec.architecture, hello.architecture)}"
        if hello.stages != len(spec.spans):
            return "stages", f"it has {hello.stages} stages, here are {len(spec.spans)}"
        if hello.wanted is not None and hello.wanted >= hello.stages:
            return "stages", f"it wants stage {hello.wanted} of {hello.stages}"
        if leader is not None and not leader.planning.takes(hello.spans):
            return "span", "its files are of stages with other layers: it can take part with another --run-dir"
        return None
