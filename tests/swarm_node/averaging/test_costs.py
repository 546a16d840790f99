"""What partners may cost in sum: liars that know the limits, honest ones that meet them by chance."""

from __future__ import annotations

import math
import random

import pytest

from swarm_node.averaging.costs import EVERYBODY, FLOOR, KEPT, NOTHING, SHARE, TOGETHER, USUAL, PartnerCosts

OWN = 0.8  # this node's loss, in nats per token


def left(costs: PartnerCosts, partner: str, own: float = OWN) -> float:
    """What an exchange with `partner` may cost at most, by all that is remembered."""
    allowed, spent = max(FLOOR, SHARE * own), costs.state()["spent"]
    limits = {partner: allowed, EVERYBODY: TOGETHER * allowed}
    return min(limit - KEPT * spent.get(key, 0.0) for key, limit in limits.items()) + costs.usual(allowed)


def honest(rng: random.Random, spread: float = 0.01) -> float:
    """What an honest partner costs: 16 answers tell it no better."""
    return rng.gauss(-0.005, spread)


def harm(names: list[str], seed: int = 0, exchanges: int = 600) -> float:
    """What a liar costs in all that is a third of all partners, knows what it may still cost, and takes nearly all."""
    rng, costs, cost_of_liar = random.Random(seed), PartnerCosts(), 0.0
    for number in range(exchanges):
        if number % 3:
            costs.judge(f"honest {number % 3}", OWN, OWN + honest(rng))
            continue
        name = names[number // 3 % len(names)]
        cost = 0.99 * left(costs, name)
        too_much, _ = costs.judge(name, OWN, OWN + cost)
        assert not too_much, "it knows what it may cost"
        cost_of_liar += cost
    return cost_of_liar


def test_a_worked_value() -> None:
    costs = PartnerCosts()
    assert costs.judge("a", OWN, OWN + 0.09) == (False, False)
    assert costs.judge("a", OWN, OWN + 0.02) == (True, False), "0.98 * 0.09 + 0.02 is more than 0.1"
    assert costs.judge("b", OWN, OWN + 0.02) == (False, False), "another partner has spent nothing"
    assert costs.judge("a", OWN, OWN - 0.01) == (False, True), "what helps is applied whatever was spent"
    assert costs.state()["spent"]["a"] == pytest.approx(0.98 * 0.98 * 0.09 - 0.01)


def test_a_large_loss_allows_a_tenth_of_it() -> None:
    assert PartnerCosts().judge("a", 5.0, 5.49) == (False, False)
    assert PartnerCosts().judge("a", 5.0, 5.51) == (True, False)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e300])
def test_nothing_that_cannot_be_computed_is_remembered(loss: float) -> None:
    costs = PartnerCosts()
    for _ in range(50):
        assert costs.judge("a", OWN, loss) == (True, False)
    assert all(math.isfinite(spent) for spent in costs.state()["spent"].values())
    assert costs.usual(FLOOR) <= USUAL * FLOOR
    assert costs.judge("b", OWN, OWN - 0.01) == (False, True)


@pytest.mark.parametrize("seed", range(3))
def test_a_liar_that_knows_the_limits_costs_little(seed: int) -> None:
    """One that costs just below the limit of a single exchange each time would cost 20 nats."""
    assert harm(["liar"], seed) < FLOOR + 200 * 0.005


def test_identities_share_what_all_may_cost() -> None:
    assert harm(["liar"]) < harm([f"liar {i}" for i in range(5)]) < FLOOR + 200 * 0.01
    assert harm([f"liar {i}" for i in range(50)]) < 20 * 0.4, "each of them would have had 0.1 nats, and again later"


def test_good_turns_give_no_credit() -> None:
    costs, cost_of_liar = PartnerCosts(), 0.0
    for turn in range(400):
        cost = -0.05 if turn % 2 else 0.99 * left(costs, "liar")
        assert not costs.judge("liar", OWN, OWN + cost)[0]
        cost_of_liar += cost
    assert cost_of_liar < FLOOR + 400 * 0.02


@pytest.mark.parametrize("mean", [-0.005, 0.005, 0.03])
def test_honest_partners_are_rarely_refused(mean: float) -> None:
    """Also where averaging usually costs a little: members with different tasks."""
    rng, costs = random.Random(0), PartnerCosts()
    refused = [costs.judge(rng.choice("abc"), OWN, OWN + rng.gauss(mean, 0.01))[0] for _ in range(2000)]
    assert sum(refused[50:]) < 0.03 * len(refused)


def test_nobody_is_shut_out() -> None:
    costs = PartnerCosts()
    for _ in range(100):
        costs.judge("a", OWN, OWN + 1.0)
    assert not costs.judge("a", OWN, OWN)[0]
    costs = PartnerCosts()
    costs.judge("a", OWN, OWN + 0.1)
    assert costs.judge("a", OWN, OWN + 0.05)[0]
    assert any(not costs.judge("a", OWN, OWN + 0.05)[0] for _ in range(100)), "it is forgotten at last"


def test_only_the_latest_partners_are_remembered() -> None:
    costs = PartnerCosts()
    for number in range(1000):
        costs.judge(f"peer {number}", OWN, OWN + 0.001)
    state = costs.state()
    assert len(state["spent"]) <= 64 and {EVERYBODY, "peer 999"} <= state["spent"].keys() and len(state["last"]) == 32
    again = PartnerCosts()
    again.load(state)
    assert again.state() == state != NOTHING
