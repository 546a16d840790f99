"""Configuration of checkpoints, metrics, spot machines, health checks and resource limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from swarm_node.config.network import checked_ip
from swarm_node.config.section import HOST_NAME, HOST_OR_NONE, HOURS_OR_NONE, URL_OR_NONE, Section


class CheckpointsConfig(Section):
    """Checkpoints, from which a run resumes."""

    every: PositiveInt = 10
    """Rounds between checkpoints."""
    every_minutes: PositiveFloat = 1.0
    """Also save a checkpoint after a round that ends this many minutes after the last one; not for a crew's stages."""
    keep: PositiveInt = 2
    """Number of checkpoints kept; one more for each stage of a crew."""
    to: str = Field("", pattern=URL_OR_NONE)
    """Copy each checkpoint to this directory (file://, s3://, gs:// or az://), and start from it if there is none here.
    The bucket or folder must exist (docker/spot.md). Empty = no copies."""


class MetricsConfig(Section):
    """Metrics files of a run."""

    keep: Literal["thinned", "all"] = "thinned"
    """Lines of metrics.jsonl. `thinned` = one line for each of the newest 2,048 rounds, while older rounds share lines;
    so the file stays below about 15 MB. `all` = one line for each round, without limit (docs/dashboard.md)."""
    samples_every: int = Field(10, ge=0)
    """Rounds between two records in samples.jsonl, which has questions with their answers for people to look at; 0 =
    none. The first round has one as well. The file stays below about 8 MB (docs/dashboard.md)."""
    samples_groups: PositiveInt = 3
    """Groups recorded each time, if the round has them. First one with right and wrong answers, one of another member
    that was trained on, and one that nothing solved."""


class SpotConfig(Section):
    """Spot machines, which their cloud takes back at short notice; docker/spot.md."""

    cloud: Literal["auto", "aws", "gcp", "azure", "off"] = "auto"
    """Which cloud's preemption notices to listen for; `auto` = the cloud that the firmware names. They are read from
    the cloud's metadata address on this machine. A notice acts like a first SIGTERM, with the time that it leaves."""
    endpoint: str = Field("", pattern=HOST_OR_NONE)
    """HOST:PORT of the metadata service; empty = the cloud's own."""
    uplink_mbit: PositiveFloat = 100.0
    """Upload speed of this machine, in Mbit/s. The start reports how much of the state can be sent after a notice."""


class HealthConfig(Section):
    """Health of this node for monitoring: /livez, /healthz, and /metrics for Prometheus."""

    port: int = Field(0, ge=0, lt=65536)
    """TCP port of /livez, /healthz and, for Prometheus, /metrics; 0 = none."""
    listen: Annotated[str, AfterValidator(checked_ip)] = "127.0.0.1"
    """IP address to listen on. There is no authentication: keep the default, unless a firewall protects the port."""
    hosts: list[Annotated[str, Field(pattern=HOST_NAME)]] = []
    """Host names, such as node1.lan, that requests may use. IP addresses and localhost need no entry. Other names are
    refused, so that no web page can read the figures through its own name. * = any name."""


def _checked_hours(text: str) -> str:
    begin, _, end = text.partition("-")
    if text and begin == end:
        raise PydanticCustomError(
            "hours", "must end at another time than they begin; to pause always, use `swarm-node pause`"
        )
    return text


class ResourcesConfig(Section):
    """Limits on what the node takes of its machine (docs/resources.md). With --stages only `nice` is allowed."""

    preset: Literal["gentle", "normal", "all"] | None = None
    """Limits that hold where no key of this section says otherwise: `gentle` = lowest priority (nice 19), half of the
    cores, pause on battery; `normal` = lower priority (nice 10); `all` = no limit. Unset = `all`, or for `join` on a
    machine with a battery or a graphical session `gentle`."""
    max_cpu: float = Field(100.0, ge=1, le=100)
    """Most CPU, in percent of the cores that the node may use (a container's quota counts). All its processes count
    together, over some seconds."""
    max_memory_gb: float = Field(0.0, ge=0)
    """Most main memory in GiB, for all processes together; 0 = no limit. A node that would take more saves and ends."""
    nice: int = Field(0, ge=0, le=19)
    """Niceness of the processes; 19 = lowest priority."""
    quiet_hours: Annotated[str, Field(pattern=HOURS_OR_NONE), AfterValidator(_checked_hours)] = ""
    """Pause between these times, local time, for example 22:00-07:00; empty = never."""
    pause_on: list[Literal["battery", "hot", "owner"]] = []
    """Pause while the machine runs on battery, is hot, or is used by its owner. docs/resources.md says more."""
    hot_c: float = Field(85.0, gt=0)
    """Temperature of the hottest sensor, in degrees Celsius, from which the machine counts as hot."""

    def in_force(self) -> ResourcesConfig:
        """These limits, with those of the preset where no key was set."""
        of_preset = PRESETS[self.preset or "all"]
        return self.model_copy(update={k: v for k, v in of_preset.items() if k not in self.model_fields_set})


PRESETS: dict[str, dict[str, object]] = {
    "gentle": {"nice": 19, "max_cpu": 50.0, "pause_on": ["battery"]},
    "normal": {"nice": 10},
    "all": {},
}
"""Preset -> keys of `resources` and their values."""
