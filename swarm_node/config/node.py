"""All sections together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from swarm_node.config.machine import (
    CheckpointsConfig,
    HealthConfig,
    MetricsConfig,
    ResourcesConfig,
    SpotConfig,
)
from swarm_node.config.network import NetworkConfig
from swarm_node.config.section import NAME_PATTERN, Section
from swarm_node.config.swarm import AveragingConfig, PipelineConfig, SharingConfig
from swarm_node.config.training import EvalConfig, GrpoConfig, PolicyConfig, RewardsConfig, RolloutsConfig, TaskConfig
from swarm_protocol.limits import MAX_NAME_CHARS

DEFAULT_ROUNDS = 200


class NodeConfig(Section):
    """Everything a node can be told."""

    swarm: str | None = None
    """Manifest file of the swarm, its https address, or a swarm:// link; unset = the run's swarm. Not for `local`."""
    name: str | None = Field(None, max_length=MAX_NAME_CHARS, pattern=NAME_PATTERN)
    """Name of this node, which others see. It also names the run directory; unset = `local`, or `node` in a swarm."""
    run_dir: str | None = None
    """Directory of the run; starting there again resumes it. It holds all that the run keeps; unset = runs/<name>."""
    seed: int | None = Field(None, ge=0)
    """Seed of all randomness. Unset = 0, or in a swarm derived from the peer id (else all peers would do the same)."""
    pace_s: float = Field(0.0, ge=0)
    """A round takes at least this many seconds. Between rounds the machine is free for its owner."""
    rounds: PositiveInt | None = None
    """Rounds in total, resumptions included; unset = 200, or no limit in a swarm or if `minutes` is given."""
    minutes: PositiveFloat | None = None
    """Stop after this many minutes of training, whatever `rounds` says. Waiting for a swarm's manifest counts."""
    tasks: list[str | TaskConfig] = ["small"]
    """Tasks to train on: names (see `swarm-node tasks`), question files (.jsonl, .csv, …), data sets of the
    hub (hf:OWNER/NAME), or tables such as {file="questions.jsonl", question="prompt"}."""
    price_per_hour: PositiveFloat | None = None
    """Price of this machine per hour, in any currency, for the metrics of cost. These are `cost/*`; unset = none."""
    log: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where to send each round's metrics besides metrics.jsonl. That file is always written."""
    log_format: Literal["text", "json"] = "text"
    """Form of the lines that a node shows: `text`, or `json` = one JSON object a line, for log collectors. Lines of
    `text` have time and level, except on a terminal."""
    policy: PolicyConfig = PolicyConfig()
    rewards: RewardsConfig = RewardsConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    grpo: GrpoConfig = GrpoConfig()
    sharing: SharingConfig = SharingConfig()
    averaging: AveragingConfig = AveragingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    network: NetworkConfig = NetworkConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    spot: SpotConfig = SpotConfig()
    health: HealthConfig = HealthConfig()
    resources: ResourcesConfig = ResourcesConfig()

    @property
    def total_rounds(self) -> float:
        """Rounds after which the run is over; infinity if only `minutes` end it."""
        return self.rounds or (math.inf if self.minutes or self.swarm else DEFAULT_ROUNDS)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run_dir or f"runs/{self.name or ('node' if self.swarm else 'local')}")
