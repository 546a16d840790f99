"""A small language model, trained by several replicas that average their weights: what `averaging` runs.

Text: Python's own library as it is installed beside this interpreter, modules and packages in order of their paths,
without tests, tables and generated files; 8 MB of code and prose, the same wherever the same Python is (`sha256` in
the figures says so). The hash of its path puts a file among eight parts: one is held out, three are for the start,
four are dealt out to the replicas.

Start: as in a swarm, weights that can do something already, learned by one model from a text of its own (START_*),
kept in `.cache`.

Replicas: a Llama over bytes (float32, AdamW, warm-up, cosine to zero), all from the start, each with text, order of
text and optimiser of its own. They run on a virtual clock: an inner step takes STEP_S, a node's link has
100 Mbit/s and what two nodes send each other is 50 ms on its way. Averaging is `swarm_node.averaging` over the memory
transport, unchanged; weights really travel, late and encoded.

A liar trains like everybody else, and sends something else (`Liar`).
"""

from __future__ import annotations

import copy
import hashlib
import math
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from swarm_node.averaging.averager import Averager, CohortPlace
from swarm_node.averaging.cohort import make_averager
from swarm_node.averaging.pair_averager import PairAverager
from swarm_node.averaging.pair_exchange import PairExchange
from swarm_node.config import AveragingConfig
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.transports.base import Outgoing
from swarm_protocol.transports.memory import LinkModel, MemoryNetwork, MemoryTransport, VirtualClock
from swarm_protocol.transports.memory.links import UPLINK_TURN_S

SWARM, COHORT = "a" * 64, "c" * 16
STEP_S = 0.2
LINK = LinkModel(latency_s=0.025, bandwidth_bytes_s=100e6 / 8)
"""Delays of sender and receiver add up."""
POLL_S = 0.05
"""Who waits for others looks again this much later."""
START = 1000.0
BEGIN = 1020.0
"""Cards have spread by then. A multiple of all periods in use, so that rounds begin with training."""
CACHE = Path(__file__).parent / ".cache"
START_STEPS, START_BATCH, START_RATE = 500, 12, 2e-3
POINTS = 20
"""Of a curve, and its beginning."""
OMITTED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "encodings", "pydoc_data", "distutils", "turtledemo"}
"""Directories."""


# --------------------------------------------------------------------- text


@dataclass(frozen=True)
class Corpus:
    held_out: Tensor
    start: Tensor
    """uint8 [n], both"""
    files: list[Tensor]
    """uint8 [n] each, in order of their paths."""
    sha256: str

    def shards(self, count: int, alike: bool) -> list[Tensor]:
        """One for each replica: of `alike` ones each has every `count`-th file, else neighbouring files."""
        if alike:
            return [torch.cat(self.files[k::count]) for k in range(count)]
        ends = torch.tensor([len(file) for file in self.files]).cumsum(0)
        of = [min(count - 1, int(count * (int(end) - 1) / int(ends[-1]))) for end in ends]
        return [torch.cat([file for file, k in zip(self.files, of, strict=True) if k == mine]) for mine in range(count)]


@cache
def corpus() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    parts: list[list[Tensor]] = [[] for _ in range(8)]
    digest = hashlib.sha256()
    files = []
    for name in names:
        if OMITTED & set(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        text = (root / name).read_bytes()
        digest.update(text)
        part = hashlib.sha256(name.as_posix().encode()).digest()[0] % 8
        parts[part].append(torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8))
        if part > 3:
            files.append(parts[part][-1])
    return Corpus(torch.cat(parts[0]), torch.cat([*parts[1], *parts[2], *parts[3]]), files, digest.hexdigest())


def windows(text: Tensor, count: int, length: int, rng: torch.Generator) -> Tensor:
    """Random parts of it: int64 [count, length + 1]."""
    starts = torch.randint(len(text) - length, (count, 1), generator=rng)
    return text[starts + torch.arange(length + 1)].long()


# --------------------------------------------------------------------- the task


@dataclass(frozen=True)
class Task:
    """What is learned, and by how many."""

    replicas: int = 8
    steps: int = 1000
    hidden: int = 128
    layers: int = 4
    batch: int = 2
    length: int = 64
    """Bytes of context."""
    learning_rate: float = 5e-4
    warm_up: int = 50
    alike: bool = True
    """Replicas have text of one kind."""
    held_out: int = 512
    """Windows."""
    start_steps: int = START_STEPS


def new_model(task: Task, seed: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=task.hidden,
                intermediate_size=3 * task.hidden,
                num_hidden_layers=task.layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=task.length,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )


def start(task: Task, seed: int) -> torch.nn.Module:
    """The model that all replicas begin with."""
    model = new_model(task, seed)
    size = f"{task.hidden}x{task.layers}x{task.length}-{task.start_steps}"
    path = CACHE / f"averaging-{corpus().sha256[:8]}-{size}-{seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    learner = Learner(model, corpus().start, torch.Generator().manual_seed(seed))
    for _ in range(task.start_steps):
        learner.learn(START_BATCH, task.length, START_RATE, task.warm_up, task.start_steps)
    CACHE.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def loss_of(model: torch.nn.Module, text: Tensor) -> Tensor:
    """Nats per byte; `text` [batch, length + 1]."""
    return cross_entropy(model(input_ids=text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten())


def held_out_loss(model: torch.nn.Module, text: Tensor) -> float:
    """`text` [windows, length + 1]."""
    with torch.no_grad():
        return fmean(float(loss_of(model, part)) for part in text.split(64))


class Learner:
    """A model, its text and its optimiser."""

    def __init__(self, model: torch.nn.Module, text: Tensor, rng: torch.Generator) -> None:
        self.model, self.text, self.rng = model, text, rng
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.steps = 0

    def learn(self, batch: int, length: int, rate: float, warm_up: int, steps: int) -> None:
        """One step of `steps`, at the learning rate of its time; `rate` is the highest."""
        warm = min(1.0, (self.steps + 1) / warm_up)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * self.steps / steps))
        loss = loss_of(self.model, windows(self.text, batch, length, self.rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


# --------------------------------------------------------------------- arms


@dataclass(frozen=True)
class Arm:
    """How replicas average."""

    options: dict[str, Any] | None = None
    """Of AveragingConfig, other than `every`; None = not at all."""
    every: int = 50
    """Inner steps between two exchanges of the same weights (H)."""
    liars: int = 0
    lie: str = ""

    @property
    def period_s(self) -> float:
        """Of outer rounds in pairs: every fragment has its turn once in `every` steps."""
        return self.every * STEP_S / self.config.fragments

    @property
    def config(self) -> AveragingConfig:
        """Pairs go by the clock, and the clock's rounds are not whole steps: a few steps less must do."""
        options = {"codec": "float32", "clip": 0.0, "gates": False, "probe": False, **(self.options or {})}
        pairs = options.get("method") == "noloco"
        every = max(1, int(0.8 * self.every)) if pairs else self.every
        return AveragingConfig(every=every, overlap=pairs, timeout_s=5.0, **options)


class Liar(PairAverager):
    """Takes what it gets as an honest peer does, and sends lies. One fragment is `fast`, `slow` = as of the last
    exchange, `start` = as everybody began.

    flip    slow - 10 (fast - slow)
    noise   fast + noise ten times as long as fast - slow
    stale   start
    drift   fast moved back towards `start`, by the usual distance of two honest peers: no further off than they are
    """

    lie = ""
    starts: Sequence[Tensor] = ()

    def sent(self, exchange: PairExchange) -> Tensor:
        fast, slow, start = exchange.copy.fast, exchange.copy.slow, self.starts[exchange.copy.fragment]
        if self.lie == "flip":
            return slow - 10 * (fast - slow)
        if self.lie == "noise":
            noise = torch.Generator().manual_seed(exchange.round)
            return fast + 10 * rms(fast - slow) * torch.randn(len(fast), generator=noise)
        if self.lie == "stale":
            return start.clone()
        assert self.lie == "drift"
        back = start - fast
        return fast + back * min(1.0, self._apart[exchange.copy.fragment] / max(rms(back), 1e-12))

    def _half(self, exchange: PairExchange) -> Outgoing:
        copy = exchange.copy
        exchange.copy = replace(copy, reach=max(copy.reach, rms(self.sent(exchange) - copy.slow)))
        return super()._half(exchange)

    def _pieces(self, exchange: PairExchange) -> Iterator[memoryview]:
        lying = replace(exchange, copy=replace(exchange.copy, fast=self.sent(exchange)))
        lying.theirs = exchange.theirs
        return super()._pieces(lying)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


# --------------------------------------------------------------------- a run


@dataclass(eq=False)
class Replica:
    learner: Learner
    transport: MemoryTransport
    averager: Averager | None = None
    honest: bool = True
    sent: list[int] = field(default_factory=list)
    """Bytes by the end of every UPLINK_TURN_S."""

    @property
    def steps(self) -> int:
        return self.learner.steps

    @property
    def flat(self) -> Tensor:
        return flat(self.learner.model)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Run:
    """All replicas of one arm, from one seed."""

    def __init__(self, task: Task, arm: Arm, seed: int) -> None:
        self.task, self.arm = task, arm
        self.cpu_s = self.training_s = 0.0
        self.clock = VirtualClock(START)
        self.network = MemoryNetwork(self.clock, seed)
        self.period_s = arm.period_s
        shards = corpus().shards(task.replicas, task.alike)
        self.text = windows(corpus().held_out, task.held_out, task.length, torch.Generator().manual_seed(0))
        self.start = start(task, seed)
        self.replicas = [self._replica(k, shard, seed) for k, shard in enumerate(shards)]

    def _replica(self, number: int, shard: Tensor, seed: int) -> Replica:
        first = [] if number == 0 else [f"/memory/p2p/{self._peer(0)}"]
        transport = self.network.join(self._peer(number), SWARM, link=LINK, bootstrap=first)
        model = copy.deepcopy(self.start)
        rng = torch.Generator().manual_seed(1000 * (seed + 1) + number)
        honest = number < self.task.replicas - self.arm.liars
        replica = Replica(Learner(model, shard, rng), transport, honest=honest)
        if self.arm.options is not None:
            place = CohortPlace(SWARM, COHORT, transport.peer_id, self.period_s)
            tensors = {name: p.detach() for name, p in model.named_parameters()}
            rest = (place, tensors, transport, self.clock.now, lambda _: None)
            probe = windows(shard, 8, self.task.length, rng.clone_state()) if self.arm.config.probe else None
            if replica.honest:
                probed = partial(held_out_loss, model, probe) if probe is not None else lambda: None
                replica.averager = make_averager(self.arm.config, *rest, probe=probed)
            else:
                replica.averager = liar = Liar(self.arm.config, *rest)
                liar.lie, liar.starts = self.arm.lie, liar.fragments.gather_all()
            card = PeerCard(PROTOCOL_VERSION, SWARM, self.clock.now(), f"p{number}", ["trainer"], cohort=COHORT)
            transport.announce(card)
        # nodes do not march in step
        self.clock.call_at(BEGIN + STEP_S * number / self.task.replicas, self._tick, replica)
        self.clock.call_at(BEGIN, self._count, replica)
        return replica

    @staticmethod
    def _peer(number: int) -> str:
        return f"peer{number}"

    def _tick(self, replica: Replica) -> None:
        """One step of training, or of waiting."""
        averager, again = replica.averager, POLL_S
        if averager is None:
            self._learn(replica)
            again = STEP_S
        else:
            if not averager.waiting():
                with averager.changing():
                    self._learn(replica)
                again = STEP_S
            averager.step(replica.steps)
        if replica.steps < self.task.steps or (averager is not None and averager.waiting()):
            self.clock.call_at(self.clock.now() + again, self._tick, replica)

    def _learn(self, replica: Replica) -> None:
        task = self.task
        if replica.steps < task.steps:
            began = time.process_time()
            replica.learner.learn(task.batch, task.length, task.learning_rate, task.warm_up, task.steps)
            self.training_s += time.process_time() - began

    def _count(self, replica: Replica) -> None:
        replica.sent.append(replica.transport.bytes_out)
        self.clock.call_at(self.clock.now() + UPLINK_TURN_S, self._count, replica)

    def figures(self, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """Train to the end. `curve`: [step, loss of own models on the first 64 windows, bytes sent by a replica]."""
        began, looked_s = time.process_time(), 0.0
        honest = [r for r in self.replicas if r.honest]
        curve: list[list[float]] = []
        while any(r.steps < self.task.steps or (r.averager and r.averager.waiting()) for r in self.replicas):
            if not self.clock.step():
                raise RuntimeError("nothing happens any more")
            if honest[0].steps >= len(curve) * max(1, self.task.steps // POINTS):
                looking = time.process_time()
                loss = fmean(held_out_loss(r.learner.model, self.text[:64]) for r in honest)
                curve.append([honest[0].steps, round(loss, 5), fmean(r.transport.bytes_out for r in honest)])
                looked_s += time.process_time() - looking
                say(f"{honest[0].steps}: {loss:.3f}")
        self.cpu_s = time.process_time() - began - looked_s
        self.clock.run_until(self.clock.now() + UPLINK_TURN_S)
        weights = torch.stack([r.flat for r in honest])
        mean = weights.mean(0)
        start = flat(self.start)
        own = [held_out_loss(r.learner.model, self.text) for r in honest]
        before = held_out_loss(self.start, self.text)
        torch.nn.utils.vector_to_parameters(mean, self.start.parameters())
        counts: Counter[str] = Counter()
        for r in honest:
            counts.update(r.averager.counts if r.averager else {})
        spread = rms(weights - mean)
        return {
            "loss_before": before,
            "loss": fmean(own),
            "loss_by_replica": [round(loss, 5) for loss in own],
            "loss_of_mean": held_out_loss(self.start, self.text),
            "spread": spread,
            "spread_of_progress": spread / rms(mean - start),
            "bytes": fmean(r.transport.bytes_out for r in honest),
            "peak_bytes_per_s": max(peak(r.sent) for r in honest),
            "counts": {name: n / len(honest) for name, n in sorted(counts.items())},
            "seconds": self.clock.now() - BEGIN,
            "cpu_s": self.cpu_s,
            "cpu_training_s": self.training_s,
            "parameters": len(mean),
            "corpus": corpus().sha256,
            "curve": curve,
        }


def peak(sent: Sequence[int], window: int = round(1 / UPLINK_TURN_S)) -> int:
    """Most bytes in any second; `sent` by the end of every UPLINK_TURN_S."""
    sent = [0] * window + list(sent)
    return max(later - earlier for earlier, later in zip(sent, sent[window:], strict=False))
