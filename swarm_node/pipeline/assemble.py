"""Everything that a node needs in its crew, made in order: the policy, its files, the crew, stages, averaging.

    configuration + swarm -> CrewParts -> `crew.CrewNode`, which lets them work together

Mistakes of the user are found first: a crew without a name, files of another model, a stage that does not exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from swarm_node.config import NodeConfig
from swarm_node.errors import UserError
from swarm_node.pipeline.compute.fingerprint import architecture
from swarm_node.pipeline.compute.partition import UNKNOWN
from swarm_node.pipeline.compute.stage_model import weights_digest
from swarm_node.pipeline.footprint import Footprint, free_memory
from swarm_node.pipeline.join_command import JoinCommand
from swarm_node.pipeline.membership.actions import PeerSpec, Spans
from swarm_node.pipeline.recovery.held_stages import HeldStages
from swarm_node.pipeline.recovery.replicas import EVERY, replica_every
from swarm_node.pipeline.recovery.sources import elsewhere, rank_sources, tell
from swarm_node.pipeline.recovery.stage_checkpoints import newest, stage_files
from swarm_node.pipeline.recovery.weight_transfer import WeightTransfer
from swarm_node.pipeline.settings import crew_settings, limits, with_crew_settings
from swarm_node.pipeline.stage_cohort import MOST_S, StageCohort
from swarm_node.pipeline.status_text import StatusText
from swarm_node.pipeline.transport import StageTransport
from swarm_node.policy.adapters import ARCHITECTURE
from swarm_node.policy.extras import check_optimizer
from swarm_node.policy.loading import Plan as Loading
from swarm_node.policy.loading import prepare
from swarm_node.storage.cgroups import free_main_memory
from swarm_node.storage.room import check_room
from swarm_node.storage.run_settings import RunSettings
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.join import JoinedSwarm
from swarm_protocol.crew import Holding, Settings, Source, crew_id, crew_key
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.lineage import NO_RUN

FIRST_LEADER_WAIT_S = 15.0
"""A node with checkpoints of later stages only waits so much longer before it begins the crew: a node with the first
stage should."""
FRESH = 100
"""A copy of a stage that is at most so many updates old is better than what CheckFree makes of its neighbours."""


class CrewParts:
    """The parts of a node in a crew, and which of its weights other peers may have."""

    def __init__(
        self,
        config: NodeConfig,
        entered: JoinedSwarm,
        run: RunDir,
        say: Callable[..., None],
        stack: ExitStack,
        asked: NodeConfig | None = None,
    ) -> None:
        """The crew is left with `stack`. `asked`: what the user asked for, in the fields that are set; by default
        `config`.

        UserError for a policy that cannot be divided so, a stage that does not exist, or files of another model."""
        if not config.pipeline.crew:
            raise UserError("give the crew a name that its other machines are given too, and nobody else: --crew NAME")
        check_optimizer(config.grpo.optimizer, config.pipeline.stages)
        if config.seed is None:
            config = config.model_copy(update={"seed": entered.seed})
        self.own = config  # the configuration as the user of this node wants it
        self.entered = entered
        self.run = run
        self.say = say
        self.transport = entered.transport  # the swarm's
        self.leaving: Callable[[], bool] = lambda: False  # whether this node leaves the crew, or the run is over
        self.run_settings = RunSettings(run, config, asked or config, say)
        self.run_settings.begin(trained=run.exists)  # as soon as there is a stage, its directory is that of a run
        self.loading = prepare(config.policy, alone=False, report=say)  # the kind of policy and how it is loaded
        self.footprint = Footprint(config, self.loading)
        self.spec = spec = self._peer_spec()
        model = self.loading.config
        self.stage_transport = StageTransport(
            self.transport,
            spec,
            partial(limits, width=model.hidden_size, vocabulary=model.vocab_size),
            lambda text: say(self.status_text.named(text)),
        )
        self.status_text = StatusText(self.transport, self.stage_transport, spec.crew, spec.name)
        stack.callback(self.stage_transport.close)
        self.weight_transfer = WeightTransfer(
            self.transport,
            (spec.swarm, spec.architecture),
            self._may_have,
            self._in_crew,
            shelf=self.shelf,
            shelved=self.report,
            room=free_main_memory,
        )
        self.held_stages = HeldStages(
            config, self.loading, self.weight_transfer, run.path / "stages", self.stage_transport.stands, say
        )
        self.held_stages.go_to(spec.run)
        self.held_stages.recall(spec.spans)
        self.report()
        self.cohort = StageCohort(
            config.averaging,
            spec.swarm,
            entered.manifest.averaging_period_s,
            self.held_stages,
            self.transport,
            say,
            most_s=min(MOST_S, config.pipeline.stall_s / 4),
            absent=lambda: self.stage_transport.absent,
        )
        self.join_command = JoinCommand(entered, config)

    @property
    def over(self) -> bool:
        """All rounds of the run are done."""
        return self.stage_transport.progress is not None and self.stage_transport.progress.over

    def count_refusal(self, error: RemoteProtocolError) -> None:
        """A peer sent an invalid message."""
        self.stage_transport.counts[f"refused/{error.reason}"] += 1

    def report(self) -> None:
        """Tell the crew what this node holds."""
        self.stage_transport.report(self.held_stages.holding())

    def shelf(self, peer: str, stage: int) -> Mapping[str, Tensor]:
        """Names and shapes of a stage that a leaving peer wants kept here. RemoteProtocolError if it is refused."""
        plan = self.stage_transport.plan
        if plan is None or stage not in plan.held_by(peer):
            raise RemoteProtocolError("stranger", f"stage {stage} is another's")
        if self.leaving():
            raise RemoteProtocolError("leaving", "the other node leaves as well")
        if stage in self.held_stages.workers:
            raise RemoteProtocolError("stage", f"stage {stage} is here")
        self.held_stages.replicas.asked[stage] = plan.mark
        return self.held_stages.shapes_of(stage, plan.spans)

    def _in_crew(self, peer: str) -> bool:
        plan = self.stage_transport.plan
        return plan is not None and bool(plan.held_by(peer) or peer in plan.spares)

    def _may_have(self, peer: str, stage: int) -> bool:
        """Whether a peer may fetch weights: those of this crew, and with averaging any that holds the same policy."""
        if self._in_crew(peer):
            return True
        card, averages = self.transport.members().get(peer), self.own.averaging.method != "none"
        return bool(averages and card and card.crew and card.crew.architecture == self.spec.architecture)

    def _peer_spec(self) -> PeerSpec:
        """This peer's place in its crew. UserError if its run directory has stages of another model."""
        config, loading, transport = self.own, self.loading, self.transport
        pipeline, swarm, policy = config.pipeline, self.entered.manifest.swarm_id, architecture_of(config, loading)
        folder = self.run.path / "stages"
        files = stage_files(folder)
        ours = [file for file in files if file.architecture == policy]
        usable = [file for file in ours if file.run and len(file.spans) == pipeline.stages]
        if files and not ours:
            raise UserError(f"{folder} has stages of another model, or trained otherwise: choose another --run-dir")
        last = newest(usable)
        kept = {file.stage for file in usable if last is not None and file.counts(last.run)}
        wait_s = FIRST_LEADER_WAIT_S if kept and 0 not in kept else 0.0
        key = crew_key(swarm, pipeline.crew)

        def stage_sources(
            stage: int, spans: Spans, holdings: Mapping[str, Holding], updates: int, settings: Settings
        ) -> Sequence[Source]:
            def others(stage: int) -> dict[str, int]:
                """Peers of other crews that average the same stage, if this crew does -> their updates.

                Those with about as many updates as this crew come first: others may have made theirs up."""
                if config.averaging.method == "none":
                    return {}
                members = {peer: card for peer, card in transport.members().items() if card.cohort}
                found = elsewhere(members, crew_id(key), policy, pipeline.stages, spans[stage], stage)
                return dict(sorted(found.items(), key=lambda one: (abs(one[1] - updates), one[0])))

            usual = 2 * max(EVERY, replica_every(with_crew_settings(config, settings)[0], loading.lora))
            return rank_sources(
                stage, spans, holdings, updates, others=others, plus=settings.swap, usual=usual, fresh=FRESH
            )

        return PeerSpec(
            me=transport.peer_id,
            name=config.name or "node",
            swarm=swarm,
            crew=pipeline.crew,
            key=key,
            architecture=policy,
            settings=crew_settings(config),
            spans=last.spans if last is not None else self.footprint.divide([UNKNOWN] * pipeline.stages),
            run=last.run if last is not None else NO_RUN,
            round=last.round if last is not None else 0,
            sources=stage_sources,
            tell=partial(tell, adapters=loading.lora),
            costs=self.footprint.costs,
            divide=self.footprint.divide,
            wanted=None if pipeline.stage == "auto" else pipeline.stage,
            capacity=round(pipeline.capacity_gb * 2**30) or free_memory(),
            started=time.time() + wait_s,  # of two leaders that begin at once, it gives way
            spare_wait_s=pipeline.spare_wait_s,
            stall_s=pipeline.stall_s,
            absent_s=wait_s,
        )


def architecture_of(config: NodeConfig, loading: Loading) -> str:
    """16 hexadecimal digits, equal for nodes that hold stages of one policy."""
    text = loading.config.get_text_config()
    model = [getattr(text, key, None) for key in (*ARCHITECTURE, "tie_word_embeddings")]
    policy = config.policy
    trained = [policy.lora_rank, policy.lora_alpha, policy.lora_targets] if loading.lora else []
    return architecture(model, weights_digest(loading), trained, str(loading.dtype))


def check_disk_room(config: NodeConfig, run: RunDir, footprint: Footprint, everybody: bool = False) -> None:
    """UserError if the disk has no room for two checkpoints of the stage that this node is to hold.

    The smallest stage counts if it may hold any. `everybody`: all stages, whose processes are on this machine."""
    pipeline = config.pipeline
    each = footprint.checkpoints(footprint.divide([UNKNOWN] * pipeline.stages))
    own = min(each) if pipeline.stage == "auto" else each[pipeline.stage]
    files = run.path / "stages"
    check_room(files, sum(each) if everybody else own, len(stage_files(files)))
