"""Configuration of work with other nodes: pipeline stages, sharing of rollouts, averaging of weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from swarm_node.config.section import NAME_OR_NONE, TOGETHER, Plugin, Section
from swarm_protocol.limits import MAX_NAME_CHARS, MAX_STAGES


class PipelineConfig(Section):
    """A policy that is split into stages, on the machines of one crew."""

    stages: int = Field(0, ge=0, le=MAX_STAGES)
    """Number of pipeline stages that the policy is split into, one per machine. 0 = this machine holds all of it."""
    crew: str = Field("", max_length=MAX_NAME_CHARS, pattern=NAME_OR_NONE)
    """Name of the crew: the machines that train one policy together. It is also their password: any member of the swarm
    who knows it can take part, so choose one that nobody guesses. `local` needs none."""
    stage: int | Literal["auto"] = "auto"
    """Stage that this machine holds, from 0 (which drives the others); `auto` = one that nobody holds."""
    capacity_gb: float = Field(0.0, ge=0)
    """Memory in GiB for stages, also for those taken over from others; 0 = what is free at the start."""
    wire: Literal["bfloat16", "float32", "int8"] = "bfloat16"
    """Number format of activations and their gradients on the network. The first leader of a crew decides for all
    about this key, `replica`, `swap` and some keys of `grpo` and `rollouts` (docs/stages.md)."""
    replica: Literal["auto", "on", "ends", "off"] = "auto"
    """Keep a copy of each stage's weights in a neighbour's memory. `ends` = only of the first and the last stage; a
    lost stage between two others is rebuilt from its neighbours (CheckFree). `auto` = on, unless `swap` is on."""
    replica_every: int = Field(0, ge=0, le=100)
    """Updates between two such copies, each of which sends the weights once, in float32. 0 = 1 for adapters and with
    fewer than four stages, else 20."""
    swap: bool = False
    """Every other microbatch passes the first two and the last two stages in swapped order (CheckFree+). So one of them
    can replace the other. It costs some learning when nothing fails."""
    spare_wait_s: float = Field(10.0, ge=0, le=3600)
    """Seconds that a lost stage waits for a spare machine, before a neighbour takes it over."""
    stall_s: float = Field(60.0, ge=1, le=3600)
    """A stage that others wait for is given up after so many seconds without an answer."""


class SharingConfig(Section):
    """Learning from the answers of other peers (arXiv 2509.08721)."""

    own: PositiveInt = 8
    """Own groups to train on in each round (I); `rollouts.groups`, if that is set to fewer."""
    foreign: int = Field(24, ge=0)
    """Groups of other peers to train on in each round (J). 0 = none; the node still shares its own."""
    fill: bool = True
    """Sample more own groups while there are too few foreign ones, at most `rollouts.groups`."""
    sampler: Literal["uniform"] | Plugin = "uniform"
    """Choice of foreign groups: `uniform` (the paper) | a plugin `package.module:function`; see docs/sharing.md."""
    baseline: Literal["own", "group"] = "own"
    """Baseline of foreign advantages. `own` = this node's own success on that kind of task, if known; `group` = the
    mean of the foreign group, which its sender composed."""
    answers: int = Field(1, ge=0)
    """Train on so many answers of each foreign group: half the best ones, half the worst, ties by chance. 1 = only the
    best one. 0 = all."""
    max_advantage: PositiveFloat = 2.0
    """Limit of a foreign rollout's advantage. One right answer among a stranger's seven wrong ones would earn 2.5."""
    gate: bool = True
    """Leave out others' right answers with text that this policy would hardly write and that the reward does not need.
    Attackers spread such text with right answers (arXiv 2511.09780; docs/sharing.md). Also admit no reference answer,
    and no length, in a larger share than among own groups."""
    reuse: PositiveInt = 1
    """Most uses of one foreign group."""
    max_age_s: PositiveFloat = 600.0
    """Foreign groups older than this many seconds are not used. The swarm's own limit holds as well."""
    max_bytes: PositiveInt = 32 * 2**20
    """Memory in bytes for foreign groups that wait."""
    peer_share: float = Field(0.25, gt=0, le=1)
    """Most that one peer's groups may take of that memory, and of the number of waiting groups."""
    admit: PositiveInt = 24
    """Most foreign groups examined at a time, newest first, but at least `foreign`. One takes half a millisecond if
    answers are short. This work gets at most a tenth of the time; the rest waits."""
    listen_shards: PositiveInt = 4
    """Gossip shards that a node listens to, its own included. So traffic does not grow with the swarm."""
    token_ids: bool = False
    """Send token ids and log-probabilities along, for peers with the same tokenizer."""
    record: bool = False
    """Write which foreign groups were offered and chosen, with their probabilities, to offers.jsonl."""
    declare: bool = True
    """Tell members, on this node's card, how many of its latest answers are right by kind of task, its held-out
    pass@1 since it began to train, how many groups of which peers it trained on, its software's version and since when
    it runs. Nobody checks it, so it is marked as self-declared wherever it is shown."""
    give_model: bool = True
    """Give the model that the swarm's manifest names, which is public there, to members who lack it; never others."""


class AveragingConfig(Section):
    """Averaging of weights with peers of the same cohort: equal names and shapes of trained weights, equal start."""

    method: Literal["none", "noloco", "diloco", "per_step"] = "noloco"
    """none | noloco (pairs, arXiv 2506.10911) | diloco (the whole cohort every `every` updates, arXiv 2311.08105) |
    per_step (the whole cohort after each round: the baseline that costs most)."""
    every: PositiveInt = 5
    """Least number of own updates between two exchanges of the same weights (H); the papers have 50 and 500. Pairs meet
    in outer rounds of the swarm's `averaging_period_s` seconds, because updates are few in RL."""
    fragments: int = Field(1, ge=1, le=64)
    """Number of parts in which weights are exchanged, one after the other. Peak traffic falls accordingly."""
    codec: Literal["float32", "8bit", "4bit"] = "8bit"
    """Encoding of weights on the network: 32, 8.4 or 4.4 bits per value."""
    overlap: bool = True
    """Train on during an exchange; otherwise wait for it, at most `timeout_s`."""
    mixing: float = Field(0.0, ge=0, lt=1)
    """Part of the difference to the averaged weights that a node keeps (1 - alpha of streaming DiLoCo)."""
    timeout_s: PositiveFloat = 60.0
    """An exchange that takes longer than this many seconds is given up; nothing of it is applied."""
    alpha: float = Field(0.0, ge=0, lt=1)
    """NoLoCo: momentum of the slow weights. 0 with beta = gamma = 1 is the plain mean of the two. The paper has 0.5,
    0.7, 0.7 and 50 updates or more between exchanges (docs/averaging.md compares them)."""
    beta: PositiveFloat = 1.0
    """NoLoCo: step along the pair's mean progress."""
    gamma: PositiveFloat = 1.0
    """NoLoCo: pull together; stable for 0 < gamma < 2 (1 - alpha^2). If it equals beta, half as much is sent."""
    outer_learning_rate: PositiveFloat = 0.7
    """DiLoCo: step of the outer optimiser (SGD with Nesterov momentum)."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """DiLoCo: its momentum."""
    reducer: Literal["mean"] | Plugin = "mean"
    """Rule that combines weights: `mean` | a plugin `package.module:function`; see docs/averaging.md."""
    clip: float = Field(1.5, ge=0)
    """Clip a partner's difference to this many times the median of those accepted lately; 0 = never."""
    gates: bool = True
    """Refuse a partner whose weights fail several tests: of size, direction and signs."""
    probe: bool = True
    """Refuse averaged weights that make this node's own best answers much less likely, and partners that make them a
    little less likely again and again. For that one of 16 own groups with unequal rewards, and every second one of the
    first 16, is neither shared nor trained on."""
    late_join: bool = True
    """Start with the weights of a peer of the cohort, if there is one and no own checkpoint. They are tried first: a
    node samples the answers of its last round again with them."""

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
