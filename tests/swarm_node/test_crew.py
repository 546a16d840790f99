"""A node in a crew: what does not need another machine to be seen."""

from __future__ import annotations

from protocol.transports.memory import MemoryNetwork, VirtualClock
from swarm_node.crew import Ear

SWARM = "ab" * 32


def test_a_node_that_leads_twice_hears_everything_once() -> None:
    clock = VirtualClock(0.0)
    network = MemoryNetwork(clock, seed=0)
    mine = network.join("a", SWARM)
    other = network.join("b", SWARM, bootstrap=mine.addresses)
    ear = Ear(mine)
    first: list[bytes] = []
    second: list[bytes] = []
    ear.subscribe("topic", first.append)
    clock.run_until(5.0)
    for data in (b"1", b"2"):
        assert other.publish("topic", data)
        clock.run_until(clock.now() + 5.0)
        if data == b"1":
            ear.end()  # another leads meanwhile
            other.publish("topic", b"not heard")
            clock.run_until(clock.now() + 5.0)
            ear.subscribe("topic", second.append)
    assert (first, second) == ([b"1"], [b"2"])
