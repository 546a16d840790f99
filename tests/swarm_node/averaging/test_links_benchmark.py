"""The model of links against its closed forms and the published figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import averaging_links as links


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_hops_have_mean_and_variation_asked_for() -> None:
    drawn = links.hops(rng(), 1.5, 1_000_000)
    assert drawn.mean() == pytest.approx(1, rel=0.01)
    assert drawn.std() == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("variation", links.VARIATION)
def test_a_pair_takes_twice_the_larger_hop(variation: float) -> None:
    drawn = links.pair(rng(), 2, variation, 300_000).mean()
    assert drawn == pytest.approx(links.pair_mean(variation), rel=0.01)


@pytest.mark.parametrize("n", links.NODES)
def test_constant_hops(n: int) -> None:
    hops = {name: float(scheme(rng(), n, 0.0, 1)[0]) for name, scheme in links.SCHEMES.items()}
    assert hops == {"tree": 2 * math.log2(n), "ring": 2 * (n - 1), "butterfly": 2, "pair": 2}


@pytest.mark.parametrize(
    ("n", "published"),
    [(16, (4.0, 4.5, 5.2, 5.8, 6.5, 6.7)), (1024, (10, 12.4, 17.1, 23.6, 31.5, 39.2))],
)
def test_tree_to_pair_as_published(n: int, published: tuple[float, ...]) -> None:
    trials = 400_000 // n + 600
    ratios = [links.tree(rng(), n, v, trials).mean() / links.pair_mean(v) for v in links.VARIATION]
    assert ratios == pytest.approx(published, rel=0.04)


def test_a_butterfly_waits_for_the_slowest_way() -> None:
    there_and_back = links.hops(rng(), 1.0, 100_000, 2, 2).sum(2).max(1).mean()
    assert links.butterfly(rng(), 2, 1.0, 20_000).mean() == pytest.approx(there_and_back, rel=0.02)
    assert links.butterfly(rng(), 64, 1.0, 100).mean() > 5 * links.pair_mean(1.0)


def test_bytes_of_the_busiest_link() -> None:
    second = links.BYTES_PER_S
    assert links.seconds("pair", 1024, second) == 1
    assert links.seconds("tree", 1024, second) == 2
    for n in links.NODES:
        assert links.seconds("ring", n, second) == links.seconds("butterfly", n, second) == 2 * (n - 1) / n
    assert links.SIZES["100M float32"] == 400e6


def test_partners_meet_each_other() -> None:
    partner = links.partners(rng(), (5, 16))
    own = np.arange(16)
    assert (np.take_along_axis(partner, partner, axis=1) == own).all()
    assert (partner != own).all()


def test_exchanges_take_both_partners_as_long() -> None:
    partner = links.partners(rng(), (3, 8))
    took = links.exchanges(rng(), partner, 1.0, links.BYTES_PER_S)
    assert (took == np.take_along_axis(took, partner, axis=1)).all()
    assert (took > 1).all()


@pytest.mark.parametrize(("n", "published"), [(16, 1.07), (64, 1.11), (256, 1.15)])
def test_barrier_ratios_are_as_published(n: int, published: float) -> None:
    assert links.barrier_ratio(rng(), n, math.sqrt(0.5), trials=512 // n) == pytest.approx(published, abs=0.01)


def test_runs_by_hand() -> None:
    """Two peers, two rounds of work (1, 3) and (4, 1) seconds, half a second of network each round."""
    work = np.zeros((2, links.FRAGMENTS, 1, 2))
    work[:, 0, 0] = [[1, 3], [4, 1]]
    half = np.full((1, 2), 0.5)
    assert links.group_run(work, np.full((2, 1), 0.5)).tolist() == [[8.0, 8.0]]
    assert links.waiting_run(rng(), work, lambda partner: half).tolist() == [[8.0, 8.0]]
    assert links.overlapped_run(work, [half, half]).tolist() == [[5.0, 4.0]]
    assert links.overlapped_run(work, [4 * half, 4 * half]).tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize("n", [8, 64])
def test_pairs_keep_the_variance_that_theory_says(n: int) -> None:
    left = np.mean([links.spread(np.random.default_rng(i), n, 3) for i in range(400)], axis=0)
    factor = (n - 2) / (2 * (n - 1))
    assert left == pytest.approx([1, factor, factor**2, factor**3], rel=0.05)


def test_noloco_in_pairs_contracts_as_its_recursion_says() -> None:
    left = np.mean([links.spread(np.random.default_rng(i), 8, 6, 0.5, 0.7) for i in range(400)], axis=0)
    golden = [0.48, 0.2284, 0.1730, 0.1362, 0.0906, 0.0566]
    assert left[1:] == pytest.approx(golden, rel=0.05)
