"""One step: groups in, `iterations` optimiser updates, metrics out.

    groups -> advantages -> drop what cannot contribute -> rows in microbatches
           -> (reference log-probs of each) -> for each: log-probs, loss, backward -> clip, AdamW, version + 1

Rollouts with zero advantage contribute exactly nothing unless there is a KL term, so they are never computed;
they still count in the loss's denominators (see `objective`). A step in which nothing contributes updates nothing.

Running out of memory is no error: the microbatch is halved, then packed rows give way to plain ones, and the update
starts again from a zero gradient. An interrupted update starts again too, after `Policy.again`.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np
import torch
from torch import Tensor

from swarm_node.config import GrpoConfig
from swarm_node.errors import CheckpointError, Interrupted, NoRoom, Unworkable
from swarm_node.grpo import advantage, batch
from swarm_node.grpo.corrections import find_correction
from swarm_node.grpo.down_sampling import down_sampled
from swarm_node.grpo.losses import find_loss
from swarm_node.grpo.objective import Loss, policy_loss
from swarm_node.grpo.off_policy import figures_by_peer, off_policy_metrics
from swarm_node.grpo.optimizer import AnyOptimizer, Optimizer, embeddings_of
from swarm_node.policy.digests import some_of
from swarm_node.policy.finite import check_updated
from swarm_node.policy.logprobs import TokenBatch, logits_bytes
from swarm_node.policy.oom import NO_ROOM_TO_TRAIN, is_out_of_memory, large_tensors_mapped
from swarm_node.policy.packed import is_packed
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import SMALL
from swarm_node.say import Once, Warned
from swarm_node.types import Group, Rollout, Sampling


@dataclass
class _Step:
    """The rollouts of a step that are trained on: b of them, with N tokens laid end to end."""

    groups: list[batch.Row]
    flat: batch.Flat
    advantages: Tensor  # [b]
    weights: Tensor  # [b] weight of each token in the loss
    peers: list[str | None]  # [b] who sampled each; None = this node
    sampled: Tensor  # [N] log-probs recorded at sampling, by this node or by a peer; NaN where there are none
    stale: Tensor  # [N] whether an older version of this policy sampled it
    foreign: Tensor  # [N] whether a peer sampled it
    old: Tensor  # [N] log-probs that ratios are taken to, as the correction says; NaN = filled in by the first pass
    now: Tensor  # [N] log-probs of the first pass
    reference: Tensor  # [N] log-probs under the reference policy, filled in the first pass


@dataclass(frozen=True)
class Before:
    """A policy as it was before its weights were averaged."""

    version: int
    fingerprint: str
    values: dict[str, Tensor]  # some values of each trained tensor


class Trainer:
    """Improves `policy` in place; holds the optimiser."""

    def __init__(
        self,
        policy: Policy,
        config: GrpoConfig,
        sampling: Sampling,
        report: Callable[[str], None] = print,
        reward_weights: Mapping[str, float] | None = None,
        optimizer: AnyOptimizer | None = None,
    ) -> None:
        """`sampling` is the sampling of this node's rollouts, and `reward_weights` by name serve GDPO only. An
        `optimizer` is given for a policy whose parameters are partly in other processes."""
        self.policy = policy
        self.config = config
        self.sampling = sampling
        self.report = report
        self.reward_weights = reward_weights or {}
        self._baseline = advantage.find_baseline(config)
        self.loss = find_loss(config.loss)
        self._correction = find_correction(config)
        self.optimizer: AnyOptimizer = _optimizer(policy.model, config) if optimizer is None else optimizer
        self.limit = config.microbatch_tokens  # most tokens of a microbatch; see `memory`
        self.maps = False  # whether large tensors are mapped one by one while it learns
        self.packing = config.packing and policy.packing
        self._unshrunk: tuple[int, bool] | None = None  # limit and packing before memory ran out
        self._padding = _most_padding(policy)
        self.num_tokens = 0
        self.measured: Callable[[dict[str, dict[str, float]]], None] = lambda figures: None  # gets `figures_by_peer`
        self._say_once = Once(report)  # failures of `logprobs`

    def step(self, groups: Sequence[Group], before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Train on `groups` (sizes may differ, there may be none); metrics of the training under TRL's names.

        `before_update` is called once, before anything that lasts has changed: until then a step can be
        given up without a trace. Metrics that need a forward pass are means over all updates of this step, and missing
        if no rollout had an advantage. UserError if not one rollout fits into memory, NotFinite if weights are spoiled.
        """
        start = time.perf_counter()
        step = self._prepare(groups)
        with large_tensors_mapped() if self.maps else nullcontext():
            metrics = {} if step is None else self._learn(step, before_update)
        if step is None or not metrics:
            before_update()
            metrics = {"loss": 0.0, "grad_norm": 0.0}
        else:
            trained = len(step.flat.target) * self.config.iterations
            metrics["perf/trained_tok_s"] = trained / (time.perf_counter() - start)
            metrics |= self._measure(step)
            if "grad_norm" in metrics:
                self.num_tokens += sum(len(row.prompt) + len(c) for row in step.groups for c in row.completions)
        return metrics | {"num_tokens": float(self.num_tokens)}

    def before_averaging(self, tensors: Mapping[str, Tensor]) -> Before:
        """The policy's state, for `averaged` to compare with. `tensors` come from `optimizer.weights()`."""
        return Before(self.policy.version, self.policy.fingerprint, self._values(tensors))

    def averaged(self, tensors: Mapping[str, Tensor], before: Before) -> None:
        """Make a new version of the policy after `tensors` were averaged with others'. RuntimeError if the model does
        not compute with them, or keeps its old version or fingerprint: nobody would notice otherwise."""
        self.policy.version += 1
        values, weights = self._values(tensors), self.policy.trainable_state()
        for name, expected in values.items():
            if not torch.equal(some_of(weights[name]), expected):
                raise RuntimeError(f"{name} was averaged, but the policy goes on with other values")
        if self.policy.version <= before.version:
            raise RuntimeError(f"weights were averaged, but the policy is still of version {self.policy.version}")
        changed = any(not torch.equal(value, before.values[name]) for name, value in values.items())
        if changed and self.policy.fingerprint == before.fingerprint:
            raise RuntimeError(f"weights were averaged, but the policy's fingerprint is still {before.fingerprint}")

    def _values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of some values of each tensor, in the model's dtype."""
        weights = self.policy.trainable_state()
        return {name: some_of(tensor).to(weights[name].dtype, copy=True) for name, tensor in tensors.items()}

    def mean_nll(self, groups: Sequence[Group]) -> float | None:
        """Mean negative log-probability (nats) of the completions' tokens under the present policy; None if it cannot
        be computed, see `logprobs`."""
        tables = self.logprobs(groups, 1.0, "judging averaged weights: they are taken as they are")
        if tables is None:
            return None
        values = [value for rollouts in tables for logprobs in rollouts for value in logprobs]
        return -math.fsum(values) / len(values)

    @torch.no_grad()
    def logprobs(self, groups: Sequence[Group], temperature: float, purpose: str) -> list[list[list[float]]] | None:
        """Log-probability of each token of each rollout of `groups` under the present policy.

        None if there is not enough memory, or if the stages of the policy refuse the rollouts. That is reported once
        for each `purpose`.
        """
        rows = _rows([(group, group.rollouts) for group in groups])
        if not rows:
            return [[] for _ in groups]
        flat = batch.flatten(rows)
        while True:
            values = torch.empty(len(flat.target), device=self.policy.device)
            try:
                for b, logprobs, _ in self.policy.passes(self._token_batches(self.plan(rows), flat), temperature):
                    values[b.index] = logprobs.float()
            except Interrupted as interrupted:
                try:
                    self.policy.again(interrupted)
                except Unworkable as error:
                    self._say_once(f"{error}/{purpose}", f"{error} while {purpose}")
                    return None
            except (RuntimeError, MemoryError) as exc:
                if not is_out_of_memory(exc):
                    raise
                self._say_once(f"memory/{purpose}", f"out of memory while {purpose}")
                return None
            else:
                parts = iter(np.split(values.cpu().numpy(), flat.start[1:]))  # one transfer for all
                return [[next(parts).tolist() for _ in group.rollouts] for group in groups]

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Everything but the weights that resuming needs: live tensors, and numbers."""
        return self.optimizer.state_dict(), {"updates": self.optimizer.updates, "num_tokens": self.num_tokens}

    def load_state_dict(self, tensors: dict[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Take over the result of `state_dict`. CheckpointError if it is another policy's, and UserError if its moments
        are those of another `grpo.optimizer`; nothing is changed then."""
        if numbers.keys() != {"updates", "num_tokens"}:
            raise CheckpointError("its trainer state lacks a number")
        self.optimizer.load_state_dict(tensors, numbers["updates"])
        self.num_tokens = numbers["num_tokens"]

    def _prepare(self, groups: Sequence[Group]) -> _Step | None:
        """The rollouts of `groups` that are trained on, with their tensors; None if there are none."""
        if not groups:
            return None
        config, device = self.config, self.policy.device
        advantages = advantage.advantages(groups, config, self.reward_weights, self._baseline)
        if config.answers:
            groups = _down_sampled(groups, advantages, config, self.policy.version)
            advantages = advantage.advantages(groups, config, self.reward_weights, self._baseline)
        rollouts = [r for group in groups for r in group.rollouts]
        for rollout, value in zip(rollouts, advantages.tolist(), strict=True):
            rollout.advantage = value
        lengths = torch.tensor([0 if config.mask_truncated and not r.finished else r.num_tokens for r in rollouts])
        live = (lengths > 0) & ((advantages != 0) | (config.beta > 0))
        if not live.any():
            return None
        weights = self.loss.weights(lengths, self.sampling.max_new_tokens)

        flags = iter(live.tolist())
        kept = [[r for r in group.rollouts if next(flags)] for group in groups]
        chosen = _rows(list(zip(groups, kept, strict=True)))
        flat = batch.flatten(chosen)
        pairs = [(group, r) for group, k in zip(groups, kept, strict=True) for r in k]
        is_foreign = np.array([group.peer is not None for group, _ in pairs])
        is_stale = np.array([group.policy_version != self.policy.version for group, _ in pairs]) & ~is_foreign
        recorded = np.concatenate([_recorded(group, r, self.sampling.top_p) for group, r in pairs])
        sampled, stale, foreign = (
            torch.from_numpy(each).to(device) for each in (recorded, is_stale[flat.sequence], is_foreign[flat.sequence])
        )
        return _Step(
            groups=chosen,
            flat=flat,
            advantages=advantages[live].to(device),
            weights=weights[live].to(device),
            peers=[group.peer for group, _ in pairs],
            sampled=sampled,
            stale=stale,
            foreign=foreign,
            old=self._correction.old(sampled, stale, foreign),
            now=torch.full_like(sampled, torch.nan),
            reference=torch.full_like(sampled, torch.nan),
        )

    def _learn(self, step: _Step, before_update: Callable[[], None]) -> dict[str, float]:
        """Make the updates; their metrics, or none if these rollouts cannot be trained on."""
        metrics: dict[str, float] = {}
        totals: dict[str, float] = defaultdict(float)
        for iteration in range(self.config.iterations):
            try:
                sums, norm, metrics["learning_rate"] = self._update(step, iteration, before_update)
            except Unworkable as error:
                self.report(Warned(f"{error}: no update is made of these rollouts"))
                self.optimizer.zero_grad()
                if iteration == 0:
                    return {}
                break
            for name, value in sums.items():
                totals[name] += value
            if math.isfinite(norm):
                check_updated(self.policy.trainable_state())
                metrics["grad_norm"] = norm
                self.policy.version += 1
            else:
                self.report(Warned(f"{self.optimizer.unusable or 'the gradient is not finite'}: update skipped"))
        return metrics | _means(totals, self.loss, self.config)

    def _update(
        self, step: _Step, iteration: int, before_update: Callable[[], None]
    ) -> tuple[dict[str, float], float, float]:
        """Make one update: sums for the metrics, the gradient's norm before clipping, the learning rate."""
        asked = iteration > 0
        while True:
            try:
                sums = self._accumulate(step, iteration)
                if not asked:
                    before_update()
                    asked = True
                return sums, *self.optimizer.step()
            except Interrupted as interrupted:
                self.policy.again(interrupted)

    def _accumulate(self, step: _Step, iteration: int) -> dict[str, float]:
        """Leave the gradient of the whole step in the parameters; sums for the metrics."""
        while True:
            microbatches = self.plan(step.groups)
            self.optimizer.zero_grad()
            try:
                return self._backward(step, microbatches, iteration)
            except (RuntimeError, MemoryError) as exc:
                if not is_out_of_memory(exc):
                    raise
                self._shrink(microbatches, exc)
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()

    def plan(self, rows: Sequence[batch.Row]) -> list[list[batch.Row]]:
        """Microbatches of these rows within `limit`."""
        limit = self.limit
        if not self.policy.split_head:
            limit = min(limit, logits_bytes(self.policy.device) // (4 * self.policy.vocabulary))
        if self.policy.microbatches > 1:
            limit = min(limit, max(1, sum(row.length for row in rows) // self.policy.microbatches))
        return batch.plan(rows, self.packing, limit, self.policy.width, self._padding)

    def _token_batches(self, microbatches: list[list[batch.Row]], flat: batch.Flat) -> Iterator[TokenBatch]:
        for rows in microbatches:
            yield batch.token_batch(rows, flat, self.policy.pad_id, self.policy.device)

    def _backward(self, step: _Step, microbatches: list[list[batch.Row]], iteration: int) -> dict[str, float]:
        temperature = self.sampling.temperature
        if self.config.beta and iteration == 0:
            batches = self._token_batches(microbatches, step.flat)
            for b, before, _ in self.policy.passes(batches, temperature, reference=True):
                step.reference[b.index] = before
        totals: dict[str, Tensor] = {}
        batches = self._token_batches(microbatches, step.flat)
        for b, logprobs, entropy in self.policy.passes(batches, temperature, entropy=iteration == 0):
            now, sampled, foreign = logprobs.detach(), step.sampled[b.index], step.foreign[b.index]
            old = step.old[b.index]
            old = step.old[b.index] = torch.where(old.isnan(), now, old)
            if iteration == 0:
                step.now[b.index] = now
            value, sums = policy_loss(
                logprobs,
                old,
                b.sequence,
                step.advantages,
                step.weights,
                self.config,
                reference=step.reference[b.index] if self.config.beta else None,
                sampled=sampled,
                foreign=foreign,
                loss=self.loss,
                correction=self._correction,
            )
            value.backward()
            sums["loss"] = value.detach()
            if entropy is not None:
                comparable = ~(sampled.isnan() | step.stale[b.index] | foreign)
                sums["entropy"] = entropy.sum()
                sums["compared"] = comparable.sum()
                sums["difference"] = torch.where(comparable, (sampled - now).abs(), 0.0).sum()
            for name, part in sums.items():
                totals[name] = totals[name] + part if name in totals else part
        numbers = torch.stack([total.float() for total in totals.values()]).tolist()  # one transfer for all
        return dict(zip(totals, numbers, strict=True)) | {"tokens": float(len(step.flat.target))}

    def _measure(self, step: _Step) -> dict[str, float]:
        """Metrics of how far from the policy the step was sampled; none if all of it is its own and fresh."""
        tensors = torch.stack([step.stale.float(), step.foreign.float(), step.now, step.sampled])
        stale, foreign, now, sampled = tensors.cpu().numpy()  # one transfer for all
        stale, foreign = stale > 0, foreign > 0
        if foreign.any():
            self.measured(figures_by_peer(now, sampled, step.flat.sequence, step.peers))
        return off_policy_metrics(now, sampled, step.flat.sequence, stale, foreign)

    def _shrink(self, microbatches: list[list[batch.Row]], exc: BaseException) -> None:
        """Use less memory from now on; NoRoom if that is not possible."""
        largest = max(microbatches, key=batch.tokens)
        self._unshrunk = self._unshrunk or (self.limit, self.packing)
        if len(largest) > 1:
            self.limit = batch.tokens(largest) // 2
            self.report(Warned(f"out of memory while training: microbatches of {self.limit} tokens from now on"))
        elif len(largest[0].completions) > 1:
            self.packing = False
            self.report(Warned("out of memory while training: plain rows instead of packed ones from now on"))
        else:
            self.limit, self.packing = self._unshrunk
            raise NoRoom(NO_ROOM_TO_TRAIN.format(batch.tokens(largest)), exc) from exc


def _rows(groups: Sequence[tuple[Group, Sequence[Rollout]]]) -> list[batch.Row]:
    """A row for each group with rollouts, numbered through."""
    first = accumulate((len(rollouts) for _, rollouts in groups), initial=0)
    return [
        batch.Row(group.prompt_ids, [r.spoken for r in rollouts], i, _targets(rollouts))
        for (group, rollouts), i in zip(groups, first, strict=False)
        if rollouts
    ]


def _targets(rollouts: Sequence[Rollout]) -> list[np.ndarray] | None:
    """Places of the tokens of answers in each rollout's `spoken`; None if there are no others."""
    if all(len(rollout.turns) == 1 for rollout in rollouts):
        return None
    return [np.flatnonzero([own for turn in r.turns for own in turn.is_own]) for r in rollouts]


def _down_sampled(groups: Sequence[Group], advantages: Tensor, config: GrpoConfig, version: int) -> list[Group]:
    """The groups, own ones with `config.answers` answers, each with the advantage that it has in its whole group."""
    parts = iter(advantages.split([len(group.rollouts) for group in groups]))
    kept = []
    for i, group in enumerate(groups):
        own = next(parts).tolist()
        if group.peer is None:
            rng = random.Random(f"{version}/{i}")
            whole = msgspec.structs.replace(group, advantages=own)
            group = down_sampled(whole, config.answers or 0, rng, finished=config.mask_truncated)
        kept.append(group)
    return kept


def _most_padding(policy: Policy) -> float:
    """Padding tokens of a microbatch that cost as much as another pass; where weights are quantised, each pass
    dequantises them."""
    dear = policy.device.type != "cpu" or any(map(is_packed, policy.model.parameters()))
    return batch.PADDING if dear else batch.padding_on_cpu(policy.width)


def _recorded(group: Group, rollout: Rollout, top_p: float) -> np.ndarray:
    """Log-probs [T] that the sampler recorded; NaN if it gave none, or if `top_p` altered this node's own."""
    n = rollout.num_tokens
    is_altered = group.peer is None and top_p < 1.0
    if is_altered or len(rollout.logprobs) != n:
        return np.full(n, np.nan, dtype=np.float32)
    return np.array(rollout.logprobs, dtype=np.float32)


def _optimizer(model: torch.nn.Module, config: GrpoConfig) -> Optimizer:
    """The optimiser of all that is trained of a model in this process."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    lora, trained = hasattr(model, "peft_config"), sum(p.numel() for _, p in named)
    rate = config.learning_rate or default_learning_rate(lora, trained)
    return Optimizer(named, config, rate, embeddings=embeddings_of(model))


def default_learning_rate(lora: bool, trained: int) -> float:
    """2e-4 for an adapter, since the best rate of one is far above that of all weights (docs/grpo.md). In full training
    2e-4 for small models, else 2e-6. `trained` counts parameters."""
    return 2e-4 if lora or trained < SMALL else 2e-6


def _means(totals: Mapping[str, float], loss: Loss, config: GrpoConfig) -> dict[str, float]:
    """Metrics from sums over tokens (or rollouts, for clipping of ratios of whole rollouts)."""
    tokens, iterations = totals["tokens"], config.iterations
    means = {"loss": totals["loss"] / iterations, "entropy": totals["entropy"] * iterations / tokens}
    means |= loss.metrics(totals["clip/low"], totals["clip/high"], totals["clip/count"])
    if config.beta:
        means["kl"] = totals["kl"] / tokens
    if totals["compared"]:
        means["sampling/logp_difference"] = totals["difference"] / totals["compared"]
    return means
