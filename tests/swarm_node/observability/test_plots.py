import random

import pytest
from PIL import Image

from swarm_node.errors import UserError
from swarm_node.observability.plots import moving_average, plot_reward


def run(rounds, tasks=()):
    rng = random.Random(0)
    return [
        {"round": n, "reward": n / rounds + rng.gauss(0, 0.05)} | {f"reward/{task}": rng.random() for task in tasks}
        for n in range(1, rounds + 1)
    ]


def colors(path):
    image = Image.open(path).convert("RGB")
    return image.size, {color for count, color in image.getcolors(1 << 16) if count > 20}


def close_to(found, wanted):
    return any(sum(abs(a - b) for a, b in zip(color, wanted, strict=True)) < 60 for color in found)


def test_a_plot_shows_curve_and_held_out_points(tmp_path):
    out = tmp_path / "plots" / "reward.png"
    plot_reward(run(500, ["gcd", "lcm", "bf"]), out, "starter on three tasks", (0.1, 0.7))
    size, found = colors(out)
    assert size == (800, 450) and out.stat().st_size < 100_000
    assert close_to(found, (0x25, 0x63, 0xEB)) and close_to(found, (0xEA, 0x58, 0x0C))
    plot_reward(run(500), out, "starter", None)
    assert not close_to(colors(out)[1], (0xEA, 0x58, 0x0C))


@pytest.mark.parametrize("metrics", [run(1), run(2, ["gcd"]), run(3) + [{"round": 4, "reward": None}]])
def test_short_runs_and_missing_rewards_are_drawn(tmp_path, metrics):
    plot_reward(metrics, tmp_path / "reward.png", "short", (0.0, 0.0))
    assert close_to(colors(tmp_path / "reward.png")[1], (0x25, 0x63, 0xEB))


@pytest.mark.parametrize("metrics", [[], [{"round": 1, "reward": None}], [{"round": 1}]])
def test_nothing_to_plot(tmp_path, metrics):
    with pytest.raises(UserError, match="nothing to plot"):
        plot_reward(metrics, tmp_path / "reward.png", "empty")


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "plots").write_text("")
    with pytest.raises(UserError, match="not a directory"):
        plot_reward(run(2), tmp_path / "plots" / "reward.png", "t")


def test_moving_average_is_centred_and_spans_the_run():
    assert moving_average([1, 2, 3, 4], 1) == [1, 2, 3, 4]
    assert moving_average([0, 3, 6, 9], 3) == [1.5, 3, 6, 7.5]
    assert moving_average([0, 2, 4, 6], 2) == [1, 3, 5, 6]
