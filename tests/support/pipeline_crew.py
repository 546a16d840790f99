"""A crew in one process: every stage a peer of its own, messages as bytes, in any order that real peers could see.

Messages between two peers keep their order; which pair's message is next is drawn from a seed. A peer can be made to
die when a given message reaches somebody; it is then replaced by an exact copy of its weights, moments and numbers, or
of its weights only.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from swarm_node.config import GrpoConfig, PolicyConfig, RolloutsConfig
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.grpo.trainer import Trainer
from swarm_node.pipeline.compute.stage_model import Stage
from swarm_node.pipeline.compute.worker import Worker, attend, refused_turn
from swarm_node.pipeline.driver import Driver
from swarm_node.pipeline.messages import (
    LEADER,
    Limits,
    StageLost,
    StageMessage,
    decode_message,
    encode_message,
    encoded_size,
)
from swarm_node.pipeline.stage_calls import StageCalls
from swarm_node.pipeline.staged_policy import StagedPolicy
from swarm_node.policy.loading import load_policy, load_tokenizer
from swarm_node.policy.policy import Policy
from swarm_node.policy.starter import build_tokenizer
from swarm_node.types import Group, Sampling
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import ActivationCodec, decode_envelope
from tests.support.stages import load_part
from tests.support.tiny_policy import group

SIZES = dict(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=5,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.15,
)
GROUPED = dict(SIZES, num_key_value_heads=2)
MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=False)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    # Biases of keys have no effect where nothing rotates: Adam would make steps of rounding errors.
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, rotary_pct=1.0)),
}
SAMPLING = Sampling(max_new_tokens=6)
Saved = Callable[..., PolicyConfig]
RATE = 1e-3


def save(kind: str, out: Path) -> PolicyConfig:
    """A tiny random model of five layers in Hugging Face layout, and how to load it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MAKERS[kind]().save_pretrained(out)
    build_tokenizer(["what is one plus two", "how many bits are there"] * 8).save_pretrained(out)
    return PolicyConfig(model=str(out), dtype="float32", device="cpu", lora=False)


def saver(folders: pytest.TempPathFactory) -> Saved:
    """How to load a tiny model of a kind, with an adapter or without: `saved("llama", lora=True)`."""
    configs: dict[str, PolicyConfig] = {}

    def load(kind: str, lora: bool = False) -> PolicyConfig:
        if kind not in configs:
            configs[kind] = save(kind, folders.mktemp(kind))
        return configs[kind].model_copy(update={"lora": lora, "lora_rank": 2})

    return load


def whole(config: PolicyConfig) -> Policy:
    """The policy in one process."""
    return load_policy(config, RolloutsConfig(max_new_tokens=8), lambda line: None)


def some_groups(seed: int = 0) -> list[Group]:
    return [
        group([1.0, 0.0, 0.0], prompt=5, seed=seed + 1),
        group([0.0, 1.0, 1.0, 0.5], prompt=3, seed=seed + 2),
        group([1.0, 0.5], prompt=4, seed=seed + 3),
    ]


@dataclass
class Fault:
    """A stage dies when message number `at` (from 0) of a kind reaches it, or another."""

    stage: int
    kind: str
    at: int = 0
    to: int | None = None
    mute: bool = False
    """It is not seen to die: it just takes no messages any more."""
    fired: bool = False


@dataclass
class Crew:
    """A lead and its crewmates."""

    config: PolicyConfig
    stages: int
    grpo: GrpoConfig = field(default_factory=lambda: GrpoConfig(learning_rate=RATE))
    codec: ActivationCodec = "float32"
    seed: int = 0
    swapped: bool = False
    native: bool = True
    holders: dict[int, int] = field(default_factory=dict)
    """Peer that holds a stage, if not one of its own; peer 0 leads."""
    faults: list[Fault] = field(default_factory=list)
    fresh: float = 0.0
    """If not 0, a stage is replaced as CheckFree does: new moments, no norm, and its rates are multiplied by this."""
    tamper: Callable[[bytes, bytearray], tuple[bytes, bytearray]] | None = None
    """What happens to messages on the way."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.queues: dict[tuple[int, int], deque[tuple[int, bytes, bytearray] | StageMessage]] = defaultdict(deque)
        self.plan = 1
        self.seen: Counter[tuple[int, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.lost: set[int] = set()
        self.muted: set[int] = set()
        self.repairs = 0
        self.workers = {k: self._worker(k) for k in range(self.stages)}
        if self.grpo.beta:
            for worker in self.workers.values():
                worker.keep_reference()
        self.own = {k: worker for k, worker in self.workers.items() if self.peer(k) == 0}
        calls = StageCalls(self, self.own, self.codec, self.refuse, patience_s=0.2)
        self.said: list[str] = []
        self.driver = Driver(calls, self.mend, self.swapped, self.said.append)
        self.policy = StagedPolicy(self.driver, load_tokenizer(self.config), self.config, lambda line: None)
        self.policy.packing = True
        self.trainer = Trainer(self.policy, self.grpo, SAMPLING, lambda line: None, optimizer=self.driver)

    def _worker(self, k: int) -> Worker:
        stage = load_part(self.config, k, self.stages)
        return Worker(stage, self._optimizer(stage), self.codec, self.native)

    def _optimizer(self, stage: Stage) -> Optimizer:
        return Optimizer(stage.named().items(), self.grpo, RATE, [] if stage.shared is None else [stage.shared])

    def peer(self, stage: int) -> int:
        return self.holders.get(stage, stage) if stage != LEADER else 0

    def limits(self, sender: int, receiver: int) -> Limits:
        held = lambda peer: frozenset(k for k in range(self.stages) if self.peer(k) == peer)  # noqa: E731
        return Limits(
            plan=self.plan,
            stages=self.stages,
            here=held(receiver) | ({LEADER} if receiver == 0 else set()),
            sender=held(sender),
            width=SIZES["hidden_size"],
            vocabulary=SIZES["vocab_size"],
            tokens=512,
            rows=64,
            prompt=32,
            length=16,
        )

    # ----------------------------------------------------------------- what the lead sees

    def send(self, message: StageMessage) -> None:
        self._check()
        self._put(0, message)

    def receive(self, timeout: float) -> StageMessage | None:
        while True:
            self._check()
            pairs = sorted(pair for pair, queue in self.queues.items() if queue)
            if not pairs:
                return None
            sender, receiver = self.rng.choice(pairs)
            item = self.queues[sender, receiver].popleft()
            message = item if isinstance(item, StageMessage) else self._open(sender, receiver, item)
            if message is None or self._kills(message):
                continue
            if receiver == 0:
                return message
            attend(message, self.workers, lambda answer, peer=receiver: self._put(peer, answer), self.refuse)

    def mend(self, lost: StageLost) -> None:
        """Put a copy in the place of what was lost."""
        assert lost.stages == self.lost | self.muted
        for k in lost.stages:
            old = self.workers[k]
            stage = copy.deepcopy(old.stage)
            for parameter in stage.parameters():
                parameter.grad = None
            optimizer = self._optimizer(stage)
            new = Worker(stage, optimizer, self.codec, self.native)
            new.updates, new.reference = old.updates, old.reference
            if self.fresh:
                optimizer.rate_scale, optimizer.updates = self.fresh, old.optimizer.updates
            else:
                optimizer.load_state_dict(old.optimizer.state_dict(), old.optimizer.updates)
                new.omega = old.omega
            self.workers[k] = new
        self.lost.clear()
        self.muted.clear()
        self.plan += 1
        self.repairs += 1

    # ----------------------------------------------------------------- in between

    def _check(self) -> None:
        if self.lost:
            raise StageLost(self.lost, "killed")

    def _put(self, sender: int, message: StageMessage) -> None:
        receiver = self.peer(message.stage)
        if receiver == sender:
            self.queues[sender, receiver].append(message)
            return
        head, pieces = encode_message(message, self.codec, self.plan)
        body = bytearray(b"".join(pieces))
        assert len(body) == encoded_size(message, self.codec)
        if self.tamper is not None:
            head, body = self.tamper(head, body)
        self.queues[sender, receiver].append((self.plan, head, body))

    def _open(self, sender: int, receiver: int, item: tuple[int, bytes, bytearray]) -> StageMessage | None:
        _, head, body = item
        try:
            return decode_message(decode_envelope(head), body, self.limits(sender, receiver))
        except RemoteProtocolError as error:
            self.refuse(error)
            if sender == 0 and error.reason != "plan":  # the lead hears of it, as from `StageTransport`
                envelope = decode_envelope(head)
                for answer in refused_turn(envelope.stage, envelope.head):
                    self._put(receiver, answer)
            return None

    def refuse(self, error: RemoteProtocolError) -> None:
        self.refused[error.reason] += 1

    def _kills(self, message: StageMessage) -> bool:
        """Whether this message reaches nobody, since its stage dies of it."""
        kind = type(message.head).__name__
        key = message.stage, kind
        number = self.seen[key]
        self.seen[key] += 1
        for fault in self.faults:
            to = fault.stage if fault.to is None else fault.to
            if not fault.fired and (to, fault.kind, fault.at) == (*key, number):
                fault.fired = True
                (self.muted if fault.mute else self.lost).add(fault.stage)
        return message.stage in self.lost | self.muted


def parameters(crew: Crew) -> dict[str, torch.Tensor]:
    """All trained parameters of a crew by name; a tied matrix must be equal at both ends."""
    found: dict[str, torch.Tensor] = {}
    for worker in crew.workers.values():
        for name, parameter in worker.stage.named().items():
            if name in found:
                assert torch.equal(found[name], parameter), name
            found[name] = parameter.detach()
    return found
