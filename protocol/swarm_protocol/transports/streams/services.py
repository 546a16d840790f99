"""All that one node answers, and asks for, on streams."""

from __future__ import annotations

from collections.abc import Callable

from swarm_protocol.transports.settings import NetworkSettings
from swarm_protocol.transports.streams.channels import Channels
from swarm_protocol.transports.streams.exchanges import Exchanges
from swarm_protocol.transports.streams.requests import Answers
from swarm_protocol.transports.streams.stream import Traffic


class Services:
    """Its requests, exchanges and channels, over all starts of p2pd. Any thread may enter what is served."""

    def __init__(self, settings: NetworkSettings, report: Callable[[str], None]) -> None:
        self.traffic = Traffic.limited(settings)
        self.answers = Answers(self.traffic, report)
        self.exchanges = Exchanges(self.traffic, report)
        self.channels = Channels(self.traffic, report)
