"""Configuration of a node: every option, its default and its reason; loading, writing, documenting it.

    defaults < TOML file < environment (SWARM_NODE_GRPO__LOSS=gspo) < flags (--seed 3) < --set grpo.loss=gspo

Loads no torch.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from protocol.limits import MAX_ADDRESS_CHARS, MAX_ADDRESSES, MAX_NAME_CHARS, MAX_STAGES
from protocol.transports.gossip_pipe import MAX_CONNECTIONS, MAX_HOST_CHARS
from protocol.transports.settings import endpoint
from swarm_node.errors import UserError


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, a field's docstring is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class PolicyConfig(Section):
    """Which language model this node trains, and where."""

    model: str = "starter"
    """Local path or Hugging Face hub id of a causal language model; `starter` = the tiny one in this
    package."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    lora: bool | None = None
    """Train a LoRA adapter instead of all weights; unset = only above 100 million parameters."""
    lora_rank: PositiveInt = 16
    """Rank of the adapter."""
    lora_alpha: PositiveInt = 32
    """Scale of the adapter (alpha / rank multiplies its output)."""
    lora_targets: str | list[str] = "all-linear"
    """Modules that get an adapter (PEFT's `target_modules`)."""
    device: str = "auto"
    """`auto` = cuda, else mps, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` = bfloat16 on a GPU that has it; on a CPU whichever a two-second measurement finds faster."""
    threads: int = Field(0, ge=0)
    """CPU threads for torch; 0 = one below 2 million parameters (a second gains nothing), else all cores."""
    system_prompt: str = (
        "Solve the problem. You may reason first. Then give only the final answer between <answer> and </answer>."
    )
    """System message for tokenizers whose chat template takes one; empty = none."""
    prompt_template: str = "{question}\n"
    """Prompt for tokenizers without a chat template; `{question}` is replaced."""


class TaskConfig(Section):
    """One source of tasks: either an environment (with its options) or a file."""

    env: str | None = None
    """Environment name from `swarm-node tasks`, for example `gcd`."""
    config: dict[str, object] = {}
    """Options of the environment."""
    file: str | None = None
    """JSONL file with a `question` and an `answer` on each line."""
    weight: PositiveFloat = 1.0
    """How often this source is drawn from, relative to the others."""


class RewardFunction(Section):
    """A reward function of the user's own."""

    path: str
    """`file.py:function` or `package.module:function`, with TRL's signature `f(prompts, completions,
    **columns)`."""
    weight: float = 1.0
    """Its share in the sum."""


class RewardsConfig(Section):
    """How completions are judged."""

    partial: bool = False
    """Give partial credit where the task's checker has it; off = 1 for a fully right answer, else 0 (partial
    credit was exploited in measurement: a short number contained in a long guess earned reward)."""
    checker_weight: float = Field(1.0, ge=0)
    """Weight of the task's own checker beside `functions`; 0 = only the functions count."""
    functions: list[RewardFunction] = []
    """Python reward functions, for this node only."""


class RolloutsConfig(Section):
    """How answers are sampled."""

    groups: PositiveInt = 8
    """Groups sampled in each round."""
    group_size: int = Field(8, ge=2)
    """Completions sampled for each task (G); at least two, since the baseline is the group's own mean."""
    max_new_tokens: PositiveInt = 256
    """Length limit of a completion, in tokens."""
    max_prompt_tokens: PositiveInt = 2048
    """Tasks with longer prompts are skipped and counted."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the smallest set of tokens with this much probability."""
    refill: float = Field(1.0, ge=1)
    """Dynamic sampling: replace groups without a learning signal by sampling up to `refill` x `groups`
    groups; 1 = off."""
    engine: Literal["auto", "native", "transformers"] = "auto"
    """Decode engine: `native` (fast, common architectures), `transformers` (any); `auto` = native where it
    fits."""


MomentDecay = Annotated[float, Field(ge=0, lt=1)]
Outside = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$")]
"""`package.module:function` or `file.py:function`: code of the user's own."""


class GrpoConfig(Section):
    """The update rule. Defaults: DAPO's token mean and clip-higher, no KL term."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] | Outside = "dapo"
    """Objective, or a function of your own, `package.module:function`; see docs/grpo.md."""
    advantage: Literal["group_std", "batch_std", "none", "leave_one_out", "median"] | Outside = "group_std"
    """Baseline and scale: (r-mean)/std of the group | (r-mean)/std of the batch | r-mean | leave-one-out mean
    | median and MAD | a function of your own, `package.module:function`."""
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With several rewards: normalise their sum, or normalise each and then sum (GDPO)."""
    epsilon_low: float | None = Field(None, ge=0)
    """Lower clip range; unset = 0.2 (gspo: 3e-4)."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip range; unset = 0.28 (gspo: 4e-4; cispo: 5.0, where it is the cap on the ratio itself)."""
    delta: float | None = Field(None, gt=0)
    """Two-sided clip: also cap the ratio at this value when the advantage is negative."""
    importance_level: Literal["token", "sequence"] | None = None
    """Ratio and clip of each token, or of each sequence (its geometric mean); unset = token (gspo:
    sequence)."""
    off_policy_mask: float | None = None
    """Leave out sequences with a negative advantage that the policy has moved away from by more than this
    mean log-probability a token (DeepSeek-V3.2); 0.5 is a good start."""
    beta: float = Field(0.0, ge=0)
    """Weight of the k3 KL penalty to the reference policy; 0 = no reference policy is kept."""
    iterations: PositiveInt = 1
    """Optimiser updates on each batch of groups."""
    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss (DAPO's overlong filter)."""
    learning_rate: PositiveFloat | None = None
    """Adam's step size; unset = 2e-4 for full training below 20 million parameters, 2e-6 above, 2e-5 for
    LoRA."""
    betas: tuple[MomentDecay, MomentDecay] = (0.9, 0.95)
    """Adam's moment decay rates."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly."""
    microbatch_tokens: PositiveInt = 8192
    """Tokens (padding included) in one forward pass; halved when memory runs out."""
    packing: bool = True
    """Pack a group into one row that shares the prompt, where the architecture allows."""


class StagesConfig(Section):
    """A policy in stages, on several machines that are one crew."""

    count: int = Field(0, ge=0, le=MAX_STAGES)
    """Stages that the policy is cut into, one for each machine; 0 = this machine holds all of it, as usual."""
    crew: str = Field("", max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9._-]*$")
    """Name that the machines have in common which hold one policy together, and their password: who is in the swarm and
    knows it can take part, so choose one that nobody guesses. `local` needs none."""
    stage: int | Literal["auto"] = "auto"
    """Which stage this machine holds, from 0 (which drives the others); `auto` = one that nobody holds."""
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


class EvalConfig(Section):
    """The held-out table printed before and after a run."""

    questions: int = Field(128, ge=0)
    """Held-out questions, over all tasks; 0 = no table."""
    samples: PositiveInt = 8
    """Samples a question: pass@1 is their mean, pass@k whether any is right."""


class SnapshotsConfig(Section):
    """Resume state."""

    every: PositiveInt = 10
    """Rounds between snapshots."""
    keep: PositiveInt = 2
    """Snapshots kept."""
    to: str = Field("", pattern=r"^([a-z][a-z0-9+]*://\S+)?$")
    """URL of a directory to copy each snapshot to, and to begin from where there is none here: file://, s3://, gs://,
    az:// (docker/spot.md). Empty = nowhere."""


class SharingConfig(Section):
    """Learning from other peers' answers (arXiv 2509.08721)."""

    own: PositiveInt = 4
    """Groups of its own that a node trains on in each round (I)."""
    foreign: int = Field(4, ge=0)
    """Groups of other peers that it trains on in each round (J); 0 = a silo that shares but does not listen."""
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
    reuse: PositiveInt = 1
    """How often one foreign group is trained on."""
    max_age_s: PositiveFloat = 600.0
    """Foreign groups older than this are not used (nor longer than the swarm's own limit)."""
    max_bytes: PositiveInt = 32 * 2**20
    """Memory for foreign groups that wait to be used."""
    peer_share: float = Field(0.25, gt=0, le=1)
    """Largest part of that memory, and of the waiting groups, that one peer's may take."""
    admit: PositiveInt = 16
    """Most foreign groups examined at a time, newest first (but at least `foreign`): half a millisecond each."""
    listen_shards: PositiveInt = 4
    """Gossip shards that a node listens to, its own among them: bytes stay flat however large the swarm."""
    token_ids: bool = False
    """Send token ids and log-probabilities along, for peers with the same tokenizer."""
    record: bool = False
    """Write what was offered, chosen and with which probability to offers.jsonl."""


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
    """Without a snapshot, begin with the weights of a peer of the cohort, if one is there."""

    @model_validator(mode="after")
    def _stable(self) -> AveragingConfig:
        limit = 2 * (1 - self.alpha**2)
        if self.gamma >= limit:
            raise PydanticCustomError(
                "gamma",
                "gamma must be less than 2 (1 - alpha^2) = {limit}: with more, differences between peers grow",
                {"limit": f"{limit:.3g}"},
            )
        return self


def _is_ip(text: str, version: str = "") -> bool:
    """Whether `text` is an IP address, without a zone, of `version` 4 or 6 if given."""
    try:
        return "%" not in text and version in ("", str(ipaddress.ip_address(text).version))
    except ValueError:
        return False


def _is_host(text: str) -> bool:
    """Whether `text` is an IP address or may be a host name."""
    label = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
    name = re.fullmatch(rf"({label}\.)*{label}\.?", text) and not re.fullmatch(r"[0-9.]+", text)
    return len(text) <= MAX_HOST_CHARS and (_is_ip(text) or bool(name))


def _checked_ip(text: str) -> str:
    if not _is_ip(text):
        raise PydanticCustomError("ip", "must be an IP address")
    return text


def _checked_announcement(text: str) -> str:
    """`text` if it is a host, or a multiaddress of a host and a TCP port, perhaps with a peer id."""
    found = endpoint(text) if text.startswith("/") and len(text) <= MAX_ADDRESS_CHARS else None
    if found is None:
        good = _is_host(text)
    else:
        _, kind, host, _, port, *rest = text.split("/")
        fits = _is_ip(host, kind[2:]) if kind in ("ip4", "ip6") else kind in ("dns", "dns4", "dns6") and _is_host(host)
        good = fits and 0 < int(port) < 65536 and (not rest or (len(rest) == 2 and rest[0] == "p2p"))
    if not good:
        raise PydanticCustomError(
            "announce", "must be an IP address, a host name, or a multiaddress such as /ip4/203.0.113.7/tcp/31330"
        )
    return text


def _checked_rate(mbit: float) -> float:
    if 0 < mbit < 1:
        raise PydanticCustomError("rate", "must be 0 (no limit) or 1 and more: below that, peers give up waiting")
    return mbit


Rate = Annotated[float, Field(ge=0), AfterValidator(_checked_rate)]


class NetworkConfig(Section):
    """Where this node listens and what it tells others."""

    listen: Annotated[str, AfterValidator(_checked_ip)] = "0.0.0.0"
    """IP address to listen on; 127.0.0.1 = this machine only."""
    port: int = Field(31330, ge=0, lt=65536)
    """TCP port of the DHT and of streams; the next free one if taken; 0 = any."""
    gossip_port: int = Field(31331, ge=0, lt=65536)
    """TCP port of the gossip process; likewise."""
    announce: list[Annotated[str, AfterValidator(_checked_announcement)]] = Field([], max_length=MAX_ADDRESSES)
    """Public IP addresses or host names that others reach this node under (port forwarding), or whole multiaddresses
    of the DHT port."""
    dial_only: bool = False
    """Never listen: for machines that nobody can reach anyway."""
    bootstrap: list[str] = []
    """Multiaddresses of peers to begin with, besides those of the manifest."""
    relay: bool = True
    """Be reached through relays if nobody can reach this node directly."""
    serve_relay: bool = False
    """Relay streams for peers that cannot be reached directly (`--relay`): others' traffic over this connection."""
    nat_port_map: bool = False
    """Ask the router for a port by UPnP or NAT-PMP."""
    max_connections: int = Field(64, ge=1, le=MAX_CONNECTIONS)
    """Gossip connections kept."""
    max_upload_mbit: Rate = 0.0
    """Most that this node sends, in Mbit/s: half of it for gossip, half for weights and all else; 0 = no limit."""
    max_download_mbit: Rate = 0.0
    """Most that it receives, likewise."""


class SpotConfig(Section):
    """Machines that their cloud takes back at short notice; docker/spot.md."""

    cloud: Literal["auto", "aws", "gcp", "azure", "off"] = "auto"
    """Whose notices to ask for, at the cloud's metadata address on this machine; `auto` = of the cloud that the
    firmware names, if it names one. A notice is as good as a first SIGTERM, with the time it leaves."""
    endpoint: str = Field("", pattern=r"^([A-Za-z0-9.-]+(:[0-9]{1,5})?)?$")
    """HOST:PORT of the metadata service; empty = the cloud's own."""
    uplink_mbit: PositiveFloat = 100.0
    """What this machine can send, in Mbit/s: the start says how much of the state that is in one notice."""


class HealthConfig(Section):
    """Whether this node trains, for those who watch over it: /healthz, and /metrics for Prometheus."""

    port: int = Field(0, ge=0, lt=65536)
    """TCP port; 0 = none."""
    listen: Annotated[str, AfterValidator(_checked_ip)] = "127.0.0.1"
    """IP address to listen on. Nothing is asked of who comes: leave it, unless a firewall is in front."""


def _checked_hours(text: str) -> str:
    moment = "([01][0-9]|2[0-3]):[0-5][0-9]"
    if text and not re.fullmatch(f"{moment}-{moment}", text):
        raise PydanticCustomError("hours", "must be from when to when, as 22:00-07:00")
    return text


class GuestConfig(Section):
    """A good guest on somebody's machine; docs/guest.md. Not for stages, but for `nice`: a crew waits for each."""

    max_cpu: float = Field(100.0, ge=1, le=100)
    """Percent of this machine's CPU cores that the node takes, all its processes together, over some seconds."""
    max_memory_gb: float = Field(0.0, ge=0)
    """Most main memory (GiB) that its processes take together; a node that would take more saves and ends. 0 = no
    limit."""
    nice: int = Field(0, ge=0, le=19)
    """Priority of its processes: 19 = only what nobody else wants."""
    quiet_hours: Annotated[str, AfterValidator(_checked_hours)] = ""
    """Paused between these, local time, for example 22:00-07:00; empty = never."""
    pause_on: list[Literal["battery", "hot", "owner"]] = []
    """Paused while the machine runs on its battery | is hot | is in use (where it tells: docs/guest.md)."""
    hot_c: float = Field(85.0, gt=0)
    """Degrees Celsius of its hottest sensor that are hot."""


DEFAULT_ROUNDS = 200


class NodeConfig(Section):
    """Everything a node can be told."""

    swarm: str | None = None
    """Swarm to join: a manifest file, its https address, or a swarm:// link; `local` ignores it."""
    name: str | None = Field(None, max_length=32, pattern=r"^[A-Za-z0-9._-]+$")
    """This node's name for people, and of its run directory; unset = `local`, or `node` in a swarm."""
    run_dir: str | None = None
    """Where this run lives: config, identity, metrics, snapshots, plots; unset = runs/<name>. Running again resumes
    from it."""
    seed: int | None = Field(None, ge=0)
    """Root of all randomness; unset = 0, or in a swarm derived from the peer id (else all peers would do the same)."""
    pace_s: float = Field(0.0, ge=0)
    """A round takes at least this many seconds: leaves the machine to its owner in between."""
    rounds: PositiveInt | None = None
    """Rounds in total, counted over resumptions; unset = 200, or no limit in a swarm or if `minutes` is given."""
    minutes: PositiveFloat | None = None
    """Stop after this many minutes of training, whatever `rounds` says."""
    tasks: list[str | TaskConfig] = ["small"]
    """Tasks to train on: names, files, or tables with options."""
    log: list[Literal["tensorboard", "wandb"]] = []
    """Sinks besides metrics.jsonl, which is always written."""
    policy: PolicyConfig = PolicyConfig()
    rewards: RewardsConfig = RewardsConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    grpo: GrpoConfig = GrpoConfig()
    sharing: SharingConfig = SharingConfig()
    averaging: AveragingConfig = AveragingConfig()
    stages: StagesConfig = StagesConfig()
    network: NetworkConfig = NetworkConfig()
    eval: EvalConfig = EvalConfig()
    snapshots: SnapshotsConfig = SnapshotsConfig()
    spot: SpotConfig = SpotConfig()
    health: HealthConfig = HealthConfig()
    guest: GuestConfig = GuestConfig()

    @property
    def total_rounds(self) -> float:
        """Rounds after which the run is over; infinity if only `minutes` end it."""
        return self.rounds or (math.inf if self.minutes or self.swarm else DEFAULT_ROUNDS)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run_dir or f"runs/{self.name or ('node' if self.swarm else 'local')}")


# --------------------------------------------------------------------- loading

PREFIX = "SWARM_NODE_"
FLAGS = {
    "model": "policy.model",
    "lora": "policy.lora",
    "stages": "stages.count",
    "crew": "stages.crew",
    "stage": "stages.stage",
    "own": "sharing.own",
    "foreign": "sharing.foreign",
    "record": "sharing.record",
    "listen": "network.listen",
    "announce": "network.announce",
    "port": "network.port",
    "gossip_port": "network.gossip_port",
    "bootstrap": "network.bootstrap",
    "dial_only": "network.dial_only",
    "relay": "network.serve_relay",
    "spot": "spot.cloud",
    "snapshot_to": "snapshots.to",
    "health_port": "health.port",
    "max_cpu": "guest.max_cpu",
    "max_memory": "guest.max_memory_gb",
    "max_upload": "network.max_upload_mbit",
    "max_download": "network.max_download_mbit",
    "nice": "guest.nice",
    "quiet_hours": "guest.quiet_hours",
    "pause_on": "guest.pause_on",
}
"""Flags (and environment variables) whose name is not their key."""
COMMAND_VARIABLES = frozenset(
    PREFIX + name
    for name in "CONFIG SET JSON DRY_RUN SAMPLES QUESTIONS OUT LAYERS HIDDEN STEPS EXPECTED_PEERS LICENCE MAX_AGE_S "
    "GROUPS_PER_MINUTE AVERAGING_PERIOD_S METHOD SCALE HOST FOR".split()
)
"""Environment variables of options that are no keys of the configuration."""


def load_config(
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    sets: Sequence[str] = (),
) -> NodeConfig:
    """The configuration from, in rising precedence, a TOML file, `SWARM_NODE_*` variables among `env`,
    `flags` (flag name to value, `None` = not given) and `section.key=value` texts.

    Raises UserError with one line that names the key, the value and where it came from.
    """
    table: dict[str, Any] = {}
    for source, layer in _layers(file, env or {}, flags or {}, sets):
        try:
            NodeConfig.model_validate(layer)
        except ValidationError as error:
            raise UserError(_explain(error, source)) from None
        table = _merge(table, layer)
    config = NodeConfig.model_validate(table)
    _check_together(config)
    return config


def _check_together(config: NodeConfig) -> None:
    """What no key can say alone."""
    for i, task in enumerate(config.tasks):
        if isinstance(task, TaskConfig) and (task.env is None) == (task.file is None):
            raise UserError(f"tasks[{i}] must have either `env` or `file`")
        if isinstance(task, TaskConfig) and task.file is not None and task.config:
            raise UserError(f"tasks[{i}] must not have `config`, which is for `env`")
    if not config.rewards.checker_weight and not config.rewards.functions:
        raise UserError("rewards.checker_weight = 0 leaves nothing to judge answers: add rewards.functions")
    if config.stages.crew and not config.stages.count:
        raise UserError("a crew needs to know in how many stages it holds its policy: --stages N")
    if config.stages.stage != "auto" and not 0 <= config.stages.stage < config.stages.count:
        raise UserError(
            f"stages.stage = {config.stages.stage}: of {config.stages.count} stages the first is 0; say how many there "
            "are with --stages"
        )
    if "{question}" not in config.policy.prompt_template:
        raise UserError(f"policy.prompt_template = {config.policy.prompt_template!r} lacks {{question}}")


def _layers(
    file: Path | None, env: Mapping[str, str], flags: Mapping[str, object], sets: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(source, partial table) in rising precedence."""
    if file is not None:
        yield str(file), _read_toml(file)
    variables = _variables()
    for name in sorted(name for name in env if name.startswith(PREFIX)):
        if name in variables:
            yield name, _nest(variables[name], _parse(env[name], _keys()[variables[name]]))
        elif name not in COMMAND_VARIABLES:
            hint = _did_you_mean(name, [*variables, *COMMAND_VARIABLES], "__")
            raise UserError(f"unknown environment variable {name}{hint}")
    for text in _split_sets(env.get(PREFIX + "SET", "")):
        yield PREFIX + "SET", _parse_set(text, PREFIX + "SET")
    for name, value in flags.items():
        if value is not None:
            yield "--" + name.replace("_", "-"), _nest(FLAGS.get(name, name), value)
    for text in sets:
        yield "--set", _parse_set(text, "--set")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {file}: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise UserError(f"{file} is not valid TOML: {error}") from None


def _split_sets(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{PREFIX}SET: {error}; write it as on a command line: a.b=1 'c.d=two words'") from None


def _parse_set(text: str, source: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{source} {text}: write section.key=value, for example {source} grpo.loss=gspo")
    field = _keys().get(key)
    return _nest(key, value if field is None else _parse(value, field))


def _variables() -> dict[str, str]:
    """Environment variable -> key."""
    keys = {key.replace(".", "__"): key for key in _keys() if "[]" not in key}
    return {PREFIX + name.upper(): key for name, key in (keys | FLAGS).items()}


def _parse(text: str, field: FieldInfo) -> object:
    """Text from outside a TOML file: a TOML value if it is one and the key is not for text anyway, `a,b` for
    lists, nothing = unset."""
    kinds = [get_origin(kind) or kind for kind in _alternatives(field.annotation)]
    if not text and NoneType in kinds:
        return None
    is_text, is_list = str in kinds or Literal in kinds, list in kinds or tuple in kinds
    if is_text and not text.startswith(("[",) if is_list else ('"', "'")):
        return text
    try:
        document = tomllib.loads(f"value = {text}")
    except ValueError:
        document = {}
    value = document["value"] if document.keys() == {"value"} else text
    if is_list and not isinstance(value, list):
        return [item for part in text.split(",") if (item := part.strip())]
    return value


def _nest(key: str, value: object) -> dict[str, Any]:
    """("a.b", 1) -> {"a": {"b": 1}}."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[return-value]


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Sections key by key; everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _explain(error: ValidationError, source: str) -> str:
    """One line about the most telling of the errors: a wrong name first, then the deepest wrong value."""
    errors = error.errors(include_url=False)
    problem = max(errors, key=lambda e: (e["type"] == "extra_forbidden", len(e["loc"]), e["type"] != "string_type"))
    key = _dotted(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key} in {source}{_did_you_mean(key, _keys(), '.')}"
    if problem["type"] == "missing":
        return f"{key} is missing in {source}"
    message = problem["msg"].replace("Input should be", "must be")
    if problem["type"] in ("model_type", "dict_type"):
        message = "must be a table"
    if problem["type"] == "literal_error" and _is_alternative(problem["loc"][-1]):
        names = re.findall(r"'[^']*'", problem["ctx"]["expected"])
        message = f"must be {', '.join(names)} or package.module:function"
        for match in difflib.get_close_matches(repr(problem["input"]), names, n=1):
            message += f"; did you mean {match}?"
    value, field = problem["input"], _keys().get(key)
    if isinstance(value, dict) and len(value) == 1 and field is not None and dict(_subsections(field)):
        ((name, value),) = value.items()  # all that was given of the section
        key += f".{name}"
    return f"{key} = {shorten(_shown(value), 80)} in {source}: {message}"


def _shown(value: object) -> str:
    """As it may be written in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_shown(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _dotted(location: tuple[int | str, ...]) -> str:
    """("tasks", 0, "TaskConfig", "weight") -> "tasks[0].weight": pydantic puts alternatives of a union in
    between, named after a section or a type such as `str` and `list[str]`."""
    alternatives = {"str", "list[str]", *(kind.__name__ for kind in Section.__subclasses__())}
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part not in alternatives and not _is_alternative(part):
            key += f".{part}" if key else part
    return key


def _is_alternative(part: int | str) -> bool:
    """Whether pydantic put it into a location for a name among several, or for a text with a pattern."""
    return isinstance(part, str) and part.startswith(("literal[", "constrained-str"))


def _did_you_mean(word: str, known: Iterable[str], separator: str) -> str:
    """`; did you mean …?`: the nearest known name, those that end in the same way first."""
    indices = re.findall(r"\[\d+\]", word)
    word = re.sub(r"\[\d+\]", "[]", word)
    last = word.rpartition(separator)[2]
    alike = [name for name in known if name.removeprefix(PREFIX).rpartition(separator)[2] == last.removeprefix(PREFIX)]
    match = difflib.get_close_matches(word, alike or known, n=1, cutoff=0.0 if alike else 0.6)
    if not match:
        return "; `swarm-node config reference` lists all"
    for index in indices:
        match[0] = match[0].replace("[]", index, 1)
    return f"; did you mean {match[0]}?"


# --------------------------------------------------------------------- what there is


def _keys(section: type[Section] | None = None, prefix: str = "") -> dict[str, FieldInfo]:
    """Every key with its field, sections included: `grpo`, `grpo.loss`, `tasks`, `tasks[].env`."""
    keys = {}
    for name, field in (section or NodeConfig).model_fields.items():
        keys[prefix + name] = field
        for suffix, part in _subsections(field):
            keys |= _keys(part, f"{prefix}{name}{suffix}.")
    return keys


def _subsections(field: FieldInfo) -> Iterator[tuple[str, type[Section]]]:
    """The sections that a field holds: ("", S) for `S` itself, ("[]", S) for a list that may hold some."""
    for kind in _alternatives(field.annotation):
        if _is_section(kind):
            yield "", kind
        if get_origin(kind) is list:
            yield from (("[]", item) for item in _alternatives(get_args(kind)[0]) if _is_section(item))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """`A | B` -> (A, B), anything else alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


# --------------------------------------------------------------------- writing


def dump_toml(config: NodeConfig) -> str:
    """The whole configuration as TOML that `load_config` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def config_reference() -> str:
    """A Markdown table of keys, types, defaults and meanings for each section."""
    return "\n".join(_reference(NodeConfig, "", "Top level"))


def _reference(section: type[Section], prefix: str, title: str) -> Iterator[str]:
    yield f"### {title}\n\n{section.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|"
    inner = []
    for name, field in section.model_fields.items():
        parts = [(f"{prefix}{name}{suffix}", part) for suffix, part in _subsections(field)]
        inner += parts
        if (f"{prefix}{name}", field.annotation) not in parts:
            cells = f"`{prefix}{name}`", _type_text(field), _default_text(field), field.description or ""
            yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
    yield ""
    for name, part in inner:
        yield from _reference(part, f"{name}.", f"`{name}`")


def _type_text(field: FieldInfo) -> str:
    bounds = "".join(_bound(item) for item in field.metadata)
    names = [_kind_text(kind) for kind in _alternatives(field.annotation) if kind is not NoneType]
    return " or ".join(names) + bounds


def _kind_text(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _kind_text(get_args(kind)[0]) + "".join(_bound(item) for item in get_args(kind)[1:])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return "list of " + " or ".join(_kind_text(item) for item in _alternatives(get_args(kind)[0]))
    if get_origin(kind) is tuple:
        return f"list of {len(get_args(kind))} {_kind_text(get_args(kind)[0])}s"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(kind, "table")


def _bound(item: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return "".join(f" {sign} {getattr(item, name)}" for name, sign in signs.items() if hasattr(item, name))


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "unset" if field.default is None else f"`{json.dumps(field.default)}`"
