"""A network in one process, on a virtual clock: for tests and simulations."""

from protocol.transports.memory.links import LinkModel, VirtualClock
from protocol.transports.memory.network import MemoryNetwork
from protocol.transports.memory.transport import MemoryTransport

__all__ = ["LinkModel", "MemoryNetwork", "MemoryTransport", "VirtualClock"]
