"""What staleness costs, and which off-policy correction makes up for it; one learner, and peers of unequal speed.

    python -m benchmarks.staleness [--setting plain] [--arms 'delay 0 recorded' …] [--seeds 0 1 2 3 4]
    python -m benchmarks.staleness --report
    python -m benchmarks.staleness --quick        # four short arms; nothing is stored

    delay D C    one learner, which trains on its groups D updates after it sampled them, with the correction C. The
                 first D rounds only fill the queue, so all arms make the same number of updates
    speed S C    four peers that train on 4 own and 4 foreign groups with token ids, every other one S times slower, for
                 the same virtual time

C is `recorded` or `truncated`, as `grpo.correction` has them; a class of `benchmarks.corrections`; or `none`: every
ratio starts at 1, as if the groups were fresh. `wide` is `recorded` with the clip range to which M2PO falls back where
its second moment is far above its limit (0.3 and 0.5; arXiv 2510.01161, official code), as it is here from 16 updates
on; `slowed` is `recorded` with VCPO's learning rate, times the root of the effective share of the step before (arXiv
2602.17616). Nodes, settings and
figures are those of `benchmarks.sharing`; one JSON for each (setting, arm, seed) under results/staleness; what is there
already is not run again. Differences are in points (hundredths), paired by seed, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import sharing
from benchmarks.common import RESULTS, machine, spent, table, write_row
from benchmarks.intervals import interval
from benchmarks.sharing_arms import Arm, Measured
from benchmarks.sharing_settings import SETTINGS, Setting
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.rollouts import Collected
from swarm_node.runtime.simulation import Peer, Speed
from swarm_node.types import Group

FOLDER = RESULTS / "staleness"
SEEDS = (0, 1, 2, 3, 4)
UPDATES = 480  # of the learner
SECONDS = 600.0  # virtual time of peers: about 300 rounds of a fast one
PEERS = 4
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"correction": "swarm_node.grpo.objective:Correction"},
    "recorded": {"correction": "recorded"},
    "truncated": {"correction": "truncated"},
    "truncated_sequence": {"correction": "benchmarks.corrections:TruncatedSequence"},
    "icepop": {"correction": "benchmarks.corrections:IcePop"},
    "wide": {"correction": "recorded", "epsilon_low": 0.3, "epsilon_high": 0.5},
    "slowed": {"correction": "recorded"},
}
"""Keys of `grpo` by the name of the correction."""
SLOW = "wide", "slowed"  # run at the longer delays only


class Delayed(Measured):
    """Trains on its groups `delay` rounds after it sampled them."""

    delay = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue: deque[list[Group]] = deque()
        self.lags: list[int] = []
        """Updates between sampling and training, of each group trained on."""

    def choose(self, collected: Collected) -> list[Group]:
        self.queue.append(super().choose(collected))
        if len(self.queue) <= self.delay:
            return []
        groups = self.queue.popleft()
        self.lags += [self.policy.version - group.policy_version for group in groups if group.peer is None]
        return groups


class Slowed(Delayed):
    """The learning rate follows the root of the effective share of the stale rollouts of the step before."""

    effective = 1.0  # share of the stale rollouts of the step before

    def learn(self, groups: Sequence[Group], *calls: Any) -> dict[str, float]:
        optimizer = self.trainer.optimizer
        assert isinstance(optimizer, Optimizer)
        optimizer.rate_scale = self.effective**0.5
        learned = super().learn(groups, *calls)
        self.effective = learned.get("off_policy/stale/ess", 1.0)
        return learned


@dataclass(frozen=True)
class Late:
    """An arm of this benchmark."""

    correction: str
    delay: int = 0
    slower: int = 0  # every other peer is so many times slower; 0 = one learner alone

    def arm(self) -> Arm:
        grpo = CORRECTIONS[self.correction]
        if not self.slower:
            node = Slowed if self.correction == "slowed" else Delayed
            return Arm("one learner", own=8, foreign=0, silo=True, sets={"grpo": grpo}, node=node)
        sharing = {"token_ids": True, "answers": 0}
        sets = {"grpo": grpo, "sharing": sharing, "averaging": {"method": "none"}}
        return Arm("4 own + 4 foreign", own=4, foreign=4, sets=sets, node=Delayed)


ON_POLICY = "delay 0 recorded"  # with any correction the same, up to rounding
ARMS = {
    ON_POLICY: Late("recorded"),
    **{
        f"delay {delay} {name}": Late(name, delay)
        for delay in (4, 16, 64)
        for name in CORRECTIONS
        if delay > 4 or name not in SLOW
    },
    **{
        f"speed {s} {name}": Late(name, slower=s)
        for s in (1, 10)
        for name in CORRECTIONS
        if name not in ("none", *SLOW)
    },
}
"""A peer's own groups are fresh, so `none` is `recorded` there."""
QUICK = ON_POLICY, "delay 16 recorded", "delay 16 truncated", "speed 10 truncated"
QUICK_UPDATES, QUICK_SECONDS = 30, 60.0


def run(setting: Setting, late: Late, seed: int, updates: int = UPDATES, seconds: float = SECONDS) -> dict[str, Any]:
    """One simulation: its figures, by kind of peer (fast ones, slow ones)."""
    simulation = sharing.simulate(setting, late.arm(), seed, PEERS if late.slower else 1)
    peers = simulation.peers
    nodes: list[Delayed] = [peer.node for peer in peers]  # type: ignore[misc]
    for node in nodes:
        node.delay = late.delay
    for peer in peers[1::2]:
        fast = peer.speed
        rates = fast.generate_tok_s / late.slower, fast.train_tok_s / late.slower
        peer.speed = Speed(*rates, overhead_s=fast.overhead_s * late.slower)
    before = sharing.held_out(setting, nodes[0])
    if late.slower:
        cpu_s = sharing.timed(nodes, lambda: simulation.run(seconds=seconds))
    else:
        cpu_s = sharing.timed(nodes, lambda: simulation.run(updates + late.delay))
    kinds = [figures(setting, members) for members in (peers[::2], peers[1::2]) if members]
    return {"held_out_before": before, "cpu_s": round(cpu_s, 2), "kinds": kinds}


def figures(setting: Setting, members: Sequence[Peer]) -> dict[str, Any]:
    """Of peers that are alike: means over them; `level` is the reward of their last sixth of rounds."""
    nodes: list[Delayed] = [peer.node for peer in members]  # type: ignore[misc]
    lines = [line for peer in members for line in peer.metrics]
    measured = sorted({name for line in lines for name in line if name.startswith("off_policy/")})
    levels = [fmean(end.reward for end in node.curve[-max(1, len(node.curve) // 6) :]) for node in nodes]
    return {
        "held_out": sharing.mean_by_key([sharing.held_out(setting, node) for node in nodes]),
        "level": fmean(levels),
        "rounds": fmean(len(node.curve) for node in nodes),
        "updates": fmean(node.trainer.optimizer.updates for node in nodes),
        "lag": fmean(lag for node in nodes for lag in node.lags),
        "off_policy": {name: fmean(line[name] for line in lines if name in line) for name in measured},
        "curve": sharing.curve([nodes[0].curve]),
    }


# --------------------------------------------------------------------- files


def path_of(setting: str, arm: str, seed: int) -> Path:
    return FOLDER / setting / f"{arm.replace(' ', '_')}-{seed}.json"


def run_missing(setting: str, arms: Sequence[str], seeds: Sequence[int]) -> None:
    for seed in seeds:
        for arm in arms:
            path = path_of(setting, arm, seed)
            if path.exists():
                continue
            row = {"setting": setting, "arm": arm, "seed": seed} | run(SETTINGS[setting], ARMS[arm], seed)
            write_row(path, row | {"machine": machine()})
            show(row)


def show(row: dict[str, Any]) -> None:
    print(f"{row['setting']}  {row['arm']}  seed {row['seed']}  {row['cpu_s']:.1f} CPU s", flush=True)
    for kind in row["kinds"]:
        held = "  ".join(f"{name} {value:.3f}" for name, value in kind["held_out"].items())
        done = f"{kind['updates']:.0f} updates  lag {kind['lag']:.1f}  level {kind['level']:.3f}"
        print(f"    {done}  {held}", flush=True)


Rows = dict[int, dict[str, Any]]
"""Rows of an arm by seed."""


def load(setting: str) -> dict[str, Rows]:
    """The rows of each arm, in the order of ARMS."""
    found: dict[str, Rows] = {}
    for path in sorted((FOLDER / setting).glob("*.json")):
        row = json.loads(path.read_text())
        if row["seed"] < sharing.SEARCHED_FROM:
            found.setdefault(row["arm"], {})[row["seed"]] = row
    return {arm: found[arm] for arm in ARMS if arm in found}


# --------------------------------------------------------------------- report


def report(setting: str) -> str:
    """Markdown: a table of delays, against on-policy, and one of speeds, against `recorded` at the same speeds."""
    found = load(setting)
    tables = []
    for is_delay, base, whose, first in (
        (True, "on-policy", "stale", "lag, updates"),
        (False, "recorded", "foreign", "own log-prob, nats"),
    ):
        columns = ["arm", "seeds", first, "level", f"against {base}", "pass@1", f"against {base}", "pass@8"]
        columns += ["second moment", "ratio, 1 %", "50 %", "99 %", "effective share"]
        rows = []
        for arm in [name for name in found if is_delay == (not ARMS[name].slower)]:
            against = ON_POLICY if is_delay else f"speed {ARMS[arm].slower} recorded"
            kinds = range(1 if is_delay or ARMS[arm].slower == 1 else 2)
            rows += [line_of(found[arm], arm, found.get(against, {}), kind, whose) for kind in kinds]
        if rows:
            tables.append(table(columns, rows))
    cost = spent(sum(row["cpu_s"] for runs in found.values() for row in runs.values()))
    return "\n\n".join([f"**{setting}**: {SETTINGS[setting].says}.", *tables, f"{cost}\n"])


def line_of(rows: Rows, arm: str, base: Rows, kind: int, whose: str) -> list[str]:
    """The line of an arm and a kind of peer (0 = fast, 1 = slow); measures are of `stale` or of `foreign` tokens."""
    runs, others = ({seed: row["kinds"][kind] for seed, row in each.items()} for each in (rows, base))
    both = [] if rows is base else sorted(runs.keys() & others.keys())

    def against(get: Callable[[dict[str, Any]], float]) -> str:
        return interval([100 * (get(runs[seed]) - get(others[seed])) for seed in both], "+.1f") if both else ""

    def mean(get: Callable[[dict[str, Any]], float | None], form: str) -> str:
        known = [value for run in runs.values() if (value := get(run)) is not None]
        return f"{fmean(known):{form}}" if known else ""

    def measure(name: str) -> str:
        return mean(lambda run: run["off_policy"].get(f"off_policy/{name}"), ".3g")

    def pass_1(run: dict[str, Any]) -> float:
        return run["held_out"]["pass_1"]

    def level(run: dict[str, Any]) -> float:
        return run["level"]

    return [
        f"{arm}{', slow' if kind else ''}",
        str(len(runs)),
        mean(lambda run: run["lag"], ".1f") if whose == "stale" else measure("foreign_logp"),
        mean(level, ".3f"),
        against(level),
        mean(pass_1, ".3f"),
        against(pass_1),
        mean(lambda run: run["held_out"]["pass_8"], ".3f"),
        *(measure(f"{whose}/{name}") for name in ("second_moment", "ratio_p1", "ratio_p50", "ratio_p99", "ess")),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="plain")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--report", action="store_true", help="tables of all that has been run")
    parser.add_argument("--quick", action="store_true", help="four short arms of one seed; nothing is stored")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.report:
        text = "\n".join(report(setting) for setting in SETTINGS if load(setting))
        (FOLDER / "report.md").write_text(text)
        print(text)
    elif args.quick:
        for arm in QUICK:
            row = run(SETTINGS[args.setting], ARMS[arm], 0, QUICK_UPDATES, QUICK_SECONDS)
            show({"setting": args.setting, "arm": arm, "seed": 0} | row)
    else:
        run_missing(args.setting, args.arms, args.seeds)


if __name__ == "__main__":
    main()
