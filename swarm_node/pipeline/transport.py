"""The other stages of a crew, over the network, as the main thread of a peer uses them.

    thread of a channel  records -> CrewMembership -> orders           stage messages -> inbox         (`crew_channels`)
    main thread           orders() -> build, leave, lead      receive() <- inbox     send() -> channel, or own inbox

Bodies of messages are decoded on the main thread. Each message names the plan it belongs to. Messages of an earlier
plan are dropped, and so are this peer's answers to them.

The leader goes on as long as `receive` and `send` raise nothing. After StageLost it calls `doubt` once and then `mend`,
until that says that the crew is whole, carrying out `orders` in between. Then it begins its step or its sampling anew.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

from swarm_node.pipeline.compute.worker import refused_turn
from swarm_node.pipeline.crew_channels import CrewChannels, Order
from swarm_node.pipeline.inbox import Expected
from swarm_node.pipeline.membership.actions import BuildStage, PeerSpec, StartLeading, StopLeading
from swarm_node.pipeline.membership.leadership import CrewRole
from swarm_node.pipeline.membership.member import CrewMembership
from swarm_node.pipeline.messages import LEADER, Limits, StageLost, StageMessage, decode_message, encode_message
from swarm_protocol.codec import version_for
from swarm_protocol.crew import Holding, Plan, Progress, Source
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import PeerCard
from swarm_protocol.transports.base import Transport

TICK_S = 0.25  # time passes for the crew at least this often while the main thread waits
LEAST_TICK_S = 0.05  # shortest time between two ticks, since messages may come in hundreds a second
LOOK_S = 1.0  # cards are looked at this often


T = TypeVar("T")


class _Known(Generic[T]):
    """An attribute that is read from the membership under its lock: other threads handle events."""

    def __init__(self, read: Callable[[CrewMembership], T]) -> None:
        self._read = read

    def __get__(self, transport: StageTransport, kind: type[StageTransport]) -> T:
        with transport._lock:
            return self._read(transport._membership)


class StageTransport:
    """Sends and receives stage messages (`MessageTransport`), and gives the main thread its orders."""

    def __init__(
        self,
        transport: Transport,
        spec: PeerSpec,
        limits: Callable[[Plan, str, str], Limits],
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits`: see `CrewChannels`."""
        self.counts: Counter[str] = Counter()
        """`late`: messages of earlier plans; `unsent`: messages to stages that had gone."""
        self._transport = transport
        self._now = now
        self._taken_at: float | None = None  # when the message came that the main thread is dealing with
        self._working = -1  # mark of the plan that the main thread works by
        self._leading = False  # the main thread has been told to lead
        self._built_at = now()  # when the main thread last did something about stages that are to be built
        self._quiet_since = now()  # when the main thread last sent or received anything
        self._looked_at = self._ticked_at = -LOOK_S
        self._members: Mapping[str, PeerCard] = {}  # of the swarm, as last looked up
        self._membership = CrewMembership(spec, now(), self.held_s)
        self._channels = CrewChannels(transport, self._membership, limits, say, now)
        self._inbox, self._orders, self._lock = self._channels.inbox, self._channels.orders, self._channels.lock
        self._handle = self._channels.handle

    # ----------------------------------------------------------------- what is known

    plan = _Known(lambda crew: crew.plan)
    planned_stages = _Known(lambda crew: crew.following.stages)  # stages of this peer, as planned
    leading = _Known(lambda crew: crew.role == CrewRole.LEADING)
    whole = _Known(lambda crew: crew.whole)  # every stage is held
    progress = _Known(lambda crew: crew.following.progress)  # of the run, as the leader last told it
    updates = _Known(lambda crew: crew.leader.updates if crew.leader is not None else 0)
    """At the leader: updates that the crew has made, as most of its stages say."""
    absent = _Known(lambda crew: crew.absent)
    """At the leader: peers whose card names this crew, but that have no contact with it."""
    card = _Known(lambda crew: crew.card)
    """The crew's part of the membership card, which must be announced again when it has changed."""

    @property
    def missing(self) -> dict[int, tuple[float, str]]:
        """Lost stages, as far as is known here -> seconds since then, and the peer that builds it (empty = none)."""
        with self._lock:
            crew, now = self._membership, self._now()
            return {stage: (now - since, crew.taker(stage)) for stage, since in sorted(crew.missing.items())}

    def stands(self, order: BuildStage) -> bool:
        """Whether an order still stands. Asked often while a stage is built, which shows that the builder works."""
        self._built_at = self._now()
        with self._lock:
            return self._membership.following.stands(order)

    def name_of(self, peer: str) -> str:
        """The name that a peer gave itself; empty = not known here. `peer`: its id, or the end that `short` shows."""
        with self._lock:
            known = [name for one, name in self._membership.directory.names.items() if peer and one.endswith(peer)]
        return known[-1] if known else ""

    def metrics(self) -> dict[str, float]:
        """Running totals, as `stages/*`."""
        with self._lock:
            counts = Counter(self._membership.counts) + self.counts
        return {f"stages/{name}": float(n) for name, n in sorted(counts.items())}

    # ----------------------------------------------------------------- what the main thread does

    def orders(self) -> list[Order]:
        """What the main thread must do now, in order. Stages that need not be built any more are left out."""
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
        """A stage was built; `source` is the one that worked."""
        self._handle(partial(self._membership.built, order, updates, source))

    def unable(self, order: BuildStage, why: str) -> None:
        """A stage could not be built from any source. Ignored if the order does not stand any more."""
        self._handle(partial(self._membership.unable, order, why))

    def report(self, holding: Holding) -> None:
        """Tell the others what this peer has, after each update or less often; they rebuild lost stages from it."""
        self._handle(partial(self._membership.report, holding))

    def tell(self, progress: Progress) -> None:
        """At the leader: tell the progress to all peers of the crew."""
        self._handle(partial(self._membership.advance, progress))

    def at_rest(self) -> None:
        """At the leader, between two rounds: a stage may pass to another peer, and then `send` raises StageLost."""
        self._handle(self._membership.at_rest)

    def tick(self) -> None:
        """Let time pass. To be called at least about once a second, on any thread."""
        now = self._now()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._members = self._transport.members()
            self._handle(partial(self._membership.cards, self._members))
        self._handle(self._membership.tick)

    def doubt(self, lost: StageLost) -> None:
        """At the leader, with any StageLost, before `mend`.

        If the pipeline itself found that a stage does not answer, and the crew does not know it yet, the stage's peer
        is given up."""
        self._handle(partial(self._membership.doubted, self._working, lost.stages, lost.why))

    def mend(self, timeout: float) -> bool:
        """At the leader: wait until every stage is held, or there are orders, or `timeout` seconds are over.

        Returns whether the crew is whole; then `send` and `receive` work again."""
        until = self._now() + timeout
        while True:
            self.tick()
            with self._lock:
                membership = self._membership
                if self._leading and membership.leader is not None and membership.whole and membership.plan is not None:
                    membership.leader.resume()
                    self._working, self._quiet_since = membership.plan.mark, self._now()
                    return True
            if self._orders or not self._wait(until):
                return False

    def send(self, message: StageMessage) -> None:
        """See `MessageTransport`. A peer that does not lead drops a message that cannot be sent, since the leader
        begins anew anyway."""
        self._check()
        with self._lock:
            plan = self._membership.plan
            here = (*self._membership.following.stages, *[LEADER] * (self._membership.role == CrewRole.LEADING))
            link = self._membership.way_to(message.stage)
            channel = self._channels.get(link)
        if plan is None or plan.mark != self._working:
            self.counts["late"] += 1
        elif message.stage in here:
            self._inbox.put(plan.mark, message)
            self._channels.news.set()
        else:
            sent = False
            if link is not None and channel is not None:
                head, body = encode_message(
                    message, plan.settings.wire, plan.mark, version_for(link.peer, self._members)
                )
                sent = channel.send(head, *body)
            if not sent:
                self.counts["unsent"] += 1
                if self._leading:
                    raise StageLost({message.stage}, "its channel is closed")
                if message.stage != LEADER:
                    self._handle(partial(self._membership.unsent, plan.mark, plan.assignments[message.stage].peer))
        self._quiet_since = self._now()

    def receive(self, timeout: float) -> StageMessage | None:
        """See `MessageTransport`. At a peer that does not lead, also `None` if there are orders."""
        self._taken_at = None
        until = self._now() + timeout
        while True:
            if self._now() - self._ticked_at >= LEAST_TICK_S:
                self._ticked_at = self._now()
                if self._leading:
                    self._handle(lambda now: self._membership.tick(now, self._quiet_since))
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
        """Whether any peer has a channel with this one."""
        return len(self._channels) > 0

    def close(self) -> None:
        """Leave the crew."""
        self._channels.close()

    # ----------------------------------------------------------------- messages

    def _wait(self, until: float) -> bool:
        """Wait for something to come in, at most a tick. False if the time is over already."""
        left = until - self._now()
        if left <= 0:
            return False
        self._channels.news.wait(min(left, TICK_S))
        self._channels.news.clear()
        return True

    def _next(self) -> StageMessage | None:
        """Take the first message that waits; `None` if there is none, or it is of no use."""
        waiting = self._inbox.take()
        if waiting is None:
            return None
        plan = self.plan
        current = plan.mark if plan is not None else -1
        if waiting.plan != (self._working if self._leading else current):
            self.counts["late"] += 1
            return None
        content = waiting.content
        message = content if isinstance(content, StageMessage) else self._decoded(*content)
        if message is not None and message.stage == LEADER and not self._leading:
            self.counts["late"] += 1  # an answer to a question of this peer from when it led
            return None
        if message is not None:
            self._working, self._taken_at, self._quiet_since = waiting.plan, waiting.at, self._now()
        return message

    def _decoded(self, expected: Expected, body: bytearray) -> StageMessage | None:
        """The message; `None` if it is refused."""
        try:
            return decode_message(expected.envelope, body, expected.limits)
        except RemoteProtocolError as error:
            is_leader = self._channels.is_leader(expected.link)
            answers = refused_turn(expected.envelope.stage, expected.envelope.head) if is_leader else []
            if answers:  # the leader begins anew, or does something else
                self.counts[f"refused/{error.reason}"] += 1
                self._working = expected.limits.plan
                for answer in answers:
                    self.send(answer)
            else:
                self._handle(partial(self._membership.refused, expected.link, error.reason, ended=False))
            return None

    def _check(self) -> None:
        """At the leader: raise StageLost unless the pipeline is the one that the main thread works with."""
        if not self._leading:
            return
        with self._lock:
            membership = self._membership
            if membership.leader is None:
                raise StageLost((), "another peer leads")
            if not membership.whole or membership.plan is None or membership.plan.mark != self._working:
                raise StageLost(membership.leader.lost, membership.leader.why or "the crew is not whole yet")

    def held_s(self) -> float:
        """Seconds that the oldest message has been here without being dealt with, or that nothing was done about a
        stage that is to be built."""
        since = [at for at in (self._taken_at, self._inbox.oldest) if at is not None]
        since += [self._built_at] * self._membership.following.building
        return self._now() - min(since, default=self._now())
