"""The tables of `benchmarks.sharing`: how much sooner a member is where the strongest silo ends.

    level       mean reward of the last WINDOW answers of all peers; what a silo ends with: of the last sixth of its run
    CPU s       of one member, all of its processes; the simulator's own figure plus what p2pd and gossip take beside
                one busy core (results/overhead.json)
    S = 80 %    the same as if sampling took so much of the CPU time of `silo`: each sampled answer costs m times more

Ratios are paired by seed: median with range. An arm that does not get there counts as `never`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.common import RESULTS, table
from benchmarks.intervals import Point, first_reach, value_at
from benchmarks.sharing import FOLDER, load
from benchmarks.sharing_arms import ARMS
from benchmarks.sharing_settings import SETTINGS

Row = dict[str, Any]
WINDOW = 1536
ROUND, REWARD, CPU_S, ANSWERS, TOKENS = range(5)  # columns of a curve
SILO = "silo"  # the arm by which sampling is re-priced
AVERAGING = ("silo", "averaging", "sharing", "new", "NoLoCo", "Streaming DiLoCo")


def network_share() -> float:
    """CPU time of p2pd and the gossip process for each second of a busy core."""
    member = json.loads((RESULTS / "overhead.json").read_text())["member"]
    return member["figures"]["at 1 message/s of each"]["cpu_percent"] / 100


def levels(row: Row, column: int = CPU_S, price: float = 1.0) -> list[Point]:
    """(CPU seconds, answers, tokens or rounds; level) along a run; `price`: how much dearer an answer is."""
    curve = row["curve"]
    n = min(len(curve), max(1, round(len(curve) * WINDOW / (curve[-1][ANSWERS] * row["peers"]))))
    return [
        (x_of(row, curve[i], column, price), fmean(point[REWARD] for point in curve[i - n + 1 : i + 1]))
        for i in range(n - 1, len(curve))
    ]


def x_of(row: Row, point: Sequence[float], column: int, price: float = 1.0) -> float:
    if column != CPU_S:
        return point[column]
    dearer = (price - 1) * row["cpu"]["generate"] * point[ANSWERS] / max(row["curve"][-1][ANSWERS], 1)
    network = 0.0 if ARMS[row["arm"]].silo else network_share()
    return (point[CPU_S] + dearer) * (1 + network)


def passes(row: Row) -> list[Point]:
    """(CPU seconds, held-out pass@1)"""
    network = 0.0 if ARMS[row["arm"]].silo else network_share()
    start = (0.0, row["held_out_before"]["pass_1"])
    return [start, *((cpu_s * (1 + network), pass_1) for cpu_s, pass_1, _ in row["looks"])]


def end_level(row: Row) -> float:
    """Level at the end: the mean reward of the last sixth of the run."""
    return fmean(point[REWARD] for point in row["curve"][-max(1, len(row["curve"]) // 6) :])


def price_at(silo: Row, share: float) -> float:
    """How much dearer an answer is where sampling takes `share` of the silo's CPU time."""
    sampling = silo["cpu"]["generate"]
    return share / (1 - share) * (silo["cpu_s"] - sampling) / sampling


def strongest(found: Mapping[str, Mapping[int, Row]]) -> str:
    """The silo whose level at the end is highest, mean over seeds."""
    silos = [arm for arm in found if ARMS[arm].silo and ARMS[arm].peers != 1]
    return max(silos, key=lambda arm: fmean(map(end_level, found[arm].values())))


def times(theirs: float | None, mine: float | None) -> float:
    return 0.0 if mine is None or theirs is None else theirs / max(mine, 1e-9)


def ranged(values: Sequence[float]) -> str:
    """Median with range of ratios."""
    if not values:
        return ""
    written = [f"{value:.2f}" if value else "never" for value in (median(values), min(values), max(values))]
    return written[0] if len(values) == 1 else f"{written[0]} ({written[1]} to {written[2]})"


def report(setting: str) -> str:
    """Markdown: each arm against the strongest silo of the setting."""
    found = load(setting)
    silo = strongest(found)
    seeds = sorted(found[silo])
    says = f"{SETTINGS[setting].says}. Seeds {seeds}; the strongest silo: {silo}"
    before = fmean(row["held_out_before"]["pass_1"] for row in found[silo].values())
    lines = [f"**{setting}**: {says}. Held-out pass@1 before {before:.3f}.", ""]
    rows = []
    for arm, runs in found.items():
        both = [seed for seed in seeds if seed in runs]
        if not both:
            continue
        pairs = [(found[silo][seed], runs[seed]) for seed in both]
        rows.append([f"{arm}: {ARMS[arm].says}", len(both), *cells(pairs, found.get(SILO, {}), both)])
    columns = ["arm", "seeds", "CPU s", "reward at the end", "pass@1", "pass@8", "times as soon, reward", "pass@1"]
    columns += ["reward at equal CPU, x", "at equal tokens, x", "at equal rounds, x", "S = 80 %", "S = 90 %"]
    return "\n".join([*lines, table(columns, rows), ""])


def in_short(settings: Sequence[str], arm: str = "new") -> str:
    """Markdown: `arm` against the strongest silo of each setting, one line a setting."""
    rows = []
    for setting in settings:
        found = load(setting)
        silo = strongest(found)
        both = sorted(set(found[silo]) & set(found.get(arm, {})))
        if not both:
            continue
        pairs = [(found[silo][seed], found[arm][seed]) for seed in both]
        sooner, sooner_1, at_equal = (cells(pairs, found.get(SILO, {}), both)[i] for i in (4, 5, 6))
        pass_8 = (f"{fmean(pair[i]['held_out']['pass_8'] for pair in pairs):.3f}" for i in (0, 1))
        level = f"{fmean(end_level(pair[0]) for pair in pairs):.3f}"
        rows.append([setting, len(both), silo, level, sooner, sooner_1, at_equal, *pass_8])
    columns = ["setting", "seeds", "strongest silo", "its level", "times as soon, reward", "pass@1"]
    return table([*columns, "reward at equal CPU, x", "pass@8, silo", f"pass@8, {arm}"], rows)


def of_averaging(settings: Sequence[str]) -> str:
    """Markdown: with and without averaging, with and without sharing, over seeds that all of these arms have."""
    rows = []
    for setting in settings:
        found = load(setting)
        present = {arm: found[arm] for arm in AVERAGING if arm in found}
        if "averaging" not in present:
            continue
        silo = strongest(found)
        both = sorted(set(found[silo]).intersection(*present.values()))
        for arm, runs in present.items() if both else ():
            cell = cells([(found[silo][seed], runs[seed]) for seed in both], found.get(SILO, {}), both)
            sent = fmean(runs[seed]["swarm"].get("swarm/bytes_out", 0.0) for seed in both) / 1e6
            rows.append([setting, arm, len(both), *cell[1:6], f"{sent:.1f}"])
    columns = ["setting", "arm", "seeds", "reward at the end", "pass@1", "pass@8", "times as soon, reward", "pass@1"]
    return table([*columns, "MB sent"], rows)


def cells(pairs: Sequence[tuple[Row, Row]], plain: Mapping[int, Row], seeds: Sequence[int]) -> list[str]:
    """What a row of the table says of (strongest silo, arm) by seed."""
    mean = lambda get: fmean(get(mine) for _, mine in pairs)  # noqa: E731

    def sooner(points: Callable[[Row], list[Point]], goal: Callable[[Row], float]) -> str:
        return ranged([times(*(first_reach(points(row), goal(silo)) for row in (silo, mine))) for silo, mine in pairs])

    def repriced(share: float) -> str:
        ratios = []
        for seed, (silo, mine) in zip(seeds, pairs, strict=True):
            if seed in plain:
                price, goal = price_at(plain[seed], share), end_level(silo)
                ratios.append(times(*(first_reach(levels(row, CPU_S, price), goal) for row in (silo, mine))))
        return ranged(ratios)

    def at_equal(column: int) -> str:
        """Level of the arm, in terms of the silo's, where the shorter of the two runs ends."""
        ratios = []
        for silo, mine in pairs:
            curves = levels(silo, column), levels(mine, column)
            end = min(curve[-1][0] for curve in curves)
            theirs, own = (value_at(curve, end) for curve in curves)
            ratios.append((own or 0.0) / max(theirs or 0.0, 1e-9))
        return ranged(ratios)

    return [
        f"{mean(lambda row: x_of(row, row['curve'][-1], CPU_S)):.1f}",
        f"{mean(end_level):.3f}",
        *(f"{mean(lambda row, key=key: row['held_out'][key]):.3f}" for key in ("pass_1", "pass_8")),
        sooner(levels, end_level),
        sooner(passes, lambda silo: fmean(pass_1 for _, pass_1, _ in silo["looks"][-2:])),
        *map(at_equal, (CPU_S, TOKENS, ROUND)),
        repriced(0.8),
        repriced(0.9),
    ]


def write_report() -> None:
    """Print the tables of all settings with rows, and write them to results/sharing/report.md."""
    settings = [setting for setting in SETTINGS if load(setting)]
    hours = sum(
        row["cpu_s"] * row["peers"] for setting in settings for runs in load(setting).values() for row in runs.values()
    )
    text = "\n".join(
        [
            *(in_short(settings), "", of_averaging(settings), ""),
            *map(report, settings),
            f"All rows together took {hours / 3600:.1f} CPU hours.",
            "",
        ]
    )
    (FOLDER / "report.md").write_text(text)
    print(text)
