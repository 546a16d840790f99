"""How long answers may be where nobody says so: as long as the answers of this policy to these questions are.

    max_new_tokens = the least of 32, 64, 128 at which a third of its answers end, else 256

A round's time grows with it, also that of answers which ramble on behind their result. A policy that reasons needs more
than one that does not, and no rule by its size or by the kind of its questions tells which one it is.
"""

from __future__ import annotations

import random

from swarm_node.config import NodeConfig
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import SMALL
from swarm_node.rollouts.collect import encode_each
from swarm_node.say import Say
from swarm_node.tasks.taskset import TaskSet
from swarm_node.types import Sampling

LENGTHS = (32, 64, 128)  # tokens that are tried, in order
ENDED = 1 / 3  # share of answers that must end
QUESTIONS, SAMPLES = 8, 4


def with_answer_length(config: NodeConfig, policy: Policy, tasks: TaskSet, say: Say) -> NodeConfig:
    """`config` with the length limit of answers for `policy`, which is then set, if nobody has set it and sampling
    counts, which it does from `SMALL` parameters on. Gives `config` itself otherwise."""
    rollouts = config.rollouts
    if "max_new_tokens" in rollouts.model_fields_set or policy.num_parameters() < SMALL:
        return config
    asked = tasks.sample(random.Random("answer length"), QUESTIONS)
    room = min(rollouts.max_prompt_tokens, policy.max_positions - LENGTHS[-1])
    encoded = encode_each(policy, [tasks.prompt(task) for task in asked])
    prompts = [prompt for prompt in encoded if prompt is not None and len(prompt) <= room]
    if not prompts:  # the first round will say why
        return config
    say(f"trying how long answers to {len(prompts)} questions are; rollouts.max_new_tokens would set it")
    for length in (each for each in LENGTHS if each < rollouts.max_new_tokens):
        sampling = Sampling(length, rollouts.temperature, rollouts.top_p)
        groups = policy.generate(prompts, SAMPLES, sampling, [*range(len(prompts))])
        ended = sum(answer.finished for group in groups for answer in group) / (SAMPLES * len(prompts))
        if ended >= ENDED:
            say(f"answers may take {length} tokens: {ended:.0%} of them end before (rollouts.max_new_tokens)")
            break
    else:
        length = rollouts.max_new_tokens
        few = f"less than a third of those tried end within {LENGTHS[-1]}"
        say(f"answers may take {length} tokens: {few} (rollouts.max_new_tokens)")
    return config.model_copy(update={"rollouts": rollouts.model_copy(update={"max_new_tokens": length})})
