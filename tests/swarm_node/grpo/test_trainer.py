"""The trainer on tiny real models: learning, splitting, running out of memory, resuming."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_node.config import GrpoConfig
from swarm_node.errors import CheckpointError, UserError
from swarm_node.grpo.batch import Row
from swarm_node.grpo.losses import LOSSES
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.grpo.trainer import Trainer, default_learning_rate
from swarm_node.policy.logprobs import token_logprobs
from swarm_node.types import Group, Sampling, Turn
from tests.support.tiny_policy import VOCABULARY, TinyPolicy, batch, group, make, watch_gradients

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it

SAMPLING = Sampling(max_new_tokens=6)


def some_groups() -> list[Group]:
    return [
        group([1.0, 0.0, 0.0], prompt=5, seed=1),
        group([0.0, 1.0, 1.0, 0.5], prompt=3, seed=2),
        group([1.0, 1.0], prompt=4, seed=3),  # no signal
    ]


def lora(kind: str = "llama") -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(make(kind), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))


def step(config: GrpoConfig, groups: list[Group], model=None, packing: bool = True):
    """Gradient before clipping and metrics of one step."""
    policy = TinyPolicy(model or make(), packing=packing)
    gradients = watch_gradients(policy)
    return gradients, Trainer(policy, config, SAMPLING).step(groups)


def recorded(model: torch.nn.Module, groups: list[Group], version: int = 0) -> list[Group]:
    """The groups with the log-probs that `model` has for them."""
    for g in groups:
        g.policy_version = version
        for r in g.rollouts:
            with torch.no_grad():
                b = batch([Row(g.prompt_ids, [r.token_ids], 0)], packing=False)
                r.turns[0].logprobs = token_logprobs(model, b, SAMPLING.temperature)[0].tolist()
    return groups


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: single numbers, and shapes that depend on values."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        return function(*args, **kwargs or {})


def test_microbatches_of_packed_rows_make_no_waits():
    counts, groups = [], some_groups()
    for tokens in (8192, 20):
        policy = TinyPolicy(make())
        trainer = Trainer(policy, GrpoConfig(microbatch_tokens=tokens), SAMPLING)
        rows = [Row(g.prompt_ids, [r.token_ids for r in g.rollouts], 0) for g in groups]
        with Waits() as waits:
            trainer.step(groups)
        counts.append((len(trainer.plan(rows)), waits.count))
    (few, first), (many, second) = counts
    assert many > few and first == second


@pytest.mark.parametrize("packing", [True, False])
def test_only_the_answers_of_a_dialogue_are_trained_on(packing: bool):
    """Two answers with a text between them: gradient of mean(-A log p) over the answers' tokens, in their context."""
    g = group([1.0, 0.0])
    g.rollouts[0].turns = [Turn([10, 11], [], True), Turn([12], [], True, context=[7, 8])]
    g.rollouts[1].turns = [Turn([13, 14], [], True)]
    g.advantages = [1.0, -0.5]
    gradients, _ = step(GrpoConfig(loss="dapo"), [g], packing=packing)
    twin, losses = make(), []
    for rollout, advantage in zip(g.rollouts, g.advantages, strict=True):
        ids = torch.tensor([g.prompt_ids + rollout.spoken])
        logprobs = twin(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        own = torch.tensor([own for turn in rollout.turns for own in turn.is_own])
        losses.append(-advantage * logprobs[len(g.prompt_ids) - 1 :][own])
    assert len(tokens := torch.cat(losses)) == 5
    tokens.mean().backward()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("weights", "updates"), [(None, 1), ({"a": 1.0}, 1), ({"a": 0.0}, 0)])
def test_a_reward_without_weight_teaches_nothing(weights: dict[str, float] | None, updates: int):
    g = group([1.0, 0.0, 0.0])
    for rollout in g.rollouts:
        rollout.rewards = {"a": rollout.reward}
    policy = TinyPolicy(make())
    Trainer(policy, GrpoConfig(aggregation="normalize_then_sum"), SAMPLING, reward_weights=weights).step([g])
    assert policy.version == updates


@pytest.mark.parametrize("model", [make("llama"), make("qwen2"), lora()], ids=["llama", "qwen2", "lora"])
@pytest.mark.parametrize("loss", LOSSES)
def test_packed_plain_and_any_microbatch_give_one_gradient(loss, model):
    groups = some_groups()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    results = []
    for packing, tokens in ((True, 8192), (False, 8192), (True, 20), (False, 9), (False, 1)):
        config = GrpoConfig(loss=loss, beta=0.05, microbatch_tokens=tokens)
        results.append(step(config, groups, model, packing))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
    first, metrics = results[0]
    assert max(g.abs().max() for g in first.values()) > 1e-3
    for gradients, other in results[1:]:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, first[name], atol=1e-5, rtol=1e-4)
        for name, value in metrics.items():
            if not name.startswith("perf/"):
                assert other[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name


@pytest.mark.parametrize("loss", LOSSES)
def test_training_makes_rewarded_completions_likelier(loss):
    policy = TinyPolicy(make())
    trainer = Trainer(policy, GrpoConfig(loss=loss, learning_rate=1e-2), SAMPLING)
    g = group([1.0, 0.0, 0.0, 1.0], lengths=[4, 4, 4, 4])

    def chances() -> list[float]:
        return [sum(r.logprobs) for r in recorded(policy.model, [g], policy.version)[0].rollouts]

    before = chances()
    for _ in range(5):
        trainer.step([g])
    after = chances()
    change = [b - a for a, b in zip(before, after, strict=True)]
    assert min(change[0], change[3]) > 1.0 and max(change[1], change[2]) < -1.0
    assert policy.version == 5


def test_groups_without_signal_leave_the_policy_alone():
    policy = TinyPolicy(make())
    trainer = Trainer(policy, GrpoConfig(), SAMPLING)
    trainer.step(some_groups())  # so that there is momentum
    before = [p.detach().clone() for p in policy.trainable_parameters()]
    seen = trainer.num_tokens
    groups = [group([1.0, 1.0], lengths=[2, 3]), group([0.0, 0.0], lengths=[1, 1])]
    metrics = trainer.step(groups)
    assert all(torch.equal(a, p) for a, p in zip(before, policy.trainable_parameters(), strict=True))
    assert metrics == {"loss": 0.0, "grad_norm": 0.0, "num_tokens": seen}, "no update was made of them"
    assert policy.version == 1


def test_a_step_without_groups_only_asks():
    policy = TinyPolicy(make())
    trainer = Trainer(policy, GrpoConfig(beta=0.1), SAMPLING)
    asked = []
    metrics = trainer.step([], before_update=lambda: asked.append(policy.version))
    assert metrics == {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 0.0}
    assert asked == [0] and policy.version == 0 and trainer.optimizer.updates == 0


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [1.0, 1.0]], ids=["signal", "no signal"])
def test_a_step_given_up_changes_nothing(rewards):
    class GiveUp(Exception):
        pass

    def give_up() -> None:
        raise GiveUp

    policy = TinyPolicy(make())
    trainer = Trainer(policy, GrpoConfig(iterations=2), SAMPLING)
    before = [p.detach().clone() for p in policy.trainable_parameters()]
    with pytest.raises(GiveUp):
        trainer.step([group(rewards)], before_update=give_up)
    assert all(torch.equal(a, p) for a, p in zip(before, policy.trainable_parameters(), strict=True))
    tensors, numbers = trainer.state_dict()
    assert numbers == {"updates": 0, "num_tokens": 0} and policy.version == 0
    assert all((t == 0).all() for t in tensors.values())

    asked = []
    trainer.step([group(rewards)], before_update=lambda: asked.append(policy.version))
    assert asked == [0]


def test_groups_without_signal_count_for_kl_only():
    seen = []
    for beta in (0.0, 0.1):
        policy = TinyPolicy(make())
        policy.model.model.register_forward_hook(lambda _, args, kwargs, out: seen.append(kwargs), with_kwargs=True)
        Trainer(policy, GrpoConfig(beta=beta), SAMPLING).step([group([1.0, 0.0]), group([1.0, 1.0])])
    assert [len(kwargs["input_ids"]) for kwargs in seen] == [1, 2]  # the reference is another module


def test_kl_pulls_towards_the_reference():
    gradients, metrics = step(GrpoConfig(beta=0.1), some_groups())
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    policy = TinyPolicy(make())
    trainer = Trainer(policy, GrpoConfig(beta=1.0, learning_rate=1e-2), SAMPLING)
    free = TinyPolicy(make())
    unbound = Trainer(free, GrpoConfig(beta=1e-9, learning_rate=1e-2), SAMPLING)
    for _ in range(10):
        held, away = trainer.step(some_groups()), unbound.step(some_groups())
    assert 0 < held["kl"] < away["kl"] / 2


def test_an_adapters_reference_is_its_base_model():
    model = lora()
    _, metrics = step(GrpoConfig(beta=0.1), some_groups(), model)
    assert metrics["kl"] > 1e-3  # the adapter does not start at zero


def test_iterations_take_ratios_to_the_first_pass():
    """The second update sees a policy that moved: an empty clip range clips all that moved as it should."""
    groups = [group([1.0, 0.0, 0.0, 1.0], lengths=[4, 4, 4, 4])]
    once = step(GrpoConfig(epsilon_low=0.0, epsilon_high=0.0, learning_rate=1e-2), groups)[1]
    policy = TinyPolicy(make())
    config = GrpoConfig(iterations=2, epsilon_low=0.0, epsilon_high=0.0, learning_rate=1e-2)
    twice = Trainer(policy, config, SAMPLING).step(groups)
    assert once["clip_ratio/region_mean"] == 0.0
    low, high, both = (twice[f"clip_ratio/{name}_mean"] for name in ("low", "high", "region"))
    assert min(low, high) > 0 and low + high == pytest.approx(both) and 0.3 < both <= 1
    assert policy.version == 2


def test_stale_ratios_are_to_the_sampling_version():
    model = make()
    groups = recorded(make(seed=7), [group([1.0, 0.0, 0.0, 1.0])])
    fresh = step(GrpoConfig(), groups, model)[1]
    assert fresh["clip_ratio/region_mean"] == 0.0
    policy = TinyPolicy(make(), version=3)
    stale = Trainer(policy, GrpoConfig(), SAMPLING).step(groups)
    assert stale["clip_ratio/region_mean"] > 0.2


def test_a_peers_rollouts_start_at_ratio_one():
    groups = recorded(make(seed=7), [group([1.0, 0.0, 0.0, 1.0])], version=9)
    groups[0].peer = "12D3KooW"
    metrics = step(GrpoConfig(), groups)[1]
    assert metrics["clip_ratio/region_mean"] == 0.0
    assert "sampling/logp_difference" not in metrics


def test_the_tripwire_compares_with_recorded_logprobs():
    same = step(GrpoConfig(), recorded(make(), some_groups()))[1]
    assert same["sampling/logp_difference"] < 1e-5
    other = step(GrpoConfig(), recorded(make(seed=7), some_groups()))[1]
    assert other["sampling/logp_difference"] > 0.1
    nucleus = Trainer(TinyPolicy(make()), GrpoConfig(), Sampling(6, top_p=0.9))
    assert "sampling/logp_difference" not in nucleus.step(recorded(make(), some_groups()))


def test_metrics_of_the_training():
    groups = [
        group([1.0, 0.0], lengths=[2, 5], prompt=4, unfinished=[1]),
        group([0.5, 0.5, None], lengths=[3, 3, 1], prompt=2),
    ]
    metrics = step(GrpoConfig(beta=0.1), recorded(make(), groups))[1]
    assert metrics.keys() == {
        "loss", "grad_norm", "learning_rate", "entropy", "kl", "num_tokens", "perf/trained_tok_s",
        "sampling/logp_difference", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    }  # fmt: skip
    assert metrics["num_tokens"] == 2 + 5 + 3 + 3 + 1 + 2 * 4 + 3 * 2
    assert metrics["grad_norm"] > 0 and metrics["perf/trained_tok_s"] > 0
    assert 0 < metrics["entropy"] < math.log(64)
    assert metrics["learning_rate"] == 2e-4


def test_truncated_rollouts_can_be_left_out():
    whole = [group([1.0, 0.0, 0.5], seed=4)]
    cut = [group([1.0, 0.0, 0.5], seed=4, unfinished=[1])]
    kept, _ = step(GrpoConfig(loss="dr_grpo"), cut)
    same, _ = step(GrpoConfig(loss="dr_grpo", mask_truncated=True), whole)
    masked, _ = step(GrpoConfig(loss="dr_grpo", mask_truncated=True), cut)
    assert all(torch.equal(kept[name], same[name]) for name in kept)
    assert any((kept[name] - masked[name]).abs().max() > 1e-4 for name in kept)


def test_warm_up_and_clipping():
    policy = TinyPolicy(make())
    trainer = Trainer(policy, GrpoConfig(learning_rate=1.0e-3, warmup=4), SAMPLING)
    rates = [trainer.step(some_groups())["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("grad_clip", [1e-3, 1e3])
def test_an_update_is_that_of_torch(grad_clip):
    """Two steps against clip_grad_norm_ and AdamW on the same gradients; matrices decay, vectors do not."""
    config = GrpoConfig(learning_rate=1e-3, grad_clip=grad_clip, weight_decay=0.1)
    policy, twin = TinyPolicy(make()), make()
    gradients = watch_gradients(policy)
    trainer = Trainer(policy, config, SAMPLING)
    matrices, vectors = ([p for p in twin.parameters() if (p.ndim > 1) == big] for big in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3, betas=config.betas, weight_decay=0.1, foreach=False, fused=False,
    )  # fmt: skip
    for _ in range(2):
        trainer.step(some_groups())
        for name, p in twin.named_parameters():
            p.grad = gradients[name].clone()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), grad_clip)
        optimizer.step()
    for ours, theirs in zip(policy.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_small_updates_survive_in_bfloat16():
    """Weights near 1 are 2^-8 apart: a hundred steps of 1e-4 show only because a master copy adds them up."""
    policy = TinyPolicy(make().to(torch.bfloat16))
    trainer = Trainer(policy, GrpoConfig(learning_rate=1e-4), SAMPLING)
    norm = policy.model.model.norm.weight
    assert (norm == 1).all()
    groups = some_groups()
    for _ in range(100):
        trainer.step(groups)
    assert (norm != 1).any()
    assert trainer.state_dict()[0]["master.model.norm.weight"].dtype == torch.float32


def test_a_non_finite_gradient_is_reported_and_skipped():
    lines = []
    policy = TinyPolicy(make())
    with torch.no_grad():
        policy.model.model.norm.weight[0] = torch.inf
    before = [p.detach().clone() for p in policy.trainable_parameters()]
    metrics = Trainer(policy, GrpoConfig(), SAMPLING, lines.append).step(some_groups())
    assert len(lines) == 1 and "skipped" in lines[0]
    assert "grad_norm" not in metrics and policy.version == 0
    assert all(torch.equal(a, p) for a, p in zip(before, policy.trainable_parameters(), strict=True))


@pytest.mark.parametrize("model", [make, lora, lambda: make().to(torch.bfloat16)], ids=["full", "lora", "bfloat16"])
def test_a_resumed_trainer_goes_on_unchanged(model):
    config = GrpoConfig(warmup=5, learning_rate=1e-3)
    straight, first = TinyPolicy(model()), TinyPolicy(model())
    trainer, before = Trainer(straight, config, SAMPLING), Trainer(first, config, SAMPLING)
    for seed in range(2):
        for t in (trainer, before):
            t.step([group([1.0, 0.0, 0.5], seed=seed)])
    tensors, numbers = before.state_dict()
    assert numbers == {"updates": 2, "num_tokens": before.num_tokens}
    second = TinyPolicy(model(), version=first.version)
    second.model.load_state_dict(first.model.state_dict())
    after = Trainer(second, config, SAMPLING)
    after.load_state_dict({name: t.clone() for name, t in tensors.items()}, numbers)
    for seed in range(2, 4):
        expected = trainer.step([group([1.0, 0.0, 0.5], seed=seed)])
        actual = after.step([group([1.0, 0.0, 0.5], seed=seed)])
        for metrics in (expected, actual):
            del metrics["perf/trained_tok_s"]
        assert actual == expected
    for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_another_policy_is_refused():
    trainer = Trainer(TinyPolicy(make("llama")), GrpoConfig(), SAMPLING)
    tensors, numbers = Trainer(TinyPolicy(make("qwen2")), GrpoConfig(), SAMPLING).state_dict()
    with pytest.raises(CheckpointError, match="names and shapes"):
        trainer.load_state_dict(tensors, numbers)
    with pytest.raises(CheckpointError, match="number"):
        trainer.load_state_dict(trainer.state_dict()[0], {})


class Cramped(TinyPolicy):
    """A policy whose model runs out of memory above `most` tokens in one forward pass."""

    most = 0
    error: type[BaseException] = torch.OutOfMemoryError
    message = "CUDA out of memory. Tried to allocate 2.00 GiB"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes: list[int] = []

        def allocate(_, args, kwargs) -> None:
            self.sizes.append(kwargs["input_ids"].numel())
            if self.sizes[-1] > self.most:
                raise self.error(self.message)

        self.model.model.register_forward_pre_hook(allocate, with_kwargs=True)


def cramped_groups() -> list[Group]:
    """Four groups of four; packed a row is 5 + 4 * 4 = 21 tokens, plain it is 9."""
    return [group([1.0, 0.0, 0.0, 1.0], lengths=[5] * 4, prompt=5, seed=seed) for seed in range(4)]


@pytest.mark.parametrize(
    ("most", "said"),
    [
        (84, []),
        (50, ["microbatches of 42 tokens"]),
        (30, ["microbatches of 42 tokens", "microbatches of 21 tokens"]),
        (20, ["microbatches of 42 tokens", "microbatches of 21 tokens", "plain rows"]),
        (9, ["42 tokens", "21 tokens", "plain rows", "microbatches of 9 tokens"]),
    ],
)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (RuntimeError, "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        (RuntimeError, "MPS backend out of memory (MPS allocated: 17.00 GB)"),
    ],
    ids=["cuda", "cpu", "mps"],
)
def test_memory_that_runs_out_is_adapted_to(most, said, error, message):
    expected, _ = step(GrpoConfig(), cramped_groups())
    policy = Cramped(make())
    policy.most, policy.error, policy.message = most, error, message
    gradients, lines = watch_gradients(policy), []
    trainer = Trainer(policy, GrpoConfig(), SAMPLING, lines.append)
    trainer.step(cramped_groups())
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], atol=1e-5, rtol=1e-4)
    assert policy.version == 1

    policy.sizes.clear()
    trainer.step(cramped_groups())
    assert max(policy.sizes) <= most and len(lines) == len(said)  # it stays adapted


def test_memory_may_run_out_in_a_later_microbatch():
    """The gradient of the microbatches that did fit must not count twice."""
    expected, _ = step(GrpoConfig(), cramped_groups())
    policy = Cramped(make())
    policy.most = 10**6
    gradients, lines = watch_gradients(policy), []

    def fail_once(*_) -> None:
        if len(policy.sizes) == 2 and not lines:
            raise torch.OutOfMemoryError

    policy.model.model.layers[1].register_forward_pre_hook(fail_once)
    Trainer(policy, GrpoConfig(microbatch_tokens=42), SAMPLING, lines.append).step(cramped_groups())
    assert len(lines) == 1 and policy.sizes == [42, 42, 21, 21, 21, 21]
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], atol=1e-5, rtol=1e-4)


def test_a_rollout_beyond_memory_is_a_user_error():
    policy = Cramped(make())
    policy.most = 8
    with pytest.raises(UserError, match="one rollout of 9 tokens.*max_new_tokens"):
        Trainer(policy, GrpoConfig(), SAMPLING, lambda _: None).step(cramped_groups())
    assert policy.version == 0


@pytest.mark.parametrize("split_head", [True, False])
def test_mean_nll_does_not_depend_on_cuts(split_head, monkeypatch):
    policy = TinyPolicy(make(), split_head=split_head)
    groups = recorded(policy.model, cramped_groups())
    values = [-value for g in groups for r in g.rollouts for value in r.logprobs]
    trainer = Trainer(policy, GrpoConfig(), SAMPLING)
    assert trainer.mean_nll(groups) == pytest.approx(sum(values) / len(values), rel=1e-4)
    monkeypatch.setattr("swarm_node.policy.logprobs.LOGITS_BYTES", 42 * 4 * VOCABULARY)
    passes = []
    policy.model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    policy.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    assert trainer.mean_nll(groups) == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert max(passes) == (84 if split_head else 42)


def test_memory_shortage_while_judging_is_said_once():
    policy, lines = Cramped(make()), []
    trainer = Trainer(policy, GrpoConfig(), SAMPLING, lines.append)
    assert [trainer.mean_nll(cramped_groups()) for _ in range(2)] == [None, None]
    assert len(lines) == 1 and "out of memory while judging" in lines[0]
    policy.error, policy.message = RuntimeError, "something else"
    with pytest.raises(RuntimeError, match="something else"):
        trainer.mean_nll(cramped_groups())


class Elsewhere(TinyPolicy):
    """A policy whose passes are computed ahead of who asks for them, and whose gradient is brought back afterwards."""

    def passes(self, batches, temperature, entropy=False, reference=False):
        gradient = torch.is_grad_enabled() and not reference
        done = list(super().passes(batches, temperature, entropy, reference))
        assert len(done) > 1
        for b, logprobs, entropies in done:
            assert logprobs.requires_grad == gradient
            leaf = logprobs.detach().requires_grad_(gradient)
            yield b, leaf, entropies
            if gradient:
                logprobs.backward(leaf.grad)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_log_probabilities_may_come_from_elsewhere(beta):
    config = GrpoConfig(beta=beta, iterations=2, microbatch_tokens=9, learning_rate=1e-3)
    here, elsewhere = TinyPolicy(make()), Elsewhere(make())
    trainers = [Trainer(policy, config, SAMPLING) for policy in (here, elsewhere)]
    for _ in range(2):
        expected, actual = (trainer.step(some_groups()) for trainer in trainers)
        del expected["perf/trained_tok_s"], actual["perf/trained_tok_s"]
        assert actual == expected
    assert trainers[0].mean_nll(cramped_groups()) == trainers[1].mean_nll(cramped_groups())
    for ours, theirs in zip(here.model.parameters(), elsewhere.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(here.model.lm_head.weight, here.start.lm_head.weight)


def test_passes_keep_the_gradient_mode_of_the_call():
    policy = TinyPolicy(make())
    batches = [batch([Row(g.prompt_ids, [r.token_ids for r in g.rollouts], 0)], packing=True) for g in some_groups()]
    with torch.no_grad():
        without = policy.passes(batches, 0.7, entropy=True)
    reference = policy.passes(batches, 0.7, reference=True)
    wanted = policy.passes(batches, 0.7)
    for b in batches:
        asked, logprobs, entropies = next(without)
        assert asked is b and not logprobs.requires_grad and torch.is_grad_enabled()
        assert entropies is not None and len(entropies) == len(b.target) == len(logprobs)
        assert not next(reference)[1].requires_grad
        with torch.no_grad():
            asked, same, entropies = next(wanted)
            assert same.requires_grad and not torch.is_grad_enabled() and entropies is None
        assert torch.equal(same.detach(), logprobs)
        same.sum().backward()
    with pytest.raises(StopIteration):
        next(wanted)


class Counted(Optimizer):
    """An optimiser with a length, 0 at first."""

    def __len__(self):
        return self.updates


@pytest.mark.parametrize("kind", [Optimizer, Counted])
def test_the_optimiser_may_be_brought_along(kind):
    policy = TinyPolicy(make())
    optimizer = kind(policy.model.named_parameters(), GrpoConfig(), 3e-3)
    trainer = Trainer(policy, GrpoConfig(learning_rate=1.0), SAMPLING, optimizer=optimizer)
    assert trainer.step(some_groups())["learning_rate"] == 3e-3
    assert trainer.optimizer is optimizer and optimizer.updates == 1


class Stuck(TinyPolicy):
    """A policy with a cache that nobody clears, or a version that does not rise."""

    stuck = ""

    def __setattr__(self, name, value):
        if name != "version" or self.stuck != "version" or value == 0:
            super().__setattr__(name, value)

    @property
    def fingerprint(self):
        values = "" if self.stuck == "fingerprint" else [float(p.detach().sum()) for p in self.trainable_parameters()]
        return str(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stuck", ["", "version", "fingerprint", "weights"])
def test_averaged_weights_become_those_of_the_policy(stuck, dtype):
    policy = Stuck(make().to(dtype))
    policy.stuck = stuck
    trainer = Trainer(policy, GrpoConfig(), SAMPLING)
    tensors = trainer.optimizer.weights()
    if stuck == "weights":
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    trainer.averaged(tensors, trainer.before_averaging(tensors)) if not stuck else None  # two that were the same
    before = trainer.before_averaging(tensors)
    version = policy.version
    for tensor in tensors.values():
        tensor.mul_(1.25)
    trainer.optimizer.publish()
    if not stuck:
        trainer.averaged(tensors, before)
        assert policy.version == version + 1 and policy.fingerprint != before.fingerprint
        return
    said = {
        "weights": "goes on with other values",
        "version": "still of version 0",
        "fingerprint": "fingerprint is still",
    }
    with pytest.raises(RuntimeError, match=said[stuck]):
        trainer.averaged(tensors, before)


def test_other_errors_are_not_taken_for_memory():
    policy = Cramped(make())
    policy.most, policy.error, policy.message = 8, RuntimeError, "mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match="mat1"):
        Trainer(policy, GrpoConfig(), SAMPLING).step(cramped_groups())


def test_default_learning_rates():
    assert Trainer(TinyPolicy(make()), GrpoConfig(), SAMPLING).optimizer.learning_rate == 2e-4
    assert Trainer(TinyPolicy(lora()), GrpoConfig(), SAMPLING).optimizer.learning_rate == 2e-4
    assert default_learning_rate(False, 25_000_000) == 2e-6
    assert default_learning_rate(True, 25_000_000) == 2e-4


def test_a_users_loss_is_weighed_like_ours(tmp_path):
    """REINFORCE written outside gives the gradient of our token mean without a clip: at ratio 1 they are the same."""
    (tmp_path / "mine.py").write_text(
        "def reinforce(logprobs, old, advantage, sequence): return -advantage * logprobs\n"
        "def scalar(logprobs, old, advantage, sequence): return logprobs.sum()\n"
        "def dead(logprobs, old, advantage, sequence): return logprobs.detach()\n"
        "def broken(logprobs, old, advantage, sequence): return nothing\n"
    )
    groups = some_groups()
    ours, _ = step(GrpoConfig(loss="dapo", beta=0.1), groups)
    theirs, metrics = step(GrpoConfig(loss=f"{tmp_path}/mine.py:reinforce", beta=0.1), groups)
    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient)
    assert metrics["clip_ratio/region_mean"] == 0.0
    for name, message in (("scalar", "one number a token"), ("dead", "with a gradient"), ("broken", "NameError")):
        with pytest.raises(UserError, match=f"grpo.loss .*{message}"):
            step(GrpoConfig(loss=f"{tmp_path}/mine.py:{name}"), groups)
    with pytest.raises(UserError, match="grpo.loss .*cannot import"):
        step(GrpoConfig(loss="no.such.module:f"), groups)


def test_a_foreign_group_brings_its_advantages():
    own, foreign = group([1.0, 0.0, 0.0], seed=1), group([0.0, 0.0], seed=2)
    foreign.peer = "someone"
    without, _ = step(GrpoConfig(), [own, foreign])
    foreign.advantages = [2.0, -2.0]
    brought, _ = step(GrpoConfig(), [own, foreign])
    assert any(not torch.equal(without[name], gradient) for name, gradient in brought.items())
    foreign.advantages = [0.0, 0.0]
    nothing, _ = step(GrpoConfig(), [own, foreign])
    assert all(torch.equal(without[name], gradient) for name, gradient in nothing.items())


MANY = [0.1, 0.9, 0.4, 0.0, 0.6, 1.0, 0.5, 0.3]


@pytest.mark.parametrize(("masked", "kept"), [(False, [0, 1, 3, 5]), (True, [0, 1, 4, 7])])
def test_a_large_group_is_trained_on_its_extremes(masked, kept):
    """Four of eight answers, with the advantages that they have among all: (r - mean) / std. The best and the worst are
    cut off."""
    whole, part = (group(MANY, seed=5, unfinished=[3, 5]) for _ in range(2))
    rewards = torch.tensor(MANY)
    advantages = (rewards - rewards.mean()) / rewards.std()
    part.rollouts = [whole.rollouts[i] for i in kept]
    part.advantages = [float(advantages[i]) for i in kept]
    found, metrics = step(GrpoConfig(answers=4, mask_truncated=masked), [whole])
    expected, _ = step(GrpoConfig(answers=0, mask_truncated=masked), [part])
    everything, _ = step(GrpoConfig(answers=0, mask_truncated=masked), [whole])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-3)
    assert any((found[name] - gradient).abs().max() > 1e-2 for name, gradient in everything.items())
    assert metrics["num_tokens"] == sum(5 + len(r.token_ids) for r in part.rollouts), "others were sampled only"


@pytest.mark.parametrize("given", [None, [0.5 - i / 8 for i in range(8)]], ids=["judged here", "given"])
def test_a_peers_group_is_trained_on_as_it_comes(given):
    own, foreign = group([1.0, 0.0, 0.0], seed=1), group(MANY, seed=5)
    foreign.peer, foreign.advantages = "someone", given
    few, whole = (step(GrpoConfig(answers=answers), [own, foreign])[0] for answers in (4, 0))
    assert all(torch.equal(few[name], gradient) for name, gradient in whole.items())
