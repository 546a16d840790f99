"""What partners may cost in sum: liars that know the limits, honest ones that meet them by chance."""

from __future__ import annotations

import math
import random

import pytest

from swarm_node.averaging.costs import EVERYBODY, FLOOR, KEPT, LEAST, NOTHING, TOGETHER, USUAL, PartnerCosts, allowance

OWN = 0.8  # this node's loss, in nats per token
A_THIRD = 3  # one of so many exchanges is with a liar
HONEST = [(-0.005, 0.01), (-0.02, 0.036)]
"""Mean and spread of what an honest partner costs by 16 answers. The second is what `benchmarks.averaging_uphill` had
in the arm `none`, seed 0."""


def judge(costs: PartnerCosts, partner: str, cost: float, own: float = OWN) -> tuple[float, bool]:
    """An exchange that costs half as much if half of it is taken back."""
    halves = iter((cost / 2, cost / 4, cost / 8, cost / 16))
    return costs.judge(partner, own, own + cost, lambda: own + next(halves))


def left(costs: PartnerCosts, partner: str, least: float = 1.0) -> float:
    """What an exchange with `partner` may cost at most, by all that is remembered, so that `least` of it stays."""
    allowed, spent = allowance(OWN), costs.state()["spent"]
    own, together = (
        max(0.0, limit - KEPT * spent.get(key, 0.0))
        for key, limit in ((partner, allowed), (EVERYBODY, TOGETHER * allowed))
    )
    return min(own, together / least) + costs.usual(allowed)


def run(
    names: list[str], seed: int = 0, exchanges: int = 600, least: float = 1.0, honest: tuple[float, float] = HONEST[0]
) -> tuple[float, list[float]]:
    """(what liars cost in all, of each honest exchange the part that stayed): a third of all partners are liars that
    know what they may still cost, and take nearly all, in exchanges of which `least` stays."""
    rng, costs, cost_of_liars, parts = random.Random(seed), PartnerCosts(), 0.0, list[float]()
    for number in range(exchanges):
        if not names or number % A_THIRD:
            part, _ = judge(costs, f"honest {number % A_THIRD}", rng.gauss(*honest))
            parts.append(part)
            continue
        name = names[number // A_THIRD % len(names)]
        cost = 0.99 * left(costs, name, least)
        part, _ = judge(costs, name, cost)
        assert part >= least, "it knows what it may cost"
        cost_of_liars += part * cost
    return cost_of_liars, parts


def crowd(n: int) -> list[str]:
    return [f"liar {i}" for i in range(n)]


def test_a_worked_value() -> None:
    costs = PartnerCosts()
    assert judge(costs, "a", 0.09) == (1.0, False)
    assert judge(costs, "a", 0.02) == (0.0, False), "0.98 * 0.09 + 0.02 is more than 0.1"
    assert judge(costs, "b", 0.02) == (1.0, False), "another partner has spent nothing"
    assert judge(costs, "a", -0.01) == (1.0, True), "what helps is applied whatever was spent"
    assert costs.state()["spent"]["a"] == pytest.approx(0.98 * 0.98 * 0.09 - 0.01)
    assert costs.state()["spent"][EVERYBODY] == pytest.approx((0.98**2 * 0.09 + 0.02) * 0.98), "no credit for help"


def test_where_all_have_spent_much_everybody_gets_a_smaller_share() -> None:
    costs = PartnerCosts()
    costs.load({"last": [], "spent": {EVERYBODY: TOGETHER * FLOOR}})
    room = TOGETHER * FLOOR * (1 - KEPT)
    assert judge(costs, "honest", 0.9 * room) == (1.0, False)
    costs.load({"last": [], "spent": {EVERYBODY: TOGETHER * FLOOR}})
    assert judge(costs, "honest", 3.9 * room) == (0.25, False)
    assert costs.state()["spent"][EVERYBODY] == pytest.approx(KEPT * TOGETHER * FLOOR + 3.9 * room / 4)
    costs.load({"last": [], "spent": {EVERYBODY: TOGETHER * FLOOR}})
    assert judge(costs, "honest", 8.1 * room) == (0.0, False), "less than an eighth is not worth it"
    assert judge(costs, "honest", -0.01) == (1.0, True)


def test_an_exchange_of_the_whole_cohort_is_refused_rather_than_halved() -> None:
    costs = PartnerCosts()
    assert judge(costs, EVERYBODY, 0.9 * TOGETHER * FLOOR) == (1.0, False)
    assert judge(costs, EVERYBODY, 0.2 * TOGETHER * FLOOR) == (0.0, False)
    assert costs.state()["spent"] == {EVERYBODY: pytest.approx(KEPT * 0.9 * TOGETHER * FLOOR)}


def test_a_large_loss_allows_a_tenth_of_it() -> None:
    assert judge(PartnerCosts(), "a", 0.49, 5.0) == (1.0, False)
    assert judge(PartnerCosts(), "a", 0.51, 5.0) == (0.0, False)


def test_help_is_applied_when_less_is_allowed_than_was_spent() -> None:
    """A node whose loss has fallen from 5 to 0.8 allows 0.1 in place of 0.5."""
    costs = PartnerCosts()
    for partner in "ab":
        judge(costs, partner, 0.36, 5.0)
    assert judge(costs, "a", -0.001) == (1.0, True)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e300])
def test_nothing_that_cannot_be_computed_is_remembered(loss: float) -> None:
    costs = PartnerCosts()
    for _ in range(50):
        assert costs.judge("a", OWN, loss, lambda: loss) == (0.0, False)
    assert all(math.isfinite(spent) for spent in costs.state()["spent"].values())
    assert costs.usual(FLOOR) <= USUAL * FLOOR
    assert judge(costs, "b", -0.01) == (1.0, True)


def test_a_half_that_cannot_be_computed_does_not_stay() -> None:
    costs = PartnerCosts()
    costs.load({"last": [], "spent": {EVERYBODY: TOGETHER * FLOOR}})
    assert costs.judge("a", OWN, OWN + 0.05, lambda: math.nan) == (0.0, False)


@pytest.mark.parametrize("seed", range(3))
def test_a_liar_that_knows_the_limits_costs_little(seed: int) -> None:
    """One that costs just below the limit of a single exchange each time would cost 20 nats."""
    assert run(["liar"], seed)[0] < FLOOR + 200 * 0.005


@pytest.mark.parametrize("honest", HONEST)
@pytest.mark.parametrize("least", [1.0, LEAST])
@pytest.mark.parametrize("seed", range(3))
def test_identities_share_what_all_may_cost(seed: int, least: float, honest: tuple[float, float]) -> None:
    """Each of them would have had 0.1 nats, and again later. All take 0.15 nats, and then in each exchange of this
    node a fiftieth of that, which is 0.009 a turn of theirs, and what is usual."""
    rate = A_THIRD * (1 - KEPT) * TOGETHER * FLOOR
    usual = 0.003  # with a third of all costs at the limit, the median is above most honest ones
    for names in (crowd(1), crowd(5), crowd(50)):
        assert run(names, seed, 120, least, honest)[0] < TOGETHER * FLOOR + 40 * (rate + usual)
        assert run(names, seed, 600, least, honest)[0] < TOGETHER * FLOOR + 200 * (rate + usual)


@pytest.mark.parametrize("honest", HONEST)
@pytest.mark.parametrize("names", [crowd(0), crowd(1), crowd(5), crowd(50)], ids=len)
def test_honest_partners_are_heard_while_liars_spend_all(names: list[str], honest: tuple[float, float]) -> None:
    """With what all may cost used up, one honest exchange in five would be refused if none could be halved."""
    for seed in range(3):
        _, parts = run(names, seed, honest=honest)
        assert parts.count(0.0) < 0.08 * len(parts) and sum(parts) > 0.8 * len(parts)


def test_good_turns_give_no_credit() -> None:
    costs, cost_of_liar = PartnerCosts(), 0.0
    for turn in range(400):
        cost = -0.05 if turn % 2 else 0.99 * left(costs, "liar")
        assert judge(costs, "liar", cost)[0] == 1.0
        cost_of_liar += cost
    assert cost_of_liar < FLOOR + 400 * 0.02


@pytest.mark.parametrize("mean", [-0.005, 0.005, 0.03])
def test_honest_partners_are_rarely_refused(mean: float) -> None:
    """Also where averaging usually costs a little: members with different tasks."""
    rng, costs = random.Random(0), PartnerCosts()
    parts = [judge(costs, rng.choice("abc"), rng.gauss(mean, 0.01))[0] for _ in range(2000)]
    assert parts[50:].count(0.0) < 0.03 * len(parts) and sum(parts) > 0.9 * len(parts)


def test_nobody_is_shut_out() -> None:
    costs = PartnerCosts()
    for _ in range(100):
        judge(costs, "a", 1.0)
    assert judge(costs, "a", 0.0)[0] == 1.0
    costs = PartnerCosts()
    judge(costs, "a", 0.1)
    assert judge(costs, "a", 0.05)[0] == 0.0
    assert any(judge(costs, "a", 0.05)[0] for _ in range(100)), "it is forgotten at last"


def test_only_the_latest_partners_are_remembered() -> None:
    costs = PartnerCosts()
    for number in range(1000):
        judge(costs, f"peer {number}", 0.001)
    state = costs.state()
    assert len(state["spent"]) <= 64 and {EVERYBODY, "peer 999"} <= state["spent"].keys() and len(state["last"]) == 32
    again = PartnerCosts()
    again.load(state)
    assert again.state() == state != NOTHING
