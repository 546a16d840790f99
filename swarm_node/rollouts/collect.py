"""Sample and score the groups of one round.

draw tasks -> prompt -> encode (skip what is too long) -> sample G completions each -> score -> groups
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from swarm_node.config import RolloutsConfig
from swarm_node.policy.policy import Policy
from swarm_node.policy.tokenizing import TokenizerError
from swarm_node.say import Detail, Warned
from swarm_node.tasks.taskset import TaskSet, score_rollouts
from swarm_node.types import Group, Sampling, Task

DRAWS = 20  # times that tasks are drawn anew because some were too long, before the round goes on with fewer

DrawTasks = Callable[[int], list[Task]]


@dataclass
class Collected:
    """The result of a round's sampling."""

    groups: list[Group] = field(default_factory=list)  # those without a learning signal included
    too_long: int = 0  # tasks skipped because their prompt is longer than `max_prompt_tokens` or the model's positions
    skipped: list[int] = field(default_factory=list)  # tokens of the shortest and of the longest prompt among those
    not_encoded: int = 0  # tasks skipped because the tokenizer failed at their prompt
    seconds: float = 0.0  # time spent generating (not scoring)

    @property
    def num_tokens(self) -> int:
        return sum(r.num_tokens for g in self.groups for r in g.rollouts)


def collect(
    policy: Policy,
    draw: DrawTasks,
    tasks: TaskSet,
    config: RolloutsConfig,
    seed: str,
    collected: Collected | None = None,
    first: int = 0,
    longest: int | None = None,
) -> Collected:
    """Sample `config.groups` groups with `policy`: fewer if too many prompts are too long or cannot be encoded.

    `draw(n)` gives n tasks, and `tasks` judges answers to them. `seed` names this round's randomness: the same seed,
    tasks and weights give the same groups. If this is interrupted, a `collected` of the caller's has what is scored.
    `first`: groups that were sampled under this seed before, which the randomness of these goes on from. `longest`:
    tokens at which answers are cut, if not at `config.max_new_tokens`; up to there they are the same.
    """
    collected = Collected() if collected is None else collected
    fitting = _fitting(policy, draw, tasks, config, collected)
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p)
    if longest is not None:
        sampling = replace(sampling, max_new_tokens=longest, drawn=config.max_new_tokens)
    for group in _sample(policy, fitting, config.group_size, sampling, seed, collected, first) if fitting else ():
        try:
            prompt = tasks.prompt_text(group.prompt_ids, policy.text_of_prompt)
        except TokenizerError as error:
            policy.once("prompt", Warned(f"a task whose prompt cannot be decoded is left out: {error}"))
            collected.not_encoded += 1
            continue
        score_rollouts(group.task, prompt, group.rollouts, tasks.score)
        collected.groups.append(group)
    return collected


def fit_length(config: RolloutsConfig, policy: Policy, report: Callable[[str], None]) -> RolloutsConfig:
    """Completions may take at most half of the model's positions, so that prompts have room."""
    most = policy.max_positions // 2
    if config.max_new_tokens <= most:
        return config
    report(Detail(f"rollouts.max_new_tokens {config.max_new_tokens} -> {most}: half of this model's positions"))
    return config.model_copy(update={"max_new_tokens": most})


def too_long(lengths: Sequence[int], config: RolloutsConfig, policy: Policy) -> str:
    """Why prompts of so many tokens each do not fit, and the settings with which they do."""
    if not lengths:
        return "none was drawn"
    shortest, longest = min(lengths), max(lengths)
    room = policy.max_positions - config.max_new_tokens
    told = f"their prompts have {shortest:,} to {longest:,} tokens" if shortest < longest else f"each has {longest:,}"
    wanted = min(longest, room)
    if shortest <= room:
        limit = f"rollouts.max_prompt_tokens = {config.max_prompt_tokens}"
        return f"{told}, and {limit}: --set rollouts.max_prompt_tokens={wanted} lets them in"
    told += f", and the model's {policy.max_positions:,} positions less rollouts.max_new_tokens leave {max(0, room):,}"
    if (new := policy.max_positions - longest) > 0:
        prompt = "" if longest <= config.max_prompt_tokens else f" --set rollouts.max_prompt_tokens={longest}"
        return f"{told}: --set rollouts.max_new_tokens={new}{prompt} makes room, or take a model with more positions"
    return f"{told}: shorten the questions (and policy.system_prompt), or take a model with more positions"


def encode_each(policy: Policy, questions: Sequence[str]) -> list[list[int] | None]:
    """Prompt ids of each question; None where the tokenizer fails, which is reported once."""
    try:
        return [*policy.encode_questions(questions)]
    except TokenizerError as error:
        if len(questions) == 1:
            policy.once("prompt", Warned(f"a task whose prompt cannot be encoded is left out: {error}"))
            return [None]
    return [ids for question in questions for ids in encode_each(policy, [question])]


def _fitting(
    policy: Policy, draw: DrawTasks, tasks: TaskSet, config: RolloutsConfig, collected: Collected
) -> list[tuple[Task, list[int]]]:
    """Tasks of the round with their encoded prompts. Others are drawn for those that do not fit; some may lack."""
    longest = min(config.max_prompt_tokens, policy.max_positions - config.max_new_tokens)
    fitting: list[tuple[Task, list[int]]] = []
    for _ in range(DRAWS):
        drawn = draw(config.groups - len(fitting))
        prompts = encode_each(policy, list(map(tasks.prompt, drawn)))
        encoded = [(task, prompt) for task, prompt in zip(drawn, prompts, strict=True) if prompt is not None]
        fitting += [(task, prompt) for task, prompt in encoded if len(prompt) <= longest]
        lengths = [len(prompt) for _, prompt in encoded if len(prompt) > longest]
        collected.too_long += len(lengths)
        every = [*collected.skipped, *lengths]
        collected.skipped = [min(every), max(every)] if every else []
        collected.not_encoded += len(drawn) - len(encoded)
        if len(fitting) == config.groups or not drawn:
            break
    return fitting


def _sample(
    policy: Policy,
    fitting: list[tuple[Task, list[int]]],
    group_size: int,
    sampling: Sampling,
    seed: str,
    collected: Collected,
    first: int,
) -> list[Group]:
    names = [f"{seed}/{slot}" for slot in range(first, first + len(fitting))]
    seeds = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1 for name in names]  # 63 bits
    start = time.perf_counter()
    samples = policy.generate([prompt for _, prompt in fitting], group_size, sampling, seeds)
    collected.seconds += time.perf_counter() - start
    return [
        Group(task, prompt, rollouts, policy.version) for (task, prompt), rollouts in zip(fitting, samples, strict=True)
    ]
