"""Outer steps: worked values, other implementations, and how NoLoCo changes the spread of many peers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, tensor

from swarm_node.averaging.outer_step import MEAN, DiLoCo, NoLoCo
from swarm_node.averaging.pairing import partner
from tests.support.averaging_cohort import noloco_step


def both(outer: NoLoCo, slow: list[Tensor], momentum: list[Tensor], fast: list[Tensor]) -> None:
    """One exchange of a pair: each peer gets the other's weights from before."""
    before = [s.clone() for s in slow]
    for i, j in ((0, 1), (1, 0)):
        noloco_step(outer, slow[i], momentum[i], fast[i], fast[j], before[j])


def test_noloco_worked_values():
    slow, momentum = [tensor([0.0]), tensor([2.0])], [tensor([0.0]), tensor([0.0])]
    both(NoLoCo(0.5, 0.7, 0.7), slow, momentum, [tensor([1.0]), tensor([2.5])])
    torch.testing.assert_close(momentum, [tensor([1.225]), tensor([-0.175])])
    torch.testing.assert_close(slow, [tensor([1.225]), tensor([1.825])])


def test_noloco_worked_values_with_momentum_and_another_gamma():
    slow, momentum = [tensor([0.0]), tensor([2.0])], [tensor([0.2]), tensor([-1.0])]
    both(NoLoCo(0.5, 0.8, 0.6), slow, momentum, [tensor([1.0]), tensor([2.5])])
    # 0.5 m + 0.8 (1 + 0.5) / 2 + 0.6 (1 - slow)
    torch.testing.assert_close(momentum, [tensor([0.1 + 0.6 + 0.6]), tensor([-0.5 + 0.6 - 0.6])])
    torch.testing.assert_close(slow, [tensor([1.3]), tensor([1.5])])


def test_noloco_of_one_copy_is_that_of_two():
    torch.manual_seed(0)
    slow, fast = torch.randn(2, 1000), torch.randn(2, 1000)
    start = torch.randn(1000)
    one, two = (slow[0].clone(), start.clone()), (slow[0].clone(), start.clone())
    noloco_step(NoLoCo(0.5, 0.7, 0.7), *one, fast[0], fast[1])
    noloco_step(NoLoCo(0.5, 0.7, 0.7 * (1 + 1e-12)), *two, fast[0], fast[1], slow[1])
    torch.testing.assert_close(one, two)


def test_fast_weights_are_only_read():
    slow, momentum, fast, theirs = torch.randn(4, 10).unbind()
    kept = fast.clone(), theirs.clone()
    noloco_step(NoLoCo(0.5, 0.7, 0.7), slow, momentum, fast, theirs)
    noloco_step(NoLoCo(0.5, 0.7, 0.6), slow, momentum, fast, theirs, theirs)
    assert torch.equal(fast, kept[0]) and torch.equal(theirs, kept[1])


def spread(outer: NoLoCo, rounds: int, seed: int, n: int = 8, d: int = 500) -> Tensor:
    """Mean square of slow weights about the swarm's mean after each round [rounds + 1], from variance 1, where nobody
    trains. The unbiased estimate: it begins at 1."""
    slow = torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).double()
    momentum = torch.zeros_like(slow)
    everyone = [f"peer {i}" for i in range(n)]
    variance = [slow.var(0).mean()]
    for round in range(rounds):
        before = slow.clone()
        left = set(everyone)
        while left:
            me = left.pop()
            other = partner(me, everyone, round, str(seed))
            left.remove(other)
            i, j = everyone.index(me), everyone.index(other)
            noloco_step(outer, slow[i], momentum[i], before[i], before[j], before[j])
            noloco_step(outer, slow[j], momentum[j], before[j], before[i], before[i])
        variance.append(slow.var(0).mean())
    return torch.stack(variance) / variance[0]


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        # R' = a^2 R - a g c Q + g^2 c P / 2;  e = a Q - g c P / 2;  P' = P + 2 e + R';  Q' = e + R';  c = N / (N - 1)
        (NoLoCo(0.5, 0.7, 0.7), [0.4800, 0.2284, 0.1730, 0.1362, 0.0906, 0.0566]),
        (NoLoCo(0.0, 1.0, 1.0), [0.4286, 0.1837, 0.0787]),  # (N - 2) / (2 (N - 1)) = 3/7 a round: plain averaging
    ],
    ids=["momentum", "plain"],
)
def test_peers_draw_together_at_the_calculated_rate(outer, expected):
    """Over 150 runs the mean's standard error, taken from the runs, is 0.2 % after one round and under 5 % after
    all; it is that of the matchings, not of the 500 values. Four of it are allowed."""
    runs = torch.stack([spread(outer, len(expected), seed) for seed in range(150)])[:, 1:]
    error = runs.std(0) / len(runs) ** 0.5
    assert (error / tensor(expected)).max() < 0.05
    assert ((runs.mean(0) - tensor(expected)).abs() < 4 * error + 1e-4).all()


def test_too_much_momentum_drives_peers_apart():
    """gamma must be below 2 (1 - 0.9^2) = 0.38."""
    assert spread(NoLoCo(0.9, 0.7, 0.7), 100, seed=0)[-1] > 10
    assert spread(NoLoCo(0.9, 0.7, 0.35), 100, seed=0)[-1] < 0.5


def test_diloco_worked_values():
    slow, velocity = tensor([1.0]), tensor([0.0])
    seen = []
    for _ in range(3):
        DiLoCo(0.7, 0.9).step(slow, velocity, tensor([-0.1]))
        seen.append(slow.item())
    assert seen == pytest.approx([0.867, 0.6773, 0.43657])


@pytest.mark.parametrize(("learning_rate", "momentum"), [(0.7, 0.9), (0.4, 0.5)])
def test_diloco_is_sgd_with_nesterov_momentum(learning_rate, momentum):
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(50))
    optimizer = torch.optim.SGD([theirs], lr=learning_rate, momentum=momentum, nesterov=True)
    slow, velocity = theirs.data.clone(), torch.zeros(50)
    for _ in range(5):
        delta = torch.randn(50)
        theirs.grad = -delta
        optimizer.step()
        DiLoCo(learning_rate, momentum).step(slow, velocity, delta)
        torch.testing.assert_close(slow, theirs.data)


def test_mean_is_the_mean():
    slow = tensor([1.0, 2.0])
    fast = torch.randn(3, 2)
    velocity = torch.zeros(2)
    for _ in range(2):  # nothing is carried over
        MEAN.step(slow, velocity, (fast - slow).mean(0))
        torch.testing.assert_close(slow, fast.mean(0))
