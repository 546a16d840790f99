"""One node of the real transport, as a process: JSON commands on stdin, one line of JSON in answer to each.

python p2p_node.py FOLDER NAME SETTINGS        identity, cache in FOLDER; settings as JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from swarm_protocol.codec import sign_batch, verify_batch
from swarm_protocol.errors import ProtocolError
from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.identity import Identity
from swarm_protocol.messages import PeerCard, RolloutBatch, SharedGroup, SharedRollout, SharedSampling, TaskName
from swarm_protocol.topics import shard_of
from swarm_protocol.transports.base import Accepted, Channel, Listener, Outgoing, Sink
from swarm_protocol.transports.p2p.transport import P2PTransport
from swarm_protocol.transports.settings import NetworkSettings
from tests.support.commands import obey

SWARM = "cd" * 32
HANG_S = 300.0


class Clock:
    """`time.time`, ahead of the real one by so many seconds."""

    real = staticmethod(time.time)
    ahead = 0.0

    def __call__(self) -> float:
        return self.real() + self.ahead


clock = Clock()


class Talk:
    """One end of a channel, and its result."""

    def __init__(self) -> None:
        self.got = 0
        self.digest = hashlib.sha256()
        self.ends: list[str] = []
        """Why."""

    def opened(self, channel: Channel) -> Listener:
        self.channel = channel
        return Listener(lambda head, size: None, self.received, self.closed)

    def received(self, head: bytes, body: bytearray) -> None:
        self.got += 1
        self.digest.update(head + b":" + body + b";")

    def closed(self, why: str) -> None:
        self.ends.append(why)

    def say(self, seed: int, count: int) -> str:
        """Send messages of mixed size; their digest."""
        rng, digest = random.Random(seed), hashlib.sha256()
        for i in range(count):
            head, body = b"%d" % i, rng.randbytes(rng.choice([0, 10, 1000, 30_000, 100_000, 1_500_000]))
            assert self.channel.send(head, body[:5], body[5:])
            digest.update(head + b":" + body + b";")
        return digest.hexdigest()


class Node:
    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        self.said: list[str] = []
        self.heard: list[tuple[str, int]] = []
        self.sent = 0
        path = folder / f"{name}.key"
        self.identity = Identity.load_or_create(path)
        self.shards = settings.pop("shards", 1)
        roles = settings.pop("roles", ["trainer"])
        self.transport = P2PTransport(
            path,
            SWARM,
            NetworkSettings(**settings),
            self.shards,
            cache_file=folder / f"{name}.json",
            ports_file=folder / f"{name}.ports",
            report=self.said.append,
        )
        for shard in range(self.shards):
            self.transport.subscribe(ROLLOUTS.topic(SWARM, shard), self.hear)
        self.transport.serve("echo", self.echo)
        self.transport.accept("swap", self.swap)  # before the network is up
        self.transport.listen("talk", self.taken)
        self.talks: list[Talk] = []
        self.outcomes: list[str] = []
        self.call: Future[None] = Future()
        self.holds, self.let_go = False, threading.Event()
        """Whether a caller waits until it is let go."""
        self.transport.announce(PeerCard(1, SWARM, 0.0, name, roles))

    def echo(self, peer: str, payload: bytes) -> bytes:
        if payload == b"fail":
            raise ValueError("fail")
        return peer[-4:].encode() + payload

    def swap(self, peer: str, head: bytes, size: int) -> Accepted:
        if head == b"late":
            self.holds = True
            assert self.let_go.wait(HANG_S)
        return Accepted(Outgoing(head, 5, lambda: [b"hello"]), len, lambda error: self.outcomes.append(repr(error)))

    def taken(self, channel: Channel) -> Listener:
        self.talks.append(Talk())
        return self.talks[-1].opened(channel)

    def hear(self, data: bytes) -> None:
        sender, batch = verify_batch(data, SWARM)
        self.heard.append((sender, batch.sequence))

    def do_status(self) -> dict[str, Any]:
        transport, plane = self.transport, self.transport._plane
        return {
            "peer": transport.peer_id,
            "addresses": transport.addresses,
            "members": {card.name: card.gossip_id for card in transport.members().values()},
            "ways": {card.name: card.addresses for card in transport.members().values()},
            "created": {card.name: card.created for card in transport.members().values()},
            "stats": dict(transport.stats()),
            "gossip": transport._gossip.client.gossip_id,
            "pids": [os.getpid(), plane and plane.daemon.pid, transport._gossip.client.pid],
            "said": self.said,
            "outcomes": self.outcomes,
            "holds": self.holds,
            "talks": [[talk.got, talk.digest.hexdigest(), talk.ends] for talk in self.talks],
            "heard": sorted({f"{sender[-4:]}/{sequence}" for sender, sequence in self.heard}),
        }

    def do_publish(self, count: int = 1) -> int:
        rollout = SharedRollout.of("4", True)
        for _ in range(count):
            self.sent += 1
            name = TaskName("gcd", "0" * 16, "test 1", 0, self.sent)
            batch = RolloutBatch(
                protocol=1,
                swarm=SWARM,
                sequence=self.sent,
                created=time.time(),
                fingerprint="0" * 16,
                tokenizer="0" * 16,
                sampling=SharedSampling(8, 1.0, 1.0),
                groups=[SharedGroup(name, 0, 0, bytes(16), 0, [rollout, rollout])],
            )
            topic = ROLLOUTS.topic(SWARM, shard_of(self.identity.peer_id, self.shards))
            self.transport.publish(topic, sign_batch(batch, self.identity))
        return self.sent

    def do_ask(self, peer: str, text: str) -> str:
        try:
            return self.transport.request(peer, "echo", text.encode(), timeout=5.0).decode()
        except ProtocolError as error:
            return f"{type(error).__name__}: {error}"

    def do_exchange(self, peer: str, head: str, size: int, wait: bool = True) -> str:
        """How it ended, and what came back."""
        got = bytearray()

        def answered(head: bytes, size: int) -> Sink:
            got.extend(head + b" %d " % size)
            return got.extend

        ours = Outgoing(head.encode(), size, lambda: (bytes(min(2**20, size - i)) for i in range(0, size, 2**20)))
        self.call = self.transport.exchange(peer, "swap", ours, answered, 20.0)
        return self.do_outcome() + got.decode() if wait else ""

    def do_outcome(self) -> str:
        error = self.call.exception(25.0)
        return "" if error is None else f"{type(error).__name__}: {error}"

    def do_let_go(self) -> None:
        """Who was called `late`."""
        self.let_go.set()

    def do_talk(self, peer: str | None, seed: int, count: int) -> str:
        """On a new channel to `peer`, or on the last one there is."""
        if peer is not None:
            self.talks.append(talk := Talk())
            self.transport.connect(peer, "talk", talk.opened)
        return self.talks[-1].say(seed, count)

    def do_set_clock(self, ahead: float) -> None:
        """Of this process, not of its gossip process."""
        clock.ahead = ahead

    def do_close(self) -> None:
        self.transport.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in whatever a shell starts in the background
    settings = json.loads(sys.argv[3])
    clock.ahead = settings.pop("clock", 0.0)
    time.time = clock  # before anything takes hold of it: hivemind is not imported yet
    obey(Node(Path(sys.argv[1]), sys.argv[2], settings))


if __name__ == "__main__":
    main()
