"""Runs a `CrewMembership`, which is pure, over a transport's channels.

    records, channels that open and end -> events -> CrewMembership -> actions -> channels, orders
    stage messages -> their heads are decoded and judged -> inbox

An event is handled on whatever thread brings it, one after the other; nothing here waits. A stage message names the
plan that it belongs to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from swarm_node.pipeline.inbox import Expected, Inbox
from swarm_node.pipeline.membership.actions import (
    Action,
    BuildStage,
    Close,
    Connect,
    DropStage,
    PeerLink,
    Say,
    Send,
    StartLeading,
    StopLeading,
)
from swarm_node.pipeline.membership.member import CrewMembership
from swarm_node.pipeline.messages import Limits, check_message
from swarm_protocol.crew import (
    CONTROL,
    CREW_METHOD,
    MAX_CONTROL_BYTES,
    STAGE_METHOD,
    Plan,
    decode_record,
    encode_record,
)
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import Envelope, decode_envelope
from swarm_protocol.transports.base import Channel, Listener, Transport

PLANS = 16
"""Latest plans whose messages are still recognised, and dropped; a message of any other plan ends its channel."""

Order = BuildStage | DropStage | StartLeading | StopLeading  # something that the main thread must do


class CrewChannels:
    """The channels of one peer in its crew, and the messages and orders that came over them."""

    def __init__(
        self,
        transport: Transport,
        membership: CrewMembership,
        limits: Callable[[Plan, str, str], Limits],
        say: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        """`limits`: (plan, this peer, another peer) -> what the other one may send."""
        self.membership = membership
        self.lock = threading.Lock()  # held while the crew's state is read or changed
        self.inbox = Inbox(now)
        self.orders: deque[Order] = deque()
        self.news = threading.Event()  # a message, an order or a new plan has come since the main thread last looked
        self._transport = transport
        self._limits = limits
        self._say = say
        self._now = now
        self._busy = threading.Lock()  # held by the thread that handles events
        self._events: deque[Callable[[float], list[Action]]] = deque()
        self._channels: dict[PeerLink, Channel] = {}
        self._faults: dict[PeerLink, str] = {}  # channels whose peers sent a message that no stage accepts -> why
        self._plans: dict[int, Plan] = {}  # latest plans, by mark
        self._over = False  # the run is over, or this peer has left: no event matters any more
        transport.listen(CREW_METHOD, partial(self._opened, CREW_METHOD))
        transport.listen(STAGE_METHOD, partial(self._opened, STAGE_METHOD))

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, link: PeerLink | None) -> Channel | None:
        """The channel of a link, if it is open."""
        return None if link is None else self._channels.get(link)

    def is_leader(self, link: PeerLink) -> bool:
        """Whether the channel's peer leads the crew."""
        with self.lock:
            return self.membership.plan is not None and self.membership.plan.lead == link.peer

    def close(self) -> None:
        """Leave the crew: the others notice that this peer's channels are closed."""
        with self.lock:
            self._over = True
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def handle(self, event: Callable[[float], list[Action]]) -> None:
        """Handle an event, on any thread. While another thread handles one, that thread goes on with this event."""
        self._events.append(event)
        while self._events and self._busy.acquire(blocking=False):
            try:
                while self._events:
                    now, event = self._now(), self._events.popleft()
                    with self.lock:
                        actions = [] if self._over else event(now)
                        progress = self.membership.following.progress
                        self._over |= progress is not None and progress.over
                    for action in actions:
                        self._perform(action)
                    self._note_plan()
            finally:
                self._busy.release()

    def _perform(self, action: Action) -> None:
        match action:
            case Connect(link=link):
                listener = self._listener(link)
                self._channels[link] = self._transport.connect(link.peer, link.method, lambda channel: listener)
            case Send(link=link, record=record):
                channel = self._channels.get(link)
                if channel is not None:
                    self._note_plan()
                    channel.send(CONTROL, encode_record(record))
            case Close(link=link):
                channel = self._channels.pop(link, None)
                self.inbox.ended(link)
                if channel is not None:
                    channel.close()
            case Say(text=text):
                self._say(text)
            case _:
                self.orders.append(action)
                self.news.set()

    def _note_plan(self) -> None:
        """Know a new plan before any peer can answer to it."""
        plan = self.membership.plan
        if plan is None or self._plans.get(plan.mark) is plan:
            return
        if plan.mark not in self._plans:
            self.news.set()  # the plan that the main thread works by is void
        self._plans = {**dict(list(self._plans.items())[-PLANS:]), plan.mark: plan}

    def _opened(self, method: str, channel: Channel) -> Listener:
        link = PeerLink(channel.peer, method)
        self._channels[link] = channel
        self.handle(partial(self.membership.opened, link))
        return self._listener(link)

    def _listener(self, link: PeerLink) -> Listener:
        return Listener(partial(self._judge, link), partial(self._received, link), partial(self._closed, link))

    def _judge(self, link: PeerLink, head: bytes, size: int) -> None:
        if head == CONTROL:
            if size > MAX_CONTROL_BYTES:
                raise RemoteProtocolError("size", f"a record of {size} bytes")
            return
        try:
            envelope = decode_envelope(head)
            limits = self._limits_of(link, envelope)
            try:
                check_message(envelope, size, limits)
            except RemoteProtocolError as error:
                if error.reason != "shape" or not self.is_leader(link):
                    raise  # else the leader is told when the body has come
            self.inbox.expect(Expected(link, envelope, size, limits))
        except RemoteProtocolError as error:
            if error.reason != "plan":
                self._faults[link] = error.reason
            raise

    def _limits_of(self, link: PeerLink, envelope: Envelope) -> Limits:
        """What the channel's peer may send by the plan that it names. Raises RemoteProtocolError: plan, stranger."""
        plan = self._plans.get(envelope.plan)
        if plan is None:
            raise RemoteProtocolError("plan", "messages of a plan that is not known here")
        limits = self._limits(plan, self.membership.spec.me, link.peer)
        if not limits.sender:
            raise RemoteProtocolError("stranger", "messages from a peer without a stage")
        return limits

    def _received(self, link: PeerLink, head: bytes, body: bytearray) -> None:
        if head != CONTROL:
            self.inbox.arrived(link, body)
            self.news.set()
            return
        try:
            record = decode_record(body)
        except RemoteProtocolError as error:
            if error.reason == "version":
                self.handle(partial(self.membership.unspoken, link, error.detail))
            raise
        self.handle(partial(self.membership.heard, link, record))

    def _closed(self, link: PeerLink, why: str) -> None:
        self._channels.pop(link, None)
        self.inbox.ended(link)
        fault = self._faults.pop(link, None)
        if fault is not None:
            self.handle(partial(self.membership.refused, link, fault))
        else:
            self.handle(partial(self.membership.closed, link, why))
