"""A peer's part in its crew: events come in, actions go out.

    Leadership   who leads: this peer seeks the leader, follows it, or leads     Directory   cards and names of peers
    Leader       while it leads: who is there, who holds which stage             PeerChannels    which ones stay open
    Following    the plan that it goes by, and the stages that it holds

A follower's day: Hello -> Answer -> Plan -> BuildStage ... Ready -> Whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from swarm_node.install import upgrade_command
from swarm_node.pipeline.membership.actions import Action, ActionQueue, BuildStage, PeerLink, PeerSpec
from swarm_node.pipeline.membership.channels import PeerChannels
from swarm_node.pipeline.membership.directory import Directory
from swarm_node.pipeline.membership.following import Following, line
from swarm_node.pipeline.membership.leader import Leader
from swarm_node.pipeline.membership.leader_search import LeaderSearch
from swarm_node.pipeline.membership.leadership import ACCEPTED, CrewRole, Leadership
from swarm_node.pipeline.membership.roster import short
from swarm_protocol import crew
from swarm_protocol.messages import CrewCard, PeerCard


class CrewMembership:
    """This peer in its crew."""

    def __init__(self, spec: PeerSpec, now: float, held_s: Callable[[], float]) -> None:
        """`held_s` gives seconds that the oldest message has been waiting here, or that a build has made no
        progress."""
        self.spec = spec
        self.missing: dict[int, float] = {}
        """Stages that are lost, as far as this peer knows, until the crew is whole again -> since when."""
        self._held_s = held_s
        self._queue = queue = ActionQueue()
        self.counts: Mapping[str, int] = queue.counts
        """`lost`, `recovered/<way>`, `given_up`, `unable`, `stuck`, `stray`, `refused/<reason>`: running totals."""
        self._channels = channels = PeerChannels(queue, lambda link: self.leadership.gone(link))
        self.following = Following(spec, channels, queue)
        self.directory = Directory(spec, queue)
        search = LeaderSearch(spec, channels, queue, now)
        self.leadership = Leadership(spec, channels, queue, self.following, self.directory, search)

    # ----------------------------------------------------------------- what is known

    @property
    def role(self) -> CrewRole:
        return self.leadership.role

    @property
    def leader(self) -> Leader | None:
        """While this peer leads."""
        return self.leadership.leader

    @property
    def plan(self) -> crew.Plan | None:
        return self.following.plan

    @property
    def whole(self) -> bool:
        return self.following.whole

    @property
    def card(self) -> CrewCard:
        """The crew's part of the membership card.

        A leader shows stage 0 as soon as it leads. Other stages are shown once they are in memory."""
        mine = {stage for stage in self.following.stages if stage in self.following.live and stage > 0}
        held = tuple(sorted(mine | {0} if self.role == CrewRole.LEADING else mine))
        return CrewCard(self.spec.id, self.spec.architecture, len(self.spec.spans), held, self.leadership.term)

    @property
    def absent(self) -> set[str]:
        """At the leader: peers with cards of this crew that are not in touch with it."""
        return set() if self.leader is None else self.directory.cards.keys() - self.leader.roster.members.keys()

    def way_to(self, stage: int) -> PeerLink | None:
        """The channel to the holder of `stage` (-1 = the leader); `None` if there is none, or it is this peer."""
        if self.plan is None:
            return None
        peer = self.plan.lead if stage < 0 else self.plan.assignments[stage].peer
        if self.leader is not None:
            return self.leader.roster.link_of(peer)
        return self.following.link if peer == self.plan.lead else self._channels.neighbours.get(peer)

    def taker(self, stage: int) -> str:
        """The peer that is building a missing stage; empty = nobody yet."""
        if self.leader is not None:
            return self.leader.planning.holders[stage]
        if self.plan is None or self.role == CrewRole.SEEKING:
            return ""
        row = self.plan.assignments[stage]
        return row.peer if row.sources and not self.whole else ""

    # ----------------------------------------------------------------- events

    def cards(self, members: Mapping[str, PeerCard], now: float) -> list[Action]:
        """These are the members of the swarm, as last looked up."""
        self.leadership.search.look(bool(members), now)
        self.directory.look_up(members, forming=self.leader is not None and self.plan is None)
        return self._settle(now)

    def opened(self, link: PeerLink, now: float) -> list[Action]:
        """A peer has opened a channel."""
        self._channels.opened(link, now)
        self._channels.tidy(self.following.neighbours(), now)
        return self._settle(now)

    def heard(self, link: PeerLink, record: crew.Record, now: float) -> list[Action]:
        """A record has come over a channel."""
        if link.method != crew.CREW_METHOD or (link in self._channels and type(record) not in ACCEPTED[self.role]):
            self._queue.counts["stray"] += 1
        elif link in self._channels:
            self._heard(link, record, now)
        return self._settle(now)

    def closed(self, link: PeerLink, why: str, now: float) -> list[Action]:
        """A channel has ended, or could not be opened."""
        if link in self._channels:
            self._channels.forget(link)
            if link.method == crew.STAGE_METHOD:
                self.following.lose_neighbour(link, why, refused=False)
            else:
                self.leadership.ended(link, why, now)
        return self._settle(now)

    def refused(self, link: PeerLink, reason: str, now: float, ended: bool = True) -> list[Action]:
        """A peer sent an invalid message about a stage's work: its channel is closed.

        The leader's channel stays open unless it has `ended`; only the work under way is given up."""
        self._queue.counts[f"refused/{reason}"] += 1
        if link is self.following.link and not ended and self.plan is not None:
            self.following.refuse_leader(reason)
        elif link in self._channels:
            self._channels.close(link)
            if link.method == crew.STAGE_METHOD:
                self.following.lose_neighbour(link, reason, refused=True)
            elif link is self.following.link:
                self.leadership.lose_leader(f"what it says is refused: {reason}", now)
            elif self.leader is not None and self.leader.roster.link_of(link.peer) is link:
                self.leader.give_up(link.peer, f"what it says is refused: {reason}", now)
        return self._settle(now)

    def unspoken(self, link: PeerLink, why: str, now: float) -> list[Action]:
        """A peer says Hello in a protocol version that is not read here; its channel ends."""
        self._queue.counts["refused/version"] += 1
        upgrade = f"to upgrade this node, if it is the older one: {upgrade_command()}"
        self._queue.say_of_peer(f"peer {short(link.peer)} is not heard in crew {self.spec.crew}: {why}; {upgrade}")
        return self._settle(now)

    def unsent(self, mark: int, peer: str, now: float) -> list[Action]:
        """There was no channel for a message to a neighbour, by the plan with that mark."""
        self.following.miss_channel(mark, peer)
        return self._settle(now)

    def built(self, order: BuildStage, updates: int, source: crew.Source | None, now: float) -> list[Action]:
        """A stage that was ordered is here."""
        self.following.built(order, updates, source)
        return self._settle(now)

    def unable(self, order: BuildStage, why: str, now: float) -> list[Action]:
        """A stage that was ordered cannot be built. A peer that cannot hold the first does not lead for a while."""
        if self.following.stands(order) and self.plan is not None:
            self.following.unable(order, line(why))
            if self.leader is not None and order.stage:
                self.leader.unable(self.spec.me, order.stage, line(why), now)
            elif self.leader is not None:
                self.leadership.resign(line(why), now)
        return self._settle(now)

    def report(self, holding: crew.Holding, now: float) -> list[Action]:
        """This peer has these stages, replicas and checkpoints."""
        self.following.update(holding)
        if self.leader is not None:
            self.leader.roster.note(self.spec.me, self.following.holding, self.following.run)
        self._queue.send(self.following.link, crew.Report(self.following.holding, self.following.run))
        return self._settle(now)

    def doubted(self, mark: int, stages: Collection[int], why: str, now: float) -> list[Action]:
        """The leader's pipeline, which worked by the plan with that mark, has given up stages."""
        if self.leader is not None and self.leader.whole and self.plan is not None and self.plan.mark == mark:
            self.leader.doubt(stages, why, now)
        return self._settle(now)

    def advance(self, progress: crew.Progress, now: float) -> list[Action]:
        """The leader tells all members the progress of the run."""
        self.following.progress = progress
        if self.leader is not None:
            self.leader.send_all(progress)
        return self._settle(now)

    def at_rest(self, now: float) -> list[Action]:
        """The leader is between two rounds."""
        if self.leader is not None:
            self.leader.at_rest(now)
        return self._settle(now)

    def tick(self, now: float, waiting_since: float | None = None) -> list[Action]:
        """Time has passed. `waiting_since`: the leader has heard nothing from its pipeline since then."""
        self.leadership.search.look(False, now)
        if self.leader is not None:
            self.leader.watch(waiting_since, now)
        self.following.tend_channels(now)
        return self._settle(now)

    # ----------------------------------------------------------------- what follows from events

    def _settle(self, now: float) -> list[Action]:
        """Do what follows from what is known now."""
        self.leadership.seek(now)
        if self.leader is not None:
            self._lead(self.leader, now)
        self.following.report_ready(now)
        self.missing = {stage: self.missing.get(stage, now) for stage in self._lost()}
        return self._queue.take()

    def _lost(self) -> set[int]:
        if self.leader is not None:
            return self.leader.missing
        if self.role == CrewRole.SEEKING:
            return set(self.plan.held_by(self.plan.lead)) if self.plan else set()
        return self.following.missing

    def _lead(self, leader: Leader, now: float) -> None:
        following = self.following
        self.leadership.call_rivals(now)
        if leader.plan is not None:
            self._note_ready(leader)
        plan = leader.arrange(now)
        if plan is not None:
            first = self.plan is None or self.plan.term != plan.term
            self.leadership.term = plan.term
            following.adopt(plan, now)
            self._note_ready(leader)
            if first:  # the members may have known the progress differently
                reward = following.progress.reward if following.progress else 0.0
                following.progress = crew.Progress(leader.roster.round, reward)
                leader.send_all(following.progress)
        following.plan = leader.plan or following.plan
        if leader.whole and not following.whole:
            following.drop_others()
        following.whole = leader.whole

    def _note_ready(self, leader: Leader) -> None:
        for record in self.following.take_ready():
            leader.ready(self.spec.me, record)

    def _heard(self, link: PeerLink, record: crew.Record, now: float) -> None:
        following = self.following
        match record:
            case crew.Hello():
                self.leadership.greeted(link, record, now)
            case crew.Answer():
                self.leadership.answered(link, record, now)
            case crew.Refusal():
                self.leadership.refused(link, record, now)
            case _ if self.leader is not None:
                self.leader.heard(link, record, now)
            case _ if link is not following.link:
                self._queue.counts["stray"] += 1
            case crew.Plan():
                if following.accept(record, link.peer, now):
                    self.leadership.term = record.term
            case crew.Whole(plan=mark):
                following.confirm_whole(mark)
            case crew.Progress():
                following.progress = record
            case crew.Probe(plan=mark):
                self._queue.send(link, crew.Load(mark, max(0.0, self._held_s())))
