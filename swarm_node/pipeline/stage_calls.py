"""The leader's messages to all stages of its crew, and their answers.

Nothing here runs by itself. While the leader waits for an answer, the stages that it holds itself do their work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from swarm_node.pipeline.compute.worker import Worker, attend
from swarm_node.pipeline.messages import LEADER, MessageTransport, StageLost, StageMessage, encoded_size
from swarm_protocol import pipeline as heads
from swarm_protocol.errors import RemoteProtocolError

TICK_S = 0.5  # longest wait for a message before the time is looked at

H = TypeVar("H")


class TurnRefused(StageLost):
    """A stage refuses a message of the work under way; no stage is lost. Doing it again may not help."""

    def __init__(self, stage: int) -> None:
        super().__init__((), f"stage {stage} refuses what it is sent")
        self.stage = stage


class NothingArrives(StageLost):
    """All stages answer, but what is under way does not arrive; no stage is lost. Doing it again may not help."""

    def __init__(self) -> None:
        super().__init__((), "all answer, but what is under way does not arrive")


class StageOutOfMemory(torch.OutOfMemoryError):
    """A stage says that it has no memory for its part of the work under way."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"out of memory at stage {stage}")
        self.stage = stage


@dataclass
class StageCalls:
    """Sends, waits, and finds stages that do not answer."""

    transport: MessageTransport
    workers: Mapping[int, Worker]  # the stages held here, by number; stage 0 must be among them
    codec: heads.ActivationCodec
    refused: Callable[[RemoteProtocolError], None]  # is told of messages that make no sense
    patience_s: float
    """After so long without a message all stages are asked for their status; a stage that does not answer within the
    same time again is lost."""
    turn: int = 0  # number of the last pass or generation; those of a new leader must differ from old ones
    statuses: dict[int, heads.StageStatus] = field(default_factory=dict)  # last status of each stage
    tokens: int = 0  # tokens sampled, or in rows of a pass, since `figures` was last asked
    trained_s: float = 0.0  # seconds of train steps, since then
    _waited_s: float = 0.0
    _bytes: int = 0
    _heard: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.stages = self.workers[0].count

    def figures(self) -> dict[str, float]:
        """Figures since the last call.

        stages/bytes_per_token  bytes sent to other peers for each token
        stages/bubble           share of train steps in which this peer waited
        """
        figures: dict[str, float] = {}
        if self.tokens:
            figures["stages/bytes_per_token"] = self._bytes / self.tokens
        if self.trained_s:
            figures["stages/bubble"] = self._waited_s / self.trained_s
        self._bytes = self.tokens = 0
        self._waited_s = self.trained_s = 0.0
        return figures

    @contextmanager
    def new_turn(self) -> Iterator[int]:
        """Number of a new turn. If the caller gives it up, all stages are told."""
        self.turn += 1
        try:
            yield self.turn
        except StageLost:
            raise
        except BaseException:
            for stage in range(self.stages):
                with suppress(StageLost):  # the next use of the stage will notice
                    self.send(StageMessage(stage, heads.Reset(self.turn)))
            raise

    def forget(self) -> None:
        """Have every stage forget the work under way; answers to it do not count any more. Raises StageLost."""
        self.turn += 1
        self.to_all(heads.Reset(self.turn))

    def send(self, message: StageMessage) -> None:
        """Raises StageLost."""
        if message.stage != LEADER and message.stage not in self.workers:
            self._bytes += encoded_size(message, self.codec)
        self._heard = time.monotonic()
        self.transport.send(message)

    def to_all(self, head: heads.Head) -> None:
        """Raises StageLost."""
        for stage in range(self.stages):
            self.send(StageMessage(stage, head))

    def ask(self) -> dict[int, heads.StageStatus]:
        """The status of every stage. Raises StageLost."""
        self.statuses.clear()
        self.to_all(heads.StatusRequest())
        while len(self.statuses) < self.stages:
            self.next()
        return dict(self.statuses)

    def answer(self, kind: type[H], train: bool = False) -> tuple[H, tuple[Tensor, ...]] | None:
        """See `next`; but `None` also if the message is of another kind, or of an earlier turn."""
        message = self.next(train)
        if message is None or not isinstance(message.head, kind):
            return None
        return None if getattr(message.head, "turn", self.turn) != self.turn else (message.head, message.tensors)

    def next(self, train: bool = False) -> StageMessage | None:
        """Deal with one message. Returns it if it is for the leader; `None` also if none comes for a while.

        Raises StageLost, or StageOutOfMemory if the turn has failed so. `train`: count the time for `figures`.
        """
        start = time.perf_counter()
        came = self.transport.receive(min(TICK_S, self.patience_s))
        waited = time.perf_counter() - start
        if came is None and time.monotonic() - self._heard > self.patience_s:
            self._find_lost()
        message = self._attend(came)
        if train:
            self._waited_s += waited
            self.trained_s += time.perf_counter() - start
        if message is not None and isinstance(message.head, heads.TurnFailed) and message.head.turn == self.turn:
            if message.head.what == "refused":
                raise TurnRefused(message.head.stage)
            raise StageOutOfMemory(message.head.stage)
        return message

    def _attend(self, message: StageMessage | None) -> StageMessage | None:
        """Have a stage here deal with a message. A message for the leader is returned, and a status is noted."""
        if message is None:
            return None
        self._heard = time.monotonic()
        message = attend(message, self.workers, self.send, self.refused)
        if message is not None and isinstance(message.head, heads.StageStatus):
            self.statuses[message.head.stage] = message.head
        return message

    def _find_lost(self) -> None:
        """Ask all stages for their status, and raise StageLost for those that do not answer."""
        self.statuses.clear()
        self.to_all(heads.StatusRequest())
        end = time.monotonic() + self.patience_s
        while len(self.statuses) < self.stages and time.monotonic() < end:
            self._attend(self.transport.receive(min(TICK_S, self.patience_s)))
        missing = set(range(self.stages)) - self.statuses.keys()
        raise StageLost(missing, "no answer") if missing else NothingArrives()
