"""GRPO steps of this package and of TRL, timed alike: `swarm-node bench` and the benchmarks compare with them.

    questions -> sample -> rewards 0, 1, 0, 1 … in each group -> update

Every group has a signal, so neither skips anything, and judging answers takes no time. Steps of the warm-up are not
counted.

`python -m swarm_node.cli.commands.bench_arms SPEC` does the steps of one arm in a process of its own, so that the peak
of its memory is its own, and prints an `Arm` as JSON on the last line. Both arms then have the same model, questions,
dtype, kind of adapter, number of threads and malloc, and every answer runs to its full length.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from swarm_node.cli.commands.bench import Arm, Spec, StepWork
from swarm_node.config import GrpoConfig, NodeConfig, PolicyConfig, RewardsConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.grpo.memory import Fitting, fit_sampling, hardware_of
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy.adapters import lora_config
from swarm_node.policy.chat_template import tokenizer_frame
from swarm_node.policy.dtypes import name_of
from swarm_node.policy.engines.base import Engine
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.loading import load_base, load_policy, load_tokenizer, prepare
from swarm_node.policy.oom import is_out_of_memory
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import SMALL
from swarm_node.rollouts import collect
from swarm_node.tasks.base import Environment, Messages
from swarm_node.tasks.dialogue import Between, Dialogue
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Rollout, Sampling, Task

TASKS = ["small"]  # whose questions are asked
PROMPTS = 8  # of a step, if their number is not given
PROMPTS_OF_LARGE = 1  # of models above SMALL parameters on a CPU, where a step takes minutes otherwise


@dataclass
class Times:
    """What was measured of each step after the warm-up."""

    step: list[float] = field(default_factory=list)  # seconds of the whole step
    sampling: list[float] = field(default_factory=list)  # seconds of it in sampling; empty if that is not known
    tokens: list[int] = field(default_factory=list)  # tokens of its answers


def goes_on(done: int, seconds: float, work: StepWork, now: float) -> bool:
    """Whether another step is due after `done` of them, the last of which took `seconds`. One after the warm-up always
    is."""
    if done <= work.warmup:
        return True
    return done < work.warmup + work.steps and now + seconds <= work.until


def rewards(n: int) -> list[float]:
    """0, 1, 0, 1, …"""
    return [float(i % 2) for i in range(n)]


def config_of(work: StepWork) -> NodeConfig:
    """The settings of our steps, which train on all answers, as TRL does."""
    rollouts = RolloutsConfig(groups=work.prompts, group_size=work.group_size, max_new_tokens=work.new)
    return NodeConfig(rollouts=rollouts, grpo=GrpoConfig(learning_rate=work.learning_rate, answers=0))


class _Asks(Environment):
    """Asks a question, and takes any answer."""

    def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": task.question}]

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        return messages, None, True


class _InTurn:
    """In place of a `TaskSet`: the answers to a question earn `rewards`."""

    turns = 1

    def prompt(self, task: Task) -> str:
        return task.question

    def prompt_text(self, token_ids: list[int], decode: object) -> str:
        return ""

    def dialogue(self, task: Task, prompt: str, prompt_ids: list[int], between: Between) -> Dialogue:
        return Dialogue(task, _Asks(), prompt_ids, between, False, lambda task, error: None)

    def judged(self, dialogues: Sequence[Dialogue], prompt: str) -> list[Rollout]:
        rollouts = [dialogue.rollout for dialogue in dialogues]
        for rollout, reward in zip(rollouts, rewards(len(rollouts)), strict=True):
            rollout.rewards, rollout.reward = {"turn": reward}, reward
        return rollouts


def our_steps(
    policy: Policy,
    tasks: Sequence[Task],
    work: StepWork,
    clock: Callable[[], float] = time.perf_counter,
    fit: bool = False,
) -> Times:
    """Steps of this package on `tasks`, `work.prompts` of them in each step. `fit`: they fit into free memory, as those
    of a run do. UserError if they cannot, or if a question does not fit the model."""
    config = config_of(work)
    rollouts = config.rollouts
    trainer = Trainer(policy, config.grpo, Sampling(work.new), lambda sentence: print(sentence, file=sys.stderr))
    if fit:
        config = config.model_copy(update={"policy": policy.config})
        prompts = [policy.encode(task.question) for task in tasks[: work.prompts]]
        Fitting(trainer, prompts, config, hardware_of(policy.device)).fit()

    judge: Any = _InTurn()
    times, done, seconds = Times(), 0, 0.0
    while goes_on(done, seconds, work, time.monotonic()):
        part = list(tasks[done * work.prompts : (done + 1) * work.prompts])
        start = clock()
        collected = collect(policy, lambda n, part=part: part[:n], judge, rollouts, str(done))  # type: ignore[misc]
        if len(collected.groups) < work.prompts:
            raise UserError("a question is too long for this model: choose another one (--model)")
        trainer.step(collected.groups)
        _synchronise()
        seconds = clock() - start
        if done >= work.warmup:
            times.step.append(seconds)
            times.sampling.append(collected.seconds)
            times.tokens.append(collected.num_tokens)
        done += 1
    return times


def trl_steps(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    work: StepWork,
    lora: Any = None,
    clock: Callable[[], float] = time.perf_counter,
    **settings: Any,
) -> Times:
    """Steps of TRL's GRPOTrainer as its users set it up, on `prompts` as they are. `lora` is a LoraConfig for a model
    without an adapter; `settings` are of GRPOConfig."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer.padding_side, tokenizer.chat_template = "left", None
    ends: list[float] = []
    sampling: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: object, state: object, control: Any, **kwargs: object) -> None:
            _synchronise()
            ends.append(clock())
            seconds = ends[-1] - ends[-2] if len(ends) > 1 else 0.0
            control.should_training_stop |= not goes_on(len(ends), seconds, work, time.monotonic())

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = clock()
            made = super()._generate(*args, **kwargs)
            sampling.append(clock() - start)
            return made

    def reward(completions: list[str], completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return rewards(len(completions))

    with tempfile.TemporaryDirectory() as folder:
        usual = {
            "per_device_train_batch_size": work.prompts * work.group_size,
            "num_generations": work.group_size,
            "max_completion_length": work.new,
            "learning_rate": work.learning_rate,
            "beta": 0.0,
            "loss_type": "dapo",
            "max_steps": work.warmup + work.steps,
            "logging_steps": 1000,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": model.device.type == "cpu",
            "bf16": False,
            "temperature": 1.0,
            "top_k": 0,
            "gradient_checkpointing": False,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
            "shuffle_dataset": False,
            "seed": work.seed,
        }
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(output_dir=folder, **(usual | settings)),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[Clock()],
        )
        trainer.train()
    first = work.warmup
    steps = [b - a for a, b in zip(ends[first - 1 :], ends[first:], strict=False)]
    known = len(sampling) == len(ends)
    return Times(steps, sampling[first:] if known else [], tokens[first : len(ends)])


def peak_bytes() -> int:
    """The most memory that this process has had: what torch reserved of a GPU if it uses one, else of the machine.

    Linux counts it for the program; what other systems tell may be that of the process that started this one.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    status = Path("/proc/self/status")
    if status.exists():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), "")
        if line:
            return int(line.split()[1]) * 2**10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 2**10


def _synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# --------------------------------------------------------------------- one arm in a process of its own


def measure_arm(spec: Spec) -> Arm:
    """The steps of one arm. UserError if the model or its questions do not allow them."""
    config = PolicyConfig(**spec.policy)
    return (_measure_trl if spec.side == "trl" else _measure_ours)(spec, config)


def _measure_ours(spec: Spec, config: PolicyConfig) -> Arm:
    steps = config_of(spec.work)
    rollouts = steps.rollouts

    def fit(policy: Policy) -> None:
        fit_sampling(policy, hardware_of(policy.device), rollouts, rollouts.group_size)

    report = partial(print, file=sys.stderr)
    policy = load_policy(config, rollouts, report, fit=fit, of_round=lambda policy: steps)
    if spec.work.new > policy.max_positions // 2:
        raise UserError(f"--length {spec.work.new}: this model takes at most {policy.max_positions // 2}")
    work = _with_prompts(spec.work, policy.device, policy.num_parameters())
    policy.engine = endless_engine(policy)
    times = our_steps(policy, _tasks(work), work, fit=True)
    engine = type(policy.engine).__name__.removesuffix("Engine").lower()
    arm = _arm(times, work, engine, policy.device, policy.dtype, policy.num_parameters(), policy.is_lora)
    return msgspec.structs.replace(arm, checkpointing=policy.checkpointing is not None)


def endless_engine(policy: Policy) -> Engine:
    """The policy's engine with no token that ends an answer."""
    engine: Any = policy.engine
    never = policy.model, [policy.vocabulary], policy.pad_id
    if isinstance(engine, TransformersEngine):
        return TransformersEngine(*never, padded=engine.padded, cached=engine.cached)
    return type(engine)(*never)


def _measure_trl(spec: Spec, config: PolicyConfig) -> Arm:
    from importlib.metadata import version

    plan = prepare(config)
    work = _with_prompts(spec.work, plan.device, plan.size)
    model = load_base(plan)[0].to(plan.device)
    tokenizer = load_tokenizer(config)
    prompts = [_prompt(tokenizer, config, task.question) for task in _tasks(work)]
    lora = lora_config(config) if plan.lora else None
    settings: dict[str, Any] = {
        "generation_kwargs": {"min_new_tokens": work.new},  # no token ends an answer before its full length
        "gradient_checkpointing": spec.checkpointing,
    }
    times = trl_steps(model, tokenizer, prompts, work, lora, **settings)
    return _arm(times, work, f"TRL {version('trl')}", plan.device, plan.dtype, plan.size, plan.lora)


def _with_prompts(work: StepWork, device: torch.device, parameters: int) -> StepWork:
    usual = PROMPTS_OF_LARGE if device.type == "cpu" and parameters > SMALL else PROMPTS
    return msgspec.structs.replace(work, prompts=work.prompts or usual)


def _tasks(work: StepWork) -> list[Task]:
    """Questions for all steps, the same ones for each arm."""
    count = work.prompts * (work.warmup + work.steps)
    return load_tasks(TASKS, RewardsConfig()).sample(random.Random(work.seed), count)


def _prompt(tokenizer: Any, config: PolicyConfig, question: str) -> str:
    """The text that a policy with this tokenizer is asked."""
    if tokenizer.chat_template:
        return tokenizer_frame(tokenizer, config).around(question)
    return config.prompt_template.replace("{question}", question)


def _arm(
    times: Times, work: StepWork, engine: str, device: torch.device, dtype: torch.dtype, parameters: int, lora: bool
) -> Arm:
    is_gpu = device.type == "cuda"
    return Arm(
        engine=engine,
        device=torch.cuda.get_device_name(device) if is_gpu else device.type,
        device_bytes=torch.cuda.get_device_properties(device).total_memory if is_gpu else 0,
        threads=torch.get_num_threads(),
        dtype=name_of(dtype),
        parameters=parameters,
        lora=lora,
        prompts=work.prompts,
        step_s=times.step,
        sampling_s=times.sampling,
        tokens=times.tokens,
        peak_bytes=peak_bytes(),
    )


def main(text: str) -> None:
    """Measure the arm of a `Spec` in JSON; prints an `Arm`, or {"failed": reason}."""
    found: Any
    try:
        found = measure_arm(msgspec.json.decode(text, type=Spec))
    except UserError as error:
        found = {"failed": str(error), "refused": True}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        found = {"failed": "out of memory"}
    print("\n" + msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
