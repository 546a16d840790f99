"""Whether a model of an unusual architecture can be trained at all, and how `generate` samples from it.

Models that the native engine knows need none of this. Of all others a few tokens are computed in all ways in which a
round does, and compared with the model's own forward pass over one row. A model is refused by name where they differ,
before anything is sampled: wrong numbers would train it towards nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swarm_node.errors import UserError
from swarm_node.policy.architecture import selected
from swarm_node.policy.engines.base import BatchEngine, uniforms
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.logprobs import TokenBatch, token_logprobs
from swarm_node.policy.oom import is_out_of_memory
from swarm_node.policy.policy import Policy
from swarm_node.policy.rounding import Agreement, OwnNumbers, judge_tokens, worst
from swarm_node.say import Detail, in_short
from swarm_node.storage.model_names import model_name
from swarm_node.types import Sampling

OTHER = "take a model of another architecture, docs/own-model.md lists those that can be trained"
WRONG = {"moshi": "its cache forgets what lies behind a window, and its forward pass does not"}
"""Families of which a few tokens do not show what is wrong."""
COUNTS_PADDING = {"deepseek_v4", "recurrent_gemma", "rwkv", "xlstm"}
"""Families that count padding at the left, which below float32 a few tokens do not show."""
NOT_READ_AGAIN = "inkling2_text", "laguna"
"""Families whose adapters PEFT writes under other names than it reads."""
WAYS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("", {}),
    ("one length of prompts after the other", {"padded": False}),
    ("one length of prompts after the other, without a cache", {"padded": False, "cached": False}),
)
"""Options of `TransformersEngine`, the fastest first, and what there is to say about them."""


def own_logits(policy: Policy, ids: list[int]) -> Tensor:
    """The model's own logits [T, V] of one row."""
    return policy.model(input_ids=torch.tensor([ids], device=policy.device), use_cache=False).logits[0]


@contextmanager
def naming(policy: Policy, doing: str) -> Iterator[None]:
    """Turn an error of the libraries in `doing` something with the model into a UserError that names its class."""
    try:
        yield
    except UserError:
        raise
    except Exception as exc:  # hundreds of architectures, each with errors of its own
        if is_out_of_memory(exc):
            raise
        detail = in_short(f"{type(exc).__name__}: {exc}")
        raise UserError(f"{_name(policy)} cannot be trained: {doing} fails ({detail}); {OTHER}") from exc


def check_architecture(policy: Policy, longest: int) -> None:
    """UserError if it is known beforehand that rows of `longest` tokens get wrong numbers."""
    if policy.family in WRONG:
        raise UserError(f"{_name(policy)} cannot be trained: {WRONG[policy.family]}; {OTHER}")
    if policy.is_lora and policy.family in NOT_READ_AGAIN:
        raise UserError(f"{_name(policy)}: an adapter of it cannot be loaded again; use --no-lora, or {OTHER}")
    most = selected(policy.base.config.get_text_config())
    if most is not None and most < longest:
        raise UserError(
            f"{_name(policy)} selects {most} tokens to look at, and another computation selects others: lower "
            f"rollouts.max_prompt_tokens and rollouts.max_new_tokens to at most {most} together"
        )


def check_causal(policy: Policy, rows: list[OwnNumbers], shared: int) -> None:
    """UserError if the numbers of two rows that begin with the same `shared` tokens differ there."""
    found = rows[0].judge(rows[1].logits[:shared], 0, shared)
    if found.agrees:
        return
    remedy = OTHER
    if getattr(policy.base.config, "is_decoder", None) is False:
        remedy = f'set "is_decoder": true in its config.json if it was trained as a decoder; else {OTHER}'
    raise UserError(
        f"{_name(policy)} is not causal: it sees the tokens behind the one that it predicts ({found}); {remedy}"
    )


def check_training(policy: Policy, prompt: list[int], one: list[int], two: list[int], rows: list[OwnNumbers]) -> None:
    """UserError unless rows of an update have the log-probabilities of `rows`, the numbers of the two rows prompt + one
    and prompt + two, and a gradient of them reaches the weights."""
    batch, expected, moved = _update(policy, prompt, one, two, rows)
    try:
        with naming(policy, "an update"), torch.enable_grad():
            logprobs, _ = token_logprobs(policy.model, batch, 1.0, full_logits=not policy.split_head)
            logprobs.mean().backward()
        found = judge_tokens((logprobs.detach() - expected).abs(), moved, policy.dtype, torch.median)
        if not found.agrees:
            raise UserError(
                f"{_name(policy)} cannot be trained: other rows beside it change its numbers ({found}); {OTHER}"
            )
        if all(p.grad is None for p in policy.trainable_parameters()):
            raise UserError(f"{_name(policy)} cannot be trained: no gradient reaches its weights; {OTHER}")
    finally:
        for parameter in policy.trainable_parameters():
            parameter.grad = None


def _update(
    policy: Policy, prompt: list[int], one: list[int], two: list[int], rows: list[OwnNumbers]
) -> tuple[TokenBatch, Tensor, Tensor]:
    """Two plain rows of an update, the log-probabilities of their completions, and how far rounding moves those."""
    device, p, width = policy.device, len(prompt), len(prompt) + max(len(one), len(two)) - 1
    ids = [(prompt + tail)[:-1] for tail in (one, two)]
    padded = [row + [policy.pad_id] * (width - len(row)) for row in ids]
    target = torch.tensor(one + two, device=device)
    row = torch.tensor([0] * len(one) + [1] * len(two), device=device)
    col = torch.tensor([*range(p - 1, p - 1 + len(one)), *range(p - 1, p - 1 + len(two))], device=device)
    batch = TokenBatch(torch.tensor(padded, device=device), None, None, row, col, target, row, torch.arange(len(row)))
    parts = [own.of_tokens(p - 1, tail) for own, tail in zip(rows, (one, two), strict=True)]
    expected, moved = map(torch.cat, zip(*parts, strict=True))
    return batch, expected, moved


def generate_engine(policy: Policy, prompt: list[int], more: list[int]) -> TransformersEngine:
    """The fastest way of `generate` to sample with the model's own log-probabilities. UserError if there is none.

    Below float32, rounding sends a token to another expert now and then: the mean after each prompt must be right.
    """
    why = "its samples have other log-probabilities than its own forward pass"
    for words, options in WAYS[policy.family in COUNTS_PADDING :]:
        engine = TransformersEngine(policy.model, policy.eos_ids, policy.pad_id, **options)
        try:
            found = judge_samples(policy, engine, [prompt, prompt + more])
        except Exception as exc:  # as in `naming`
            if is_out_of_memory(exc):
                raise
            why = in_short(f"{type(exc).__name__}: {exc}")
            continue
        if found.agrees:
            if words:
                policy.report(Detail(f"{_name(policy)} is sampled {words}, which is slow"))
            return engine
        why = f"the log-probabilities of its samples are {found}"
        policy.report(Detail(f"sampling{f' {words}' if words else ''}: {found}: not so"))
    remedy = OTHER if policy.dtype == torch.float32 else f"set policy.dtype = float32, or {OTHER}"
    raise UserError(f"{_name(policy)} cannot be sampled ({why}); {remedy}")


@torch.no_grad()
def judge_samples(policy: Policy, engine: BatchEngine, prompts: list[list[int]]) -> Agreement:
    """Compare an engine's log-probabilities of a few samples after each prompt with the model's own."""
    sampling, n = Sampling(6), 2
    drawn = uniforms(list(range(len(prompts))), n, sampling.max_new_tokens)
    rows = []
    for i, (ids, logprobs, _) in enumerate(engine.decode(prompts, n, sampling, drawn, tuple)):
        prompt = prompts[i // n]
        own, moved = OwnNumbers.of(policy, prompt + ids).of_tokens(len(prompt) - 1, ids)
        rows.append(((torch.tensor(logprobs, device=own.device) - own).abs(), moved))
    pairs = ((torch.cat(part) for part in zip(*rows[i : i + n], strict=True)) for i in range(0, len(rows), n))
    return worst(judge_tokens(differences, moved, policy.dtype) for differences, moved in pairs)


def _name(policy: Policy) -> str:
    return f"{type(policy.base).__name__} ({model_name(policy.config.model)})"
