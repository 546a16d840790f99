"""A network in one process, on a virtual clock: for tests and simulations."""

from swarm_protocol.transports.memory.links import LinkModel, VirtualClock
from swarm_protocol.transports.memory.network import MemoryNetwork
from swarm_protocol.transports.memory.transport import MemoryTransport

__all__ = ["LinkModel", "MemoryNetwork", "MemoryTransport", "VirtualClock"]
