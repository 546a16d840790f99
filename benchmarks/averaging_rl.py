"""Are RL peers better for averaging their weights? Silos, averaging, sharing, and both, from one start, simulated.

    python -m benchmarks.averaging_rl [--setting plain] [--arms silo averaging …] [--seeds 0 1 2 3 4] [--rounds 120]
    python -m benchmarks.averaging_rl --report

As `benchmarks.sharing`, whose settings these are: whole nodes, only clock and wires are simulated. All peers of a seed
begin with the same policy and draw questions of their own. One JSON for each (setting, arm, seed) under
results/averaging_rl; what is there already is not run again. Figures:

    cum       training reward (mean over a round's own answers), mean over peers, sum over rounds
    in time   the same, up to the virtual time at which the first arm of that seed has had its last round
    own       pass@1 of each peer's own model on held-out questions: mean, best and worst peer
    x2        with twice the learning rate of the setting. Comparisons with silos and with sharing are with those of
              the better learning rate, by cum
    merged    pass@1 of the mean of all peers' weights (`swarm-node merge`), made once, at the end
    spread    root mean square difference to the mean of the weights, as part of what training changed (root mean
              square of mean - start)
    bytes     sent by a node, mean over nodes. Rollouts: to each other peer once (a real mesh of four measured a third
              more). Averaging: bodies of exchanges. Rest: what an idle member of four sends and receives (DHT, its
              bootstrap, gossip's own; results/overhead.json), for each virtual second; silos send nothing

The link is 20 Mbit/s up, 25 ms; the machine that of `benchmarks.sharing`: a round takes about two virtual seconds, an
exchange of 0.45 MB a fifth of one. Exchanges are in that proportion to rounds where a machine with rounds of half a
minute trains an adapter of some 8 M values. Nothing waits for an upload, but rollouts and weights share the uplink.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, machine, table
from benchmarks.intervals import against, interval, value_at
from benchmarks.sharing import SEARCHED_FROM, held_out, simulate, timed
from benchmarks.sharing_arms import BEFORE, Arm, Measured
from benchmarks.sharing_settings import SETTINGS, Setting
from protocol.transports.memory import LinkModel
from swarm_node.averaging.merge import uniform_mean
from swarm_node.runtime.simulation import START, Peer

FOLDER = RESULTS / "averaging_rl"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "averaging_rl.png"
PEERS, ROUNDS, SEEDS = 4, 120, (0, 1, 2, 3, 4)
QUESTIONS = 192
LINK = LinkModel(latency_s=0.025, bandwidth_bytes_s=20e6 / 8)

PERIOD_S = 5.0
"""Two to three rounds."""
AVERAGED = {"method": "noloco", "alpha": 0.0, "beta": 1.0, "gamma": 1.0, "every": 1, "late_join": False}
"""The mean of the pair."""
AVERAGING = BEFORE | {"averaging": AVERAGED}
ONCE = {
    "silo": Arm("8 own", own=8, foreign=0, silo=True, sets=BEFORE),
    "averaging": Arm("8 own, weights averaged", own=8, foreign=0, sets=AVERAGING, period_s=PERIOD_S),
    "sharing": Arm("4 own + 4 foreign", own=4, foreign=4, sets=BEFORE),
    "sharing + averaging": Arm(
        "4 own + 4 foreign, weights averaged", own=4, foreign=4, sets=AVERAGING, period_s=PERIOD_S
    ),
}
TWICE = {f"{name} x2": replace(a, says=f"{a.says}, twice the learning rate", rate=2.0) for name, a in ONCE.items()}
ARMS = {name: arm for pair in zip(ONCE.items(), TWICE.items(), strict=True) for name, arm in pair}


def run(setting: Setting, arm: Arm, seed: int, peers: int, rounds: int) -> dict[str, Any]:
    """One simulation: its figures."""
    simulation = simulate(setting, arm, seed, peers, LINK)
    nodes: list[Measured] = [peer.node for peer in simulation.peers]  # type: ignore[misc]
    states = {str(i): node.policy.trainable_state() for i, node in enumerate(nodes)}
    start = {name: tensor.clone() for name, tensor in states["0"].items()}
    before = held_out(setting, nodes[0], QUESTIONS)
    seconds = timed(nodes, lambda: simulation.run(rounds))
    own = [held_out(setting, node, QUESTIONS) for node in nodes]
    merged = uniform_mean(states)
    spread = apart(states, merged, start)
    nodes[0].policy.load_trainable_state(merged)
    points = curve(simulation.peers)
    last = [peer.metrics[-1] for peer in simulation.peers]
    names = sorted({name for line in last for name in line if name.startswith("averaging/")})
    return {
        "cum": points[-1][1],
        "last_20": points[-1][1] / 20 - (points[-21][1] / 20 if rounds > 20 else 0.0),
        "seconds": points[-1][2],
        "held_out_before": before,
        "own": own,
        "merged": held_out(setting, nodes[0], QUESTIONS),
        "spread_of_progress": spread,
        "rollout_bytes": fmean(line.get("swarm/bytes_out", 0.0) - line.get("averaging/bytes", 0.0) for line in last),
        "averaging_bytes": fmean(line.get("averaging/bytes", 0.0) for line in last),
        "rest_bytes": points[-1][3] - fmean(line.get("swarm/bytes_out", 0.0) for line in last),
        "averaging": {name: fmean(line.get(name, 0.0) for line in last) for name in names},
        "updates": fmean(node.trainer.optimizer.updates for node in nodes),
        "signal_groups": sum(node.signal for node in nodes) / (peers * rounds),
        "cpu_s": seconds,
        "curve": points,
    }


def apart(states: Mapping[str, Mapping[str, Tensor]], mean: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """How far `states` are from their mean, against how far that is from `start`: root mean squares, as a ratio."""
    square = lambda a, b: sum(float((a[name] - b[name]).square().sum()) for name in mean)  # noqa: E731
    return math.sqrt(fmean(square(state, mean) for state in states.values()) / max(square(mean, start), 1e-30))


def curve(members: Sequence[Peer]) -> list[list[float]]:
    """[round, cum, virtual seconds since its beginning, bytes sent], mean over peers, after each round."""
    idle = json.loads((RESULTS / "overhead.json").read_text())["member"]["figures"]["idle"]["kb_per_s"] * 1000
    points, cum = [], 0.0
    for number, lines in enumerate(zip(*(peer.metrics for peer in members), strict=True), 1):
        ends = [line["time"] - START - peer.starts_at for peer, line in zip(members, lines, strict=True)]
        cum += fmean(line["reward"] for line in lines)
        seconds = fmean(ends)
        sent = fmean(line.get("swarm/bytes_out", 0.0) for line in lines)
        rest = 0.0 if members[0].silo else idle * seconds
        points.append([number, round(cum, 4), round(seconds, 2), round(sent + rest)])
    return points


# --------------------------------------------------------------------- files


def path_of(setting: str, arm: str, seed: int, peers: int, rounds: int) -> Path:
    size = "" if (peers, rounds) == (PEERS, ROUNDS) else f"-{peers}x{rounds}"
    return FOLDER / f"{setting}{size}" / f"{arm.replace(' ', '_')}-{seed}.json"


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
            shown = "  ".join(f"{key} {figures[key]:.3g}" for key in ("cum", "last_20", "spread_of_progress", "cpu_s"))
            print(f"{args.setting}  {name}  seed {seed}  {shown}  own {mean_own(figures):.3f}", flush=True)


def load(setting: str, peers: int, rounds: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Arm -> seed -> figures, arms in the order of ARMS."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(path_of(setting, "", 0, peers, rounds).parent.glob("*.json")):
        figures = json.loads(path.read_text())
        if figures["seed"] < SEARCHED_FROM:
            found.setdefault(figures["arm"], {})[figures["seed"]] = figures
    return {arm: found[arm] for arm in ARMS if arm in found}


# --------------------------------------------------------------------- report


def mean_own(figures: dict[str, Any], key: str = "pass_1") -> float:
    return fmean(own[key] for own in figures["own"])


def earned_at(figures: dict[str, Any], seconds: float) -> float:
    """Summed reward after so many virtual seconds."""
    return value_at([(point[2], point[1]) for point in figures["curve"]], seconds) or 0.0


def best_own(figures: dict[str, Any]) -> float:
    return max(own["pass_1"] for own in figures["own"])


def better(found: dict[str, dict[int, dict[str, Any]]], arm: str) -> dict[int, dict[str, Any]]:
    """The arm at the learning rate at which it earns more, on the seeds that were run at both."""
    both = [found[name] for name in (arm, f"{arm} x2") if name in found]
    seeds = set.intersection(*map(set, both)) if both else set()
    return max(both, key=lambda runs: sum(runs[seed]["cum"] for seed in seeds), default={})


def report(setting: str, peers: int, rounds: int) -> str:
    """Markdown: figures of each arm; what the final merge and averaging are worth."""
    found = load(setting, peers, rounds)
    seeds = sorted({seed for runs in found.values() for seed in runs})
    first = {seed: min(runs[seed]["seconds"] for runs in found.values() if seed in runs) for seed in seeds}
    before = fmean(f["held_out_before"]["pass_1"] for runs in found.values() for f in runs.values())
    says = f"{SETTINGS[setting].says}. {peers} peers, {rounds} rounds, seeds {seeds}; pass@1 before {before:.3f}"
    lines = [f"**{setting}**: {says}.", ""]

    def difference(
        runs: dict[int, Any], get: Callable[[Any], float], base: dict[int, Any], of: Callable[[Any], float]
    ) -> str:
        both = sorted(runs.keys() & base.keys())
        return interval([get(runs[s]) - of(base[s]) for s in both], "+.3f") if both else ""

    rows, compared = [], []
    silos, sharing = better(found, "silo"), better(found, "sharing")
    for arm, runs in found.items():
        values = list(runs.values())
        mean = lambda get, values=values: fmean(map(get, values))  # noqa: E731
        kilobytes = [mean(lambda f, k=k: f[f"{k}_bytes"]) / 1000 for k in ("rollout", "averaging", "rest")]
        rows.append(
            [
                arm,
                len(runs),
                interval([f["cum"] for f in values], ".2f"),
                against(runs, silos, lambda f: f["cum"]),
                f"{fmean(earned_at(f, first[seed]) for seed, f in runs.items()):.2f}",
                f"{mean(lambda f: f['last_20']):.3f}",
                f"{mean(lambda f: f['seconds']) / rounds:.2f}",
                *(f"{kb:,.0f}" for kb in kilobytes),
                f"{mean(lambda f: f['averaging'].get('averaging/exchanges', 0.0)):.0f}",
                f"{100 * mean(lambda f: f['spread_of_progress']):.0f}",
            ]
        )
        compared.append(
            [
                arm,
                interval([mean_own(f) for f in values], ".3f"),
                f"{mean(best_own):.3f}",
                f"{mean(lambda f: min(own['pass_1'] for own in f['own'])):.3f}",
                f"{mean(lambda f: f['merged']['pass_1']):.3f}",
                f"{mean(lambda f: mean_own(f, 'pass_8')):.3f}",
                f"{mean(lambda f: f['merged']['pass_8']):.3f}",
                difference(runs, lambda f: f["merged"]["pass_1"], runs, mean_own),
                difference(runs, mean_own, silos, mean_own) if "silo" not in arm else "",
                difference(runs, mean_own, silos, best_own) if "silo" not in arm else "",
                difference(runs, mean_own, sharing, mean_own) if arm not in ("sharing", "sharing x2") else "",
            ]
        )
    columns = ["arm", "seeds", "cum", "against silo", "in time", "last 20", "s a round"]
    columns += ["kB rollouts", "kB averaging", "kB rest", "exchanges", "spread, %"]
    lines += [table(columns, rows), ""]
    columns = ["arm", "own pass@1", "best", "worst", "merged", "own pass@8", "merged"]
    columns += ["merged - own", "own - silo's", "own - best silo", "own - sharing's"]
    return "\n".join([*lines, table(columns, compared), ""])


def plot(settings: Sequence[str], peers: int, rounds: int, out: Path) -> None:
    """Reward level over virtual time and over bytes, mean of the seeds; a row for each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6 * len(settings)), dpi=100, layout="constrained")
    for setting, panels in zip(settings, figure.subplots(len(settings), 2, sharey="row", squeeze=False), strict=True):
        for number, (arm, runs) in enumerate(load(setting, peers, rounds).items()):
            curves = [f["curve"] for f in runs.values()]
            points = [[fmean(column) for column in zip(*p, strict=True)] for p in zip(*curves, strict=True)]
            window = max(1, len(points) // 8)
            pairs = list(zip(points, points[window:], strict=False))
            level = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs]
            style = {"lw": 1.6, "color": f"C{number}", "label": arm}
            panels[0].plot([b[2] for _, b in pairs], level, **style)
            if points[-1][3]:
                panels[1].plot([b[3] / 1e6 for _, b in pairs], level, **style)
            else:
                panels[1].axhline(level[-1], **style, ls=":")
        panels[0].set(xlabel="virtual seconds", ylabel=f"{setting}: training reward per answer")
        panels[1].set(xlabel="MB sent by a node; dotted: silos, at the end", xscale="log")
        for axes in panels:
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=8, ncols=4
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="plain")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--report", action="store_true", help="tables and plot of all that has been run")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not args.report:
        run_missing(args)
        return
    found = [setting for setting in SETTINGS if load(setting, args.peers, args.rounds)]
    text = "\n".join(report(setting, args.peers, args.rounds) for setting in found)
    (FOLDER / "report.md").write_text(text)
    print(text)
    plot(found, args.peers, args.rounds, PLOT)


if __name__ == "__main__":
    main()
