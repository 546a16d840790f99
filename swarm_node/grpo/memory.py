"""What a round takes, and how it is made to fit into the memory that is free.

    measure activations -> tokens of a microbatch that fit -> fewer than a group has?
                             on a CPU, map large tensors one by one; still fewer? checkpoint gradients
                        -> questions sampled at a time

A CPU maps the large tensors of all but small models in any case: the gaps of a heap would take as much again as they
do, and differ from run to run.

Limits are chosen once, at the start of a run, and only ever lower what is configured: with ample memory a run makes the
same numbers as without any of this. A run of which not even one answer fits is refused with the setting that fits.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil
import torch

from swarm_node.config import NodeConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.grpo import batch
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy.activations import measured, row
from swarm_node.policy.architecture import model_of
from swarm_node.policy.checkpointing import Checkpointing
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.engines.products import Layout, layout_of, packed_layout
from swarm_node.policy.fitting import Hardware, Training, sentence_of_refusal
from swarm_node.policy.loading import Plan
from swarm_node.policy.oom import free_on_gpu, is_out_of_memory
from swarm_node.policy.packed import held_bytes, is_packed, values_of
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import (
    RUNTIME_BYTES,
    SMALL,
    Activations,
    Shape,
    Work,
    copied_bytes,
    copying_bytes,
    lasting_bytes,
    round_bytes,
    sampling_bytes,
)
from swarm_node.say import Detail
from swarm_node.storage.cgroups import free_main_memory

MOST_AT_ONCE = 2**16  # questions that are sampled at a time


@dataclass(frozen=True)
class Estimate:
    """Memory of a round in which every completion runs to its limit."""

    bytes: int
    gpu: bool = False
    asks: bool = False  # whether held-out questions are counted

    def __str__(self) -> str:
        where = "GPU memory" if self.gpu else "memory, the program itself included"
        what = "rounds and held-out questions need" if self.asks else "a round needs"
        return f"{what} at most about {self.bytes / 2**30:.2f} GiB of {where}; most take less"


def hardware_of(device: torch.device, most: int = 0) -> Hardware:
    """The memory of a device that is free or that this process has already. `most` is its limit of main memory."""
    if device.type == "cuda":
        return Hardware("cuda", free_on_gpu(device) + torch.cuda.memory_allocated(device))
    free, mine = free_main_memory() or psutil.virtual_memory().available, psutil.Process().memory_info()
    available = free and free + mine.rss - getattr(mine, "shared", 0)  # pages of files count as free already
    return Hardware(device.type, available, most)


def training_of(config: NodeConfig, plan: Plan) -> Training:
    """How the model that is about to be loaded will be trained."""
    model = model_of(config.policy.model, plan.size, plan.config)
    return Training(model, config, plan.lora, plan.dtype.itemsize)


def check_plan(config: NodeConfig, plan: Plan) -> None:
    """Raise UserError, before weights are fetched or loaded, if not even one answer fits."""
    machine, training = hardware_of(plan.device), training_of(config, plan)
    if machine.available and training.least_bytes(machine.gpu) > machine.available:
        raise UserError(sentence_of_refusal(training, machine))


def shape_of(policy: Policy) -> Shape:
    """What the memory of a round with this policy depends on."""
    rank, width = policy.config.lora_rank if policy.is_lora else 0, policy.dtype.itemsize
    packed = [p for p in policy.model.parameters() if is_packed(p)]
    return replace(
        model_of("", 0, policy.base.config).shape(rank, width),
        parameters=policy.num_parameters(),
        trained=policy.num_parameters(trainable=True),
        saved=sum(map(values_of, packed)) * width - held_bytes(packed),
    )


def _kept(policy: Policy, shape: Shape) -> Activations:
    try:
        return measured(policy)
    except Exception as exc:  # hundreds of architectures, each with errors of its own
        if is_out_of_memory(exc):
            raise
        policy.report(
            Detail(f"memory of updates is estimated, since it cannot be measured here ({type(exc).__name__})")
        )
        return shape.activations


def copy_of(policy: Policy, shape: Shape) -> int:
    """Bytes of the copy of the weights that a policy samples from."""
    copies = isinstance(policy.engine, NativeEngine) and policy.engine.layout.name != "own"
    return shape.weights + shape.saved if copies else 0


def sampled_tokens(policy: Policy, prompt: int, n: int, new: int) -> int:
    """Tokens whose keys and values are held while `n` answers to a question are sampled."""
    return n * new + prompt * (1 if isinstance(policy.engine, NativeEngine) else n)


def prefilled_tokens(policy: Policy, prompt: int, n: int) -> int:
    """Tokens of a question's prompt that are computed at once before `n` answers are sampled."""
    return prompt * (1 if isinstance(policy.engine, NativeEngine) else n)


def bytes_of_sampling(policy: Policy, shape: Shape, questions: int, prompt: int, n: int, new: int) -> int:
    """Bytes of sampling `n` answers of at most `new` tokens to each of so many questions with prompts of `prompt`
    tokens, beside weights and their copy."""
    tokens, first = sampled_tokens(policy, prompt, n, new), prefilled_tokens(policy, prompt, n)
    native, gpu = isinstance(policy.engine, NativeEngine), policy.device.type == "cuda"
    return sampling_bytes(shape, questions * n, questions * tokens, questions * first, native, gpu)


def questions_at_once(policy: Policy, shape: Shape, room: float, prompt: int, n: int, new: int) -> int:
    """Questions with prompts of so many tokens of which `n` answers of at most `new` tokens can be sampled at a time in
    `room` bytes; at least one."""

    def bytes(questions: int) -> int:
        return bytes_of_sampling(policy, shape, questions, prompt, n, new)

    return max(1, bisect_right(range(1, MOST_AT_ONCE + 1), room, key=bytes))


def choose_layout(policy: Policy, fits: Callable[[], bool], beside: str, report: Callable[[str], None]) -> None:
    """Have the native engine sample from a copy of the weights, if that is faster and there is room for it; what was
    chosen before does not count. `fits` is asked when the engine has the layout of the copy; `beside` says what else
    takes memory."""
    engine, own = policy.engine, layout_of(policy.base)
    if not isinstance(engine, NativeEngine) or own.name != "own" or policy.device.type == "cuda":
        return
    engine.layout = packed_layout(policy.base)
    if engine.layout.name != "own" and not fits():
        engine.layout = Layout(own.name, f"{own.why}, for which there is no room beside {beside}")
    report(Detail(f"sampling multiplies with {engine.layout.name} weights: {engine.layout.why}"))


def fit_sampling(policy: Policy, machine: Hardware, rollouts: RolloutsConfig, n: int) -> int:
    """Make a policy that is only sampled from, `n` answers to a question, fit into memory: choose the layout of its
    weights, and how many questions are sampled at a time. Gives the bytes that are taken beside the answers."""
    shape, new = shape_of(policy), rollouts.max_new_tokens
    longest = max(1, min(rollouts.max_prompt_tokens, policy.max_positions - new))

    def lasting() -> int:
        return shape.weights + copy_of(policy, shape) + (0 if machine.gpu else RUNTIME_BYTES)

    one = max(bytes_of_sampling(policy, shape, 1, longest, n, new), copying_bytes(shape))
    choose_layout(policy, lambda: lasting() + one <= machine.room, "the answers to a question", policy.report)
    if machine.room < math.inf:
        policy.prompts_at_once = partial(questions_at_once, policy, shape, machine.room - lasting())
    return lasting()


class Fitting:
    """Makes the rounds of a run fit into memory."""

    def __init__(
        self, trainer: Trainer, prompts: Sequence[Sequence[int]], config: NodeConfig, machine: Hardware, copies: int = 0
    ) -> None:
        """`prompts` are some encoded ones. `copies`: of what is trained in float32, for averaging."""
        self.trainer, self.policy, self.config, self.machine = trainer, trainer.policy, config, machine
        self.shape: Shape = replace(shape_of(self.policy), adamw_8bit=config.grpo.optimizer == "adamw_8bit")
        self.kept: Activations = _kept(self.policy, self.shape)
        self._prompt, self._new = max(map(len, prompts)), config.rollouts.max_new_tokens
        self._answers = min(config.grpo.answers or config.rollouts.group_size, config.rollouts.group_size)
        self._reference, self._copies = bool(config.grpo.beta) and not self.policy.is_lora, copies
        self.mapped = False  # whether an update maps large tensors one by one; of no effect on a GPU

    def fit(self) -> int:
        """Set the trainer's limit, checkpointing, and the questions sampled at a time. Gives the bytes that a round
        takes then, at most. UserError if not even one answer fits, or if `grpo.gradient_checkpointing` is on and the
        model has none."""
        setting, trainer, engine = self.config.grpo.gradient_checkpointing, self.trainer, self.policy.engine
        if isinstance(engine, NativeEngine) and not self.machine.gpu:
            engine.layout = layout_of(self.policy.base)  # updates come first, and then the copy that is sampled from
        wanted = min(self._group, max(trainer.limit, self._answer))
        self.mapped |= setting == "on" or self.shape.parameters >= SMALL or self._tokens() < wanted
        if setting == "on" or (setting == "auto" and self._tokens() < wanted):
            self._checkpoint(setting == "on")
        if self.machine.available and self.bytes(self._least) > self.machine.available:
            raise UserError(sentence_of_refusal(self._training, self.machine, self.bytes(self._least)))
        tokens = max(self._tokens(), self._least.tokens)
        if tokens < trainer.limit:
            limits = f"at most {tokens:,} tokens in a microbatch: more do not fit into {self.machine.in_words}"
            trainer.report(limits if tokens < wanted else Detail(limits))
        trainer.limit = min(trainer.limit, tokens)
        choose_layout(self.policy, lambda: self.bytes(self.work()) <= self.machine.room, "a round", trainer.report)
        if self.machine.room < math.inf:
            self.policy.prompts_at_once = self._prompts_at_once
        trainer.maps = self.mapped and not self.machine.gpu
        return self.bytes(self.work())

    def bytes(self, work: Work) -> int:
        """Bytes of a round with that work at a time."""
        return round_bytes(self.shape, self.kept, work, self.machine.gpu, self._reference, self._copies)

    @property
    def _training(self) -> Training:
        model = model_of(self.policy.config.model, self.policy.num_parameters(), self.policy.base.config)
        config = self.config.model_copy(update={"policy": self.policy.config})
        return Training(model, config, self.policy.is_lora, self.policy.dtype.itemsize, self._copies)

    @property
    def _answer(self) -> int:
        """Tokens of a row with one answer that runs to its limit."""
        return self._prompt + self._new - 1

    @property
    def _group(self) -> int:
        """Tokens of a group: in one packed row, or in plain ones."""
        packed = self._prompt + self._answers * (self._new - 1)
        return packed if self.trainer.packing else self._answers * self._answer

    @property
    def _least(self) -> Work:
        """The work that takes least memory: one question sampled, and one of its answers trained on, at a time."""
        n, checkpointing = self.config.rollouts.group_size, self.policy.checkpointing is not None
        sampled, tokens = sampled_tokens(self.policy, self._prompt, n, self._new), self._answer
        first, native = prefilled_tokens(self.policy, self._prompt, n), isinstance(self.policy.engine, NativeEngine)
        update = tokens, tokens, self._new, True, checkpointing, self.mapped
        return Work(n, sampled, *update, self._copied, first, native)

    def work(self) -> Work:
        """The work at a time in a round within the limits."""
        rollouts, grpo, n = self.config.rollouts, self.config.grpo, self._answers
        groups = min(rollouts.groups, grpo.batch_groups or rollouts.groups)
        answers = [[0] * self._new] * n
        microbatches = self.trainer.plan([batch.Row([0] * self._prompt, answers, i * n) for i in range(groups)])
        largest = max(microbatches, key=batch.tokens)
        questions = min(rollouts.groups, self.policy.prompts_at_once(self._prompt, rollouts.group_size, self._new))
        return Work(
            answers=questions * rollouts.group_size,
            sampled=questions * sampled_tokens(self.policy, self._prompt, rollouts.group_size, self._new),
            tokens=batch.tokens(largest),
            longest=largest[0].length,
            targets=sum(len(completion) for row in largest for completion in row.completions),
            several=len(microbatches) > 1,
            checkpointing=self.policy.checkpointing is not None,
            mapped=self.mapped,
            copied=self._copied,
            prefilled=questions * prefilled_tokens(self.policy, self._prompt, rollouts.group_size),
            native=isinstance(self.policy.engine, NativeEngine),
        )

    def asking(self, prompts: Sequence[Sequence[int]], n: int, at_once: int) -> int:
        """Bytes of asking these encoded held-out questions, at most `at_once` at a time, for `n` answers to each."""
        longest = max(map(len, prompts))
        questions = min(at_once, len(prompts), self.policy.prompts_at_once(longest, n, self._new))
        sampling = bytes_of_sampling(self.policy, self.shape, questions, longest, n, self._new)
        return self._lasting + max(sampling, copying_bytes(self.shape))

    @property
    def _lasting(self) -> int:
        """Bytes that are held while answers are sampled, the copy of the weights included."""
        gpu = self.machine.gpu
        lasting = lasting_bytes(self.shape, gpu, self._reference, self._copies)
        return lasting + (self._copied or copied_bytes(self.shape, gpu))

    @property
    def _copied(self) -> int:
        return copy_of(self.policy, self.shape)

    def _tokens(self) -> int:
        """Tokens of the largest microbatch that fits, at most the trainer's limit."""
        most, least = max(self.trainer.limit, self._answer), 0
        while least < most:
            middle = (least + most + 1) // 2
            longest = min(middle, self._group if self.trainer.packing else self._answer)
            work = replace(self._least, tokens=middle, longest=longest, targets=middle)
            if self.bytes(work) <= self.machine.room:
                least = middle
            else:
                most = middle - 1
        return most

    def _prompts_at_once(self, prompt: int, n: int, new: int) -> int:
        """Questions with prompts of so many tokens of which `n` answers of at most `new` tokens can be sampled at a
        time."""
        return questions_at_once(self.policy, self.shape, self.machine.room - self._lasting, prompt, n, new)

    def _checkpoint(self, asked: bool) -> None:
        again = Checkpointing(self.policy.model)
        if again.agrees(self.policy.model, row(self.policy, 5), not self.policy.split_head):
            self.policy.checkpointing = again
            if not asked:
                self.trainer.report(
                    "there is little memory, so each layer is computed twice (grpo.gradient_checkpointing)"
                )
        elif asked:
            raise UserError(
                "grpo.gradient_checkpointing = on, but the layers of this model cannot be computed again with the same "
                "numbers; use auto"
            )
        else:
            self.trainer.report(Detail("no gradient checkpointing: the layers of this model cannot be computed again"))
