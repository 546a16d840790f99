"""Rollouts to everybody: GossipSub as this node uses it, against a DHT key that all write to and read.

    python -m benchmarks.gossip [--nodes 2 4 8 12] [--rounds 30] [--groups 4]

Real processes on this machine, all with the same payloads: each round, of a second, every node has one sealed batch for
all others. `gossip` publishes it (one shard, bootstrap included in the mesh). `all-gather` does what Gensyn's rl-swarm
does: everyone stores its batch as a subkey of one key, sleeps a second, and reads the whole dictionary. Bytes are those
of the TCP connections of a node's p2pd and gossip process, as the kernel counts them; CPU is that of all its processes.
Also, without processes: the memory transport's mesh for up to 10,000 nodes, in shards of 32 peers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.common import table, write
from protocol.codec import open_batch, seal_batch
from protocol.identity import Identity
from protocol.messages import RolloutBatch, SharedGroup, SharedRollout, SharedSampling, TaskName
from protocol.topics import epoch_at, rollout_topic, shard_of

SWARM = "5" * 64
SETTLE_S = 10.0
"""Before the first round: everyone is there. After the last: stragglers arrive."""
TEXT_CHARS = 300


def batch(identity: Identity, sequence: int, groups: int, now: float) -> bytes:
    """A sealed batch of `groups` groups of eight answers of `TEXT_CHARS` characters."""
    rng = random.Random(f"{identity.peer_id}/{sequence}")
    return seal_batch(
        RolloutBatch(
            protocol=1,
            swarm=SWARM,
            sequence=sequence,
            created=now,
            fingerprint="0" * 16,
            tokenizer="0" * 16,
            sampling=SharedSampling(128, 1.0, 1.0),
            groups=[
                SharedGroup(
                    task=TaskName("gcd", "0" * 16, "reasoning-gym 0.1.25", 0, rng.randrange(2**31)),
                    epoch=epoch_at(now),
                    slot=slot,
                    prompt=bytes(16),
                    policy_version=sequence,
                    rollouts=[SharedRollout(rng.randbytes(TEXT_CHARS // 2).hex(), True) for _ in range(8)],
                )
                for slot in range(groups)
            ],
        ),
        identity,
    )


# --------------------------------------------------------------------- one node


def children() -> list[int]:
    """Pids of this process's children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tcp_bytes(pids: list[int]) -> tuple[int, int]:
    """(sent, received) over the open TCP connections of these processes."""
    lines = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout.splitlines()
    mine = [line for line in lines if any(f"pid={pid}," in line for pid in pids)]
    return tuple(  # type: ignore[return-value]
        sum(int(n) for line in mine for n in re.findall(rf"\b{name}:(\d+)", line)) for name in ("bytes_sent", "bytes_received")
    )


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def measure(rounds: int, begin_at: float, step: Callable[[int], None]) -> dict[str, Any]:
    """Run `step` once a second from `begin_at` on; what that took."""
    time.sleep(max(0.0, begin_at - time.time()))
    pids = [os.getpid(), *children()]
    cpu, traffic = [cpu_seconds(pid) for pid in pids], tcp_bytes(pids)
    for i in range(rounds):
        step(i)
        time.sleep(max(0.0, begin_at + i + 1 - time.time()))
    time.sleep(SETTLE_S)
    after = tcp_bytes(pids)
    return {
        "cpu_ms": 1000 * (sum(map(cpu_seconds, pids)) - sum(cpu)) / rounds,
        "network_cpu_ms": 1000 * (sum(map(cpu_seconds, pids[1:])) - sum(cpu[1:])) / rounds,
        "kb_out": (after[0] - traffic[0]) / 1000 / rounds,
        "kb_in": (after[1] - traffic[1]) / 1000 / rounds,
        "rss_mib": [round(rss_mib(pid)) for pid in pids],
    }


def gossip_node(folder: Path, bootstrap: list[str], rounds: int, groups: int) -> None:
    from protocol.messages import PROTOCOL_VERSION, PeerCard
    from protocol.transports.p2p import P2PTransport
    from protocol.transports.settings import NetworkSettings

    identity = Identity.load_or_create(folder / "identity.key")
    settings = NetworkSettings(listen="127.0.0.1", port=0, gossip_port=0, bootstrap=tuple(bootstrap))
    transport = P2PTransport(folder / "identity.key", SWARM, settings)
    latencies: list[float] = []
    topic = rollout_topic(SWARM, shard_of(identity.peer_id, 1))
    transport.subscribe(topic, lambda data: latencies.append(time.time() - open_batch(data, SWARM)[1].created))
    roles = ["trainer"] if bootstrap else ["trainer", "bootstrap"]
    transport.announce(PeerCard(PROTOCOL_VERSION, SWARM, time.time(), "bench", roles))  # type: ignore[arg-type]
    while not transport.addresses:
        time.sleep(0.05)
    say(addresses=transport.addresses)
    begin_at, nodes = json.loads(sys.stdin.readline())
    unsent = 0

    def step(i: int) -> None:
        nonlocal unsent
        time.sleep(random.random() / 2)
        unsent += not transport.publish(topic, batch(identity, i, groups, time.time()))

    figures = measure(rounds, begin_at, step)
    say(**figures, delivered=len(latencies) / (rounds * (nodes - 1)), latencies=latencies, unsent=unsent)
    sys.stdin.readline()
    transport.close()


def all_gather_node(folder: Path, bootstrap: list[str], rounds: int, groups: int) -> None:
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P
    from hivemind.utils import get_dht_time

    identity = Identity.load_or_create(folder / "identity.key")
    loop = asyncio.new_event_loop()

    async def up() -> tuple[Any, Any, list[str]]:
        p2p = await P2P.create(
            initial_peers=bootstrap or None,
            identity_path=str(folder / "identity.key"),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            auto_nat=False,
            nat_port_map=False,
            use_relay=False,
            use_auto_relay=False,
            check_if_identity_free=False,
        )
        node = await DHTNode.create(p2p=p2p, initial_peers=bootstrap or None)
        return p2p, node, [str(address) for address in await p2p.get_visible_maddrs()]

    p2p, node, addresses = loop.run_until_complete(up())
    say(addresses=addresses)
    begin_at, nodes = loop.run_until_complete(asyncio.to_thread(lambda: json.loads(sys.stdin.readline())))
    latencies: list[float] = []
    unsent = 0

    async def gather(i: int) -> None:
        nonlocal unsent
        await asyncio.sleep(random.random() / 2)
        created = time.time()
        data = batch(identity, i, groups, created)
        try:
            stored = await asyncio.wait_for(
                node.store(str(i), data, subkey=identity.peer_id, expiration_time=get_dht_time() + 600), 10
            )
            unsent += not stored
            await asyncio.sleep(1.0)
            found = await asyncio.wait_for(node.get(str(i), latest=True), 10)
        except TimeoutError:
            return
        if found is not None and isinstance(found.value, dict):
            now = time.time()
            for peer, entry in found.value.items():
                if peer != identity.peer_id:
                    latencies.append(now - open_batch(entry.value, SWARM)[1].created)

    async def serve() -> dict[str, Any]:
        tasks: list[asyncio.Task[None]] = []
        call = asyncio.run_coroutine_threadsafe

        def step(i: int) -> None:
            call(gather(i), loop)

        figures = await asyncio.to_thread(measure, rounds, begin_at, step)
        del tasks
        return figures

    figures = loop.run_until_complete(serve())
    say(**figures, delivered=len(latencies) / (rounds * (nodes - 1)), latencies=latencies, unsent=unsent)
    loop.run_until_complete(asyncio.to_thread(sys.stdin.readline))
    loop.run_until_complete(asyncio.wait_for(p2p.shutdown(), 5))


# --------------------------------------------------------------------- all of them


def contest(mode: str, nodes: int, rounds: int, groups: int) -> dict[str, Any]:
    """Figures of one method among `nodes` processes."""
    processes: list[subprocess.Popen[str]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            bootstrap: list[str] = []
            for i in range(nodes):
                mine = Path(folder) / str(i)
                mine.mkdir()
                arguments = ["--node", mode, str(mine), json.dumps(bootstrap), "--rounds", str(rounds)]
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.gossip", *arguments, "--groups", str(groups)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                    )
                )
                if i == 0:
                    bootstrap = hear(processes[0])["addresses"]
            for process in processes[1:]:
                hear(process)
            begin_at = time.time() + SETTLE_S
            for process in processes:
                tell(process, json.dumps([begin_at, nodes]))
            results = [hear(process) for process in processes]
            for process in processes:
                tell(process, "")
            for process in processes:
                process.wait(20)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    latencies = sorted(latency for result in results for latency in result["latencies"])
    others = results[1:]
    return {
        "method": mode,
        "nodes": nodes,
        "payload_kb": len(batch(Identity.generate(), 0, groups, time.time())) / 1000,
        "delivered": fmean(result["delivered"] for result in results),
        "p50_ms": 1000 * median(latencies),
        "p95_ms": 1000 * quantiles(latencies, n=20)[-1],
        **{name: fmean(r[name] for r in others) for name in ("cpu_ms", "network_cpu_ms", "kb_in", "kb_out")},
        "bootstrap_kb": results[0]["kb_in"] + results[0]["kb_out"],
        "rss_mib": others[0]["rss_mib"],
        "unsent": sum(result["unsent"] for result in results),
    }


def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a node ended with {process.wait(10)}")
    return dict(json.loads(line))


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def curve(sizes: list[int], groups: int) -> list[dict[str, Any]]:
    """Bytes of a node and round over the memory transport's mesh, a shard for every 32 nodes, four shards a node."""
    from protocol.transports.memory import MemoryNetwork, VirtualClock

    figures = []
    for nodes in sizes:
        shards, rounds = max(1, nodes // 32), 3
        clock = VirtualClock(1.8e9)
        network = MemoryNetwork(clock, seed=0, degree=6)
        members: list[Any] = []
        for i in range(nodes):
            members.append(network.join(f"peer{i}", SWARM, bootstrap=members[0].addresses if members else []))
        data = batch(Identity.generate(bytes(32)), 0, groups, clock.now())
        for member in members:
            own = shard_of(member.peer_id, shards)
            rng = random.Random(member.peer_id)
            for shard in {own, *rng.sample(range(shards), min(3, shards))}:
                member.subscribe(rollout_topic(SWARM, shard), lambda data: None)
        clock.run_until(clock.now() + 20)
        before = sum(member.bytes_in for member in members)
        heard = sum(member.messages_in for member in members)
        for _ in range(rounds):
            for member in members:
                clock.call_at(
                    clock.now() + network.rng.random(),
                    member.publish,
                    rollout_topic(SWARM, shard_of(member.peer_id, shards)),
                    data,
                )
            clock.run_until(clock.now() + 1.0)
        clock.run_until(clock.now() + 5)
        figures.append(
            {
                "nodes": nodes,
                "shards": shards,
                "heard": (sum(member.messages_in for member in members) - heard) / nodes / rounds,
                "kb_in": (sum(member.bytes_in for member in members) - before) / 1000 / nodes / rounds,
            }
        )
        print(f"{nodes} nodes: {figures[-1]['kb_in']:.0f} kB a node and round", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 12])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--curve", type=int, nargs="*", default=[32, 128, 1000, 10_000])
    parser.add_argument("--node", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node:
        mode, folder, bootstrap = args.node
        node = gossip_node if mode == "gossip" else all_gather_node
        node(Path(folder), json.loads(bootstrap), args.rounds, args.groups)
        return
    figures = []
    for nodes in args.nodes:
        for mode in ("gossip", "all-gather"):
            figures.append(contest(mode, nodes, args.rounds, args.groups))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in figures[-1].items()}, flush=True)
    columns = ["nodes", "method", "delivered", "p50 ms", "p95 ms", "kB in", "kB out", "CPU ms", "bootstrap kB"]
    rows = [
        [
            f["nodes"],
            f["method"],
            f"{f['delivered']:.1%}",
            *(f"{f[name]:.0f}" for name in ("p50_ms", "p95_ms", "kb_in", "kb_out", "cpu_ms", "bootstrap_kb")),
        ]
        for f in figures
    ]
    print(table(columns, rows))
    sizes = curve(args.curve, args.groups)
    print(table(["nodes", "shards", "batches heard", "kB in"], [[f"{v:.4g}" for v in f.values()] for f in sizes]))
    write("gossip", {"rounds": args.rounds, "groups": args.groups, "contest": figures, "curve": sizes})


if __name__ == "__main__":
    main()
