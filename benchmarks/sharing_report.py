"""The tables of `benchmarks.sharing`: how much sooner a member is where the strongest silo ends.

    level       mean reward of the last WINDOW answers of all peers; what a silo ends with: of the last sixth of its run
    CPU s       of one member, all of its processes; the simulator's own figure plus what p2pd and gossip take beside
                one busy core (results/overhead.json)
    S = 80 %    the same as if sampling took so much of the CPU time of `silo`: each sampled answer costs m times more

Ratios are paired by seed, over runs with the same start: median with range. An arm that does not get there counts as
`never`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import fmean, median, median_low
from typing import Any

from benchmarks.common import RESULTS, spent, table
from benchmarks.intervals import Point, first_reach, value_at
from benchmarks.sharing import FOLDER, load
from benchmarks.sharing_arms import ARMS
from benchmarks.sharing_settings import SETTINGS

Row = dict[str, Any]
WINDOW = 1536
ROUND, REWARD, CPU_S, ANSWERS, TOKENS = range(5)  # columns of a curve
SILO = "silo"  # the arm by which sampling is re-priced
MEMBER = "new"
AVERAGING = (SILO, "averaging", "sharing", MEMBER)
OTHER_AVERAGING = ("NoLoCo", "Streaming DiLoCo")


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
    """The silo whose level at the end is highest, mean over seeds, of those with the most seeds."""
    silos = [arm for arm in found if is_silo(arm)]
    most = max(len(found[arm]) for arm in silos)
    return max(
        (arm for arm in silos if len(found[arm]) == most), key=lambda arm: fmean(map(end_level, found[arm].values()))
    )


def paired(theirs: Mapping[int, Row], mine: Mapping[int, Row]) -> dict[int, tuple[Row, Row]]:
    """By seed, the runs that began with the same policies."""
    both = sorted(theirs.keys() & mine.keys())
    return {seed: (theirs[seed], mine[seed]) for seed in both if theirs[seed].get("start") == mine[seed].get("start")}


def sampling(row: Row) -> float:
    """Share of the CPU time that sampling takes."""
    return row["cpu"]["generate"] / row["cpu_s"]


def first_silo(found: Mapping[str, Mapping[int, Row]], pairs: Mapping[int, tuple[Row, Row]]) -> list[float]:
    """How many times as soon as the first of all silos a member is where the strongest one ends, one for each seed;
    `pairs` are (strongest silo, member)."""
    ratios = []
    for seed, (silo, mine) in pairs.items():
        alike = [runs[seed] for arm, runs in found.items() if is_silo(arm) and seed in paired({seed: silo}, runs)]
        there = [at for row in alike if (at := first_reach(levels(row), end_level(silo))) is not None]
        ratios.append(times(min(there, default=None), first_reach(levels(mine), end_level(silo))))
    return ratios


def is_silo(arm: str) -> bool:
    return ARMS[arm].silo and ARMS[arm].peers != 1


def times(theirs: float | None, mine: float | None) -> float:
    """How many times as soon; 0 = never, infinite = the other never."""
    if mine is None:
        return 0.0
    return inf if theirs is None else theirs / max(mine, 1e-9)


def ranged(values: Sequence[float]) -> str:
    """Median with range of ratios."""
    if not values:
        return ""
    middle = median_low(values) if 0.0 in values or inf in values else median(values)
    written = [f"{x:.2f}" if 0 < x < inf else "only it" if x else "never" for x in (middle, min(values), max(values))]
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
        if not (pairs := paired(found[silo], runs)):
            continue
        share = f"{100 * fmean(sampling(row) for _, row in pairs.values()):.0f}"
        rows.append([f"{arm}: {ARMS[arm].says}", len(pairs), share, *cells(pairs, found.get(SILO, {}))])
    columns = ["arm", "seeds", "sampling, %", "CPU s", "reward at the end", "pass@1", "pass@8"]
    columns += ["times as soon, reward", "pass@1"]
    columns += ["reward at equal CPU, x", "at equal tokens, x", "at equal rounds, x", "S = 80 %", "S = 90 %"]
    return "\n".join([*lines, table(columns, rows), ""])


def in_short(settings: Sequence[str], arm: str = MEMBER) -> str:
    """Markdown: `arm` against the strongest silo of each setting, one line a setting."""
    rows = []
    for setting in settings:
        found = load(setting)
        silo = strongest(found)
        if not (pairs := paired(found[silo], found.get(arm, {}))):
            continue
        sooner, sooner_1, at_equal = (cells(pairs, found.get(SILO, {}))[i] for i in (4, 5, 6))
        pass_8 = (f"{fmean(pair[i]['held_out']['pass_8'] for pair in pairs.values()):.3f}" for i in (0, 1))
        level = f"{fmean(end_level(pair[0]) for pair in pairs.values()):.3f}"
        ahead = ranged(first_silo(found, pairs))
        rows.append([setting, len(pairs), silo, level, sooner, ahead, sooner_1, at_equal, *pass_8])
    columns = [
        "setting",
        "seeds",
        "strongest silo",
        "its level",
        "times as soon, reward",
        "than the first silo",
        "pass@1",
    ]
    return table([*columns, "reward at equal CPU, x", "pass@8, silo", f"pass@8, {arm}"], rows)


def of_averaging(settings: Sequence[str]) -> str:
    """Markdown: with and without averaging, with and without sharing, over seeds that all of these arms have; then
    other ways of averaging, over the seeds of each."""
    rows = []
    for setting in settings:
        found = load(setting)
        present = {arm: found[arm] for arm in AVERAGING if arm in found}
        if "averaging" not in present:
            continue
        silo = strongest(found)
        common = set[int].intersection(*(set(paired(found[silo], runs)) for runs in present.values()))
        others = {arm: found[arm] for arm in OTHER_AVERAGING if arm in found}
        for arm, runs in (present | others).items() if common else ():
            pairs = paired(found[silo], {seed: runs[seed] for seed in runs if seed in common or arm in others})
            sent = fmean(row["swarm"].get("swarm/bytes_out", 0.0) for _, row in pairs.values()) / 1e6
            rows.append([setting, arm, len(pairs), *cells(pairs, found.get(SILO, {}))[1:6], f"{sent:.1f}"])
    columns = ["setting", "arm", "seeds", "reward at the end", "pass@1", "pass@8", "times as soon, reward", "pass@1"]
    return table([*columns, "MB sent"], rows)


def of_parts(settings: Sequence[str]) -> str:
    """Markdown: members with one thing changed, in terms of `new` where the shorter run ends."""
    rows = []
    for setting in settings:
        found = load(setting)
        for arm, runs in found.items():
            if ARMS[arm].silo or arm == MEMBER or not (pairs := paired(found.get(MEMBER, {}), runs)):
                continue
            both = pairs.values()
            equal = [ranged([level_at_equal(*pair, column) for pair in both]) for column in (CPU_S, TOKENS)]
            rows.append([setting, arm, len(both), *equal])
    return table(["setting", "arm", "seeds", "reward at equal CPU, x", "at equal tokens, x"], rows)


def level_at_equal(theirs: Row, mine: Row, column: int) -> float:
    """Level of `mine` in terms of that of `theirs`, where the shorter of the two runs ends."""
    curves = levels(theirs, column), levels(mine, column)
    end = min(curve[-1][0] for curve in curves)
    other, own = (value_at(curve, end) for curve in curves)
    return (own or 0.0) / max(other or 0.0, 1e-9)


def cells(pairs: Mapping[int, tuple[Row, Row]], plain: Mapping[int, Row]) -> list[str]:
    """What a row of the table says of (strongest silo, arm) by seed; `plain`: the silo by which sampling is priced."""
    both = pairs.values()
    mean = lambda get: fmean(get(mine) for _, mine in both)  # noqa: E731

    def sooner(points: Callable[[Row], list[Point]], goal: Callable[[Row], float]) -> str:
        return ranged([times(*(first_reach(points(row), goal(silo)) for row in (silo, mine))) for silo, mine in both])

    def repriced(share: float) -> str:
        ratios = []
        for seed, (silo, mine) in pairs.items():
            if seed in plain:
                price, goal = price_at(plain[seed], share), end_level(silo)
                ratios.append(times(*(first_reach(levels(row, CPU_S, price), goal) for row in (silo, mine))))
        return ranged(ratios)

    def at_equal(column: int) -> str:
        return ranged([level_at_equal(*pair, column) for pair in both])

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
    cpu_s = sum(
        row["cpu_s"] * row["peers"] for setting in settings for runs in load(setting).values() for row in runs.values()
    )
    text = "\n".join(
        [
            *(in_short(settings), "", of_averaging(settings), "", of_parts(settings), ""),
            *map(report, settings),
            spent(cpu_s),
            "",
        ]
    )
    (FOLDER / "report.md").write_text(text)
    print(text)
