"""The peers of a crew, as its leader knows them: what each one holds, and which of them may not come back yet.

Everything that peers hold counts only as far as it belongs to the crew's run. A new leader without weights of its own
goes on with the run of the first peer that has some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

import msgspec

from swarm_node.pipeline.membership.actions import PeerLink
from swarm_protocol.crew import Hello, Holding, Kept, Plan
from swarm_protocol.lineage import AHEAD, Lineage, leads_to, shared

GATHER_S = 10.0
"""A new leader waits so long for the peers of the last plan: each may need 4 s to notice that the old leader has gone,
and 3 s to ask whether it has."""
MAX_TERM = 2**20  # leaders that a crew can count: turns of a later one would not fit into messages
BREAKS_S = 20.0
"""A peer that keeps losing touch with a neighbour for so long is given up; had the neighbour gone, that would be known
much sooner."""
CALM_S = 30.0
"""After so long without a break, earlier breaks are forgotten: a failed attempt to open a channel may take ten
seconds."""
BANNED_S, MAX_DOUBLINGS = 120.0, 5
"""A peer that was given up may not come back for so long; the time doubles with each further time."""
NOTHING = Holding()


@dataclass
class CrewPeer:
    """A peer of the crew."""

    link: PeerLink | None  # `None` = the leader itself
    hello: Hello
    holding: Holding  # the part of its holding that belongs to the crew's run
    unable: set[int] = field(default_factory=set)  # stages that it could not build, or not in time
    astray: bool = False  # its stages went on without this crew: what it has in memory is another branch of the run
    probed: float | None = None  # when it was asked how long a message has been waiting; `None` = it has answered

    @property
    def live(self) -> dict[int, int]:
        """Stages in memory -> their updates."""
        return {kept.stage: kept.updates for kept in self.holding.live}


class CrewRoster:
    """Peers that are in touch with the leader, itself included."""

    def __init__(self, me: str, hello: Hello, before: Plan | None, lost: str, now: float) -> None:
        """`lost`: the leader of the plan `before`, if it has gone."""
        self.before = before  # the last plan that this peer went by before it led
        self.members = {me: CrewPeer(None, hello, hello.holding)}  # in order of arrival
        self.run = self.base = hello.run
        """The run that holdings are counted by; `base` is the one that it goes on from, as this leader found it."""
        self._me = me
        planned = [*(row.peer for row in before.assignments), *before.spares] if before else []
        self._awaited = {*planned} - {lost, me, ""}  # peers of the last plan that have yet to come
        self._gather_until = now + GATHER_S
        self._breaks: dict[str, tuple[float, float]] = {}
        """First and last time in a row that a peer lost touch with a neighbour."""
        self._banned: dict[str, float] = {}
        self._bans: Counter[str] = Counter()

    def link_of(self, peer: str) -> PeerLink | None:
        """The channel to a member; `None` if it is the leader itself, or no member."""
        return self.members[peer].link if peer in self.members else None

    def updates(self, holders: Sequence[str]) -> int:
        """Updates that the crew has made; 0 if no stage is in memory.

        The median over the stages, so that no single peer can make it up; but not fewer than when the run last
        branched, however many stages had to begin anew."""
        live = [self.members[peer].live.get(i) for i, peer in enumerate(holders) if peer in self.members]
        counts = [n for n in live if n is not None]
        return max(median_high(counts), self.run[-1][1] if self.run else 0) if counts else 0

    @property
    def stored(self) -> int:
        """Updates of the newest replica or checkpoint that any peer has."""
        holdings = [member.holding for member in self.members.values()]
        return max((kept.updates for one in holdings for kept in (*one.replicas, *one.checkpoints)), default=0)

    @property
    def round(self) -> int:
        """Last round of the run, by the peers that have a stage of it in memory, or else anything of it."""
        ours = [member for member in self.members.values() if leads_to(member.hello.run, self.base)]
        told = [member for member in ours if member.holding.live] or [m for m in ours if m.holding != NOTHING]
        told += [self.members[self._me]] if self.before and leads_to(self.before.run, self.base) else []
        return max((member.hello.round for member in told), default=0)

    @property
    def any_live(self) -> bool:
        """Some peer has a stage in memory."""
        return any(member.holding.live for member in self.members.values())

    def least_term(self, term: int) -> int:
        """`term`, or more: above the terms of peers with stages in memory, which may have heard their leader."""
        terms = [one.hello.term + 1 for one in self.members.values() if one.live and one.link is not None]
        return min(max([term, *terms]), MAX_TERM)

    def note(self, peer: str, holding: Holding, run: Lineage) -> None:
        """A member holds these things, which belong to `run`."""
        member = self.members[peer]
        member.hello = msgspec.structs.replace(member.hello, holding=holding, run=run)
        self._count(member)

    def note_stage(self, peer: str, stage: int, updates: int, planned: bool) -> None:
        """A member has a stage in memory. `planned`: by the crew's plan, so that it is not astray any more."""
        member = self.members[peer]
        member.astray = member.astray and not planned
        kept = [one for one in member.holding.live if one.stage != stage]
        live = tuple(sorted([*kept, Kept(stage, updates)]))
        member.holding = msgspec.structs.replace(member.holding, live=live)

    def count_by(self, run: Lineage) -> None:
        """From now on holdings count as far as they belong to `run`."""
        self.run = run
        for member in self.members.values():
            self._count(member)

    def _count(self, member: CrewPeer) -> None:
        holding = counted(member.hello.holding, member.hello.run, self.run)
        member.holding = msgspec.structs.replace(holding, live=()) if member.astray else holding

    def gathered(self, now: float) -> bool:
        """Whether the peers of the last plan have come, or are not waited for any longer."""
        if self._awaited and now < self._gather_until:
            return False
        self._awaited = set()
        return True

    def choose_run(self, hello: Hello) -> None:
        """Before the first plan: go on with the run of a peer, if that is better than the run so far.

        A stage in memory outweighs files. Of equals the leader's own run comes first, and before it one that goes on
        from it. Nothing else is chosen while peers of the last plan have yet to come."""
        if hello.run == self.run:
            return
        theirs, ours = hello.holding, [member.holding for member in self.members.values()]
        onward = leads_to(self.run, hello.run)
        better = (theirs.live and (onward or not self.any_live)) or (
            theirs != NOTHING and ((onward and not self.any_live) or all(holding == NOTHING for holding in ours))
        )
        if better and (onward or not self._awaited):
            self.base = hello.run
            self.count_by(hello.run)

    def probe(self, peers: Collection[str], stall_s: float, now: float) -> tuple[list[PeerLink], str]:
        """Channels of the peers that must be asked how long a message has been waiting there.

        Also one that has not answered an earlier question for `stall_s`; empty = there is none."""
        links = []
        for peer in sorted(peers):
            member = self.members[peer]
            if member.probed is None and member.link is not None:
                member.probed = now
                links.append(member.link)
            elif member.probed is not None and now - member.probed >= stall_s:
                return links, peer
        return links, ""

    def enter(self, link: PeerLink, hello: Hello, astray: bool) -> CrewPeer | None:
        """A peer joins, or comes back: its earlier entry is returned."""
        old = self.members.get(link.peer)
        self._awaited.discard(link.peer)
        member = self.members[link.peer] = CrewPeer(link, hello, NOTHING, astray=astray)
        self._count(member)
        return old

    def is_banned(self, peer: str, now: float) -> bool:
        """The peer was given up, and may not come back yet."""
        return self._banned.get(peer, now) > now

    def ban(self, peer: str, now: float) -> None:
        """The peer was given up."""
        self._banned[peer] = now + BANNED_S * 2 ** min(self._bans[peer], MAX_DOUBLINGS)
        self._bans[peer] += 1

    def note_loss(self, peer: str, now: float) -> None:
        """A peer with stages has lost touch with the leader. It is banned if it keeps doing so."""
        if self.flaps(peer, now):
            self._banned[peer] = max(now + BANNED_S, self._banned.get(peer, now))

    def flaps(self, peer: str, now: float) -> bool:
        """The peer has lost touch, with a neighbour or with the leader. Whether it keeps doing so."""
        self._breaks = {one: times for one, times in self._breaks.items() if now < times[1] + CALM_S}
        since, _ = self._breaks.get(peer, (now, now))
        self._breaks[peer] = since, now
        return now >= since + BREAKS_S


def counted(holding: Holding, theirs: Lineage, ours: Lineage) -> Holding:
    """The part of a holding of the run `theirs` that belongs to the run `ours` as well.

    Stages in memory that went on elsewhere have heard turns that the crew's have not: none of them counts."""
    upto, onward = shared(theirs, ours), leads_to(theirs, ours)
    most = upto + AHEAD if onward else upto
    return Holding(
        live=tuple(kept for kept in holding.live if onward and kept.updates <= most),
        replicas=tuple(kept for kept in holding.replicas if kept.updates <= most),
        checkpoints=tuple(kept for kept in holding.checkpoints if kept.updates <= upto),
    )


def short(peer: str) -> str:
    """The end of a peer id, for people."""
    return f"…{peer[-8:]}"


def note_latest(peers: dict[str, Any], peer: str, value: Any, most: int) -> None:
    """Note something about a peer, as the latest; of more than `most` peers, the first is forgotten."""
    peers.pop(peer, None)
    peers[peer] = value
    if len(peers) > most:
        del peers[next(iter(peers))]
