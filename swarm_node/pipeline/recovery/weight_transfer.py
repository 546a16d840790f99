"""Weights of stages that travel between peers of a crew: to rebuild a lost stage, and to keep replicas.

    a holder of the stage   -- its layers ---------------------------------> a peer that rebuilds a neighbour of it
                            -- all of it ----------------------------------> a peer that takes the stage over
                            -- all of it, or what is in no layer ---------> a peer that keeps a replica
    a keeper of a replica   -- the replica --------------------------------> a peer that takes the stage over
    a peer that leaves      -- a request to keep its stage ----------------> another of the crew, which then fetches it

The body of a transfer (`swarm_protocol.transports.transfer`) has the tensors asked for in float32: those of layers
first, in the order of layers and names. Both ends know the sizes beforehand. The giver copies its tensors between two
updates, and the second waits for the copy; all peers that ask between the same two share it. A peer that takes it too
slowly is cut off. Peers of other crews get weights one at a time. Optimiser moments are not sent: a peer that takes
weights over begins with new ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from swarm_node.pipeline.compute.partition import layer_of
from swarm_node.policy.digests import some_of
from swarm_protocol.codec import version_for
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.tensors import KEEP_METHOD, STATE_METHOD, KeepHead, StateHead, decode_head, encode_head
from swarm_protocol.transports import transfer
from swarm_protocol.transports.base import Accepted, Outgoing, Sink, Transport

PACE = transfer.Pace(20.0, 2**17)  # both sides give up a transfer that is slower than a megabit a second
AT_ONCE, PER_PEER = 8, 2  # transfers to peers of the crew at the same time, and to one of them
OTHER_CREW_PAUSE_S = 60.0
"""Peers of other crews are served one at a time, and each waits so long before its next transfer."""
MAX_ASKS = 256  # how often a peer that leaves may ask whether its stage is kept by now


@dataclass(frozen=True)
class Wanted:
    """Which tensors of a stage: those of layers `first` to `end` - 1 and, if `rest`, those of no layer."""

    stage: int
    first: int
    end: int
    rest: bool
    replica: bool = False  # the copy that the asked peer keeps for another, rather than its own


@dataclass(frozen=True)
class StageWeights:
    """Weights of (part of) a stage at a moment."""

    tensors: Mapping[str, Tensor]  # global name -> tensor
    updates: int
    omega: float  # norm of the stage's gradient at its last update, before clipping


@dataclass(frozen=True, eq=False)
class _Copy(StageWeights):
    """A copy of some tensors of a stage here, made between two updates; more may be added before the second. It lives
    as long as a transfer of it."""

    tensors: dict[str, Tensor]
    some: Tensor  # some values of all tensors of the stage. They show whether averaging has changed the weights since.


@dataclass
class _Offer:
    """A stage that is to be kept for a peer that leaves."""

    peer: str
    updates: int
    asks: int = 0
    begun: bool = False  # a fetch has begun; there is only one
    told: bool = False  # the crew knows that it is here


@dataclass(eq=False)
class WeightTransfer:
    """Gives the weights that this peer holds and keeps, and fetches those of others.

    The functions that it is given are called on any thread."""

    transport: Transport
    place: tuple[str, str]
    """The swarm, and 16 hexadecimal digits that are equal for peers that hold stages of one policy."""
    allowed: Callable[[str, int], bool]  # whether a peer may have weights of a stage; others are refused as `stranger`
    of_crew: Callable[[str], bool]  # whether a peer is of this crew
    shelf: Callable[[str, int], Mapping[str, Tensor]]
    """Names and shapes of a stage that is kept for a peer that asks. Raises RemoteProtocolError if it is not."""
    shelved: Callable[[], None]  # called when such a stage is here
    room: Callable[[], int]  # free memory in bytes, 0 = not known
    now: Callable[[], float] = time.monotonic
    replicas: dict[int, StageWeights] = field(default_factory=dict)  # copies of others' stages

    def __post_init__(self) -> None:
        self.me = self.transport.peer_id
        self._lock = threading.Lock()
        self._held: dict[int, tuple[Callable[[], StageWeights], Callable[[], AbstractContextManager[object]]]] = {}
        self._copies: WeakValueDictionary[int, _Copy] = WeakValueDictionary()
        self._crew_slots = transfer.UploadSlots(AT_ONCE, PER_PEER, self.now)
        self._other_slots = transfer.UploadSlots(1, 1, self.now)  # for peers of other crews
        self._keeping: dict[int, Future[StageWeights]] = {}  # fetches of replicas, the last of each stage
        self._offers: dict[int, _Offer] = {}  # the last one of each stage
        self.transport.accept(STATE_METHOD, self._accept)
        self.transport.accept(KEEP_METHOD, self._accept_offer)

    def hold(
        self, stage: int, state: Callable[[], StageWeights], still: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """This peer holds `stage`; `state` gives its live tensors. `still` is held while they are copied and while they
        change."""
        with self._lock:
            self._held[stage] = state, still
            self.replicas.pop(stage, None)

    def let_go(self, stage: int) -> None:
        """This peer no longer holds `stage`."""
        with self._lock:
            self._held.pop(stage, None)

    def forget(self, keep: Collection[int]) -> None:
        """Drop the replicas of all stages but these."""
        with self._lock:
            self.replicas = {stage: state for stage, state in self.replicas.items() if stage in keep}
            self._keeping = {stage: fetch for stage, fetch in self._keeping.items() if stage in keep}

    def own(self, wanted: Wanted) -> StageWeights | None:
        """Weights that this peer has itself, live or as a replica; `None` if it has not."""
        state = self.replicas.get(wanted.stage)
        if not wanted.replica:
            held = self._held.get(wanted.stage)
            state = None if held is None else held[0]()
        if state is None:
            return None
        tensors = {name: state.tensors[name] for name in ordered(state.tensors, wanted)}
        return StageWeights(tensors, state.updates, state.omega)

    # ---------------------------------------------------------------- fetching

    def fetch(self, peer: str, wanted: Wanted, like: Mapping[str, Tensor]) -> Future[StageWeights]:
        """Fetch `wanted` from `peer`, in the background; `like` has its global names and shapes. Fails with
        ProtocolError. Nothing is allocated before the peer has announced a body of the right size."""
        names = ordered(like, wanted)
        size = size_of(like[name] for name in names)
        theirs, tensors = StateHead(0, "", "", 0, False, 0, 0, False), dict[str, Tensor]()

        def answered(head: bytes, length: int) -> Sink:
            nonlocal theirs
            theirs = decode_head(head, StateHead)
            self._check_place(theirs)
            if _wanted(theirs) != wanted:
                raise RemoteProtocolError("stage", f"stage {theirs.stage}, layers {theirs.first} to {theirs.end}")
            if length != size:
                raise RemoteProtocolError("size", f"{length} bytes")
            body = torch.empty(size // 4)
            parts = body.split([like[name].numel() for name in names])
            tensors.update({name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)})
            return filling(body)

        def arrived() -> StageWeights:
            if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                raise RemoteProtocolError("nonfinite", f"stage {wanted.stage}")
            return StageWeights(tensors, theirs.updates, theirs.omega)

        ours = Outgoing(self._head(wanted, peer))
        return transfer.outcome(
            self.transport.exchange(peer, STATE_METHOD, ours, answered, PACE.seconds(size)), arrived
        )

    def keep(self, stage: int, peer: str, like: Mapping[str, Tensor]) -> None:
        """Renew the replica of `stage`, which `peer` holds, in the background, unless that is under way."""
        running = self._keeping.get(stage)
        if running is not None and not running.done():
            return
        layers = [layer for name in like if (layer := layer_of(name)) is not None]
        wanted = Wanted(stage, min(layers, default=0), max(layers, default=-1) + 1, rest=True)
        fetch = self._keeping[stage] = self.fetch(peer, wanted, like)

        def kept(fetched: Future[StageWeights]) -> None:
            if fetched.exception() is None:
                with self._lock:
                    if stage not in self._held and self._keeping.get(stage) is fetch:
                        self.replicas[stage] = fetched.result()

        fetch.add_done_callback(kept)

    # ---------------------------------------------------------------- keeping for a peer that leaves

    def offer(self, peer: str, stage: int, updates: int, timeout: float) -> Future[int]:
        """Ask `peer` to fetch and keep a stage that is held here, as of update `updates`, unless it has begun to. The
        result is the update of the copy that it has by now, 0 = none. Fails with ProtocolError."""
        kept = 0

        def answered(head: bytes, size: int) -> Sink:
            nonlocal kept
            theirs = decode_head(head, KeepHead)
            self._check_place(theirs)
            if theirs.stage != stage or size:
                raise RemoteProtocolError("stage", f"stage {theirs.stage} and {size} bytes")
            kept = theirs.updates
            return transfer.no_body

        ours = Outgoing(self._keep_head(peer, stage, updates))
        return transfer.outcome(self.transport.exchange(peer, KEEP_METHOD, ours, answered, timeout), lambda: kept)

    def _accept_offer(self, peer: str, head: bytes, size: int) -> Accepted:
        request = decode_head(head, KeepHead)
        transfer.expect_no_body(size)
        self._check_place(request)
        stage, updates = request.stage, request.updates
        like = self.shelf(peer, stage)
        with self._lock:
            offer = self._offers.get(stage)
            if offer is None or (offer.peer, offer.updates) != (peer, updates):
                offer = self._offers[stage] = _Offer(peer, updates)
            offer.asks += 1
            replica = self.replicas.get(stage)
            kept = replica.updates if replica is not None and replica.tensors.keys() == like.keys() else 0
            here = kept >= updates
            begin = not here and not self._comes(stage, updates, like)
            if offer.asks > MAX_ASKS or (begin and offer.begun):
                raise RemoteProtocolError("flood", f"stage {stage} after update {updates} was to be kept before")
            offer.begun |= begin
        if begin:
            size = size_of(like.values())
            if 0 < (room := self.room()) < 2 * size:  # the other half is for this peer's own work
                raise RemoteProtocolError("room", f"{size} bytes are too many for {room} that are free")
            self.keep(stage, peer, like)
        if here and not offer.told:
            self.shelved()
            offer.told = True
        return Accepted(Outgoing(self._keep_head(peer, stage, kept)), transfer.no_body, lambda error: None)

    def _comes(self, stage: int, updates: int, like: Mapping[str, Tensor]) -> bool:
        """Whether a fetch of the stage is under way, or has just brought all of it."""
        fetch = self._keeping.get(stage)
        if fetch is None or not fetch.done():
            return fetch is not None
        if fetch.exception() is not None:
            return False
        return fetch.result().tensors.keys() == like.keys() and fetch.result().updates >= updates

    def _keep_head(self, peer: str, stage: int, updates: int) -> bytes:
        return encode_head(KeepHead(version_for(peer, self.transport.members()), *self.place, stage, updates))

    # ---------------------------------------------------------------- giving

    def _accept(self, peer: str, head: bytes, size: int) -> Accepted:
        request = decode_head(head, StateHead)
        transfer.expect_no_body(size)
        self._check_place(request)
        if not self.allowed(peer, request.stage):
            raise RemoteProtocolError("stranger", f"stage {request.stage} is not for everybody")
        slots, wait_s = (self._crew_slots, 0.0) if self.of_crew(peer) else (self._other_slots, OTHER_CREW_PAUSE_S)
        give = partial(self._give, _wanted(request))
        return slots.give(peer, give, lambda slot, size, error: slots.leave(slot, wait_s))

    def _give(self, wanted: Wanted, slot: transfer.UploadSlot) -> Outgoing:
        state, tensors = self._given(wanted)
        head = self._head(wanted, slot.peer, state.updates, state.omega)
        return Outgoing(head, size_of(tensors), partial(self._body, state, tensors))

    def _given(self, wanted: Wanted) -> tuple[StageWeights, list[Tensor]]:
        """The tensors wanted, and the replica or copy that they are of; nothing changes them."""
        with self._lock:
            held = self._held.get(wanted.stage)
            replica = self.replicas.get(wanted.stage)
        if wanted.replica and replica is not None:
            return replica, [replica.tensors[name] for name in ordered(replica.tensors, wanted)]
        if wanted.replica or held is None:
            raise RemoteProtocolError("stage", f"stage {wanted.stage} is not here")
        live, still = held
        with still():
            state = live()
            names = ordered(state.tensors, wanted)
            some = torch.cat([some_of(tensor).float().cpu() for tensor in state.tensors.values()] or [torch.empty(0)])
            with self._lock:
                copy = self._copies.get(wanted.stage)
                if copy is None or copy.updates != state.updates or not torch.equal(copy.some, some):
                    copy = self._copies[wanted.stage] = _Copy({}, state.updates, state.omega, some)
            for name in names:
                if name not in copy.tensors:
                    copy.tensors[name] = state.tensors[name].detach().to("cpu", torch.float32, copy=True)
            return copy, [copy.tensors[name] for name in names]

    def _body(self, state: StageWeights, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
        """The bytes of `tensors`. While this runs, `state`, of which they are, lives and is shared with other peers.
        Raises RemoteProtocolError: slow."""
        began, values = self.now(), (tensor.detach().float().cpu().flatten().numpy() for tensor in tensors)
        pieces = (piece for array in values for piece in transfer.chunks(memoryview(array.view(np.uint8))))
        yield from transfer.in_time(pieces, lambda taken: began + PACE.seconds(taken), self.now)

    def _head(self, wanted: Wanted, peer: str, updates: int = 0, omega: float = 0.0) -> bytes:
        version, (swarm, architecture) = version_for(peer, self.transport.members()), self.place
        return encode_head(StateHead(version, swarm, architecture, **asdict(wanted), updates=updates, omega=omega))

    def _check_place(self, head: StateHead | KeepHead) -> None:
        if (head.swarm, head.architecture) != self.place:
            raise RemoteProtocolError("crew", f"policy {head.architecture} of swarm {head.swarm[:16]}")


def _wanted(head: StateHead) -> Wanted:
    return Wanted(head.stage, head.first, head.end, head.rest, head.replica)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors on their way, in float32."""
    return 4 * sum(tensor.numel() for tensor in tensors)


def ordered(names: Mapping[str, Tensor], wanted: Wanted) -> list[str]:
    """The `names` that are wanted, in the order in which they are sent: layer by layer, then the rest."""
    layers = {name: layer for name in names if (layer := layer_of(name)) is not None}
    inside = [name for name, layer in layers.items() if wanted.first <= layer < wanted.end]
    rest = sorted(name for name in names if name not in layers) if wanted.rest else []
    return sorted(inside, key=lambda name: (layers[name], name)) + rest


def filling(tensor: Tensor) -> Sink:
    """Writes bytes into a float32 `tensor`, one piece after the other."""
    left = tensor.numpy().view(np.uint8)

    def write(piece: memoryview) -> None:
        nonlocal left
        left[: len(piece)] = np.frombuffer(piece, np.uint8)
        left = left[len(piece) :]

    return write
