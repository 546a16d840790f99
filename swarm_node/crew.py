"""A node in a crew: holds stages of a policy that several peers hold together, and leads them if it has the first.

    enter the swarm -> Mates (who holds what) --orders--> Seats (stages come and go)
                         |                                   |
                         | messages                          v
                         +----------------------> Worker.handle -> answers     until the lead says that the run is over
                         |
                         +-- holds stage 0 --> Run: the usual rounds, with StagedPolicy and StagedOptimizer

Whoever leads runs the node's own loop; everybody else answers messages. A peer that leads no more, because another does
with better right, goes back to answering. What is lost and how it came back is said by the lead.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from protocol.crew import Progress
from protocol.errors import RemoteProtocolError
from protocol.messages import PROTOCOL_VERSION, CrewCard, PeerCard
from swarm_node.averaging import Averager
from swarm_node.cohorts import StageCohort, leave_cohort
from swarm_node.config import NodeConfig, dump_toml
from swarm_node.enter import EnteredSwarm
from swarm_node.errors import SwarmNodeError, UserError
from swarm_node.joining import join_link
from swarm_node.policy.loading import ARCHITECTURE, Plan, is_windowed, load_tokenizer, prepare
from swarm_node.recovery.paths import elsewhere, sources, tell
from swarm_node.rundir import RunDir
from swarm_node.seats import Seats, snapshots_in
from swarm_node.stages.handing import Handing
from swarm_node.stages.leading import LeaveLead, LeaveSeat, Post, TakeLead, TakeSeat
from swarm_node.stages.mates import Mates
from swarm_node.stages.partition import partition, sizes
from swarm_node.stages.pipeline import Lead, StagedOptimizer, StagedPolicy
from swarm_node.stages.ports import StageLost
from swarm_node.stages.wire import Limits
from swarm_node.stages.worker import attend
from swarm_node.stopping import Stopper

TICK_S = 0.5
LOOK_S = 0.5
"""Longest between two looks at orders and messages."""
TRAINED_COPIES = 4
"""Weights, gradient and two moments, where all weights are trained."""
ADAPTED_COPIES = 1.3
"""Likewise with an adapter, more or less."""
MAX_ROWS = 2**14
"""Samples drawn at a time."""
LAST_WORD_S = 5.0
"""The others hear that the run is over, and leave."""
GATHER_S = 20.0
"""How long a lead that ends waits for the weights of the other stages."""
AFTER = 10
"""Rounds on either side of a loss whose reward is compared."""
SLACK_S = 5.0
"""A lost stage that its neighbours could take on is there by then, or somebody else has to come."""
ABSENT_S = 15.0
"""So much longer does a node with snapshots of later stages wait for another to begin the crew: one of the first."""
_PEER = re.compile(r"(?:peer )?…(\w{8})")

STATUS_S = 2.0
"""Between two writings of the status of a node that does not lead."""
MAX_SHOWN = 500
"""Peers in it."""
RECOVERED = "stages/recovered/"
FRESH = 20
"""Updates that a replica may be behind and still be better than what is made of neighbours."""
TURNS = 2**32
"""Passes and generations that a lead may count before its numbers would be those of the next lead."""


class Deposed(SwarmNodeError):
    """Another peer leads this crew now."""


class CrewNode:
    """This node's part in its crew."""

    def __init__(
        self, config: NodeConfig, entered: EnteredSwarm, run: RunDir, say: Callable[..., None], stack: ExitStack
    ) -> None:
        """UserError for a policy that cannot be cut so, or a stage that there is not."""
        plain = config.policy.dtype == "auto" and not torch.cuda.is_available()
        if plain:  # a measurement might come out otherwise on another machine
            config = config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": "float32"})})
        if not config.stages.crew:
            raise UserError("give the crew a name that its other machines are given too, and nobody else: --crew NAME")
        if config.seed is None:
            config = config.model_copy(update={"seed": entered.seed})
        self.config = config
        self._names: dict[str, str] = {}
        """Of peers, by the end of their ids."""
        self.entered = entered
        self.run = run
        self.say = say
        if not run.exists:  # as soon as there is a stage, its directory is that of a run
            run.write_config(dump_toml(config))
        self.loading = prepare(config.policy)
        stages = config.stages
        layer_bytes, embed_bytes, head_bytes = sizes(self.loading.config, self.loading.dtype.itemsize)
        spans = partition(layer_bytes, embed_bytes, head_bytes, [1.0] * stages.count)
        self.architecture = architecture(config, self.loading)
        self.transport = entered.transport
        self.handing = Handing(self.transport, entered.manifest.swarm_id, self.architecture)
        copies = ADAPTED_COPIES if self.loading.lora else TRAINED_COPIES

        def costs(spans: tuple[tuple[int, int], ...]) -> list[int]:
            each = [sum(layer_bytes[first:end]) for first, end in spans]
            each[0] += embed_bytes
            each[-1] += head_bytes
            return [round(copies * cost) for cost in each]

        kept = {stage for stage, _ in snapshots_in(run.path / "stages")}
        absent_s = ABSENT_S if kept and 0 not in kept else 0.0
        post = Post(
            me=self.transport.peer_id,
            swarm=entered.manifest.swarm_id,
            crew=stages.crew,
            architecture=self.architecture,
            spans=tuple((span.first, span.end) for span in spans),
            wanted=None if stages.stage == "auto" else stages.stage,
            capacity=round(stages.capacity_gb * 2**30) or free_memory(),
            started=time.time() + absent_s,  # of two leads that begin at once, it gives way
            spare_wait_s=stages.spare_wait_s,
            stall_s=stages.stall_s,
            reach=2 if stages.swap else 1,
            absent_s=absent_s,
        )

        def others(stage: int) -> dict[str, int]:
            """Peers of other crews that hold the same stage; worth having if it is averaged with them."""
            if config.averaging.method == "none":
                return {}
            layers, members = post.spans[stage], self.transport.members()
            return elsewhere(members, stages.crew, self.architecture, stages.count, layers, stage)

        self.mates = Mates(
            self.transport,
            post,
            partial(
                sources,
                others=others,
                plus=stages.swap,
                fresh=FRESH,
            ),
            partial(tell, adapters=self.loading.lora),
            costs,
            self._limits(),
            stages.wire,
            lambda text: say(self._named(text)),
        )
        stack.callback(self.mates.close)
        self.seats = Seats(
            config, self.loading, self.handing, run.path / "stages", self.transport.peer_id, self.mates.stands, say
        )
        recalled = self.seats.recall(post.spans)
        self.mates.report(self.seats.holding())
        manifest = entered.manifest
        self.cohort = StageCohort(
            config.averaging, manifest.swarm_id, manifest.averaging_period_s, self.seats, self.transport, say
        )
        self.lead: Lead | None = None
        self.policy: StagedPolicy
        self.optimizer: StagedOptimizer
        self.progress = Progress(recalled, 0.0)
        """Of the crew, as last heard or told, or as it was at the newest snapshot here."""
        self.link = ""
        """Others join with it, if there is any."""
        self.inviting = True
        """Others may come from elsewhere."""
        self._invited = ""
        self._losses = 0.0
        """When the crew was last whole."""
        self._holders: tuple[str, ...] = ()
        """Of the stages, then."""
        self._leads = False
        self._updates = -1
        self._averaged = 0
        """Changes that others' weights made to stage 0 while this node led."""
        self._announced: Any = None
        self._compare: list[tuple[int, float, str]] = []
        """Losses whose effect on the reward is still to be told: (round to tell it after, reward before, what)."""
        self._rewards: list[float] = []
        ended = threading.Event()
        ticking = threading.Thread(target=self._tick, args=(ended,), name="crew", daemon=True)
        ticking.start()
        stack.callback(ticking.join)
        stack.callback(ended.set)

    # ----------------------------------------------------------------- whoever does not lead

    def follow(self, stop: Stopper) -> bool:
        """Answer messages until this node is to lead (True), or the run is over (False). StopRequested by a signal."""
        told = False
        while True:
            stop.check()
            self._obey()
            if self.mates.whole and not self._leads and not told:
                told = True
                self.say(self._whole())
            if self._leads:
                self.cohort.leave()
            else:
                self.cohort.look()
            self.announce()
            if self._leads:
                return True
            if self.mates.progress is not None and self.mates.progress != self.progress:
                self.progress = self.mates.progress
                self.seats.round = self.progress.round
                if self.progress.over:
                    self.say(f"the run of crew {self.config.stages.crew} is over after round {self.progress.round}")
                    return False
            message = self.mates.receive(LOOK_S)
            if message is None:
                continue
            left = attend(message, self.seats.workers, self.mates.send, self._refused)
            assert left is None, "only the lead is sent what is for the lead"
            self.cohort.step()
            self._after_update()

    def _after_update(self) -> None:
        updates, plan = self.seats.updates, self.mates.plan
        if updates != self._updates and plan is not None:
            self._updates = updates
            self.seats.round = max(self.seats.round, self.progress.round + (self.lead is None))
            self.seats.updated(plan)
            self.mates.report(self.seats.holding())
            self.announce()

    def _obey(self) -> None:
        """Do what is to be done about stages. Deposed if this node does not lead any more."""
        for order in self.mates.orders():
            match order:
                case TakeLead():
                    self._leads = True
                case LeaveLead():
                    self._leads = False
                    if self.lead is not None:
                        raise Deposed("another peer leads this crew now")
                case LeaveSeat(stage):
                    self.seats.leave(stage)
                case TakeSeat():
                    self._take(order)
            self.mates.report(self.seats.holding())

    def _take(self, order: TakeSeat) -> None:
        plan = self.mates.plan
        if plan is None or not self.mates.stands(order):
            return
        try:
            taken = self.seats.take(order, plan.spans)
        except UserError as error:
            taken = str(error)
        if isinstance(taken, str):
            self.mates.unable(order.stage, taken)
        else:
            updates, source = taken
            self.mates.seated(order.stage, updates, source)
            self._updates = -1

    # ----------------------------------------------------------------- the lead

    def take_lead(self, stop: Stopper) -> None:
        """Wait until every stage is held: then there are `policy` and `optimizer`. Deposed, or StopRequested by a
        signal."""
        began = time.monotonic()
        while not self.mates.mend(LOOK_S):
            stop.check()
            self._obey()
            self.announce()
            self._waiting(began)
            if not self._leads:
                raise Deposed("another peer leads this crew now")
        config, plan = self.config, self.mates.plan
        assert plan is not None
        self.lead = Lead(
            self.mates,
            self.seats.workers,
            self._mend,
            config.stages.wire,
            config.stages.swap,
            self._refused,
            config.stages.stall_s,
            first_turn=plan.term * TURNS,
        )
        self.policy = StagedPolicy(self.lead, load_tokenizer(config.policy), config.policy, self.say)
        self.policy.version = updates = self.seats.updates
        self.policy.packing = not is_windowed(self.loading.config, longest_row(config))
        self.policy.start_digest = self.seats.starts[0]
        self.optimizer = StagedOptimizer(self.lead)
        self.progress = self.mates.progress or self.progress
        if updates:
            self._join_ends(averaged=False)
            self._surely(self.lead.agree)
            self.policy.version = updates = self.lead.updates
        self._holders = self._now_held_by()
        self.say(f"{self._whole()}; {updates} updates so far")
        if self._lost():
            self._compare_later(f"the lead of crew {config.stages.crew} was lost")

    def round_over(self, round: int, reward: float, averager: Averager | None) -> None:
        """At the lead, between two rounds: replicas and snapshots; a stage may change hands. `averager` is of stage
        0."""
        if averager is not None:
            self.cohort.say_which(sorted(self.seats.workers))
            changes = averager.counts["exchanges"] + averager.replaced
            if changes != self._averaged:
                self._averaged = changes
                self._join_ends(averaged=True)
        self._rewards.append(reward)
        del self._rewards[: -2 * AFTER]
        for after, before, what in [one for one in self._compare if one[0] <= round]:
            now = mean(self._rewards[-AFTER:])
            self.say(f"reward {before:.3f} in the {AFTER} rounds before {what}, {now:.3f} in the {AFTER} after")
            self._compare.remove((after, before, what))
        self.progress = Progress(round, mean(self._rewards[-AFTER:]))
        self.seats.round = round
        self.mates.tell(self.progress)
        self._after_update()
        self.mates.at_rest()

    def _join_ends(self, averaged: bool) -> None:
        """`Lead.join_ends`, whatever is lost meanwhile."""
        assert self.lead is not None
        self._surely(partial(self.lead.join_ends, averaged))

    def _surely(self, act: Callable[[], None]) -> None:
        """Do it, again whenever a stage is lost meanwhile."""
        assert self.lead is not None
        while True:
            try:
                act()
                return
            except StageLost as lost:
                self.lead.again(lost)

    def gather(self) -> None:
        """At the lead, at its end: write the weights of the stages that others hold beside those of its own, as far as
        they answer."""
        plan = self.mates.plan
        if plan is None or not self.seats.updates:
            return
        if len(self.seats.workers) < len(plan.seats):
            self.say("fetching the weights of the other stages, so that the policy can be exported here")
        for stage in self.seats.workers:
            self.seats.save(stage)
        missing = self.seats.gather(plan, GATHER_S)
        for stage, why in sorted(missing.items()):
            self.say(f"the weights of stage {stage} are not here ({why}): the run directory of its holder has them")

    def over(self) -> None:
        """At the lead: all rounds are done, so the others need not wait for another lead."""
        self.mates.tell(Progress(self.progress.round, self.progress.reward, over=True))
        until = time.monotonic() + LAST_WORD_S
        while self.mates.connected and time.monotonic() < until:
            time.sleep(TICK_S / 10)

    def leave(self) -> None:
        """At the end: what is held here is on disk, and whatever becomes of the crew is not this node's affair."""
        self.seats.save_all()
        self.mates.close()

    def metrics(self) -> dict[str, float]:
        """`stages/*` of the round that ends."""
        return ({} if self.lead is None else self.lead.figures()) | self.mates.metrics()

    def _mend(self, lost: StageLost) -> None:
        """Have lost stages rebuilt, here or elsewhere; returns when the crew is whole. Deposed if this is not the lead
        any more."""
        began, before = time.monotonic(), self._holders
        self.mates.doubt(lost)
        while not self.mates.mend(LOOK_S):
            self._obey()
            self._waiting(began)
        self._obey()  # a stage that has passed to another is let go
        holders = self._holders = self._now_held_by()
        passed = [stage for stage, peer in enumerate(holders) if peer != before[stage]]
        if self._lost():
            back = passed or sorted(lost.stages)
            stages = ", ".join(map(str, back))
            by = ", ".join(dict.fromkeys(self.called(holders[stage]) for stage in back))
            self.say(f"stage {stages} is back after {time.monotonic() - began:.1f} s, held by {by}")
            self._compare_later(f"stage {stages} was lost")
        elif passed:
            self.say("; ".join(f"stage {stage} passed to {self.called(holders[stage])}" for stage in passed))
        else:
            self.say(self._named(f"crew {self.config.stages.crew} does a step again: {lost.why}"))

    def _compare_later(self, what: str) -> None:
        before = mean(self._rewards[-AFTER:]) if self._rewards else self.progress.reward
        self._compare.append((self.progress.round + AFTER, before, what))

    def _lost(self) -> bool:
        """Whether any stage was lost since this was last asked."""
        before, self._losses = self._losses, self.mates.metrics().get("stages/lost", 0.0)
        return self._losses > before

    def leave_lead(self) -> None:
        self.lead, self._leads = None, False
        leave_cohort(self.transport)

    # ----------------------------------------------------------------- what others see

    def announce(self) -> None:
        """Until the crew is whole and this node leads it: then its card is `Member`'s affair."""
        card, layers = self.on_card()
        shown = card, self.seats.updates, self.cohort.id
        if self.lead is not None or shown == self._announced:
            return
        self._announced = shown
        self.transport.announce(
            PeerCard(
                protocol=PROTOCOL_VERSION,
                swarm=self.entered.manifest.swarm_id,
                created=time.time(),
                name=self.config.name or "node",
                roles=["trainer"],
                cohort=self.cohort.id,
                family=self.loading.config.model_type,
                policy_version=self.seats.updates,
                stages=layers,
                crew=card,
            )
        )

    def on_card(self) -> tuple[CrewCard, tuple[int, int] | None]:
        """Of the membership card: the crew, and the first and the last layer held."""
        card, plan = self.mates.card, self.mates.plan
        held = [] if plan is None else [plan.spans[stage] for stage in card.seats]
        return card, (held[0][0], held[-1][1] - 1) if held else None

    def _refused(self, error: RemoteProtocolError) -> None:
        self.mates.counts[f"refused/{error.reason}"] += 1

    def status(self) -> dict[str, Any]:
        """Of the crew, as `swarm-node status` shows it. From any thread."""
        plan, card, counts = self.mates.plan, self.mates.card, self.mates.metrics()
        members, workers = self.transport.members(), dict(self.seats.workers)

        def called(peer: str) -> str:
            me = self.config.name or "node"
            return me if peer == self.transport.peer_id else members[peer].name if peer in members else ""

        seats = [] if plan is None else plan.seats
        return {
            "name": card.name,
            "count": card.count,
            "lead": None if plan is None else {"peer": plan.lead, "name": called(plan.lead)},
            "whole": self.mates.whole,
            "updates": max((worker.updates for worker in workers.values()), default=0),
            "round": self.progress.round,
            "stages": [
                {"layers": [seat.layers[0], seat.layers[1] - 1], "peer": seat.peer, "name": called(seat.peer)}
                for seat in seats
            ],
            "spares": 0 if plan is None else len(plan.spares),
            "held": sorted(workers),
            "replicas": {stage: state.updates for stage, state in sorted(self.handing.replicas.copy().items())},
            "recovered": {
                name.removeprefix(RECOVERED): int(n) for name, n in counts.items() if name.startswith(RECOVERED)
            },
        }

    def _write_status(self, link: str) -> None:
        """Of a node that does not lead; of one that does, the run writes more."""
        members, averager = self.transport.members(), self.cohort.averager
        self.run.write_status(
            {
                "swarm": self.entered.manifest.swarm_id,
                "swarm_name": self.entered.manifest.name,
                "time": time.time(),
                "peer": self.transport.peer_id,
                "name": self.config.name or "node",
                "addresses": self.transport.addresses,
                "traffic": dict(self.transport.stats()),
                "averaging": None if averager is None else averager.status(),
                "peers": {
                    peer: {
                        "name": card.name,
                        "present": True,
                        "trains": "trainer" in card.roles,
                        "policy_version": card.policy_version,
                    }
                    for peer, card in sorted(members.items())[:MAX_SHOWN]
                },
                "link": link,
                "crew": self.status(),
            }
        )

    def _tick(self, ended: threading.Event) -> None:
        written = 0.0
        others = [*self.config.network.bootstrap, *self.entered.manifest.bootstrap]
        while not ended.wait(TICK_S):
            self.mates.tick()
            if addresses := self.transport.addresses:
                self.link = join_link(self.entered.manifest.swarm_id, addresses, others)
            if self.lead is None and time.monotonic() - written > STATUS_S:
                written = time.monotonic()
                self._write_status(self.link)

    # ----------------------------------------------------------------- what people read

    def _waiting(self, since: float) -> None:
        """Nobody has come for a stage: say how to."""
        formed = self.mates.plan is not None
        if not formed or time.monotonic() >= since + self.config.stages.spare_wait_s + SLACK_S:
            self.invite()

    def invite(self) -> None:
        """Say what to type on another machine, once."""
        stages = self.config.stages
        if not self.inviting or not self.link or self.link == self._invited:
            return
        self._invited = self.link
        model = [] if self.config.policy.model == "starter" else ["--model", self.config.policy.model]
        options = ["--stages", str(stages.count), "--crew", stages.crew, *model]
        self.say("on another machine:")
        self.say(f"swarm-node join '{self.link}' {shlex.join(options)}", "link")

    def _now_held_by(self) -> tuple[str, ...]:
        plan = self.mates.plan
        return () if plan is None else tuple(seat.peer for seat in plan.seats)

    def _whole(self) -> str:
        holders = ", ".join(f"{stage} {self.called(peer)}" for stage, peer in enumerate(self._now_held_by()))
        return f"crew {self.config.stages.crew} is whole: stage {holders}"

    def called(self, peer: str) -> str:
        """A peer's name for people."""
        if peer == self.transport.peer_id:
            return "this node"
        card = self.transport.members().get(peer)
        if card is not None:
            self._names[peer[-8:]] = card.name
        name = self._names.get(peer[-8:])
        alone = sum(other == name for other in self._names.values()) == 1
        return name if name is not None and alone and name != "node" else f"peer …{peer[-8:]}"

    def _named(self, text: str) -> str:
        """With peers called by their names, where these are known."""
        members = {peer[-8:]: peer for peer in (self.transport.peer_id, *self.transport.members())}
        return _PEER.sub(lambda found: self.called(members.get(found[1], found[1])), text)

    def _limits(self) -> Limits:
        config, rollouts = self.loading.config, self.config.rollouts
        longest = rollouts.max_prompt_tokens + rollouts.group_size * rollouts.max_new_tokens
        return Limits(
            plan=0,
            stages=self.config.stages.count,
            here=frozenset(),
            sender=frozenset(),
            width=config.hidden_size,
            vocabulary=config.vocab_size,
            tokens=2 * max(self.config.grpo.microbatch_tokens, longest),
            rows=MAX_ROWS,
            prompt=rollouts.max_prompt_tokens,
            length=rollouts.max_new_tokens,
        )


def architecture(config: NodeConfig, loading: Plan) -> str:
    """16 hexadecimal digits: equal for those who hold stages of one policy. Which weights a directory holds is not
    looked at (a stage has a part of them only): its name on the hub and commit are, if it comes from there."""
    text = loading.config.get_text_config()
    known = [getattr(text, key, None) for key in (*ARCHITECTURE, "tie_word_embeddings")]
    policy = config.policy
    trained = [policy.lora_rank, policy.lora_alpha, policy.lora_targets] if loading.lora else []
    source = getattr(loading.config, "_commit_hash", None)
    return hashlib.sha256(json.dumps([known, trained, str(loading.dtype), source]).encode()).hexdigest()[:16]


def longest_row(config: NodeConfig) -> int:
    """Most tokens of a prompt and one answer."""
    return config.rollouts.max_prompt_tokens + config.rollouts.max_new_tokens


def free_memory() -> int:
    """Bytes that this machine has left; 0 = not known."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
