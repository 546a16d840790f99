"""What a node does together with others: stages, sharing of rollouts, averaging of weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from protocol.limits import MAX_NAME_CHARS, MAX_STAGES
from swarm_node.config.section import NAME_OR_NONE, TOGETHER, Outside, Section


class PipelineConfig(Section):
    """A policy in stages, on several machines that are one crew."""

    stages: int = Field(0, ge=0, le=MAX_STAGES)
    """Number of pipeline stages that the policy is split into, one per machine. 0 = this machine holds all of it."""
    crew: str = Field("", max_length=MAX_NAME_CHARS, pattern=NAME_OR_NONE)
    """Name of the crew: the machines that train one policy together. It is also their password: any member of the swarm
    who knows it can take part, so choose one that nobody guesses. `local` needs none."""
    stage: int | Literal["auto"] = "auto"
    """Stage that this machine holds, from 0 (which drives the others); `auto` = one that nobody holds."""
    capacity_gb: float = Field(0.0, ge=0)
    """Memory that this machine gives to stages; 0 = what is free when it starts. Bounds what it takes on for others."""
    wire: Literal["bfloat16", "float32", "int8"] = "bfloat16"
    """How activations and their gradients travel. In this, in `replica`, in `swap` and in some of `grpo` and `rollouts`
    all go by what the first lead was told (docs/stages.md)."""
    replica: Literal["auto", "on", "ends", "off"] = "auto"
    """Each stage's weights are kept in memory by a neighbour as well. `ends` = those of the first and the last only; a
    lost stage between two others is made of these (CheckFree). `auto` = on, unless `swap` is."""
    replica_every: int = Field(0, ge=0, le=100)
    """Updates from one such copy to the next, for each of which the weights travel once, in float32. 0 = 1 for adapters
    and with fewer than four stages, else 20."""
    swap: bool = False
    """Every other microbatch goes through the first two and the last two stages in swapped order, so that either can
    stand in for the other (CheckFree+). It costs some learning where nothing fails."""
    spare_wait_s: float = Field(10.0, ge=0, le=3600)
    """How long a lost stage waits for a machine without one, before a neighbour takes it on."""
    stall_s: float = Field(60.0, ge=1, le=3600)
    """A stage that answers nothing for so long, while others wait for it, is given up."""


class SharingConfig(Section):
    """Learning from other peers' answers (arXiv 2509.08721)."""

    own: PositiveInt = 4
    """Own groups to train on in each round (I)."""
    foreign: int = Field(4, ge=0)
    """Groups of other peers to train on in each round (J). 0 = a silo, which shares but uses nothing of others."""
    fill: bool = True
    """Sample more groups of its own while too few foreign ones are there (4 alone learn worse than 8)."""
    sampler: Literal["uniform"] | Outside = "uniform"
    """Which foreign groups: `uniform` (the paper) | a function of your own, `package.module:function`; see
    docs/sharing.md."""
    baseline: Literal["own", "group"] = "own"
    """Foreign advantages are taken against this node's own success on that kind of task, where known, or against the
    foreign group's mean (which its sender composed)."""
    max_advantage: PositiveFloat = 2.0
    """Bound on a foreign rollout's advantage: one right answer that a stranger puts among seven wrong ones would
    otherwise earn 2.5."""
    gate: bool = True
    """Leave out right answers of others that hold text which this policy would hardly write and which their reward does
    not ask for: a payload that liars spread with right answers (arXiv 2511.09780); see docs/sharing.md."""
    reuse: PositiveInt = 1
    """How often one foreign group is trained on."""
    max_age_s: PositiveFloat = 600.0
    """Foreign groups older than this are not used (nor longer than the swarm's own limit)."""
    max_bytes: PositiveInt = 32 * 2**20
    """Memory for foreign groups that wait to be used."""
    peer_share: float = Field(0.25, gt=0, le=1)
    """Largest part of that memory, and of the waiting groups, that one peer's may take."""
    admit: PositiveInt = 16
    """Most foreign groups examined at a time, newest first (but at least `foreign`): half a millisecond each where
    answers are short. Examining them takes at most a tenth of the time; the rest waits."""
    listen_shards: PositiveInt = 4
    """Gossip shards that a node listens to, its own among them: bytes stay flat however large the swarm."""
    token_ids: bool = False
    """Send token ids and log-probabilities along, for peers with the same tokenizer."""
    record: bool = False
    """Write which foreign groups were offered and chosen, with their probabilities, to offers.jsonl."""
    give_model: bool = True
    """Give the model that the swarm's manifest names, if it is here, to members who lack it: its files are public to
    the swarm already, and somebody has to. Other models are never given."""


class AveragingConfig(Section):
    """Averaging of weights with peers of the same cohort: equal names and shapes of what is trained, equal start."""

    method: Literal["none", "noloco", "diloco", "per_step"] = "none"
    """none | noloco (pairs, arXiv 2506.10911) | diloco (the whole cohort every `every` updates, arXiv 2311.08105) |
    per_step (the whole cohort after each update: the baseline that costs most)."""
    every: PositiveInt = 5
    """Own updates between two exchanges of the same weights, at least (H). Pairs meet in outer rounds of the swarm's
    `averaging_period_s`: updates are few in RL, so time is what counts. The papers have 50 and 500."""
    fragments: int = Field(1, ge=1, le=64)
    """Weights are exchanged in so many parts, one after the other: peak traffic falls accordingly."""
    codec: Literal["float32", "8bit", "4bit"] = "8bit"
    """How weights travel: 32, 8.4 or 4.4 bits a value."""
    error_feedback: bool = False
    """Group methods: add what the codec lost to what is sent next (in pairs nothing is lost for good)."""
    overlap: bool = True
    """Go on training while an exchange is under way; otherwise wait for it, no longer than `timeout_s`."""
    mixing: float = Field(0.0, ge=0, lt=1)
    """Part of the difference to the averaged weights that a node keeps to itself (streaming DiLoCo's 1 - alpha)."""
    timeout_s: PositiveFloat = 60.0
    """An exchange that takes longer is given up: nothing of it is applied."""
    alpha: float = Field(0.0, ge=0, lt=1)
    """NoLoCo: momentum of the slow weights. 0 with beta = gamma = 1 is the plain mean of the two; the paper has 0.5,
    0.7, 0.7 and 50 updates or more between exchanges (docs/averaging.md compares them)."""
    beta: PositiveFloat = 1.0
    """NoLoCo: step along the pair's mean progress."""
    gamma: PositiveFloat = 1.0
    """NoLoCo: pull together; stable for 0 < gamma < 2 (1 - alpha^2). Where it equals beta, half as much is sent."""
    outer_learning_rate: PositiveFloat = 0.7
    """DiLoCo: step of the outer optimiser (SGD with Nesterov momentum)."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """DiLoCo: its momentum."""
    reducer: Literal["mean"] | Outside = "mean"
    """What averaging is: `mean` | a function of your own, `package.module:function`; see docs/averaging.md."""
    clip: float = Field(1.5, ge=0)
    """A partner's difference is clipped to so many times the median of those accepted lately; 0 = never."""
    gates: bool = True
    """Refuse a partner whose weights fail several of: size, direction, signs."""
    probe: bool = True
    """Refuse averaged weights under which this node's own best answers are much less likely."""
    late_join: bool = True
    """Without a checkpoint, begin with the weights of a peer of the cohort, if one is there."""

    @model_validator(mode="after")
    def _stable(self) -> AveragingConfig:
        limit = 2 * (1 - self.alpha**2)
        if self.gamma >= limit:
            raise PydanticCustomError(
                TOGETHER,
                "gamma must be less than 2 (1 - alpha^2) = {limit}: with more, differences between peers grow",
                {"limit": f"{limit:.3g}"},
            )
        return self
