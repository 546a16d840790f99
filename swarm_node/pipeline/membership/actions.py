"""Values that the pure part of a membership and the code that carries it out exchange."""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from swarm_protocol.crew import Holding, Layers, Record, Settings, Source, crew_id, proof
from swarm_protocol.lineage import NO_RUN, Lineage

MAX_SAID = 1000
"""Different sentences about peers that are said; after that no more, as peers may make up others without end."""

Spans = tuple[Layers, ...]
Sources = Callable[[int, Spans, Mapping[str, Holding], int, Settings], Sequence[Source]]
"""(stage, layers of all stages, holding of each peer, updates of the crew, its settings) -> sources of the stage, best
first."""
Tell = Callable[[int, Source, int, int], str]
"""(stage, its source, its updates, updates of the crew) -> a sentence for people: what was done, what is lost."""
Costs = Callable[[Spans], Sequence[int]]  # layers of all stages -> bytes that each stage takes


@dataclass(frozen=True)
class PeerSpec:
    """This peer's place in its crew, and the functions that the crew's decisions need."""

    me: str
    name: str  # name of this peer, for people
    swarm: str
    crew: str  # name of the crew. It is a password: only this machine shows it.
    key: bytes  # `crew_key` of the crew's name
    architecture: str
    settings: Settings  # how the crew works if this peer becomes its first leader
    spans: Spans  # layers of each stage if this peer becomes the first leader: of its checkpoints, or else equal shares
    sources: Sources
    tell: Tell
    costs: Costs
    divide: Callable[[Sequence[float]], Spans]
    """Bytes that the holder of each stage has room for (0 = not known) -> layers of each stage. ValueError if they do
    not fit."""
    wanted: int | None = None  # stage that it would like to hold; `None` = any
    capacity: int = 0  # bytes that it can hold; 0 = not known
    started: float = 0.0  # when this peer started, in seconds since the Unix epoch
    spare_wait_s: float = 10.0  # a lost stage waits so long for a peer without one, before a neighbour takes it
    stall_s: float = 60.0  # a peer that keeps a message for longer is given up
    absent_s: float = 0.0
    """This peer waits so much longer for another one to begin the crew, which may have newer weights."""
    run: Lineage = NO_RUN  # run of its newest checkpoint
    round: int = 0  # round of its newest checkpoint
    draw: Callable[[], str] = partial(secrets.token_hex, 8)  # draws an id for a segment of a run

    @property
    def id(self) -> str:
        """Id of the crew, as cards show it."""
        return crew_id(self.key)

    def proof_to(self, peer: str) -> str:
        """Proof to `peer` that this peer knows the crew's name."""
        return proof(self.key, self.me, peer)

    def is_proof_of(self, peer: str, text: str) -> bool:
        """Whether `text` proves that `peer` knows the crew's name."""
        return hmac.compare_digest(proof(self.key, peer, self.me), text)


@dataclass(eq=False)
class PeerLink:
    """A channel with a peer."""

    peer: str
    method: str
    dialled: bool = False  # this node opened it


@dataclass(frozen=True)
class Connect:
    """Open the channel."""

    link: PeerLink


@dataclass(frozen=True)
class Close:
    """Close the channel; no event about it follows."""

    link: PeerLink


@dataclass(frozen=True)
class Send:
    """Send a record over the channel."""

    link: PeerLink
    record: Record


@dataclass(frozen=True)
class Say:
    """A sentence for people."""

    text: str


@dataclass(frozen=True)
class BuildStage:
    """Build a stage from the first source that works, then call `CrewMembership.built` or `CrewMembership.unable`."""

    stage: int
    layers: Layers
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class DropStage:
    """Drop a stage: another peer holds it."""

    stage: int


@dataclass(frozen=True)
class StartLeading:
    """Run the training loop: this peer holds stage 0, or is about to."""


@dataclass(frozen=True)
class StopLeading:
    """End the training loop: another peer leads."""


Action = Connect | Close | Send | Say | BuildStage | DropStage | StartLeading | StopLeading


class ActionQueue:
    """Actions that are to be done, in order; sentences that were said; counts."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._of_peers = 0  # sentences about peers that were said

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def send(self, link: PeerLink | None, record: Record) -> None:
        """Send a record; `None` stands for this peer itself, which knows already."""
        if link is not None:
            self.actions.append(Send(link, record))

    def say(self, text: str) -> None:
        self.actions.append(Say(text))

    def say_once(self, text: str) -> bool:
        """Say a sentence unless it was said before. Whether it was the first time."""
        first = text not in self._said
        if first:
            self._said.add(text)
            self.say(text)
        return first

    def say_of_peer(self, text: str) -> bool:
        """`say_once` for sentences about peers: at most `MAX_SAID` different ones."""
        first = self._of_peers < MAX_SAID and self.say_once(text)
        self._of_peers += first
        return first

    def unsay(self, text: str) -> None:
        """Have `say_once` say this sentence again the next time: its occasion is over."""
        self._said.discard(text)

    def take(self) -> list[Action]:
        """All actions so far; the queue is empty then."""
        actions, self.actions = self.actions, []
        return actions
