"""Pipeline settings: the options of a crew's first leader, which its plans tell all peers.

    config of the first leader -> Settings (in each plan) -> config of all other peers, sizes of possible messages

Everything else is up to each peer, or to the present leader: tasks, loss, learning rate, clipping, memory, minutes.
"""

from __future__ import annotations

import json
from typing import Any

from swarm_node.config import NodeConfig
from swarm_node.pipeline.messages import LEADER, Limits
from swarm_protocol.crew import Plan, Settings

MOST_TOKENS = 2**24  # largest count of tokens that `swarm_protocol.crew` allows
MAX_ROWS = 2**14  # most samples that are drawn at a time


def crew_settings(config: NodeConfig) -> Settings:
    """The settings of a crew whose first leader is this node."""
    pipeline, rollouts, grpo = config.pipeline, config.rollouts, config.grpo
    longest = rollouts.max_prompt_tokens + rollouts.group_size * rollouts.max_new_tokens
    return Settings(
        wire=pipeline.wire,
        swap=pipeline.swap,
        replica=pipeline.replica,
        replica_every=pipeline.replica_every,
        reference=bool(grpo.beta),
        prompt=min(rollouts.max_prompt_tokens, MOST_TOKENS),
        length=min(rollouts.max_new_tokens, MOST_TOKENS),
        microbatch=min(max(grpo.microbatch_tokens, longest), MOST_TOKENS),
        decay=grpo.weight_decay,
        betas=grpo.betas,
        rounds=config.rounds or 0,
    )


def with_crew_settings(config: NodeConfig, settings: Settings) -> tuple[NodeConfig, list[str]]:
    """`config` with the crew's `settings`, and a description of each option that they change."""
    group = max(2, (settings.microbatch - settings.prompt) // settings.length)
    theirs: dict[str, dict[str, Any]] = {
        "pipeline": {name: getattr(settings, name) for name in ("wire", "swap", "replica", "replica_every")},
        "rollouts": {
            "max_prompt_tokens": settings.prompt,
            "max_new_tokens": settings.length,
            "group_size": min(config.rollouts.group_size, group),  # a packed group is one microbatch at least
        },
        "grpo": {
            "weight_decay": settings.decay,
            "betas": settings.betas,
            "microbatch_tokens": min(config.grpo.microbatch_tokens, settings.microbatch),
            "beta": config.grpo.beta if settings.reference else 0.0,  # no stage has kept a reference
        },
    }
    sections, changed = {}, []
    for section, options in theirs.items():
        mine = getattr(config, section)
        for name, value in options.items():
            if getattr(mine, name) != value:
                changed.append(f"{section}.{name} = {json.dumps(value)} (here {json.dumps(getattr(mine, name))})")
        sections[section] = mine.model_copy(update=options)
    if (config.rounds or 0) != settings.rounds:
        changed.append(f"rounds = {settings.rounds or 'without end'} (here {config.rounds or 'without end'})")
    return config.model_copy(update={**sections, "rounds": settings.rounds or None}), changed


def limits(plan: Plan, me: str, sender: str, width: int, vocabulary: int) -> Limits:
    """What the peer `sender` may send to `me` by this plan. `width`: of a hidden state."""
    settings = plan.settings
    return Limits(
        plan=plan.mark,
        stages=len(plan.assignments),
        here=frozenset({*plan.held_by(me), *([LEADER] if plan.lead == me else [])}),
        sender=frozenset(plan.held_by(sender)),
        width=width,
        vocabulary=vocabulary,
        tokens=2 * settings.microbatch,
        rows=MAX_ROWS,
        prompt=settings.prompt,
        length=settings.length,
    )
