"""Every name of what can be set: `section.key`, flag, environment variable."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from swarm_node.config.node import NodeConfig
from swarm_node.config.section import Section

PREFIX = "SWARM_NODE_"

FLAGS = {
    "model": "policy.model",
    "lora": "policy.lora",
    "stages": "pipeline.stages",
    "crew": "pipeline.crew",
    "stage": "pipeline.stage",
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
    "checkpoint_to": "checkpoints.to",
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
    "GROUPS_PER_MINUTE MAX_ANSWER_TOKENS AVERAGING_PERIOD_S METHOD SCALE COHORT WITHOUT TIMEOUT HOST DASHBOARD_PORT "
    "FOR".split()
)
"""Environment variables of options that are no keys of the configuration."""


def all_keys(section: type[Section] | None = None, prefix: str = "") -> dict[str, FieldInfo]:
    """Every key with its field, sections included: `grpo`, `grpo.loss`, `tasks`, `tasks[].env`."""
    keys = {}
    for name, field in (section or NodeConfig).model_fields.items():
        keys[prefix + name] = field
        for suffix, part in subsections(field):
            keys |= all_keys(part, f"{prefix}{name}{suffix}.")
    return keys


def all_variables() -> dict[str, str]:
    """Environment variable -> key."""
    keys = {key.replace(".", "__"): key for key in all_keys() if "[]" not in key}
    return {PREFIX + name.upper(): key for name, key in (keys | FLAGS).items()}


def subsections(field: FieldInfo) -> Iterator[tuple[str, type[Section]]]:
    """The sections that a field holds: ("", S) for `S` itself, ("[]", S) for a list that may hold some."""
    for kind in alternatives(field.annotation):
        if _is_section(kind):
            yield "", kind
        if get_origin(kind) is list:
            yield from (("[]", item) for item in alternatives(get_args(kind)[0]) if _is_section(item))


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """`A | B` -> (A, B), anything else alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
