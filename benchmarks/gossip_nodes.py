"""What one process does in `benchmarks.gossip` and `benchmarks.overhead`; started by them.

stdin: Spec            -> says {"addresses"} when it is up, {"ready"} when it sees all others
stdin: when to begin   -> a sealed batch every `interval_s`, then says what arrived
stdin: anything        -> leaves
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from swarm_protocol.codec import sign_batch, verify_batch
from swarm_protocol.errors import ProtocolError
from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.identity import Identity
from swarm_protocol.messages import (
    PROTOCOL_VERSION,
    PeerCard,
    RolloutBatch,
    SharedGroup,
    SharedRollout,
    SharedSampling,
    TaskName,
)
from swarm_protocol.topics import epoch_at, shard_of

STRAGGLERS_S = 6.0
"""After the last round: what is late arrives."""
TEXT_CHARS = 300
"""Of an answer: some 75 tokens."""
CALL_S = 10.0
BEAM = 50
"""`beam_size` in rl-swarm's configuration."""
GATHER_SLEEP_S = 1.0
READY_S = 300.0
"""Two dozen nodes that start on two cores take minutes."""
RECOVERY_S = 30.0
SETTLED_S = 25.0
"""Between two kills: both processes count as settled after this."""


class Spec(msgspec.Struct):
    """What a node is told first."""

    method: str
    """`gossip`, `all-gather` or `recovery`."""
    folder: str
    swarm: str
    nodes: int
    """How many there are in all, to wait for."""
    shards: int = 1
    bootstrap: list[str] = []
    hub: bool = False
    dial_only: bool = False
    rounds: int = 30
    interval_s: float = 1.0
    groups: int = 4
    repeats: int = 3


def batch(identity: Identity, swarm: str, sequence: int, groups: int, now: float) -> bytes:
    """A sealed batch of `groups` groups of eight answers of `TEXT_CHARS` characters."""
    rng = random.Random(f"{identity.peer_id}/{sequence}")
    return sign_batch(
        RolloutBatch(
            protocol=PROTOCOL_VERSION,
            swarm=swarm,
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
                    rollouts=[SharedRollout.of(rng.randbytes(TEXT_CHARS // 2).hex(), True) for _ in range(8)],
                )
                for slot in range(groups)
            ],
        ),
        identity,
    )


class Arrived:
    """Who was heard, each message once, and after how long."""

    def __init__(self, swarm: str) -> None:
        self._swarm = swarm
        self.latencies: dict[tuple[str, int], float] = {}
        self.again = 0
        self.newest: dict[str, float] = {}
        """Peer -> when the newest message of it was made."""

    def take(self, data: bytes) -> None:
        now = time.time()
        peer, opened = verify_batch(data, self._swarm)
        self.again += (peer, opened.sequence) in self.latencies
        self.latencies.setdefault((peer, opened.sequence), now - opened.created)
        self.newest[peer] = max(opened.created, self.newest.get(peer, 0.0))


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


_lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()


def listen() -> None:
    """Read stdin to its end, which means that the parent is gone, whatever it died of."""
    rest = b""
    while data := os.read(0, 65536):  # sys.stdin would be locked, which Python does not survive at its end
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            _lines.put(line)
    os._exit(1)  # p2pd ends with its parent, the gossip process with its stdin


def told() -> Any:
    """The next line of stdin."""
    return json.loads(_lines.get())


def in_rounds(spec: Spec, begin_at: float, step: Callable[[int], object]) -> None:
    """`step` in each round, at a random moment of its first half."""
    for i in range(spec.rounds):
        at = begin_at + (i + random.random() / 2) * spec.interval_s
        time.sleep(max(0.0, at - time.time()))
        step(i)
    time.sleep(max(0.0, begin_at + spec.rounds * spec.interval_s + STRAGGLERS_S - time.time()))


def until(what: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.02)
    return False


# --------------------------------------------------------------------- our transport


def gossip(spec: Spec) -> None:
    from swarm_protocol.transports.p2p.transport import P2PTransport
    from swarm_protocol.transports.settings import NetworkSettings

    key = Path(spec.folder) / "identity.key"
    identity = Identity.load_or_create(key)
    settings = NetworkSettings(
        listen="127.0.0.1",
        port=0,
        gossip_port=0,
        bootstrap=tuple(spec.bootstrap),
        dial_only=spec.dial_only,
        serve_relay=spec.hub,
    )
    transport = P2PTransport(
        key, spec.swarm, settings, spec.shards, report=lambda sentence: print(sentence, file=sys.stderr)
    )
    arrived = Arrived(spec.swarm)
    own = ROLLOUTS.topic(spec.swarm, shard_of(identity.peer_id, spec.shards))
    for shard in range(spec.shards):
        transport.subscribe(ROLLOUTS.topic(spec.swarm, shard), arrived.take)
    transport.serve("newest", lambda peer, payload: json.dumps(arrived.newest.get(peer, 0.0)).encode())
    transport.announce(
        PeerCard(
            PROTOCOL_VERSION,
            spec.swarm,
            time.time(),
            "bench",
            ["trainer", "bootstrap", "relay"] if spec.hub else ["trainer"],
            shards=list(range(spec.shards)),
        )
    )
    until(lambda: transport.addresses or (spec.dial_only and transport.members()), READY_S)
    say(addresses=transport.addresses)

    def complete() -> bool:
        return len(transport.members()) >= spec.nodes - 1 and transport.stats()["connections/gossip"] > 0

    ready = until(complete, READY_S)
    say(ready=ready, members=len(transport.members()), stats=dict(transport.stats()))
    unsent = 0

    def send(i: int) -> None:
        nonlocal unsent
        unsent += not transport.publish(own, batch(identity, spec.swarm, i, spec.groups, time.time()))

    try:
        if spec.method == "recovery":
            recover(spec, transport, identity, arrived, send)
        else:
            in_rounds(spec, told(), (lambda i: None) if spec.hub else send)
            stats = dict(transport.stats())
            say(latencies=list(arrived.latencies.values()), again=arrived.again, failed=unsent, stats=stats)
        told()
    finally:
        transport.close()


def recover(spec: Spec, transport: Any, identity: Identity, arrived: Arrived, send: Callable[[int], None]) -> None:
    """Kill this node's own processes by turns: how long until there is a new one, until a message made after the kill
    is heard here, one of ours is heard elsewhere, and a request is answered."""
    from benchmarks.processes import kind, tree

    told()
    figures: list[dict[str, Any]] = []
    sequence = 1_000_000
    for repeat in range(spec.repeats):
        for victim in ("gossip", "p2pd"):
            time.sleep(SETTLED_S)
            [process] = [process for process in tree(os.getpid()) if kind(process) == victim]
            killed_at, began = time.time(), time.monotonic()
            process.kill()
            took: dict[str, float] = {}
            while time.monotonic() - began < RECOVERY_S and len(took) < 4:
                sequence += 1
                send(sequence)
                asked = time.monotonic()
                try:
                    peer = random.choice(list(transport.members()))
                    newest = json.loads(transport.request(peer, "newest", timeout=1.0))
                    took.setdefault("answered", time.monotonic() - began)
                    if newest > killed_at:
                        took.setdefault("heard", time.monotonic() - began)
                except ProtocolError:
                    pass
                if max(arrived.newest.values()) > killed_at + 0.05:
                    took.setdefault("hears", time.monotonic() - began)
                if any(kind(new) == victim and new != process for new in tree(os.getpid())):
                    took.setdefault("runs", time.monotonic() - began)
                time.sleep(max(0.0, asked + 0.25 - time.monotonic()))
            figures.append({"killed": victim, "repeat": repeat, **took})
    say(recoveries=figures, stats=dict(transport.stats()))


# --------------------------------------------------------------------- a DHT key that all write to and read


def all_gather(spec: Spec) -> None:
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P
    from hivemind.utils import get_dht_time

    key = Path(spec.folder) / "identity.key"
    identity = Identity.load_or_create(key)
    loop = asyncio.new_event_loop()

    async def up() -> tuple[Any, Any, list[str]]:
        p2p = await P2P.create(
            initial_peers=spec.bootstrap or None,
            identity_path=str(key),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            auto_nat=False,
            nat_port_map=False,
            use_relay=False,
            use_auto_relay=False,
            check_if_identity_free=False,
        )
        node = await DHTNode.create(p2p=p2p, initial_peers=spec.bootstrap or None)
        return p2p, node, [str(address) for address in await p2p.get_visible_maddrs()]

    p2p, node, addresses = loop.run_until_complete(up())
    say(addresses=addresses)
    say(ready=True)
    arrived = Arrived(spec.swarm)
    failed = 0

    async def gather(i: int) -> None:
        """One round of HivemindBackend.all_gather_object, with a world of one: a single read."""
        nonlocal failed
        data = batch(identity, spec.swarm, i, spec.groups, time.time())
        try:
            stored = await asyncio.wait_for(
                node.store(str(i), data, get_dht_time() + 600, subkey=identity.peer_id, beam_size=BEAM), CALL_S
            )
            failed += not stored
            await asyncio.sleep(GATHER_SLEEP_S)
            found = await asyncio.wait_for(node.get(str(i), latest=True, beam_size=BEAM), CALL_S)
        except TimeoutError:
            failed += 1
            return
        if found is None or not isinstance(found.value, dict):
            failed += 1
            return
        for peer, entry in found.value.items():
            if peer != identity.peer_id:
                arrived.take(entry.value)

    def rounds() -> None:
        in_rounds(spec, told(), lambda i: asyncio.run_coroutine_threadsafe(gather(i), loop))

    loop.run_until_complete(asyncio.to_thread(rounds))
    say(latencies=list(arrived.latencies.values()), again=arrived.again, failed=failed, stats={})
    loop.run_until_complete(asyncio.to_thread(told))
    loop.run_until_complete(asyncio.wait_for(p2p.shutdown(), 5))


def main() -> None:
    threading.Thread(target=listen, daemon=True).start()
    spec = msgspec.convert(told(), Spec)
    if spec.method == "all-gather":
        all_gather(spec)
    else:
        gossip(spec)


if __name__ == "__main__":
    main()
