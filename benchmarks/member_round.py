"""CPU time of a member's round: two simulated members share answers and average weights, in one process on one thread.

    python -m benchmarks.member_round [--rounds 60] [--profile 30]

The network is one in memory, so what p2pd and gossip take is not in it. All metrics are hashed: code that changes no
number prints the same digest. To compare two versions, run them in turn.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import json
import pstats
import time
from statistics import fmean, median

import torch
from msgspec.structs import replace

from swarm_node.config import NodeConfig
from swarm_node.runtime.simulation import Peer, Simulation, manifest_for

WARM = 10  # rounds of each member before the clock starts


def simulation() -> Simulation:
    config = NodeConfig.model_validate(
        {"tasks": ["small"], "averaging": {"method": "noloco"}, "rollouts": {"max_new_tokens": 16}}
    )
    manifest = replace(manifest_for(config), averaging_period_s=2.0)
    return Simulation(manifest, [Peer(config), Peer(config)], seed=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="Show the N places that took most.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    both = simulation()
    both.run(WARM)
    profile = cProfile.Profile()
    spent = []
    for number in range(WARM, WARM + args.rounds):
        began = time.process_time()
        if args.profile:
            profile.enable()
        both.run(number + 1)
        profile.disable()
        spent.append(1000 * (time.process_time() - began) / len(both.peers))
    if args.profile:
        for order in ("tottime", "cumulative"):
            pstats.Stats(profile).sort_stats(order).print_stats(args.profile)
    lines = [json.dumps(peer.metrics, sort_keys=True) for peer in both.peers]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    rounds = [line for peer in both.peers for line in peer.metrics[WARM:]]
    exchanges = sum(peer.metrics[-1]["averaging/exchanges"] for peer in both.peers)
    print(
        f"{sum(spent) / len(spent):.2f} ms of CPU a round (median {median(spent):.2f}); {exchanges:.0f} exchanges, "
        f"{fmean(line['swarm/groups_own'] for line in rounds):.1f} own and "
        f"{fmean(line['swarm/groups_used'] for line in rounds):.1f} foreign groups a round; digest {digest}"
    )


if __name__ == "__main__":
    main()
