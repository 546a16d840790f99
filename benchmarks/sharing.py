"""Is sharing worth it? Nodes that share, silos and controls, from the same starts, in the simulator.

    python -m benchmarks.sharing [--setting format] [--arms 8/0 4/4 …] [--seeds 0 1 2 3 4] [--peers 8] [--rounds 120]
    python -m benchmarks.sharing --report
    python -m benchmarks.sharing --quick          # two arms, four peers, 30 rounds: a minute or two; nothing is stored

Every peer is a whole node (tasks, sampling, admission, replay, updates); only clock and wires are simulated. A seed
decides the warm start as well as the sampling; all arms of a seed begin with the same policies. One JSON for each
(setting, arm, seed) under results/sharing; what is there already is not run again. Figures:

    cum      training reward (mean over a round's own answers, before any filter), mean over peers, sum over rounds
    last 20  the same, mean over the last 20 rounds
    pass@1   held-out questions, 8 samples each, under the same reward as training
    samples  own answers sampled, all peers together
    CPU s    process time of everything, all peers together; one thread

Intervals are 95 % bootstrap intervals over seeds, of paired differences where two arms are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.common import RESULTS, machine, table
from benchmarks.sharing_arms import ARMS, Arm, Measured, Round
from benchmarks.sharing_settings import SETTINGS, Setting
from protocol.transports.memory import LinkModel
from swarm_node.config import NodeConfig, RolloutsConfig
from swarm_node.node import Node
from swarm_node.rollouts import collect
from swarm_node.rollouts.evaluate import QUESTIONS_PER_BATCH
from swarm_node.runtime.simulation import Peer, Simulation, Speed, manifest_for
from swarm_node.tasks import load_tasks
from swarm_node.types import Group

FOLDER = RESULTS / "sharing"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "sharing.png"
PEERS, ROUNDS, SEEDS = 8, 120, (0, 1, 2, 3, 4)
QUESTIONS, SAMPLES = 96, 8
POINTS = 60
SPEED = Speed(generate_tok_s=300.0, train_tok_s=1000.0)
"""A round takes one to two virtual seconds: messages, sent once a second, arrive about a round after sampling."""
LINK = LinkModel()
STAGGER_S = 0.37
"""Peers begin this long after each other, so that they do not march in step."""


def run(setting: Setting, arm: Arm, seed: int, peers: int, rounds: int) -> dict[str, Any]:
    """One simulation: its figures."""
    peers, times = (1, arm.alone) if arm.alone else (peers, 1)
    simulation = simulate(setting, arm, seed, peers)
    members = simulation.peers
    nodes: list[Measured] = [peer.node for peer in members]  # type: ignore[misc]
    before = [held_out(setting, node) for node in nodes[: setting.kinds]]
    seconds = timed(nodes, lambda: simulation.run(times * rounds))
    after = [held_out(setting, node) for node in nodes]
    curves = [windows(node.curve, times) for node in nodes]
    rewards = [fmean(c[r][0] for c in curves) for r in range(rounds)]
    cpu = {part: round(sum(node.cpu[part] for node in nodes), 2) for part in dict(nodes[0].cpu)}
    figures = {
        "cum": sum(rewards),
        "last_20": fmean(rewards[-20:]),
        "cum_by_peer": [round(sum(reward for reward, _, _ in c), 3) for c in curves],
        "held_out_before": mean_by_key(before),
        "held_out": mean_by_key(after),
        "pass_1_by_peer": [round(table["pass_1"], 4) for table in after],
        "samples": sum(node.samples for node in nodes),
        "signal_groups": sum(node.signal for node in nodes) / (times * peers * rounds),
        "trained_groups": sum(node.trained for node in nodes) / (times * peers * rounds),
        "foreign_groups": sum(node.foreign for node in nodes) / (times * peers * rounds),
        "cpu": cpu | {"other": round(seconds - sum(cpu.values()), 2)},
        "cpu_s": seconds,
        "swarm": swarm(members),
    }
    if arm.longer > 1:
        timed(nodes, lambda: simulation.run(arm.longer * rounds), seconds)
        curves = [node.curve for node in nodes]
    return figures | {"curve": curve(curves)}


def simulate(setting: Setting, arm: Arm, seed: int, peers: int, link: LinkModel = LINK) -> Simulation:
    """`peers` nodes of `arm`, about to begin."""
    members = [
        Peer(
            config(setting, arm, seed, number),
            speed=SPEED,
            link=link,
            starts_at=STAGGER_S * number,
            silo=arm.silo,
            node_type=arm.node,
        )
        for number in range(peers)
    ]
    manifest = msgspec.structs.replace(manifest_for(members[0].config), averaging_period_s=arm.period_s)
    return Simulation(manifest, members, seed)


def timed(nodes: Sequence[Measured], run: Callable[[], None], already: float = 0.0) -> float:
    """CPU seconds of `run`; the nodes' curves count from its beginning, and from `already`."""
    began = time.process_time()
    for node in nodes:
        node.began = began - already
    run()
    return time.process_time() - began


def config(setting: Setting, arm: Arm, seed: int, number: int) -> NodeConfig:
    """Of peer `number` in `arm`. Nobody lies here: answers are not looked at for payloads unless the arm says so."""
    table: dict[str, Any] = {
        "tasks": list(setting.tasks(number)),
        "rewards": setting.rewards,
        "policy": {"model": str(setting.start(seed, number))},
        "rollouts": {"groups": arm.own, "max_new_tokens": setting.max_new_tokens, "max_prompt_tokens": 128},
        "grpo": {"learning_rate": arm.rate * setting.learning_rate},
        "sharing": {"own": arm.own, "foreign": arm.foreign, "gate": False},
    }
    for section, keys in arm.sets.items():
        table[section] = {**table.get(section, {}), **keys}
    return NodeConfig.model_validate(table)


def held_out(setting: Setting, node: Node, count: int = 0) -> dict[str, float]:
    """pass@1 and pass@8 on `count` held-out questions (QUESTIONS if not given), right = full reward."""
    tasks = load_tasks(list(setting.held_out), node.config.rewards)
    rollouts = RolloutsConfig(
        groups=QUESTIONS_PER_BATCH, group_size=SAMPLES, max_new_tokens=node.config.rollouts.max_new_tokens
    )
    questions = tasks.held_out(count or QUESTIONS)
    waiting = iter(questions)
    groups: list[Group] = []
    for start in range(0, len(questions), QUESTIONS_PER_BATCH):
        groups += collect(node.policy, lambda n: list(islice(waiting, n)), tasks, rollouts, f"{start}").groups
    right = [[rollout.reward > 0.999 for rollout in group.rollouts] for group in groups]
    return {"pass_1": fmean(map(fmean, right)), "pass_8": fmean(map(any, right))}


def windows(rounds: Sequence[Round], n: int) -> list[Round]:
    """`n` rounds as one: mean reward, CPU seconds and samples at its end."""
    return [
        (fmean(r for r, _, _ in rounds[i : i + n]), *rounds[min(i + n, len(rounds)) - 1][1:])
        for i in range(0, len(rounds), n)
    ]


def curve(curves: Sequence[Sequence[Round]]) -> list[list[float]]:
    """[round, cum, CPU seconds, samples] at about POINTS rounds, the last among them."""
    points = []
    rounds, cum = len(curves[0]), 0.0
    for r in range(rounds):
        cum += fmean(c[r][0] for c in curves)
        if (r + 1) % max(1, rounds // POINTS) == 0 or r + 1 == rounds:
            points.append(
                [r + 1, round(cum, 4), round(fmean(c[r][1] for c in curves), 2), sum(c[r][2] for c in curves)]
            )
    return points


def swarm(members: Sequence[Peer]) -> dict[str, float]:
    """`swarm/*` metrics, mean over peers: running totals at the end; what is of a round, mean over all rounds."""
    lines = [line for peer in members for line in peer.metrics]
    last = [peer.metrics[-1] for peer in members]
    names = sorted({name for line in lines for name in line if name.startswith("swarm/")})
    of_a_round = ("swarm/groups_used", "swarm/staleness_mean", "swarm/groups_waiting")
    figures = {name: [line[name] for line in lines if name in line] for name in names}
    return {
        name: fmean(values) if name in of_a_round else sum(line.get(name, 0.0) for line in last) / len(last)
        for name, values in figures.items()
    }


def mean_by_key(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: fmean(row[key] for row in tables) for key in tables[0]}


# --------------------------------------------------------------------- files


def path_of(setting: str, arm: str, seed: int, peers: int, rounds: int) -> Path:
    size = "" if (peers, rounds) == (PEERS, ROUNDS) else f"-{peers}x{rounds}"
    return FOLDER / f"{setting}{size}" / f"{arm.replace('/', '-').replace(' ', '_')}-{seed}.json"


def run_missing(args: argparse.Namespace) -> None:
    for seed in args.seeds:
        for name in args.arms:
            path = path_of(args.setting, name, seed, args.peers, args.rounds)
            if path.exists():
                continue
            figures = run(SETTINGS[args.setting], ARMS[name], seed, args.peers, args.rounds)
            head = {"setting": args.setting, "arm": name, "seed": seed, "peers": args.peers, "rounds": args.rounds}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(head | figures | {"machine": machine()}) + "\n")
            show(args.setting, name, seed, figures)


def show(setting: str, arm: str, seed: int, figures: dict[str, Any]) -> None:
    shown = "  ".join(f"{key} {figures[key]:.3g}" for key in ("cum", "last_20", "signal_groups", "cpu_s"))
    print(f"{setting}  {arm}  seed {seed}  {shown}  {figures['held_out']}", flush=True)


def quick(setting: str) -> None:
    """A look at whether sharing still does what it did; one seed says nothing of whether it is worth it."""
    for arm in ("8/0", "4/4"):
        show(setting, arm, 0, run(SETTINGS[setting], ARMS[arm], 0, peers=4, rounds=30))


def load(setting: str, peers: int, rounds: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Arm -> seed -> figures, arms in the order of ARMS."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for arm in ARMS:
        paths = path_of(setting, arm, 0, peers, rounds)
        for path in sorted(paths.parent.glob(paths.name.replace("-0.json", "-*.json"))):
            figures = json.loads(path.read_text())
            if figures["arm"] == arm and figures["seed"] < SEARCHED_FROM:
                found.setdefault(arm, {})[figures["seed"]] = figures
    return found


SEARCHED_FROM = 100
"""Seeds from here on were used to search settings, and are not reported."""


# --------------------------------------------------------------------- report


def report(setting: str, peers: int, rounds: int) -> str:
    """Markdown: figures of each arm over the silo's seeds, and comparisons of two arms over all that both have."""
    found = load(setting, peers, rounds)
    silo = found.get("8/0", {})
    seeds = sorted(silo or {seed for runs in found.values() for seed in runs})
    lines = [f"**{setting}**: {SETTINGS[setting].says}. {peers} peers, {rounds} rounds, seeds {seeds}.", ""]
    columns = ["arm", "seeds", "cum", "cum against 8/0", "last 20", "pass@1", "pass@8", "samples", "signal", "CPU s"]
    rows = []
    for arm, all_runs in found.items():
        runs = {seed: figures for seed, figures in all_runs.items() if seed in seeds}
        if not runs:
            continue
        mean = lambda get, runs=runs: fmean(map(get, runs.values()))  # noqa: E731
        rows.append(
            [
                f"{arm}: {ARMS[arm].says}",
                len(runs),
                interval([f["cum"] for f in runs.values()], ".2f"),
                "" if arm == "8/0" else against(runs, silo, lambda f: f["cum"]),
                f"{mean(lambda f: f['last_20']):.3f}",
                interval([f["held_out"]["pass_1"] for f in runs.values()], ".3f"),
                interval([f["held_out"]["pass_8"] for f in runs.values()], ".3f"),
                f"{mean(lambda f: f['samples']):,.0f}",
                f"{mean(lambda f: f['signal_groups']):.2f}",
                f"{mean(lambda f: f['cpu_s']):.0f}",
            ]
        )
    lines += [table(columns, rows), ""]
    shared = found.get("4/4", {})
    rows = []
    for arm, runs in found.items():
        both = sorted(runs.keys() & shared.keys())
        if arm == "4/4" or not both:
            continue
        cells = []
        for axis in (1, 2):  # CPU seconds, samples: columns 2 and 3 of a curve
            mine, theirs = [], []
            short = False
            for seed in both:
                limit = shared[seed]["curve"][-1][1 + axis]
                value, reached = at(runs[seed]["curve"], 1 + axis, limit)
                short |= not reached
                mine.append(value)
                theirs.append(shared[seed]["cum"])
            ratio = fmean(theirs) / max(fmean(mine), 1e-9)
            cells += [f"{'≥ ' if short else ''}{fmean(mine):.2f}", f"{'≤ ' if short else ''}{ratio:.1f}x"]
        pass_1 = [shared[s]["held_out"]["pass_1"] - runs[s]["held_out"]["pass_1"] for s in both]
        rows.append([arm, *cells, interval(pass_1, "+.3f")])
    columns = [
        "arm",
        "cum at the CPU time of 4/4",
        "4/4 is",
        "cum at its samples",
        "4/4 is",
        "4/4 has more pass@1",
    ]
    lines += [table(columns, rows), ""]
    kinds = SETTINGS[setting].kinds
    if kinds > 1:
        columns = ["arm", *(f"{figure} of kind {k}" for figure in ("cum", "pass@1") for k in range(kinds))]
        rows = []
        for arm, runs in found.items():
            cells = [
                f"{fmean(fmean(figures[key][kind::kinds]) for figures in runs.values()):.{digits}f}"
                for key, digits in (("cum_by_peer", 2), ("pass_1_by_peer", 3))
                for kind in range(kinds)
            ]
            rows.append([arm, *cells])
        lines += [table(columns, rows), ""]
    return "\n".join(lines)


def at(points: Sequence[Sequence[float]], column: int, limit: float) -> tuple[float, bool]:
    """Cumulative reward where `column` reaches `limit` (linear in between), and whether it does."""
    before = [0.0] * 4
    for point in points:
        if point[column] >= limit:
            share = (limit - before[column]) / max(point[column] - before[column], 1e-9)
            return before[1] + share * (point[1] - before[1]), True
        before = list(point)
    return before[1], False


def against(runs: dict[int, Any], base: dict[int, Any], get: Callable[[dict[str, Any]], float]) -> str:
    """Difference of the means in percent, with the bootstrap interval over paired seeds."""
    seeds = sorted(runs.keys() & base.keys())
    if not seeds or runs is base:
        return ""
    pairs = [(get(runs[s]), get(base[s])) for s in seeds]
    ratio = lambda sample: 100 * (sum(a for a, _ in sample) / max(sum(b for _, b in sample), 1e-9) - 1)  # noqa: E731
    low, high = bootstrap(pairs, ratio)
    return f"{ratio(pairs):+.0f} % [{low:+.0f}, {high:+.0f}]"


def interval(values: Sequence[float], form: str) -> str:
    low, high = bootstrap(values, fmean)
    return f"{fmean(values):{form}} [{low:{form}}, {high:{form}}]"


def bootstrap(values: Sequence[Any], statistic: Callable[[Sequence[Any]], float], n: int = 4000) -> tuple[float, float]:
    """95 % percentile interval of `statistic` over resampled `values`."""
    rng = random.Random(0)
    drawn = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(n))
    return drawn[int(0.025 * n)], drawn[int(0.975 * n) - 1]


def plot(setting: str, peers: int, rounds: int, out: Path) -> None:
    """Reward level over rounds and over CPU seconds, mean of the silo's seeds."""
    from matplotlib.figure import Figure

    found = load(setting, peers, rounds)
    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for arm in ("4/4", "6/2", "2/6", "8/0", "refill", "4/4 refill"):
        runs = [figures for seed, figures in found.get(arm, {}).items() if seed in found.get("8/0", {seed})]
        if not runs:
            continue
        n = min(len(f["curve"]) for f in runs)
        points = [[fmean(f["curve"][i][c] for f in runs) for c in range(4)] for i in range(n)]
        for axes, column in zip(panels, (0, 2), strict=True):
            window = max(1, n // 12)
            x = [p[column] for p in points[window:]]
            y = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(points, points[window:], strict=False)]
            axes.plot(x, y, lw=2.2 if arm in ("4/4", "8/0") else 1.3, label=f"{arm}: {ARMS[arm].says}")
    panels[0].set_xlabel("round")
    panels[1].set_xlabel("CPU seconds, all peers")
    panels[0].set_ylabel("training reward per answer")
    panels[0].legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=SETTINGS, default="format")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--report", action="store_true", help="tables and plot of all that has been run")
    parser.add_argument("--quick", action="store_true", help="two arms of one seed, four peers, 30 rounds")
    args = parser.parse_args(argv)
    if args.report:
        found = [setting for setting in SETTINGS if load(setting, args.peers, args.rounds)]
        text = "\n".join(report(setting, args.peers, args.rounds) for setting in found)
        (FOLDER / "report.md").write_text(text)
        print(text)
        plot("format", args.peers, args.rounds, PLOT)
    elif args.quick:
        quick(args.setting)
    else:
        run_missing(args)


if __name__ == "__main__":
    main()
