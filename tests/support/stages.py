"""Stages of about equal size, as a crew of machines of unknown capacity has them."""

from __future__ import annotations

from collections.abc import Callable

from swarm_node.config import PolicyConfig
from swarm_node.pipeline.compute.partition import UNKNOWN, Span, partition
from swarm_node.pipeline.compute.stage_model import Stage, load_stage
from swarm_node.pipeline.footprint import Sizes
from swarm_node.pipeline.membership.actions import Spans
from swarm_node.policy.loading import Plan, prepare, skeleton


def equal_spans(loading: Plan, count: int) -> Spans:
    sizes = Sizes.among(dict(skeleton(loading.config).named_parameters()), loading.config)
    return partition(sizes.layers, sizes.embed, sizes.head, [UNKNOWN] * count)


def load_part(config: PolicyConfig, index: int, count: int, report: Callable[[str], None] = lambda line: None) -> Stage:
    """Stage `index` of `count`."""
    return load_stage(config, Span.of(index, equal_spans(prepare(config, alone=False), count)), report)
