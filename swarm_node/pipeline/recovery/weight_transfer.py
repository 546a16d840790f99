"""Weights of stages, handed from peer to peer of a crew: to rebuild a lost one, and to keep replicas.

    whoever holds a stage   -- its layers ---------------------------------> whoever rebuilds a neighbour of it
                            -- all of it ----------------------------------> whoever takes the stage over
                            -- all of it, or what is in no layer ---------> whoever keeps its replica
    whoever keeps a replica -- the replica --------------------------------> whoever takes the stage over
    whoever leaves      -- word that its stage is to be kept --------------> another of the crew, who then fetches it

An exchange (`protocol.transports.base`) in which only the giver has a body: the tensors asked for, in float32, those of
layers first, in the order of layers and names. Both ends know the sizes beforehand. What leaves is a copy made between
two updates, the next of which waits for it; all who ask between the same two share it. Who takes it too slowly is cut
off, and peers that are not of the crew take turns. Optimiser moments stay where they are: whoever takes weights over
begins with new ones.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from protocol.codec import version_for
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_CHUNK_BYTES
from protocol.tensors import KEEP_METHOD, STATE_METHOD, KeepHead, StateHead, open_keep_head, open_state_head, seal_head
from protocol.transports.base import Accepted, Outgoing, Sink, Transport
from swarm_node.policy.policy import some_of

BYTES_PER_S = 2**17
"""Who gives, or takes, less than a megabit a second is not waited for, ..."""
GRACE_S = 20.0
"""... these seconds not counted."""
AT_ONCE, PER_PEER = 8, 2
"""Peers of the crew that are given weights at a time, and what one of them is."""
COOL_S = 60.0
"""Of other peers it is one at a time, and the same one not again so soon."""
MAX_ASKS = 256
"""Times that a peer which leaves asks whether its stage is kept by now."""


@dataclass(frozen=True)
class Wanted:
    """Which tensors of a stage: those of layers `first` to `end` - 1 and, if `rest`, those of no layer."""

    stage: int
    first: int
    end: int
    rest: bool
    replica: bool = False
    """The copy that the asked peer keeps for another, rather than its own."""


@dataclass(frozen=True)
class StageWeights:
    """Weights of (part of) a stage at a moment."""

    tensors: Mapping[str, Tensor]
    """By global name."""
    updates: int
    omega: float
    """Norm of the stage's gradient at its last update, before clipping."""


@dataclass(frozen=True, eq=False)
class _Copy(StageWeights):
    """Of some tensors of a stage here, made between two updates; more may be added before the second. It lives as long
    as somebody is being given it."""

    tensors: dict[str, Tensor]
    some: Tensor
    """Some values of all tensors of the stage: others' weights may change it between two updates, too."""


@dataclass
class Fetch:
    """StageWeights that is being fetched; `state` is of any worth when `done` is, without an error."""

    peer: str
    tensors: dict[str, Tensor]
    done: Future[None] = field(default_factory=Future)
    updates: int = 0
    omega: float = 0.0

    @property
    def state(self) -> StageWeights:
        return StageWeights(self.tensors, self.updates, self.omega)


@dataclass
class _Offer:
    """A stage that is to be kept for a peer that leaves."""

    peer: str
    updates: int
    asks: int = 0
    begun: bool = False
    """It has been fetched, or is being: that is done once."""
    told: bool = False
    """The crew knows that it is here."""


def nothing_kept(peer: str, stage: int) -> Mapping[str, Tensor]:
    """As `WeightTransfer.shelf`: for nobody."""
    raise RemoteProtocolError("stranger", f"stage {stage} is not kept here")


class WeightTransfer:
    """Gives what this peer holds and keeps, and fetches what others do."""

    def __init__(
        self,
        transport: Transport,
        swarm: str,
        architecture: str,
        allowed: Callable[[str, int], bool],
        of_crew: Callable[[str], bool] = lambda peer: True,
        now: Callable[[], float] = time.monotonic,
        shelf: Callable[[str, int], Mapping[str, Tensor]] = nothing_kept,
        shelved: Callable[[], None] = lambda: None,
        room: Callable[[], int] = lambda: 0,
    ) -> None:
        """`architecture`: 16 hexadecimal digits, equal for those who hold stages of one policy. `allowed` says, on any
        thread, whether a peer may have weights of a stage; others are refused as `stranger`. `of_crew`: whether it is
        one of this crew; others take turns. Whose turn it is not is refused as `busy`.

        `shelf` gives, on any thread, the names and shapes of a stage that is kept for that peer if it asks for it, or
        raises RemoteProtocolError; `shelved` is called, likewise, when it is here; `room` = bytes of memory that are
        free, 0 = not known."""
        self.transport = transport
        self.allowed = allowed
        self.of_crew = of_crew
        self.now = now
        self.shelf = shelf
        self.shelved = shelved
        self.room = room
        self.place = swarm, architecture
        self.replicas: dict[int, StageWeights] = {}
        """Copies of others' stages."""
        self._lock = threading.Lock()
        self._held: dict[int, tuple[Callable[[], StageWeights], Callable[[], AbstractContextManager[object]]]] = {}
        self._copies: WeakValueDictionary[int, _Copy] = WeakValueDictionary()
        self._given_to: Counter[str] = Counter()
        """Peers that are being given weights."""
        self._guest = ""
        """The one of them that is not of this crew, ..."""
        self._cool_until: dict[str, float] = {}
        """... and when the last ones may ask again."""
        self._keeping: dict[int, Fetch] = {}
        self._offers: dict[int, _Offer] = {}
        """Last one of each stage."""
        transport.accept(STATE_METHOD, self._accept)
        transport.accept(KEEP_METHOD, self._accept_offer)

    def hold(
        self, stage: int, state: Callable[[], StageWeights], still: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """This peer holds `stage`; `state` is of its live tensors. `still` is held while another thread copies them,
        and by whoever changes them."""
        with self._lock:
            self._held[stage] = state, still
            self.replicas.pop(stage, None)

    def let_go(self, stage: int) -> None:
        """It no longer does."""
        with self._lock:
            self._held.pop(stage, None)

    def forget(self, keep: Collection[int]) -> None:
        """From now on, keep no replicas but of these stages."""
        with self._lock:
            self.replicas = {stage: state for stage, state in self.replicas.items() if stage in keep}
            self._keeping = {stage: fetch for stage, fetch in self._keeping.items() if stage in keep}

    # ---------------------------------------------------------------- fetching

    def fetch(self, peer: str, wanted: Wanted, like: Mapping[str, Tensor]) -> Fetch:
        """Have `wanted` sent by `peer`, in the background; `like` has its global names and shapes. Its future fails
        with ProtocolError. Nothing is allocated before the peer has said that it gives just as many bytes."""
        names = ordered(like, wanted)
        result = Fetch(peer, {})

        def answered(head: bytes, size: int) -> Sink:
            theirs = open_state_head(head)
            self._check(theirs, wanted)
            if size != 4 * sum(like[name].numel() for name in names):
                raise RemoteProtocolError("size", f"{size} bytes")
            result.updates, result.omega = theirs.updates, theirs.omega
            result.tensors = {name: torch.empty(like[name].shape) for name in names}
            return Filler([result.tensors[name] for name in names]).write

        limit = GRACE_S + 4 * sum(like[name].numel() for name in names) / BYTES_PER_S
        ours = Outgoing(self._head(wanted, peer))
        arrived = self.transport.exchange(peer, STATE_METHOD, ours, answered, limit)

        def judge(future: Future[None]) -> None:
            error: BaseException | None
            if future.cancelled():
                error = RemoteProtocolError("torn", "given up")
            else:
                error = future.exception()
            if error is None and not all(bool(tensor.isfinite().all()) for tensor in result.tensors.values()):
                error = RemoteProtocolError("nonfinite", f"stage {wanted.stage}")
            if error is None:
                result.done.set_result(None)
            else:
                result.done.set_exception(error)

        arrived.add_done_callback(judge)
        return result

    def keep(self, stage: int, peer: str, like: Mapping[str, Tensor]) -> None:
        """Renew the replica of `stage`, which `peer` holds, in the background, unless that is under way."""
        running = self._keeping.get(stage)
        if running is not None and not running.done.done():
            return
        layers = [layer for name in like if (layer := layer_of(name)) is not None]
        first, end = (min(layers), max(layers) + 1) if layers else (0, 0)
        fetch = self._keeping[stage] = self.fetch(peer, Wanted(stage, first, end, rest=True), like)

        def kept(future: Future[None]) -> None:
            if future.exception() is None:
                with self._lock:
                    if stage not in self._held and self._keeping.get(stage) is fetch:
                        self.replicas[stage] = fetch.state

        fetch.done.add_done_callback(kept)

    # ---------------------------------------------------------------- keeping for who leaves

    def offer(self, peer: str, stage: int, updates: int, timeout: float) -> Future[int]:
        """Have `peer` fetch and keep a stage that is held here, after that update, unless it is at it: the updates
        behind the copy that it has by now, 0 = none. Fails with ProtocolError."""
        result: Future[int] = Future()
        kept = 0

        def answered(head: bytes, size: int) -> Sink:
            nonlocal kept
            theirs = open_keep_head(head)
            self._check_place(theirs)
            if theirs.stage != stage or size:
                raise RemoteProtocolError("stage", f"stage {theirs.stage} and {size} bytes")
            kept = theirs.updates
            return _refuse

        ours = Outgoing(self._keep_head(peer, stage, updates))
        arrived = self.transport.exchange(peer, KEEP_METHOD, ours, answered, timeout)

        def judge(future: Future[None]) -> None:
            error = RemoteProtocolError("torn", "given up") if future.cancelled() else future.exception()
            if error is None:
                result.set_result(kept)
            else:
                result.set_exception(error)

        arrived.add_done_callback(judge)
        return result

    def _accept_offer(self, peer: str, head: bytes, size: int) -> Accepted:
        request = open_keep_head(head)
        if size:
            raise RemoteProtocolError("size", f"{size} bytes where none are wanted")
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
            size = 4 * sum(tensor.numel() for tensor in like.values())
            if 0 < (room := self.room()) < 2 * size:  # the rest is for whoever works here
                raise RemoteProtocolError("room", f"{size} bytes are too many for {room} that are free")
            self.keep(stage, peer, like)
        if here and not offer.told:
            self.shelved()
            offer.told = True
        return Accepted(Outgoing(self._keep_head(peer, stage, kept)), _refuse, lambda error: None)

    def _comes(self, stage: int, updates: int, like: Mapping[str, Tensor]) -> bool:
        """Some of it is on its way, or all of it has just come."""
        fetch = self._keeping.get(stage)
        if fetch is None or not fetch.done.done():
            return fetch is not None
        whole = fetch.tensors.keys() == like.keys() and fetch.updates >= updates
        return fetch.done.exception() is None and whole

    def _keep_head(self, peer: str, stage: int, updates: int) -> bytes:
        return seal_head(KeepHead(version_for(peer, self.transport.members()), *self.place, stage, updates))

    # ---------------------------------------------------------------- giving

    def _accept(self, peer: str, head: bytes, size: int) -> Accepted:
        request = open_state_head(head)
        if size:
            raise RemoteProtocolError("size", f"{size} bytes where none are wanted")
        wanted = Wanted(request.stage, request.first, request.end, request.rest, request.replica)
        self._check(request, wanted)
        if not self.allowed(peer, wanted.stage):
            raise RemoteProtocolError("stranger", f"stage {wanted.stage} is not for everybody")
        self._begin(peer)
        try:
            state, tensors = self._given(wanted)
        except BaseException:
            self._end(peer)
            raise
        body = 4 * sum(tensor.numel() for tensor in tensors)
        ours = Outgoing(self._head(wanted, peer, state), body, partial(self._body, state, tensors))
        return Accepted(ours, _refuse, lambda error: self._end(peer))

    def _begin(self, peer: str) -> None:
        """To give; RemoteProtocolError (busy) if it is not that peer's turn."""
        now, guest = self.now(), not self.of_crew(peer)
        with self._lock:
            self._cool_until = {one: until for one, until in self._cool_until.items() if until > now}
            most = AT_ONCE + bool(self._guest)
            if guest and (self._guest or peer in self._cool_until):
                raise RemoteProtocolError("busy", "weights were given to a peer of another crew a moment ago")
            if not guest and (self._given_to.total() >= most or self._given_to[peer] >= PER_PEER):
                raise RemoteProtocolError("busy", "weights are being given to as many peers as can be")
            self._given_to[peer] += 1
            self._guest = peer if guest else self._guest

    def _end(self, peer: str) -> None:
        with self._lock:
            self._given_to[peer] -= 1
            self._given_to += Counter()  # those that are above 0
            if peer == self._guest:
                self._guest, self._cool_until[peer] = "", self.now() + COOL_S

    def _given(self, wanted: Wanted) -> tuple[StageWeights, list[Tensor]]:
        """What has the tensors wanted, and these; they stay as they are."""
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
        """All bytes of `tensors`; others share the `state` that they are of for as long as this lives.
        RemoteProtocolError (slow) if they are not taken in time."""
        began, taken = self.now(), 0
        for tensor in tensors:
            flat = tensor.detach().float().cpu().flatten().numpy().view(np.uint8)
            for start in range(0, len(flat), MAX_CHUNK_BYTES):
                if self.now() > began + GRACE_S + taken / BYTES_PER_S:
                    raise RemoteProtocolError("slow", "the weights were not taken in time")
                piece = memoryview(flat[start : start + MAX_CHUNK_BYTES])
                taken += len(piece)
                yield piece

    def _head(self, wanted: Wanted, peer: str, state: StageWeights | None = None) -> bytes:
        updates, omega = (0, 0.0) if state is None else (state.updates, state.omega)
        swarm, architecture = self.place
        return seal_head(
            StateHead(
                version_for(peer, self.transport.members()),
                swarm,
                architecture,
                wanted.stage,
                wanted.replica,
                wanted.first,
                wanted.end,
                wanted.rest,
                updates,
                omega,
            )
        )

    def _check_place(self, head: StateHead | KeepHead) -> None:
        if (head.swarm, head.architecture) != self.place:
            raise RemoteProtocolError("crew", f"policy {head.architecture} of swarm {head.swarm[:16]}")

    def _check(self, head: StateHead, wanted: Wanted) -> None:
        self._check_place(head)
        if Wanted(head.stage, head.first, head.end, head.rest, head.replica) != wanted:
            raise RemoteProtocolError("stage", f"stage {head.stage}, layers {head.first} to {head.end}")


def layer_of(name: str) -> int | None:
    """The first integer among the dotted parts of a tensor's name."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def ordered(names: Mapping[str, Tensor], wanted: Wanted) -> list[str]:
    """Those of `names` that are wanted, as they are sent: layers in order, then the rest."""
    layers = {name: layer for name in names if (layer := layer_of(name)) is not None}
    inside = [name for name, layer in layers.items() if wanted.first <= layer < wanted.end]
    rest = sorted(name for name in names if name not in layers) if wanted.rest else []
    return sorted(inside, key=lambda name: (layers[name], name)) + rest


class Filler:
    """Takes the bytes of float32 `tensors`, one after the other."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views = [tensor.flatten().numpy().view(np.uint8) for tensor in tensors if tensor.numel()]
        self._at = 0

    def write(self, piece: memoryview) -> None:
        data = np.frombuffer(piece, dtype=np.uint8)
        while len(data):
            room = self._views[0][self._at : self._at + len(data)]
            room[:] = data[: len(room)]
            data, self._at = data[len(room) :], self._at + len(room)
            if self._at == len(self._views[0]):
                del self._views[0]
                self._at = 0


def _refuse(piece: memoryview) -> None:
    raise RemoteProtocolError("size", "bytes where none are wanted")
