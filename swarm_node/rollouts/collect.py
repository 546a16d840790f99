"""Sample and score the groups of one round.

draw tasks -> prompt -> encode (skip what is too long) -> G dialogues each -> score -> groups

All dialogues of a round go on together: their first answers are sampled, then the second answers of those that are not
over, and so on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from swarm_node.config import RolloutsConfig
from swarm_node.policy.policy import Policy
from swarm_node.policy.tokenizing import TokenizerError
from swarm_node.say import Detail, Warned
from swarm_node.tasks.dialogue import Dialogue
from swarm_node.tasks.taskset import TaskSet
from swarm_node.types import Group, Rollout, Sampling, Task

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
    begun: list[tuple[Task, list[int], str, list[Dialogue]]] = []
    for task, prompt_ids in fitting:
        try:
            prompt = tasks.prompt_text(prompt_ids, policy.text_of_prompt)
        except TokenizerError as error:
            policy.once("prompt", Warned(f"a task whose prompt cannot be decoded is left out: {error}"))
            collected.not_encoded += 1
            continue
        between = partial(_after_answer, policy)
        dialogues = [tasks.dialogue(task, prompt, prompt_ids, between) for _ in range(config.group_size)]
        begun.append((task, prompt_ids, prompt, dialogues))
    if begun:
        _converse([dialogues for *_, dialogues in begun], policy, sampling, seed, collected, first)
    for task, prompt_ids, prompt, dialogues in begun:
        collected.groups.append(Group(task, prompt_ids, tasks.judged(dialogues, prompt), policy.version))
    return collected


def _after_answer(policy: Policy, text: str, ended: bool) -> list[int] | None:
    """`Policy.after_answer`; None where the tokenizer fails, which is reported once."""
    try:
        return policy.after_answer(text, ended)
    except TokenizerError as error:
        policy.once("prompt", Warned(f"a dialogue ends early, since what comes next cannot be encoded: {error}"))
        return None


def fit_length(config: RolloutsConfig, policy: Policy, report: Callable[[str], None], turns: int = 1) -> RolloutsConfig:
    """An answer may take at most half of the model's positions, so that prompts have room; in dialogues of several
    `turns`, less."""
    most = policy.max_positions // (turns + 1)
    if config.max_new_tokens <= most:
        return config
    share = "half" if turns == 1 else f"a share, for {turns} turns,"
    report(Detail(f"rollouts.max_new_tokens {config.max_new_tokens} -> {most}: {share} of this model's positions"))
    return config.model_copy(update={"max_new_tokens": most})


def too_long(lengths: Sequence[int], config: RolloutsConfig, policy: Policy, turns: int = 1) -> str:
    """Why prompts of so many tokens each do not fit, and the settings with which they do."""
    if not lengths:
        return "none was drawn"
    shortest, longest = min(lengths), max(lengths)
    room = policy.max_positions - turns * config.max_new_tokens
    told = f"their prompts have {shortest:,} to {longest:,} tokens" if shortest < longest else f"each has {longest:,}"
    wanted = min(longest, room)
    if shortest <= room:
        limit = f"rollouts.max_prompt_tokens = {config.max_prompt_tokens}"
        return f"{told}, and {limit}: --set rollouts.max_prompt_tokens={wanted} lets them in"
    answers = "" if turns == 1 else f"{turns} times "
    told += f", and the model's {policy.max_positions:,} positions less {answers}rollouts.max_new_tokens leave "
    told += f"{max(0, room):,}"
    if (new := (policy.max_positions - longest) // turns) > 0:
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
    longest = min(config.max_prompt_tokens, policy.max_positions - tasks.turns * config.max_new_tokens)
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


def _converse(
    groups: Sequence[Sequence[Dialogue]],
    policy: Policy,
    sampling: Sampling,
    seed: str,
    collected: Collected,
    first: int,
) -> None:
    """Sample answers until all dialogues are over. Group number i is sampled with the seed number `first` + i."""
    names = [f"{seed}/{slot}" for slot in range(first, first + len(groups))]
    begin = [group[0].prompt_ids for group in groups]
    for group, answers in zip(groups, _sampled(policy, begin, len(groups[0]), sampling, names, collected), strict=True):
        for dialogue, rollout in zip(group, answers, strict=True):
            dialogue.answer(rollout.turns[0])
    named = [(f"{name}/{i}", d) for name, group in zip(names, groups, strict=True) for i, d in enumerate(group)]
    turn, room = 1, policy.max_positions - sampling.max_new_tokens
    while going := [(f"{name}/{turn}", d, asked) for name, d in named if (asked := d.ask()) is not None]:
        for _, dialogue, asked in going:
            if len(asked) > room:
                dialogue.cut()
        going = [each for each in going if not each[1].over]
        next_answers = _sampled(policy, [ids for *_, ids in going], 1, sampling, [n for n, *_ in going], collected)
        for (_, dialogue, _), (rollout,) in zip(going, next_answers, strict=True):
            dialogue.answer(rollout.turns[0])
        turn += 1


def _sampled(
    policy: Policy, prompts: list[list[int]], n: int, sampling: Sampling, names: Sequence[str], collected: Collected
) -> list[list[Rollout]]:
    """`n` answers to each prompt, whose randomness its name decides."""
    if not prompts:
        return []
    seeds = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1 for name in names]  # 63 bits
    start = time.perf_counter()
    answers = policy.generate(prompts, n, sampling, seeds)
    collected.seconds += time.perf_counter() - start
    return answers
