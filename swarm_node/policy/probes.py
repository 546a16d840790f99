"""Measurements on a loaded model: which fast paths give its own numbers, is bfloat16 faster, what does a round cost?

Every fast path (native decoding, packed rows, head apart from the backbone) is tried once on a few tokens of text. It
is taken only if it gives the model's own numbers up to `rounding`, so an unknown architecture is slow, never wrong.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_node.config import GrpoConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import tokenizing
from swarm_node.policy.architecture import is_windowed, largest
from swarm_node.policy.engines import find_engine
from swarm_node.policy.engines.graphs import GraphEngine
from swarm_node.policy.engines.native import SUPPORTED, Decoder, NativeEngine
from swarm_node.policy.engines.products import Layout, layout_of
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.finite import check_logits
from swarm_node.policy.oom import is_out_of_memory
from swarm_node.policy.policy import Policy
from swarm_node.policy.rounding import OwnNumbers, worst
from swarm_node.policy.suitability import (
    check_architecture,
    check_causal,
    check_training,
    generate_engine,
    judge_samples,
    naming,
    own_logits,
)
from swarm_node.say import Detail
from swarm_node.types import Sampling

TEXT = (
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?",
    " 3 + 4 = 7, so it is 7.",
    " He had three, so now he has seven apples.",
)
LENGTHS = 11, 5, 7
"""Tokens of the prompt and the two answers. Both rows stay below the windows of the tiny models in the tests."""
MEASURED_ROW = 192  # most tokens of the row by which the time of an update is measured


def bf16_slowdown(hidden: int, seconds: float = 1.0) -> float:
    """Time of a bfloat16 layer over that of a float32 one on this CPU, [256, hidden] x [hidden, 4 hidden]."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(256, hidden, dtype=dtype), torch.randn(4 * hidden, hidden, dtype=dtype)
        torch.nn.functional.linear(x, w)
        best, end = float("inf"), time.monotonic() + seconds / 2
        while math.isinf(best) or time.monotonic() < end:
            start = time.perf_counter()
            torch.nn.functional.linear(x, w)
            best = min(best, time.perf_counter() - start)
        times[dtype] = best
    return times[torch.bfloat16] / times[torch.float32]


@dataclass(frozen=True)
class ProbeText:
    """Token ids on which all ways of computing are tried: two rows, `prompt + one` and `prompt + two`."""

    prompt: list[int]
    one: list[int]
    two: list[int]  # two tokens longer than `one`

    @classmethod
    def of(cls, policy: Policy) -> ProbeText:
        """A question with two answers in the policy's own tokens, filled up with random ones."""
        text = policy.base.config.get_text_config()
        words = min(largest(text, "vocab_size", policy.vocabulary), policy.vocabulary)
        rng = torch.Generator().manual_seed(0)
        parts = []
        for sentence, length in zip(TEXT, LENGTHS, strict=True):
            found = tokenizing.encode(policy.tokenizer, [sentence])[0]
            known = [i for i in found if i < words and i != policy.tokenizer.unk_token_id][:length]
            parts.append(known + torch.randint(words, (length - len(known),), generator=rng).tolist())
        return cls(*parts)


def choose_paths(policy: Policy, rollouts: RolloutsConfig) -> None:
    """Set `packing`, `split_head` and `engine` from comparisons with the model's own forward pass.

    NotFinite if that pass gives numbers that are not finite. UserError if `rollouts.engine` names an engine that does
    not serve this model, or that cannot be loaded.
    """
    longest = min(rollouts.max_prompt_tokens + rollouts.max_new_tokens, policy.max_positions)
    windowed = is_windowed(policy.base.config.get_text_config(), longest)
    probe = ProbeText.of(policy)
    native, known, layout = False, policy.family in SUPPORTED, layout_of(policy.base)
    if not known:
        check_architecture(policy, longest)
    with torch.no_grad():
        with naming(policy, "a forward pass"):
            rows = [OwnNumbers.of(policy, probe.prompt + tail) for tail in (probe.one, probe.two)]
        for row in rows:
            check_logits(policy.config.model, policy.dtype, row.logits)
        if not known:
            check_causal(policy, rows, len(probe.prompt))
        # the very same operations, unless something happens to the logits afterwards: no room for rounding
        policy.split_head = _head_is_apart(policy, probe.prompt + probe.one, rows[0].logits)
        policy.packing = not windowed and policy.split_head and _packed_agrees(policy, probe, rows)
        if rollouts.engine in ("auto", "native") and not windowed and known:
            native = _native_agrees(policy, probe, rows, layout)
    if windowed:
        policy.report(Detail(f"a window is shorter than {longest} tokens: no native engine, plain rows"))
    if not known:
        policy.report(Detail(f"the native engine serves {', '.join(sorted(SUPPORTED))}, and not {policy.family}"))
        check_training(policy, probe.prompt, probe.one, probe.two, rows)
    if rollouts.engine == "native" and not native:
        raise UserError(f"rollouts.engine = native, but it does not serve {policy.family!r} here; use auto")
    kind = TransformersEngine if rollouts.engine in ("auto", "native") else find_engine(rollouts.engine)
    if native:
        recorded = policy.device.type == "cuda" and graphs_agree(policy, probe, layout)
        engine = GraphEngine if recorded else NativeEngine
        policy.engine = engine(policy.model, policy.eos_ids, policy.pad_id, layout)
        policy.report(Detail(f"sampling multiplies with {layout.name} weights: {layout.why}"))
    elif kind is TransformersEngine and not known:
        policy.engine = generate_engine(policy, probe.prompt, probe.two)
    else:
        policy.engine = policy.engine_of(kind)


def _head_is_apart(policy: Policy, ids: list[int], logits: Tensor) -> bool:
    """Whether the logits are exactly what the head makes of the backbone's output."""
    try:
        apart = torch.equal(_head_of_backbone(policy, ids), logits)
    except Exception as exc:  # a model without such parts, or with others under their names
        if is_out_of_memory(exc):
            raise
        policy.report(Detail(f"this architecture has no backbone of its own ({type(exc).__name__}): full logits"))
        return False
    if not apart:
        policy.report(Detail("this architecture alters its logits after the head: full logits, plain rows"))
    return apart


def _head_of_backbone(policy: Policy, ids: list[int], last: int = 0, **options: Tensor) -> Tensor:
    """Logits [T, V] as head(backbone(ids)); only those of the `last` tokens, if that is not 0."""
    ids_tensor = torch.tensor([ids], device=policy.device)
    hidden = policy.base.get_decoder()(input_ids=ids_tensor, use_cache=False, **options).last_hidden_state[0]
    return policy.base.get_output_embeddings()(hidden[-last:])


def packed_row(probe: ProbeText, device: torch.device) -> tuple[list[int], dict[str, Tensor]]:
    """One row [prompt, one, two], and the mask and the positions of a forward pass in which its answers are apart."""
    p, a, b = len(probe.prompt), len(probe.one), len(probe.two)
    mask = torch.ones(p + a + b, p + a + b, dtype=torch.bool, device=device).tril()
    mask[p + a :, p : p + a] = False
    positions = torch.tensor([[*range(p + a), *range(p, p + b)]], device=device)
    return probe.prompt + probe.one + probe.two, {"attention_mask": mask[None, None], "position_ids": positions}


def _packed_agrees(policy: Policy, probe: ProbeText, rows: list[OwnNumbers]) -> bool:
    """Whether one row [prompt, one, two] with a block mask gives the numbers of the two rows apart."""
    p, a = len(probe.prompt), len(probe.one)
    ids, options = packed_row(probe, policy.device)
    try:
        packed = _head_of_backbone(policy, ids, **options)
    except Exception as exc:  # many forward passes refuse such a mask, each in its own way
        if is_out_of_memory(exc):
            raise
        policy.report(Detail(f"packed rows do not suit this architecture ({type(exc).__name__}): plain rows"))
        return False
    found = worst(iter([rows[0].judge(packed[: p + a]), rows[1].judge(packed[p + a :], p)]))
    policy.report(Detail(f"packed rows: {found}: {'taken' if found.agrees else 'plain rows'}"))
    return found.agrees


def _native_agrees(policy: Policy, probe: ProbeText, rows: list[OwnNumbers], layout: Layout) -> bool:
    """Whether the native engine, fed with given tokens, gives the model's own numbers.

    It has two prompts with two samples each: `prompt`, which goes on as the first row, and `prompt` with two tokens
    more, which goes on as the second.
    """
    prompts, tails = [probe.prompt, probe.prompt + probe.two[:2]], [probe.one, probe.two[2:]]
    try:
        decoder = Decoder(policy.model, layout.name)
        cache = decoder.slice.cache([len(p) for p in prompts], 2, len(probe.one))
        ours = [decoder.prefill(cache, prompts).repeat_interleave(2, 0)]
        for step, tokens in enumerate(zip(*tails, strict=True)):
            fed = torch.tensor(tokens, device=policy.device).repeat_interleave(2)
            ours.append(decoder.forward(cache, fed, step))
    except Exception as exc:  # it reaches into the model's modules: any surprise there means "not this one"
        if is_out_of_memory(exc):
            raise
        policy.report(Detail(f"the native engine does not suit this model ({type(exc).__name__}: {exc})"))
        return False
    logits = torch.stack(ours, 1)  # [4, 1 + len(one), V]
    found = worst(rows[i].judge(logits[2 * i + j], len(prompts[i]) - 1) for i in range(2) for j in range(2))
    policy.report(Detail(f"the native engine: {found}: {'taken' if found.agrees else 'transformers samples'}"))
    return found.agrees


def graphs_agree(policy: Policy, probe: ProbeText, layout: Layout) -> bool:
    """Whether recorded steps sample with the model's own log-probabilities."""
    engine = GraphEngine(policy.model, [], policy.pad_id, layout)
    try:
        found = judge_samples(policy, engine, [probe.prompt, probe.prompt + probe.two])
    except Exception as exc:  # an operation that cannot be recorded, or not on this device
        policy.report(Detail(f"steps of sampling cannot be recorded here ({type(exc).__name__}: {exc})"))
        return False
    policy.report(Detail(f"recorded steps of sampling: {found}: {'taken' if found.agrees else 'not recorded'}"))
    return found.agrees


class TokenSeconds(NamedTuple):
    """Measured seconds of each token of a policy."""

    sampled_s: float
    trained_s: float


def round_seconds(
    policy: Policy,
    speed: TokenSeconds,
    prompts: list[list[int]],
    rollouts: RolloutsConfig,
    grpo: GrpoConfig,
    tokens: float,
    teaching: float = 1.0,
) -> float:
    """Seconds of one round of `rollouts` and one update of `grpo` with `policy`, given some encoded prompts.

    time = sampled tokens x measured seconds a token + trained tokens x measured seconds a token

    `tokens`: mean length of a completion. `teaching`: share of the groups that have a signal, since the others are not
    trained on. Scoring and evaluation are left out.
    """
    length = round(fmean(len(p) for p in prompts))
    sampled = rollouts.groups * rollouts.group_size * tokens
    of_group = update_tokens(policy, rollouts, grpo, length, tokens)
    trained = teaching * rollouts.groups * of_group.whole * of_group.passes
    trained += rollouts.groups * length / 3  # prompts: no backward pass
    return sampled * speed.sampled_s + trained * speed.trained_s


class UpdateTokens(NamedTuple):
    """Tokens of a group in an update."""

    whole: float
    read: float  # those of its completions: the head reads no others
    passes: float  # how often they pass through the model and back


def update_tokens(policy: Policy, rollouts: RolloutsConfig, grpo: GrpoConfig, prompt: int, new: float) -> UpdateTokens:
    """What an update computes for a group. `prompt`, `new`: tokens of the prompt and of each completion."""
    kept = min(grpo.answers or rollouts.group_size, rollouts.group_size)  # answers of a group that are trained on
    copies = 1 if grpo.packing and policy.packing else kept  # of each prompt in the rows of an update
    passes = grpo.iterations * (1 + (1 / 3 if grpo.beta else 0))  # the reference needs no backward pass
    return UpdateTokens(kept * new + copies * prompt, kept * new, passes)


def token_seconds(
    policy: Policy,
    prompt: list[int],
    rollouts: RolloutsConfig,
    grpo: GrpoConfig,
    tokens: float,
    sampled_s: float | None = None,
) -> TokenSeconds:
    """The speed of a policy: sampling by a group of short completions unless `sampled_s` is known, training by a row of
    a group with completions of so many `tokens` (weights stay as they are)."""
    if sampled_s is None:
        sampling = Sampling(min(8, rollouts.max_new_tokens), rollouts.temperature, rollouts.top_p)
        sampled_s = [_sampled_s(policy, prompt, rollouts.group_size, sampling) for _ in range(2)][1]
    of_group = update_tokens(policy, rollouts, grpo, len(prompt), tokens)
    n = min(round(of_group.whole), MEASURED_ROW, policy.max_positions)
    row, read = (prompt * (n // len(prompt) + 1))[:n], max(1, round(n * of_group.read / of_group.whole))
    trained_s = [update_seconds(policy, row, read) / n for _ in range(2)][1]  # the first one warms caches up
    return TokenSeconds(sampled_s, trained_s)


def _sampled_s(policy: Policy, prompt: list[int], n: int, sampling: Sampling) -> float:
    """Seconds of each token of `n` completions."""
    start = _now(policy)
    made = policy.generate([prompt], n, sampling, [0])[0]
    return (_now(policy) - start) / sum(r.num_tokens for r in made)


def update_seconds(policy: Policy, row: list[int], read: int) -> float:
    """Seconds of a forward and a backward pass over one row of tokens, the last `read` of which the head reads where
    it can (weights stay as they are)."""
    start = _now(policy)
    logits = _head_of_backbone(policy, row, read) if policy.split_head else own_logits(policy, row)
    logits.float().logsumexp(-1).mean().backward()
    for p in policy.trainable_parameters():
        p.grad = None
    return _now(policy) - start


def _now(policy: Policy) -> float:
    """Seconds of a clock, after all that the device was told to do is done."""
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)
    return time.perf_counter()
