"""One round of training with a tiny model of an architecture, compared with the model's own forward pass."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from swarm_node.config import GrpoConfig, NodeConfig, PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.grpo.memory import Fitting
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.engines.transformers import TransformersEngine
from swarm_node.policy.fitting import Hardware
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.types import Group, Rollout, Sampling, Task
from swarm_protocol.messages import TaskName
from tests.support.architectures import MODEL_TYPES, causal_class, save

PROMPTS = [[5, 9, 14, 7, 22, 31, 12, 17, 45, 33, 21, 19], [8, 6, 40], [11, 13, 60, 61, 62, 63, 64, 65]]
SAMPLING = Sampling(20)  # with the longest prompt, rows are longer than the windows of the tiny models
ROLLOUTS = RolloutsConfig(max_new_tokens=20, max_prompt_tokens=40, group_size=3, groups=3)
GRPO = GrpoConfig(beta=0.05)
ROUNDING = 1e-3
PAD_ROW_IS_LOST = {"youtu"}
"""Families of which transformers empties the embedding of the padding token whenever it loads them."""
HEAD = "| sampled by | rows in updates | architectures |\n|---|---|---|\n"


@dataclass(frozen=True)
class Outcome:
    """How a model was trained, or why not."""

    sampled: str = ""
    rows: str = ""
    refused: str = ""


def own_logprobs(policy: Policy, prompt: list[int], ids: list[int]) -> Tensor:
    """Log-probabilities of `ids` after `prompt` in one row without padding, cache or anything of ours."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def assert_own(policy: Policy, prompt: list[int], rollout: Rollout, found: list[float], what: str) -> None:
    expected = own_logprobs(policy, prompt, rollout.token_ids)
    difference = float((torch.tensor(found) - expected).abs().max())
    assert difference <= ROUNDING, f"{what} gives log-probabilities that are off by {difference:.3g}"


def round_of(folder: Path, lora: bool) -> Outcome:
    """Load the model and train a round; all of it must be right, or the model refused before anything is sampled."""
    config = PolicyConfig(model=str(folder), lora=lora, lora_rank=2, device="cpu", dtype="float32")
    try:
        policy = load_policy(config, ROLLOUTS, lambda text: None)
    except UserError as refused:
        return Outcome(refused=str(refused))
    policy.keep_reference()
    trainer = Trainer(policy, GRPO, SAMPLING, lambda text: None)
    run = NodeConfig(policy=config, rollouts=ROLLOUTS, grpo=GRPO)
    assert Fitting(trainer, PROMPTS, run, Hardware("cpu", 0)).fit() > 0
    groups = []
    for i, rollouts in enumerate(policy.generate(PROMPTS, 3, SAMPLING, [1, 2, 3])):
        for rollout in rollouts:
            assert_own(policy, PROMPTS[i], rollout, rollout.logprobs, "sampling")
        rewarded = [
            msgspec.structs.replace(r, rewards={"checker": j % 2}, reward=j % 2) for j, r in enumerate(rollouts)
        ]
        task = Task(TaskName("gcd", "0" * 16, "test 1", 0, i), "gcd", "question", "answer")
        groups.append(Group(task, PROMPTS[i], rewarded, policy.version))
    scored = trainer.logprobs(groups, 1.0, "scoring")
    assert scored is not None
    for group, table in zip(groups, scored, strict=True):
        for rollout, found in zip(group.rollouts, table, strict=True):
            assert_own(policy, group.prompt_ids, rollout, found, "an update")
    before = {name: tensor.clone() for name, tensor in policy.trainable_state().items()}
    metrics = trainer.step(groups)
    after = policy.trainable_state()
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    if policy.family not in PAD_ROW_IS_LOST:
        assert_saved(policy, config)
    return Outcome(sampled_by(policy), "packed" if policy.packing else "plain")


def assert_saved(policy: Policy, config: PolicyConfig) -> None:
    """What is exported is loaded again with the trained weights."""
    with tempfile.TemporaryDirectory() as out:
        policy.save(Path(out))
        saved = config.model_copy(update={"model": out, "lora": None if policy.is_lora else False})
        again = load_policy(saved, ROLLOUTS, lambda text: None)
    trained, loaded = policy.trainable_state(), again.trainable_state()
    assert trained.keys() == loaded.keys()
    lost = [name for name in trained if not torch.equal(trained[name], loaded[name])]
    assert not lost, f"{lost} changed on the way to the disk and back"


def sampled_by(policy: Policy) -> str:
    engine = policy.engine
    if isinstance(engine, NativeEngine):
        return "the native engine"
    assert isinstance(engine, TransformersEngine)
    if engine.padded:
        return "`generate`"
    return "`generate`, one length of prompts at a time" + ("" if engine.cached else ", without a cache")


@cache
def outcomes(model_type: str) -> tuple[Outcome, Outcome]:
    """A round that trains all weights, and one with LoRA."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # hundreds of architectures have something to say
        save(model_type, Path(folder))
        return round_of(Path(folder), lora=False), round_of(Path(folder), lora=True)


def table() -> str:
    """Markdown: all architectures by how they are trained. This takes minutes."""
    return rows({model_type: outcomes(model_type) for model_type in MODEL_TYPES})


def rows(found: Mapping[str, tuple[Outcome, Outcome]]) -> str:
    """The table of these outcomes, the fastest ways first."""
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for model_type, (full, lora) in sorted(found.items()):
        trained = lora if full.refused else full
        name = f"`{model_type}`"
        if trained.refused:
            why = "not causal" if "is not causal" in trained.refused else "for another reason, which is said"
            kinds[f"refused: {why}", ""].append(name)
            continue
        if full.refused or lora.refused:
            name += " (LoRA only)" if full.refused else " (without LoRA)"
        kinds[trained.sampled, trained.rows].append(name)
    order = sorted(kinds, key=lambda kind: (kind[0].startswith("refused"), "native" not in kind[0], len(kind[0]), kind))
    return HEAD + "".join(f"| {a} | {b} | {', '.join(kinds[a, b])} |\n" for a, b in order)


def refusals(model_type: str) -> list[str]:
    """The sentences with which a model is refused. Each must name its class and what to do."""
    found = [outcome.refused for outcome in outcomes(model_type) if outcome.refused]
    for sentence in found:
        assert causal_class(model_type).removesuffix("ForCausalLM") in sentence, sentence
        assert "\n" not in sentence and "take a model of another architecture" in sentence, sentence
    return found
