"""Four equal members with a real model, alone or in a swarm: the parts `arms` and `steps` of `benchmarks.real_swarm`.

    alone              four silos, 8 groups a round, one update
    alone:often        the same with as many updates of a round as a member makes that uses all groups it may
    sharing            8 own groups and the best answers of up to 24 groups of others
    averaging:WAY      8 own groups; adapters are averaged in pairs, as WAY of `benchmarks.real_swarm_ways` says
    both:WAY           both

Whole nodes in one process, on one thread, over the network in memory and a virtual clock, as in `benchmarks.sharing`,
whose parts these are. Everything else is as a node has it by default, but for what `DEFAULTS` and `Play` set. The four
have one copy of the frozen base. CPU seconds are those of the process, divided by four; questions that are asked to
measure are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import real_judge, sharing
from benchmarks.real_held_out import Asked, look
from benchmarks.real_sets import NEW_TOKENS, path_of
from benchmarks.real_swarm_ways import WAYS, Way, take_shapes, train_only
from benchmarks.sharing_arms import Arm, Measured
from benchmarks.sharing_settings import Setting
from swarm_node.config import NodeConfig, RewardsConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.rollouts.answer_length import with_answer_length
from swarm_node.runtime.simulation import START, Speed
from swarm_node.tasks.taskset import load_tasks

ALONE, SHARING, AVERAGING, BOTH = "alone", "sharing", "averaging", "both"
OFTEN = "alone:often"
FOREIGN = 24  # most groups of others that a member trains on in a round
RATE = 2e-4
DEFAULTS: dict[str, dict[str, Any]] = {
    "policy": {"lora": True, "dtype": "float32", "threads": 1},
    "rollouts": {"groups": 8, "max_prompt_tokens": RolloutsConfig().max_prompt_tokens},
    "grpo": {"answers": 0, "schedule": "constant"},
}
"""What a member chooses for an adapter on these weights, by section, so that no run chooses anything else. A node alone
would let its rate fall until its end; these are compared before theirs."""
SPEED = Speed(generate_tok_s=150.0, train_tok_s=400.0, overhead_s=0.1)
"""Of SmolLM2 on one core, tokens of prompts included in the second. By it the virtual clock runs, and so the seconds
between two averagings."""
PERIOD_S = 10.0  # `swarm-node new` has it so; an adapter of 4.9 million values takes five times as long
ROWS_AT_ONCE = 64  # answers that are sampled at a time: a round's, and the memory for them
Row = dict[str, Any]


@dataclass(frozen=True)
class Play:
    """How long, and how it is measured."""

    peers: int = 4
    rounds: int = 20
    every: int = 5  # rounds between two looks at held-out questions
    questions: int = 64  # of a look, held out
    samples: int = 2  # answers to each at looks
    thorough: int = 4  # answers to each at the start and the end


def arm_of(name: str, peers: int) -> Arm:
    """The arm of that name, as `benchmarks.sharing` takes it."""
    kind, _, way = name.partition(":")
    averages = way in WAYS
    sets = {**DEFAULTS, "averaging": {"reducer": WAYS[way].reducer} if averages else {"method": "none"}}
    if name == OFTEN:
        own = DEFAULTS["rollouts"]["groups"]
        sets["grpo"] = DEFAULTS["grpo"] | {"batch_groups": own * own // (own + FOREIGN)}
    return Arm(
        says=name,
        foreign=FOREIGN if kind in (SHARING, BOTH) else 0,
        silo=kind == ALONE,
        node=Member if averages else Measured,
        peers=peers,
        sets=sets,
    )


def answer_length(set_name: str, model: str) -> int:
    """The longest answer, in tokens, as a node works it out for a policy and its questions."""
    table = {**DEFAULTS, "tasks": [str(path_of(set_name))], "policy": {**DEFAULTS["policy"], "model": model}}
    config = NodeConfig.model_validate(table)
    loaded = load_policy(config.policy, config.rollouts, lambda text: None)
    tasks = load_tasks(config.tasks, config.rewards)
    return with_answer_length(config, loaded, tasks, lambda text: None).rollouts.max_new_tokens


def setting_of(set_name: str, model: str, length: int) -> Setting:
    tasks = [str(path_of(set_name))]
    return Setting(
        says=set_name,
        tasks=lambda peer: tasks,
        start=lambda seed, peer: Path(model),
        learning_rate=RATE,
        held_out=tasks,
        period_s=PERIOD_S,
        max_new_tokens=length,
    )


class Member(Measured):
    """A node that trains the factors that its way of averaging says."""

    way: Way

    def learn(self, *args: Any) -> dict[str, float]:
        assert self.averager is not None
        train_only(self.policy.model, self.way, self.averager.counts["exchanges"])
        return super().learn(*args)


def one_base(policies: Sequence[Policy]) -> None:
    """Let all policies have the frozen weights of the first one."""
    first = dict(policies[0].model.named_parameters())
    for policy in policies[1:]:
        for name, parameter in policy.model.named_parameters():
            if not parameter.requires_grad:
                assert torch.equal(parameter, first[name])
                parameter.data = first[name].data


def run(
    model: str, set_name: str, name: str, seed: int, play: Play, say: Callable[[str], None] = lambda text: None
) -> Row:
    """The figures of one arm and seed."""
    began, new = time.monotonic(), NEW_TOKENS[set_name]
    asked = Asked(path_of(set_name).name, play.questions, play.samples, play.thorough, new)
    setting, arm = setting_of(set_name, model, answer_length(set_name, model)), arm_of(name, play.peers)
    simulation = sharing.simulate(setting, arm, seed, play.peers, speed=SPEED)
    nodes: list[Measured] = [peer.node for peer in simulation.peers]  # type: ignore[misc]
    start = nodes[0].policy.fingerprint
    one_base([node.policy for node in nodes])
    prepare(nodes, WAYS.get(name.partition(":")[2]))
    tasks = load_tasks([str(path_of(set_name))], RewardsConfig()).held_out(play.questions)

    def seen(node: Measured, samples: int) -> dict[str, float]:
        found = asdict(look(node.policy, tasks, asked, 0.0, samples))
        say(f"{name}, seed {seed}, round {node.round} of {play.rounds}: {found['right']:.3f} right")
        return found

    before = seen(nodes[0], play.thorough)
    for node in nodes:
        node.look_every = play.every
        node.look = lambda node=node: seen(node, play.samples)  # type: ignore[misc]
    cpu_s = sharing.timed(nodes, lambda: simulation.run(play.rounds))
    return {
        "peers": play.peers,
        "rounds": play.rounds,
        "start": start,
        "before": before,
        "looks": [[found | {"seconds": round(at / play.peers, 1)} for at, found in node.looks] for node in nodes],
        "ends": [seen(node, play.thorough) for node in nodes],
        "rewards": [[round(end.reward, 4) for end in node.curve] for node in nodes],
        "curve": sharing.curve([node.curve for node in nodes]),
        "cpu_s": round(cpu_s / play.peers, 1),
        "cpu": {part: round(sum(node.cpu[part] for node in nodes) / play.peers, 1) for part in dict(nodes[0].cpu)},
        "swarm": sharing.swarm(simulation.peers),
        "averaging": averagings(nodes),
        "virtual_s": round(simulation.clock.now() - START, 1),
        "asked": asdict(asked) | {"temperature": 1.0},
        "judge": real_judge.NAME,
        "settings": arm.sets | {"rate": RATE, "period_s": PERIOD_S, "speed": asdict(SPEED)},
        "max_new_tokens": setting.max_new_tokens,
        "seconds": round(time.monotonic() - began, 1),
    }


def prepare(nodes: Sequence[Measured], way: Way | None) -> None:
    """Bound what is sampled at a time, and tell members their way of averaging."""
    for node in nodes:
        node.policy.prompts_at_once = lambda prompt, n, new: max(1, ROWS_AT_ONCE // n)
        if way is not None:
            assert isinstance(node, Member)
            node.way = way
    take_shapes(nodes[0].policy.trainable_state())


def averagings(nodes: Sequence[Measured]) -> dict[str, float]:
    """Exchanges, bytes sent and skipped exchanges by reason of a member, in the mean; empty without averaging."""
    counted = [node.averager.counts for node in nodes if node.averager is not None]
    names = sorted({name for counts in counted for name in counts})
    return {name: round(sum(counts[name] for counts in counted) / len(counted), 2) for name in names}
