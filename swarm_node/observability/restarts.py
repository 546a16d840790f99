"""Restarts of the processes of the network, in words: for `swarm-node status`, `doctor` and the dashboard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

PROCESSES = {"gossip": "gossip process", "dht": "p2pd"}


def restarts(traffic: Mapping[str, float], why: Mapping[str, str]) -> Iterator[str]:
    """A clause for each process that started again. `traffic` has `restarts/<process>`; `why`: what ended it last."""
    for process, name in PROCESSES.items():
        if times := int(traffic.get(f"restarts/{process}", 0)):
            reason = why.get(process)
            because = f", {'last ' if times > 1 else ''}because it ended: {reason}" if reason else ""
            yield f"{name} started again {'once' if times == 1 else f'{times} times'}{because}"
