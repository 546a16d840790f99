"""The swarm side of a node: the tasks it is assigned, the groups it publishes, admits, and trains on.

draw:     slots of this epoch -> tasks                     publish:  own groups -> sharing.Publisher -> transport
choose:   transport -> sharing.Receiver -> sharing.ReplayBuffer -> J foreign groups, with advantages
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from torch import Tensor

from swarm_node.averaging.averager import Averager
from swarm_node.averaging.cohort import join_cohort
from swarm_node.averaging.cohort_weights import LateJoin
from swarm_node.config import AveragingConfig, NodeConfig
from swarm_node.install import outdated
from swarm_node.observability.refusals import refusal_rows, say_first_refusals
from swarm_node.observability.worth import Worth, worth_metrics
from swarm_node.policy.policy import Policy
from swarm_node.say import Once, Say, Warned
from swarm_node.sharing import Balance, Gate, Publisher, Receiver, ReplayBuffer
from swarm_node.sharing.gate import Logprobs
from swarm_node.sharing.teaching import Teaching
from swarm_node.swarm.clock import say_clock
from swarm_node.swarm.declared import declare, declared_table, kinds_of, pass_1_of, share_of
from swarm_node.swarm.twins import check_twins
from swarm_node.swarm.uses import Uses
from swarm_node.tasks.taskset import TaskSet, slot_key, slot_place
from swarm_node.types import Group, Sampling, Task
from swarm_protocol.codec import SPOKEN, common_version, in_version
from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.identity import Identity
from swarm_protocol.limits import SLOTS
from swarm_protocol.manifest import Manifest
from swarm_protocol.messages import PROTOCOL_VERSION, CrewCard, Declared, PeerCard
from swarm_protocol.topics import epoch_at, shard_of
from swarm_protocol.transports.base import Handler, Transport

MAX_SHOWN = 500  # peers in a status: those with the most admitted groups
SENT = ("swarm/groups_sent", "swarm/bytes_sent", "swarm/unsent/")
RECEIVED = ("swarm/groups_received", "swarm/groups_admitted", "swarm/rejected/", "swarm/payloads")


class Member:
    """This node as a member of its swarm."""

    def __init__(
        self,
        config: NodeConfig,
        manifest: Manifest,
        identity: Identity,
        transport: Transport,
        policy: Policy,
        tasks: TaskSet,
        say: Say,
        now: Callable[[], float] = time.time,
        record: Callable[[dict[str, Any]], None] | None = None,
        subscribe: Callable[[str, Handler], None] | None = None,
        spoken: Collection[int] = SPOKEN,
        spent: Callable[[], float] = time.monotonic,
    ) -> None:
        """`record` is told what was offered and chosen in each round (`sharing.record`). `subscribe` replaces the
        transport's, which lasts as long as the transport, for a member that may end earlier. `spoken`: the protocol
        versions that it understands. `spent`: the clock [s] that bounds admission."""
        self.sharing = config.sharing
        self._form = config.rewards.answer  # the manifest's
        self._most_own = max(config.sharing.own, config.rollouts.groups)
        self.manifest = manifest
        self.peer_id = identity.peer_id
        self.transport = transport
        self.policy = policy
        self.name = config.name or "node"
        self.serves_relay = config.network.serve_relay
        self.now = now
        self._spoken = spoken
        self.swarm = swarm = manifest.swarm_id  # kept, because it is a hash
        self.tasks = tasks
        self.shard = shard_of(self.peer_id, manifest.shards)
        listened = random.Random(f"{swarm}/{self.peer_id}").sample(range(manifest.shards), manifest.shards)
        others = [shard for shard in listened if shard != self.shard]
        self.shards = sorted([self.shard, *others[: config.sharing.listen_shards - 1]])
        sampling = Sampling(config.rollouts.max_new_tokens, config.rollouts.temperature, config.rollouts.top_p)
        self.publisher = Publisher(
            send=lambda data: transport.publish(ROLLOUTS.topic(swarm, self.shard), data),
            identity=identity,
            manifest=manifest,
            policy=policy,
            sampling=sampling,
            config=config.sharing,
            now=now,
            version=self._version,
            addresses=lambda: transport.addresses,
        )
        k = config.grpo.k if config.grpo.advantage == "pass_k" else 1
        self.replay_buffer = ReplayBuffer(config.sharing, now, record, say, k=k)
        self.receiver = Receiver(
            me=self.peer_id,
            manifest=manifest,
            policy=policy,
            sampling=sampling,
            tasks=tasks,
            config=config.sharing,
            add=self.replay_buffer.add,
            now=now,
            say=say,
            spoken=spoken,
            spent=spent,
            hear=transport.hear,
        )
        self.teaching = Teaching()
        self.uses = Uses(self.peer_id)
        self.held_out: tuple[float, int] | None = None  # the latest held-out (pass@1, questions) since training began
        self.pass_1_before: float | None = None  # held-out pass@1 before training; None if nothing was measured since
        self.latest_worth: Worth | None = None  # as found last; it stays when the network is closed
        self._began = now()
        self.kinds = kinds_of(manifest)
        self.card: PeerCard | None = None  # as announced last
        self.averager: Averager | None = None
        self.late_join: LateJoin | None = None
        self.crew: Callable[[], tuple[CrewCard, tuple[int, int] | None]] | None = None
        """The card's entry for this node's crew, and the layers that this node holds."""
        self._names: dict[str, str] = {}  # peer -> name as of the last `status`; includes peers that have left
        self._say = say
        self._say_once = Once(say)
        self._figures: dict[str, float] = {}
        """The metrics of the last round. Replaced as a whole, so that other threads may read them."""
        self._slots = self._count_slots()
        if config.rollouts.group_size > manifest.limits.max_rollouts:
            most = manifest.limits.max_rollouts
            say(Warned(f"this swarm takes groups of at most {most}: nothing of this node's is shared"))
        if config.rollouts.max_new_tokens > (longest := manifest.limits.max_answer_tokens):
            say(Warned(f"this swarm takes answers of at most {longest} tokens: groups with longer ones are not shared"))
        for shard in self.shards:  # a node that uses no foreign groups still forwards them
            heard = self.receiver.take if self.sharing.foreign else lambda data: None
            (subscribe or transport.subscribe)(ROLLOUTS.topic(swarm, shard), heard)

    # ----------------------------------------------------------------- a round

    def wanted(self) -> int:
        """How many own groups to sample: `sharing.own`, and with `sharing.fill` one for each missing foreign group, but
        no more than alone. UserError if a node with this node's key was there before it."""
        check_twins(self.transport.twins(), self.peer_id, self._say_once)
        say_clock(self.transport, self._say_once)
        self.receiver.admit(enough=self.sharing.foreign - self.replay_buffer.available())
        missing = max(0, self.sharing.foreign - self.replay_buffer.available()) if self.sharing.fill else 0
        return min(self.sharing.own + missing, self._most_own)

    def draw(self, n: int) -> list[Task]:
        """The tasks of the next `n` slots."""
        tasks = []
        for slot in islice(self._slots, n):
            which = self.swarm, self.peer_id, *slot
            task = self.tasks.at(slot_place(*which), slot_key(*which))
            tasks.append(msgspec.structs.replace(task, slot=slot))
        return tasks

    def publish(self, groups: Sequence[Group]) -> None:
        """Share the sampled groups, and record how this node does on each kind of task."""
        self.replay_buffer.observe(groups)
        self.teaching.observe(groups)
        self.publisher.publish(groups)
        if self.publisher.metrics().get("swarm/unsent/age"):
            late = "sampling a round takes more than an hour: peers take no answers that late; sample fewer groups"
            self._say_once("too slow", late)

    def guard(self, logprobs: Logprobs) -> None:
        """Reject answers that carry a payload, and admit answers and lengths in own proportions; `logprobs` says how
        likely this node's policy is to write them."""
        self.replay_buffer.gate = gate = Gate(self.policy, self.tasks, logprobs, self.now, self._form)
        self.replay_buffer.balance = Balance(gate.length)

    # ----------------------------------------------------------------- averaging

    def average(
        self,
        config: AveragingConfig,
        weights: Mapping[str, Tensor],
        changed: Callable[[], None],
        probe: Callable[[], float | None],
    ) -> Averager:
        """Join the cohort of the peers whose weights can be averaged with `weights`, which must still be as all of them
        began. `changed` and `probe` are those of `Averager`. Raises UserError as `join_cohort`."""
        self.late_join = join_cohort(
            config,
            self.swarm,
            self.manifest.averaging_period_s,
            self.policy.start,
            weights,
            self.transport,
            self.now,
            self._say,
            changed,
            probe,
        )
        self.averager = self.late_join.averager
        if config.late_join and not self.policy.version:
            self.late_join.seek()
        return self.averager

    # ----------------------------------------------------------------- what others and people see

    def announce(self, speed: float = 0.0) -> None:
        """Announce this node's card to the swarm; `speed` in tokens a second."""
        crew, stages = (None, None) if self.crew is None else self.crew()
        card = PeerCard(
            protocol=PROTOCOL_VERSION,
            swarm=self.swarm,
            created=self.now(),
            name=self.name,
            roles=["trainer", "relay"] if self.serves_relay else ["trainer"],
            shards=self.shards,
            cohort="" if self.averager is None else self.averager.place.cohort,
            family=self.policy.family,
            tokenizer=self.policy.tokenizer_hash,
            policy_version=self.policy.version,
            speed=speed,
            stages=stages,
            crew=crew,
            declared=self._declared(),
        )
        self.card = in_version(card, self._version(), self._spoken)
        self.transport.announce(self.card)

    def _declared(self) -> Declared | None:
        """What this node says of itself; None if its user does not want that."""
        if not self.sharing.declare:
            return None
        return declare(self._began, self.teaching.latest(), self.held_out, self.replay_buffer.used_by_peer())

    def worth(self) -> Worth:
        """What the swarm gave this node, as far as it is known. For any thread."""
        members = self.transport.members()
        by_others, by_itself = self.teaching.changes()
        share, declaring = share_of(self.peer_id, members)
        own, others = self.teaching.learned
        self.latest_worth = Worth(
            own_groups=own,
            others_groups=others,
            by_others=by_others,
            by_itself=by_itself,
            unsolved=self.teaching.unsolved,
            pass_1=None if self.held_out is None else self.held_out[0],
            pass_1_before=self.pass_1_before,
            theirs=pass_1_of(members),
            used_by_others=self.uses.look({**self.transport.left(), **members}),
            share_of_used=share,
            declaring=declaring,
        )
        return self.latest_worth

    def metrics(self, speed: float) -> dict[str, float]:
        """The metrics `swarm/*` of the round that ends. All are running totals, except `used` and levels."""
        self.announce(speed)
        members, totals, averager = self.transport.members(), self.transport.stats(), self.averager
        figures = {
            "swarm/peers": float(len(members)),
            "swarm/trainers": float(sum("trainer" in card.roles for card in members.values())),
            "swarm/bytes_in": totals["bytes_in"],
            "swarm/bytes_out": totals["bytes_out"],
            **{f"swarm/{name}": n for name, n in totals.items() if name.startswith("restarts/")},
            **self.publisher.metrics(),
            **self.receiver.metrics(),
            **self.replay_buffer.metrics(),
            **({} if averager is None else averager.metrics()),
            **worth_metrics(self.worth()),
        }
        refused: list[str] = []
        for name, value in totals.items():
            reason = name.removeprefix("rejected/")
            own = value - (0 if averager is None else averager.refused[reason])
            if reason != name and own > 0:  # refusals of averaging have metrics of their own
                figures[f"swarm/{name}"] = figures.get(f"swarm/{name}", 0.0) + own
                refused.append(reason)
        say_first_refusals(self._say_once, refused, self.transport.refusals())
        self._figures = figures
        if figures.get("swarm/rejected/newer"):
            heard = (peer for peer, account in self.receiver.by_peer().items() if "newer" in account["rejected"])
            self._say_once("outdated", Warned(outdated(next(heard, self.transport.too_new() or "a peer"))))
        return figures

    def status(self) -> dict[str, Any]:
        """The swarm, this node and each peer, as `swarm-node status` shows them. For any thread, one at a time."""
        members, used, figures = self.transport.members(), self.replay_buffer.used_by_peer(), self._figures
        counts = self.receiver.by_peer()  # after `used`, so that no peer has more used than admitted
        for peer, n in self.replay_buffer.trust.refused().items():
            if peer in counts:
                counts[peer]["rejected"]["payload"] = n
        named = {peer: name for peer in counts if (name := self._names.get(peer))}
        self._names = named | {peer: card.name for peer, card in members.items()}
        shown = sorted({*members, *counts}, key=lambda peer: -counts.get(peer, {}).get("admitted", 0))[:MAX_SHOWN]
        return {
            "swarm": self.swarm,
            "swarm_name": self.manifest.name,
            "time": self.now(),
            "since": self._began,
            "peer": self.peer_id,
            "name": self.name,
            "addresses": self.transport.addresses,
            "traffic": dict(self.transport.stats()),
            "restarted": dict(self.transport.restarted()),
            "sent": {name: n for name, n in figures.items() if name.startswith(SENT)},
            "received": {name: n for name, n in figures.items() if name.startswith(RECEIVED)} | self.receiver.totals(),
            "refused": msgspec.to_builtins(refusal_rows(self.transport.refusals(), counts, self._names)),
            "averaging": None if self.averager is None else self.averager.status(),
            "worth": msgspec.to_builtins(self.worth()),
            "uses": self.uses.state(),
            "peers": {
                peer: {
                    "name": self._names.get(peer, ""),
                    "present": peer in members,
                    "trains": peer not in members or "trainer" in members[peer].roles,
                    "policy_version": members[peer].policy_version if peer in members else None,
                    "declared": declared_table(members[peer].declared, self.kinds) if peer in members else None,
                    **counts.get(peer, {}),
                    "used": used.get(peer, 0),
                }
                for peer in sorted(shown)
            },
        }

    def close(self) -> None:
        """Publish the groups that wait, declare the last counts, and close the transport."""
        try:
            self.publisher.flush()
            if self.card is not None:
                self.announce(self.card.speed)
        finally:
            self.transport.close()

    def _version(self) -> int:
        """The protocol version to write in."""
        heard = self.transport.stats().get("rejected/newer", 0.0) > 0
        return common_version(self.transport.members().values(), self._spoken, newer_heard=heard)

    def _count_slots(self) -> Iterator[tuple[int, int]]:
        """(epoch, slot) of each task to come, from slot 0 in every epoch. A node that uses up all slots of an epoch
        starts again; the publisher shares at most two groups of one slot."""
        epoch, drawn = -1, 0
        while True:
            present = epoch_at(self.now())
            epoch, drawn = (epoch, drawn + 1) if present == epoch else (present, 0)
            yield epoch, drawn % SLOTS
