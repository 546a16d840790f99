"""What partners may cost in sum: liars that know the limits, honest ones that meet them by chance."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice

import pytest

from swarm_node.averaging.costs import EVERYBODY, FLOOR, KEPT, LEAST, NOTHING, TOGETHER, USUAL, PartnerCosts, allowance

OWN = 0.8  # this node's loss, in nats per token
A_THIRD = 3  # one of so many exchanges is with a liar
HONEST = [(-0.005, 0.01, 0.0), (-0.02, 0.035, 0.0)]
"""Mean and spread of what an honest partner costs by 16 answers, and the correlation with the exchange before. The
second is what `benchmarks.averaging_uphill` had in the arm `none`, seed 0."""
COHORT = (-0.015, 0.031, 0.44)  # the same in the arm `whole`, where all nodes average at once; slow changes included


def noise(rng: random.Random, mean: float, spread: float, correlation: float) -> Iterator[float]:
    """Honest costs."""
    each = rng.gauss(0.0, 1.0)
    while True:
        yield mean + spread * each
        each = correlation * each + (1 - correlation**2) ** 0.5 * rng.gauss(0.0, 1.0)


def judge(costs: PartnerCosts, partner: str, cost: float, own: float = OWN) -> tuple[float, bool]:
    """An exchange that costs half as much if half of it is taken back."""
    halves = iter((cost / 2, cost / 4, cost / 8, cost / 16))
    return costs.judge(partner, own, own + cost, lambda: own + next(halves))


def left(costs: PartnerCosts, partner: str, least: float = 1.0) -> float:
    """What an exchange with `partner` may cost at most, by all that is remembered, so that `least` of it stays."""
    alone, together = costs.rooms(partner, allowance(OWN))
    return min(alone, together / least) + costs.usual(allowance(OWN))


def run(
    names: list[str],
    seed: int = 0,
    exchanges: int = 600,
    least: float = 1.0,
    honest: tuple[float, float, float] = HONEST[0],
    partners: int = 3,
) -> tuple[float, list[float]]:
    """(what liars cost in all beyond what is usual, of each honest exchange the part that stayed): a third of all
    partners are liars that know what they may still cost, and take nearly all, in exchanges of which `least` stays."""
    rng, costs, cost_of_liars, parts = random.Random(seed), PartnerCosts(), 0.0, list[float]()
    honest_costs = noise(rng, *honest)
    for number in range(exchanges):
        if not names or number % A_THIRD:
            part, _ = judge(costs, f"honest {rng.randrange(partners)}", next(honest_costs))
            parts.append(part)
            continue
        name, usual = names[number // A_THIRD % len(names)], costs.usual(FLOOR)
        cost = 0.99 * left(costs, name, least)
        part, _ = judge(costs, name, cost)
        assert part >= least, "it knows what it may cost"
        cost_of_liars += part * (cost - usual)
    return cost_of_liars, parts


ALL_SPENT = {**NOTHING, "shares": {EVERYBODY: TOGETHER * FLOOR}}
"""The state of a node that may lose no more to partners that it remembers no longer."""


def crowd(n: int) -> list[str]:
    return [f"liar {i}" for i in range(n)]


def test_a_worked_value() -> None:
    costs = PartnerCosts()
    assert judge(costs, "a", 0.09) == (1.0, False)
    assert judge(costs, "a", 0.02) == (0.0, False), "0.98 * 0.09 + 0.02 is more than 0.1"
    assert judge(costs, "b", 0.02) == (1.0, False), "another partner has spent nothing"
    assert judge(costs, "a", -0.01) == (1.0, True), "what helps is applied whatever was spent"
    assert costs.state()["spent"]["a"] == pytest.approx(0.98 * 0.98 * 0.09 - 0.01)
    shares = {"a": pytest.approx(0.98**3 * 0.09 - 0.01), "b": pytest.approx(0.98 * 0.02)}
    assert costs.state()["shares"] == shares, "help by one partner gives no room to another"
    assert judge(costs, "b", -0.5) == (1.0, True)
    assert costs.state()["shares"] == {"a": pytest.approx(0.98 * (0.98**3 * 0.09 - 0.01)), "b": 0.0}, "nor any credit"


def test_where_all_have_spent_much_everybody_gets_a_smaller_share() -> None:
    costs = PartnerCosts()
    costs.load(ALL_SPENT)
    room = TOGETHER * FLOOR * (1 - KEPT)
    assert judge(costs, "honest", 0.9 * room) == (1.0, False)
    costs.load(ALL_SPENT)
    assert judge(costs, "honest", 3.9 * room) == (0.25, False)
    assert sum(costs.state()["shares"].values()) == pytest.approx(KEPT * TOGETHER * FLOOR + 3.9 * room / 4)
    costs.load(ALL_SPENT)
    assert judge(costs, "honest", 8.1 * room) == (0.0, False), "less than an eighth is not worth it"
    assert judge(costs, "honest", -0.01) == (1.0, True)


def test_an_exchange_of_the_whole_cohort_is_refused_rather_than_halved() -> None:
    costs = PartnerCosts()
    assert judge(costs, EVERYBODY, 0.9 * TOGETHER * FLOOR) == (1.0, False)
    assert judge(costs, EVERYBODY, 0.2 * TOGETHER * FLOOR) == (0.0, False)
    assert costs.state()["shares"] == {EVERYBODY: pytest.approx(KEPT * 0.9 * TOGETHER * FLOOR)}
    assert judge(costs, EVERYBODY, 0.117 * TOGETHER * FLOOR) == (1.0, False)


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
    costs.load(ALL_SPENT)
    assert costs.judge("a", OWN, OWN + 0.05, lambda: math.nan) == (0.0, False)


@pytest.mark.parametrize("seed", range(3))
def test_a_liar_that_knows_the_limits_costs_little(seed: int) -> None:
    """One that costs just below the limit of a single exchange each time would cost 20 nats."""
    assert run(["liar"], seed)[0] < FLOOR + 200 * (1 - KEPT) * FLOOR


@pytest.mark.parametrize("honest", HONEST)
@pytest.mark.parametrize("least", [1.0, LEAST])
@pytest.mark.parametrize("seed", range(3))
def test_identities_share_what_all_may_cost(seed: int, least: float, honest: tuple[float, float, float]) -> None:
    """Each of them would have had 0.1 nats, and again later. All take 0.15 nats beyond what is usual, and then in each
    exchange of this node a fiftieth of that, which is 0.009 a turn of theirs."""
    rate = A_THIRD * (1 - KEPT) * TOGETHER * FLOOR
    for names in (crowd(1), crowd(5), crowd(50), crowd(200)):
        assert run(names, seed, 120, least, honest)[0] < TOGETHER * FLOOR + 40 * rate
        assert run(names, seed, 600, least, honest)[0] < TOGETHER * FLOOR + 200 * rate


@pytest.mark.parametrize("honest", HONEST)
@pytest.mark.parametrize("names", [crowd(0), crowd(1), crowd(5), crowd(50)], ids=len)
def test_honest_partners_are_heard_while_liars_spend_all(names: list[str], honest: tuple[float, float, float]) -> None:
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
    assert len(state["spent"]) == 64 and len(state["last"]) == 32
    assert state["shares"].keys() == {EVERYBODY, *state["spent"]} and "peer 999" in state["spent"]
    again = PartnerCosts()
    again.load(state)
    assert again.state() == state != NOTHING


def test_what_a_forgotten_partner_spent_is_lowered_by_time_only() -> None:
    costs = PartnerCosts()
    judge(costs, "liar", 0.09)
    for number in range(64):
        judge(costs, f"peer {number}", -0.1)
    assert "liar" not in costs.state()["spent"]
    assert costs.state()["shares"][EVERYBODY] == pytest.approx(0.09 * KEPT**64)


def test_a_state_of_before_shares_is_read() -> None:
    costs = PartnerCosts()
    costs.load({"last": [], "spent": {"a": 0.05, EVERYBODY: 0.1}})
    assert costs.rooms("a", FLOOR) == pytest.approx((FLOOR - KEPT * 0.05, TOGETHER * FLOOR - KEPT * 0.1))


@pytest.mark.parametrize(("honest", "most"), [*((each, 0.005) for each in HONEST), (COHORT, 0.02)])
def test_noise_undoes_few_exchanges_of_a_whole_cohort(honest: tuple[float, float, float], most: float) -> None:
    """A sum of the positive parts of this noise undid one in ten."""
    costs = PartnerCosts()
    parts = [judge(costs, EVERYBODY, cost)[0] for cost in islice(noise(random.Random(0), *honest), 10_000)]
    assert parts.count(0.0) < most * len(parts) and parts.count(1.0) + parts.count(0.0) == len(parts)


@pytest.mark.parametrize("honest", HONEST)
@pytest.mark.parametrize("partners", [2, 3, 10])
def test_noise_takes_little_of_exchanges_in_pairs(partners: int, honest: tuple[float, float, float]) -> None:
    """A sum of the positive parts of this noise took a tenth."""
    _, parts = run([], exchanges=10_000, honest=honest, partners=partners)
    assert parts.count(0.0) < 0.015 * len(parts) and sum(parts) > 0.97 * len(parts)


@pytest.mark.parametrize("every", [1, 2, 10])
@pytest.mark.parametrize("seed", range(3))
def test_a_cohort_with_a_creeping_liar_costs_no_more_than_all_partners_may(seed: int, every: int) -> None:
    """It knows what the others give, and takes all that may be spent, in each exchange or now and then. Since any
    exchange on, a node has lost no more than 0.15 nats beyond what is usual, and a fiftieth of that for each."""
    costs, honest, lost, worst = PartnerCosts(), noise(random.Random(seed), *COHORT), 0.0, 0.0
    for number in range(2000):
        usual, cost = costs.usual(FLOOR), next(honest)
        if number % every == 0:
            cost = max(cost, 0.99 * left(costs, EVERYBODY))
        part, _ = judge(costs, EVERYBODY, cost)
        lost = max(0.0, lost + part * (cost - usual) - (1 - KEPT) * TOGETHER * FLOOR)
        worst = max(worst, lost)
    assert 0.8 * TOGETHER * FLOOR < worst <= TOGETHER * FLOOR
