"""Is joining worth it? Members that share, silos and controls, from the same starts, in the simulator.

    python -m benchmarks.sharing [--settings format tags …] [--arms silo new …] [--seeds 0 1 2 3 4]
    python -m benchmarks.sharing --report
    python -m benchmarks.sharing --quick [--settings …] [--arms …]   # a short look at each; nothing is stored

Every peer is a whole node (tasks, sampling, admission, replay, updates); only clock and wires are simulated. A seed
decides the warm start as well as the sampling; all arms of a seed begin with the same policies. One JSON for each
(setting, arm, seed) under results/sharing; what is there already is not run again. Silos are simulated with fewer
peers, since they do not meet. All figures are means over the peers of a run:

    curve     [round, reward (mean over own answers, before any filter), CPU seconds, answers and tokens sampled]
    looks     [CPU seconds, pass@1, pass@8] on held-out questions, under the same reward as training
    cpu       process time of its parts on one thread, evaluation left out
    start     fingerprints of the policies at the beginning. Processors of other kinds make other starts from one seed;
              the tables compare only runs with the same start. Run all arms of a seed on one machine, and nothing else

`benchmarks.sharing_report` makes the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch

from benchmarks.common import RESULTS, machine, write_row
from benchmarks.sharing_arms import ARMS, Arm, Measured, Round, Stopwatch
from benchmarks.sharing_settings import SETTINGS, Setting
from swarm_node.config import NodeConfig, RolloutsConfig
from swarm_node.node import Node
from swarm_node.rollouts import collect
from swarm_node.rollouts.evaluate import QUESTIONS_PER_SEED
from swarm_node.runtime.simulation import Peer, Simulation, Speed, manifest_for
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Group
from swarm_protocol.transports.memory import LinkModel

FOLDER = RESULTS / "sharing"
PEERS, SILOS, SEEDS = 8, 2, (0, 1, 2, 3, 4)
"""Peers of a swarm; silos of each kind of peer."""
QUESTIONS, SAMPLES = 96, 8
"""Held-out questions at the beginning and the end, of every peer; answers to each."""
LOOKS, LOOK_QUESTIONS = 12, 48
"""Looks at the held-out questions on the way, of one peer of each kind."""
POINTS = 120
SPEED = Speed(generate_tok_s=300.0, train_tok_s=1000.0)
"""A round takes one to two virtual seconds: messages, sent once a second, arrive about a round after sampling."""
LINK = LinkModel()
STAGGER_S = 0.37
"""Peers begin this long after each other, so that they do not march in step."""
QUICK_PEERS, QUICK_ROUNDS = 4, 8
SEARCHED_FROM = 100
"""Seeds from here on were used to search settings, and are not reported."""


def run(setting: Setting, arm: Arm, seed: int, peers: int, rounds: int) -> dict[str, Any]:
    """One simulation of `arm`, which may run longer than `rounds`: its figures."""
    peers = arm.peers or (min(peers, SILOS * setting.kinds) if arm.silo else peers)
    rounds = round(arm.longer * rounds)
    simulation = simulate(setting, arm, seed, peers)
    nodes: list[Measured] = [peer.node for peer in simulation.peers]  # type: ignore[misc]
    start = [node.policy.fingerprint for node in nodes[: setting.kinds]]
    before = [held_out(setting, node) for node in nodes[: setting.kinds]]
    for node in nodes[: setting.kinds]:
        node.look_every = max(1, rounds // LOOKS)
        node.look = lambda node=node: held_out(setting, node, LOOK_QUESTIONS)  # type: ignore[misc]
    seconds = timed(nodes, lambda: simulation.run(rounds))
    after = [held_out(setting, node) for node in nodes]
    parts = {part: round(sum(node.cpu[part] for node in nodes) / peers, 2) for part in dict(nodes[0].cpu)}
    looks = [[at / peers for at, _ in node.looks] for node in nodes[: setting.kinds]]
    seen = [[found for _, found in node.looks] for node in nodes[: setting.kinds]]
    return {
        "peers": peers,
        "rounds": rounds,
        "start": start,
        "held_out_before": mean_by_key(before),
        "held_out": mean_by_key(after),
        "pass_1_by_peer": [round(table["pass_1"], 4) for table in after],
        "groups": {
            name: round(sum(getattr(node, name) for node in nodes) / (peers * rounds), 3)
            for name in ("trained", "signal", "foreign")
        },
        "cpu_s": round(seconds / peers, 3),
        "cpu": parts | {"other": round(seconds / peers - sum(parts.values()), 2)},
        "swarm": swarm(simulation.peers),
        "curve": curve([node.curve for node in nodes]),
        "looks": [
            [round(fmean(at), 2), *(round(fmean(found[key] for found in tables), 4) for key in ("pass_1", "pass_8"))]
            for at, tables in zip(zip(*looks, strict=True), zip(*seen, strict=True), strict=True)
        ],
    }


def simulate(
    setting: Setting, arm: Arm, seed: int, peers: int, link: LinkModel = LINK, speed: Speed | None = None
) -> Simulation:
    """`peers` nodes of `arm`, about to begin."""
    members = [
        Peer(
            config(setting, arm, seed, number),
            speed=speed or SPEED,
            link=link,
            starts_at=STAGGER_S * number,
            silo=arm.silo,
            node_type=arm.node,
        )
        for number in range(peers)
    ]
    manifest = msgspec.structs.replace(
        manifest_for(members[0].config), averaging_period_s=arm.period_s or setting.period_s
    )
    return Simulation(manifest, members, seed)


def timed(nodes: Sequence[Measured], run: Callable[[], None]) -> float:
    """CPU seconds of `run`, looks left out; the nodes' curves count from its beginning."""
    stopwatch = Stopwatch()
    for node in nodes:
        node.stopwatch = stopwatch
    run()
    return stopwatch.seconds()


def config(setting: Setting, arm: Arm, seed: int, number: int) -> NodeConfig:
    """Of peer `number` in `arm`."""
    table: dict[str, Any] = {
        "tasks": list(setting.tasks(number)),
        "rewards": setting.rewards,
        "policy": {"model": str(setting.start(seed, number))},
        "rollouts": {
            "groups": arm.own + arm.foreign,
            "max_new_tokens": setting.max_new_tokens,
            "max_prompt_tokens": 128,
        },
        "grpo": {"learning_rate": setting.learning_rate},
        "sharing": {"own": arm.own, "foreign": arm.foreign},
    }
    for section, keys in arm.sets.items():
        table[section] = {**table.get(section, {}), **keys}
    return NodeConfig.model_validate(table)


def held_out(setting: Setting, node: Node, count: int = 0) -> dict[str, float]:
    """pass@1 and pass@8 on `count` held-out questions (QUESTIONS if not given), right = full reward."""
    tasks = load_tasks(list(setting.held_out), node.config.rewards)
    rollouts = RolloutsConfig(
        groups=QUESTIONS_PER_SEED, group_size=SAMPLES, max_new_tokens=node.config.rollouts.max_new_tokens
    )
    questions = tasks.held_out(count or QUESTIONS)
    waiting = iter(questions)
    groups: list[Group] = []
    for start in range(0, len(questions), QUESTIONS_PER_SEED):
        groups += collect(node.policy, lambda n: list(islice(waiting, n)), tasks, rollouts, f"{start}").groups
    right = [[rollout.reward > 0.999 for rollout in group.rollouts] for group in groups]
    return {"pass_1": fmean(map(fmean, right)), "pass_8": fmean(map(any, right))}


def curve(curves: Sequence[Sequence[Round]]) -> list[list[float]]:
    """[round, reward since the point before, CPU seconds, answers, tokens] at about POINTS rounds, mean over peers."""
    points: list[list[float]] = []
    peers, rounds, rewards = len(curves), len(curves[0]), list[float]()
    for number, ends in enumerate(zip(*curves, strict=True), 1):
        rewards.append(fmean(end.reward for end in ends))
        if number % max(1, rounds // POINTS) == 0 or number == rounds:
            cpu_s, answers, tokens = (fmean(end[i] for end in ends) for i in (1, 2, 3))
            points.append([number, round(fmean(rewards), 4), round(cpu_s / peers, 3), round(answers), round(tokens)])
            rewards = []
    return points


def swarm(members: Sequence[Peer]) -> dict[str, float]:
    """`swarm/*` metrics, mean over peers: running totals at the end; what is of a round, mean over all rounds."""
    lines = [line for peer in members for line in peer.metrics]
    last = [peer.metrics[-1] for peer in members]
    names = sorted({name for line in lines for name in line if name.startswith("swarm/")})
    of_a_round = ("swarm/groups_used", "swarm/staleness_mean", "swarm/groups_waiting")
    figures = {name: [line[name] for line in lines if name in line] for name in names}
    return {
        name: round(fmean(values) if name in of_a_round else sum(line.get(name, 0.0) for line in last) / len(last), 3)
        for name, values in figures.items()
    }


def mean_by_key(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: fmean(row[key] for row in tables) for key in tables[0]}


# --------------------------------------------------------------------- files


def path_of(setting: str, arm: str, seed: int) -> Path:
    return FOLDER / setting / f"{arm.replace('/', '-').replace(' ', '_')}-{seed}.json"


def run_missing(settings: Sequence[str], arms: Sequence[str], seeds: Sequence[int], peers: int, rounds: int) -> None:
    """Run what is not stored yet, a seed of all arms after another; `rounds` = 0: those of the setting."""
    for seed in seeds:
        for setting in settings:
            for arm in arms:
                path = path_of(setting, arm, seed)
                if path.exists():
                    continue
                figures = run(SETTINGS[setting], ARMS[arm], seed, peers, rounds or SETTINGS[setting].rounds)
                row = {"setting": setting, "arm": arm, "seed": seed} | figures | {"machine": machine()}
                write_row(path, row)
                show(row)


def show(row: dict[str, Any]) -> None:
    last = row["curve"][-max(1, len(row["curve"]) // 6) :]
    before, after = row["held_out_before"], row["held_out"]
    held = "  ".join(f"pass@{k} {before[f'pass_{k}']:.3f} -> {after[f'pass_{k}']:.3f}" for k in (1, 8))
    print(
        f"{row['setting']}  {row['arm']}  seed {row['seed']}  {row['rounds']} rounds  {row['cpu_s']:.1f} CPU s a peer  "
        f"reward {fmean(point[1] for point in last):.3f}  {held}",
        flush=True,
    )


def load(setting: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Arm -> seed -> row, arms in the order of ARMS."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted((FOLDER / setting).glob("*.json")):
        row = json.loads(path.read_text())
        if row["seed"] < SEARCHED_FROM:
            found.setdefault(row["arm"], {})[row["seed"]] = row
    return {arm: found[arm] for arm in ARMS if arm in found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--rounds", type=int, default=0, help="rounds of a member; 0 = those of the setting")
    parser.add_argument("--report", action="store_true", help="tables of all that has been run")
    parser.add_argument("--quick", action="store_true", help="one seed, few peers, few rounds; nothing is stored")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.report:
        from benchmarks.sharing_report import write_report

        write_report()
    elif args.quick:
        for setting in args.settings if args.settings != list(SETTINGS) else ["format"]:
            for arm in args.arms if args.arms != list(ARMS) else ["silo", "new"]:
                row = run(SETTINGS[setting], ARMS[arm], 0, QUICK_PEERS, args.rounds or QUICK_ROUNDS)
                show({"setting": setting, "arm": arm, "seed": 0} | row)
    else:
        run_missing(args.settings, args.arms, args.seeds, args.peers, args.rounds)


if __name__ == "__main__":
    main()
