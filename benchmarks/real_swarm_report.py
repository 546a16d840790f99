"""Tables of `benchmarks.real_swarm`, from its rows.

    level           held-out share right where the strongest silo ends: that of the seed's silos of `alone` and
                    `alone:often` which ends highest
    times as soon   CPU seconds of that silo to the level / CPU seconds of a member to it, by the mean of all members;
                    p2pd and gossip of a member are added as `benchmarks.overhead` has measured them
    by reward       the same with the mean reward of WINDOW rounds, of all silos and all members

Ratios are paired by seed, where silos have learned. A cell has the median, and each seed behind it. 0 = it never gets
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median, median_low
from typing import Any

from benchmarks.common import table
from benchmarks.intervals import Point, first_reach
from benchmarks.real_report import NOISE
from benchmarks.real_swarm_ways import WAYS
from benchmarks.sharing_report import network_share, times

Row = dict[str, Any]
ALONE, OFTEN = SILOS = ("alone", "alone:often")
SOONER, NEVER_BELOW = 1.5, 0.97
"""What the best arm is held to: times as soon at the median, and at least in every seed."""
WINDOW = 3  # rounds


def of(rows: Iterable[Row], part: str, arm: str = "") -> dict[int, Row]:
    """Seed -> row of a part and an arm."""
    return {row["seed"]: row for row in rows if row["part"] == part and (not arm or row["arm"] == arm)}


def arms_in(rows: Iterable[Row], part: str, first: str) -> list[str]:
    names = {row["arm"] for row in rows if row["part"] == part}
    return sorted(names, key=lambda name: (name != first, name))


def each_seed(values: Sequence[float], form: str) -> str:
    """The median, and each value if there are several."""
    if not values:
        return ""
    middle = f"{median(values):{form}}"
    return middle if len(values) == 1 else f"{middle} ({', '.join(f'{value:{form}}' for value in values)})"


# --------------------------------------------------------------------- ways


def best_ways(rows: Sequence[Row], seeds: Sequence[int], count: int = 2) -> list[str]:
    """The ways with the least mean loss at the end, the best one first; none until all ways have these seeds."""
    found = {way: of(rows, "ways", way) for way in WAYS}
    if any(seed not in runs for runs in found.values() for seed in seeds):
        return []
    return sorted(WAYS, key=lambda way: fmean(found[way][seed]["losses"][-1] for seed in seeds))[:count]


def of_ways(rows: Sequence[Row]) -> str:
    lines = []
    for arm in arms_in(rows, "ways", "apart"):
        runs = of(rows, "ways", arm)
        apart = of(rows, "ways", "apart")
        more = [100 * (runs[s]["losses"][-1] / apart[s]["losses"][-1] - 1) for s in sorted(runs.keys() & apart.keys())]
        ordered = [runs[seed] for seed in sorted(runs)]
        lines.append(
            [
                arm,
                each_seed([row["losses"][0] for row in ordered[:1]], ".4f"),
                each_seed([row["losses"][1] for row in ordered], ".4f"),
                each_seed([row["losses"][-1] for row in ordered], ".4f"),
                each_seed(more, "+.1f"),
                f"{median(row['bytes'] for row in ordered) / 1e6:.2f}",
                f"{median(row['average_s'] for row in ordered):.2f}",
                f"{median(row['train_s'] for row in ordered):.0f}",
            ]
        )
    columns = ["way", "loss at the start", "after one averaging", "at the end", "against apart, %"]
    return table([*columns, "MB sent each time", "CPU s each time", "CPU s of all steps"], lines) if lines else ""


# --------------------------------------------------------------------- arms


def cost(row: Row) -> float:
    """Factor on a row's CPU seconds."""
    return 1.0 if row["arm"] in SILOS else 1.0 + network_share()


def shares(row: Row, member: int | None = None) -> list[Point]:
    """(CPU seconds, held-out share right) of one peer, or of all in the mean."""
    peers = range(row["peers"]) if member is None else [member]
    points = [(0.0, row["before"]["right"])]
    for looks in zip(*(row["looks"][i] for i in peers), strict=True):
        points.append((cost(row) * fmean(look["seconds"] for look in looks), fmean(look["right"] for look in looks)))
    end = cost(row) * row["cpu_s"], fmean(row["ends"][i]["right"] for i in peers)
    return [*(point for point in points if point[0] < end[0]), end]


def strongest(silos: Row) -> int:
    """The silo that ends highest."""
    return max(range(silos["peers"]), key=lambda i: silos["ends"][i]["right"])


def silos_of(rows: Sequence[Row], part: str) -> dict[int, Row]:
    """Seed -> the row of silos in which the strongest one is."""
    arms = [of(rows, part, arm) for arm in SILOS]
    found = {seed: [runs[seed] for runs in arms if seed in runs] for runs in arms for seed in runs}
    return {seed: max(them, key=lambda row: row["ends"][strongest(row)]["right"]) for seed, them in found.items()}


def sooner(silos: Row, row: Row) -> float:
    """How many times as soon as the strongest silo a member is where that one ends."""
    theirs = shares(silos, strongest(silos))
    return times(first_reach(theirs, theirs[-1][1]), first_reach(shares(row), theirs[-1][1]))


def rewards(row: Row) -> list[Point]:
    """(CPU seconds, mean reward of WINDOW rounds), of all peers in the mean."""
    ends = row["curve"]
    starts = range(len(ends) - WINDOW + 1)
    return [(cost(row) * ends[i + WINDOW - 1][2], fmean(end[1] for end in ends[i : i + WINDOW])) for i in starts]


def sooner_by_reward(silos: Row, row: Row) -> float:
    theirs, mine = rewards(silos), rewards(row)
    if not theirs or not mine:
        return 0.0
    return times(first_reach(theirs, theirs[-1][1]), first_reach(mine, theirs[-1][1]))


def ratios(rows: Sequence[Row], part: str, arm: str, get: Callable[[Row, Row], float] = sooner) -> list[float]:
    """One for each seed that silos, which have learned, and the arm have from the same start."""
    silos, runs = silos_of(rows, part), of(rows, part, arm)
    pairs = [(silos[seed], runs[seed]) for seed in sorted(silos.keys() & runs.keys())]
    return [get(alone, row) for alone, row in pairs if alone["start"] == row["start"] and has_learned(alone)]


def has_learned(silos: Row) -> bool:
    return max(end["right"] for end in silos["ends"]) - silos["before"]["right"] >= NOISE


def best_arm(rows: Sequence[Row]) -> str:
    """The arm of the part `arms` with the highest median ratio; empty if there is none."""
    arms = [arm for arm in arms_in(rows, "arms", ALONE) if arm not in SILOS and ratios(rows, "arms", arm)]
    return max(
        arms, key=lambda arm: (median_low(ratios(rows, "arms", arm)), fmean(ratios(rows, "arms", arm))), default=""
    )


def of_arms(rows: Sequence[Row], part: str) -> str:
    lines = []
    for arm in arms_in(rows, part, ALONE):
        runs = of(rows, part, arm)
        ordered = [runs[seed] for seed in sorted(runs)]
        ends = [[end["right"] for end in row["ends"]] for row in ordered]
        lines.append(
            [
                arm,
                ", ".join(str(row["seed"]) for row in ordered),
                each_seed([row["before"]["right"] for row in ordered], ".3f"),
                each_seed(list(map(fmean, ends)), ".3f"),
                each_seed(list(map(max, ends)), ".3f"),
                each_seed([cost(row) * row["cpu_s"] for row in ordered], ".0f"),
                each_seed(ratios(rows, part, arm), ".2f"),
                each_seed(ratios(rows, part, arm, sooner_by_reward), ".2f"),
                f"{fmean(row['averaging'].get('exchanges', 0.0) for row in ordered):.1f}",
                f"{fmean(row['swarm'].get('swarm/bytes_out', 0.0) for row in ordered) / 1e6:.1f}",
            ]
        )
    columns = [part, "seeds", "right at the start", "at the end", "the best peer's", "CPU s a peer", "times as soon"]
    return table([*columns, "by reward", "averagings", "MB sent"], lines) if lines else ""


def goal(rows: Sequence[Row]) -> str:
    """What became of the goal: one sentence for the best arm in each part."""
    best = best_arm(rows)
    sentences = []
    for part in ("arms", "steps"):
        if found := ratios(rows, part, best) if best else []:
            met = median(found) >= SOONER and min(found) >= NEVER_BELOW
            verdict = "reached" if met else "not reached"
            asked = f"goal: {SOONER:g} times as soon as the strongest silo, never below {NEVER_BELOW:g}"
            chosen = " It was chosen on these seeds." if part == "arms" else ""
            sentences.append(f"{part}: {asked}: {verdict} by {best}, {each_seed(found, '.2f')}.{chosen}")
    return "\n".join(sentences)


def of_link(rows: Sequence[Row]) -> str:
    lines = []
    for row in (row for row in rows if row["part"] == "link"):
        for number, node in enumerate(row["nodes"], 1):
            curve, looks = node["curve"], node["looks"]
            last = fmean(reward for _, reward in curve[-WINDOW:])
            cells = [f"{looks[0]['right']:.3f}", f"{looks[-1]['right']:.3f}", f"{last:.3f}", f"{curve[-1][0]:.0f}"]
            lines.append([row["arm"], row["seed"], number, len(curve), *cells, node["used"], f"{node['exchanges']:g}"])
    columns = ["link", "seed", "node", "rounds", "right at the start", "at the end", "reward at the end", "CPU s"]
    return table([*columns, "groups of the other a round", "averagings"], lines) if lines else ""


def report(rows: Sequence[Row]) -> str:
    """Markdown: a table for each part that has rows, and what became of the goal."""
    texts = [of_ways(rows), of_arms(rows, "arms"), of_arms(rows, "steps"), goal(rows), of_link(rows)]
    return "\n\n".join(filter(None, texts)) or "no rows yet"
