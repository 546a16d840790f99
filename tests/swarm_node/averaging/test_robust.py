"""Robust averaging: worked values, properties, and a small swarm with liars in it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, tensor

from swarm_node.averaging import robust
from swarm_node.averaging.costs import NOTHING
from swarm_node.averaging.reducers import centred_clip, clipped_mean, coordinate_median
from swarm_node.averaging.robust import GROWTH, Robust, measure
from swarm_protocol.errors import RemoteProtocolError
from tests.support.random_vectors import normal

ZERO = torch.zeros(1)


def met(distances: list[float], clip: float = 1.0, gates: bool = False, n: int = 1) -> Robust:
    """A node that has averaged with partners at these distances, without progress of its own."""
    robust = Robust(clip, gates)
    state = {"distances": distances, "sizes": [], "cosines": [], "signs": []}
    robust.load({"probed": [], "seen": {"0": state}})
    return robust


def check(robust: Robust, fragment: int, fast: Tensor, slow: Tensor, partner: Tensor, *more: Tensor) -> Tensor:
    """A partner's weights after a check, in an exchange that ends well and costs nothing."""
    verdict = robust.check(fragment, fast, slow, partner, *more)
    robust.remember(fragment, verdict)
    if verdict.refused:
        raise RemoteProtocolError("gates", verdict.refused)
    robust.accept(fragment, verdict, cheap=True)
    return partner


# --------------------------------------------------------------------- clip


def test_worked_value_of_the_clip():
    """With phi_i = 0, phi_j = 10 and tau = 1, the pair moves to the middle, 0.5."""
    clipped = check(met([1.0]), 0, ZERO, ZERO, tensor([10.0]))
    assert (0 + clipped.item()) / 2 == 0.5


def test_both_vectors_are_clipped_where_both_are_sent():
    fast, slow = tensor([10.0]), tensor([-10.0])
    check(met([2.0]), 0, ZERO, ZERO, fast, slow)
    assert (fast.item(), slow.item()) == (2.0, -2.0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e10, 3e37])
def test_clipped_weights_lie_within_tau(scale, monkeypatch):
    monkeypatch.setattr(robust, "CHUNK", 64)
    fast, slow, partner = normal(1000, 0), normal(1000, 1), normal(1000, 2, scale)
    own = float((fast - slow).norm())
    before = partner.clone()
    distance = float((check(Robust(0.5, False), 0, fast, slow, partner) - fast).norm())
    expected = min(0.5 * own, float((before.double() - fast.double()).norm()))
    assert distance == pytest.approx(expected, rel=1e-5)
    direction = (before.double() - fast.double()) / (before.double() - fast.double()).norm()
    torch.testing.assert_close((partner - fast).double() / distance, direction, atol=1e-5, rtol=0)


def test_a_partner_within_tau_is_untouched():
    fast, slow = normal(1000, 0), normal(1000, 1)
    partner = fast + 0.5 * (slow - fast)
    before = partner.clone()
    assert torch.equal(check(Robust(1.5, True), 0, fast, slow, partner), before)


def test_switched_off_it_changes_nothing():
    robust = Robust(0.0, False)
    for seed in range(10):
        partner = normal(100, seed, 1e30 if seed > 5 else 1.0)
        before = partner.clone()
        assert torch.equal(check(robust, 0, normal(100, 50), normal(100, 51), partner), before)
    assert robust.state() == {"probed": [], "seen": {}, "costs": NOTHING}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("gates", [False, True])
def test_values_that_are_not_finite_are_always_refused(value, gates):
    partner = torch.zeros(10)
    partner[7] = value
    for vectors in [(partner,), (torch.zeros(10), partner)]:
        with pytest.raises(RemoteProtocolError) as error:
            Robust(1.5 if gates else 0.0, gates).check(0, torch.zeros(10), torch.zeros(10), *vectors)
        assert error.value.reason == "values"


# --------------------------------------------------------------------- what is remembered


def test_only_exchanges_that_came_about_count_as_usual():
    robust = met([1.0], gates=True)
    before = robust.state()
    verdict = robust.check(0, tensor([1.0]), ZERO, tensor([2.25]))
    assert robust.state() == before, "one that did not end well"
    robust.remember(0, verdict)
    after = robust.state()["seen"]["0"]
    assert (after["sizes"], after["distances"]) == ([2.25], [1.0]), "one that was refused"
    robust.accept(0, verdict, cheap=True)
    assert robust.state()["seen"]["0"]["distances"] == [1.0, 1.25]


def test_the_usual_distance_grows_at_a_bounded_rate():
    """Partners at 1000 times the usual distance: tau must follow in the end, by GROWTH in five exchanges at most."""
    robust = met([1.0] * 8)
    reach = []
    for _ in range(100):
        reach.append(check(robust, 0, ZERO, ZERO, tensor([1000.0])).item())
    assert reach[0] == 1.0
    assert all(later <= GROWTH * earlier * 1.00001 for earlier, later in zip(reach, reach[5:], strict=False))
    assert reach[-1] == 1000.0


def test_a_minority_of_liars_cannot_stretch_tau():
    robust = met([], clip=1.5)
    for round in range(200):
        check(robust, 0, ZERO, ZERO, tensor([1e6 if round % 2 else 1.0]))
    assert check(robust, 0, ZERO, ZERO, tensor([1e6])).item() == pytest.approx(1.5)


def test_before_any_exchange_own_progress_is_the_measure():
    assert check(Robust(1.5, False), 0, tensor([2.0]), ZERO, tensor([100.0])).item() == 2 + 1.5 * 2


def test_a_long_loner_accepts_far_partners():
    robust = met([1.0] * 8, clip=1.5)
    assert check(robust, 0, tensor([50.0]), ZERO, tensor([-20.0])).item() == -20.0


def test_a_still_node_comes_to_believe_others():
    robust = Robust(1.5, True)
    fast = torch.zeros(1000)
    for _ in range(300):
        partner = check(robust, 0, fast, fast, torch.ones(1000))
    assert torch.equal(partner, torch.ones(1000))


def test_fragments_are_judged_apart():
    robust = met([1.0])
    assert check(robust, 1, tensor([5.0]), ZERO, tensor([9.0])).item() == 9.0
    assert check(robust, 0, ZERO, ZERO, tensor([9.0])).item() == 1.0


def test_state_survives_json():
    first, second = Robust(1.5, True), Robust(1.5, True)
    for seed in range(12):
        check(first, 3, normal(50, 0), normal(50, 1), normal(50, seed))
        first.broken(1.0, 1.0 + seed / 100)
        first.costs.judge(f"peer{seed % 5}", 1.0, 1.0 - seed / 100, float)
    second.load(json.loads(json.dumps(first.state())))
    assert second.state() == first.state() and first.state()["costs"] != NOTHING
    assert [len(values) for values in second.state()["seen"]["3"].values()] == [8, 8, 8, 8]
    partners = [normal(50, 99, 5.0) for _ in range(2)]
    assert torch.equal(
        *(check(r, 3, normal(50, 0), normal(50, 1), p) for r, p in zip((first, second), partners, strict=True))
    )


def test_own_progress_is_used_only_when_whole(monkeypatch):
    judge, chunks, seen = Robust(0.0, True), robust.cache_parts, []

    def looking(*vectors):
        seen.append((vectors[0].dtype, 0 in judge._own))
        return chunks(*vectors)

    monkeypatch.setattr(robust, "cache_parts", looking)
    check(judge, 0, torch.ones(9), torch.zeros(9), torch.ones(9))
    assert (torch.bfloat16, False) in seen and (torch.bfloat16, True) not in seen
    assert torch.equal(judge._own[0].float(), torch.ones(9))


# --------------------------------------------------------------------- gates


def test_measures_by_hand(monkeypatch):
    monkeypatch.setattr(robust, "CHUNK", 3)
    fast, slow = tensor([3.0, 4.0, 0.0, 0.0]), torch.zeros(4)
    seen = measure(fast, slow, tensor([3.0, 0.0, -4.0, 1.0]), tensor([1.0, 0.0, 1.0, 2.0]).bfloat16())
    assert (seen.distance, seen.size, seen.progress) == pytest.approx((33**0.5, 26**0.5, 5.0))
    assert seen.cosine == pytest.approx((3 - 4 + 2) / (26 * 6) ** 0.5)
    assert seen.signs == pytest.approx(2 / 3)  # the second value moved for one of them only


def gated(partners: list[Tensor]) -> Counter[str]:
    """How often each gate failed for one node that always moves by +1 everywhere."""
    robust, count, n = Robust(0.0, True), Counter[str](), len(partners[0])
    for partner in partners:
        met = partner.clone()
        try:
            check(robust, 0, torch.ones(n), torch.zeros(n), met)
        except RemoteProtocolError as error:
            assert error.reason == "gates"
            count[error.detail] += 1
        assert torch.equal(met, partner), "gates alone change nothing"
    return count


def test_one_failing_gate_is_not_enough():
    usual = [1 + normal(100, seed, 0.1) for seed in range(6)]
    assert not gated([*usual, 5 * usual[0]])  # size
    up, down = torch.full((55,), 0.1), torch.full((45,), -2.0)
    assert not gated([*usual, torch.cat([up, down])])  # cosine: more of them agree, by little
    assert gated([*usual, -20 * usual[0]])
    assert gated([*usual, -usual[0]]), "direction alone, but far from usual"
    assert gated([*usual, 20 * usual[0]]), "size alone, but far from usual"


def test_a_node_that_went_far_accepts_far_partners():
    robust = Robust(0.0, True)
    for seed in range(6):
        check(robust, 0, torch.ones(100), ZERO.expand(100), 1 + normal(100, seed, 0.1))
    with pytest.raises(RemoteProtocolError):
        check(robust, 0, torch.ones(100), ZERO.expand(100), torch.full((100,), 20.0))
    check(robust, 0, torch.full((100,), 10.0), ZERO.expand(100), torch.full((100,), 20.0))


def test_direction_is_one_vote_of_two_measures():
    """Partners usually have a cosine of 0.3, as in reinforcement learning."""

    def partner(cosine: float, seed: int, scale: float = 1.0) -> Tensor:
        noise = normal(10_000, seed)
        return scale * (cosine + (1 - cosine**2) ** 0.5 * (noise - noise.mean()))

    usual = [partner(0.3, seed) for seed in range(8)]
    assert not gated([*usual, partner(-0.4, 9)])  # cosine and signs
    assert gated([*usual, partner(-0.4, 9, 4.0)])  # and size
    assert gated([*usual, partner(-0.7, 9)])


def test_without_a_past_gates_let_pass():
    assert not gated([torch.full((100,), -50.0)] * 3)


def test_a_node_unlike_others_accepts_them_at_last():
    refused = gated([torch.ones(100)] * 8 + [torch.full((100,), -50.0)] * 20)
    assert 1 <= refused.total() <= 5


# --------------------------------------------------------------------- groups


def test_worked_value_of_the_centred_clip():
    vectors = [tensor([x]) for x in (0.0, 0.1, -0.1, 0.05, 100.0)]
    assert centred_clip(vectors, 1.0, coordinate_median(vectors)).item() == pytest.approx(0.2625, abs=1e-4)


def test_centred_clip_of_near_vectors_is_their_mean(monkeypatch):
    monkeypatch.setattr(robust, "CHUNK", 7)
    vectors = [normal(50, seed) for seed in range(4)]
    before = [x.clone() for x in vectors]
    torch.testing.assert_close(centred_clip(vectors, 1e3, coordinate_median(vectors)), torch.stack(vectors).mean(0))
    torch.testing.assert_close(clipped_mean(vectors, 0.0), torch.stack(vectors).mean(0))
    assert all(torch.equal(x, y) for x, y in zip(vectors, before, strict=True))


def test_clipped_mean_survives_a_minority():
    honest = [normal(200, seed) for seed in range(5)]
    mean = torch.stack(honest).mean(0)
    for lies in (torch.full((200,), 1e30), -1e3 * mean):
        error = (clipped_mean([*honest, lies], 1.5) - mean).norm()
        assert error < 0.5 * honest[0].norm()
    same = clipped_mean([torch.ones(3)] * 3 + [torch.full((3,), 9.0)], 1.5)
    torch.testing.assert_close(same, torch.ones(3))  # tau = 0


# --------------------------------------------------------------------- probe


def test_the_probe_refuses_much_worse_weights():
    robust = Robust(0.0, False)
    assert not robust.broken(1.0, 1.9)
    assert robust.broken(1.0, 2.2)
    assert robust.broken(1.0, float("nan"))
    assert robust.broken(1.0, float("inf"))


def test_the_probe_knows_its_noise():
    """Noise far above the floor passes once it is known, and is rarely refused."""
    robust, noise = Robust(0.0, False), np.random.default_rng(0).standard_t(3, 2000)
    vetoes = [robust.broken(5.0, 5.0 + 2.0 * x) for x in noise]
    assert np.mean(vetoes[50:]) < 0.05
    assert robust.broken(5.0, 500.0)


def test_the_probe_accepts_usual_differences():
    robust = Robust(0.0, False)
    vetoes = [robust.broken(1.0, 4.0) for _ in range(40)]
    assert vetoes[0] and not vetoes[-1]


@pytest.mark.parametrize(("cheap", "known"), [(False, [1.0]), (True, [1.0, 1.25]), (None, [1.0, 0.75])])
def test_distances_of_partners_that_cost_something_are_not_usual(cheap, known):
    """Where nothing tells what a partner cost, its distance counts up to this node's own progress."""
    robust = met([1.0])
    robust.accept(0, robust.check(0, tensor([0.75]), ZERO, tensor([2.0])), cheap)
    assert robust.state()["seen"]["0"]["distances"] == known


def test_nothing_that_is_not_judged_stretches_tau():
    """A partner that sends what is just believed, again and again, moves no farther in the last exchange than in the
    first."""
    robust, reached = Robust(1.5, True), []
    for _ in range(100):
        partner = tensor([100.0])
        verdict = robust.check(0, tensor([1.0]), ZERO, partner)
        robust.remember(0, verdict)
        robust.accept(0, verdict, cheap=None)
        reached.append(partner.item())
    assert set(reached) == {1.0 + 1.5}


# --------------------------------------------------------------------- a swarm with liars

N, SIZE, ROUNDS, STEPS = 8, 400, 40, 10
Lie = Callable[[Tensor, Tensor, Tensor, float, torch.Generator], Tensor]
"""(the liar's fast, its slow, its victim's fast weights, the victim's tau, randomness) -> what it sends."""
AWAY = torch.full((SIZE,), -(SIZE**-0.5))

LIES: dict[str, Lie] = {
    "sign flip x10": lambda fast, slow, victim, tau, g: slow - 10 * (fast - slow),
    "noise": lambda fast, slow, victim, tau, g: fast + 10 * torch.randn(SIZE, generator=g),
    "stale": lambda fast, slow, victim, tau, g: torch.zeros(SIZE),
    "slow drift": lambda fast, slow, victim, tau, g: victim + 0.99 * tau * AWAY,
}


def train(lie: Lie | None = None, clip: float = 1.5, gates: bool = True, seed: int = 0) -> tuple[float, Counter[str]]:
    """NoLoCo on quadratics: mean loss of the honest, and what became of the exchanges.

    Heterogeneous goals and curvatures, gradients with noise of Student's t with three degrees of freedom; Adam's
    bounded steps are imitated by tanh. If there is a lie, node 0 tells it.
    """
    g, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    liars = int(lie is not None)
    offsets = 0.5 * torch.randn(N, SIZE, generator=g)
    goals = 1 + offsets - offsets[liars:].mean(0)
    curvature = torch.exp(0.5 * torch.randn(N, SIZE, generator=g))
    slow, momentum = torch.zeros(N, SIZE), torch.zeros(N, SIZE)
    fast = slow.clone()
    nodes = [Robust(clip, gates) for _ in range(N)]
    count: Counter[str] = Counter()
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            tails = torch.from_numpy(rng.chisquare(3, (N, 1)) / 3).float().sqrt()
            gradient = curvature * (fast - goals) + torch.randn(N, SIZE, generator=g) / tails
            fast = fast - 0.02 * gradient.tanh()
        told, order = fast.clone(), rng.permutation(N)
        for i, j in [*zip(order[: N // 2], order[N // 2 :], strict=True), *zip(order[N // 2 :], order, strict=False)]:
            partner, who = told[j].clone(), "honest"
            if lie is not None and j == 0:
                seen = nodes[i].state()["seen"].get("0", {"distances": []})["distances"]
                tau = 1.5 * max(np.median(seen or [0.0]), float((fast[i] - slow[i]).norm()))
                partner, who = lie(told[0], slow[0], fast[i], tau, g), "liar"
            if lie is None or i != 0:
                count[who] += 1
                before = partner.clone()
                try:
                    check(nodes[i], 0, fast[i], slow[i], partner)
                except RemoteProtocolError:
                    count[f"{who} refused"] += 1
                    continue
                count[f"{who} clipped"] += not torch.equal(before, partner)
            momentum[i] = 0.5 * momentum[i] + 0.7 * ((fast[i] + partner) / 2 - slow[i])
            slow[i] += momentum[i]
            fast[i] = slow[i]
    return float((slow[liars:] - 1).square().mean() / 2), count


def test_an_honest_swarm_hardly_notices():
    plain = np.mean([train(clip=0.0, gates=False, seed=seed)[0] for seed in range(3)])
    runs = [train(seed=seed) for seed in range(3)]
    assert np.mean([loss for loss, _ in runs]) < 1.05 * plain
    count = sum((count for _, count in runs), Counter[str]())
    assert count["honest"] == 3 * N * ROUNDS
    assert count["honest refused"] < 0.05 * count["honest"]


@pytest.mark.parametrize("name", LIES)
def test_one_liar_of_eight_does_bounded_harm(name):
    start = 0.5  # loss of the weights that all begin with
    loss, count = train(LIES[name])
    assert count["liar"] > 30
    assert loss < 0.25 * start
    if name in ("sign flip x10", "noise"):
        unprotected, _ = train(LIES[name], clip=0.0, gates=False)
        assert unprotected > 3 * loss
        assert count["liar clipped"] + count["liar refused"] > 0.9 * count["liar"]
