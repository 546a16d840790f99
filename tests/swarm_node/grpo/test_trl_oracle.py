"""TRL as the oracle: same loss, gradients, advantages and metrics, for every option that both have."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import tomllib
from types import SimpleNamespace

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from swarm_node.config import GrpoConfig, NodeConfig, load_config
from swarm_node.config.keys import flat
from swarm_node.grpo.advantage import advantages
from swarm_node.grpo.batch import Row, flatten, plan, token_batch
from swarm_node.grpo.corrections import find_correction
from swarm_node.grpo.losses import find_loss
from swarm_node.grpo.objective import Correction, Tokens, clip_range, policy_loss
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy.logprobs import token_logprobs
from swarm_node.types import Sampling
from tests.support.repository import ROOT
from tests.support.tiny_policy import VOCABULARY, TinyPolicy, group, make, watch_gradients

pytestmark = pytest.mark.filterwarnings(
    "ignore:::transformers", "ignore:::trl", "ignore:::torch", "ignore:::accelerate"
)

TOLERANCE = 1e-5
WIDTH = 6  # TRL's max_completion_length
TEMPERATURE = 0.8

# Two groups of two: prompts of 5 and 3 tokens, completions of 6, 4 and 2, 1 tokens.
GROUPS = [
    group([1.0, 0.0], lengths=[6, 4], prompt=5, seed=1),
    group([0.0, 1.0], lengths=[2, 1], prompt=3, seed=2),
]
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -0.9])
LENGTHS = torch.tensor([6, 4, 2, 1])


def of_trl(names: str) -> list[object]:
    """TRL's defaults of the arguments in a cell of the table."""
    fields = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    values = [fields[name] for name in re.findall(r"`(\w+)`", names)]
    return [getattr(value, "value", value) for value in values]


def test_the_table_of_defaults_tells_both() -> None:
    ours = flat(NodeConfig().model_dump(mode="json"))
    text = (ROOT / "docs/grpo.md").read_text().partition("### Defaults, and TRL's\n")[2].partition("\n### ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]
    assert len(rows) > 20
    for key, here, arguments, theirs in rows:
        key = key.strip("`")
        if shown := re.match(r"`([^`]*)`", here):
            assert tomllib.loads(f"v = {shown[1]}")["v"] == ours[key], key
        if shown := re.findall(r"`([^`]*)`", theirs):
            assert [tomllib.loads(f"v = {each}")["v"] for each in shown] == of_trl(arguments), key


def test_the_settings_nearest_to_trl_are_its_defaults() -> None:
    config = load_config(ROOT / "configs/trl.toml")
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    grpo, rollouts = config.grpo, config.rollouts
    answers = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
    assert rollouts.groups * rollouts.group_size == answers and grpo.batch_groups == rollouts.groups
    found = {
        "num_generations": rollouts.group_size,
        "max_completion_length": rollouts.max_new_tokens,
        "temperature": rollouts.temperature,
        "top_p": rollouts.top_p,
        "loss_type": grpo.loss,
        "num_iterations": grpo.iterations,
        "epsilon": grpo.epsilon_low,
        "beta": grpo.beta,
        "learning_rate": grpo.learning_rate,
        "warmup_steps": grpo.warmup,
        "adam_beta1": grpo.betas[0],
        "adam_beta2": grpo.betas[1],
        "weight_decay": grpo.weight_decay,
        "max_grad_norm": grpo.grad_clip,
        "multi_objective_aggregation": grpo.aggregation,
        "mask_truncated_completions": grpo.mask_truncated,
        "off_policy_mask_threshold": grpo.off_policy_mask,
        "delta": grpo.delta,
    }
    assert found == {name: theirs[name] for name in found}
    assert theirs["epsilon_high"] is None and grpo.epsilon_high == grpo.epsilon_low
    assert getattr(theirs["lr_scheduler_type"], "value", theirs["lr_scheduler_type"]) == grpo.schedule


def trl_trainer(tmp_path, model, rewards, **options) -> GRPOTrainer:
    words = {"<pad>": 0, "<s>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<s>")), pad_token="<pad>", eos_token="<eos>"
    )
    options = dict(num_generations=2, temperature=TEMPERATURE) | options
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_completion_length=WIDTH,
        **options,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w3"] * 4}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # set by train(), which is not called
    trainer.model.train()
    return trainer


def trl_inputs(groups) -> dict[str, torch.Tensor]:
    """TRL's padded tensors: prompts to the left, completions to the right."""
    rollouts = [(g.prompt_ids, r.token_ids) for g in groups for r in g.rollouts]
    width = max(len(p) for p, _ in rollouts)
    padded = [
        ([0] * (width - len(p)) + p, [0] * (width - len(p)) + [1] * len(p), c + [0] * (WIDTH - len(c)))
        for p, c in rollouts
    ]
    prompt_ids, prompt_mask, completion_ids = (torch.tensor(x) for x in zip(*padded, strict=True))
    lengths = torch.tensor([len(c) for _, c in rollouts])
    completion_mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    return dict(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        num_items_in_batch=completion_mask.sum(),
    )


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A TRL trainer, our copy of its model, and random old, reference and correction values [4, WIDTH]."""
    ours = make("qwen2")
    trl = trl_trainer(tmp_path_factory.mktemp("trl"), make("qwen2"), lambda completions, **_: [0.0] * 4)
    inputs = trl_inputs(GROUPS)
    with torch.no_grad():
        both = [torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask")]
        now = trl._get_per_token_logps_and_entropies(trl.model, *both, WIDTH)[0]
    rng = torch.Generator().manual_seed(5)
    noise = lambda: torch.randn(now.shape, generator=rng)  # noqa: E731
    return SimpleNamespace(
        trl=trl,
        model=ours,
        inputs=inputs,
        now=now,
        old=now + 0.5 * noise(),
        reference=now + 0.3 * noise(),
        ratio=2 * torch.rand(now.shape, generator=rng),
    )


def layout(packing: bool):
    """The microbatch of all rollouts."""
    groups = [Row(g.prompt_ids, [r.token_ids for r in g.rollouts], 2 * i) for i, g in enumerate(GROUPS)]
    (rows,) = plan(groups, packing, limit=1000, hidden=32)
    assert all((len(row.completions) > 1) == packing for row in rows)
    return token_batch(rows, flatten(groups), 0, torch.device("cpu"))


class Scaled(Correction):
    """The correction that `config` names, times TRL's importance ratio."""

    def __init__(self, config: GrpoConfig, ratio: torch.Tensor) -> None:
        self.named, self.ratio = find_correction(config), ratio

    def factor(self, tokens: Tokens) -> torch.Tensor:
        factor = self.named.factor(tokens)
        return self.ratio if factor is None else factor * self.ratio


OPTIONS = [
    dict(importance_level=level, delta=delta, beta=beta, off_policy_mask=mask)
    for level, delta, beta, mask in itertools.product(["token", "sequence"], [None, 1.1], [0.0, 0.04], [None, 0.05])
]


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("off_policy", [True, False], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("corrected", [True, False], ids=["importance ratio", "no importance ratio"])
def test_loss_and_gradients_equal_trl(oracle, loss, off_policy, corrected):
    batches = [layout(packing=True), layout(packing=False)]
    logprobs = [token_logprobs(oracle.model, batch, TEMPERATURE)[0] for batch in batches]
    for options in OPTIONS:
        config = GrpoConfig(loss=loss, **options)
        theirs = trl_loss(oracle, config, off_policy, corrected)
        expected = torch.autograd.grad(theirs, list(oracle.trl.model.parameters()))
        for batch, now in zip(batches, logprobs, strict=True):
            place = (batch.sequence * WIDTH + batch.index) - (LENGTHS.cumsum(0) - LENGTHS)[batch.sequence]
            ours, sums = policy_loss(
                now,
                oracle.old.flatten()[place] if off_policy else now.detach(),
                batch.sequence,
                ADVANTAGES,
                find_loss(loss).weights(LENGTHS, WIDTH),
                config,
                find_loss(loss),
                Scaled(config, oracle.ratio.flatten()[place]) if corrected else find_correction(config),
                reference=oracle.reference.flatten()[place],
            )
            actual = torch.autograd.grad(ours, list(oracle.model.parameters()), retain_graph=True)
            difference = max((a - b).abs().max() for a, b in zip(expected, actual, strict=True))
            assert abs(theirs.item() - ours.item()) <= TOLERANCE, config
            assert difference <= TOLERANCE, config
            for name, value in trl_metrics(oracle, config).items():
                count = sums["clip/count"] if name.startswith("clip/") else LENGTHS.sum()
                assert (sums[name] / count).item() == pytest.approx(value, abs=TOLERANCE), (name, config)


def trl_loss(oracle, config: GrpoConfig, off_policy: bool, corrected: bool) -> torch.Tensor:
    trl = oracle.trl
    trl.loss_type = "grpo" if config.loss == "gspo" else config.loss
    trl.importance_sampling_level = config.importance_level
    trl.beta, trl.args.delta = config.beta, config.delta
    trl.epsilon_low, trl.epsilon_high = clip_range(config, find_loss(config.loss))
    trl.off_policy_mask_threshold = config.off_policy_mask
    trl.use_vllm = trl.vllm_importance_sampling_correction = corrected
    inputs = dict(oracle.inputs, advantages=ADVANTAGES, ref_per_token_logps=oracle.reference)
    if off_policy:
        inputs["old_per_token_logps"] = oracle.old
    if corrected:
        inputs["importance_sampling_ratio"] = oracle.ratio
    return trl.compute_loss(trl.model, inputs)


def trl_metrics(oracle, config: GrpoConfig) -> dict[str, float]:
    """What TRL logged last, under the names of our sums."""
    names = {"clip_ratio/low_mean": "clip/low", "clip_ratio/high_mean": "clip/high"}
    if config.loss == "cispo":
        names = {"cispo_clip_ratio": "clip/high"}
    elif config.delta is not None:
        names = {}  # TRL compares the ratio after the cap, ours before it
    if config.beta:
        names["kl"] = "kl"
    return {ours: oracle.trl._metrics["train"][theirs][-1] for theirs, ours in names.items()}


def test_logprobs_and_entropy_equal_trl(oracle):
    batch = layout(packing=True)
    inputs = oracle.inputs
    both = [torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask")]
    theirs = oracle.trl._get_per_token_logps_and_entropies(oracle.trl.model, *both, WIDTH, compute_entropy=True)
    kept = inputs["completion_mask"].bool()
    for theirs_, ours in zip(theirs, token_logprobs(oracle.model, batch, TEMPERATURE, entropy=True), strict=False):
        in_order = torch.empty_like(ours).index_copy(0, batch.index, ours)
        torch.testing.assert_close(in_order, theirs_[kept], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("mask_truncated", [True, False])
def test_a_whole_step_has_the_gradient_of_trl(oracle, loss, packing, mask_truncated):
    """Advantages, a dropped group (the second has no signal), truncated rollouts and microbatches at once."""
    rewards = [1.0, 0.0, 1.0, 1.0]
    groups = [
        group(rewards[:2], lengths=[6, 4], prompt=5, seed=1, unfinished=[0]),
        group(rewards[2:], lengths=[2, 1], prompt=3, seed=2),
    ]
    config = GrpoConfig(loss=loss, mask_truncated=mask_truncated, microbatch_tokens=12, grad_clip=1e-9)
    policy = TinyPolicy(make("qwen2"), packing=packing)
    ours = watch_gradients(policy)
    metrics = Trainer(policy, config, Sampling(WIDTH, TEMPERATURE)).step(groups)

    advantage = advantages(groups, config, {})
    assert advantage[2:].tolist() == [0.0, 0.0]
    inputs = trl_inputs(groups) | {"advantages": advantage}
    if mask_truncated:
        inputs["completion_mask"][0] = 0
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    trl = oracle.trl
    trl.loss_type, trl.importance_sampling_level = ("grpo", "sequence") if loss == "gspo" else (loss, "token")
    trl.beta, trl.args.delta, trl.off_policy_mask_threshold, trl.use_vllm = 0.0, None, None, False
    trl.epsilon_low, trl.epsilon_high = clip_range(config, find_loss(config.loss))
    theirs = trl.compute_loss(trl.model, inputs)
    trl.model.zero_grad()
    theirs.backward()
    assert metrics["loss"] == pytest.approx(theirs.item(), abs=TOLERANCE)
    for name, p in trl.model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, atol=TOLERANCE, rtol=0)


REWARDS = torch.tensor([[1.0, 0.2], [0.0, 0.4], [1.0, 0.4], [3.0, 0.1]])
PARTLY_SCORED = torch.tensor([[1.0, torch.nan], [0.0, 0.4], [torch.nan, torch.nan], [3.0, 0.1]])
SCALES = {"group_std": "group", "batch_std": "batch", "none": "none"}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", [*SCALES, "gdpo"])
@pytest.mark.parametrize("rewards", [REWARDS, PARTLY_SCORED], ids=["scored", "partly scored"])
def test_advantages_equal_trl(tmp_path, rewards, method, size):
    weights = [1.0, 0.5]
    functions = [lambda completions, k=k, **_: [None if r.isnan() else r.item() for r in rewards[:, k]] for k in (0, 1)]
    for i, function in enumerate(functions):
        function.__name__ = f"f{i}"
    trl = trl_trainer(
        tmp_path,
        make("qwen2"),
        functions,
        num_generations=size,
        reward_weights=weights,
        scale_rewards=SCALES.get(method, "group"),
        multi_objective_aggregation="normalize_then_sum" if method == "gdpo" else "sum_then_normalize",
    )
    rollouts = [r for g in GROUPS for r in g.rollouts]
    prompts = [g.prompt_ids for g in GROUPS for _ in g.rollouts]
    trl._generate = lambda _: (
        prompts,
        [r.token_ids for r in rollouts],
        None,
        ["w3"] * 4,
        None,
        {},
        None,
        None,
    )
    theirs = trl._generate_and_score_completions([{"prompt": "w3"}] * 4)["advantages"]

    named = [{f"f{k}": None if r.isnan() else r.item() for k, r in enumerate(row)} for row in rewards]
    sums = (rewards * torch.tensor(weights)).nansum(1).tolist()
    groups = []
    for first in range(0, 4, size):
        groups.append(group([0.0] * size))
        for i, rollout in enumerate(groups[-1].rollouts, first):
            rollout.rewards, rollout.reward = named[i], sums[i]
    config = GrpoConfig(aggregation="normalize_then_sum") if method == "gdpo" else GrpoConfig(advantage=method)
    ours = advantages(groups, config, {"f0": weights[0], "f1": weights[1]})
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
