"""AdamW with gradient clipping and warm-up, and its state as plain tensors.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   w <- w - lr (m^ / (sqrt(v^) + eps) + decay w)

with bias-corrected m^, v^ (arXiv 1711.05101); g is first scaled down to norm `grad_clip` if it is longer.
Matrices decay, vectors (norms, biases) do not. Weights in 16 bits get a float32 master copy: bfloat16 has 8
bits of mantissa, so most updates of 1e-6 would round to nothing. m and v are float32, or 8 bits a value (`adamw_8bit`).

A policy held in stages has one optimiser a stage. Their squared gradient norms are added up, then each one calls
`apply` with the same scale and rate.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swarm_node.config import GrpoConfig
from swarm_node.errors import CheckpointError, UserError
from swarm_node.policy.extras import check_optimizer


class AnyOptimizer(Protocol):
    """The part of an optimiser that a trainer uses, wherever the parameters are; see `Optimizer`."""

    updates: int
    decay: float
    unusable: str  # why the gradient of the last step was not used, if its norm alone does not say so

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[float, float]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, tensors: dict[str, Tensor], updates: int) -> None: ...


class Optimizer:
    """Updates the named parameters in place from their `.grad`."""

    unusable = ""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        config: GrpoConfig,
        learning_rate: float,
        shared: Collection[str] = (),
        embeddings: Collection[str] = (),
    ) -> None:
        """`shared`: names of matrices that another stage has a copy of, which must make the same updates.
        `embeddings`: names of those whose moments are in float32 in any case. Raises UserError if `config.optimizer`
        needs a package or a device that is not there."""
        self.named = dict(named)
        self.shared = shared
        self.learning_rate = learning_rate
        self.rate_scale = 1.0
        """Factor on every update's rate, except for shared matrices; above 1 for a stage that was rebuilt from its
        neighbours."""
        self.decay = 1.0
        """Factor of the schedule on the learning rate, set before each round."""
        self.updates = 0
        self.updating: Callable[[], AbstractContextManager[object]] = nullcontext
        """Context that is entered while weights change."""
        self._lock = threading.Lock()  # a second lock on changing weights, for threads that copy them
        half = {name: p for name, p in self.named.items() if p.dtype in (torch.bfloat16, torch.float16)}
        self.masters = {name: p.detach().float().requires_grad_() for name, p in half.items()}
        weights = {name: self.masters.get(name, p) for name, p in self.named.items()}
        own = [w for name, w in weights.items() if name not in shared]
        groups = [w for w in own if w.ndim > 1], [w for w in own if w.ndim <= 1], [weights[name] for name in shared]
        given = [{"params": params} for params in groups], learning_rate, weights
        # moments are allocated now, so that memory that suffices for the first update suffices for all
        self.adamw = _adamw_8bit(*given, embeddings) if config.optimizer == "adamw_8bit" else _adamw(*given)
        self.go_by(config)

    def go_by(self, config: GrpoConfig) -> None:
        """Take over warm-up, clipping, betas and decay from `config` for later updates; the learning rate stays."""
        self.warmup = config.warmup
        self.grad_clip = config.grad_clip
        for group, decay in zip(self.adamw.param_groups, (1.0, 0.0, 1.0), strict=True):
            group |= {"betas": config.betas, "weight_decay": decay * config.weight_decay}

    def zero_grad(self) -> None:
        for p in self.named.values():
            p.grad = None

    def step(self) -> tuple[float, float]:
        """Make one update, unless the gradient is not finite. Gives the norm before clipping, and the learning rate."""
        norm, rate = math.sqrt(self.squares()), self.rate()
        if math.isfinite(norm):
            self.apply(self.grad_clip / norm if norm > self.grad_clip else 1.0, rate)
        else:
            self.zero_grad()
        return norm, rate

    def rate(self) -> float:
        """Learning rate of the next update, warm-up and schedule included."""
        return self.learning_rate * self.decay * min(1.0, (self.updates + 1) / max(1, self.warmup))

    def squares(self, leave_out: Collection[str] = ()) -> float:
        """Squared norm of the gradient without the parameters in `leave_out`; not finite if the gradient is not."""
        gradients = [p.grad for name, p in self.named.items() if p.grad is not None and name not in leave_out]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        return norm * norm  # exact: the norm has the 24 bits of a float32

    def apply(self, scale: float, rate: float) -> None:
        """Make one update with the gradient times `scale` at learning rate `rate` (times `rate_scale`), then drop the
        gradient."""
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        for name, master in self.masters.items():
            gradient = self.named[name].grad
            master.grad = None if gradient is None else gradient.float()
        *own, shared = self.adamw.param_groups
        for group in own:
            group["lr"] = rate * self.rate_scale
        shared["lr"] = rate
        with self.still():
            self.adamw.step()
            self.publish()
        for master in self.masters.values():
            master.grad = None
        self.updates += 1
        self.zero_grad()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Context in which nobody else changes weights; other threads copy them under it."""
        with self.updating(), self._lock:
            yield

    def weights(self) -> dict[str, Tensor]:
        """The tensors that are updated, by name: float32 master copies or else the parameters. Live."""
        return {name: self.masters.get(name, p).detach() for name, p in self.named.items()}

    @torch.no_grad()
    def publish(self) -> None:
        """Copy `weights()` into the model, after somebody else changed them."""
        for name, master in self.masters.items():
            self.named[name].copy_(master)

    @torch.no_grad()
    def renew(self, name: str, value: Tensor, keep: bool = False) -> None:
        """Give a parameter another value, and zero its moments unless `keep`."""
        weight = self.masters.get(name, self.named[name])
        with self.still():
            weight.copy_(value)
            self.publish()
        for moment in () if keep else self.adamw.state[weight].values():
            moment.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Live tensors by name: moments, update counts and master copies of each parameter. If the rate scale is not 1,
        it is there under the name of the first parameter that it applies to."""
        tensors: dict[str, Tensor] = {}
        for name, p in self.named.items():
            state = self.adamw.state[self.masters.get(name, p)]
            tensors |= {f"{key}.{name}": tensor for key, tensor in state.items()}
        if self.rate_scale != 1.0 and (own := [name for name in self.named if name not in self.shared]):
            tensors[f"rate_scale.{own[0]}"] = torch.tensor(self.rate_scale)
        return tensors | {f"master.{name}": master.detach() for name, master in self.masters.items()}

    def load_state_dict(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take over tensors of `state_dict`; without `step`, moments count as those of all updates. CheckpointError,
        and nothing changed, if names or shapes differ; UserError if they are those of another `grpo.optimizer`."""
        mine = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("rate_scale.")}
        scales = [float(tensor) for name, tensor in tensors.items() if name.startswith("rate_scale.")]
        early = {name: torch.tensor(float(updates)) for name in mine if name.startswith("step.")}
        tensors = early | {name: tensor for name, tensor in tensors.items() if not name.startswith("rate_scale.")}
        if (theirs := _kind(tensors)) != _kind(mine):
            raise UserError(f"the checkpoint has moments of another kind: go on with --set grpo.optimizer={theirs}")
        if mine.keys() != tensors.keys() or any(mine[k].shape != tensors[k].shape for k in mine):
            raise CheckpointError("its optimiser state does not have the names and shapes of this policy")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self.rate_scale = scales[0] if scales else 1.0
        self.updates = updates


def embeddings_of(model: nn.Module) -> list[str]:
    """Names of the trained embeddings of a model."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) in tables]


def _adamw(groups: list[dict[str, Any]], rate: float, weights: dict[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW with moments in float32."""
    fused = all(w.device.type in ("cpu", "cuda", "mps") for w in weights.values())
    adamw = torch.optim.AdamW(groups, lr=rate, fused=fused)
    for w in weights.values():
        adamw.state[w] = {
            "step": torch.zeros((), device=w.device),
            "exp_avg": torch.zeros_like(w),
            "exp_avg_sq": torch.zeros_like(w),
        }
    return adamw


def _adamw_8bit(
    groups: list[dict[str, Any]], rate: float, weights: dict[str, Tensor], embeddings: Collection[str]
) -> torch.optim.Optimizer:
    """AdamW with moments in 8 bits, but those of `embeddings` in float32. UserError if that is not possible here."""
    check_optimizer("adamw_8bit")
    devices = {w.device.type for w in weights.values()}
    if devices - {"cpu", "cuda"}:
        raise UserError(
            f"grpo.optimizer = adamw_8bit is for CPUs and NVIDIA GPUs, not for {', '.join(devices)}: leave it out"
        )
    from swarm_node.grpo.adamw_8bit import AdamW8bit

    adamw = AdamW8bit(groups, rate)
    for name, w in weights.items():
        adamw.state[w] = adamw.moments(w, wide=name in embeddings)
    return adamw


def _kind(state: Collection[str]) -> str:
    """The `grpo.optimizer` whose state has these names; tensors that are all small have the same with both."""
    return "adamw_8bit" if any(name.startswith("exp_avg_scale.") for name in state) else "adamw"
