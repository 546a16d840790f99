"""The other stages of a crew, over the network: `ports.MessageTransport` from a `Membership` and channels.

    transport's thread   records -> Crew -> actions -> channels, orders      messages -> judged -> inbox
    main thread          orders() -> build, leave, lead     receive() <- inbox     send() -> channel, or own inbox

What comes in is handled on whatever thread brings it, one event after the other; nothing there waits. Messages are
decoded on the main thread. Each names the plan it belongs to: those of an earlier one are dropped, and so is what this
peer says in answer to them.

The lead goes on as long as `receive` and `send` raise nothing; after StageLost it calls `doubt` once, then `mend`, and
carries `orders` out in between, until that says that the crew is whole, and begins its step or its sampling anew.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from protocol.codec import version_for
from protocol.crew import (
    CONTROL,
    CREW_METHOD,
    MAX_CONTROL_BYTES,
    STAGE_METHOD,
    Holding,
    Plan,
    Progress,
    Settings,
    Source,
    decode_record,
)
from protocol.crew import encode_record as seal
from protocol.errors import RemoteProtocolError
from protocol.messages import CrewCard, PeerCard
from protocol.pipeline import decode_envelope
from protocol.transports.base import Channel, Listener, Transport
from swarm_node.pipeline.compute.worker import refusal
from swarm_node.pipeline.membership.actions import (
    Action,
    BuildStage,
    Close,
    Connect,
    Costs,
    DropStage,
    Link,
    PeerSpec,
    Say,
    Send,
    Sources,
    StartLeading,
    StopLeading,
    Tell,
)
from swarm_node.pipeline.membership.member import NOTHING, Membership, Role
from swarm_node.pipeline.messages import Limits, decode, encode, judge
from swarm_node.pipeline.ports import LEAD, Message, StageLost

TICK_S = 0.25
"""Time passes for the crew at least this often while the main thread waits."""
LEAST_TICK_S = 0.05
LOOK_S = 1.0
"""Cards are looked at this often."""
MAX_WAITING = 1024
"""Messages that may wait here: the schedule lets far fewer be on their way."""
MAX_WAITING_BYTES = 2**30
"""Their bodies, and those under way, together."""
PLANS = 16
"""Latest plans whose messages are still known for what they are, and dropped; others end their channel."""

Order = BuildStage | DropStage | StartLeading | StopLeading
"""What the main thread is to do."""


@dataclass(frozen=True)
class _Waiting:
    """A message that has come, from a channel (then still in bytes) or from this peer itself."""

    plan: int
    at: float
    """When it came."""
    link: Link | None = None
    limits: Limits | None = None
    head: bytes = b""
    body: bytearray | None = None
    message: Message | None = None


class StageTransport:
    """`MessageTransport`."""

    def __init__(
        self,
        transport: Transport,
        spec: PeerSpec,
        sources: Sources,
        tell: Tell,
        costs: Costs,
        limits: Callable[[Settings], Limits],
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        holding: Holding = NOTHING,
    ) -> None:
        """`limits`: of a crew that works so; its `plan`, `stages`, `here` and `sender` are filled in for each message.
        The other arguments are those of `Membership`."""
        self.counts: Counter[str] = Counter()
        """`late`: messages of earlier plans; `unsent`: to stages that had gone."""
        self._transport = transport
        self._limits = limits
        self._say = say
        self._now = now
        self._crew = Membership(spec, sources, tell, costs, now(), holding, self.held_s)
        self._busy = threading.Lock()
        """Held by whoever handles events."""
        self._lock = threading.Lock()
        """Of the crew's state."""
        self._events: deque[Callable[[float], list[Action]]] = deque()
        self._channels: dict[Link, Channel] = {}
        self._faults: dict[Link, str] = {}
        """Channels whose peers said what nobody takes."""
        self._plans: dict[int, Plan] = {}
        self._orders: deque[Order] = deque()
        self._inbox: deque[_Waiting] = deque()
        self._coming: dict[Link, int] = {}
        """Bytes of the body that is under way on each channel."""
        self._kept = 0
        """Bytes of bodies in the inbox."""
        self._news = threading.Event()
        """A message, an order or a new plan has come since the main thread last looked."""
        self._taken: _Waiting | None = None
        """What the main thread is dealing with."""
        self._working = -1
        """Plan that the main thread works by."""
        self._leading = False
        """The main thread has been told to lead."""
        self._over = False
        """The run is, or this peer has left: what happens from now on does not matter."""
        self._built_at = now()
        """The main thread has done something about stages that are to be built."""
        self._quiet_since = now()
        """The main thread has neither sent nor heard anything since."""
        self._looked_at = self._ticked_at = -LOOK_S
        self._members: Mapping[str, PeerCard] = {}
        """Of the swarm, as last looked up."""
        transport.listen(CREW_METHOD, partial(self._opened, CREW_METHOD))
        transport.listen(STAGE_METHOD, partial(self._opened, STAGE_METHOD))

    # ----------------------------------------------------------------- what is known

    @property
    def count(self) -> int:
        return len(self._crew.spec.spans)

    @property
    def planned_stages(self) -> tuple[int, ...]:
        """Stages of this peer, as planned."""
        with self._lock:
            return self._crew.stages

    @property
    def plan(self) -> Plan | None:
        with self._lock:
            return self._crew.plan

    @property
    def leading(self) -> bool:
        with self._lock:
            return self._crew.role == Role.LEADING

    @property
    def updates(self) -> int:
        """At the lead: that the crew has made, as most of its stages say."""
        with self._lock:
            return self._crew.lead.updates if self._crew.lead is not None else 0

    @property
    def whole(self) -> bool:
        """Every stage is held."""
        with self._lock:
            return self._crew.whole

    @property
    def missing(self) -> dict[int, tuple[float, str]]:
        """Stages that are lost, as far as is known here -> for how many seconds, and who is building it (empty =
        nobody yet)."""
        with self._lock:
            crew, now = self._crew, self._now()
            return {stage: (now - since, crew.taker(stage)) for stage, since in sorted(crew.missing.items())}

    @property
    def absent(self) -> set[str]:
        """At the lead: peers that show this crew's sign, but are not in touch with it."""
        with self._lock:
            return self._crew.absent

    @property
    def card(self) -> CrewCard:
        """For the membership card; to be announced anew when it has changed."""
        with self._lock:
            return self._crew.card

    def stands(self, order: BuildStage) -> bool:
        """Whether a stage is still to be built, and so. Whoever builds it asks this often: it shows that it gets on."""
        self._built_at = self._now()
        with self._lock:
            return self._crew.stands(order)

    def name_of(self, peer: str) -> str:
        """What a peer, given by its id or by the end of it that `short` shows, called itself; empty = it is not known
        here."""
        with self._lock:
            return next((name for one, name in reversed(self._crew.names.items()) if peer and one.endswith(peer)), "")

    def metrics(self) -> dict[str, float]:
        """`stages/*`: running totals."""
        with self._lock:
            return {
                f"stages/{name}": float(n) for name, n in sorted((Counter(self._crew.counts) + self.counts).items())
            }

    # ----------------------------------------------------------------- what the main thread does

    def orders(self) -> list[Order]:
        """What is to be done now, in order; stages that are not to be built any more are left out."""
        self.tick()
        self._built_at = self._now()
        orders = []
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, BuildStage) and not self.stands(order):
                continue
            if isinstance(order, (StartLeading, StopLeading)):
                self._leading = isinstance(order, StartLeading)
            orders.append(order)
        return orders

    def seated(self, order: BuildStage, updates: int, source: Source | None) -> None:
        """A stage was built; `source` is the way that worked."""
        self._handle(partial(self._crew.seated, order, updates, source))

    def unable(self, order: BuildStage, why: str) -> None:
        """A stage could not be built, in any way. What orders say that do not stand any more is ignored."""
        self._handle(partial(self._crew.unable, order, why))

    def report(self, holding: Holding) -> None:
        """What this peer has, after each update or less often: by it others decide how a lost stage is rebuilt."""
        self._handle(partial(self._crew.report, holding))

    @property
    def progress(self) -> Progress | None:
        """Of the run, as the lead last told."""
        with self._lock:
            return self._crew.progress

    def tell(self, progress: Progress) -> None:
        """At the lead: have everybody know it."""
        self._handle(partial(self._crew.advance, progress))

    def at_rest(self) -> None:
        """The lead is between two rounds: a stage may change hands; then `send` and `receive` raise StageLost."""
        self._handle(self._crew.at_rest)

    def tick(self) -> None:
        """Let time pass; to be called at least once a second or so, on any thread."""
        now = self._now()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._members = self._transport.members()
            self._handle(partial(self._crew.cards, self._members))
        self._handle(self._crew.tick)

    def doubt(self, lost: StageLost) -> None:
        """At the lead, with any StageLost, before `mend`: if it is the pipeline's own judgement (somebody does not
        answer), which the crew does not know of yet, then that peer is given up."""
        self._handle(partial(self._crew.doubted, self._working, lost.stages, lost.why))

    def mend(self, timeout: float) -> bool:
        """At the lead: wait until every stage is held, or there are orders, or time is over. True = the crew is whole,
        and `send` and `receive` work again."""
        until = self._now() + timeout
        while True:
            self.tick()
            with self._lock:
                crew = self._crew
                if self._leading and crew.lead is not None and crew.whole and crew.plan is not None:
                    crew.lead.resume()
                    self._working, self._quiet_since = crew.plan.mark, self._now()
                    return True
            if self._orders or not self._wait(until):
                return False

    def send(self, message: Message) -> None:
        """As the port says; but a peer that does not lead drops what cannot be sent: the lead begins anew anyway."""
        self._check()
        with self._lock:
            plan = self._crew.plan
            stages = (*self._crew.stages, LEAD) if self._crew.role == Role.LEADING else self._crew.stages
            link = self._crew.way_to(message.stage)
            channel = self._channels.get(link) if link is not None else None
        if plan is None or plan.mark != self._working:
            self.counts["late"] += 1
        elif message.stage in stages:
            self._put(_Waiting(plan.mark, self._now(), message=message))
        else:
            if link is None or channel is None or not self._say_over(channel, link, message, plan):
                self.counts["unsent"] += 1
                if self._leading:
                    raise StageLost({message.stage}, "its channel is closed")
                if message.stage != LEAD:
                    self._handle(partial(self._crew.unsent, plan.mark, plan.assignments[message.stage].peer))
        self._quiet_since = self._now()

    def _say_over(self, channel: Channel, link: Link, message: Message, plan: Plan) -> bool:
        head, body = encode(message, plan.settings.wire, plan.mark, version_for(link.peer, self._members))
        return channel.send(head, *body)

    def receive(self, timeout: float) -> Message | None:
        """As the port says; at others than the lead, `None` as well if there are orders."""
        self._taken = None
        until = self._now() + timeout
        while True:
            if self._now() - self._ticked_at >= LEAST_TICK_S:  # messages may come in hundreds a second
                self._ticked_at = self._now()
                if self._leading:
                    self._handle(lambda now: self._crew.tick(now, self._quiet_since))
                self.tick()
            self._check()
            if self._orders and not self._leading:
                return None
            message = self._next()
            if message is not None:
                return message
            if not self._inbox and not self._wait(until):
                return None

    @property
    def connected(self) -> bool:
        """Somebody has a channel with this peer."""
        return bool(self._channels)

    def close(self) -> None:
        """Leave the crew: the others are told that this peer's channels are closed."""
        with self._lock:
            self._over = True
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    # ----------------------------------------------------------------- messages

    def _wait(self, until: float) -> bool:
        """For something to come in, at most a tick. False if the time is over already."""
        left = until - self._now()
        if left <= 0:
            return False
        self._news.wait(min(left, TICK_S))
        self._news.clear()
        return True

    def _next(self) -> Message | None:
        """Take the first message that is there; `None` if there is none, or it is of no use."""
        if not self._inbox:
            return None
        waiting = self._inbox.popleft()
        with self._lock:
            self._kept -= len(waiting.body or b"")
            plan = self._crew.plan
        current = plan.mark if plan is not None else -1
        if waiting.plan != (self._working if self._leading else current):
            self.counts["late"] += 1
            return None
        message = waiting.message or self._decode(waiting)
        if message is not None and message.stage == LEAD and not self._leading:
            self.counts["late"] += 1  # an answer to what this peer asked while it led
            return None
        if message is not None:
            self._working, self._taken, self._quiet_since = waiting.plan, waiting, self._now()
        return message

    def _decode(self, waiting: _Waiting) -> Message | None:
        assert waiting.limits is not None and waiting.link is not None and waiting.body is not None
        try:
            return decode(waiting.head, waiting.body, waiting.limits)
        except RemoteProtocolError as error:
            envelope = decode_envelope(waiting.head)
            answers = refusal(envelope.stage, envelope.head) if self._is_lead(waiting.link) else []
            if answers:  # it begins anew, or does something else
                self.counts[f"refused/{error.reason}"] += 1
                self._working = waiting.plan
                for answer in answers:
                    self.send(answer)
                return None
            self._handle(partial(self._crew.refused, waiting.link, error.reason, ended=False))
            return None

    def _check(self) -> None:
        """Raise StageLost if this peer leads and the pipeline is not, or no more, the one that it works with."""
        if not self._leading:
            return
        with self._lock:
            crew = self._crew
            if crew.lead is None:
                raise StageLost((), "another peer leads")
            if not crew.whole or crew.plan is None or crew.plan.mark != self._working:
                raise StageLost(crew.lead.lost, crew.lead.why or "the crew is not whole yet")

    def held_s(self) -> float:
        """How long the oldest message that is not dealt with has been here, or nothing was done about a stage that is
        to be built."""
        waiting = [self._taken, *list(self._inbox)[:1]]
        since = [one.at for one in waiting if one is not None] + [self._built_at] * self._crew.building
        return self._now() - min(since, default=self._now())

    def _put(self, waiting: _Waiting) -> None:
        self._inbox.append(waiting)
        self._news.set()

    # ----------------------------------------------------------------- channels

    def _opened(self, method: str, channel: Channel) -> Listener:
        link = Link(channel.peer, method)
        self._channels[link] = channel
        self._handle(partial(self._crew.opened, link))
        return self._listener(link)

    def _dialled(self, link: Link, channel: Channel) -> Listener:
        return self._listener(link)

    def _listener(self, link: Link) -> Listener:
        return Listener(partial(self._judge, link), partial(self._received, link), partial(self._closed, link))

    def _judge(self, link: Link, head: bytes, size: int) -> None:
        if head == CONTROL:
            if size > MAX_CONTROL_BYTES:
                raise RemoteProtocolError("size", f"a record of {size} bytes")
            return
        try:
            limits = self._limits_of(link, head)
            try:
                judge(head, size, limits)
            except RemoteProtocolError as error:
                if error.reason != "shape" or not self._is_lead(link):
                    raise  # else it is told, when it has come
            if len(self._inbox) >= MAX_WAITING:
                raise RemoteProtocolError("flood", f"{MAX_WAITING} messages wait already")
            with self._lock:
                if size + self._kept + sum(self._coming.values()) > MAX_WAITING_BYTES:
                    raise RemoteProtocolError("flood", f"{size} bytes more than {MAX_WAITING_BYTES} would wait")
                self._coming[link] = size
        except RemoteProtocolError as error:
            if error.reason != "plan":
                self._faults[link] = error.reason
            raise

    def _is_lead(self, link: Link) -> bool:
        with self._lock:
            return self._crew.plan is not None and self._crew.plan.lead == link.peer

    def _limits_of(self, link: Link, head: bytes) -> Limits:
        """What that peer may send by the plan that the head names. Raises RemoteProtocolError: plan, stranger, and
        those of `decode_envelope`."""
        mark = decode_envelope(head).plan
        plan = self._plans.get(mark)
        if plan is None:
            raise RemoteProtocolError("plan", "messages of a plan that is not known here")
        sender = frozenset(plan.held_by(link.peer))
        if not sender:
            raise RemoteProtocolError("stranger", "messages from a peer without a stage")
        me = self._crew.spec.me
        here = {*plan.held_by(me), *((LEAD,) if plan.lead == me else ())}
        limits = self._limits(plan.settings)
        return replace(limits, plan=mark, stages=len(plan.assignments), here=frozenset(here), sender=sender)

    def _received(self, link: Link, head: bytes, body: bytearray) -> None:
        if head == CONTROL:
            try:
                record = decode_record(body)
            except RemoteProtocolError as error:
                if error.reason == "version":
                    self._handle(partial(self._crew.unspoken, link, error.detail))
                raise
            self._handle(partial(self._crew.heard, link, record))
        else:
            limits = self._limits_of(link, head)
            with self._lock:
                self._kept += self._coming.pop(link, 0)
            self._put(_Waiting(limits.plan, self._now(), link, limits, head, body))

    def _closed(self, link: Link, why: str) -> None:
        self._channels.pop(link, None)
        with self._lock:
            self._coming.pop(link, None)
        fault = self._faults.pop(link, None)
        if fault is not None:
            self._handle(partial(self._crew.refused, link, fault))
        else:
            self._handle(partial(self._crew.closed, link, why))

    # ----------------------------------------------------------------- events and actions

    def _handle(self, event: Callable[[float], list[Action]]) -> None:
        """On any thread, also while another event is being handled: then whoever handles that goes on with this."""
        self._events.append(event)
        while self._events and self._busy.acquire(blocking=False):
            try:
                while self._events:
                    now, event = self._now(), self._events.popleft()
                    with self._lock:
                        actions = [] if self._over else event(now)
                        self._over |= self._crew.progress is not None and self._crew.progress.over
                    for action in actions:
                        self._perform(action)
                    self._note_plan()
            finally:
                self._busy.release()

    def _perform(self, action: Action) -> None:
        match action:
            case Connect(link=link):
                opened = partial(self._dialled, link)
                self._channels[link] = self._transport.connect(link.peer, link.method, opened)
            case Send(link=link, record=record):
                channel = self._channels.get(link)
                if channel is not None:
                    self._note_plan()
                    channel.send(CONTROL, seal(record))
            case Close(link=link):
                channel = self._channels.pop(link, None)
                if channel is not None:
                    channel.close()
            case Say(text=text):
                self._say(text)
            case _:
                self._orders.append(action)
                self._news.set()

    def _note_plan(self) -> None:
        """Before anybody can answer to it."""
        plan = self._crew.plan
        if plan is None or self._plans.get(plan.mark) is plan:
            return
        if plan.mark not in self._plans:
            self._news.set()  # what the main thread works by is void
        self._plans = {**dict(list(self._plans.items())[-PLANS:]), plan.mark: plan}
