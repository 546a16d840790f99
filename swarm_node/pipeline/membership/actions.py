"""What a peer is in its crew, and what there is to do: values between the pure part of a crew and what carries it out.

PeerSpec     this peer's place in its crew, given once
Link         a channel with a peer
ActionQueue  actions in order (Connect, Close, Send, Say, BuildStage, DropStage, StartLeading, StopLeading), and counts
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from protocol.crew import Holding, Layers, Record, Settings, Source, crew_id, proof
from protocol.lineage import NO_RUN, Lineage

MAX_SAID = 1000
"""Sentences about peers that are said once, and then no more of them."""

Spans = tuple[Layers, ...]
Sources = Callable[[int, Spans, Mapping[str, Holding], int, Settings], Sequence[Source]]
"""(stage, spans, what each peer of the crew has, updates that the crew has made, how it works) -> ways to come by the
stage, best first."""
Tell = Callable[[int, Source, int, int], str]
"""(stage, how it was come by, its updates, those of the crew) -> a sentence for people: what was done, what is lost."""
Costs = Callable[[Spans], Sequence[int]]
"""Bytes that each stage takes."""


@dataclass(frozen=True)
class PeerSpec:
    """This peer's place in its crew, and how the crew goes about things."""

    me: str
    name: str
    """Of this peer, for people."""
    swarm: str
    crew: str
    """Its name, for people at this end."""
    key: bytes
    """`crew_key` of it."""
    architecture: str
    settings: Settings
    """How the crew works, if this peer turns out to be the first lead."""
    spans: Spans
    """Layers of each stage, likewise: equal shares, or those of its checkpoints, if it has any."""
    sources: Sources
    tell: Tell
    costs: Costs
    divide: Callable[[Sequence[float]], Spans]
    """Bytes that the holder of each stage can take, 0 = not known -> layers of each; ValueError if that cannot be."""
    wanted: int | None = None
    """Stage it would like to hold; `None` = any."""
    capacity: int = 0
    """Bytes that it can hold; 0 = not known."""
    started: float = 0.0
    """When this peer did, in seconds since the Unix epoch."""
    spare_wait_s: float = 10.0
    """A lost stage waits so long for somebody without one."""
    stall_s: float = 60.0
    """Longer than this no stage keeps a message."""
    absent_s: float = 0.0
    """It waits so much longer for another to begin the crew, who may know more of it."""
    run: Lineage = NO_RUN
    """Of its newest checkpoint."""
    round: int = 0
    """Likewise."""
    draw: Callable[[], str] = partial(secrets.token_hex, 8)
    """An id for a segment of a run."""

    @property
    def id(self) -> str:
        """Of the crew, as cards show it."""
        return crew_id(self.key)

    def proof_to(self, peer: str) -> str:
        """That this peer knows the crew's name."""
        return proof(self.key, self.me, peer)

    def is_proof_of(self, peer: str, text: str) -> bool:
        """That `peer` does."""
        return hmac.compare_digest(proof(self.key, peer, self.me), text)


@dataclass(eq=False)
class Link:
    """A channel with a peer."""

    peer: str
    method: str
    dialled: bool = False
    """By this node."""


@dataclass(frozen=True)
class Connect:
    """Open the channel."""

    link: Link


@dataclass(frozen=True)
class Close:
    """Close it; nothing is told about it any more."""

    link: Link


@dataclass(frozen=True)
class Send:
    link: Link
    record: Record


@dataclass(frozen=True)
class Say:
    """A sentence for people."""

    text: str


@dataclass(frozen=True)
class BuildStage:
    """Build a stage from the first source that works, then call `Membership.seated` or `Membership.unable`."""

    stage: int
    layers: Layers
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class DropStage:
    """Let a stage go: another peer holds it."""

    stage: int


@dataclass(frozen=True)
class StartLeading:
    """Run the loop: this peer holds stage 0, or is about to."""


@dataclass(frozen=True)
class StopLeading:
    """End the loop: another peer leads."""


Action = Connect | Close | Send | Say | BuildStage | DropStage | StartLeading | StopLeading


class ActionQueue:
    """What is to be done, in order; what was said; what was counted."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._said_of_peers: set[str] = set()

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def send(self, link: Link | None, record: Record) -> None:
        """`None` = this peer itself, which knows."""
        if link is not None:
            self.actions.append(Send(link, record))

    def say(self, text: str) -> None:
        self.actions.append(Say(text))

    def say_once(self, text: str) -> bool:
        """Whether it is the first time."""
        first = text not in self._said
        if first:
            self._said.add(text)
            self.say(text)
        return first

    def say_of_peer(self, text: str) -> bool:
        """Likewise, of what peers do: as they may make up others, not without end."""
        first = text not in self._said_of_peers and len(self._said_of_peers) < MAX_SAID
        if first:
            self._said_of_peers.add(text)
            self.say(text)
        return first

    def unsay(self, text: str) -> None:
        """It is over; when it comes again it is said again."""
        self._said.discard(text)

    def take(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions
