"""Rollouts to everybody: GossipSub as this node uses it, against a DHT key that all write to and read.

    python -m benchmarks.gossip [--parts contest hubs curve] [--nodes 2 4 8 12] [--rounds 30] [--groups 4]

contest   Real processes on this machine, all with the same payloads: in each round, of a second, every node has one
          sealed batch for all others. `gossip` is `P2PTransport`, one shard. `all-gather` is what Gensyn's rl-swarm
          does (genrl's HivemindBackend with rl-swarm's beam of 50 and a world of one): everyone stores its batch as a
          subkey of one key, sleeps a second, and reads the whole dictionary once. In its favour, hivemind's DHT runs
          inside the node here; there it is a process of its own behind a pipe, and dies of large messages.
hubs      Nodes that only dial, and one bootstrap.
curve     Without processes: the memory transport's mesh for up to 10,000 nodes, in shards of 32 peers.

A batch counts as delivered once for each receiver that got it. Bytes are those of the TCP connections of a node's
processes, as the kernel counts them; CPU is that of all its processes.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from msgspec.structs import asdict, replace

from benchmarks.common import RESULTS, table, write
from benchmarks.gossip_nodes import STRAGGLERS_S, Spec, batch
from benchmarks.processes import Child, Meter, end, merged, mind_signals, other_load
from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.identity import Identity
from swarm_protocol.topics import shard_of

SWARM = "5" * 64
SETTLE_S = 5.0
"""From when everyone sees everyone to the first round."""
AT_ONCE = 3
"""Nodes that start at a time: each spends seconds of CPU on imports."""
HUB_RATE = 4.0
"""Messages a second of all dial-only nodes together."""
PARTS = ["contest", "hubs", "curve"]
REPEATS = 1
"""How often a contest is held; the median of each figure counts."""
Row = dict[str, Any]


@contextmanager
def started(
    spec: Spec, others: Callable[[Spec], Spec] = lambda spec: spec, checkout: Path | None = None
) -> Iterator[list[Child]]:
    """Nodes as `spec` says, the first as it stands, the others changed by `others`, ready; ended with the context. They
    run from `checkout`, if given."""
    nodes: list[Child] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            addresses: list[str] = list(spec.bootstrap)
            while len(nodes) < spec.nodes:
                batch_of = range(len(nodes), min(len(nodes) + AT_ONCE, spec.nodes)) if nodes else range(1)
                for i in batch_of:
                    mine = Path(folder) / str(i)
                    mine.mkdir()
                    its = replace(spec, folder=str(mine), bootstrap=addresses)
                    node = Child("benchmarks.gossip_nodes", checkout=checkout)
                    nodes.append(node)
                    node.tell(asdict(others(its) if i else its))
                for node in nodes[batch_of.start :]:
                    up = node.hear()
                    addresses = addresses or up["addresses"]
            for node in nodes:
                ready = node.hear()
                if not ready["ready"]:
                    print(f"not everyone sees everyone: {ready}", flush=True)
            yield nodes
        finally:
            end((node.process for node in nodes), patience=0.0)


def rounds(spec: Spec, nodes: list[Child]) -> tuple[list[Row], Meter]:
    """Have `nodes` send; what each heard, and what all cost."""
    time.sleep(SETTLE_S)
    with Meter({str(i): node.pid for i, node in enumerate(nodes)}) as meter:
        begin_at = time.time() + 1.0
        for node in nodes:
            node.tell(begin_at)
        results = [node.hear(spec.rounds * spec.interval_s + STRAGGLERS_S + 60) for node in nodes]
    for node in nodes:
        node.tell("leave")
    end((node.process for node in nodes), patience=15.0)
    return results, meter


def contest(spec: Spec, others: Callable[[Spec], Spec] = lambda spec: spec) -> Row:
    """Figures of one method among `spec.nodes` processes; of the first node beside those of the others."""
    with started(spec, others) as nodes:
        results, meter = rounds(spec, nodes)
    senders = spec.nodes - spec.hub
    expected = [spec.rounds * (senders - 1)] * spec.nodes
    if spec.hub:
        expected[0] = spec.rounds * senders
    delivered = [len(r["latencies"]) / n for r, n in zip(results, expected, strict=True)]
    latencies = sorted(latency for r in results for latency in r["latencies"])
    names = list(meter.trees)
    sent, received = ({n: meter.bytes[n][way] / 1000 / spec.rounds for n in names} for way in range(2))
    cpu = {n: 1000 * sum(meter.cpu_s[n].values()) / spec.rounds for n in names}
    network = {n: 1000 * (sum(meter.cpu_s[n].values()) - meter.cpu_s[n]["node"]) / spec.rounds for n in names}
    rest = names[1:]
    return {
        "nodes": spec.nodes - spec.hub,
        "method": spec.method,
        "payload_kb": len(batch(Identity.generate(), spec.swarm, 0, spec.groups, time.time())) / 1000,
        "delivered": fmean(delivered[spec.hub :]),
        "delivered_worst": min(delivered[spec.hub :]),
        "p50_ms": 1000 * median(latencies),
        "p95_ms": 1000 * quantiles(latencies, n=20)[-1],
        "kb_in": fmean(received[n] for n in rest),
        "kb_out": fmean(sent[n] for n in rest),
        "cpu_ms": fmean(cpu[n] for n in rest),
        "network_cpu_ms": fmean(network[n] for n in rest),
        "busiest_kb": max(sent[n] + received[n] for n in names),
        "bootstrap_kb": sent["0"] + received["0"],
        "bootstrap_cpu_ms": cpu["0"],
        "bootstrap_network_cpu_ms": network["0"],
        "cores_busy": sum(sum(kinds.values()) for kinds in meter.cpu_s.values()) / meter.seconds,
        "sent_per_received": sum(sent.values()) / sum(received.values()),
        "share_of_loopback": 1000 * spec.rounds * sum(sent.values()) / meter.loopback_bytes,
        "failed": sum(r["failed"] for r in results),
        "again": sum(r["again"] for r in results),
        "dropped": sum(n for r in results for name, n in r["stats"].items() if name == "dropped"),
    }


def contests(sizes: list[int], count: int, groups: int, repeats: int) -> list[Row]:
    """Both methods in turn, `repeats` times; the median of each figure."""
    figures = []
    for nodes in sizes:
        runs: dict[str, list[Row]] = {"gossip": [], "all-gather": []}
        for _ in range(repeats):
            for method, rows in runs.items():
                rows.append(contest(Spec(method, "", SWARM, nodes, rounds=count, groups=groups)))
                print(_short(rows[-1]), flush=True)
        figures += [
            {k: v if isinstance(v, str) else median(row[k] for row in rows) for k, v in rows[0].items()}
            | {"runs": len(rows), "delivered_worst": min(row["delivered_worst"] for row in rows)}
            for rows in runs.values()
        ]
    return figures


def hubs(sizes: list[int], count: int, groups: int) -> list[Row]:
    """A bootstrap that only listens, and `sizes` nodes that only dial and send."""
    figures = []
    for leaves in sizes:
        spec = Spec("gossip", "", SWARM, leaves + 1, hub=True, rounds=count, groups=groups)
        spec.interval_s = leaves / HUB_RATE
        figures.append(contest(spec, lambda spec: replace(spec, hub=False, dial_only=True)))
        row = figures[-1]
        row["rate"] = HUB_RATE
        row["hub_kb_per_message"] = row["bootstrap_kb"] / leaves
        row["hub_cpu_ms_per_message"] = row["bootstrap_network_cpu_ms"] / leaves
        print(_short(row), flush=True)
    return figures


def curve(sizes: list[int], groups: int) -> list[Row]:
    """Bytes of a node and round over the memory transport's mesh, a shard for every 32 nodes, four shards a node."""
    from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock

    figures = []
    for nodes in sizes:
        shards, count = max(1, nodes // 32), 3
        clock = VirtualClock(1.8e9)
        network = MemoryNetwork(clock, seed=0, degree=6)
        members: list[Any] = []
        for i in range(nodes):
            members.append(network.join(f"peer{i}", SWARM, bootstrap=members[0].addresses if members else []))
        data = batch(Identity.generate(bytes(32)), SWARM, 0, groups, clock.now())
        listening: dict[int, set[str]] = {shard: set() for shard in range(shards)}
        for member in members:
            own = shard_of(member.peer_id, shards)
            rng = random.Random(member.peer_id)
            others = rng.sample([shard for shard in range(shards) if shard != own], min(3, shards - 1))
            for shard in (own, *others):
                member.subscribe(ROLLOUTS.topic(SWARM, shard), lambda data: None)
                listening[shard].add(member.peer_id)
        clock.run_until(clock.now() + 20)
        before = {name: sum(getattr(m, name) for m in members) for name in ("bytes_in", "bytes_out", "messages_in")}
        for _ in range(count):
            for member in members:
                topic = ROLLOUTS.topic(SWARM, shard_of(member.peer_id, shards))
                clock.call_at(clock.now() + network.rng.random(), member.publish, topic, data)
            clock.run_until(clock.now() + 1.0)
        clock.run_until(clock.now() + 5)
        took = {name: (sum(getattr(m, name) for m in members) - n) / nodes / count for name, n in before.items()}
        wanted = sum(len(listening[shard_of(member.peer_id, shards)]) - 1 for member in members) / nodes
        figures.append(
            {
                "nodes": nodes,
                "shards": shards,
                "heard": took["messages_in"],
                "delivered": took["messages_in"] / wanted,
                "kb_in": took["bytes_in"] / 1000,
                "kb_in_per_message": took["bytes_in"] / 1000 / took["messages_in"],
                "payload_kb": len(data) / 1000,
            }
        )
        print(_short(figures[-1]), flush=True)
    return figures


def _short(row: Row) -> Row:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def _show(part: str, rows: list[Row]) -> str:
    names = {
        "contest": {
            "nodes": "nodes",
            "method": "method",
            "delivered": "delivered",
            "delivered_worst": "worst receiver",
            "p50_ms": "p50 ms",
            "p95_ms": "p95 ms",
            "kb_in": "kB in",
            "kb_out": "kB out",
            "busiest_kb": "busiest node kB",
            "bootstrap_kb": "bootstrap kB",
            "cpu_ms": "CPU ms",
            "network_cpu_ms": "of which network processes",
        },
        "hubs": {
            "nodes": "dial-only nodes",
            "delivered": "delivered",
            "delivered_worst": "worst receiver",
            "p50_ms": "p50 ms",
            "p95_ms": "p95 ms",
            "kb_in": "leaf kB in",
            "kb_out": "leaf kB out",
            "bootstrap_kb": "hub kB a round",
            "hub_kb_per_message": "hub kB a message",
            "hub_cpu_ms_per_message": "hub CPU ms a message",
        },
        "curve": {
            "nodes": "nodes",
            "shards": "shards",
            "heard": "batches heard",
            "delivered": "delivered",
            "kb_in": "kB in",
            "kb_in_per_message": "kB in a batch heard",
        },
    }[part]
    cells = [[_cell(name, row[name]) for name in names] for row in rows]
    return table(list(names.values()), cells)


def _cell(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2%}" if name.startswith("delivered") else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 12], help="sizes of the contest")
    parser.add_argument("--leaves", type=int, nargs="+", default=[12, 24], help="numbers of dial-only nodes")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 128, 1000, 10_000], help="sizes on the curve")
    parser.add_argument("--rounds", type=int, default=30, help="in a contest; a third of them for hubs")
    parser.add_argument("--groups", type=int, default=4, help="groups of eight answers in a batch")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each contest")
    args = parser.parse_args()
    mind_signals()
    for part in args.parts:
        load = other_load()
        print(load, flush=True)
        if part == "contest":
            rows = contests(args.nodes, args.rounds, args.groups, args.repeats)
        elif part == "hubs":
            rows = hubs(args.leaves, max(1, args.rounds // 3), args.groups)
        else:
            rows = curve(args.sizes, args.groups)
        print(_show(part, rows))
        figures = {"other load": load, "rounds": args.rounds, "groups": args.groups, "rows": rows}
        write("gossip", merged(RESULTS / "gossip.json", part, figures))


if __name__ == "__main__":
    main()
