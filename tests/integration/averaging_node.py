"""One node of test_averaging.py that only averages: JSON commands on stdin, one line of JSON in answer to each.

python averaging_node.py FOLDER NAME SETTINGS        identity, cache in FOLDER; settings as JSON: `fill`, what all
weights are; `values`, how many; `bytes_per_s`, how fast they leave; `period_s`; all others are the network's
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from swarm_node.averaging.averager import CohortPlace
from swarm_node.averaging.pair_averager import PairAverager
from swarm_node.averaging.pair_exchange import PairExchange
from swarm_node.config import AveragingConfig
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.transports.p2p.transport import P2PTransport
from swarm_protocol.transports.settings import NetworkSettings
from tests.support.commands import obey

SWARM, COHORT = "ab" * 32, "c" * 16


class Node:
    """Its training is a clock: weights change by averaging alone."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        self.said: list[str] = []
        self.fill, self.rate = settings.pop("fill"), settings.pop("bytes_per_s")
        self.weights = {"w": torch.zeros(settings.pop("values"))}
        period_s = settings.pop("period_s")
        self.transport = P2PTransport(
            folder / f"{name}.key",
            SWARM,
            NetworkSettings(**settings),
            cache_file=folder / f"{name}.json",
            report=self.said.append,
        )
        config = AveragingConfig(method="noloco", every=1, codec="float32")
        place = CohortPlace(SWARM, COHORT, self.transport.peer_id, period_s)
        self.averager = PairAverager(config, place, self.weights, self.transport, time.time, self.said.append)
        self.weights["w"].fill_(self.fill)
        self._make = PairExchange.pieces
        PairExchange.pieces = lambda exchange, me: self._slowly(exchange, me)  # type: ignore[method-assign]
        self.transport.announce(PeerCard(PROTOCOL_VERSION, SWARM, 0.0, name, ["trainer"], cohort=COHORT))
        self.status: dict[str, Any] = {}
        self.skipped: dict[str, Any] | None = None
        """The status when the first exchange had failed."""
        threading.Thread(target=self._train, daemon=True).start()

    def _slowly(self, exchange: PairExchange, me: str) -> Iterator[memoryview]:
        for piece in self._make(exchange, me):
            time.sleep(len(piece) / self.rate)
            yield piece

    def _train(self) -> None:
        """A step boundary every moment. What is told of one was so at one moment."""
        updates = 0
        while True:
            updates += 1
            self.averager.step(updates)
            plane = self.transport._plane
            now = {
                "addresses": self.transport.addresses,
                "members": [card.name for card in self.transport.members().values()],
                "bytes_in": self.transport.stats()["bytes_in"],
                "pids": [os.getpid(), plane and plane.daemon.pid],
                "metrics": self.averager.metrics(),
                "sha256": hashlib.sha256(self.weights["w"].numpy()).hexdigest(),
                "mean": float(self.weights["w"].mean(dtype=torch.float64)),
                "said": list(self.said),
            }
            torn = {"averaging/skipped/torn", "averaging/skipped/unreachable"} & now["metrics"].keys()
            self.skipped = self.skipped or (now if torn else None)
            self.status = now | {"skipped": self.skipped}
            time.sleep(0.05)

    def do_status(self) -> dict[str, Any]:
        return self.status

    def do_close(self) -> None:
        self.transport.close()


def main() -> None:
    torch.set_num_threads(1)
    obey(Node(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))


if __name__ == "__main__":
    main()
