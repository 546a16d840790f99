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
from swarm_node.config import NodeConfig
from swarm_node.enter import EnteredSwarm
from swarm_node.errors import SwarmNodeError, UserError
from swarm_node.joining import join_link
from swarm_node.policy.loading import ARCHITECTURE, Plan, load_tokenizer, prepare
from swarm_node.recovery.paths import elsewhere, sources, tell
from swarm_node.rundir import RunDir
from swarm_node.seats import Seats
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
AFTER = 10
"""Rounds on either side of a loss whose reward is compared."""


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
        self.config = config
        self.entered = entered
        self.say = say
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

        post = Post(
            me=self.transport.peer_id,
            swarm=entered.manifest.swarm_id,
            crew=stages.crew,
            architecture=self.architecture,
            spans=tuple((span.first, span.end) for span in spans),
            wanted=None if stages.stage == "auto" else stages.stage,
            capacity=round(stages.capacity_gb * 2**30) or free_memory(),
            started=time.time(),
            spare_wait_s=stages.spare_wait_s,
            stall_s=stages.stall_s,
            reach=2 if stages.swap else 1,
        )
        layers = post.spans
        self.mates = Mates(
            self.transport,
            post,
            partial(
                sources,
                others=lambda stage: elsewhere(
                    self.transport.members(), stages.crew, self.architecture, stages.count, layers[stage], stage
                ),
                plus=stages.swap,
                fresh=config.grpo.iterations,
            ),
            partial(tell, adapters=self.loading.lora),
            costs,
            self._limits(),
            stages.wire,
            say,
        )
        stack.callback(self.mates.close)
        self.seats = Seats(
            config, self.loading, self.handing, run.path / "stages", self.transport.peer_id, self.mates.stands, say
        )
        self.mates.report(self.seats.holding())
        self.lead: Lead | None = None
        self.policy: StagedPolicy
        self.optimizer: StagedOptimizer
        self.progress = Progress(0, 0.0)
        """Of the crew, as last heard or told."""
        self._leads = False
        self._updates = -1
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
        while True:
            stop.check()
            self._obey()
            self.announce()
            if self._leads:
                return True
            if self.mates.progress is not None and self.mates.progress != self.progress:
                self.progress = self.mates.progress
                if self.progress.over:
                    self.say(f"the run of crew {self.config.stages.crew} is over after round {self.progress.round}")
                    return False
            message = self.mates.receive(LOOK_S)
            if message is None:
                continue
            left = attend(message, self.seats.workers, self.mates.send, self._refused)
            assert left is None, "only the lead is sent what is for the lead"
            self._after_update()

    def _after_update(self) -> None:
        updates, plan = self.seats.updates, self.mates.plan
        if updates != self._updates and plan is not None:
            self._updates = updates
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
        while not self.mates.mend(LOOK_S):
            stop.check()
            self._obey()
            self.announce()
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
        self.policy.packing = True
        self.optimizer = StagedOptimizer(self.lead)
        self.progress = self.mates.progress or self.progress
        self.say(f"crew {config.stages.crew} is whole: {config.stages.count} stages, {updates} updates so far")

    def round_over(self, round: int, reward: float) -> None:
        """At the lead, between two rounds: replicas and snapshots; a stage may change hands."""
        self._rewards.append(reward)
        del self._rewards[: -2 * AFTER]
        for after, before, what in [one for one in self._compare if one[0] <= round]:
            now = mean(self._rewards[-AFTER:])
            self.say(f"{what}: reward {before:.3f} in the {AFTER} rounds before, {now:.3f} in the {AFTER} after")
            self._compare.remove((after, before, what))
        self.progress = Progress(round, mean(self._rewards[-AFTER:]))
        self.mates.tell(self.progress)
        self._after_update()
        self.mates.at_rest()

    def over(self) -> None:
        """At the lead: all rounds are done, so the others need not wait for another lead."""
        self.mates.tell(Progress(self.progress.round, self.progress.reward, over=True))

    def metrics(self) -> dict[str, float]:
        """`stages/*` of the round that ends."""
        return self.mates.metrics() | ({} if self.lead is None else self.lead.figures())

    def _mend(self, lost: StageLost) -> None:
        """Have lost stages rebuilt, here or elsewhere; returns when the crew is whole. Deposed if this is not the lead
        any more."""
        began = time.monotonic()
        if lost.stages:
            self.say(f"crew {self.config.stages.crew}: {lost}")
        self.mates.doubt(lost)
        while not self.mates.mend(LOOK_S):
            self._obey()
        seconds = time.monotonic() - began
        what = f"stage {', '.join(map(str, sorted(lost.stages)))} was lost and is back after {seconds:.1f} s"
        self.say(what)
        before = mean(self._rewards[-AFTER:]) if self._rewards else self.progress.reward
        self._compare.append((self.progress.round + AFTER, before, what))

    def leave_lead(self) -> None:
        self.lead, self._leads = None, False

    # ----------------------------------------------------------------- what others see

    def announce(self) -> None:
        """Until the crew is whole and this node leads it: then its card is `Member`'s affair."""
        card, layers = self.on_card()
        if self.lead is not None or (card, self.seats.updates) == self._announced:
            return
        self._announced = card, self.seats.updates
        self.transport.announce(
            PeerCard(
                protocol=PROTOCOL_VERSION,
                swarm=self.entered.manifest.swarm_id,
                created=time.time(),
                name=self.config.name or "node",
                roles=["trainer"],
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

    def _tick(self, ended: threading.Event) -> None:
        told = ""
        others = [*self.config.network.bootstrap, *self.entered.manifest.bootstrap]
        while not ended.wait(TICK_S):
            self.mates.tick()
            addresses = self.transport.addresses
            link = join_link(self.entered.manifest.swarm_id, addresses, others)
            if addresses and link != told and self.lead is None:  # afterwards the run says it
                told = link
                self.say("others join with:")
                self.say(link, "link")

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
