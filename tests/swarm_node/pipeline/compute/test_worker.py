"""A single stage: the order of its work, and messages that it drops, refuses or obeys only once."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from swarm_node.config import GrpoConfig, PolicyConfig
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.pipeline.compute import tied_weights
from swarm_node.pipeline.compute.schedule import schedule
from swarm_node.pipeline.compute.worker import Worker
from swarm_node.pipeline.messages import LEADER, StageMessage
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import (
    Apply,
    Backward,
    Forward,
    GradientNorm,
    GradientNormRequest,
    Prefill,
    Reset,
    SetUpdates,
    Share,
    StageStatus,
    StatusRequest,
    Step,
    TiedGradient,
    TiedMatrix,
    TurnFailed,
)
from tests.support.pipeline_crew import SIZES, save
from tests.support.stages import load_part

H = SIZES["hidden_size"]
MICROBATCHES = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PolicyConfig:
    return save("llama_tied", tmp_path_factory.mktemp("model"))


@pytest.fixture
def worker(config: PolicyConfig) -> Worker:
    """The middle of three stages."""
    return make(config, 1)


def make(config: PolicyConfig, index: int, count: int = 3) -> Worker:
    stage = load_part(config, index, count)
    return Worker(stage, Optimizer(stage.named().items(), GrpoConfig(), 1e-3))


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward(i: int, turn: int = 1, total: int = 1, microbatches: int = MICROBATCHES) -> StageMessage:
    index = torch.tensor([0])
    head = Forward(turn, total, i, microbatches, 1, 1.0)
    return StageMessage(1, head, (numbers(i, 1, 5, H), index, index, index))


def backward(i: int, turn: int = 1) -> StageMessage:
    return StageMessage(1, Backward(turn, i, 1), (numbers(100 + i, 1, 5, H),))


def in_order(turn: int = 1, total: int = 1) -> list[StageMessage]:
    operations = schedule(3, MICROBATCHES)[1]
    return [forward(o.microbatch, turn, total) if o.kind == "F" else backward(o.microbatch, turn) for o in operations]


def begin(worker: Worker, total: int) -> None:
    """Begin a sum with a microbatch that is then given up, so nothing is added to it."""
    index = torch.tensor([0])
    x = numbers(0, 1, 5, H) if worker.index else torch.ones(1, 5, dtype=torch.long)
    worker.handle(StageMessage(worker.index, Forward(1, total, 0, 1, worker.index, 1.0), (x, index, index, index)))
    worker.handle(StageMessage(worker.index, Reset(1)))


def gradients(worker: Worker) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in worker.stage.named().items() if p.grad is not None}


def refused(worker: Worker, message: StageMessage, reason: str) -> None:
    before = gradients(worker)
    with pytest.raises(RemoteProtocolError) as caught:
        worker.handle(message)
    assert caught.value.reason == reason
    after = gradients(worker)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def expected(worker: Worker) -> dict[str, Tensor]:
    """Gradient of all microbatches, computed directly."""
    for i in range(MICROBATCHES):
        worker.stage.layers(numbers(i, 1, 5, H)).backward(numbers(100 + i, 1, 5, H))
    found = gradients(worker)
    worker.optimizer.zero_grad()
    return found


def test_work_is_done_in_the_schedules_order(worker: Worker) -> None:
    wanted = expected(worker)
    waiting = [forward(i) for i in range(MICROBATCHES)]
    random.Random(3).shuffle(waiting)
    done = []
    while waiting:
        for answer in worker.handle(waiting.pop()):
            kind = "F" if isinstance(answer.head, Forward) else "B"
            done.append((kind, answer.head.microbatch))
            assert (answer.stage, answer.head.place) == ((2, 2) if kind == "F" else (0, 0))
            if kind == "F":  # and its gradient comes back
                waiting.insert(0, backward(answer.head.microbatch))
    assert done == [(o.kind, o.microbatch) for o in schedule(3, MICROBATCHES)[1]]
    assert worker.finished(1) and max(accumulate(1 if kind == "F" else -1 for kind, _ in done)) == 3  # held at a time
    for name, gradient in gradients(worker).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-6, rtol=1e-5)


def test_every_message_counts_once(worker: Worker) -> None:
    wanted = expected(worker)
    for message in in_order():
        worker.handle(message)
        refused(worker, message, "order")
    for name, gradient in gradients(worker).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-6, rtol=1e-5)


def test_a_new_turn_begins_a_sum_at_zero(worker: Worker) -> None:
    wanted = expected(worker)
    for message in in_order()[:5]:
        worker.handle(message)
    assert gradients(worker)
    first, *rest = in_order(turn=2, total=2)
    assert worker.handle(first) and not gradients(worker)
    assert worker.handle(forward(3, turn=1)) == [] == worker.handle(backward(1, turn=1))
    for message in rest:
        worker.handle(message)
    for name, gradient in gradients(worker).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-6, rtol=1e-5)


def test_a_reset_is_complete(worker: Worker) -> None:
    worker.handle(forward(0))
    assert worker.handle(StageMessage(1, Reset(1))) == [] and not worker.finished(1)
    assert worker.handle(forward(1)) == [] == worker.handle(backward(0))
    assert worker.handle(forward(0, turn=2, total=2))


def test_several_passes_may_add_to_one_sum(worker: Worker) -> None:
    wanted = expected(worker)
    for turn in (1, 2):
        for message in in_order(turn, total=1):
            worker.handle(message)
    for name, gradient in gradients(worker).items():
        torch.testing.assert_close(gradient, 2 * wanted[name], atol=1e-6, rtol=1e-5)


def test_a_senseless_message_changes_nothing(worker: Worker) -> None:
    refused(worker, backward(0), "order")
    worker.handle(forward(0))
    refused(worker, forward(1, microbatches=MICROBATCHES + 1), "order")
    refused(worker, forward(1, total=2), "order")
    refused(worker, StageMessage(1, Backward(1, 0, 1), (numbers(0, 1, 6, H),)), "shape")
    refused(worker, StageMessage(1, Backward(1, 0, 0), (numbers(0, 1, 5, H),)), "order")
    refused(worker, StageMessage(1, GradientNormRequest(1)), "order")
    refused(worker, StageMessage(1, Apply(1, 1.0, 1e-3)), "order")
    refused(worker, StageMessage(1, TiedGradient(1), (numbers(0, 384, H),)), "order")
    refused(worker, StageMessage(1, Share()), "order")
    refused(worker, StageMessage(1, StageStatus(1, 0, 0.0)), "order")
    assert worker.handle(forward(0, turn=2, total=3))
    refused(worker, forward(0, turn=3, total=2), "order")


def test_an_update_is_made_once(worker: Worker) -> None:
    for message in in_order():
        worker.handle(message)
    (answer,) = worker.handle(StageMessage(1, GradientNormRequest(1)))
    assert answer.stage == LEADER and isinstance(answer.head, GradientNorm) and answer.head.squares is not None
    norm = answer.head.squares**0.5
    before = {name: p.detach().clone() for name, p in worker.stage.named().items()}
    for _ in range(2):
        (answer,) = worker.handle(StageMessage(1, Apply(1, 0.1 / norm, 1e-3)))
        assert answer.head == StageStatus(1, 1, pytest.approx(norm))  # what came before clipping
        if _ == 0:
            after = {name: p.detach().clone() for name, p in worker.stage.named().items()}
    assert worker.optimizer.updates == 1
    assert all(torch.equal(after[name], p) for name, p in worker.stage.named().items())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert worker.handle(StageMessage(1, SetUpdates(3)))[0].head == StageStatus(1, 3, pytest.approx(norm))
    assert worker.handle(StageMessage(1, StatusRequest()))[0].head == StageStatus(1, 3, pytest.approx(norm))
    assert worker.optimizer.updates == 1


def test_tied_ends_add_gradients_and_count_them_once(config: PolicyConfig) -> None:
    ends = {k: make(config, k, 2) for k in range(2)}
    names = {k: worker.stage.shared for k, worker in ends.items()}
    assert names == {0: "model.embed_tokens.weight", 1: "model.embed_tokens.weight"}
    grads = {k: numbers(k, 384, H) for k in ends}
    for k, worker in ends.items():
        begin(worker, total=1)
        for name, p in worker.stage.named().items():
            p.grad = grads[k].clone() if name == names[k] else torch.zeros_like(p)
    messages, squares = [StageMessage(k, GradientNormRequest(1)) for k in (1, 0)], {}
    while messages:
        message = messages.pop(0)
        if message.stage == LEADER:
            assert isinstance(message.head, GradientNorm)
            squares[message.head.stage] = message.head.squares
        else:
            messages += ends[message.stage].handle(message)
    both = grads[0] + grads[1]
    for k, worker in ends.items():
        assert torch.equal(worker.stage.named()[names[k] or ""].grad, both)
    assert squares == {0: pytest.approx(float(both.square().sum()), rel=1e-5), 1: 0.0}


def test_one_end_gives_the_other_its_matrix(config: PolicyConfig) -> None:
    first, last = make(config, 0, 2), make(config, 1, 2)
    name = first.stage.shared or ""
    with torch.no_grad():
        first.stage.named()[name].add_(1.0)
    (given,) = first.handle(StageMessage(0, Share()))
    (answer,) = last.handle(given)
    assert (given.stage, answer.stage) == (1, LEADER)
    assert torch.equal(last.stage.named()[name], first.stage.named()[name])


def test_gradient_blocks_come_in_turn_and_count_once(config: PolicyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_weights, "BLOCK_BYTES", 1)
    first, theirs = make(config, 0, 2), numbers(5, 384, H)
    parameter = first.stage.named()[first.stage.shared or ""]
    begin(first, total=2)
    parameter.grad = numbers(6, 384, H)
    expected = parameter.grad + theirs

    def block(i: int, total: int = 2) -> StageMessage:
        return StageMessage(0, TiedGradient(total, i), (theirs[64 * i : 64 * (i + 1)],))

    assert first.handle(block(0, total=1)) == []
    refused(first, block(1), "order")
    refused(first, block(0, total=3), "order")
    assert first.handle(block(0)) == []  # it is kept until the own ones are there
    refused(first, block(0), "order")
    sent = first.handle(StageMessage(0, GradientNormRequest(2)))
    assert [message.head for message in sent] == [TiedGradient(2, 0), TiedGradient(2, 1)]
    assert first.handle(StageMessage(0, GradientNormRequest(2))) == []
    for i in range(1, 6):
        refused(first, block(i - 1), "order")
        (answer,) = first.handle(block(i))
        assert answer.head == TiedGradient(2, i + 1) if i < 5 else isinstance(answer.head, GradientNorm)
    refused(first, block(5), "order")
    assert first.handle(StageMessage(0, GradientNormRequest(2))) == [answer] and torch.equal(parameter.grad, expected)


def test_a_matrix_is_taken_when_all_blocks_came(config: PolicyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_weights, "BLOCK_BYTES", 1)
    last, theirs = make(config, 1, 2), numbers(7, 384, H)
    parameter = last.stage.named()[last.stage.shared or ""]
    before, state = parameter.detach().clone(), last.optimizer.adamw.state[parameter]

    def block(i: int) -> StageMessage:
        return StageMessage(1, TiedMatrix(False, i), (theirs[64 * i : 64 * (i + 1)],))

    state["exp_avg"].fill_(1.0)
    refused(last, block(1), "order")
    for i in (0, 1, 2, 0, 1, 2, 3, 4):  # the lead had it begun anew
        (answer,) = last.handle(block(i))
        assert (answer.stage, answer.head) == (0, Share(False, i + 1))
        assert torch.equal(parameter, before) and state["exp_avg"].all()
    refused(last, block(4), "order")
    (answer,) = last.handle(block(5))
    assert answer == StageMessage(LEADER, StageStatus(1, 0, 0.0, taken=True, new=True))
    assert torch.equal(parameter, theirs) and not state["exp_avg"].any()
    refused(last, block(5), "order")
    refused(last, StageMessage(1, Share(False, 6)), "order")


def test_exhausted_memory_is_said_and_drops_the_turn(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker.stage, "layers", layers)
    assert worker.handle(forward(0)) == [StageMessage(LEADER, TurnFailed(1, 1, "memory"))]
    assert worker.handle(forward(1)) == []


def test_samples_are_drawn_in_order(worker: Worker) -> None:
    lengths, uniform = torch.tensor([3, 2]), torch.rand(4)
    begin = StageMessage(1, Prefill(1, 0, 2, 4, 1.0, 1.0), (numbers(0, 2, 3, H), lengths, uniform))
    (answer,) = worker.handle(begin)
    assert answer.stage == 2 and answer.tensors[0].shape == (2, 3, H)
    refused(worker, begin, "order")

    def step(number: int, rows: int = 4, *picked: Tensor) -> StageMessage:
        return StageMessage(1, Step(1, 0, number, bool(picked)), (numbers(1, rows, H), torch.rand(rows), *picked))

    refused(worker, step(1), "order")
    refused(worker, step(0, 3), "shape")
    assert worker.handle(step(0))[0].tensors[0].shape == (4, H)
    refused(worker, step(0), "order")
    refused(worker, step(1, 1, torch.tensor([2]), torch.tensor([[0]])), "values")
    refused(worker, step(1, 1, torch.tensor([1]), torch.tensor([[2]])), "values")
    assert worker.handle(step(1, 1, torch.tensor([1]), torch.tensor([[1]])))[0].tensors[0].shape == (1, H)
    assert worker.handle(step(2, 1))
    refused(worker, step(3, 1), "order")  # samples have four tokens at most, and the last is not appended
    refused(worker, StageMessage(1, Step(1, 5, 0), (numbers(1, 4, H), torch.rand(4))), "order")
