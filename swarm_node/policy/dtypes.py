"""In which number format a policy holds its weights: by a rule, or on a CPU by the time of a round in each of two.

all weights trained, or whole layers of an adapter     float32
LoRA on a GPU                                          bfloat16, if the GPU has it
LoRA on a CPU                                          the faster one, as `expected` or as `fastest` finds
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from swarm_node.config import NodeConfig
from swarm_node.errors import UserError
from swarm_node.policy.architecture import largest
from swarm_node.policy.policy import Policy
from swarm_node.policy.probes import ProbeText, bf16_slowdown, update_seconds, update_tokens
from swarm_node.say import Detail
from swarm_node.types import Sampling

MEASURED_WIDTH = 4096  # widest layer for which the speed of bfloat16 is measured: a gigabyte or so
TIMED_BELOW = 600_000_000
"""Parameters of a model that is loaded in both types. Larger ones are expected to have the fast paths in both."""
HOPELESS = 2.0
"""Times as long as in float32 that a layer in bfloat16 may take for a round in it to be tried."""
WORTH = 0.95  # of the time of a float32 round, below which bfloat16 is worth its rounding
ROWS, PROMPT, WARM, STEPS, ROW = 32, 48, 2, 16, 192
"""Of a short round: answers, tokens of a prompt, steps that warm caches up, steps that are measured, tokens trained."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DtypeChoice(NamedTuple):
    """A number format of weights."""

    dtype: torch.dtype
    why: str
    timed: bool = False  # it is only expected to be the faster one: a round in each shall decide


def name_of(dtype: torch.dtype) -> str:
    """The name of a number format in the configuration."""
    return str(dtype).removeprefix("torch.")


def expected(
    name: str, device: torch.device, adapter_only: bool, model_config: Any, timed: bool, alone: bool
) -> DtypeChoice:
    """The choice for `policy.dtype` = `name`. `adapter_only`: nothing but LoRA factors is trained. `timed`: the model
    may be loaded more than once. `alone`: what is measured on this machine may decide."""
    if name != "auto":
        return DtypeChoice(_DTYPES[name], "as asked")
    if not adapter_only:
        return DtypeChoice(torch.float32, "bfloat16 would lose small updates of the weights that are trained")
    if device.type == "cuda":
        good = torch.cuda.is_bf16_supported()
        return (
            DtypeChoice(torch.bfloat16, "this GPU has it")
            if good
            else DtypeChoice(torch.float32, "no bfloat16 on this GPU")
        )
    if device.type == "mps":
        return DtypeChoice(torch.float32, "the safe choice on mps")
    if not alone:
        return DtypeChoice(torch.float32, "as on every machine of a crew without a GPU")
    width = largest(model_config.get_text_config(), "hidden_size", MEASURED_WIDTH)
    ratio = bf16_slowdown(min(MEASURED_WIDTH, width))
    if ratio < 0.9:
        return DtypeChoice(torch.bfloat16, f"one layer measured {1 / ratio:.1f}x faster than in float32 here", timed)
    why = f"one layer in bfloat16 measured {ratio:.1f}x slower here"
    return DtypeChoice(torch.float32, why, timed and ratio < HOPELESS)


def fastest(
    choice: DtypeChoice, make: Callable[[torch.dtype], Policy], of_round: Callable[[Policy], NodeConfig]
) -> tuple[Policy, DtypeChoice]:
    """The policy that `make` gives in the type in which a round of the settings `of_round` takes less time, of float32
    and bfloat16.

    One policy exists at a time. The type that is expected to win is tried last, so that it need not be made again.
    A type in which the model cannot be trained is not taken. Raises UserError if it cannot be in either.
    """
    seconds, refused = dict[torch.dtype, float](), dict[torch.dtype, UserError]()
    for dtype in sorted((torch.float32, torch.bfloat16), key=lambda each: each == choice.dtype):
        policy = None
        gc.collect()  # it refers to itself: now its memory is free for the next one
        try:
            policy = make(dtype)
        except UserError as error:
            refused[dtype] = error
            continue
        seconds[dtype] = short_round(policy, of_round(policy))
        policy.report(Detail(f"a short round in {name_of(dtype)} takes {seconds[dtype]:.1f} s"))
    if not seconds:
        raise refused[choice.dtype]
    best = DtypeChoice(*_faster(seconds))
    if policy is None or policy.dtype != best.dtype:
        policy = None
        gc.collect()
        policy = make(best.dtype)
    return policy, best


def _faster(seconds: dict[torch.dtype, float]) -> tuple[torch.dtype, str]:
    """The faster type, and why it is taken."""
    if len(seconds) == 1:
        (dtype,) = seconds
        return dtype, "the model cannot be trained in another type"
    ratio = seconds[torch.bfloat16] / seconds[torch.float32]
    if ratio < WORTH:
        return torch.bfloat16, f"a short round measured {1 / ratio:.2f}x faster than in float32 here"
    return torch.float32, f"a short round in bfloat16 measured {ratio:.2f}x as long here"


def with_dtype(config: NodeConfig, policy: Policy) -> NodeConfig:
    """`config` with the number format that an adapter's base has, in place of `auto`: a later start takes it from the
    run's settings, and so do `eval`, `export` and `merge`. All weights are trained in float32 anyway."""
    if config.policy.dtype != "auto" or not policy.is_lora:
        return config
    fixed = config.policy.model_copy(update={"dtype": name_of(policy.dtype)})
    return config.model_copy(update={"policy": fixed})


def short_round(policy: Policy, config: NodeConfig) -> float:
    """Seconds of a round of `config` with the paths of `policy`, reckoned from at most `ROWS` answers of a few tokens.

    copy of the weights + steps of sampling + tokens of an update, each measured after a pass that warms caches up
    """
    rollouts = config.rollouts
    n, new = rollouts.group_size, rollouts.max_new_tokens
    groups = max(1, min(rollouts.groups or ROWS // n, ROWS // n))
    text = ProbeText.of(policy)
    prompt = (text.prompt * PROMPT)[: max(1, min(PROMPT, policy.max_positions - new))]
    steps = max(1, min(STEPS, new - WARM, policy.max_positions - len(prompt) - WARM))
    warm, whole = (_sampling_s(policy, [prompt] * groups, n, length) for length in (WARM, WARM + steps))
    step = max(0.0, whole - warm) / steps
    of_group = update_tokens(policy, rollouts, config.grpo, len(prompt), new)
    row = (prompt * ROW)[: min(ROW, policy.max_positions)]
    read = max(1, round(len(row) * of_group.read / of_group.whole))
    update = [update_seconds(policy, part, min(read, len(part))) for part in (row[:WARM], row)][-1]
    return warm + step * (new - WARM) + groups * of_group.whole * of_group.passes * update / len(row)


def _sampling_s(policy: Policy, prompts: list[list[int]], n: int, length: int) -> float:
    """Seconds of sampling `n` answers of at most that length to each prompt."""
    start = time.perf_counter()
    policy.generate(prompts, n, Sampling(length), list(range(len(prompts))))
    return time.perf_counter() - start
