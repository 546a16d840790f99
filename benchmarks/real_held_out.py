"""Held-out shares of saved adapters, ours and TRL's, measured alike: a process of its own for each run.

Each adapter is loaded into this package's policy in float32. It is asked the same held-out questions in the system
prompt that it was trained with, at temperature 1 with the same seeds, and `benchmarks.real_judge` judges the answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.real_judge import right
from swarm_node.runtime.waiting import PASSIVE

ANSWERS_AT_ONCE = 128
TIMEOUT_S = 7200


@dataclass(frozen=True)
class Asked:
    """How a policy is asked."""

    file: str  # of questions, of which those are asked that runs hold out
    questions: int  # at most
    samples: int  # answers to each at looks while a run trains
    thorough: int  # answers to each at its start and end
    new: int  # most tokens of an answer


@dataclass(frozen=True)
class Look:
    """What held-out questions say about one adapter."""

    seconds: float  # of the run until then
    right: float  # share of the answers
    finished: float  # share of the answers that ended by themselves
    answers: int


def measure(policy: Mapping[str, Any], asked: Asked, adapters: Sequence[tuple[float, str]]) -> list[Look]:
    """The adapters in their order, after the policy without one. `policy` has keys of `PolicyConfig`; an adapter is
    (seconds of the run, its safetensors file). Runs in a process of its own."""
    spec = {"policy": dict(policy), "asked": asdict(asked), "adapters": list(adapters)}
    command = [sys.executable, "-m", "benchmarks.real_held_out", json.dumps(spec)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | PASSIVE
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"measuring failed:\n{done.stderr[-3000:]}")
    return [Look(**each) for each in json.loads(done.stdout.strip().splitlines()[-1])]


def as_ours(name: str) -> str:
    """The name that a tensor of PEFT's file has in a policy; a policy's own name stays."""
    parts = name.split(".")
    if parts[-2] in ("lora_A", "lora_B"):
        parts.insert(-1, "default")
    return ".".join(parts)


def child(spec: dict[str, Any]) -> list[Look]:
    from safetensors.torch import load_file

    from swarm_node.config import PolicyConfig, RewardsConfig, RolloutsConfig
    from swarm_node.grpo.memory import fit_sampling, hardware_of
    from swarm_node.policy.loading import load_policy
    from swarm_node.tasks.taskset import load_tasks

    asked = Asked(**spec["asked"])
    tasks = load_tasks([asked.file], RewardsConfig()).held_out(asked.questions)
    settings = PolicyConfig(**spec["policy"] | {"dtype": "float32"})
    policy = load_policy(settings, RolloutsConfig(), lambda text: print(text, file=sys.stderr))
    fit_sampling(policy, hardware_of(policy.device), RolloutsConfig(max_new_tokens=asked.new), asked.thorough)
    looks = [look(policy, tasks, asked, 0.0, asked.thorough)]
    for seconds, file in spec["adapters"]:
        state = {as_ours(name): tensor for name, tensor in load_file(file).items()}
        policy.load_trainable_state(state)
        policy.version += 1
        samples = asked.thorough if file == spec["adapters"][-1][1] else asked.samples
        looks.append(look(policy, tasks, asked, seconds, samples))
    return looks


def look(policy: Any, tasks: Sequence[Any], asked: Asked, seconds: float, samples: int) -> Look:
    """Ask the policy as it is now."""
    from swarm_node.types import Sampling

    prompts = policy.encode_questions([task.question for task in tasks])
    groups, at_once = [], max(1, ANSWERS_AT_ONCE // samples)
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        groups += policy.generate(part, samples, Sampling(asked.new), list(range(start, start + len(part))))
    answers = [(task.answer, each) for task, group in zip(tasks, groups, strict=True) for each in group]
    found = fmean(right(reference, each.text) for reference, each in answers)
    finished = fmean(each.finished for _, each in answers)
    return Look(round(seconds, 1), round(found, 4), round(finished, 4), len(answers))


if __name__ == "__main__":
    print("\n" + json.dumps([asdict(each) for each in child(json.loads(sys.argv[1]))]))
