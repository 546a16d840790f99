"""The benchmark of swarms of real models: ways to average have closed forms, rows are chosen and told rightly."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import real_swarm, real_swarm_arms, real_swarm_link, real_swarm_supervised, real_swarm_ways
from benchmarks.real_sets import path_of
from benchmarks.real_swarm import PARTS, asked_for, file_of, minutes_of
from benchmarks.real_swarm_report import best_arm, best_ways, ratios, report, shares, sooner_by_reward, strongest
from benchmarks.real_swarm_supervised import Course, partner
from benchmarks.real_swarm_ways import WAYS, State, apart, factored, fitted
from swarm_node.config import NodeConfig

RANK, WIDE, TALL = 4, 24, 40
A, B = "model.layers.0.q_proj.lora_A.default.weight", "model.layers.0.q_proj.lora_B.default.weight"
Row = dict[str, Any]


def adapters(count: int, near: float | None = None, same_a: bool = False) -> list[State]:
    """Random adapters of one layer; `near`: all about the first one, so far apart."""
    rng = torch.Generator().manual_seed(7)
    found: list[State] = []
    for _ in range(count):
        a, b = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((RANK, WIDE), (TALL, RANK)))
        if found and near is not None:
            a, b = found[0][A] + near * a, found[0][B] + near * b
        found.append({A: found[0][A] if found and same_a else a, B: b})
    return found


def product(state: State) -> Tensor:
    return state[B] @ state[A]


def mean_of_products(states: Sequence[State]) -> Tensor:
    return torch.stack([product(state) for state in states]).mean(0)


# --------------------------------------------------------------------- ways


@pytest.mark.parametrize("way", WAYS)
def test_equal_adapters_have_themselves_as_their_average(way: str) -> None:
    (state,) = adapters(1)
    mean = WAYS[way].mean([state, state, state])
    assert torch.allclose(product(mean), product(state), atol=1e-6)
    if way != "factored":  # which turns the factors
        assert all(torch.allclose(mean[name], state[name], atol=1e-6) for name in state)


@pytest.mark.parametrize("way", ["frozen", "alternating", "factored", "fitted"])
def test_ways_are_exact_where_members_have_the_same_a(way: str) -> None:
    states = adapters(4, same_a=True)
    mean = WAYS[way].mean(states)
    assert torch.allclose(product(mean), mean_of_products(states), atol=1e-6)


def test_factors_apart_lack_the_product_of_their_deviations() -> None:
    states = adapters(3)
    mean = apart(states)
    deviations = torch.stack([(s[B] - mean[B]) @ (s[A] - mean[A]) for s in states]).mean(0)
    assert deviations.norm() > 1
    assert torch.allclose(product(mean) + deviations, mean_of_products(states), atol=1e-6)


def test_the_factored_product_is_the_nearest_of_its_rank() -> None:
    states = adapters(3)
    wanted = mean_of_products(states)
    u, s, vt = torch.linalg.svd(wanted)
    nearest = u[:, :RANK] * s[:RANK] @ vt[:RANK]
    mean = factored(states)
    assert mean[A].shape == (RANK, WIDE) and mean[B].shape == (TALL, RANK)
    assert torch.allclose(product(mean), nearest, atol=1e-6)
    left = [float((product(way(states)) - wanted).norm()) for way in (factored, fitted, apart)]
    assert left[0] < left[1] < left[2]


def test_b_is_fitted_to_the_mean_of_a() -> None:
    states = adapters(3, near=0.1)
    mean, plain = fitted(states), apart(states)
    assert torch.equal(mean[A], plain[A])
    best = torch.linalg.lstsq(plain[A].T, mean_of_products(states).T).solution.T
    assert torch.allclose(mean[B], best, atol=1e-6)


def test_partners_get_the_same_factors_whoever_comes_first() -> None:
    one, other = adapters(2, near=0.05)
    found, again = factored([one, other]), factored([other, one])
    assert all(torch.allclose(found[name], again[name], atol=1e-6) for name in found)


def test_reducers_take_the_values_of_an_adapter_in_order_of_names() -> None:
    states = adapters(3, near=0.1)
    real_swarm_ways.take_shapes(states[0])
    flat = [torch.cat([state[name].flatten() for name in sorted(state)]) for state in states]
    for mean, reduce in ((factored, real_swarm_ways.factored_values), (fitted, real_swarm_ways.fitted_values)):
        expected = mean(states)
        found = reduce(flat[0], torch.stack(flat[1:]))
        assert torch.equal(found, torch.cat([expected[name].flatten() for name in sorted(expected)]))


def test_factors_take_turns() -> None:
    turns = {way: [[WAYS[way].trains(name, n) for name in (A, B)] for n in range(3)] for way in WAYS}
    assert turns["apart"] == [[True, True]] * 3
    assert turns["frozen"] == [[False, True]] * 3
    assert turns["alternating"] == [[False, True], [True, False], [False, True]]


# --------------------------------------------------------------------- supervised steps


def test_every_member_meets_every_other() -> None:
    for number in range(6):
        assert all(partner(partner(i, number, 4), number, 4) == i for i in range(4))
    assert {frozenset((i, partner(i, n, 4))) for n in range(3) for i in range(4)} == {
        frozenset((i, j)) for i in range(4) for j in range(i)
    }


@pytest.mark.parametrize("arm", ["never", "pooled", "alternating"])
def test_members_learn_in_turn(arm: str) -> None:
    course = Course(averagings=2, steps=2, held_out=4)
    found = real_swarm_supervised.run("starter", path_of("sums"), arm, 1, course)
    assert len(found["losses"]) == 3 and found["losses"][2] < found["losses"][0]
    assert (found["bytes"] > 0) == (arm in WAYS)
    again = real_swarm_supervised.run("starter", path_of("sums"), arm, 1, course)
    assert again["losses"] == found["losses"]


def test_a_frozen_factor_stays_and_pairs_end_equal() -> None:
    from swarm_node.config import PolicyConfig, RolloutsConfig
    from swarm_node.policy.loading import load_policy

    policy = load_policy(PolicyConfig(model="starter", lora=True), RolloutsConfig(), lambda text: None)
    course = Course(members=2, steps=1, held_out=2)
    members = real_swarm_supervised.Supervised(policy, WAYS["frozen"], course, str(path_of("sums")), 1, False)
    before = members.members[0].weights
    for member in members.members:
        members.learn(member, 0)
    one, other = (member.weights for member in members.members)
    expected = {name: (one[name] + other[name]) / 2 for name in one}
    members.average(0)
    for member in members.members:
        for name, value in member.weights.items():
            assert torch.allclose(value, expected[name])
            assert torch.equal(value, before[name]) == (".lora_A." in name)


# --------------------------------------------------------------------- members


@pytest.mark.parametrize("name", ["alone:often", "both:factored", "averaging:alternating"])
def test_arms_run_and_average(name: str) -> None:
    play = real_swarm_arms.Play(peers=2, rounds=24, every=12, questions=4, samples=1, thorough=1)
    found = real_swarm_arms.run("starter", "sums", name, 1, play)
    assert json.loads(json.dumps(found)) == found
    assert [len(rewards) for rewards in found["rewards"]] == [24, 24]
    assert [len(looks) for looks in found["looks"]] == [2, 2] and len(found["ends"]) == 2
    assert bool(found["averaging"].get("exchanges")) == (name != "alone:often")
    assert bool(found["swarm"].get("swarm/groups_used")) == (name == "both:factored")


def test_four_members_have_one_base_and_an_adapter_each() -> None:
    setting = real_swarm_arms.setting_of("sums", "starter", 8)
    arm = real_swarm_arms.arm_of("averaging:apart", 2)
    nodes = [p.node for p in real_swarm_arms.sharing.simulate(setting, arm, 1, 2).peers]
    real_swarm_arms.one_base([node.policy for node in nodes])
    one, other = (dict(node.policy.model.named_parameters()) for node in nodes)
    assert all((one[name].data_ptr() == other[name].data_ptr()) == (".lora_" not in name) for name in one)


def test_nodes_are_started_as_the_page_says(tmp_path: Path) -> None:
    file, place = path_of("sums"), tmp_path / "alice"
    assert real_swarm_link.arguments("swarm://x", "smollm2", file, place)[:2] == ["join", "swarm://x"]
    alone = real_swarm_link.arguments("", "smollm2", file, place)
    assert alone == ["local", "--model", "smollm2", "--tasks", str(file), "--run-dir", str(place)]


# --------------------------------------------------------------------- rows


def way_row(way: str, seed: int, loss: float) -> Row:
    head = {"part": "ways", "arm": way, "seed": seed, "seconds": 90.0}
    return head | {"losses": [2.0, 1.5, loss], "bytes": 5_000_000, "average_s": 0.1, "train_s": 50.0}


def arm_row(arm: str, seed: int, levels: Sequence[float], cpu_s: float = 100.0, part: str = "arms") -> Row:
    """A run of two peers that are looked at halfway; the second one ends 0.1 higher."""
    middle, end = levels
    looks = [[{"seconds": cpu_s / 2, "right": middle + more}] for more in (0.0, 0.1)]
    ends = [{"right": end}, {"right": end + 0.1}]
    curve = [[i + 1, end * (i + 1) / 4, cpu_s * (i + 1) / 4, 64, 640] for i in range(4)]
    head = {"part": part, "arm": arm, "seed": seed, "peers": 2, "start": "a", "before": {"right": 0.1}}
    return head | {"looks": looks, "ends": ends, "curve": curve, "cpu_s": cpu_s, "swarm": {}, "averaging": {}}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.real_swarm_report.network_share", lambda: 0.25)


def test_the_best_ways_are_those_with_the_least_loss() -> None:
    rows = [way_row(way, seed, 1.0 + i / 10) for i, way in enumerate(WAYS) for seed in (1, 2)]
    assert best_ways(rows, (1, 2)) == ["apart", "factored"]
    assert best_ways(rows, (1, 2, 3)) == [] == best_ways(rows[1:], (1, 2))
    line = next(line for line in report(rows).splitlines() if line.startswith("| fitted"))
    assert line.split(" | ")[3:6] == ["1.2000 (1.2000, 1.2000)", "+20.0 (+20.0, +20.0)", "5.00"]


def test_a_member_is_sooner_than_the_strongest_silo() -> None:
    silos = arm_row("alone", 1, (0.3, 0.7))
    assert strongest(silos) == 1
    assert shares(silos, 1) == [(0.0, 0.1), (50.0, pytest.approx(0.4)), (100.0, pytest.approx(0.8))]
    member = arm_row("both:apart", 1, (0.75, 0.9))  # 0.8 on average after half of its time, a quarter dearer
    assert ratios([silos, member], "arms", "both:apart") == [pytest.approx(100 / 62.5)]
    assert sooner_by_reward(silos, silos | {"arm": "sharing"}) == pytest.approx(1 / 1.25)
    assert ratios([silos, member | {"start": "b"}], "arms", "both:apart") == [], "other adapters at the start"
    assert ratios([arm_row("alone", 1, (0.1, 0.05)), member], "arms", "both:apart") == [], "nothing was learned"
    assert ratios([silos, arm_row("sharing", 1, (0.2, 0.5))], "arms", "sharing") == [0.0]


def test_silos_with_more_updates_are_silos_as_well() -> None:
    silos, often = arm_row("alone", 1, (0.3, 0.7)), arm_row("alone:often", 1, (0.6, 0.8))
    member = arm_row("both:apart", 1, (0.75, 0.9))  # 0.95 on average at its end, where the other silo has 0.9
    assert ratios([silos, often, member], "arms", "both:apart") == [
        pytest.approx(100 / (62.5 + 62.5 * (0.9 - 0.8) / (0.95 - 0.8)))
    ]
    assert best_arm([silos, often]) == "", "more updates are no way of joining"


def test_a_silo_makes_as_many_updates_as_a_member_may() -> None:
    often = real_swarm_arms.arm_of("alone:often", 2)
    member = real_swarm_arms.arm_of("sharing", 2)
    groups = often.sets["rollouts"]["groups"]
    whole = NodeConfig().grpo.batch_groups
    assert often.silo and often.foreign == 0
    assert groups / often.sets["grpo"]["batch_groups"] == (groups + member.foreign) / whole


def test_the_goal_is_judged_by_the_best_arm() -> None:
    rows = [arm_row("alone", seed, (0.3, 0.7)) for seed in (1, 2)]
    rows += [arm_row("both:apart", seed, (0.75, 0.9)) for seed in (1, 2)]
    rows += [arm_row("sharing", 1, (0.2, 0.5))]
    assert best_arm(rows) == "both:apart" and best_arm(rows[:2]) == ""
    assert "not" not in report(rows).splitlines()[-1] and "1.60 (1.60, 1.60)" in report(rows)
    rows += [arm_row("alone", 1, (0.3, 0.7), part="steps"), arm_row("both:apart", 1, (0.3, 0.7), part="steps")]
    assert "steps: goal: 1.5 times as soon as the strongest silo, never below 0.97: not reached" in report(rows)
    assert report([]) == "no rows yet"


def test_a_link_has_a_line_for_each_node() -> None:
    node = {"curve": [(0.0, 0.1), (9.5, 0.5)], "looks": [{"right": 0.1}, {"right": 0.6}], "used": 7.5, "exchanges": 2.0}
    row = {"part": "link", "arm": "joined", "seed": 1, "nodes": [node, node]}
    lines = report([row]).splitlines()
    assert lines[2] == "| joined | 1 | 1 | 2 | 0.100 | 0.600 | 0.300 | 10 | 7.5 | 2 |" and len(lines) == 4


def wanted(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"parts": list(PARTS), "seeds": None, "ways": [], "arms": [], **more})


def test_rows_are_asked_for_in_their_order_and_once() -> None:
    keys = list(asked_for(wanted(ways=["fitted", "apart"]), list))
    assert len({file_of(*key) for key in keys}) == len(keys)
    arms = [arm for part, arm, seed in keys if (part, seed) == ("arms", 2)]
    assert arms == ["alone", "averaging:fitted", "both:fitted", "alone:often", "sharing", "averaging:apart"]
    steps = [("steps", arm, seed) for seed in (1, 2) for arm in ("alone", "alone:often")]
    assert [key for key in keys if key[0] == "steps"] == steps, "no best arm"
    assert [key[1] for key in asked_for(wanted(parts=["arms"], seeds=[3]), list)] == ["alone", "alone:often", "sharing"]
    named = asked_for(wanted(arms=["both:apart", "fitted", "joined"], seeds=[1]), list)
    assert [key[:2] for key in named] == [
        ("ways", "fitted"),
        ("arms", "both:apart"),
        ("steps", "both:apart"),
        ("link", "joined"),
    ]


def test_what_is_there_or_would_end_late_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_swarm, "FOLDER", tmp_path)
    monkeypatch.setattr(real_swarm, "folder_of", lambda model: model)
    file_of("ways", "never", 1).write_text(json.dumps(way_row("never", 1, 1.0)))
    ran: list[real_swarm.Key] = []

    def run(key: real_swarm.Key, args: argparse.Namespace) -> Row:
        ran.append(key)
        return way_row(key[1], key[2], 1.0)

    monkeypatch.setattr(real_swarm, "run", run)
    real_swarm.main(["--parts", "ways", "arms", "--seeds", "1", "--missing", "--minutes", "5"])
    assert ran == [("ways", arm, 1) for arm in ("pooled", *WAYS)], (
        "a row of `ways` takes four minutes, one of `arms` 45"
    )
    real_swarm.main(["--parts", "ways", "arms", "--seeds", "1", "--missing", "--minutes", "5"])
    assert len(ran) == 1 + len(WAYS)
    assert minutes_of(("ways", "apart", 2), real_swarm.stored()) == 1.5, "as the stored one"
    capsys.readouterr()
    real_swarm.main(["--report"])
    assert "| pooled | 2.0000 | 1.5000 | 1.0000 | +0.0 |" in capsys.readouterr().out
